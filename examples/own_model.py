"""Your own model and data on real workers: each has two of the ten digits, and builds its data in its own process."""

import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import dualdelay as dd


def model():
    """A small network; every run makes a new one under its seed."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def shard(worker):
    """The images of two digits, which no other worker has; called where that worker computes."""
    images, labels = load_digits(return_X_y=True)
    mine = (labels // 2 == worker) & (np.arange(len(labels)) < 1500)
    return torch.tensor(images[mine] / 16, dtype=torch.float32), torch.tensor(labels[mine])


def exam():
    """Images that nobody trains with."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[1500:] / 16, dtype=torch.float32), torch.tensor(labels[1500:])


if __name__ == "__main__":
    problem = dd.Network(model, nn.functional.cross_entropy, shard, workers=5, batch_size=32, test=exam)
    folder = time.strftime("runs/own-model-%Y%m%d-%H%M%S")
    run = dd.train(dd.DuDe(lr=0.1), problem, dd.RayFleet(), updates=800, folder=folder)
    print(f"{run.version} updates in {run.time:.1f} s, saved in {folder}")
    print(
        f"accuracy {run.metrics.accuracy[0]:.2f} before, {run.metrics.accuracy[-1]:.2f} after; tau_max {run.delays.tau_max}"
    )

"""What every peer is measured on: the model, the data, the split, the plain loop, and the comparison with it.

Nothing but torch and numpy is needed here, so that each peer can run it in its own environment.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLIENTS = 10
SAMPLES = 10_000
BATCH = 64
LR = 0.01


class LeNet(nn.Sequential):
    """62,006 weights."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


@functools.cache
def shards() -> list[tuple[Tensor, Tensor]]:
    """Random images and labels in CIFAR-10's shape, split per class by Dirichlet(0.1).

    Drawn again until every client has a whole minibatch, since some peers would otherwise take a smaller one.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=SAMPLES)
    while True:
        rows: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            of_label = rng.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(rng.dirichlet([0.1] * CLIENTS))[:-1] * len(of_label)).astype(int)
            for client, part in enumerate(np.split(of_label, cuts)):
                rows[client].extend(part.tolist())
        if min(map(len, rows)) >= BATCH:
            break
    inputs = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    targets = torch.from_numpy(labels)
    return [(inputs[part].contiguous(), targets[part].contiguous()) for part in (rng.permutation(r) for r in rows)]


def minibatch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.randint(len(inputs), (BATCH,))
    return inputs[rows], targets[rows]


def plain(data: list[tuple[Tensor, Tensor]], seconds: float, threads: int = 1) -> float:
    """Steps per second of a loop over the clients: draw a minibatch, autograd, torch.optim.SGD."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    steps, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        inputs, targets = minibatch(*data[steps % CLIENTS])
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
    torch.set_num_threads(before)
    return steps / spent


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0, help="of each timed section of the peer")
    parser.add_argument("--rounds", type=int, default=3, help="timed sections, each between two plain loops")
    return parser.parse_args()


def compare(name: str, version: str, kind: str, run: Callable[[int], float], given: argparse.Namespace) -> None:
    """Time ``run(updates)``, which gives its seconds, between plain loops on one thread; print the medians as JSON."""
    data = shards()
    warm = run(10)
    updates = 10 if warm > given.seconds else max(10, round(20 / run(20) * given.seconds / 10) * 10)
    before = plain(data, given.seconds / 2)
    rates, ratios, plains = [], [], [before]
    for _ in range(given.rounds):
        rates.append(updates / run(updates))
        after = plain(data, given.seconds / 2)
        ratios.append(rates[-1] / ((before + after) / 2))
        plains.append(after)
        before = after
    report(name, version, kind, rates, ratios, plains)


def report(name: str, version: str, kind: str, rates: list[float], ratios: list[float], plains: list[float]) -> None:
    row = {"name": name, "version": version, "kind": kind, "rate": round(statistics.median(rates), 1)}
    row |= {"ratio": float(f"{statistics.median(ratios):.3g}"), "ratios": [float(f"{r:.3g}") for r in ratios]}
    print(json.dumps(row | {"plain": round(statistics.median(plains), 1)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(plain(shards(), options().seconds))

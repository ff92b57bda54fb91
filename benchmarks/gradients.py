"""Simulated DuDe against a plain PyTorch loop of the same model, batch and number of gradients, on one thread.

    python benchmarks/gradients.py

The plain loop is a module, autograd and an in-place step; it draws its minibatches with torch.randint. Both are timed in
turns, and the ratio of each turn is taken before the median, since the machine's pace drifts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.problems.cifar10 import lenet

WORKERS = 10


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def images() -> dd.Network:
    generator = torch.Generator().manual_seed(0)
    shards = [
        (torch.randn(100, 3, 32, 32, generator=generator), torch.randint(10, (100,), generator=generator))
        for _ in range(WORKERS)
    ]
    return dd.Network(lenet, cross_entropy, shards, batch_size=64, full_gradient=False)


def plain_loop(make: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor, steps: int, move: bool) -> float:
    model = make()
    parameters = list(model.parameters())
    begin = time.perf_counter()
    for _ in range(steps):
        rows = torch.randint(len(inputs), (64,))
        loss = cross_entropy(model(inputs[rows]), targets[rows])
        gradients = torch.autograd.grad(loss, parameters)
        if move:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.01)
        loss.item()
    return time.perf_counter() - begin


def simulation(problem: dd.Network, steps: int) -> float:
    speeds = dd.TruncatedNormalSpeeds(WORKERS, std=1.0, seed=0)
    marks: list[float] = []
    # the first and the last evaluation lie outside the marks
    dd.simulate(
        dd.DuDe(lr=0.01),
        problem,
        speeds,
        updates=steps,
        evaluation=dd.Evaluation(every=steps + 1),
        watch=(lambda state, arrival: marks.append(time.perf_counter()),),
    )
    return (marks[-1] - marks[0]) * steps / (len(marks) - 1)


def gradients_alone(problem: dd.Network, steps: int) -> float:
    x = problem.start(0)
    begin = time.perf_counter()
    for draw in range(steps):
        problem.gradient(x, draw % WORKERS, draw // WORKERS)
    return time.perf_counter() - begin


def ratio(ours: Callable[[], float], theirs: Callable[[], float], turns: int) -> tuple[float, float, float]:
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(turns)]
    middle = statistics.median
    return middle(a / b for a, b in pairs), middle(a for a, _ in pairs), middle(b for _, b in pairs)


def main() -> None:
    torch.set_num_threads(1)
    digits, cnn = dd.Digits(WORKERS, alpha=0.1), images()
    pixels, labels = torch.rand(1000, 64), torch.randint(10, (1000,))
    pictures, classes = torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,))
    print(f"{'what':44s} {'ours':>10s} {'plain':>10s} {'ratio':>7s}  at most")
    for name, steps, turns, limit, ours, theirs in (
        ("digits: simulated DuDe / plain loop", 500, 25, 1.25,
         lambda: simulation(digits, 500), lambda: plain_loop(mlp, pixels, labels, 500, True)),
        ("digits: problem.gradient / plain autograd", 500, 25, 1.30,
         lambda: gradients_alone(digits, 500), lambda: plain_loop(mlp, pixels, labels, 500, False)),
        ("LeNet, batch 64: simulated DuDe / plain loop", 20, 41, 1.03,
         lambda: simulation(cnn, 20), lambda: plain_loop(lenet, pictures, classes, 20, True)),
    ):  # fmt: skip
        share, mine, plain = ratio(ours, theirs, turns)
        print(f"{name:44s} {mine / steps * 1e6:7.0f} us {plain / steps * 1e6:7.0f} us {share:7.3f}  {limit}")


if __name__ == "__main__":
    main()

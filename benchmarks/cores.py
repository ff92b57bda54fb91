"""A LeNet simulated on the cores of this machine, against plain PyTorch loops of the same gradients."""

from __future__ import annotations

import os
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.fleet import using_threads
from dualdelay.problems.cifar10 import lenet
from models import Unevaluated

UPDATES, ROUNDS, WORKERS = 200, 5, 10


def plain(threads: int, problem: dd.Network, count: int) -> float:
    """Seconds per gradient of a loop: sample, forward, backward."""
    module = lenet()
    parameters = list(module.parameters())
    shards = problem.shards()
    with using_threads(threads):
        begin = time.perf_counter()
        for k in range(count):
            inputs, targets = shards[k % WORKERS].batch(torch.randint(shards[k % WORKERS].size, (64,)))
            torch.autograd.grad(cross_entropy(module(inputs), targets), parameters)
        return (time.perf_counter() - begin) / count


def simulated(cores: int, problem: dd.Network) -> float:
    """Seconds per gradient of a run of DuDe, without what happens before its first arrival and after its last."""
    times: list[float] = []
    dd.simulate(
        *(dd.DuDe(lr=0.01), problem, dd.TruncatedNormalSpeeds(n=WORKERS, std=1.0)),
        updates=UPDATES,
        evaluation=dd.Evaluation(every=10**9),
        compute=dd.Compute(cores=cores),
        watch=[lambda state, arrival: times.append(time.perf_counter())],
    )
    return (times[-1] - times[20]) / (len(times) - 21)


def main() -> None:
    """Print a table of ratios, each round by itself."""
    torch.manual_seed(0)
    shards = [(torch.randn(500, 3, 32, 32), torch.randint(10, (500,))) for _ in range(WORKERS)]
    problem = Unevaluated(lenet, cross_entropy, shards, 64)
    cores = os.cpu_count() or 1
    plain(1, problem, 20)
    rows = []
    for _ in range(ROUNDS):
        one, many = plain(1, problem, UPDATES), plain(cores, problem, UPDATES)
        alone, ours = simulated(1, problem), simulated(cores, problem)
        rows.append((one * 1e3, one / many, one / alone, one / ours, many / ours, one / ours / cores))
    names = (
        "plain loop, 1 thread, ms per gradient",
        f"plain loop, {cores} threads, times as fast",
        "simulated on 1 core",
        f"simulated on {cores} cores",
        f"simulated on {cores} cores / plain loop with {cores} threads (goal 1.35)",
        "share of the cores' own rate (goal 0.9)",
    )
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        rounds = "  ".join(f"{value:6.2f}" for value in values)
        print(f"{name:72s} {statistics.median(values):6.2f}   rounds {rounds}")


if __name__ == "__main__":
    main()

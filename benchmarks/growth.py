"""How the time per gradient grows with workers and with runs, on the processor with a small network."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from models import Unevaluated


def problem(workers: int) -> dd.Network:
    """A small classifier, each worker with 16 samples of its own."""
    torch.manual_seed(0)
    shards = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(workers)]
    return Unevaluated(lambda: nn.Linear(64, 10), cross_entropy, shards, 16)


def per_gradient(workers: int, runs: int, batch: bool) -> float:
    """Microseconds per gradient of vanilla ASGD, from two runs of different length."""
    made, speeds = problem(workers), dd.TruncatedNormalSpeeds(n=workers, std=1.0)
    times, counts = [], []
    for updates in (workers + 200, 3 * workers + 2000):
        begin = time.perf_counter()
        table = dd.sweep(
            {"algorithm": [dd.VanillaASGD(lr=0.01)], "lr": [0.001 + 0.0001 * k for k in range(runs)]},
            *(made, speeds),
            updates=updates,
            evaluation=dd.Evaluation(every=10**9),
            compute=dd.Compute(batch=batch),
        )
        times.append(time.perf_counter() - begin)
        counts.append(sum(len(run.trace) for run in table.runs if run is not None))
    return (times[1] - times[0]) / (counts[1] - counts[0]) * 1e6


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("microseconds per gradient                one at a time   many at once")
    for workers in (10, 100, 1000, 10_000):
        print(
            f"{workers:6d} workers, 1 run                     {per_gradient(workers, 1, False):10.1f} "
            f"{per_gradient(workers, 1, True):14.1f}",
            flush=True,
        )
    for runs in (10, 100):
        print(
            f"    10 workers, {runs:3d} runs                                  {per_gradient(10, runs, True):14.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

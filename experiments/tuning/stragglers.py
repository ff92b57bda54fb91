"""Which delay bounds DuDe's step where some workers are far slower: its stability edge times three kinds of mean age.

python experiments/tuning/stragglers.py         half a minute of one core; prints the table of docs/how_to/tune.md

The recursion is that of edge.py, with equal curvatures, L = 1. The edge is the first of steps a tenth apart with which a
run grows; an age is the mean over the later three quarters of a run. The last column is the edge times the mean if all
curvature is in the slowest worker.
"""

from __future__ import annotations

import numpy as np
import torch
from edge import Array, growth, replay, simulate

import dualdelay as dd
from dualdelay.engine.delays import delay_grids

STEPS = np.geomspace(0.02, 60.0, 90)  # times one over the median age
WORST = np.geomspace(0.1, 10.0, 60)  # times one over the largest age


def near(count: int, seconds: float = 1.0) -> list[float]:
    """So many workers that are nearly alike, so that no two report at the same time for ever."""
    return [seconds * (1 + 0.01 * i) for i in range(count)]


def first(steps: Array, rates: Array) -> float:
    """The first step with which a run grows."""
    growing = np.flatnonzero(rates > 0)
    return float(steps[growing[0]]) if len(growing) else float("inf")


def row(name: str, times: list[float]) -> str:
    ratio, n = max(times) / float(np.median(times)), len(times)
    run = simulate(dd.DuDe(0.001), dd.FixedSpeeds(times), 40 if ratio < 50 else 8 if ratio < 500 else 4)
    tau, _ = delay_grids(run.trace, n)
    always, ages = np.ones(len(tau)), tau[len(tau) // 4 :].mean(0)
    slow, mean, median, harmonic = int(np.argmax(ages)), ages.mean(), float(np.median(ages)), 1 / np.mean(1 / ages)
    edge = first(STEPS / median, growth(replay(tau, np.full(n, 1 / n), STEPS / median, always)))
    steps = WORST / tau[:, slow].max()
    worst = first(steps, growth(replay(tau[:, [slow]], np.ones(1), steps, always)))
    cells = [f"{age:,.3g}" for age in (mean, median, harmonic)] + [f"{edge * age:.2g}" for age in (mean, median, harmonic)]
    return f"| {name} | {' | '.join(cells)} | {worst * mean:.2g} |"


def main() -> None:
    torch.set_num_threads(1)
    print("| workers | mean age | median age | harmonic mean | edge x mean | edge x median | edge x harmonic | slowest |")
    print("| --- |" + " ---: |" * 7)
    print(row("10 alike", near(10)))
    for n, slower in ((10, 10), (10, 100), (10, 1000), (30, 100)):
        print(row(f"one of {n} is {slower:,} times slower", [*near(n - 1), float(slower)]))
    for k in (4, 6):
        print(row(f"{k} of 10 are 100 times slower", near(10 - k) + near(k, 100.0)))
    print(row("one of 10 is 100 times faster", [0.01, *near(9)]))
    for std in (1.0, 5.0):
        for seed in range(6):
            times = dd.TruncatedNormalSpeeds(10, std=std, seed=seed).__dict__["times"]
            print(row(f"`truncated_normal[std={std:g}]`, seed {seed}", list(times)))


if __name__ == "__main__":
    main()

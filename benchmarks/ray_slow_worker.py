"""Wall-clock time to a loss on the digits when one of four workers is ten times slower: DuDe against synchronous SGD.

    python benchmarks/ray_slow_worker.py

A job takes 20 ms and worker 0's takes 200 ms, most of it asleep, so that four workers do not share the processors. The four
have uneven digits (Dirichlet 0.1). Both methods get the step size that reaches the loss first on the simulator's clock at
the same speeds, from the grid 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, with seeds that are not used afterwards. Seconds count from
the first update, for which both methods wait for everybody, to the first evaluated model with the loss; evaluations are
half a second apart.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from torch import Tensor

import dualdelay as dd
from ray_updates import ray_here

JOB = [0.2, 0.02, 0.02, 0.02]  # seconds, by worker
GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
TARGET, LIMIT = 0.1, 120.0
METHODS = (dd.SyncSGD, dd.DuDe)


class SlowDigits(dd.Digits):
    """The digits, with jobs that take as long as they are told to."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        until = time.perf_counter() + JOB[worker]
        found = super().gradient(x, worker, draw)
        time.sleep(max(0.0, until - time.perf_counter()))
        return found


def tuned(method: Any) -> float:
    """The step size of the grid that is fastest on the simulator's clock."""
    stop = dd.EarlyStop(target=TARGET)

    def seconds(lr: float, seed: int) -> float:
        problem, speeds = dd.Digits(workers=len(JOB), seed=seed), dd.FixedSpeeds(JOB)
        run = dd.simulate(
            method(lr=lr),
            problem,
            speeds,
            time=LIMIT / 2,
            evaluation=dd.Evaluation(seconds=0.5, early_stop=stop),
            seed=seed,
        )
        return run.time if run.ended == "stop" else math.inf

    times = {lr: max(seconds(lr, seed) for seed in (100, 101)) for lr in GRID}
    print(f"{method.__name__}: " + ", ".join(f"{lr} {spent:.1f} s" for lr, spent in times.items()), flush=True)
    return min(times, key=times.__getitem__)


def seconds_to_loss(method: Any, lr: float, seed: int) -> float:
    """Wall-clock seconds with real workers."""
    problem, stop = SlowDigits(workers=len(JOB), seed=seed), dd.EarlyStop(target=TARGET)
    run = dd.train(
        method(lr=lr),
        problem,
        dd.RayFleet(cpus=0.1),
        time=LIMIT,
        evaluation=dd.Evaluation(seconds=0.5, early_stop=stop),
        seed=seed,
    )
    good = run.metrics.time[run.metrics.objective <= TARGET]
    began = run.trace.time[run.trace.after > 0][0]
    return float(good[0] - began) if len(good) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("simulated seconds to the loss, by step size (the slower of two seeds)")
    steps = [tuned(method) for method in METHODS]
    lines = []
    with ray_here(len(JOB)):
        for seed in range(options.seeds):
            sync, dude = (seconds_to_loss(method, lr, seed) for method, lr in zip(METHODS, steps, strict=True))
            lines.append((seed, sync, dude, sync / dude))
            print(f"seed {seed}: {sync:.1f} s and {dude:.1f} s", flush=True)
    print(f"\nseconds to loss {TARGET}: SyncSGD with lr {steps[0]}, DuDe with lr {steps[1]}")
    print("seed   SyncSGD      DuDe     ratio")
    for seed, sync, dude, ratio in lines:
        print(f"{seed:4d} {sync:9.1f} {dude:9.1f} {ratio:9.1f}")
    middle = (statistics.median(column) for column in list(zip(*lines, strict=True))[1:])
    print("all  " + " ".join(f"{value:9.1f}" for value in middle))


if __name__ == "__main__":
    main()

"""The server's processor time per update with 2, 8 and 32 real workers: it should not grow with their number.

    python benchmarks/ray_workers.py

The gradient is a constant of a thousand numbers, so that next to nothing but the server's own work and Ray's is left. The
time is that of the server's process over 1,500 updates, once every worker has been heard: of its main thread, where our
code runs, and of the whole process, with Ray's threads. Each round runs all sizes in turn; the ratio of each round is taken
before the median.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import dualdelay as dd
from ray_updates import Constant, ray_here

WEIGHTS, WARM, UPDATES = 1000, 200, 1500


class Enough(Exception):
    """The last update that counts has been made."""


def server_time(method: Callable[..., Any], count: int) -> tuple[float, float, float]:
    """Microseconds per update: of the main thread, of the process, and on the wall clock."""
    heard: set[int] = set()
    left = WARM + UPDATES
    marks: list[tuple[float, float, float]] = []

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        nonlocal left
        heard.add(arrival.worker)
        if len(heard) < count:
            return
        left -= 1
        if left in (UPDATES, 0):
            marks.append((time.thread_time(), time.process_time(), time.perf_counter()))
        if left == 0:
            raise Enough

    fleet = dd.RayFleet(cpus=0.01, faults=dd.FaultPolicy(patience=600.0))
    with contextlib.suppress(Enough):
        dd.train(
            method(lr=1e-6),
            Constant(count, WEIGHTS),
            fleet,
            updates=10**9,
            evaluation=dd.Evaluation(every=10**9),
            watch=[watch],
        )
    main, process, wall = (1e6 * (b - a) / UPDATES for a, b in zip(*marks, strict=True))
    return main, process, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes, methods = options.workers, (dd.VanillaASGD, dd.DuDe)
    turns: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with ray_here(1):
        for _ in range(options.rounds):
            for method in methods:
                for count in sizes:
                    turns.setdefault((method.__name__, count), []).append(server_time(method, count))
                    print(f"{method.__name__}, {count} workers: {turns[method.__name__, count][-1][0]:.0f}", flush=True)
    print(f"\nmicroseconds per update at the server\n{'method':12} workers  main thread   ratio  process   ratio    wall")
    for (name, count), found in turns.items():
        base = turns[name, sizes[0]]
        main, process, wall = (statistics.median(column) for column in zip(*found, strict=True))
        grown = [statistics.median(a[k] / b[k] for a, b in zip(found, base, strict=True)) for k in (0, 1)]
        print(f"{name:12} {count:7d} {main:12.0f} {grown[0]:7.2f} {process:8.0f} {grown[1]:7.2f} {wall:7.0f}")


if __name__ == "__main__":
    main()

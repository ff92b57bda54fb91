"""What an arrival costs (medians of five) on a one-dimensional quadratic, with 100 and with 100,000 workers, on one thread.

    python benchmarks/arrivals.py

"our own code" is the time between two arrivals less the time of the problem's gradient, measured in the same run.
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np
import torch

import dualdelay as dd


class Timed(dd.Quadratic):
    """A quadratic that writes down how long its gradients take."""

    inside: list[float]

    def gradient(self, x: torch.Tensor, worker: int, draw: int) -> tuple[torch.Tensor, float]:
        begin = time.perf_counter()
        result = super().gradient(x, worker, draw)
        self.inside.append(time.perf_counter() - begin)
        return result


def arrival(method: dd.Algorithm, n: int, count: int = 3000) -> tuple[float, float]:
    """Medians in microseconds: one arrival, and the gradient within it."""
    problem = Timed(np.linspace(0, 1, n)[:, None])
    problem.inside = []
    marks: list[float] = []
    speeds = dd.FixedSpeeds(np.linspace(1, 2, n).tolist())
    watch = (lambda state, a: marks.append(time.perf_counter()),)
    dd.simulate(method, problem, speeds, updates=count, evaluation=dd.Evaluation(every=count + 1), watch=watch)
    return float(np.median(np.diff(marks))) * 1e6, float(np.median(problem.inside)) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'method':10s} {'workers':>9s} {'arrival':>10s} {'gradient':>10s} {'own code':>10s}  microseconds")
    for name, method in (("vanilla", dd.VanillaASGD(1e-4)), ("dude", dd.DuDe(1e-4, start="zeros"))):
        rows: dict[int, list[tuple[float, float]]] = {100: [], 100_000: []}
        for _ in range(5):  # in turns, since the machine's pace drifts
            for n, row in rows.items():
                row.append(arrival(method, n))
        middle = {n: [statistics.median(column) for column in zip(*row, strict=True)] for n, row in rows.items()}
        for n, (whole, gradient) in middle.items():
            print(
                f"{name:10s} {n:9,d} {whole:10.1f} {gradient:10.1f} {whole - gradient:10.1f}   at most 40 of our own code"
            )
        print(f"{name:10s} difference {middle[100_000][0] - middle[100][0]:8.1f}   at most 10")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()

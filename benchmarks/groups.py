"""A gradient by a worker of two ranks, against one process with one thread and with two, on two cores.

    python benchmarks/groups.py

One real worker; the seconds are those that it computes for a job, without the way to the server and back, of the job that a
tenth of all are quicker than: other work on the machine makes jobs longer and never shorter. A rank uses one thread. Each
round runs the three in turn; ratios are taken in a round, and then their median.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from torch.nn.functional import cross_entropy

import dualdelay as dd
from models import Unevaluated
from ray_updates import images, lenet, ray_here

WARM, JOBS, QUICK = 10, 60, 0.1  # jobs before the others, those that count, and the share of these that are quicker
WAYS = {"one thread": (1, 1), "two threads": (1, 2), "two ranks": (2, 1)}  # ranks and threads of each


def seconds(batch: int, ranks: int, threads: int) -> float:
    """What a quick job takes."""
    problem = Unevaluated(lenet, cross_entropy, images, batch, workers=1, full_gradient=False)
    fleet = dd.RayFleet(ranks=ranks, threads=threads, cpus=0.01)
    run = dd.train(dd.VanillaASGD(lr=1e-3), problem, fleet, updates=WARM + JOBS, evaluation=dd.Evaluation(every=10**6))
    return float(np.quantile(run.trace.seconds[WARM:], QUICK))


def main() -> None:
    """Run all of it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    taken: dict[tuple[int, str], list[float]] = {}
    with ray_here(2):
        for _ in range(options.rounds):
            for batch in options.batches:
                for name, way in WAYS.items():
                    taken.setdefault((batch, name), []).append(seconds(batch, *way))
    print(f"\n{'batch':>5}  {'way':12} ms a gradient  over one thread  over two threads")
    for (batch, name), found in taken.items():
        ratios = [statistics.median(np.divide(found, taken[batch, other])) for other in list(WAYS)[:2]]
        print(f"{batch:5}  {name:12} {1e3 * statistics.median(found):13.1f}  {ratios[0]:15.2f}  {ratios[1]:16.2f}")


if __name__ == "__main__":
    main()

"""The ways of choosing a step on the digits and on logistic regression, in a few minutes on a processor: small.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from corrected import Corrected
from first import FirstRule
from rich.progress import track
from variants import Trial
from waiting import WaitingDuDe

import dualdelay as dd
from dualdelay.storage.files import write

SEEDS = (0, 1, 2)
ARRIVALS = 4_000  # of a fully asynchronous method, as in docs/results/methods.md
PROBLEMS = {
    "digits": dd.Digits(workers=10, alpha=0.1),
    "logistic": dd.problems.Logistic(workers=10, features=5, samples=200, heterogeneity=3.0, batch_size=8),
}
RULES: dict[str, Callable[[], dd.Algorithm[Any]]] = {
    "AutoDuDe": FirstRule,  # as it was then
    "the same with last gradients": WaitingDuDe,
    "fixed step 1/16": partial(dd.DuDe, 2.0**-4),
    "fixed step 1/256": partial(dd.DuDe, 2.0**-8),
    "0.6 / mean delay": partial(Trial, 0.6),
    "0.6 / mean delay, by time": partial(Trial, 0.6, unit="time"),
    "1 / largest delay, decayed": partial(Trial, 1.0, delay="max", decay=0.999, floor="none"),
    "with noise from differences": partial(Trial, 0.6, noise=0.1),
    "waiting for ages below 3 n": partial(Trial, 0.6, bound=3.0),
    "cosine of movement and gradient, 0.1": partial(Trial, 0.6, beta=0.1),
    "cosine of movement and gradient, 0.3": partial(Trial, 0.6, beta=0.3),
    "curvature from secants": partial(Trial, 0.6, secant=0.2),
    "rounds: Ringleader, step 0.6 / 2 n": partial(dd.algorithms.RingleaderASGD, 0.03),
    "corrected, 0.3 / n": partial(Corrected, 0.3),
}


def final(rule: Callable[[], dd.Algorithm[Any]], name: str, std: float, seed: int) -> float:
    """F - F* at the end (F for the digits); nan if the run failed."""
    problem, speeds = PROBLEMS[name].reseeded(seed), dd.TruncatedNormalSpeeds(10, std, seed)
    time = ARRIVALS / sum(1 / speeds.seconds(worker, 0) for worker in range(10))
    least = problem.evaluate(problem.optimum())["objective"] if isinstance(problem, dd.problems.Logistic) else 0.0
    try:
        run = dd.simulate(rule(), problem, speeds, time=time, evaluation=dd.Evaluation(seconds=time), seed=seed)
    except dd.RunFailed:
        return float("nan")
    return float(run.metrics.objective[-1]) - least


def main() -> None:
    """Compute and write the table."""
    torch.set_num_threads(1)
    places = [(name, std) for name in PROBLEMS for std in (1.0, 5.0)]
    lines = ["| rule | " + " | ".join(f"{name}, std {std:g}" for name, std in places) + " |", "| --- " * 5 + "|"]
    for rule, make in track(RULES.items(), "rules", disable=not sys.stdout.isatty()):
        cells = []
        for name, std in places:
            ends = [final(make, name, std, seed) for seed in SEEDS]
            cells.append(f"{fmean(ends):.3g} ({min(ends):.3g} to {max(ends):.3g})")
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    write(Path(__file__).parent / "results" / "small.md", ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()

"""What local steps cost: a step of a simulated job over a bare gradient, and on a GPU a grid of runs over the plain loop.

    python benchmarks/local_steps.py [gpu]

On the processor: ``problem.gradient`` in a loop against a simulated method whose jobs take K = 5 steps, per gradient, one
thread, in turns; the ratio of each turn is taken before the median. On a GPU: a grid of 36 runs (twelve steps, three
splits) of LeNet on random data of CIFAR-10's shape, by a half of the method (SCAFFOLD, DiLoCo) and by the problem
(``LocalSteps``), against a plain PyTorch loop that takes one gradient after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import dualdelay as dd
from gpu import NEVER, data, network, per_gradient, plain_loop, rates
from gradients import images

K = 5
SGD: dict[str, Any] = {"steps": K, "inner_lr": 0.01}
ADAM: dict[str, Any] = {"steps": K, "inner_lr": 0.001, "inner": "AdamW", "inner_state": "keep"}
Way = tuple[dd.Algorithm[Any], Callable[[dd.Problem], dd.Problem]]
WAYS: dict[str, Way] = {
    "no local steps: DuDe": (dd.DuDe(0.01), lambda problem: problem),
    "half: SCAFFOLD": (dd.algorithms.SCAFFOLD(0.01, steps=K), lambda problem: problem),
    "half: DiLoCo, SGD": (dd.algorithms.AsyncDiLoCo(0.7, **SGD), lambda problem: problem),
    "half: DiLoCo, AdamW kept": (dd.algorithms.AsyncDiLoCo(0.7, **ADAM), lambda problem: problem),
    "problem: DuDe, SGD": (dd.DuDe(0.01), lambda problem: dd.LocalSteps(problem, K, 0.01)),
    "problem: DuDe, AdamW kept": (dd.DuDe(0.01), lambda problem: dd.LocalSteps(problem, K, 0.001, "AdamW", "keep")),
}


def gradients_of(name: str, run: dd.Run) -> int:
    """How many gradients a run took; those inside of a problem's jobs are not in its trace."""
    return run.gradients * (K if name.startswith("problem") else 1)


def bare(problem: dd.Problem, count: int) -> float:
    """Seconds of a gradient at one model."""
    x, begin = problem.start(0), time.perf_counter()
    for draw in range(count):
        problem.gradient(x, draw % problem.workers, draw)
    return (time.perf_counter() - begin) / count


def simulated(name: str, problem: dd.Problem, gradients: int) -> float:
    """Seconds of a gradient in a run."""
    method, wrap = WAYS[name]
    speeds, options = dd.FixedSpeeds([1.0 + 0.1 * k for k in range(problem.workers)]), dd.Compute(cores=1)
    updates = (
        max(2, gradients // (problem.workers * K)) if "SCAFFOLD" in name else gradients // (1 if "no" in name[:2] else K)
    )
    begin = time.perf_counter()
    run = dd.simulate(
        method, wrap(problem), speeds, updates=updates, evaluation=dd.Evaluation(every=NEVER), compute=options
    )
    return (time.perf_counter() - begin) / gradients_of(name, run)


def on_the_processor(turns: int = 7) -> None:
    """Print a line for each problem and way to take local steps."""
    torch.set_num_threads(1)
    problems = {"digits, 4,810 weights": (dd.Digits(workers=10), 2000), "LeNet, batch 64": (images(), 200)}
    print(f"{'a local step over a bare gradient, K = 5':58} ratio")
    for title, (problem, count) in problems.items():
        for name in WAYS:
            ratios = [simulated(name, problem, count) / bare(problem, count) for _ in range(turns)]
            print(f"{title + ': ' + name:58} {statistics.median(ratios):.3f}", flush=True)


def swept(name: str, problems: Sequence[dd.Problem], updates: int) -> int:
    """The gradients of a sweep over step sizes and splits."""
    made = dd.sweep(
        {"algorithm": [WAYS[name][0]], "lr": rates(12), "problem": [WAYS[name][1](problem) for problem in problems]},
        speeds=dd.TruncatedNormalSpeeds(n=10, std=1.0),
        updates=updates,
        evaluation=dd.Evaluation(every=NEVER),
        compute=dd.Compute("cuda"),
        watch=dd.Reporting(progress=False),
    )
    return sum(gradients_of(name, run) for run in made.runs if run is not None)


def on_a_gpu() -> None:
    """Print a line for each way."""
    whole = data()
    splits = [network(whole, alpha=alpha) for alpha in (0.1, 0.5, 1.0)]
    plain = plain_loop(whole)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; plain loop {1e6 * plain:.0f} us per gradient")
    for name in WAYS:
        few = 10 if "SCAFFOLD" in name else 100
        each, fixed = per_gradient(partial(swept, name, splits), few, 4 * few)
        figures = f"{each * 1e6:8.1f} us  {plain / each:6.1f} x  (before the first {fixed:.1f} s)"
        print(f"36 runs, {name:34s} {figures}", flush=True)


if __name__ == "__main__":
    on_a_gpu() if "gpu" in sys.argv[1:] else on_the_processor()

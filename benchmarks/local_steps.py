"""What local steps cost: a step of a simulated job over a bare gradient, and on a GPU a grid of runs over the plain loop.

    python benchmarks/local_steps.py [cpu | gpu]

On the processor: ``problem.gradient`` in a loop against a simulated method whose jobs take K steps, per gradient, one thread,
in turns; the ratio of each turn is taken before the median. On a GPU: a grid of 36 runs (twelve steps, three seeds) of LeNet
on random data of CIFAR-10's shape with K = 5, by a half of the method (SCAFFOLD, asynchronous DiLoCo) and by the problem
(``LocalSteps``), against a plain PyTorch loop that takes one gradient after the other.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dualdelay as dd
from gpu import NEVER, data, network, per_gradient, plain_loop, rates
from gradients import images

K = 5


def timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def on_the_processor(turns: int = 7) -> None:
    """Print a line for each problem and way to take local steps."""
    torch.set_num_threads(1)
    problems = {"digits, 4,810 weights": (dd.Digits(workers=10), 400), "LeNet, batch 64": (images(), 30)}
    print(f"{'a local step over a bare gradient, K = 5':58} ratio")
    for title, (problem, jobs) in problems.items():
        speeds, never = dd.FixedSpeeds([1.0 + 0.1 * k for k in range(10)]), dd.Evaluation(every=NEVER)
        one = dd.Compute(cores=1)
        x = problem.start(0)
        ways: dict[str, tuple[Any, Any]] = {
            "no local steps": (dd.VanillaASGD(0.01), problem),
            "half, SGD": (dd.algorithms.AsyncDiLoCo(0.7, steps=K, inner_lr=0.01, momentum=0.0), problem),
            "half, AdamW kept": (
                dd.algorithms.AsyncDiLoCo(0.7, steps=K, inner_lr=0.001, inner="AdamW", inner_state="keep"),
                problem,
            ),
            "problem, SGD": (dd.VanillaASGD(0.01), dd.LocalSteps(problem, K, 0.01)),
            "problem, AdamW kept": (dd.DuDe(0.001), dd.LocalSteps(problem, K, 0.001, "AdamW", "keep")),
        }

        def bare(problem: Any = problem, x: Any = x, count: int = jobs * K) -> None:
            for draw in range(count):
                problem.gradient(x, draw % 10, draw)

        ratios: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, (method, kind) in ways.items():
                steps = 1 if name == "no local steps" else K
                updates = jobs * K // steps

                def simulated(method: Any = method, kind: Any = kind, updates: int = updates) -> None:
                    dd.simulate(method, kind, speeds, updates=updates, evaluation=never, compute=one)

                plain = timed(bare)
                ratios[name].append(timed(simulated) / plain)
        for name, values in ratios.items():
            print(f"{title + ': ' + name:58} {statistics.median(values):.3f}", flush=True)


def on_a_gpu() -> None:
    """Print a line for each way."""
    whole = data()
    splits = [network(whole, alpha=alpha) for alpha in (0.1, 0.5, 1.0)]
    plain = plain_loop(whole)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; plain loop {1e6 * plain:.0f} us per gradient",
        flush=True,
    )
    local = {"steps": K, "inner_lr": 0.01}
    adam = {"steps": K, "inner_lr": 0.001, "inner": "AdamW", "inner_state": "keep"}
    ways: dict[str, tuple[Any, Sequence[dd.Problem]]] = {
        "no local steps: DuDe": (dd.DuDe(0.01), splits),
        "half: SCAFFOLD": (dd.algorithms.SCAFFOLD(0.01, steps=K), splits),
        "half: DiLoCo, SGD": (dd.algorithms.AsyncDiLoCo(0.7, **local), splits),
        "half: DiLoCo, AdamW kept": (dd.algorithms.AsyncDiLoCo(0.7, **adam), splits),
        "problem: DuDe, SGD": (dd.DuDe(0.01), [dd.LocalSteps(split, K, 0.01) for split in splits]),
        "problem: DuDe, AdamW kept": (dd.DuDe(0.01), [dd.LocalSteps(split, K, 0.001, "AdamW", "keep") for split in splits]),
    }
    for name, (method, problems) in ways.items():

        def run(
            updates: int, method: Any = method, problems: Any = problems, each: int = K * name.startswith("problem")
        ) -> int:
            made = dd.sweep(
                {"algorithm": [method], "lr": rates(12), "problem": problems},
                speeds=dd.TruncatedNormalSpeeds(n=10, std=1.0),
                updates=updates,
                evaluation=dd.Evaluation(every=NEVER),
                compute=dd.Compute("cuda"),
                watch=dd.Reporting(progress=False),
            )
            return sum((each or 1) * run.gradients for run in made.runs if run is not None)

        few = 10 if name.startswith("half: SCAFFOLD") else 100
        each, fixed = per_gradient(run, few, 4 * few)
        print(
            f"36 runs, {name:34s} {each * 1e6:8.1f} us  {plain / each:6.1f} x  (before the first {fixed:.1f} s)", flush=True
        )


if __name__ == "__main__":
    if "gpu" in sys.argv[1:]:
        on_a_gpu()
    else:
        on_the_processor()

"""Short runs of one method at a few steps, made until some seconds are over: which step is best, beside a rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from ..core import Algorithm, Problem
from ..core.errors import BadInput, RunFailed
from ..runs.settings import Evaluation, Reporting, Server
from ..runs.simulate import simulate
from ..simulation.speeds import SpeedModel

Report = Callable[[float, str], None]

_FIRST = (1.0, 2.0, 0.5, 4.0, 0.25)  # times the step by the rule, in the order in which they are tried
_FURTHEST = 4096.0  # times that step at most, and one over this at least
_PLANNED = 8  # runs that the seconds are to suffice for: the first ones, and some beyond the edge
_NEVER = 10**9  # updates between two evaluations, of which only the last counts here
_SHORTEST = 1 / 8  # of the planned length: runs that are shorter do not tell which step is best at its end
_TOLD = 0.2  # seconds by which a run has to be longer than the shortest to tell what an update costs


@dataclass(frozen=True)
class Try:
    """A step, and the objective that it ended with: inf if it diverged."""

    lr: float
    objective: float


@dataclass(frozen=True)
class Tries:
    """What came of the steps that were tried."""

    runs: tuple[Try, ...]
    """By their steps; one at least."""
    updates: int | None
    """Where each of them ended: after so many updates,"""
    time: float | None
    """or at this simulated time."""
    share: float
    """Of the length that was asked for; below one if the seconds would not have sufficed."""
    complete: bool
    """Whether no further step was wanted when they ended; otherwise the seconds were over."""

    @property
    def best(self) -> Try:
        """The run with the lowest objective; of equal ones that with the smallest step."""
        return min(self.runs, key=lambda run: (run.objective, run.lr))

    @property
    def edge(self) -> str:
        """Whether the best step is the smallest or the largest of several; empty if it lies between others."""
        ends = {self.runs[0]: "smallest", self.runs[-1]: "largest"}
        return ends.get(self.best, "") if len(self.runs) > 1 else ""

    @property
    def tell(self) -> bool:
        """Whether the runs were long enough to choose a step by; a step that diverges in a short one is too long anyway."""
        return self.share >= _SHORTEST or not math.isfinite(self.best.objective)

    @property
    def lr(self) -> float:
        """The step to begin with: the best, or if all diverged a quarter of the smallest."""
        return self.best.lr if math.isfinite(self.best.objective) else round_to(self.best.lr / 4)


def round_to(value: float) -> float:
    """A number with two digits, for a person to type."""
    return float(f"{value:.2g}")


def try_steps(
    method: Callable[[float], Algorithm[Any]],
    lr: float,
    problem: Problem,
    speeds: SpeedModel,
    *,
    seconds: float,
    updates: int,
    time: float | None = None,
    seed: int = 0,
    x: Tensor | None = None,
    report: Report | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Tries:
    """Simulate the method at steps around ``lr``, and beyond them while the best is on the edge, for so many real seconds.

    Each run is a whole one, the same that anybody else would simulate. The clock decides how many there are, and if the
    seconds would not suffice for eight, whether each has a half, a quarter, ... of the updates. One is always made.

    updates, time: the length that is asked for: a simulated time if that is given, which has about so many updates.
    """
    began, report = clock(), report or (lambda share, text: None)

    def objective(step: float, count: int | None, until: float | None = None) -> float:
        server, evaluation, quietly = Server(initial_weights=x), Evaluation(every=_NEVER), Reporting(progress=False)
        options: dict[str, Any] = {"seed": seed, "watch": quietly, "evaluation": evaluation, "server": server}
        try:
            run = simulate(method(step), problem, speeds, updates=count, time=until, **options)
        except RunFailed as error:
            if "not finite" not in str(error):
                raise
            return math.inf
        if not run.version:
            raise BadInput(
                f"no update is made by time {until:g}; expected a time in which every worker reports, so give more."
            )
        end = float(run.metrics.objective[-1])
        return end if math.isfinite(end) else math.inf

    report(0.0, "timing a few updates")
    cost, share = _cost(lambda count: objective(lr / 100, count), updates, clock), 1.0
    while share * updates > 1 and _PLANNED * cost(share * updates) > seconds - (clock() - began):
        share /= 2
    until = time if share == 1 else None  # a part of the time might end before the slowest worker has reported once
    count = max(1, round(share * updates)) if until is None else None
    tried, longest = dict[float, float](), 0.0
    while (step := _next(lr, tried)) is not None and (not tried or clock() - began + longest <= seconds):
        start = clock()
        report(min(1.0, (start - began) / seconds), f"trying lr={step:g}")
        tried[step] = objective(step, count, until)
        longest = max(longest, clock() - start)
    runs = tuple(Try(step, tried[step]) for step in sorted(tried))
    return Tries(runs, count, until, share, complete=step is None)


def _cost(run: Callable[[int], object], most: int, clock: Callable[[], float]) -> Callable[[float], float]:
    """About how many seconds a run of so many updates takes, from runs that get longer until they tell."""

    def timed(updates: int) -> float:
        start = clock()
        run(updates)
        return clock() - start

    updates, first = 1, timed(1)
    latest = first
    while updates < most and latest < 2 * first + _TOLD:
        updates = min(4 * updates, most)
        latest = timed(updates)
    each = max(latest - first, 0.0) / max(updates - 1, 1)
    return lambda count: first + each * (count - 1)


def _next(lr: float, tried: dict[float, float]) -> float | None:
    """The step to try next: one of the first, then beyond the best as long as that is on the edge; None if it is not."""
    for factor in _FIRST:
        if (step := round_to(lr * factor)) not in tried:
            return step
    best = min(tried, key=lambda step: (tried[step], step))
    factor = 2.0 if best == max(tried) else 0.5 if best == min(tried) else 1.0
    further = round_to(best * factor)
    return further if factor != 1 and 1 / _FURTHEST <= further / lr <= _FURTHEST else None

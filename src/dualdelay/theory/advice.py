"""What suits given workers: how unlike they are, how stale gradients get, which method, which step, and why.

The rules of thumb are those of docs/methods.md and docs/paper.md. Where vanilla ASGD ends, grad F is the pull of the fast
workers' data, sum_i (1/n - p_i) (grad F_i - grad F) with p_i worker i's share of the gradients; so that pull, against the
gradient that training has to bring down, says whether the bias matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms import AutoDuDe, DuDe
from ..core import Problem
from ..core.errors import MOST, BadInput, DualDelayError
from ..runs.settings import Evaluation, Server
from ..runs.simulate import simulate
from ..simulation.speeds import SpeedModel
from .constants import Constants, constants
from .staleness import Staleness, delays
from .survey import FEW, Estimate, Survey
from .theorem import horizon, step_size

KAPPA = AutoDuDe.lr  # a first step size, times the mean delay: docs/tuning.md
IDLE = 1 / 8  # of their time that workers may wait: so far the step grows as fast as updates get fewer
_EVEN = 0.8  # of the gradients that synchronous SGD still has where it costs little
_PULL = 0.1  # of the gradient, below which the fast workers' data may count for more
_ARRIVALS = 20_000  # to simulate at most for each wait_for
_LENGTH = 2_000  # gradients of a run of which nobody says how long it is to be, and of the trial at most
_TRIAL = 50  # gradients of the trial for each worker
_PASS, _SAMPLES = 50, 1_000  # curvature is that of all data if they are so few minibatches, else of so many samples

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Later:
    """||grad F|| at a second model, and ||grad F_i - grad F||^2 there for each worker."""

    gradient: Estimate
    heterogeneity: tuple[Estimate, ...]


@dataclass(frozen=True)
class Advice:
    """What to say to a person with these workers; nan, None and empty where something could not be found out."""

    workers: int
    constants: Constants | None
    """Measured where the run starts."""
    later: Later | None
    """Measured after a short trial run, or at the end of the recorded run."""
    staleness: tuple[Staleness, ...]
    """For each wait_for that was looked at."""
    even: float
    """Gradients per second of synchronous SGD, as a share of those of workers that never wait."""
    pull: float
    """How far the fast workers' data pull vanilla ASGD aside, as a share of the gradient of F."""
    method: str
    """The name of the method that suits."""
    wait_for: int
    """Workers per update: of DuDe, and n for synchronous SGD."""
    lr: float
    """A first step size for it."""
    lr_async: float
    """The same for methods that wait for nobody."""
    updates: int
    """The planned length, in updates of that method."""
    missing: tuple[str, ...]
    """What could not be measured, one sentence each."""
    notes: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    """Why, one sentence each."""
    theory_lr: float = math.nan
    """The theorem's step size for that length, with the measured constants."""
    horizon: float = math.nan
    """The updates from which on the theorem holds as it is printed."""

    @property
    def chosen(self) -> Staleness | None:
        """How stale gradients are with the wait_for that is advised."""
        return next((row for row in self.staleness if row.wait_for == self.wait_for), None)

    @property
    def smaller(self) -> float:
        """How many times smaller the theorem's step is."""
        return self.lr / self.theory_lr


def rows_for(workers: int) -> list[int]:
    """The numbers of workers to wait for that are looked at: all, or of many 1, 2, 3, 5, 8, ... and all of them."""
    if workers <= 6:
        return list(range(1, workers + 1))
    rows = [1, 2]
    while rows[-1] < workers:
        rows.append(rows[-1] + rows[-2])
    return [*(row for row in rows if row < workers), workers]


def advise(
    problem: Problem | None,
    speeds: SpeedModel | None,
    *,
    x: Tensor | None = None,
    later: Tensor | None = None,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Advice:
    """Measure the problem and the times of its jobs, as far as either is there, and say what suits.

    x, later: where a run starts, and a model from further on; by default that of a short trial run.
    updates, time: how long the run is to be.
    report: told how much is done, and of what.
    """
    n = problem.workers if problem is not None else speeds.n if speeds is not None else 0
    if not n:
        raise BadInput("neither a problem nor speeds are given, so there is nothing to measure; give one of them.")
    say, missing, notes, found = report or (lambda share, text: None), list[str](), list[str](), None
    if problem is not None:
        say(0.0, "measuring the workers' gradients")
        x = problem.start(seed) if x is None else x
        data = sum(problem.epoch(worker) for worker in range(n))
        found = constants(problem, x, seed=seed, samples=None if data <= _PASS else max(32, _SAMPLES // n))
        missing += [note for note in found.notes if "could not be" in note]
        notes += [note for note in found.notes if "could not be" not in note]
    table: list[Staleness] = []
    for k, wait_for in enumerate(rows_for(n) if speeds is not None else ()):
        say(0.5 + 0.4 * k / len(rows_for(n)), f"simulating arrivals, wait_for={wait_for}")
        try:
            assert speeds is not None
            table.append(delays(speeds, wait_for, most=_ARRIVALS))
            notes += [f"with wait_for={wait_for} {note}" for note in table[-1].notes]
        except DualDelayError as error:
            missing.append(f"delays with wait_for={wait_for} could not be measured: {error}")
    steep = 1.0 if found is None or not found.smoothness.value > 1 else found.smoothness.value
    wait_for = max((row.wait_for for row in table if row.idle_share <= IDLE), default=1)
    by_wait = {row.wait_for: row for row in table}
    step = {row.wait_for: round_to(KAPPA / (steep * row.tau_avg)) for row in table}
    lr = step.get(wait_for, round_to(KAPPA / (steep * (1.5 * n - 0.5))))  # as if all were equally fast
    if problem is not None and later is None and speeds is not None and table:
        say(0.9, "a short trial run")
        count = max(1, min(_TRIAL * n, _LENGTH) // wait_for)
        try:
            run = simulate(
                DuDe(lr, wait_for),
                problem,
                speeds,
                updates=count,
                seed=seed,
                evaluation=Evaluation(every=count),
                server=Server(initial_weights=x),
            )
            later, (first, *_, last) = run.x, run.metrics.objective.tolist()
            if not last <= first:
                said = f"in a trial of {count} updates with lr={lr:g} and wait_for={wait_for} F rose from {first:.3g} to"
                notes.append(f"{said} {last:.3g}: begin with a quarter of that step, or less.")
        except DualDelayError as error:
            missing.append(f"how unlike the workers are later on could not be measured: a trial run failed: {error}")
    after = None if problem is None or later is None else _later(problem, later, missing)
    even = by_wait[n].arrivals_per_second / by_wait[1].arrivals_per_second if {1, n} <= set(by_wait) else math.nan
    pull = _pull(by_wait.get(1), found, after)
    method = "sync" if even >= _EVEN else "vanilla" if pull <= _PULL else "dude"
    wait_for = {"sync": n, "vanilla": 1}.get(method, wait_for)
    if updates is None and time is not None and wait_for in by_wait:
        updates = max(1, round(min(time * by_wait[wait_for].updates_per_second, MOST)))
    updates = updates or int(round_to(max(1.0, _LENGTH / wait_for)))
    steps, told = (step.get(wait_for, lr), step.get(1, lr)), (tuple(missing), tuple(notes))
    advice = Advice(n, found, after, tuple(table), even, pull, method, wait_for, *steps, updates, *told)
    return replace(advice, reasons=_reasons(advice), **_theory(advice))


def _later(problem: Problem, x: Tensor, missing: list[str]) -> Later | None:
    """The workers' gradients at another model; without exact ones, of a few minibatches each."""
    survey, what = Survey(problem, FEW, 2**30), "how unlike the workers are later on"
    made = survey.attempt(what, lambda: torch.stack([survey.gradient(x, i) for i in range(problem.workers)]))
    if made is None:
        missing += survey.notes[-1:]
        return None
    how, mean = "exact" if survey.exact else f"{FEW} minibatches", made.mean(0)
    unlike = (Estimate(square, math.nan, how) for square in (made - mean).square().sum(1).tolist())
    return Later(Estimate(float(mean.norm()), math.nan, how), tuple(unlike))


def _pull(free: Staleness | None, found: Constants | None, after: Later | None) -> float:
    """The pull of the fast workers' data over the gradient of F; of two models that where it is larger.

    It is the root of sum_i (p_i - 1/n)^2 zeta_i^2, as if workers differed in unlike directions, against the larger of the
    two models' gradients, since at the solution grad F is zero whatever the workers are.
    """
    both: tuple[Constants | Later | None, ...] = (found, after)
    seen = [one for one in both if one is not None and math.isfinite(one.gradient.value)]
    if free is None or not seen:
        return math.nan
    n, gradient = len(free.shares), max(one.gradient.value for one in seen)
    squares = [[(p - 1 / n) ** 2 * z.value for p, z in zip(free.shares, one.heterogeneity, strict=True)] for one in seen]
    worst = math.sqrt(max(map(sum, squares)))
    return worst / gradient if gradient > 0 else math.inf if worst > 0 else 0.0


def _theory(advice: Advice) -> dict[str, Any]:
    """The theorem's step and horizon; the safe smoothness is the largest of the workers' own."""
    found, made = advice.constants, advice.chosen
    if found is None or made is None:
        return {}
    smooth = [each.value for each in found.smoothnesses]
    known = (max(smooth), found.gap.value, found.variance.value)
    if not all(map(math.isfinite, (*smooth, *known))) or known[0] <= 0 or known[1] <= 0:
        said = "the theorem's step is not known: it needs the smoothness, the gap to the minimum and the variance."
        return {"missing": (*advice.missing, said)}
    whole = (*known, made.tau_max, advice.workers)
    return {"theory_lr": step_size(*whole, advice.updates), "horizon": horizon(*whole)}


def _reasons(advice: Advice) -> tuple[str, ...]:
    """Why this method, with the numbers that say so."""
    made, even, pull = advice.chosen, advice.even, advice.pull
    if made is None:
        return ("DuDe needs to know neither how fast nor how unlike the workers are, so it is the one to begin with.",)
    if advice.method == "sync":
        return (
            f"Speeds are nearly equal: waiting for everybody keeps {even:.0%} of the gradients, and all of them are fresh, "
            "which allows the longest steps. Unlike data do no harm then.",
        )
    reasons, drawn = [], f"fast workers' data pull x aside by about {pull:.2g} of the gradient of F"
    if not math.isnan(even):
        reasons.append(f"Synchronous SGD would compute only {even:.0%} as many gradients, for it waits for the slowest.")
    if advice.method == "vanilla":
        reasons.append(
            f"Vanilla ASGD uses every gradient at once and remembers none; {drawn}, which is little (under {_PULL:g}). "
            "FedBuff, which takes longer steps along a few gradients each, has the same bias and is as good a choice."
        )
    elif math.isnan(pull):
        reasons.append("How unlike the workers are is not known, and DuDe does not depend on it.")
    else:
        reasons.append(
            f"DuDe counts every worker the same. Vanilla ASGD and FedBuff follow whoever reports most: {drawn} (over "
            f"{_PULL:g}). If one model can fit all data, as large networks can, that fades with the loss, and they may "
            "still be level or ahead: compare."
        )
    if advice.method == "dude" and 1 < advice.wait_for < advice.workers:
        reasons.append(
            f"Waiting for {advice.wait_for} workers costs {made.idle_share:.0%} of their time and shortens the mean delay "
            f"to {made.tau_avg:.3g} updates: steps can be longer by about what updates get fewer. "
            "The method auto finds such a number and its step as it goes, and was ahead in docs/tuning.md."
        )
    return tuple(reasons)


def round_to(value: float) -> float:
    """A number with two digits, for a person to type."""
    return float(f"{value:.2g}")

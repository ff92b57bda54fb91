"""What suits given workers: how heterogeneous their data are, how stale gradients get, which method, which step, and why.

The rules of thumb are those of docs/results/methods.md and docs/results/paper.md. Where vanilla ASGD ends, grad F is the
pull of the fast workers' data, sum_i (1/n - p_i) (grad F_i - grad F) with p_i worker i's share of the gradients; so that
pull, against the gradient that training has to bring down, says whether the bias matters.

The step is over a delay. For DuDe it is the median over workers of their gradients' age, each worker with the weight of
its curvature: with x' = -step sum_i L_i x(t - tau_i) / n all is stable while step L m < 1, if half of the curvature is m
updates old at most, whatever the other ages are. The mean is no longer than that but for stragglers, which it follows.
For vanilla ASGD it is the mean age of arriving gradients, which is about the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms.dude import DuDe
from ..algorithms.sync import SyncSGD
from ..algorithms.vanilla import VanillaASGD
from ..core import Algorithm, Problem
from ..core.errors import MOST, BadInput, DualDelayError
from ..runs.settings import Evaluation, Server
from ..runs.simulate import simulate
from ..simulation.speeds import SpeedModel
from .constants import FEW, Constants, Estimate, Oracle, constants
from .staleness import Staleness, delays, weighted_median, whole_jobs
from .theorem import horizon, step_size
from .tries import Report, Tries, round_to, try_steps

KAPPA = 0.6  # a first step size, times the delay: docs/results/tuning.md
IDLE = 1 / 8  # of their time that workers may wait: up to there the step grows as fast as updates get fewer
_EVEN = 0.8  # of the gradients that synchronous SGD still has where it costs little
_PULL = 0.1  # of the gradient, below which the fast workers' data may count for more
_BEST = {  # what the best steps were there, times the delay
    "dude": "the best steps had 0.3 to 0.8",
    "vanilla": "vanilla's best steps had 0.2 to 0.6",
    "sync": "of synchronous SGD none above 0.2 was tried",
}
_ARRIVALS = 20_000  # to simulate at most for each wait_for
_LENGTH = 2_000  # gradients of a run whose length is not given, and of the trial at most
_TRIAL = 50  # gradients of the trial for each worker
_PASS, _SAMPLES = 50, 1_000  # curvature is that of all data if they are so few minibatches, else of so many samples


@dataclass(frozen=True)
class Later:
    """||grad F|| at a second model, and ||grad F_i - grad F||^2 there for each worker."""

    gradient: Estimate
    heterogeneity: tuple[Estimate, ...]


@dataclass(frozen=True)
class Advice:
    """What suits these workers; nan, None and empty where something could not be measured."""

    workers: int
    constants: Constants | None
    """Measured where the run starts."""
    later: Later | None
    """Measured after a short trial run, or at the end of the recorded run."""
    staleness: tuple[Staleness, ...]
    """For each wait_for that was simulated."""
    even: float
    """Gradients per second of synchronous SGD, as a share of those of workers that never wait."""
    pull: float
    """How far the fast workers' data pull vanilla ASGD aside, as a share of the gradient of F."""
    method: str
    """The name of the method that suits: sync, vanilla or dude."""
    wait_for: int
    """Workers per update: of DuDe, and n for synchronous SGD."""
    lr: float
    """A first step size for it: by the rule, or the best of those that were tried."""
    lr_by_rule: float
    """0.6 over the delay and the smoothness."""
    delay: float
    """The delay of the rule, in updates of that method."""
    lr_async: float
    """By the same rule, of DuDe that waits for no other worker,"""
    lr_vanilla: float
    """and of vanilla ASGD."""
    updates: int
    """The planned length, in updates of that method."""
    missing: tuple[str, ...]
    """What could not be measured, one sentence each."""
    notes: tuple[str, ...]
    theory_lr: float
    """The theorem's step size for that length, with the measured constants."""
    horizon: float
    """The updates from which on the theorem holds as it is printed."""
    tries: Tries | None = None
    """What came of trying some steps."""

    def algorithm(self, lr: float) -> Algorithm[Any]:
        """The method that suits, with this step."""
        if self.method == "dude":
            return DuDe(lr, self.wait_for)
        return SyncSGD(lr) if self.method == "sync" else VanillaASGD(lr)

    @property
    def chosen(self) -> Staleness | None:
        """How stale gradients are with the wait_for that is advised."""
        return next((row for row in self.staleness if row.wait_for == self.wait_for), None)

    @property
    def smaller(self) -> float:
        """How many times smaller the theorem's step is."""
        return self.lr_by_rule / self.theory_lr

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this method, with the numbers that say so, one sentence each."""
        if self.chosen is None:
            return (
                "DuDe needs to know neither how fast the workers nor how heterogeneous their data are, so begin with it.",
            )
        if self.method == "sync":
            return (
                f"Speeds are nearly equal: waiting for all workers keeps {self.even:.0%} of the gradients, and all of them "
                "are fresh, which allows the longest steps. Heterogeneous data do no harm then.",
            )
        reasons, pulled = [], f"fast workers' data pull x aside by about {self.pull:.2g} of the gradient of F"
        if not math.isnan(self.even):
            share = f"{self.even:.0%}"
            reasons.append(f"Synchronous SGD would compute only {share} as many gradients, for it waits for the slowest.")
        if self.method == "vanilla":
            reasons.append(
                f"Vanilla ASGD uses every gradient at once and remembers none; {pulled}, which is little (under {_PULL:g})."
                " FedBuff, which takes longer steps along a few gradients each, has the same bias and is as good a choice."
            )
        elif math.isnan(self.pull):
            reasons.append("How heterogeneous the data are is not known, and DuDe does not depend on it.")
        else:
            reasons.append(
                "DuDe counts every worker the same. Vanilla ASGD and FedBuff follow the workers that report most: "
                f"{pulled} (over {_PULL:g}). If one model can fit all data, as large networks can, that fades with the "
                "loss, and they may still be level or ahead: compare."
            )
        if self.method == "dude" and 1 < self.wait_for < self.workers:
            reasons.append(
                f"Waiting for {self.wait_for} workers costs {self.chosen.idle_share:.0%} of their time and shortens the "
                f"median delay to {self.chosen.tau_median:.3g} updates: steps can be longer by about what updates get "
                "fewer. The method auto finds such a number and its step as it goes (docs/results/tuning.md)."
            )
        return tuple(reasons)

    @property
    def rests_on(self) -> tuple[str, ...]:
        """What each part of the advice rests on: measurements, rules of thumb and where they were found, assumptions."""
        texts, row = [], self.chosen
        if row is not None:
            texts.append(
                f"Delays: measured, in a simulation of {row.arrivals:,} gradients, as if workers stayed as fast as this."
            )
        if self.constants is not None:
            later = "" if self.later is None else " and at one further on"
            texts.append(
                f"Heterogeneity: measured at the first model{later}. Smoothness: measured at the first model only."
            )
        if row is not None:
            texts.append(
                f"Method: rules of thumb of docs/results/methods.md: synchronous SGD from {_EVEN:.0%} of the gradients on, "
                f"vanilla ASGD up to a pull of {_PULL:g}, otherwise DuDe."
            )
        if row is not None and self.method == "dude":
            texts.append(
                f"wait_for: a rule of thumb: the most workers that it costs up to {IDLE:.1%} of their time to wait for."
            )
        texts.append(
            f"lr: a rule of thumb. {KAPPA:g} was found for DuDe with LeNet on CIFAR-10 ({_BEST[self.method]}). On a "
            "logistic regression the best was up to ten times smaller, on the digits up to seven times larger: a start, "
            "not a result."
        )
        if row is not None and self.method == "dude" and row.tau_avg > 2 * self.delay:
            careful = round_to(self.lr_by_rule * self.delay / row.tau_avg)
            texts.append(
                "The median delay: an assumption, that no direction is curved by the slowest workers' data alone. Where "
                f"one is, the mean delay counts, {row.tau_avg:.3g}: if the loss swings for long, begin with lr={careful:g}."
            )
        return tuple(texts)

    def after_trying(
        self,
        problem: Problem,
        speeds: SpeedModel,
        seconds: float,
        *,
        time: float | None = None,
        x: Tensor | None = None,
        seed: int = 0,
        report: Report | None = None,
    ) -> Advice:
        """The same advice with the best of some steps, each simulated for the planned length, in so many real seconds."""
        tries = try_steps(
            self.algorithm,
            self.lr_by_rule,
            problem,
            whole_jobs(speeds, problem),
            seconds=seconds,
            updates=self.updates,
            time=time,
            seed=seed,
            x=x,
            report=report,
        )
        return replace(self, lr=tries.lr if tries.tell else self.lr_by_rule, tries=tries)


def rows_for(workers: int) -> list[int]:
    """The values of wait_for to simulate: all, or for many workers 1, 2, 3, 5, 8, ... and the number of workers."""
    if workers <= 6:
        return list(range(1, workers + 1))
    rows = [1, 2]
    while rows[-1] < workers:
        rows.append(rows[-1] + rows[-2])
    return [*rows[:-1], workers]


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
    """Measure the problem and the times of its jobs, as far as they are given, and choose what suits.

    x, later: where a run starts, and a model from further on; by default that of a short trial run.
    updates, time: how long the run is to be.
    report: called with the share that is done, and what is done next.
    """
    n = problem.workers if problem is not None else speeds.n if speeds is not None else 0
    if not n:
        raise BadInput("neither a problem nor speeds are given, so there is nothing to measure; give one of them.")
    report = report or (lambda share, text: None)
    missing, notes, measured, rows = list[str](), list[str](), None, dict[int, Staleness]()
    if problem is not None:
        report(0.0, "measuring the workers' gradients")
        x = problem.start(seed) if x is None else x
        minibatches = sum(problem.epoch(worker) for worker in range(n))
        measured = constants(problem, x, seed=seed, samples=None if minibatches <= _PASS else max(32, _SAMPLES // n))
        for note in measured.notes:
            (missing if "could not be" in note else notes).append(note)
    for k, wait_for in enumerate(choices := rows_for(n)):
        if speeds is not None:
            report(0.5 + 0.4 * k / len(choices), f"simulating arrivals, wait_for={wait_for}")
            try:
                rows[wait_for] = delays(speeds, wait_for, most=_ARRIVALS)
                notes += [f"with wait_for={wait_for} {note}" for note in rows[wait_for].notes]
            except DualDelayError as error:
                missing.append(f"delays with wait_for={wait_for} could not be measured: {error}")

    smoothness = 1.0 if measured is None or not measured.smoothness.value > 1 else measured.smoothness.value
    weights = _curvatures(measured, n)
    delay = {wait_for: weighted_median(row.ages, weights) for wait_for, row in rows.items()}
    equal = 1.5 * n - 0.5  # DuDe's delay if all are equally fast
    arriving = rows[1].arrival_avg if 1 in rows else float(n)  # vanilla's

    def step(delay: float) -> float:
        return round_to(KAPPA / (smoothness * delay))

    wait_for = max((wait_for for wait_for, row in rows.items() if row.idle_share <= IDLE), default=1)
    if problem is not None and later is None and speeds is not None and rows:
        report(0.9, "a short trial run")
        try:
            lr = step(delay[wait_for])
            later = _trial(DuDe(lr, wait_for), problem, whole_jobs(speeds, problem), x, seed, notes)
        except DualDelayError as error:
            missing.append(f"how heterogeneous the data are later on could not be measured: a trial run failed: {error}")
    after = None if problem is None or later is None else _later(problem, later, missing)

    even = rows[n].arrivals_per_second / rows[1].arrivals_per_second if {1, n} <= rows.keys() else math.nan
    pull = _pull(rows.get(1), measured, after)
    method = "sync" if even >= _EVEN else "vanilla" if pull <= _PULL else "dude"
    wait_for = {"sync": n, "vanilla": 1}.get(method, wait_for)
    if updates is None and time is not None and wait_for in rows:
        updates = max(1, round(min(time * rows[wait_for].updates_per_second, MOST)))
    updates = updates or int(round_to(max(1.0, _LENGTH / wait_for)))
    theory_lr, theory_horizon = _theory(measured, rows.get(wait_for), n, updates, missing)
    own = arriving if method == "vanilla" else delay.get(wait_for, equal)
    return Advice(
        workers=n,
        constants=measured,
        later=after,
        staleness=tuple(rows.values()),
        even=even,
        pull=pull,
        method=method,
        wait_for=wait_for,
        lr=step(own),
        lr_by_rule=step(own),
        delay=own,
        lr_async=step(delay.get(1, equal)),
        lr_vanilla=step(arriving),
        updates=updates,
        missing=tuple(missing),
        notes=tuple(notes),
        theory_lr=theory_lr,
        horizon=theory_horizon,
    )


def _curvatures(measured: Constants | None, n: int) -> Sequence[float]:
    """The workers' own smoothness, and where that is not known ones."""
    own = [] if measured is None else [estimate.value for estimate in measured.smoothnesses]
    return own if own and all(map(math.isfinite, own)) and max(own) > 0 else [1.0] * n


def _trial(method: DuDe, problem: Problem, speeds: SpeedModel, x: Tensor | None, seed: int, notes: list[str]) -> Tensor:
    """The model after a short run; if its objective rose, the notes say so."""
    updates = max(1, min(_TRIAL * problem.workers, _LENGTH) // method.wait_for)
    evaluation, server = Evaluation(every=updates), Server(initial_weights=x)
    run = simulate(method, problem, speeds, updates=updates, seed=seed, evaluation=evaluation, server=server)
    first, *_, last = run.metrics.objective.tolist()
    if not last <= first:
        notes.append(
            f"in a trial of {updates} updates with lr={method.lr:g} and wait_for={method.wait_for} F rose from {first:.3g} "
            f"to {last:.3g}: begin with a quarter of that step, or less."
        )
    return run.x


def _later(problem: Problem, x: Tensor, missing: list[str]) -> Later | None:
    """The workers' gradients at another model; without exact ones, of a few minibatches each."""
    oracle = Oracle(problem, FEW, 2**30)
    gradients = oracle.attempt(
        "how heterogeneous the data are later on",
        lambda: torch.stack([oracle.gradient(x, worker) for worker in range(problem.workers)]),
    )
    if gradients is None:
        missing += oracle.notes[-1:]
        return None
    how, mean = "exact" if oracle.exact else f"{FEW} minibatches", gradients.mean(0)
    squares = (gradients - mean).square().sum(1).tolist()
    heterogeneity = tuple(Estimate(square, math.nan, how) for square in squares)
    return Later(Estimate(float(mean.norm()), math.nan, how), heterogeneity)


def _pull(free: Staleness | None, start: Constants | None, later: Later | None) -> float:
    """The pull of the fast workers' data over the gradient of F; of two models that where it is larger.

    It is the root of sum_i (p_i - 1/n)^2 zeta_i^2, as if the workers' differences were orthogonal, against the larger of
    the two models' gradients, since at the solution grad F is zero whatever the data are.
    """
    both: tuple[Constants | Later | None, ...] = (start, later)
    models = [model for model in both if model is not None and math.isfinite(model.gradient.value)]
    if free is None or not models:
        return math.nan
    n, gradient = len(free.shares), max(model.gradient.value for model in models)
    squares = [
        sum((p - 1 / n) ** 2 * zeta.value for p, zeta in zip(free.shares, model.heterogeneity, strict=True))
        for model in models
    ]
    pull = math.sqrt(max(squares))
    return pull / gradient if gradient > 0 else math.inf if pull > 0 else 0.0


def _theory(
    measured: Constants | None, chosen: Staleness | None, n: int, updates: int, missing: list[str]
) -> tuple[float, float]:
    """The theorem's step and horizon, or nan; the safe smoothness is the largest of the workers' own."""
    if measured is None or chosen is None:
        return math.nan, math.nan
    own = [estimate.value for estimate in measured.smoothnesses]
    known = (max(own), measured.gap.value, measured.variance.value)
    if not all(map(math.isfinite, (*own, *known))) or known[0] <= 0 or known[1] <= 0:
        missing.append("the theorem's step is not known: it needs the smoothness, the gap to the minimum and the variance.")
        return math.nan, math.nan
    setting = (*known, chosen.tau_max, n)
    return step_size(*setting, updates), horizon(*setting)

"""What is compared: the methods with their settings, the problems, the speeds and the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from statistics import median
from typing import Any

import torch

import dualdelay as dd

WORKERS = 10
SEEDS = (0, 1, 2)
ARRIVALS = 4_000  # that vanilla ASGD makes in the simulated time that all methods have
EVALUATIONS = 25
STEPS = tuple(2.0**k for k in range(-10, 3, 2))  # first; then beyond an edge, then beside the best
PROBLEMS = {
    # five features for ten workers far apart: no model suits all; `heterogeneity` was chosen on seeds 100 to 102
    "logistic": dd.problems.Logistic(workers=WORKERS, features=5, samples=200, heterogeneity=3.0, batch_size=8),
    "digits": dd.Digits(workers=WORKERS, alpha=0.1),
}
STDS = (5.0, 1.0)

LOCAL_STEPS = (5, 20)  # that jobs take beside one, at the most uneven speeds

Times = tuple[float, ...]
Make = Callable[[float, Times, int], dd.Algorithm[Any]]


def _plain(name: str, **settings: Any) -> Make:
    """A method by its name, with k local steps if it takes them itself."""
    kind: Any = dd.ALGORITHMS[name]
    own = "steps" in {field.name for field in fields(kind)}
    return lambda lr, times, k: kind(lr=lr, **({"steps": k} if own else {}), **settings)


def _by_speed(lr: float, times: Times, k: int) -> dd.Algorithm[Any]:
    """With equal chances it would be Uniform ASGD again."""
    rate = sum(1 / time for time in times)
    return dd.algorithms.GeneralizedASGD(lr=lr, probabilities=tuple(1 / time / rate for time in times))


def _polled(name: str) -> Make:
    """A third of the workers is contacted in the time in which the median worker has done its steps."""
    kind: Any = dd.ALGORITHMS[name]
    return lambda lr, times, k: kind(lr=lr, steps=k, sampled=3, period=k * median(times))


def _outer(name: str, **settings: Any) -> Make:
    """A method with an outer and an inner step: the outer is its default, and what is searched is the inner one."""
    kind: Any = dd.ALGORITHMS[name]
    return lambda lr, times, k: kind(steps=k, inner_lr=lr, **settings)


EXACT = ("iag", "sag", "saga")  # with local steps a job would be many passes over all data
OUTER = ("diloco", "delayed_nesterov", "mla", "heloco")
ENTRIES: dict[str, Make] = {name: _plain(name) for name in dd.ALGORITHMS} | {
    "mifa": _plain("mifa", active=WORKERS // 2),  # with all of them it would be synchronous SGD again
    "mimic": _plain("mimic", sampled=WORKERS // 2),  # likewise
    "generalized": _by_speed,
    "fedfix": lambda lr, times, k: dd.algorithms.FedFix(lr=lr, period=k * median(times)),
    **{name: _polled(name) for name in ("quafl", "favano")},
    **{name: _outer(name, lr=0.7) for name in OUTER},
    "auto default": lambda lr, times, k: dd.AutoDuDe(),
    "dude c=3": _plain("dude", wait_for=3),
    "fedbuff m=3": _plain("fedbuff", buffer=3),
    "malenia S=20": _plain("malenia", gradients=2 * WORKERS),
    "aced 30": _plain("aced", max_delay=3 * WORKERS),
}
ADAM: dict[str, Make] = {  # with AdamW inside, its state kept at the worker
    "dude adamw": lambda lr, times, k: dd.DuDe(lr),
    **{f"{name} adamw": _outer(name, lr=0.7, inner="AdamW", inner_state="keep") for name in OUTER},
}
FIXED = {"auto default": 0.6}  # the only step of an entry
LABELS = {name: method.title for name, method in dd.ALGORITHMS.items()} | {
    "auto default": "AutoDuDe, default",
    "dude c=3": "DuDe, c = 3",
    "fedbuff m=3": "FedBuff, buffer 3",
    "malenia S=20": "Malenia, S = 20",
    "aced 30": "ACED, delay 30",
}
LABELS |= {name: f"{LABELS[name.removesuffix(' adamw')]}, AdamW inside" for name in ADAM}
FAMILIES = {
    "in the paper, and sIAG": ("dude", "vanilla", "sync", "fedbuff", "mifa", "uniform", "shuffled", "siag"),
    "made for heterogeneous data": ("dude", "rescaled", "malenia", "ringleader", "ca2fl", "aced", "sync_by_speed"),
    "made for homogeneous data": ("dude", "rennala", "ringmaster", "delay_adaptive"),
    "named in the paper's text": ("dude", "generalized", "fedasync", "fedfix", "iag", "sag", "saga"),
    "workers with models of their own": (
        "dude",
        "quafl",
        "favano",
        "scaffold",
        "mimic",
        "area",
        "asofed",
        "defedavg",
        "adpsgd",
    ),
    "momentum at the server": ("dude", "diloco", "delayed_nesterov", "mla", "heloco", "ormo"),
    "corrected or scaled": ("dude", "auto", "adsaga", "dc_asgd", "fadas", "ringmaster_lmo"),
}


def entries(k: int) -> dict[str, Make]:
    """What is compared with k local steps."""
    if k == 1:
        return ENTRIES
    return {name: make for name, make in ENTRIES.items() if name not in EXACT} | ADAM


@dataclass(frozen=True)
class Setting:
    """A problem at a spread of speeds."""

    problem: str
    std: float
    k: int = 1  # gradients of a job
    arrivals: int = ARRIVALS

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.problem}-std{self.std:g}{f'-k{self.k}' if self.k > 1 else ''}"

    @property
    def panel(self) -> tuple[str, float, int]:
        """Its place among the others."""
        return self.problem, self.std, self.k

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.problem}, std = {self.std:g}{f', K = {self.k}' if self.k > 1 else ''}"

    def run(self, entry: str, lr: float, seed: int) -> tuple[dd.Algorithm[Any], dd.Problem]:
        """The method and the problem of a run: local steps are the method's, or the problem's with the method's step.

        AutoDuDe's step is lr / 8 at first; the steps of FADAS and of the LMO are none of plain SGD: the inner one is 2^-4.
        DuDe with AdamW inside takes how far its workers have moved as it is: its step is that of AdamW.
        """
        algorithm, problem = entries(self.k)[entry](lr, self.times(seed), self.k), self.made(seed)
        if self.k == 1 or algorithm.most_steps > 1:
            return algorithm, problem
        inner = {
            "auto": lr / 8,
            "auto default": FIXED["auto default"] / 8,
            "fadas": 2.0**-4,
            "ringmaster_lmo": 2.0**-4,
        }.get(entry, lr)
        optimizer = ("AdamW", "keep") if entry in ADAM else ()
        return algorithm, dd.LocalSteps(problem, self.k, inner, *optimizer)

    def made(self, seed: int) -> dd.Problem:
        """The problem of a seed."""
        return _made(self.problem, seed)

    def speeds(self, seed: int) -> dd.TruncatedNormalSpeeds:
        """The workers' speeds of a seed."""
        return dd.TruncatedNormalSpeeds(WORKERS, std=self.std, seed=seed)

    def times(self, seed: int) -> Times:
        """The workers' times for a minibatch."""
        speeds = self.speeds(seed)
        return tuple(speeds.seconds(worker, 0) for worker in range(WORKERS))

    def horizon(self, seed: int) -> float:
        """The simulated time that every method has."""
        return self.arrivals / sum(1 / time for time in self.times(seed))

    def least(self, seed: int) -> float:
        """The least F there is; for a network that can fit everything, zero."""
        problem = self.made(seed)
        return problem.evaluate(problem.optimum())["objective"] if isinstance(problem, dd.problems.Logistic) else 0.0

    def biased(self, seed: int) -> float:
        """How far above the least F is where vanilla ASGD tends to, the minimum of sum_i F_i / s_i."""
        problem, times = self.made(seed), self.times(seed)
        x = problem.start(seed)
        minimise = torch.optim.LBFGS([x], max_iter=1000, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

        def weighted() -> float:
            parts = [problem.measure(x, worker) for worker in range(WORKERS)]
            x.grad = sum(part["gradient"] / time for part, time in zip(parts, times, strict=True))
            return sum(part["loss"] / time for part, time in zip(parts, times, strict=True))

        minimise.step(weighted)
        return problem.evaluate(x)["objective"] - self.least(seed)


@cache
def _made(name: str, seed: int) -> dd.Problem:
    return PROBLEMS[name].reseeded(seed)


SETTINGS = tuple(Setting(problem, std) for problem in PROBLEMS for std in STDS)
WITH_LOCAL_STEPS = tuple(Setting(problem, STDS[0], k) for problem in PROBLEMS for k in LOCAL_STEPS)

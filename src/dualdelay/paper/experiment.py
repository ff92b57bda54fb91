"""The experiments behind the paper's figures, with a declared choice wherever the paper is silent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..algorithms import MIFA, DuDe, FedBuff, ShuffledASGD, SyncSGD, UniformASGD, VanillaASGD
from ..core import Algorithm, Problem
from ..core.errors import BadInput, nearest, require_positive, require_whole
from ..core.settings import check_settings, whole
from ..problems.network import Network
from ..problems.splits import deal
from ..runs.names import build, call
from ..simulation.speeds import TruncatedNormalSpeeds

# Methods as a person reads them; DuDe that waits for c workers is "dude c=3" in tables and "DuDe, c = 3" in figures.
TITLES = {
    "dude": "DuDe-ASGD",
    "vanilla": "vanilla ASGD",
    "uniform": "uniform ASGD",
    "shuffled": "shuffled ASGD",
    "fedbuff": "FedBuff",
    "mifa": "MIFA",
    "sync": "synchronous SGD",
}


def title(method: str) -> str:
    """The method's name in a figure."""
    name, _, variant = method.partition(" ")
    return TITLES[name] + (f", {variant.replace('=', ' = ')}" if variant else "")


@dataclass(frozen=True)
class Experiment:
    """The runs of a figure: every method, step and seed on panels of (alpha, std).

    All runs of one std and seed have the same speeds and end at the same simulated time, the one in which a fully
    asynchronous method makes ``updates`` updates; those of one seed have the same split, initial weights and minibatches.
    """

    workers: int = whole()
    alphas: tuple[float, ...] = (0.1, 0.5)
    stds: tuple[float, ...] = (1.0, 5.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: tuple[float, ...] = (0.001, 0.005, 0.01)
    wait_for: tuple[int, ...] = (1,)
    methods: tuple[str, ...] = tuple(TITLES)
    updates: int = whole(20_000)
    evaluations: int = whole(25)
    problem: str = "cifar10[minimum=1]"

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("alphas", "stds", "steps"):
            for value in getattr(self, name):
                require_positive(name, value)
        for count in self.wait_for:
            require_whole("wait_for", count, 1, self.workers)
        for name in ("workers", "alpha", "seed"):
            if name in call(self.problem)[1]:
                raise BadInput(f"problem is {self.problem!r}; leave {name} out of it, the experiment sets it for each run.")
        for method in self.methods:
            if method not in TITLES:
                raise BadInput(f"the paper compares no {method!r}; {nearest(method, TITLES)}")
        for name in ("alphas", "stds", "seeds", "steps", "wait_for", "methods"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise BadInput(f"{name} is {list(values)}; expected at least one value, and each only once.")

    @property
    def makers(self) -> dict[str, Callable[..., Algorithm[Any]]]:
        """The methods by name, to be called with a step size; DuDe once for each ``wait_for``.

        One job is one minibatch for all (K = 1 local step). FedBuff's buffer holds a third of the workers. Half of the
        workers are available to MIFA in a round, drawn uniformly; with the fastest, the others would never report.
        """
        makers: dict[str, Callable[..., Algorithm[Any]]] = {
            **{f"dude c={c}" if c > 1 else "dude": partial(DuDe, wait_for=c) for c in self.wait_for},
            "vanilla": VanillaASGD,
            "uniform": UniformASGD,
            "shuffled": ShuffledASGD,
            "fedbuff": partial(FedBuff, buffer=max(1, self.workers // 3)),
            "mifa": partial(MIFA, active=max(1, self.workers // 2)),
            "sync": SyncSGD,
        }
        return {name: maker for name, maker in makers.items() if name.partition(" ")[0] in self.methods}

    def cells(self) -> Iterator[Cell]:
        """All pairs of std and seed."""
        return (Cell(self, std, seed) for seed in self.seeds for std in self.stds)


FIGURES = {
    "figure1": Experiment(10),
    "figure2": Experiment(30, (0.05, 0.1)),
    # what reviewers of the paper asked for: the most heterogeneous data, until accuracy does not rise any more
    "saturation": Experiment(10, (0.1,), (1.0,), updates=100_000, steps=(0.01, 0.02, 0.05), wait_for=(1, 2, 3, 5)),
}


class Key(NamedTuple):
    """What tells the runs of a cell apart."""

    alpha: float
    method: str
    lr: float

    @property
    def name(self) -> str:
        """The run's name in its cell's file."""
        return f"alpha {self.alpha:.15g}, {self.method}, lr {self.lr:.15g}"


@dataclass(frozen=True)
class Cell:
    """The runs of one draw of speeds: one std and one seed."""

    experiment: Experiment
    std: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file, without the ending."""
        return f"std{self.std:g}-seed{self.seed}"

    @property
    def alone(self) -> Experiment:
        """An experiment of this cell and no other."""
        return replace(self.experiment, stds=(self.std,), seeds=(self.seed,))

    @property
    def speeds(self) -> TruncatedNormalSpeeds:
        """The speed model: every worker's time for a minibatch is drawn from TN(1, std)."""
        return TruncatedNormalSpeeds(self.experiment.workers, self.std, self.seed)

    @property
    def times(self) -> list[float]:
        """Every worker's time for a minibatch."""
        return [self.speeds.seconds(worker, 0) for worker in range(self.experiment.workers)]

    @property
    def rate(self) -> float:
        """Updates of a fully asynchronous method in a unit of time."""
        return math.fsum(1 / time for time in self.times)

    @property
    def horizon(self) -> float:
        """The simulated time at which every run ends."""
        return self.experiment.updates / self.rate

    def problem(self, alpha: float) -> Problem:
        """The problem with its data split for this alpha and seed."""
        name, settings = call(self.experiment.problem)
        split = {"workers": self.experiment.workers, "alpha": alpha, "seed": self.seed}
        problem: Problem = build("problem", name, {**settings, **split})
        return problem

    def wanted(self) -> Iterator[Key]:
        """The keys of all runs of the cell."""
        e = self.experiment
        return itertools.starmap(Key, itertools.product(e.alphas, e.makers, e.steps))


def classes(problem: Problem) -> list[list[int]]:
    """How many samples of each class every worker has; empty for a problem without classes."""
    if not isinstance(problem, Network):
        return []
    targets = []
    for shard in problem.shards():
        if shard.pair is None or shard.pair[1].is_floating_point():
            return []
        targets.append(shard.pair[1] if shard.rows is None else shard.pair[1][shard.rows])
    count = 1 + max(int(part.max()) for part in targets)
    return [torch.bincount(part, minlength=count).tolist() for part in targets]


def draws(problem: Problem, alpha: float, seed: int) -> int:
    """How many splits were drawn until every worker had as many samples as the problem asks for."""
    settings, counts = getattr(problem, "settings", {}), classes(problem)
    if not counts or settings.get("split") != "dirichlet" or settings.get("empty") != "resample":
        return 1
    labels = np.repeat(np.arange(len(counts[0])), np.sum(counts, 0))
    sizes = (min(map(len, deal(labels, len(counts), alpha, seed, k))) for k in itertools.count())
    return next(k for k, least in enumerate(sizes, 1) if least >= settings["minimum"])

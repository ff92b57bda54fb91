"""A simulated run, checked and not yet begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core import Algorithm, Problem
from ..core.errors import BadInput, plain_number, require_kind
from ..core.state import State
from ..engine.evaluation import Metric
from ..engine.result import EarlyStop
from ..simulation.clocks import Change, checked_changes
from ..simulation.link import Link
from ..simulation.speeds import SpeedModel
from .names import describe
from .naming import seeded_problem, seeded_speeds
from .optimizer import Maker, Optimizer, make_optimizer
from .setup import Start, configuration, ends, placing, starting_point, suited

_NUMBERS = ("updates", "time", "seed", "checkpoint_every", "keep", "evaluate_every", "evaluate_seconds", "evaluate_samples")


@dataclass
class Plan:
    """The arguments of ``simulate`` that say what is computed, and what follows from them."""

    algorithm: Algorithm[Any]
    problem: Problem
    speeds: SpeedModel
    updates: int | None = None
    time: float | None = None
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int = 3
    start: Start = None
    link: Link | None = None
    changes: Sequence[Change] = ()
    metrics: Mapping[str, Metric] | None = None
    evaluate_every: int | None = None
    evaluate_seconds: float | None = None
    evaluate_samples: int | None = None
    stop: EarlyStop | None = None
    keep_best: str | None = None
    on_nonfinite: str = "retry"
    threads: int | None = 1
    optimizer: Maker = None
    schedule: Maker = None
    device: str | None = None
    precision: str = "float32"
    batch: bool | None = None
    table: str = "full"
    config: dict[str, Any] = field(init=False)
    x: Tensor = field(init=False)
    stepper: Optimizer | None = field(init=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            setattr(self, name, plain_number(getattr(self, name)))
        self.changes = checked_changes(self.changes)
        require_kind("algorithm", self.algorithm, Algorithm, "dd.DuDe(lr=0.05)")
        self.speeds, problem = seeded_speeds(self.speeds, self.seed), seeded_problem(self.problem, self.seed)
        self.problem, place = placing(suited(problem, self.algorithm), self.device, self.precision, self.batch)
        self.stepper = make_optimizer(self.optimizer, self.schedule, self.updates, self.algorithm, self.problem)
        threads = torch.get_num_threads() if self.threads is None else self.threads
        require_kind("link", self.link or Link(), Link, "dd.Link(latency=0.1)")
        pace = {
            "speeds": describe(self.speeds),
            "link": describe(self.link or Link()),
            "changes": [list(change) for change in self.changes],
        }
        n = self.problem.workers
        if not isinstance(getattr(self.speeds, "n", None), int):
            raise BadInput(
                f"{type(self.speeds).__name__} does not say for how many workers it is; give it n, their number."
            )
        if self.speeds.n != n:
            raise BadInput(f"speeds are given for {self.speeds.n} workers, but the problem has {n}; give as many.")
        when = (self.evaluate_every, self.evaluate_seconds, self.evaluate_samples, self.checkpoint_every)
        self.config = configuration(
            *(self.algorithm, self.problem, self.seed, self.metrics, self.stop, self.on_nonfinite, self.keep_best),
            *(self.keep, threads, threads, self.stepper, self.table),
            {**place, **pace, **ends(self.problem, self.speeds, self.updates, self.time, *when)},
        )
        self.x = starting_point(self.problem, self.start, self.seed)

    def require_rules(self, state: State) -> None:
        """A method without a rule for workers that come or go says so now, not when it happens."""
        for kind, worker, _ in self.changes:
            if kind == "left" and type(self.algorithm).leave is Algorithm.leave:
                self.algorithm.leave(state, worker)
            if kind == "joined" and type(self.algorithm).join is Algorithm.join:
                self.algorithm.join(state, worker)

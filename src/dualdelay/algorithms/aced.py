"""ACED: Chang et al., 2025 (arXiv 2511.19066); the rule is from public summaries of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..core.aggregate import AggregateState, aggregate
from ..core.draws import Draws
from ..core.errors import BadInput, require_positive


@dataclass(kw_only=True)
class ACEDState(AggregateState):
    missing: set[int]  # workers whose first gradient the first update waits for
    waiting: list[int]  # workers that wait for it
    versions: list[int]  # where each worker's gradient in the table was taken


@dataclass(frozen=True)
class ACED(Algorithm[ACEDState]):
    """DuDe whose average leaves out gradients that are too old; ACE, of the same paper, is DuDe itself.

    Who is left out does not count, so with a tight limit the slow workers' data are missing from the solution.
    """

    away: ClassVar[str] = "its gradient leaves the average until it reports again"

    max_delay: float | None = None
    """Updates since a gradient's model after which it is left out; None: ten times as many as there are workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_delay is not None and self.max_delay != math.inf:
            require_positive("max_delay", self.max_delay)
            if self.max_delay < 1:
                raise BadInput(
                    f"max_delay is {self.max_delay}; expected 1 or more, which is the delay of the newest gradient."
                )

    def init(self, x: Tensor, n: int, rng: Draws) -> ACEDState:
        return ACEDState(weights=x, n=n, missing=set(range(n)), waiting=[], versions=[0] * n, **aggregate(x, n))

    def step(self, s: ACEDState, a: Arrival) -> Orders:
        assert a.job is not None
        s.take(a.worker, a.value)
        s.versions[a.worker] = a.job.version
        s.missing.discard(a.worker)
        s.waiting.append(a.worker)
        return self._update(s)

    def _update(self, s: ACEDState) -> Orders:
        if s.missing:
            return []
        most = 10 * len(s.present) if self.max_delay is None else self.max_delay
        for worker, version in enumerate(s.versions):
            if s.version + 1 - version > most:
                s.drop(worker)
        if s.n:
            s.descend(s.total, self.lr, over=s.n)
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def leave(self, s: ACEDState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker, held)
        s.missing.discard(worker)
        s.waiting = [other for other in s.waiting if other != worker]
        return self._update(s) if s.waiting else []

    def join(self, s: ACEDState, worker: int) -> Orders:
        s.back(worker)
        return [send(worker)]

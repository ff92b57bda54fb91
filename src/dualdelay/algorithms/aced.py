"""ACED: Chang et al., 2025 (arXiv 2511.19066); the rule is from public summaries of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws
from ..core.errors import BadInput, require_positive


@dataclass(kw_only=True)
class ACEDState(AggregateState):
    missing: set[int]  # workers whose first gradient the first update waits for
    versions: list[int]  # where each worker's gradient in the table was taken
    waiting: list[int] = field(default_factory=list)  # workers that wait for the first update


@dataclass(frozen=True)
class ACED(Algorithm[ACEDState]):
    """DuDe whose average leaves out gradients that are too old; ACE, of the same paper, is DuDe itself.

    A worker that is left out does not count, so with a tight limit the stragglers' data are missing from the solution.
    """

    name, title = "aced", "ACED"
    colour, line, marker = "#EE6677", ":", ">"
    keeps, needs, wastes = "a gradient of each worker", "a limit on delay", "gradients beyond the limit"
    away = "its gradient leaves the average until it reports again"

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
        return ACEDState(x, n, missing=set(range(n)), versions=[0] * n)

    def step(self, s: ACEDState, a: Arrival) -> Orders:
        s.replace(a.worker, a.value)
        s.versions[a.worker] = a.version
        s.missing.discard(a.worker)
        s.waiting.append(a.worker)
        return self._update(s)

    def _update(self, s: ACEDState) -> Orders:
        if s.missing:
            return []
        oldest = 10 * s.n if self.max_delay is None else self.max_delay
        for worker, version in enumerate(s.versions):
            if s.version + 1 - version > oldest:
                s.discard(worker)
        if s.counted:
            s.descend(s.total, self.lr, over=s.counted)
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def leave(self, s: ACEDState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.missing.discard(worker)
        s.waiting = [other for other in s.waiting if other != worker]
        return self._update(s) if s.waiting else []

    def join(self, s: ACEDState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

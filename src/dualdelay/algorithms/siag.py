"""sIAG: Wang, Jin, Wai and Gu, "Linear Speedup of Incremental Aggregated Gradient Methods on Streaming Data", 2023."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import AggregateState, aggregate


@dataclass(frozen=True)
class SIAG(Algorithm[AggregateState]):
    """One worker at a time, in turn, renews its gradient at the current model; the others idle.

    Before the first update every worker reports once.
    """

    def init(self, x: Tensor, n: int, rng: Draws) -> AggregateState:
        state = AggregateState(weights=x, n=n, **aggregate(x, n))
        state.absent, state.n = set(range(n)), 0
        return state

    def first(self, s: AggregateState) -> Orders:
        return [send(worker) for worker in sorted(s.absent)]

    def step(self, s: AggregateState, a: Arrival) -> Orders:
        s.take(a.worker, a.value)
        if s.absent:
            return []
        s.descend(s.total, self.lr / s.n)
        return [send((s.version - 1) % s.n)]

"""sIAG: Wang, Jin, Wai and Gu, "Linear Speedup of Incremental Aggregated Gradient Methods on Streaming Data", 2023."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import AggregateState, aggregate


@dataclass(kw_only=True)
class SIAGState(AggregateState):
    expected: int  # reports still to come before the next update


@dataclass(frozen=True)
class SIAG(Algorithm[SIAGState]):
    """One worker at a time, in turn, renews its gradient at the current model; the others idle.

    Before the first update every worker reports once.
    """

    def init(self, x: Tensor, n: int, rng: Draws) -> SIAGState:
        return SIAGState(weights=x, n=n, expected=n, **aggregate(x, n))

    def step(self, s: SIAGState, a: Arrival) -> Orders:
        s.take(a.worker, a.value)
        s.expected -= 1
        if s.expected:
            return []
        s.descend(s.total, self.lr, over=s.n)
        s.expected = 1
        return [send((s.version - 1) % s.n)]

"""SAGA: Defazio, Bach and Lacoste-Julien, "SAGA: A Fast Incremental Gradient Method With Support for Non-Strongly Convex
Composite Objectives", 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core import Arrival, Orders
from .siag import SIAG, SIAGState


@dataclass(frozen=True)
class SAGA(SIAG):
    """The next worker is drawn uniformly, and its exact gradient replaces the old one with weight 1, not 1/n as in SAG.

    So the direction is unbiased, and noisier. Before the first update every worker reports once.
    """

    exact: ClassVar[bool] = True

    def turn(self, s: SIAGState) -> int:
        return s.present[s.rng.integer(len(s.present), s.version)]

    def step(self, s: SIAGState, a: Arrival) -> Orders:
        if s.version == 0:
            return super().step(s, a)
        assert s.table is not None
        change = a.value - s.table[a.worker].to(a.value)
        s.descend(s.total / len(s.present) + change, self.lr)  # the mean as it was before, zero for who just joined
        s.take(a.worker, a.value)
        s.asked.discard(a.worker)
        return self.ask(s)

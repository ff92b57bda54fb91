"""SAGA: Defazio, Bach and Lacoste-Julien, "SAGA: A Fast Incremental Gradient Method With Support for Non-Strongly Convex
Composite Objectives", 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import Arrival, Orders
from .siag import SIAG, SIAGState


@dataclass(frozen=True)
class SAGA(SIAG):
    """The next worker is drawn uniformly, and its exact gradient replaces the old one with weight 1, not 1/n as in SAG.

    So the direction is unbiased, and noisier. Before the first update every worker reports once.
    """

    name, title = "saga", "SAGA"
    colour, line, marker = "#1B7E57", "5 1", "p"
    keeps, needs, wastes = "a gradient of each worker", "all data in every job", "the time of all workers but one"
    exact = True

    def turn(self, s: SIAGState) -> int:
        return s.present[s.rng.integer(s.n, s.version)]

    def step(self, s: SIAGState, a: Arrival) -> Orders:
        if s.version == 0:
            return super().step(s, a)
        change = a.value - s.last(a.worker)
        s.descend(s.total / s.n + change, self.lr)  # the mean as it was before, zero for a worker that just joined
        s.replace(a.worker, a.value)
        s.asked.discard(a.worker)
        return self.ask(s)

"""SAG: Le Roux, Schmidt and Bach, "A Stochastic Gradient Method with an Exponential Convergence Rate for Finite Training
Sets", 2012.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Orders
from ..core.draws import Draws
from .siag import SIAG, SIAGState


@dataclass(frozen=True)
class SAG(SIAG):
    """IAG whose next worker is drawn uniformly, and which begins with nothing: the mean is over those seen so far."""

    name, title = "sag", "SAG"
    colour, line, marker = "#6A3D9A", "3 1", "h"
    keeps, needs, wastes = "a gradient of each worker", "all data in every job", "the time of all workers but one"
    exact = True

    def init(self, x: Tensor, n: int, rng: Draws) -> SIAGState:
        return SIAGState(x, n, rng=rng, asked=set(), uncounted=set(range(n)))

    def first(self, s: SIAGState) -> Orders:
        return self.ask(s)

    def turn(self, s: SIAGState) -> int:
        return s.present[s.rng.integer(s.n, s.version)]

"""SAG: Le Roux, Schmidt and Bach, "A Stochastic Gradient Method with an Exponential Convergence Rate for Finite Training
Sets", 2012.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Orders
from ..core.aggregate import aggregate
from ..core.draws import Draws
from .siag import SIAG, SIAGState


@dataclass(frozen=True)
class SAG(SIAG):
    """IAG whose next worker is drawn uniformly, and which begins with nothing: the mean is over those seen so far."""

    exact: ClassVar[bool] = True

    def init(self, x: Tensor, n: int, rng: Draws) -> SIAGState:
        nobody = aggregate(x, n) | {"uncounted": set(range(n))}
        return SIAGState(weights=x, n=0, size=n, rng=rng, asked=set(), **nobody)

    def first(self, s: SIAGState) -> Orders:
        return self.ask(s)

    def turn(self, s: SIAGState) -> int:
        return s.present[s.rng.integer(len(s.present), s.version)]

"""MLA, momentum look-ahead: Ajanthan, Ramasinghe, Avraham, Zuo and Long, "Momentum Look-Ahead for Asynchronous Distributed
Low-Communication Training", 2025 (workshop MCDC at ICLR); the rule is that of three public codes, one by HeLoCo's authors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Orders
from ..core.draws import Draws
from ..core.settings import positive
from ..core.state import ShapedState
from .diloco import OuterState, OuterSteps


@dataclass(kw_only=True)
class LookAheadState(OuterState, ShapedState):
    pass


@dataclass(frozen=True)
class MomentumLookAhead(OuterSteps[LookAheadState]):
    """Asynchronous DiLoCo whose model is ahead of itself by the momentum's next step, where a late x - y will be used.

    With m <- gamma m + (1 - gamma) delta and x~ the model without that, x = x~ - lr gamma m is what is kept and sent.
    """

    name, title = "mla", "MLA"
    colour, line, marker = "#3288BD", "2 2", "s"
    keeps, needs = "one vector", "outer and inner steps"

    weight: float | None = positive(1.0)
    """What each x - y is multiplied by; None: 1 / sqrt(n), as in the runs of HeLoCo's authors."""

    def init(self, x: Tensor, n: int, rng: Draws) -> LookAheadState:
        return LookAheadState(x, n, momentum=torch.zeros_like(x), speeds=[0.0] * n)

    def step(self, s: LookAheadState, a: Arrival) -> Orders:
        gamma, g = self.momentum, self.weighted(s, self.corrected(s, a.value))
        s.momentum = gamma * s.momentum + (1 - gamma) * g  # m <- gamma m + (1 - gamma) delta
        s.descend(gamma * s.momentum + g, self.lr)  # x <- x - eta (gamma m + delta)
        return self.next_job(s, a)

    def corrected(self, s: LookAheadState, delta: Tensor) -> Tensor:
        """What is used of an arrival: here all of it."""
        return delta

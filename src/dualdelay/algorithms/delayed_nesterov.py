"""Delayed Nesterov: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024 (arXiv 2401.09135), Algorithm
3; the rule is that of three public codes, none of them by the authors. With ``dynamic`` it is the paper's DN + DyLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Orders
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.errors import BadInput
from ..core.settings import positive, whole, zero_or_more
from .diloco import OuterState, OuterSteps


@dataclass(kw_only=True)
class DelayedState(OuterState, BufferState):
    pass


@dataclass(frozen=True)
class DelayedNesterov(OuterSteps[DelayedState]):
    """Asynchronous DiLoCo whose momentum moves once in N arrivals, by their mean; in between x moves by the arrivals alone.

    With c above zero some of the momentum's step is made at each arrival, and that much less at the N-th.
    """

    name, title = "delayed_nesterov", "Delayed Nesterov"
    colour, line, marker = "#9E0142", "4 2 1 2", "X"
    keeps, needs = "one vector and one sum", "outer and inner steps"

    weight: float | None = positive(1.0)
    """What each x - y is multiplied by, besides the 1 / N of the rule; None: 1 / sqrt(n)."""
    every: int | None = whole(None)
    """Arrivals after which the momentum moves (the paper's N); None: as many as there are workers."""
    spread: float = zero_or_more(0.0)
    """How much of the momentum is used at each arrival before (the paper's c), 1 / N at most."""

    def init(self, x: Tensor, n: int, rng: Draws) -> DelayedState:
        every = n if self.every is None else self.every
        if self.spread * every > 1 + 1e-9:
            raise BadInput(
                f"spread is {self.spread}; expected 1 / {every} at most, with a momentum that moves every {every}."
            )
        return DelayedState(x, n, momentum=torch.zeros_like(x), speeds=[0.0] * n)

    def step(self, s: DelayedState, a: Arrival) -> Orders:
        every, beta, c = s.n if self.every is None else self.every, self.momentum, self.spread
        g = self.weighted(s, a.value)
        s.add(g)  # S <- S + g
        if s.count >= every:
            s.momentum = beta * s.momentum + (s.total / s.count).to(g.dtype)  # m <- beta m + S / N
            c = 1 - c * every + c
            s.clear()
        s.descend(c * beta * s.momentum + g / every, self.lr)  # x <- x - eps (c beta m + g / N), at the N-th 1 - c N + c
        return self.next_job(s, a)

"""Rennala SGD: Tyurin and Richtarik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods", 2023."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, again, cancel, send
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.state import State, blocks


@dataclass(kw_only=True)
class RennalaState(State):
    total: Tensor  # (d), float64: this round's gradients so far
    count: int = 0


@dataclass(frozen=True)
class RennalaSGD(WaitsForNobody[RennalaState]):
    """Everybody computes at one model until there are enough gradients, whosever they are; what is under way is dropped.

    It is optimal where all workers have the same data. Where they have not, the fast ones' count for more.
    """

    gradients: int | None = None
    """Gradients per update (the paper's S); None: as many as there are workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradients is not None:
            require_whole("gradients", self.gradients, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> RennalaState:
        return RennalaState(weights=x, n=n, total=x.new_zeros(x.shape, dtype=torch.float64))

    def step(self, s: RennalaState, a: Arrival) -> Orders:
        for total, value in blocks(s.total, a.value):
            total.add_(value)
        s.count += 1
        if s.count < (s.n if self.gradients is None else self.gradients):
            return [again(a.worker)]
        s.descend(s.total, self.lr, over=s.count)
        s.total.zero_()
        s.count = 0
        return [order for worker in s.present for order in (cancel(worker), send(worker))]

"""Synchronous SGD: everybody computes at the same model, and everybody waits for the slowest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Orders
from ..draws import Draws
from ..state import State, blocks


@dataclass(kw_only=True)
class SyncState(State):
    total: Tensor  # (d), float64: this round's gradients so far
    count: int = 0


@dataclass(frozen=True)
class SyncSGD(Algorithm[SyncState]):
    """Every update averages one fresh gradient of each worker."""

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncState:
        return SyncState(weights=x, n=n, total=x.new_zeros(x.shape, dtype=torch.float64))

    def step(self, s: SyncState, a: Arrival) -> Orders:
        for total, value in blocks(s.total, a.value):
            total.add_(value)
        s.count += 1
        if s.count < s.n:
            return []
        s.descend(s.total, self.lr, over=s.n)
        s.total.zero_()
        s.count = 0
        return self.first(s)

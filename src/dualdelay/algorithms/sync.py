"""Synchronous SGD: everybody computes at the same model, and everybody waits for the slowest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..core.draws import Draws
from ..core.state import State, blocks


@dataclass(kw_only=True)
class SyncState(State):
    total: Tensor  # (d), float64: this round's gradients so far
    reported: set[int]  # whose gradients these are
    missing: set[int]  # workers that this round waits for


@dataclass(frozen=True)
class SyncSGD(Algorithm[SyncState]):
    """Every update averages one fresh gradient of each worker."""

    away: ClassVar[str] = "the round goes on without it"

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncState:
        total = x.new_zeros(x.shape, dtype=torch.float64)
        return SyncState(weights=x, n=n, total=total, reported=set(), missing=set(range(n)))

    def step(self, s: SyncState, a: Arrival) -> Orders:
        for total, value in blocks(s.total, a.value):
            total.add_(value)
        s.reported.add(a.worker)
        s.missing.discard(a.worker)
        return self._update(s)

    def _update(self, s: SyncState) -> Orders:
        if s.missing or not s.reported:
            return []
        s.descend(s.total, self.lr, over=len(s.reported))
        s.total.zero_()
        s.reported, s.missing = set(), set(s.present)
        return self.first(s)

    def leave(self, s: SyncState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.missing.discard(worker)
        return self._update(s)

    def join(self, s: SyncState, worker: int) -> Orders:
        s.back(worker)
        if worker in s.reported:
            return []  # until the next round
        s.missing.add(worker)
        return [send(worker)]

"""Synchronous SGD: all workers compute at the same model, and all wait for the slowest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.buffers import BufferState
from ..core.draws import Draws


@dataclass(kw_only=True)
class SyncState(BufferState):
    missing: set[int]  # workers that this round waits for
    reported: set[int] = field(default_factory=set)  # workers whose gradients are in the sum


@dataclass(frozen=True)
class SyncSGD(Algorithm[SyncState]):
    """Every update averages one fresh gradient of each worker."""

    name, title = "sync", "synchronous"
    colour, line, marker = "#000000", ":", "X"
    keeps, wastes = "one sum", "the time of the fast workers"
    away = "the round goes on without it"

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncState:
        return SyncState(x, n, missing=set(range(n)))

    def step(self, s: SyncState, a: Arrival) -> Orders:
        s.add(a.value)
        s.reported.add(a.worker)
        s.missing.discard(a.worker)
        return self._update(s)

    def _update(self, s: SyncState) -> Orders:
        if s.missing or not s.reported:
            return []
        s.descend(s.total, self.lr, over=s.count)
        s.clear()
        s.reported, s.missing = set(), set(s.present)
        return self.first(s)

    def leave(self, s: SyncState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.missing.discard(worker)
        return self._update(s)

    def join(self, s: SyncState, worker: int) -> Orders:
        s.join(worker)
        if worker in s.reported:
            return []  # until the next round
        s.missing.add(worker)
        return [send(worker)]

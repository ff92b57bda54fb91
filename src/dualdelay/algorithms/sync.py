"""Synchronous SGD: all workers compute at the same model, and all wait for the slowest, or for as many as are needed.

With ``wait_for`` it is K-sync SGD of Dutta et al., 2018 (arXiv 1803.01113), which is synchronous SGD with n - K backup
workers of Chen et al., 2016 (arXiv 1604.00981): the first K gradients of a round make the update, the others are
cancelled. Dutta et al.'s K-batch-sync is Rennala SGD, K-async is FedBuff with ``wait``, and K-batch-async is FedBuff
without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, cancel, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.settings import whole


@dataclass(kw_only=True)
class SyncState(BufferState):
    missing: set[int]  # workers that this round waits for
    reported: set[int] = field(default_factory=set)  # workers whose gradients are in the sum


@dataclass(frozen=True)
class SyncSGD(Algorithm[SyncState]):
    """Every update averages one fresh gradient of each worker, or of the first of them."""

    name, title = "sync", "synchronous"
    colour, line, marker = "#000000", ":", "X"
    keeps, wastes = "one sum", "the time of the fast workers"
    away = "the round goes on without it"

    wait_for: int | None = whole(None)
    """How many gradients a round waits for; jobs that are late are cancelled. None: one of each worker."""

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncState:
        require_whole(f"wait_for (with {n} workers)", n if self.wait_for is None else self.wait_for, 1, n)
        return SyncState(x, n, missing=set(range(n)))

    def step(self, s: SyncState, a: Arrival) -> Orders:
        s.add(a.value)
        s.reported.add(a.worker)
        s.missing.discard(a.worker)
        return self._update(s)

    def _update(self, s: SyncState) -> Orders:
        if not s.reported or (s.missing and (self.wait_for is None or s.count < self.wait_for)):
            return []
        s.descend(s.total, self.lr, over=s.count)
        s.clear()
        late, s.reported, s.missing = sorted(s.missing), set(), set(s.present)
        return [*map(cancel, late), *self.first(s)]

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

"""Synchronous SGD in which fast workers take more minibatches, and every worker counts the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, again, send
from ..core.buffers import RoundState
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(kw_only=True)
class SyncBySpeedState(RoundState):
    times: list[float]  # each worker's mean seconds per gradient
    measured: list[int]  # gradients that these are the mean of
    shares: list[int]  # gradients that each worker owes in this round


@dataclass(frozen=True)
class SyncBySpeed(Algorithm[SyncBySpeedState]):
    """Every update averages the workers' mean gradients, each of as many as fit into the slowest's time.

    Times are measured: the first round takes one gradient of each worker.
    """

    name, title = "sync_by_speed", "sync. by speed"
    colour, line, marker = "#555555", "1 2", "X"
    keeps = "a sum for each worker"
    needs = "speeds, measured on the way"
    wastes = "what does not fit into the slowest worker's time"
    away = "the round goes on without it and its gradients"

    least: int = whole(1)
    """Gradients that the slowest worker gives in a round."""

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncBySpeedState:
        return SyncBySpeedState(x, n, times=[0.0] * n, measured=[0] * n, shares=[1] * n)

    def step(self, s: SyncBySpeedState, a: Arrival) -> Orders:
        i = a.worker
        s.add(i, a.value)
        s.measured[i] += 1
        s.times[i] += (a.seconds - s.times[i]) / s.measured[i]
        return [again(i)] if s.counts[i] < s.shares[i] else self._update(s)

    def _update(self, s: SyncBySpeedState) -> Orders:
        if not s.n or any(s.counts[i] < s.shares[i] for i in s.present):
            return []
        s.descend_mean(self.lr)
        slowest = max(s.times[i] for i in s.present)
        for i in s.present:
            s.counts[i], s.shares[i] = 0, max(1, int(self.least * slowest / s.times[i] * (1 + 1e-9)))
        return self.first(s)

    def leave(self, s: SyncBySpeedState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.counts[worker] = 0
        return self._update(s)

    def join(self, s: SyncBySpeedState, worker: int) -> Orders:
        s.join(worker)
        s.shares[worker], s.measured[worker] = 1, 0  # it may be another machine now
        return [send(worker)]

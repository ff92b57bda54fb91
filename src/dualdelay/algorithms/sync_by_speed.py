"""Synchronous SGD in which fast workers take more minibatches, and every worker counts the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, again, send
from ..core.aggregate import RoundState, nothing_yet
from ..core.draws import Draws
from ..core.errors import require_whole


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

    away: ClassVar[str] = "the round goes on without it and its gradients"

    least: int = 1
    """Gradients that the slowest worker gives in a round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("least", self.least, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> SyncBySpeedState:
        empty = nothing_yet(x, n)
        return SyncBySpeedState(weights=x, n=n, times=[0.0] * n, measured=[0] * n, shares=[1] * n, **empty)

    def step(self, s: SyncBySpeedState, a: Arrival) -> Orders:
        i = a.worker
        s.add(i, a.value)
        s.measured[i] += 1
        s.times[i] += (a.seconds - s.times[i]) / s.measured[i]
        return [again(i)] if s.counts[i] < s.shares[i] else self._update(s)

    def _update(self, s: SyncBySpeedState) -> Orders:
        if not s.n or any(s.counts[i] < s.shares[i] for i in s.present):
            return []
        s.follow_mean(self.lr)
        slowest = max(s.times[i] for i in s.present)
        for i in s.present:
            s.counts[i], s.shares[i] = 0, max(1, int(self.least * slowest / s.times[i] * (1 + 1e-9)))
        return self.first(s)

    def leave(self, s: SyncBySpeedState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.counts[worker] = 0
        return self._update(s)

    def join(self, s: SyncBySpeedState, worker: int) -> Orders:
        s.back(worker)
        s.shares[worker], s.measured[worker] = 1, 0  # it may be another machine now
        return [send(worker)]

"""FedFix: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
Heterogeneous Clients Updates", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, send, wake
from ..core.draws import Draws
from ..core.errors import require_positive
from ..core.state import State, blocks


@dataclass(kw_only=True)
class FedFixState(State):
    total: Tensor  # (d), float64: the weighted gradients since the last update
    since: list[int]  # at which tick each worker got its model; -1: after the last
    used: set[int]  # workers whose gradients are in the sum
    waiting: list[int]  # those of them that wait for the tick
    ticks: int = 0
    awake: bool = True  # whether the next tick is ordered


@dataclass(frozen=True)
class FedFix(WaitsForNobody[FedFixState]):
    """Updates are made at fixed times from what has arrived, a gradient weighted by the ticks its worker needed.

    A worker that reports every a-th tick counts a times, so that in the long run all count the same.
    """

    period: float = 1.0
    """Seconds between two updates, simulated or real."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("period", self.period)

    def init(self, x: Tensor, n: int, rng: Draws) -> FedFixState:
        total = x.new_zeros(x.shape, dtype=torch.float64)
        return FedFixState(weights=x, n=n, total=total, since=[0] * n, used=set(), waiting=[])

    def first(self, s: FedFixState) -> Orders:
        return [*super().first(s), wake(self.period)]

    def step(self, s: FedFixState, a: Arrival) -> Orders:
        if a.job is None:
            return self._tick(s, a.time)
        since = s.since[a.worker]
        for total, value in blocks(s.total, a.value):
            total.add_(value, alpha=1 if since < 0 else s.ticks + 1 - since)
        s.used.add(a.worker)
        s.waiting.append(a.worker)
        return []

    def _tick(self, s: FedFixState, time: float) -> Orders:
        s.ticks = max(s.ticks + 1, int(time / self.period + 1e-6))  # more than one if nobody was there for a while
        if s.used:
            s.descend(s.total, self.lr, over=len(s.used.union(s.present)))
            s.total.zero_()
        ready, s.waiting, s.used, s.awake = s.waiting, [], set(), s.n > 0
        s.since = [s.ticks if i in ready else s.ticks - 1 if since < 0 else since for i, since in enumerate(s.since)]
        return [*(send(worker) for worker in ready), *([wake((s.ticks + 1) * self.period)] if s.awake else [])]

    def leave(self, s: FedFixState, worker: int, held: Tensor | None = None) -> Orders:
        s.waiting = [other for other in s.waiting if other != worker]
        return super().leave(s, worker)

    def join(self, s: FedFixState, worker: int) -> Orders:
        tick = [] if s.awake else [wake((s.ticks + 1) * self.period)]
        s.since[worker], s.awake = -1, True
        return [*super().join(s, worker), *tick]

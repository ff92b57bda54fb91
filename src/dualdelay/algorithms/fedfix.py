"""FedFix: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
Heterogeneous Clients Updates", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send, wake
from ..draws import Draws
from ..errors import require_positive
from ..state import State, blocks


@dataclass(kw_only=True)
class FedFixState(State):
    total: Tensor  # (d), float64: the weighted gradients since the last update
    since: list[int]  # at which tick each worker got its model
    waiting: list[int]  # workers whose gradients are in the sum
    ticks: int = 0
    awake: bool = True  # whether the next tick is ordered


@dataclass(frozen=True)
class FedFix(Algorithm[FedFixState]):
    """Updates are made at fixed times from what has arrived, a gradient weighted by the ticks its worker needed.

    A worker that reports every a-th tick counts a times, so that in the long run all count the same.
    """

    away: ClassVar[str] = "its job is lost, and the others go on"

    period: float = 1.0
    """Seconds between two updates, simulated or real."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("period", self.period)

    def init(self, x: Tensor, n: int, rng: Draws) -> FedFixState:
        return FedFixState(weights=x, n=n, total=x.new_zeros(x.shape, dtype=torch.float64), since=[0] * n, waiting=[])

    def first(self, s: FedFixState) -> Orders:
        return [*super().first(s), wake(self.period)]

    def step(self, s: FedFixState, a: Arrival) -> Orders:
        if a.job is not None:
            for total, value in blocks(s.total, a.value):
                total.add_(value, alpha=s.ticks + 1 - s.since[a.worker])
            s.waiting.append(a.worker)
            return []
        s.ticks += 1
        s.awake = s.n > 0
        if s.waiting:
            s.descend(s.total, self.lr, over=max(s.n, 1))
            s.total.zero_()
        ready, s.waiting = [worker for worker in s.waiting if worker not in s.absent], []
        for worker in ready:
            s.since[worker] = s.ticks
        return [*(send(worker) for worker in ready), *([wake((s.ticks + 1) * self.period)] if s.awake else [])]

    def leave(self, s: FedFixState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        return []

    def join(self, s: FedFixState, worker: int) -> Orders:
        s.back(worker)
        s.since[worker] = s.ticks
        orders = [send(worker)] if s.awake else [send(worker), wake((s.ticks + 1) * self.period)]
        s.awake = True
        return orders

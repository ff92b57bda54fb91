"""FedFix: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
Heterogeneous Clients Updates", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Orders, send, wake
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.settings import positive


@dataclass(kw_only=True)
class FedFixState(BufferState):
    sent: list[int]  # the tick at which each worker was sent its model
    joined: set[int] = field(default_factory=set)  # workers that were sent theirs between two ticks
    reported: set[int] = field(default_factory=set)  # workers whose gradients are in the sum
    waiting: list[int] = field(default_factory=list)  # those of them that are present and wait for the tick
    tick: int = 0  # the last one
    ticking: bool = True  # whether the next one is ordered


@dataclass(frozen=True)
class FedFix(IndependentWorkers[FedFixState]):
    """Updates are made at fixed times from what has arrived, a gradient weighted by the ticks its worker needed.

    A worker that reports every a-th tick counts a times, so that in the long run all count the same.
    """

    name, title = "fedfix", "FedFix"
    colour, line, marker = "#004488", "-.", "P"
    keeps, needs, wastes = "one sum", "a period that fits the speeds", "the time to the next tick"

    period: float = positive(1.0)
    """Seconds between two updates, simulated or real."""

    def init(self, x: Tensor, n: int, rng: Draws) -> FedFixState:
        return FedFixState(x, n, sent=[0] * n)

    def first(self, s: FedFixState) -> Orders:
        return [*super().first(s), wake(self.period)]

    def step(self, s: FedFixState, a: Arrival) -> Orders:
        ticks = 1 if a.worker in s.joined else s.tick + 1 - s.sent[a.worker]  # the paper's ceil(s_i / period)
        s.add(a.value, weight=ticks)
        s.reported.add(a.worker)
        s.waiting.append(a.worker)
        return []

    def on_wake(self, s: FedFixState, time: float) -> Orders:
        s.tick = max(s.tick + 1, int(time / self.period + 1e-6))  # more than one later if all workers were absent
        if s.reported:
            s.descend(s.total, self.lr, over=len(s.reported.union(s.present)))
            s.clear()
        s.sent = [s.tick - 1 if worker in s.joined else sent for worker, sent in enumerate(s.sent)]
        for worker in s.waiting:
            s.sent[worker] = s.tick
        ready, s.waiting, s.reported, s.joined, s.ticking = s.waiting, [], set(), set(), s.n > 0
        return [*(send(worker) for worker in ready), *(self._next_tick(s) if s.ticking else [])]

    def _next_tick(self, s: FedFixState) -> Orders:
        return [wake((s.tick + 1) * self.period)]

    def leave(self, s: FedFixState, worker: int, held: Memory | None = None) -> Orders:
        s.waiting = [other for other in s.waiting if other != worker]
        return super().leave(s, worker)

    def join(self, s: FedFixState, worker: int) -> Orders:
        s.joined.add(worker)
        tick, s.ticking = [] if s.ticking else self._next_tick(s), True
        return [*super().join(s, worker), *tick]

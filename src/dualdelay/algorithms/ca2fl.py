"""CA2FL: Wang, Cao, Wu, Chen and Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
Update Calibration", 2023.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(kw_only=True)
class CA2FLState(AggregateState):  # its table is the cache
    frozen: Tensor  # (d), float64: the cache's sum as it was at the last update
    count: int = 0  # arrivals since then
    before: dict[int, Tensor] = field(default_factory=dict)  # of workers that have reported since then: what was cached


@dataclass(frozen=True)
class CA2FL(Algorithm[CA2FLState]):
    """FedBuff with a memory: an update follows the mean of all workers' last gradients, corrected by the buffer's changes.

    With H the sum of the cache at the last update and T the sum now, that is H / n + (T - H) / buffer: T - H is what the
    buffer's gradients add up to, each less the one before it of the same worker. A worker not heard yet counts with zero.
    A worker that reports twice in one buffer is counted twice in its size, and its second gradient is taken less its first,
    so that its last one less the cached one is left of both; the paper's sets of workers do not say, public code does this.
    """

    name, title = "ca2fl", "CA2FL"
    colour, line, marker = "#33A9D0", "3 1", "<"
    keeps, needs = "a gradient of each worker and one sum", "buffer"
    away = "its gradient leaves the cache until it reports again"
    waits = False

    buffer: int = whole(10)
    """Arrivals per update."""

    def init(self, x: Tensor, n: int, rng: Draws) -> CA2FLState:
        return CA2FLState(x, n, frozen=x.new_zeros(x.shape, dtype=torch.float64))

    def step(self, s: CA2FLState, a: Arrival) -> Orders:
        s.before.setdefault(a.worker, s.row(a.worker))
        s.replace(a.worker, a.value)
        s.count += 1
        if s.count == self.buffer:
            s.descend(s.frozen / s.counted + (s.total - s.frozen) / self.buffer, self.lr)
            s.frozen.copy_(s.total)
            s.count, s.before = 0, {}
        return [send(a.worker)]

    def leave(self, s: CA2FLState, worker: int, held: Memory | None = None) -> Orders:
        s.frozen -= s.before.pop(worker, s.row(worker)).to(s.frozen.device)
        s.leave(worker)
        return []

    def join(self, s: CA2FLState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

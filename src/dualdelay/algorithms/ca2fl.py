"""CA2FL: Wang, Cao, Wu, Chen and Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
Update Calibration", 2023.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..core.aggregate import AggregateState, aggregate
from ..core.draws import Draws
from ..core.errors import require_whole


@dataclass(kw_only=True)
class CA2FLState(AggregateState):
    frozen: Tensor  # (d), float64: the sum as it was at the last update
    count: int = 0  # arrivals since then
    before: dict[int, Tensor]  # what those who have reported since then had in the cache


@dataclass(frozen=True)
class CA2FL(Algorithm[CA2FLState]):
    """FedBuff with a memory: an update follows the mean of all workers' last gradients, corrected by the buffer's changes.

    With H the sum of the cache at the last update and T the sum now, that is H / n + (T - H) / buffer: T - H is what the
    buffer's gradients add up to, each less the one before it of the same worker. A worker not heard yet counts with zero.
    """

    waits: ClassVar[bool] = False
    away: ClassVar[str] = "its gradient leaves the cache until it reports again"

    buffer: int = 10
    """Arrivals per update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("buffer", self.buffer, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> CA2FLState:
        fields = aggregate(x, n)
        return CA2FLState(weights=x, n=n, frozen=fields["total"].clone(), before={}, **fields)

    def step(self, s: CA2FLState, a: Arrival) -> Orders:
        assert s.table is not None
        s.before.setdefault(a.worker, s.table[a.worker])
        s.take(a.worker, a.value)
        s.count += 1
        if s.count == self.buffer:
            s.descend(s.frozen / s.n + (s.total - s.frozen) / self.buffer, self.lr)
            s.frozen.copy_(s.total)
            s.count, s.before = 0, {}
        return [send(a.worker)]

    def leave(self, s: CA2FLState, worker: int, held: Tensor | None = None) -> Orders:
        assert s.table is not None
        s.frozen -= s.before.pop(worker, s.table[worker]).to(s.frozen.device)
        s.gone(worker)
        return []

    def join(self, s: CA2FLState, worker: int) -> Orders:
        s.back(worker)
        return [send(worker)]

"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, send
from ..core.draws import Draws
from ..core.errors import BadInput, require_positive, require_whole
from ..core.state import State, blocks


@dataclass(kw_only=True)
class FedBuffState(State):
    total: Tensor  # (d), float64: the buffer's weighted sum
    count: int = 0  # arrivals in the buffer
    waiting: list[int]  # workers that idle until the next update


@dataclass(frozen=True)
class FedBuff(WaitsForNobody[FedBuffState]):
    """An update is made from every ``buffer`` arrivals; fast workers fill it more often."""

    buffer: int = 10
    """Arrivals per update."""
    wait: bool = False
    """Whether a worker idles until the update it is part of, or goes on at once with the current model."""
    staleness: float | None = None
    """Weight an arrival by (1 + staleness) to the power of minus this; the FedBuff paper uses 0.5. None: weight 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("buffer", self.buffer, 1)
        if self.staleness is not None:
            require_positive("staleness", self.staleness)

    def init(self, x: Tensor, n: int, rng: Draws) -> FedBuffState:
        if self.wait and self.buffer > n:
            raise BadInput(f"buffer is {self.buffer} with wait=True and {n} workers: it could never fill; use {n} at most.")
        return FedBuffState(weights=x, n=n, total=x.new_zeros(x.shape, dtype=torch.float64), waiting=[])

    def step(self, s: FedBuffState, a: Arrival) -> Orders:
        assert a.job is not None
        weight = 1.0 if self.staleness is None else (1.0 + s.version - a.job.version) ** -self.staleness
        for total, value in blocks(s.total, a.value):
            total.add_(value, alpha=weight)
        s.count += 1
        s.waiting.append(a.worker)
        return self._update(s)

    def _update(self, s: FedBuffState) -> Orders:
        if s.count >= (min(self.buffer, s.n) if self.wait else self.buffer):
            s.descend(s.total, self.lr, over=s.count)  # divided by the number of arrivals, not by the sum of weights
            s.total.zero_()
            s.count = 0
        elif self.wait:
            return []
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def leave(self, s: FedBuffState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.waiting = [other for other in s.waiting if other != worker]
        return self._update(s) if s.waiting else []

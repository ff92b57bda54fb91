"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)``. With one gradient in a job it is K-batch-async
SGD of Dutta et al., 2018 (arXiv 1803.01113), with K = ``buffer``, and with ``wait`` their K-async SGD, in which K
different workers wait for the update that they are part of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Orders, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.errors import BadInput
from ..core.settings import positive, whole


@dataclass(kw_only=True)
class FedBuffState(BufferState):
    waiting: list[int] = field(default_factory=list)  # workers that idle until the next update


@dataclass(frozen=True)
class FedBuff(IndependentWorkers[FedBuffState]):
    """An update is made from every ``buffer`` arrivals; fast workers fill it more often."""

    name, title = "fedbuff", "FedBuff"
    colour, line, marker = "#009E73", "-.", "D"
    keeps, needs = "one sum", "buffer"

    buffer: int = whole(10)
    """Arrivals per update."""
    wait: bool = False
    """Whether a worker idles until the update it is part of, or goes on at once with the current model."""
    staleness: float | None = positive(None)
    """Weight an arrival by (1 + staleness) to the power of minus this; the FedBuff paper uses 0.5. None: weight 1."""

    def init(self, x: Tensor, n: int, rng: Draws) -> FedBuffState:
        if self.wait and self.buffer > n:
            raise BadInput(f"buffer is {self.buffer} with wait=True and {n} workers: it could never fill; use {n} at most.")
        return FedBuffState(x, n)

    def step(self, s: FedBuffState, a: Arrival) -> Orders:
        s.add(a.value, 1.0 if self.staleness is None else (1.0 + s.version - a.version) ** -self.staleness)
        s.waiting.append(a.worker)
        return self._update(s)

    def _update(self, s: FedBuffState) -> Orders:
        if s.count >= (min(self.buffer, s.n) if self.wait else self.buffer):
            s.descend(s.total, self.lr, over=s.count)  # divided by the number of arrivals, not by the sum of weights
            s.clear()
        elif self.wait:
            return []
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def leave(self, s: FedBuffState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.waiting = [other for other in s.waiting if other != worker]
        return self._update(s) if s.waiting else []

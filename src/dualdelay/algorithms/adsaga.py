"""ADSAGA: Glasgow and Wootters, "Asynchronous Distributed Optimization with Stochastic Delays", 2020 (arXiv 2009.10717);
an adaptation from its abstract, since the paper's text was not available.

There a machine draws one of its samples for each job, and the table has a gradient of each sample. Here it has one of
each worker, that of its last minibatch, as SAGA's in this package; all workers compute at all times, each at the model
that it was sent last.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws


@dataclass(frozen=True)
class ADSAGA(IndependentWorkers[AggregateState]):
    """SAGA with all workers at once: each arrival steps along the mean of the table and, with weight 1, its own news.

    A worker that has not been heard counts with zero, so the first steps are longer than the gradient.
    """

    name, title = "adsaga", "ADSAGA"
    colour, line, marker = "#66A61E", "5 1", "p"
    keeps = "a gradient of each worker"
    away = "its gradient leaves the table until it reports again"

    def init(self, x: Tensor, n: int, rng: Draws) -> AggregateState:
        return AggregateState(x, n)

    def step(self, s: AggregateState, a: Arrival) -> Orders:
        change = a.value - s.last(a.worker)
        s.descend(s.total / s.n + change, self.lr)  # the mean as it was before
        s.replace(a.worker, a.value)
        return [send(a.worker)]

    def leave(self, s: AggregateState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        return []

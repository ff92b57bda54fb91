"""Uniform ASGD, asynchronous SGD with random assignment: Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..core.draws import Draws
from ..core.state import State


@dataclass(kw_only=True)
class QueueState(State):
    rng: Draws
    jobs: list[int]  # how many each worker has
    flying: int  # how many that is in all
    drawn: int = 0  # workers drawn so far
    order: list[int]  # who is drawn next, last first, where that is decided ahead


@dataclass(frozen=True)
class UniformASGD(Algorithm[QueueState]):
    """The new model goes to a worker drawn uniformly, busy or not, and waits in its queue.

    Each worker gets the same share of the jobs, so the slowest bounds the rate of updates by n / s_max.
    """

    away: ClassVar[str] = "its jobs are given to others, but for one: there are as many jobs as workers"

    def init(self, x: Tensor, n: int, rng: Draws) -> QueueState:
        return QueueState(weights=x, n=n, rng=rng, jobs=[1] * n, flying=n, order=[])

    def draw(self, s: QueueState) -> int:
        """Who gets the next job."""
        return s.present[s.rng.integer(s.n, s.drawn)]

    def step(self, s: QueueState, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        return self.refill(s, a.worker)

    def refill(self, s: QueueState, worker: int, lost: int = 1) -> Orders:
        """So many of a worker's jobs are no more: see to it that there are as many jobs as workers."""
        s.jobs[worker] -= lost
        s.flying -= lost
        orders = []
        while s.flying < s.n:
            s.drawn += 1
            chosen = self.draw(s)
            s.jobs[chosen] += 1
            s.flying += 1
            orders.append(send(chosen))
        return orders

    def leave(self, s: QueueState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.order = [other for other in s.order if other != worker]
        return self.refill(s, worker, s.jobs[worker])

    def join(self, s: QueueState, worker: int) -> Orders:
        s.back(worker)
        return self.refill(s, worker, 0)

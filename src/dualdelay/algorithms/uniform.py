"""Uniform ASGD, asynchronous SGD with random assignment: Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import State


@dataclass(kw_only=True)
class QueueState(State):
    rng: Draws
    jobs: list[int]  # how many each worker has
    drawn: int = 0  # workers drawn so far
    order: list[int]  # who is drawn next, last first, where that is decided ahead


@dataclass(frozen=True)
class UniformASGD(Algorithm[QueueState]):
    """The new model goes to a worker drawn uniformly, busy or not, and waits in its queue.

    Each worker gets the same share of the jobs, so the slowest bounds the rate of updates by n / s_max.
    """

    away: ClassVar[str] = "its jobs are given to others, but for one: there are as many jobs as workers"

    def init(self, x: Tensor, n: int, rng: Draws) -> QueueState:
        return QueueState(weights=x, n=n, rng=rng, jobs=[1] * n, order=[])

    def draw(self, s: QueueState) -> int:
        """Who gets the next job."""
        return s.present[s.rng.integer(s.n, s.drawn)]

    def step(self, s: QueueState, a: Arrival) -> Orders:
        s.jobs[a.worker] -= 1
        s.descend(a.value, self.lr)
        return self._fill(s)

    def _fill(self, s: QueueState) -> Orders:
        orders = []
        while sum(s.jobs) < s.n:
            s.drawn += 1
            worker = self.draw(s)
            s.jobs[worker] += 1
            orders.append(send(worker))
        return orders

    def leave(self, s: QueueState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.jobs[worker] = 0
        s.order = [other for other in s.order if other != worker]
        return self._fill(s)

    def join(self, s: QueueState, worker: int) -> Orders:
        s.back(worker)
        return self._fill(s)

"""Uniform ASGD, asynchronous SGD with random assignment: Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, State, send
from ..core.draws import Draws


@dataclass(kw_only=True)
class QueueState(State):
    rng: Draws
    queued: list[int]  # how many jobs each worker has
    in_flight: int  # how many that is in all
    drawn: int = 0  # workers drawn so far
    order: list[int] = field(default_factory=list)  # who is drawn next, last first, where that is decided ahead


@dataclass(frozen=True)
class UniformASGD(Algorithm[QueueState]):
    """The new model goes to a worker drawn uniformly, busy or not, and waits in its queue.

    Each worker gets the same share of the jobs, so the slowest bounds the rate of updates by n / s_max.
    """

    name, title = "uniform", "Uniform ASGD"
    colour, line, marker = "#E69F00", "5 1 1 1", "^"
    keeps, wastes = "models that wait", "the time of workers without a job"
    away = "its jobs are given to others, but for one: there are as many jobs as workers"

    def init(self, x: Tensor, n: int, rng: Draws) -> QueueState:
        return QueueState(x, n, rng=rng, queued=[1] * n, in_flight=n)

    def draw(self, s: QueueState) -> int:
        """Who gets the next job."""
        return s.present[s.rng.integer(s.n, s.drawn)]

    def step(self, s: QueueState, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        return self.refill(s, a.worker)

    def refill(self, s: QueueState, worker: int, ended: int = 1) -> Orders:
        """So many jobs of a worker have ended: give out new ones until there are as many jobs as workers."""
        s.queued[worker] -= ended
        s.in_flight -= ended
        orders: Orders = []
        while s.in_flight < s.n:
            s.drawn += 1
            chosen = self.draw(s)
            s.queued[chosen] += 1
            s.in_flight += 1
            orders.append(send(chosen))
        return orders

    def leave(self, s: QueueState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.order = [other for other in s.order if other != worker]
        return self.refill(s, worker, s.queued[worker])

    def join(self, s: QueueState, worker: int) -> Orders:
        s.join(worker)
        return self.refill(s, worker, 0)

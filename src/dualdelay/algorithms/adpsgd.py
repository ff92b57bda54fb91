"""AD-PSGD: Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", 2017 (arXiv
1710.06952); the rule is that of a public implementation by others and of restatements of its Algorithm 1.

It has no server. Here the server is a relay that keeps each worker's model: it sends worker i its own, and averages two
models as the two workers would, atomically, so that no graph can lock up. A job is one model down and one gradient up,
the bytes of what a worker exchanges with its neighbour, one model each way. ``s.x`` is the mean of the models, which no
worker knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Orders, State, send
from ..core.draws import Draws


@dataclass(kw_only=True)
class ADPSGDState(State):
    rng: Draws
    models: list[Tensor]  # n of (d): the workers' own


@dataclass(frozen=True)
class ADPSGD(IndependentWorkers[ADPSGDState]):
    """Each worker has a model of its own: it averages it with that of a neighbour, then takes off the gradient.

    The gradient is of the worker's model as it was when the job began; others may have averaged with it since.
    """

    name, title = "adpsgd", "AD-PSGD"
    colour, line, marker = "#1F4E79", "1 2", "8"
    keeps, needs = "a model of each worker", "a graph"
    away = "its model leaves the mean, and it begins anew at the mean of the others"
    own_step = "each worker's model makes steps of its own"

    graph: Literal["complete", "ring"] = "complete"
    """Whom a worker averages with: any of the others, or one of its two neighbours on a ring, drawn uniformly."""

    def init(self, x: Tensor, n: int, rng: Draws) -> ADPSGDState:
        return ADPSGDState(x, n, rng=rng, models=[x] * n)

    def model(self, s: ADPSGDState, worker: int) -> Tensor:
        return s.models[worker]

    def neighbours(self, s: ADPSGDState, worker: int) -> list[int]:
        """Those of the workers present that a worker may average with."""
        present = list(s.present)
        if self.graph == "complete" or len(present) < 3:
            return [other for other in present if other != worker]
        place = present.index(worker)
        return [present[place - 1], present[(place + 1) % len(present)]]

    def step(self, s: ADPSGDState, a: Arrival) -> Orders:
        i, others = a.worker, self.neighbours(s, a.worker)
        if others:
            j = others[s.rng.integer(len(others), s.version)]
            s.models[i] = s.models[j] = (s.models[i] + s.models[j]) / 2  # x_i, x_j <- (x_i + x_j) / 2
        s.models[i] = s.models[i] - self.lr * a.value  # then x_i <- x_i - lr g, with g from before the average
        s.descend(a.value, self.lr, over=s.n)
        return [send(i)]

    def leave(self, s: ADPSGDState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        if s.n and s.version:
            s.descend(s.models[worker] - s.x, 1.0, over=s.n)  # the mean of the others' models
        return []

    def join(self, s: ADPSGDState, worker: int) -> Orders:
        s.models[worker] = s.x
        return super().join(s, worker)

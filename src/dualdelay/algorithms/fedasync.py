"""FedAsync: Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019 (arXiv 1903.03934)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Message, Orders, RunningJob, State, send
from ..core.draws import Draws
from ..core.settings import positive, whole, zero_or_more


@dataclass(kw_only=True)
class FedAsyncState(State):
    models: list[Tensor]  # n of (d): what each worker was sent last


@dataclass(frozen=True)
class FedAsync(IndependentWorkers[FedAsyncState]):
    """The server mixes the worker's model x_u - lr G into its own: x <- (1 - alpha_t) x + alpha_t (x_u - lr G).

    alpha_t falls with the delay t - u, counted as in the paper, from 1 for a gradient at the newest model. With several
    local steps G is the sum of their gradients, those of a proximal term included.
    """

    name, title = "fedasync", "FedAsync"
    colour, line, marker = "#BB5566", "--", "v"
    keeps, needs = "the model each worker has", "the weight alpha"
    ahead = True

    alpha: float = positive(0.6, high=1)
    """The weight of a worker's model before its delay is looked at."""
    mixing: Literal["constant", "polynomial", "hinge"] = "constant"
    """How the weight falls with the delay: not at all, as (delay + 1)^-a, or as 1 / (a (delay - b) + 1) beyond b."""
    a: float | None = positive(None)
    """How steeply; None: 0.5 for polynomial, 10 for hinge."""
    b: float = positive(4.0)
    """The delay up to which hinge leaves the weight as it is."""
    steps: int = whole(1)
    """Local steps in a job, each of size lr."""
    proximal: float = zero_or_more(0.0)
    """The weight rho of (rho / 2) ||y - x_u||^2 in the local loss, 0.005 in public code; one local step has none of it."""

    def init(self, x: Tensor, n: int, rng: Draws) -> FedAsyncState:
        return FedAsyncState(x, n, models=[x] * n)

    def step(self, s: FedAsyncState, a: Arrival) -> Orders:
        alpha = self.alpha * self._mixing(s.version + 1 - a.version)
        s.descend((s.weights - s.models[a.worker]) / self.lr + a.value, self.lr * alpha)
        s.models[a.worker] = s.x
        return [send(a.worker)]

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        y, pull = model, job.gradient(model)  # at y = x_u the proximal term has no slope
        total = pull
        for _ in job:
            y = y - (self.lr * pull).to(y.dtype)
            pull = job.gradient(y) + self.proximal * (y - model)
            total = total + pull
        return total, memory

    def _mixing(self, delay: int) -> float:
        if self.mixing == "polynomial":
            return float((delay + 1) ** -(0.5 if self.a is None else self.a))
        steep = 10.0 if self.a is None else self.a
        return 1.0 if self.mixing == "constant" or delay <= self.b else 1 / (steep * (delay - self.b) + 1)

    def join(self, s: FedAsyncState, worker: int) -> Orders:
        s.models[worker] = s.x
        return super().join(s, worker)

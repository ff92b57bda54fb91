"""DC-ASGD, delay-compensated ASGD: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017
(arXiv 1609.08326); the rule is that of Microsoft's updater for the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws
from ..core.settings import below_one, positive, zero_or_more


@dataclass(kw_only=True)
class DCASGDState(State):
    models: list[Tensor]  # n of (d): what each worker was sent last
    squares: list[Tensor]  # one of (d) or n of them: running means of squared gradients; none without ``adaptive``


@dataclass(frozen=True)
class DCASGD(IndependentWorkers[DCASGDState]):
    """A gradient that is late is corrected by how far the model has moved meanwhile: G + lambda G * G * (x - x_then).

    G * G stands in for the Hessian, number by number. A fresh gradient stays as it is.
    """

    name, title = "dc_asgd", "DC-ASGD"
    colour, line, marker = "#CC6677", "6 1 2 1", "<"
    keeps, needs = "the model each worker has", "lambda"

    strength: float | None = zero_or_more(None)
    """How much is corrected (the paper's lambda, or lambda_0); None: 0.04, or 2 if it is adaptive."""
    adaptive: bool = False
    """Whether lambda is divided by the root of a running mean of squared gradients, number by number."""
    decay: float = below_one(0.95)
    """How much of that mean is kept at an arrival (the paper's m)."""
    eps: float = positive(1e-7)
    """Added to the mean below the root."""
    own_means: bool = False
    """Whether every worker has a mean of its own, as in Microsoft's file, or all have one, as the paper writes it."""

    def init(self, x: Tensor, n: int, rng: Draws) -> DCASGDState:
        means = [torch.zeros_like(x) for _ in range(n if self.own_means else 1)] if self.adaptive else []
        return DCASGDState(x, n, models=[x] * n, squares=means)

    def step(self, s: DCASGDState, a: Arrival) -> Orders:
        g, strength = a.value, self.strength
        if strength is None:
            strength = 2.0 if self.adaptive else 0.04
        correction = strength * g * g * (s.weights - s.models[a.worker])  # lambda g g (x - bak_i)
        if self.adaptive:
            mine = a.worker if self.own_means else 0
            s.squares[mine] = self.decay * s.squares[mine] + (1 - self.decay) * g * g  # MS <- m MS + (1 - m) g g
            correction = correction / (s.squares[mine] + self.eps).sqrt()  # lambda = lambda_0 / sqrt(MS + eps)
        s.descend(g + correction, self.lr)
        s.models[a.worker] = s.x  # bak_i <- x, the new one, which is the reply
        return [send(a.worker)]

    def join(self, s: DCASGDState, worker: int) -> Orders:
        s.models[worker] = s.x
        return super().join(s, worker)

"""Asynchronous DiLoCo: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024 (arXiv 2401.09135), as its
baseline; the rule is that of the authors' notebook. DiLoCo is Douillard et al., 2023 (arXiv 2311.08105).

There a worker may wait half a second for others before it gets the next model, and takes the data that were visited least;
here it gets the model at once, and its data are its own. The optimisers' state: the notebook resets it, DiLoCo keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws
from ..core.local_steps import LocalTraining
from ..core.settings import below_one, positive


@dataclass(kw_only=True)
class OuterState(State):
    momentum: Tensor  # (d)
    speeds: list[float]  # of each worker, in local steps a second, as last measured; 0: not yet


T = TypeVar("T", bound=OuterState)


@dataclass(frozen=True)
class OuterSteps(LocalTraining[T], IndependentWorkers[T]):
    """What asynchronous methods of the DiLoCo family share: outer steps with a momentum, along x - y of each job."""

    own_step = "its outer step has a momentum already"

    momentum: float = below_one(0.9)
    """How much of the outer momentum is kept."""
    weight: float | None = positive(None)
    """What each x - y is multiplied by; None: 1 / sqrt(n)."""
    dynamic: bool = False
    """Whether slow workers take fewer local steps (DyLU): the share of ``steps`` that their speed is of the fastest's."""

    def weighted(self, s: T, delta: Tensor) -> Tensor:
        """w delta."""
        return delta * (s.n**-0.5 if self.weight is None else self.weight)

    def next_job(self, s: T, a: Arrival) -> Orders:
        """The sender's next job: H_w = max(1, floor(H v_w / v_max)) local steps, where that is wanted and known."""
        s.speeds[a.worker] = speed = a.steps / a.seconds if a.seconds > 0 else 0.0
        if not self.dynamic or speed == 0:
            return [send(a.worker)]
        share = speed / max(s.speeds[other] for other in s.present)
        return [send(a.worker, steps=max(1, math.floor(self.steps * share + 1e-6)))]  # speeds are rounded


@dataclass(frozen=True)
class AsyncDiLoCo(OuterSteps[OuterState]):
    """Workers take many local steps, and every arrival is an outer step of Nesterov's along how far its worker has moved.

    ``lr`` is the outer step size, ``inner_lr`` that of the local steps. A fast worker's data count for more.
    """

    name, title = "diloco", "async. DiLoCo"
    colour, line, marker = "#5E4FA2", "7 2", "8"
    keeps, needs = "one vector", "outer and inner steps"

    staleness: float | None = positive(None)
    """Weight an arrival also by (1 + staleness) to the power of minus this, 0.5 in the notebook; None: it is not."""

    def init(self, x: Tensor, n: int, rng: Draws) -> OuterState:
        return OuterState(x, n, momentum=torch.zeros_like(x), speeds=[0.0] * n)

    def step(self, s: OuterState, a: Arrival) -> Orders:
        g = self.weighted(s, a.value)
        if self.staleness is not None:
            g = g * (1.0 + s.version - a.version) ** -self.staleness
        s.momentum = self.momentum * s.momentum + g  # m <- beta m + g
        s.descend(self.momentum * s.momentum + g, self.lr)  # x <- x - eta (beta m + g)
        return self.next_job(s, a)

"""Shuffled ASGD: Islamov, Safaryan and Alistarh, "AsGrad", 2024."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import State


@dataclass(kw_only=True)
class ShuffledState(State):
    rng: Draws
    order: list[int]  # who gets the next jobs, first come last


@dataclass(frozen=True)
class ShuffledASGD(Algorithm[ShuffledState]):
    """The new model goes to the next worker of a random order, drawn anew every n jobs, and waits in its queue."""

    def init(self, x: Tensor, n: int, rng: Draws) -> ShuffledState:
        return ShuffledState(weights=x, n=n, rng=rng, order=[])

    def step(self, s: ShuffledState, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        if not s.order:
            s.order = s.rng.permutation(s.n, s.version).tolist()
        return [send(s.order.pop())]

"""Vanilla asynchronous SGD: Nedic, Bertsekas and Borkar, 2001; Agarwal and Duchi, 2011."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import State


@dataclass(frozen=True)
class VanillaASGD(Algorithm[State]):
    """Every arrival is an update of its own, so a fast worker's data count for more."""

    def init(self, x: Tensor, n: int, rng: Draws) -> State:
        return State(weights=x, n=n)

    def step(self, s: State, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        return [send(a.worker)]

    def leave(self, s: State, worker: int, held: Tensor | None = None) -> Orders:
        s.n -= 1
        return []

    def join(self, s: State, worker: int) -> Orders:
        s.n += 1
        return [send(worker)]

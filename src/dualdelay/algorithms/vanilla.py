"""Vanilla asynchronous SGD: Nedic, Bertsekas and Borkar, 2001; Agarwal and Duchi, 2011."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws


@dataclass(frozen=True)
class VanillaASGD(IndependentWorkers[State]):
    """Every arrival is an update of its own, so a fast worker's data count for more."""

    name, title = "vanilla", "vanilla ASGD"
    colour, line, marker = "#D55E00", "--", "s"

    def init(self, x: Tensor, n: int, rng: Draws) -> State:
        return State(x, n)

    def step(self, s: State, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        return [send(a.worker)]

"""Delay-adaptive ASGD: Mishchenko, Bach, Even and Woodworth, 2022; Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws


@dataclass(frozen=True)
class DelayAdaptiveASGD(IndependentWorkers[State]):
    """Vanilla ASGD with smaller steps for older gradients: lr n / max(n, delay).

    Stragglers' gradients are the old ones, so their data count for even less than under vanilla ASGD.
    """

    name, title = "delay_adaptive", "delay-adaptive"
    colour, line, marker = "#999933", ":", "s"

    delay: Literal["tau", "staleness"] = "tau"
    """How delay is counted: "tau", from 1 for a gradient at the newest model, or "staleness", from 0."""

    def init(self, x: Tensor, n: int, rng: Draws) -> State:
        return State(x, n)

    def step(self, s: State, a: Arrival) -> Orders:
        delay = s.version - a.version + (self.delay == "tau")
        s.descend(a.value, self.lr * (s.n / max(s.n, delay)))
        return [send(a.worker)]

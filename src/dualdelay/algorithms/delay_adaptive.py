"""Delay-adaptive ASGD: Mishchenko, Bach, Even and Woodworth, 2022; Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, send
from ..core.draws import Draws
from ..core.errors import require_one_of
from ..core.state import State


@dataclass(frozen=True)
class DelayAdaptiveASGD(WaitsForNobody[State]):
    """Vanilla ASGD with smaller steps for older gradients: lr n / max(n, delay).

    Slow workers are the late ones, so their data count for even less than under vanilla ASGD.
    """

    delay: Literal["tau", "staleness"] = "tau"
    """How delay is counted: "tau", from 1 for a gradient at the newest model, or "staleness", from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("delay", self.delay, ("tau", "staleness"))

    def init(self, x: Tensor, n: int, rng: Draws) -> State:
        return State(weights=x, n=n)

    def step(self, s: State, a: Arrival) -> Orders:
        assert a.job is not None
        delay = s.version - a.job.version + (self.delay == "tau")
        s.descend(a.value, self.lr * (s.n / max(s.n, delay)))
        return [send(a.worker)]

"""Uniform ASGD, asynchronous SGD with random assignment: Koloskova, Stich and Jaggi, 2022."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..state import State


@dataclass(kw_only=True)
class UniformState(State):
    rng: Draws


@dataclass(frozen=True)
class UniformASGD(Algorithm[UniformState]):
    """The new model goes to a worker drawn uniformly, busy or not, and waits in its queue.

    Each worker gets the same share of the jobs, so the slowest bounds the rate of updates by n / s_max.
    """

    def init(self, x: Tensor, n: int, rng: Draws) -> UniformState:
        return UniformState(weights=x, n=n, rng=rng)

    def step(self, s: UniformState, a: Arrival) -> Orders:
        s.descend(a.value, self.lr)
        return [send(s.rng.integer(s.n, s.version))]

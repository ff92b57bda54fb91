"""A variant of DuDe: slow running means of each worker's gradients, and fresh gradients less their worker's mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dualdelay.core import Algorithm, Arrival, Orders, send
from dualdelay.core.aggregate import AggregateState
from dualdelay.core.draws import Draws


@dataclass(kw_only=True)
class CorrectedState(AggregateState):
    """Running means in the table, and their sum."""

    missing: set[int]
    waiting: list[int]
    times: list[float]  # what each worker's last job took, on the way and waiting included
    since: list[float]  # when each worker was given its model
    fresh: Any = None  # (d): the sum of what came since the last update, each less its worker's mean


@dataclass(frozen=True)
class Corrected(Algorithm[CorrectedState]):
    """h_j <- h_j + a (G_j - h_j); x <- x - lr / n (G_j - h_j + mean h). DuDe is a = 1, vanilla ASGD h = 0."""

    wait_for: int = 1
    wait: bool = True
    """Whether those who have reported wait for the update."""
    keep: float = 3.0
    """Over how many of the slowest worker's jobs the means go back."""

    def init(self, x: Tensor, n: int, rng: Draws) -> CorrectedState:
        zeros = {"times": [0.0] * n, "since": [0.0] * n}
        return CorrectedState(x, n, missing=set(range(n)), waiting=[], **zeros)

    def step(self, s: CorrectedState, a: Arrival) -> Orders:
        i, first = a.worker, a.worker in s.missing
        s.times[i] = max(a.time - s.since[i], 1e-12)
        share = 1.0 if first or not self.keep else 1 - math.exp(-s.times[i] / (self.keep * max(s.times)))
        if share == 1.0:
            s.replace(i, a.value)
            change = None
        else:
            held = s.last(i) + share * (a.value - s.last(i))
            s.replace(i, held)
            change = (a.value - held).double()
        if change is not None:
            s.fresh = change if s.fresh is None else s.fresh + change
        s.missing.discard(i)
        s.waiting.append(i)
        if not self.wait and not s.missing and len(s.waiting) < self.wait_for:
            s.since[i] = a.time
            return [send(i)]
        if s.missing or len(s.waiting) < self.wait_for:
            return []
        count = len(s.waiting)
        direction = s.total / s.n if s.fresh is None else s.total / s.n + s.fresh / count
        s.descend(direction, self.lr * self.wait_for / s.n)
        ready, s.waiting, s.fresh = s.waiting, [], None
        if not self.wait and s.version > 1:
            ready = ready[-1:]
        for worker in ready:
            s.since[worker] = a.time
        return [send(worker) for worker in ready]

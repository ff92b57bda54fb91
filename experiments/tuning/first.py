"""The first rule of AutoDuDe, which docs/results/tuning.md calls so: the step is lr over the mean delay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dualdelay.core import Algorithm, Arrival, Orders, send
from dualdelay.core.aggregate import AggregateState
from dualdelay.core.draws import Draws


@dataclass(kw_only=True)
class FirstState(AggregateState):  # its table holds the running means h_i
    """DuDe's, with what is found out."""

    versions: list[int]  # u_i: where each worker's newest gradient was taken
    wait_for: int  # workers per update
    newest: dict[int, Tensor] = field(default_factory=dict)  # G_j of the workers that have reported since, and idle
    round_start: int = 0  # a round lasts until every gradient was taken at this version or later


@dataclass(frozen=True)
class FirstRule(Algorithm[FirstState]):
    """DuDe with a running mean of each worker's gradients, over eight updates, that sets its own step and ``wait_for``.

    An update follows the mean of all h_i plus that of what is new, G_j - h_j, with step lr / delay: the mean delay of the
    newest gradients, kept near eight updates by waiting. It begins as synchronous SGD; after every round, in which each
    worker has reported on a model of that round, it waits for fewer if gradients are much fresher, for more if much older.
    """

    name = "first"

    lr: float = 0.6
    """The step times the mean delay (the paper's eta times tau_avg)."""
    delay: ClassVar[float] = 8.0
    """The mean delay that is kept to, and what the means go back; a step is never larger than with this one."""

    def init(self, x: Tensor, n: int, rng: Draws) -> FirstState:
        return FirstState(x, n, versions=[0] * n, wait_for=n)

    def step(self, s: FirstState, a: Arrival) -> Orders:
        s.newest[a.worker], s.versions[a.worker] = a.value, a.version
        if len(s.newest) < min(s.wait_for, s.counted):
            return []
        t, news = s.version + 1, s.total.new_zeros(s.total.shape)
        for j, gradient in s.newest.items():  # h_j <- h_j + a (G_j - h_j) with a = 1 - exp(-tau_j / 8), at first 1
            share = 1.0 if s.version == 0 else 1 - math.exp((s.versions[j] - t) / self.delay)
            mean = s.last(j).lerp(gradient, share)
            s.replace(j, mean)
            news += gradient - mean
        delay = t - sum(s.versions) / s.n
        if min(s.versions) >= s.round_start:
            s.round_start, s.wait_for = t, self._wait_for(s, delay)
        s.descend(s.total / s.counted + news / len(s.newest), self.lr / max(delay, self.delay))
        ready, s.newest = list(s.newest), {}
        return [send(worker) for worker in ready]

    def _wait_for(self, s: FirstState, delay: float) -> int:
        """How many workers the next round waits for; the mean delay is about in inverse proportion to that."""
        if delay < 0.7 * self.delay:
            return max(1, math.floor(0.7 * s.wait_for))
        return min(s.counted, math.ceil(s.wait_for / 0.7)) if delay > self.delay / 0.7 else s.wait_for

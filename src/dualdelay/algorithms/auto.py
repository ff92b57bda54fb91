"""DuDe that chooses its own step and how many workers it waits for; the rule and its tests are in docs/tuning.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..core.aggregate import AggregateState, aggregate
from ..core.draws import Draws


@dataclass(kw_only=True)
class AutoState(AggregateState):
    newest: dict[int, Tensor]  # the gradients that have come since the last update, whose workers idle
    versions: list[int]  # where each worker's newest gradient was taken
    wait_for: int  # workers per update
    since: int = 0  # the round lasts until everybody's gradient was taken at this version or later


@dataclass(frozen=True)
class AutoDuDe(Algorithm[AutoState]):
    """DuDe with a running mean of each worker's gradients, over eight updates, that sets its own step and ``wait_for``.

    An update follows the mean of all h_i plus that of what is new, G_i - h_i, with step lr / delay: the mean delay of the
    newest gradients, kept near eight updates by waiting. It begins as synchronous SGD; after every round, in which each
    worker has reported on a model of that round, it waits for fewer if gradients are much fresher, for more if much older.
    """

    away: ClassVar[str] = "its gradient leaves the average until it reports again"
    own_step: ClassVar[str] = "it sets its own step for plain SGD, from the delays that it sees"

    lr: float = 0.6
    """The step times the mean delay (the paper's eta times tau_avg); lower it for losses that bend more sharply."""
    delay: ClassVar[float] = 8.0
    """The mean delay that is kept to, and what the means go back; a step is never larger than with this one."""

    def init(self, x: Tensor, n: int, rng: Draws) -> AutoState:
        return AutoState(weights=x, n=n, newest={}, versions=[0] * n, wait_for=n, **aggregate(x, n))

    def step(self, s: AutoState, a: Arrival) -> Orders:
        assert a.job is not None
        s.newest[a.worker], s.versions[a.worker] = a.value, a.job.version
        return self._update(s)

    def _update(self, s: AutoState) -> Orders:
        if len(s.newest) < min(s.wait_for, s.n):
            return []
        assert s.table is not None
        update, new = s.version + 1, torch.zeros_like(s.total)
        for worker, gradient in s.newest.items():
            known = s.version > 0 and worker not in s.uncounted
            share = 1 - math.exp((s.versions[worker] - update) / self.delay) if known else 1.0
            mean = torch.lerp(s.table[worker].to(gradient), gradient, share)  # h_j + a (G_j - h_j)
            s.take(worker, mean)
            new += gradient - mean
        taken = [version for worker, version in enumerate(s.versions) if worker not in s.uncounted]
        delay = update - sum(taken) / len(taken)
        if min(taken) >= s.since:  # the round is over; the mean delay is about in inverse proportion to wait_for
            s.since = update
            if delay < 0.7 * self.delay:
                s.wait_for = max(1, math.floor(0.7 * s.wait_for))
            elif delay > self.delay / 0.7:
                s.wait_for = min(s.n, math.ceil(s.wait_for / 0.7))
        s.descend(s.total / s.n + new / len(s.newest), self.lr / max(delay, self.delay))
        orders, s.newest = [send(worker) for worker in s.newest], {}
        return orders

    def leave(self, s: AutoState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.newest.pop(worker, None)
        return self._update(s) if s.newest else []

    def join(self, s: AutoState, worker: int) -> Orders:
        s.back(worker)
        return [send(worker)]

"""AutoDuDe: DuDe that chooses its own step and how many workers it waits for: docs/results/tuning.md has the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws
from ..core.settings import positive


@dataclass(kw_only=True)
class AutoState(AggregateState):  # its table holds the running means h_i
    versions: list[int]  # u_i: where each worker's newest gradient was taken
    wait_for: int  # workers per update
    newest: dict[int, Tensor] = field(default_factory=dict)  # G_j of the workers that have reported since, and idle
    round_start: int = 0  # a round lasts until every gradient was taken at this version or later


@dataclass(frozen=True)
class AutoDuDe(Algorithm[AutoState]):
    """DuDe with a running mean of each worker's gradients, over eight updates, that sets its own step and ``wait_for``.

    An update follows the mean of all h_i plus that of what is new, G_j - h_j, with step lr / delay: the mean delay of the
    newest gradients, kept near eight updates by waiting. It begins as synchronous SGD; after every round, in which each
    worker has reported on a model of that round, it waits for fewer if gradients are much fresher, for more if much older.
    """

    name, title = "auto", "AutoDuDe"
    colour, line, marker = "#332288", "-", "^"
    keeps, wastes = "a running mean of each worker's gradients", "the time of workers that wait"
    away = "its gradient leaves the average until it reports again"
    own_step = "it sets its own step for plain SGD, from the delays that it sees"

    lr: float = positive(0.6)
    """The step times the mean delay (the paper's eta times tau_avg); lower it for losses that bend more sharply."""
    delay: ClassVar[float] = 8.0
    """The mean delay that is kept to, and what the means go back; a step is never larger than with this one."""

    def init(self, x: Tensor, n: int, rng: Draws) -> AutoState:
        return AutoState(x, n, versions=[0] * n, wait_for=n)

    def step(self, s: AutoState, a: Arrival) -> Orders:
        s.newest[a.worker], s.versions[a.worker] = a.value, a.version
        return self._update(s)

    def _update(self, s: AutoState) -> Orders:
        if len(s.newest) < min(s.wait_for, s.counted):
            return []
        t, news = s.version + 1, torch.zeros_like(s.total)
        for j, gradient in s.newest.items():  # h_j <- h_j + a (G_j - h_j) with a = 1 - exp(-tau_j / 8), at first 1
            first = s.version == 0 or j in s.uncounted
            a = 1.0 if first else 1 - math.exp((s.versions[j] - t) / self.delay)
            mean = torch.lerp(s.last(j), gradient, a)
            s.replace(j, mean)
            news += gradient - mean
        versions = [version for worker, version in enumerate(s.versions) if worker not in s.uncounted]
        delay = t - sum(versions) / len(versions)
        if min(versions) >= s.round_start:
            s.round_start, s.wait_for = t, self._wait_for(s, delay)
        s.descend(s.total / s.counted + news / len(s.newest), self.lr / max(delay, self.delay))
        ready, s.newest = list(s.newest), {}
        return [send(worker) for worker in ready]

    def _wait_for(self, s: AutoState, delay: float) -> int:
        """How many workers the next round waits for; the mean delay is about in inverse proportion to that."""
        if delay < 0.7 * self.delay:
            return max(1, math.floor(0.7 * s.wait_for))
        return min(s.counted, math.ceil(s.wait_for / 0.7)) if delay > self.delay / 0.7 else s.wait_for

    def leave(self, s: AutoState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.newest.pop(worker, None)
        return self._update(s) if s.newest else []

    def join(self, s: AutoState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

"""The first rule before it kept running means: DuDe itself, with the same waiting and the same step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dualdelay.algorithms.dude import DuDe, DuDeState
from dualdelay.core import Arrival, Orders, send
from dualdelay.core.draws import Draws


@dataclass(kw_only=True)
class WaitingState(DuDeState):
    """DuDe's, with what is found out."""

    versions: list[int]  # where each worker's gradient in use was taken
    wait_for: int  # workers per update
    since: int = 0  # the round lasts until everybody's gradient was taken at this version or later


@dataclass(frozen=True)
class WaitingDuDe(DuDe):
    """DuDe with step lr / delay, the mean delay of the gradients in use, which it keeps near eight updates by waiting.

    It begins as synchronous SGD. After every round, in which each worker has reported on a model of that round, it waits
    for fewer workers if gradients are much fresher than eight updates, and for more if they are much older.
    """

    lr: float = 0.6
    """The step times the mean delay (the paper's eta times tau_avg); lower it for losses that bend more sharply."""
    wait_for: int = field(default=1, init=False, repr=False)  # found out
    delay: ClassVar[float] = 8.0
    """The mean delay that is kept to; a step is never larger than with this one."""

    def init(self, x: Tensor, n: int, rng: Draws) -> WaitingState:
        return WaitingState(x, n, missing=super().init(x, n, rng).missing, versions=[0] * n, wait_for=n)

    def step(self, s: DuDeState, a: Arrival) -> Orders:
        assert isinstance(s, WaitingState)
        s.versions[a.worker] = a.version
        return super().step(s, a)

    def _update(self, s: DuDeState) -> Orders:
        assert isinstance(s, WaitingState)
        if s.missing or len(s.waiting) < min(s.wait_for, s.counted):
            return []
        taken = [version for worker, version in enumerate(s.versions) if worker not in s.uncounted]
        delay = s.version + 1 - sum(taken) / len(taken)
        if min(taken) >= s.since:
            self._adapt(s, delay)
        s.descend(s.total, self.lr / max(delay, self.delay), over=s.counted)  # w <- w - eta g~
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def _adapt(self, s: WaitingState, delay: float) -> None:
        """Wait for fewer workers or more; the mean delay is about in inverse proportion to their number."""
        s.since = s.version + 1
        if delay < 0.7 * self.delay:
            s.wait_for = max(1, math.floor(0.7 * s.wait_for))
        elif delay > self.delay / 0.7:
            s.wait_for = min(s.counted, math.ceil(s.wait_for / 0.7))

"""Ways for DuDe to choose its own step that were tried; the best of them became the first rule of AutoDuDe, first.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dualdelay.core import Algorithm, Arrival, Orders, send
from dualdelay.core.aggregate import AggregateState
from dualdelay.core.draws import Draws


@dataclass(kw_only=True)
class TrialState(AggregateState):
    """DuDe's state, and what the rules look at."""

    missing: set[int]
    waiting: list[int]
    versions: list[int]  # where each worker's gradient in use was taken
    begun: list[float]  # when that model was given out
    given: list[float]  # when each worker was given the model it computes at
    times: list[float]  # what each worker's last job took
    longest: float = 0.0  # the running maximum of the delay
    updated: float = -1.0  # when the last update was
    since: int = 0  # gradients from this version on belong to the round
    mark: Tensor | None = None  # the model at its beginning
    before: Tensor | None = None  # the sum then
    factor: Any = 1.0  # by which the step has been adapted
    bend: Any = 0.0  # the curvature along the rounds' movements
    seen: int = 0  # rounds
    spread: list[Any]  # the mean square of each worker's differences


def _along(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Trial(Algorithm[TrialState]):
    """DuDe with step lr / delay, in many variants."""

    wait_for: int = 1
    delay: Literal["mean", "max"] = "mean"
    """Over the workers whose gradients are in use."""
    unit: Literal["updates", "time"] = "updates"
    floor: Literal["none", "workers", "predicted"] = "predicted"
    """The least delay: 1.5 n / wait_for, or 1.5 (2 for the maximum) times what the measured times predict."""
    decay: float = 0.0
    """The running maximum of the delay falls by this factor an update; 0: the delay of the moment."""
    beta: float = 0.0
    """By how much the step's logarithm follows the cosine of a round's movement with the gradient after it."""
    bound: float = 0.0
    """Updates wait while a gradient is older than so many times the number of workers; 0: never."""
    noise: float = 0.0
    """The least factor 1 - noise / square of the average, with the noise from the norms of differences; 0: no factor."""
    secant: float = 0.0
    """The share by which the curvature, by which the step is divided, is renewed each round; 0: never."""

    def init(self, x: Tensor, n: int, rng: Draws) -> TrialState:
        zeros = {name: [0.0] * n for name in ("begun", "given", "times")}
        one: Any = x.new_ones((*x.shape[:-1], 1), dtype=torch.float64) if self.beta else 1.0
        lists = {"missing": set(range(n)), "waiting": [], "versions": [0] * n, "spread": [0.0] * n}
        return TrialState(x, n, factor=one, **lists, **zeros)

    def step(self, s: TrialState, a: Arrival) -> Orders:
        i = a.worker
        if self.noise and i not in s.missing:
            change = a.value - s.last(i)
            square = _along(change, change)
            s.spread[i] = square if isinstance(s.spread[i], float) else torch.lerp(s.spread[i], square, 0.1)
        s.replace(i, a.value)
        s.versions[i], s.begun[i], s.times[i] = a.version, s.given[i], a.seconds
        s.missing.discard(i)
        s.waiting.append(i)
        if s.missing or len(s.waiting) < self.wait_for:
            return []
        if self.bound and len(s.waiting) < s.n:
            waits = set(s.waiting)
            late = [s.version + 1 - s.versions[j] for j in range(s.n) if j not in waits]
            if max(late) >= self.bound * s.n / self.wait_for:
                return []
        s.descend(s.total, self._lr(s, a.time), over=s.n)
        s.updated = a.time
        ready, s.waiting = s.waiting, []
        for worker in ready:
            s.given[worker] = a.time
        return [send(worker) for worker in ready]

    def _lr(self, s: TrialState, now: float) -> Any:
        rate = sum(1 / time for time in s.times) / self.wait_for  # if nobody waited
        seconds = 1.5 * sum(s.times) / s.n if self.delay == "mean" else 2 * max(s.times)
        if self.unit == "time":
            ages = [now - begun for begun in s.begun]
            age = sum(ages) / s.n if self.delay == "mean" else max(ages)
            pause = now - s.updated if s.updated >= 0 else 1 / rate
            share = pause / max(age, seconds if self.floor == "predicted" else 0.0)
        else:
            late = [s.version + 1 - version for version in s.versions]
            age = sum(late) / s.n if self.delay == "mean" else max(late)
            least = {"none": 1.0, "workers": 1.5 * s.n / self.wait_for, "predicted": seconds * rate}[self.floor]
            if self.floor == "predicted" and s.version > 4 * least:
                least = 1.0  # by now it is seen
            s.longest = max(age, least, s.longest * self.decay)
            share = 1 / s.longest
        if self.beta or self.secant:
            self._round(s)
        bend = 1.0 if isinstance(s.bend, float) else s.bend
        if self.noise and not any(isinstance(spread, float) for spread in s.spread):
            bend = bend / (1 - 0.5 * sum(s.spread) / _along(s.total, s.total).clamp_min(1e-300)).clamp_min(self.noise)
        return self.lr * share * s.factor / bend

    def _round(self, s: TrialState) -> None:
        """At the end of a round, in which everybody has reported on a model of it, adapt."""
        if s.mark is not None and min(s.versions) < s.since:
            return
        if s.mark is not None:
            move = s.mark - s.weights
            if self.beta:
                size = (_along(move, move) * _along(s.total, s.total)).sqrt().clamp_min(1e-300)
                cosine = _along(move, s.total) / size
                s.factor = (s.factor * torch.exp(self.beta * cosine)).clamp_max(1e9)
            if self.secant and s.before is not None:
                found = _along(move, s.before - s.total) / s.n / _along(move, move).clamp_min(1e-300)
                found = found.abs().clamp_min(1e-3)
                s.bend = found if s.seen == 1 else s.bend * (found / s.bend) ** self.secant
        s.seen += 1
        if self.secant:
            s.before = s.total.clone()
        s.mark, s.since = s.x, s.version + 1

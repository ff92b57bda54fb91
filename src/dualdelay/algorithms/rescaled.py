"""Rescaled ASGD: Mahran, Maranjyan and Richtarik, 2026 (arXiv 2605.13434); the rule is derived from its abstract.

Fraboni et al., 2023, weight asynchronous updates in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws


@dataclass(kw_only=True)
class RescaledState(State):
    sent: list[float]  # when each worker was sent its model; nan if that is not known
    times: list[float]  # the mean time of each worker's jobs, travel included
    counts: list[int]  # how many they were


@dataclass(frozen=True)
class RescaledASGD(IndependentWorkers[RescaledState]):
    """Vanilla ASGD whose step is in proportion to the time the worker takes, so that every worker moves x as much.

    With times t_i the step is lr t_i (1/n) sum_j 1/t_j, which is lr in the mean over updates. The times are measured.
    """

    name, title = "rescaled", "Rescaled ASGD"
    colour, line, marker = "#AA3377", "--", "d"
    keeps, needs = "a few numbers", "speeds, measured on the way"

    def init(self, x: Tensor, n: int, rng: Draws) -> RescaledState:
        return RescaledState(x, n, sent=[0.0] * n, times=[0.0] * n, counts=[0] * n)

    def step(self, s: RescaledState, a: Arrival) -> Orders:
        i = a.worker
        s.counts[i] += 1
        time = a.seconds if math.isnan(s.sent[i]) else a.time - s.sent[i]
        s.times[i] += (time - s.times[i]) / s.counts[i]
        s.sent[i] = a.time
        measured = [j for j in s.present if s.counts[j]]
        s.descend(a.value, self.lr * (sum(s.times[i] / s.times[j] for j in measured) / len(measured)))
        return [send(i)]

    def join(self, s: RescaledState, worker: int) -> Orders:
        s.counts[worker], s.sent[worker] = 0, math.nan  # it may be another machine now
        return super().join(s, worker)

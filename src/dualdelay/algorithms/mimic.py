"""MimiC: Sun, Mao and Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates", 2023
(arXiv 2306.12212); the rule is that of a public implementation of its Algorithm 1, since its text was not available.

What workers send and what is kept of it is divided by the step size, so that a correction stays right when that changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, Memory, Message, RunningJob
from ..core.draws import Draws
from ..core.local_steps import sum_of_gradients
from ..core.rounds import SampledRounds, SampledState
from ..core.settings import whole


@dataclass(kw_only=True)
class MimiCState(SampledState):
    corrections: list[Tensor]  # n of (d): c_i, the mean update less the worker's own when it was last there
    updates: dict[int, Tensor]  # those of this round


@dataclass(frozen=True)
class MimiC(SampledRounds[MimiCState]):
    """Rounds in which a worker's update is corrected by what it lacked of the mean of all when it was last there.

    The mean is that of the corrected updates, the worker's own is as it came. With all workers in each round the
    corrections cancel, and it is FedAvg.
    """

    name, title = "mimic", "MimiC"
    colour, line, marker = "#9A3B54", "5 1", "<"
    keeps = "a correction for each worker"
    away = "it is not asked, and the corrections of the others stand in for it"

    steps: int = whole(1)
    """Local steps of each worker in a round."""

    def init(self, x: Tensor, n: int, rng: Draws) -> MimiCState:
        self.fits(n)
        return MimiCState(x, n, rng=rng, corrections=[torch.zeros_like(x)] * n, updates={})

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        return sum_of_gradients(model, job, self.lr), memory

    def absorb(self, s: MimiCState, a: Arrival) -> None:
        s.updates[a.worker] = a.value

    def update(self, s: MimiCState) -> None:
        v = torch.zeros_like(s.weights)
        for i, g in s.updates.items():
            v = v + (g + s.corrections[i]) / len(s.updates)  # over those that are there
        s.descend(v, self.lr)
        for i, g in s.updates.items():
            s.corrections[i] = v - g
        s.updates = {}

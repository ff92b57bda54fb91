"""ASO-Fed: Chen, Ning, Slawski and Rangwala, "Asynchronous Online Federated Learning for Edge Devices with Non-IID
Data", 2019 (arXiv 1911.02134); the rule is that of two public implementations which name the paper's lines and
disagree, since its text was not available.

Our choices where they disagree or are silent: the history h takes in the gradient from before the last one; both move
with every local step; the mean delay of a worker is that of its jobs so far, in updates, and its logarithm is the
natural one; all workers count the same, 1/n, since the problem's weights say otherwise where they should. The server's
feature learning on the first layer is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Message, Orders, RunningJob, State, send
from ..core.draws import Draws
from ..core.settings import positive, whole, zero_or_more


@dataclass(kw_only=True)
class ASOFedState(State):
    models: list[Tensor]  # n of (d): what each worker's next model is compared with
    reported: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class ASOFed(IndependentWorkers[ASOFedState]):
    """The server's model is the mean of the workers' last models, which make local steps along gradients with a history.

    A worker's direction is grad - v + h, with v its last gradient and h a decaying mean of those before; it is held
    near the model that it was sent, and one that is much delayed makes longer steps.
    """

    name, title = "asofed", "ASO-Fed"
    colour, line, marker = "#0F7B8A", "8 2", "s"
    keeps, needs = "a model of each worker", "the weights of the history and of the constraint"
    away = "its model leaves the mean, and it begins anew"
    remembers = "its last gradient, its history and its delays; a worker that has lost them begins without a history"
    own_step = "its update is a mean of models"

    steps: int = whole(5)
    """Local steps of a job."""
    beta: float = positive(0.5, high=1)
    """How much of the history stays when a gradient enters it."""
    proximal: float = zero_or_more(0.01)
    """How strongly a local model is held near the one that was sent (the paper's lambda)."""
    compare_with: Literal["last", "sent"] = "last"
    """What a worker's new model is compared with: its last one, so that x is the mean of their models, or that sent."""
    dynamic: bool = True
    """Whether a worker's step is longer by the logarithm of its mean delay, once that is above 1 (the paper's r_k)."""

    def init(self, x: Tensor, n: int, rng: Draws) -> ASOFedState:
        return ASOFedState(x, n, models=[x] * n)

    def step(self, s: ASOFedState, a: Arrival) -> Orders:
        s.descend(s.models[a.worker] - a.value, 1.0, over=s.n)  # x <- x - (1/n) (x_k old - x_k new)
        s.models[a.worker] = a.value if self.compare_with == "last" else s.x
        s.reported.add(a.worker)
        return [send(a.worker)]

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        zero = torch.zeros_like(model)
        kept = memory or {"v": zero, "h": zero, "version": job.version, "jobs": 0, "delays": 0}
        v, h = kept["v"], kept["h"]
        jobs = int(kept["jobs"])
        delays = int(kept["delays"]) + job.version - int(kept["version"])  # of all jobs, each until the next was sent
        r = max(1.0, math.log(delays / jobs)) if self.dynamic and delays else 1.0  # r_k = max(1, log(mean delay))
        y = model
        for _ in job:
            gradient = job.gradient(y) + self.proximal * (y - model)  # of f + (lambda / 2) |y - x|^2
            y = y - r * self.lr * (gradient - v + h)
            h, v = self.beta * h + (1 - self.beta) * v, gradient
        return y, {"v": v, "h": h, "version": job.version, "jobs": jobs + 1, "delays": delays}

    def leave(self, s: ASOFedState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        if s.n and worker in s.reported and self.compare_with == "last":
            s.descend(s.models[worker] - s.x, 1.0, over=s.n)  # the mean of the others' models
        s.reported.discard(worker)
        return []

    def join(self, s: ASOFedState, worker: int) -> Orders:
        s.models[worker] = s.x
        return super().join(s, worker)

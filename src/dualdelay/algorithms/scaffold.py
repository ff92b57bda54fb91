"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", 2019 (arXiv 1910.06378); the rule, with the paper's second option for c_i, is that of public implementations
which name the lines of its Algorithm 1, since its text was not available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import Arrival, Memory, Message, Orders, RunningJob
from ..core.draws import Draws
from ..core.rounds import SampledRounds, SampledState
from ..core.settings import positive, whole


@dataclass(kw_only=True)
class ScaffoldState(SampledState):
    moves: Tensor = field(init=False)  # (d), float64: the sum of y_i - x in this round
    controls: Tensor = field(init=False)  # (d), float64: the sum of all workers' c_i, zero before their first report

    def __post_init__(self) -> None:
        self.moves = self.weights.new_zeros(self.weights.shape, dtype=torch.float64)
        self.controls = self.moves.clone()


def control(memory: Memory | None) -> Tensor | float:
    """A worker's c_i, zero at first."""
    return 0.0 if memory is None else memory["c"]


@dataclass(frozen=True)
class SCAFFOLD(SampledRounds[ScaffoldState]):
    """Rounds of local steps that are corrected by c - c_i: what all workers' gradients are beyond the worker's own.

    So workers with different losses do not drift apart. Two vectors travel each way: x and c, and how far y_i and c_i
    have moved.
    """

    name, title = "scaffold", "SCAFFOLD"
    colour, line, marker = "#3D5A1E", "-.", ">"
    keeps = "one sum, and that of the corrections"
    away = "it is not asked, and its correction leaves the mean"
    remembers = "its correction c_i; a lost one is what is missing from the sum of all"
    asks_others = True

    steps: int = whole(5)
    """Local steps of each worker in a round (the paper's K)."""
    global_lr: float = positive(1.0)
    """How much of the workers' mean way the server goes (the paper's eta_g); ``lr`` is the step of the workers."""

    def init(self, x: Tensor, n: int, rng: Draws) -> ScaffoldState:
        self.fits(n)
        return ScaffoldState(x, n, rng=rng)

    def model(self, s: ScaffoldState, worker: int) -> Mapping[str, Tensor]:
        return {"x": s.x, "c": (s.controls / s.n).to(s.weights.dtype)}

    def shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        return {"move": tuple(x.shape), "control": tuple(x.shape)}

    def work(self, memory: Memory | None, model: Mapping[str, Tensor], job: RunningJob) -> tuple[Message, Memory | None]:
        x, c, c_i = model["x"], model["c"], control(memory)
        y = x
        for _ in job:
            y = y - self.lr * (job.gradient(y) - c_i + c)
        change = (x - y) / (job.steps * self.lr) - c  # c_i+ = c_i - c + (x - y) / (K lr)
        return {"move": y - x, "control": change}, {"c": c_i + change}

    def absorb(self, s: ScaffoldState, a: Arrival) -> None:
        s.moves += a.parts["move"]
        s.controls += a.parts["control"]  # over all n workers, not those of the round

    def update(self, s: ScaffoldState) -> None:
        s.descend(-s.moves, self.global_lr, over=len(s.reported))
        s.moves.zero_()

    def leave(self, s: ScaffoldState, worker: int, held: Memory | None = None) -> Orders:
        s.controls -= control(held)
        return super().leave(s, worker, held)

    def recover(self, s: ScaffoldState, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        rest = s.controls.clone()
        for other in sorted(others.keys() - {worker}):
            rest -= control(others[other])
        return {"c": rest.to(s.weights.dtype)}

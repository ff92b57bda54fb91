"""Malenia SGD: Tyurin and Richtarik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods", 2023."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, again, cancel, send
from ..core.buffers import RoundState
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(frozen=True)
class MaleniaSGD(Algorithm[RoundState]):
    """All workers compute at one model until every one has given enough; the fast give more, and each counts the same.

    A round ends when n / sum_i 1/B_i >= S / n, B_i being the gradients of worker i; what is under way then is dropped.
    """

    name, title = "malenia", "Malenia"
    colour, line, marker = "#B8A000", "-.", "p"
    keeps, needs, wastes = "a sum for each worker", "S", "jobs under way at the end of a round"
    away = "the round goes on without it and its gradients"

    gradients: int | None = whole(None)
    """Gradients that a round is worth (the paper's S); None: as many as workers, so that it ends when each has one."""

    def init(self, x: Tensor, n: int, rng: Draws) -> RoundState:
        return RoundState(x, n)

    def step(self, s: RoundState, a: Arrival) -> Orders:
        s.add(a.worker, a.value)
        return self._update(s) or [again(a.worker)]

    def _update(self, s: RoundState) -> Orders:
        counts = [s.counts[worker] for worker in s.present]
        enough = s.n if self.gradients is None else self.gradients
        if not all(counts) or s.n**2 < enough * sum(1 / count for count in counts) * (1 - 1e-12):
            return []
        s.descend_mean(self.lr)
        s.counts = [0] * s.workers
        return [order for worker in s.present for order in (cancel(worker), send(worker))]

    def leave(self, s: RoundState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.counts[worker] = 0
        return self._update(s) if s.n else []

    def join(self, s: RoundState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

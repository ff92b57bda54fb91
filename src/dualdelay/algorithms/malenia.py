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

    A round ends when n / sum_i 1/B_i >= S / n, B_i being the gradients of worker i; what is under way then is dropped. By
    default it is stopped, and its worker begins the next round at once, as in the code of the authors' group; in the
    paper's pseudo-code it ends unheard, and only then its worker gets the new model.
    """

    name, title = "malenia", "Malenia"
    colour, line, marker = "#B8A000", "-.", "p"
    keeps, needs, wastes = "a sum for each worker", "S", "jobs under way at the end of a round"
    away = "the round goes on without it and its gradients"

    gradients: int | None = whole(None)
    """Gradients that a round is worth (the paper's S); None: as many as workers, so that it ends when each has one.

    That default is ours: the paper's S follows from the noise and the accuracy that is wanted, S = max(n, sigma^2 / eps).
    """
    cancel: bool = True
    """Whether jobs under way at the end of a round are stopped, or end unheard."""

    def init(self, x: Tensor, n: int, rng: Draws) -> RoundState:
        return RoundState(x, n)

    def step(self, s: RoundState, a: Arrival) -> Orders:
        if a.version < s.version:  # of a round that is over
            return [send(a.worker)]
        s.add(a.worker, a.value)
        if not self._update(s):
            return [again(a.worker)]
        return self._next_round(s) if self.cancel else [send(a.worker)]

    def _update(self, s: RoundState) -> bool:
        """End the round, if every worker has given enough."""
        counts = [s.counts[worker] for worker in s.present]
        enough = s.n if self.gradients is None else self.gradients
        if not all(counts) or s.n**2 < enough * sum(1 / count for count in counts) * (1 - 1e-12):
            return False
        s.descend_mean(self.lr)
        s.counts = [0] * s.workers
        return True

    def _next_round(self, s: RoundState) -> Orders:
        return [order for worker in s.present for order in (cancel(worker), send(worker))]

    def leave(self, s: RoundState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.counts[worker] = 0
        return self._next_round(s) if s.n and self._update(s) and self.cancel else []

    def join(self, s: RoundState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

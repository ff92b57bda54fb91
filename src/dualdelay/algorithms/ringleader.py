"""Ringleader ASGD: Maranjyan and Richtarik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under
Data Heterogeneity", 2025. The letters are those of its Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, again, send
from ..core.buffers import RoundState, accumulate
from ..core.draws import Draws


@dataclass(kw_only=True)
class RingleaderState(RoundState):  # sums and counts are G_i and b_i
    next_sums: list[Tensor] = field(init=False)  # G+_i: gradients at models of this round, for the next one
    next_counts: list[int] = field(init=False)  # b+_i
    due: set[int]  # workers that have not had their update in this round
    gathering: bool = True  # phase 1: some worker has no gradient in G yet

    def __post_init__(self) -> None:
        super().__post_init__()
        self.next_sums, self.next_counts = self.no_gradients()


@dataclass(frozen=True)
class RingleaderASGD(Algorithm[RingleaderState]):
    """Rounds of n updates, each along the mean of all workers' means, in which every worker gets one new model.

    A worker goes on at the model it has until its turn, so that all gradients of a table's entry belong to one model.
    """

    name, title = "ringleader", "Ringleader"
    colour, line, marker = "#228833", "5 1", "h"
    keeps = "two sums for each worker"
    away = "its gradients are dropped, and the round goes on without it"

    def init(self, x: Tensor, n: int, rng: Draws) -> RingleaderState:
        return RingleaderState(x, n, due=set(range(n)))

    def step(self, s: RingleaderState, a: Arrival) -> Orders:
        if a.worker not in s.due:  # phase 2, and its model is one of this round
            accumulate(s.next_sums, s.next_counts, a.worker, a.value)  # G+_j <- G+_j + g,  b+_j <- b+_j + 1
            return [again(a.worker)]
        s.add(a.worker, a.value)  # G_j <- G_j + g,  b_j <- b_j + 1
        if s.gathering and not all(s.counts[worker] for worker in s.present):  # phase 1 goes on
            return [again(a.worker)]
        s.gathering = False  # phase 2: one update for each worker
        s.descend_mean(self.lr)  # x <- x - gamma (1/n) sum_i G_i / b_i
        s.due.remove(a.worker)
        self._end_round(s)
        return [send(a.worker)]

    def _end_round(self, s: RingleaderState) -> None:
        """When every worker has had its update, G <- G+ and b <- b+, and phase 1 begins again."""
        if not s.due:
            s.sums, s.next_sums = s.next_sums, s.sums
            s.counts, s.next_counts = s.next_counts, [0] * s.workers
            s.gathering, s.due = True, set(s.present)

    def leave(self, s: RingleaderState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.counts[worker] = s.next_counts[worker] = 0
        s.due.discard(worker)
        self._end_round(s)
        return []

    def join(self, s: RingleaderState, worker: int) -> Orders:
        s.join(worker)
        if s.gathering:
            s.due.add(worker)
        return [send(worker)]

"""Ringleader ASGD: Maranjyan and Richtarik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under
Data Heterogeneity", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, again, send
from ..core.aggregate import RoundState, accumulate, nothing_yet
from ..core.draws import Draws


@dataclass(kw_only=True)
class RingleaderState(RoundState):
    next_sums: list[Tensor]  # n of (d): gradients at models of this round, for the next one
    next_counts: list[int]
    gathering: bool  # whether some worker has no gradient in this round's table yet
    old: set[int]  # workers that have no model of this round yet


@dataclass(frozen=True)
class RingleaderASGD(Algorithm[RingleaderState]):
    """Rounds of n updates, each along the mean of all workers' means, in which every worker gets one new model.

    A worker goes on at the model it has until its turn, so that all gradients of a table's entry belong to one model.
    """

    away: ClassVar[str] = "its gradients are dropped, and the round goes on without it"

    def init(self, x: Tensor, n: int, rng: Draws) -> RingleaderState:
        later = {f"next_{name}": value for name, value in nothing_yet(x, n).items()}
        return RingleaderState(weights=x, n=n, gathering=True, old=set(range(n)), **nothing_yet(x, n), **later)

    def step(self, s: RingleaderState, a: Arrival) -> Orders:
        if a.worker not in s.old:
            accumulate(s.next_sums, s.next_counts, a.worker, a.value)
            return [again(a.worker)]
        s.add(a.worker, a.value)
        s.gathering = s.gathering and not all(s.counts[worker] for worker in s.present)
        if s.gathering:
            return [again(a.worker)]
        s.follow_mean(self.lr)
        s.old.remove(a.worker)
        self._turn(s)
        return [send(a.worker)]

    def _turn(self, s: RingleaderState) -> None:
        """When every worker has a model of this round, the next one begins."""
        if not s.old:
            s.sums, s.next_sums = s.next_sums, s.sums
            s.counts, s.next_counts = s.next_counts, [0] * s.size
            s.gathering, s.old = True, set(s.present)

    def leave(self, s: RingleaderState, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker)
        s.counts[worker] = s.next_counts[worker] = 0
        s.old.discard(worker)
        self._turn(s)
        return []

    def join(self, s: RingleaderState, worker: int) -> Orders:
        s.back(worker)
        if s.gathering:
            s.old.add(worker)
        return [send(worker)]

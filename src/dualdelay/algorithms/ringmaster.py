"""Ringmaster ASGD: Maranjyan, Tyurin and Richtarik, 2025, with and without stops (its Algorithms 5 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, cancel, send
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(kw_only=True)
class RingmasterState(State):
    sent: list[int]  # the version that each worker was sent last


@dataclass(frozen=True)
class RingmasterASGD(IndependentWorkers[RingmasterState]):
    """Vanilla ASGD that ignores gradients which are too old.

    It is optimal for homogeneous data. With heterogeneous data those of a straggler may never be used.
    """

    name, title = "ringmaster", "Ringmaster"
    colour, line, marker = "#44AA99", "--", "D"
    keeps, needs, wastes = "a number for each worker", "R", "gradients that are R updates old"

    threshold: int | None = whole(None)
    """How many updates old is too old (the paper's R); None: as many as there are workers.

    That default is ours: the paper's R follows from the noise and the accuracy that is wanted, R = max(1, sigma^2 / eps).
    """
    stop: bool = False
    """Whether a job that becomes too old is stopped at once, or ignored when it arrives."""

    def init(self, x: Tensor, n: int, rng: Draws) -> RingmasterState:
        return RingmasterState(x, n, sent=[0] * n)

    def step(self, s: RingmasterState, a: Arrival) -> Orders:
        too_old = self.too_old(s)
        if s.version - s.sent[a.worker] < too_old:
            self.update(s, a.value)
        late = [i for i in s.present if s.version - s.sent[i] >= too_old and i != a.worker] if self.stop else []
        for worker in (a.worker, *late):
            s.sent[worker] = s.version
        return [send(a.worker), *(order for worker in late for order in (cancel(worker), send(worker)))]

    def too_old(self, s: RingmasterState) -> int:
        """How many updates old is too old now."""
        return s.n if self.threshold is None else self.threshold

    def update(self, s: RingmasterState, gradient: Tensor) -> None:
        """Use a gradient that is young enough."""
        s.descend(gradient, self.lr)

    def join(self, s: RingmasterState, worker: int) -> Orders:
        s.sent[worker] = s.version
        return super().join(s, worker)

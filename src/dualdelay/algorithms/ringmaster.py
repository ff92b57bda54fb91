"""Ringmaster ASGD: Maranjyan, Tyurin and Richtarik, 2025, with and without stops (its Algorithms 5 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, cancel, send
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.state import State


@dataclass(kw_only=True)
class RingmasterState(State):
    models: list[int]  # the version that each worker was sent last


@dataclass(frozen=True)
class RingmasterASGD(WaitsForNobody[RingmasterState]):
    """Vanilla ASGD that ignores gradients which are too old.

    It is optimal where all workers have the same data. Where they have not, a slow worker may never be heard.
    """

    threshold: int | None = None
    """How many updates old is too old (the paper's R); None: as many as there are workers."""
    stop: bool = False
    """Whether a job that becomes too old is stopped at once, or ignored when it arrives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            require_whole("threshold", self.threshold, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> RingmasterState:
        return RingmasterState(weights=x, n=n, models=[0] * n)

    def step(self, s: RingmasterState, a: Arrival) -> Orders:
        most = s.n if self.threshold is None else self.threshold
        if s.version - s.models[a.worker] < most:
            s.descend(a.value, self.lr)
        late = [i for i in s.present if s.version - s.models[i] >= most and i != a.worker] if self.stop else []
        for worker in (a.worker, *late):
            s.models[worker] = s.version
        return [send(a.worker), *(order for worker in late for order in (cancel(worker), send(worker)))]

    def join(self, s: RingmasterState, worker: int) -> Orders:
        s.models[worker] = s.version
        return super().join(s, worker)

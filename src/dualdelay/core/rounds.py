"""Rounds of workers that are drawn for them: all of these compute at one model, and the round waits for all of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from .algorithm import Algorithm
from .draws import Draws
from .errors import require_whole
from .jobs import Arrival, Orders, send
from .settings import whole
from .state import State
from .work import Memory


@dataclass(kw_only=True)
class SampledState(State):
    """A server in the middle of a round."""

    rng: Draws
    asked: set[int] = field(default_factory=set)  # workers whose reports are still to come in this round
    reported: set[int] = field(default_factory=set)  # workers whose reports have come


R = TypeVar("R", bound=SampledState)


@dataclass(frozen=True)
class SampledRounds(Algorithm[R]):
    """A method of rounds: it absorbs the reports of the workers drawn, and makes an update when all are there."""

    wastes: ClassVar[str] = "the time of workers not asked, or faster than the others"
    away: ClassVar[str] = "it is not asked, and the round goes on without it"

    sampled: int | None = whole(None)
    """How many workers take part in a round, drawn uniformly each time; None: all."""

    def fits(self, n: int) -> None:
        """Refuse more workers in a round than there are."""
        require_whole(f"sampled (with {n} workers)", n if self.sampled is None else self.sampled, 1, n)

    def first(self, s: R) -> Orders:
        present, order = s.present, s.rng.permutation(s.n, s.version)
        s.asked, s.reported = {present[k] for k in order[: self.sampled].tolist()}, set()
        return [send(worker) for worker in sorted(s.asked)]

    def step(self, s: R, a: Arrival) -> Orders:
        self.absorb(s, a)
        s.asked.discard(a.worker)
        s.reported.add(a.worker)
        return self._next(s)

    @abstractmethod
    def absorb(self, s: R, a: Arrival) -> None:
        """Take in one worker's report."""

    @abstractmethod
    def update(self, s: R) -> None:
        """End a round with the reports of the workers in ``s.reported``."""

    def _next(self, s: R) -> Orders:
        if s.asked:
            return []
        if s.reported:
            self.update(s)
        return self.first(s)

    def leave(self, s: R, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        waited_for = worker in s.asked
        s.asked.discard(worker)
        return self._next(s) if waited_for else []

    def join(self, s: R, worker: int) -> Orders:
        s.join(worker)
        return [] if s.asked else self.first(s)  # it takes part from the next round on, which begins now if there was none

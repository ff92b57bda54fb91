"""What the server knows of each real worker, and of the evaluations they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .fleet import Model

AT_WORK = ("starting", "present")


@dataclass
class Desk:
    """One worker, as the server sees it."""

    state: str = "absent"  # absent, starting, present, awaited (not started in time), dead (about to go), frozen
    incarnation: int = 0  # processes before this one
    since: float = 0.0  # when it began to start, or to work on its job
    sequence: int = -1  # of the last request
    accepted: int = -1  # the last request of this incarnation whose reply was taken
    doing: int | None = None  # the draw it was asked for and has not answered
    queue: deque[int] = field(default_factory=deque)  # the draws behind that
    asked: float = 0.0  # when the request was sent last
    pause: float = 0.0  # until it is sent again
    crashes: int = 0  # in a row
    failures: int = 0  # in a row
    memory: str = "none"  # where what it keeps is: none, worker, server, lost
    spare: Tensor | None = None  # what it keeps, while that is at the server
    blocked: bool = False  # between a crash and what is done about it
    late: bool = False  # an alarm was given

    @property
    def at_work(self) -> bool:
        """Whether it can be given something to do."""
        return self.state in AT_WORK

    @property
    def jobs(self) -> list[int]:
        """The draws that it was given and has not answered."""
        return [*([] if self.doing is None else [self.doing]), *self.queue]


class Look(NamedTuple):
    """An evaluation under way: who has answered what, and who has not."""

    time: float
    model: Model
    parts: dict[int, Mapping[str, Any]]
    waiting: set[int]


class Looks:
    """The evaluations under way; each is complete when everybody who is still there has answered."""

    def __init__(self, complete: Callable[[Look], None]) -> None:
        self.open: dict[int, Look] = {}
        self._complete = complete
        self._count = 0

    def add(self, time: float, model: Model, workers: Iterable[int]) -> int:
        """Open an evaluation; returns its number."""
        self._count += 1
        self.open[self._count] = Look(time, model, {}, set(workers))
        return self._count

    def take(self, number: int, worker: int, part: Mapping[str, Any]) -> None:
        """A worker's answer; one that was given up or has come twice is nobody's."""
        if number in self.open and worker in self.open[number].waiting:
            self.open[number].parts[worker] = part
            self.drop(worker, number)

    def drop(self, worker: int, *numbers: int) -> None:
        """Nothing more will come from a worker, for these evaluations or for all."""
        for number in self.open.keys() & set(numbers or self.open):
            look = self.open[number]
            look.waiting.discard(worker)
            if not look.waiting:
                del self.open[number]
                if look.parts:
                    self._complete(look)

    def asked_of(self, worker: int) -> list[tuple[int, Model]]:
        """What a worker has not answered yet."""
        return [(number, look.model) for number, look in self.open.items() if worker in look.waiting]

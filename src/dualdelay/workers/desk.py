"""What the server knows of each real worker, and of the evaluations they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..core import Samples
from ..engine.fleet import Model
from .messages import Request

AT_WORK = ("starting", "present")


class Piece(NamedTuple):
    """What a worker evaluates in one go."""

    evaluation: int
    model: Any
    samples: Samples


@dataclass
class Desk:
    """One worker, as the server sees it."""

    state: str = "absent"  # absent, starting, present, awaited (not started in time), dead (about to go), frozen
    incarnation: int = 0  # processes before this one
    since: float = 0.0  # when it began to start, or to work on its job
    sequence: int = -1  # of the last request
    accepted: int = -1  # the last request of this incarnation whose reply was taken
    doing: int | None = None  # the draw it was asked for and has not answered
    request: Request | None = None  # in which it was
    queue: deque[int] = field(default_factory=deque)  # the draws behind that
    asked: float = 0.0  # when the request was sent last
    pause: float = 0.0  # until it is sent again
    crashes: int = 0  # in a row
    failures: int = 0  # in a row
    memory: str = "none"  # where what it keeps is: none, worker, server, lost
    spare: Tensor | None = None  # what it keeps, while that is at the server
    blocked: bool = False  # between a crash and what is done about it
    late: bool = False  # an alarm was given
    done: int = 0  # jobs that it has answered
    evaluating: Piece | None = None  # what it was asked to evaluate and has not answered
    spent: float = 0.0  # seconds that it has evaluated for
    last: float = 0.0  # seconds of its last evaluation
    samples: int | None = None  # how many it has, if it was asked for that
    machine: str = ""  # how its machine differs from the server's

    @property
    def free(self) -> bool:
        """Whether it has said where it is, has nothing to do and can be asked for something."""
        return self.state == "present" and not self.blocked and self.doing is None and self.evaluating is None

    @property
    def at_work(self) -> bool:
        """Whether it can be given something to do."""
        return self.state in AT_WORK

    @property
    def jobs(self) -> list[int]:
        """The draws that it was given and has not answered."""
        return [*([] if self.doing is None else [self.doing]), *self.queue]


@dataclass
class Look:
    """An evaluation under way: who has answered what, and who has not."""

    time: float
    model: Model
    samples: int | None  # of each worker; None: all
    limit: float | None  # the share of a worker's time that it may take; None: it waits for one job only
    pieces: int | None  # samples in one go, where all are evaluated; None: all in one go
    asked: dict[int, int]  # the workers, and how many jobs each had answered then
    parts: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    errors: dict[int, str] = field(default_factory=dict)

    def next(self, worker: int) -> Samples:
        """Which samples a worker is to look at next."""
        if self.samples is not None or self.pieces is None:
            return self.samples
        done = sum(part["samples"] for part in self.parts.get(worker, ()))
        size = _size(self.parts[worker][0]) if done else self.pieces
        return (done, min(done + self.pieces, size)) if done else (0, self.pieces)

    def found(self) -> dict[int, dict[str, Any]]:
        """What each worker has found on all that it looked at."""
        return {worker: _together(parts) for worker, parts in self.parts.items() if worker not in self.waiting}

    @property
    def complete(self) -> bool:
        """Whether everybody who was asked has answered."""
        return set(self.parts) == set(self.asked) and not self.errors

    @property
    def share(self) -> float:
        """How much of it is done."""
        shares = []
        for worker in self.asked:
            parts = self.parts.get(worker, [])
            size = _size(parts[0]) if parts else 1
            shares.append(1.0 if worker not in self.waiting else sum(part["samples"] for part in parts) / size)
        return sum(shares) / max(1, len(shares))


def _size(part: Mapping[str, Any]) -> int:
    """How many samples a worker has, as far as it says so."""
    size: int = part.get("size", part["samples"])
    return size


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was found in several pieces as if it had been found in one."""
    if len(parts) == 1:
        return dict(parts[0])
    samples = sum(part["samples"] for part in parts)
    mean = {"loss": sum(part["loss"] * part["samples"] for part in parts) / samples, "gradient": None}
    if all(part["gradient"] is not None for part in parts):
        mean["gradient"] = sum(part["gradient"] * (part["samples"] / samples) for part in parts)
    return {**parts[-1], **mean, "samples": samples}


class Looks:
    """The evaluations under way; each is complete when everybody who is still there has answered."""

    def __init__(self, complete: Callable[[Look], None]) -> None:
        self.open: dict[int, Look] = {}
        self._complete = complete
        self._count = 0

    def add(self, look: Look) -> None:
        """Open an evaluation."""
        self._count += 1
        look.waiting = set(look.asked)
        self.open[self._count] = look
        if not look.waiting:
            del self.open[self._count]

    def wanted(self, worker: int) -> tuple[int, Look] | None:
        """The oldest evaluation that a worker has not answered."""
        return next(((number, look) for number, look in self.open.items() if worker in look.waiting), None)

    def take(self, number: int, worker: int, part: Mapping[str, Any]) -> None:
        """A worker's answer; one that was given up or has come twice is nobody's."""
        look = self.open.get(number)
        if look is None or worker not in look.waiting:
            return
        parts = look.parts.setdefault(worker, [])
        parts.append(part)
        pieces = look.samples is None and look.pieces is not None
        if not pieces or sum(one["samples"] for one in parts) >= _size(part):
            self.drop(worker, number)

    def fail(self, number: int, worker: int, text: str) -> None:
        """A worker could not evaluate."""
        if number in self.open and worker in self.open[number].waiting:
            self.open[number].errors[worker] = text
            self.open[number].parts.pop(worker, None)
            self.drop(worker, number)

    def again(self, worker: int) -> None:
        """A worker has to begin its evaluations anew."""
        for look in self.open.values():
            if worker in look.waiting:
                look.parts.pop(worker, None)

    def drop(self, worker: int, *numbers: int) -> None:
        """Nothing more will come from a worker, for these evaluations or for all."""
        for number in self.open.keys() & set(numbers or self.open):
            look = self.open[number]
            look.waiting.discard(worker)
            if not look.waiting:
                del self.open[number]
                if look.parts or look.errors:
                    self._complete(look)

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self.open.clear()

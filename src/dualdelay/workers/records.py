"""What the server knows of each real worker, with the states that a worker goes through."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ..engine.half import Kept
from .messages import EvaluationRequest, JobRequest, Reply


class Status(Enum):
    """Where a worker stands. ``MOVES`` says what may follow what."""

    ABSENT = "absent"  # it has no process, and the method does without it
    STARTING = "starting"  # its process has not said yet where it is
    PRESENT = "present"  # it can be asked for something
    OVERDUE = "overdue"  # its process has not started in time: the run goes on without it until it is ready
    LEAVING = "leaving"  # it has to go, and the method has not heard of it yet
    FROZEN = "frozen"  # it is gone for good or for a while, and its last gradient goes on counting


MOVES: dict[Status, frozenset[Status]] = {
    Status.ABSENT: frozenset({Status.STARTING, Status.LEAVING}),  # it joins; the run begins without it
    Status.STARTING: frozenset({Status.STARTING, Status.PRESENT, Status.OVERDUE, Status.LEAVING}),  # it crashes; ...
    Status.PRESENT: frozenset({Status.STARTING, Status.LEAVING}),  # it crashes; it is given up or asked to leave
    Status.OVERDUE: frozenset({Status.OVERDUE, Status.STARTING, Status.PRESENT, Status.ABSENT, Status.FROZEN}),
    Status.LEAVING: frozenset({Status.ABSENT, Status.FROZEN}),  # the method has heard of it
    Status.FROZEN: frozenset({Status.STARTING, Status.PRESENT}),  # it is asked to join, and its process is new or stayed
}


class MemoryPlace(Enum):
    """Where that is what a worker keeps between its messages."""

    NONE = "none"
    AT_WORKER = "worker"
    AT_SERVER = "server"  # until a new process has answered once
    LOST = "lost"


@dataclass
class WorkerRecord:
    """One worker, as the server sees it."""

    number: int
    status: Status = Status.ABSENT
    incarnation: int = 0  # processes before this one
    since: float = 0.0  # when it began to start, or to work on what it was asked for
    queue: deque[int] = field(default_factory=deque)  # the draws that it is asked for next
    polled: set[int] = field(default_factory=set)  # those among its jobs that were polled
    request: JobRequest | None = None  # what it was asked for and has not answered
    reply: Reply | None = None  # what it has answered and the loop has not taken
    sequence: int = -1  # of the last request
    accepted: int = -1  # the last request of this incarnation whose reply was taken
    release: int = -1  # a request that is not open any more and may still be held: it is polled until that is heard of
    has: int = 0  # the serial of the model that its process is known to have, where models travel as differences
    down: int = 0  # bytes that it was sent for its oldest job
    sent: float = 0.0  # when the request was sent last
    pause: float = 0.0  # until it is sent again
    alarmed: bool = False  # whether an alarm was given about it
    crashes: int = 0  # in a row
    failures: int = 0  # in a row
    jobs_done: int = 0
    has_delivered: bool = False  # whether one of them came to something
    bad_inputs: int = 0  # since it came or joined, before the first that did
    memory: MemoryPlace = MemoryPlace.NONE
    held: Kept | None = None  # what it keeps, while that is at the server
    blocked: bool = False  # between a crash and what is done about it
    evaluating: EvaluationRequest | None = None  # what it was asked to evaluate and has not answered
    evaluation_seconds: float = 0.0  # that it has evaluated for
    last_evaluation_seconds: float = 0.0
    samples: int | None = None  # how many it has, if it was asked for that
    machine: str = ""  # how its machine differs from the server's

    def move(self, status: Status) -> None:
        """The worker goes from one state to another; refuses what ``MOVES`` does not have."""
        assert status in MOVES[self.status], f"worker {self.number} is {self.status.value} and cannot be {status.value}"
        self.status = status

    @property
    def at_work(self) -> bool:
        """Whether it can be given something to do, now or as soon as its process has started."""
        return self.status in (Status.STARTING, Status.PRESENT)

    @property
    def is_free(self) -> bool:
        """Whether it is present, has nothing to do and can be asked for something."""
        busy = self.blocked or any(one is not None for one in (self.request, self.reply, self.evaluating))
        return self.status is Status.PRESENT and not busy

    @property
    def holds(self) -> bool:
        """Whether it does a job that ends when it is polled, which it was not: nobody waits for it."""
        return self.request is not None and self.request.hold and not self.request.polled

    @property
    def can_evaluate_aside(self) -> bool:
        """Whether it holds a job and can be asked for an evaluation meanwhile."""
        busy = self.blocked or self.evaluating is not None
        return self.status is Status.PRESENT and self.holds and not busy

    @property
    def jobs(self) -> list[int]:
        """The draws that it was given and the loop has not taken; a reply that is due may still be lost."""
        asked = self.request if self.reply is None else self.reply.request
        return [*([] if asked is None else [asked.draw]), *self.queue]

    def lose_process(self) -> None:
        """Its process is gone, and with it what it was doing."""
        self.crashes += 1
        self.blocked, self.evaluating = True, None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Its next process is another one, which knows of nothing."""
        self.incarnation += 1
        self.accepted = self.release = -1
        self.has = 0

    def forgive(self) -> None:
        """Its crashes and failures so far do not count any more."""
        self.crashes = self.failures = self.bad_inputs = 0

"""What happens in a run: arrivals, wakes, changes among the workers, and what befalls real ones."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EventKind(StrEnum):
    """What an event is; traces hold these words."""

    ARRIVAL = "arrival"  # a gradient has reached the server
    REJECTED = "rejected"  # what has reached the server is no gradient
    FAILED = "failed"  # a gradient raised at its worker
    WAKE = "wake"
    LEFT = "left"
    JOINED = "joined"
    CRASHED = "crashed"  # the process of a worker was lost, or without a worker's number that of a shard of the server
    LOST = "lost"  # with it what the worker kept
    RESTORED = "restored"  # and that was put together again
    FROZEN = "frozen"  # a worker is gone, and its last gradient goes on counting
    THAWED = "thawed"
    LATE = "late"
    PLACE = "place"  # where a worker is: its site, and the address that it calls from
    MACHINE = "machine"  # a worker or the server computes on another kind of machine from now on
    WEIGHED = "weighed"  # the mean number of the workers' samples is known
    EVALUATED = "evaluated"  # the workers have evaluated a model
    IDLE = "idle"  # nothing has happened for a moment

    @property
    def ends_job(self) -> bool:
        """Whether a worker's job has ended, one way or another."""
        return self is EventKind.ARRIVAL or self is EventKind.REJECTED or self is EventKind.FAILED


class Event(NamedTuple):
    """What happens next in a run."""

    time: float
    kind: EventKind
    worker: int = -1
    draw: int = -1
    seconds: float = 0.0  # of computing
    start: float = 0.0  # when the worker begins to compute
    batches: float = 1  # that each of its gradients is worth
    steps: int = 1  # gradients that the job takes
    text: str = ""  # what a person should know about it

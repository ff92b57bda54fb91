"""The name of a gradient, its arrival at the server, and what the server orders next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

NO_PARTS: Mapping[str, Tensor] = {}


class Job(NamedTuple):
    """The name of a job: ``version`` says at which model, ``(worker, draw)`` on which minibatches."""

    worker: int
    draw: int
    version: int


class Arrival(NamedTuple):
    """What reached the server; ``value`` and ``parts`` are never written to."""

    job: Job
    value: Tensor  # the message, or the first of its tensors
    time: float
    seconds: float  # of computing, without queueing or travel
    loss: float  # of its minibatches, on average
    bytes: int = 0  # that the worker sent
    steps: int = 1  # gradients that the job took
    down: int = 0  # bytes that the worker was sent for it
    parts: Mapping[str, Tensor] = NO_PARTS  # the tensors of a message that names them

    @property
    def worker(self) -> int:
        """The sender."""
        return self.job.worker

    @property
    def version(self) -> int:
        """The version of the model that the worker was sent."""
        return self.job.version


@dataclass(frozen=True, slots=True)
class Send:
    """See ``send``."""

    worker: int
    steps: int | None = None
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """See ``poll``."""

    worker: int


@dataclass(frozen=True, slots=True)
class Again:
    """See ``again``."""

    worker: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """See ``cancel``."""

    worker: int


@dataclass(frozen=True, slots=True)
class Wake:
    """See ``wake``."""

    time: float


Order = Send | Again | Poll | Cancel | Wake
Orders = list[Order]  # which a list of Send alone is not to a type checker: the functions below give Order


def send(worker: int, steps: int | None = None, hold: bool = False) -> Order:
    """Send the current model to a worker, for a job after what it already has to do.

    The job takes ``steps`` gradients, by default the method's ``most_steps``. If it is to ``hold``, it ends when the worker
    is polled and not by itself: it takes as many as there is time for until then, ``steps`` at most.
    """
    return Send(worker, steps, hold)


def again(worker: int) -> Order:
    """Have a worker do one more job, on other minibatches, at the model it was sent last, after what it has to do."""
    return Again(worker)


def poll(worker: int) -> Order:
    """Ask a worker for what it has done up to now: its job ends with the gradients taken so far, perhaps none."""
    return Poll(worker)


def cancel(worker: int) -> Order:
    """Have a worker drop what it is doing and what it has queued."""
    return Cancel(worker)


def wake(time: float) -> Order:
    """Call the algorithm's ``on_wake`` at that time."""
    return Wake(time)

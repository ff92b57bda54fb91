"""The name of a gradient, its arrival at the server, and what the server orders next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Job(NamedTuple):
    """The name of a gradient: ``version`` says at which model, ``(worker, draw)`` on which minibatch."""

    worker: int
    draw: int
    version: int


class Arrival(NamedTuple):
    """What reached the server; ``value`` is never written to."""

    job: Job
    value: Tensor
    time: float
    seconds: float  # of computing, without queueing or travel
    loss: float  # of that minibatch
    bytes: int = 0  # that travelled

    @property
    def worker(self) -> int:
        """The sender."""
        return self.job.worker

    @property
    def version(self) -> int:
        """The version of the model that the gradient was taken at."""
        return self.job.version


@dataclass(frozen=True, slots=True)
class Send:
    """See ``send``."""

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


Order = Send | Again | Cancel | Wake
Orders = list[Order]  # which a list of Send alone is not to a type checker: the functions below give Order


def send(worker: int) -> Order:
    """Send the current model to a worker, which computes a gradient there after what it already has to do."""
    return Send(worker)


def again(worker: int) -> Order:
    """Have a worker compute on one more minibatch at the model it was sent last, after what it already has to do."""
    return Again(worker)


def cancel(worker: int) -> Order:
    """Have a worker drop what it is doing and what it has queued."""
    return Cancel(worker)


def wake(time: float) -> Order:
    """Call the algorithm's ``on_wake`` at that time."""
    return Wake(time)

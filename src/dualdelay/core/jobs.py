"""The name of a gradient, its arrival at the server, and what the server orders next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Job(NamedTuple):
    """The name of a gradient: ``version`` says at which model, ``(worker, draw)`` on which minibatch."""

    worker: int
    draw: int
    version: int


class Arrival(NamedTuple):
    """What reached the server. ``value`` is never written to; ``job`` is None for a wake."""

    job: Job | None
    value: Tensor
    time: float
    seconds: float  # computing, without queueing or travel
    loss: float  # of that minibatch
    bytes: int = 0  # what travelled

    @property
    def worker(self) -> int:
        """The sender."""
        assert self.job is not None, "a wake has no sender"
        return self.job.worker


class Order(NamedTuple):
    """What the server wants done; make one with ``send``, ``again``, ``cancel`` or ``wake``."""

    kind: str
    worker: int = -1
    time: float = 0.0


Orders = list[Order]


def send(worker: int) -> Order:
    """The current model goes to a worker, behind what it already has to do."""
    return Order("send", worker)


def again(worker: int) -> Order:
    """One more draw at the model the worker was sent last, behind what it already has."""
    return Order("again", worker)


def cancel(worker: int) -> Order:
    """The worker drops what it is doing and what it has queued."""
    return Order("cancel", worker)


def wake(time: float) -> Order:
    """Call ``step`` at that time with an arrival whose job is None."""
    return Order("wake", -1, time)

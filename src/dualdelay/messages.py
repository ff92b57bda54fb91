"""What the server and its real workers say to one another."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy.typing as npt

from .compression import Packed

Array = npt.NDArray[Any]


class Request(NamedTuple):
    """What the server asks for: the job ``draw`` at the model ``version``.

    ``sequence`` counts a worker's requests; one that comes again is the same question. ``accepted`` is the sequence number
    of the last reply that the server took from this incarnation of the worker, or -1.
    """

    worker: int
    incarnation: int
    sequence: int
    draw: int
    version: int
    accepted: int


class Reply(NamedTuple):
    """What a worker answers; ``error`` is a traceback, or empty."""

    request: Request
    value: Array | Packed
    keeps: bool
    loss: float
    seconds: float
    error: str = ""


class Ready(NamedTuple):
    """A worker's process is there."""

    worker: int
    incarnation: int
    node: str
    pid: int


class Died(NamedTuple):
    """A worker's process is gone; ``final`` if another one would not get further."""

    worker: int
    incarnation: int
    text: str
    final: bool = False


class Measured(NamedTuple):
    """A worker's part of an evaluation, or the traceback it ended with."""

    worker: int
    incarnation: int
    evaluation: int
    part: dict[str, Any] | str


Notice = Reply | Ready | Died | Measured


def why_dead(error: str) -> tuple[str, bool]:
    """Why an actor is dead, from Ray's explanation, and whether the next would die of the same."""
    lines = re.sub(r"\x1b\[\d+m", "", error).strip().splitlines()
    return (f"it could not start: {lines[-1]}", True) if "creation task" in lines[0] else ("its process died", False)

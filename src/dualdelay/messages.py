"""What the server and its real workers say to one another."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    unit: float = 0.0  # the samples that count as one worker, where workers count by samples


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
    environment: dict[str, str]
    samples: int | str | None = None  # how many it has, if it was asked; a text: why it cannot say


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
    if "creation task" in lines[0]:
        return f"it could not start: {lines[-1]}", True
    if "low on memory" in error or "memory monitor" in error:
        return "its process was killed because its machine ran out of memory", False
    signal = re.search(r"SIG[A-Z]+", error.partition("Some common causes")[0])
    return (f"its process was ended by {signal[0]}" if signal else "its process died"), False


def last_words(lines: Sequence[str]) -> str:
    """The signal that a process says it got, in what it printed last; without one it was killed before it could say."""
    for pattern in (r"\*\*\* (SIG[A-Z]+) received", r"Fatal Python error: (.*)"):
        found = [match for match in (re.search(pattern, line) for line in lines) if match]
        if found:
            return f"by {found[-1][1]}"
    return "without a word, as by SIGKILL (kill -9, or the kernel when memory runs out) or by os._exit"

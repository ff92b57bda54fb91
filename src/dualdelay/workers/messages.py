"""What the server and its real workers say to one another."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.compression import Packed

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


def asked(reply: Reply) -> Request | None:
    """The request that a reply says it answers, if it names one."""
    named = reply.request
    whole = isinstance(named, Request) and all(type(part) is int for part in named[:6])
    return named if whole else None


def checked(reply: Reply) -> Reply:
    """The reply, if its parts are what they should be; otherwise that of a job that failed."""
    wrong = ""
    if not isinstance(reply.error, str):
        wrong = f"its error is {reply.error!r:.50}, which is no text"
    elif not reply.error and not all(map(_is_number, (reply.loss, reply.seconds))):
        wrong = f"its loss is {reply.loss!r:.50} and took {reply.seconds!r:.50} s, which are no numbers"
    elif not reply.error and not isinstance(reply.value, Packed) and not _is_array(reply.value):
        wrong = "its gradient is no array of numbers"
    elif not isinstance(reply.keeps, bool):
        wrong = f"it says {reply.keeps!r:.50} of whether it keeps something"
    if not wrong:
        return reply
    return reply._replace(value=np.empty(0), keeps=False, loss=math.nan, seconds=0.0, error=f"BadReply: {wrong}")


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def is_part(part: object) -> bool:
    """Whether this is a worker's part of an evaluation: at least a loss, and over how many samples."""
    if not isinstance(part, dict):
        return False
    return all(_is_number(part.get(name)) for name in ("loss", "samples")) and all(
        _is_number(part.get(name, 0)) for name in ("size", "seconds")
    )


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


def last_line(text: str) -> str:
    """The last line of a traceback, which says what it was."""
    return [*text.strip().splitlines()[-1:], "nothing"][0]


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

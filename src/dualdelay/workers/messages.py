"""What the server and its real workers say to one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core import Samples
from ..core.compression import Packed, size_of
from ..engine.slices import Elsewhere

Array = npt.NDArray[Any]
INLINE = 90_000
"""Bytes of a model or a message up to which it travels in the call, as Ray lets 100 kB do: three times as quick."""


class JobRequest(NamedTuple):
    """The server asks for the job ``draw`` at the model ``version``.

    ``sequence`` counts a worker's requests; one that comes again is the same question. ``accepted`` is the sequence number
    of the last reply that the server took from this incarnation of the worker, or -1.
    """

    worker: int
    incarnation: int
    sequence: int
    draw: int
    version: int
    accepted: int
    mean_samples: float = 0.0  # of the workers, where they count by samples
    steps: int = 1  # gradients that the job takes
    hold: bool = False  # whether it ends when it is polled alone
    polled: bool = False  # whether it was
    serial: int = 0  # names the model, where models travel as differences; otherwise 0
    base: int = 0  # the serial of the model that what is sent is added to, one that the worker has; 0: the whole is sent

    def is_same_question(self, other: JobRequest) -> bool:
        """Whether both ask for the same, whatever was accepted meanwhile."""
        return self[:5] == other[:5]


class PollRequest(NamedTuple):
    """The server asks for what a worker has done of a job so far, or does not need it any more: the job ends.

    The answer, if it is still wanted, is that to the job's request. Of several polls the one with the largest number
    counts, so that one that comes early, twice or late does no harm.
    """

    worker: int
    incarnation: int
    sequence: int  # of the job's request


class EvaluationRequest(NamedTuple):
    """The server asks for a worker's part of an evaluation, on these samples."""

    worker: int
    incarnation: int
    evaluation: int
    samples: Samples
    mean_samples: float = 0.0
    aside: bool = False  # whether the worker may be holding a job: it then evaluates between two steps, or while it waits


class Ready(NamedTuple):
    """A worker's process is there."""

    worker: int
    incarnation: int
    node: str
    pid: int
    environment: dict[str, str]
    samples: int | str | None = None  # how many it has, if it was asked; a text: why it cannot say
    place: str = ""  # its site and the address that it calls from, for the record; empty: a process that was started here
    probe: Any = None  # a name of what it shares, by which the server finds out whether it reaches that
    door: str = ""  # the address at which it lets a server of its own machine in


class Returned(NamedTuple):
    """A worker's process, without which the run may have gone on, is there and has nothing to do."""

    worker: int


class Pushed(NamedTuple):
    """What a worker says of a message that it has sent to the shards of a server."""

    size: int  # its bytes
    fault: str = ""  # what is wrong with it, in words


class Reply(NamedTuple):
    """What a worker answers to a job; ``error`` is a traceback, or empty."""

    request: JobRequest
    value: Array | Packed | dict[str, Array | Packed]
    keeps: bool
    loss: float
    seconds: float
    error: str = ""
    steps: int = 1  # gradients that it took
    refused: str = ""  # why the method's work cannot be right, whoever does it
    pushed: Pushed | None = None  # where ``value`` has stand-ins, because shards have the message


class Evaluated(NamedTuple):
    """A worker's part of an evaluation, or the traceback it ended with."""

    worker: int
    incarnation: int
    evaluation: int
    part: dict[str, Any] | str


class Died(NamedTuple):
    """A worker's process is gone; ``final`` if another one would not get further."""

    worker: int
    incarnation: int
    text: str
    final: bool = False


Notice = Ready | Reply | Evaluated | Died | Returned
Request = JobRequest | PollRequest | EvaluationRequest


def size_of_kept(kept: Any) -> int:
    """The bytes of what a worker keeps; a number is eight."""
    if isinstance(kept, Elsewhere):
        return kept.size
    if isinstance(kept, Mapping):
        return sum(map(size_of_kept, kept.values()))
    return size_of(kept) if isinstance(kept, (Tensor, Packed)) else 8


def as_arrays(value: Any) -> Any:
    """Tensors as numpy arrays, which processes exchange; also those in dicts, and what was made small."""
    if isinstance(value, Elsewhere):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Packed):
        return value.arrays()
    return {name: as_arrays(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def as_tensors(value: Any) -> Any:
    """The inverse of ``as_arrays``."""
    if isinstance(value, Elsewhere):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return {name: as_tensors(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def each_part(value: Any, make: Callable[[Any], Any]) -> Any:
    """What is made of a model or a message, or of each of its parts if these have names."""
    return {name: make(part) for name, part in value.items()} if isinstance(value, dict) else make(value)


def request_of(reply: Reply) -> JobRequest | None:
    """The request that a reply names, if it names one."""
    request = reply.request
    well_formed = isinstance(request, JobRequest) and all(type(part) is int for part in request[:6])
    return request if well_formed else None


def checked(reply: Reply, request: JobRequest, most: int) -> Reply:
    """The reply to this request, if its parts are what they should be; otherwise that of a job that failed.

    What was made small for its way comes to so many numbers at most: it is not to fill the server's memory.
    """
    wrong = ""
    if not isinstance(reply.error, str) or not isinstance(reply.refused, str):
        wrong = f"its error is {reply.error!r:.50}, which is no text"
    elif not reply.error and not all(map(_is_number, (reply.loss, reply.seconds))):
        wrong = f"its loss is {reply.loss!r:.50} and took {reply.seconds!r:.50} s, which are no numbers"
    elif not reply.error and not _is_message(reply.value):
        wrong = "its message is no array of numbers, and no arrays by name"
    elif not reply.error and (numbers := _numbers(reply.value)) > most:
        wrong = f"its message comes to {numbers:,} numbers; expected {most:,} at most"
    elif not reply.error and (type(reply.steps) is not int or not 0 <= reply.steps <= request.steps):
        wrong = f"it took {reply.steps!r:.50} gradients, where {request.steps} were asked for"
    elif not reply.error and reply.steps < request.steps and not request.polled:
        wrong = f"it took {reply.steps} gradients of {request.steps}, and nobody polled it"
    elif not isinstance(reply.keeps, bool):
        wrong = f"it says {reply.keeps!r:.50} of whether it keeps something"
    reply = reply._replace(request=request)
    if not wrong:
        return reply
    nothing = reply._replace(value=np.empty(0), keeps=False, loss=math.nan, seconds=0.0, steps=1, refused="")
    return nothing._replace(error=f"BadReply: {wrong}")


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000)


def _is_message(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(isinstance(name, str) and _is_message(part) for name, part in value.items())
    return isinstance(value, Packed) or _is_array(value)


def _numbers(value: Any) -> int:
    """How many numbers what was made small comes to; those that were left out on its way are counted, too."""
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    return int(value.length * math.prod(np.shape(value.parts[1])[:-1])) if isinstance(value, Packed) else 0


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def is_part(part: object) -> TypeGuard[dict[str, Any]]:
    """Whether this is a worker's part of an evaluation: at least a loss, and over how many samples."""
    if not isinstance(part, dict):
        return False
    numbers = {"size": 0, "seconds": 0, **part}
    return all(_is_number(numbers.get(name)) for name in ("loss", "samples", "size", "seconds"))


def is_told(times: int) -> bool:
    """Whether what has happened so many times goes into the log: the first ten, and then every hundredth."""
    return times <= 10 or times % 100 == 0

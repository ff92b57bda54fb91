"""What a worker does with a job: it takes gradients, sends a message, and keeps something for its next job.

A method's ``work(memory, model, job)`` is the worker's half of it, as pure as the server's: what it returns depends on its
arguments alone, and it writes into none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .compression import Packed
from .errors import BadWork
from .jobs import Job

Memory = Mapping[str, Tensor | float]
"""What a worker keeps between its messages: named tensors and numbers."""
Message = Tensor | Packed | Mapping[str, Tensor | Packed]
"""What a worker sends: a tensor, or several named ones."""
Sent = Tensor | Mapping[str, Tensor]
"""What a worker is sent: the model, or several named tensors."""
TakeGradient = Callable[[Tensor, int], tuple[Tensor, Any]]
"""The gradient of a job at a point, on the job's minibatch of that number, and the minibatch's loss."""


class RunningJob:
    """A job at its worker: its name, and the gradients that it takes.

    ``for _ in job: y = y - lr * job.gradient(y)`` takes as many steps as the server asked for, or as there was time for
    until it polled. A point y may be several in one tensor, (..., d), where jobs are computed together: write ``work`` so
    that it does not care, as ``step``.
    """

    def __init__(self, job: Job, steps: int, gradient: TakeGradient) -> None:
        self._job, self._gradient, self._losses = job, gradient, 0.0
        self._most = steps
        self.taken = 0
        """How many it has taken."""

    @property
    def worker(self) -> int:
        """Whose job it is."""
        return self._job.worker

    @property
    def draw(self) -> int:
        """Its number among the worker's jobs."""
        return self._job.draw

    @property
    def version(self) -> int:
        """The server's version when the model was sent."""
        return self._job.version

    @property
    def most(self) -> int:
        """How many gradients it may come to."""
        return self._most

    @property
    def steps(self) -> int:
        """How many gradients it takes; of a job that ends when it is polled, this is known when it has ended."""
        return self._most

    def gradient(self, y: Tensor) -> Tensor:
        """The gradient at any point, on the worker's next minibatch."""
        if self.taken == self._most:
            raise BadWork(
                f"job {self._job.draw} of worker {self._job.worker} asks for another gradient after {self.taken}, which is "
                "all it has time for; expected as many as were ordered by send(worker, steps=...). Take them in a loop: "
                "for _ in job."
            )
        gradient, loss = self._gradient(y, self.taken)
        self.taken += 1
        self._losses = self._losses + loss
        return gradient

    def __iter__(self) -> Iterator[int]:
        """The job's steps, each with time for a gradient."""
        return iter(range(self.taken, self._most))

    @property
    def loss(self) -> float:
        """The mean loss of the minibatches so far."""
        return self._losses / self.taken if self.taken else math.nan


def checked_memory(memory: object, method: str, worker: int) -> dict[str, Any] | None:
    """What a worker keeps, if that can be saved; refuses what cannot."""
    if memory is None:
        return None
    if not isinstance(memory, Mapping):
        raise BadWork(
            f"{method}.work kept a {type(memory).__name__} for worker {worker}; expected named tensors and numbers, such "
            'as {"y": y}, or None.'
        )
    for name, value in memory.items():
        if not isinstance(name, str) or not isinstance(value, (Tensor, int, float)):
            raise BadWork(
                f"{method}.work kept {name!r} for worker {worker}, a {type(value).__name__}, which cannot be saved; "
                "expected named tensors and numbers."
            )
    return dict(memory)


def expected_parts(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The tensors that a method's messages have, in words."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())

"""Exact local gradients: a problem, not an algorithm, so that every method can have them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from ..core import Problem
from ..core.errors import BadInput
from .data import digest
from .local_steps import LocalSteps
from .network import Network
from .wrapped import Wrapped


class FullGradients(Wrapped):
    """Another problem, each of whose jobs is the exact gradient of F_i, over all of the worker's data.

    A job takes as long as the minibatches that make up the data.

    problem: the problem whose gradients are taken.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if type(problem).measure is Problem.measure:
            raise BadInput(
                f"{type(problem).__name__} gives no exact local gradients; use a problem that does (quadratic, logistic, a "
                "network), or give it 'measure'."
            )
        self._source = source = copy.copy(problem)
        if isinstance(source, Network):
            source.full_gradient = True  # here, whether or not an evaluation takes the trouble

    @property
    def settings(self) -> dict[str, Any]:
        """What builds this problem again."""
        return {"problem": self.problem}

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        found = self._source.measure(x, worker)
        return found["gradient"].to(x.dtype), found["loss"]

    def batches(self, worker: int) -> int:
        return self.problem.epoch(worker)

    def few_samples(self) -> int | None:
        return None  # all of them take no longer than a gradient

    def fingerprint(self) -> str:
        return str(digest("full gradients", self.problem.fingerprint()).hexdigest())

    def rewrapped(self, problem: Problem) -> FullGradients:
        return FullGradients(problem)


def exact(problem: Problem) -> Problem:
    """The problem with exact local gradients; where several local steps are taken, each step's is exact."""
    if isinstance(problem, LocalSteps):
        return problem.rewrapped(exact(problem.problem))
    return problem if isinstance(problem, FullGradients) else FullGradients(problem)

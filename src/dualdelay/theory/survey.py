"""Gradients of any problem for a measurement: exact ones where there are any, their cost, and what could not be had."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core import Problem
from ..core.draws import Draws
from ..core.errors import BadInput
from ..core.state import is_finite
from ..problems import FullGradients, LocalSteps, Network
from ..problems.wrapped import Wrapped

T = TypeVar("T")

FEW = 10  # minibatches whose mean stands for a worker's gradient where many means are needed


@dataclass(frozen=True)
class Estimate:
    """A number and how well it is known."""

    value: float
    """The number; nan if it could not be measured."""
    error: float
    """Its standard error, or how far a bound may be off; 0.0 if it is exact, nan if that is not known."""
    how: str
    """Where it comes from, in a few words."""


UNKNOWN = Estimate(math.nan, math.nan, "could not be measured")


class Survey:
    """One problem under measurement, without what is wrapped around it."""

    def __init__(self, problem: Problem, draws: int, first: int) -> None:
        self.notes: list[str] = []
        self.cost = 0
        self.noiseless = False  # whether its jobs are exact gradients
        self.draws, self._first = draws, first  # the numbers of the minibatches to draw
        while isinstance(problem, (FullGradients, LocalSteps)):
            if isinstance(problem, LocalSteps) and not self.noiseless:
                self.notes.append(
                    f"a job is the sum of {problem.k} gradients along as many local steps, which the theorem does not "
                    "cover: the constants are those of the single gradients."
                )
            self.noiseless = self.noiseless or isinstance(problem, FullGradients)
            problem = problem.problem
        self.problem = problem
        inner = problem
        while isinstance(inner, Wrapped):
            inner = inner.problem
        self.exact = type(inner).measure is not Problem.measure
        self._whole, self._bare = problem, problem
        if isinstance(problem, Network):
            self._whole, self._bare = copy.copy(problem), copy.copy(problem)
            self._whole.full_gradient, self._bare.full_gradient = True, False

    def of_samples(self, most: int, draws: Draws) -> tuple[Survey, Survey]:
        """Two surveys of a network on at most so many samples of each worker; on others, where there are so many."""
        problem, made = self.problem, []
        assert isinstance(problem, Network)
        orders = [torch.from_numpy(draws.permutation(shard.size, k)) for k, shard in enumerate(problem.shards())]
        for part in (slice(most), slice(-most, None)):
            other = copy.copy(problem)
            other._shards = copy.copy(problem._shards)
            other._shards.kept = {k: problem.shards()[k].some(order[part]) for k, order in enumerate(orders)}
            made.append(Survey(other, self.draws, self._first))
        return made[0], made[1]

    def attempt(self, what: str, function: Callable[[], T]) -> T | None:
        """What the function gives; if it cannot, None and a note."""
        try:
            return function()
        except Exception as error:  # whatever a user's problem raises
            said = str(error).rstrip(".") or "no message"
            self.notes.append(f"{what} could not be measured: {type(error).__name__}: {said}.")
            return None

    def sample(self, x: Tensor, worker: int, draw: int) -> Tensor:
        """One minibatch's gradient, in float64."""
        self.cost += self.problem.batches(worker)
        gradient, _ = self.problem.gradient(x, worker, self._first + draw)
        return _checked(gradient, x, f"the gradient of worker {worker} on minibatch {self._first + draw}")

    def gradient(self, x: Tensor, worker: int) -> Tensor:
        """A worker's exact gradient, or the mean of a few minibatches' if there is none, in float64."""
        if not self.exact:
            return torch.stack([self.sample(x, worker, draw) for draw in range(min(FEW, self.draws))]).mean(0)
        self.cost += self.problem.epoch(worker)
        found: Mapping[str, Any] = self._whole.measure(x, worker)
        return _checked(found["gradient"], x, f"the exact gradient of worker {worker}")

    def objective(self, x: Tensor) -> float:
        """F at x."""
        self.cost += sum(self.problem.epoch(worker) for worker in range(self.problem.workers))
        value = float(self._bare.evaluate(x)["objective"])
        if not math.isfinite(value):
            raise BadInput(f"F is {value} there; look at the data, the loss and the model's weights")
        return value


def _checked(gradient: Tensor | None, x: Tensor, what: str) -> Tensor:
    if gradient is None:
        raise BadInput(f"{what} is None; let 'measure' give a tensor")
    if gradient.shape != x.shape:
        raise BadInput(f"{what} has shape {tuple(gradient.shape)}; expected {tuple(x.shape)}, as the weights")
    gradient = gradient.detach().to(torch.float64)
    if not is_finite(gradient):
        raise BadInput(f"{what} is not finite; look at its data, or measure at smaller weights")
    return gradient

"""Several steps at the worker before it reports: a problem, not an algorithm, so that every method can have it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import Problem
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.errors import plain_number, require_positive, require_whole
from .data import digest
from .wrapped import Wrapped

_MOST = 100_000  # steps of one job


class LocalSteps(Wrapped):
    """Another problem, each of whose jobs takes ``k`` SGD steps from the model x to y and reports (x - y) / lr.

    That value is the sum of the k gradients met on the way; for k = 1 it is the plain gradient. A job takes k times as
    long.

    problem: the problem whose gradients the steps take.
    k: local steps per job.
    lr: their step size.
    """

    def __init__(self, problem: Problem, k: int, lr: float) -> None:
        super().__init__(problem)
        k, lr = plain_number(k), plain_number(lr)
        require_whole("k", k, 1)
        require_whole("k", k, 1, _MOST)
        require_positive("lr", lr)
        self.k, self.lr = k, lr

    @property
    def settings(self) -> dict[str, Any]:
        """What builds this problem again."""
        return {"problem": self.problem, "k": self.k, "lr": self.lr}

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        total, losses = torch.zeros_like(x), 0.0
        for inner in range(draw * self.k, (draw + 1) * self.k):
            gradient, loss = self.problem.gradient(x, worker, inner)
            x = x - self.lr * gradient
            total += gradient
            losses += loss
        return total, losses / self.k

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, one row for each step."""
        problem: Any = self.problem
        return torch.stack([problem.indices(worker, inner) for inner in range(draw * self.k, (draw + 1) * self.k)])

    def batches(self, worker: int) -> int:
        return self.k * self.problem.batches(worker)

    def fingerprint(self) -> str:
        return str(digest("local steps", self.k, self.lr, self.problem.fingerprint()).hexdigest())

    def rewrapped(self, problem: Problem) -> LocalSteps:
        return LocalSteps(problem, self.k, self.lr)

    @property
    def batch_key(self) -> Hashable:
        inner = self.problem.batch_key
        return OneAtATime if inner is OneAtATime else (self.k, self.lr, inner)

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        inner = [problem.problem for problem in problems if isinstance(problem, LocalSteps)]
        return (
            OneAtATime(problems) if self.batch_key is OneAtATime else _Steps(self.problem.batched(inner), self.k, self.lr)
        )


class _Steps:
    """The local steps of many jobs, each step of all of them in one call."""

    def __init__(self, inner: BatchedGradients, k: int, lr: float) -> None:
        self.most, self._inner, self._k, self._lr = inner.most, inner, k, lr

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        y = torch.cat([piece if piece.ndim == 2 else piece[None] for piece in x])
        total, losses = torch.zeros_like(y), torch.zeros(len(y), dtype=torch.float64, device=y.device)
        for step in range(self._k):
            gradients, loss = self._inner([y], which, workers, [draw * self._k + step for draw in draws])
            y = y - self._lr * gradients
            total += gradients
            losses += loss
        return total, losses / self._k

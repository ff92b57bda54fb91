"""Several steps at the worker before it reports: a problem, not an algorithm, so that every method can have it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import OneAtATime, Problem, Together
from ..errors import BadInput, require_positive, require_whole
from .data import digest


class LocalSteps(Problem):
    """Another problem, each of whose jobs takes ``k`` SGD steps from the model x to y and reports (x - y) / lr.

    That value is the sum of the k gradients met on the way; for k = 1 it is the plain gradient. A job takes k times as
    long.

    problem: the problem whose gradients the steps take.
    k: local steps per job.
    lr: their step size.
    """

    def __init__(self, problem: Problem, k: int, lr: float) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(f"problem is {problem!r}; expected a problem, on the shell with brackets, such as digits[].")
        require_whole("k", k, 1)
        require_positive("lr", lr)
        self.problem, self.k, self.lr = problem, k, lr
        self.workers, self.seed, self.measures = problem.workers, problem.seed, problem.measures

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

    def start(self, seed: int) -> Tensor:
        return self.problem.start(seed)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.problem.evaluate(x)

    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return self.problem.measure(x, worker)

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        return self.problem.combine(x, parts)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.problem.flat(state_dict)

    def fingerprint(self) -> str:
        return str(digest("local steps", self.k, self.lr, self.problem.fingerprint()).hexdigest())

    def reseeded(self, seed: int) -> LocalSteps:
        return LocalSteps(self.problem.reseeded(seed), self.k, self.lr)

    @property
    def parallel(self) -> bool:
        return self.problem.parallel

    def twin(self) -> LocalSteps:
        return LocalSteps(self.problem.twin(), self.k, self.lr)

    def on(self, device: str, precision: str = "float32") -> LocalSteps:
        return LocalSteps(self.problem.on(device, precision), self.k, self.lr)

    @property
    def kin(self) -> Hashable:
        inner = self.problem.kin
        return OneAtATime if inner is OneAtATime else (self.k, self.lr, inner)

    def together(self, problems: Sequence[Problem]) -> Together:
        inner = [problem.problem for problem in problems if isinstance(problem, LocalSteps)]
        return OneAtATime(problems) if self.kin is OneAtATime else _Steps(self.problem.together(inner), self.k, self.lr)


class _Steps:
    """The local steps of many jobs, each step of all of them in one call."""

    def __init__(self, inner: Together, k: int, lr: float) -> None:
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

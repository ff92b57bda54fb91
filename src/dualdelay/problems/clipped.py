"""Gradients clipped at the worker: a problem, not an algorithm, so that every method can have it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import Problem
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.errors import plain_number, require_positive
from .data import digest
from .wrapped import Wrapped


class Clipped(Wrapped):
    """Another problem, each of whose jobs reports a gradient of norm at most ``norm``, shortened if it is longer.

    Each worker clips its own gradient before it is sent. To clip what the server steps along, use a hook of torch's
    optimiser (docs/own_model.md).

    problem: the problem whose gradients are taken.
    norm: the largest Euclidean norm that a gradient keeps.
    """

    def __init__(self, problem: Problem, norm: float) -> None:
        super().__init__(problem)
        require_positive("norm", norm := plain_number(norm))
        self.norm = float(norm)

    @property
    def settings(self) -> dict[str, Any]:
        """What builds this problem again."""
        return {"problem": self.problem, "norm": self.norm}

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = self.problem.gradient(x, worker, draw)
        return _shortened(gradient, self.norm), loss

    def fingerprint(self) -> str:
        return str(digest("clipped", self.norm, self.problem.fingerprint()).hexdigest())

    def rewrapped(self, problem: Problem) -> Clipped:
        return Clipped(problem, self.norm)

    @property
    def batch_key(self) -> Hashable:
        inner = self.problem.batch_key
        return OneAtATime if inner is OneAtATime else ("clipped", self.norm, inner)

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        inner = [problem.problem for problem in problems if isinstance(problem, Clipped)]
        return OneAtATime(problems) if self.batch_key is OneAtATime else _Clips(self.problem.batched(inner), self.norm)


def _shortened(gradients: Tensor, most: float) -> Tensor:
    """Gradients (d) or (m, d), each of norm ``most`` at most; what is not finite stays so."""
    norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
    return torch.where(norms > most, gradients * (most / norms), gradients)


class _Clips:
    """Clips the gradients of many jobs."""

    def __init__(self, inner: BatchedGradients, most: float) -> None:
        self.most, self._inner, self._norm = inner.most, inner, most

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The gradients (m, d) and losses (m) of m jobs."""
        gradients, losses = self._inner(x, which, workers, draws)
        return _shortened(gradients, self._norm), losses

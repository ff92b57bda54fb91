"""How the gradients of many jobs are taken: in one call, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import DualDelayError, RunFailed


class BatchedGradients(Protocol):
    """How the gradients of many jobs are taken in one call."""

    most: int
    """How many jobs it can be asked for at once."""

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The gradients (m, d) and losses (m) of m jobs; they may change with the next call.

        ``x`` holds the models, pieces of (d) or (r, d) that follow one another; ``which`` says whose job each is, as a
        position in the list of problems.
        """


class OneAtATime:
    """The gradients of many jobs, one after the other."""

    most = 1 << 62

    def __init__(self, problems: Sequence[Any]) -> None:
        self._problems = problems

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The gradients (m, d) and losses (m) of m jobs."""
        models = [row for piece in x for row in (piece if piece.ndim == 2 else (piece,))]
        gradients, losses = [], []
        for row, k, worker, draw in zip(models, which, workers, draws, strict=True):
            try:
                gradient, loss = self._problems[k].gradient(row, worker, draw)
            except DualDelayError:
                raise
            except Exception as error:
                raise RunFailed(f"worker {worker} could not compute its job number {draw}: {error}") from error
            gradients.append(gradient.to(row.dtype) if gradient.shape == row.shape else torch.full_like(row, math.nan))
            losses.append(loss)
        return torch.stack(gradients), torch.tensor(losses, dtype=torch.float64, device=models[0].device)

    @property
    def stateful(self) -> Any:
        """Of problems whose gradients depend on what the workers keep: how these are taken, one after the other."""
        return self._with_memory if self._problems[0].stateful else None

    def _with_memory(
        self, memory: Any, x: Tensor, which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor, Any]:
        done = []
        for row, k in enumerate(which):
            own = memory and {name: v[row] if isinstance(v, Tensor) else v for name, v in memory.items()}
            done.append(self._problems[k].stateful_gradient(own, x[row], workers[row], draws[row]))
        values, losses, memories = zip(*done, strict=True)
        after = memories[0] and {
            name: torch.stack([m[name] for m in memories]) if isinstance(v, Tensor) else v
            for name, v in memories[0].items()
        }
        return torch.stack(values), torch.tensor(losses, dtype=torch.float64, device=x.device), after

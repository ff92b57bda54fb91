"""Servers that add gradients up until they make an update of them: all in one sum, or one sum for each worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .state import State, blocks


@dataclass(kw_only=True)
class BufferState(State):
    """A server with one sum of gradients."""

    total: Tensor = field(init=False)  # (d), float64
    count: int = 0  # gradients in it

    def __post_init__(self) -> None:
        self.total = self.weights.new_zeros(self.weights.shape, dtype=torch.float64)

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """One more gradient."""
        for total, part in blocks(self.total, value):
            total.add_(part, alpha=weight)
        self.count += 1

    def clear(self) -> None:
        """Begin anew with nothing."""
        self.total.zero_()
        self.count = 0


@dataclass(kw_only=True)
class RoundState(State):
    """A server with a sum of gradients for each worker, all of a worker's gradients taken at one model."""

    sums: list[Tensor] = field(init=False)  # n of (d), float64
    counts: list[int] = field(init=False)  # gradients in each

    def __post_init__(self) -> None:
        self.sums, self.counts = self.no_gradients()

    def no_gradients(self) -> tuple[list[Tensor], list[int]]:
        """Sums and counts before anything has arrived."""
        return [self.weights.new_zeros(self.weights.shape, dtype=torch.float64)] * self.workers, [0] * self.workers

    def add(self, worker: int, value: Tensor) -> None:
        """One more gradient of a worker."""
        accumulate(self.sums, self.counts, worker, value)

    def descend_mean(self, lr: float) -> None:
        """Descend along the mean, over the workers that have gradients, of the mean of each worker's gradients."""
        total = torch.zeros_like(self.sums[0])
        for gradients, count in zip(self.sums, self.counts, strict=True):
            if count:
                total += gradients / count
        self.descend(total, lr, over=sum(count > 0 for count in self.counts))


def accumulate(sums: list[Tensor], counts: list[int], worker: int, value: Tensor) -> None:
    """Add a gradient to a worker's sum; while its count is zero, the sum is whatever an earlier round has left."""
    sums[worker] = sums[worker] + value if counts[worker] else value.double()
    counts[worker] += 1

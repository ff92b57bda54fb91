"""Servers that remember a gradient of every worker, and the sum of these gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .state import State, blocks
from .work import Memory

TableFormat = Literal["full", "half", "host"]

_SUM_AGAIN = 1000  # gradients after which a table is added up anew, or as many as it has rows: O(d) each


def kept_gradient(memory: Memory) -> Tensor:
    """The last gradient of a worker that keeps it itself."""
    gradient = memory["gradient"]
    assert isinstance(gradient, Tensor)
    return gradient


@dataclass(kw_only=True)
class AggregateState(State):
    """A server that remembers the last gradient of every worker, or at least their sum."""

    total: Tensor = field(init=False)  # (d), float64: the sum of the gradients, which does not drift as a mean would
    table: list[Tensor] | None = field(init=False)  # n of (d): the gradients as they came; None: the workers keep them
    uncounted: set[int] = field(default_factory=set)  # workers without a part in the sum: they left, or have not reported
    keeps_table: bool = True  # whether the server has the gradients, and not only their sum
    replaced: int = 0  # gradients so far
    table_format: TableFormat = "full"  # gradients as they came, in half the bytes (bfloat16), or in the host's memory

    def __post_init__(self) -> None:
        self.total = self.weights.new_zeros(self.weights.shape, dtype=torch.float64)
        zeros = [torch.zeros_like(self.weights)] * self.workers  # one for all, until they report
        self.table = zeros if self.keeps_table else None

    @property
    def counted(self) -> int:
        """How many workers have a gradient in the sum, zeros before their first included."""
        return self.workers - len(self.uncounted)

    def row(self, worker: int) -> Tensor:
        """The last gradient of a worker as the table keeps it."""
        assert self.table is not None, "the workers keep their gradients"
        return self.table[worker]

    def last(self, worker: int) -> Tensor:
        """The last gradient of a worker as it is used: on the device and of the type of the weights."""
        return self.row(worker).to(self.weights)

    def _formatted(self, value: Tensor) -> Tensor:
        """A gradient as the table keeps it."""
        if self.table_format == "half":
            row, largest = torch.empty_like(value, dtype=torch.bfloat16), torch.finfo(torch.bfloat16).max
            for rounded, part in blocks(row, value):
                rounded.copy_(part.clamp(-largest, largest))  # what is finite stays so
            return row
        return value.cpu() if self.table_format == "host" else value

    def replace(self, worker: int, value: Tensor) -> None:
        """sum <- sum + (G - G~) and G~ <- G; without a table ``value`` is the difference itself."""
        self.uncounted.discard(worker)
        if self.table is None:
            for total, difference in blocks(self.total, value):
                total.add_(difference)
            return
        row, last = value, self.table[worker]
        if self.table_format != "full":
            row, last = self._formatted(value), last.to(self.total.device)
        counted = row if self.table_format == "half" else value  # the sum is that of the table, so no rounding stays in it
        for total, old, new in blocks(self.total, last, counted):
            if new.dtype == total.dtype:
                total.add_(new - old)
            else:
                total.add_(new).sub_(old)  # in float64 the sums of float32 numbers round nothing
        self.table[worker] = row
        self.replaced += 1
        if self.replaced % max(_SUM_AGAIN, self.workers) == 0:
            self._sum_again()

    def _sum_again(self) -> None:
        """Add the table up anew: after a huge gradient has come and gone, the last digits of small ones are lost."""
        self.total.zero_()
        for worker in range(self.workers):
            for total, part in blocks(self.total, self.row(worker).to(self.total.device)):
                total.add_(part)

    def leave(self, worker: int, held: Memory | None = None) -> None:
        """A worker is absent from now on, and its gradient, ``held`` if the worker kept it, leaves the sum."""
        super().leave(worker)
        self.discard(worker, held)

    def discard(self, worker: int, held: Memory | None = None) -> None:
        """Take a worker's gradient out of the sum; the worker counts again when it reports."""
        if worker in self.uncounted:
            return
        self.uncounted.add(worker)
        if self.table is not None:
            self.total -= self.row(worker).to(self.total.device)
            self.table[worker] = self._formatted(torch.zeros_like(self.weights))
        elif held is not None:
            self.total -= kept_gradient(held)

    def recover(self, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """Without a table: what the sum holds beyond the gradients of the others."""
        return {"gradient": self.remainder(others)} if self.table is None else None

    def remainder(self, held: Mapping[int, Memory]) -> Tensor:
        """What the sum holds beyond these workers' gradients: the gradient of the one worker that lost its own."""
        rest = self.total.clone()
        for worker in sorted(held):
            rest -= kept_gradient(held[worker])
        return rest

    def audit(self, held: Mapping[int, Memory]) -> float:
        """||sum - sum_i G_i|| / sum_i ||G_i||, against the table or what the workers hold.

        Not over ||sum_i G_i||, which goes to zero at a solution whatever the gradients' sizes.
        """
        return audit([self.deviation(held)])

    def deviation(self, held: Mapping[int, Memory]) -> tuple[float, list[float]]:
        """||sum - sum_i G_i|| and each ||G_i||."""
        exact, sizes = torch.zeros_like(self.total), []
        kept = (kept_gradient(held[worker]) for worker in sorted(held))  # one at a time: together they may be too large
        for row in self.table if self.table is not None else kept:
            exact += row.to(exact.device)
            sizes.append(float(row.float().norm() if row.dtype == torch.bfloat16 else row.norm()))
        return float((self.total - exact).norm()), sizes


def audit(deviations: Sequence[tuple[float, Sequence[float]]]) -> float:
    """The audit of a sum from the deviations of its slices, or of the whole."""
    gap = math.hypot(*(gap for gap, _ in deviations))
    size = sum(math.hypot(*parts) for parts in zip(*(sizes for _, sizes in deviations), strict=True))
    return gap / size if size > 0 else gap

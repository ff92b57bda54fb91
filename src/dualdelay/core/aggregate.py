"""What servers remember of their workers: the last gradient of each, or those of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .state import State, blocks

_SUM_AGAIN = 1000  # gradients after which a table is added up anew, or as many as it has rows: O(d) each


@dataclass(kw_only=True)
class AggregateState(State):
    """A server that remembers the last gradient of every worker, or at least their sum."""

    total: Tensor  # (d), float64: the sum of the workers' gradients, kept as a sum so that it does not drift
    table: list[Tensor] | None  # n of (d): the gradients themselves, as they came, unless the workers keep them
    uncounted: set[int]  # workers that have no part in the sum: they left, or joined and have not reported yet
    taken: int = 0  # gradients so far
    kept: str = "full"  # how the table is: as the gradients came, in "half" the bytes, or on the "host"

    def _row(self, value: Tensor) -> Tensor:
        """A gradient as the table keeps it."""
        if self.kept == "half":
            most = torch.finfo(torch.bfloat16).max  # what is finite stays so
            return value.clamp(-most, most).to(torch.bfloat16)
        return value.cpu() if self.kept == "host" else value

    def take(self, worker: int, value: Tensor) -> None:
        """sum <- sum + (G - G~) and G~ <- G; without a table ``value`` is the difference itself."""
        if worker in self.uncounted:
            self.uncounted.remove(worker)
            self.n += 1
        if self.table is None:
            for total, new in blocks(self.total, value):
                total.add_(new)
        else:
            row = self._row(value)
            counted = row if self.kept == "half" else value  # the sum is that of the table, so no rounding stays in it
            for total, old, new in blocks(self.total, self.table[worker].to(self.total.device), counted):
                if new.dtype == total.dtype:
                    total.add_(new - old)
                elif total.is_cpu and new.dtype != torch.bfloat16:  # numpy converts on the way, torch first: a fifth slower
                    exact = total.numpy()
                    np.add(exact, new.numpy(), out=exact)
                    np.subtract(exact, old.numpy(), out=exact)
                else:
                    total.add_(new).sub_(old)  # in float64 the sums of float32 numbers round nothing
            self.table[worker] = row
            self.taken += 1
            if self.taken % max(_SUM_AGAIN, len(self.table)) == 0:
                self._sum_again(self.table)

    def _sum_again(self, table: list[Tensor]) -> None:
        """Add the table up anew: after a huge gradient has come and gone the small ones' last digits are lost."""
        self.total.zero_()
        for row in table:
            for total, part in blocks(self.total, row.to(self.total.device)):
                total.add_(part)

    def gone(self, worker: int, held: Tensor | None = None) -> None:
        """A worker is not there any more, and its gradient is taken out of the sum."""
        self.absent.add(worker)
        self.drop(worker, held)

    def back(self, worker: int) -> None:
        """A worker is there; it counts when it has reported."""
        self.absent.discard(worker)

    def drop(self, worker: int, held: Tensor | None = None) -> None:
        """Take a worker's gradient out of the sum; it counts no more."""
        if worker in self.uncounted:
            return
        self.uncounted.add(worker)
        self.n -= 1
        if self.table is not None:
            self.total -= self.table[worker].to(self.total.device)
            self.table[worker] = self._row(torch.zeros_like(self.weights))
        elif held is not None:
            self.total -= held

    def rest(self, held: Mapping[int, Tensor]) -> Tensor:
        """What the sum holds beyond these gradients: what a worker whose memory is lost must have sent."""
        rest = self.total.clone()
        for worker in sorted(held):
            rest -= held[worker]
        return rest

    def error(self, held: Mapping[int, Tensor]) -> float:
        """||sum - sum_i G_i|| / sum_i ||G_i||, against the table or what the workers hold.

        Not over ||sum_i G_i||, which goes to zero at a solution whatever the gradients' sizes.
        """
        exact, size = torch.zeros_like(self.total), 0.0
        for row in self.table if self.table is not None else held.values():
            exact += row.to(exact.device)
            size += float(row.float().norm() if row.dtype == torch.bfloat16 else row.norm())
        gap = float((self.total - exact).norm())
        return gap / size if size > 0 else gap


def aggregate(x: Tensor, n: int, memory: str = "server") -> dict[str, Any]:
    """The empty fields of an AggregateState."""
    table = [torch.zeros_like(x)] * n if memory == "server" else None  # one zero for all, until they report
    return {"total": x.new_zeros(x.shape, dtype=torch.float64), "table": table, "uncounted": set()}


@dataclass(kw_only=True)
class RoundState(State):
    """A server that gathers several gradients of each worker, all taken at one model."""

    sums: list[Tensor]  # n of (d), float64
    counts: list[int]

    def add(self, worker: int, value: Tensor) -> None:
        """One more gradient of a worker."""
        accumulate(self.sums, self.counts, worker, value)

    def follow_mean(self, lr: float) -> None:
        """Descend along the mean over workers of the means of their gradients, over those that have any."""
        total = torch.zeros_like(self.sums[0])
        for gradients, count in zip(self.sums, self.counts, strict=True):
            if count:
                total += gradients / count
        self.descend(total, lr, over=sum(count > 0 for count in self.counts))


def accumulate(sums: list[Tensor], counts: list[int], worker: int, value: Tensor) -> None:
    """Add a gradient to a worker's sum; where there is none yet, what its place holds is not looked at."""
    sums[worker] = sums[worker] + value if counts[worker] else value.double()
    counts[worker] += 1


def nothing_yet(x: Tensor, n: int) -> dict[str, Any]:
    """The empty fields of a RoundState."""
    return {"sums": [x.new_zeros(x.shape, dtype=torch.float64)] * n, "counts": [0] * n}

"""What a server knows, and arithmetic on long vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_SUM_AGAIN = 1000  # gradients after which a table is added up anew, or as many as it has rows: O(d) each
BLOCK = 65_536  # elements per pass, so that what one operation writes is still in the cache for the next


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces of tensors of one size; small ones and those on a GPU come whole."""
    if tensors[0].numel() <= BLOCK or not tensors[0].is_cpu:
        return iter((tensors,))
    return zip(*(torch.split(tensor.view(-1), BLOCK) for tensor in tensors), strict=True)


class Stepper(Protocol):
    """What moves the weights instead of plain SGD; ``optimizer.Optimizer`` is one."""

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
        """The moved weights; both tensors may be written to."""

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values and tensors."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved."""


@dataclass(kw_only=True)
class State:
    """What the server knows; algorithms extend it. A tensor read from ``x`` keeps its values for good."""

    weights: Tensor  # (d); use x to read it
    n: int  # workers that count
    version: int = 0
    lent: bool = True  # somebody may hold weights, so the next descent makes new ones
    optimizer: Stepper | None = None  # momentum, Adam, schedules; without one the step is plain SGD

    @property
    def x(self) -> Tensor:
        """The current model, flat. It is never changed: a later version is another tensor."""
        self.lent = True
        return self.weights

    def descend(self, direction: Tensor, lr: float | Tensor, over: float = 1) -> None:
        """x <- x - lr * direction / over, and the version goes up by one; an optimizer takes direction / over as gradient.

        Divide by ``over`` and not the step size: to Adam a sum of n gradients with lr / n is not their mean with lr. Runs
        that advance together have a step size each, a column (r, 1).
        """
        if isinstance(lr, Tensor):
            dtype = self.weights.dtype
            self.weights = torch.addcmul(self.weights, direction.to(dtype), (lr / -over).to(dtype))
            self.lent = False
            self.version += 1
            return
        if self.optimizer is not None:
            gradient = torch.empty_like(self.weights)  # of its own: optimisers may write into it
            for out, part in blocks(gradient, direction):
                torch.div(part, over, out=out)
            self.weights = self.optimizer.step(self.weights.clone() if self.lent else self.weights, gradient, lr)
            self.lent = False
            self.version += 1
            return
        alpha = -(lr / over)
        if self.lent and direction.numel() <= BLOCK:
            same = direction.dtype == self.weights.dtype  # a conversion to the same type is a call all the same
            self.weights = torch.add(self.weights, direction if same else direction.to(self.weights.dtype), alpha=alpha)
        else:
            new = torch.empty_like(self.weights) if self.lent else self.weights
            for out, x, part in blocks(new, self.weights, direction):
                torch.add(x, part.to(x.dtype), alpha=alpha, out=out)
            self.weights = new
        self.lent = False
        self.version += 1


@dataclass(kw_only=True)
class AggregateState(State):
    """A server that remembers the last gradient of every worker, or at least their sum."""

    total: Tensor  # (d), float64: the sum of the workers' gradients, kept as a sum so that it does not drift
    table: list[Tensor] | None  # n of (d): the gradients themselves, as they came, unless the workers keep them
    absent: set[int]  # workers that do not count: they left, or joined and have not reported yet
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
        if worker in self.absent:
            self.absent.remove(worker)
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

    def drop(self, worker: int, held: Tensor | None) -> None:
        """Take a worker's gradient out of the sum; it counts no more."""
        if worker in self.absent:
            return
        self.absent.add(worker)
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
    return {"total": x.new_zeros(x.shape, dtype=torch.float64), "table": table, "absent": set()}


_SAME_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def checksum(tensor: Tensor) -> int | Tensor:
    """The sum of a tensor's bit patterns modulo 2**64, as int64: one pass, and any single changed bit shows.

    Of several rows or on a GPU it is a tensor, one number for each row: nobody waits for it.
    """
    size = tensor.element_size()
    kind = torch.int64 if tensor.shape[-1] * size % 8 == 0 else _SAME_SIZE[size]
    total = tensor.view(kind).sum(-1)
    return int(total.item()) if tensor.ndim == 1 and tensor.is_cpu else total


def is_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite; a finite sum of squares settles it in one pass."""
    flat = tensor if tensor.ndim == 1 else tensor.view(-1)
    return math.isfinite(flat.dot(flat).item()) or bool(torch.isfinite(tensor).all())

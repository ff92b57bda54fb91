"""What a server knows, and arithmetic on long vectors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from .work import Memory

BLOCK = 262_144  # elements per pass, so that what one operation writes is still in the cache for the next


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces of tensors of one size; small ones and those on a GPU come whole."""
    if tensors[0].numel() <= BLOCK or not tensors[0].is_cpu:
        return iter((tensors,))
    return zip(*(torch.split(tensor.view(-1), BLOCK) for tensor in tensors), strict=True)


class Stepper(Protocol):
    """What moves the weights instead of plain SGD; ``runs.optimizer.Optimizer`` is one."""

    @property
    def own(self) -> bool:
        """Whether it is a user's own, which may fail."""

    def observe(self, weights: Tensor, message: Tensor) -> None:
        """A worker's message has arrived, which the method is about to absorb."""

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """The moved weights; both tensors may be written to."""

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what was saved."""


class _Place:
    _blank: Callable[[], Tensor] | None = None
    """Where new weights are made, if that is not left to torch: no field of a state, which is saved and cut as it is."""


@dataclass
class State(_Place):
    """What the server knows; algorithms extend it. A tensor read from ``x`` keeps its values for good."""

    weights: Tensor  # (d); read it as x, move it with descend
    workers: int  # in the fleet, present or absent
    _: KW_ONLY
    version: int = 0  # updates made
    absent: set[int] = field(default_factory=set)  # workers that have left or have not joined yet
    optimizer: Stepper | None = None  # momentum, Adam, schedules; without one the step is plain SGD
    lent: bool = True  # whether the weights were read, so that the next descent must make new ones
    descents: int = 0  # calls of descend, which alone moves the weights

    @property
    def n(self) -> int:
        """How many workers are present."""
        return self.workers - len(self.absent)

    @property
    def present(self) -> Sequence[int]:
        """The workers that are present, in order."""
        everybody = range(self.workers)
        return [worker for worker in everybody if worker not in self.absent] if self.absent else everybody

    def leave(self, worker: int) -> None:
        """A worker is absent from now on."""
        self.absent.add(worker)

    def join(self, worker: int) -> None:
        """A worker is present from now on."""
        self.absent.discard(worker)

    def recover(self, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """What a worker kept, from what is here and what the others keep; None if that cannot be known."""
        return None

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
        if self.optimizer is not None:
            gradient = torch.empty_like(self.weights)  # of its own: optimisers may write into it
            for out, part in blocks(gradient, direction):
                torch.div(part, over, out=out)
            self.weights = self.optimizer.step(self.weights.clone() if self.lent else self.weights, gradient, lr)
        elif isinstance(lr, Tensor):
            dtype = self.weights.dtype
            self.weights = torch.addcmul(self.weights, direction.to(dtype), (lr / -over).to(dtype))
        elif direction.dtype == self.weights.dtype:
            self.weights = torch.add(self.weights, direction, alpha=-(lr / over), out=self._out())
        elif self.lent and self._blank is None and direction.numel() <= BLOCK:
            self.weights = torch.add(self.weights, direction.to(self.weights.dtype), alpha=-(lr / over))
        else:
            new = self._out()
            new = torch.empty_like(self.weights) if new is None else new
            for out, x, part in blocks(new, self.weights, direction):
                torch.add(x, part.to(x.dtype), alpha=-(lr / over), out=out)
            self.weights = new
        self.lent = False
        self.version += 1
        self.descents += 1

    def _out(self) -> Tensor | None:
        """Where the next weights are made: in place, or if these were read where ``_blank`` says; None: torch decides."""
        if not self.lent:
            return self.weights
        return None if self._blank is None else self._blank()


@dataclass(kw_only=True)
class ShapedState(State):
    """A server that looks at the weights tensor by tensor; whoever runs it fills in the problem's ``layout``."""

    layout: list[list[Any]] = field(default_factory=list)  # of each tensor its first number and its shape; none: one vector

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The tensors that a flat one (..., d) consists of, each of them flat, too."""
        return [flat[..., first : first + math.prod(shape)] for first, shape in self.places(flat)]

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """The tensors that a flat one (..., d) consists of, each (..., shape)."""
        shapes = [shape for _, shape in self.places(flat)]
        return [piece.reshape(*flat.shape[:-1], *shape) for piece, shape in zip(self.pieces(flat), shapes, strict=True)]

    def places(self, flat: Tensor) -> list[list[Any]]:
        """Of each tensor its first number and its shape."""
        return self.layout or [[0, [flat.shape[-1]]]]

    def flattened(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of both."""
        axes = self.weights.ndim - 1  # in front, where several runs advance together
        return torch.cat([tensor.reshape(*tensor.shape[:axes], -1) for tensor in tensors], dim=-1)


_MOST_ENTRIES = 2000  # tensors of a list or a dict whose changes are noticed


class Snapshot:
    """A copy of a state, taken before a step that may fail half way, so that the step can be undone."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._fields: dict[str, Any] = {}
        self._optimizer: dict[str, Any] | None = None
        self._entries: list[tuple[Tensor, int]] = []  # tensors of lists and dicts, and how often they were written into
        self._all = True  # whether those are all

    def take(self) -> None:
        """Copy what a step may write into; of lists and dicts the entries are kept, which a step should replace."""
        state, optimizer = self._state, self._state.optimizer
        self._fields = {
            f.name: self._copied(f.name, getattr(state, f.name)) for f in fields(state) if f.name != "optimizer"
        }
        self._optimizer = None if optimizer is None else copy.deepcopy(optimizer.save())
        several = [value for value in self._fields.values() if isinstance(value, (list, dict))]
        self._all = all(len(value) <= _MOST_ENTRIES for value in several)
        entries = (entry for value in several for entry in (value if isinstance(value, list) else value.values()))
        self._entries = [(entry, entry._version) for entry in entries if isinstance(entry, Tensor)] if self._all else []

    def _copied(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            old = self._fields.get(name)  # new memory would cost more than the copy
            if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device):
                return old.copy_(value)
            return value.clone()
        return copy.copy(value) if isinstance(value, (list, dict, set)) else value

    def restore(self) -> bool:
        """Undo what happened since; False if that is uncertain, because what a list holds was written into."""
        for name, value in self._fields.items():
            setattr(self._state, name, value)
        if self._state.optimizer is not None and self._optimizer is not None:
            self._state.optimizer.load(self._optimizer)
        self._fields = {}
        return self._all and all(entry._version == version for entry, version in self._entries)


_SAME_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def pattern_of(length: int, dtype: torch.dtype) -> torch.dtype:
    """The integers as which the bits of a vector are added up."""
    return torch.int64 if length * dtype.itemsize % 8 == 0 else _SAME_SIZE[dtype.itemsize]


def checksum(tensor: Tensor, pattern: torch.dtype | None = None) -> int | Tensor:
    """The sum of a tensor's bit patterns modulo 2**64, as int64: one pass, and any single changed bit shows.

    Of several rows or on a GPU it is a tensor, one number for each row: nobody waits for it. A slice of a vector has the
    ``pattern`` of the whole.
    """
    total = tensor.view(pattern or pattern_of(tensor.shape[-1], tensor.dtype)).sum(-1)
    return int(total.item()) if tensor.ndim == 1 and tensor.is_cpu else total


def is_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite; a finite sum of squares settles it in one pass."""
    flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
    return math.isfinite(flat.dot(flat).item()) or bool(torch.isfinite(tensor).all())

"""How long vectors are cut into slices and put together again.

Where only decisions are made, one number stands in for a vector: what is longer than in a state with such a stand-in is a
vector, and is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.compression import Packed
from ..core.errors import BadInput

STAND_IN = 1  # numbers that stand in for a vector
GRAIN = 64  # weights of which slices have multiples: the last few of a vector may be rounded otherwise than the rest
COARSE = 4096  # the same of long slices, which then begin with a page of memory, whatever the weights' type


@dataclass(frozen=True)
class Slices:
    """Where a vector is cut: ``count`` slices of nearly the same size."""

    length: int
    count: int

    def __post_init__(self) -> None:
        if self.length < GRAIN * self.count:
            most = self.length // GRAIN
            expected = f"at most {most}, so that each has {GRAIN} weights or more" if most else "none, it is too small"
            raise BadInput(f"shards is {self.count} for a model of {self.length:,} weights; expected {expected}.")

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The first weight of each slice, and the one after its last."""
        grain = COARSE if self.length >= COARSE * GRAIN * self.count else GRAIN
        each, more = divmod(self.length // grain, self.count)
        bounds = [grain * (each * k + min(k, more)) for k in range(self.count)]
        return tuple(zip(bounds, [*bounds[1:], self.length], strict=True))


class Elsewhere(dict[str, Any]):
    """Named tensors and numbers that a worker keeps, with stand-ins for its vectors; ``place`` says where these are."""

    def __init__(self, few: Mapping[str, Any], place: Any, size: int = 0) -> None:
        super().__init__(few)
        self.place, self.size = place, size  # bytes of all of it

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.place, self.size)


def elsewhere(few: Mapping[str, Mapping[str, Any]], place: Any, size: int) -> dict[str, Mapping[str, Any]]:
    """What a worker keeps, by kind, all of it in one place and of so many bytes."""
    sizes = [size, *[0] * len(few)]
    return {kind: Elsewhere(part, place, own) for (kind, part), own in zip(few.items(), sizes, strict=False)}


class Lazily(Mapping[int, Any]):
    """What each worker keeps, of which one is made when it is asked for, so that they need not be here all at once."""

    def __init__(self, values: Mapping[int, Any], make: Callable[[Any], Any]) -> None:
        self._values, self._make = values, make

    def __getitem__(self, worker: int) -> Any:
        return self._make(self._values[worker])

    def __contains__(self, worker: object) -> bool:
        return worker in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def cut(value: Any, like: Any, start: int, stop: int) -> Any:
    """A slice of plain values: of every tensor that is longer than in ``like``, where stand-ins are, these numbers."""
    if isinstance(value, Tensor):
        whole = value.ndim == 0 or value.shape[-1] == like.shape[-1]
        return value if whole else value[..., start:stop].clone()
    if isinstance(value, Mapping):
        return {name: cut(part, like[name], start, stop) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cut(part, other, start, stop) for part, other in zip(value, like, strict=True))
    return value


def joined(parts: Sequence[Any], like: Any) -> Any:
    """The inverse of ``cut``."""
    first = parts[0]
    if isinstance(first, Tensor):
        whole = first.ndim == 0 or first.shape[-1] == like.shape[-1]
        return first if whole else torch.cat(list(parts), dim=-1)
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts], like[name]) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(items, other) for *items, other in zip(*parts, like, strict=True))
    return first


def stand_ins(value: Any, length: int) -> Any:
    """Plain values with stand-ins for all vectors of that length; where there are stand-ins already, they stay."""
    if isinstance(value, Elsewhere):
        return value
    if isinstance(value, Tensor):
        return value[..., :STAND_IN].clone() if value.shape[-1:] == (length,) else value
    if isinstance(value, Mapping):
        return {name: stand_ins(part, length) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(stand_ins(part, length) for part in value)
    return value


def vectors_of(memory: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Of named tensors and numbers the vectors of that length."""
    return {name: part for name, part in memory.items() if isinstance(part, Tensor) and part.shape[-1:] == (length,)}


def cut_part(part: Any, start: int, stop: int) -> Any:
    """A slice of a vector as it travels: a tensor, an array, or one that was made small."""
    if not isinstance(part, Packed):
        return part[..., start:stop]
    first, second = part.parts
    if first.dtype in (np.int8, torch.int8):
        return Packed(stop - start, (first[..., start:stop], second))
    here = (first >= start) & (first < stop)
    return Packed(stop - start, (first[here] - start, second[here]))

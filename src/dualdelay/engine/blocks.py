"""The state of a server's slice in blocks: what one pass of a step reads is in the processor's cache for the next one.

A step of a long slice goes through memory several times: the exchange in the sum, the descent, the checksum. A method that
can be cut into shards can be cut into blocks as well, whatever it is; so a shard makes all passes of a step over one block
before it goes to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..core.draws import Draws
from ..core.state import State


def can_be_cut(value: Any) -> bool:
    """Whether it is known how something in a state is cut: tensors, also in dicts, lists and tuples, and plain values."""
    if type(value) is dict:
        return all(map(can_be_cut, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(can_be_cut, value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, set, frozenset, Draws))


class Blocks:
    """A state in blocks, each a state of its own whose vectors are parts of those of the whole."""

    def __init__(self, state: State, size: int) -> None:
        """Cut a state into blocks of so many weights; it is out of date from the first step on until it is renewed."""
        self._whole, self._length = state, state.weights.shape[-1]
        self._places = [(start, min(start + size, self._length)) for start in range(0, self._length, size)]
        self._states = [copy.copy(state) for _ in self._places]
        for f in fields(state):
            for block, place in zip(self._states, self._places, strict=True):
                setattr(block, f.name, self._part(getattr(state, f.name), *place))

    def __iter__(self) -> Iterator[tuple[tuple[int, int], State]]:
        """Where each block begins and ends, and its state."""
        return iter(zip(self._places, self._states, strict=True))

    @property
    def version(self) -> int:
        """Updates made."""
        return self._states[0].version

    @property
    def weights(self) -> Tensor:
        """The weights of all blocks, which are parts of it from then on: the next time nothing is copied."""
        weights = _beside([state.weights for state in self._states])
        for state, (start, stop) in zip(self._states, self._places, strict=True):
            state.weights = weights[start:stop]
        return weights

    def cut(self, parts: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        """The part of a message, by name, that belongs to a block."""
        return {name: self._part(part, start, stop) for name, part in parts.items()}

    def renewed(self) -> State:
        """The whole state as the blocks are now."""
        for f in fields(self._whole):
            setattr(self._whole, f.name, self._joined([getattr(state, f.name) for state in self._states]))
        return self._whole

    def _part(self, value: Any, start: int, stop: int) -> Any:
        """What a block has of something: of vectors its part in place, and of all else a copy of its own."""
        if isinstance(value, Tensor):
            return value[..., start:stop] if value.shape[-1:] == (self._length,) else value.clone()
        if isinstance(value, dict):
            return {name: self._part(part, start, stop) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return _like(value, [self._part(part, start, stop) for part in value])
        return copy.deepcopy(value)

    def _joined(self, parts: Sequence[Any]) -> Any:
        """The inverse: vectors are put together, without a copy where they still lie side by side."""
        first = parts[0]
        if isinstance(first, Tensor):
            sizes = [stop - start for start, stop in self._places]
            vectors = [part.shape[-1:] for part in parts] == [(size,) for size in sizes]
            return _beside(parts) if vectors else first
        if isinstance(first, dict):
            return {name: self._joined([part[name] for part in parts]) for name in first}
        if isinstance(first, (list, tuple)):
            return _like(first, [self._joined(items) for items in zip(*parts, strict=True)])
        return first


def _like(value: Any, parts: list[Any]) -> Any:
    """A list or a tuple of the same type with other entries."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other: as they are if they are neighbours in one piece of memory, or else a copy."""
    first, place = parts[0], parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if part.ndim != 1 or not part.is_contiguous() or part.data_ptr() != place or not same:
            return torch.cat(list(parts), -1)
        place += part.nbytes
    return first.as_strided((sum(map(len, parts)),), (1,))

"""Vectors made small for their way: a byte for each number, or the largest numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import BadInput

Compress = str | float | None

_LEVELS = 127  # of an int8 on either side of zero


class Packed(NamedTuple):
    """A vector of ``length`` numbers as it travels; of replicas one row each.

    ``parts`` are the numbers in bytes and what one step of them is worth, or the places of the largest and their values.
    """

    length: int
    parts: tuple[Any, Any]

    def unpack(self) -> Tensor:
        """The vector that the receiver sees, and the sender remembers."""
        first, second = (torch.as_tensor(part) for part in self.parts)
        if first.dtype == torch.int8:
            return first.to(second.dtype) * second
        return second.new_zeros(*second.shape[:-1], self.length).scatter_(-1, first.long(), second)

    def arrays(self) -> Packed:
        """The same with numpy arrays for parts, which processes exchange."""
        return Packed(self.length, tuple(part.detach().cpu().numpy() for part in self.parts))


def require_way(name: str, compress: Compress) -> None:
    """Refuse what is no way to compress."""
    share = isinstance(compress, Real) and not isinstance(compress, bool) and 0 < compress <= 1
    if compress not in (None, "int8") and not share:
        raise BadInput(
            f"{name} is {compress!r}; expected 'int8', or the share of numbers to be sent, above 0 and up to 1, such as "
            "0.01."
        )


def require_compress(compress: Compress, memory: str) -> None:
    """Refuse what is no way to compress, or has no differences to be used on."""
    require_way("compress", compress)
    if compress is not None and memory != "workers":
        raise BadInput(
            f"compress is {compress!r} with memory={memory!r}; differences are sent with memory='workers' alone."
        )


def pack(vector: Tensor, compress: str | float) -> Packed:
    """A vector in as many bytes as it has numbers, or its largest numbers; what is not finite stays so."""
    size = vector.abs()
    if isinstance(compress, str):
        step = size.amax(-1, keepdim=True) / _LEVELS
        step = torch.where(step == 0, torch.ones_like(step), step)
        return Packed(vector.shape[-1], ((vector / step).round().clamp(-_LEVELS, _LEVELS).to(torch.int8), step))
    count = max(1, round(compress * vector.shape[-1]))
    places = size.topk(count, dim=-1).indices
    return Packed(vector.shape[-1], (places.to(torch.int32), vector.gather(-1, places)))


def difference(
    gradient: Tensor, memory: Mapping[str, Any] | None, compress: Compress = None
) -> tuple[Tensor | Packed, dict[str, Tensor]]:
    """What a worker that keeps its last gradient sends of its new one, and what it keeps then.

    It keeps what was sent, not what was meant: what one message left out, by rounding or on purpose, is in the next.
    """
    before = torch.zeros_like(gradient, dtype=torch.float64) if memory is None else memory["gradient"]
    delta = (gradient - before).to(gradient.dtype)
    if compress is None:
        return delta, {"gradient": before + delta}
    packed = pack(delta, compress)
    return packed, {"gradient": before + packed.unpack()}


def unpacked(value: Tensor | Packed) -> Tensor:
    """What the receiver sees of a message."""
    return value.unpack() if isinstance(value, Packed) else value


def size_of(value: Tensor | Packed | Mapping[str, Tensor | Packed]) -> int:
    """The bytes of one run's message, also where replicas share the tensor."""
    if isinstance(value, Mapping):
        return sum(size_of(part) for part in value.values())
    parts = [torch.as_tensor(part) for part in value.parts] if isinstance(value, Packed) else [value]
    return sum(part.shape[-1] * part.element_size() for part in parts)

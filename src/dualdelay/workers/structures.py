"""Messages as plain values for JSON, and the arrays among them beside that; nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.compression import Packed
from .messages import Array

_DEEPEST = 12  # levels of a structure


def array_name(place: int) -> str:
    """What an array is called beside the structure that names it by its place."""
    return f"t{place}"


class BadMessage(ValueError):
    """Bytes that are no message, or another than was expected."""


def plain(value: Any, arrays: list[Array]) -> Any:
    """A structure for JSON; arrays are collected and named by their places."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, Packed):
        return {"packed": [value.length, *(plain(np.asarray(part), arrays) for part in value.parts)]}
    if isinstance(value, Mapping):
        return {"dict": {str(key): plain(part, arrays) for key, part in value.items()}}
    if isinstance(value, (list, tuple)):
        return [plain(part, arrays) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot travel")


def structure(value: Any, arrays: Mapping[str, Array], depth: int = 0) -> Any:
    """The inverse of ``plain``, with arrays by ``array_name``; refuses what that would not write."""
    if depth > _DEEPEST:
        raise BadMessage("a structure is too deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [structure(part, arrays, depth + 1) for part in value]
    kind, inside = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "array" and type(inside) is int and array_name(inside) in arrays:
        return arrays[array_name(inside)]
    if kind == "dict" and isinstance(inside, dict):
        return {key: structure(part, arrays, depth + 1) for key, part in inside.items()}
    if kind == "packed" and isinstance(inside, list) and len(inside) == 3:
        length, *parts = (structure(part, arrays, depth + 1) for part in inside)
        return _packed(length, parts)
    raise BadMessage("a structure has an unknown part")


def _packed(length: Any, parts: Sequence[Any]) -> Packed:
    """A vector made small, if it can be unpacked without surprises: in range, finite in number, of the types we use."""
    first, second = parts
    good = type(length) is int and 0 <= length < 2**40 and all(isinstance(part, np.ndarray) for part in parts)
    if good and first.dtype == np.int8:
        good = first.shape == (length,) and second.shape == (1,)
    elif good:
        good = first.dtype == np.int32 and first.ndim == 1 and first.shape == second.shape and len(first) <= length
        good = good and (not len(first) or (int(first.min()) >= 0 and int(first.max()) < length))
    if not good or second.dtype.kind != "f":
        raise BadMessage("a vector that was made small is none")
    return Packed(length, (first, second))

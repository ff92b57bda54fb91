"""Messages as plain values for JSON, and the arrays among them beside that; nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.compression import Packed
from .messages import Array

Kinds = Mapping[str, type]
"""Named tuples that travel as what they are, by name."""

_DEEPEST = 12  # levels of a structure
_TUPLE = "tuple"


UNSAYABLE = (TypeError, ValueError, RecursionError)
"""What writing a message raises if something in it cannot travel, such as a number of thousands of digits."""


def array_name(place: int) -> str:
    """What an array is called beside the structure that names it by its place."""
    return f"t{place}"


class BadMessage(ValueError):
    """Bytes that are no message, or another than was expected."""


def plain(value: Any, arrays: list[Array], kinds: Kinds | None = None, depth: int = 0) -> Any:
    """A structure for JSON; arrays are collected and named by their places.

    With ``kinds`` all of it is read again as it was, and what would not be is refused. Without, tuples become lists, keys
    texts and numbers of numpy's plain ones, and the reader refuses the rest.
    """
    if kinds is not None and depth > _DEEPEST:
        raise TypeError("a structure that is so deep cannot travel")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is np.ndarray or (kinds is None and isinstance(value, np.ndarray)):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, Packed):
        halves = [np.asarray(part) for part in value.parts]
        if kinds is not None:
            _require_packed(value.length, halves, TypeError)
        return {"packed": [value.length, *(plain(half, arrays, kinds, depth + 1) for half in halves)]}
    if isinstance(value, Mapping):
        if kinds is not None and not (type(value) is dict and all(type(key) is str for key in value)):
            raise TypeError("a dict whose keys are no texts cannot travel as it is")
        return {"dict": {str(key): plain(part, arrays, kinds, depth + 1) for key, part in value.items()}}
    if isinstance(value, (list, tuple)):
        parts = [plain(part, arrays, kinds, depth + 1) for part in value]
        if kinds is None or type(value) is list:
            return parts
        name = _TUPLE if type(value) is tuple else type(value).__name__
        if name == _TUPLE or kinds.get(name) is type(value):
            return {name: parts}
    elif kinds is None and isinstance(value, (bool, int, float, str, np.generic)):
        return value.item() if isinstance(value, np.generic) else value
    raise TypeError(f"a {type(value).__name__} cannot travel")


def structure(value: Any, arrays: Mapping[str, Array], kinds: Kinds | None = None, depth: int = 0) -> Any:
    """The inverse of ``plain``, with arrays by ``array_name``; refuses what that would not write."""
    if depth > _DEEPEST:
        raise BadMessage("a structure is too deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [structure(part, arrays, kinds, depth + 1) for part in value]
    kind, inside = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "array" and type(inside) is int and array_name(inside) in arrays:
        return arrays[array_name(inside)]
    if kind == "dict" and isinstance(inside, dict):
        return {key: structure(part, arrays, kinds, depth + 1) for key, part in inside.items()}
    if kind == "packed" and isinstance(inside, list) and len(inside) == 3:
        length, first, second = (structure(part, arrays, kinds, depth + 1) for part in inside)
        _require_packed(length, (first, second), BadMessage)
        return Packed(length, (first, second))
    if kinds is not None and isinstance(inside, list) and (kind == _TUPLE or kind in kinds):
        parts = [structure(part, arrays, kinds, depth + 1) for part in inside]
        return tuple(parts) if kind == _TUPLE else kinds[kind](*parts)
    raise BadMessage("a structure has an unknown part")


def _require_packed(length: Any, parts: Sequence[Any], error: type[Exception]) -> None:
    """Refuse a vector made small that cannot be unpacked without surprises: in range, finite in number, of our types."""
    good = type(length) is int and 0 <= length < 2**40 and len(parts) == 2
    if good and all(isinstance(part, np.ndarray) and part.ndim > 0 for part in parts):
        first, second = parts
        if first.dtype == np.int8:
            good = first.shape[-1] == length and second.shape == (*first.shape[:-1], 1)
        else:
            good = first.dtype == np.int32 and first.shape == second.shape and first.shape[-1] <= length
            good = good and (not first.size or (int(first.min()) >= 0 and int(first.max()) < length))
        if good and second.dtype.kind in "fi":
            return
    raise error("a vector that was made small is none")

"""Messages as bytes: safetensors files whose first tensor is the structure, as JSON; nothing is pickled.

What comes in is trusted with nothing: it has to be a file of that format, its structure one of those listed here, with
every field there, of its type, and none beside them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.compression import Packed
from ..messages import Array
from ..structures import BadMessage, array_name, plain, structure

PROTOCOL = 1
LARGEST_STRUCTURE = 4 * 2**20  # bytes of JSON in one message
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_CONTENT = "content"
_LARGE = 256 * 1024  # bytes from which on memory is kept


Pieces = Sequence[bytes | memoryview]
"""A message as it is sent, one piece after the other; those of arrays are the arrays' own memory."""


# --- bytes ---


def encode(kind: str, fields: Mapping[str, Any]) -> list[bytes | memoryview]:
    """A message in pieces."""
    arrays: list[Array] = []
    text = json.dumps({"kind": kind, "fields": {name: plain(value, arrays) for name, value in fields.items()}}).encode()
    text += b" " * (-len(text) % 8)
    header: dict[str, Any] = {_CONTENT: {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}}
    pieces: list[bytes | memoryview] = []
    end = len(text)
    order = sorted(range(len(arrays)), key=lambda k: -arrays[k].itemsize)  # the largest first, so that all are aligned
    for k in order:
        array = np.ascontiguousarray(arrays[k])
        if array.dtype not in _NAMES:
            raise TypeError(f"an array of {array.dtype} cannot travel")
        header[array_name(k)] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(arrays[k].shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
        if array.nbytes:
            pieces.append(array.reshape(-1).view(np.uint8).data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little") + head + text, *pieces]


def size_of(pieces: Pieces) -> int:
    """How many bytes a message has."""
    return sum(len(piece) for piece in pieces)


def part_of(pieces: Pieces, offset: int, most: int | None = None) -> list[bytes | memoryview]:
    """A message from some byte on, all of the rest or at most so many."""
    part: list[bytes | memoryview] = []
    for piece in pieces:
        rest = piece[offset:] if most is None else piece[offset : offset + most]
        part += [rest] if len(rest) else []
        offset = max(0, offset - len(piece))
        most = None if most is None else most - len(rest)
    return part


def _holders(rooms: list[Array], place: int) -> int:
    """How many hold a room, the list among them and whatever this version of Python adds."""
    return sys.getrefcount(rooms[place])


_UNUSED = _holders([np.empty(1, np.uint8)], 0)


class Rooms:
    """Memory for messages, used again when nobody reads what was there before: new pages cost more than what is copied."""

    def __init__(self, most: int = 4) -> None:
        """So many are kept."""
        self._kept: list[Array] = []
        self._most = most

    def take(self, size: int) -> Array:
        """Room for so many bytes that nothing else uses, and that is free again as soon as nothing holds it any more."""
        if size < _LARGE:
            return np.empty(size, np.uint8)
        for place in range(len(self._kept)):
            if self._kept[place].size == size and _holders(self._kept, place) == _UNUSED:
                return self._kept[place][:]
        self._kept = [np.empty(size, np.uint8), *self._kept][: self._most]
        return self._kept[0][:]


class Partial:
    """A message that is on its way, as far as it is here."""

    def __init__(self, size: int, rooms: Rooms) -> None:
        self.size, self.have = size, 0
        self._room: memoryview | None = None
        self._rooms = rooms

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.data[self.have : self.have + len(piece)] = piece
        self.have += len(piece)

    @property
    def data(self) -> memoryview:
        """The message, of which ``have`` bytes are there."""
        if self._room is None:
            self._room = self._rooms.take(self.size).data
        return self._room


def decode(data: bytes | bytearray | memoryview) -> tuple[str, dict[str, Any]]:
    """The kind and the fields of a message, whose arrays lie in its bytes; raises BadMessage for anything else."""
    try:
        arrays = _arrays(memoryview(data))
        text = arrays.pop(_CONTENT).tobytes()
        message = json.loads(text)
        kind, fields = message["kind"], message["fields"]
        if message.keys() != {"kind", "fields"} or not isinstance(kind, str) or not isinstance(fields, dict):
            raise BadMessage("it has no kind")
        decoded = {name: structure(value, arrays) for name, value in fields.items()}
    except BadMessage:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError):
        raise BadMessage("it is no safetensors file of a message") from None
    return kind, _checked(kind, decoded)


def _arrays(data: memoryview) -> dict[str, Array]:
    """The tensors of a safetensors file, not copied; every byte behind its header belongs to just one of them."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(LARGEST_STRUCTURE, len(data) - 8):
        raise BadMessage("it is no safetensors file of a message")
    header, body = json.loads(bytes(data[8 : 8 + length])), data[8 + length :]
    arrays: dict[str, Array] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        kind, shape, (start, stop) = np.dtype(_TYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        whole = all(type(size) is int and size >= 0 for size in (*shape, start, stop))
        if not whole or start != end or not start <= stop <= len(body) or math.prod(shape) * kind.itemsize != stop - start:
            raise BadMessage("its tensors are not where they are said to be")
        if name == _CONTENT and stop - start > LARGEST_STRUCTURE:
            raise BadMessage("its structure is too long")
        arrays[name], end = np.frombuffer(body[start:stop], dtype=kind).reshape(shape), stop
    if end != len(body):
        raise BadMessage("it is longer than its tensors")
    return arrays


# --- which messages there are ---

NUMBER, TEXT, TRUTH, WHOLE, ARRAYS, TREE, TEXTS = "number", "text", "truth", "whole", "arrays", "tree", "texts"
SCHEMAS: dict[str, dict[str, str]] = {
    # from a site
    "hello": {
        "protocol": WHOLE, "version": TEXT, "life": TEXT, "exchange": TEXT, "fingerprint": TEXT, "data": TEXT,
    },
    "ready": {"incarnation": WHOLE, "pid": WHOLE, "environment": TEXTS, "samples": "count"},
    "reply": {
        "request": "request", "value": ARRAYS, "keeps": TRUTH, "loss": NUMBER, "seconds": NUMBER, "error": TEXT,
        "steps": WHOLE, "refused": TEXT,
    },
    "evaluated": {"incarnation": WHOLE, "evaluation": WHOLE, "part": TREE},
    "kept": {"question": WHOLE, "held": TREE},
    # from the server
    "welcome": {
        "session": TEXT, "exchange": TEXT, "worker": WHOLE, "workers": WHOLE, "room": WHOLE, "algorithm": TREE,
        "uplink": "way", "seed": WHOLE, "threads": WHOLE,
    },
    "start": {"incarnation": WHOLE, "count": TRUTH},
    "stop": {},
    "job": {"request": "request", "model": TREE, "held": TREE},
    "poll": {"incarnation": WHOLE, "sequence": WHOLE},
    "evaluate": {
        "incarnation": WHOLE, "evaluation": WHOLE, "samples": "samples", "mean_samples": NUMBER, "aside": TRUTH,
        "model": TREE,
    },
    "ask": {"question": WHOLE, "accepted": WHOLE},
    "refused": {"text": TEXT},
    "end": {"text": TEXT},
}  # fmt: skip
FROM_SITES = ("ready", "reply", "evaluated", "kept")
_LONGEST_TEXT = 200_000
_REQUEST = (int, int, int, int, int, int, float, int, bool, bool, int, int)  # the fields of a JobRequest


def _checked(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    schema = SCHEMAS.get(kind)
    if schema is None or fields.keys() != schema.keys():
        raise BadMessage(f"a message {kind[:40]!r} has other fields than it should have")
    for name, expected in schema.items():
        if not _is(expected, fields[name]):
            raise BadMessage(f"{name} of a message {kind!r} is no {expected}")
    return fields


def _is(expected: str, value: Any) -> bool:
    match expected:
        case "text":
            return isinstance(value, str) and len(value) <= _LONGEST_TEXT
        case "truth":
            return isinstance(value, bool)
        case "whole":
            return _is_whole(value)
        case "number":
            return isinstance(value, float) or _is_whole(value)
        case "arrays":
            return _is_arrays(value)
        case "texts":
            return isinstance(value, dict) and len(value) <= 100 and all(_is("text", part) for part in value.values())
        case "count":
            return value is None or _is("text", value) or (_is_whole(value) and value >= 0)
        case "way":
            return value is None or isinstance(value, (str, float)) or _is_whole(value)
        case "samples":
            return value is None or _is_whole(value) or (_is_pair(value))
        case "request":
            return isinstance(value, list) and len(value) == len(_REQUEST) and all(map(_is_field, value, _REQUEST))
    return True  # a tree: whatever a structure may be


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))


def _is_field(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, float) or _is_whole(value)
    return isinstance(value, bool) if kind is bool else _is_whole(value)


def _is_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= 10_000 and all(isinstance(part, (np.ndarray, Packed)) for part in value.values())
    return isinstance(value, (np.ndarray, Packed))

"""The trace of a run: who arrived when, with what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Arrival
from ..core.state import checksum
from .events import EventKind
from .table import Column, Table

ARRIVAL_COLUMNS = ("time", "seconds", "worker", "draw", "version", "after", "loss", "fingerprint", "bytes", "steps", "down")
_ROW = Struct("=ddqqqqdqqqq")
_KINDS = np.dtype(
    list(zip(ARRIVAL_COLUMNS, ("f8", "f8", "i8", "i8", "i8", "i8", "f8", "i8", "i8", "i8", "i8"), strict=True))
)
_TOGETHER = 32  # weights of which fingerprints are taken in one call
_EVENT_FIELDS = ("kind", "row", "time", "worker", "draw", "version", "after", "text")


class Trace(Table):
    """One row per absorbed arrival.

    ``version`` is that of the model the worker was sent, ``after`` the server's once the arrival was absorbed, ``steps``
    the gradients that the job took, ``bytes`` what the worker sent and ``down`` what it was sent for the job. What is no
    arrival stands in ``events``, where ``row`` says how many arrivals came before it: rejected, left, joined, wake, and for
    real workers failed, crashed, lost, restored, frozen, thawed and late.
    """

    def __init__(self, columns: Mapping[str, Column], events: list[dict[str, Any]]) -> None:
        super().__init__(columns)
        self.events = events


def is_trace(columns: Mapping[str, Column], events: object) -> bool:
    """Whether columns and events have the kinds of values that a trace has."""
    if any(columns[name].dtype != _KINDS[name] for name in ARRIVAL_COLUMNS) or not isinstance(events, list):
        return False
    return all(isinstance(event, dict) and event.keys() == set(_EVENT_FIELDS) for event in events)


class Course:
    """A digest of a trace so far, so that what was saved of a run is not taken for that of another."""

    def __init__(self) -> None:
        self._rows, self._events = hashlib.sha256(), hashlib.sha256()

    def copy(self) -> Course:
        """The same, to go on with."""
        other = Course()
        other._rows, other._events = self._rows.copy(), self._events.copy()
        return other

    def add(self, rows: Mapping[str, Column], events: Iterable[Mapping[str, Any]]) -> str:
        """The digest after these rows and events."""
        self._rows.update(_packed(rows))
        for event in events:
            self._events.update(json.dumps(event, sort_keys=True).encode())
        return hashlib.sha256(self._rows.digest() + self._events.digest()).hexdigest()[:16]


def _packed(rows: Mapping[str, Column]) -> bytes:
    table = np.empty(len(rows["time"]), dtype=_KINDS)
    for name in ARRIVAL_COLUMNS:
        table[name] = rows[name]
    return table.tobytes()


class Recorder:
    """A trace that is still being written."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._later: list[tuple[int, Tensor]] = []  # rows whose fingerprint is to come: on a GPU, or of these weights
        self.events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def arrival(self, a: Arrival, after: int, fingerprint: int | Tensor) -> None:
        """Record an absorbed arrival. A fingerprint on a GPU is fetched when the rows are asked for.

        Of weights that are given in its place it is taken then, or when there are several: one call for all is quicker.
        """
        known = 0 if isinstance(fingerprint, Tensor) else fingerprint
        self._rows += _ROW.pack(a.time, a.seconds, *a.job, after, a.loss, known, a.bytes, a.steps, a.down)
        if isinstance(fingerprint, Tensor):
            self._later.append((len(self) - 1, fingerprint))
            if fingerprint.ndim and len(self._later) == _TOGETHER:
                self._take_fingerprints()

    def event(
        self, kind: EventKind, time: float, after: int, worker: int = -1, draw: int = -1, version: int = -1, text: str = ""
    ) -> None:
        """Record something that is no arrival."""
        values = (kind.value, len(self), time, worker, draw, version, after, text)
        self.events.append(dict(zip(_EVENT_FIELDS, values, strict=True)))

    def fill_fingerprints(self, first: int, fingerprints: Sequence[int]) -> None:
        """Put fingerprints that were not known before into rows from ``first`` on."""
        rows = np.frombuffer(self._rows, dtype=_KINDS)
        rows["fingerprint"][first : first + len(fingerprints)] = fingerprints

    def rows(self, start: int = 0) -> dict[str, Column]:
        """A copy of the rows from ``start`` on."""
        self._take_fingerprints()
        rows = np.frombuffer(bytes(self._rows[start * _ROW.size :]), dtype=_KINDS)
        return {name: rows[name].copy() for name in ARRIVAL_COLUMNS}

    def _take_fingerprints(self) -> None:
        """Put those into the rows that were still to come."""
        if self._later:
            places, given = [row for row, _ in self._later], torch.stack([value for _, value in self._later])
            values = torch.as_tensor(checksum(given)) if given.ndim > 1 else given
            np.frombuffer(self._rows, dtype=_KINDS)["fingerprint"][places] = values.cpu().numpy()
            self._later = []

    def extend(self, rows: Mapping[str, Column]) -> None:
        """Take over rows written earlier."""
        self._rows += _packed(rows)

    def trace(self) -> Trace:
        """What was recorded so far."""
        return Trace(self.rows(), list(self.events))

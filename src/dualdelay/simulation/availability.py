"""Workers that are absent for a while or for good, and what the server knows of it.

Either the server does not know, and the worker's job pauses (``AwaySpeeds``); or the absence is announced, and the worker
leaves and joins (``announced``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..core.draws import Draws
from ..core.errors import (
    BadInput,
    is_finite,
    plain_number,
    require_positive,
    require_several,
    require_whole,
    require_workers,
    shown,
)
from ..engine.events import EventKind
from .input_columns import read_columns, whole
from .speeds import Alternating, PacedSpeeds


class Change(NamedTuple):
    """A worker that leaves or joins a simulated fleet at a given time; one that joins is absent before."""

    kind: EventKind  # LEFT or JOINED
    worker: int
    time: float


def leave(worker: int, time: float) -> Change:
    """At that time the worker is gone, with the job it had."""
    return Change(EventKind.LEFT, worker, time)


def join(worker: int, time: float) -> Change:
    """At that time the worker is there; if it has not left before, it was absent from the start."""
    return Change(EventKind.JOINED, worker, time)


def checked_changes(changes: Iterable[Any]) -> list[Change]:
    """What a user gave for the changes of a run, if each can be one; whether there are such workers is not known here."""
    require_several("changes", changes, "changes, such as dd.speeds.leave(0, 10.0)")
    if isinstance(changes, Change):
        raise BadInput(f"changes is {shown(changes)}; expected a list of changes: changes=[dd.speeds.leave(0, 10.0)].")
    return [_checked_change(k, change) for k, change in enumerate(changes)]


def _checked_change(k: int, change: Any) -> Change:
    try:
        kind, worker, time = map(plain_number, change)
        if kind in (EventKind.LEFT, EventKind.JOINED) and type(worker) is int and type(time) in (int, float):
            return Change(EventKind(kind), worker, time)
    except (TypeError, ValueError):
        pass
    raise BadInput(
        f"changes[{k}] is {shown(change)}; expected dd.speeds.leave(worker, time) or dd.speeds.join(worker, time), a "
        "worker's number and a time."
    )


class Absence(NamedTuple):
    """A worker is away from ``start`` to ``end``; without an end it is gone for good, with start 0 it comes late."""

    worker: int
    start: float = 0.0
    end: float | None = None  # None or infinite: for good


_MOST_ABSENCES = 10_000_000  # that chance may make

Absences = str | Path | Sequence[Sequence[Any]]


def checked_absences(absences: Absences, workers: int | None = None) -> list[Absence]:
    """Absences given in a list or in a file, checked, by worker and time; those that touch are made one."""
    workers = plain_number(workers)
    if workers is not None:
        require_workers("workers", workers)
    if isinstance(absences, (str, Path)):
        named = _read(Path(absences))
    else:
        require_several("absences", absences, "triples (worker, start, end)")
        named = [(f"absences[{k}]", given) for k, given in enumerate(absences)]
    checked = [(where, _checked(where, given, workers)) for where, given in named]
    merged: list[Absence] = []
    for where, absence in sorted(checked, key=lambda pair: (pair[1].worker, pair[1].start)):
        before = merged[-1] if merged and merged[-1].worker == absence.worker else None
        if before is not None and (before.end is None or absence.start < before.end):
            lasts = "is for good" if before.end is None else f"lasts to {before.end:g}"
            raise BadInput(
                f"{where}: worker {absence.worker} is away from {absence.start:g}, but its absence from {before.start:g} "
                f"{lasts}; expected absences of one worker that do not overlap."
            )
        if before is not None and before.end == absence.start:
            merged[-1] = before._replace(end=absence.end)
        else:
            merged.append(absence)
    return merged


def _read(path: Path) -> list[tuple[str, Sequence[Any]]]:
    columns = read_columns(path, ("worker", "start", "end"))
    ends = [None if math.isnan(end) else end for end in columns["end"]]
    workers = [whole(path, row, "worker", worker) for row, worker in enumerate(columns["worker"])]
    rows = zip(workers, columns["start"], ends, strict=True)
    return [(f"{path}, row {row}", absence) for row, absence in enumerate(rows, 1)]


def _checked(where: str, given: Sequence[Any], workers: int | None) -> Absence:
    try:
        worker, start, end = map(plain_number, Absence(*given))
        start, end = float(start), math.inf if end is None else float(end)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(
            f"{where} is {shown(given)}; expected (worker, start, end), such as (2, 10.0, 25.0), with end None for good."
        ) from None
    require_whole(f"{where}: worker", worker, 0, None if workers is None else workers - 1)
    if not (math.isfinite(start) and start >= 0):
        raise BadInput(f"{where}: start is {start:g}; expected a finite time, zero or more.")
    if not end > start:
        raise BadInput(f"{where}: end is {end:g}; expected a time after its start, {start:g}, or none at all: for good.")
    return Absence(worker, start, end if end < math.inf else None)


@dataclass(frozen=True)
class AwaySpeeds(PacedSpeeds):
    """Another model whose workers are away at times, without the server's knowing: a job pauses and then goes on.

    A job that its worker does not end before it is gone for good never ends. To tell the server, use ``announced``.
    """

    absences: Absences
    """Triples (worker, start, end), with end None for good; or a .csv or .parquet file with columns worker, start, end."""
    _moments: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        absences = tuple(checked_absences(self.absences, self.speeds.n))
        object.__setattr__(self, "absences", absences)
        for worker, start, end in absences:  # every second moment is the end of an absence
            self._moments.setdefault(worker, []).extend((start, math.inf if end is None else end))

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        moments = self._moments.get(worker, [])
        k = bisect_right(moments, time)
        return (math.inf if k % 2 else 1.0), moments[k] if k < len(moments) else math.inf


def announced(absences: Absences, workers: int | None = None) -> list[Change]:
    """Absences that the server knows of, as ``changes`` of a ``SimulatedFleet``: the worker leaves and joins.

    It leaves with its job. A worker away from time 0 is absent from the beginning; one that is gone for good never joins.
    ``workers`` is their number, if it is to be checked now.
    """
    changes = []
    for worker, start, end in checked_absences(absences, workers):
        if start > 0 or end is None:  # who only joins is absent before
            changes.append(leave(worker, start))
        if end is not None:
            changes.append(join(worker, end))
    return sorted(changes, key=lambda change: change.time)


def on_off(workers: int, on: float, off: float, until: float, seed: int = 0) -> list[Absence]:
    """Absences by chance: each worker is there and away by turns, for exponential times with means ``on`` and ``off``.

    At every moment, also the first, a worker is away with probability off / (on + off). Those absences are given that begin
    before ``until``.
    """
    workers, on, off, until, seed = map(plain_number, (workers, on, off, until, seed))
    require_workers("workers", workers)
    for name, value in (("on", on), ("off", off), ("until", until)):
        require_positive(name, value)
    if not workers * (until / (on + off)) <= _MOST_ABSENCES:
        raise BadInput(
            f"on is {on:g} and off is {off:g}, which makes about {workers * (until / (on + off)):.2g} absences until "
            f"{until:g}; expected {_MOST_ABSENCES:,} at most. Make them longer, or until smaller."
        )
    turns, absences = Alternating(Draws(seed, "absences"), on, off, 0), []
    for worker in range(workers):
        start = 0.0
        while start < until:
            state, end = turns.at(worker, start)
            if state:
                absences.append(Absence(worker, start, end))
            start = end
    return absences


def dropouts(workers: int, share: float, until: float, seed: int = 0) -> list[Absence]:
    """Workers that leave for good by chance: a ``share`` of them, rounded, each at a uniform time before ``until``."""
    workers, share, until, seed = map(plain_number, (workers, share, until, seed))
    require_workers("workers", workers)
    require_positive("until", until)
    if not is_finite(share) or not 0 <= share <= 1:
        raise BadInput(f"share is {shown(share)}; expected a number from 0 to 1.")
    draws = Draws(seed, "absences")
    gone = draws.permutation(workers, 1)[: math.floor(share * workers + 0.5)]
    return [Absence(worker, until * draws.uniform(1, worker)) for worker in sorted(gone.tolist())]

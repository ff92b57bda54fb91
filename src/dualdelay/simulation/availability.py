"""Workers that are away for a while or for good: one noun, the absence, and its two meanings.

Either the server is not told, and the worker's job pauses (``AwaySpeeds``); or it is told, and the worker leaves and joins
(``announced``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
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
from .clocks import Change, join, leave
from .input_columns import read_columns, whole
from .paces import Alternating, BurstySpeeds, DriftingSpeeds
from .speeds import SPEEDS as STEADY
from .speeds import PacedSpeeds


class Absence(NamedTuple):
    """A worker is away from ``start`` to ``end``; without an end it is gone for good, with start 0 it comes late."""

    worker: int
    start: float = 0.0
    end: float | None = None  # None or infinite: for good


_MOST = 10_000_000  # absences that chance may make

Absences = str | Path | Sequence[Sequence[Any]]


def away(absences: Absences, workers: int | None = None) -> list[Absence]:
    """Absences given in a list or in a file, checked, by worker and time; those that touch are made one."""
    workers = plain_number(workers)
    if workers is not None:
        require_workers("workers", workers)
    if isinstance(absences, (str, Path)):
        named = _read(Path(absences))
    else:
        require_several("absences", absences, "triples (worker, start, end)")
        named = [(f"absences[{k}]", given) for k, given in enumerate(absences)]
    mine: list[Absence] = []
    for where, one in sorted(((where, _checked(where, given, workers)) for where, given in named), key=_place):
        before = mine[-1] if mine and mine[-1].worker == one.worker else None
        if before is not None and (before.end is None or one.start < before.end):
            lasts = "is for good" if before.end is None else f"lasts to {before.end:g}"
            raise BadInput(
                f"{where}: worker {one.worker} is away from {one.start:g}, but its absence from {before.start:g} {lasts}; "
                "expected absences of one worker that do not overlap."
            )
        if before is not None and before.end == one.start:
            mine[-1] = before._replace(end=one.end)
        else:
            mine.append(one)
    return mine


def _place(named: tuple[str, Absence]) -> tuple[int, float]:
    return named[1].worker, named[1].start


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
    """Another model whose workers are away at times, which nobody tells the server: a job pauses and then goes on.

    A job that its worker does not end before it is gone for good takes for ever. To tell the server, use ``announced``.
    """

    absences: Absences
    """Triples (worker, start, end), with end None for good; or a .csv or .parquet file with columns worker, start, end."""
    _moments: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        mine = tuple(away(self.absences, self.speeds.n))
        object.__setattr__(self, "absences", mine)
        for worker, start, end in mine:  # every second moment is the end of an absence
            self._moments.setdefault(worker, []).extend((start, math.inf if end is None else end))

    def stretch(self, worker: int, time: float) -> tuple[float, float]:
        moments = self._moments.get(worker, [])
        k = bisect_right(moments, time)
        return (math.inf if k % 2 else 1.0), moments[k] if k < len(moments) else math.inf


def announced(absences: Absences, workers: int | None = None) -> list[Change]:
    """Absences that the server is told of, as ``changes`` of ``simulate``: the worker leaves, with its job, and joins.

    Who is away from time 0 is absent from the beginning; who is gone for good never joins. ``workers`` is their number, if
    it is to be checked now.
    """
    changes = []
    for worker, start, end in away(absences, workers):
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
    if not workers * (until / (on + off)) <= _MOST:
        raise BadInput(
            f"on is {on:g} and off is {off:g}, which makes about {workers * (until / (on + off)):.2g} absences until "
            f"{until:g}; expected {_MOST:,} at most. Make them longer, or until smaller."
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


SPEEDS = {**STEADY, "drifting": DriftingSpeeds, "bursty": BurstySpeeds, "away": AwaySpeeds}

"""The two delays of the paper, derived from the versions in a trace.

In iteration t, the update that makes version t, worker i's gradient in use was taken at version u_i(t). Its model delay is
tau_i(t) = t - u_i(t), at least 1; its data delay d_i(t) is the number of iterations since it was first used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .events import EventKind
from .trace import Trace

Grid = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Delays:
    """How stale the gradients of a run were, if each is first used by the next update after its arrival.

    That is so for all methods here but three: Ringmaster ignores some, ACED leaves out old ones, and Ringleader sets some
    aside for its next round.
    """

    tau_max: int
    """The largest model delay of any gradient in use."""
    tau_avg: float
    """The mean model delay over workers and iterations 1..T-1; for methods without memory, over arrivals."""
    arrival_max: int
    """The largest model delay of a gradient at its first use."""
    arrival_avg: float
    """The mean model delay of a gradient at its first use."""


def used_in(trace: Trace) -> Grid:
    """For each arrival, the iteration that first used it; one beyond the last iteration if none did yet."""
    places = np.concatenate([_places(trace), [2 * event["row"] for event in trace.events]]).astype(np.int64)
    versions = np.concatenate([trace.after, [event["after"] for event in trace.events]]).astype(np.int64)
    order = np.lexsort((versions, places))
    places, versions = places[order], versions[order]
    updates = np.flatnonzero(np.diff(versions, prepend=0) > 0)
    iterations = np.append(versions[updates], last_version(trace) + 1)
    return iterations[np.searchsorted(places[updates], _places(trace))]


def _places(trace: Trace) -> Grid:
    """Where each arrival stands: arrival r at 2r + 1, and an event between arrivals r - 1 and r at 2r."""
    return 2 * np.arange(len(trace)) + 1


def last_version(trace: Trace) -> int:
    """The server's version at the end of a trace."""
    events = [event["after"] for event in trace.events]
    return int(max([trace.after[-1] if len(trace) else 0, *events]))


def delays(trace: Trace, *, remembers: bool) -> Delays:
    """Summarise a run's delays; ``remembers`` says whether its method goes on using gradients after their first use."""
    used, last = used_in(trace), last_version(trace)
    begin, taken = used[used <= last], trace.version[used <= last]
    if remembers:
        _, begin, taken, end = _segments(trace, used, last)
    if not len(begin):
        return Delays(0, 0.0, 0, 0.0)
    at_arrival = int((begin - taken).max()), float((begin - taken).mean())
    if not remembers:
        return Delays(*at_arrival, *at_arrival)
    sums, count = _in_use(begin, taken, end, last)
    return Delays(int((end - taken).max()), float(sums.sum() / count.sum()), *at_arrival)


def mean_ages(trace: Trace, workers: int) -> npt.NDArray[np.float64]:
    """For each worker, the mean model delay of its gradient in use, over iterations 1..T-1."""
    last = last_version(trace)
    worker, begin, taken, end = _segments(trace, used_in(trace), last)
    sums, count = _in_use(begin, taken, end, last)
    return np.bincount(worker, sums, workers) / np.bincount(worker, count, workers)


def _in_use(begin: Grid, taken: Grid, end: Grid, last: int) -> tuple[Grid, Grid]:
    """For each gradient that was used, the sum of its delays over the iterations that used it, and their number."""
    until = np.minimum(end, max(last - 1, 1))  # the paper's mean is over t = 1..T-1
    count = np.maximum(until - begin + 1, 0)  # iterations begin..until use a gradient taken at version `taken`
    return (begin + until) * count // 2 - taken * count, count


def _segments(trace: Trace, used: Grid, last: int) -> tuple[Grid, Grid, Grid, Grid]:
    """For each gradient that was used: its worker, its first iteration, its version, its last iteration."""
    left = [event for event in trace.events if event["kind"] == EventKind.LEFT]
    worker = np.concatenate([trace.worker, [event["worker"] for event in left]]).astype(np.int64)
    begin = np.concatenate([used, [event["version"] + 1 for event in left]]).astype(np.int64)
    place = np.concatenate([_places(trace), [2 * event["row"] for event in left]]).astype(np.int64)
    taken = np.concatenate([trace.version, np.full(len(left), -1)])  # -1: nothing of this worker is in use any more
    order = np.lexsort((place, begin, worker))
    worker, begin, taken = worker[order], begin[order], taken[order]
    end = np.full(len(worker), last)
    same = worker[1:] == worker[:-1]
    end[:-1][same] = np.minimum(begin[1:][same] - 1, last)
    kept = (taken >= 0) & (begin <= end)
    return worker[kept], begin[kept], taken[kept], end[kept]


def delay_grids(trace: Trace, workers: int) -> tuple[Grid, Grid]:
    """tau_i(t) and d_i(t) for every iteration t = 1..T (rows) and worker i (columns); -1 where i is not in use.

    This takes T x n memory; ``delays`` does not.
    """
    last = last_version(trace)
    tau, data = np.full((last, workers), -1), np.full((last, workers), -1)
    for worker, begin, taken, end in zip(*_segments(trace, used_in(trace), last), strict=True):
        t = np.arange(begin, end + 1)
        tau[t - 1, worker], data[t - 1, worker] = t - taken, t - begin
    return tau, data

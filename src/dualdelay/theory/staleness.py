"""How stale gradients will be: the paper's two delays and the rates that come with them, predicted from speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..algorithms import DuDe
from ..core import Problem
from ..core.errors import BadInput, require_whole
from ..engine.delays import delays as delays_of
from ..engine.delays import last_version, used_in
from ..engine.result import Run
from ..engine.trace import Trace
from ..problems import Quadratic
from ..runs.names import rebuild
from ..runs.settings import Compute, Evaluation
from ..runs.simulate import simulate
from ..simulation.input_columns import floats
from ..simulation.speeds import RecordedSpeeds, SpeedModel
from ..storage.folder import Folder

PERCENTILES = (5, 25, 50, 75, 95)
_REPORTS = 20  # of the slowest worker, in a simulation of which nobody said how long it should be
_MOST = 50_000  # arrivals of such a simulation: a few seconds
_SMALLEST = 1e-9  # seconds of a job that was too quick for the clock

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Staleness:
    """How stale gradients are at given speeds when DuDe waits for so many workers, and what waiting costs."""

    wait_for: int
    """Workers per update."""
    tau_max: int
    """The largest model delay of any gradient in the aggregate."""
    tau_avg: float
    """The mean model delay over all workers' gradients in the aggregate and iterations 1..T-1."""
    arrival_mean: tuple[float, ...]
    """For each worker, the mean model delay of its gradients when they are first used."""
    arrival_max: tuple[int, ...]
    """For each worker, the largest such delay."""
    arrival_percentiles: tuple[tuple[float, ...], ...]
    """For each worker, the percentiles 5, 25, 50, 75 and 95 of these delays."""
    updates_per_second: float
    """Server updates in a second, once everybody has reported."""
    arrivals_per_second: float
    """Gradients in a second, once everybody has reported."""
    shares: tuple[float, ...]
    """Each worker's share of all arrivals."""
    idle: tuple[float, ...]
    """Each worker's share of the time that it spends waiting for others, once everybody has reported."""
    updates: int
    """Updates that were simulated."""
    arrivals: int
    """Gradients that arrived for them."""
    notes: tuple[str, ...] = ()
    """What a person should know, such as a worker that hardly reported."""

    @property
    def idle_share(self) -> float:
        """The share of all workers' time that is spent waiting."""
        return sum(self.idle) / len(self.idle)


def delays(
    speeds: SpeedModel | Run | Trace | str | Path, wait_for: int = 1, *, updates: int | None = None, most: int = _MOST
) -> Staleness:
    """Predict how stale gradients will be in DuDe at these speeds, waiting for ``wait_for`` workers.

    The project's own loop runs DuDe on the smallest quadratic for so many updates, so for a speed model the delays are
    exactly those of a simulated run of that length. By default it goes on until the slowest worker has reported twenty
    times, or until ``most`` arrivals (five for each worker at the least): then ``notes`` says so. Of something recorded, a
    run, its trace or its folder, whatever its method, the measured times of each worker's jobs are used in their order,
    from the front again when they run out.
    """
    model, notes = _model(speeds)
    require_whole(f"wait_for (with {model.n} workers)", wait_for, 1, model.n)
    require_whole("most", most, 1)
    if updates is not None:
        require_whole("updates", updates, 1)
        return _staleness(_trace(model, wait_for, updates), model.n, wait_for, notes)
    longest = (max(most, 5 * model.n) - model.n) // wait_for + 1
    updates = min(math.ceil(_REPORTS * model.n / wait_for), longest)  # enough if all are equally fast
    while True:
        trace = _trace(model, wait_for, updates)
        counts = np.bincount(trace.worker, minlength=model.n)
        fewest = int(counts.min())
        if fewest >= _REPORTS:
            break
        if updates == longest:
            who = int(counts.argmin())
            said = f"worker {who} made {fewest} of the {len(trace):,} arrivals that were simulated, so delays may be longer"
            notes += (f"{said} in a longer run (give updates to say how long).",)
            break
        updates = min(longest, math.ceil(updates * min(8.0, max(2.0, 1.2 * _REPORTS / max(fewest, 1)))))
    return _staleness(trace, model.n, wait_for, notes)


def tau_max(times: Sequence[float]) -> float:
    """About the largest delay in DuDe's aggregate for workers of these fixed times, waiting for one: 2 s_max R - 1.

    R = sum 1/s_j is the rate of updates: the slowest worker's gradient is s_max R updates old when it comes and ages for as
    many, less one, until the next. It is exact for equal times, 2 n - 1. In 284 random draws of three, ten and thirty times
    (TN(1, 1), TN(1, 5), U(0.5, 1.5); one with s_max R > 1,500 left out) it was below what was simulated: on average by 1 to
    10%, by 13% at most with ten workers and by 20% with three, since now and then everybody else reports once more.
    """
    seconds = floats("times", times)
    return 2.0 * max(seconds) * _rate(seconds) - 1.0


def tau_avg(times: Sequence[float]) -> float:
    """About the mean delay in DuDe's aggregate for workers of these fixed times, waiting for one: 1.5 mean(s) R - 0.5.

    R = sum 1/s_j is the rate of updates: worker i's gradient is s_i R updates old when it comes and 2 s_i R - 1 when it is
    replaced. In the draws of ``tau_max`` it was 1 to 4% above what was simulated until the slowest worker had reported
    twenty times, since the first gradients are fresh; after 20,000 updates of ten workers it was 0.1%.
    """
    seconds = floats("times", times)
    return 1.5 * sum(seconds) / len(seconds) * _rate(seconds) - 0.5


def _rate(seconds: Sequence[float]) -> float:
    return sum(1.0 / one for one in seconds)


class _Jobs(SpeedModel):
    """The speeds of jobs of several minibatches."""

    def __init__(self, speeds: SpeedModel, batches: Sequence[int]) -> None:
        self.n, self._speeds, self._batches = speeds.n, speeds, batches

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self._speeds.job(worker, draw, start, self._batches[worker])


def per_job(speeds: SpeedModel, problem: Problem) -> SpeedModel:
    """The speeds of a problem's jobs, from those of its minibatches."""
    if speeds.n != problem.workers:
        raise BadInput(f"speeds are given for {speeds.n} workers, but the problem has {problem.workers}; give as many.")
    batches = tuple(problem.batches(worker) for worker in range(problem.workers))
    return speeds if set(batches) == {1} else _Jobs(speeds, batches)


def _trace(speeds: SpeedModel, wait_for: int, updates: int) -> Trace:
    """Who arrives when in DuDe; the problem is as small as can be, since it has no part in that."""
    problem = Quadratic([[0.0]] * speeds.n)
    return simulate(
        DuDe(1.0, wait_for),
        problem,
        speeds,
        updates=updates,
        evaluation=Evaluation(every=updates),
        compute=Compute(cores=1),
    ).trace


def _staleness(trace: Trace, workers: int, wait_for: int, notes: tuple[str, ...]) -> Staleness:
    found, used, last = delays_of(trace, remembers=True), used_in(trace), last_version(trace)
    made = _moments(trace, last)  # when each version was made
    begins = made[1] if last > 1 else 0.0
    later, span = trace.time > begins, float(made[last] - begins)
    if not span > 0:
        raise BadInput("the workers' jobs take no time, so there are no rates; expected seconds above zero.")
    until = np.maximum(made[np.minimum(used, last)], begins)
    waits = np.maximum(until - np.maximum(trace.time, begins), 0.0)  # from an arrival to the update that sends a new job
    idle = np.bincount(trace.worker, waits, workers) / span
    counts = np.bincount(trace.worker, minlength=workers)
    mine = [(used - trace.version)[trace.worker == worker] for worker in range(workers)]
    return Staleness(
        wait_for=wait_for,
        tau_max=found.tau_max,
        tau_avg=found.tau_avg,
        arrival_mean=tuple(float(delay.mean()) for delay in mine),
        arrival_max=tuple(int(delay.max()) for delay in mine),
        arrival_percentiles=tuple(tuple(np.percentile(delay, PERCENTILES).tolist()) for delay in mine),
        updates_per_second=max(last - 1, 1) / span,
        arrivals_per_second=int(later.sum()) / span,
        shares=tuple((counts / len(trace)).tolist()),
        idle=tuple(idle.tolist()),
        updates=last,
        arrivals=len(trace),
        notes=notes,
    )


def _moments(trace: Trace, last: int) -> Times:
    """When each version 0..last was made."""
    rows = [*zip(2 * np.arange(len(trace)) + 1, trace.after.tolist(), trace.time.tolist(), strict=True)]
    rows += [(2 * event["row"], event["after"], event["time"]) for event in trace.events]
    rows.sort()
    after, time = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    return np.append(0.0, time[np.searchsorted(after, np.arange(1, last + 1))])


def _model(speeds: Any) -> tuple[SpeedModel, tuple[str, ...]]:
    """The speeds to simulate: given, or measured."""
    if isinstance(speeds, SpeedModel):
        return speeds, ()
    if isinstance(speeds, Run):
        return measured(speeds.trace, speeds.state.workers), ()
    if isinstance(speeds, Trace):
        return measured(speeds), ()
    if isinstance(speeds, (str, Path)):
        place = Folder(Path(speeds))
        description = place.config()["problem"]
        try:
            workers = rebuild("problem", description).workers
        except BadInput:  # a user's own, or its data are not here
            note = "the problem cannot be built from the folder, so a worker that never reported is not known of."
            return measured(recorded_trace(place)), (note,)
        return measured(recorded_trace(place), workers), ()
    raise BadInput(
        f"speeds is {speeds!r}; expected a dd.SpeedModel, such as dd.FixedSpeeds([1.0, 2.0]), or something recorded: a "
        "dd.Run, a Trace or a run's folder."
    )


def recorded_trace(place: Folder) -> Trace:
    """The trace in a run's folder; of a run that is not finished, up to its last good checkpoint."""
    if place.result() is not None:
        return place.trace()
    loaded = place.load()
    if loaded is None:
        raise BadInput(f"the run in {place.path} has saved nothing yet; go on with it first: dualdelay resume {place.path}")
    return Trace(loaded[1], loaded[0]["events"])


def measured(trace: Trace, workers: int | None = None) -> RecordedSpeeds:
    """The times that each worker's jobs took, with their messages: from when it was free and sent for to the arrival."""
    if not len(trace):
        raise BadInput("nothing arrived in the recorded run, so nothing is known of its speeds; record a longer one.")
    workers = int(trace.worker.max()) + 1 if workers is None else workers
    made = _moments(trace, last_version(trace))
    joined = [event for event in trace.events if event["kind"] == "joined"]
    rows = []
    for worker in range(workers):
        mine = trace.worker == worker
        if not mine.any():
            raise BadInput(f"worker {worker} never reported in the recorded run, so nothing is known of its speed.")
        time, seconds = trace.time[mine], trace.seconds[mine]
        back = np.array([0.0, *(event["time"] for event in joined if event["worker"] == worker)])
        begun = np.maximum(np.append(0.0, time[:-1]), made[trace.version[mine]])
        begun = np.maximum(begun, back[np.searchsorted(back, time, side="left") - 1])
        took = time - begun
        rounded = np.isclose(took, seconds, rtol=1e-6)  # nothing travelled: as it was, so that ties stay ties
        rows.append(np.maximum(np.where(rounded, seconds, took), _SMALLEST).tolist())
    return RecordedSpeeds(rows)

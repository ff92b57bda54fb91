"""How stale gradients will be at given speeds, by simulation and by formula: the paper's delays, and what waiting costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..algorithms.dude import DuDe
from ..core import Problem
from ..core.errors import BadInput, require_whole
from ..engine.delays import delays as delays_of
from ..engine.delays import last_version, mean_ages, used_in
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
_REPORTS = 20  # of the slowest worker, in a simulation whose length is not given
_MOST = 50_000  # arrivals of such a simulation, which takes a few seconds
_SHORTEST = 1e-9  # seconds of a job that was too quick for the clock


@dataclass(frozen=True)
class Staleness:
    """How stale gradients are at given speeds when DuDe waits for so many workers, and what waiting costs."""

    wait_for: int
    """Workers per update."""
    tau_max: int
    """The largest model delay of any gradient in the aggregate."""
    tau_avg: float
    """The mean model delay over all workers' gradients in the aggregate and iterations 1..T-1."""
    ages: tuple[float, ...]
    """For each worker, the mean model delay of its gradient in the aggregate over iterations 1..T-1."""
    arrival_mean: tuple[float, ...]
    """For each worker, the mean model delay of its gradients when they are first used."""
    arrival_max: tuple[int, ...]
    """For each worker, the largest such delay."""
    arrival_percentiles: tuple[tuple[float, ...], ...]
    """For each worker, the percentiles 5, 25, 50, 75 and 95 of these delays."""
    updates_per_second: float
    """Server updates in a second, once every worker has reported."""
    arrivals_per_second: float
    """Gradients in a second, once every worker has reported."""
    shares: tuple[float, ...]
    """Each worker's share of all arrivals."""
    idle: tuple[float, ...]
    """The share of its time that each worker spends waiting for others, once every worker has reported."""
    updates: int
    """Updates that were simulated."""
    arrivals: int
    """Gradients that arrived for them."""
    notes: tuple[str, ...] = ()
    """Warnings, such as of a worker that hardly reported."""

    @property
    def tau_median(self) -> float:
        """The median over workers of the mean model delay of their gradients in the aggregate."""
        return weighted_median(self.ages, [1.0] * len(self.ages))

    @property
    def arrival_avg(self) -> float:
        """The mean model delay of all arrivals when they are first used: that of vanilla ASGD, if wait_for is one."""
        return sum(share * mean for share, mean in zip(self.shares, self.arrival_mean, strict=True))

    @property
    def idle_share(self) -> float:
        """The share of all workers' time that is spent waiting."""
        return sum(self.idle) / len(self.idle)


def delays(
    speeds: SpeedModel | Run | Trace | str | Path, wait_for: int = 1, *, updates: int | None = None, most: int = _MOST
) -> Staleness:
    """Predict how stale gradients will be in DuDe at these speeds, waiting for ``wait_for`` workers.

    DuDe is simulated on the smallest quadratic for so many updates, so for a speed model the delays are exactly those of a
    simulated run of that length. By default the simulation goes on until the slowest worker has reported twenty times, or
    until ``most`` arrivals (five for each worker at the least): then ``notes`` says so. Of something recorded, a run, its
    trace or its folder, whatever its method, the measured times of each worker's jobs are used in their order, from the
    front again when they run out.
    """
    model, notes = _speed_model(speeds)
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
        if fewest >= _REPORTS or updates == longest:
            break
        updates = min(longest, math.ceil(updates * min(8.0, max(2.0, 1.2 * _REPORTS / max(fewest, 1)))))
    if fewest < _REPORTS:
        notes += (
            f"worker {counts.argmin()} made {fewest} of the {len(trace):,} arrivals that were simulated, so delays may be "
            "longer in a longer run (give updates to say how long).",
        )
    return _staleness(trace, model.n, wait_for, notes)


def tau_max(times: Sequence[float]) -> float:
    """About the largest delay in DuDe's aggregate for workers of these fixed times, waiting for one: 2 s_max R - 1.

    R = sum 1/s_j is the rate of updates: the slowest worker's gradient is s_max R updates old when it comes and ages for as
    many, less one, until the next. It is exact for equal times, 2 n - 1. In 284 random draws of three, ten and thirty times
    (TN(1, 1), TN(1, 5), U(0.5, 1.5); one with s_max R > 1,500 left out) it was below what was simulated: on average by 1 to
    10%, by 13% at most with ten workers and by 20% with three, since now and then all others report once more.
    """
    seconds = floats("times", times)
    return 2.0 * max(seconds) * sum(1.0 / s for s in seconds) - 1.0


def tau_avg(times: Sequence[float]) -> float:
    """About the mean delay in DuDe's aggregate for workers of these fixed times, waiting for one: 1.5 mean(s) R - 0.5.

    R = sum 1/s_j is the rate of updates: worker i's gradient is s_i R updates old when it comes and 2 s_i R - 1 when it is
    replaced. In the draws of ``tau_max`` it was 1 to 4% above what was simulated until the slowest worker had reported
    twenty times, since the first gradients are fresh; after 20,000 updates of ten workers it was 0.1%.
    """
    seconds = floats("times", times)
    return 1.5 * sum(seconds) / len(seconds) * sum(1.0 / s for s in seconds) - 0.5


def tau_median(times: Sequence[float]) -> float:
    """About the median over workers of the mean delay in DuDe's aggregate, waiting for one: 1.5 median(s) R - 0.5.

    It is as near as ``tau_avg``, with which it agrees within a fifth for most draws of speeds. One very slow worker makes
    the mean as long as it likes, and the median hardly longer.
    """
    seconds = floats("times", times)
    return 1.5 * float(np.median(seconds)) * sum(1.0 / s for s in seconds) - 0.5


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value that half of the weight lies below, interpolated; with equal weights the median."""
    pairs = sorted((value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0)
    ordered, positive = np.array(pairs).T
    places = (np.cumsum(positive) - positive / 2) / positive.sum()
    return float(np.interp(0.5, places, ordered))


class _JobSpeeds(SpeedModel):
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
    return speeds if set(batches) == {1} else _JobSpeeds(speeds, batches)


class _WholeJobs(SpeedModel):
    """Speeds that are those of whole jobs already, however many minibatches a job has."""

    def __init__(self, speeds: SpeedModel) -> None:
        self.n, self._speeds = speeds.n, speeds

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self._speeds.seconds(worker, draw, start)

    def job(self, worker: int, draw: int, start: float, batches: int) -> float:
        return self.seconds(worker, draw, start)


def whole_jobs(speeds: SpeedModel, problem: Problem) -> SpeedModel:
    """Speeds of a problem's jobs, such as ``per_job`` makes, for a simulation, which would count minibatches again."""
    return speeds if all(problem.batches(worker) == 1 for worker in range(problem.workers)) else _WholeJobs(speeds)


def _trace(speeds: SpeedModel, wait_for: int, updates: int) -> Trace:
    """The trace of DuDe at these speeds; the problem, which does not influence it, is as small as possible."""
    problem, evaluation, compute = Quadratic([[0.0]] * speeds.n), Evaluation(every=updates), Compute(cores=1)
    return simulate(DuDe(1.0, wait_for), problem, speeds, updates=updates, evaluation=evaluation, compute=compute).trace


def _staleness(trace: Trace, workers: int, wait_for: int, notes: tuple[str, ...]) -> Staleness:
    in_aggregate, used, last = delays_of(trace, remembers=True), used_in(trace), last_version(trace)
    updated = _update_times(trace, last)
    begin = updated[1] if last > 1 else 0.0
    span = float(updated[last] - begin)
    if not span > 0:
        raise BadInput("the workers' jobs take no time, so there are no rates; expected seconds above zero.")
    # a worker waits from an arrival to the update that sends it a new job
    until = np.maximum(updated[np.minimum(used, last)], begin)
    waits = np.maximum(until - np.maximum(trace.time, begin), 0.0)
    by_worker = [(used - trace.version)[trace.worker == worker] for worker in range(workers)]
    return Staleness(
        wait_for=wait_for,
        tau_max=in_aggregate.tau_max,
        tau_avg=in_aggregate.tau_avg,
        ages=tuple(mean_ages(trace, workers).tolist()),
        arrival_mean=tuple(float(delay.mean()) for delay in by_worker),
        arrival_max=tuple(int(delay.max()) for delay in by_worker),
        arrival_percentiles=tuple(tuple(np.percentile(delay, PERCENTILES).tolist()) for delay in by_worker),
        updates_per_second=max(last - 1, 1) / span,
        arrivals_per_second=int((trace.time > begin).sum()) / span,
        shares=tuple((np.bincount(trace.worker, minlength=workers) / len(trace)).tolist()),
        idle=tuple((np.bincount(trace.worker, waits, workers) / span).tolist()),
        updates=last,
        arrivals=len(trace),
        notes=notes,
    )


def _update_times(trace: Trace, last: int) -> npt.NDArray[np.float64]:
    """When each version 0..last was made."""
    arrivals = zip(2 * np.arange(len(trace)) + 1, trace.after.tolist(), trace.time.tolist(), strict=True)
    events = ((2 * event["row"], event["after"], event["time"]) for event in trace.events)
    _, after, time = zip(*sorted([*arrivals, *events]), strict=True)
    return np.append(0.0, np.array(time)[np.searchsorted(after, np.arange(1, last + 1))])


def _speed_model(speeds: SpeedModel | Run | Trace | str | Path) -> tuple[SpeedModel, tuple[str, ...]]:
    """The speeds to simulate, given or measured, and notes about them."""
    if isinstance(speeds, SpeedModel):
        return speeds, ()
    if isinstance(speeds, Run):
        return measured(speeds.trace, speeds.state.workers), ()
    if isinstance(speeds, Trace):
        return measured(speeds), ()
    if not isinstance(speeds, (str, Path)):
        raise BadInput(
            f"speeds is {speeds!r}; expected a dd.SpeedModel, such as dd.FixedSpeeds([1.0, 2.0]), or something recorded: a "
            "dd.Run, a Trace or a run's folder."
        )
    folder = Folder(Path(speeds))
    description = folder.record().problem
    try:
        workers = rebuild("problem", description).workers
    except BadInput:  # the user's own problem, or its data are not here
        note = "the problem cannot be built from the folder, so a worker that never reported would not be noticed."
        return measured(recorded_trace(folder)), (note,)
    return measured(recorded_trace(folder), workers), ()


def recorded_trace(folder: Folder) -> Trace:
    """The trace in a run's folder; of a run that is not finished, up to its last good checkpoint."""
    if folder.result() is not None:
        return folder.trace()
    saved = folder.load()
    if saved is None:
        raise BadInput(f"the run in {folder.path} has saved nothing yet; go on with it: dualdelay resume {folder.path}")
    return Trace(saved.rows, saved.content["events"])


def measured(trace: Trace, workers: int | None = None) -> RecordedSpeeds:
    """The seconds of each worker's jobs with their messages: from when it was free and had the model to the arrival."""
    if not len(trace):
        raise BadInput("nothing arrived in the recorded run, so nothing is known of its speeds; record a longer one.")
    workers = int(trace.worker.max()) + 1 if workers is None else workers
    updated = _update_times(trace, last_version(trace))
    joined = [event for event in trace.events if event["kind"] == "joined"]
    times = []
    for worker in range(workers):
        own = trace.worker == worker
        if not own.any():
            raise BadInput(f"worker {worker} never reported in the recorded run, so nothing is known of its speed.")
        arrival, seconds = trace.time[own], trace.seconds[own]
        joins = np.array([0.0, *(event["time"] for event in joined if event["worker"] == worker)])
        start = np.maximum(np.append(0.0, arrival[:-1]), updated[trace.version[own]])
        start = np.maximum(start, joins[np.searchsorted(joins, arrival, side="left") - 1])
        elapsed = arrival - start
        without_messages = np.isclose(elapsed, seconds, rtol=1e-6)  # then the exact seconds, so that ties stay ties
        times.append(np.maximum(np.where(without_messages, seconds, elapsed), _SHORTEST).tolist())
    return RecordedSpeeds(times)

"""A run as one frozen value: made once from what the caller gave, checked, its defaults filled in, and passed whole."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..core import Algorithm, Problem
from ..core.devices import batches
from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_kind, require_path, require_whole, require_zero_or_more
from ..engine.evaluation import MOST_EVALUATIONS, Schedule, default_schedule, require_metrics
from ..engine.events import EventKind
from ..engine.trace import Trace
from ..problems import exact
from ..simulation.speeds import SpeedModel
from ..storage import parts
from ..storage.files import load_weights
from ..storage.folder import Folder, read_checkpoint
from ..workers.settings import WorkerFleet
from .optimizer import Optimizer, make_optimizer
from .seeds import ProblemOf, seeded_problem, seeded_speeds
from .settings import Compute, Evaluation, InitialWeights, Saving, Server, SimulatedFleet

_MOST_JOBS = 1e15  # of a run that a time ends: a million in a second would take thirty years
_TRIALS = 16  # jobs of a worker after which one may think that none takes any time
_SHORTEST_PAUSE = 1e-3  # seconds between two evaluations at real workers
_MOST_BY_DEFAULT = 50  # evaluations at real workers
_REAL_SHARE = 0.1  # of a real worker's time that evaluations take by default


@dataclass(frozen=True)
class RecordedFleet:
    """The workers of a recorded run, which report in the order of its trace."""

    trace: Trace
    threads: int | None = None
    """Threads of torch that the workers used, if the server used another number."""
    ranks: int = 1
    """Processes of each worker, and so the parts that its gradients were computed in."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that decides what a run computes, when it ends and is evaluated, and how often it is saved."""

    algorithm: Algorithm[Any]
    problem: Problem
    """With the run's seed, on its device, and with the kind of gradients that the method asks for."""
    fleet: SimulatedFleet | WorkerFleet | RecordedFleet
    updates: int | None
    time: float | None
    seed: int
    evaluation: Evaluation
    schedule: Schedule | None
    """When the model is evaluated; None: never, as in a replay."""
    scheduled_by_default: bool = False
    """Whether the caller left open when to evaluate."""
    saving: Saving
    compute: Compute
    server: Server
    optimizer: Optimizer | None
    x: Tensor
    """The initial weights."""
    threads: int
    """Threads of torch that a worker uses."""
    server_threads: int

    @property
    def real(self) -> bool:
        """Whether the workers are processes of their own."""
        return isinstance(self.fleet, WorkerFleet)

    @property
    def speeds(self) -> SpeedModel | None:
        """How long simulated workers compute."""
        return cast("SpeedModel", self.fleet.speeds) if isinstance(self.fleet, SimulatedFleet) else None

    def require_end(self) -> None:
        """Refuse a run of more jobs or evaluations than anybody can wait for."""
        seconds = None if self.schedule is None else self.schedule.seconds
        _require_end(self.problem, self.speeds, self.updates, self.time, seconds)

    def require_rules(self) -> None:
        """Refuse a method without a rule for workers that come or go now, and not when it happens."""
        if self.algorithm.away:
            return
        state = self.algorithm.init(self.x, self.problem.workers, Draws(self.seed, "server"))
        changes = self.fleet.changes if isinstance(self.fleet, SimulatedFleet) else ()
        absent = self.fleet.absent_at_first(self.problem.workers) if isinstance(self.fleet, WorkerFleet) else ()
        for worker in [*absent, *(change.worker for change in changes if change.kind is EventKind.LEFT)]:
            self.algorithm.leave(state, worker)
        for change in changes:
            self.algorithm.join(state, change.worker)


@dataclass(frozen=True)
class Options:
    """What the runs of a verb have in common: their ends, and the small values that the caller gave."""

    updates: int | None
    time: float | None
    saving: Saving
    evaluation: Evaluation
    compute: Compute
    server: Server

    def __post_init__(self) -> None:
        for name in ("updates", "time"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        require_kind("evaluation", self.evaluation, Evaluation, "dd.Evaluation(every=100)")
        require_kind("compute", self.compute, Compute, "dd.Compute(threads=2)")
        require_kind("server", self.server, Server, "dd.Server(optimizer='Adam')")

    def spec(
        self, algorithm: Algorithm[Any], problem: ProblemOf, fleet: SimulatedFleet | WorkerFleet, seed: int
    ) -> RunSpec:
        """The run of a method on a problem with these workers; refuses what cannot be."""
        seed = plain_number(seed)
        require_kind("algorithm", algorithm, Algorithm, "dd.DuDe(lr=0.05)")
        problem = seeded_problem(problem, seed)
        problem = exact(problem) if algorithm.exact else problem
        require_totals(self.updates, self.time)
        speeds: SpeedModel | None = None
        compute = self.compute
        if isinstance(fleet, WorkerFleet):
            problem = with_room(problem, fleet.room)
            threads, server_threads = fleet.threads, fleet.server_threads
        else:
            speeds = seeded_speeds(fleet.speeds, seed)
            fleet = replace(fleet, speeds=speeds)
            device = compute.device or problem.start(0).device.type
            threads = server_threads = torch.get_num_threads() if compute.threads is None else compute.threads
            compute = replace(compute, device=device, batch=batches(device, compute.batch), threads=threads)
            problem = problem.on(device, compute.precision)
            _require_fit(speeds, problem)
        require_metrics(self.evaluation.metrics, problem)
        x = _initial_weights(problem, self.server.initial_weights, seed)
        _require_numbers(x, travel=isinstance(fleet, WorkerFleet))
        _require_step(algorithm, x)
        if isinstance(fleet, WorkerFleet):
            x = x.cpu()  # where the server of real workers is, wherever they compute
        return RunSpec(
            algorithm=algorithm,
            problem=problem,
            fleet=fleet,
            updates=self.updates,
            time=self.time,
            seed=seed,
            evaluation=self.evaluation,
            schedule=_schedule(problem, speeds, self.updates, self.time, self.evaluation),
            scheduled_by_default=self.evaluation.every is None and self.evaluation.seconds is None,
            saving=self.saving,
            compute=compute,
            server=self.server,
            optimizer=make_optimizer(self.server.optimizer, self.server.schedule, self.updates, algorithm, problem),
            x=x,
            threads=threads,
            server_threads=server_threads,
        )


def _require_fit(speeds: SpeedModel, problem: Problem) -> None:
    """Refuse speeds for another number of workers."""
    if not isinstance(getattr(speeds, "n", None), int):
        raise BadInput(f"{type(speeds).__name__} does not say for how many workers it is; give it n, their number.")
    if speeds.n != problem.workers:
        raise BadInput(f"speeds are given for {speeds.n} workers, but the problem has {problem.workers}; give as many.")


def _require_step(algorithm: Algorithm[Any], x: Tensor) -> None:
    """Refuse a step size that numbers like the weights cannot hold."""
    largest = torch.finfo(x.dtype).max
    if algorithm.lr > largest:
        raise BadInput(f"lr is {algorithm.lr:g}; expected at most {largest:.3g}, what weights in {x.dtype} can hold.")


def _require_numbers(x: Tensor, travel: bool) -> None:
    """Refuse weights that cannot be trained, or that cannot travel."""
    if not x.is_floating_point():
        raise BadInput(f"the weights are {x.dtype}; expected numbers such as float32, of which there are gradients.")
    if travel and x.dtype not in (torch.float64, torch.float32, torch.float16):
        raise BadInput(f"the weights are {x.dtype}, which numpy and so Ray cannot carry; use float32, float64 or float16.")


def require_totals(updates: int | None, time: float | None) -> None:
    """Refuse ends that cannot be."""
    if updates is None and time is None:
        raise BadInput("neither updates nor time is given, so the run would never end; give at least one.")
    if updates is not None:
        require_whole("updates", updates, 0)
    if time is not None:
        require_zero_or_more("time", time, "finite seconds")
        if 0 < time < 1e-300:
            raise BadInput(f"time is {time}; expected finite seconds, zero or 1e-300 and more: no clock is that fine.")


def _schedule(
    problem: Problem, speeds: SpeedModel | None, updates: int | None, time: float | None, evaluation: Evaluation
) -> Schedule:
    """When a run is evaluated, with the defaults filled in; without speeds its workers are real.

    By default evaluations take at most about a tenth of the work: of a simulation by their number, on real workers by what
    they take of each worker's time as it goes.
    """
    every, seconds, samples = evaluation.every, evaluation.seconds, evaluation.samples
    _require_end(problem, speeds, updates, time, seconds)
    default = every is None and seconds is None
    if speeds is None:
        few = problem.few_samples() if samples is None else samples
        if not default:
            return Schedule(every, seconds, few)
        if time:
            return Schedule(None, time / _MOST_BY_DEFAULT, few, _REAL_SHARE)
        return Schedule(max(1, (updates or 0) // _MOST_BY_DEFAULT), None, few, _REAL_SHARE)
    if not default:
        return Schedule(every, seconds, samples)
    schedule = default_schedule(problem, updates, time, _count_jobs(problem, speeds, updates, time))
    return schedule if samples is None else replace(schedule, samples=samples)


def _count_jobs(problem: Problem, speeds: SpeedModel, updates: int | None, time: float | None) -> float:
    """About how many jobs a run will have: at least one for an update, or what fits into its time."""
    if time is None or not time:
        return float(updates or 0)
    count = float(sum(time / seconds for seconds in _durations(problem, speeds) if seconds > 0))
    return min(count, float(updates)) if updates else count


def _durations(problem: Problem, speeds: SpeedModel, draw: int = 0) -> list[float]:
    """What each worker's first job takes, or a later one; none if the speed model cannot say."""
    try:
        return [float(speeds.seconds(i, draw, 0.0) * problem.batches(i)) for i in range(problem.workers)]
    except Exception:  # whatever a user's own raises: it is refused when the jobs begin
        return []


def _require_end(
    problem: Problem, speeds: SpeedModel | None, updates: int | None, time: float | None, seconds: float | None
) -> None:
    if speeds is None and seconds is not None and seconds < _SHORTEST_PAUSE:
        raise BadInput(
            f"seconds of the evaluation (--evaluate-seconds) is {seconds}; expected {_SHORTEST_PAUSE:g} or more: no real "
            "worker is as quick as that."
        )
    length = time
    if speeds is not None and updates is None and time:
        if (jobs := _count_jobs(problem, speeds, None, time)) > _MOST_JOBS:
            raise BadInput(
                f"time is {time}, in which there would be about {jobs:.2g} jobs; expected {_MOST_JOBS:.0e} at most. Give "
                "less time, slower workers, or updates."
            )
        durations = (_durations(problem, speeds, draw) for draw in range(_TRIALS))
        instant = set.intersection(*({i for i, duration in enumerate(each) if not duration} for each in durations))
        if instant:
            raise BadInput(
                f"the jobs of worker {min(instant)} take no time, so that time {time} would never come; expected seconds "
                "above zero, or updates to end the run."
            )
    elif speeds is not None and updates is not None and seconds is not None:
        rate = sum(1.0 / duration for duration in _durations(problem, speeds) if duration > 0)
        length = min(updates / rate if rate else 0.0, math.inf if time is None else time)
    if seconds is not None and length is not None and length > MOST_EVALUATIONS * seconds:
        raise BadInput(
            f"seconds of the evaluation (--evaluate-seconds) is {seconds}, and the run takes about {length:.3g} seconds; "
            f"expected {MOST_EVALUATIONS:,} evaluations at most. Evaluate less often."
        )


def _initial_weights(problem: Problem, given: InitialWeights, seed: int) -> Tensor:
    """The first weights: a tensor, a state dict, a file of one, a run's folder or checkpoint, or the problem's own."""
    if given is None:
        return problem.start(seed).detach().clone()
    if isinstance(given, (str, Path)):
        require_path("initial_weights", given)
    weights: Any = _read(Path(given)) if isinstance(given, (str, Path)) else given
    x = problem.flat(weights) if isinstance(weights, Mapping) else weights
    if not isinstance(x, Tensor):
        raise BadInput(f"initial_weights is a {type(x).__name__}; expected a tensor, a state dict or a path.")
    expected = problem.start(seed)
    x = x.to(expected.device)
    if x.shape != expected.shape or x.dtype != expected.dtype:
        raise BadInput(
            f"initial_weights has shape {tuple(x.shape)} and type {x.dtype}; expected {tuple(expected.shape)} and "
            f"{expected.dtype}."
        )
    return x.detach().clone()


def _read(path: Path) -> Tensor | dict[str, Tensor]:
    if path.is_dir():
        folder = Folder(path)
        if folder.result() is not None:
            return folder.weights("model")
        loaded = folder.load()  # what an unfinished run has left otherwise is for people
        if loaded is None:
            return folder.start()
        return cast("Tensor", loaded[0]["state"]["weights"])
    tensors = load_weights(path)
    if not {"content", "t0"} <= tensors.keys():
        return tensors
    content = read_checkpoint(path)
    if content is None:
        raise BadInput(f"{path} is damaged, or has another name than its run gave it; choose another checkpoint.")
    return cast("Tensor", parts.whole(content, path.parent.parent)["state"]["weights"])


def with_room(problem: Problem, room: int) -> Problem:
    """The problem with room for workers that may join later."""
    return problem.extended(problem.workers + room) if room else problem


_lock = threading.Lock()
_users: dict[int, list[int]] = {}  # by the identity of what a problem computes in: the thread of each run that uses it


@contextmanager
def for_this_thread(problem: Problem) -> Iterator[Problem]:
    """The problem for a run of this thread; a twin of it if a run of another thread computes in the same place."""
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    place, thread = problem.workplace, threading.get_ident()
    with _lock:
        users = _users.setdefault(id(place), [])
        free = place is None or all(user == thread for user in users)
        if free:
            users.append(thread)
    try:
        yield problem if free else problem.twin()
    finally:
        with _lock:
            if free:
                users.remove(thread)
            if not users:
                _users.pop(id(place), None)

"""What a run is made from: its configuration, its first weights, its fleet."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..core import Algorithm, Problem
from ..core.devices import batches, require_device, using_precision
from ..core.errors import (
    BadInput,
    plain_number,
    require_kind,
    require_one_of,
    require_path,
    require_threads,
    require_whole,
    shown,
)
from ..core.version import __version__
from ..engine.evaluation import MOST_EVALUATIONS, Metric, Schedule, require_metrics, usual
from ..engine.fleet import Fleet
from ..engine.loop import Loop
from ..engine.result import EarlyStop
from ..problems import exact
from ..simulation.clocks import Change, VirtualClock
from ..simulation.cores import Cores, cores_worth
from ..simulation.gradients import Batch, Gradients, Round
from ..simulation.link import Link
from ..simulation.local_fleet import LocalFleet
from ..simulation.speeds import SpeedModel
from ..storage.files import load_weights
from ..storage.folder import Folder, digest_of, read_checkpoint
from ..workers.crew import Crew
from ..workers.ray_fleet import RayFleet
from .drive import require_totals
from .names import describe, rebuild
from .naming import seeded_problem
from .optimizer import Optimizer

Start = Tensor | Mapping[str, Tensor] | str | Path | None

_JOBS = 1e15  # of a run that a time ends: a million in a second would take thirty years
_TRIALS = 16  # jobs of a worker after which one may think that none takes any time
_OFTEN = 1e-3  # seconds between two evaluations at real workers, at least
_REAL_SHARE = 0.1  # of a real worker's time that evaluations take by default


def configuration(
    algorithm: Algorithm[Any],
    problem: Problem,
    seed: int,
    metrics: Mapping[str, Metric] | None,
    stop: EarlyStop | None,
    on_nonfinite: str,
    keep_best: str | None,
    keep: int,
    threads: int,
    server_threads: int,
    optimizer: Optimizer | None,
    table: str,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """A run's settings as plain values; refuses what cannot be."""
    require_one_of("on_nonfinite", on_nonfinite, ("retry", "leave", "stop"))
    require_metrics(metrics, problem)
    if stop is not None:
        require_kind("stop", stop, EarlyStop, "dd.EarlyStop(patience=5)")
        target = plain_number(stop.target)
        if target is not None and not (isinstance(target, (int, float)) and target == target):
            raise BadInput(f"the target of stop is {shown(target)}; expected a number.")
    if keep_best is not None and not isinstance(keep_best, str):
        raise BadInput(f"keep_best is {shown(keep_best)}; expected the name of a metric, such as 'objective'.")
    require_whole("keep", keep, 1)
    require_threads("threads", threads)
    require_threads("server_threads", server_threads)
    require_one_of("table", table, ("full", "half", "host"))
    return {
        "dualdelay": __version__,
        "algorithm": describe(algorithm),
        "problem": describe(problem),
        "seed": seed,
        "metrics": list(metrics or ()),
        "stop": None if stop is None else {name: plain_number(value) for name, value in asdict(stop).items()},
        "on_nonfinite": on_nonfinite,
        "keep_best": stop.keeps if keep_best is None and stop is not None else keep_best,
        "keep": keep,
        "threads": threads,
        "server_threads": server_threads,
        "optimizer": None if optimizer is None else optimizer.describe(),
        "table": table,
        **others,
    }


def ends(
    problem: Problem,
    speeds: SpeedModel | None,
    updates: int | None,
    time: float | None,
    every: int | None,
    seconds: float | None,
    samples: int | None,
    checkpoint: int | None,
) -> dict[str, Any]:
    """When a run stops, is evaluated and saved, with the defaults filled in; without speeds its workers are real.

    By default evaluations take at most about a tenth of the work: of a simulation by their number, on real workers by what
    they take of each worker's time as it goes.
    """
    require_totals(updates, time, every, seconds, checkpoint)
    if samples is not None:
        require_whole("evaluate_samples", samples, 1)
    require_an_end(problem, speeds, updates, time, seconds)
    schedule, default = Schedule(every, seconds, samples), every is None and seconds is None
    if default and speeds is None:
        few = problem.few_samples() if samples is None else samples
        often = Schedule(seconds=time / 50) if time else Schedule(updates=max(1, (updates or 0) // 50))
        schedule = Schedule(often.updates, often.seconds, few, _REAL_SHARE)
    elif speeds is None and samples is None:  # when was said, and not on how much
        schedule = Schedule(every, seconds, problem.few_samples())
    elif default and speeds is not None:
        schedule = usual(problem, updates, time, _jobs(problem, speeds, updates, time))
        schedule = schedule if samples is None else Schedule(schedule.updates, schedule.seconds, samples)
    return {
        "updates": updates,
        "time": time,
        "evaluate_every": schedule.updates,
        "evaluate_seconds": schedule.seconds,
        "evaluate_samples": schedule.samples,
        "evaluate_limit": schedule.limit,
        "evaluates_by_default": default,
        "checkpoint_every": checkpoint,
    }


def _jobs(problem: Problem, speeds: SpeedModel, updates: int | None, time: float | None) -> float:
    """About how many jobs a run will have: at least one for an update, or what fits into its time."""
    if time is None or not time:
        return float(updates or 0)
    count = float(sum(time / seconds for seconds in _firsts(problem, speeds) if seconds > 0))
    return min(count, float(updates)) if updates else count


def _firsts(problem: Problem, speeds: SpeedModel, draw: int = 0) -> list[float]:
    """What each worker's first job takes, or a later one; none if that cannot be told."""
    try:
        each = [speeds.seconds(worker, draw, 0.0) * problem.batches(worker) for worker in range(problem.workers)]
        return [float(seconds) for seconds in each]
    except Exception:  # whatever a user's own raises: it is refused when the jobs begin
        return []


def require_an_end(
    problem: Problem, speeds: SpeedModel | None, updates: int | None, time: float | None, seconds: float | None
) -> None:
    """Refuse a run of more jobs or evaluations than anybody can wait for."""
    if speeds is None and seconds is not None and seconds < _OFTEN:
        raise BadInput(f"evaluate_seconds is {seconds}; expected {_OFTEN:g} or more: no real worker is as quick as that.")
    length = time
    if speeds is not None and updates is None and time:
        if (jobs := _jobs(problem, speeds, None, time)) > _JOBS:
            raise BadInput(
                f"time is {time}, in which there would be about {jobs:.2g} jobs; expected {_JOBS:.0e} at most. Give less "
                "time, slower workers, or updates."
            )
        idle = set.intersection(*({w for w, s in enumerate(_firsts(problem, speeds, k)) if not s} for k in range(_TRIALS)))
        if idle:
            raise BadInput(
                f"the jobs of worker {min(idle)} take no time, so that time {time} would never come; expected seconds "
                "above zero, or updates to end the run."
            )
    elif speeds is not None and updates is not None and seconds is not None:
        rate = sum(1.0 / each for each in _firsts(problem, speeds) if each > 0)
        length = min(updates / rate if rate else 0.0, math.inf if time is None else time)
    if seconds is not None and length is not None and length > MOST_EVALUATIONS * seconds:
        raise BadInput(
            f"evaluate_seconds is {seconds}, and the run takes about {length:.3g} seconds; expected {MOST_EVALUATIONS:,} "
            "evaluations at most. Evaluate less often."
        )


def identified(config: Mapping[str, Any], problem: Problem, x: Tensor) -> dict[str, Any]:
    """The settings with digests of the problem and the first weights, to know them by, and the weights' names."""
    return {**config, "fingerprint": problem.fingerprint(), "start": digest_of(x), "layout": layout_of(problem)}


def layout_of(problem: Problem) -> list[list[Any]]:
    """Where in the flat weights each entry of a state dict is, as plain values."""
    return [[name, first, list(shape)] for name, first, shape in problem.layout()]


def starting_point(problem: Problem, start: Start, seed: int) -> Tensor:
    """The first weights, from what the user gave: a tensor, a state dict, a file of them, a run's folder or checkpoint."""
    if start is None:
        return problem.start(seed).detach().clone()
    if isinstance(start, (str, Path)):
        require_path("start", start)
    given: Any = _read(Path(start)) if isinstance(start, (str, Path)) else start
    x = problem.flat(given) if isinstance(given, Mapping) else given
    if not isinstance(x, Tensor):
        raise BadInput(f"start is a {type(x).__name__}; expected a tensor, a state dict or a path.")
    expected = problem.start(seed)
    x = x.to(expected.device)
    if x.shape != expected.shape or x.dtype != expected.dtype:
        raise BadInput(
            f"start has shape {tuple(x.shape)} and type {x.dtype}; expected {tuple(expected.shape)} and {expected.dtype}."
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
    weights_or_checkpoint = load_weights(path)
    if "content" in weights_or_checkpoint and "t0" in weights_or_checkpoint:
        content = read_checkpoint(path)
        if content is None:
            raise BadInput(f"{path} is damaged, or has another name than its run gave it; choose another checkpoint.")
        return cast("Tensor", content["state"]["weights"])
    return weights_or_checkpoint


_borrowing = threading.Lock()
_borrowers: dict[int, list[int]] = {}  # by the identity of a workplace: the thread of each run that uses it


@contextmanager
def borrowed(problem: Problem) -> Iterator[Problem]:
    """The problem for a run of this thread; a twin of it if a run of another thread computes in the same place."""
    place, thread = problem.workplace, threading.get_ident()
    with _borrowing:
        users = _borrowers.setdefault(id(place), [])
        free = place is None or all(user == thread for user in users)
        if free:
            users.append(thread)
    try:
        yield problem if free else problem.twin()
    finally:
        with _borrowing:
            if free:
                users.remove(thread)
            if not users:
                _borrowers.pop(id(place), None)


def suited(problem: Problem, algorithm: Algorithm[Any]) -> Problem:
    """The problem whose jobs are of the kind that the method asks for."""
    return exact(problem) if algorithm.exact else problem


def with_room(problem: Problem, room: int) -> Problem:
    """The problem with room for workers that nobody counts at the start."""
    return problem.extended(problem.workers + room) if room else problem


def placing(problem: Problem, device: str | None, precision: str, batch: bool | None) -> tuple[Problem, dict[str, Any]]:
    """The problem where it is to be computed, and the settings that say so; by default it stays where it is."""
    require_device(device or "cpu", precision)
    device = device or problem.start(0).device.type
    settings = {"device": device, "precision": precision, "batch": batches(device, batch)}
    return problem.on(device, precision), settings


def gradients_of(config: Mapping[str, Any], problem: Problem, cores: int | None = 1) -> Gradients:
    """How the gradients of a simulated fleet are computed: many at once, on several cores, or one at a time."""
    if cores is not None:
        require_whole("cores", cores, 1)
    if config["batch"]:
        return Batch(Round(problem.together([problem])), [0])
    count = cores_worth(problem, cores)
    return Gradients(problem) if count == 1 else Cores(problem, count, config["threads"])


@contextmanager
def manned(
    config: Mapping[str, Any],
    algorithm: Algorithm[Any],
    problem: Problem,
    *,
    speeds: SpeedModel | None = None,
    link: Link | None = None,
    fleet: RayFleet | None = None,
    output: Path | None = None,
    cores: int | None = 1,
) -> Iterator[Fleet]:
    """The fleet that a configuration asks for, let go at the end; what real workers print goes to a folder."""
    crew: Fleet
    with using_precision(config.get("device", "cpu"), config.get("precision", "float32")):
        if "fleet" in config:
            crew = Crew(rebuild("fleet", config["fleet"]) if fleet is None else fleet, problem, algorithm.message, output)
        else:
            pace: SpeedModel = rebuild("speeds", config["speeds"], speeds)
            travel: Link = rebuild("link", config["link"], link)
            changes = [Change(*change) for change in config["changes"]]
            gradients = gradients_of(config, problem, cores)
            crew = LocalFleet(problem, VirtualClock(pace, travel, changes), algorithm.message, gradients=gradients)
        try:
            yield crew
        finally:
            crew.close()


def make_loop(
    config: Mapping[str, Any],
    algorithm: Algorithm[Any],
    problem: Problem,
    fleet: Fleet,
    x: Tensor,
    metrics: Mapping[str, Metric] | None,
    optimizer: Optimizer | None,
) -> Loop:
    """A run that is about to begin."""
    return Loop(
        algorithm,
        problem,
        fleet,
        x,
        seed=config["seed"],
        schedule=schedule_of(config),
        metrics=metrics,
        on_nonfinite=config["on_nonfinite"],
        optimizer=optimizer,
        table=config["table"],
        keep_best=config["keep_best"],
    )


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """When a run of this configuration is evaluated."""
    return Schedule(*(config[f"evaluate_{name}"] for name in ("every", "seconds", "samples", "limit")))


def require_same(config: Mapping[str, Any], folder: Folder) -> None:
    """Refuse a folder that holds a run of another configuration."""
    recorded = folder.config()
    other = [key for key, value in config.items() if recorded.get(key) != value]
    if other:
        said = "; ".join(f"{key}: {recorded.get(key)} there, {config[key]} now" for key in other[:3])
        raise BadInput(f"{folder.path} holds a run of another configuration ({said}). Choose another folder.")


def recorded_problem(
    config: Mapping[str, Any], problem: Problem | None, algorithm: Algorithm[Any], failure: type[Exception], verb: str
) -> Problem:
    """The problem of a run's folder, built again or given again, and checked."""
    given = rebuild("problem", config["problem"], verb=verb) if problem is None else problem
    built = suited(seeded_problem(given, config["seed"]), algorithm)
    built = with_room(built, config.get("fleet", {}).get("room", 0))
    if "device" in config:
        require_device(config["device"], config["precision"])
        built = built.on(config["device"], config["precision"])
    if built.fingerprint() != config["fingerprint"]:
        raise failure(
            "the problem is not the one this folder was made with: its data or settings differ (recorded fingerprint "
            f"{config['fingerprint'][:12]}, now {built.fingerprint()[:12]}). Pass the same problem, or start a new run."
        )
    return built

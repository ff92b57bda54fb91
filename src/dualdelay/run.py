"""What a person calls: simulate a run, go on with one that was stopped, recompute one that was recorded."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .clocks import Change, RecordedClock, VirtualClock
from .config import describe, rebuild
from .core import Algorithm, Problem
from .drive import Watch, drive, ended_run, threads
from .errors import BadInput, ReplayMismatch, require_one_of, require_positive, require_whole
from .files import load_weights
from .folder import Folder
from .loop import Loop, Metric, Schedule
from .result import EarlyStop, Run
from .speeds import Link, SpeedModel

Start = Tensor | Mapping[str, Tensor] | str | Path | None


def _starting_point(problem: Problem, start: Start, seed: int) -> Tensor:
    if start is None:
        return problem.start(seed)
    if isinstance(start, (str, Path)):
        start = load_weights(Path(start))
    x = problem.flat(start) if isinstance(start, Mapping) else start
    expected = problem.start(seed)
    if x.shape != expected.shape or x.dtype != expected.dtype:
        raise BadInput(
            f"start has shape {tuple(x.shape)} and type {x.dtype}; expected {tuple(expected.shape)} and {expected.dtype}."
        )
    return x.detach().clone()


def simulate(
    algorithm: Algorithm[Any],
    problem: Problem,
    speeds: SpeedModel,
    *,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    watch: Sequence[Watch] = (),
    folder: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    start: Start = None,
    link: Link | None = None,
    changes: Sequence[Change] = (),
    metrics: Mapping[str, Metric] | None = None,
    evaluate_every: int | None = None,
    evaluate_seconds: float | None = None,
    stop: EarlyStop | None = None,
    bad: str = "retry",
    go_on: bool = False,
) -> Run:
    """Run an algorithm on a virtual clock until ``updates`` or ``time``, whichever comes first.

    ``seed`` names the initial weights and the server's own draws. Each ``watch`` function is called with the state and the
    arrival after every arrival. The model is evaluated every ``evaluate_every`` updates and ``evaluate_seconds`` simulated
    seconds, by default fifty times in all; ``metrics`` are functions of ``problem.model(x)`` of your own. With a ``folder``
    the run can be killed, resumed and replayed: it is saved every ``checkpoint_every`` updates, by default twenty times in
    all, and the newest ``keep`` checkpoints stay; with ``go_on`` a folder that holds the same run already is resumed.
    ``bad`` says what a gradient that is not finite does: "retry" or "stop".
    """
    config = {
        "dualdelay": __version__,
        "algorithm": describe(algorithm),
        "problem": describe(problem),
        "speeds": describe(speeds),
        "link": describe(link or Link()),
        "changes": [list(change) for change in changes],
        "seed": seed,
        "metrics": list(metrics or ()),
        "stop": None if stop is None else asdict(stop),
        "bad": bad,
        "keep": keep,
        "threads": torch.get_num_threads(),
        **_totals(updates, time, evaluate_every, evaluate_seconds, checkpoint_every),
    }
    if speeds.n != problem.workers:
        raise BadInput(f"speeds are given for {speeds.n} workers, but the problem has {problem.workers}; give as many.")
    require_one_of("bad", bad, ("retry", "stop"))
    require_whole("keep", keep, 1)
    x = _starting_point(problem, start, seed)
    loop = _loop(config, algorithm, problem, speeds, x, metrics)
    if folder is None:
        loop.begin()
        return drive(loop, config, None, watch, stop)
    config["fingerprint"] = problem.fingerprint()
    if go_on and Path(folder).exists():
        _require_same(config, Folder(Path(folder)))
        return resume(folder, problem=problem, algorithm=algorithm, speeds=speeds, metrics=metrics, watch=watch)
    config["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    loop.begin()
    return drive(loop, config, Folder.create(Path(folder), config, x), watch, stop)


def _require_same(config: Mapping[str, Any], folder: Folder) -> None:
    recorded = folder.config()
    other = [key for key, value in config.items() if recorded.get(key) != value]
    if other:
        said = "; ".join(f"{key}: {recorded.get(key)} there, {config[key]} now" for key in other[:3])
        raise BadInput(f"{folder.path} holds a run of another configuration ({said}). Choose another folder.")


def _totals(
    updates: int | None, time: float | None, every: int | None, seconds: float | None, checkpoint: int | None
) -> dict[str, Any]:
    """When to stop, evaluate and save, with the defaults filled in."""
    if updates is None and time is None:
        raise BadInput("neither updates nor time is given, so the run would never end; give at least one.")
    if updates is not None:
        require_whole("updates", updates, 0)
    if time is not None and not (math.isfinite(time) and time >= 0):
        raise BadInput(f"time is {time}; expected finite simulated seconds, zero or more.")
    if every is not None:
        require_whole("evaluate_every", every, 1)
    if seconds is not None:
        require_positive("evaluate_seconds", seconds)
    if every is None and seconds is None:
        seconds = time / 50 if time else None
        every = None if seconds else max(1, (updates or 0) // 50)
    if checkpoint is None:
        checkpoint = 1000 if updates is None else max(1, updates // 20)
    require_whole("checkpoint_every", checkpoint, 1)
    totals = {"updates": updates, "time": time, "evaluate_every": every, "evaluate_seconds": seconds}
    return {**totals, "checkpoint_every": checkpoint}


def _loop(
    config: Mapping[str, Any],
    algorithm: Algorithm[Any],
    problem: Problem,
    speeds: SpeedModel,
    x: Tensor,
    metrics: Mapping[str, Metric] | None,
) -> Loop:
    changes = [Change(*change) for change in config["changes"]]
    clock = VirtualClock(speeds, rebuild("link", config["link"]), changes)
    schedule = Schedule(config["evaluate_every"], config["evaluate_seconds"])
    return Loop(algorithm, problem, clock, x, seed=config["seed"], schedule=schedule, metrics=metrics, bad=config["bad"])


def _recorded_problem(config: Mapping[str, Any], problem: Problem | None, failure: type[Exception]) -> Problem:
    """The problem of a run's folder, built again or given again, and checked."""
    built: Problem = rebuild("problem", config["problem"]) if problem is None else problem
    if built.fingerprint() != config["fingerprint"]:
        raise failure(
            "the problem is not the one this folder was made with: its data or settings differ (recorded fingerprint "
            f"{config['fingerprint'][:12]}, now {built.fingerprint()[:12]}). Pass the same problem, or start a new run."
        )
    return built


def resume(
    folder: str | Path,
    updates: int | None = None,
    time: float | None = None,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    speeds: SpeedModel | None = None,
    metrics: Mapping[str, Metric] | None = None,
    watch: Sequence[Watch] = (),
) -> Run:
    """Go on from a folder's last good checkpoint, to the totals it was started with or to new ones.

    A problem, algorithm, speed model or metric functions of your own cannot be built from the folder: pass them again. A
    problem is checked by its fingerprint. The result has the same bits as that of a run that was never stopped.
    """
    place = Folder(Path(folder))
    config = place.config()
    built = _recorded_problem(config, problem, BadInput)
    if set(config["metrics"]) != set(metrics or ()):
        raise BadInput(
            f"the run was started with metrics {config['metrics']}; pass the same functions again (metrics=...)."
        )
    result = place.result()
    if updates is not None or time is not None:
        asked = {"updates": updates, "time": time}
        if result is not None and asked != {key: config[key] for key in asked}:
            result = None
        old = {key: config[key] for key in ("evaluate_every", "evaluate_seconds", "checkpoint_every")}
        config |= _totals(updates, time, old["evaluate_every"], old["evaluate_seconds"], old["checkpoint_every"])
        place.write_config(config)
    method, pace = rebuild("algorithm", config["algorithm"], algorithm), rebuild("speeds", config["speeds"], speeds)
    stop = None if config["stop"] is None else EarlyStop(**config["stop"])
    loop = _loop(config, method, built, pace, place.start(), metrics)
    with threads(config["threads"]):
        loaded = place.load()
        if loaded is None:
            place.clear_after(0)
            loop.begin()
            return drive(loop, config, place, watch, stop)
    content, rows, notes = loaded
    loop.load(content, rows)
    place.clear_after(content["arrivals"])
    ended = result["ended"] if result is not None and result["arrivals"] == content["arrivals"] else ""
    return drive(loop, config, place, watch, stop, tuple(notes), ended)


def replay(
    folder: str | Path,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    watch: Sequence[Watch] = (),
) -> Run:
    """Recompute a recorded run in its recorded order, and raise ReplayMismatch unless every bit agrees."""
    place = Folder(Path(folder))
    config, trace = place.config(), place.trace()
    built = _recorded_problem(config, problem, ReplayMismatch)
    method = rebuild("algorithm", config["algorithm"], algorithm)
    loop = Loop(method, built, RecordedClock(trace), place.start(), seed=config["seed"])
    with threads(config["threads"]):
        loop.begin()
        row = 0
        while loop.clock.peek() is not None:
            a = loop.advance()
            if a is None:
                continue
            made = {name: column[0] for name, column in loop.recorder.rows(row).items()}
            for name in ("version", "after", "fingerprint"):
                if made[name] != trace[name][row]:
                    raise ReplayMismatch(
                        f"version {trace.after[row]} differs: at arrival {row} (worker {a.worker}, job number "
                        f"{made['draw']}, taken at version {trace.version[row]}) the recorded {name} is "
                        f"{trace[name][row]}, replayed it is {made[name]}. Code, data or libraries are not those of the "
                        f"record ({config['versions']})."
                    )
            row += 1
            for function in watch:
                function(loop.state, a)
    for name, recorded in load_weights(place.path / "model.safetensors").items():
        if not torch.equal(built.state_dict(loop.state.x)[name].view(torch.uint8), recorded.view(torch.uint8)):
            raise ReplayMismatch(f"version {loop.state.version} differs: the final weights {name!r} are not the recorded.")
    return ended_run(loop, loop.table, loop.recorder.last_time, "replay", place.path)

"""What a person calls: simulate a run, go on with one that was stopped, recompute one that was recorded."""

from __future__ import annotations

import math
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .checkpoint import Folder, equal_bits, load_weights
from .clocks import Change, RecordedClock, VirtualClock
from .config import describe, rebuild
from .core import (
    AggregateState,
    Algorithm,
    Arrival,
    BadInput,
    Problem,
    ReplayMismatch,
    RunFailed,
    State,
    require_one_of,
    require_positive,
    require_whole,
)
from .loop import Loop, Metric, Schedule
from .result import EarlyStop, Run, plain
from .speeds import Link, SpeedModel
from .trace import Table

Watch = Callable[[State, Arrival], None]
Start = Tensor | Mapping[str, Tensor] | str | Path | None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was saved."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _ctrl_c(active: bool) -> Iterator[list[bool]]:
    """While this lasts, Ctrl-C sets the flag instead of breaking into a step; a second one breaks in."""
    asked = [False]

    def ask(*_: object) -> None:
        asked[0] = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if not active or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


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
        return _go(loop, config, None, watch, stop)
    config["fingerprint"] = problem.fingerprint()
    if go_on and Path(folder).exists():
        _require_same(config, Folder(Path(folder)))
        return resume(folder, problem=problem, algorithm=algorithm, speeds=speeds, metrics=metrics, watch=watch)
    config["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    loop.begin()
    return _go(loop, config, Folder.create(Path(folder), config, x), watch, stop)


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


def _go(
    loop: Loop,
    config: Mapping[str, Any],
    folder: Folder | None,
    watch: Sequence[Watch],
    stop: EarlyStop | None,
    notes: tuple[str, ...] = (),
    ended: str = "",
) -> Run:
    """Advance a loop to its end, saving on the way; ``ended`` if it is there already."""
    updates, limit, every = config["updates"], config["time"], config["checkpoint_every"]
    saved = len(loop.recorder)

    def save() -> None:
        nonlocal saved
        if folder is not None:
            folder.save(loop.save(), loop.recorder.rows(saved), len(loop.recorder), config["keep"])
            saved = len(loop.recorder)

    judged = len(loop.rows)
    with _threads(config["threads"]), _ctrl_c(folder is not None) as interrupted:
        while not ended:
            due = loop.clock.peek()
            if updates is not None and loop.state.version >= updates:
                ended = "updates"
            elif due is None:
                raise RunFailed("nothing is in flight and nothing is due: the algorithm gave nobody anything to do.")
            elif limit is not None and due.time > limit:
                loop.evaluate_before(math.nextafter(limit, math.inf))
                ended = "time"
            else:
                loop.evaluate_before(due.time)
                before = loop.state.version
                arrival = loop.advance()
                if arrival is not None:
                    for function in watch:
                        function(loop.state, arrival)
                if loop.state.version != before and loop.state.version % every == 0:
                    save()
                if interrupted[0]:
                    save()
                    raise Interrupted(f"saved after {loop.state.version} updates")
            if stop is not None and len(loop.rows) > judged:
                judged = len(loop.rows)
                ended = "stop" if stop(loop.table) else ended
        if len(loop.recorder) > saved or (folder is not None and not folder.checkpoints()):
            save()
        rows = loop.rows
        now = limit if ended == "time" else loop.recorder.last_time
        if rows[-1]["version"] != loop.state.version or rows[-1]["time"] != now:
            loop.rows = [*rows, loop.evaluate(now)]  # the end is always evaluated, on schedule or not
        table, loop.rows = loop.table, rows
    run = _ended(loop, table, now, ended, None if folder is None else folder.path, notes)
    if folder is not None:
        folder.finish(run.trace, run.metrics, run.state_dict(), plain(run.summary()))
    return run


def _ended(loop: Loop, table: Table, now: float, ended: str, path: Path | None, notes: tuple[str, ...] = ()) -> Run:
    state = loop.state
    error = state.error(loop.fleet.held) if isinstance(state, AggregateState) else None
    return Run(loop.algorithm, loop.problem, state, loop.recorder.trace(), table, now, ended, error, path, notes)


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
    with _threads(config["threads"]):
        loaded = place.load()
        if loaded is None:
            place.clear_after(0)
            loop.begin()
            return _go(loop, config, place, watch, stop)
    content, rows, notes = loaded
    loop.load(content, rows)
    place.clear_after(content["arrivals"])
    ended = result["ended"] if result is not None and result["arrivals"] == content["arrivals"] else ""
    return _go(loop, config, place, watch, stop, tuple(notes), ended)


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
    with _threads(config["threads"]):
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
        if not equal_bits(built.state_dict(loop.state.x)[name], recorded):
            raise ReplayMismatch(f"version {loop.state.version} differs: the final weights {name!r} are not the recorded.")
    return _ended(loop, loop.table, loop.recorder.last_time, "replay", place.path)

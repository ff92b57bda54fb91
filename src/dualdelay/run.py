"""What a person calls: simulate a run, go on with one that was stopped, recompute one that was recorded."""

from __future__ import annotations

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
from .drive import Watch, drive, ended_run, totals, using_threads
from .errors import BadInput, ReplayMismatch, require_kind, require_one_of, require_whole
from .files import load_table, load_weights, pack
from .folder import Folder, config_digest, digest_of
from .loop import Loop, Metric, Schedule
from .result import EarlyStop, Run
from .speeds import Link, SpeedModel
from .trace import Table

Start = Tensor | Mapping[str, Tensor] | str | Path | None


def _starting_point(problem: Problem, start: Start, seed: int) -> Tensor:
    if start is None:
        return problem.start(seed).detach().clone()
    if isinstance(start, (str, Path)):
        start = load_weights(Path(start))
    x = problem.flat(start) if isinstance(start, Mapping) else start
    if not isinstance(x, Tensor):
        raise BadInput(f"start is a {type(x).__name__}; expected a tensor, a state dict or a path.")
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
    threads: int | None = 1,
    go_on: bool = False,
) -> Run:
    """Run an algorithm on a virtual clock until ``updates`` or ``time``, whichever comes first.

    ``seed`` names the initial weights and the server's own draws. Each ``watch`` function is called with the state and the
    arrival after every arrival. The model is evaluated every ``evaluate_every`` updates and ``evaluate_seconds`` simulated
    seconds, by default fifty times in all; ``metrics`` are functions of ``problem.model(x)`` of your own. With a ``folder``
    the run can be killed, resumed and replayed: it is saved every ``checkpoint_every`` updates, by default twenty times in
    all, and the newest ``keep`` checkpoints stay; with ``go_on`` a folder that holds the same run already is resumed.
    ``bad`` says what a gradient that is not finite does: "retry" or "stop". Torch uses ``threads`` threads: small models
    are faster with one, another number gives other bits, and None leaves torch's own.
    """
    require_kind("algorithm", algorithm, Algorithm, "dd.DuDe(lr=0.05)")
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    require_kind("speeds", speeds, SpeedModel, "dd.FixedSpeeds([1.0, 2.0])")
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
        "threads": torch.get_num_threads() if threads is None else threads,
        **totals(updates, time, evaluate_every, evaluate_seconds, checkpoint_every),
    }
    if speeds.n != problem.workers:
        raise BadInput(f"speeds are given for {speeds.n} workers, but the problem has {problem.workers}; give as many.")
    require_one_of("bad", bad, ("retry", "stop"))
    require_whole("keep", keep, 1)
    require_whole("threads", config["threads"], 1)
    x = _starting_point(problem, start, seed)
    loop = _loop(config, algorithm, problem, speeds, x, metrics)
    for kind, worker, _ in changes:  # a method without a rule for it says so now, not when it happens
        if kind == "left" and type(algorithm).leave is Algorithm.leave:
            algorithm.leave(loop.state, worker)
        if kind == "joined" and type(algorithm).join is Algorithm.join:
            algorithm.join(loop.state, worker)
    with using_threads(config["threads"]):
        loop.begin()
    if stop is not None:
        stop(loop.table)  # says so if there is nothing to stop by
    if folder is None:
        return drive(loop, config, None, watch, stop)
    pack(loop.save(), {})  # says so if something cannot be saved
    config |= {"fingerprint": problem.fingerprint(), "start": digest_of(x)}
    if go_on and Path(folder).exists():
        _require_same(config, Folder(Path(folder)))
        return resume(folder, problem=problem, algorithm=algorithm, speeds=speeds, metrics=metrics, watch=watch)
    config["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return drive(loop, config, Folder.create(Path(folder), config, x), watch, stop)


def _require_same(config: Mapping[str, Any], folder: Folder) -> None:
    recorded = folder.config()
    other = [key for key, value in config.items() if recorded.get(key) != value]
    if other:
        said = "; ".join(f"{key}: {recorded.get(key)} there, {config[key]} now" for key in other[:3])
        raise BadInput(f"{folder.path} holds a run of another configuration ({said}). Choose another folder.")


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
    if updates is not None or time is not None:
        old = (config[key] for key in ("evaluate_every", "evaluate_seconds", "checkpoint_every"))
        config |= totals(updates, time, *old)
    method, pace = rebuild("algorithm", config["algorithm"], algorithm), rebuild("speeds", config["speeds"], speeds)
    stop = None if config["stop"] is None else EarlyStop(**config["stop"])
    loop = _loop(config, method, built, pace, place.start(config["start"]), metrics)
    loaded, result = place.load(), place.result()
    if updates is not None or time is not None:
        place.write_config(config)
    if loaded is None:
        place.clear_after(0, -1)
        with using_threads(config["threads"]):
            loop.begin()
        return drive(loop, config, place, watch, stop)
    content, rows, problems = loaded
    notes = [f"{wrong}; an older checkpoint was used" for wrong in problems]
    if config["updates"] is not None and content["state"]["version"] > config["updates"]:
        notes.append(f"the run has made {content['state']['version']} updates already, more than {config['updates']}")
    loop.load(content, rows)
    place.clear_after(content["arrivals"], content["moment"])
    ended = ""
    if result is not None and (result.get("config"), result.get("moment")) == (config_digest(config), content["moment"]):
        ended = result["ended"]
    return drive(loop, config, place, watch, stop, resumed=True, notes=tuple(notes), ended=ended)


def replay(
    folder: str | Path,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    watch: Sequence[Watch] = (),
) -> Run:
    """Recompute a recorded run in its recorded order, and raise ReplayMismatch unless every bit agrees."""
    place = Folder(Path(folder))
    config, result, trace = place.config(), place.finished(), place.trace()
    built = _recorded_problem(config, problem, ReplayMismatch)
    method = rebuild("algorithm", config["algorithm"], algorithm)
    loop = Loop(method, built, RecordedClock(trace), place.start(config["start"]), seed=config["seed"])
    with using_threads(config["threads"]):
        loop.begin()
        row = 0
        while loop.clock.peek() is not None:
            a = loop.advance()
            if a is None:
                continue
            made = {name: column[0] for name, column in loop.recorder.rows(row).items()}
            for name in ("version", "after", "loss", "fingerprint"):
                if made[name].tobytes() != trace[name][row].tobytes():
                    raise ReplayMismatch(
                        f"version {made['after']} differs: at arrival {row} (worker {a.worker}, job number {made['draw']}, "
                        f"taken at version {made['version']}) the recorded {name} is {trace[name][row]}, replayed it is "
                        f"{made[name]}. Code, data, libraries ({config['versions']}) or the record have changed."
                    )
            row += 1
            for function in watch:
                function(loop.state, a)
    recorded, made = load_weights(place.path / "model.safetensors"), built.state_dict(loop.state.x)
    if {name: digest_of(x) for name, x in recorded.items()} != {name: digest_of(x) for name, x in made.items()}:
        raise ReplayMismatch(f"version {loop.state.version} differs: the final weights are not those of model.safetensors.")
    metrics = Table(load_table(place.path / "metrics.parquet")[0])
    return ended_run(loop, metrics, float(result["time"]), "replay", place.path)

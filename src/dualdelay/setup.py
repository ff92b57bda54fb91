"""What a run is made from: its configuration, its first weights, its fleet."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__
from .clocks import Change, VirtualClock
from .config import describe, rebuild
from .core import Algorithm, Problem
from .cores import Cores, cores_worth
from .crew import Crew
from .devices import batches, require_device, using_precision
from .errors import BadInput, require_one_of, require_whole
from .evaluation import Metric, Schedule
from .files import load_weights
from .fleet import Fleet, using_threads
from .folder import Folder, digest_of
from .gradients import Batch, Gradients, Round
from .local_fleet import LocalFleet
from .loop import Loop
from .optimizer import Optimizer
from .problems import exact
from .ray_fleet import RayFleet
from .result import EarlyStop
from .speeds import SpeedModel

Start = Tensor | Mapping[str, Tensor] | str | Path | None


def configuration(
    algorithm: Algorithm[Any],
    problem: Problem,
    seed: int,
    metrics: Mapping[str, Metric] | None,
    stop: EarlyStop | None,
    bad: str,
    keep: int,
    threads: int,
    server_threads: int,
    optimizer: Optimizer | None,
    table: str,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """A run's settings as plain values; refuses what cannot be."""
    require_one_of("bad", bad, ("retry", "stop"))
    require_whole("keep", keep, 1)
    require_whole("threads", threads, 1)
    require_one_of("table", table, ("full", "half", "host"))
    return {
        "dualdelay": __version__,
        "algorithm": describe(algorithm),
        "problem": describe(problem),
        "seed": seed,
        "metrics": list(metrics or ()),
        "stop": None if stop is None else asdict(stop),
        "bad": bad,
        "keep": keep,
        "threads": threads,
        "server_threads": server_threads,
        "optimizer": None if optimizer is None else optimizer.describe(),
        "table": table,
        **others,
    }


def identified(config: Mapping[str, Any], problem: Problem, x: Tensor) -> dict[str, Any]:
    """The settings with digests of the problem and the first weights, to know them by later."""
    return {**config, "fingerprint": problem.fingerprint(), "start": digest_of(x)}


def versions() -> dict[str, str]:
    """The libraries that a run's bits depend on."""
    return {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def starting_point(problem: Problem, start: Start, seed: int) -> Tensor:
    """The first weights, from what the user gave."""
    if start is None:
        return problem.start(seed).detach().clone()
    if isinstance(start, (str, Path)):
        start = load_weights(Path(start))
    x = problem.flat(start) if isinstance(start, Mapping) else start
    if not isinstance(x, Tensor):
        raise BadInput(f"start is a {type(x).__name__}; expected a tensor, a state dict or a path.")
    expected = problem.start(seed)
    x = x.to(expected.device)
    if x.shape != expected.shape or x.dtype != expected.dtype:
        raise BadInput(
            f"start has shape {tuple(x.shape)} and type {x.dtype}; expected {tuple(expected.shape)} and {expected.dtype}."
        )
    return x.detach().clone()


def suited(problem: Problem, algorithm: Algorithm[Any]) -> Problem:
    """The problem whose jobs are of the kind that the method asks for."""
    return exact(problem) if algorithm.exact else problem


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
    fleet: RayFleet | None = None,
    cores: int | None = 1,
) -> Iterator[Fleet]:
    """The fleet that a configuration asks for, let go at the end."""
    crew: Fleet
    with using_precision(config.get("device", "cpu"), config.get("precision", "float32")):
        if "fleet" in config:
            crew = Crew(rebuild("fleet", config["fleet"]) if fleet is None else fleet, problem, algorithm.message)
        else:
            pace: SpeedModel = rebuild("speeds", config["speeds"], speeds)
            changes = [Change(*change) for change in config["changes"]]
            clock = VirtualClock(pace, rebuild("link", config["link"]), changes)
            with using_threads(config["threads"]):
                gradients = gradients_of(config, problem, cores)
            crew = LocalFleet(problem, clock, algorithm.message, gradients=gradients)
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
        schedule=Schedule(config["evaluate_every"], config["evaluate_seconds"]),
        metrics=metrics,
        bad=config["bad"],
        optimizer=optimizer,
        table=config["table"],
    )


def require_same(config: Mapping[str, Any], folder: Folder) -> None:
    """Refuse a folder that holds a run of another configuration."""
    recorded = folder.config()
    other = [key for key, value in config.items() if recorded.get(key) != value]
    if other:
        said = "; ".join(f"{key}: {recorded.get(key)} there, {config[key]} now" for key in other[:3])
        raise BadInput(f"{folder.path} holds a run of another configuration ({said}). Choose another folder.")


def recorded_problem(
    config: Mapping[str, Any], problem: Problem | None, algorithm: Algorithm[Any], failure: type[Exception]
) -> Problem:
    """The problem of a run's folder, built again or given again, and checked."""
    built = suited(rebuild("problem", config["problem"]) if problem is None else problem, algorithm)
    if "device" in config:
        require_device(config["device"], config["precision"])
        built = built.on(config["device"], config["precision"])
    if built.fingerprint() != config["fingerprint"]:
        raise failure(
            "the problem is not the one this folder was made with: its data or settings differ (recorded fingerprint "
            f"{config['fingerprint'][:12]}, now {built.fingerprint()[:12]}). Pass the same problem, or start a new run."
        )
    return built

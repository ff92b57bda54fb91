"""A run's specification as JSON, in its folder and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..core import Algorithm, Problem
from ..core.devices import require_device
from ..core.errors import BadInput, DualDelayError, plain_number, require_positive, require_threads, require_whole, shown
from ..core.version import __version__
from ..engine.evaluation import Metric, Schedule
from ..engine.events import EventKind
from ..engine.result import EarlyStop
from ..problems import exact
from ..simulation.availability import Change
from ..simulation.speeds import SpeedModel
from ..storage.folder import Folder, digest_of
from ..workers.settings import WorkerFleet
from .names import describe, rebuild
from .optimizer import Maker, optimizer_of
from .seeds import seeded_problem, seeded_speeds
from .settings import NO_LINK, Compute, Evaluation, Saving, Server, SimulatedFleet
from .spec import RecordedFleet, RunSpec, require_totals, with_room

Config = dict[str, Any]


@dataclass(frozen=True)
class GivenAgain:
    """What cannot be built from its name in a folder, and so is passed again."""

    problem: Problem | None = None
    algorithm: Algorithm[Any] | None = None
    optimizer: Maker = None
    schedule: Maker = None
    metrics: Mapping[str, Metric] | None = None
    speeds: SpeedModel | SimulatedFleet | None = None
    cores: int | None = None


def to_json(spec: RunSpec) -> Config:
    """A specification as plain values."""
    evaluation, schedule, stop = spec.evaluation, spec.schedule or Schedule(), spec.evaluation.early_stop
    config = {
        "dualdelay": __version__,
        "algorithm": describe(spec.algorithm),
        "problem": describe(spec.problem),
        "seed": spec.seed,
        "metrics": list(evaluation.metrics or ()),
        "stop": None if stop is None else {name: plain_number(value) for name, value in asdict(stop).items()},
        "on_nonfinite": spec.server.on_nonfinite,
        "keep_best": evaluation.keeps,
        "keep": spec.saving.keep,
        "threads": spec.threads,
        "server_threads": spec.server_threads,
        "optimizer": None if spec.optimizer is None else spec.optimizer.describe(),
        "table": spec.compute.gradient_table,
        "updates": spec.updates,
        "time": spec.time,
        "evaluate_every": schedule.updates,
        "evaluate_seconds": schedule.seconds,
        "evaluate_samples": schedule.samples,
        "evaluate_limit": schedule.limit,
        "evaluates_by_default": spec.scheduled_by_default,
        "checkpoint_every": spec.saving.every,
    }
    if isinstance(spec.fleet, SimulatedFleet):
        return config | {
            "device": spec.compute.device,
            "precision": spec.compute.precision,
            "batch": spec.compute.batch,
            "speeds": describe(spec.fleet.speeds),
            "link": describe(spec.fleet.link),
            "changes": [list(change) for change in spec.fleet.changes],
        }
    assert isinstance(spec.fleet, WorkerFleet)
    return config | {"fleet": describe(spec.fleet), "room": spec.fleet.room}


def identified(spec: RunSpec, fingerprint: str = "") -> Config:
    """A specification as plain values, with digests of the problem and the first weights, and the weights' names."""
    layout = [[name, first, list(shape)] for name, first, shape in spec.problem.layout()]
    digests = {"fingerprint": fingerprint or spec.problem.fingerprint(), "start": digest_of(spec.x), "layout": layout}
    return {**to_json(spec), **digests}


def require_same(config: Mapping[str, Any], folder: Folder) -> None:
    """Refuse a folder that holds a run of another configuration."""
    recorded = folder.config()
    other = [key for key, value in config.items() if recorded.get(key) != value]
    if other:
        differences = "; ".join(f"{key}: {recorded.get(key)} there, {config[key]} now" for key in other[:3])
        raise BadInput(f"{folder.path} holds a run of another configuration ({differences}). Choose another folder.")


def read_config(folder: Folder) -> Config:
    """The configuration of a run, with numbers that there can be."""
    config = folder.config()
    for name in ("threads", "server_threads"):
        require_threads(name, config[name])
    require_totals(config["updates"], config["time"])
    for name, least in (("evaluate_every", 1), ("checkpoint_every", 1), ("evaluate_samples", 1), ("keep", 1)):
        if config[name] is not None:
            require_whole(name, config[name], least)
    if config["evaluate_seconds"] is not None:
        require_positive("evaluate_seconds", config["evaluate_seconds"])
    require_whole("room", config.get("room", 0), 0)
    return config


def from_json(
    config: Config,
    folder: Folder,
    again: GivenAgain,
    fleet: WorkerFleet | RecordedFleet | None,
    verb: str,
    failure: type[DualDelayError] = BadInput,
) -> RunSpec:
    """The specification of a recorded run, for ``dd.VERB``; without a fleet its workers are simulated.

    What was passed again has to be what was recorded; a problem that is not is a ``failure``.
    """
    algorithm = rebuild("algorithm", config["algorithm"], again.algorithm, verb=verb)
    problem = _problem(config, again.problem, algorithm, verb, failure)
    replays = isinstance(fleet, RecordedFleet)
    if not replays and set(config["metrics"]) != set(again.metrics or ()):
        raise BadInput(
            f"the run was started with metrics {config['metrics']}; pass the same functions again (metrics=...)."
        )
    optimizer = optimizer_of(
        config["optimizer"], again.optimizer, again.schedule, config["updates"], algorithm, problem, verb
    )
    when = [config[f"evaluate_{name}"] for name in ("every", "seconds", "samples", "limit")]
    device = config.get("device", "cpu")
    return RunSpec(
        algorithm=algorithm,
        problem=problem,
        fleet=_simulated(config, again.speeds) if fleet is None else fleet,
        updates=config["updates"],
        time=config["time"],
        seed=config["seed"],
        evaluation=Evaluation() if replays else _evaluation(config, again.metrics),
        schedule=None if replays else Schedule(*when),
        scheduled_by_default=bool(config.get("evaluates_by_default")),
        saving=Saving(folder.path, config["checkpoint_every"], config["keep"]),
        compute=Compute(
            device,
            again.cores,
            config.get("precision", "float32"),
            batch=config.get("batch", False),
            gradient_table=config["table"],
        ),
        server=Server(on_nonfinite=config["on_nonfinite"]),
        optimizer=optimizer,
        x=folder.start().to(device),
        threads=config["threads"],
        server_threads=config["server_threads"],
    )


def _evaluation(config: Config, metrics: Mapping[str, Metric] | None) -> Evaluation:
    stop = config["stop"]
    if stop is not None and set(stop) != {field.name for field in fields(EarlyStop)}:
        raise BadInput(f"the configuration says of early stopping {shown(stop)}; no run has written that.")
    return Evaluation(metrics=metrics, best_by=config["keep_best"], early_stop=None if stop is None else EarlyStop(**stop))


def _simulated(config: Config, given: SpeedModel | SimulatedFleet | None) -> SimulatedFleet:
    fleet = None if given is None else SimulatedFleet.of(given)
    speeds = None if fleet is None or fleet.speeds is None else seeded_speeds(fleet.speeds, config["seed"])
    link = None if fleet is None or fleet.link == NO_LINK else fleet.link
    return SimulatedFleet(
        rebuild("speeds", config["speeds"], speeds),
        rebuild("link", config["link"], link),
        [Change(EventKind(kind), worker, time) for kind, worker, time in config["changes"]],
    )


def _problem(
    config: Config, given: Problem | None, algorithm: Algorithm[Any], verb: str, failure: type[DualDelayError]
) -> Problem:
    """The problem of a run's folder, built again or given again, and checked."""
    problem = rebuild("problem", config["problem"], verb=verb) if given is None else given
    problem = seeded_problem(problem, config["seed"])
    problem = exact(problem) if algorithm.exact else problem
    problem = with_room(problem, config.get("room", 0))
    if "device" in config:
        require_device(config["device"], config["precision"])
        problem = problem.on(config["device"], config["precision"])
    if problem.fingerprint() != config["fingerprint"]:
        raise failure(
            "the problem is not the one this folder was made with: its data or settings differ (recorded fingerprint "
            f"{config['fingerprint'][:12]}, now {problem.fingerprint()[:12]}). Pass the same problem, or start a new run."
        )
    return problem

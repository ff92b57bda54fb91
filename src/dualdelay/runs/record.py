"""From a run's specification to the record in its folder, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..core import Algorithm, Problem
from ..core.devices import require_device
from ..core.environment import environment
from ..core.errors import BadInput, DualDelayError, plain_number, shown
from ..core.version import __version__
from ..engine.evaluation import Metric, Schedule
from ..engine.events import EventKind
from ..engine.result import EarlyStop
from ..problems import exact
from ..simulation.availability import Change
from ..simulation.speeds import SpeedModel
from ..storage.folder import Folder, digest_of
from ..storage.record import RunRecord
from ..workers.settings import WorkerFleet
from .names import describe, rebuild
from .optimizer import Maker, optimizer_of
from .seeds import seeded_problem, seeded_speeds
from .settings import NO_LINK, Compute, Evaluation, Saving, Server, SimulatedFleet
from .spec import RecordedFleet, RunSpec, with_room


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


def record_of(spec: RunSpec, fingerprint: str = "", together: int = 1) -> RunRecord:
    """What a folder holds of a specification, computed here and now; the problem's fingerprint may be known already."""
    evaluation, schedule, stop = spec.evaluation, spec.schedule or Schedule(), spec.evaluation.early_stop
    workers: dict[str, Any] = {}
    if isinstance(spec.fleet, SimulatedFleet):
        workers = {
            "device": spec.compute.device,
            "precision": spec.compute.precision,
            "batch": spec.compute.batch,
            "speeds": describe(spec.fleet.speeds),
            "link": describe(spec.fleet.link),
            "changes": [[change.kind.value, change.worker, change.time] for change in spec.fleet.changes],
        }
    elif isinstance(spec.fleet, WorkerFleet):
        workers = {"fleet": describe(spec.fleet), "room": spec.fleet.room, "ranks": spec.fleet.ranks}
    return RunRecord(
        dualdelay=__version__,
        algorithm=describe(spec.algorithm),
        problem=describe(spec.problem),
        fingerprint=fingerprint or spec.problem.fingerprint(),
        seed=spec.seed,
        start=digest_of(spec.x),
        layout=[[name, first, list(shape)] for name, first, shape in spec.problem.layout()],
        updates=spec.updates,
        time=spec.time,
        optimizer=None if spec.optimizer is None else spec.optimizer.describe(),
        on_nonfinite=spec.server.on_nonfinite,
        uplink=spec.server.uplink,
        downlink=spec.server.downlink,
        table=spec.server.gradient_table,
        metrics=list(evaluation.metrics or ()),
        keep_best=evaluation.keeps,
        stop=None if stop is None else {name: plain_number(value) for name, value in asdict(stop).items()},
        evaluate_every=schedule.updates,
        evaluate_seconds=schedule.seconds,
        evaluate_samples=schedule.samples,
        evaluate_limit=schedule.limit,
        evaluates_by_default=spec.scheduled_by_default,
        keep=spec.saving.keep,
        checkpoint_every=spec.saving.every,
        threads=spec.threads,
        server_threads=spec.server_threads,
        environment=environment(),
        together=together,
        **workers,
    )


def require_same(record: RunRecord, folder: Folder) -> None:
    """Refuse a folder that holds a run of another configuration."""
    there = folder.record()
    if names := record.differences(there):
        texts = [f"{name}: {getattr(there, name)} there, {getattr(record, name)} now" for name in names[:3]]
        raise BadInput(f"{folder.path} holds a run of another configuration ({'; '.join(texts)}). Choose another folder.")


def spec_of(
    record: RunRecord,
    folder: Folder,
    again: GivenAgain,
    fleet: WorkerFleet | RecordedFleet | None,
    verb: str,
    failure: type[DualDelayError] = BadInput,
) -> RunSpec:
    """The specification of a recorded run, for ``dd.VERB``; without a fleet its workers are simulated.

    What was passed again has to be what was recorded; a problem that is not is a ``failure``.
    """
    algorithm = rebuild("algorithm", record.algorithm, again.algorithm, verb=verb)
    problem = _problem(record, again.problem, algorithm, verb, failure)
    replays = isinstance(fleet, RecordedFleet)
    if not replays and set(record.metrics) != set(again.metrics or ()):
        raise BadInput(f"the run was started with metrics {record.metrics}; pass the same functions again (metrics=...).")
    makers = (again.optimizer, again.schedule)
    return RunSpec(
        algorithm=algorithm,
        problem=problem,
        fleet=_simulated(record, again.speeds) if fleet is None else fleet,
        updates=record.updates,
        time=record.time,
        seed=record.seed,
        evaluation=Evaluation() if replays else _evaluation(record, again.metrics),
        schedule=None if replays else _schedule(record),
        scheduled_by_default=record.evaluates_by_default,
        saving=Saving(folder.path, record.checkpoint_every, record.keep),
        compute=Compute(record.device or "cpu", again.cores, record.precision or "float32", batch=record.batch or False),
        server=Server(
            on_nonfinite=record.on_nonfinite,
            uplink=record.uplink,
            downlink=record.downlink,
            gradient_table=record.table,
        ),
        optimizer=optimizer_of(record.optimizer, *makers, record.updates, algorithm, problem, verb),
        x=folder.start().to(record.device or "cpu"),
        threads=record.threads,
        server_threads=record.server_threads,
    )


def _schedule(record: RunRecord) -> Schedule:
    return Schedule(record.evaluate_every, record.evaluate_seconds, record.evaluate_samples, record.evaluate_limit)


def _evaluation(record: RunRecord, metrics: Mapping[str, Metric] | None) -> Evaluation:
    stop = record.stop
    if stop is not None and set(stop) != {field.name for field in fields(EarlyStop)}:
        raise BadInput(f"the configuration says of early stopping {shown(stop)}; no run has written that.")
    return Evaluation(metrics=metrics, best_by=record.keep_best, early_stop=None if stop is None else EarlyStop(**stop))


def _simulated(record: RunRecord, given: SpeedModel | SimulatedFleet | None) -> SimulatedFleet:
    """The simulated workers of a recorded run, or those that were passed again."""
    assert record.speeds is not None and record.link is not None and record.changes is not None
    fleet = None if given is None else SimulatedFleet.of(given)
    speeds = None if fleet is None or fleet.speeds is None else seeded_speeds(fleet.speeds, record.seed)
    link = None if fleet is None or fleet.link == NO_LINK else fleet.link
    return SimulatedFleet(
        rebuild("speeds", record.speeds, speeds),
        rebuild("link", record.link, link),
        [Change(EventKind(kind), worker, time) for kind, worker, time in record.changes],
    )


def _problem(
    record: RunRecord, given: Problem | None, algorithm: Algorithm[Any], verb: str, failure: type[DualDelayError]
) -> Problem:
    """The problem of a recorded run, built again or given again, and checked."""
    problem = rebuild("problem", record.problem, verb=verb) if given is None else given
    problem = seeded_problem(problem, record.seed)
    problem = exact(problem) if algorithm.exact else problem
    problem = with_room(problem, record.room)
    if record.device is not None and record.precision is not None:
        require_device(record.device, record.precision)
        problem = problem.on(record.device, record.precision)
    if problem.fingerprint() != record.fingerprint:
        raise failure(
            "the problem is not the one this folder was made with: its data or settings differ (recorded fingerprint "
            f"{record.fingerprint[:12]}, now {problem.fingerprint()[:12]}). Pass the same problem, or start a new run."
        )
    return problem

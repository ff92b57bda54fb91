"""Go on with a run from its folder's last good checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core import Algorithm, Problem
from ..core.devices import using_threads
from ..core.environment import changes, environment
from ..core.errors import BadInput, RunFailed, plain_number, require_threads
from ..engine.evaluation import Metric
from ..engine.events import EventKind
from ..engine.loop import Loop
from ..engine.result import Run
from ..engine.shard import divided
from ..engine.sharded import ShardLost
from ..simulation.speeds import SpeedModel
from ..storage.folder import Folder, Saved
from ..storage.record import RunRecord
from ..workers.ray_fleet import RayFleet
from ..workers.settings import WorkerFleet
from .fleets import make_loop, open_fleet, require_watchable
from .names import rebuild
from .optimizer import Maker, optimizer_of
from .outcome import best_of, result_of
from .record import GivenAgain, spec_of
from .runner import Member, Runner, result, starting_workers
from .settings import Reporting, SimulatedFleet, Watch
from .showing import showing
from .spec import RecordedFleet, RunSpec, for_this_thread, require_totals

_log = logging.getLogger("dualdelay")


def resume(
    folder: str | Path,
    updates: int | None = None,
    time: float | None = None,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    speeds: SpeedModel | SimulatedFleet | None = None,
    fleet: WorkerFleet | None = None,
    metrics: Mapping[str, Metric] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] | Reporting = (),
    cores: int | None = None,
) -> Run:
    """Go on from a folder's last good checkpoint, to the totals it was started with or to new ones.

    Arguments:
        folder: the run's folder.
        updates, time: new totals; a finished run is returned if they are those it had.
        problem, algorithm, speeds, metrics, optimizer, schedule: what is your own and cannot be built from the folder has
            to be passed again. A problem is checked by its fingerprint. A link of your own comes with the speeds, in a
            ``dd.SimulatedFleet``.
        fleet: real workers may go on with other settings, but for the number of threads and of ranks.
        watch, cores: as in ``simulate``.

    A simulation ends with the same bits as one that was never stopped, on the same kind of processor with the same
    libraries; on another the run goes on, and its notes and trace say so. Real workers go on in new processes, and what had
    arrived since the checkpoint is computed again.

    Example:
        >>> run = dd.resume("runs/mine", updates=5000)
    """
    place, reporting = Folder(Path(folder)), Reporting.of(watch)
    updates, time = plain_number(updates), plain_number(time)
    if updates is not None or time is not None:
        require_totals(updates, time)
    if cores is not None:
        require_threads("cores", cores)
    place.record()  # refuses what is no run's folder before it is locked
    with place, ExitStack() as stack:
        record = place.record()
        require_totals(record.updates, record.time)
        stack.enter_context(using_threads(record.server_threads))
        own = None if problem is None else stack.enter_context(for_this_thread(problem))
        again = GivenAgain(own, algorithm, optimizer, schedule, metrics, speeds, cores)
        spec = spec_of(record, place, again, _real_workers(place, record, fleet), "resume")
        require_watchable(spec, reporting)
        if updates is not None or time is not None:
            record, spec = replace(record, updates=updates, time=time), replace(spec, updates=updates, time=time)
        return through_losses(Member(spec, place), reporting, partial(go_on, place, spec, record, reporting))


def through_losses(member: Member, reporting: Reporting, run: Callable[[], Run]) -> Run:
    """Bring a run to its end that goes back to its last checkpoint whenever a shard of its server dies."""
    newest, lost = -1, list[str]()
    while True:
        try:
            return run()
        except ShardLost as error:
            spec, place = member.spec, member.folder
            assert isinstance(spec.fleet, WorkerFleet)
            if place is None and spec.saving.path is None:
                raise RunFailed(f"{error} Nothing was saved that it could go back to: give the run a folder.") from error
            if place is None:  # it had not begun
                lost = [*lost, str(error)]
                if len(lost) > spec.fleet.faults.restarts:
                    raise RunFailed(f"{error} That is the {len(lost)}th time before anything had begun.") from error
                _log.warning("%s Nothing had begun: all of them are started again", error)
                continue
            before, newest = newest, max(place.moments(), default=-1)
            lost = [*([] if newest > before else lost), f"{error} The server went back to its last checkpoint"]
            if len(lost) > spec.fleet.faults.restarts:
                raise RunFailed(f"{error} That is the {len(lost)}th time without a new checkpoint between.") from error
            _log.warning("%s The server goes back to its last checkpoint", error)
            run = partial(go_on, place, _afresh(spec, place), place.record(), reporting, lost)


def _afresh(spec: RunSpec, place: Folder) -> RunSpec:
    """The run as it was given, with an optimizer that has made no step."""
    record = place.record()
    if record.optimizer is None:
        return spec
    optimizer = optimizer_of(record.optimizer, None, None, spec.updates, spec.algorithm, spec.problem, "resume")
    return replace(spec, optimizer=optimizer)


def go_on(place: Folder, spec: RunSpec, record: RunRecord, reporting: Reporting, lost: Sequence[str] = ()) -> Run:
    """Continue the run in a folder, which is locked, to the ends that the specification and the record have.

    ``lost`` are the shards that have died since the checkpoint, in words: its trace does not have them.
    """
    sharded = isinstance(spec.fleet, RayFleet) and spec.fleet.shards is not None
    saved, (outcome, warnings) = place.load(joined=not sharded), result_of(place)
    ended, now, notes = "", environment(), list[str]()
    if saved is not None and outcome is not None and outcome.get("moment") == saved.content["moment"]:
        ended = outcome["ended"] if outcome.get("config") == record.digest else ""
        if spec.real and (ended or _is_enough(spec, outcome)):  # no worker needs to be started
            try:
                run = _as_it_ended(place, spec, record, outcome, place.load() if sharded else saved)
                return run if ended else _with_new_totals(place, spec, record, outcome, run)
            except BadInput as error:
                ended, warnings = "", [*warnings, f"{str(error).rstrip('.')}; what the last checkpoint has is taken"]
    for warning in warnings:  # what the run says of itself does not change: the files are written again
        _log.warning("%s", warning)
    spec.require_end()
    with (
        showing(reporting, spec.algorithm if lost else place.path.name, spec.updates, spec.time, spec.fleet) as shown_to,
        open_fleet(spec, place.path / "output") as fleet,
    ):
        loop, member = make_loop(spec, fleet), Member(spec, place)
        if saved is None:
            place.rewind(None)
            if changes(record.environment, now):  # nothing was done on the other machine that counts
                record = replace(record, environment=now)
            if record != place.record():
                place.write_record(record)
            with starting_workers("nothing had been saved yet") if spec.real else nullcontext():
                loop.begin()
            _record_losses(loop, lost)
            return Runner(loop, [member], shown_to, notes).run()
        content, rows, problems = saved
        if sharded and "shards" not in content:
            content, alone = divided(content, spec.x.numel())
            content["shards"] = [(0, spec.x.numel(), alone)]
        notes += [f"{problem}; an older checkpoint was used" for problem in problems]
        notes += _beyond(spec, content["state"]["version"], content["now"])
        if outcome is not None and outcome["ended"] == "stop" and not ended:
            _warn_of_stop(place, spec, content["state"]["version"])
        with starting_workers("the run is as it was saved last") if spec.real else nullcontext():
            loop.load(content, rows)
        if not ended:
            place.rewind(content, rows)
            if record != place.record():
                place.write_record(record)
        _record_losses(loop, lost)
        moved = changes(_last_environment(record, content["events"]), now)
        if moved and not ended:
            place.keep_aside(content["arrivals"])
            loop.recorder.event(EventKind.MACHINE, loop.now, loop.state.version, text=moved)
            notes.append(
                f"from arrival {content['arrivals']} on it was computed on another kind of machine ({moved}): the bits "
                "are not those of a run that stays where it is"
            )
        return Runner(loop, [member], shown_to, notes, resumed=not moved).run(ended)


_BEYOND = re.compile(r"the run has (made \d+ updates|come to time \S+) already, more than \S+")


def _beyond(spec: RunSpec, version: int, now: float) -> list[str]:
    """What is to be said of totals that a run has passed already."""
    notes = []
    if spec.updates is not None and version > spec.updates:
        notes.append(f"the run has made {version} updates already, more than {spec.updates}")
    if spec.time is not None and now > spec.time:
        notes.append(f"the run has come to time {now:g} already, more than {spec.time:g}")
    return notes


def _warn_of_stop(place: Folder, spec: RunSpec, version: int) -> None:
    _log.warning(
        "the run was stopped early at version %d (%s), and what stopped it still holds; to train on, begin another run "
        "from it: dd.Server(initial_weights=%r)",
        *(version, spec.evaluation.early_stop, str(place.path)),
    )


def _is_enough(spec: RunSpec, outcome: Mapping[str, Any]) -> str:
    """Why a finished run has nothing to do for other totals than it had; empty if it has."""
    if outcome["ended"] == "stop":  # what stopped it still holds
        return "stop"
    if spec.updates is not None and outcome["updates"] >= spec.updates:
        return "updates"
    return "time" if spec.time is not None and outcome["time"] >= spec.time else ""


def _with_new_totals(place: Folder, spec: RunSpec, record: RunRecord, outcome: Mapping[str, Any], run: Run) -> Run:
    """A finished run of real workers that is to be no longer than it is; its folder then holds the totals it was given.

    Of the notes that it had, those stay that do not speak of other totals.
    """
    if outcome["ended"] == "stop":
        _warn_of_stop(place, spec, run.version)
    before = [note for note in run.notes if not _BEYOND.fullmatch(note)]
    run = replace(run, ended=_is_enough(spec, outcome), notes=(*_beyond(spec, run.version, run.time), *before))
    place.write_record(record)
    place.end_anew({**outcome, "ended": run.ended, "notes": list(run.notes), "config": record.digest})
    return run


def _record_losses(loop: Loop, lost: Sequence[str]) -> None:
    """Put into the trace that shards of the server have died."""
    for text in lost:
        loop.recorder.event(EventKind.CRASHED, loop.now, loop.state.version, text=text)


_TRUST = {"address": None, "host": "127.0.0.1", "insecure": False}  # what no folder decides, and what is usual


def recorded_fleet(folder: str | Path, **trust: Any) -> WorkerFleet | None:
    """The real workers of a run that is to go on; whom it trusts (address, host, insecure) is said here alone."""
    recorded = Folder(Path(folder)).record().fleet
    if recorded is None:
        if trust:
            raise BadInput(
                f"{folder} is a simulation, which nobody else has to be trusted for; leave out {', '.join(trust)}."
            )
        return None
    if recorded.get("name") == "sites":
        raise BadInput(
            f"{folder} was trained with sites that dial in. Whom to let in is not for a folder to decide: go on with the "
            f"same dualdelay serve ... --folder {folder}, or in Python with dd.resume(folder, fleet=dd.SiteFleet(...))."
        )
    unconfirmed = [name for name in _TRUST if recorded.get(name, _TRUST[name]) != _TRUST[name] and name not in trust]
    if unconfirmed:
        settings = ", ".join(f"{name}={recorded[name]!r}" for name in unconfirmed)
        flags = " ".join("--insecure" if name == "insecure" else f"--{name} {recorded[name]}" for name in unconfirmed)
        raise BadInput(
            f"{folder} says of its workers {settings}. Whom to trust is not for a folder to decide: if that is right, say "
            f"so again, with dd.resume(folder, fleet=dd.RayFleet({settings}, ...)) or dualdelay resume {folder} {flags}. "
            "To go on with workers on this machine alone: fleet=dd.RayFleet(), or --address local."
        )
    given = {**_TRUST, **trust, "address": None if trust.get("address") == "local" else trust.get("address")}
    fleet: WorkerFleet = rebuild("fleet", {**recorded, **given})
    return fleet


def _real_workers(place: Folder, record: RunRecord, fleet: WorkerFleet | None) -> WorkerFleet | None:
    """The workers that a run continues with, given again or as they were; None if they are simulated."""
    if fleet is None:
        return recorded_fleet(place.path)
    if not record.real or (fleet.threads, fleet.ranks) != (record.threads, record.ranks):
        several = f" and ranks={record.ranks}" if record.ranks > 1 or fleet.ranks > 1 else ""
        kind = f"real workers with threads={record.threads}{several}" if record.real else "simulated workers"
        other = f", and this fleet has threads={fleet.threads}" + (f" and ranks={fleet.ranks}" if several else "")
        raise BadInput(
            f"the run was started with {kind}{other if record.real else ''}; pass a fleet of the same kind, or none."
        )
    return fleet


def _last_environment(record: RunRecord, events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where a run was computed last: where it began, with the changes that its events record."""
    last = dict(record.environment)
    for event in events:
        if event["kind"] == EventKind.MACHINE and event["worker"] < 0:
            for change in event["text"].split("; "):
                key, _, values = change.partition(": ")
                last[key] = values.partition(" -> ")[2]
    return last


def _as_it_ended(place: Folder, spec: RunSpec, record: RunRecord, ended: Mapping[str, Any], saved: Saved | None) -> Run:
    """A finished run of real workers, from what it left behind."""
    assert saved is not None
    trace = place.trace()
    recorded = replace(spec, fleet=RecordedFleet(trace), schedule=None)
    with open_fleet(recorded) as fleet:
        loop = make_loop(recorded, fleet)
        loop.load(saved.content, saved.rows)
        loop.recorder.events = trace.events
        time, notes = float(ended["time"]), ended["notes"]
        run = result(loop, 0, spec, place.table("metrics"), time, ended["ended"], notes, place)
        best = best_of(place, record, ended, run.metrics, loop.state.weights)
    return replace(run, workers=place.table("workers"), best=best)

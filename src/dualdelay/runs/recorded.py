"""What can be done with a run's folder: look at it, go on with the run, or recompute it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core import Algorithm, Problem
from ..core.aggregate import AggregateState
from ..core.devices import using_precision, using_threads
from ..core.environment import changes, differences, environment
from ..core.errors import (
    BadInput,
    ReplayMismatch,
    plain_number,
    require_kind,
    require_positive,
    require_threads,
    require_whole,
)
from ..core.state import State
from ..engine.evaluation import Best, Metric, WorkerRows, metric_rows
from ..engine.loop import Loop
from ..engine.monitor import Logger
from ..engine.result import EarlyStop, Names, Run, troubles
from ..engine.trace import Column, Recorder, Table, Trace
from ..simulation.clocks import RecordedClock
from ..simulation.link import Link
from ..simulation.local_fleet import LocalFleet
from ..simulation.speeds import SpeedModel
from ..storage.files import Damaged, json_digest
from ..storage.folder import Folder, digest_of
from ..workers.ray_fleet import RayFleet
from .drive import Watch, drive, ended_run, require_totals, starting
from .names import rebuild
from .naming import seeded_speeds
from .optimizer import Maker, optimizer_of
from .setup import borrowed, gradients_of, make_loop, manned, recorded_problem, require_an_end
from .showing import showing

_CLOSE, _EARLY = 1e-3, 100  # how well the losses of the first arrivals agree when a run is computed in other company


_log = logging.getLogger("dualdelay")


def resume(
    folder: str | Path,
    updates: int | None = None,
    time: float | None = None,
    problem: Problem | None = None,
    *,
    algorithm: Algorithm[Any] | None = None,
    speeds: SpeedModel | None = None,
    link: Link | None = None,
    fleet: RayFleet | None = None,
    metrics: Mapping[str, Metric] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] = (),
    log: Sequence[Logger] = (),
    cores: int | None = None,
    progress: bool = True,
) -> Run:
    """Go on from a folder's last good checkpoint, to the totals it was started with or to new ones.

    A problem, algorithm, speed model, link, metric, optimizer or schedule of your own cannot be built from the folder: pass
    it again. A problem is checked by its fingerprint. A simulation ends with the same bits as one that was never stopped,
    on the same kind of processor with the same libraries; on another the run goes on, and its notes and trace say so. Real
    workers go on in new processes, and what had arrived since the checkpoint is computed again. Those may be given another
    ``fleet``, with the same number of threads.
    """
    place = Folder(Path(folder))
    updates, time = plain_number(updates), plain_number(time)
    if updates is not None or time is not None:
        require_totals(updates, time, None, None, None)
    place.config()  # says so if it is no run's folder, which is not locked then
    with place, ExitStack() as stack:
        config = _runnable(place)
        stack.enter_context(using_threads(config["server_threads"]))
        mine = stack.enter_context(_given(problem))
        method = rebuild("algorithm", config["algorithm"], algorithm)
        built = recorded_problem(config, mine, method, BadInput, "resume")
        if set(config["metrics"]) != set(metrics or ()):
            raise BadInput(
                f"the run was started with metrics {config['metrics']}; pass the same functions again (metrics=...)."
            )
        crew = _same_kind(place, config, fleet)
        if cores is not None:
            require_threads("cores", cores)
        if updates is not None or time is not None:
            config |= {"updates": updates, "time": time}
        x = place.start().to(config.get("device", "cpu"))
        mover = optimizer_of(config["optimizer"], optimizer, schedule, config["updates"], method, built, "resume")
        loaded, (result, wrong) = place.load(), _result(place)
        notes, ended, now = list[str](), "", environment()
        if loaded is not None and result is not None:
            same = (result.get("config"), result.get("moment")) == (json_digest(config), loaded[0]["moment"])
            ended = result["ended"] if same else ""
            if same and crew is not None:  # nobody needs to be called
                try:
                    return _as_it_ended(place, config, result, loaded, method, built, x, mover)
                except BadInput as error:
                    ended, wrong = "", [*wrong, f"{str(error).rstrip('.')}; what the last checkpoint has is taken"]
        for said in wrong:  # what the run says of itself does not change: the files are written again
            _log.warning("%s", said)
        pace: SpeedModel | None = None
        if crew is None:
            given = None if speeds is None else seeded_speeds(speeds, config["seed"])
            pace = rebuild("speeds", config["speeds"], given)
        require_an_end(built, pace, config["updates"], config["time"], config["evaluate_seconds"])
        shown = stack.enter_context(
            showing(place.path.name, config["updates"], config["time"], progress=progress, real=crew is not None)
        )
        workers = stack.enter_context(
            manned(
                *(config, method, built),
                speeds=pace,
                link=link,
                fleet=crew,
                output=place.path / "output",
                cores=cores,
            )
        )
        watch, log = (*watch, *shown["watch"]), (*log, *shown["log"])
        loop = make_loop(config, method, built, workers, x, metrics, mover)
        stop = None if config["stop"] is None else EarlyStop(**config["stop"])
        if loaded is None:
            place.rewind(None)
            if changes(config["environment"], now):  # nothing was done on the other machine that counts
                config["environment"] = now
            if config != place.config():
                place.write_config(config)
            loop.begin()
            return drive(loop, config, place, watch, stop, log=log)
        content, rows, problems = loaded
        notes += [f"{wrong}; an older checkpoint was used" for wrong in problems]
        if config["updates"] is not None and content["state"]["version"] > config["updates"]:
            made = content["state"]["version"]
            notes.append(f"the run has made {made} updates already, more than {config['updates']}")
        if result is not None and result["ended"] == "stop" and not ended:
            _log.warning(
                "the run was stopped early at version %d (%s), and what stopped it still holds; to train on, begin "
                "another run from it: start=%r",
                *(content["state"]["version"], stop, str(place.path)),
            )
        with starting("the run is as it was saved last") if crew is not None else nullcontext():
            loop.load(content, rows)
        if not ended:
            place.rewind(content, rows)
            if updates is not None or time is not None:
                place.write_config(config)
        moved = changes(_last_environment(config, content["events"]), now)
        if moved and not ended:
            place.keep_aside(content["arrivals"])
            loop.recorder.event("machine", loop.now, loop.state.version, text=moved)
            notes.append(
                f"from arrival {content['arrivals']} on it was computed on another kind of machine ({moved}): the bits "
                "are not those of a run that stays where it is"
            )
        return drive(loop, config, place, watch, stop, resumed=not moved, notes=notes, ended=ended, log=log)


_TRUST = {"address": None, "host": "127.0.0.1", "insecure": False}  # what no folder decides, and what is usual


def fleet_of(folder: str | Path, **trust: Any) -> RayFleet | None:
    """The real workers of a run that is to go on; whom it trusts (address, host, insecure) is said here alone."""
    recorded = Folder(Path(folder)).config().get("fleet")
    if recorded is None:
        if trust:
            raise BadInput(
                f"{folder} is a simulation, which nobody else has to be trusted for; leave out {', '.join(trust)}."
            )
        return None
    unconfirmed = [name for name in _TRUST if recorded.get(name, _TRUST[name]) != _TRUST[name] and name not in trust]
    if unconfirmed:
        said = ", ".join(f"{name}={recorded[name]!r}" for name in unconfirmed)
        flags = " ".join("--insecure" if name == "insecure" else f"--{name} {recorded[name]}" for name in unconfirmed)
        raise BadInput(
            f"{folder} says of its workers {said}. Whom to trust is not for a folder to decide: if that is right, say so "
            f"again, with dd.resume(folder, fleet=dd.RayFleet({said}, ...)) or dualdelay resume {folder} {flags}. To go on "
            "with workers on this machine alone: fleet=dd.RayFleet(), or --address local."
        )
    given = {**_TRUST, **trust, "address": None if trust.get("address") == "local" else trust.get("address")}
    fleet: RayFleet = rebuild("fleet", {**recorded, **given})
    return fleet


def _same_kind(place: Folder, config: Mapping[str, Any], fleet: RayFleet | None) -> RayFleet | None:
    """The workers that a run goes on with, given again or as they were; None if they are simulated."""
    if fleet is None:
        return fleet_of(place.path)
    if "fleet" not in config or fleet.threads != config["threads"]:
        kind = f"real workers with threads={config['threads']}" if "fleet" in config else "simulated workers"
        raise BadInput(f"the run was started with {kind}; pass a fleet of the same kind, or none.")
    return fleet


def _result(place: Folder) -> tuple[dict[str, Any] | None, list[str]]:
    """How a run ended, if it did, and what is wrong with that."""
    try:
        return place.result(), []
    except Damaged as error:
        return None, [f"{error}; what the last checkpoint has is taken"]


def _runnable(place: Folder) -> dict[str, Any]:
    """The configuration of a run, with numbers that there can be."""
    config = place.config()
    for name in ("threads", "server_threads"):
        require_threads(name, config[name])
    ends = ("updates", "time", "evaluate_every", "evaluate_seconds", "checkpoint_every")
    require_totals(*(config[name] for name in ends))
    require_whole("keep", config["keep"], 1)
    require_whole("room", config.get("fleet", {}).get("room", 0), 0)
    if config["evaluate_samples"] is not None:
        require_whole("evaluate_samples", config["evaluate_samples"], 1)
    return config


def _given(problem: Problem | None) -> AbstractContextManager[Problem | None]:
    """The problem that was given again, for a run of this thread."""
    if problem is not None:
        require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    return nullcontext() if problem is None else borrowed(problem)


def _last_environment(config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where a run was computed last: where it began, with the changes that its events tell of."""
    last = dict(config["environment"])
    for event in events:
        if event["kind"] == "machine" and event["worker"] < 0:
            for change in event["text"].split("; "):
                key, _, values = change.partition(": ")
                last[key] = values.partition(" -> ")[2]
    return last


def _as_it_ended(
    place: Folder,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    loaded: tuple[dict[str, Any], dict[str, Any], list[str]],
    method: Algorithm[Any],
    built: Problem,
    x: Tensor,
    mover: Any,
) -> Run:
    """A finished run of real workers, from what it left behind."""
    fleet = LocalFleet(built, RecordedClock(place.trace()), method.message)
    loop = Loop(method, built, fleet, x, optimizer=mover, keep_best=config["keep_best"])
    loop.load(loaded[0], loaded[1])
    loop.recorder.events = place.trace().events
    run = ended_run(loop, place.table("metrics"), float(result["time"]), result["ended"], place.path, result["notes"])
    best = _kept_best(place, config, result, run.metrics, loop.state.weights)
    return replace(run, workers=place.table("workers"), best=best)


def load(folder: str | Path) -> Run:
    """What a run's folder holds, finished or not: metrics, trace, weights and state dict.

    Neither the problem nor Ray is needed: ``dd.load("runs/mine").state_dict()`` gives a model's weights by name, and
    ``.metrics``, ``.workers``, ``.trace``, ``.notes`` what is known of the run. One that was interrupted is as it was saved
    last; ``ended`` is then "interrupted", or "failed" with a note that says why.
    """
    place = Folder(Path(folder))
    config, (result, wrong), names = place.config(), _result(place), place.names()
    try:
        method = rebuild("algorithm", config["algorithm"])
    except BadInput:  # a user's own
        method = None
    try:
        loaded = place.load()
    except Damaged as error:
        if result is None:
            raise
        if "returned_version" in result:  # what it left is not where it ended
            said = "It was stopped early, so its last state is lost; the model that it returned is in model.safetensors."
            raise Damaged(f"{error} {said}") from None
        return _finished(place, config, result, method, None, names, [str(error)])
    if loaded is None:
        x = place.start()
        empty = Table.of([], ("time", "version", "objective"))
        state, nothing = State(weights=x, n=0), Recorder().trace()
        notes = (*wrong, f"it could not go on: {place.failure()}") if place.failure() else tuple(wrong)
        ended = "failed" if place.failure() else "interrupted"
        return Run(method, None, state, nothing, empty, 0.0, ended, None, place.path, notes, names=names)
    content, rows, problems = loaded
    if result is not None and not problems and result.get("moment") != content["moment"]:
        problems.append("the last checkpoint is missing")
    state = _state(content["state"])
    if result is not None and not (problems and "returned_version" in result):  # its last weights are not those it left
        try:
            return _finished(place, config, result, method, None if problems else state, names, problems)
        except BadInput as error:
            wrong = [f"{str(error).rstrip('.')}; what the last checkpoint has is taken"]
    evaluation = content["evaluation"]
    best = None if evaluation["best"] is None else Best(**evaluation["best"])
    best = best if best is not None and best.x is not None else None
    trace = Trace(rows, content["events"])
    metrics = Table.of(metric_rows(evaluation["metrics"]), evaluation["metrics"]["names"])
    workers = WorkerRows.loaded(evaluation["workers"]).table()
    older = [f"{problem}; an older checkpoint was used" for problem in problems]
    ended, notes = "interrupted", (*wrong, *older, *troubles(content["events"]))
    if place.failure():
        ended, notes = "failed", (*notes, f"it could not go on: {place.failure()}")
    return Run(
        *(method, None, state, trace, metrics, content["now"], ended, None, place.path, notes, workers, best),
        names=names,
    )


def _finished(
    place: Folder,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    method: Algorithm[Any] | None,
    state: State | None,
    names: Names,
    problems: Sequence[str] = (),
) -> Run:
    """A finished run, from the files that it left behind; without its last state, that is made of its model."""
    metrics, like = place.table("metrics"), place.start() if state is None else state.weights
    weights = names.flat(place.weights("model"), like)
    if state is None:
        state = State(weights=weights, n=0, version=int(result["updates"]))
    best = _kept_best(place, config, result, metrics, like)
    time, notes = float(result["time"]), (*result["notes"], *problems)
    return Run(
        *(method, None, state, place.trace(), metrics, time, result["ended"], result["audit"], place.path, notes),
        *(place.table("workers"), best, weights),
        names=names,
    )


def _kept_best(
    place: Folder, config: Mapping[str, Any], result: Mapping[str, Any], metrics: Table, like: Tensor
) -> Best | None:
    """The best model of a finished run; its last evaluation, which is in no checkpoint, may have found it."""
    if result.get("best_version") is None:
        return None
    best = Best.by(config["keep_best"], tuple(metrics))
    best.value, best.version = float(result["best_value"]), int(result["best_version"])
    best.x = place.names().flat(place.weights("best"), like)
    return best


def _state(saved: Mapping[str, Any]) -> State:
    """What the server knew, as far as every method's state has it."""
    kind = AggregateState if "total" in saved and "table" in saved else State
    known = {field.name for field in fields(kind)} - {"optimizer"}
    return kind(**{name: value for name, value in saved.items() if name in known})


def replay(
    folder: str | Path,
    problem: Problem | None = None,
    *,
    rtol: float | None = None,
    algorithm: Algorithm[Any] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] = (),
    progress: bool = True,
) -> Run:
    """Recompute a recorded run, simulated or real, in its recorded order; raises ReplayMismatch unless every bit agrees.

    Bits agree on the same kind of processor with the same libraries; the error names what differs. With ``rtol`` the order
    must agree exactly, and losses and final weights to that relative tolerance: for another kind of machine. Where a run
    went on on another kind of machine, the replay goes on from the weights that it had there, and ``notes`` say how near
    the replayed ones were. A run that a sweep computed side by side with others is recomputed by itself, which gives other
    last digits: then the order must agree exactly and the first losses to a thousandth, and ``notes`` says how far apart
    the weights end.
    """
    if rtol is not None:
        require_positive("rtol", rtol)
    place = Folder(Path(folder))
    doubts: list[str] = []  # a replay may find out what is wrong with a record that is not as it was written
    config, result, trace = _runnable(place), place.finished(), place.trace(doubts)
    with (
        using_threads(config["server_threads"]),
        using_precision(config.get("device", "cpu"), config.get("precision", "float32")),
        _given(problem) as mine,
        showing(f"replay of {place.path.name}", config["updates"], config["time"], progress=progress) as shown,
    ):
        method = rebuild("algorithm", config["algorithm"], algorithm, verb="replay")
        built = recorded_problem(config, mine, method, ReplayMismatch, "replay")
        apart = None if config["threads"] == config["server_threads"] else config["threads"]
        gradients = gradients_of(config, built) if config.get("batch") else None
        fleet = LocalFleet(built, RecordedClock(trace), method.message, apart, gradients)
        x = place.start().to(config.get("device", "cpu"))
        mover = optimizer_of(config["optimizer"], optimizer, schedule, config["updates"], method, built, "replay")
        how = {"seed": config["seed"], "on_nonfinite": "as recorded", "optimizer": mover, "table": config["table"]}
        try:
            replayed = _Replay(place, config, result, trace, Loop(method, built, fleet, x, **how), rtol, doubts)
            run = replayed.run((*watch, *shown["watch"]))
            if doubts:
                raise Damaged(f"{doubts[0]}, although what was replayed agrees with it.")
            return run
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            if doubts and not isinstance(error, BadInput):  # a record that makes no sense at all
                raise Damaged(doubts[0]) from error
            raise
        finally:
            fleet.close()


class _Replay:
    """A recorded run that is being recomputed."""

    def __init__(
        self,
        place: Folder,
        config: Mapping[str, Any],
        result: Mapping[str, Any],
        trace: Trace,
        loop: Loop,
        rtol: float | None,
        doubts: list[str],
    ) -> None:
        self._doubts = doubts
        self._place, self._config, self._result, self._trace, self._loop = place, config, result, trace, loop
        self._rtol, self._together = rtol, config.get("together", 1)
        self._notes: list[str] = []
        self._worst, self._exact = 0.0, True  # how far losses were apart, relative to them, and whether no bit differed
        self._elsewhere: list[str] = []  # where the run went on, on another kind of machine
        kept = result.get("best_version")
        self._best_version = -1 if kept is None else int(kept)
        self._best: Tensor | None = None

    def run(self, watch: Sequence[Watch]) -> Run:
        """Recompute it to its end."""
        loop, row = self._loop, 0
        loop.begin()
        self._keep()
        while (due := loop.fleet.peek()) is not None:
            a = loop.advance()
            if due.kind == "machine":
                self._go_on_from_what_was_kept(row, due.worker, due.text)
            self._keep()
            if a is not None:
                self._compare(row, a.worker)
                row += 1
                for function in watch:
                    function(loop.state, a)
        return self._ended()

    def _keep(self) -> None:
        if self._best is None and self._loop.state.version == self._best_version:
            self._best = self._loop.state.x

    def _go_on_from_what_was_kept(self, row: int, worker: int, text: str) -> None:
        """Another kind of machine was at work from here on: the rest is compared from the weights that it began with."""
        self._elsewhere.append(f"from arrival {row} on {'' if worker < 0 else f'worker {worker} was '}elsewhere ({text})")
        kept = self._place.kept_aside(row) if worker < 0 else None
        if kept is None:
            return
        here, there = self._loop.state.x.double(), kept["state"]["weights"].to(self._loop.state.x.device).double()
        distance = float((here - there).norm()) / (float(there.norm()) or 1.0)
        self._notes.append(
            f"from arrival {row} on it was computed on another kind of machine ({text}); there the replayed weights were "
            f"{distance:.1e} from those it had, and the replay went on from those"
        )
        self._loop.restore(kept)

    def _compare(self, row: int, worker: int) -> None:
        trace = self._trace
        made = {name: column[0] for name, column in self._loop.recorder.rows(row).items()}
        for name in ("version", "after", "loss", "fingerprint"):
            same = made[name].tobytes() == trace[name][row].tobytes()
            self._exact = self._exact and same
            if not same and name == "loss" and (self._rtol is not None or self._together > 1):
                same = self._near(float(made[name]), float(trace[name][row]), row)
            elif not same and name == "fingerprint":
                same = self._rtol is not None or self._together > 1
            if not same:
                raise self._mismatch(row, worker, made, name)

    def _near(self, made: float, recorded: float, row: int) -> bool:
        if math.isnan(made) and math.isnan(recorded):
            return True
        size = max(abs(made), abs(recorded), 1e-6 * float(np.nanmax(np.abs(self._trace.loss[: row + 1]))))
        self._worst = max(self._worst, abs(made - recorded) / size) if size else self._worst
        if self._rtol is not None:
            return abs(made - recorded) <= self._rtol * size
        return row >= _EARLY or bool(np.isclose(made, recorded, _CLOSE))

    def _mismatch(self, row: int, worker: int, made: Mapping[str, Column], name: str) -> ReplayMismatch:
        after, draw, version = made["after"], made["draw"], made["version"]
        said = (
            f"version {after} differs: at arrival {row} (worker {worker}, job number {draw}, taken at version {version}) "
            f"the recorded {name} is {self._trace[name][row]}, replayed it is {made[name]}."
        )
        return ReplayMismatch(f"{said} {self._why()}")

    def _why(self) -> str:
        """What may be the reason, as far as it was recorded."""
        found = [*differences(self._config["environment"], environment()), *self._elsewhere]
        if not found:
            return (
                "The processor, torch, numpy and the libraries for matrices are those of the record: the code, the data or "
                "the record itself have changed, or the method draws numbers that no seed names (use the rng of init)."
            )
        hint = "" if self._rtol is not None else " To compare numbers instead of bits: dd.replay(folder, rtol=1e-3)."
        return f"What is not as it was recorded: {'; '.join(found)}.{hint}"

    def _ended(self) -> Run:
        place, loop, result = self._place, self._loop, self._result
        early = result["ended"] == "stop" and self._best is not None
        x = self._best if early and self._best is not None else loop.state.x
        recorded, made = place.weights("model", self._doubts), loop.problem.state_dict(x)
        distance = _distance(recorded, made)
        if self._together > 1 and self._rtol is None:
            others = self._together - 1
            self._notes.append(
                f"it was computed side by side with {others} others: alone the weights end {distance:.1e} apart"
            )
        elif self._rtol is not None and distance > self._rtol:
            raise ReplayMismatch(
                f"the final weights are {distance:.1e} apart, more than rtol={self._rtol:g}. {self._why()}"
            )
        elif self._rtol is not None and distance > 0:
            self._notes.append(f"losses agree to {self._worst:.1e} and the final weights to {distance:.1e}, not to the bit")
        elif self._rtol is None and not _same(recorded, made):
            doubted = [said for said in self._doubts if "model.safetensors" in said]
            raise ReplayMismatch(
                f"version {loop.state.version} differs: the final weights are not those of model.safetensors. "
                f"{f'{doubted[0]}.' if doubted else self._why()}"
            )
        if self._best is not None:
            name, value = result["best_metric"], result["best_value"]
            loop.evaluation.best = Best(name, False, math.nan if value is None else value, self._best_version, self._best)
        run = ended_run(
            *(loop, place.table("metrics"), float(result["time"]), "replay", place.path, self._notes), returns=early
        )
        exact = self._exact and _same(recorded, made)
        return replace(run, workers=place.table("workers"), same_bits=exact)


def _distance(recorded: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> float:
    """How far apart two state dicts are, relative to the first."""
    if {name: x.shape for name, x in recorded.items()} != {name: x.shape for name, x in made.items()}:
        return math.inf
    apart = math.sqrt(math.fsum(float((made[name].double() - x.double()).norm()) ** 2 for name, x in recorded.items()))
    size = math.sqrt(math.fsum(float(x.double().norm()) ** 2 for x in recorded.values()))
    return apart / size if size else apart


def _same(recorded: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> bool:
    return {name: digest_of(x) for name, x in recorded.items()} == {name: digest_of(x) for name, x in made.items()}

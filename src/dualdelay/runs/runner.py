"""The runner: it brings one run, or several that share a schedule, to their ends, evaluates and saves them on the way."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..batching.replicas import Replicas
from ..core import Arrival
from ..core.devices import keep_freed_memory, use_threads, using_threads
from ..core.errors import BadInput, BadWork, DualDelayError, NotSaved, RunFailed
from ..engine.loop import Loop, passed
from ..engine.monitor import Monitor
from ..engine.result import Run, plain, troubles
from ..engine.sharded import ShardLost
from ..engine.table import Table
from ..simulation.gradients import Batcher
from ..simulation.local_fleet import LocalFleet
from ..storage.files import pack
from ..storage.folder import Folder
from ..storage.record import RunRecord
from .names import describe
from .settings import Reporting, SimulatedFleet
from .spec import RunSpec


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the run was saved; the message says what was saved, and in Python how to go on."""

    def __init__(self, saved: str, way_on: str = "") -> None:
        self.saved = saved
        super().__init__(f"{saved}; {way_on}" if way_on else saved)


def runs_saved(folder: Path | None) -> Interrupted:
    """The same of several runs, which are kept in one folder."""
    return Interrupted(f"the runs were saved in {folder}", "the same call goes on where they are")


class WatchFailed(Exception):
    """A function that watches runs side by side has raised its cause."""


@dataclass
class Member:
    """One of the runs that advance together: what it is, where it is kept, and what came of it."""

    spec: RunSpec
    folder: Folder | None = None
    record: RunRecord | None = None  # what a new folder is to hold of it
    run: Run | None = None  # once it has ended
    judged: int = 0  # evaluations that early stopping has seen


class Runner:
    """Runs under way with one loop: one by itself, or several that share a schedule."""

    def __init__(
        self,
        loop: Loop,
        members: Sequence[Member],
        reporting: Reporting | None = None,
        notes: Sequence[str] = (),
        *,
        resumed: bool = False,
    ) -> None:
        keep_freed_memory()
        self.loop, self.members = loop, members
        self._spec = members[0].spec  # what all members have in common
        self._watch = () if reporting is None else reporting.watch
        loggers = [*(() if reporting is None else reporting.log), *loop.fleet.loggers]
        self._monitor = Monitor(loggers, loop) if loggers else None
        self._notes = list(notes)
        self._may_stop_early = any(member.spec.evaluation.early_stop is not None for member in members)
        self._interrupted = [False]
        self._ending = False  # whether what is left is to write down how it ended
        self._saved = len(loop.recorder), loop.moment if resumed else -1  # arrivals and moment of the last checkpoint
        self._twentieth = int(20 * self.done)

    def resumed(self) -> None:
        """The loop was loaded: what has happened so far is saved."""
        self._saved = len(self.loop.recorder), self.loop.moment
        self._twentieth = int(20 * self.done)

    @property
    def done(self) -> float:
        """How much of the way is done."""
        updates, limit = self._spec.updates, self._spec.time
        return max(self.loop.state.version / updates if updates else 0.0, self.loop.now / limit if limit else 0.0)

    def ready(self) -> bool:
        """End the runs that are at their ends and evaluate what comes before the next event; whether a run is left."""
        loop, updates, limit = self.loop, self._spec.updates, self._spec.time
        if self._may_stop_early:
            self._stop_early()
        if not loop.going:
            return False
        if updates is not None and loop.state.version >= updates:
            self._end("updates")
            return False
        due = loop.fleet.peek()
        if due is None or loop.stuck:
            raise _nothing_due(loop)
        if limit is not None and due.time > limit:
            loop.evaluate_before(math.nextafter(limit, math.inf))
            self._stop_early()
            self._end("time")
            return False
        if loop.evaluate_before(due.time):
            self._stop_early()
        return bool(loop.going)

    def advance(self) -> None:
        """Let the next event happen, show it to the functions that watch, and save if it is time."""
        loop, before = self.loop, self.loop.state.version
        arrival = loop.advance()
        if arrival is not None and self._watch:
            self._show(arrival)
        if self._monitor is not None:
            self._monitor(loop, arrival)
        if torch.get_num_threads() != self._spec.server_threads:  # a user's function has changed it
            use_threads(self._spec.server_threads)
        if self.members[0].folder is not None and self._is_to_be_saved(before):
            self.save()

    def _is_to_be_saved(self, before: int) -> bool:
        """Whether a checkpoint is due: after so many updates, or after every twentieth of the way."""
        every = self._spec.saving.every
        if every is not None:
            return passed(every, before, self.loop.state.version)
        before, self._twentieth = self._twentieth, int(20 * self.done)
        return before != self._twentieth

    def _show(self, arrival: Arrival) -> None:
        """Call the functions that watch, for each run that is going with its own state and arrival."""
        if not isinstance(self.loop, Replicas):
            for function in self._watch:
                function(self.loop.state, arrival)
            return
        self.loop.drop_diverged()
        for k in sorted(self.loop.going):
            seen = self.loop.seen_of(k, arrival)
            for function in self._watch:
                try:
                    function(*seen)
                except Exception as error:  # the runs are not to be taken for such as cannot be computed together
                    raise WatchFailed from error

    def save(self) -> None:
        """Write a checkpoint of every run that is going, if something has happened since the last one."""
        loop = self.loop
        if self.members[0].folder is None or loop.moment == self._saved[1]:
            return
        loop.drop_diverged()
        for k in sorted(loop.going):
            self._save(k)
        self._saved = len(loop.recorder), loop.moment

    def _save(self, k: int) -> None:
        folder, loop = self.members[k].folder, self.loop
        if folder is not None and loop.moment != self._saved[1]:
            folder.save(loop.save_of(k, folder.path), loop.rows_of(k, self._saved[0]), self._spec.saving.keep)

    def _stop_early(self) -> None:
        """Finish the runs that their early stopping ends."""
        for k in sorted(self.loop.going):
            member, evaluation = self.members[k], self.loop.evaluations[k]
            stop = member.spec.evaluation.early_stop
            if stop is not None and len(evaluation.rows) > member.judged:
                member.judged = len(evaluation.rows)
                if stop(evaluation.table):
                    self._finish(k, "stop")

    def _end(self, why: str) -> None:
        self.save()
        self.loop.drop_diverged()
        self.loop.assess_ahead()
        for k in sorted(self.loop.going):
            self._finish(k, why)

    def _finish(self, k: int, why: str) -> None:
        """A run is at its end: evaluate it once more, write down what is left to write, and look at it no more."""
        loop, member, limit = self.loop, self.members[k], self._spec.time
        if len(self.members) == 1:
            self.save()
        else:
            self._save(k)
        if k not in loop.going:  # it has to be done again by itself
            return
        rows = loop.evaluations[k].rows
        now = max([loop.now, *(row["time"] for row in rows[-1:])])
        if why == "time" and limit is not None:
            now = max(now, limit)  # a run that is to be shorter than it is stays as long as it is
        metrics = self._last_evaluation(k, now)
        self._ending = True
        member.run = result(loop, k, member.spec, metrics, now, why, self._all_notes(k), member.folder)
        if member.folder is not None:
            summary = {**plain(member.run.summary()), "notes": list(member.run.notes), "moment": loop.moment}
            member.folder.finish(member.run, {**summary, "config": member.folder.known.digest})
            member.folder.close()
        if self._monitor is not None:
            self._monitor.log_evaluations(metrics.rows())
            self._monitor.log_signs(loop)
        self._ending = False
        loop.going.discard(k)

    def _last_evaluation(self, k: int, now: float) -> Table:
        """The evaluations with one at the end, on all data; it is no part of a checkpoint, lest a longer run have it."""
        loop, evaluation = self.loop, self.loop.evaluations[k]
        if loop.fleet.evaluates:
            loop.fleet.evaluate_all(now, loop.state.version, loop.state.weights)
            while loop.fleet.wait_for_evaluations():
                while loop.fleet.has_evaluation:
                    loop.take_evaluation()
                if self._monitor is not None:
                    self._monitor(loop, None)
                if self._interrupted[0]:
                    raise self._interruption()
            return evaluation.table
        rows, last = evaluation.rows, evaluation.rows[-1] if evaluation.rows else None
        if last is not None and last["version"] == loop.state.version and last["share"] == 1.0:
            before = rows[:-1] if math.isclose(last["time"], now, rel_tol=1e-12) else rows
            rows = [*before, {**last, "time": now}]
        elif (row := loop.evaluation_of(k, now)) is not None:
            rows = [*rows, row]
        return Table.of(rows, rows[0] if rows else evaluation.names)

    def _all_notes(self, k: int) -> list[str]:
        loop = self.loop
        notes = [*self._notes, *(f"{what}: {how}" for what, how in loop.evaluations[k].failures.items())]
        best, rows = loop.evaluations[k].best, loop.evaluations[k].rows
        if best is not None and rows and math.isnan(rows[-1][best.metric]):
            notes.append(f"{best.metric} had no value at the end: no best model and no early stopping followed it there")
        if self._monitor is not None:
            notes += [f"logger {name}: {how}" for name, how in self._monitor.failures.items()]
        if loop.skipped_evaluations and not self._spec.scheduled_by_default:
            notes.append(
                f"{loop.skipped_evaluations} evaluations were left out, because a worker was still busy with the one "
                "before; evaluate less often, or on fewer samples (dd.Evaluation(samples=...))"
            )
        return notes

    def run(self, ended: str = "") -> Run:
        """Bring a single run to its end, through Ctrl-C and whatever fails; ``ended`` says why if it is there already."""
        member = self.members[0]
        with using_threads(self._spec.server_threads), interruptible(member.folder is not None) as self._interrupted:
            try:
                if ended:
                    self._end(ended)
                else:
                    self.loop.evaluate_overdue()
                    while self.ready():
                        self.advance()
                        if self._interrupted[0]:
                            raise self._interruption()
            except (Interrupted, ShardLost):
                raise
            except RunFailed as error:
                way_on = self._save_at_last(str(error), error)
                if not way_on:
                    raise
                if not self.loop.fleet.real:
                    error.add_note(way_on)
                    raise
                raise RunFailed(f"{error} {way_on}") from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                kind = "" if isinstance(error, DualDelayError) else f"{type(error).__name__}: "  # ours say it themselves
                why = "" if isinstance(error, KeyboardInterrupt) else f"{kind}{error}"
                way_on = self._save_at_last(why, error)
                if way_on and (self.loop.state.version or not isinstance(error, BadWork)):  # else nothing is worth going on
                    error.add_note(way_on)
                raise
            if self._interrupted[0]:
                raise Interrupted(f"finished and saved after {self.loop.state.version} updates")
        assert member.run is not None
        return member.run

    def _interruption(self) -> Interrupted:
        self._save_and_leave()
        folder = self.members[0].folder
        assert folder is not None
        return Interrupted(f"saved after {self.loop.state.version} updates in {folder.path}", "dd.resume goes on")

    def _save_and_leave(self, why: str = "") -> None:
        """Save a run that does not come to its end, with a model and metrics that can be used as they are."""
        self.save()
        folder, evaluation = self.members[0].folder, self.loop.evaluation
        if folder is not None:
            model = self.loop.problem.state_dict(self.loop.x)
            folder.leave(evaluation.table, evaluation.workers.table(), model, why)

    def _save_at_last(self, why: str, cause: BaseException) -> str:
        """Save a run that cannot go on, as far as that can be done, and say how to go on with it."""
        folder = self.members[0].folder
        if folder is None or self._ending:
            return ""
        way_on = _way_on(self._spec, folder)
        if not self.loop.consistent:
            with suppress(RunFailed):
                folder.fail(why)
            return f"The last checkpoint stands, for this happened in the middle of an update; go on with {way_on}."
        try:
            self._save_and_leave(why)
        except RunFailed as error:
            told = isinstance(cause, NotSaved) and isinstance(error, NotSaved)  # of this disk, whichever file was first
            return f"{'' if told else f'It could not be saved: {error} '}{_what_stands(folder)}; go on with {way_on}."
        return f"It is saved after {self.loop.state.version} updates; go on with {way_on}."


def run_together(
    runners: Sequence[Runner],
    begin: Callable[[Runner], None],
    batchers: Sequence[Batcher],
    report: Callable[[float], None],
    folder: Path | None,
) -> None:
    """Bring several groups of runs to their ends side by side, with the gradients that they wait for taken together.

    If ``folder`` is given, which has a folder of each run, an interruption saves them.
    """
    under_way = list[Runner]()
    acting: Runner | None = None  # in the middle of a step
    with interruptible(folder is not None) as interrupted:
        try:
            for runner in runners:
                begin(runner)
                under_way.append(runner)
            while under_way:
                for acting in list(under_way):
                    if not _until_gradients_lack(acting):
                        under_way.remove(acting)
                acting = None
                for batcher in batchers:
                    batcher.compute()
                report((len(runners) - len(under_way) + sum(runner.done for runner in under_way)) / len(runners))
                if interrupted[0]:
                    raise runs_saved(folder)
        except BaseException:
            for runner in under_way:
                if runner is not acting:
                    runner.save()
            raise
        finally:
            for member in (member for runner in runners for member in runner.members):
                if member.folder is not None:
                    member.folder.close()


def _until_gradients_lack(runner: Runner) -> bool:
    """Advance as far as gradients are known; False once all runs have ended."""
    fleet = runner.loop.fleet
    assert isinstance(fleet, LocalFleet)
    while runner.ready():
        if not fleet.ready:
            return True
        runner.advance()
    return False


def require_possible(loop: Loop, members: Sequence[Member]) -> None:
    """Say so at the start if there is nothing to stop early or to keep the best by, or if something cannot be saved."""
    for k, member in enumerate(members):
        if member.spec.evaluation.early_stop is not None:
            member.spec.evaluation.early_stop(loop.evaluations[k].table)
        best, rows = loop.evaluations[k].best, loop.evaluations[k].rows
        if best is not None and rows and math.isnan(rows[0][best.metric]):
            raise BadInput(
                f"{best.metric} is nan at the start, so there is no best model to keep by it; choose another metric (or "
                "give the network test= data)."
            )
    if members[0].spec.saving.path is not None:
        pack(loop.save_of(0), {})


def result(
    loop: Loop,
    k: int,
    spec: RunSpec,
    metrics: Table,
    now: float,
    ended: str,
    notes: Sequence[str],
    folder: Folder | None,
    *,
    returns_best: bool | None = None,
) -> Run:
    """What a run has come to, with the audit of its sum; if it stopped early it returns its best model."""
    (state, audit), evaluation, trace = loop.state_of(k), loop.evaluations[k], loop.trace_of(k)
    if audit is not None and loop.fleet.unheard:
        audit = None
        silent = f"there is no audit: workers {list(loop.fleet.unheard)} did not say at the end what they keep"
        notes = (*notes, silent)
    best = evaluation.best if evaluation.best is not None and evaluation.best.x is not None else None
    early = ended == "stop" if returns_best is None else returns_best
    weights = best.x if best is not None and early else None
    return Run(
        algorithm=spec.algorithm,
        problem=spec.problem,
        state=state,
        trace=trace,
        metrics=metrics,
        time=now,
        ended=ended,
        audit=audit,
        folder=None if folder is None else folder.path,
        notes=tuple(dict.fromkeys([*notes, *troubles(trace)])),
        workers=evaluation.workers.table(),
        best=best,
        weights=weights if weights is None else weights.to(state.weights.device),
    )


def _nothing_due(loop: Loop) -> RunFailed:
    """Why a run cannot go on in which there will never be another update."""
    gone = loop.fleet.never_ending
    if not gone and not loop.state.present:
        return RunFailed(
            f"all workers have left by time {loop.now:g}, after {loop.state.version} updates, and none joins again. Let "
            "one stay, or give the run less time or fewer updates."
        )
    if not gone and loop.fleet.in_flight:
        return RunFailed(
            f"workers {sorted({job.worker for job in loop.fleet.in_flight})} hold jobs until they are polled, and nothing "
            "is due that would poll them; order wake(time) and poll in on_wake."
        )
    if not gone:
        return RunFailed("nothing is in flight and nothing is due: the algorithm gave nobody anything to do.")
    who = f"worker {gone[0]}" if len(gone) == 1 else f"workers {', '.join(map(str, gone))}"
    return RunFailed(
        f"{type(loop.algorithm).__name__} waits for {who}, who will never come back: at time {loop.now:g}, after "
        f"{loop.state.version} updates, there can be no other. Tell the server who is away "
        "(dd.SimulatedFleet(speeds, changes=dd.speeds.announced(absences)), on the shell --absences), or use a method that "
        "waits for nobody (vanilla, or dude after its first update)."
    )


def _what_stands(folder: Folder) -> str:
    """From where a run goes on that could not be saved."""
    try:
        has_begun = bool(folder.checkpoints())
    except NotSaved:  # a disk that cannot even be read
        has_begun = True
    return "The last checkpoint stands" if has_begun else "No checkpoint had been written, so it will begin anew"


def _way_on(spec: RunSpec, folder: Folder) -> str:
    """How this run is resumed; what no text can hold has to be passed again, in Python."""
    parts: list[Any] = [spec.algorithm, spec.problem]
    if isinstance(spec.fleet, SimulatedFleet):
        parts += [spec.fleet.speeds, spec.fleet.link]
    if any("class" in describe(part) for part in parts) or (spec.optimizer is not None and spec.optimizer.own):
        return f"dd.resume({str(folder.path)!r}, ...), with what is your own"
    return f"dualdelay resume {folder.path}"


@contextmanager
def interruptible(active: bool) -> Iterator[list[bool]]:
    """While this lasts, Ctrl-C, SIGTERM and a lost terminal set the flag and break into no step; a second one does.

    Where a lost terminal was to be ignored (``nohup``) it still is.
    """
    asked = [False]
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, *_: object) -> None:
        asked[0] = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if number != signal.SIGINT:
            signal.signal(number, before[signal.Signals(number)])

    if not active or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number: signal.Signals | None = getattr(signal, name, None)  # Windows has no terminal to lose
        if number is not None and (name != "SIGHUP" or signal.getsignal(number) == signal.SIG_DFL):
            before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def starting_workers(meaning: str) -> Iterator[None]:
    """While real workers start, SIGTERM interrupts as Ctrl-C does, and either says what that means."""
    try:
        with interrupted_by_sigterm():
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"real workers were still starting; {meaning}") from None


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, also the first process of a container."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)

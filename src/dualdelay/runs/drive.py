"""Advance a loop to its end: stop where it should, save on the way, let Ctrl-C and SIGTERM in between two arrivals."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ..core import Arrival
from ..core.aggregate import AggregateState
from ..core.devices import use_threads, using_threads
from ..core.errors import BadInput, RunFailed, require_positive, require_whole, require_zero_or_more
from ..core.state import State
from ..engine.evaluation import Row
from ..engine.loop import Loop, passed
from ..engine.monitor import Logger, Monitor
from ..engine.result import EarlyStop, Run, plain, troubles
from ..engine.trace import Table
from ..storage.files import json_digest
from ..storage.folder import Folder

Watch = Callable[[State, Arrival], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the run was saved."""


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
def starting(says: str) -> Iterator[None]:
    """While real workers start, SIGTERM interrupts as Ctrl-C does, and either says what that means."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"real workers were still starting; {says}") from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def require_totals(
    updates: int | None, time: float | None, every: int | None, seconds: float | None, checkpoint: int | None
) -> None:
    """Refuse ends, evaluations and checkpoints that cannot be."""
    if updates is None and time is None:
        raise BadInput("neither updates nor time is given, so the run would never end; give at least one.")
    if updates is not None:
        require_whole("updates", updates, 0)
    if time is not None:
        require_zero_or_more("time", time, "finite seconds")
        if 0 < time < 1e-300:
            raise BadInput(f"time is {time}; expected finite seconds, zero or 1e-300 and more: no clock is that fine.")
    if every is not None:
        require_whole("evaluate_every", every, 1)
    if seconds is not None:
        require_positive("evaluate_seconds", seconds)
    if checkpoint is not None:
        require_whole("checkpoint_every", checkpoint, 1)


class Driver:
    """A run on its way to its end, with what it leaves behind."""

    def __init__(
        self,
        loop: Loop,
        config: Mapping[str, Any],
        folder: Folder | None,
        watch: Sequence[Watch],
        stop: EarlyStop | None,
        log: Sequence[Logger],
        notes: Sequence[str],
        *,
        resumed: bool,
    ) -> None:
        self._loop, self._config, self._folder, self._watch, self._stop = loop, config, folder, watch, stop
        self._monitor = Monitor(log, loop) if log else None
        self._notes = list(notes)
        self._saved = len(loop.recorder), loop.moment if resumed else -1  # arrivals and moment of the last checkpoint
        self._judged = 0  # evaluations that early stopping has seen
        self._share = int(20 * self._fraction())

    def _fraction(self) -> float:
        return fraction(self._loop, self._config["updates"], self._config["time"])

    def save(self) -> None:
        """Write a checkpoint, if something has happened since the last one."""
        loop = self._loop
        if self._folder is not None and loop.moment != self._saved[1]:
            self._folder.save(loop.save(), loop.recorder.rows(self._saved[0]), self._config["keep"])
            self._saved = len(loop.recorder), loop.moment

    def _save_and_leave(self, why: str = "") -> None:
        """Save a run that does not come to its end, with a model and metrics that can be used as they are."""
        self.save()
        if self._folder is not None:
            evaluation = self._loop.evaluation
            model = self._loop.problem.state_dict(self._loop.state.x)
            self._folder.leave(evaluation.table, evaluation.workers.table(), model, why)

    def _save_if_due(self, before: int) -> None:
        every, version = self._config["checkpoint_every"], self._loop.state.version
        if every is None and self._share != int(20 * self._fraction()):
            self._share = int(20 * self._fraction())
            self.save()
        elif passed(every, before, version):
            self.save()

    def _good_enough(self) -> bool:
        if self._stop is None or len(self._loop.rows) == self._judged:
            return False
        self._judged = len(self._loop.rows)
        return self._stop(self._loop.evaluation.table)

    def _advance(self) -> str:
        """Go to what happens next; returns why the run has ended, if it has."""
        loop, updates, limit = self._loop, self._config["updates"], self._config["time"]
        before = loop.state.version
        if self._good_enough():
            return "stop"
        if updates is not None and before >= updates:
            return "updates"
        due = loop.fleet.peek()
        if due is None or loop.stuck:
            raise nothing_due(loop)
        if limit is not None and due.time > limit:
            loop.evaluate_before(math.nextafter(limit, math.inf))
            return "stop" if self._good_enough() else "time"
        if loop.evaluate_before(due.time) and self._good_enough():
            return "stop"
        arrival = loop.advance()
        if arrival is not None:
            for function in self._watch:
                function(loop.state, arrival)
        if self._monitor is not None:
            self._monitor(loop, arrival)
        if torch.get_num_threads() != self._config["server_threads"]:  # a user's function has changed it
            use_threads(self._config["server_threads"])
        self._save_if_due(before)
        return ""

    def run(self, ended: str) -> Run:
        """Advance to the end; ``ended`` says why if the run is there already."""
        loop, folder = self._loop, self._folder
        with using_threads(self._config["server_threads"]), interruptible(folder is not None) as interrupted:
            try:
                if not ended:
                    loop.catch_up()
                while not ended:
                    ended = self._advance()
                    if interrupted[0] and not ended:
                        raise self._interrupted()
                self.save()
                limit = self._config["time"]
                now = limit if ended == "time" else max([loop.now, *(row["time"] for row in loop.rows[-1:])])
                metrics = self._last_evaluation(now, interrupted)
            except Interrupted:
                raise
            except RunFailed as error:
                said = self._saved_at_last(str(error))
                if not said:
                    raise
                if not loop.fleet.real:
                    error.add_note(said)
                    raise
                raise RunFailed(f"{error} {said}") from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                why = "" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
                if said := self._saved_at_last(why):
                    error.add_note(said)
                raise
            run = ended_run(loop, metrics, now, ended, None if folder is None else folder.path, self._all_notes())
            if folder is not None:
                finish(folder, run, loop.moment, self._config)
            if self._monitor is not None:
                self._monitor.tell_evaluations(metrics.rows())
                self._monitor.tell(loop)
            if interrupted[0]:
                raise Interrupted(f"finished and saved after {loop.state.version} updates")
        return run

    def _saved_at_last(self, why: str) -> str:
        """Save a run that cannot go on, as far as that can be done, and say how to go on with it."""
        if self._folder is None:
            return ""
        if not self._loop.whole:
            with suppress(RunFailed):
                self._folder.fail(why)
            return f"The last checkpoint stands, for this happened in the middle of an update; go on with {self._way_on()}."
        try:
            self._save_and_leave(why)
        except RunFailed as error:
            return f"The last checkpoint stands ({error}); go on with {self._way_on()}."
        return f"It is saved after {self._loop.state.version} updates; go on with {self._way_on()}."

    def _way_on(self) -> str:
        """How this run is resumed; what no text can hold has to be passed again, in Python."""
        assert self._folder is not None
        place = str(self._folder.path)
        described = [self._config.get(name) or {} for name in ("algorithm", "problem", "speeds", "link")]
        made = (self._config["optimizer"] or {}).values()
        if any("class" in one for one in described) or any(isinstance(one, dict) for one in made):
            return f"dd.resume({place!r}, ...), with what is your own"
        return f"dualdelay resume {place}"

    def _interrupted(self) -> Interrupted:
        self._save_and_leave()
        assert self._folder is not None
        return Interrupted(f"saved after {self._loop.state.version} updates in {self._folder.path}; dd.resume goes on")

    def _last_evaluation(self, now: float, interrupted: Sequence[bool]) -> Table:
        """The evaluations with one at the end, on all data; it is no part of a checkpoint, lest a longer run have it."""
        loop = self._loop
        if not loop.fleet.measures:
            rows = ending(
                loop.rows, loop.state.version, now, lambda: loop.evaluation.of(now, loop.state.version, loop.state.x)
            )
            return Table.of(rows, rows[0] if rows else loop.evaluation.names)
        loop.fleet.measure_whole(now, loop.state.version, loop.state.weights)
        while loop.fleet.settle():
            while loop.fleet.has_measured:
                loop.measured()
            if self._monitor is not None:
                self._monitor(loop, None)
            if interrupted[0]:
                raise self._interrupted()
        return loop.evaluation.table

    def _all_notes(self) -> tuple[str, ...]:
        loop = self._loop
        notes = [*self._notes, *(f"{what}: {how}" for what, how in loop.evaluation.failures.items())]
        if self._monitor is not None:
            notes += [f"logger {name}: {how}" for name, how in self._monitor.failures.items()]
        if loop.left_out and not self._config.get("evaluates_by_default"):
            notes.append(
                f"{loop.left_out} evaluations were left out, because a worker was still busy with the one before; evaluate "
                "less often, or on fewer samples (evaluate_samples)"
            )
        return tuple(dict.fromkeys(notes))


def drive(
    loop: Loop,
    config: Mapping[str, Any],
    folder: Folder | None,
    watch: Sequence[Watch],
    stop: EarlyStop | None,
    *,
    resumed: bool = False,
    notes: Sequence[str] = (),
    ended: str = "",
    log: Sequence[Logger] = (),
) -> Run:
    """Advance a loop to its end, saving on the way; ``ended`` says why if it is there already."""
    return Driver(loop, config, folder, watch, stop, log, notes, resumed=resumed).run(ended)


def nothing_due(loop: Loop) -> RunFailed:
    """Why a run cannot go on in which there will never be another update."""
    gone = loop.fleet.never
    if not gone and not loop.state.present:
        return RunFailed(
            f"all workers have left by time {loop.now:g}, after {loop.state.version} updates, and none joins again. Let "
            "one stay, or give the run less time or fewer updates."
        )
    if not gone:
        return RunFailed("nothing is in flight and nothing is due: the algorithm gave nobody anything to do.")
    who = f"worker {gone[0]}" if len(gone) == 1 else f"workers {', '.join(map(str, gone))}"
    return RunFailed(
        f"{type(loop.algorithm).__name__} waits for {who}, who will never come back: at time {loop.now:g}, after "
        f"{loop.state.version} updates, there can be no other. Tell the server who is away (changes=dd.told(absences), on "
        "the shell --absences), or use a method that waits for nobody (vanilla, or dude after its first update)."
    )


def fraction(loop: Loop, updates: int | None, limit: float | None) -> float:
    """How much of the run is done."""
    return max(loop.state.version / updates if updates else 0.0, loop.now / limit if limit else 0.0)


def ending(rows: list[Row], version: int, now: float, evaluate: Callable[[], Row | None]) -> list[Row]:
    """The rows of a run that has ended now: the last one is about its end and all data, evaluated if it was not."""
    last = rows[-1] if rows else None
    if last is not None and last["version"] == version and last["share"] == 1.0:
        if math.isclose(last["time"], now, rel_tol=1e-12):
            return [*rows[:-1], {**last, "time": now}]
        return [*rows, {**last, "time": now}]
    row = evaluate()
    return rows if row is None else [*rows, row]


def finish(folder: Folder, run: Run, moment: int, config: Mapping[str, Any]) -> None:
    """Write what a finished run leaves behind."""
    result = {**plain(run.summary()), "notes": list(run.notes), "moment": moment, "config": json_digest(config)}
    folder.finish(run, result)


def ended_run(
    loop: Loop,
    metrics: Table,
    now: float,
    ended: str,
    path: Path | None,
    notes: Sequence[str] = (),
    *,
    returns: bool | None = None,
) -> Run:
    """What a loop has come to, with the audit of its sum; if it stopped early it returns its best model."""
    state, error, evaluation = loop.state, None, loop.evaluation
    if isinstance(state, AggregateState):
        error = state.error(loop.fleet.held())
        if loop.fleet.silent:
            error = None
            silent = f"there is no audit: workers {list(loop.fleet.silent)} did not say at the end what they keep"
            notes = (*notes, silent)
    best = evaluation.best if evaluation.best is not None and evaluation.best.x is not None else None
    early = best is not None and (ended == "stop" if returns is None else returns)
    weights = best.x if early and best is not None else None
    trace, workers = loop.recorder.trace(), evaluation.workers.table()
    notes = tuple(dict.fromkeys([*notes, *troubles(trace.events)]))
    return Run(loop.algorithm, loop.problem, state, trace, metrics, now, ended, error, path, notes, workers, best, weights)

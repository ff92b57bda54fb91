"""Advance a loop to its end: stop where it should, save on the way, let Ctrl-C in between two arrivals."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .core import Arrival
from .errors import BadInput, RunFailed, require_positive, require_whole
from .fleet import using_threads
from .folder import Folder, config_digest
from .loop import Loop
from .memory import AggregateState
from .monitor import Logger, Monitor
from .result import EarlyStop, Run, plain
from .state import State
from .trace import Table

Watch = Callable[[State, Arrival], None]
Rows = list[dict[str, float]]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was saved."""


@contextmanager
def ctrl_c(active: bool) -> Iterator[list[bool]]:
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


def totals(
    updates: int | None, time: float | None, every: int | None, seconds: float | None, checkpoint: int | None
) -> dict[str, Any]:
    """When to stop, evaluate and save, with the defaults filled in."""
    if updates is None and time is None:
        raise BadInput("neither updates nor time is given, so the run would never end; give at least one.")
    if updates is not None:
        require_whole("updates", updates, 0)
    if time is not None and not (math.isfinite(time) and time >= 0):
        raise BadInput(f"time is {time}; expected finite seconds, zero or more.")
    if every is not None:
        require_whole("evaluate_every", every, 1)
    if seconds is not None:
        require_positive("evaluate_seconds", seconds)
    if every is None and seconds is None:
        seconds = time / 50 if time else None
        every = None if seconds else max(1, (updates or 0) // 50)
    if checkpoint is not None:
        require_whole("checkpoint_every", checkpoint, 1)
    totals = {"updates": updates, "time": time, "evaluate_every": every, "evaluate_seconds": seconds}
    return {**totals, "checkpoint_every": checkpoint}


def drive(
    loop: Loop,
    config: Mapping[str, Any],
    folder: Folder | None,
    watch: Sequence[Watch],
    stop: EarlyStop | None,
    *,
    resumed: bool = False,
    notes: tuple[str, ...] = (),
    ended: str = "",
    log: Sequence[Logger] = (),
) -> Run:
    """Advance a loop to its end, saving on the way; ``ended`` says why if it is there already."""
    monitor = Monitor(log, loop.state.version) if log else None
    updates, limit, every = config["updates"], config["time"], config["checkpoint_every"]
    share = int(20 * fraction(loop, updates, limit))
    rows_saved, moment_saved, judged = len(loop.recorder), loop.moment if resumed else -1, 0

    def save() -> None:
        nonlocal rows_saved, moment_saved
        if folder is not None and loop.moment != moment_saved:
            folder.save(loop.save(), loop.recorder.rows(rows_saved), config["keep"])
            rows_saved, moment_saved = len(loop.recorder), loop.moment

    def good_enough() -> bool:
        nonlocal judged
        if stop is None or len(loop.rows) == judged:
            return False
        judged = len(loop.rows)
        return stop(loop.table)

    with using_threads(config["server_threads"]), ctrl_c(folder is not None) as interrupted:
        while not ended:
            before = loop.state.version
            try:
                if good_enough():
                    ended = "stop"
                elif updates is not None and loop.state.version >= updates:
                    ended = "updates"
                elif (due := loop.fleet.peek()) is None or loop.stuck:
                    raise nothing_due(loop)
                elif limit is not None and due.time > limit:
                    loop.evaluate_before(math.nextafter(limit, math.inf))
                    ended = "stop" if good_enough() else "time"
                elif loop.evaluate_before(due.time) and good_enough():
                    ended = "stop"
                else:
                    arrival = loop.advance()
            except RunFailed:
                save()
                raise
            if not ended:
                if arrival is not None:
                    for function in watch:
                        function(loop.state, arrival)
                if monitor is not None:
                    monitor(loop, arrival)
                if every is None and share != int(20 * fraction(loop, updates, limit)):
                    share = int(20 * fraction(loop, updates, limit))
                    save()
                elif every is not None and loop.state.version != before and loop.state.version % every == 0:
                    save()
                if interrupted[0]:
                    save()
                    assert folder is not None
                    raise Interrupted(f"saved after {loop.state.version} updates in {folder.path}; dd.resume goes on")
        save()
        now = limit if ended == "time" else max([loop.now, *(row["time"] for row in loop.rows[-1:])])
        run = ended_run(loop, _with_end(loop, now), now, ended, None if folder is None else folder.path, notes)
        if folder is not None:
            finish(folder, run, loop.moment, config)
        if monitor is not None:
            monitor.tell(loop)
        if interrupted[0]:
            raise Interrupted(f"finished and saved after {loop.state.version} updates")
    return run


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


def _with_end(loop: Loop, now: float) -> Table:
    """The evaluations with one at the end, on schedule or not; it is no part of a checkpoint, lest a longer run have it."""
    if loop.fleet.measures:
        loop.look(now)
        while loop.fleet.settle():
            loop.measured()
        return loop.table
    rows = ending(loop.rows, loop.state.version, now, loop.evaluate)
    return Table.of(rows, rows[0])


def ending(rows: Rows, version: int, now: float, evaluate: Callable[[float], dict[str, float]]) -> Rows:
    """The rows of a run that has ended now: the last one is about its end, evaluated if it was not."""
    if rows and rows[-1]["version"] == version and math.isclose(rows[-1]["time"], now, rel_tol=1e-12):
        return [*rows[:-1], {**rows[-1], "time": now}]
    return [*rows, evaluate(now)]


def finish(folder: Folder, run: Run, moment: int, config: Mapping[str, Any]) -> None:
    """Write what a finished run leaves behind."""
    result = {**plain(run.summary()), "moment": moment, "config": config_digest(config)}
    folder.finish(run.trace, run.metrics, run.state_dict(), result)


def ended_run(loop: Loop, table: Table, now: float, ended: str, path: Path | None, notes: tuple[str, ...] = ()) -> Run:
    """What a loop has come to, with the audit of its sum."""
    state, error = loop.state, None
    if isinstance(state, AggregateState):
        error = state.error(loop.fleet.held())
        if loop.fleet.silent:
            error = None
            notes = (*notes, f"there is no audit: workers {list(loop.fleet.silent)} did not say at the end what they keep")
    return Run(loop.algorithm, loop.problem, state, loop.recorder.trace(), table, now, ended, error, path, notes)

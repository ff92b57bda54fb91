"""Advance a loop to its end: stop where it should, save on the way, let Ctrl-C in between two arrivals."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .core import Arrival
from .errors import RunFailed
from .folder import Folder
from .loop import Loop
from .result import EarlyStop, Run, plain
from .state import AggregateState, State
from .trace import Table

Watch = Callable[[State, Arrival], None]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run was saved."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch uses so many threads: another number gives other bits."""
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


def drive(
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
    with threads(config["threads"]), _ctrl_c(folder is not None) as interrupted:
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
    run = ended_run(loop, table, now, ended, None if folder is None else folder.path, notes)
    if folder is not None:
        folder.finish(run.trace, run.metrics, run.state_dict(), plain(run.summary()))
    return run


def ended_run(loop: Loop, table: Table, now: float, ended: str, path: Path | None, notes: tuple[str, ...] = ()) -> Run:
    """What a loop has come to, with the audit of its sum."""
    state = loop.state
    error = state.error(loop.fleet.held) if isinstance(state, AggregateState) else None
    return Run(loop.algorithm, loop.problem, state, loop.recorder.trace(), table, now, ended, error, path, notes)

"""How far a run has come, with its rate and the time that remains; shown once it takes more than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .core import Arrival
from .state import State


class Watcher:
    """A ``watch`` function that shows progress on standard error; use it as a context around the run."""

    def __init__(
        self, label: str, updates: int | None = None, until: float | None = None, after: float = 2.0, lines: float = 10.0
    ) -> None:
        """Show the share of ``updates`` or of the time ``until``, whichever is larger, ``after`` so many seconds.

        Where there is no terminal to draw on, a line is printed every ``lines`` seconds instead.
        """
        self._label, self._updates, self._until, self._after, self._lines = label, updates, until, after, lines
        self._console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(label, total=1.0, text="")
        self._began = self._shown = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self._started = False

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._started and self._console.is_terminal:
            self._bar.stop()

    def __call__(self, state: State, a: Arrival) -> None:
        """Show where the run stands, a few times a second at most."""
        now = time.perf_counter()
        pause = 0.2 if self._console.is_terminal else self._lines
        share = max(
            state.version / self._updates if self._updates else 0.0,
            a.time / self._until if self._until else 0.0,
        )
        if self._first is None:
            self._first = (share, state.version)  # a resumed run does not begin at nothing
        if now - self._began < self._after or now - self._shown < pause:
            return
        self._shown = now
        seconds = now - self._began
        done = share - self._first[0]
        left = f"{seconds * (1 - share) / done:.0f} s left" if done > 0 else ""
        rate = (state.version - self._first[1]) / seconds
        text = f"{100 * share:3.0f}%  {state.version:,} updates  {rate:,.0f} updates/s  {left}"
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: {text}", highlight=False, markup=False)
            return
        if not self._started:
            self._bar.start()
            self._started = True
        self._bar.update(self._task, completed=share, text=text)

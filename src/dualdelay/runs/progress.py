"""How far a run has come, with its rate and the time that remains; shown once it takes more than two seconds."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from ..core import Arrival
from ..core.state import State

_HIDDEN = (
    "time",
    "updates_per_second",
    "tau_max",
    "pooled_loss",
    "gradient_norm",
    "answered",
    "share",
    "last_evaluation",
)  # elsewhere in the view, or too much
_MOST_WORKERS = 20  # lines of the view
_RECENT = 10  # seconds over which rates are averaged, for a slow worker reports less than once in one


class _Course:
    """How much of a run is done, and how long the rest takes at this pace."""

    def __init__(self, updates: int | None, until: float | None) -> None:
        self.updates, self.until = updates, until
        self._first: tuple[float, float] | None = None  # a resumed run does not begin at nothing

    def at(self, version: int, now: float) -> tuple[float, str]:
        """The share that is done, and a text about the time that is left."""
        shares = (version / self.updates if self.updates else 0.0, now / self.until if self.until else 0.0)
        share, seconds = min(max(shares), 1.0), time.perf_counter()
        if self._first is None:
            self._first = (share, seconds)
        done = share - self._first[0]
        return share, f"{duration((seconds - self._first[1]) * (1 - share) / done)} left" if done > 0 else ""


def duration(seconds: float) -> str:
    """A time that a person can read."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class Watcher:
    """A ``watch`` function that shows progress on standard error; use it as a context around the run."""

    def __init__(
        self,
        label: str,
        updates: int | None = None,
        until: float | None = None,
        after: float = 2.0,
        lines: float = 10.0,
        console: Console | None = None,
    ) -> None:
        """Show the share of ``updates`` or of the time ``until``, whichever is larger, ``after`` so many seconds.

        Where there is no terminal to draw on, a line is printed every ``lines`` seconds instead.
        """
        self._label, self._course, self._after, self._lines = label, _Course(updates, until), after, lines
        self._console = Console(file=sys.stderr) if console is None else console
        self._drawing = self._console.is_terminal  # which rich finds out anew, at length, whenever it is asked
        # labels have brackets, which are no markup
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(label, total=1.0, text="")
        self._began = self._shown = time.perf_counter()
        self._first: int | None = None
        self._started = False

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._started and self._drawing:
            self._bar.stop()
        self._started = False

    def __call__(self, state: State, a: Arrival) -> None:
        """Show where the run stands, a few times a second at most."""
        if self._first is None:
            self._first = state.version
            self._course.at(state.version, a.time)
        if self.due():
            share, left = self._course.at(state.version, a.time)
            rate = (state.version - self._first) / (self._shown - self._began)
            self.show(f"{state.version:,} updates  {rate:,.0f} updates/s  {left}", share)

    def due(self) -> bool:
        """Whether it is time to show something again."""
        now, pause = time.perf_counter(), 0.2 if self._drawing else self._lines
        if now - self._began < self._after or now - self._shown < pause:
            return False
        self._shown = now
        return True

    def show(self, text: str, share: float) -> None:
        """Show that so much is done."""
        text = f"{100 * share:3.0f}%  {text}"
        if not self._drawing:
            self._console.print(f"{self._label}: {text}".rstrip(), highlight=False, markup=False, soft_wrap=True)
            return
        if not self._started:
            self._bar.start()
            self._started = True
        self._bar.update(self._task, completed=share, text=text)


class Sharing:
    """A ``report`` function that shows how much of a sweep is done; use it as a context around it."""

    def __init__(self, label: str = "sweep", after: float = 2.0, lines: float = 10.0) -> None:
        self._watcher, self._course = Watcher(label, after=after, lines=lines), _Course(None, 1.0)

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, *error: object) -> None:
        self._watcher.close()

    def __call__(self, share: float, text: str) -> None:
        """Show where the sweep stands; a run by itself, which has no text, shows itself."""
        if not text:
            self._watcher.close()
        elif self._watcher.due():
            _, left = self._course.at(0, share)
            self._watcher.show(f"{text}  {left}", share)


class _Said(logging.Handler):
    """Prints what a logger says on a console, which knows where there is room beside a view."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class View:
    """A ``log`` function that shows real workers at work, on standard error; use it as a context around the run.

    While it lasts, what the package has to say (a worker crashed, left, came back) is printed above it.
    """

    def __init__(
        self,
        label: str,
        updates: int | None = None,
        until: float | None = None,
        after: float = 2.0,
        lines: float = 10.0,
        console: Console | None = None,
    ) -> None:
        """Show the share of ``updates`` or of the seconds ``until``, whichever is larger, ``after`` so many seconds.

        Where there is no terminal to draw on, a line is printed every ``lines`` seconds instead.
        """
        self._label, self._course, self._after, self._lines = label, _Course(updates, until), after, lines
        self._console = Console(file=sys.stderr) if console is None else console
        self._said = _Said(self._console)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began = self._shown = time.perf_counter()
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._evaluation: dict[str, float] = {}

    def __enter__(self) -> View:
        logging.getLogger("dualdelay").addHandler(self._said)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        logging.getLogger("dualdelay").removeHandler(self._said)
        if self._live.is_started:
            self._live.stop()

    def __call__(self, version: int, values: Mapping[str, float]) -> None:
        """Show where the run stands; what an evaluation has found is shown until the next."""
        if "updates_per_second" not in values:
            self._evaluation = dict(values)
            return
        self._recent.append(values)
        values = {**self._evaluation, **values}
        share, left = self._course.at(version, values["time"])
        now = time.perf_counter()
        if now - self._began < self._after:
            return
        if self._console.is_terminal:
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._panel(version, values, share, left), refresh=True)
        elif now - self._shown >= self._lines:
            self._shown = now
            signs = {**self._signs(values), "faults": _faults(values) or "none"}
            said = "  ".join(f"{name} {text}" for name, text in signs.items())
            left = _last_evaluation(values) or left
            text = f"{self._label}: {100 * share:3.0f}%  {version:,} updates  {said}  {left}"
            self._console.print(text.rstrip(), highlight=False, markup=False, soft_wrap=True)

    def _signs(self, values: Mapping[str, float]) -> dict[str, str]:
        """What to show of the run as a whole, the user's own metrics too."""
        named = {name: value for name, value in values.items() if "/" not in name and name not in _HIDDEN}
        rate = f"{self._rate('updates_per_second'):,.1f}"
        return {"updates/s": rate, **{k: _number(v) for k, v in named.items()}, "tau_max": _number(values["tau_max"])}

    def _rate(self, name: str) -> float:
        return sum(values[name] for values in self._recent) / len(self._recent)

    def _panel(self, version: int, values: Mapping[str, float], share: float, left: str) -> RenderableType:
        course = self._course
        said = [f"{100 * share:.0f}%", f"{version:,}{f' of {course.updates:,}' if course.updates else ''} updates"]
        said += [f"{values['time']:,.0f} of {course.until:,g} s"] if course.until else []
        left = _last_evaluation(values) or left
        bar = Grid.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        about = Text("  ".join([*said, left]).rstrip())
        bar.add_row(ProgressBar(total=1.0, completed=share, complete_style="green"), about)
        signs = Grid.grid(padding=(0, 4, 0, 0))
        shown = self._signs(values)
        faults = Text(_faults(values), style="yellow")
        signs.add_row(*(Text(name, style="dim") for name in (*shown, "faults")))
        signs.add_row(*(Text(text, style="bold") for text in shown.values()), faults if faults else "none")
        return Panel(Group(bar, "", signs, "", self._workers(values)), title=Text(self._label))

    def _workers(self, values: Mapping[str, float]) -> RenderableType:
        count = sum(name.startswith("worker/") and name.endswith("/rate") for name in values)
        shown = max(1, min(count, _MOST_WORKERS, self._console.height - 9))  # the rest of the view needs nine lines
        rates = [self._rate(f"worker/{worker}/rate") for worker in range(count)]
        grid = Grid.grid(padding=(0, 3, 0, 0))
        for column in ("worker", "jobs/s", "", "delay", "crashes"):
            grid.add_column(justify="right" if column else "left", min_width=len(column) if column else 24)
        grid.add_row(*(Text(name, style="dim") for name in ("worker", "jobs/s", "", "delay", "crashes")))
        for worker in range(shown):
            bar = "━" * round(24 * rates[worker] / max([*rates, 1e-9]))
            crashes = values[f"worker/{worker}/crashes"]
            trouble = Text(f"{crashes:.0f}", style="yellow") if crashes else Text("0", style="dim")
            cells = (f"{rates[worker]:,.1f}", Text(bar, style="green"), _number(values[f"worker/{worker}/delay"]))
            grid.add_row(str(worker), *cells, trouble)
        return Group(grid, Text(f"and {count - shown:,} more", style="dim")) if count > shown else grid


def _last_evaluation(values: Mapping[str, float]) -> str:
    """How far the last evaluation has come, once it is under way."""
    return f"last evaluation, on all data: {values['last_evaluation']:.0%}" if "last_evaluation" in values else ""


def _number(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else "-"


def _faults(values: Mapping[str, float]) -> str:
    """What has gone wrong so far, and what has come back."""
    counts = {name.removeprefix("faults/"): int(v) for name, v in values.items() if name.startswith("faults/") and v}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())

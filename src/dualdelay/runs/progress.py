"""How far a run has come, with its rate and the time that remains; shown once it takes more than two seconds."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from html import escape
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from ..core import Algorithm, Arrival
from ..core.state import State
from .names import label

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


def duration(seconds: float) -> str:
    """A time that a person can read."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class _Place:
    """A place in a notebook's cell whose text is replaced, and taken away in the end: nothing of it is stored."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, share: float | None = None) -> None:
        """Put this text there instead of what was there, beside a bar."""
        import IPython.display

        bar = "" if share is None else f"<progress value='{share:.3f}' style='vertical-align:middle'></progress> "
        data = {"text/plain": text, "text/html": f"<pre style='margin:0'>{bar}{escape(text)}</pre>"}
        if self._handle is None:
            display: Any = IPython.display.display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def clear(self) -> None:
        """Leave nothing there."""
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None


def _notebook() -> _Place | None:
    """A place in the cell that is being run, if this is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if getattr(shell, "kernel", None) is None else _Place()


class _Progress:
    """How much of something is done, on standard error, once it has taken more than ``after`` seconds.

    Done is the share of ``updates`` or of the time ``until``, whichever is larger. Where there is no terminal to draw on, a
    line is printed every ``lines`` seconds instead; in a notebook it is replaced by the next, and taken away in the end.
    """

    _pause = 0.0  # seconds between two pictures

    def __init__(
        self,
        subject: str | Algorithm[Any],
        updates: int | None = None,
        until: float | None = None,
        after: float = 2.0,
        lines: float = 10.0,
        console: Console | None = None,
    ) -> None:
        self._subject, self._updates, self._until, self._after, self._lines = subject, updates, until, after, lines
        self._place = _notebook() if console is None else None
        if (
            console is None
        ):  # a notebook's standard error says that it is a terminal, and rich's own views there leave traces
            plain = None if self._place is None else False
            console = Console(file=sys.stderr, force_jupyter=plain, force_terminal=plain)
        self._console = console
        self._drawing = self._console.is_terminal  # which rich finds out anew, at length, whenever it is asked
        self._began = self._shown = time.perf_counter()
        self._first: tuple[float, float] | None = None  # share and moment: a resumed run does not begin at nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it away."""
        if self._place is not None:
            self._place.clear()

    @cached_property
    def _label(self) -> str:
        return self._subject if isinstance(self._subject, str) else label(self._subject)

    def _is_due(self) -> bool:
        """Whether it is time to show something again."""
        now = time.perf_counter()
        pause = self._pause if self._drawing else self._lines if self._place is None else min(1.0, self._lines)
        if now - self._began < self._after or now - self._shown < pause:
            return False
        self._shown = now
        return True

    def _done(self, version: int, now: float) -> tuple[float, str]:
        """The share that is done, and a text about the time that is left at this pace."""
        shares = (version / self._updates if self._updates else 0.0, now / self._until if self._until else 0.0)
        share, seconds = min(max(shares), 1.0), time.perf_counter()
        if self._first is None:
            self._first = (share, seconds)
        done = share - self._first[0]
        return share, f"{duration((seconds - self._first[1]) * (1 - share) / done)} left" if done > 0 else ""

    def _print(self, share: float, text: str) -> None:
        line = f"{self._label}: {100 * share:3.0f}%  {text}".rstrip()
        if self._place is not None:
            self._place.show(line, share)
            return
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Bar(_Progress):
    """A bar with a text."""

    _pause = 0.2

    _bar: Bar | None = None

    def close(self) -> None:
        """Take the bar away."""
        super().close()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, text: str, share: float) -> None:
        """Show that so much is done."""
        if not self._drawing:
            self._print(share, text)
            return
        if self._bar is None:
            texts = [TextColumn(part, markup=False) for part in ("{task.description}", "{task.fields[text]}")]
            self._bar = Bar(texts[0], BarColumn(), texts[1], console=self._console, transient=True)  # labels have brackets
            self._bar.add_task(self._label, total=1.0, text="")
            self._bar.start()
        self._bar.update(TaskID(0), completed=share, text=f"{100 * share:3.0f}%  {text}")


class RunProgress(_Bar):
    """A ``watch`` function that shows the progress of a simulation; use it as a context around the run."""

    _first_version: int | None = None

    def __call__(self, state: State, a: Arrival) -> None:
        """Show where the run stands, a few times a second at most."""
        if self._first_version is None:
            self._first_version = state.version
            self._done(state.version, a.time)
        if self._is_due():
            share, left = self._done(state.version, a.time)
            rate = (state.version - self._first_version) / (self._shown - self._began)
            self.show(f"{state.version:,} updates  {rate:,.0f} updates/s  {left}", share)


class SweepProgress(_Bar):
    """A ``report`` function that shows how much of a sweep is done; use it as a context around it."""

    def __init__(self, label: str = "sweep", after: float = 2.0, lines: float = 10.0) -> None:
        super().__init__(label, until=1.0, after=after, lines=lines)

    def __call__(self, share: float, text: str) -> None:
        """Show where the sweep stands; a run by itself, which has no text, shows itself."""
        if not text:
            self.close()
        elif self._is_due():
            self.show(f"{text}  {self._done(0, share)[1]}", share)


class _ConsoleHandler(logging.Handler):
    """Prints a logger's messages on a console, which knows where there is room beside a view."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class WorkersView(_Progress):
    """A ``log`` function that shows real workers at work; use it as a context around the run.

    While it lasts, the package's messages (a worker crashed, left, came back) are printed above it.
    """

    def __enter__(self) -> Self:
        self._messages = _ConsoleHandler(self._console)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._recent: deque[Mapping[str, float]] = deque(maxlen=_RECENT)
        self._evaluation: dict[str, float] = {}
        logging.getLogger("dualdelay").addHandler(self._messages)
        return self

    def say(self, text: str) -> None:
        """Say something before the first picture."""
        if self._place is not None:
            self._place.show(text)
        else:
            print(text, file=sys.stderr)

    def close(self) -> None:
        """Take the view away."""
        super().close()
        logging.getLogger("dualdelay").removeHandler(self._messages)
        if self._live.is_started:
            self._live.stop()

    def __call__(self, version: int, values: Mapping[str, float]) -> None:
        """Show where the run stands; the values of an evaluation are shown until the next."""
        if "updates_per_second" not in values:
            self._evaluation = dict(values)
            return
        self._recent.append(values)
        values = {**self._evaluation, **values}
        share, left = self._done(version, values["time"])
        if not self._is_due():
            return
        left = _last_evaluation(values) or left
        if self._drawing:
            self._live.start()
            self._live.update(self._panel(version, values, share, left), refresh=True)
        else:
            signs = {**self._signs(values), "faults": _faults(values) or "none"}
            texts = "  ".join(f"{name} {text}" for name, text in signs.items())
            self._print(share, f"{version:,} updates  {texts}  {left}")

    def _signs(self, values: Mapping[str, float]) -> dict[str, str]:
        """What to show of the run as a whole, the user's own metrics too."""
        named = {name: value for name, value in values.items() if "/" not in name and name not in _HIDDEN}
        rate = f"{self._rate('updates_per_second'):,.1f}"
        return {"updates/s": rate, **{k: _number(v) for k, v in named.items()}, "tau_max": _number(values["tau_max"])}

    def _rate(self, name: str) -> float:
        return sum(values[name] for values in self._recent) / len(self._recent)

    def _panel(self, version: int, values: Mapping[str, float], share: float, left: str) -> RenderableType:
        of_updates = f" of {self._updates:,}" if self._updates else ""
        texts = [f"{100 * share:.0f}%", f"{version:,}{of_updates} updates"]
        texts += [f"{values['time']:,.0f} of {self._until:,g} s"] if self._until else []
        bar = Grid.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        about = Text("  ".join([*texts, left]).rstrip())
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

"""What the commands have in common: folders, progress, tables and the last line."""

from __future__ import annotations

import io
import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..analysis.figures import draw
from ..analysis.loggers import TensorBoard
from ..core.errors import BadInput
from ..engine.monitor import Logger
from ..engine.trace import Table
from ..runs.runner import Interrupted


def free_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 10_000))) if not p.exists())


@contextmanager
def going_on_with(command: str) -> Iterator[None]:
    """If the run is interrupted, say how to go on."""
    try:
        yield
    except Interrupted as interrupt:
        raise Interrupted(f"{interrupt}. Go on with: {command}") from None


@contextmanager
def boards(folder: Path | None) -> Iterator[list[Logger]]:
    """What writes a run's vital signs for TensorBoard, as ``log`` functions."""
    if folder is None:
        yield []
    else:
        with TensorBoard(folder) as board:
            yield [board]


def make_console(json: bool) -> Console:
    """Where tables and sentences go: standard output, or standard error beside a line of JSON."""
    stream = sys.stderr if json else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # a folder's name may hold what no terminal can show
        stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=json, highlight=False, markup=False, soft_wrap=True)
    return (
        console if console.is_terminal else Console(stderr=json, highlight=False, markup=False, soft_wrap=True, width=120)
    )


class Partly(BadInput):
    """What could not be told, after all that could be, the last line included."""


def finish(json: bool, command: str, **values: Any) -> None:
    """The last line of a command, if one was asked for."""
    if json:
        print(jsonlib.dumps({"command": command, **values}))


def draw_figure(table: Table, path: Path, console: Console, clock: str = "simulated time") -> str | None:
    """Draw a figure and say where it is; without matplotlib say that there is none."""
    try:
        draw(table, path, clock)
    except BadInput as error:  # no matplotlib: the numbers are there all the same
        console.print(f"no figure: {error}")
        return None
    console.print(f"figure: {path}")
    return str(path)

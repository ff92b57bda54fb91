"""What all commands share: kinds of flags, the problem and the speeds that a text names, and how a command ends."""

from __future__ import annotations

import io
import itertools
import json as jsonlib
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ..core import Problem
from ..core.errors import BadInput
from ..runs.names import parse
from ..runs.seeds import seeded_problem, seeded_speeds
from ..simulation.speeds import SpeedModel

# optional flags: their helps say what happens without them, so none of them says "(default: None)"
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
Seed = Annotated[int, tyro.conf.arg(help="Determines split, minibatches, speeds and initial weights.")]
Json = Annotated[bool, tyro.conf.arg(help="Print one line of JSON at the end, and the rest to standard error.")]

DEFAULT_PROBLEM = "digits"
DEFAULT_SPEEDS = "truncated_normal[std=1]"


class Incomplete(BadInput):
    """Part of the input was bad; the command has printed what it could do without it, its line of JSON included."""


def make_problem(text: str, seed: int) -> Problem:
    """The problem that a text names, in a run with this seed."""
    return seeded_problem(parse("problem", text), seed)


def make_speeds(text: str, workers: int, seed: int) -> SpeedModel:
    """The speed model that a text names in a run with this seed; it may leave out the number of workers, also inside."""
    return seeded_speeds(parse("speeds", text, n=workers), seed)


def free_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    paths = (Path("runs") / f"{name}{end}" for end in itertools.chain([""], (f"-{k}" for k in itertools.count(2))))
    return next(path for path in paths if not path.exists())


def make_console(json: bool) -> Console:
    """Where tables and sentences go: standard output, or standard error beside a line of JSON."""
    stream = sys.stderr if json else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # a folder's name may have characters that the terminal cannot show
        stream.reconfigure(errors="backslashreplace")
    make = partial(Console, stderr=json, highlight=False, markup=False, soft_wrap=True)
    console = make()
    return console if console.is_terminal else make(width=120)


def print_figure(draw: Callable[[], Path], console: Console) -> str | None:
    """Draw a figure and print where it is; without matplotlib, print why there is none."""
    try:
        path = str(draw())
    except BadInput as error:
        console.print(f"no figure: {error}")
        return None
    console.print(f"figure: {path}")
    return path


def finish(json: bool, command: str, **values: Any) -> None:
    """Print the line of JSON that ends a command, if it was asked for."""
    if json:
        print(jsonlib.dumps(_strict({"command": command, **values})))


def _strict(value: Any) -> Any:
    """A value as strict JSON can hold it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

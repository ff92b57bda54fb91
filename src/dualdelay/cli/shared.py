"""What all commands share: kinds of flags, the problem and the speeds that a text names, and how a command ends."""

from __future__ import annotations

import io
import json as jsonlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from ..core import Problem
from ..core.errors import BadInput
from ..runs.names import REGISTRIES, parameters, parse, require_text
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


def parse_speeds(text: str, workers: int) -> SpeedModel:
    """The speed model that a text names; the number of workers may be left out of it, also inside brackets."""
    require_text(text)

    def fill_in(match: re.Match[str]) -> str:
        """Give a model that takes a number of workers this one, unless its own settings have it."""
        settings = text[match.end() :]
        while (outside := re.sub(r"[\[(][^][()]*[])]", "", settings)) != settings:  # those of models within it
            settings = outside
        names = re.findall(r"(\w+)\s*=", settings.partition("]")[0])
        lacks = "n" in parameters(REGISTRIES["speeds"][match[1]]) and "n" not in names
        return f"{match[0]}n={workers}," if lacks else match[0]

    filled = re.sub(rf"\b({'|'.join(REGISTRIES['speeds'])})\[", fill_in, text)
    speeds: SpeedModel = parse("speeds", filled, n=workers)
    return speeds


def make_speeds(text: str, workers: int, seed: int) -> SpeedModel:
    """The speed model that a text names, for so many workers and in a run with this seed."""
    return seeded_speeds(parse_speeds(text, workers), seed)


def free_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{base.name}-{k}") for k in range(2, 10_000))) if not p.exists())


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
        print(jsonlib.dumps({"command": command, **values}))

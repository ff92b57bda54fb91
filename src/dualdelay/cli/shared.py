"""What all commands share: the problem and the speeds that a text names, code of the user's own, and how a command ends."""

from __future__ import annotations

import io
import itertools
import json as jsonlib
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core import Problem
from ..core.errors import BadInput, NotSaved
from ..runs import own
from ..runs.names import alternatives, distinct, parse, rebuild
from ..runs.seeds import seeded_problem, seeded_speeds
from ..simulation.speeds import SpeedModel
from ..storage.record import RunRecord
from . import config
from .flags import Json as Json
from .flags import MaybeFloat as MaybeFloat
from .flags import MaybeInt as MaybeInt
from .flags import MaybePath as MaybePath
from .flags import MaybeText as MaybeText
from .flags import Seed as Seed

_WIDE = 10_000  # columns where there is no terminal: a program that reads a table wants its rows whole


class Incomplete(BadInput):
    """Part of the input was bad; the command has printed what it could do without it, its line of JSON included."""

    told = True


def make_problem(text: str, seed: int) -> Problem:
    """The problem that a text names, in a run with this seed."""
    return seeded_problem(parse("problem", text), seed)


def make_speeds(text: str, workers: int, seed: int) -> SpeedModel:
    """The speed model that a text names in a run with this seed; it may leave out the number of workers, also inside."""
    return seeded_speeds(parse("speeds", text, n=workers), seed)


def import_all(texts: Sequence[str]) -> None:
    """Load the code of the user's own that --import names."""
    for text in texts:
        own.import_code(text)


def require_named(command: str, folder: Path, record: RunRecord, problem: str | None) -> None:
    """Refuse a run that needs code of the user's own which was not named again: no folder decides what code is run."""
    lacking = {}
    for kind in ("algorithm", "speeds") if problem else ("algorithm", "speeds", "problem"):
        description = getattr(record, kind)
        if description is not None and "name" not in description:
            try:
                rebuild(kind, description)
            except BadInput:
                lacking[kind] = description.get("class")
    if lacking:
        what = ", ".join(f"the {kind} is a {name}" for kind, name in lacking.items())
        again = named_again(command, folder, record, problem="problem" in lacking or problem is not None)
        arguments = ", ".join(f"{kind}=..." for kind in lacking)
        raise BadInput(
            f"{folder} was made with code of your own ({what}), and no folder decides what code is run: name it again with "
            f"{again}, or in Python: dd.{command}({str(folder)!r}, {arguments})."
        )


def named_again(command: str, folder: Path, record: RunRecord, problem: bool) -> str:
    """The command that names a run's own code again, as far as the folder remembers how it was named."""
    files, text = config.code_of(folder)
    words = [f"--import {shlex.quote(file)}" for file in files]
    if not words and "name" not in record.algorithm:
        words = ["--import FILE.py"]
    if text is not None:  # of several in a comparison, the one that the folder is named after
        text = next((one for one in alternatives(text) if distinct(one) in folder.name), text)
    if problem and "name" not in record.problem:
        words.append(f"--problem {shlex.quote(text or 'FILE.py:FUNCTION')}")
    return " ".join(["dualdelay", command, shlex.quote(str(folder)), *words])


def free_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet."""
    paths = (Path("runs") / f"{name}{end}" for end in itertools.chain([""], (f"-{k}" for k in itertools.count(2))))
    return next(path for path in paths if not path.exists())


class _Console(Console):
    """A console that leaves it to ``main`` what happens when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(json: bool) -> Console:
    """Where tables and sentences go: standard output, or standard error beside a line of JSON."""
    stream = sys.stderr if json else sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # a folder's name may have characters that the terminal cannot show
        stream.reconfigure(errors="backslashreplace")
    make = partial(_Console, stderr=json, highlight=False, markup=False, soft_wrap=True)
    console = make()
    return console if console.is_terminal else make(width=_WIDE)


def print_figure(draw: Callable[[], Path], console: Console) -> str | None:
    """Draw a figure and print where it is; without matplotlib or room for it, print why there is none."""
    try:
        path = str(draw())
    except (BadInput, NotSaved) as error:
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

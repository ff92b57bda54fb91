"""What is told of an exception that somebody's code has raised in another process."""

from __future__ import annotations

import itertools
import re
import traceback
from pathlib import Path

import torch

from .errors import shortened

_FOLDERS = (Path(__file__).parents[1], Path(torch.__file__).parent)
_OURS = tuple(f"{folder}/" for folder in _FOLDERS)
_BEGIN = "Traceback (most recent call last):"
_LONGEST = 600
_HOME = "dualdelay.core.errors."  # of our own exceptions, which need no address
_UNNAMED = ("builtins", "__main__", _HOME.removesuffix("."))

_NEXT = re.compile(r"^(?:During handling of the above|The above exception was the direct cause of).*:$", re.MULTILINE)
_KIND = re.compile(r"[^:(]*")  # of the first line: what is before the first colon or bracket
_GROUP = re.compile(r"^ *\| ([\w.]*ExceptionGroup: .*)", re.MULTILINE)  # what several exceptions together are told as


def told(error: BaseException) -> str:
    """Its name, and below that its traceback.

    That is without the calls within this package and torch if other code is in it; the last one stays. The name stands
    before all that the exception itself says, which may look like a traceback, too.
    """
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        others = [not _is_ours(call) for call in part.stack]
        if any(others):
            others[-1] = True
            part.stack = traceback.StackSummary.from_list(list(itertools.compress(part.stack, others)))
        part = part.__cause__ or part.__context__
    kind = type(error)
    home = "" if kind.__module__ in _UNNAMED else f"{kind.__module__}."
    return "".join([f"{home}{kind.__qualname__}:\n", *whole.format()])


def _is_ours(call: traceback.FrameSummary) -> bool:
    """Whether a call is within this package, torch, or the constructor of a dataclass."""
    return call.filename.startswith(_OURS) or (call.filename, call.name) == ("<string>", "__init__")


def cause_of(text: str) -> str:
    """What a traceback ends with, in one line: the exception and what was added to it; of any other text the last line."""
    last = _NEXT.split(text)[-1]
    lines = last.strip().splitlines()
    begin = len(lines) - 1
    if grouped := _GROUP.search(last):
        return shortened(grouped[1], _LONGEST)
    calls = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if _BEGIN in lines and calls:
        begin = calls[-1] + 1
        while lines[begin : begin + 1] and lines[begin].startswith(("    ", "  [Previous line")):  # the code of the call
            begin += 1
    cause = " ".join(" ".join(lines[max(begin, 0) :]).split()).removeprefix(_HOME)
    return shortened(cause, _LONGEST) or "nothing"


def kind_of(text: str) -> str:
    """The name alone of the exception of which this was told, for what it says may quote data.

    Of other text what its first line has before a colon or a bracket.
    """
    first = _KIND.match(text)
    return first[0].strip() if first is not None else ""


def is_bad_input(text: str) -> bool:
    """Whether it was bad input of which this was told."""
    return kind_of(text) == "BadInput"

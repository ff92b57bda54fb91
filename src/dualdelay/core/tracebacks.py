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

_NEXT = re.compile(r"^(?:During handling of the above|The above exception was the direct cause of).*:$", re.MULTILINE)
_NAME = re.compile(r"[^\s:]+")
_GROUP = re.compile(r"^ *\| ([\w.]*ExceptionGroup: .*)", re.MULTILINE)  # what several exceptions together are told as


def told(error: BaseException) -> str:
    """Its traceback, without the calls within this package and torch if other code is in it; the last one stays."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        others = [not _is_ours(call) for call in part.stack]
        if any(others):
            others[-1] = True
            part.stack = traceback.StackSummary.from_list(list(itertools.compress(part.stack, others)))
        part = part.__cause__ or part.__context__
    return "".join(whole.format())


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
    """The name alone of the exception that a traceback ends with, for what it says may quote data; of other text what is
    before a colon."""
    cause = cause_of(text)
    named = _NAME.match(cause) if _BEGIN in text or _GROUP.search(text) else None
    return named[0] if named else cause.partition(":")[0].strip()


def is_bad_input(text: str) -> bool:
    """Whether a traceback ends with bad input."""
    return kind_of(text) == "BadInput"

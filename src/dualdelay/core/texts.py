"""Texts that name something with its settings, such as ``dude[lr=0.05,wait_for=3]``."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import BadInput, nearest, shortened, shown

_LONGEST = 1_000_000  # characters of a text that names something
_DEEPEST = 50  # brackets within brackets in it


def literal(text: str) -> Any:
    """The value that a text is: a number, a list, true, false or none; otherwise the text itself."""
    words = {"true": True, "false": False, "none": None, "inf": math.inf, "infinity": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (RecursionError, MemoryError):  # a sum of a hundred thousand numbers, say
        raise BadInput(f"the value {shown(text)} is too complicated; expected a number, a list or a word.") from None
    except (ValueError, SyntaxError, TypeError):
        if len(text) > 100 and text.removeprefix("-").isdecimal():  # Python reads no number of thousands of digits
            raise BadInput(f"the value {shown(text)} is too large; expected a number of fewer digits.") from None
    return text


def parse_call(text: str, value: Callable[[str], Any] = literal) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a text; ``value`` reads the text of a setting."""
    require_text(text)
    name, bracket, rest = text.strip().partition("[")
    if bracket and not rest.endswith("]"):
        raise BadInput(f"{shown(text)} has an open bracket; expected {shortened(name)}[parameter=value,...].")
    values: dict[str, Any] = {}
    for part in split(rest[:-1]):
        key, equals, right = part.partition("=")
        if not equals:
            raise BadInput(f"{shown(part)} in {shown(text)} is no setting; expected parameter=value.")
        if key.strip() in values:
            raise BadInput(f"{shown(text)} gives {shortened(key.strip())} twice; give it once.")
        values[key.strip()] = value(right.strip())
    return name, values


def require_text(text: str) -> None:
    """Refuse a text that names nothing: too long, with brackets too deep, or with a zero byte in it."""
    if not isinstance(text, str):
        raise BadInput(f"{shown(text)} is no text; expected a name with its settings, such as 'dude[lr=0.05]'.")
    if len(text) > _LONGEST:
        raise BadInput(f"{shown(text)} is too long; expected {_LONGEST:,} characters at most. Give long lists in Python.")
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
        raise BadInput(f"{shown(text)} has a zero byte or bytes that are no UTF-8 in it; leave them out.")
    deepest = max(itertools.accumulate((c in "[({") - (c in "])}") for c in text), default=0)
    if deepest > _DEEPEST:
        raise BadInput(f"{shown(text)} has {deepest:,} brackets within one another; expected {_DEEPEST} at most.")


def split(text: str, at: str = ",") -> list[str]:
    """The parts between commas, or what else they are split at, that stand in no bracket."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == at and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    return [part for part in (*parts, part) if part.strip()]


def require_parameters(name: str, known: Mapping[str, inspect.Parameter], values: Mapping[str, Any]) -> None:
    """Refuse settings that are unknown or lacking."""
    for key in values:
        if key not in known:
            raise BadInput(f"{name} has no parameter {shown(key)}; {nearest(key, known)}")
    lacking = [key for key, p in known.items() if p.default is p.empty and key not in values]
    if lacking:
        raise BadInput(f"{name} needs {', '.join(lacking)}: write {name}[{','.join(f'{key}=...' for key in lacking)}].")

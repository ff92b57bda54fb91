"""What goes wrong, and the checks that say so."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


class DualDelayError(Exception):
    """Anything this package refuses or cannot finish."""


class BadInput(DualDelayError, ValueError):
    """Something was given that cannot work; the message says what, what was expected and what to do."""


class ReplayMismatch(DualDelayError):
    """A replay did not give what was recorded."""


class RunFailed(DualDelayError):
    """A run could not go on; what it had done up to its last checkpoint is saved."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error about an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."


def require_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above zero."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise BadInput(f"{name} is {value!r}; expected a finite number above zero.")


def require_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Refuse a number that is not whole or lies outside low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"{low}..{high}"
        raise BadInput(f"{name} is {value!r}; expected a whole number, {span}.")


def require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise BadInput(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def require_several(name: str, value: object, what: str) -> None:
    """Refuse one thing where several are expected."""
    if callable(value) or isinstance(value, str) or not isinstance(value, Iterable):
        raise BadInput(f"{name} is {value!r}; expected a list of {what}: {name}=[...].")


def require_kind(name: str, value: object, kind: type, example: str) -> None:
    """Refuse something of another kind."""
    if not isinstance(value, kind):
        raise BadInput(f"{name} is {value!r}; expected a dd.{kind.__name__}, such as {example}.")

"""What goes wrong, and the checks that say so."""

from __future__ import annotations

import difflib
import errno
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 10**15  # of anything that is counted: nobody waits for more
MOST_WORKERS = 1_000_000
MOST_THREADS = 1024
_LONG = 200  # characters of a value in a message
_LONGEST = 2000  # of a whole message about what was given
_MANY, _FEW = 12, 5  # names: more than so many are not all shown, but so many of them


class DualDelayError(Exception):
    """Anything this package refuses or cannot finish."""


class BadInput(DualDelayError, ValueError):
    """Something was given that cannot work; the message says what, what was expected and what to do."""

    def __str__(self) -> str:
        return shortened(super().__str__(), _LONGEST)


class BadWork(BadInput):
    """A method's ``work`` does what it must not: no other process and no second try would help."""


class ReplayMismatch(DualDelayError):
    """A replay did not give what was recorded."""


class RunFailed(DualDelayError):
    """A run could not go on; what it had done up to its last checkpoint is saved."""


class NotSaved(RunFailed):
    """The disk is full, read-only or broken; what was saved before is intact."""


def shortened(text: str, most: int = _LONG) -> str:
    """A text of at most about so many characters, its middle left out if it has more."""
    if len(text) <= most:
        return text
    return f"{text[: 2 * most // 3]} ...({len(text):,} characters)... {text[-most // 3 :]}"


def shown(value: object) -> str:
    """A value as a message shows it: as Python writes it, and short."""
    if isinstance(value, int) and value.bit_length() > _LONG:
        return f"a whole number of about {round(value.bit_length() * math.log10(2)):,} digits"
    try:
        return shortened(repr(value))
    except Exception:  # a list too deep, or whatever a user's class raises
        return f"a {type(value).__name__} that cannot be written out"


def plain_number(value: Any) -> Any:
    """A single number of numpy or torch as Python's own; anything else as it is."""
    if type(value) in (int, float, bool) or getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except Exception:  # one without a value, such as a tensor on torch's device "meta"
        return value


def is_finite(value: object) -> bool:
    """Whether a value is a number that torch and files can hold: no truth value, and no whole one beyond 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def nearest(name: str, known: Iterable[str], see: str = "") -> str:
    """A hint that ends an error about an unknown name; of many names a few, if there is a command to see them all."""
    names, name = sorted(known), name[:_LONG]
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {close[0]!r}?"
    if not see or len(names) <= _MANY:
        return f"known: {', '.join(names)}."
    few = difflib.get_close_matches(name, names, n=_FEW, cutoff=0.0)
    return f"known: {', '.join(sorted(few))} and {len(names) - len(few)} more (see: {see})."


def require_positive(name: str, value: float, high: float | None = None) -> None:
    """Refuse a number that is not finite and above zero, or is above ``high``."""
    if not is_finite(value) or value <= 0:
        raise BadInput(f"{name} is {shown(value)}; expected a finite number above zero.{_hint(value)}")
    if high is not None and value > high:
        raise BadInput(f"{name} is {shown(value)}; expected a number above zero, {high:g} at most.")


def require_zero_or_more(name: str, value: float, what: str = "a finite number") -> None:
    """Refuse a number that is not finite or below zero; ``what`` says what it is, such as finite seconds."""
    if not is_finite(value) or value < 0:
        raise BadInput(f"{name} is {shown(value)}; expected {what}, zero or more.{_hint(value)}")


def require_below_one(name: str, value: float) -> None:
    """Refuse a number that is below zero, or one and more."""
    if not is_finite(value) or not 0 <= value < 1:
        raise BadInput(f"{name} is {shown(value)}; expected a number of zero or more, and below 1.{_hint(value)}")


def require_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Refuse a number that is not whole or lies outside low..high; without ``high`` it may be as large as makes sense."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= (MOST if high is None else high):
        return
    span = f"{low}..{high}" if high is not None else f"{low} or more"
    if high is None and isinstance(value, int) and value > MOST:
        span = f"{low}..{MOST}"
    hint = "" if isinstance(value, int) else _hint(value)
    raise BadInput(f"{name} is {shown(value)}; expected a whole number, {span}.{hint}")


def _hint(value: object) -> str:
    """What to do about a number that would be one if it were written otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**63:
        return " Write a number with so many digits as 1e20."
    return "" if plain_number(value) is value else " It is a number of numpy or torch: write float(...) or int(...)."


def require_threads(name: str, value: int) -> None:
    """Refuse a number of threads or cores that no machine has; torch would take it, and fail or hang."""
    if isinstance(value, int) and value > MOST_THREADS:
        raise BadInput(f"{name} is {shown(value)}; expected a whole number, 1..{MOST_THREADS}, as many as there are cores.")
    require_whole(name, value, 1)


def require_workers(name: str, value: int) -> None:
    """Refuse a number of workers that is none, or more than a process can keep in mind."""
    if isinstance(value, int) and value > MOST_WORKERS:
        raise BadInput(f"{name} is {shown(value)}; expected a whole number, 1..{MOST_WORKERS}; use fewer.")
    require_whole(name, value, 1)


def require_room(what: str, size: float, instead: str) -> None:
    """Refuse what needs more bytes than this machine has, before they are asked for; ``instead`` says what to do."""
    try:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system says
        return
    if not size <= room:
        raise BadInput(
            f"{what} needs about {size / 1e9:,.3g} GB, more than the {room / 1e9:.3g} GB of memory here; {instead}."
        )


def require_path(name: str, value: object) -> None:
    """Refuse what cannot be the name of a file or folder."""
    expected = "" if isinstance(value, (str, os.PathLike)) else "a text or a Path"
    try:
        if value == "":
            expected = "a name with at least one character"
        elif isinstance(value, (str, os.PathLike)):
            os.lstat(value)
    except ValueError:  # a zero byte, or what the file system's encoding does not have
        expected = "a name without a zero byte, in characters that the file system knows"
    except OSError as error:
        expected = "a shorter name" if error.errno == errno.ENAMETOOLONG else ""
    if expected:
        raise BadInput(f"{name} is {shown(value)}; expected {expected}. Choose another name.")


def require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise BadInput(f"{name} is {shown(value)}; expected one of {', '.join(map(repr, choices))}.")


def require_several(name: str, value: object, what: str) -> None:
    """Refuse one thing where several are expected."""
    if callable(value) or isinstance(value, (str, bytes)) or not isinstance(value, Iterable) or _is_single(value):
        raise BadInput(f"{name} is {shown(value)}; expected a list of {what}: {name}=[...].")


def _is_single(value: object) -> bool:
    """Whether it is one number, which numpy and torch call iterable all the same."""
    return getattr(value, "ndim", None) == 0


def require_kind(name: str, value: object, kind: type, example: str) -> None:
    """Refuse something of another kind."""
    if not isinstance(value, kind):
        raise BadInput(f"{name} is {shown(value)}; expected a dd.{kind.__name__}, such as {example}.")

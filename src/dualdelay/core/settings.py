"""Settings that say themselves what they may be: a check stands with its field and is made in ``check_settings``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import (
    plain_number,
    require_below_one,
    require_one_of,
    require_positive,
    require_threads,
    require_whole,
    require_zero_or_more,
)

Check = Callable[[str, Any], None]


def _setting(default: Any, check: Check, label: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"check": check, "label": label})


def whole(default: Any = dataclasses.MISSING, low: int = 1, high: int | None = None, label: str = "") -> Any:
    """A field for a whole number from ``low`` on.

    Messages call it by its ``label``, where it has one.
    """
    return _setting(default, lambda name, value: require_whole(name, value, low, high), label)


def positive(default: Any = dataclasses.MISSING, high: float | None = None, label: str = "") -> Any:
    """A field for a finite number above zero."""
    return _setting(default, lambda name, value: require_positive(name, value, high), label)


def zero_or_more(default: Any = dataclasses.MISSING, what: str = "a finite number") -> Any:
    """A field for a finite number that is not below zero."""
    return _setting(default, lambda name, value: require_zero_or_more(name, value, what))


def below_one(default: Any = dataclasses.MISSING) -> Any:
    """A field for a number from zero on that is below one."""
    return _setting(default, require_below_one)


def thread_count(default: Any = dataclasses.MISSING) -> Any:
    """A field for a number of threads or cores."""
    return _setting(default, require_threads)


@functools.cache
def types_of(kind: Any) -> dict[str, Any]:
    """The types of a class's fields, by name."""
    return get_type_hints(kind)


def check_settings(record: Any) -> None:
    """Refuse a dataclass with a field that is not what it may be; numbers of numpy and torch become Python's own.

    A field of a ``Literal`` type has one of its values, and None is fine where the type says so.
    """
    kind_of_record: Any = type(record)
    types = types_of(kind_of_record)
    for field in dataclasses.fields(record):
        given = getattr(record, field.name, None)
        if (value := plain_number(given)) is not given:
            object.__setattr__(record, field.name, value)
        kind = types[field.name]
        if get_origin(kind) is Literal:
            require_one_of(field.name, value, get_args(kind))
        elif "check" in field.metadata and not (value is None and type(None) in get_args(kind)):
            field.metadata["check"](field.metadata["label"] or field.name, value)

"""Settings that say themselves what they may be: a check stands with its field and is made in ``check_settings``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import plain_number, require_one_of, require_positive, require_threads, require_whole, require_zero_or_more

Check = Callable[[str, Any], None]


def _setting(default: Any, check: Check) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


def whole(default: Any = dataclasses.MISSING, low: int = 1, high: int | None = None) -> Any:
    """A field for a whole number from ``low`` on; None is fine where it is the default."""
    return _setting(default, lambda name, value: require_whole(name, value, low, high))


def positive(default: Any = dataclasses.MISSING, high: float | None = None) -> Any:
    """A field for a finite number above zero; None is fine where it is the default."""
    return _setting(default, lambda name, value: require_positive(name, value, high))


def zero_or_more(default: Any = dataclasses.MISSING, what: str = "a finite number") -> Any:
    """A field for a finite number that is not below zero; None is fine where it is the default."""
    return _setting(default, lambda name, value: require_zero_or_more(name, value, what))


def thread_count(default: Any = dataclasses.MISSING) -> Any:
    """A field for a number of threads or cores; None is fine where it is the default."""
    return _setting(default, require_threads)


_known_choices: dict[type, dict[str, tuple[Any, ...]]] = {}


def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The values that each field of a dataclass with a ``Literal`` type may have."""
    if kind not in _known_choices:
        literals = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}
        _known_choices[kind] = {name: get_args(hint) for name, hint in literals.items()}
    return _known_choices[kind]


def check_settings(record: Any) -> None:
    """Refuse a dataclass with a field that is not what it may be; numbers of numpy and torch become Python's own."""
    choices = _choices(type(record))
    for field in dataclasses.fields(record):
        given = getattr(record, field.name, None)
        if (value := plain_number(given)) is not given:
            object.__setattr__(record, field.name, value)
        if field.name in choices:
            require_one_of(field.name, value, choices[field.name])
        elif "check" in field.metadata and not (value is None and field.default is None):
            field.metadata["check"](field.name, value)

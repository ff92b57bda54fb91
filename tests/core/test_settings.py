"""A field of a dataclass that states what it may be: what is taken, what is refused, and in which words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.errors import MOST, MOST_THREADS
from dualdelay.core.settings import check_settings, positive, thread_count, whole, zero_or_more


@dataclass(frozen=True)
class Settings:
    needed: float = positive()
    count: int = whole(3, low=2, high=5)
    total: int | None = whole(None)
    share: float = positive(0.5, high=1.0)
    pause: float | None = zero_or_more(None, "finite seconds")
    threads: int = thread_count(1)
    start: Literal["zeros", "busy", 3] = "zeros"
    note: Any = None  # anything at all

    def __post_init__(self) -> None:
        check_settings(self)


USUAL = Settings(1.0)

TAKEN = [
    *(("needed", value) for value in (1, 1e-300, 1e300)),
    *(("count", value) for value in (2, 5)),
    *(("total", value) for value in (None, 1, MOST)),
    ("share", 1.0),
    *(("pause", value) for value in (None, 0, 2.5)),
    *(("threads", value) for value in (1, MOST_THREADS)),
    *(("start", value) for value in ("busy", 3)),
    *(("note", value) for value in (-1, "x", [math.nan])),
]


@pytest.mark.parametrize(("name", "value"), TAKEN)
def test_what_a_field_may_be_is_taken_as_it_is(name: str, value: Any) -> None:
    assert getattr(replace(USUAL, **{name: value}), name) is value


REFUSED = [
    *(("needed", value, "expected a finite number above zero") for value in (0, -1.0, math.nan, math.inf, True, None, "1")),
    ("needed", 10**30, "Write a number with so many digits as 1e20"),
    *(("count", value, r"expected a whole number, 2\.\.5") for value in (1, 6, 2.0, True, None)),
    *(("total", value, "expected a whole number, 1 or more") for value in (0, -3, 1.5)),
    ("total", MOST + 1, rf"expected a whole number, 1\.\.{MOST}"),
    ("share", 1.5, "expected a number above zero, 1 at most"),
    *(("pause", value, "expected finite seconds, zero or more") for value in (-1, math.inf, math.nan)),
    *(("threads", value, "expected a whole number, 1") for value in (0, MOST_THREADS + 1, 1.5, None)),
    *(("start", value, "expected one of 'zeros', 'busy', 3") for value in ("Zeros", 4, None)),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_what_a_field_may_not_be_is_refused_with_its_name_and_what_was_expected(name: str, value: Any, words: str) -> None:
    with pytest.raises(dd.BadInput, match=rf"^{name} is .*{words}"):
        replace(USUAL, **{name: value})


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, np.array])
def test_a_number_of_numpy_or_torch_becomes_python_s_own(kind: Any) -> None:
    taken = Settings(np.float32(0.5), count=kind(3), note=kind(4))
    assert [(value, type(value)) for value in (taken.needed, taken.count, taken.note)] == [(0.5, float), (3, int), (4, int)]


def test_an_array_of_several_numbers_is_none() -> None:
    with pytest.raises(dd.BadInput, match="needed is"):
        Settings(np.array([1.0, 2.0]))


@dataclass(frozen=True)
class More(Settings):
    start: Literal["late"] = "late"
    period: float = positive(2.0)


def test_a_subclass_has_the_checks_of_its_fields_and_of_those_it_inherits() -> None:
    assert More(1.0).start == "late"
    for name, value in (("start", "zeros"), ("period", 0.0), ("count", 9)):
        with pytest.raises(dd.BadInput, match=f"{name} is "):
            replace(More(1.0), **{name: value})
    assert Settings(1.0).start == "zeros"


def test_every_method_checks_its_settings() -> None:
    for kind in dd.ALGORITHMS.values():
        with pytest.raises(dd.BadInput, match="lr is 0"):
            kind(lr=0)

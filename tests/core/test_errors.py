"""What messages show of a value, hints at the name that was meant, and checks no setting makes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.errors import (
    MOST_WORKERS,
    is_finite,
    nearest,
    plain_number,
    require_kind,
    require_room,
    require_several,
    require_workers,
    shortened,
    shown,
)


def test_a_long_text_is_shown_by_its_beginning_and_end() -> None:
    text = "".join(chr(ord("a") + k % 26) for k in range(3000))
    assert shortened(text[:200]) == text[:200]
    assert shortened(text, 300) == f"{text[:200]} ...(3,000 characters)... {text[-100:]}"
    assert len(str(dd.BadInput(text))) < 2100


def test_every_value_can_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(0.5) == "0.5"
    assert shown(10**5000) == "a whole number of about 5,000 digits"  # more than Python writes out
    assert shown(Broken()) == "a Broken that cannot be written out"
    assert shown(deep) == "a list that cannot be written out"
    assert len(shown(list(range(10_000)))) < 250


@pytest.mark.parametrize("value", [1, 0.5, True, "x", [1], np.zeros(1), torch.zeros(1), torch.zeros((), device="meta")])
def test_what_is_no_single_number_of_numpy_or_torch_stays_as_it_is(value: Any) -> None:
    assert plain_number(value) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (-(2**63), True), (2**63, False), (0.0, True), (math.inf, False), (math.nan, False), (True, False)]
    + [(value, False) for value in ("1", None, 1j)],
)
def test_finite_is_a_number_that_torch_and_files_can_hold(value: Any, expected: bool) -> None:
    assert is_finite(value) is expected


def test_the_nearest_name_is_the_hint_or_all_names_are() -> None:
    assert nearest("dudee", ["vanilla", "dude"]) == "did you mean 'dude'?"
    assert nearest("x", ["vanilla", "dude"]) == "known: dude, vanilla."
    assert nearest("foo", ["vanilla", "ormo"]) == "known: ormo, vanilla.", "only what is near is suggested"
    many = [f"name{k}" for k in range(20)]
    assert nearest("foo", many).count("name") == 20
    assert nearest("foo", many, "a list").endswith(" and 15 more (see: a list).")


@pytest.mark.parametrize("value", [5, "abc", b"abc", print, np.array(3.0), torch.tensor(3.0)])
def test_one_thing_where_several_are_expected_is_refused(value: Any) -> None:
    with pytest.raises(dd.BadInput, match=r"times is .*; expected a list of seconds: times=\[\.\.\.\]"):
        require_several("times", value, "seconds")
    require_several("times", [value], "seconds")


def test_a_fleet_of_no_workers_or_of_more_than_a_process_can_keep_is_refused() -> None:
    require_workers("n", MOST_WORKERS)
    for value in (0, MOST_WORKERS + 1, 1.5):
        with pytest.raises(dd.BadInput, match=r"n is .*; expected a whole number, 1"):
            require_workers("n", value)


def test_what_needs_more_memory_than_the_machine_has_is_refused() -> None:
    require_room("a table", 8, "use less")
    for size in (1e18, math.inf, math.nan):
        with pytest.raises(dd.BadInput, match=r"a table needs about .* GB, more than .* here; use less\."):
            require_room("a table", size, "use less")


def test_a_thing_of_another_kind_is_refused_with_an_example() -> None:
    require_kind("speeds", dd.FixedSpeeds([1.0]), dd.SpeedModel, "dd.FixedSpeeds([1.0])")
    with pytest.raises(dd.BadInput, match=r"speeds is 3; expected a dd.SpeedModel, such as dd.FixedSpeeds\(\[1.0\]\)"):
        require_kind("speeds", 3, dd.SpeedModel, "dd.FixedSpeeds([1.0])")

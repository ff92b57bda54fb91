"""Figures and sentences rank what can be ranked, by all seeds, and are written as their names say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import dualdelay as dd
from dualdelay.analysis.figures import _best, draw, drawn
from dualdelay.analysis.reports import print_comparison, sentence
from dualdelay.engine.trace import Table


def table_of(ends: dict[str, list[float]], **more: Any) -> Table:
    """A run for each method and seed that begins at 2 and ends there."""
    runs = [(name, seed, end) for name, values in ends.items() for seed, end in enumerate(values)]
    columns: dict[str, Any] = {
        "algorithm": np.repeat([name for name, _, _ in runs], 3),
        "seed": np.repeat([seed for _, seed, _ in runs], 3),
        "time": np.tile([0.0, 1.0, 2.0], len(runs)),
        "objective": np.concatenate([[2.0, (2.0 + end) / 2, end] for _, _, end in runs]),
        "accuracy": np.full(3 * len(runs), np.nan),
    }
    return Table(columns | more)


def axes(table: Table) -> list[Any]:
    found: list[Any] = drawn(table, "time").axes
    return found


def test_the_best_are_so_in_the_mean_over_seeds_not_by_the_last() -> None:
    ends = {f"dude[lr={k}]": [1.0 + 0.1 * k, 1.0 + 0.1 * k] for k in range(10)}
    ends["dude[lr=9]"] = [9.0, 0.1]  # the last seed alone would put it first
    ends["dude[lr=8]"] = [0.1, 1.9]  # and this one last, which is second in the mean
    assert _best(table_of(ends), slice(None)) == [f"dude[lr={k}]" for k in (0, 1, 2, 3, 4, 5, 6, 8)]


def test_runs_of_different_problems_are_drawn_apart() -> None:
    ends = {f"dude[lr={k}]": [1.0 + k] for k in range(2)}
    problem = np.array(["digits[alpha=0.1]"] * 3 + ["digits[alpha=0.5]"] * 3)
    both = axes(table_of(ends, problem=problem))
    assert [axis.get_title() for axis in both] == ["digits[alpha=0.1]", "digits[alpha=0.5]"]
    assert [[line.get_label() for line in axis.get_lines()] for axis in both] == [["dude[lr=0]"], ["dude[lr=1]"]]


def test_a_run_that_diverged_does_not_set_the_axis() -> None:
    """Neither one that is not drawn nor one that is: it leaves the picture at three times the start."""
    calm = {f"dude[lr={k}]": [1.0 + 0.01 * k] for k in range(8)}
    (axis,) = axes(table_of(calm | {"vanilla[lr=9]": [1e30]}))
    assert len(axis.get_lines()) == 8 and axis.get_ylim()[1] < 2.5
    (axis,) = axes(table_of({"dude[lr=0]": [1.0], "vanilla[lr=9]": [1e30]}))
    assert len(axis.get_lines()) == 2 and axis.get_ylim()[1] < 8.0


@pytest.mark.parametrize(("name", "first"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_figure_is_written_as_its_name_says_for_a_text_and_a_path(
    kind: type, name: str, first: bytes, tmp_path: Path
) -> None:
    made = draw(table_of({"dude[lr=1]": [1.0]}), kind(tmp_path / name))
    assert made == tmp_path / name and made.read_bytes().startswith(first)
    again = made.read_bytes()
    assert draw(table_of({"dude[lr=1]": [1.0]}), kind(tmp_path / name)).read_bytes() == again  # no date, nothing drawn


@pytest.mark.parametrize("name", ["a.jpeg", "a", "a.parquet"])
def test_a_kind_of_file_that_is_unknown_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(dd.BadInput, match=r"cannot be drawn; expected a name that ends in \.png, \.pdf, \.svg"):
        draw(table_of({"dude[lr=1]": [1.0]}), str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


CENTERS = [[0.0], [6.0], [12.0]]
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])


def test_the_sentence_ranks_by_the_mean_and_says_who_failed() -> None:
    methods = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05), dd.VanillaASGD(lr=1e200)]
    table = dd.compare(methods, dd.Quadratic(CENTERS, noise=0.5), SPEEDS, seeds=[0, 1], updates=300)
    said = sentence(table)
    assert said.startswith("To be seen: at the end (their times differ) dude[lr=0.05] has the lowest objective")
    assert "vanilla[lr=1e+200] failed or diverged in 2 of 2 runs" in said
    console = Console(width=140)
    with console.capture() as shown:
        print_comparison(table, console)
    assert "0 of 2" in shown.get() and "2 of 2" in shown.get()


def test_problems_are_not_ranked_against_each_other() -> None:
    problems = [dd.Quadratic(CENTERS), dd.Quadratic([[0.0], [1.0], [2.0]])]
    table = dd.sweep(
        {"algorithm": [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], "problem": problems}, None, SPEEDS, updates=200
    )
    said = sentence(table).splitlines()
    assert len(said) == 2 and all("dude[lr=0.05] has the lowest objective" in one for one in said)

"""Figures show what is comparable, the best curves of many, and the same bytes for the same runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualdelay as dd
from dualdelay.analysis.figures import _SHADES, Curve, Panel, _looks, draw, draw_panels, drawn, drawn_panels
from dualdelay.engine.table import Table


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


def labels(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_every_method_has_a_colour_of_its_own() -> None:
    colours = [kind.colour for kind in dd.ALGORITHMS.values()]
    assert len(set(colours)) == len(colours) and dd.Algorithm.colour not in colours


def test_the_best_are_so_in_the_mean_over_seeds_not_by_the_last() -> None:
    ends = {f"dude[lr={k}]": [1.0 + 0.1 * k, 1.0 + 0.1 * k] for k in range(10)}
    ends["dude[lr=9]"] = [9.0, 0.1]  # the last seed alone would put it first
    ends["dude[lr=8]"] = [0.1, 1.9]  # and this one last, which is second in the mean
    (axis,) = drawn(table_of(ends)).axes
    assert [line.get_label() for line in axis.get_lines()] == [f"dude[lr={k}]" for k in (0, 1, 2, 3, 4, 5, 6, 8)]


@pytest.mark.parametrize(
    ("count", "heading"), [(5, None), (6, ""), (8, ""), (20, "the 8 of 20 with the lowest objective at the end")]
)
def test_of_many_curves_the_best_are_drawn_and_a_long_legend_stands_below(count: int, heading: str | None) -> None:
    names = [f"dude[lr={k}]" for k in range(count)]
    figure = drawn(table_of({name: [1.0 + 0.1 * k] for k, name in enumerate(names)}), "time")
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.get_lines()] == names[:8]
    legend = axis.get_legend() if heading is None else figure.legends[0]
    assert labels(legend) == names[:8]
    assert legend.get_title().get_text() == (heading or "")


def test_a_curve_is_the_mean_over_seeds_up_to_the_end_of_the_shortest() -> None:
    table = table_of({"dude": [1.0, 0.0]})
    table.columns["time"][3:] = [0.0, 0.5, 1.5]  # the second seed's evaluations
    (line,) = drawn(table, "time").axes[0].get_lines()
    assert line.get_xdata().tolist() == [0.0, 0.5, 1.0, 1.5]
    # between two evaluations the model of the earlier one stands: 2, 2, 1.5, 1.5 and 2, 1, 1, 0
    assert line.get_ydata().tolist() == [2.0, 1.5, 1.25, 0.75]


def test_runs_of_different_problems_are_drawn_apart() -> None:
    problem = np.repeat(["digits[alpha=0.1]", "digits[alpha=0.5]"], 3)
    first, second = drawn(table_of({"dude[lr=0]": [1.0], "dude[lr=1]": [2.0]}, problem=problem), "time").axes
    assert (first.get_title(), second.get_title()) == ("digits[alpha=0.1]", "digits[alpha=0.5]")
    assert [line.get_label() for axis in (first, second) for line in axis.get_lines()] == ["dude[lr=0]", "dude[lr=1]"]


def test_a_run_that_diverged_does_not_set_the_axis() -> None:
    """Neither one that is not drawn nor one that is: it leaves the picture at three times the start."""
    calm = {f"dude[lr={k}]": [1.0 + 0.01 * k] for k in range(8)}
    (axis,) = drawn(table_of(calm | {"vanilla[lr=9]": [1e30]}), "time").axes
    assert len(axis.get_lines()) == 8 and axis.get_ylim() == pytest.approx((0.95, 2.05))  # 1..2 and a twentieth
    (axis,) = drawn(table_of({"dude[lr=0]": [1.0], "vanilla[lr=9]": [1e30]}), "time").axes
    assert len(axis.get_lines()) == 2 and axis.get_ylim() == pytest.approx((1 / 1.15, 6 * 1.15))  # logarithmic, 1..3 * 2


def test_the_legend_counts_runs_that_failed() -> None:
    methods = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=1e200)]
    sweep = dd.compare(methods, dd.Quadratic([[0.0], [6.0]], noise=0.5), dd.FixedSpeeds([1, 2]), seeds=[0, 1], updates=300)
    figure = drawn(sweep, "time")
    assert labels(figure.axes[0].get_legend()) == ["dude[lr=0.05]", "vanilla[lr=1e+200] (2 of 2 runs failed)"]


@pytest.mark.parametrize(("name", "first"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_ending_of_the_name_decides_the_format(name: str, first: bytes, tmp_path: Path) -> None:
    table = table_of({"dude[lr=1]": [1.0]})
    path = draw(table, str(tmp_path / "new" / name))
    data = path.read_bytes()
    assert path == tmp_path / "new" / name and data.startswith(first)
    assert draw(table, path).read_bytes() == data, "no date and no random names"


@pytest.mark.parametrize("name", ["a.jpeg", "a", "a.parquet"])
def test_an_unknown_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(dd.BadInput, match=r"cannot be drawn; expected a name that ends in \.png, \.pdf, \.svg"):
        draw(table_of({"dude[lr=1]": [1.0]}), str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_panels_have_one_legend_and_each_row_one_scale(tmp_path: Path) -> None:
    x, methods = [0.1, 1.0, 2.0], ["dude", "dude c=3", "vanilla", "own"]

    def panel(title: str, ylabel: str, methods: list[str], **options: Any) -> Panel:
        curves = [Curve(m, f"${m}", x, [k, k + 1, k + 2], [k] * 3, [k + 3] * 3) for k, m in enumerate(methods)]
        return Panel(title, "time", ylabel, curves, **options)

    rows = [[panel("a", "F", methods[:3]), panel("b", "F", methods[1:])], [panel("c", "G", ["dude"]), panel("d", "G", [])]]
    figure = drawn_panels(rows, "a caption with $ signs")
    first, second, third, _ = figure.axes
    (legend,) = figure.legends
    assert labels(legend) == [f"${method}" for method in methods], "each once, in the order in which they come"
    assert not any(text.get_parse_math() for text in legend.get_texts()), "a dollar begins no formula"
    assert figure.get_supxlabel() == "a caption with $ signs"
    assert [axis.get_title() for axis in figure.axes] == list("abcd")
    assert [axis.get_ylabel() for axis in figure.axes] == ["F", "", "G", ""]
    assert first.get_ylim() == second.get_ylim() != third.get_ylim()
    lines = first.get_lines()
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 3, "told apart"
    assert [len(axis.collections) for axis in figure.axes] == [3, 3, 1, 0], "a band for each curve"
    steps = drawn_panels([[panel("e", "F", ["dude"], steps=True), panel("f", "G", ["dude"] * 8, log="y")]], "").axes
    assert [tick.get_text() for tick in steps[0].get_xticklabels()] == ["0.1", "1", "2"] and steps[0].get_xscale() == "log"
    assert [axis.get_ylabel() for axis in steps] == ["F", "G"], "two quantities in a row"
    assert (steps[1].get_yscale(), len(steps[1].collections)) == ("log", 1), "of many bands the first method's"
    assert [path.name for path in draw_panels(rows, tmp_path / "new" / "x") if path.exists()] == ["x.png", "x.pdf"]


@pytest.mark.parametrize("label", ["$x$", "$\\frac{", "_hidden", "x" * 1000, "a%b", "a_b^c"])
def test_labels_are_no_formulas(label: str, tmp_path: Path) -> None:
    table = table_of({label: [1.0]})
    (text,) = drawn(table, "time").axes[0].get_legend().get_texts()
    assert text.get_text().strip()[:20] == label[:20] and not text.get_parse_math()
    draw(table, tmp_path / "figure.svg")


def test_methods_of_a_user_s_own_have_looks_that_differ() -> None:
    looks = _looks(["own", "other", "own[lr=2]", "dude[lr=1]"])
    assert len({(look["color"], str(look["linestyle"])) for look in looks.values()}) == 4
    assert looks["own"]["color"] == looks["own[lr=2]"]["color"] != looks["other"]["color"]


class Green(dd.VanillaASGD):
    colour = "#5B8C5A"


class Named(dd.VanillaASGD):
    colour = "no colour at all"


def test_a_method_of_a_user_s_own_has_the_colour_that_it_was_given() -> None:
    problem, speeds = dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 2.0])
    methods = {"a": Green(0.1), "b": Green(0.2), "c": Named(0.1), "d": dd.DuDe(0.1)}
    figure = dd.compare(methods, problem, speeds, updates=4).plot()
    a, b, c, d = figure.axes[0].get_lines()
    assert a.get_color() == b.get_color() == Green.colour and a.get_linestyle() != b.get_linestyle()
    assert c.get_color() in _SHADES and d.get_color() in _SHADES, "a name of the user's own for one of ours has its own"
    run = dd.simulate(Green(0.1), problem, speeds, updates=4)
    assert run.plot().axes[0].get_lines()[0].get_color() == Green.colour


def seen(figure: Any) -> list[dict[str, list[float]]]:
    """The values of each curve of each panel."""
    return [{line.get_label(): line.get_ydata().tolist() for line in axis.get_lines()} for axis in figure.axes]


@pytest.mark.parametrize(
    ("bands", "half"), [("range", 0.5), ("std", 0.5 * np.sqrt(2)), ("interval", 12.706 * 0.5), ("none", None)]
)
def test_a_band_shows_the_range_a_deviation_or_an_interval(bands: str, half: float | None) -> None:
    (axis,) = table_of({"dude": [1.0, 2.0]}).plot(bands=bands, log="").axes  # the seeds are half from their mean, 1.5
    assert len(axis.collections) == (half is not None)
    for band in axis.collections:
        ends = band.get_paths()[0].vertices
        ends = ends[ends[:, 0] == 2.0][:, 1]
        assert (ends.min(), ends.max()) == pytest.approx((1.5 - half, 1.5 + half), abs=1e-3)


def test_metrics_axes_labels_panels_and_size_are_the_user_s_to_choose(tmp_path: Path) -> None:
    table = table_of({"dude[lr=1]": [1.0, 1.5], "own": [0.5, 0.7]}, f1=np.tile([0.1, 0.2, 0.4], 4))
    table["version"], table["alpha"] = np.tile([0, 3, 9], 4), np.repeat([0.1, 0.5], 6)
    figure = table.plot(
        *(tmp_path / "new" / "figure.pdf",),
        metrics=["f1"],
        x="version",
        panels="alpha",
        labels={"own": "Ours"},
        size=(7, 2),
    )
    assert (tmp_path / "new" / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert figure.get_size_inches().tolist() == [7, 2]
    assert [axis.get_title() for axis in figure.axes] == ["alpha = 0.1", "alpha = 0.5"]
    assert seen(figure) == [{"dude[lr=1]": [0.1, 0.2, 0.4]}, {"Ours": [0.1, 0.2, 0.4]}]
    assert {axis.get_xlabel() for axis in figure.axes} == {"server updates"} and figure.axes[0].get_ylabel() == "f1"
    assert labels(figure.axes[0].get_legend()) == ["dude[lr=1]", "Ours"]
    (axis,) = table.plot(log="xy", panels=()).axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    path = draw(table, tmp_path / "picture", kind="svg")
    assert path.read_bytes().startswith(b"<?xml")


def test_the_order_of_a_table_s_rows_does_not_change_its_figure() -> None:
    table = table_of({"dude": [1.0, 1.5], "own": [0.5, 0.7]})
    order = np.random.default_rng(0).permutation(len(table))
    (one,), (other,) = seen(table.plot()), seen(Table({name: column[order] for name, column in table.items()}).plot())
    assert one == other


def test_a_run_draws_itself(tmp_path: Path) -> None:
    run = dd.simulate(dd.DuDe(lr=0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 3.14]), updates=30)
    figure = run.plot(tmp_path / "run.png")
    assert seen(figure) == [{"dude[lr=0.1]": run.metrics.objective.tolist()}]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [[*curves.values()] for curves in seen(run.metrics.plot())] == [[run.metrics.objective.tolist()]]
    assert run.metrics.plot().axes[0].get_legend() is None, "one curve without a name needs none"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": "objektive"}, "there is no column of numbers 'objektive' to draw; did you mean 'objective'"),
        ({"metrics": "algorithm"}, "there is no column of numbers 'algorithm'"),
        ({"x": "tim"}, "there is no column of numbers 'tim' to draw; did you mean 'time'"),
        ({"bands": "wide"}, "bands is 'wide'; expected one of 'range', 'std', 'interval', 'none'"),
        ({"log": "z"}, "log is 'z'"),
        ({"by": "metod"}, "there is no column 'metod'"),
        ({"panels": "alfa"}, "there is no column 'alfa'"),
        ({"by": "seed"}, "has rows of several runs, which differ in algorithm"),
        ({"path": "figure.jpeg"}, "cannot be drawn"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(dd.BadInput, match=words):
        table_of({"dude": [1.0], "own": [2.0]}).plot(**options)


def test_panels_of_one_problem_have_one_scale_that_has_room_for_bands_and_several_ticks() -> None:
    table = table_of({"dude": [1.0, 1.2], "own": [0.5, 0.7], "one": [1.9, 2.0], "other": [0.4, 1.6]})
    table["lr"] = np.repeat([0.1, 0.1, 0.5, 0.5], 6)
    for options in ({"log": "y"}, {"log": ""}):
        first, second = drawn(table, "time", panels="lr", bands="std", **options).axes
        assert first.get_ylim() == second.get_ylim()
        low, high = first.get_ylim()
        for axis in (first, second):
            edges = np.concatenate([band.get_paths()[0].vertices[:, 1] for band in axis.collections])
            assert low <= edges.min() and edges.max() <= high, "no band is cut off"
            assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 4
    problem = np.repeat(["easy", "hard"], 12)
    easy, hard = drawn(Table({**table, "problem": problem, "objective": table.objective * np.repeat([1, 100], 12)})).axes
    assert easy.get_ylim()[1] < 3 < 30 < hard.get_ylim()[0], "objectives of different problems are not comparable"


def test_a_band_that_reaches_zero_ends_near_the_curves_on_a_log_scale() -> None:
    table = table_of({"dude": [0.01, 1.9]})  # the mean less its deviation is below zero
    (axis,) = drawn(table, "time", bands="std", log="y").axes
    (band,) = axis.collections
    assert axis.get_ylim()[0] > 0.01 / 2 and band.get_paths()[0].vertices[:, 1].min() == pytest.approx(0.01 / 1.5)


@pytest.mark.parametrize(("values", "least"), [([1.3, 1.0], 4), ([8.0, 1.0], 4), ([20.0, 0.1], 5), ([1e3, 1e-6], 4)])
def test_a_log_scale_has_several_numbers_however_much_it_spans(values: list[float], least: int) -> None:
    table = Table({"time": np.arange(2.0), "objective": np.array(values)})
    (axis,) = drawn(table, log="y").axes
    low, high = axis.get_ylim()
    assert sum(low <= tick <= high for tick in axis.get_yticks()) >= least


def test_metrics_of_a_user_s_own_are_drawn() -> None:
    evaluation = dd.Evaluation(every=2, metrics={"f1": lambda x: 0.5})
    problem, speeds = dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 2.0])
    table = dd.compare([dd.DuDe(0.1)], problem, speeds, updates=4, evaluation=evaluation)
    assert [axis.get_ylabel() for axis in drawn(table).axes][1:] == ["f1"]
    assert [axis.get_ylabel() for axis in table.runs[0].plot().axes][1:] == ["f1"]

"""Pictures of splits and speeds show what is there, and small tables for notebooks say it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.simulation.speeds import ChangingSpeeds, DriftingSpeeds, LognormalSpeeds, RecordedSpeeds

DIGITS = dd.Digits(workers=4, alpha=0.5, hidden=4)


def dots(figure: Any) -> dict[tuple[str, int], float]:
    """The area of the dot of each class and worker in a picture of a split."""
    axis = figure.axes[1]
    names = [text.get_text() for text in axis.get_yticklabels()]
    points = axis.collections[0]
    places = np.asarray(points.get_offsets()).round().astype(int)
    return {(names[row], int(worker)): size for (worker, row), size in zip(places, points.get_sizes(), strict=True)}


def test_a_split_shows_every_class_of_every_worker_and_the_sizes() -> None:
    figure = DIGITS.plot_split()
    bars = [bar.get_height() for bar in figure.axes[0].patches]
    assert bars == [DIGITS.samples(worker) for worker in range(4)]
    counts = {(name, worker): count for worker in range(4) for name, count in DIGITS.classes(worker).items()}
    areas = dots(figure)
    assert areas.keys() == counts.keys()
    largest = max(counts, key=counts.__getitem__)
    for place, count in counts.items():
        if areas[place] > 0.5:  # the least that is drawn
            assert areas[place] / areas[largest] == pytest.approx(count / counts[largest])
    assert figure.axes[0].get_title() == "digits[workers=4,alpha=0.5,hidden=4]"


def test_data_without_classes_show_their_sizes_alone() -> None:
    shards = [(torch.randn(size, 3), torch.randn(size, 1)) for size in (5, 20, 7)]
    problem = dd.Network(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, shards, 2)
    figure = problem.plot_split()
    assert len(figure.axes) == 1 and [bar.get_height() for bar in figure.axes[0].patches] == [5, 20, 7]
    assert problem.classes(0) is None


def test_a_wrapped_problem_has_the_split_of_the_other() -> None:
    wrapped = dd.LocalSteps(DIGITS, k=2, lr=0.1)
    assert dots(wrapped.plot_split()) == dots(DIGITS.plot_split())


def test_a_problem_without_samples_has_no_split() -> None:
    with pytest.raises(dd.BadInput, match="Quadratic does not say how many samples"):
        dd.Quadratic([[0.0], [6.0]]).plot_split()


def test_speeds_show_each_worker_s_times_and_first_jobs() -> None:
    figure = dd.FixedSpeeds([1.0, 4.0]).plot(jobs=20)
    left, right = figure.axes
    assert left.lines[0].get_xdata().tolist() == [1.0, 4.0]
    # of worker 1 four jobs fit into the time that is shown: twelve times the middle of the workers' middles
    spans = [path.get_extents() for bars in right.collections[2:] for path in bars.get_paths()]
    assert sorted(span.x0 for span in spans) == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0]


def test_the_middle_of_random_times_is_their_median_and_a_seed_names_them() -> None:
    speeds = LognormalSpeeds([1.0, 3.0], sigma=0.5)
    middles = [speeds.plot(jobs=101, seed=seed).axes[0].lines[0].get_xdata().tolist() for seed in (0, 0, 1)]
    assert middles[0] == middles[1] != middles[2]
    assert middles[0][0] == pytest.approx(sorted(speeds.seconds(0, draw) for draw in range(101))[50])


def test_times_that_depend_on_the_clock_are_taken_one_after_the_other() -> None:
    speeds = ChangingSpeeds(dd.FixedSpeeds([1.0]), changes=[2.0], factors=[[1.0], [3.0]])
    right = speeds.plot(jobs=3).axes[1]
    spans = sorted(
        (path.get_extents().x0, path.get_extents().x1) for bars in right.collections for path in bars.get_paths()
    )
    assert spans == [(0.0, 1.0), (1.0, 2.0), (2.0, 5.0)]


@pytest.mark.parametrize("ratio", [40.0, 1e4])
def test_recorded_times_are_named_in_short_and_labels_of_a_wide_range_do_not_overlap(ratio: float) -> None:
    times = [[0.0011, 0.0012, 0.0011 * ratio] * 20, [0.002] * 60]
    figure = RecordedSpeeds(times).plot(jobs=60)
    left = figure.axes[0]
    figure.canvas.draw()
    low, high = left.get_window_extent().intervalx
    texts = [text for text in left.get_xticklabels(which="both") if text.get_text()]
    boxes = sorted(tuple(text.get_window_extent().intervalx) for text in texts)
    boxes = [(start, end) for start, end in boxes if low <= (start + end) / 2 <= high]
    assert figure.get_suptitle() == "recorded, 2 workers" and len(boxes) >= 3
    assert all(end < start for (_, end), (start, _) in pairwise(boxes))


def test_a_picture_is_written_if_a_file_is_named(tmp_path: Path) -> None:
    dd.FixedSpeeds([1.0, 2.0]).plot(tmp_path / "deeper" / "speeds.png")
    DIGITS.plot_split(tmp_path / "split.svg")
    assert (tmp_path / "deeper" / "speeds.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "split.svg").read_bytes()
    with pytest.raises(dd.BadInput, match=r"ends with \.png, \.pdf or \.svg"):
        DIGITS.plot_split(tmp_path / "split.txt")
    with pytest.raises(dd.BadInput, match="jobs is 0"):
        dd.FixedSpeeds([1.0]).plot(jobs=0)


# small tables


@pytest.fixture(scope="module")
def comparison() -> dd.Sweep:
    methods = {"<b>mine</b>": dd.DuDe(0.05), "vanilla": dd.VanillaASGD(0.05)}
    return dd.compare(methods, DIGITS, dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), seeds=[0, 1], updates=10)


def cells(html: str) -> str:
    """What a person reads."""
    import html as entities
    import re

    return entities.unescape(re.sub(r"<[^>]+>", " ", html))


def test_a_run_says_how_it_ended(comparison: dd.Sweep) -> None:
    run = comparison.runs[0]
    text = cells(run._repr_html_())
    assert f"{run.metrics.objective[-1]:.4g}" in text and "updates 10 arrivals" in " ".join(text.split())
    assert "ended by updates" in text and "dude[lr=0.05]" in text


def test_a_table_has_its_first_and_last_rows_and_says_of_how_many(comparison: dd.Sweep) -> None:
    trace = comparison.runs[0].trace
    html = trace._repr_html_()
    assert f"… of {len(trace)} rows" in html and html.count("<tr>") == 10
    assert f"<td>{trace.time[-1]:.4g}</td>" in html
    few = dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2]), updates=3).trace
    assert len(few) == 4 and "…" not in few._repr_html_()


def test_a_sweep_has_each_run_at_its_end_and_names_are_escaped(comparison: dd.Sweep) -> None:
    html = comparison._repr_html_()
    assert "4 runs, each at its end" in html and html.count("<tr>") == 5
    assert "<b>mine</b>" not in html and "&lt;b&gt;mine&lt;/b&gt;" in html
    for run in comparison.runs:
        assert f"<td>{run.metrics.objective[-1]:.4g}</td>" in html


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (DIGITS, ["digits: Handwritten digits", "alpha", "0.5", "size of the model", "310"]),
        (dd.Quadratic([[0.0], [6.0]]), ["quadratic", "[[0.0], [6.0]]"]),
        (dd.LocalSteps(DIGITS, k=2, lr=0.1), ["local_steps", "workers"]),
        (dd.FixedSpeeds([1.0, 2.5]), ["fixed: the first 20 jobs", "2.5"]),
        (dd.FixedSpeeds([1.0] * 9), ["… of 9 workers"]),
        (DriftingSpeeds(dd.FixedSpeeds([1.0, 2.0])), ["drifting"]),
        (dd.DuDe(lr=0.05, wait_for=2), ["DuDe", "lr", "0.05", "wait_for", "2", "keeps"]),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_everything_shows_itself_in_the_notebook_s_own_colours(thing: Any, words: list[str]) -> None:
    html = thing._repr_html_()
    assert all(word in cells(html) for word in words), cells(html)
    assert "background" not in html and "color" not in html


def test_data_that_a_function_builds_are_not_built_to_be_shown() -> None:
    def never(worker: int) -> Any:
        raise AssertionError("it was called")

    problem = dd.Network(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, never, 2, workers=3)
    assert "size of the model" in problem._repr_html_() and repr(problem) == "Network(workers=3)"


def test_a_problem_s_repr_has_its_settings() -> None:
    assert repr(DIGITS).startswith("Digits(workers=4, alpha=0.5, seed=None, split='dirichlet'")


def test_workers_of_a_split_by_group_have_their_names(tmp_path: Path) -> None:
    names, rows = ["north"] * 30 + ["south $1"] * 20 + ["west"] * 10, torch.randn(60, 4)
    targets = torch.arange(60) % 3
    problem = dd.Network(
        torch.nn.Linear(4, 3),
        torch.nn.functional.cross_entropy,
        dd.problems.shards((rows, targets), split="group", groups=names),
        4,
    )
    for one in (problem, dd.LocalSteps(problem, 2, 0.1)):
        figure = one.plot_split(tmp_path / "split.png")
        assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["north", "south $1", "west"]

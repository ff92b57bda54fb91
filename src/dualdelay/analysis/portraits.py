"""Pictures of what a run is made of: how data are split over workers, and how long the workers' jobs take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..core import Problem
from ..core.errors import BadInput, require_whole
from ..runs.names import label
from ..runs.seeds import seeded_speeds
from ..simulation.speeds import SpeedModel
from .figures import pyplot, save_figure

_MOST_WORKERS = 60  # beyond which they stand closer, without their numbers
_INK, _FAINT = "#0072B2", "#56B4E9"  # of Okabe and Ito's colours, which nearly everybody can tell apart
_KINDS = ("png", "pdf", "svg")
_LONGEST = 70  # characters of a title


def split_portrait(problem: Problem, path: str | Path | None = None) -> Any:
    """Who has how many samples: a dot for each class and worker, its area the number, under bars of the workers' sizes."""
    sizes = [problem.samples(worker) for worker in range(problem.workers)]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise BadInput(
            f"{type(problem).__name__} does not say how many samples its workers have; there is no split to draw."
        )
    counts = [problem.classes(worker) for worker in range(problem.workers)]
    by_class = [part for part in counts if part is not None]
    names = sorted({name for part in by_class for name in part}, key=_by_number) if len(by_class) == len(counts) else []
    plt, width = pyplot(), min(12.0, 2.6 + 0.34 * problem.workers)
    heights = [1.3, max(1.2, min(7.0, 0.26 * len(names)))] if names else [2.2]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(max(4.0, width), sum(heights) + 1.0), sharex=True, squeeze=False, layout="constrained",
        height_ratios=heights,
    )  # fmt: skip
    places, bars = np.arange(problem.workers), axes[0][0]
    bars.bar(places, known, color=_INK)
    if problem.workers <= 15:
        for place, size in zip(places, known, strict=True):
            bars.annotate(
                f"{size:,}", (place, size), ha="center", va="bottom", fontsize=7, xytext=(0, 1), textcoords="offset points"
            )
        bars.margins(y=0.2)
    bars.set_ylabel("samples", fontsize=9)
    bars.set_title(_fitting(label(problem), int(10 * max(4.0, width))), fontsize=10, parse_math=False)
    if names:
        _draw_classes(axes[1][0], names, by_class)
    _finish(axes[-1][0], places, problem.groups)
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    plt.close(figure)
    return _written(figure, path)


def _draw_classes(axis: Any, names: list[str], by_class: list[Any]) -> None:
    """A dot for each class and worker."""
    grid = np.array([[part.get(name, 0) for part in by_class] for name in names], dtype=float)
    rows, columns = np.nonzero(grid)
    room = 250.0 * min(1.0, 10.0 / len(names), 18.0 / len(by_class))  # area of the largest dot, in square points
    axis.scatter(columns, rows, s=np.maximum(room * grid[rows, columns] / grid.max(), 0.5), color=_INK, linewidths=0)
    axis.set_yticks(np.arange(len(names)), names if len(names) <= 40 else [""] * len(names))
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_ylabel("class", fontsize=9)
    axis.grid(color="#88888840", linewidth=0.5)
    axis.set_axisbelow(True)


def speeds_portrait(speeds: SpeedModel, path: str | Path | None = None, jobs: int = 200, seed: int = 0) -> Any:
    """How long each worker's jobs take: their middle, where half and nine tenths of them lie, and the first on a clock."""
    require_whole("jobs", jobs, 1, 100_000)
    speeds = seeded_speeds(speeds, seed)
    spans = [_first_jobs(speeds, worker, jobs) for worker in range(speeds.n)]
    seconds = np.array([[end - start for start, end in span] for span in spans])
    plt, places = pyplot(), np.arange(speeds.n)
    height = max(1.4, min(7.0, 0.24 * speeds.n)) + 1.0
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.6, height), sharey=True, layout="constrained", width_ratios=(1, 1.3)
    )
    low, first, middle, third, high = np.quantile(seconds, (0.05, 0.25, 0.5, 0.75, 0.95), axis=1)
    left.hlines(places, low, high, color=_FAINT, linewidth=1.5)
    left.hlines(places, first, third, color=_INK, linewidth=4)
    left.plot(middle, places, "o", color=_INK, markersize=4)
    left.set_xlabel("seconds of a job", fontsize=9)
    left.set_title(
        "median; thick: half of the jobs, thin: nine in ten" if (high > low * 1.001).any() else "always the same",
        fontsize=9,
    )
    if seconds.min() > 0 and seconds.max() > 30 * seconds.min():
        left.set_xscale("log")
        _label_decades(left.xaxis, float(high.max() / low.min()))
    else:
        left.set_xlim(left=0.0)
    until = 12 * float(np.median(middle))
    for worker, span in enumerate(spans):
        shown = [(start, min(end, until) - start) for start, end in span if start < until]
        for parity, colour in enumerate((_INK, _FAINT)):
            right.broken_barh(shown[parity::2], (worker - 0.36, 0.72), color=colour, linewidth=0)
    right.set_xlim(0, until)
    right.set_xlabel("time, if nobody waits", fontsize=9)
    right.set_title("each worker's first jobs, by turns dark and light", fontsize=9)
    left.set_ylim(speeds.n - 0.4, -0.6)
    if speeds.n <= _MOST_WORKERS:
        left.set_yticks(places)
    left.set_ylabel("worker", fontsize=9)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(which="both", labelsize=8)
    named = label(speeds)
    title = named if len(named) <= _LONGEST else f"{named.partition('[')[0]}, {speeds.n} workers"  # it may hold every time
    figure.suptitle(title, fontsize=10, parse_math=False)
    plt.close(figure)
    return _written(figure, path)


def _label_decades(axis: Any, ratio: float) -> None:
    """Plain numbers at few places of a logarithmic axis, so that they do not stand on one another."""
    axis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0) if ratio < 100 else (1.0,))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _first_jobs(speeds: SpeedModel, worker: int, jobs: int) -> list[tuple[float, float]]:
    """When a worker's first jobs begin and end, if each begins with the end of the one before."""
    spans, now = [], 0.0
    for draw in range(jobs):
        seconds = speeds.seconds(worker, draw, now)
        if not math.isfinite(seconds):
            raise BadInput(f"worker {worker}'s job number {draw} never ends, so the speeds cannot be drawn.")
        spans.append((now, now + seconds))
        now += seconds
    return spans


def _finish(axis: Any, places: Any, groups: list[list[Any]] | None) -> None:
    """Name the workers: by the groups whose data they have, if data were split by group, and otherwise by numbers."""
    axis.set_xlabel("worker", fontsize=9)
    axis.set_xlim(-0.7, len(places) - 0.3)
    if len(places) > 30:
        return
    axis.set_xticks(places)
    if groups is not None:
        names = [", ".join(map(str, group)) for group in groups]
        names = [name if len(name) <= 24 else f"{name[:21]}..." for name in names]
        axis.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)


def _by_number(name: str) -> tuple[float, str]:
    try:
        return float(name), name
    except ValueError:
        return math.inf, name


def _fitting(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _written(figure: Any, path: str | Path | None) -> Any:
    """The figure, written into a file if one is named."""
    if path is not None:
        path = Path(path)
        if (kind := path.suffix.removeprefix(".")) not in _KINDS:
            raise BadInput(f"path is {str(path)!r}; expected a name that ends with .png, .pdf or .svg.")
        save_figure(figure, path, kind)
    return figure

"""Figures of runs. The only file that imports matplotlib."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..core import Algorithm
from ..core.errors import BadInput, shortened
from ..engine.trace import Column, Table
from ..runs.sweep import Sweep
from ..storage.files import make_folder, write
from ..theory.staleness import Staleness

_SHADES = ("#661100", "#44AA99", "#332288", "#882255", "#AA4499", "#999933")  # of variants and of users' own methods
_VARIANT_MARKS = ("h", "d", "<", ">", "8", "p")
_LINES = ("-", "--", ":", "-.")
_DATED = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}  # by format: the entry that differs between equal files
_MOST_CURVES = 8  # curves in one panel that can be told apart
_MOST_BANDS = 7  # curves in one panel whose bands can be told apart; of more, only the first and vanilla's are drawn
_MOST_ROWS = 6  # settings of one grid that are drawn, a row of panels each
_MOST_INSIDE = 5  # labels that fit beside the curves; a longer legend stands below the panels
_LABEL_LENGTH = 120  # characters of a label that fit into a legend
_DIVERGED = 3.0  # times the start beyond which a curve leaves the panel

Values = Sequence[float] | Column


@dataclass(frozen=True)
class Curve:
    """A line with its band."""

    method: str  # decides the look: "dude", or "dude c=3" for a variant
    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Panel:
    """One of several pairs of axes in a figure."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    steps: bool = False  # whether the horizontal axis is logarithmic, with a tick at each point
    log: str = ""  # which axes are logarithmic: "y", "x" or both
    plain: bool = False  # whether a logarithmic vertical axis has 1, 2, 5 written out, as over a few powers of ten


def look(method: str) -> dict[str, Any]:
    """A method's colour, line and mark, the same in every figure; a variant such as "dude c=3" has its own."""
    name, _, variant = method.partition(" ")
    if not variant:
        kind: Any = ALGORITHMS.get(name, Algorithm)
        line = (0, tuple(map(int, kind.line.split()))) if kind.line[0].isdigit() else kind.line
        width = 2.2 if name == "dude" else 1.4
        return {"color": kind.colour, "linestyle": line, "marker": kind.marker, "linewidth": width}
    number = int("".join(filter(str.isdigit, variant)) or 0) % len(_SHADES)
    return {"color": _SHADES[number], "linestyle": "-", "marker": _VARIANT_MARKS[number], "linewidth": 1.2}


def draw_panels(
    rows: Sequence[Sequence[Panel]], path: Path, caption: str = "", kinds: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Draw rows of panels under one legend and over a caption; if each row shows one quantity, it has one scale."""
    figure = drawn_panels(rows, caption)
    return [_save(figure, path.with_suffix(f".{kind}"), kind) for kind in kinds]


def drawn_panels(rows: Sequence[Sequence[Panel]], caption: str) -> Any:
    """The figure that ``draw_panels`` writes."""
    plt = _pyplot()
    height, width = len(rows), len(rows[0])
    one_quantity = all(panel.ylabel == row[0].ylabel for row in rows for panel in row)
    size, share = (3.5 * width, 2.7 * height + 0.9), "row" if one_quantity else False
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False, layout="constrained", sharey=share)
    lines: dict[str, Any] = {}
    for axes_of_row, row in zip(axes, rows, strict=True):
        for k, (axis, panel) in enumerate(zip(axes_of_row, row, strict=True)):
            for label, line in _draw_panel(axis, panel).items():
                lines.setdefault(label, line)
            axis.set_ylabel("" if k and one_quantity else panel.ylabel, fontsize=9)
    _add_legend(figure, lines, loc="outside upper center", ncols=min(len(lines), 2 * width))
    if caption:
        figure.supxlabel(textwrap.fill(caption, 55 * width), fontsize=8, parse_math=False)
    plt.close(figure)
    return figure


def _draw_panel(axis: Any, panel: Panel) -> dict[str, Any]:
    """Draw a panel and return its lines by label."""
    lines = {}
    for k, curve in enumerate(panel.curves):
        style = look(curve.method)
        every = 1 if panel.steps else (k % 6, 6)
        (lines[curve.label],) = axis.plot(curve.x, curve.y, markersize=4, markevery=every, label=curve.label, **style)
        if curve.low is not None and (len(panel.curves) <= _MOST_BANDS or k == 0 or curve.method == "vanilla"):
            axis.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.13, linewidth=0)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.xlabel, fontsize=9)
    axis.tick_params(which="both", labelsize=8)
    if panel.steps:
        axis.set_xscale("log")
        points = sorted({float(x) for curve in panel.curves for x in curve.x})
        axis.set_xticks(points, [f"{x:g}" for x in points])
        axis.minorticks_off()
    else:
        axis.locator_params(axis="x", nbins=5)
    for name in panel.log:
        axis.set(**{f"{name}scale": "log"})
    if panel.plain:
        _write_out(axis.yaxis)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return lines


def draw_waiting(rows: Sequence[Staleness], path: Path, caption: str) -> Path:
    """Draw delays and throughput against the number of workers that an update waits for."""
    delays = (("tau_max 1", "tau_max", "largest delay (tau_max)"), ("tau_avg 2", "tau_avg", "mean delay (tau_avg)"))
    rates = (("rate 5", "updates_per_second", "updates"), ("rate 0", "arrivals_per_second", "gradients"))
    panels = []
    for title, unit, columns in (("how stale", "delay in updates", delays), ("how many", "per second", rates)):
        counts = [row.wait_for for row in rows]
        curves = [Curve(method, text, counts, [getattr(row, name) for row in rows]) for method, name, text in columns]
        panels.append(Panel(title, "workers per update (wait_for)", unit, curves, steps=True, log="y", plain=True))
    return draw_panels([panels], path, caption, ("png",))[0]


def _write_out(axis: Any, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _add_legend(place: Any, lines: Mapping[str, Any], **options: Any) -> None:
    """Give a figure or its axes a legend whose labels are shown literally: a dollar in one begins no formula."""
    legend = place.legend(lines.values(), lines.keys(), frameon=False, fontsize=9, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise BadInput("figures need matplotlib, which is not installed: pip install 'dualdelay[plots]'.") from None
    return plt


def _save(figure: Any, path: Path, kind: str) -> Path:
    """Write a figure into a folder, which is made if need be, with the same bytes for the same figure."""
    sink = io.BytesIO()
    with _pyplot().rc_context({"svg.hashsalt": "dualdelay"}):  # else the names inside an SVG are random
        figure.savefig(sink, format=kind, dpi=150, metadata={_DATED[kind]: None})
    make_folder(path.parent)
    write(path, sink.getvalue())
    return path


def draw(table: Table, path: str | Path, clock: str = "simulated time") -> Path:
    """Draw the objective and, where there is one, the accuracy against time: the mean over seeds with its range.

    Runs of different problems or speeds, which have columns of those names, are drawn in a row of panels each: their
    objectives are not comparable. The file's ending decides its format: .png, .pdf or .svg.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _DATED:
        raise BadInput(f"{str(path)!r} cannot be drawn; expected a name that ends in .{', .'.join(_DATED)}.")
    return _save(drawn(table, clock), path, kind)


def drawn(table: Table, clock: str) -> Any:
    """The figure that ``draw`` writes."""
    plt = _pyplot()
    columns = [("objective", "objective F (mean over workers)")]
    if np.isfinite(table.accuracy).any():
        columns.append(("accuracy", "accuracy"))
    settings = _settings(table)
    shown = [(setting, rows, _best(table, rows)) for setting, rows in settings[:_MOST_ROWS]]
    labels = list(dict.fromkeys(label for _, _, best in shown for label in best))
    height = 3.8 if len(labels) <= _MOST_INSIDE else 4.2 + 0.1 * len(labels)
    size = (5.2 * len(columns), height + 3.2 * (len(shown) - 1))
    figure, axes = plt.subplots(len(shown), len(columns), figsize=size, squeeze=False, layout="constrained")
    looks, failures = _looks(labels), _failures(table)
    texts = {label: _visible(label) + failures.get(label, "") for label in (*labels, *failures)}
    for axes_of_row, (setting, rows, best) in zip(axes, shown, strict=True):
        for axis, (column, title) in zip(axes_of_row, columns, strict=True):
            _draw_curves(axis, table, rows, column, {label: {**looks[label], "label": texts[label]} for label in best})
            axis.set(xlabel=clock, ylabel=title, title=setting if len(settings) > 1 else "")
            axis.title.set(fontsize=9, parse_math=False)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    for label in failures:
        if label not in table.algorithm:  # all its runs failed: it is in the legend alone
            axes[0][0].plot([], [], label=texts[label], linestyle="none")
    lines = {label: line for axis in axes[:, 0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(labels) <= _MOST_INSIDE:
        _add_legend(axes[0][0], lines)
    else:
        heading = None
        count = max(len(set(table.algorithm[rows].tolist())) for _, rows, _ in shown)
        if len(labels) < count or len(settings) > len(shown):
            more = f", {len(shown)} of {len(settings)} settings" if len(settings) > len(shown) else ""
            heading = f"the {min(len(labels), _MOST_CURVES)} of {count} with the lowest objective at the end{more}"
        _add_legend(figure, lines, loc="outside lower center", ncols=2, title=heading)
    plt.close(figure)
    return figure


def _settings(table: Table) -> list[tuple[str, Column]]:
    """The problems and speeds that a table names, each with the mask of its rows; all rows if it names none."""
    names = [name for name in ("problem", "speeds") if name in table]
    if not names:
        return [("", np.ones(len(table), dtype=bool))]
    texts = np.array([", ".join(map(str, values)) for values in zip(*(table[name] for name in names), strict=True)])
    return [(text, texts == text) for text in dict.fromkeys(texts.tolist())]


def _by_seed(table: Table, rows: Column, label: str, column: str) -> list[tuple[Column, Column]]:
    """The times and values of one column for each seed of a method."""
    rows = rows & (table.algorithm == label)
    by_seed = [rows & (table.seed == seed) for seed in dict.fromkeys(table.seed[rows].tolist())]
    return [(table.time[rows], table[column][rows]) for rows in by_seed]


def _best(table: Table, rows: Column) -> list[str]:
    """The labels of the curves to draw: all, or of many those lowest at the end in the mean over seeds."""
    final = {}
    for label in dict.fromkeys(table.algorithm[rows].tolist()):
        ends = [values[-1] for _, values in _by_seed(table, rows, label, "objective")]
        final[label] = float(np.mean(ends)) if np.isfinite(ends).all() else math.inf
    best = sorted(final, key=lambda label: final[label])[:_MOST_CURVES]
    return [label for label in final if label in best]


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for each label: its method's colour, and another kind of line for each further variant of the method."""
    looks: dict[str, dict[str, Any]] = {}
    variants: Counter[str] = Counter()
    known = {name: kind.colour for name, kind in ALGORITHMS.items() if kind.colour != Algorithm.colour}
    colours = defaultdict(itertools.cycle(_SHADES).__next__, known)  # methods without a colour have the shades in turn
    for label in labels:
        name = label.partition("[")[0]
        again, line = divmod(variants[name], len(_LINES))
        looks[label] = {"color": colours[name], "linestyle": _LINES[line], "linewidth": 1.0 if again else 1.8}
        variants[name] += 1
    return looks


def _visible(label: str) -> str:
    """A label that matplotlib shows and has room for: it hides those that begin with an underscore."""
    text = f" {label}" if label.startswith("_") else label
    return text if len(text) <= _LABEL_LENGTH else shortened(text, _LABEL_LENGTH // 3)


def _failures(table: Table) -> dict[str, str]:
    """What follows the label of each method some of whose runs failed: its curve is that of the others."""
    if not isinstance(table, Sweep):
        return {}
    labels = [str(names["algorithm"]) for names in table.points]
    failed = Counter(labels[k] for k in table.failed)
    return {label: f" ({count} of {labels.count(label)} runs failed)" for label, count in failed.items()}


def _draw_curves(axis: Any, table: Table, rows: Column, column: str, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw one column of these rows, a curve for each label in ``styles``."""
    low, high = math.inf, -math.inf  # of what is drawn; a curve that diverges is followed a little way only
    for label, style in styles.items():
        curves = _by_seed(table, rows, label, column)
        grid = np.unique(np.concatenate([times for times, _ in curves]))
        grid = grid[grid <= min(times[-1] for times, _ in curves)]
        # between two evaluations the model of the earlier one stands
        values = np.stack([c[np.searchsorted(t, grid, side="right") - 1] for t, c in curves])
        axis.plot(grid, values.mean(0), **style)
        if len(curves) > 1:
            axis.fill_between(grid, values.min(0), values.max(0), color=style["color"], alpha=0.15, linewidth=0)
        finite = values[np.isfinite(values)]
        if len(finite):
            most = _DIVERGED * abs(float(values[0, 0])) if column == "objective" else math.inf
            low, high = min(low, float(finite.min())), max(high, min(float(finite.max()), most))
    if column != "objective" or not low < high:
        return
    if low > 0 and high / low > 5:  # over less a logarithmic axis has too few labels
        axis.set_yscale("log")
        _write_out(axis.yaxis, (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,))
        axis.set_ylim(low / 1.15, high * 1.15)
    else:
        axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))

"""Figures of runs. The only file that imports matplotlib."""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..core import Algorithm
from ..core.errors import BadInput, nearest, require_one_of, shortened
from ..core.version import install_command
from ..engine.metrics import NAMES, metric_and_way
from ..engine.statistics import margin
from ..engine.table import Column, Table
from ..runs.names import known
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
_MOST_ACROSS = 3  # panels side by side that show one quantity
_BANDS = ("range", "std", "interval", "none")
_AXES = {"objective": "objective F (mean over workers)", "version": "server updates"}  # what stands at an axis, by column
DIVERGED = 3.0  # times the start beyond which a curve leaves the panel

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
    return [save_figure(figure, path.with_suffix(f".{kind}"), kind) for kind in kinds]


def drawn_panels(rows: Sequence[Sequence[Panel]], caption: str) -> Any:
    """The figure that ``draw_panels`` writes."""
    plt = pyplot()
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


def pyplot() -> Any:
    """matplotlib's pyplot, if it is installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise BadInput(f"figures need matplotlib, which is not installed: {install_command('matplotlib')}.") from None
    return plt


def save_figure(figure: Any, path: Path, kind: str) -> Path:
    """Write a figure into a folder, which is made if need be, with the same bytes for the same figure."""
    sink = io.BytesIO()
    with pyplot().rc_context({"svg.hashsalt": "dualdelay"}):  # else the names inside an SVG are random
        figure.savefig(sink, format=kind, dpi=150, metadata={_DATED[kind]: None})
    make_folder(path.parent)
    write(path, sink.getvalue())
    return path


def draw(table: Table, path: str | Path, clock: str = "simulated time", *, kind: str | None = None, **options: Any) -> Path:
    """Draw the curves of a table of runs into a file; the options are those of ``drawn``.

    The file's ending decides its format, .png, .pdf or .svg, unless ``kind`` does.
    """
    path, kind = _place(path, kind)
    return save_figure(drawn(table, clock, **options), path, kind)


def plotted(table: Table, path: str | Path | None = None, *, kind: str | None = None, **options: Any) -> Any:
    """The figure of a table's curves, which a notebook shows; written into a file if one is named."""
    place = None if path is None else _place(path, kind)
    figure = drawn(table, **options)
    if place is not None:
        save_figure(figure, *place)
    return figure


def _place(path: str | Path, kind: str | None) -> tuple[Path, str]:
    """A figure's file and its format."""
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower() if kind is None else kind
    if kind not in _DATED:
        raise BadInput(f"{str(path)!r} cannot be drawn; expected a name that ends in .{', .'.join(_DATED)}.")
    return path, kind


def drawn(
    table: Table,
    clock: str = "simulated time",
    *,
    metrics: str | Sequence[str] | None = None,
    x: str = "time",
    by: str | None = None,
    panels: str | Sequence[str] | None = None,
    bands: str = "range",
    labels: Mapping[str, str] | None = None,
    log: str | None = None,
    size: tuple[float, float] | None = None,
) -> Any:
    """The figure of a table of runs: the mean over seeds of each metric, with a band that shows how the seeds differ.

    Arguments:
        clock: what stands below the axis of time.
        metrics: the columns to draw; by default the objective, the accuracy where there is one, and a sweep's own metrics.
        x: the column along the horizontal axis: time, version, or any other that grows.
        by: the column that names a curve; by default algorithm, or method if there is none. Of more than eight those
            are drawn that end best.
        panels: the columns whose values have panels of their own; by default problem and speeds, since objectives of
            different ones are not comparable. Panels of one problem have one scale.
        bands: "range" (from the lowest to the highest seed), "std" (one standard deviation on both sides), "interval"
            (Student's 95 % interval of the mean) or "none".
        labels: other texts for curves in the legend, by their names.
        log: the logarithmic axes, "y", "x", "xy" or ""; by default the objective's if it spans more than a factor of five.
        size: width and height in inches.
    """
    require_one_of("bands", bands, _BANDS)
    require_one_of("log", log, (None, "", "x", "y", "xy"))
    plt = pyplot()
    chart = _Chart.of(table, x, by, panels)
    columns = [metrics] if isinstance(metrics, str) else list(metrics or ("objective",))
    if metrics is None:
        columns += [name for name in ("accuracy", *_own_metrics(table)) if name in table and np.isfinite(table[name]).any()]
    for name in (x, *columns):
        if name not in table or table[name].dtype.kind not in "fiu":
            raise BadInput(f"there is no column of numbers {name!r} to draw; {nearest(name, table)}")
    rank = "objective" if "objective" in table else columns[0]
    shown = [(setting, chart.best(setting, rank)) for setting in chart.settings[:_MOST_ROWS]]
    drawn_labels = list(dict.fromkeys(label for _, best in shown for label in best))
    across = len(columns) if len(columns) > 1 else min(len(shown), _MOST_ACROSS)
    down = len(shown) if len(columns) > 1 else math.ceil(len(shown) / across)
    height = 3.8 if len(drawn_labels) <= _MOST_INSIDE else 4.2 + 0.1 * len(drawn_labels)
    inches = size or (5.2 * across, height + 3.2 * (down - 1))
    shared = chart.shares_scale and ("col" if len(columns) > 1 else "all")
    figure, grid = plt.subplots(down, across, figsize=inches, squeeze=False, layout="constrained", sharey=shared)
    axes = list(grid.flat)
    spans: dict[Any, _Span] = {}  # of what the panels with one scale show
    looks, failures = _looks(drawn_labels, _own_classes(table)), chart.failures()
    texts = {label: _visible((labels or {}).get(label, label)) for label in (*drawn_labels, *failures)}
    texts = {label: text + failures.get(label, "") for label, text in texts.items()}
    for (setting, best), column in itertools.product(shown, columns):
        axis = axes.pop(0)
        styles = {label: {**looks[label], "label": texts[label]} for label in best}
        span = spans.setdefault(column if chart.shares_scale else axis, _Span(column))
        _draw_curves(axis, chart, setting, column, styles, bands, span)
        span.axes.append(axis)
        axis.set(xlabel=clock if x == "time" else _AXES.get(x, x), ylabel=_AXES.get(column, column.replace("_", " ")))
        axis.set_title(setting if len(chart.settings) > 1 else "", fontsize=9, parse_math=False)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes:  # those that are left over
        figure.delaxes(axis)
    for span in spans.values():
        span.scale(log)
    for label in failures:
        if label not in chart.ended:  # all its runs failed: it is in the legend alone
            figure.axes[-1].plot([], [], label=texts[label], linestyle="none")
    lines = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(drawn_labels) <= _MOST_INSIDE:
        if lines:  # matplotlib has none for one curve without a name
            _add_legend(grid[0][0], lines)
    else:
        heading = None
        count = max(len(chart.curves[setting]) for setting, _ in shown)
        if len(drawn_labels) < count or len(chart.settings) > len(shown):
            more = f", {len(shown)} of {len(chart.settings)} settings" if len(chart.settings) > len(shown) else ""
            which = f"{'highest' if _larger(rank) else 'lowest'} {rank}"
            heading = f"the {min(len(drawn_labels), _MOST_CURVES)} of {count} with the {which} at the end{more}"
        _add_legend(figure, lines, loc="outside lower center", ncols=2, title=heading)
    plt.close(figure)
    return figure


def _larger(metric: str) -> bool:
    """Whether more of a metric is better."""
    return metric_and_way("the first of metrics", metric)[1] == "max"


@dataclass(frozen=True)
class _Chart:
    """The rows of each run of a table by what a figure shows: panel, curve and seed."""

    table: Table
    x: str
    by: str | None
    curves: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]  # by the panel's title and the curve's name, for each seed
    shares_scale: bool  # whether all panels are of one problem

    @classmethod
    def of(cls, table: Table, x: str, by: str | None, panels: str | Sequence[str] | None) -> _Chart:
        """Those of a table, whose rows are put into the order of ``x``."""
        by = next((name for name in ("algorithm", "method") if name in table), None) if by is None else by
        apart = [panels] if isinstance(panels, str) else list(panels or ())
        if panels is None:
            apart = [name for name in ("problem", "speeds") if name in table]
        names = [*apart, *([by] if by else []), *(["seed"] if "seed" in table else [])]
        curves: dict[str, dict[str, list[list[int]]]] = {}
        for key, rows in table.rows_of_runs(names).items():
            if rows and x in table:
                title = ", ".join(_panel_text(name, value) for name, value in zip(apart, key, strict=False))
                label = str(key[len(apart)]) if by else ""
                curves.setdefault(title, {}).setdefault(label, []).append(sorted(rows, key=table[x].__getitem__))
        return cls(table, x, by, curves, "problem" not in apart)

    @property
    def settings(self) -> list[str]:
        """The titles of the panels."""
        return list(self.curves) or [""]

    @property
    def ended(self) -> set[str]:
        """The names of the curves with at least one run that ended."""
        return {label for some in self.curves.values() for label in some}

    def best(self, setting: str, column: str) -> list[str]:
        """The names of the curves to draw: all, or of many those best at the end in the mean over seeds."""
        curves = self.curves.get(setting, {})
        if len(curves) <= _MOST_CURVES:
            return list(curves)
        sign, final = -1.0 if _larger(column) else 1.0, {}
        for label, runs in curves.items():
            ends = sign * self.table[column][[rows[-1] for rows in runs]]
            final[label] = float(np.mean(ends)) if np.isfinite(ends).all() else math.inf
        best = sorted(final, key=lambda label: final[label])[:_MOST_CURVES]
        return [label for label in final if label in best]

    def failures(self) -> dict[str, str]:
        """What follows the name of each curve some of whose runs failed: it is that of the others."""
        failed = Counter(str(run[self.by]) for run in self.table.absent if self.by in run)
        runs = Counter({label: sum(len(some.get(label, ())) for some in self.curves.values()) for label in failed})
        return {label: f" ({count} of {count + runs[label]} runs failed)" for label, count in failed.items()}

    def values(self, setting: str, label: str, column: str) -> tuple[Column, Column]:
        """A curve's points along the horizontal axis, and a row of values for each seed, up to the end of the shortest."""
        runs = [(self.table[self.x][rows], self.table[column][rows]) for rows in self.curves[setting][label]]
        grid = np.unique(np.concatenate([along for along, _ in runs]))
        grid = grid[grid <= min(along[-1] for along, _ in runs)]
        # between two evaluations the model of the earlier one stands
        rows = [np.maximum(np.searchsorted(along, grid, side="right") - 1, 0) for along, _ in runs]
        return grid, np.stack([values[at] for at, (_, values) in zip(rows, runs, strict=True)])


def _panel_text(name: str, value: Any) -> str:
    """A panel's title: a text as it is, and a number with its column's name."""
    return str(value) if isinstance(value, str) else f"{name} = {value:g}"


def _looks(labels: Sequence[str], own: Mapping[str, type] | None = None) -> dict[str, dict[str, Any]]:
    """A look for each label: its method's colour, and another kind of line for each further variant of the method.

    ``own`` has the classes of those methods of the user's own that no name finds, by their labels.
    """
    looks: dict[str, dict[str, Any]] = {}
    variants: Counter[object] = Counter()
    colours: dict[object, str] = {}
    shades = itertools.cycle(_SHADES)  # which methods without a colour have in turn
    for label in labels:
        name = label.partition("[")[0]
        kind = (own or {}).get(label) or known("algorithm", name)
        method = name if kind is None else kind
        if method not in colours:
            colours[method] = colour_of(kind) or next(shades)
        again, line = divmod(variants[method], len(_LINES))
        looks[label] = {"color": colours[method], "linestyle": _LINES[line], "linewidth": 1.0 if again else 1.8}
        variants[method] += 1
    return looks


def colour_of(kind: Any) -> str | None:
    """The colour that a method's class was given; None if it has none that pages and figures can draw."""
    colour = getattr(kind, "colour", Algorithm.colour)
    is_one = isinstance(colour, str) and re.fullmatch("#[0-9A-Fa-f]{6}", colour) is not None
    return colour if is_one and colour != Algorithm.colour else None


def _own_classes(table: Table) -> dict[str, type]:
    """The classes of the user's own among the methods of a table that has its runs, by the labels of their curves."""
    found: dict[str, type] = {}
    if isinstance(table, Sweep):
        for names, run in zip(table.points, table.runs, strict=True):
            if run is not None and run.algorithm is not None and type(run.algorithm) not in ALGORITHMS.values():
                text = str(names.get("algorithm", ""))
                found |= {text: type(run.algorithm), text.partition("[")[0]: type(run.algorithm)}
    return found


def _own_metrics(table: Table) -> list[str]:
    """The metrics of the user's own that a table of runs has."""
    if not isinstance(table, Sweep):  # of another table nobody knows which columns are metrics
        return []
    return [name for name in table if name not in (*NAMES, *table.names) and table[name].dtype.kind in "fiu"]


def _visible(label: str) -> str:
    """A label that matplotlib shows and has room for: it hides those that begin with an underscore."""
    text = f" {label}" if label.startswith("_") else label
    return text if len(text) <= _LABEL_LENGTH else shortened(text, _LABEL_LENGTH // 3)


@dataclass
class _Span:
    """From where to where the curves of panels with one scale go, and their bands."""

    column: str
    axes: list[Any] = field(default_factory=list)
    low: float = math.inf  # of the curves; one that diverges is followed a little way only
    high: float = -math.inf
    least: float = math.inf  # above zero
    bands: list[tuple[Any, Column, Column, Column, str]] = field(default_factory=list)  # axis, x, edges, colour

    def see(self, values: Column) -> None:
        """Make room for the values of a curve, a row for each seed."""
        finite = values[np.isfinite(values)]
        if len(finite):
            most = DIVERGED * abs(float(values[0, 0])) if self.column == "objective" else math.inf
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, min(float(finite.max()), most))
            self.least = min([self.least, *finite[finite > 0].tolist()])

    def scale(self, log: str | None) -> None:
        """Draw the bands and set the axes: as far as the curves go, and the bands where they do not go much further."""
        ratio = self.high / self.low if 0 < self.low < self.high else 1.0
        logarithmic = self.column == "objective" and ratio > 5 if log is None else "y" in log  # over less: too few labels
        low = self.least if logarithmic else self.low
        room = 1.5 if logarithmic else 0.5 * (self.high - self.low)
        lowest, highest = (low / room, self.high * room) if logarithmic else (low - room, self.high + room)
        edges = [low, self.high]
        for axis, x, below, above, colour in self.bands:
            if logarithmic:  # where there is no zero to go to
                below, above = np.clip(below, lowest, None), np.clip(above, lowest, None)
            axis.fill_between(x, below, above, color=colour, alpha=0.15, linewidth=0)
            edges += [edge for edge in (*below.tolist(), *above.tolist()) if math.isfinite(edge)]
        low, high = max(min(edges), lowest), min(max(edges), highest)
        for axis in self.axes:
            for name in log or "":
                axis.set(**{f"{name}scale": "log"})
            if "x" in (log or ""):
                _write_out(axis.xaxis)
            if logarithmic:
                axis.set_yscale("log")
                _label_log(axis.yaxis, high / low if 0 < low < high else math.inf)
        if not low < high:
            return
        margin = 0.05 * (high - low)
        for axis in self.axes:
            if logarithmic and low > 0:
                axis.set_ylim(low / 1.15, high * 1.15)
            elif not logarithmic and self.column == "objective":
                axis.set_ylim(low - margin, high + margin)


def _label_log(axis: Any, ratio: float) -> None:
    """Label a logarithmic axis that spans such a ratio, with several numbers also where it is small."""
    from matplotlib import ticker

    _write_out(axis, (1.0, 2.0, 3.0, 5.0, 7.0) if ratio < 30 else (1.0, 2.0, 5.0) if ratio < 1000 else (1.0,))
    if ratio < 4:
        axis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        axis.set_minor_locator(ticker.NullLocator())


def _draw_curves(
    axis: Any,
    chart: _Chart,
    setting: str,
    column: str,
    styles: Mapping[str, Mapping[str, Any]],
    bands: str,
    span: _Span,
) -> None:
    """Draw one column in one panel, a curve for each label in ``styles``."""
    for label, style in styles.items():
        grid, values = chart.values(setting, label, column)
        axis.plot(grid, values.mean(0), **style)
        if len(values) > 1 and bands != "none":
            span.bands.append((axis, grid, *band(values, bands), style["color"]))
        span.see(values)


def band(values: Column, kind: str) -> tuple[Column, Column]:
    """The lower and the upper edge of a band of some kind, from a row of values for each seed; of one seed its curve."""
    if kind == "range" or len(values) == 1:
        return values.min(0), values.max(0)
    mean, half = values.mean(0), values.std(0, ddof=1) * (margin(len(values)) if kind == "interval" else 1.0)
    return mean - half, mean + half

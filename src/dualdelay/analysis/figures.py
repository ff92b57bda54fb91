"""Pictures of runs. The only file that imports matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BadInput, shortened
from ..engine.trace import Table
from ..storage.files import make_folder, write

# A method's colour, line and mark, the same everywhere. The first seven colours are Okabe and Ito's, told apart by people
# with any kind of colour vision; with so many methods lines and marks have to help.
_LOOKS: dict[str, tuple[str, Any, str]] = {
    "dude": ("#0072B2", "-", "o"),
    "auto": ("#332288", "-", "^"),
    "vanilla": ("#D55E00", "--", "s"),
    "sync": ("#000000", ":", "X"),
    "fedbuff": ("#009E73", "-.", "D"),
    "mifa": ("#CC79A7", (0, (1, 1)), "P"),
    "uniform": ("#E69F00", (0, (5, 1, 1, 1)), "^"),
    "shuffled": ("#56B4E9", (0, (3, 1, 1, 1, 1, 1)), "v"),
    "siag": ("#8C6D31", (0, (8, 2)), "*"),
    "rescaled": ("#AA3377", "--", "d"),
    "malenia": ("#B8A000", "-.", "p"),
    "ringleader": ("#228833", (0, (5, 1)), "h"),
    "ca2fl": ("#33A9D0", (0, (3, 1)), "<"),
    "aced": ("#EE6677", ":", ">"),
    "sync_by_speed": ("#555555", (0, (1, 2)), "X"),
    "rennala": ("#882255", "-.", "8"),
    "ringmaster": ("#44AA99", "--", "D"),
    "delay_adaptive": ("#999933", ":", "s"),
    "generalized": ("#DDAA33", (0, (5, 1, 1, 1)), "^"),
    "fedasync": ("#BB5566", "--", "v"),
    "fedfix": ("#004488", "-.", "P"),
    "iag": ("#A0522D", (0, (8, 2)), "*"),
    "sag": ("#6A3D9A", (0, (3, 1)), "h"),
    "saga": ("#1B7E57", (0, (5, 1)), "p"),
    "fadas": ("#E7298A", ":", "d"),
}
COLOURS = {name: colour for name, (colour, _, _) in _LOOKS.items()}
_OTHER = "#7F7F7F"
_STYLES = ("-", "--", ":", "-.")
_MOST = 8  # curves in one panel that can be told apart
_LABEL = 120  # characters of a label for which there is room
_INSIDE = 5  # labels for which there is room beside the curves


@dataclass(frozen=True)
class Curve:
    """A line with its band."""

    method: str  # decides the look: "dude", or "dude c=3" for a variant
    label: str
    x: Any
    y: Any
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class Panel:
    """One picture of a figure of many."""

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[Curve]
    steps: bool = False  # whether the horizontal axis is of the points themselves, on a logarithmic scale
    log: str = ""  # which axes are logarithmic: "y", "x" or both
    plain: bool = False  # whether a logarithmic vertical axis has 1, 2, 5 written out, as over a few powers of ten


_SHADES = ("#661100", "#44AA99", "#332288", "#882255", "#AA4499", "#999933")  # of variants, by their number
_OTHER_MARKS = ("h", "d", "<", ">", "8", "p")
_BANDS = 7  # curves in one panel whose bands can be told apart; of more only the first and vanilla's are shown


def look(method: str) -> dict[str, Any]:
    """A method's colour, line and mark, the same in every figure; a variant such as "dude c=3" has its own."""
    name, _, variant = method.partition(" ")
    if not variant:
        colour, line, mark = _LOOKS.get(name, (_OTHER, "-", "."))
        return {"color": colour, "linestyle": line, "marker": mark, "linewidth": 2.2 if name == "dude" else 1.4}
    number = int("".join(filter(str.isdigit, variant)) or 0) % len(_SHADES)
    return {"color": _SHADES[number], "linestyle": "-", "marker": _OTHER_MARKS[number], "linewidth": 1.2}


def draw_panels(
    rows: Sequence[Sequence[Panel]], path: Path, caption: str = "", kinds: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    """Panels in rows under one legend and over a caption, as PNG and PDF; a row of one quantity has one scale."""
    plt = _pyplot()
    tall, broad = len(rows), len(rows[0])
    same = all(panel.ylabel == row[0].ylabel for row in rows for panel in row)
    size, share = (3.5 * broad, 2.7 * tall + 0.9), "row" if same else False
    figure, axes = plt.subplots(tall, broad, figsize=size, squeeze=False, layout="constrained", sharey=share)
    shown: dict[str, Any] = {}
    for line, panels in zip(axes, rows, strict=True):
        for k, (axis, panel) in enumerate(zip(line, panels, strict=True)):
            shown |= {label: drawn for label, drawn in _fill(axis, panel).items() if label not in shown}
            axis.set_ylabel("" if k and same else panel.ylabel, fontsize=9)
    columns = min(len(shown), max(2, 2 * broad))
    placed = {"loc": "outside upper center", "ncols": columns, "frameon": False, "fontsize": 9}
    _literally(figure.legend(shown.values(), shown.keys(), **placed))
    if caption:
        figure.supxlabel(textwrap.fill(caption, 55 * broad), fontsize=8, parse_math=False)
    made = [_saved(figure, path.with_suffix(f".{kind}"), kind) for kind in kinds]
    plt.close(figure)
    return made


def draw_waiting(table: Table, path: Path, caption: str) -> Path:
    """Delays and throughput against the number of workers that an update waits for."""
    named = (("tau_max 1", "tau_max", "largest delay (tau_max)"), ("tau_avg 2", "tau_avg", "mean delay (tau_avg)"))
    rates = (("rate 5", "updates_per_second", "updates"), ("rate 0", "arrivals_per_second", "gradients"))
    panels = []
    for title, unit, curves in (("how stale", "delay in updates", named), ("how many", "per second", rates)):
        made = [Curve(method, text, table.wait_for, table[name]) for method, name, text in curves]
        panels.append(Panel(title, "workers per update (wait_for)", unit, made, steps=True, log="y", plain=True))
    return draw_panels([panels], path, caption, ("png",))[0]


def _fill(axis: Any, panel: Panel) -> dict[str, Any]:
    """Draw a panel; its lines by label."""
    drawn = {}
    for k, curve in enumerate(panel.curves):
        style = look(curve.method)
        every = 1 if panel.steps else (k % 6, 6)
        (drawn[curve.label],) = axis.plot(curve.x, curve.y, markersize=4, markevery=every, label=curve.label, **style)
        if curve.low is not None and (len(panel.curves) <= _BANDS or k == 0 or curve.method == "vanilla"):
            axis.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.13, linewidth=0)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.xlabel, fontsize=9)
    axis.tick_params(labelsize=8)
    if panel.steps:
        axis.set_xscale("log")
        points = sorted({float(x) for curve in panel.curves for x in curve.x})
        axis.set_xticks(points, [f"{x:g}" for x in points])
        axis.minorticks_off()
    else:
        axis.locator_params(axis="x", nbins=5)
    for name in panel.log:
        axis.set(**{f"{name}scale": "log"})
        axis.tick_params(which="both", labelsize=8)
    if panel.plain:
        _write_out(axis.yaxis)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return drawn


def _write_out(axis: Any, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _literally(legend: Any) -> None:
    """Show the texts of a legend as they are: a dollar in a label begins no formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _visible(label: str) -> str:
    """A label that matplotlib shows, and has room for: it hides those that begin with an underscore."""
    told = f" {label}" if label.startswith("_") else label
    return told if len(told) <= _LABEL else shortened(told, _LABEL // 3)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise BadInput("figures need matplotlib, which is not installed: pip install 'dualdelay[plots]'.") from None
    return plt


def _saved(figure: Any, path: Path, kind: str) -> Path:
    """Write a figure whole, with the same bytes for the same picture."""
    sink, undated = io.BytesIO(), {"png": "Software", "pdf": "CreationDate", "svg": "Date"}[kind]
    with _pyplot().rc_context({"svg.hashsalt": "dualdelay"}):  # else the names inside an SVG are drawn anew
        figure.savefig(sink, format=kind, dpi=150, metadata={undated: None})
    write(path, sink.getvalue())
    return path


def style(label: str, seen: dict[str, int]) -> dict[str, Any]:
    """A curve's look: the method's colour, and another kind of line for each further variant of it."""
    name = label.partition("[")[0]
    seen[name] = seen.get(name, -1) + 1
    again, kind = divmod(seen[name], len(_STYLES))
    own = [other for other in seen if other not in COLOURS]  # methods and names of the user's, in their order
    colour = COLOURS[name] if name in COLOURS else _SHADES[own.index(name) % len(_SHADES)]
    return {"color": colour, "linestyle": _STYLES[kind], "linewidth": 1.0 if again else 1.8}


_KINDS = ("png", "pdf", "svg")
_ROWS = 6  # settings of one grid that are drawn, a row of panels each
_DIVERGED = 3.0  # times the start beyond which a curve is not followed


def draw(table: Table, path: str | Path, clock: str = "simulated time") -> Path:
    """The objective and, where there is one, the accuracy against time: the mean over seeds with its range.

    Runs of different problems or speeds, which have columns of those names, are drawn in a row of panels each: their
    objectives are not to be compared. The file's ending says how it is written: .png, .pdf or .svg.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _KINDS:
        raise BadInput(f"{str(path)!r} cannot be drawn; expected a name that ends in {', '.join(f'.{k}' for k in _KINDS)}.")
    make_folder(path.parent)
    return _saved(drawn(table, clock), path, kind)


def drawn(table: Table, clock: str) -> Any:
    """The figure that ``draw`` writes."""
    plt = _pyplot()
    columns = [("objective", "objective F (mean over workers)")]
    if any(math.isfinite(value) for value in table.accuracy):
        columns.append(("accuracy", "accuracy"))
    settings = _settings(table)
    shown = [(text, rows, _best(table, rows)) for text, rows in settings[:_ROWS]]
    count = max(len({*table.algorithm[rows].tolist()}) for _, rows, _ in shown)
    labels = list(dict.fromkeys(label for _, _, best in shown for label in best))
    tall = 3.8 if len(labels) <= _INSIDE else 4.2 + 0.1 * len(labels)
    size = (5.2 * len(columns), tall + 3.2 * (len(shown) - 1))
    figure, axes = plt.subplots(len(shown), len(columns), figsize=size, squeeze=False, layout="constrained")
    looks, failed = _looks(labels), _failed(table)
    for line, (text, rows, best) in zip(axes, shown, strict=True):
        for axis, (column, title) in zip(line, columns, strict=True):
            _draw_curves(axis, table, rows, best, column, looks, failed)
            axis.set(xlabel=clock, ylabel=title, title=text if len(settings) > 1 else "")
            axis.title.set(fontsize=9, parse_math=False)
            axis.grid(alpha=0.3)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    for label, words in failed.items():
        if label not in table.algorithm:
            axes[0][0].plot([], [], label=f"{_visible(label)}{words}", linestyle="none")
    handles = {label: line for axis in axes[:, 0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(labels) <= _INSIDE:
        _literally(axes[0][0].legend(handles.values(), handles.keys(), frameon=False, fontsize=9))
    else:
        heading = None
        if len(labels) < count or len(settings) > len(shown):
            more = f", {len(shown)} of {len(settings)} settings" if len(settings) > len(shown) else ""
            heading = f"the {min(len(labels), _MOST)} of {count} with the lowest objective at the end{more}"
        placed = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 9, "title": heading}
        _literally(figure.legend(handles.values(), handles.keys(), **placed))
    plt.close(figure)
    return figure


def _settings(table: Table) -> list[tuple[str, Any]]:
    """The problems and speeds of a table, each with its rows; one of all rows if it does not name any."""
    names = [name for name in ("problem", "speeds") if name in table]
    texts = np.array([", ".join(map(str, one)) for one in zip(*(table[name] for name in names), strict=True)] or [""])
    return [(str(text), texts == text) for text in dict.fromkeys(texts.tolist())] if names else [("", slice(None))]


def _by_seed(table: Table, rows: Any, label: str, column: str) -> list[tuple[Any, Any]]:
    """A method's curves of one column, one for each seed: times and values."""
    mine = np.zeros(len(table), dtype=bool)
    mine[rows] = True
    mine &= table.algorithm == label
    seeds = dict.fromkeys(table.seed[mine].tolist())
    return [(table.time[mine & (table.seed == s)], table[column][mine & (table.seed == s)]) for s in seeds]


def _best(table: Table, rows: Any) -> list[str]:
    """The labels of the curves to draw: all, or of many those lowest at the end in the mean over seeds."""
    labels = list(dict.fromkeys(table.algorithm[rows].tolist()))
    final = {}
    for label in labels:
        ends = [values[-1] for _, values in _by_seed(table, rows, label, "objective")]
        final[label] = float(np.mean(ends)) if np.isfinite(ends).all() else math.inf
    best = sorted(labels, key=lambda label: final[label])[:_MOST]
    return [label for label in labels if label in best]


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    seen: dict[str, int] = {}
    return {label: style(label, seen) for label in labels}


def _failed(table: Table) -> dict[str, str]:
    """What to write behind the label of a method some of whose runs failed, and which is drawn without those."""
    points, failed = getattr(table, "points", []), getattr(table, "failed", {})
    labels = [str(names["algorithm"]) for names in points]
    lost = Counter(labels[k] for k in failed)
    return {label: f" ({count} of {labels.count(label)} runs failed)" for label, count in lost.items()}


def _draw_curves(
    axis: Any,
    table: Table,
    rows: Any,
    labels: Sequence[str],
    column: str,
    looks: Mapping[str, Any],
    failed: Mapping[str, str],
) -> None:
    low, high = math.inf, -math.inf  # of what is drawn; a curve that runs away is followed a little way only
    for label in labels:
        curves = _by_seed(table, rows, label, column)
        grid = np.unique(np.concatenate([times for times, _ in curves]))
        grid = grid[grid <= min(times[-1] for times, _ in curves)]
        # between two evaluations the model of the earlier one stands
        values = np.stack([c[np.searchsorted(t, grid, side="right") - 1] for t, c in curves])
        axis.plot(grid, values.mean(0), label=f"{_visible(label)}{failed.get(label, '')}", **looks[label])
        if len(curves) > 1:
            axis.fill_between(grid, values.min(0), values.max(0), color=looks[label]["color"], alpha=0.15, linewidth=0)
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

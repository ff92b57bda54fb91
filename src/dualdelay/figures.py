"""Pictures of runs. The only file that imports matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from .errors import BadInput
from .files import write
from .trace import Table

# Okabe and Ito's colours, told apart by people with any kind of colour vision; a method has the same one everywhere.
COLOURS = {
    "dude": "#0072B2",
    "vanilla": "#D55E00",
    "sync": "#000000",
    "fedbuff": "#009E73",
    "mifa": "#CC79A7",
    "uniform": "#E69F00",
    "shuffled": "#56B4E9",
    "siag": "#8C6D31",
}
_OTHER = "#7F7F7F"
_STYLES = ("-", "--", ":", "-.")
_MOST = 8  # curves in one panel that can be told apart
_INSIDE = 5  # labels for which there is room beside the curves


def style(label: str, seen: dict[str, int]) -> dict[str, Any]:
    """A curve's look: the method's colour, and another kind of line for each further variant of it."""
    name = label.partition("[")[0]
    seen[name] = seen.get(name, -1) + 1
    again, kind = divmod(seen[name], len(_STYLES))
    return {"color": COLOURS.get(name, _OTHER), "linestyle": _STYLES[kind], "linewidth": 1.0 if again else 1.8}


def _best(table: Table) -> list[str]:
    """The labels of the curves to draw: all, or of many those with the lowest objective at the end."""
    labels = list(dict.fromkeys(table.algorithm.tolist()))
    final = {label: float(np.nan_to_num(table.objective[table.algorithm == label][-1], nan=np.inf)) for label in labels}
    best = sorted(labels, key=lambda label: final[label])[:_MOST]
    return [label for label in labels if label in best]


def draw(table: Table, path: Path, clock: str = "simulated time") -> Path:
    """The objective and, where there is one, the accuracy against time: the mean over seeds with its range."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib import ticker
    except ImportError:
        raise BadInput("figures need matplotlib, which is not installed: pip install 'dualdelay[plots]'.") from None
    columns = [("objective", "objective F (mean over workers)")]
    if any(math.isfinite(value) for value in table.accuracy):
        columns.append(("accuracy", "test accuracy"))
    labels, count = _best(table), len(set(table.algorithm.tolist()))
    size = (5.2 * len(columns), 3.8 if len(labels) <= _INSIDE else 4.2 + 0.1 * len(labels))
    figure, axes = plt.subplots(1, len(columns), figsize=size, squeeze=False, layout="constrained")
    for axis, (column, title) in zip(axes[0], columns, strict=True):
        seen: dict[str, int] = {}
        for label in labels:
            rows = table.algorithm == label
            seeds = set(table.seed[rows].tolist())
            curves = [(table.time[rows & (table.seed == s)], table[column][rows & (table.seed == s)]) for s in seeds]
            grid = np.unique(np.concatenate([times for times, _ in curves]))
            grid = grid[grid <= min(times[-1] for times, _ in curves)]
            # between two evaluations the model of the earlier one stands
            values = np.stack([c[np.searchsorted(t, grid, side="right") - 1] for t, c in curves])
            look = style(label, seen)
            axis.plot(grid, values.mean(0), label=label, **look)
            if len(curves) > 1:
                axis.fill_between(grid, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0)
        axis.set_xlabel(clock)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        low, high = np.nanmin(table[column]), np.nanmax(table[column])
        if column == "objective" and low > 0 and high / low > 5:  # over less a logarithmic axis has too few labels
            axis.set_yscale("log")
            if high / low < 1000:
                axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    if len(labels) <= _INSIDE:
        axes[0][0].legend(frameon=False, fontsize=9)
    else:
        heading = None if len(labels) == count else f"the {len(labels)} of {count} with the lowest objective at the end"
        handles = axes[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9, title=heading)
    for side in ("top", "right"):
        for axis in axes[0]:
            axis.spines[side].set_visible(False)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    write(path, sink.getvalue())
    return path

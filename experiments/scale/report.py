"""The figure and the tables of docs/explanation/scale.md, from what compute.py has left.

    python experiments/scale/report.py

It writes docs/pictures/scale.png, experiments/scale/results.md and the part of the page between its two marks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from compute import BANDWIDTH, LATENCY, PASSES, RESULTS, gradient_seconds, methods

from dualdelay.analysis.printing import in_bytes
from dualdelay.paper.tables import markdown
from dualdelay.theory import Footprint, Plan
from dualdelay.theory.cost import Cost, cost
from dualdelay.theory.footprint import footprint
from dualdelay.theory.machine import SHIPPED

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIGURE, PAGE = ROOT / "docs" / "pictures" / "scale.png", ROOT / "docs" / "explanation" / "scale.md"
MARKS = ("<!-- begin scale -->", "<!-- end scale -->")
PANELS = [  # a title, which method, and how many shards
    ("one server", "DuDe", 1),
    ("8 shards", "DuDe", 8),
    ("64 shards", "DuDe", 64),
    ("one server, int8 up", "DuDe, int8 up", 1),
    ("one server, int8 both ways", "DuDe, int8 both ways", 1),
    ("64 shards, int8 up", "DuDe, int8 up", 64),
]
KINDS = {"workers": "workers", "server": "server's\npasses", "shard": "shards'\npasses", "head": "head"}
KINDS |= {"lines to the server": "lines", "lines from the server": "lines"}
NAMES = {"server": "server", "shard": "shards", "head": "head", "workers": "workers"}
NAMES |= {"lines to the server": "line in", "lines from the server": "line out"}


def at(found: dict[str, Any], name: str, workers: int) -> Footprint:
    """A method with so many workers, its passes as they were timed."""
    method, server = methods(10)[name]
    counted, passes = footprint(method, workers, server, timed=1000), found["passes"][name]
    return replace(counted, **{part: passes[part] for part in PASSES})


def predicted(method: Footprint, workers: int, weights: float, shards: int) -> Cost:
    """The cost model's word on a point."""
    several = 0 if shards == 1 else shards
    return cost(Plan(weights, workers, several, gradient_seconds(weights), 0.0, None, BANDWIDTH, LATENCY), method, SHIPPED)


def draw(found: dict[str, Any]) -> None:
    """Gradients per second by workers and weights, one panel for each way to build the server."""
    across, up = np.geomspace(1e6, 7e10, 30), np.geomspace(10, 1e5, 21)
    norm = mpl.colors.LogNorm(1e-3, 1e3)
    figure, panels = plt.subplots(2, 3, figsize=(11, 6.4), sharex=True, sharey=True, layout="constrained")
    for axes, (title, name, shards) in zip(panels.flat, PANELS, strict=True):
        few = {workers: at(found, name, workers) for workers in sorted({round(value) for value in up})}
        grid = [[predicted(few[round(n)], round(n), float(round(d)), shards) for d in across] for n in up]
        rates = np.array([[point.gradients_per_second for point in row] for row in grid])
        mesh = axes.pcolormesh(across, up, rates, norm=norm, cmap="viridis", shading="nearest")
        kinds = list(dict.fromkeys(KINDS.values()))
        regions = np.array([[kinds.index(KINDS[point.bottleneck]) for point in row] for row in grid])
        for kind, text in enumerate(kinds):
            inside = regions == kind
            if 0 < inside.sum() < inside.size:
                axes.contour(across, up, inside, levels=[0.5], colors="white", linewidths=1.2)
            if inside.sum() > 0.04 * inside.size:
                rows, columns = np.nonzero(inside)
                column, row = int(np.median(columns)), int(np.median(rows))
                right, above = (1.0, 2.6) if len(set(rows)) > 6 else (2.5, 1.0)
                place = across[max(column, 3)] * right, up[row] * above  # beside the dots
                here = axes.text(*place, text, ha="center", va="center", fontsize=9)
                here.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5})
        runs = [point for point in found["points"] if (point["method"], point["shards"]) == (name, shards)]
        if runs:
            places = [[point[axis] for point in runs] for axis in ("weights", "workers", "gradients")]
            axes.scatter(
                places[0], places[1], c=places[2], norm=norm, cmap="viridis", edgecolors="black", s=42, clip_on=False
            )
        axes.set(xscale="log", yscale="log", title=title)
    for axes in panels[1]:
        axes.set_xlabel("weights")
    for axes in panels[:, 0]:
        axes.set_ylabel("workers")
    figure.colorbar(mesh, ax=panels, label="gradients per second at the server", extend="both")
    figure.savefig(FIGURE, dpi=130)


def count(value: float) -> str:
    """A number of weights or workers in words."""
    for unit, name in ((1e9, " G"), (1e6, " M")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:,.0f}"


def tables(found: dict[str, Any]) -> str:
    """What was simulated, beside what was predicted."""
    points = found["points"]
    names: Sequence[tuple[str, int]] = list(dict.fromkeys((point["method"], point["shards"]) for point in points))
    parts = []
    for workers in sorted({point["workers"] for point in points}):
        rows = [["", *(f"{count(weights)} weights" for weights in sorted({p["weights"] for p in points}))]]
        for name, shards in names:
            cells = []
            for weights in sorted({point["weights"] for point in points}):
                here = [
                    p
                    for p in points
                    if (p["method"], p["shards"], p["workers"], p["weights"]) == (name, shards, workers, weights)
                ]
                text = "".join(f"{p['gradients']:.3g}, {NAMES[p['bottleneck']]}" for p in here)
                cells.append(text or "-")
            rows.append([name + (f", {shards} shards" if shards > 1 else ""), *cells])
        parts.append(f"{workers:,} workers: gradients per second, and what they wait for\n\n{markdown(rows)}")
    ratios = np.array([point["predicted"] / point["simulated"] for point in points])
    parts.append(
        f"Predicted over simulated in these {len(ratios)} runs: median {np.median(ratios):.3f}, from {ratios.min():.2f} to "
        f"{ratios.max():.2f}."
    )
    rows = [["", *(f"{count(weights)} weights" for weights in (1e6, 1e8, 7e9, 7e10))]]
    for workers in (10, 1_000, 100_000):
        for name, shards in (("DuDe", 1), ("DuDe", 64), ("DuDe, int8 up", 64), ("vanilla", 64)):
            method = at(found, name, workers)
            sizes = [in_bytes(predicted(method, workers, d, shards).server.peak) for d in (1e6, 1e8, 7e9, 7e10)]
            rows.append([f"{workers:,} workers, {name}, {'one server' if shards == 1 else f'{shards} shards'}", *sizes])
    parts.append(f"Memory of the server, or of each shard\n\n{markdown(rows)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    found = json.loads(RESULTS.read_text())
    draw(found)
    text = tables(found)
    (HERE / "results.md").write_text("# Scale: what was simulated\n\nWritten by `report.py`.\n\n" + text)
    page = PAGE.read_text()
    before, after = page.partition(MARKS[0])[0], page.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")
    print(text)


if __name__ == "__main__":
    main()

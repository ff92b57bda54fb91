"""The paper's figures, drawn from its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..analysis.figures import Curve, Panel, draw_panels
from .experiment import title
from .tables import Choice, Outcome, by_step, heading

_CLOCK = "simulated time (1,000 asynchronous updates)"
_COLUMNS = (("objective", "training loss F"), ("accuracy", "test accuracy"))


def _band(choice: Choice, name: str, updates: int, points: int) -> Curve:
    """The mean over seeds with a standard deviation on both sides."""
    times = np.linspace(0, updates, points + 1)
    good = [run for run in choice.runs if run.failed is None]
    values = np.stack([run.at(name, times) for run in good]) if good else np.full((1, len(times)), np.nan)
    mean, far = values.mean(0), values.std(0, ddof=1) if len(good) > 1 else np.zeros(len(times))
    return Curve(choice.method, title(choice.method), times / 1000, mean, mean - far, mean + far)


def draw_figure(choices: Sequence[Choice], updates: int, points: int, path: Path, caption: str) -> list[Path]:
    """Loss above accuracy over simulated time, a column for each panel; side by side if there is one."""
    panels = sorted({choice.panel for choice in choices})
    rows = []
    for name, said in _COLUMNS:
        bands = {p: [_band(choice, name, updates, points) for choice in choices if choice.panel == p] for p in panels}
        rows.append([Panel(heading(p), _CLOCK, said, bands[p]) for p in panels])
    return draw_panels(rows if len(panels) > 1 else [[panel for row in rows for panel in row]], path, caption)


def draw_steps(found: Sequence[Outcome], path: Path, caption: str) -> list[Path]:
    """The training loss at the end against the step, for every method and panel."""
    table = by_step(found)
    row = []
    for panel in sorted({run.panel for run in found}):
        lines = []
        for (where, method), tried in table.items():
            if where == panel:
                final = [np.array([run.final("objective") for run in tried[lr]]) for lr in sorted(tried)]
                mean = [float(values.mean()) if np.isfinite(values).all() else np.nan for values in final]
                lines.append(Curve(method, title(method), sorted(tried), mean))
        row.append(Panel(heading(panel), "step size", "training loss F at the end", lines, steps=True))
    return draw_panels([row], path, caption)


def draw_seeds(choices: Sequence[Choice], about: Callable[[int], str], path: Path, caption: str) -> list[Path]:
    """One panel's loss, and below it its accuracy, with every seed by itself; ``about`` says something of a seed."""
    seeds = [run.seed for run in choices[0].runs]
    columns = next(count for count in (3, 2, len(seeds)) if len(seeds) % count == 0)
    rows = []
    for start in range(0, len(seeds), columns):
        for name, said in _COLUMNS:
            some = range(start, start + columns)
            rows.append(
                [Panel(f"seed {seeds[k]}: {about(seeds[k])}", _CLOCK, said, _alone(choices, k, name)) for k in some]
            )
    return draw_panels(rows, path, caption)


def _alone(choices: Sequence[Choice], k: int, name: str) -> list[Curve]:
    """The k-th seed's curves."""
    runs = [(choice.method, choice.runs[k]) for choice in choices if choice.runs[k].failed is None]
    return [Curve(method, title(method), run.curves["time"] / 1000, run.curves[name]) for method, run in runs]

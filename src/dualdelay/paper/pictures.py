"""The paper's figures, drawn from its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..figures import Curve, Panel, draw_panels
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


def draw_figure(choices: Sequence[Choice], updates: int, points: int, path: Path) -> list[Path]:
    """Loss above accuracy over simulated time, a column for each panel; side by side if there is one."""
    panels = sorted({choice.panel for choice in choices})
    rows = []
    for name, said in _COLUMNS:
        bands = {p: [_band(choice, name, updates, points) for choice in choices if choice.panel == p] for p in panels}
        rows.append([Panel(heading(p), _CLOCK, said, bands[p]) for p in panels])
    return draw_panels(rows if len(panels) > 1 else [[panel for row in rows for panel in row]], path)


def draw_steps(found: Sequence[Outcome], path: Path) -> list[Path]:
    """The training loss at the end against the step, for every method and panel."""
    table = by_step(found)
    rows: list[list[Panel]] = [[]]
    for panel in sorted({run.panel for run in found}):
        lines = []
        for (where, method), tried in table.items():
            if where == panel:
                final = [np.array([run.final("objective") for run in tried[lr]]) for lr in sorted(tried)]
                mean = [float(values.mean()) if np.isfinite(values).all() else np.nan for values in final]
                lines.append(Curve(method, title(method), sorted(tried), mean))
        rows[0].append(Panel(heading(panel), "step size", "training loss F at the end", lines, log="x", mark=True))
    return draw_panels(rows, path)


def draw_seeds(choices: Sequence[Choice], about: Callable[[int], str], path: Path) -> list[Path]:
    """One panel's loss, and below it its accuracy, with every seed by itself; ``about`` says something of a seed."""
    seeds = [run.seed for run in choices[0].runs]
    rows = []
    for name, said in _COLUMNS:
        line = []
        for k, seed in enumerate(seeds):
            lines = [_alone(choice, choice.runs[k], name) for choice in choices if choice.runs[k].failed is None]
            line.append(Panel(f"seed {seed}\n{about(seed)}", _CLOCK, said, lines))
        rows.append(line)
    return draw_panels(rows, path)


def _alone(choice: Choice, run: Outcome, name: str) -> Curve:
    times: Any = run.curves["time"] / 1000
    return Curve(choice.method, title(choice.method), times, run.curves[name])

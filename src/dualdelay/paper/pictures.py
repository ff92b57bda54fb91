"""The panels of the paper's figures, made from its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..analysis.figures import Curve, Panel, band
from .experiment import title
from .tables import GROUP, Choice, Outcome, by_step, heading, means, table_of

_CLOCK = "simulated time (1,000 asynchronous updates)"
_QUANTITIES = (("objective", "training loss F"), ("accuracy", "test accuracy"))


def figure_panels(choices: Sequence[Choice], updates: int, points: int) -> list[list[Panel]]:
    """Loss above accuracy over simulated time, a column for each panel; side by side if there is one."""
    panels = sorted({choice.panel for choice in choices})
    rows = []
    for name, ylabel in _QUANTITIES:
        row = []
        for panel in panels:
            bands = [_band(choice, name, updates, points) for choice in choices if choice.panel == panel]
            row.append(Panel(heading(panel), _CLOCK, ylabel, bands))
        rows.append(row)
    return rows if len(panels) > 1 else [rows[0] + rows[1]]


def _band(choice: Choice, name: str, updates: int, points: int) -> Curve:
    """The mean over seeds with a standard deviation on both sides."""
    times = np.linspace(0, updates, points + 1)
    ended = [run for run in choice.runs if run.failed is None]
    values = np.stack([run.at(name, times) for run in ended]) if ended else np.full((1, len(times)), np.nan)
    return Curve(choice.method, title(choice.method), times / 1000, values.mean(0), *band(values, "std"))


def step_panels(runs: Sequence[Outcome]) -> list[Panel]:
    """A row with the training loss at the end against the step, for every method and panel."""
    curves: dict[tuple[float, float], list[Curve]] = {}
    ends = means(table_of(runs), by=(*GROUP, "lr"))
    for (panel, method), tried in by_step(runs).items():
        found = [ends[str(panel), method, lr]["mean"] for lr in sorted(tried)]
        losses = [mean if math.isfinite(mean) else math.nan for mean in found]
        curves.setdefault(panel, []).append(Curve(method, title(method), sorted(tried), losses))
    quantity = "training loss F at the end"
    return [Panel(heading(panel), "step size", quantity, curves[panel], steps=True) for panel in sorted(curves)]


def seed_panels(choices: Sequence[Choice], about: Callable[[int], str]) -> list[list[Panel]]:
    """One panel's loss, and below it its accuracy, for each seed by itself; ``about`` describes a seed."""
    seeds = [run.seed for run in choices[0].runs]
    columns = next(count for count in (3, 2, len(seeds)) if len(seeds) % count == 0)
    rows = []
    for start in range(0, len(seeds), columns):
        for name, ylabel in _QUANTITIES:
            row = []
            for k in range(start, start + columns):
                runs = [(choice.method, choice.runs[k]) for choice in choices if choice.runs[k].failed is None]
                curves = [Curve(m, title(m), run.curves["time"] / 1000, run.curves[name]) for m, run in runs]
                row.append(Panel(f"seed {seeds[k]}: {about(seeds[k])}", _CLOCK, ylabel, curves))
            rows.append(row)
    return rows

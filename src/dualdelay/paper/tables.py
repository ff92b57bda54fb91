"""What the runs say: the step chosen for each method, where it ends, and differences between methods seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .cells import CURVES, records
from .experiment import Experiment

Panel = tuple[float, float]  # alpha and std
Numbers = Any


@dataclass(frozen=True)
class Outcome:
    """One run: where it belongs and what is kept of it; times are in updates of a fully asynchronous method."""

    panel: Panel
    seed: int
    method: str
    lr: float
    updates: int
    tau_max: int
    curves: Mapping[str, Numbers]  # time, version, objective, pooled_loss and accuracy
    failed: str | None = None

    def final(self, name: str) -> float:
        """The last value of a curve; a run that failed or diverged has an infinite loss and no accuracy."""
        if self.failed is not None or not math.isfinite(self.curves["objective"][-1]):
            return 0.0 if name == "accuracy" else math.inf
        return float(self.curves[name][-1])

    def at(self, name: str, times: Numbers) -> Numbers:
        """A curve at these times: between two evaluations the model of the earlier one stands.

        Times were rounded when they were written.
        """
        return self.curves[name][np.searchsorted(self.curves["time"], times * (1 + 1e-6), side="right") - 1]

    def reached(self, name: str, target: float) -> float:
        """When a curve is first at its target; infinite if never."""
        if self.failed is not None:
            return math.inf
        values = self.curves[name]
        there = values >= target if name == "accuracy" else values <= target
        return float(self.curves["time"][np.argmax(there)]) if there.any() else math.inf


def outcomes(experiment: Experiment, folder: Path) -> list[Outcome]:
    """Every run of the experiment that the folder holds."""
    found = []
    for cell, alpha, method, lr, record in records(experiment, folder):
        panel = (alpha, cell.std)
        if "failed" in record:
            found.append(Outcome(panel, cell.seed, method, lr, 0, 0, {}, record["failed"]))
            continue
        curves = {name: np.array(record[name], dtype=np.float64) for name in CURVES}
        curves["time"] = curves["time"] * cell.rate
        found.append(Outcome(panel, cell.seed, method, lr, record["updates"], record["tau_max"], curves))
    return found


@dataclass(frozen=True)
class Choice:
    """A method on a panel at the step chosen for it, with its runs in the order of their seeds."""

    panel: Panel
    method: str
    lr: float
    edge: bool  # whether the step is the smallest or largest that was tried
    runs: Sequence[Outcome]

    def values(self, name: str) -> Numbers:
        """The final values by seed."""
        return np.array([run.final(name) for run in self.runs])


def by_step(found: Sequence[Outcome]) -> dict[tuple[Panel, str], dict[float, list[Outcome]]]:
    """The runs of each method on each panel, by step and in the order of their seeds."""
    table: dict[tuple[Panel, str], dict[float, list[Outcome]]] = {}
    for run in sorted(found, key=lambda run: run.seed):
        table.setdefault((run.panel, run.method), {}).setdefault(run.lr, []).append(run)
    return table


def choose(found: Sequence[Outcome]) -> list[Choice]:
    """The rule: for each method and panel the step with the lowest mean over seeds of the training loss F at the end."""
    choices = []
    for (panel, method), steps in by_step(found).items():
        mean = {lr: float(np.mean([run.final("objective") for run in runs])) for lr, runs in steps.items()}
        lr = min(mean, key=lambda lr: mean[lr])
        choices.append(Choice(panel, method, lr, len(steps) > 1 and lr in (min(steps), max(steps)), steps[lr]))
    order = list(dict.fromkeys(run.method for run in found))
    return sorted(choices, key=lambda choice: (choice.panel, order.index(choice.method)))


def spread(values: Numbers, digits: int = 3) -> str:
    """A mean with its standard deviation over the seeds."""
    if not np.isfinite(values).all():
        return "diverged"
    text = f"{np.mean(values):.{digits}f}"
    return f"{text} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else text


def when(times: Numbers) -> str:
    """A mean time in thousands, or in how many seeds it never came."""
    never = int(np.isinf(times).sum())
    if never:
        return "never" if never == len(times) else f"not in {never} of {len(times)}"
    return f"{np.mean(times) / 1000:.1f}"


def heading(panel: Panel) -> str:
    """A panel's name."""
    return f"alpha = {panel[0]:g}, std = {panel[1]:g}"


def summary(choices: Sequence[Choice], loss: float, accuracy: float) -> list[list[str]]:
    """The rows of the main table, a line of headings first."""
    rows = [["panel", "method", "step", "seeds", "training loss F", "test accuracy", f"time to F = {loss:g}"]]
    rows[0] += [f"time to {accuracy:g}", "updates", "tau_max"]
    for choice in choices:
        runs = choice.runs
        good = [run for run in runs if run.failed is None] or runs
        step = f"{choice.lr:g}" + (" (edge)" if choice.edge else "")
        cells = [heading(choice.panel), choice.method, step, str(len(runs))]
        cells += [spread(choice.values("objective")), spread(choice.values("accuracy"))]
        cells += [when(np.array([run.reached("objective", loss) for run in runs]))]
        cells += [when(np.array([run.reached("accuracy", accuracy) for run in runs]))]
        tau = f"{np.mean([run.tau_max for run in good]):,.0f} ({max(run.tau_max for run in good):,})"
        rows.append([*cells, f"{np.mean([run.updates for run in good]):,.0f}", tau])
    return rows


def paired(choices: Sequence[Choice]) -> list[list[str]]:
    """How far the others are from the first method, seed by seed: above zero it is ahead; a line of headings first."""
    reference = choices[0].method
    ahead, apart = f"{reference} ahead in", f"accuracy of {reference} less the other's"
    rows = [["panel", "other", f"F of the other less F of {reference}", ahead, apart, ahead]]
    mine = {choice.panel: choice for choice in choices if choice.method == reference}
    for choice in choices:
        if choice.method == reference or choice.panel not in mine:
            continue
        cells = [heading(choice.panel), choice.method]
        for name, sign in (("objective", 1.0), ("accuracy", -1.0)):
            with np.errstate(invalid="ignore"):
                gain = sign * (choice.values(name) - mine[choice.panel].values(name))
            cells += [spread(gain), f"{int((gain > 0).sum())} of {len(gain)}"]
        rows.append(cells)
    return rows


def steps(found: Sequence[Outcome]) -> list[list[str]]:
    """The training loss at the end for every step, a line of headings first."""
    known = sorted({run.lr for run in found})
    rows = [["panel", "method", *(f"{lr:g}" for lr in known)]]
    order = list(dict.fromkeys(run.method for run in found))
    table = by_step(found)
    for panel, method in sorted(table, key=lambda key: (key[0], order.index(key[1]))):
        tried = table[panel, method]
        cells = [spread(np.array([run.final("objective") for run in tried[lr]])) if lr in tried else "" for lr in known]
        rows.append([heading(panel), method, *cells])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; a panel's name stands in its first row alone."""
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    before = ""
    for first, *rest in rows[1:]:
        lines.append(f"| {' | '.join(['' if first == before else first, *rest])} |")
        before = first
    return "\n".join(lines) + "\n"


def curves(found: Sequence[Outcome]) -> dict[str, Numbers]:
    """Every evaluation of every run as columns."""
    good = [run for run in found if run.failed is None]
    sizes = [len(run.curves["time"]) for run in good]
    names: dict[str, tuple[type, list[Any]]] = {
        "alpha": (float, [run.panel[0] for run in good]),
        "std": (float, [run.panel[1] for run in good]),
        "seed": (int, [run.seed for run in good]),
        "method": (str, [run.method for run in good]),
        "lr": (float, [run.lr for run in good]),
    }
    columns: dict[str, Numbers] = {
        name: np.repeat(np.array(values, dtype=kind), sizes) for name, (kind, values) in names.items()
    }
    return columns | {name: np.concatenate([np.empty(0), *(run.curves[name] for run in good)]) for name in CURVES}

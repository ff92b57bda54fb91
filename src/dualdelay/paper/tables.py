"""What the runs show: the step chosen for each method, where it ends, and differences between methods seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.trace import Column
from .cells import CURVES, records
from .experiment import Experiment

Panel = tuple[float, float]  # alpha and std
Rows = list[list[str]]  # of a table, the headings first


@dataclass(frozen=True)
class Outcome:
    """One run: where it belongs and what is kept of it; times are in updates of a fully asynchronous method."""

    panel: Panel
    seed: int
    method: str
    lr: float
    updates: int
    tau_max: int
    curves: Mapping[str, Column]  # time, version, objective, pooled_loss and accuracy
    failed: str | None = None

    def final(self, name: str) -> float:
        """The last value of a curve; a run that failed or diverged has an infinite loss and no accuracy."""
        if self.failed is not None or not math.isfinite(self.curves["objective"][-1]):
            return 0.0 if name == "accuracy" else math.inf
        return float(self.curves[name][-1])

    def at(self, name: str, times: Column) -> Column:
        """A curve at these times: between two evaluations the model of the earlier one stands.

        The times of evaluations were rounded when they were written, so one may be slightly late.
        """
        return self.curves[name][np.searchsorted(self.curves["time"], times * (1 + 1e-6), side="right") - 1]

    def reached(self, name: str, target: float) -> float:
        """When a curve first reaches its target; infinite if never."""
        if self.failed is not None:
            return math.inf
        values = self.curves[name]
        good = values >= target if name == "accuracy" else values <= target
        return float(self.curves["time"][np.argmax(good)]) if good.any() else math.inf


def outcomes(experiment: Experiment, folder: Path) -> list[Outcome]:
    """Every run of the experiment that the folder holds."""
    runs = []
    for cell, alpha, method, lr, record in records(experiment, folder):
        curves = {name: np.array(record[name], dtype=np.float64) for name in CURVES if "failed" not in record}
        if curves:
            curves["time"] *= cell.rate
        counts = (record.get("updates", 0), record.get("tau_max", 0))
        runs.append(Outcome((alpha, cell.std), cell.seed, method, lr, *counts, curves, record.get("failed")))
    return runs


@dataclass(frozen=True)
class Choice:
    """A method on a panel at the step chosen for it, with its runs in the order of their seeds."""

    panel: Panel
    method: str
    lr: float
    edge: bool  # whether the step is the smallest or largest that was tried
    runs: Sequence[Outcome]

    def values(self, name: str) -> Column:
        """The final values by seed."""
        return np.array([run.final(name) for run in self.runs])


def by_step(runs: Sequence[Outcome]) -> dict[tuple[Panel, str], dict[float, list[Outcome]]]:
    """The runs of each method on each panel, by step and in the order of their seeds."""
    table: dict[tuple[Panel, str], dict[float, list[Outcome]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        table.setdefault((run.panel, run.method), {}).setdefault(run.lr, []).append(run)
    return table


def choose(runs: Sequence[Outcome]) -> list[Choice]:
    """The rule: for each method and panel the step with the lowest mean over seeds of the training loss F at the end."""
    choices = []
    for (panel, method), tried in by_step(runs).items():
        mean = {lr: float(np.mean([run.final("objective") for run in tried[lr]])) for lr in tried}
        lr = min(mean, key=lambda lr: mean[lr])
        choices.append(Choice(panel, method, lr, len(tried) > 1 and lr in (min(tried), max(tried)), tried[lr]))
    order = list(dict.fromkeys(run.method for run in runs))
    return sorted(choices, key=lambda choice: (choice.panel, order.index(choice.method)))


def spread(values: Column, digits: int = 3) -> str:
    """A mean with its standard deviation over the seeds."""
    if not np.isfinite(values).all():
        return "diverged"
    text = f"{np.mean(values):.{digits}f}"
    return f"{text} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else text


def when(times: Sequence[float]) -> str:
    """A mean time in thousands, or for how many of the seeds it is infinite."""
    never = sum(map(math.isinf, times))
    if never:
        return "never" if never == len(times) else f"not in {never} of {len(times)}"
    return f"{np.mean(times) / 1000:.1f}"


def heading(panel: Panel) -> str:
    """A panel's name."""
    return f"alpha = {panel[0]:g}, std = {panel[1]:g}"


def summary(choices: Sequence[Choice], loss: float, accuracy: float) -> Rows:
    """The main table: where each method ends, and when it reaches this loss and this accuracy."""
    rows = [["panel", "method", "step", "seeds", "training loss F", "test accuracy", f"time to F = {loss:g}"]]
    rows[0] += [f"time to {accuracy:g}", "updates", "tau_max"]
    for choice in choices:
        runs = choice.runs
        ended = [run for run in runs if run.failed is None] or runs
        cells = [heading(choice.panel), choice.method, f"{choice.lr:g}{' (edge)' if choice.edge else ''}", str(len(runs))]
        cells += [spread(choice.values(name)) for name in ("objective", "accuracy")]
        for name, target in (("objective", loss), ("accuracy", accuracy)):
            cells.append(when([run.reached(name, target) for run in runs]))
        cells.append(f"{np.mean([run.updates for run in ended]):,.0f}")
        cells.append(f"{np.mean([run.tau_max for run in ended]):,.0f} ({max(run.tau_max for run in ended):,})")
        rows.append(cells)
    return rows


def paired(choices: Sequence[Choice]) -> Rows:
    """How far the others are from the first method, seed by seed; above zero the first is ahead."""
    reference = choices[0].method
    ahead, apart = f"{reference} ahead in", f"accuracy of {reference} less the other's"
    rows = [["panel", "other", f"F of the other less F of {reference}", ahead, apart, ahead]]
    references = {choice.panel: choice for choice in choices if choice.method == reference}
    for choice in choices:
        if choice.method == reference or choice.panel not in references:
            continue
        cells = [heading(choice.panel), choice.method]
        for name, sign in (("objective", 1.0), ("accuracy", -1.0)):
            with np.errstate(invalid="ignore"):
                gain = sign * (choice.values(name) - references[choice.panel].values(name))
            cells += [spread(gain), f"{int((gain > 0).sum())} of {len(gain)}"]
        rows.append(cells)
    return rows


def steps(runs: Sequence[Outcome]) -> Rows:
    """The training loss at the end of each method for every step."""
    lrs = sorted({run.lr for run in runs})
    rows, table = [["panel", "method", *(f"{lr:g}" for lr in lrs)]], by_step(runs)
    for choice in choose(runs):
        tried = table[choice.panel, choice.method]
        cells = [spread(np.array([run.final("objective") for run in tried[lr]])) if lr in tried else "" for lr in lrs]
        rows.append([heading(choice.panel), choice.method, *cells])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, headings first, as a Markdown table; a panel's name stands in its first row alone."""
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    before = ""
    for first, *rest in rows[1:]:
        lines.append(f"| {' | '.join(['' if first == before else first, *rest])} |")
        before = first
    return "\n".join(lines) + "\n"


def curves(runs: Sequence[Outcome]) -> dict[str, Column]:
    """Every evaluation of every run that ended, as columns."""
    ended = [run for run in runs if run.failed is None]
    sizes = [len(run.curves["time"]) for run in ended]
    kinds = {"alpha": float, "std": float, "seed": int, "method": str, "lr": float}
    places = [(*run.panel, run.seed, run.method, run.lr) for run in ended]
    columns: dict[str, Column] = {}
    for k, (name, kind) in enumerate(kinds.items()):
        columns[name] = np.repeat(np.array([place[k] for place in places], dtype=kind), sizes)
    return columns | {name: np.concatenate([np.empty(0), *(run.curves[name] for run in ended)]) for name in CURVES}

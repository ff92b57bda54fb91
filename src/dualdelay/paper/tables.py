"""What the runs show: the step chosen for each method, where it ends, and differences between methods seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.table import Column, Table
from .cells import CURVES, records
from .experiment import Experiment

Panel = tuple[float, float]  # alpha and std
Rows = list[list[str]]  # of a table, the headings first

GROUP = ("panel", "method")  # the columns that name what is compared


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

    def at(self, name: str, times: Column) -> Column:
        """A curve at these times: between two evaluations the model of the earlier one stands.

        The times of evaluations were rounded when they were written, so one may be slightly late.
        """
        return self.curves[name][np.searchsorted(self.curves["time"], times * (1 + 1e-6), side="right") - 1]


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
        return table_of_choices([self]).ends(name, by=GROUP)[name]


def _table(entries: Iterable[tuple[Panel, str, float, Outcome]]) -> Table:
    """A row for each evaluation of these runs, which belong to a panel, a method and a step."""
    columns: dict[str, list[Any]] = {name: [] for name in (*GROUP, "lr", "seed")}
    values: dict[str, list[Column]] = {name: [np.empty(0)] for name in ("time", "objective", "accuracy")}
    absent, missing = [], {"time": 1.0, "accuracy": math.nan}  # without times, evaluations are in their order
    for panel, method, lr, run in entries:
        place = {"panel": str(panel), "method": method, "lr": lr, "seed": run.seed}
        if run.failed is not None:
            absent.append(place)
            continue
        size = len(run.curves["objective"])
        for name, column in columns.items():
            column += [place[name]] * size
        for name, parts in values.items():
            parts.append(run.curves[name] if name in run.curves else missing[name] * np.arange(size))
    curves = {name: np.concatenate(parts) for name, parts in values.items()}
    return Table(columns | curves, (*GROUP, "lr", "seed"), absent)


def table_of(runs: Iterable[Outcome]) -> Table:
    """A row for each evaluation of all these runs, named by panel (as a text), method, lr and seed."""
    return _table((run.panel, run.method, run.lr, run) for run in runs)


def table_of_choices(choices: Iterable[Choice]) -> Table:
    """A row for each evaluation of the chosen runs alone."""
    return _table((choice.panel, choice.method, choice.lr, run) for choice in choices for run in choice.runs)


def means(table: Table, metric: str = "objective", by: Sequence[str] = GROUP) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The mean, standard deviation and number of failures at the end over the seeds of each group, by its names."""
    return _by_name(table.best(by, (), metric), by)


def _by_name(table: Table, names: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a table by these columns."""
    return {tuple(row[name] for name in names): row for row in table.rows()}


def by_step(runs: Sequence[Outcome]) -> dict[tuple[Panel, str], dict[float, list[Outcome]]]:
    """The runs of each method on each panel, by step and in the order of their seeds."""
    table: dict[tuple[Panel, str], dict[float, list[Outcome]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        table.setdefault((run.panel, run.method), {}).setdefault(run.lr, []).append(run)
    return table


def choose(runs: Sequence[Outcome]) -> list[Choice]:
    """The rule: for each method and panel the step with the lowest mean over seeds of the training loss F at the end."""
    best, choices = _by_name(table_of(runs).best(GROUP, "lr"), GROUP), []
    table = by_step(runs)
    for panel, method in _in_order(runs):
        row = best[str(panel), method]
        lr, edge = row["lr"], row["edge"] in ("lowest", "highest")
        choices.append(Choice(panel, method, lr, edge, table[panel, method][lr]))
    return choices


def _in_order(runs: Sequence[Outcome]) -> list[tuple[Panel, str]]:
    """The panels, sorted, and on each its methods, as they come."""
    order = list(dict.fromkeys(run.method for run in runs))
    return sorted({(run.panel, run.method) for run in runs}, key=lambda key: (key[0], order.index(key[1])))


def spread(mean: float, std: float, digits: int = 3) -> str:
    """A mean with its standard deviation over the seeds, if there are several."""
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def when(times: Column) -> str:
    """A mean time in thousands, or for how many of the seeds it is infinite."""
    never = int(np.isinf(times).sum())
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
    table, targets = table_of_choices(choices), {"objective": loss, "accuracy": accuracy}
    ends = {name: means(table, name) for name in targets}
    times = {name: table.time_to(target, name, GROUP) for name, target in targets.items()}
    for choice in choices:
        key, runs = (str(choice.panel), choice.method), choice.runs
        ended = [run for run in runs if run.failed is None] or runs
        cells = [heading(choice.panel), choice.method, f"{choice.lr:g}{' (edge)' if choice.edge else ''}", str(len(runs))]
        cells += [spread(ends[name][key]["mean"], ends[name][key]["std"]) for name in targets]
        cells += [when(times[name].where(panel=key[0], method=key[1]).time) for name in targets]
        cells.append(f"{np.mean([run.updates for run in ended]):,.0f}")
        cells.append(f"{np.mean([run.tau_max for run in ended]):,.0f} ({max(run.tau_max for run in ended):,})")
        rows.append(cells)
    return rows


def paired(choices: Sequence[Choice]) -> Rows:
    """How far the others are from the first method, seed by seed; above zero the first is ahead."""
    reference = choices[0].method
    ahead, apart = f"{reference} ahead in", f"accuracy of {reference} less the other's"
    rows = [["panel", "other", f"F of the other less F of {reference}", ahead, apart, ahead]]
    table, signs = table_of_choices(choices), {"objective": 1.0, "accuracy": -1.0}
    found = {name: _by_name(table.paired(reference, GROUP, name, over=()), GROUP) for name in signs}
    for choice in choices:
        key = str(choice.panel), choice.method
        if key in found["objective"]:
            cells = [heading(choice.panel), choice.method]
            for name, sign in signs.items():
                row = found[name][key]
                behind = row["n"] - row["wins"] - row["ties"]
                cells += [spread(sign * row["difference"], row["std"]), f"{behind} of {row['n']}"]
            rows.append(cells)
    return rows


def steps(runs: Sequence[Outcome]) -> Rows:
    """The training loss at the end of each method for every step."""
    lrs = sorted({run.lr for run in runs})
    rows = [["panel", "method", *(f"{lr:g}" for lr in lrs)]]
    ends = means(table_of(runs), by=(*GROUP, "lr"))
    for panel, method in _in_order(runs):
        tried = [ends.get((str(panel), method, lr)) for lr in lrs]
        cells = ["" if end is None else spread(end["mean"], end["std"]) for end in tried]
        rows.append([heading(panel), method, *cells])
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

"""How values show themselves in a notebook: small tables, in the notebook's own colours."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from ..core import Algorithm, Problem
from ..core.errors import shortened
from ..engine.result import Run
from ..engine.table import Table
from ..runs.names import label, settings
from ..runs.seeds import seeded_speeds
from ..runs.sweep import Sweep
from ..simulation.speeds import SpeedModel
from .printing import counted, ending, measured, number

_MOST_ROWS = 8
_JOBS = 20  # of a worker, that a mean is taken over


def run_html(run: Run) -> str:
    """How a run ended, in a few numbers."""
    summary = run.summary()
    facts: dict[str, Any] = {name: summary[name] for name in measured([summary], run.metrics)}
    counts = {"updates": run.version, "arrivals": len(run.trace), "time": run.time, "tau_max": run.delays.tau_max}
    counts |= {"audit": run.audit} if run.audit is not None else {}
    name = "Run" if run.algorithm is None else label(run.algorithm)
    return _pairs(f"{name}: {ending(run)}", {**facts, **counts, **run.faults}) + _notes(run.notes)


def table_html(table: Table) -> str:
    """The first rows of a table; of a sweep the last row of each run."""
    names, rows = list(table), list(table.rows())
    if isinstance(table, Sweep):
        ends = np.cumsum([len(run.metrics) for run in table.runs if run is not None]) - 1
        last = [rows[end] for end in ends]
        failed = tuple(f"run {number_} failed: {why}" for number_, why in table.failed.items())
        return _grid(f"{counted(len(table.runs), 'run')}, each at its end", names, last, "runs") + _notes(
            (*failed, *table.notes)
        )
    return _grid("", names, rows, "rows")


def problem_html(problem: Problem) -> str:
    """What a problem is."""
    size = sum(math.prod(shape) for _, _, shape in problem.layout())
    own = {} if type(problem).__name__ == "Network" else settings(problem)
    return _pairs(_named(problem), {"workers": problem.workers, "size of the model": size, **own})


def speeds_html(speeds: SpeedModel) -> str:
    """How long each worker's jobs take."""
    model = seeded_speeds(speeds, 0)
    rows = []
    for worker in range(min(model.n, _MOST_ROWS)):
        seconds = [model.seconds(worker, draw) for draw in range(_JOBS)]
        rows.append({"worker": worker, "mean seconds": sum(seconds) / _JOBS, "least": min(seconds), "most": max(seconds)})
    title = f"{label(speeds).partition('[')[0]}: the first {_JOBS} jobs"
    return _grid(title, ["worker", "mean seconds", "least", "most"], rows, "workers", model.n)


def algorithm_html(algorithm: Algorithm[Any]) -> str:
    """What a method is set to, and what it asks for."""
    about = {"keeps": algorithm.keeps, "needs": algorithm.needs, "wastes": algorithm.wastes}
    title = algorithm.title or algorithm.name or type(algorithm).__name__
    return _pairs(title, {**settings(algorithm), **{key: text for key, text in about.items() if text != "-"}})


def _named(thing: Any) -> str:
    """Its name without its settings, and the first sentence about it."""
    first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("``", "").replace("\n", " ")
    return f"{label(thing).partition('[')[0]}: {first}"


def _pairs(title: str, facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th style='text-align:left'>{_cell(k)}</th><td>{_cell(v)}</td></tr>" for k, v in facts.items())
    return f"<div><b>{_cell(title)}</b><table>{rows}</table></div>"


def _grid(title: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]], what: str, count: int | None = None) -> str:
    count = len(rows) if count is None else count
    head = "".join(f"<th>{_cell(name)}</th>" for name in names)
    lines = [f"<tr>{''.join(f'<td>{_cell(row[name])}</td>' for name in names)}</tr>" for row in rows]
    if len(rows) > _MOST_ROWS:  # the first and the last
        between = f"<tr>{'<td>…</td>' * len(names)}</tr>"
        lines[_MOST_ROWS // 2 : -_MOST_ROWS // 2] = [between]
    body = "".join(lines)
    more = f"<div>… of {count:,} {escape(what)}</div>" if count > _MOST_ROWS else ""
    above = f"<b>{_cell(title)}</b>" if title else ""
    return f"<div>{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"


def _notes(notes: Sequence[str]) -> str:
    shown = "".join(f"<li>{_cell(note)}</li>" for note in notes[:_MOST_ROWS])
    return f"<ul>{shown}</ul>" if notes else ""


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    if isinstance(value, (int, np.integer)):
        return f"{int(value):,}" if abs(int(value)) >= 10_000 else str(int(value))
    return number(float(value)) if isinstance(value, (float, np.floating)) else escape(shortened(str(value)))

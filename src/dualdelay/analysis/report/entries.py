"""From runs, sweeps and tables to the entries of a page: one for each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput
from ...engine.result import Run
from ...engine.table import Column, Table
from ...runs.load import method_label, method_settings
from ...runs.names import describe, label
from ...runs.sweep import Sweep
from ...storage.folder import Folder
from ...storage.record import RunRecord

MOST = 10_000  # runs on a page
_AXES = ("time", "version")
_RUN_NAMES = ("algorithm", "seed", "method", "problem", "speeds")


@dataclass(frozen=True)
class Entry:
    """A run, or those rows of a table that belong together."""

    label: str  # runs with the same label differ in their seeds alone
    method: str  # decides the colour
    seed: int | str
    setting: str  # problem and speeds, where they are not the same for all
    metrics: Table
    settings: dict[str, Any]  # of the method
    run: Run | None = None
    record: RunRecord | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        """What the run is called in a list."""
        parts = [self.label, *([self.setting] if self.setting else []), *([f"seed {self.seed}"] if self.seed != "" else [])]
        return ", ".join(parts)


@dataclass(frozen=True)
class Entries:
    """What a page is about."""

    runs: list[Entry]
    failed: list[tuple[str, str]] = field(default_factory=list)  # runs without a result, each with the reason
    notes: list[str] = field(default_factory=list)
    rows: Table | None = None  # a table that has no runs in it, which is shown as it is
    sweeps: list[Sweep] = field(default_factory=list)


def entries_of(things: Sequence[Run | Table]) -> Entries:
    """The entries of a page about these things."""
    runs: list[Entry] = []
    failed: list[tuple[str, str]] = []
    notes: list[str] = []
    rows: Table | None = None
    for thing in things:
        if isinstance(thing, Run):
            runs.append(_of_run(thing))
        elif isinstance(thing, Sweep):
            for names, run in zip(thing.points, thing.runs, strict=True):
                if run is not None:
                    runs.append(_of_run(run, names))
            failed += [(_named(thing.points[k]), why) for k, why in thing.failed.items()]
            notes += thing.notes
        elif not len(thing):
            raise BadInput("the table has no rows, so there is nothing to report; expected at least one.")
        elif any(axis in thing for axis in _AXES):
            runs += _of_table(thing)
        else:
            rows = thing
    empty = [run for run in runs if not len(run.metrics)]
    failed += [(run.name, "nothing was evaluated yet") for run in empty]
    runs = [run for run in runs if len(run.metrics)]
    if not runs and rows is None:
        why = f": {failed[0][0]} has no result, {failed[0][1]}" if failed else ""
        raise BadInput(f"there is nothing to report{why}. Give at least one run with an evaluation.")
    if len(runs) > MOST:
        raise BadInput(f"there are {len(runs):,} runs; a page holds {MOST:,} at most. Report some of them.")
    return Entries(_told_apart(runs), failed, notes, rows, [thing for thing in things if isinstance(thing, Sweep)])


def _of_run(run: Run, names: Mapping[str, Any] | None = None) -> Entry:
    record = None if run.folder is None else Folder(run.folder).record()
    description = record.algorithm if record is not None else {} if run.algorithm is None else describe(run.algorithm)
    named = names or {}
    text = named.get("algorithm") or (method_label(description) if run.algorithm is None else label(run.algorithm))
    seed = named.get("seed", "" if record is None else record.seed)
    setting = ", ".join(str(named[axis]) for axis in ("problem", "speeds") if axis in named)
    method = str(description.get("name") or description.get("class") or "run")
    return Entry(str(text), method, seed, setting, run.metrics, method_settings(description), run, record, run.folder)


def _of_table(table: Table) -> list[Entry]:
    """The runs of a table of the user's own: rows with the same texts and the same seed."""
    texts = [name for name in table if table[name].dtype.kind not in "fiub" and name not in _AXES]
    names = ["algorithm"] if "algorithm" in table else [name for name in texts if name not in ("problem", "speeds")]
    several = [name for name in ("problem", "speeds") if name in table]
    keys = [*names, *several, *(["seed"] if "seed" in table else [])]
    rows = list(zip(*(table[key].tolist() for key in keys), strict=True)) if keys else [()] * len(table)
    places: dict[tuple[Any, ...], list[int]] = {}
    for k, row in enumerate(rows):
        places.setdefault(row, []).append(k)
    numbers = [name for name in table if table[name].dtype.kind in "fiub" and name not in _RUN_NAMES]
    settings = [
        name
        for name in numbers
        if name not in _AXES
        and len(set(table[name].tolist())) > 1
        and all((table[name][own] == table[name][own[0]]).all() for own in places.values())
    ]
    if len(places) == len(table):  # a row for each run: nothing tells settings from results
        settings = [name for name in settings if name == "lr"]
    entries = []
    for row, own in places.items():
        at = dict(zip(keys, row, strict=True))
        text = ", ".join(str(at[name]) for name in names) or "all rows"
        method = str(table["method"][own[0]]) if "method" in table else text.partition("[")[0]
        setting = ", ".join(str(at[name]) for name in several)
        metrics = Table({name: table[name][own] for name in numbers if name not in settings})
        chosen = {name: table[name][own[0]].item() for name in settings}
        entries.append(Entry(text, method, at.get("seed", ""), setting, metrics, chosen))
    return entries


def _named(names: Mapping[str, Any]) -> str:
    texts = [str(names[name]) for name in ("algorithm", "problem", "speeds") if name in names]
    return ", ".join([*texts, f"seed {names['seed']}"])


def _told_apart(runs: Sequence[Entry]) -> list[Entry]:
    """Runs of several folders with the same name have their folder in it."""
    count = Counter(run.name for run in runs)
    again: Counter[str] = Counter()
    result = []
    for run in runs:
        if count[run.name] > 1:
            again[run.name] += 1
            where = f"{run.folder.parent.name}/{run.folder.name}" if run.folder is not None else f"number {again[run.name]}"
            run = replace(run, label=f"{run.label} ({where})")
        result.append(run)
    return result


def tidy(runs: Sequence[Entry], metric: str) -> Table:
    """One table of all evaluations with the runs' settings, as ``best`` and ``paired`` take it."""
    sizes = [len(run.metrics) for run in runs]
    shared = [key for key in runs[0].settings if all(_is_number(run.settings.get(key)) for run in runs)]
    varied = [key for key in shared if key == "lr" or len({run.settings[key] for run in runs}) > 1]
    names: dict[str, list[Any]] = {
        "algorithm": [run.label for run in runs],
        "seed": [run.seed for run in runs],
        "method": [run.method for run in runs],
        **{key: [run.settings[key] for run in runs] for key in varied},
    }
    columns: dict[str, Column] = {name: np.repeat(np.array(values), sizes) for name, values in names.items()}
    for name in (*_AXES, metric):
        if all(name in run.metrics for run in runs):
            columns[name] = np.concatenate([run.metrics[name] for run in runs])
    return Table(columns)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""From runs, sweeps and tables to the entries of a page: one for each run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput
from ...engine.result import Run
from ...engine.table import Column, Table
from ...runs.load import Kept, KeptRun, LoadedSweep, Place, home_of, method_settings, place_of, run_label, told_apart
from ...runs.names import describe, label
from ...runs.outcome import state_of
from ...runs.sweep import Sweep
from ...storage.folder import Folder
from ...storage.record import RunRecord

MOST = 10_000  # runs on a page
_AXES = ("time", "version")
_SETTINGS = ("problem", "speeds")
_RUN_NAMES = ("algorithm", "seed", "method", "problem", "speeds")

Thing = Run | Table | Kept


@dataclass(frozen=True)
class Entry:
    """A run, or those rows of a table that belong together."""

    label: str  # runs with the same label differ in their seeds alone
    method: str  # decides the colour
    seed: int | str
    metrics: Table
    settings: dict[str, Any]  # of the method
    places: Mapping[str, Place]  # its problem and speeds, as far as they are known
    home: object  # equal for the runs of one comparison, sweep or table
    run: Run | None = None
    record: RunRecord | None = None
    folder: Path | None = None
    state: str = ""  # why it has no end: interrupted, failed, under way or damaged; "" if it came to its end
    why: str = ""
    setting: str = ""  # problem and speeds, where they are not the same for all

    @property
    def curve(self) -> str:
        """What its curve is called: a run without an end has one beside those of its label that came to theirs."""
        return f"{self.label} ({self.state})" if self.state else self.label

    @property
    def name(self) -> str:
        """What the run is called in a list."""
        parts = [self.curve, *([self.setting] if self.setting else []), *([f"seed {self.seed}"] if self.seed != "" else [])]
        return ", ".join(parts)


@dataclass(frozen=True)
class Entries:
    """What a page is about."""

    runs: list[Entry]
    lost: list[Entry] = field(default_factory=list)  # runs of which nothing can be drawn
    unnamed: list[tuple[str, str]] = field(default_factory=list)  # damaged folders without a record, each with the reason
    notes: list[str] = field(default_factory=list)
    rows: Table | None = None  # a table that has no runs in it, which is shown as it is

    @property
    def without_end(self) -> dict[str, int]:
        """How many runs have no end, by what they are instead."""
        states = [run.state for run in (*self.runs, *self.lost) if run.state] + ["damaged"] * len(self.unnamed)
        return {state: states.count(state) for state in dict.fromkeys(states)}


def entries_of(things: Sequence[Thing]) -> Entries:
    """The entries of a page about these things; a run that is among them twice is on it once."""
    found: list[Entry] = []
    orphans: dict[str, KeptRun] = {}
    notes: list[str] = []
    rows: Table | None = None
    for number, thing in enumerate(things):
        if isinstance(thing, Run):
            found.append(_of_run(thing, number))
        elif isinstance(thing, (Kept, LoadedSweep)):
            kept = thing.kept if isinstance(thing, LoadedSweep) else thing
            found += [_of_kept(one, one.record) for one in kept.runs if one.record is not None]
            orphans |= {os.path.realpath(one.path): one for one in kept.runs if one.record is None}
            notes += kept.notes
        elif isinstance(thing, Sweep):
            found += _of_sweep(thing, number)
            notes += thing.notes
        elif not len(thing):
            raise BadInput("the table has no rows, so there is nothing to report; expected at least one.")
        elif any(axis in thing for axis in _AXES):
            found += _of_table(thing, number)
        else:
            rows = thing
    once = {number if entry.folder is None else os.path.realpath(entry.folder): entry for number, entry in enumerate(found)}
    placed = _placed(list(once.values()))
    adopted = {one.path: _adopted(one, placed) for one in orphans.values()}
    unnamed = {one.path: one.why for one in orphans.values() if adopted[one.path] is None}
    entries = _told_apart([*placed, *(entry for entry in adopted.values() if entry is not None)])
    runs = [entry for entry in entries if len(entry.metrics)]
    lost = [
        entry if entry.state else replace(entry, state="not evaluated", why="nothing was evaluated yet")
        for entry in entries
        if not len(entry.metrics)
    ]
    if not runs and rows is None:
        reasons = [(entry.name, entry.why) for entry in lost] + [(path.name, why) for path, why in unnamed.items()]
        why = f": {reasons[0][0]} has no result, {reasons[0][1].rstrip('.')}" if reasons else ""
        raise BadInput(f"there is nothing to report{why}. Give at least one run with an evaluation.")
    if len(runs) > MOST:
        raise BadInput(f"there are {len(runs):,} runs; a page holds {MOST:,} at most. Report some of them.")
    return Entries(runs, lost, [(path.name, why) for path, why in unnamed.items()], list(dict.fromkeys(notes)), rows)


def _of_kept(kept: KeptRun, record: RunRecord) -> Entry:
    """A run of a folder, as far as it can be read."""
    text = str(kept.names["algorithm"])
    return Entry(
        label=text,
        method=_method(record.algorithm, text),
        seed=record.seed,
        metrics=Table({}) if kept.run is None else kept.run.metrics,
        settings=method_settings(record.algorithm),
        places={axis: place_of(axis, kept.path, record) for axis in _SETTINGS},
        home=home_of(kept.path, record),
        run=kept.run,
        record=record,
        folder=kept.path,
        state=kept.state,
        why=kept.why,
    )


def _adopted(orphan: KeptRun, entries: Sequence[Entry]) -> Entry | None:
    """A run whose record cannot be read, by a run beside it that its folder's name tells it differs from by the seed."""
    stem, _, seed = orphan.path.name.rpartition("-seed")
    for entry in entries:
        beside = entry.folder is not None and entry.folder.parent == orphan.path.parent
        if seed.isdecimal() and beside and entry.folder is not None and entry.folder.name == f"{stem}-seed{entry.seed}":
            lost = replace(entry, seed=int(seed), metrics=Table({}), run=None, record=None)
            return replace(lost, folder=orphan.path, state=orphan.state, why=orphan.why)
    return None


def _of_run(run: Run, number: int) -> Entry:
    if run.folder is not None:
        record, state = Folder(run.folder).record(), state_of(run)
        names = {"algorithm": run_label(run.folder, record)}
        return _of_kept(
            KeptRun(run.folder, names, record, run, state, state and f"{state} at version {run.version}"), record
        )
    text = "run" if run.algorithm is None else label(run.algorithm)
    return _computed(run, {"algorithm": text, "seed": ""}, number)


def _of_sweep(sweep: Sweep, number: int) -> list[Entry]:
    entries = []
    for k, (names, run) in enumerate(zip(sweep.points, sweep.runs, strict=True)):
        entry = _computed(run, names, number)
        entries.append(replace(entry, state="failed", why=sweep.failed[k]) if k in sweep.failed else entry)
    return entries


def _computed(run: Run | None, names: Mapping[str, Any], home: object) -> Entry:
    """A run that was computed here, by its names; None for one that failed."""
    record = None if run is None or run.folder is None else Folder(run.folder).record()
    text, seed, description = str(names.get("algorithm", "run")), names.get("seed", ""), dict[str, Any]()
    if record is not None:
        description = record.algorithm
    elif run is not None and run.algorithm is not None:
        description = describe(run.algorithm)
    places = {axis: Place({"name": names[axis]}, str(names[axis]), seed, home) for axis in _SETTINGS if axis in names}
    if "problem" not in places and run is not None and run.problem is not None:
        problem = describe(run.problem)
        kind = json.dumps(problem, default=str) if "name" in problem else str(id(run.problem))
        places["problem"] = Place(problem, kind, seed, home)
    metrics, folder = (Table({}), None) if run is None else (run.metrics, run.folder)
    settings = method_settings(description)
    return Entry(text, _method(description, text), seed, metrics, settings, places, home, run, record, folder)


def _method(description: Mapping[str, Any], text: str) -> str:
    """The name of a method: ours, or what the label calls a user's own."""
    return str(description.get("name") or text.partition("[")[0])


def _of_table(table: Table, number: int) -> list[Entry]:
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
        seed = at.get("seed", "")
        axes = {name: Place({"name": str(at[name])}, str(at[name]), seed, number) for name in several}
        metrics = Table({name: table[name][own] for name in numbers if name not in settings})
        chosen = {name: table[name][own[0]].item() for name in settings}
        entries.append(Entry(text, method, seed, metrics, chosen, axes, number))
    return entries


def _placed(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with their problem and speeds, where those are not the same for all whose are known."""
    texts: dict[int, list[str]] = {}
    for axis in _SETTINGS:
        known = {k: entry.places[axis] for k, entry in enumerate(entries) if axis in entry.places}
        for k, text in zip(known, told_apart(list(known.values())) if known else (), strict=False):
            texts.setdefault(k, []).append(text)
    return [replace(entry, setting=", ".join(texts.get(k, ()))) for k, entry in enumerate(entries)]


def _told_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Runs of several comparisons that have one label and seed have the comparison in their label, with all its seeds."""
    homes: dict[tuple[str, str], dict[object, list[Any]]] = {}
    for entry in entries:
        homes.setdefault((entry.label, entry.setting), {}).setdefault(entry.home, []).append(entry.seed)
    doubled = {
        key: own
        for key, own in homes.items()
        if len(seeds := [one for some in own.values() for one in some]) > len(set(seeds))
    }
    result = []
    for entry in entries:
        if own := doubled.get((entry.label, entry.setting)):
            same = [home for home in own if _short(home, own) == _short(entry.home, own)]
            text = _short(entry.home, own) if len(same) == 1 else str(entry.home)
            entry = replace(entry, label=f"{entry.label} ({text})")
        result.append(entry)
    return result


def _short(home: object, homes: Mapping[object, object]) -> str:
    """What a comparison is called beside others: its folder's name, with that of the folder around it if need be."""
    if not isinstance(home, Path):
        return f"number {list(homes).index(home) + 1}"
    names = [other.name for other in homes if isinstance(other, Path)]
    return home.name if names.count(home.name) == 1 else f"{home.parent.name}/{home.name}"


def tidy(runs: Sequence[Entry], failed: Sequence[Entry], metric: str) -> Table:
    """One table of all evaluations with the runs' settings, as ``best`` and ``paired`` take it."""
    sizes = [len(run.metrics) for run in runs]
    every = [*runs, *failed]
    shared = [key for key in runs[0].settings if all(_is_number(run.settings.get(key)) for run in every)]
    varied = [key for key in shared if key == "lr" or len({run.settings[key] for run in every}) > 1]

    names: dict[str, list[Any]] = {
        "algorithm": [run.label for run in every],
        "seed": [run.seed for run in every],
        "method": [run.method for run in every],
        **{key: [run.settings[key] for run in every] for key in varied},
    }
    count = len(runs)
    columns: dict[str, Column] = {name: np.repeat(np.array(values[:count]), sizes) for name, values in names.items()}
    for name in (*_AXES, metric):
        if all(name in run.metrics for run in runs):
            columns[name] = np.concatenate([run.metrics[name] for run in runs])
    absent = [{name: values[count + k] for name, values in names.items()} for k in range(len(failed))]
    return Table(columns, list(names), absent)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

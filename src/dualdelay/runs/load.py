"""What a folder holds: one run, or the runs that a comparison or a sweep left in it."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core import Algorithm
from ..core.errors import BadInput, NotSaved, require_path
from ..engine.result import Run
from ..engine.table import Table
from ..storage.files import Missing, list_files, load_table
from ..storage.folder import Folder
from ..storage.record import RunRecord
from .names import label, rebuild, slug
from .outcome import load_run
from .sweep import NamedRun, Sweep

_UNFINISHED = ("interrupted", "failed")


def load(folder: str | Path) -> Run | Sweep:
    """What a folder holds: a run, finished or not, or of a folder of runs the sweep that they are.

    Neither the problem nor Ray is needed: ``dd.load("runs/mine").state_dict()`` gives a model's weights by name, and
    ``.metrics``, ``.workers``, ``.trace``, ``.notes`` what is known of the run. One that was interrupted is as it was saved
    last; ``ended`` is then "interrupted", or "failed" with a note that says why. In a sweep, runs that have not come to
    their end stand in its ``failed``, and a folder whose record is damaged in its ``notes``.
    """
    require_path("folder", folder)
    path = Path(folder)
    if not path.is_dir():
        raise BadInput(
            f"{path} is not the folder of a run: there is no such folder. Give that of a run, a comparison or a sweep."
        )
    return load_run(path) if (path / "config.json").exists() else load_runs(path)


def load_runs(folder: Path, tell: Callable[[float, str], None] | None = None) -> Sweep:
    """The runs in a folder as one sweep; ``tell`` is told the share that is read."""
    paths = [path.parent for path in list_files(folder, "*/config.json")]
    records: dict[Path, RunRecord] = {}
    notes = []
    for path in paths:
        try:
            records[path] = Folder(path).record()
        except (BadInput, NotSaved) as error:
            notes.append(f"{path.name} is left out: {str(error).rstrip('.')}")
    if not records:
        damaged = f" ({notes[0]})" if notes else ""
        raise BadInput(
            f"{folder} is not the folder of a run, and holds none{damaged}; expected a config.json in it or in its folders."
        )
    runs: list[Run | None] = []
    failed: dict[int, str] = {}
    for k, path in enumerate(records):
        if tell is not None:
            tell(k / len(records), f"{k} of {len(records)} runs read")
        try:
            run = load_run(path)
        except (BadInput, NotSaved) as error:
            failed[k] = str(error)
            runs.append(None)
            continue
        if run.ended in _UNFINISHED:
            why = f" ({run.notes[-1]})" if run.ended == "failed" and run.notes else ""
            failed[k] = f"{run.ended} at version {run.version}{why}; go on with: dualdelay resume {path}"
        runs.append(None if k in failed else run)
    names = _names(folder, records, notes)
    methods = [record.algorithm for record in records.values()]
    points = [NamedRun(own, _method(one), method_settings(one)) for own, one in zip(names, methods, strict=True)]
    return Sweep(points, _alike(runs), failed, notes)


def _alike(runs: Sequence[Run | None]) -> list[Run | None]:
    """The runs with those metrics alone that all of them have, for one table."""
    all_metrics = [list(run.metrics) for run in runs if run is not None]
    common = [name for name in all_metrics[0] if all(name in names for names in all_metrics)] if all_metrics else []
    return [
        run if run is None else replace(run, metrics=Table({name: run.metrics[name] for name in common})) for run in runs
    ]


def _names(folder: Path, records: Mapping[Path, RunRecord], notes: list[str]) -> list[dict[str, Any]]:
    """Each run's names in the sweep's table: method, seed, and what else is not the same for all."""
    given = _given_labels(folder, notes)
    several = {axis: texts for axis in ("problem", "speeds") if (texts := _texts(axis, list(records.values())))}
    names = []
    for k, (path, record) in enumerate(records.items()):
        method = record.algorithm
        called = [name for name, seed in given if seed == record.seed and f"{path.name}-".startswith(f"{slug(name)}-")]
        text = max(called, key=len, default="") or method_label(method)
        own = {"algorithm": text, "seed": record.seed}
        own |= {} if "name" in method else {"method": str(method.get("class"))}
        names.append(own | {axis: texts[k] for axis, texts in several.items()})
    return names


def _given_labels(folder: Path, notes: list[str]) -> list[tuple[str, int]]:
    """What a comparison called its methods, each with the seeds that it had; the folders' names begin with it."""
    try:
        columns, _ = load_table(folder / "comparison.parquet")
    except Missing:
        return []
    except (BadInput, NotSaved) as error:
        notes.append(str(error).rstrip("."))
        return []
    if not columns.keys() >= {"algorithm", "seed"}:
        return []
    pairs = dict.fromkeys(zip(columns["algorithm"].tolist(), columns["seed"].tolist(), strict=True))
    return [(str(name), int(seed)) for name, seed in pairs]


def _method(description: Mapping[str, Any]) -> Algorithm[Any] | None:
    """A recorded method; None if it is a user's own."""
    try:
        method: Algorithm[Any] = rebuild("algorithm", description)
    except BadInput:
        return None
    return method


def method_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recorded method; those of a user's own are read in its repr, as far as they are plain values."""
    if "name" in description:
        return {key: value for key, value in description.items() if key != "name"}
    try:
        written = ast.parse(str(description.get("repr")), mode="eval").body
    except (SyntaxError, ValueError):
        return {}
    values = {}
    for keyword in written.keywords if isinstance(written, ast.Call) else ():
        with contextlib.suppress(ValueError):
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
    return values


def method_label(description: Mapping[str, Any]) -> str:
    """The text that legends and tables have for a recorded method."""
    method = _method(description)
    return str(description.get("repr") or description.get("class")) if method is None else label(method)


def _texts(axis: str, records: Sequence[RunRecord]) -> list[str]:
    """A text for each run's problem or speeds; none if runs of one seed have the same."""
    kinds: dict[int, list[str]] = {}  # by seed: those that are not the same
    for record in records:
        kind, own = _kind(axis, record), kinds.setdefault(record.seed, [])
        own += [] if kind in own else [kind]
    if max(map(len, kinds.values())) == 1:
        return []
    values = [getattr(record, axis) or {"name": "real workers"} for record in records]
    keys = dict.fromkeys(key for one in values for key in one if key not in ("name", "seed", "class", "repr", "has"))
    varied = [key for key in keys if any(one.get(key) != values[0].get(key) for one in values)]
    texts, places = [], [kinds[record.seed].index(_kind(axis, record)) for record in records]
    for one in values:
        inside = ",".join(f"{key}={one[key]}" for key in varied if key in one)
        name = str(one.get("repr") or one.get("name") or one.get("class"))
        texts.append(f"{name}[{inside}]" if inside else name)
    of_text = {text: {place for other, place in zip(texts, places, strict=True) if other == text} for text in texts}
    return [text if len(of_text[text]) == 1 else f"{text} ({place})" for text, place in zip(texts, places, strict=True)]


def _kind(axis: str, record: RunRecord) -> str:
    """What is equal for runs of one seed on the same problem, or at the same speeds."""
    return record.fingerprint if axis == "problem" else json.dumps([record.speeds, record.fleet], sort_keys=True)

"""What a folder holds: one run, or the runs that a comparison or a sweep left in it."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core import Algorithm
from ..core.errors import BadInput, NotSaved, require_path
from ..engine.result import Run
from ..engine.table import Table
from ..storage.files import Missing, list_files, load_table
from ..storage.folder import Folder
from ..storage.record import RunRecord
from .names import alternatives, label, rebuild, slug
from .outcome import load_run, read_run, state_of, user_of
from .sweep import NamedRun, Sweep

_OF_A_RUN = ("config.json", "start.safetensors", "result.json")  # files by which a run's folder is known
_COMMAND = "command.toml"
_EXPECTED = "expected a config.json in it or in its folders."
_NOT_COMPARED = ("seed", "repr", "has")  # parts of a description that may follow the seed


@dataclass(frozen=True)
class KeptRun:
    """A run in a folder, as far as it can be read."""

    path: Path
    names: Mapping[str, Any] = field(default_factory=dict)  # method, seed, and what is not the same for all runs beside it
    record: RunRecord | None = None  # None if it cannot be read
    run: Run | None = None  # None if nothing of it can be read
    state: str = ""  # why it has no end: damaged, under way, interrupted or failed; "" if it came to its end
    why: str = ""


@dataclass(frozen=True)
class Kept:
    """The runs in a folder, those among them that have no end, and folders in it that hold runs themselves."""

    folder: Path
    runs: Sequence[KeptRun]
    notes: Sequence[str] = ()
    deeper: Mapping[Path, int] = field(default_factory=dict)  # how many runs such a folder has


class LoadedSweep(Sweep):
    """The sweep that a folder's runs are; ``kept`` has all of them, also as far as those came that have no end."""

    def __init__(self, kept: Kept) -> None:
        known = [one for one in kept.runs if one.record is not None]
        if not known:
            why = [one.why.rstrip(".") for one in kept.runs] or [not_looked_into(one) for one in kept.deeper.items()]
            raise BadInput(f"{kept.folder} is not the folder of a run, and holds none ({why[0]}); {_EXPECTED}")
        ended = [None if one.state else one.run for one in known]
        methods = [one.record.algorithm for one in known if one.record is not None]
        points = [
            NamedRun(dict(one.names), _method(method), method_settings(method))
            for one, method in zip(known, methods, strict=True)
        ]
        lost = [f"{one.path.name} is left out: {one.why.rstrip('.')}" for one in kept.runs if one.record is None]
        failed = {k: one.why for k, one in enumerate(known) if one.state}
        super().__init__(points, _alike(ended), failed, [*lost, *kept.notes, *map(not_looked_into, kept.deeper.items())])
        self.kept = kept


def load(folder: str | Path) -> Run | Sweep:
    """What a folder holds: a run, finished or not, or of a folder of runs the sweep that they are.

    Neither the problem nor Ray is needed: ``dd.load("runs/mine").state_dict()`` gives a model's weights by name, and
    ``.metrics``, ``.workers``, ``.trace``, ``.notes`` what is known of the run. One that was interrupted is as it was saved
    last; ``ended`` is then "interrupted", or "failed" with a note that says why; a note says so if it is under way. In a
    sweep, runs that have not come to their end stand in its ``failed``, and a folder whose record is damaged, or that holds
    runs itself, in its ``notes``.
    """
    path = _required(folder)
    return load_run(path) if (path / "config.json").exists() else LoadedSweep(kept_in(path))


def _required(folder: str | Path) -> Path:
    require_path("folder", folder)
    path = Path(folder)
    if not path.is_dir():
        raise BadInput(
            f"{path} is not the folder of a run: there is no such folder. Give that of a run, a comparison or a sweep."
        )
    return path


def not_looked_into(deeper: tuple[Path, int]) -> str:
    """What is said of a folder of runs in the folder that was asked for."""
    path, count = deeper
    return f"{path.name} is not looked into, which holds {count:,} {'run' if count == 1 else 'runs'} itself"


def run_folders(folder: Path) -> tuple[list[Path], dict[Path, int]]:
    """The folders in a folder that are those of runs, also if they lack a file, and those that hold so many runs."""
    runs, deeper = [], {}
    for path in list_files(folder, "*/"):
        if path.name.startswith(".") or not path.is_dir():  # one that is being made, or was abandoned
            continue
        if any((path / name).exists() for name in _OF_A_RUN):
            runs.append(path)
        elif count := len(list_files(path, "*/config.json")):
            deeper[path] = count
    return runs, deeper


def kept_in(folder: str | Path, tell: Callable[[float, str], None] | None = None) -> Kept:
    """The runs in a folder, or the one that it is the folder of; ``tell`` is told the share that is read."""
    path = _required(folder)
    paths, deeper = ([path], {}) if (path / "config.json").exists() else run_folders(path)
    records: dict[Path, RunRecord] = {}
    unknown: dict[Path, str] = {}
    notes: list[str] = []
    for place in paths:
        try:
            records[place] = Folder(place).record()
        except (BadInput, NotSaved) as error:
            unknown[place] = str(error)
    if not paths and not deeper:
        raise BadInput(f"{folder} is not the folder of a run, and holds none; {_EXPECTED}")
    names = dict(zip(records, _names(records, notes), strict=True))
    runs = []
    for k, place in enumerate(paths):
        if tell is not None:
            tell(k / len(paths), f"{k} of {len(paths)} runs read")
        if place in unknown:
            runs.append(KeptRun(place, state="damaged", why=unknown[place]))
        else:
            runs.append(_kept(place, names[place], records[place]))
    return Kept(path, runs, notes, deeper)


def _kept(path: Path, names: Mapping[str, Any], record: RunRecord) -> KeptRun:
    try:
        run, damage = read_run(path)
    except (BadInput, NotSaved) as error:
        return KeptRun(path, names, record, None, "damaged", str(error))
    if damage:
        return KeptRun(path, names, record, run, "damaged", f"{damage}; to restore its end: dualdelay resume {path}")
    state = state_of(run)
    why = f" ({run.notes[-1]})" if state == "failed" and run.notes else ""
    then = f" in {user_of(path)}" if state == "under way" else f"; go on with: dualdelay resume {path}"
    return KeptRun(path, names, record, run, state, f"{state} at version {run.version}{why}{then}" if state else "")


def _alike(runs: Sequence[Run | None]) -> list[Run | None]:
    """The runs with those metrics alone that all of them have, for one table."""
    all_metrics = [list(run.metrics) for run in runs if run is not None]
    common = [name for name in all_metrics[0] if all(name in names for names in all_metrics)] if all_metrics else []
    return [
        run if run is None else replace(run, metrics=Table({name: run.metrics[name] for name in common})) for run in runs
    ]


def _names(records: Mapping[Path, RunRecord], notes: list[str]) -> list[dict[str, Any]]:
    """Each run's names in the sweep's table: method, seed, and what else is not the same for all."""
    given = {folder: _given_labels(folder, notes) for folder in dict.fromkeys(path.parent for path in records)}
    texts = {axis: told_apart([place_of(axis, path, record) for path, record in records.items()]) for axis in _AXES}
    names = []
    for k, (path, record) in enumerate(records.items()):
        own = {"algorithm": _label(path, record, given[path.parent]), "seed": record.seed}
        names.append(own | {axis: several[k] for axis, several in texts.items() if several})
    return names


def run_label(path: Path, record: RunRecord) -> str:
    """What a run's method is called: as its comparison or command called it, or by its class if nobody did."""
    return _label(path, record, _given_labels(path.parent, []))


def _label(path: Path, record: RunRecord, given: Sequence[tuple[str, int]]) -> str:
    called = [name for name, seed in given if seed == record.seed and f"{path.name}-".startswith(f"{slug(name)}-")]
    method = _method(record.algorithm)
    if called or method is not None:
        return max(called, key=len, default="") or label(method)
    return _typed(path) or method_label(record.algorithm)


def _typed(path: Path) -> str:
    """What the command that made a run called its method, which is the user's own; "" if it is not known."""
    for place, key in ((path, "algorithm"), (path.parent, "algorithms")):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is no TOML: then nothing is known
            given = tomllib.loads((place / _COMMAND).read_text(encoding="utf-8")).get(key, [])
            texts = [one for text in ([given] if isinstance(given, str) else given) for one in alternatives(str(text))]
            fitting = [text for text in texts if place == path or f"{path.name}-".startswith(f"{slug(text)}-seed")]
            if len(fitting) == 1:
                return fitting[0]
    return ""


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
    """The text that legends and tables have for a recorded method; a user's own has its class and its settings in it."""
    method = _method(description)
    if method is not None:
        return label(method)
    inside = ",".join(f"{key}={value}" for key, value in method_settings(description).items())
    return f"{description.get('class')}[{inside}]" if inside else str(description.get("class"))


_AXES = ("problem", "speeds")


@dataclass(frozen=True)
class Place:
    """What a run was computed on, or at which speeds."""

    description: Mapping[str, Any]
    kind: str  # equal for runs of one seed on the same problem, or at the same speeds
    seed: Any
    home: Any  # equal for the runs of one grid, whose problem may follow the seed in whatever way


def place_of(axis: str, path: Path, record: RunRecord) -> Place:
    """The problem or the speeds of a recorded run."""
    home = home_of(path, record)
    if axis == "problem":
        return Place(record.problem, record.fingerprint, record.seed, home)
    kind = json.dumps([record.speeds, record.fleet], sort_keys=True)
    return Place(record.speeds or {"name": "real workers"}, kind, record.seed, home)


def home_of(path: Path, record: RunRecord) -> Path:
    """The folder of the comparison or sweep that a run is one of, or its own."""
    return path.parent if path.name.endswith(f"-seed{record.seed}") else path


def told_apart(places: Sequence[Place]) -> list[str]:
    """A text for each run's problem or speeds; none if all have the same, but for what follows the seed."""
    kinds: dict[Any, list[str]] = {}  # by seed: those that are not the same
    homes: dict[Any, dict[Any, str]] = {}  # by home and seed: what does not follow the seed
    for place in places:
        own = kinds.setdefault(place.seed, [])
        own += [] if place.kind in own else [place.kind]
        homes.setdefault(place.home, {})[place.seed] = json.dumps(_lasting(place.description), sort_keys=True, default=str)
    distinct = {(frozenset(own), frozenset(own.values())) for own in homes.values()}
    apart = any(one[0].isdisjoint(other[0]) and one[1] != other[1] for one, other in itertools.combinations(distinct, 2))
    if all(len(own) == 1 for own in kinds.values()) and not apart:
        return []
    lasting = [_lasting(place.description) for place in places]
    keys = dict.fromkeys(key for one in lasting for key in one if key not in ("name", "class"))
    varied = [key for key in keys if any(one.get(key) != lasting[0].get(key) for one in lasting)]
    texts, numbers = [], [kinds[place.seed].index(place.kind) for place in places]
    for one in (place.description for place in places):
        inside = ",".join(f"{key}={one[key]}" for key in varied if key in one)
        name = str(one.get("repr") or one.get("name") or one.get("class"))
        texts.append(f"{name}[{inside}]" if inside else name)
    of_text = {text: {number for other, number in zip(texts, numbers, strict=True) if other == text} for text in texts}
    return [text if len(of_text[text]) == 1 else f"{text} ({k})" for text, k in zip(texts, numbers, strict=True)]


def _lasting(description: Mapping[str, Any]) -> dict[str, Any]:
    """What of a description does not follow the seed."""
    return {
        key: _lasting(value) if isinstance(value, Mapping) else value
        for key, value in description.items()
        if key not in _NOT_COMPARED
    }

"""What the folder of one run holds, without its problem and without its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import Algorithm, State
from ..core.aggregate import AggregateState
from ..core.errors import BadInput
from ..engine.evaluation import Best, WorkerRows, metric_rows
from ..engine.result import Names, Run, troubles
from ..engine.table import Table
from ..engine.trace import Recorder, Trace
from ..storage.files import Damaged
from ..storage.folder import Folder
from ..storage.locks import LOCK_FILE, InUse, Lock
from ..storage.record import RunRecord
from .names import rebuild

_UNFINISHED = ("interrupted", "failed")


def load_run(folder: str | Path) -> Run:
    """What a run's folder holds, finished or not: metrics, trace, weights and state dict."""
    return read_run(folder)[0]


def read_run(folder: str | Path) -> tuple[Run, str]:
    """What a run's folder holds, and what is wrong with the files without which it has no end; "" if nothing is."""
    run, damage = _read(Folder(Path(folder)))
    user = user_of(Path(folder)) if run.ended in _UNFINISHED else ""
    if user:
        run = replace(run, notes=(*run.notes, f"it is under way in {user}; this is what was saved last"))
    return run, damage


def state_of(run: Run) -> str:
    """Why a run has no end: it is under way, interrupted or failed; "" if it came to its end."""
    if run.ended not in _UNFINISHED:
        return ""
    return "under way" if run.folder is not None and user_of(run.folder) else run.ended


def user_of(folder: Path) -> str:
    """Which process computes the run in a folder right now, such as "process 7 on host, since ..."; "" if none does."""
    file = folder / LOCK_FILE
    try:
        holder = file.read_text(errors="replace")[:200] if file.is_file() and not file.is_symlink() else ""
        if holder:  # a process that was killed leaves its name behind, but not its lock
            Lock(folder).release()
    except InUse:
        return holder
    except (BadInput, OSError):  # it cannot be locked, so nobody holds it here
        pass
    return ""


def _read(place: Folder) -> tuple[Run, str]:
    record, (result, warnings), names = place.record(), result_of(place), place.names()
    damage = warnings[0] if warnings else ""
    try:
        method = rebuild("algorithm", record.algorithm)
    except BadInput:  # a user's own
        method = None
    try:
        loaded = place.load()
    except Damaged as error:
        if result is None:
            raise
        if "returned_version" in result:  # what it left is not where it ended
            said = "It was stopped early, so its last state is lost; the model that it returned is in model.safetensors."
            raise Damaged(f"{error} {said}") from None
        return _finished(place, record, result, method, None, names, [str(error)]), ""
    if loaded is None:
        x = place.start()
        empty = Table.of([], ("time", "version", "objective"))
        state, nothing = State(x, 0), Recorder().trace()
        ended, notes = _stopped(place, warnings)
        return Run(method, None, state, nothing, empty, 0.0, ended, None, place.path, notes, names=names), damage
    content, rows, problems = loaded
    if result is not None and not problems and result.get("moment") != content["moment"]:
        problems.append("the last checkpoint is missing")
    state = _state(content["state"])
    if result is not None and not (problems and "returned_version" in result):  # its last weights are not those it left
        try:
            return _finished(place, record, result, method, None if problems else state, names, problems), ""
        except BadInput as error:
            warnings = [_instead(error)]
    evaluation = content["evaluation"]
    best = None if evaluation["best"] is None else Best(**evaluation["best"])
    best = best if best is not None and best.x is not None else None
    trace = Trace(rows, content["events"])
    metrics = Table.of(metric_rows(evaluation["metrics"]), evaluation["metrics"]["names"])
    workers = WorkerRows.loaded(evaluation["workers"]).table()
    older = [f"{problem}; an older checkpoint was used" for problem in problems]
    if result is not None:  # it came to an end, which cannot be read any more
        damage = (*warnings, *older)[0]
    ended, notes = _stopped(place, [*warnings, *older, *troubles(trace)])
    run = Run(
        *(method, None, state, trace, metrics, content["now"], ended, None, place.path, notes, workers, best),
        names=names,
    )
    return run, damage


def _stopped(place: Folder, notes: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """How a run without a result ended, and its notes with the reason if it failed."""
    why = (place.failure() or "").rstrip(".")
    return ("failed", (*notes, f"it could not go on: {why}")) if why else ("interrupted", tuple(notes))


def _instead(error: BadInput) -> str:
    return f"{str(error).rstrip('.')}; what the last checkpoint has is taken"


def result_of(place: Folder) -> tuple[dict[str, Any] | None, list[str]]:
    """How a run ended, if it did, and what is wrong with that."""
    try:
        return place.result(), []
    except Damaged as error:
        return None, [_instead(error)]


def _finished(
    place: Folder,
    record: RunRecord,
    result: Mapping[str, Any],
    method: Algorithm[Any] | None,
    state: State | None,
    names: Names,
    problems: Sequence[str] = (),
) -> Run:
    """A finished run, from the files that it left behind; without its last state, that is made of its model."""
    metrics, like = place.table("metrics"), place.start() if state is None else state.weights
    weights = names.flat(place.weights("model"), like)
    if state is None:
        state = State(weights, 0, version=int(result["updates"]))
    best = best_of(place, record, result, metrics, like)
    time, notes = float(result["time"]), (*result["notes"], *problems)
    return Run(
        *(method, None, state, place.trace(), metrics, time, result["ended"], result["audit"], place.path, notes),
        *(place.table("workers"), best, weights),
        names=names,
    )


def best_of(place: Folder, record: RunRecord, result: Mapping[str, Any], metrics: Table, like: Tensor) -> Best | None:
    """The best model of a finished run; its last evaluation, which is in no checkpoint, may have found it."""
    if result.get("best_version") is None:
        return None
    best = Best.by(record.keep_best or "", tuple(metrics))
    best.value, best.version = float(result["best_value"]), int(result["best_version"])
    best.x = place.names().flat(place.weights("best"), like)
    for row in metrics.rows():
        if row["version"] == best.version and row.get(best.metric) == best.value:
            best.answered, best.share = row.get("answered", -1.0), row.get("share", -1.0)
    return best


def _state(saved: Mapping[str, Any]) -> State:
    """What the server knew, as far as every method's state has it."""
    kind = AggregateState if "total" in saved and "table" in saved else State
    state = kind(saved["weights"], saved["workers"])
    for field in fields(kind):
        if field.name in saved:
            setattr(state, field.name, saved[field.name])
    return state

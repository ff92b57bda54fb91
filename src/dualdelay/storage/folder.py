"""A run's folder: its configuration, trace, metrics, checkpoints and final model.

A checkpoint is one safetensors file named by its moment (how much had happened) and by a digest of its bytes; every other
file contains a digest of its content. So damage shows. One process at a time may write to a folder.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..core.errors import BadInput, NotSaved, require_path
from ..engine.result import Names, Run
from ..engine.table import Table
from ..engine.trace import ARRIVAL_COLUMNS, Course, Recorder, Trace, is_trace
from . import files, parts
from .files import Damaged, Missing
from .locks import LOCK_FILE, InUse, Lock
from .record import RunRecord

FORMAT = 4  # of a folder; other formats are refused
_FIXED = "fixed: "  # before the names of tensors that no training moves
_CHECKPOINT = re.compile(r"(\d{12,})-([0-9a-f]{16})\.safetensors")  # moment and digest
_PART = re.compile(r"(\d{12,})-(\d{12,})\.parquet")  # the arrivals and events that came before this part of the trace
_SUBFOLDERS = ("checkpoints", "trace", "moved", "output")


class Saved(NamedTuple):
    """A checkpoint with the trace up to it."""

    content: dict[str, Any]  # of the checkpoint, where ``events`` are those of the trace
    rows: dict[str, Any]  # the columns of the trace
    problems: list[str]  # with newer checkpoints


def digest_of(x: Tensor) -> str:
    """A digest of a tensor's bytes."""
    return files.short_digest(files.tensor_bytes(x))


class Folder:
    """A run's folder on disk; as a context, locked until the end of the block."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        require_path("folder", path)
        self.path = path
        self._lock = lock
        self._events = 0  # those in the saved parts of the trace
        self._course = Course()  # the digest of these parts
        self._record: RunRecord | None = None  # as it was read or written last

    def hold(self) -> Folder:
        """Lock the folder, unless it is locked already."""
        if self._lock is None:
            for path in (self.path / name for name in _SUBFOLDERS):
                if path.is_symlink():
                    raise BadInput(f"{path} is a link to another place, which no run makes; it is not followed.")
            self._lock = Lock(self.path)
        return self

    def close(self, *_: object) -> None:
        """Let other processes and threads write to the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    __enter__, __exit__ = hold, close

    @staticmethod
    def require_new(path: Path) -> None:
        """Refuse a folder that exists, unless it is empty and can be replaced, or that cannot be created."""
        require_path("folder", path)
        try:
            if not (path.exists() or path.is_symlink()):
                return
            if is_empty(path):
                _require_replaceable(path)
                return
        except OSError as error:
            raise BadInput(f"could not create {path} ({error.strerror}); choose another.") from None
        if not (path / "config.json").exists():
            raise BadInput(f"{path} exists; a run has a folder of its own. Choose another name.")
        try:
            Lock(path).release()
        except InUse:
            raise
        except BadInput:  # it cannot be locked, and is refused anyway
            pass
        raise BadInput(
            f"{path} exists; a run has a folder of its own. Choose another, or remove it, or go on with the run in it: "
            f"dualdelay resume {path}, or if its problem is your own dd.resume({str(path)!r}, problem=...)."
        )

    @classmethod
    def require_possible(cls, path: Path) -> None:
        """Refuse a folder that cannot be created where it is to be, before anything is started for it."""
        place = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not place.is_dir():
            raise BadInput(f"could not create {path}: {place} is no folder. Choose another folder.")
        try:  # what may be written to and what can be are not the same, such as under /proc
            Path(tempfile.mkdtemp(prefix=".", dir=place)).rmdir()
        except OSError as error:
            why = f"cannot be written to ({error.strerror})"
            raise BadInput(f"could not create {path}: {place} {why}. Choose another folder.") from None

    @classmethod
    def create(cls, path: Path, record: RunRecord, x: Tensor, fixed: Mapping[str, Tensor]) -> Folder:
        """Create and lock a folder with its record, initial weights and fixed tensors, all at once or not at all."""
        cls.require_new(path)
        files.make_parent(path)
        _remove_abandoned(path)
        temporary, lock = _create_beside(path)
        with files.disk_errors(f"create {path}", files.NEW):
            try:
                for name in ("checkpoints", "trace"):
                    (temporary / name).mkdir()
                weights = {"x": x, **{_FIXED + name: tensor for name, tensor in fixed.items()}}
                files.save_weights(temporary / "start.safetensors", weights)
                cls(temporary).write_record(record)
                cls.require_new(path)
                if path.exists():  # empty, and the rename replaces it at once or fails: it stays as private as it was
                    temporary.chmod(stat.S_IMODE(path.stat().st_mode))
                temporary.rename(path)
                files.sync_folder(path.parent)
            except BaseException as error:
                lock.release()
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # created meanwhile
                    cls.require_new(path)
                raise
        return cls(path, lock)

    @property
    def known(self) -> RunRecord:
        """The record, as it was read or written last."""
        return self._record or self.record()

    @cached_property
    def key(self) -> str:
        """What every file of the run names it by."""
        return self.known.key

    def write_record(self, record: RunRecord) -> None:
        """Write the record, with the format of the folder and a digest of itself."""
        self._record = record
        files.write_json(self.path / "config.json", {"format": FORMAT, **record.values()})

    def record(self) -> RunRecord:
        """Read the record; refuses one that was edited, has another format or lacks a setting."""
        path = self.path / "config.json"
        try:
            values = files.read_json(path)
        except Missing:
            raise BadInput(f"{self.path} is not the folder of a run: there is no {path}.") from None
        except Damaged as error:
            raise BadInput(f"{error}. Undo the change, or start a new run.") from None
        version = values.pop("format", 1)
        if version != FORMAT:
            raise BadInput(
                f"{self.path} has format {version!r:.50} and was written by dualdelay {values.get('dualdelay')!r:.50}; "
                f"this version reads format {FORMAT}. Use the version that wrote it."
            )
        try:
            self._record = RunRecord.from_json(values)
        except BadInput as error:
            raise BadInput(f"{path} has {error}, so no run has written it. Use the folder of a run.") from None
        return self._record

    def _initial_tensors(self) -> dict[str, Tensor]:
        path = self.path / "start.safetensors"
        tensors = files.load_weights(path, "")
        if "x" not in tensors or digest_of(tensors["x"]) != self.record().start:
            raise Damaged(f"{path} is that of another run")
        return tensors

    def start(self) -> Tensor:
        """The run's initial weights."""
        return self._initial_tensors()["x"]

    def names(self) -> Names:
        """Where in the flat weights each entry of the model's state dict is."""
        tensors = self._initial_tensors()
        fixed = {name.removeprefix(_FIXED): tensor for name, tensor in tensors.items() if name.startswith(_FIXED)}
        return Names([(name, first, shape) for name, first, shape in self.record().layout], fixed)

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return _numbered(self.path / "checkpoints", _CHECKPOINT)

    def moments(self) -> set[int]:
        """The moments of all checkpoints."""
        return {_moment(path) for path in self.checkpoints()}

    def _parts(self) -> list[Path]:
        """The parts of the trace, in their order."""
        return _numbered(self.path / "trace", _PART)

    def save(self, content: Mapping[str, Any], rows: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint and the rows of the trace since the last one, and remove all but the newest ``keep``."""
        count, events = len(rows["time"]), content["events"]
        new, course = events[self._events :], self._course.copy()
        if count or new:
            name = f"{content['arrivals'] - count:012d}-{self._events:012d}.parquet"
            files.save_record(self.path / "trace" / name, rows, self.key, {"events": new})
        data = files.encode({**content, "events": len(events), "run": self.key, "course": course.add(rows, new)})
        name = f"{content['moment']:012d}-{files.short_digest(data)}.safetensors"
        files.write(self.path / "checkpoints" / name, data, files.RESUME)
        self._events, self._course = len(events), course
        with suppress(NotSaved):  # an old checkpoint more does no harm
            files.remove(*self.checkpoints()[:-keep])
            kept = self.moments()
            files.remove(*(path for path in self._shard_parts() if _moment(path) not in kept))

    def _shard_parts(self) -> list[Path]:
        """What the shards of a server have written beside the checkpoints."""
        return _numbered(self.path / "checkpoints", parts.PART)

    def load(self, moment: int | None = None, *, joined: bool = True) -> Saved | None:
        """The newest good checkpoint, up to a moment if one is given, with the trace up to it; None before the first.

        A folder that another process writes to meanwhile is read again. One that shards have written is put together, or
        if it is not to be ``joined`` names their files.
        """
        for _ in range(20):
            before = [*self.checkpoints(), *self._parts()]
            try:
                return self._load(moment, joined)
            except Damaged:
                if before == [*self.checkpoints(), *self._parts()]:
                    raise
        raise BadInput(f"{self.path} changes faster than it can be read; wait until its run has ended.")

    def _load(self, moment: int | None, joined: bool) -> Saved | None:
        problems, hint = list[str](), ""
        for path in reversed(self.checkpoints()):
            if moment is not None and _moment(path) > moment:
                continue
            content = read_checkpoint(path)
            if content is None and not path.exists():  # the run, which goes on meanwhile, has removed it
                continue
            if content is None or content.get("run") != self.key:
                problems.append(f"checkpoint {path.name} is {'damaged' if content is None else 'that of another run'}")
                continue
            try:
                rows, events = self._history(content["arrivals"], content["events"])
                if Course().add(rows, events) != content["course"]:
                    raise Damaged(f"the trace in {self.path} is not that of checkpoint {path.name}")
                return Saved({**self._with_shards(content, joined), "events": events}, rows, problems)
            except BadInput as error:
                problems.append(str(error).rstrip("."))
                hint = hint or f" Its weights are intact: server=dd.Server(initial_weights={str(path)!r}) begins there."
        if problems:
            listed = "; ".join(dict.fromkeys(problems))
            raise Damaged(f"no checkpoint of {self.path} can be used: {listed}. Start the run anew.{hint}")
        if moment is None and (self.result() is not None or len(self._parts()) > 1):  # there were checkpoints
            raise Damaged(
                f"the checkpoints of {self.path} are missing, without which its run cannot go on. What a finished run has "
                "left can still be used: dd.load gives it, and another run may begin with its weights "
                "(dd.Server(initial_weights=...)). Otherwise start the run anew."
            )
        return None

    def _with_shards(self, content: dict[str, Any], joined: bool) -> dict[str, Any]:
        """A checkpoint with what shards have written of it, put together or by the names of their files."""
        if "shards" not in content or joined:
            return parts.whole(content, self.path)
        return parts.located(content, self.path)

    def _history(self, arrivals: int, event_count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The trace's first rows and events, from its parts and its finished file."""
        rows, events, problem = Recorder().rows(), list[dict[str, Any]](), ""
        finished = self.path / "trace.parquet"
        for path in [*self._parts(), *([finished] if finished.exists() else [])]:
            if len(rows["time"]) >= arrivals and len(events) >= event_count:
                break
            first_row, first_event = _start_of(path)
            if first_row > len(rows["time"]) or first_event > len(events):
                continue
            try:
                columns, about = files.load_record(path, self.key, ARRIVAL_COLUMNS)
            except BadInput as error:
                problem = problem or str(error)
                continue
            last_row, last_event = first_row + len(columns["time"]), first_event + len(about["events"])
            if last_row >= len(rows["time"]) and last_event >= len(events):
                rows = {name: np.concatenate([rows[name][:first_row], columns[name]]) for name in rows}
                events = [*events[:first_event], *about["events"]]
        if len(rows["time"]) < arrivals or len(events) < event_count:
            raise Damaged(problem or f"the trace in {self.path} has {len(rows['time'])} rows of {arrivals}")
        return {name: column[:arrivals] for name, column in rows.items()}, events[:event_count]

    def rewind(self, content: Mapping[str, Any] | None, rows: Mapping[str, Any] | None = None) -> None:
        """Remove everything beyond this checkpoint, or beyond the start: the run goes on from there.

        A real run takes another course from here, so nothing of a trace that went further may stay, not even after a loss
        of power in the middle of this.
        """
        arrivals, moment, events = 0, -1, list[dict[str, Any]]()
        if content is not None:
            arrivals, moment, events = content["arrivals"], content["moment"], content["events"]
            if (self.path / "trace.parquet").exists():
                first = self.path / "trace" / f"{0:012d}-{0:012d}.parquet"
                files.save_record(first, rows or {}, self.key, {"events": events})
                files.remove(*(path for path in self._parts() if path != first))
        files.remove(*(path for path in self._parts() if _start_of(path) >= (arrivals, len(events))))
        files.remove(*(path for path in (*self.checkpoints(), *self._shard_parts()) if _moment(path) > moment))
        files.remove(*files.list_files(self.path, ".*.part"), *files.list_files(self.path, "*/.*.part"))
        files.remove(*(self.path / name for name in ("result.json", "failed.json", "trace.parquet")))
        for folder in (self.path / "checkpoints", self.path / "trace", self.path):
            with files.disk_errors(f"write {folder}", f"{files.INTACT}."):
                files.sync_folder(folder)
        self._events, self._course = len(events), Course()
        if rows is not None:
            self._course.add(rows, events)

    def keep_aside(self, arrivals: int) -> None:
        """Keep the newest checkpoint for good: the run goes on from it on another kind of machine."""
        newest, aside = self.checkpoints()[-1], self.path / "moved"
        files.make_folder(aside)
        data = files.read(newest)
        content = files.decode(data)
        if "shards" in content:
            data = files.encode(parts.whole(content, self.path))
        files.write(aside / f"{arrivals:012d}-{files.short_digest(data)}.safetensors", data, files.RESUME)

    def kept_aside(self, arrivals: int) -> dict[str, Any]:
        """What was kept where the run went on, after so many arrivals, on another kind of machine."""
        for path in _numbered(self.path / "moved", _CHECKPOINT):
            content = read_checkpoint(path) if _moment(path) == arrivals else None
            if content is not None and content.get("run") == self.key:
                return content
        raise Damaged(f"what {self.path / 'moved'} has of arrival {arrivals} is damaged or missing")

    def failure(self) -> str:
        """Why the run could not go on; empty if it has not failed."""
        try:
            return str(files.read_json(self.path / "failed.json", self.key).get("why"))
        except Missing:
            return ""
        except Damaged as error:
            return str(error)

    def fail(self, why: str) -> None:
        """Write down why the run could not go on."""
        files.write_json(self.path / "failed.json", {"run": self.key, "why": why})

    def leave(self, metrics: Table, workers: Table, model: Mapping[str, Tensor], why: str = "") -> dict[str, str]:
        """Write the model and the metrics of a run that goes on or has ended, and why it failed; returns their digests."""
        if why:
            self.fail(why)
        return {
            "metrics": files.save_record(self.path / "metrics.parquet", metrics.columns, self.key),
            "workers": files.save_record(self.path / "workers.parquet", workers.columns, self.key),
            "model": files.save_weights(self.path / "model.safetensors", model, self.key),
        }

    def finish(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the files of a finished run; result.json is written last, and without it the run is not finished."""
        before, now = None, {**result, "run": self.key}
        with suppress(Damaged):
            before = self.result()
        if before is None or files.json_digest({k: v for k, v in before.items() if k != "files"}) != files.json_digest(now):
            files.remove(self.path / "result.json")
        events = {"events": run.trace.events}
        digests = {"trace": files.save_record(self.path / "trace.parquet", run.trace.columns, self.key, events)}
        digests |= self.leave(run.metrics, run.workers, run.state_dict())
        if run.best is not None:
            digests["best"] = files.save_weights(self.path / "best.safetensors", run.state_dict(best=True), self.key)
        files.write_json(self.path / "result.json", {**now, "files": digests})
        files.remove(*self._parts())

    def end_anew(self, result: Mapping[str, Any]) -> None:
        """Write what is now said of the end of a finished run, whose other files stay as they are."""
        files.write_json(self.path / "result.json", result)

    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None if it has not; raises Damaged if that cannot be known."""
        try:
            return files.read_json(self.path / "result.json", self.key)
        except Missing:
            return None

    def finished(self) -> dict[str, Any]:
        """How the run ended; refuses a run that has not ended."""
        result = self.result()
        if result is None:
            raise BadInput(
                f"the run in {self.path} is not finished; finish it first: dualdelay resume {self.path}, or if its problem "
                f"is your own dd.resume({str(self.path)!r}, problem=...)"
            )
        return result

    def table(self, name: str) -> Table:
        """A table of a finished run: metrics or workers."""
        columns, about = files.load_record(self.path / f"{name}.parquet", self.key)
        self._require_listed(f"{name}.parquet", about["digest"])
        return Table(columns)

    def weights(self, name: str, reports: list[str] | None = None) -> dict[str, Tensor]:
        """Weights of a finished run: model or best; for ``reports`` see ``report_damage``."""
        weights = files.load_weights(self.path / f"{name}.safetensors", self.key, reports=reports)
        self._require_listed(f"{name}.safetensors", files.weights_digest(weights, self.key), reports)
        return weights

    def trace(self, reports: list[str] | None = None) -> Trace:
        """The trace of a finished run; for ``reports`` see ``report_damage``."""
        columns, about = files.load_record(self.path / "trace.parquet", self.key, ARRIVAL_COLUMNS, reports=reports)
        self._require_listed("trace.parquet", about["digest"], reports)
        if not is_trace(columns, about.get("events")):
            raise Damaged(f"{self.path / 'trace.parquet'} is damaged: it is no trace")
        return Trace(columns, about["events"])

    def _require_listed(self, name: str, digest: str, reports: list[str] | None = None) -> None:
        """Refuse an undamaged file that is not the one listed in result.json."""
        if self.finished()["files"].get(name.partition(".")[0]) != digest and not reports:
            files.report_damage(f"{self.path / name} is not the one that the run has left", reports)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a folder whose names match, in their order; other files are ignored."""
    return [path for path in files.list_files(folder, "[0-9]*") if pattern.fullmatch(path.name)]


def _moment(checkpoint: Path) -> int:
    return int(checkpoint.stem.partition("-")[0])


def _start_of(part: Path) -> tuple[int, int]:
    """How many arrivals and events came before a part of the trace; the finished trace starts with the first."""
    match = _PART.fullmatch(part.name)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What a checkpoint holds; None if it is damaged or missing."""
    from safetensors import SafetensorError

    try:
        data = files.read(path)
        return files.decode(data) if files.short_digest(data) == path.stem.partition("-")[2] else None
    except (Missing, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_empty(path: Path) -> bool:
    """Whether there is a folder with nothing in it, and no link to one: what a new run may take the place of."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _require_replaceable(path: Path) -> None:
    """Refuse an empty folder that no other can take the place of, or that this process is in."""
    why = ""
    if path.samefile(os.curdir):
        why = "this process is in it"
    elif os.path.ismount(path):
        why = "something is mounted there"
    elif not os.access(path, os.W_OK):
        why = "it cannot be written"
    elif not os.access(path.parent, os.W_OK):
        why = f"{path.parent} cannot be written"
    if why:
        raise BadInput(
            f"{path} is an empty folder that a run's cannot take the place of: {why}. Name a new one in it, such as "
            f"{path / 'run'}."
        )


def _create_beside(path: Path) -> tuple[Path, Lock]:
    """Create and lock a folder with a temporary name beside the path."""
    for _ in range(100):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with files.disk_errors(f"create {path}", files.NEW):
            temporary.mkdir()
        try:
            lock = Lock(temporary)
            if (temporary / LOCK_FILE).exists():  # no other process removed it as abandoned before it was locked
                return temporary, lock
            lock.release()
        except BadInput as error:
            if not isinstance(error, InUse) and temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    raise NotSaved(f"could not create {path}: other processes create it again and again; choose another.")


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders of processes that died while they created this folder."""
    for abandoned in files.list_files(path.parent, f".{glob.escape(path.name)}.*.part"):
        with suppress(BadInput, OSError):  # in use, or gone meanwhile
            with suppress(OSError):  # unless it is empty
                abandoned.rmdir()  # its process died, or is about to lock it and will try again
            lock = Lock(abandoned) if (abandoned / LOCK_FILE).exists() else None
            shutil.rmtree(abandoned, ignore_errors=True)
            if lock is not None:
                lock.release()

"""A run's folder: its configuration, trace, metrics, checkpoints and final model.

A checkpoint is one safetensors file named by its moment (how much had happened) and by a digest of its bytes; every other
file has a digest of its contents in it. So damage shows. One process at a time may write to a folder.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput, NotSaved, require_path
from ..engine.result import Names, Run
from ..engine.trace import ARRIVAL_COLUMNS, Course, Recorder, Table, Trace, is_trace
from . import locks
from .files import (
    Damaged,
    decode,
    doubt,
    encode,
    found,
    json_digest,
    load_record,
    load_weights,
    make_folder,
    read,
    read_json,
    remove,
    save_record,
    save_weights,
    sync_folder,
    weights_digest,
    write,
    write_json,
)
from .locks import Lock

FORMAT = 2  # of a folder; another one is refused
_FIXED = "fixed: "  # before the names of tensors that no training moves
_CHECKPOINT = re.compile(r"(\d{12,})-([0-9a-f]{16})\.safetensors")
_PART = re.compile(r"(\d{12,})-(\d{12,})\.parquet")  # arrivals and events before it
_PLACES = ("checkpoints", "trace", "moved", "output")
_MAYBE = (int, float, type(None))
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "algorithm": dict,
    "problem": dict,
    "seed": int,
    "metrics": list,
    "stop": (dict, type(None)),
    "on_nonfinite": str,
    "keep_best": (str, type(None)),
    "keep": int,
    "threads": int,
    "server_threads": int,
    "optimizer": (dict, type(None)),
    "table": str,
    "updates": _MAYBE,
    "time": _MAYBE,
    "evaluate_every": _MAYBE,
    "evaluate_seconds": _MAYBE,
    "evaluate_samples": _MAYBE,
    "evaluate_limit": _MAYBE,
    "checkpoint_every": _MAYBE,
    "fingerprint": str,
    "start": str,
    "layout": list,
    "environment": dict,
}  # what every configuration has
_SIMULATED: dict[str, type | tuple[type, ...]] = {
    "speeds": dict,
    "link": dict,
    "changes": list,
    "device": str,
    "precision": str,
    "batch": bool,
}


def digest_of(x: Tensor) -> str:
    """A digest of a tensor's bytes."""
    return hashlib.sha256(x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def run_key(config: Mapping[str, Any]) -> str:
    """What a run's files are known by: what it computes, not for how long, on which machine and how often it is saved."""
    others = ("updates", "time", "environment", "keep", "checkpoint_every")
    return json_digest({name: value for name, value in config.items() if name not in others})


class Folder:
    """A run's place on disk; as a context, one that nobody else writes to while it lasts."""

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        require_path("folder", path)
        self.path = path
        self._lock = lock
        self._events = 0  # those that are in the parts of the trace
        self._course = Course()  # of what is in them
        self._key = self._digest = ""

    def __enter__(self) -> Folder:
        self.hold()
        return self

    def hold(self) -> None:
        """Lock it, unless it is locked already."""
        if self._lock is None:
            if odd := [name for name in _PLACES if (self.path / name).is_symlink()]:
                raise BadInput(f"{self.path / odd[0]} is a link to another place, which no run makes; it is not followed.")
            self._lock = Lock(self.path)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Others may write to it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @staticmethod
    def require_new(path: Path) -> None:
        """Refuse a folder that exists, or that cannot be."""
        require_path("folder", path)
        try:
            there = path.exists() or path.is_symlink()
        except OSError as error:
            raise BadInput(f"could not create {path} ({error.strerror}); choose another.") from None
        if there and (path / "config.json").exists():
            with suppress(NotSaved):
                Folder(path)._require_free()
            raise BadInput(
                f"{path} exists; a run has a folder of its own. Choose another, or remove it, or go on with the run in it: "
                f"dualdelay resume {path}, or with what is your own dd.resume({str(path)!r}, problem=...)."
            )
        if there:
            raise BadInput(f"{path} exists; a run has a folder of its own. Choose another name.")

    def _require_free(self) -> None:
        """Say so if a run is under way here."""
        try:
            Lock(self.path).release()
        except locks.InUse:
            raise
        except BadInput:  # it cannot be locked, and is refused for another reason
            return

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], x: Tensor, fixed: Mapping[str, Tensor]) -> Folder:
        """A new folder, locked, with its configuration, first weights and what no training moves; all of it or nothing."""
        cls.require_new(path)
        try:
            make_folder(path.parent)
        except BadInput as error:
            raise NotSaved(f"could not create {path}: {error}") from None
        _remove_remains(path)
        temporary, lock = _place_beside(path)
        try:
            for name in ("checkpoints", "trace"):
                (temporary / name).mkdir()
            weights = {"x": x, **{_FIXED + name: part for name, part in fixed.items()}}
            save_weights(temporary / "start.safetensors", weights)
            cls(temporary).write_config(config)
            cls.require_new(path)  # a rename would take the place of an empty folder
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException as error:
            lock.release()
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                cls.require_new(path)
            if isinstance(error, OSError):
                said = f"could not create {path} ({error.strerror}); choose a folder that can be written."
                raise NotSaved(said) from error
            raise
        return cls(path, lock)

    @property
    def digest(self) -> str:
        """What the configuration is known by, as it was read or written last."""
        self._digest = self._digest or json_digest(self.config())
        return self._digest

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration, with the format of the folder and a digest of itself."""
        self._digest = json_digest(config)
        write_json(self.path / "config.json", {"format": FORMAT, **config})

    def config(self) -> dict[str, Any]:
        """Read the configuration, and refuse one that was changed since or that this version does not know."""
        path = self.path / "config.json"
        try:
            config = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput(f"{self.path} is not the folder of a run: there is no {path}.") from None
        except Damaged as error:
            raise BadInput(f"{error}. Undo the change, or start a new run.") from None
        of = config.pop("format", 1)
        if of != FORMAT:
            raise BadInput(
                f"{self.path} has format {of!r:.50} and was written by dualdelay {config.get('dualdelay')!r:.50}; this "
                f"version reads format {FORMAT}. Use the version that wrote it."
            )
        fields = _FIELDS | ({"fleet": dict} if "fleet" in config else _SIMULATED)
        wrong = [name for name, kind in fields.items() if not _is_a(kind, config.get(name, self))]
        wrong += [name for name in _SIMULATED if name in config and "fleet" in config]
        wrong += [] if wrong or all(map(_is_place, config["layout"])) else ["layout"]
        wrong += [] if wrong or all(isinstance(name, str) for name in config["metrics"]) else ["metrics"]
        if not wrong and config["optimizer"] is not None and {"optimizer", "schedule"} - config["optimizer"].keys():
            wrong.append("optimizer")
        if wrong:
            raise BadInput(f"{path} says nothing of use about {', '.join(wrong)}; no run has written that.")
        return config

    @property
    def key(self) -> str:
        """What the run's files are known by."""
        self._key = self._key or run_key(self.config())
        return self._key

    def _first_weights(self) -> dict[str, Tensor]:
        path = self.path / "start.safetensors"
        weights = load_weights(path, "")
        if "x" not in weights or digest_of(weights["x"]) != self.config()["start"]:
            raise Damaged(f"{path} is that of another run")
        return weights

    def start(self) -> Tensor:
        """The run's initial weights."""
        return self._first_weights()["x"]

    def names(self) -> Names:
        """Where in the flat weights each entry of the model's state dict is."""
        weights = self._first_weights()
        fixed = {name.removeprefix(_FIXED): part for name, part in weights.items() if name.startswith(_FIXED)}
        return Names(self.config()["layout"], fixed)

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return _named(self.path / "checkpoints", _CHECKPOINT)

    def _parts(self) -> list[Path]:
        """The parts of the trace, in their order."""
        return _named(self.path / "trace", _PART)

    def save(self, content: Mapping[str, Any], rows: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint and what the trace has since the last one, and remove all but the newest ``keep``."""
        count, events = len(rows["time"]), content["events"]
        new, course = events[self._events :], self._course.copy()
        if count or new:
            name = f"{content['arrivals'] - count:012d}-{self._events:012d}.parquet"
            save_record(self.path / "trace" / name, rows, self.key, {"events": new})
        data = encode({**content, "events": len(events), "run": self.key, "course": course.add(rows, new)})
        write(self.path / "checkpoints" / f"{content['moment']:012d}-{_digest(data)}.safetensors", data)
        self._events, self._course = len(events), course
        with suppress(NotSaved):  # they may as well stay
            remove(*self.checkpoints()[:-keep])

    def moments(self) -> set[int]:
        """The moments of the checkpoints there are."""
        return {_moment(path) for path in self.checkpoints()}

    def load(self, moment: int | None = None) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
        """The newest good checkpoint up to a moment, with the trace's rows up to it, and what was wrong with newer ones.

        Its ``events`` are those of the trace up to it. A folder that another process writes to meanwhile is read again.
        """
        for _ in range(20):
            before = [*self.checkpoints(), *self._parts()]
            try:
                return self._load(moment)
            except Damaged:
                if before == [*self.checkpoints(), *self._parts()]:
                    raise
        raise BadInput(f"{self.path} changes faster than it can be read; wait until its run has ended.")

    def _load(self, moment: int | None) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
        problems, usable = list[str](), ""
        for path in reversed(self.checkpoints()):
            if moment is not None and _moment(path) > moment:
                continue
            content = read_checkpoint(path)
            if content is None and not path.exists():  # the run goes on meanwhile and has removed it
                continue
            if content is None or content.get("run") != self.key:
                problems.append(f"checkpoint {path.name} is {'damaged' if content is None else 'that of another run'}")
                continue
            try:
                rows, events = self._history(content["arrivals"], content["events"])
                if Course().add(rows, events) != content["course"]:
                    raise Damaged(f"the trace in {self.path} is not that of checkpoint {path.name}")
                return {**content, "events": events}, rows, problems
            except BadInput as error:
                problems.append(str(error).rstrip("."))
                usable = usable or f" Its weights are whole: server=dd.Server(initial_weights={str(path)!r}) begins there."
        if problems:
            said = f"no checkpoint of {self.path} can be used: {'; '.join(dict.fromkeys(problems))}. Start the run anew."
            raise Damaged(said + usable)
        if moment is None and (self.result() is not None or len(self._parts()) > 1):  # there were some
            raise Damaged(
                f"the checkpoints of {self.path} are missing, without which its run cannot go on. What a finished run has "
                "left can still be used: dd.load gives it, and another run may begin with its weights "
                "(dd.Server(initial_weights=...)). Otherwise start the run anew."
            )
        return None

    def _history(self, arrivals: int, count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The trace's first rows and events, from its finished file and the parts."""
        rows, events, problem = Recorder().rows(), list[dict[str, Any]](), ""
        whole = self.path / "trace.parquet"
        for path in [*self._parts(), *([whole] if whole.exists() else [])]:
            if len(rows["time"]) >= arrivals and len(events) >= count:
                break
            match = _PART.fullmatch(path.name)
            first, before = (0, 0) if match is None else (int(match[1]), int(match[2]))
            if first > len(rows["time"]) or before > len(events):
                continue
            try:
                more, about = load_record(path, self.key, ARRIVAL_COLUMNS)
            except BadInput as error:
                problem = problem or str(error)
                continue
            if first + len(more["time"]) >= len(rows["time"]) and before + len(about["events"]) >= len(events):
                rows = {name: np.concatenate([rows[name][:first], more[name]]) for name in rows}
                events = [*events[:before], *about["events"]]
        if len(rows["time"]) < arrivals or len(events) < count:
            raise Damaged(problem or f"the trace in {self.path} has {len(rows['time'])} rows of {arrivals}")
        return {name: column[:arrivals] for name, column in rows.items()}, events[:count]

    def rewind(self, content: Mapping[str, Any] | None, rows: Mapping[str, Any] | None = None) -> None:
        """The run goes on from this checkpoint, or from its start: what lies beyond it is removed.

        A real run takes another course from here, so nothing of a trace that went further may stay, also not after a loss
        of power in the middle of this.
        """
        arrivals, moment = (0, -1) if content is None else (content["arrivals"], content["moment"])
        events = [] if content is None else content["events"]
        if content is not None and (self.path / "trace.parquet").exists():
            first = self.path / "trace" / f"{0:012d}-{0:012d}.parquet"
            save_record(first, rows or {}, self.key, {"events": events})
            remove(*(path for path in self._parts() if path != first))
        remove(*(path for path in self._parts() if _beyond(path, arrivals, len(events))))
        remove(*(path for path in self.checkpoints() if _moment(path) > moment))
        remove(*found(self.path, ".*.part"), *found(self.path, "*/.*.part"))
        remove(*(self.path / name for name in ("result.json", "failed.json", "trace.parquet")))
        for place in (self.path / "checkpoints", self.path / "trace", self.path):
            self._sync(place)
        self._events, self._course = len(events), Course()
        if rows is not None:
            self._course.add(rows, events)

    def _sync(self, place: Path) -> None:
        try:
            sync_folder(place)
        except OSError as error:
            raise NotSaved(f"could not write {place} ({error.strerror}). What was saved before is intact.") from error

    def keep_aside(self, arrivals: int) -> None:
        """Keep the newest checkpoint for good: the run goes on from it on another kind of machine."""
        newest, aside = self.checkpoints()[-1], self.path / "moved"
        make_folder(aside)
        write(aside / f"{arrivals:012d}-{newest.stem.partition('-')[2]}.safetensors", read(newest))

    def kept_aside(self, arrivals: int) -> dict[str, Any]:
        """What was kept where the run went on, after so many arrivals, on another kind of machine."""
        kept = [path for path in _named(self.path / "moved", _CHECKPOINT) if _moment(path) == arrivals]
        for content in map(read_checkpoint, kept):
            if content is not None and content.get("run") == self.key:
                return content
        raise Damaged(f"what {self.path / 'moved'} has of arrival {arrivals} is damaged or missing")

    def failure(self) -> str:
        """Why the run could not go on; empty if it did not say so."""
        try:
            said = read_json(self.path / "failed.json")
        except FileNotFoundError:
            return ""
        except Damaged as error:
            return str(error)
        return str(said.get("why")) if said.get("run") == self.key else f"{self.path / 'failed.json'} is of another run"

    def fail(self, why: str) -> None:
        """Write down why the run could not go on."""
        write_json(self.path / "failed.json", {"run": self.key, "why": why})

    def leave(self, metrics: Table, workers: Table, model: Mapping[str, Tensor], why: str = "") -> dict[str, str]:
        """Write what can be used of a run that goes on or has ended: its model and its metrics, and why it failed."""
        if why:
            self.fail(why)
        return {
            "metrics": save_record(self.path / "metrics.parquet", metrics.columns, self.key),
            "workers": save_record(self.path / "workers.parquet", workers.columns, self.key),
            "model": save_weights(self.path / "model.safetensors", model, self.key),
        }

    def finish(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write what a finished run leaves behind; without result.json, which comes last, it is not finished."""
        remove(self.path / "result.json")
        events = {"events": run.trace.events}
        files = {"trace": save_record(self.path / "trace.parquet", run.trace.columns, self.key, events)}
        files |= self.leave(run.metrics, run.workers, run.state_dict())
        if run.best is not None:
            files["best"] = save_weights(self.path / "best.safetensors", run.state_dict(best=True), self.key)
        write_json(self.path / "result.json", {**result, "run": self.key, "files": files})
        remove(*self._parts())

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it did; raises Damaged if that cannot be told."""
        path = self.path / "result.json"
        try:
            result = read_json(path)
        except FileNotFoundError:
            return None
        if result.get("run") != self.key:
            raise Damaged(f"{path} is that of another run")
        return result

    def finished(self) -> dict[str, Any]:
        """How the run ended; refuses one that did not."""
        result = self.result()
        if result is None:
            raise BadInput(
                f"the run in {self.path} is not finished; finish it first: dualdelay resume {self.path}, or with what is "
                f"your own dd.resume({str(self.path)!r}, problem=...)"
            )
        return result

    def table(self, name: str) -> Table:
        """The table of that name of a finished run: metrics or workers."""
        columns, about = load_record(self.path / f"{name}.parquet", self.key)
        self._require_listed(f"{name}.parquet", about["digest"])
        return Table(columns)

    def weights(self, name: str, doubts: list[str] | None = None) -> dict[str, Tensor]:
        """The weights of that name of a finished run: model or best."""
        weights = load_weights(self.path / f"{name}.safetensors", self.key, doubts=doubts)
        self._require_listed(f"{name}.safetensors", weights_digest(weights, self.key), doubts)
        return weights

    def trace(self, doubts: list[str] | None = None) -> Trace:
        """The trace of a finished run."""
        columns, about = load_record(self.path / "trace.parquet", self.key, ARRIVAL_COLUMNS, doubts=doubts)
        self._require_listed("trace.parquet", about["digest"], doubts)
        if not is_trace(columns, about.get("events")):
            raise Damaged(f"{self.path / 'trace.parquet'} is damaged: it is no trace")
        return Trace(columns, about["events"])

    def _require_listed(self, name: str, digest: str, doubts: list[str] | None = None) -> None:
        """Refuse a file that is whole and not the one that a finished run has left: that of another such run."""
        if self.finished()["files"].get(name.partition(".")[0]) != digest and not doubts:
            doubt(f"{self.path / name} is not the one that the run has left", doubts)


def _is_a(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_place(value: Any) -> bool:
    """Whether this says where in the flat weights an entry of the state dict is: its name, first number and shape."""
    if not isinstance(value, list) or [type(part) for part in value] != [str, int, list]:
        return False
    return value[1] >= 0 and all(_is_a(int, size) and size >= 0 for size in value[2])


def _named(place: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a place with such a name, in its order; what else lies there is nobody's."""
    return [path for path in found(place, "[0-9]*") if pattern.fullmatch(path.name)]


def _moment(checkpoint: Path) -> int:
    return int(checkpoint.stem.partition("-")[0])


def _beyond(part: Path, arrivals: int, events: int) -> bool:
    """Whether a part of the trace begins where a run goes on, or behind."""
    first, _, before = part.stem.partition("-")
    return int(first) >= arrivals if int(before) >= events else int(first) > arrivals


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What a checkpoint holds; None if it is damaged or has gone."""
    from safetensors import SafetensorError

    try:
        data = read(path)
        return decode(data) if _digest(data) == path.stem.partition("-")[2] else None
    except (FileNotFoundError, NotADirectoryError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _place_beside(path: Path) -> tuple[Path, Lock]:
    """A new folder beside that place, locked."""
    for _ in range(100):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            temporary.mkdir()
        except OSError as error:
            raise NotSaved(f"could not create {path} ({error.strerror}); choose a folder that can be written.") from error
        try:
            lock = Lock(temporary)
            if (temporary / locks.NAME).exists():  # nobody took it for remains before it was locked
                return temporary, lock
            lock.release()
        except BadInput as error:
            if not isinstance(error, locks.InUse) and temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    raise NotSaved(f"could not create {path}: others create it again and again; choose another.")


def _remove_remains(path: Path) -> None:
    """Remove what is left of processes that died while they created this folder."""
    for remains in found(path.parent, f".{glob.escape(path.name)}.*.part"):
        with suppress(BadInput, OSError):  # in use, or gone meanwhile
            with suppress(OSError):  # unless it is empty
                remains.rmdir()  # it died, or is about to lock it and will try again
            lock = Lock(remains) if (remains / locks.NAME).exists() else None
            shutil.rmtree(remains, ignore_errors=True)
            if lock is not None:
                lock.release()

"""A run's folder: its configuration, trace, metrics, checkpoints and final model.

A checkpoint is one safetensors file named by its moment (how much had happened) and by a digest of its bytes, so that
damage shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import BadInput, RunFailed
from .files import decode, encode, load_table, load_weights, make_folder, save_table, save_weights, write
from .result import Names, Run
from .trace import ARRIVAL_COLUMNS, Recorder, Table, Trace

_FIXED = "fixed: "  # before the names of tensors that no training moves


def digest_of(x: Tensor) -> str:
    """A digest of a tensor's bytes."""
    return hashlib.sha256(x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def config_digest(config: Mapping[str, Any]) -> str:
    """A digest of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


class Folder:
    """A run's place on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def require_new(path: Path) -> None:
        """Refuse a folder that exists."""
        if path.exists():
            raise BadInput(
                f"{path} exists; a run has a folder of its own. Choose another, remove it, or go on with: "
                f"dualdelay resume {path}"
            )

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], x: Tensor, fixed: Mapping[str, Tensor]) -> Folder:
        """A new folder with its configuration, initial weights and what no training moves; all of it or nothing."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            cls.require_new(path)
            (temporary / "checkpoints").mkdir(parents=True)
            (temporary / "trace").mkdir()
            folder = cls(temporary)
            save_weights(temporary / "start.safetensors", {"x": x, **{_FIXED + name: part for name, part in fixed.items()}})
            folder.write_config(config)
            temporary.rename(path)
        except (OSError, RunFailed) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RunFailed):
                raise
            raise RunFailed(f"could not create {path} ({error.strerror}); choose a folder that can be written.") from error
        return cls(path)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration with a digest of itself."""
        write(self.path / "config.json", json.dumps({**config, "digest": config_digest(config)}, indent=1).encode())

    def config(self) -> dict[str, Any]:
        """Read the configuration, and refuse one that was changed since."""
        path = self.path / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
            digest = config.pop("digest")
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput(f"{self.path} is not the folder of a run: there is no {path}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{path} is damaged; without it the run cannot be continued. Start it anew.") from None
        if digest != config_digest(config):
            raise BadInput(f"{path} was changed since the run wrote it; undo the change, or start a new run.")
        return config

    def start(self, digest: str) -> Tensor:
        """The run's initial weights, which have this digest."""
        weights = load_weights(self.path / "start.safetensors")
        if "x" not in weights or digest_of(weights["x"]) != digest:
            raise BadInput(f"{self.path / 'start.safetensors'} is damaged; start the run anew.")
        return weights["x"]

    def names(self) -> Names:
        """Where in the flat weights each entry of the model's state dict is."""
        weights = load_weights(self.path / "start.safetensors")
        fixed = {name.removeprefix(_FIXED): part for name, part in weights.items() if name.startswith(_FIXED)}
        return Names(self.config()["layout"], fixed)

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.safetensors"))

    def save(self, content: Mapping[str, Any], rows: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint and the trace's rows since the last one, and remove all but the newest ``keep``."""
        count = len(rows["time"])
        if count:
            save_table(self.path / "trace" / f"{content['arrivals'] - count:012d}.parquet", rows)
        data = encode(content)
        digest = hashlib.sha256(data).hexdigest()[:16]
        write(self.path / "checkpoints" / f"{content['moment']:012d}-{digest}.safetensors", data)
        for old in self.checkpoints()[:-keep]:
            old.unlink(missing_ok=True)

    def moments(self) -> set[int]:
        """The moments of the checkpoints there are."""
        return {int(path.stem.partition("-")[0]) for path in self.checkpoints()}

    def load(self, moment: int | None = None) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
        """The newest good checkpoint up to a moment, with the trace's rows up to it, and what was wrong with newer ones."""
        problems: list[str] = []
        for path in reversed(self.checkpoints()):
            if moment is not None and int(path.stem.partition("-")[0]) > moment:
                continue
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest()[:16] != path.stem.partition("-")[2]:
                problems.append(f"checkpoint {path.name} is damaged")
                continue
            content = decode(data)
            try:
                return content, self._rows(content["arrivals"]), problems
            except BadInput as error:
                problems.append(str(error))
        if problems:
            raise BadInput(f"no checkpoint of {self.path} can be used: {'; '.join(problems)}. Start the run anew.")
        return None

    def _rows(self, arrivals: int) -> dict[str, Any]:
        """The first rows of the trace, from its finished file and the parts that go beyond it."""
        whole = self.path / "trace.parquet"
        rows = load_table(whole, ARRIVAL_COLUMNS)[0] if whole.exists() else Recorder().rows()
        for part in sorted((self.path / "trace").glob("[0-9]*.parquet")):
            begins, have = int(part.stem), len(rows["time"])
            if begins > have or have >= arrivals:
                break
            more = load_table(part, ARRIVAL_COLUMNS)[0]
            if begins + len(more["time"]) > have:  # rows that were computed again are the same rows
                rows = {name: np.concatenate([rows[name][:begins], more[name]]) for name in rows}
        if len(rows["time"]) < arrivals:
            raise BadInput(f"the trace in {self.path} has {len(rows['time'])} rows of {arrivals}")
        return {name: column[:arrivals] for name, column in rows.items()}

    def keep_aside(self, arrivals: int) -> None:
        """Keep the newest checkpoint for good: the run goes on from it on another kind of machine."""
        newest, aside = self.checkpoints()[-1], self.path / "moved"
        make_folder(aside)
        write(aside / f"{arrivals:012d}-{newest.stem.partition('-')[2]}.safetensors", newest.read_bytes())

    def kept_aside(self, arrivals: int) -> dict[str, Any] | None:
        """What was kept where the run went on, after so many arrivals, on another kind of machine; None if damaged."""
        for path in sorted((self.path / "moved").glob(f"{arrivals:012d}-*.safetensors")):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest()[:16] == path.stem.partition("-")[2]:
                return decode(data)
        return None

    def clear_after(self, arrivals: int, moment: int) -> None:
        """Remove what lies beyond the checkpoint that a run goes on from."""
        for part in (self.path / "trace").glob("[0-9]*.parquet"):
            if int(part.stem) >= arrivals:
                part.unlink()
        for path in self.checkpoints():
            if int(path.stem.partition("-")[0]) > moment:
                path.unlink()
        for leftover in (*self.path.glob(".*.part"), *self.path.glob("*/.*.part")):
            leftover.unlink()
        (self.path / "failed.txt").unlink(missing_ok=True)

    def failure(self) -> str:
        """Why the run could not go on; empty if it did not say so."""
        path = self.path / "failed.txt"
        return path.read_text() if path.exists() else ""

    def leave(self, metrics: Table, workers: Table, model: Mapping[str, Tensor], why: str = "") -> None:
        """Write what can be used of a run that goes on or has ended: its model and its metrics, and why it failed."""
        if why:
            write(self.path / "failed.txt", why.encode())
        save_table(self.path / "metrics.parquet", metrics.columns)
        save_table(self.path / "workers.parquet", workers.columns)
        save_weights(self.path / "model.safetensors", model)

    def finish(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write what a finished run leaves behind; without result.json, which comes last, it is not finished."""
        (self.path / "result.json").unlink(missing_ok=True)
        save_table(self.path / "trace.parquet", run.trace.columns, {"events": run.trace.events})
        self.leave(run.metrics, run.workers, run.state_dict())
        if run.best is not None:
            save_weights(self.path / "best.safetensors", run.state_dict(best=True))
        write(self.path / "result.json", json.dumps(result, indent=1).encode())
        for part in (self.path / "trace").glob("[0-9]*.parquet"):
            part.unlink()

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it did; one that is damaged is written again when the run is resumed."""
        try:
            result = json.loads((self.path / "result.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def finished(self) -> dict[str, Any]:
        """How the run ended; refuses one that did not."""
        result = self.result()
        if result is None:
            raise BadInput(
                f"the run in {self.path} is not finished; finish it first: dualdelay resume {self.path}, or dd.resume"
            )
        return result

    def table(self, name: str) -> Table:
        """The table of that name of a finished run: metrics or workers."""
        return Table(load_table(self.path / f"{name}.parquet")[0])

    def trace(self) -> Trace:
        """The trace of a finished run."""
        columns, about = load_table(self.path / "trace.parquet", ARRIVAL_COLUMNS)
        return Trace(columns, about.get("events", []))

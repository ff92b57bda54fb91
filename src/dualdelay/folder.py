"""A run's folder: its configuration, trace, metrics, checkpoints and final model.

A checkpoint is one safetensors file named by its number of arrivals and by a digest of its bytes, so that damage shows.
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
from torch import Tensor

from .errors import BadInput, RunFailed
from .files import decode, encode, load_table, load_weights, save_table, save_weights, write
from .trace import Table, Trace


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


class Folder:
    """A run's place on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any], x: Tensor) -> Folder:
        """A new folder with its configuration and initial weights; all of it or nothing."""
        if path.exists():
            raise BadInput(
                f"{path} exists; a run has a folder of its own. Choose another, remove it, or go on with: "
                f"dualdelay resume {path}"
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            (temporary / "checkpoints").mkdir(parents=True)
            (temporary / "trace").mkdir()
            folder = cls(temporary)
            save_weights(temporary / "start.safetensors", {"x": x})
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
        write(self.path / "config.json", json.dumps({**config, "digest": _digest(config)}, indent=1).encode())

    def config(self) -> dict[str, Any]:
        """Read the configuration, and refuse one that was changed since."""
        path = self.path / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
            digest = config.pop("digest")
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput(f"{self.path} is not the folder of a run: there is no {path}.") from None
        except (ValueError, KeyError, AttributeError):
            raise BadInput(f"{path} is damaged; without it the run cannot be continued. Start it anew.") from None
        if digest != _digest(config):
            raise BadInput(f"{path} was changed since the run wrote it; undo the change, or start a new run.")
        return config

    def start(self) -> Tensor:
        """The run's initial weights."""
        weights = load_weights(self.path / "start.safetensors")
        if set(weights) != {"x"}:
            raise BadInput(f"{self.path / 'start.safetensors'} is damaged; start the run anew.")
        return weights["x"]

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("[0-9]*.safetensors"))

    def save(self, content: Mapping[str, Any], rows: Mapping[str, Any], arrivals: int, keep: int) -> None:
        """Write a checkpoint and the trace's rows since the last one, and remove all but the newest ``keep``."""
        count = len(rows["time"])
        if count:
            save_table(self.path / "trace" / f"{arrivals - count:012d}.parquet", rows)
        data = encode(content)
        digest = hashlib.sha256(data).hexdigest()[:16]
        write(self.path / "checkpoints" / f"{arrivals:012d}-{digest}.safetensors", data)
        for old in self.checkpoints()[:-keep]:
            old.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
        """The newest good checkpoint with the trace's rows up to it, and what was wrong with newer ones."""
        problems: list[str] = []
        for path in reversed(self.checkpoints()):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest()[:16] != path.stem.partition("-")[2]:
                problems.append(f"checkpoint {path.name} is damaged")
                continue
            content = decode(data)
            try:
                rows = self._rows(content["arrivals"])
            except BadInput as error:
                problems.append(str(error))
                continue
            return content, rows, problems
        if problems:
            raise BadInput(f"no checkpoint of {self.path} can be used: {'; '.join(problems)}. Start the run anew.")
        return None

    def _rows(self, arrivals: int) -> dict[str, Any]:
        """The first rows of the trace, from its finished file and the parts behind that; later parts are removed."""
        whole = self.path / "trace.parquet"
        pieces = [load_table(whole)[0]] if whole.exists() else []
        have = len(pieces[0]["time"]) if pieces else 0
        for part in sorted((self.path / "trace").glob("[0-9]*.parquet")):
            begins = int(part.stem)
            if begins < have or begins >= arrivals:
                continue
            if begins > have:
                break
            pieces.append(load_table(part)[0])
            have += len(pieces[-1]["time"])
        if have < arrivals:
            raise BadInput(f"the trace of {self.path} has {have} rows of {arrivals}")
        names = pieces[0] if pieces else ()
        return {name: np.concatenate([piece[name] for piece in pieces])[:arrivals] for name in names}

    def clear_after(self, arrivals: int) -> None:
        """Remove what lies beyond the checkpoint that a run goes on from."""
        for part in (self.path / "trace").glob("[0-9]*.parquet"):
            if int(part.stem) >= arrivals:
                part.unlink()
        for path in self.checkpoints():
            if int(path.stem.partition("-")[0]) > arrivals:
                path.unlink()
        for leftover in (*self.path.glob(".*.part"), *self.path.glob("*/.*.part")):
            leftover.unlink()

    def finish(self, trace: Trace, metrics: Table, model: Mapping[str, Tensor], result: Mapping[str, Any]) -> None:
        """Write what a finished run leaves behind."""
        save_table(self.path / "trace.parquet", trace.columns, {"events": trace.events})
        save_table(self.path / "metrics.parquet", metrics.columns)
        save_weights(self.path / "model.safetensors", model)
        write(self.path / "result.json", json.dumps(result, indent=1).encode())
        for part in (self.path / "trace").glob("[0-9]*.parquet"):
            part.unlink()

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it did."""
        try:
            result: dict[str, Any] = json.loads((self.path / "result.json").read_bytes())
            return result
        except FileNotFoundError:
            return None
        except ValueError:
            return None  # it is written again when the run is resumed

    def trace(self) -> Trace:
        """The trace of a finished run."""
        if self.result() is None:
            raise BadInput(f"the run in {self.path} is not finished; finish it first: dualdelay resume {self.path}")
        columns, about = load_table(self.path / "trace.parquet")
        return Trace(columns, about.get("events", []))

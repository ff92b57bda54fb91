"""A run's folder: its configuration, trace, metrics, checkpoints and final model; each file is whole or not there.

A checkpoint is one safetensors file named by its number of arrivals and by a digest of its bytes, so that damage shows.
Nothing is pickled: structure is JSON in the file's header.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .core import BadInput, RunFailed
from .trace import Table, Trace


def write(path: Path, data: bytes) -> None:
    """Put a file in place at once: a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFailed(
            f"could not write {path} ({error.strerror}). What was saved before is intact; make room or choose another "
            "folder, then resume."
        ) from error


def pack(value: Any, tensors: dict[int, tuple[str, Tensor]]) -> Any:
    """Plain values for JSON; tensors are collected under names by their identity, so that one is saved once."""
    if isinstance(value, Tensor):
        return {"tensor": tensors.setdefault(id(value), (f"t{len(tensors)}", value))[0]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(value)}
    if isinstance(value, (list, tuple)):
        return [pack(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: pack(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(f"a {type(value).__name__} cannot be saved; keep numbers, texts, tensors, lists and sets in a state.")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return set(value["set"]) if "set" in value else {key: unpack(v, tensors) for key, v in value["dict"].items()}
    return value


def encode(content: Mapping[str, Any]) -> bytes:
    """A safetensors file with JSON in its header."""
    from safetensors.torch import save

    tensors: dict[int, tuple[str, Tensor]] = {}
    text = json.dumps(pack(dict(content), tensors))
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.values()}, {"content": text})


def decode(data: bytes) -> dict[str, Any]:
    """The inverse of ``encode``."""
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    content: dict[str, Any] = unpack(json.loads(header["__metadata__"]["content"]), load(data))
    return content


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors."""
    from safetensors.torch import save

    write(path, save({name: tensor.contiguous().clone() for name, tensor in weights.items()}))


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}.") from None
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or no safetensors file ({error}).") from None


def save_table(path: Path, columns: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Write columns as Parquet with page checksums; ``about`` goes into the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({"dualdelay": json.dumps(about or {})})
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_checksum=True)
    write(path, sink.getvalue())


def load_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read columns and what was written about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, page_checksum_verification=True)
        about: dict[str, Any] = json.loads((table.schema.metadata or {}).get(b"dualdelay", b"{}"))
        return {name: table[name].to_numpy() for name in table.column_names}, about
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}.") from None
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadInput(f"{path} is damaged or no Parquet file ({str(error).splitlines()[0]}).") from None


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


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

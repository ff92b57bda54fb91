"""Files that are whole or not there, and that know when they are damaged.

Safetensors for tensors, Parquet for tables, JSON for the rest, nothing pickled. What a run keeps carries a digest of what
it says, which is checked before it is believed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput, NotSaved


class Damaged(BadInput):
    """A file does not say what was written into it."""


def write(path: Path, data: bytes) -> None:
    """Put a file in place at once and for good: a reader sees the old one or the new one, also after a loss of power."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # on a disk that turned read-only it stays
            temporary.unlink(missing_ok=True)
        raise NotSaved(
            f"could not write {path} ({error.strerror}). What was saved before is intact; make room or choose another "
            "folder, then resume."
        ) from error


def read(path: Path) -> bytes:
    """The bytes of a file; one that is there and cannot be read now is no damage."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise NotSaved(f"could not read {path} ({error.strerror}). Nothing was changed; try again.") from error


def found(place: Path, pattern: str) -> list[Path]:
    """The files of a folder with such names, in order."""
    try:
        return sorted(place.glob(pattern))
    except OSError as error:
        raise NotSaved(f"could not read {place} ({error.strerror}). Nothing was changed; try again.") from error


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk: without this a file that was renamed may have its old name after all."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def remove(*paths: Path) -> None:
    """Remove files, those that are there."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise NotSaved(f"could not remove {path} ({error.strerror}). What was saved before is intact.") from error


def make_folder(path: Path) -> None:
    """Make a folder and those it is in, unless they are there; what is new is on the disk."""
    try:
        new = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for place in reversed(new):
            sync_folder(place.parent)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        said = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"the folder {str(path)!r} cannot be made ({said}); choose another.") from None


def json_digest(values: Mapping[str, Any]) -> str:
    """A digest of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values with a digest of themselves."""
    write(path, json.dumps({**values, "digest": json_digest(values)}, indent=1).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read plain values that were written with a digest; the file must be there."""
    data = read(path)
    try:
        values = json.loads(data)
        digest = values.pop("digest")
        good = isinstance(values, dict) and digest == json_digest(values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise Damaged(f"{path} is damaged, or was changed since it was written")
    return dict(values)


def pack(value: Any, tensors: dict[int, tuple[str, Tensor]]) -> Any:
    """Plain values for JSON; tensors are collected under names by their identity, so that one is saved once."""
    if isinstance(value, Tensor):
        return {"tensor": tensors.setdefault(id(value), (f"t{len(tensors)}", value))[0]}
    if isinstance(value, (set, frozenset)):
        return {"set": [pack(item, tensors) for item in sorted(value)]}
    if isinstance(value, tuple):
        return {"tuple": [pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
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
        if "tuple" in value:
            return tuple(unpack(item, tensors) for item in value["tuple"])
        if "set" in value:
            return set(unpack(value["set"], tensors))
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["dict"]}
    return value


def encode(content: Mapping[str, Any]) -> bytes:
    """A safetensors file whose first tensor is the structure, as JSON in bytes."""
    from safetensors.torch import save

    tensors: dict[int, tuple[str, Tensor]] = {}
    text = json.dumps(pack(dict(content), tensors)).encode()
    named = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.values()}
    return save({"content": torch.frombuffer(bytearray(text), dtype=torch.uint8), **named})


def decode(data: bytes) -> dict[str, Any]:
    """The inverse of ``encode``."""
    from safetensors.torch import load

    tensors = load(data)
    content: dict[str, Any] = unpack(json.loads(tensors["content"].numpy().tobytes()), tensors)
    return content


def save_weights(path: Path, weights: Mapping[str, Tensor], run: str = "") -> str:
    """Write a state dict as safetensors; the header says of which run, with a digest, which is returned."""
    from safetensors.torch import save

    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()}
    digest = weights_digest(tensors, run)
    write(path, save(tensors, {"dualdelay": f"{digest} {run}"}))  # one entry: of several the order would be chance
    return digest


def load_weights(path: Path, run: str | None = None, *, doubts: list[str] | None = None) -> dict[str, Tensor]:
    """Read a state dict: that of this run, or any other, which need not have a digest.

    If it is damaged that is an error, or for somebody who wants to see what is wrong one of the ``doubts``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = read(path)
        weights = load(data)
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {}).get("dualdelay")
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"there is no file {path}.") from None
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise Damaged(f"{path} is damaged or no safetensors file ({error})") from None
    digest, _, whose = (about or "").partition(" ")
    if (about is not None or run is not None) and digest != weights_digest(weights, whose):
        doubt(f"{path} is damaged: its weights are not those that were written", doubts)
    elif run is not None and whose != run:
        doubt(f"{path} is that of another run", doubts)
    return weights


def doubt(said: str, doubts: list[str] | None) -> None:
    """Something is damaged: an error, or one of the doubts of somebody who wants to see what is wrong."""
    if doubts is None:
        raise Damaged(said)
    doubts.append(said)


def weights_digest(weights: Mapping[str, Tensor], run: str) -> str:
    """A digest of a run's weights with their names."""
    digest = hashlib.sha256(run.encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_table(path: Path, columns: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Write columns as Parquet with page checksums; ``about`` goes into the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({"dualdelay": json.dumps(about or {})})
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_checksum=True)
    write(path, sink.getvalue())


def save_record(path: Path, columns: Mapping[str, Any], run: str, about: Mapping[str, Any] | None = None) -> str:
    """Write columns of a run as Parquet, with a digest of them and of what is said about them, which is returned."""
    arrays, said = {name: np.asarray(column) for name, column in columns.items()}, {**(about or {}), "run": run}
    digest = _table_digest(arrays, said)
    save_table(path, arrays, {**said, "digest": digest})
    return digest


def load_record(
    path: Path, run: str, names: Iterable[str] = (), *, doubts: list[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read columns of a run, those of these names among them, and what was said about them.

    A wrong digest is an error, or for somebody who wants to see what is wrong one of the ``doubts``.
    """
    columns, about = load_table(path)
    digest = about.pop("digest", None)
    if not columns.keys() >= set(names):
        raise Damaged(f"{path} is damaged: its columns are not those that were written")
    if digest != _table_digest(columns, about):
        doubt(f"{path} is damaged: its columns are not those that were written", doubts)
    elif about.get("run") != run:
        doubt(f"{path} is that of another run", doubts)
    return columns, {**about, "digest": digest}


def load_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read all columns and what was written about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"there is no file {path}.") from None
    try:
        source = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True)
        table = source.read(use_threads=False)  # no thread is left that could outlive the program
        about = dict(json.loads((table.schema.metadata or {}).get(b"dualdelay", b"{}")))
        return {name: table[name].to_numpy() for name in table.column_names}, about
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged or no Parquet file ({[*str(error).splitlines(), ''][0]})") from None


def _table_digest(columns: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, column in columns.items():
        texts = column.dtype.kind in "OU"
        digest.update(json.dumps([name, "text" if texts else column.dtype.str, len(column)]).encode())
        digest.update(json.dumps(column.tolist()).encode() if texts else np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()

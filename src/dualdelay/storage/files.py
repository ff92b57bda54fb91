"""Files that appear whole or not at all, and that show when they are damaged.

Tensors are saved as safetensors, tables as Parquet, everything else as JSON; nothing is pickled. Every file of a run has in
it a digest of its content, which is checked when the file is read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput, NotSaved

INTACT = "What was saved before is intact"
RESUME = f"{INTACT}; make room, or move the folder to where there is some, then resume."  # advice about a run's files
NEW = "No run has begun; choose a folder that can be written, or make room there."  # about a folder that is to be made


class Missing(BadInput):
    """There is no such file."""


class Damaged(BadInput):
    """A file does not hold what was written into it."""


def report_damage(message: str, reports: list[str] | None) -> None:
    """Raise Damaged, or add the message to the reports of a caller that reads damaged files on purpose."""
    if reports is None:
        raise Damaged(message)
    reports.append(message)


@contextmanager
def disk_errors(action: str, advice: str) -> Iterator[None]:
    """Raise an OSError anew as NotSaved, which says what could not be done and gives the advice.

    What could not be done on the way is not told beside it: one error is enough, that of the whole.
    """
    try:
        yield
    except (OSError, NotSaved) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise NotSaved(f"could not {action} ({cause.strerror}). {advice}") from cause


def write(path: Path, data: bytes, advice: str = "Choose another place, or make room there.") -> None:
    """Put a file in place at once and for good: a reader sees the old one or the new one, also after a loss of power.

    One that holds these bytes already stays as it is, with its date: repeating what is done changes nothing. The advice is
    what to do if it cannot be written.
    """
    with suppress(OSError):
        if path.stat().st_size == len(data) and not path.is_symlink() and path.read_bytes() == data:
            return
    temporary = path.with_name(f".{path.name}.part")
    with disk_errors(f"write {path}", advice):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError:
            with suppress(OSError):  # on a disk that turned read-only it stays
                temporary.unlink(missing_ok=True)
            raise


def read(path: Path) -> bytes:
    """The bytes of a file; a file that exists and cannot be read now is not taken for damaged."""
    with disk_errors(f"read {path}", "Nothing was changed; try again."):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"there is no file {path}.") from None


def list_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names match the pattern, sorted."""
    with disk_errors(f"read {folder}", "Nothing was changed; try again."):
        return sorted(folder.glob(pattern))


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: without this a renamed file may have its old name after a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def remove(*paths: Path) -> None:
    """Remove those of these files that exist."""
    for path in paths:
        with disk_errors(f"remove {path}", f"{INTACT}."):
            path.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents as far as they do not exist, and bring the new names to the disk."""
    try:
        _make_folder(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"the folder {str(path)!r} cannot be made ({reason}); choose another.") from None


def make_parent(path: Path) -> None:
    """Create the folder that a run's is to lie in; if it cannot be made, it is the run's that cannot be saved."""
    with disk_errors(f"create {path}", NEW):
        _make_folder(path.parent)


def _make_folder(path: Path) -> None:
    new = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(new):
        sync_folder(place.parent)


def short_digest(data: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of these bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def json_digest(values: Mapping[str, Any]) -> str:
    """A digest of plain values."""
    return short_digest(json.dumps(values, sort_keys=True).encode())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values with a digest of themselves."""
    write(path, json.dumps({**values, "digest": json_digest(values)}, indent=1).encode(), RESUME)


def read_json(path: Path, run: str | None = None) -> dict[str, Any]:
    """Read plain values that were written with a digest: those of this run, or any."""
    data, intact = read(path), False
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        values = json.loads(data)
        intact = values.pop("digest") == json_digest(values)
    if not intact:
        raise Damaged(f"{path} is damaged, or was changed since it was written")
    if run is not None and values.get("run") != run:
        raise Damaged(f"{path} is that of another run")
    return dict(values)


def pack(value: Any, tensors: dict[int, tuple[str, Tensor]]) -> Any:
    """Plain values for JSON; tensors are collected under names by their identity, so that each is saved once."""
    if isinstance(value, Tensor):
        return {"tensor": tensors.setdefault(id(value), (f"t{len(tensors)}", value))[0]}
    if isinstance(value, (set, frozenset)):
        return {"set": pack(sorted(value), tensors)}
    if isinstance(value, tuple):
        return {"tuple": pack(list(value), tensors)}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"dict": pack([list(pair) for pair in value.items()], tensors)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadInput(f"a {type(value).__name__} cannot be saved; keep numbers, texts, tensors, lists and sets in a state.")


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        make: Mapping[str, Any] = {"tensor": tensors.__getitem__, "tuple": tuple, "set": set, "dict": dict}
        return make[kind](unpack(content, tensors))
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
    return dict(unpack(json.loads(tensors["content"].numpy().tobytes()), tensors))


def save_weights(path: Path, weights: Mapping[str, Tensor], run: str = "") -> str:
    """Write a state dict as safetensors with a digest, which is returned; the header names the run."""
    from safetensors.torch import save

    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()}
    digest = weights_digest(tensors, run)
    about = {"dualdelay": f"{digest} {run}"}  # one entry: the order of several would be random
    write(path, save(tensors, about), RESUME)
    return digest


def load_weights(path: Path, run: str | None = None, *, reports: list[str] | None = None) -> dict[str, Tensor]:
    """Read a state dict: that of this run, or any, which need not have a digest; for ``reports`` see ``report_damage``."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = read(path)
    try:
        weights = load(data)
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {}).get("dualdelay")
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise Damaged(f"{path} is damaged or no safetensors file ({error})") from None
    digest, _, owner = (about or "").partition(" ")
    if (about is not None or run is not None) and digest != weights_digest(weights, owner):
        report_damage(f"{path} is damaged: its weights are not those that were written", reports)
    elif run is not None and owner != run:
        report_damage(f"{path} is that of another run", reports)
    return weights


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's numbers, in their order."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_digest(weights: Mapping[str, Tensor], run: str) -> str:
    """A digest of a run's weights with their names."""
    digest = hashlib.sha256(run.encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def save_table(path: Path, columns: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Write columns as Parquet with page checksums; ``about`` goes into the file's metadata."""
    write(path, _parquet(columns, about or {}))


def _parquet(columns: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Columns as the bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    table = table.replace_schema_metadata({"dualdelay": json.dumps(about)})
    sink = io.BytesIO()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


def load_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read all columns and what was written about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = read(path)
    try:
        source = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False, page_checksum_verification=True)
        table = source.read(use_threads=False)  # no thread is left that could outlive the program
        about = dict(json.loads((table.schema.metadata or {}).get(b"dualdelay", b"{}")))
        return {name: table[name].to_numpy() for name in table.column_names}, about
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged or no Parquet file ({[*str(error).splitlines(), ''][0]})") from None


def save_record(path: Path, columns: Mapping[str, Any], run: str, about: Mapping[str, Any] | None = None) -> str:
    """Write columns of a run as Parquet, with a digest of them and of ``about``, which is returned."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    about = {**(about or {}), "run": run}
    digest = _table_digest(arrays, about)
    write(path, _parquet(arrays, {**about, "digest": digest}), RESUME)
    return digest


def load_record(
    path: Path, run: str, names: Iterable[str] = (), *, reports: list[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a run's columns, which must include these names, and what was written about them."""
    columns, about = load_table(path)
    digest = about.pop("digest", None)
    message = f"{path} is damaged: its columns are not those that were written"
    if not columns.keys() >= set(names):
        raise Damaged(message)
    if digest != _table_digest(columns, about):
        report_damage(message, reports)
    elif about.get("run") != run:
        report_damage(f"{path} is that of another run", reports)
    return columns, {**about, "digest": digest}


def _table_digest(columns: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, column in columns.items():
        is_text = column.dtype.kind in "OU"
        digest.update(json.dumps([name, "text" if is_text else column.dtype.str, len(column)]).encode())
        digest.update(json.dumps(column.tolist()).encode() if is_text else np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()

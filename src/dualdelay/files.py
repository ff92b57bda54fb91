"""Files that are whole or not there: safetensors for tensors, Parquet for tables, nothing pickled."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import BadInput, RunFailed


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


def make_folder(path: Path) -> None:
    """Make a folder and those it is in, unless they are there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the folder {path} cannot be made ({error.strerror}); choose another.") from None


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


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors."""
    from safetensors.torch import save

    write(path, save({name: tensor.cpu().contiguous().clone() for name, tensor in weights.items()}))


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


def load_table(path: Path, names: Iterable[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the columns of these names, or all, and what was written about them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, page_checksum_verification=True)
        about: dict[str, Any] = json.loads((table.schema.metadata or {}).get(b"dualdelay", b"{}"))
        return {name: table[name].to_numpy() for name in names or table.column_names}, about
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}.") from None
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise BadInput(f"{path} is damaged or no Parquet file ({str(error).splitlines()[0]}).") from None

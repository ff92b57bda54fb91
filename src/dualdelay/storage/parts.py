"""What the shards of a server write beside a checkpoint: each its own file, named by the moment and a digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.shard import put_together, shard_like, united
from . import files
from .files import Damaged, Missing

PART = re.compile(r"(\d{12,})-([0-9a-f]{16})\.shard")  # moment and digest
_PIECE = 1 << 24  # bytes that are read at once


class PartFiles:
    """How shards reach the folder of their run."""

    def write(self, folder: Path, moment: int, content: Mapping[str, Any]) -> str:
        """Write what a shard has saved; returns the file's name."""
        data = files.encode(content)
        name = f"{moment:012d}-{files.short_digest(data)}.shard"
        files.write(folder / "checkpoints" / name, data, files.RESUME)
        return name

    def read(self, path: Path) -> dict[str, Any]:
        """What a shard has written; refuses what is damaged."""
        data = files.read(path)
        if files.short_digest(data) != path.stem.partition("-")[2]:
            raise Damaged(f"{path} is damaged")
        return files.decode(data)


def is_whole(path: Path) -> bool:
    """Whether a shard's file is there and undamaged, read piece by piece."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_PIECE):
                digest.update(data)
    except OSError:
        return False
    return digest.hexdigest().startswith(path.stem.partition("-")[2])


def located(content: Mapping[str, Any], folder: Path) -> list[tuple[int, int, Path]]:
    """The files of a checkpoint's shards: first weight, the one after the last, path."""
    return [(start, stop, folder.resolve() / "checkpoints" / name) for start, stop, name in content["shards"]]


def whole(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A checkpoint as a server in one process has it, also if shards have written it."""
    if "shards" not in content:
        return dict(content)
    try:
        pieces = [(start, stop, PartFiles().read(path)) for start, stop, path in located(content, folder)]
    except Missing as error:
        raise Damaged(f"a shard's part of a checkpoint is missing: {error}") from None
    like = shard_like(content, pieces[0][2]["models"], pieces[0][1] - pieces[0][0])
    joint = united(content, put_together(pieces, like, 0, pieces[-1][1]))
    return {name: value for name, value in joint.items() if name != "shards"}

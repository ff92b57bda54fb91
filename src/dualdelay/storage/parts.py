"""What the shards of a server and their workers write beside a checkpoint: each its own file.

A file is named by the moment, a digest and the number of who has written it. What workers keep is either in such a file, or
the shards lend it: then their files have the vectors, and the head's checkpoint has the rest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.shard import put_together, shard_like, united
from . import files
from .files import Damaged

PART = re.compile(r"(\d{12,})-([0-9a-f]{16})-\d+\.(?:shard|kept)")  # moment and digest
_PIECE = 1 << 24  # bytes that are read at once


class PartFiles:
    """How shards reach the folder of their run."""

    def write(self, folder: Path, moment: int, who: str, content: Mapping[str, Any]) -> str:
        """Write what somebody has saved, ``who`` is a number and a kind, such as "0.shard"; returns the file's name."""
        data = files.encode(content)
        name = f"{moment:012d}-{files.short_digest(data)}-{who}"
        files.write(folder / "checkpoints" / name, data, files.RESUME)
        return name

    def read(self, path: Path) -> dict[str, Any]:
        """What was written; refuses what is damaged."""
        data = files.read(path)
        if files.short_digest(data) != _digest_of(path):
            raise Damaged(f"{path} is damaged")
        return files.decode(data)

    def again(self, path: Path, moment: int) -> Path:
        """What was written for one moment, for another one as well."""
        other = path.with_name(f"{moment:012d}-{path.name.partition('-')[2]}")
        files.write(other, files.read(path), files.RESUME)
        return other


def _digest_of(path: Path) -> str:
    match = PART.fullmatch(path.name)
    assert match is not None
    return match[2]


def is_whole(path: Path) -> bool:
    """Whether a shard's file is there and undamaged, read piece by piece."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_PIECE):
                digest.update(data)
    except OSError:
        return False
    return digest.hexdigest().startswith(_digest_of(path))


def located(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A checkpoint of shards with the paths of the files that belong to it; refuses one whose files are not whole."""
    place = folder.resolve() / "checkpoints"
    shards = [(start, stop, place / name) for start, stop, name in content["shards"]]
    held = [(w, {**kept, "file": place / kept["file"]} if "file" in kept else kept) for w, kept in content["fleet"]["held"]]
    for path in (*(path for _, _, path in shards), *(kept["file"] for _, kept in held if "file" in kept)):
        if not is_whole(path):
            raise Damaged(f"the part {path.name} of a checkpoint is damaged or missing")
    return {**content, "shards": shards, "fleet": {**content["fleet"], "held": held}}


def whole(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A checkpoint as a server in one process has it, also if shards have written it."""
    if "shards" not in content:
        return dict(content)
    content, read = located(content, folder), PartFiles().read
    pieces = [(start, stop, read(path)) for start, stop, path in content["shards"]]
    like = shard_like(content, pieces[0][2]["models"], pieces[0][1] - pieces[0][0])
    joined = put_together(pieces, like, 0, pieces[-1][1])
    held = [(w, read(kept["file"]) if "file" in kept else kept) for w, kept in content["fleet"]["held"]]
    joint = united({**content, "fleet": {**content["fleet"], "held": held}}, joined)
    return {name: value for name, value in joint.items() if name != "shards"}

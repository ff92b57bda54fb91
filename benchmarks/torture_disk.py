"""A disk that can be told what to do: every call that changes a folder is counted, recorded, failed, or is the last one.

While a ``Disk`` is installed, the functions of ``os`` and ``open`` that write go through it for all paths under one folder;
everything else is untouched. A file that is opened for writing is Python's own buffered writer on top of a raw file whose
writes are counted, so that the calls are those that the kernel would see.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

MODES = ("before", "after", "half")  # a call is not done, done, or half done: of a write the first half


class Call(NamedTuple):
    """A call that reached the disk: what was done, to which path, with what."""

    kind: str
    path: str
    more: Any = None  # of a rename the new path, of a write (place, bytes), of an open its flags


@dataclass(frozen=True)
class Fault:
    """What happens at call number ``at``, counted from 1; ``number`` is an errno, 0 a short write, or None for SIGKILL."""

    at: int
    mode: str = "before"
    number: int | None = None
    for_ever: bool = False
    reads: bool = False  # whether reading counts as well


@dataclass
class Disk:
    """What happens under ``root``."""

    root: Path
    fault: Fault | None = None
    record: list[Call] | None = None  # with the bytes that were written
    calls: list[str] = field(default_factory=list)  # the kinds of all that were counted
    _files: dict[int, str] = field(default_factory=dict)  # paths of open descriptors
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator[Disk]:
        """In place of the operating system's."""
        names = ("open", "close", "write", "pwrite", "fsync", "ftruncate", "mkdir", "rmdir", "unlink", "rename")
        self._real = {name: getattr(os, name) for name in names} | {
            "file": io.open,
            "scandir": os.scandir,
            "listdir": os.listdir,
        }
        places = {
            **{name: [name] for name in names},
            "unlink": ["unlink", "remove"],
            "rename": ["rename", "replace"],
            "fsync": ["fsync", "fdatasync"],
            "scandir": ["scandir"],
            "listdir": ["listdir"],
        }
        with ExitStack() as stack:
            for name, some in places.items():
                for place in some:
                    stack.enter_context(mock.patch.object(os, place, getattr(self, name)))
            for module in (io, builtins):
                stack.enter_context(mock.patch.object(module, "open", self.file))
            yield self

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path, if it lies under the root."""
        if isinstance(path, int):
            return self._files.get(path)
        base = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        place = base / os.fsdecode(path)
        return str(place) if place.is_relative_to(self.root) else None

    def _through(self, call: Call, do: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do a call, unless it is the one at which something happens."""
        fault, reads = self.fault, call.kind in ("read", "list")
        if reads and not (fault is not None and fault.reads):
            return do()
        self.calls.append(call.kind)
        count = len(self.calls)
        if fault is None or not (count == fault.at or (fault.for_ever and count > fault.at)):
            made = do()
            if self.record is not None:
                self.record.append(call)
            return made
        if fault.number == 0:  # no error: only part of it was written, and the caller is told how much
            return (half or do)()
        if fault.mode == "after" or call.kind == "close":  # a descriptor is closed whatever close says
            do()
        elif fault.mode == "half":
            (half or do)()
        if fault.number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(fault.number, os.strerror(fault.number), call.path)

    # ------------------------------------------------------------------------------------------ in place of os's functions

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def do() -> int:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))

        name = self._inside(path, dir_fd)
        if name is None:
            return do()
        writes = bool(flags & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR)) or Path(name).is_dir()
        made = self._through(Call("open" if writes else "read", name, flags), do)
        self._files[made] = name
        return int(made)

    def close(self, descriptor: int) -> None:
        name = self._files.pop(descriptor, None)
        if name is None:
            return self._real["close"](descriptor)
        return self._through(Call("close", name), lambda: self._real["close"](descriptor))

    def write(self, descriptor: int, data: Any) -> int:
        name = self._files.get(descriptor)
        if name is None:
            return int(self._real["write"](descriptor, data))
        some, place, write = bytes(data), os.lseek(descriptor, 0, os.SEEK_CUR), self._real["write"]
        whole, half = partial(write, descriptor, some), partial(write, descriptor, _half(some))
        return int(self._through(Call("write", name, (place, some)), whole, half))

    def pwrite(self, descriptor: int, data: Any, place: int) -> int:
        name = self._files.get(descriptor)
        if name is None:
            return int(self._real["pwrite"](descriptor, data, place))
        some, write = bytes(data), self._real["pwrite"]
        whole, half = partial(write, descriptor, some, place), partial(write, descriptor, _half(some), place)
        return int(self._through(Call("write", name, (place, some)), whole, half))

    def fsync(self, descriptor: Any) -> None:
        name = self._files.get(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        do = partial(self._real["fsync"], descriptor)
        return do() if name is None else self._through(Call("fsync", name), do)

    def ftruncate(self, descriptor: int, length: int) -> None:
        name = self._files.get(descriptor)
        if name is None:
            return self._real["ftruncate"](descriptor, length)
        return self._through(Call("truncate", name, length), lambda: self._real["ftruncate"](descriptor, length))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        return self._on_path("mkdir", path, dir_fd, lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        return self._on_path("rmdir", path, dir_fd, lambda: self._real["rmdir"](path, dir_fd=dir_fd))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        return self._on_path("unlink", path, dir_fd, lambda: self._real["unlink"](path, dir_fd=dir_fd))

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        new = self._inside(target, dst_dir_fd)
        where = {"src_dir_fd": src_dir_fd, "dst_dir_fd": dst_dir_fd}
        return self._on_path("rename", source, src_dir_fd, lambda: self._real["rename"](source, target, **where), new)

    def scandir(self, path: Any = ".") -> Any:
        return self._on_path("list", path, None, lambda: self._real["scandir"](path))

    def listdir(self, path: Any = ".") -> Any:
        return self._on_path("list", path, None, lambda: self._real["listdir"](path))

    def _on_path(self, kind: str, path: Any, dir_fd: int | None, do: Callable[[], Any], more: Any = None) -> Any:
        name = self._inside(path, dir_fd)
        return do() if name is None else self._through(Call(kind, name, more), do)

    # ---------------------------------------------------------------------------------------------------- in place of open

    def file(self, path: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        name = self._inside(path)
        if name is None or more.get("opener") is not None:
            return self._real["file"](path, mode, buffering, *rest, **more)
        if not set(mode) & set("wax+"):
            return self._through(Call("read", name), lambda: self._real["file"](path, mode, buffering, *rest, **more))
        raw = _Raw(self, path if isinstance(path, int) else self.open(path, _flags(mode), 0o666), name)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **more)


def _half(data: bytes) -> bytes:
    """The first half, and at least a byte: a write that wrote nothing would be tried for ever."""
    return data[: max(1, len(data) // 2)]


def _flags(mode: str) -> int:
    flags = os.O_RDWR if "+" in mode else os.O_WRONLY
    flags |= os.O_CREAT if set(mode) & set("wax") else 0
    return flags | (os.O_TRUNC if "w" in mode else os.O_EXCL if "x" in mode else os.O_APPEND if "a" in mode else 0)


class _Raw(io.RawIOBase):
    """An open file whose writes go through the disk."""

    def __init__(self, disk: Disk, descriptor: int, name: str) -> None:
        super().__init__()
        self._disk, self._descriptor, self.name = disk, descriptor, name

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._descriptor, [buffer])

    def write(self, data: Any) -> int:
        return self._disk.write(self._descriptor, data)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, place, whence)

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        self._disk.ftruncate(self._descriptor, length)
        return length

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._descriptor)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()

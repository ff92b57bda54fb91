"""One writer for a folder: a lock of the operating system, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..core.errors import BadInput

try:
    import fcntl
    import resource
except ImportError:  # Windows, where everything but folders works
    pass

LOCK_FILE = "lock"
_held: set[int] = set()  # descriptors of the locks that this process holds


def _close_in_child() -> None:
    """Close a forked process's copies of its parent's locks, which would keep the folders locked after the parent's end."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class InUse(BadInput):
    """Another run writes to the folder."""


class Lock:
    """The right to write to a folder, which no other process or thread has until it is released."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder; if it is locked already, the error names the process that holds the lock."""
        if "fcntl" not in globals():
            raise BadInput("a run with a folder needs a system with file locks, Linux or macOS; leave the folder out.")
        self._descriptor = _open(folder / LOCK_FILE)
        _held.add(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace") or "another process"
            self._close()
            here = " (this one, in another thread or run)" if holder.startswith(f"process {os.getpid()} on") else ""
            raise InUse(
                f"{folder} is in use by {holder}{here}, whose run is under way there. Wait until it has ended, or end it; "
                "the lock ends with it."
            ) from None
        except OSError as error:
            self._close()
            raise BadInput(
                f"{folder} cannot be locked ({error.strerror}), and without a lock two processes could ruin a run. Choose "
                "a folder on a file system that has locks, such as a local disk."
            ) from None

        self._write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")

    def _write(self, holder: str) -> None:
        """Write who holds the lock into its file; a full disk does not prevent the lock."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)

    def release(self) -> None:
        """Let other processes and threads lock the folder."""
        if self._descriptor in _held:
            self._write("")
            with suppress(OSError):  # the lock ends anyway when the file is closed
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a process just forked, which still has it open
            self._close()

    def _close(self) -> None:
        _held.remove(self._descriptor)
        with suppress(OSError):  # the descriptor is closed even if close fails
            os.close(self._descriptor)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a large sweep holds one folder for each of its runs
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return os.open(path, flags, 0o666)
    except OSError as error:
        raise BadInput(f"{path.parent} cannot be locked ({error.strerror}); choose a folder that can be written.") from None

"""What workers print, kept by worker and incarnation in a run's folder."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

_FIRST, _LAST = 512 * 1024, 256 * 1024  # bytes of a worker's output that are kept: how it began, and how it ended


def _no_link(path: str, flags: int) -> int:
    """Open a file, and not one somewhere else that it is a link to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class _Stream:
    """One process's output: written as it comes, up to a size, and beyond that the newest lines."""

    def __init__(self) -> None:
        self.recent: deque[str] = deque(maxlen=50)  # for error messages
        self._early: list[str] = []  # until there is a folder
        self._written = self._tail_size = self._dropped = 0
        self._tail: deque[str] = deque()

    def add(self, path: Path | None, lines: list[str]) -> None:
        self.recent.extend(lines)
        self._early += lines
        if path is None or not (path.parent.parent / "config.json").exists():
            del self._early[:-1000]
            return
        text = "".join(f"{line}\n" for line in self._early)
        self._early = []
        if self._written < _FIRST:
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", opener=_no_link) as file:
                file.write(text)
            self._written += len(text)
            return
        self._tail.append(text)
        self._tail_size += len(text)
        while self._tail_size > _LAST and len(self._tail) > 1:
            size = len(self._tail.popleft())
            self._tail_size -= size
            self._dropped += size

    def close(self, path: Path | None) -> None:
        self.add(path, [])
        if path is not None and self._tail and path.exists():
            with open(path, "a", opener=_no_link) as file:
                file.write(f"[{self._dropped} characters left out]\n{''.join(self._tail)}")
            self._tail.clear()


class Output:
    """The output of all workers' processes."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._streams: dict[tuple[int, int], _Stream] = {}

    def path(self, worker: int, incarnation: int) -> Path | None:
        """The file that a process's output goes to, if there is a folder."""
        return None if self._folder is None else self._folder / f"worker-{worker}-{incarnation}.txt"

    def add(self, worker: int, incarnation: int, lines: list[str]) -> None:
        """A process has printed something."""
        stream = self._streams.setdefault((worker, incarnation), _Stream())
        with suppress(OSError):  # a full disk is no reason to stop: the newest lines are still at hand
            stream.add(self.path(worker, incarnation), lines)

    def recent(self, worker: int, incarnation: int) -> list[str]:
        """The newest lines of a process."""
        stream = self._streams.get((worker, incarnation))
        return [] if stream is None else list(stream.recent)

    def close(self) -> None:
        for (worker, incarnation), stream in self._streams.items():
            with suppress(OSError):
                stream.close(self.path(worker, incarnation))

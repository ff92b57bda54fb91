"""What the server knows of each site: its session, what is on its way in both directions, and what it does."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .keys import SEAL
from .wire import Partial, Rooms

_REQUESTS = (2000.0, 4000.0)  # of a site a second, and at once
_BUFFERED = 8 * 2**20  # bytes on their way that neither side can see
_SLOWEST = 20_000.0  # bytes that a line carries in a second, at least
_LONGEST_TURN = 120.0  # seconds of being sent something, after which others are not kept waiting any more
_FORGOTTEN = 45.0  # seconds after which who waited and has not asked again is gone: more than two questions are open


class Bucket:
    """So many a second, and so many at once."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self._most, self._left, self._time = rate, most, most, time.monotonic()

    def take(self) -> bool:
        """Whether one more is within the limit."""
        now = time.monotonic()
        self._left, self._time = min(self._most, self._left + (now - self._time) * self._rate), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Turns:
    """Who is sent something large now, and who comes next; first come, first served."""

    def __init__(self, most: int) -> None:
        """So many at the same time."""
        self._most = most
        self._taken: dict[int, float] = {}  # since when
        self._waiting: dict[int, float] = {}  # when each asked last

    def take(self, worker: int) -> bool:
        """Whether it is a worker's turn, which it then has; who does not ask again, or takes too long, is passed over."""
        now = time.monotonic()
        self._taken = {one: since for one, since in self._taken.items() if now - since < _LONGEST_TURN}
        self._waiting = {one: asked for one, asked in self._waiting.items() if now - asked < _FORGOTTEN}
        if worker not in self._taken:
            self._waiting[worker] = now
            if worker not in list(self._waiting)[: max(0, self._most - len(self._taken))]:
                return False
            del self._waiting[worker]
            self._taken[worker] = now
        return True

    def end(self, worker: int) -> list[int]:
        """A worker has what it was sent, or is gone; gives those who may ask again now."""
        waited = self._waiting.pop(worker, None)
        return list(self._waiting) if self._taken.pop(worker, waited) is not None else []


class Upload(Partial):
    """A message of a site that is on its way; its last bytes are the seal of those before."""

    def __init__(self, size: int, seal: Any, rooms: Rooms) -> None:
        """To be checked by this seal."""
        super().__init__(size, rooms)
        self._seal, self._content = seal, size - SEAL

    def add(self, piece: bytes) -> None:
        sealed = self._content - self.have
        super().add(piece)
        if sealed > 0:
            self._seal.update(piece if sealed >= len(piece) else piece[:sealed])

    def opened(self) -> memoryview | None:
        """The message, without its seal; None if that is another."""
        good = hmac.compare_digest(self._seal.finalize(), self.data[self._content :])
        return self.data[: self._content] if good else None


@dataclass
class Outgoing:
    """A message for a site, kept until the site has it."""

    number: int
    name: tuple[Any, ...]  # what it is, so that it is not put there twice
    pieces: Sequence[bytes | memoryview]
    size: int


@dataclass
class SiteBook:
    """What the hub knows of one site."""

    name: str
    worker: int
    session: str = ""
    key: bytes = b""  # of that session
    life: str = ""  # names its process
    former: list[str] = field(default_factory=list)  # processes that another one has taken the place of
    address: str = ""
    greeted: int = 0  # the number of the last challenge that it has answered
    seen: float = 0.0  # when it was heard of last, by the monotonic clock
    busy: bool = False  # whether it said that it computes
    outbox: deque[Outgoing] = field(default_factory=deque)
    sent: int = 0  # messages numbered so far
    travelling: int = 0  # bytes of a message that it is being sent
    uploads: dict[int, Upload] = field(default_factory=dict)
    taken: int = 0  # messages up to this number have come in
    counts: set[int] = field(default_factory=set)
    highest: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: str = ""  # why it was turned down, if nobody of it is there
    told: str = ""  # what the log has last of that
    doing: str = ""  # in words
    since: float = 0.0  # when it began with that
    jobs: int = 0  # that it has answered
    loss: float | None = None  # of its last minibatch
    bucket: Bucket = field(default_factory=lambda: Bucket(*_REQUESTS))
    waiting: asyncio.Event | None = None  # of the request that waits for something

    def silence(self, now: float) -> float:
        """Seconds for which nothing is known of it: it neither asks, nor sends, nor is it being sent anything."""
        quiet = now - self.seen - min(self.travelling, _BUFFERED) / _SLOWEST
        return 0.0 if self.waiting is not None else max(0.0, quiet)


@dataclass(frozen=True)
class Incoming:
    """What has come from a site: a message, or that there is a new process or a sign of life."""

    worker: int
    session: str
    data: bytes | memoryview | None = None  # None: it was heard of, and does nothing
    hello: bool = False
    bye: bool = False  # its process ends

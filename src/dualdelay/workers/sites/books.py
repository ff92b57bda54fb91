"""What the server knows of each site: its session, what is on its way in both directions, and what it does."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_REQUESTS = (2000.0, 4000.0)  # of a site a second, and at once


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


@dataclass
class Upload:
    """A message of a site that is on its way."""

    size: int
    digest: str
    have: int = 0  # bytes that are here
    data: bytearray = field(default_factory=bytearray)
    hashed: Any = field(default_factory=hashlib.sha256)

    def add(self, piece: bytes) -> None:
        """Take the next bytes; room for all is there from the first on, and costs no memory until it is used."""
        if not self.data:
            self.data = bytearray(self.size)
        self.data[self.have : self.have + len(piece)] = piece
        self.hashed.update(piece)
        self.have += len(piece)


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
    life: str = ""  # names its process
    former: list[str] = field(default_factory=list)  # processes that another one has taken the place of
    address: str = ""
    seen: float = 0.0  # when it was heard of last, by the monotonic clock
    busy: bool = False  # whether it said that it computes
    outbox: deque[Outgoing] = field(default_factory=deque)
    sent: int = 0  # messages numbered so far
    uploads: dict[int, Upload] = field(default_factory=dict)
    taken: int = 0  # messages up to this number have come in
    counts: set[int] = field(default_factory=set)
    highest: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: str = ""  # why it was turned down last
    doing: str = ""  # in words
    since: float = 0.0  # when it began with that
    jobs: int = 0  # that it has answered
    loss: float | None = None  # of its last minibatch
    bucket: Bucket = field(default_factory=lambda: Bucket(*_REQUESTS))
    waiting: asyncio.Event | None = None  # of the request that waits for something


@dataclass(frozen=True)
class Incoming:
    """What has come from a site: a message, or that there is a new process or a sign of life."""

    worker: int
    session: str
    data: bytes | bytearray | None = None  # None: it was heard of, and does nothing
    hello: bool = False
    bye: bool = False  # its process ends

"""Requests to a worker's process on the server's machine, and its answers, over a socket that no other user is let in to.

A call of a Ray actor takes half a millisecond of processor time at each end; a packet here takes a tenth of that. What is
said is plain values and short arrays, and one packet is one message: whole or not there. Longer vectors go through shared
memory (``shared_memory``), which messages name. Linux alone has such sockets; elsewhere everything goes by Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from .local_line import LineLost, user_of
from .messages import Array
from .structures import array_name, plain, structure

_LONGEST = 1 << 18  # bytes of a packet
_ROOM = 1 << 20  # the same of those that wait, as the system counts them; it may allow less
_KEPT = 64  # bytes that the system wants to itself
_LENGTH = struct.Struct("<Q")  # of the values, which come first in a packet
_ALIGNED = 8  # bytes of which everything in a packet has a multiple
_NUMBERS = "fiub"  # the kinds of arrays that travel


class Door:
    """Where a worker's process lets the server in."""

    def __init__(self) -> None:
        self.address = f"\0dualdelay-{secrets.token_hex(16)}"
        """By what the server finds it; it is no file: nothing of it is left when this process is gone."""
        self._user = os.geteuid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.address)
        self._socket.listen()

    def let_in(self) -> WorkersEnd:
        """Wait for the server; whoever is another user is turned away."""
        while True:
            line, _ = self._socket.accept()
            if user_of(line) == self._user:
                self._socket.close()
                return WorkersEnd(line)
            line.close()


class _End:
    """One end of a line."""

    def __init__(self, line: socket.socket) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._line, self._room = line, bytearray(_LONGEST)
        self._longest = min(_LONGEST, line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _KEPT)

    def _heard(self, flags: int = 0) -> Any:
        """The next packet; raises BlockingIOError if it was not to be waited for and is not there."""
        try:
            size = self._line.recv_into(self._room, 0, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error
        if not size:
            raise LineLost("the process at the other end is gone.")
        return _unpacked(self._room[:size])

    def _send(self, packet: bytes, flags: int = 0) -> None:
        """Send a packet; raises BlockingIOError if there is no room for it yet and that was not to be waited for."""
        try:
            self._line.send(packet, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error

    def _packed(self, values: Any) -> bytes | None:
        """A packet; None if it would be too long, or if something in it is neither plain nor an array of numbers."""
        arrays: list[Array] = []
        try:
            said = plain(values, arrays)
            if sum(array.nbytes for array in arrays) > self._longest or any(a.dtype.kind not in _NUMBERS for a in arrays):
                return None
            text = json.dumps([said, [[array.dtype.str, array.shape] for array in arrays]]).encode()
        except TypeError:
            return None
        parts = [_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)]
        packet = b"".join(part + bytes(-len(part) % _ALIGNED) for part in parts)
        return packet if len(packet) <= self._longest else None

    def close(self) -> None:
        """Say and hear nothing any more."""
        self._line.close()


class WorkersEnd(_End):
    """The end of a worker's process, which waits for what it is asked."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__(line)
        self.waiting: deque[Any] = deque()
        """What was heard and comes after what is done now."""

    def hear(self) -> Any:
        """Wait for what is asked next."""
        if not self.waiting:
            self.waiting.append(self._heard())
        with suppress(BlockingIOError):
            while True:
                self.waiting.append(self._heard(socket.MSG_DONTWAIT))
        return self.waiting.popleft()

    def answer(self, *values: Any) -> bool:
        """Say something; False if it is not plain or too long."""
        packet = self._packed(values)
        if packet is not None:
            self._send(packet)
        return packet is not None


class ServersEnd(_End):
    """The end of the server, which waits for many at once and for nobody in particular."""

    def __init__(self, address: str) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(line)
        try:
            line.connect(address)
        except OSError as error:
            line.close()
            raise LineLost(f"there is nobody at {address[1:]!r}: {error}") from error
        if user_of(line) != os.geteuid():
            line.close()
            raise LineLost(f"whoever listens at {address[1:]!r} is another user.")
        self._later: deque[bytes] = deque()  # what there was no room for: the worker is at work and does not listen

    def fileno(self) -> int:
        """What the system calls it by."""
        return self._line.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits until there is room for it."""
        return bool(self._later)

    def ask(self, *values: Any) -> bool:
        """Say something, later if there is no room for it now; False if it is not plain or too long."""
        packet = self._packed(values)
        if packet is None:
            return False
        self._later.append(packet)
        self.go_on()
        return True

    def go_on(self) -> None:
        """Say what waits, as far as there is room for it."""
        with suppress(BlockingIOError):
            while self._later:
                self._send(self._later[0], socket.MSG_DONTWAIT)
                self._later.popleft()

    def heard(self) -> list[Any]:
        """What has come in."""
        heard: list[Any] = []
        with suppress(BlockingIOError):
            while True:
                heard.append(self._heard(socket.MSG_DONTWAIT))
        return heard


def _unpacked(packet: bytearray) -> Any:
    """What was said; its arrays are the packet's own memory."""
    (length,) = _LENGTH.unpack_from(packet)
    place = _LENGTH.size
    said, kinds = json.loads(packet[place : place + length])
    arrays: dict[str, Array] = {}
    place += length + -length % _ALIGNED
    for number, (kind, shape) in enumerate(kinds):
        array = np.ndarray(shape, kind, packet, place)
        arrays[array_name(number)] = array
        place += array.nbytes + -array.nbytes % _ALIGNED
    return structure(said, arrays)

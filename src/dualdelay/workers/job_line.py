"""Requests to a worker's process on the server's machine, and its answers, over a socket that nobody else is let in to.

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

from .local_line import LineLost, caller_of
from .messages import Array, Evaluated, EvaluationRequest, JobRequest, Pushed, Reply
from .shared_memory import Name
from .structures import Kinds, array_name, plain, structure

_LONGEST = 1 << 18  # bytes of a packet
_BUFFER = 1 << 20  # bytes of packets that the system is asked to keep until they are read; it may keep fewer
_OVERHEAD = 64  # bytes of that which the system needs for each packet
_LENGTH = struct.Struct("<Q")  # of the values, which come first in a packet
_ALIGNED = 16  # bytes of which everything in a packet begins at a multiple, as numpy's own arrays do
_NUMBERS = "fiub"  # the kinds of arrays that travel
_KINDS: Kinds = {kind.__name__: kind for kind in (JobRequest, EvaluationRequest, Reply, Evaluated, Pushed, Name)}


class Door:
    """Where a worker's process lets the server in."""

    def __init__(self, server: int) -> None:
        """The server is the process of that number."""
        self.address = f"\0dualdelay-{secrets.token_hex(16)}"
        """By what the server finds it; it is no file: nothing of it is left when this process is gone."""
        self._may_enter = server, os.geteuid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(None)
        self._socket.bind(self.address)
        self._socket.listen()

    def let_in(self) -> WorkersEnd:
        """Wait for the server; whoever is another process is turned away."""
        while True:
            line, _ = self._socket.accept()
            if caller_of(line) == self._may_enter:
                self._socket.close()
                return WorkersEnd(line)
            line.close()


class _End:
    """One end of a line."""

    def __init__(self, line: socket.socket) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._line, self._packet = line, bytearray(_LONGEST)
        self._longest = min(_LONGEST, line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - _OVERHEAD)

    def _heard(self, flags: int = 0) -> Any:
        """The next message; raises BlockingIOError if it was not to be waited for and is not there."""
        try:
            try:
                size = self._line.recv_into(self._packet, 0, flags)
            except ConnectionResetError:  # said once by the system, before what the other end has sent last
                size = self._line.recv_into(self._packet, 0, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error
        if not size:
            raise LineLost("the process at the other end is gone.")
        try:
            return _unpacked(self._packet[:size])
        except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
            raise LineLost(f"the process at the other end sent what cannot be read: {error}") from error

    def _send(self, packet: bytes) -> None:
        """Send a packet; raises BlockingIOError if there is no room for it yet and this end does not wait."""
        try:
            self._line.send(packet)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error

    def _packed(self, message: Any) -> bytes | None:
        """A packet; None if it would be too long, or if something in it is not plain and would come as something else."""
        arrays: list[Array] = []
        try:
            said = plain(message, arrays, _KINDS)
            if sum(array.nbytes for array in arrays) > self._longest or any(a.dtype.kind not in _NUMBERS for a in arrays):
                return None
            text = json.dumps([said, [[array.dtype.str, array.shape] for array in arrays]]).encode()
        except (TypeError, ValueError):  # such as a number of thousands of digits
            return None
        parts = [_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)]
        packet = b"".join(part + bytes(-len(part) % _ALIGNED) for part in parts)
        return packet if len(packet) <= self._longest else None

    def close(self) -> None:
        """Say and hear nothing any more; the other end hears that, also if a child of this process has the socket."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


class WorkersEnd(_End):
    """The end of a worker's process, which waits for what it is asked."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__(line)
        line.settimeout(None)  # whatever a user's code makes the default
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

    def answer(self, message: Any) -> bool:
        """Say something; False if it is not plain or too long."""
        packet = self._packed(message)
        if packet is not None:
            self._send(packet)
        return packet is not None


class ServersEnd(_End):
    """The end of the server, which waits for many at once and for nobody in particular."""

    def __init__(self, address: str, worker: int) -> None:
        """Call the process of that number, which has to listen there."""
        try:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise LineLost(f"there can be no more lines: {error}") from error
        try:
            super().__init__(line)
            line.setblocking(False)  # others of the machine could make the queue at that door a long one
            line.connect(address)
        except OSError as error:
            line.close()
            raise LineLost(f"there is nobody at {address[1:]!r}: {error}") from error
        if caller_of(line) != (worker, os.geteuid()):
            line.close()
            raise LineLost(f"whoever listens at {address[1:]!r} is another process.")
        self._later: deque[tuple[Any, bytes]] = deque()  # what there was no room for: the worker is at work
        self._lost: LineLost | None = None  # what came after the last that was heard
        self.refused = 0
        """How many requests in a row could not be said, because they were not plain or too long."""

    def fileno(self) -> int:
        """What the system calls it by."""
        return self._line.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits until there is room for it."""
        return bool(self._later)

    def ask(self, request: Any, model: Any = None) -> bool:
        """Say something, later if there is no room for it now; False if it is not plain or too long.

        A job overtakes those before it that still wait here. Without a request the worker is to listen to Ray's calls.
        """
        packet = self._packed([request, model])
        if packet is None:
            self.refused += 1
            return False
        self.refused = self.refused if request is None else 0
        if isinstance(request, JobRequest):
            self._later = deque(other for other in self._later if not isinstance(other[0], JobRequest))
        self._later.append((request, packet))
        self.go_on()
        return True

    def go_on(self) -> None:
        """Say what waits, as far as there is room for it."""
        with suppress(BlockingIOError):
            while self._later:
                self._send(self._later[0][1])
                self._later.popleft()

    def heard(self) -> list[Any]:
        """What has come in; that the other end is gone is heard when nothing else is left."""
        heard: list[Any] = []
        if self._lost is not None:
            raise self._lost
        try:
            while True:
                heard.append(self._heard())
        except BlockingIOError:
            return heard
        except LineLost as error:
            if not heard:
                raise
            self._lost = error
            return heard


def _unpacked(packet: bytearray) -> Any:
    """What was said; its arrays are the packet's own memory."""
    (length,) = _LENGTH.unpack_from(packet)
    said, kinds = json.loads(packet[_ALIGNED : _ALIGNED + length])
    arrays: dict[str, Array] = {}
    place = _ALIGNED + length + -length % _ALIGNED
    for number, (kind, shape) in enumerate(kinds):
        array = np.ndarray(shape, kind, packet, place)
        arrays[array_name(number)] = array
        place += array.nbytes + -array.nbytes % _ALIGNED
    return structure(said, arrays, _KINDS)

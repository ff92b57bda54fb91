"""Questions and answers between processes of one machine, over a socket that no other user of it is let in to.

A call of a Ray actor takes about a millisecond of processor time at each end, a line of text here a tenth of that. What is
asked has a name and plain values, and goes as JSON; vectors go through shared memory (``shared_memory``).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..core.errors import DualDelayError

Handlers = Mapping[str, Callable[..., Awaitable[Any]]]

_LONGEST = 1 << 24  # bytes of a question
_PEER = struct.Struct("3i")  # process, user and group of whoever has called, as the kernel knows them


class LineLost(DualDelayError):
    """The process at the other end is gone, or cannot be reached."""


async def listen(handlers: Handlers) -> tuple[str, asyncio.AbstractServer]:
    """Answer questions by these from now on; returns by what address they are asked, and what to close in the end.

    The address is no file: nothing of it is left when this process is gone.
    """
    address, user = f"\0dualdelay-{secrets.token_hex(16)}", os.geteuid()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _is_known(writer.get_extra_info("socket"), user):
                while line := await reader.readline():
                    name, args, wants_answer = json.loads(line)
                    answer = await _answer(handlers[name], args)
                    if wants_answer:
                        writer.write(json.dumps(answer).encode() + b"\n")
                        await writer.drain()
        except OSError:
            pass  # whoever asked is gone
        finally:
            writer.close()

    return address, await asyncio.start_unix_server(serve, address, limit=_LONGEST)


def caller_of(line: socket.socket) -> tuple[int, int]:
    """The process at the other end, 0 if it is in a container into which this one does not see, and its user.

    As they were when it called, or began to listen.
    """
    process, user, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def _is_known(line: socket.socket, user: int) -> bool:
    """Whether a process of this user is at the other end, and one that can be seen from here."""
    process, other = caller_of(line)
    return process > 0 and other == user


async def _answer(handler: Callable[..., Awaitable[Any]], args: list[Any]) -> tuple[bool, Any]:
    """Whether it could be answered, and the answer, or a traceback."""
    try:
        return True, await handler(*args)
    except Exception:
        return False, traceback.format_exc()


class LocalLine:
    """A line to a process that listens, for one thread at a time."""

    def __init__(self, address: str) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(None)  # whatever a user's code makes the default
        try:
            self._line.connect(address)
        except OSError as error:
            self._line.close()
            raise LineLost(f"there is nobody at {address[1:]!r}: {error}") from error
        if not _is_known(self._line, os.geteuid()):
            self._line.close()
            raise LineLost(f"whoever listens at {address[1:]!r} is another user.")
        self._answers = self._line.makefile("rb")

    def send(self, line: bytes) -> None:
        """Say something."""
        try:
            self._line.sendall(line)
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error

    def hear(self) -> tuple[bool, Any]:
        """Wait for the next answer: whether there is one, or a traceback."""
        try:
            line = self._answers.readline()
        except OSError as error:
            raise LineLost(f"the process at the other end is gone: {error}") from error
        if not line:
            raise LineLost("the process at the other end is gone.")
        done, answer = json.loads(line)
        return done, answer

    def close(self) -> None:
        """Ask nothing any more."""
        self._answers.close()
        self._line.close()


def _said(name: str, args: Sequence[Any], wants_answer: bool) -> bytes:
    return json.dumps([name, args, wants_answer]).encode() + b"\n"


def tell_all(lines: Sequence[LocalLine], name: str, *args: Any) -> bool:
    """Say something to several processes, to which there is no answer; False, and nothing is said, if it is not plain."""
    try:
        line = _said(name, args, False)
    except TypeError:
        return False
    for each in lines:
        each.send(line)
    return True


def ask_all(lines: Sequence[LocalLine], name: str, args: Sequence[Sequence[Any]]) -> list[Any]:
    """Ask several processes at once, each with its own values, and wait for all answers."""
    for line, own in zip(lines, args, strict=True):
        line.send(_said(name, own, True))
    answers = [line.hear() for line in lines]
    for done, text in answers:
        if not done:
            raise RuntimeError(text)
    return [answer for _, answer in answers]

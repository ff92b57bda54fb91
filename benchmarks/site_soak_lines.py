"""A line of ``site_soak.py``: a forwarder or a proxy that cuts, stalls and delays what it carries, as it is told."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

PACE, PIECE = 0.004, 2**16  # seconds that so many bytes take in a line


class Connection:
    """A connection through a line, and what is wrong with it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._ends, self.until, self.late = (near, far), 0.0, 0.0  # nothing goes on until then; seconds for each piece
        self.left: int | None = None  # bytes after which it is cut

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carry what comes from one side to the other, as long as both are there."""
        with suppress(OSError):
            while data := await source.read(PIECE):
                await asyncio.sleep(PACE * len(data) / PIECE + self.late)
                while self.until > time.monotonic():
                    await asyncio.sleep(0.05)
                if self.left is not None:
                    data, self.left = data[: self.left], max(0, self.left - len(data))
                sink.write(data)
                await sink.drain()
                if self.left == 0:
                    print("half", flush=True)
                    self.cut()
                    return

    def cut(self) -> None:
        """Reset both sides."""
        for end in self._ends:
            if not end.is_closing():
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()


class Line:
    """A forwarder to the server's port, or a proxy that is asked to connect to it."""

    def __init__(self, target: int, is_proxy: bool) -> None:
        self._target, self._is_proxy, self._open = target, is_proxy, list[Connection]()
        self._due = list[Callable[[], None]]()  # what happens to the next connection, if there was none

    async def run(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        watch_driver(lambda line: loop.call_soon_threadsafe(partial(self._harm, **json.loads(line))))
        async with await asyncio.start_server(self._accept, "127.0.0.1", port) as server:
            await server.serve_forever()

    async def _accept(self, source: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            if self._is_proxy:
                head = await source.readuntil(b"\r\n\r\n")
                if not head.startswith(f"CONNECT 127.0.0.1:{self._target} ".encode()):
                    raise ConnectionError(f"a proxy was asked for {head!r}")
            back, far = await asyncio.open_connection("127.0.0.1", self._target)
            if self._is_proxy:
                near.write(b"HTTP/1.1 200 OK\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            near.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n" if self._is_proxy else b"")
            near.close()
            return
        connection = Connection(near, far)
        self._open.append(connection)
        for harm in [self._due.pop() for _ in self._due]:
            harm()
        ways = [asyncio.create_task(connection.carry(*way)) for way in ((source, far), (back, near))]
        _, others = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        self._open.remove(connection)
        for end in (near, far):
            end.close()

    def _harm(self, kind: str, which: float, amount: float) -> None:
        """Do a connection harm, or none any more; ``which`` of those that are open is a number from 0 to 1."""
        if kind == "calm":
            self._due.clear()
            for one in self._open:
                one.until = one.late = 0.0
                one.left = None
        elif not self._open:
            self._due.append(partial(self._harm, kind, which, amount))
        else:
            one = self._open[int(which * len(self._open))]
            if kind == "cut":
                one.cut()
            elif kind == "half":
                one.left = int(amount)
                return  # which is told when it happens
            elif kind == "late":
                one.late = amount
            else:
                for stalled in self._open if kind == "all stalled" else [one]:
                    stalled.until = time.monotonic() + amount
            print(kind, flush=True)


def watch_driver(hear: Callable[[str], Any]) -> None:
    """Hear what the driver says; when it has ended this process ends, too."""

    def listen() -> None:
        for line in sys.stdin:
            hear(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()

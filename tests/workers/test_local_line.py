"""Lines between processes of one machine: every question has its own answer, and nobody else is let in."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from dualdelay.workers.local_line import LineLost, LocalLine, ask_all, listen, tell_all


class Listener:
    """Somebody who listens, in a thread of its own."""

    def __init__(self) -> None:
        self.loop, self.heard, self.servers = asyncio.new_event_loop(), list[object](), list[asyncio.AbstractServer]()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def double(self, number: float) -> float:
        await asyncio.sleep(0.01)
        return 2 * number

    async def note(self, *values: object) -> int:
        self.heard.append(list(values))
        return len(self.heard)

    async def fail(self) -> None:
        raise ArithmeticError("this is too much")

    def open(self) -> str:
        handlers = {"double": self.double, "note": self.note, "fail": self.fail}
        address, server = asyncio.run_coroutine_threadsafe(listen(handlers), self.loop).result()
        self.servers.append(server)
        return address

    def close(self) -> None:
        """Wait until those who are gone are noticed."""

        async def end() -> None:
            for server in self.servers:
                server.close()
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
            for _ in range(3):  # sockets are closed in the next turns
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@contextmanager
def lines(count: int) -> Iterator[tuple[Listener, list[LocalLine]]]:
    listener = Listener()
    address = listener.open()
    calls = [LocalLine(address) for _ in range(count)]
    try:
        yield listener, calls
    finally:
        for line in calls:
            line.close()
        listener.close()


def test_several_are_asked_at_once_and_each_answer_belongs_to_its_question():
    with lines(3) as (_, calls):
        for start in (0.1, 1e300, -2.5):
            assert ask_all(calls, "double", [[start + k] for k in range(3)]) == [2 * (start + k) for k in range(3)]


def test_what_fails_at_the_other_end_is_raised_here_and_the_next_question_is_answered():
    with lines(2) as (_, calls):
        with pytest.raises(RuntimeError, match="this is too much"):
            ask_all(calls, "fail", [[], []])
        assert ask_all(calls, "double", [[1], [2]]) == [2, 4]


def test_what_is_told_comes_in_order_before_what_is_asked_next_and_values_keep_every_digit():
    with lines(1) as (listener, calls):
        values = [0.1 + 0.2, float("inf"), -(2**62), "word", None, [1, [2.5]]]
        assert tell_all(calls, "note", *values) and tell_all(calls, "note", 2)
        assert ask_all(calls, "note", [[3]]) == [3] and listener.heard == [values, [2], [3]]


def test_what_is_not_plain_is_not_said_at_all():
    with lines(1) as (listener, calls):
        assert not tell_all(calls, "note", object())
        assert ask_all(calls, "note", [[1]]) == [1] and listener.heard == [[1]]


def test_nobody_is_there():
    with pytest.raises(LineLost, match="there is nobody at 'dualdelay-none'"):
        LocalLine("\0dualdelay-none")


OTHER = """
import asyncio
from dualdelay.workers.local_line import listen

async def brood():
    await asyncio.Event().wait()

async def main():
    address, server = await listen({"brood": brood})
    print(address[1:], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def test_one_that_is_killed_before_it_has_answered_is_missed():
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    line = LocalLine("\0" + other.stdout.readline().strip())
    threading.Timer(0.2, other.kill).start()
    with pytest.raises(LineLost, match="the process at the other end is gone"):
        ask_all([line], "brood", [[]])
    with pytest.raises(LineLost, match="the process at the other end is gone"):
        tell_all([line], "brood")
    other.communicate()
    line.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as another user")
def test_another_user_of_the_machine_is_not_let_in():
    with lines(0) as (listener, _):
        address = listener.open()
        os.seteuid(65534)
        try:
            with pytest.raises(LineLost, match="is another user"):
                LocalLine(address)
            stranger = socket.socket(socket.AF_UNIX)  # one that does not ask who listens
            stranger.connect(address)
        finally:
            os.seteuid(0)
        with stranger:
            with suppress(BrokenPipeError):  # if it was hung up already
                stranger.sendall(b'["note", ["hello"], true]\n')
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        assert listener.heard == []

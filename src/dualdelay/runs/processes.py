"""Calls side by side on this machine: this process makes them, and after a while helpers do, processes of their own.

A helper is a new Python, never a fork of this one, and never executes the user's script again: it is sent the function, and
with it whatever was defined in the script (by cloudpickle), through a pipe. If this process dies, that pipe ends and the
helper with it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from ..core.errors import DualDelayError, RunFailed, shortened
from ..core.own_code import MODULES
from ..core.version import install_command

_log = logging.getLogger("dualdelay")

Share = Callable[[float], None]
Shared = Callable[[int, float | None], None]  # how much of a call is done; None: it is not under way any more
Call = Callable[[int, Share], Any]  # of a number and of a function that is told how much of it is done

AFTER = 1.0  # seconds for which this process is alone: most sweeps are done by then
_WORTH = 3.0  # seconds that have to be left: a helper takes about as long to start
_LOOK = 0.2  # seconds between two looks at whether helpers are worth it
_TELL = 0.5  # seconds between two news of a call
_COPIES = 2  # of what a helper is sent that it has in memory: as bytes, and as what they mean
_TRIES = 2  # times that a call is made whose process dies
_LEAVE = 30.0  # seconds in which a helper that is told to stop has saved what it does
_LENGTH = struct.Struct("<Q")  # before each message
_START = """import json, sys
sys.path[:], sys.argv[:] = json.loads(sys.argv[1])
from dualdelay.runs.processes import serve
serve()"""


class Outcome(NamedTuple):
    """What came of a call: a value, or what it raised."""

    value: Any = None
    error: BaseException | None = None


def outcome_of(call: Call, number: int, share: Share) -> Outcome:
    """What comes of a call; what it raises is as it can be sent, and says where it was raised."""
    try:
        return Outcome(call(number, share))
    except (Exception, KeyboardInterrupt) as error:
        where = "".join(traceback.format_exception(error))
        if not isinstance(error, DualDelayError):
            error.add_note(f"in another process:\n{where}")
        return Outcome(None, error if _can_be_sent(error) else RuntimeError(f"{type(error).__name__}: {error}\n{where}"))


def _can_be_sent(error: BaseException) -> bool:
    import cloudpickle

    try:
        return type(cloudpickle.loads(cloudpickle.dumps(error))) is type(error)
    except Exception:  # whatever a user's class does when it is made anew
        return False


class SideBySide:
    """Calls that are made by whoever is free, this process or a helper; use it as a context around ``run``."""

    def __init__(self, call: Call, numbers: Sequence[int], processes: int, room: float, done: Callable[[], float]) -> None:
        """The numbers to call with, in how many processes and bytes, and a function that says what share of all is done."""
        self._call, self._processes, self._room, self._done = call, processes, room, done
        self._waiting = deque(numbers)
        self._ended: deque[tuple[int, Outcome]] = deque()
        self._tries: dict[int, int] = {}
        self._change = threading.Condition()
        self._helpers: list[_Helper] = []
        self._busy = 0  # calls that helpers make
        self._closed = False
        self._began = time.monotonic()
        self._starter = threading.Thread(target=self._start, daemon=True)

    def __enter__(self) -> Self:
        self._starter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let the helpers go; if something has gone wrong, they save what they do."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            helpers = list(self._helpers)
        until = time.monotonic() + _LEAVE
        try:
            for helper in helpers:
                helper.stop()
            self._starter.join()
            for helper in helpers:
                helper.join(max(0.0, until - time.monotonic()))
        finally:  # also when somebody does not want to wait for that
            for helper in helpers:
                helper.kill()

    def run(
        self,
        here: Call,
        settle: Callable[[int, Outcome], None],
        share: Shared,
        check: Callable[[], None],
    ) -> None:
        """Make all calls; ``here`` makes those of this process, and ``settle`` takes what comes of each, in this thread.

        While there is nothing to do but to wait, ``check`` is called again and again, and may raise.
        """
        self._share = share
        while True:
            check()
            with self._change:
                if not (self._ended or self._waiting) and self._busy:
                    self._change.wait(_LOOK)
                if not (self._ended or self._waiting) and self._busy:
                    continue
                ended = list(self._ended)
                self._ended.clear()
                number = self._waiting.popleft() if self._waiting and not ended else None
                if number is None and not ended:
                    return
            for one, outcome in ended:
                settle(one, outcome)
            if number is not None:
                try:
                    outcome = Outcome(here(number, lambda part, number=number: share(number, part)))  # type: ignore[misc]
                except Exception as error:
                    outcome = Outcome(None, error)
                settle(number, outcome)

    # --- what the threads of helpers call ---

    def take(self) -> int | None:
        """The number of the next call, if there is one; the one before is over."""
        with self._change:
            if self._closed or not self._waiting:
                return None
            self._busy += 1
            return self._waiting.popleft()

    def put(self, number: int, outcome: Outcome) -> None:
        """A helper has made a call."""
        with self._change:
            self._busy -= 1
            self._share(number, 1.0)
            self._ended.append((number, outcome))
            self._change.notify_all()

    def lost(self, number: int, how: str) -> None:
        """A helper died in a call; somebody else makes it, but not again and again."""
        with self._change:
            self._busy -= 1
            self._tries[number] = self._tries.get(number, 0) + 1
            if self._tries[number] < _TRIES and not self._closed:
                _log.warning("a process of the sweep %s; its run is taken up by another.", how)
                self._share(number, None)
                self._waiting.appendleft(number)
            else:
                what = RunFailed(f"its process {how}, and so did the one before. What it had saved is in its folder.")
                self._ended.append((number, Outcome(None, what)))
            self._change.notify_all()

    def told(self, number: int, part: float) -> None:
        """A helper says how much of a call is done."""
        self._share(number, part)

    # --- starting them ---

    def _start(self) -> None:
        """Start helpers once the calls have taken a while and will take longer."""
        while not self._closed:
            passed, done = time.monotonic() - self._began, self._done()
            left = passed * (1 - done) / done if done > 0 else passed + _WORTH
            if passed >= AFTER and (left >= _WORTH or AFTER <= 0):
                break
            with self._change:
                self._change.wait(min(_LOOK, AFTER))
        with self._change:
            count = 0 if self._closed else min(self._processes - 1, len(self._waiting))
        if not count:
            return
        try:
            payload = packed(self._call)
        except Exception as error:  # whatever pickling a user's objects raises
            why = shortened(" ".join(str(error).split()) or type(error).__name__)
            _log.warning("the runs are computed one after the other, for they cannot be sent to other processes: %s", why)
            return
        count = min(count, int(self._room // (_COPIES * len(payload))))
        with self._change:
            if not self._closed:
                self._helpers += [_Helper(self, payload) for _ in range(count)]
                for helper in self._helpers:
                    helper.start()


def packed(call: Call) -> bytes:
    """A function as it is sent to another process; what is not installed goes with it."""
    try:
        import cloudpickle
    except ImportError:
        raise RunFailed(f"that needs cloudpickle: {install_command('cloudpickle')}") from None

    for module in MODULES.values():  # files that the shell was told to import
        cloudpickle.register_pickle_by_value(module)
    data: bytes = cloudpickle.dumps(call)
    return data


class _Helper(threading.Thread):
    """A thread that attends to a process, and to the next one if that dies."""

    def __init__(self, calls: SideBySide, payload: bytes) -> None:
        super().__init__(daemon=True)
        self._calls, self._payload = calls, payload
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._stopped = False
        self._writing = threading.Lock()

    def run(self) -> None:
        while not self._stopped and self._attend():
            pass

    def _attend(self) -> bool:
        """Have a process make calls until there are none; whether it died, so that another is needed."""
        command = [sys.executable, "-c", _START, json.dumps([sys.path, sys.argv])]
        try:  # of its own session, so that Ctrl-C is this process's alone
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        except (OSError, TypeError) as error:  # no Python to start, or no room for another process
            _log.warning("another process could not be started (%s); the sweep goes on with fewer.", error)
            return False
        self._ready, self._process = False, process
        assert process.stdin is not None and process.stdout is not None
        number: int | None = None
        try:
            _write(process.stdin, self._payload)
            while True:
                kind, *rest = _receive(process.stdout)
                if kind == "share" and number is not None:
                    self._calls.told(number, *rest)
                elif kind == "said":
                    stream, text = rest
                    with suppress(Exception):  # nobody may be there to read it
                        print(text, end="", file=getattr(sys, stream), flush=True)
                elif kind == "broken":  # what was sent cannot be read there
                    return False
                elif kind in ("ready", "ended"):
                    self._ready = True
                    if number is not None:
                        self._calls.put(number, rest[0])
                    number = None if self._stopped else self._calls.take()
                    if number is None:
                        return False
                    with self._writing:
                        _send(process.stdin, number)
        except (OSError, EOFError, ValueError):
            code = process.wait()
            if number is not None:
                self._calls.lost(number, _how(code))
            return number is not None
        finally:
            with suppress(OSError):
                process.stdin.close()  # which ends it
            process.wait()
            process.stdout.close()

    def stop(self) -> None:
        """Have the process save what it does, and end."""
        self._stopped = True
        if self._process is not None and not self._ready:
            self._process.kill()
        elif self._process is not None:
            with self._writing, suppress(OSError, ValueError):
                _send(self._process.stdin, None)

    def kill(self) -> None:
        """End the process now."""
        if self.is_alive() and self._process is not None:
            self._process.kill()


def _how(code: int) -> str:
    """How a process ended."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (kill -9, or the kernel when memory runs out)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def _send(stream: Any, message: Any) -> None:
    import cloudpickle

    _write(stream, cloudpickle.dumps(message))


def _receive(stream: IO[bytes]) -> Any:
    import cloudpickle

    return cloudpickle.loads(_read(stream))


# --- in a helper ---


class _Said(io.TextIOBase):
    """A stream whose text goes to the process that started this one."""

    def __init__(self, say: Callable[..., None], name: str) -> None:
        self._say, self._name = say, name

    def write(self, text: str) -> int:
        self._say("said", self._name, text)
        return len(text)


def serve() -> None:
    """Make the calls that come through standard input until it ends; what C code prints goes to standard error."""
    lock, inbox, outbox = threading.Lock(), os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(*message: Any) -> None:
        with lock:
            _send(outbox, message)

    sys.stdout, sys.stderr = _Said(say, "stdout"), _Said(say, "stderr")
    try:
        call: Call = _receive(inbox)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(f"another process cannot take part in the sweep ({why}); it goes on with fewer.", file=sys.stderr)
        say("broken")
        return
    say("ready")
    numbers: deque[int] = deque()
    news = threading.Semaphore(0)
    stopping = False

    def listen() -> None:
        nonlocal stopping
        try:
            while (number := _receive(inbox)) is not None:
                numbers.append(number)
                news.release()
        except (OSError, EOFError):  # whoever asked is gone: the last checkpoints stand, and nobody shall wait for a lock
            os._exit(1)
        stopping = True
        news.release()
        os.kill(os.getpid(), signal.SIGTERM)  # a run with a folder is saved, and any other ended

    threading.Thread(target=listen, daemon=True).start()
    while True:
        news.acquire()
        if stopping or not numbers:
            return
        last = 0.0

        def share(part: float) -> None:
            nonlocal last
            if time.monotonic() - last > _TELL:
                last = time.monotonic()
                say("share", part)

        data = sent(outcome_of(call, numbers.popleft(), share))
        with lock:
            _write(outbox, data)


class Sent:
    """A call as it was ``packed``, which gives what comes of it as a message, to be ``received``."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __call__(self, number: int, share: Share) -> bytes:
        import cloudpickle

        return sent(outcome_of(cloudpickle.loads(self._payload), number, share))


def sent(outcome: Outcome) -> bytes:
    """An outcome as a message, or why it cannot be one."""
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(("ended", outcome))
    except Exception as error:  # whatever pickling a user's objects raises
        what = f"what the run gave cannot be sent to the process that asked for it: {error}"
        hint = "Compute the runs one after the other: dd.Compute(cores=1)."
        data = cloudpickle.dumps(("ended", Outcome(None, RunFailed(f"{what} {hint}"))))
    return data


def received(data: bytes) -> Outcome:
    """The outcome that was sent."""
    import cloudpickle

    outcome: Outcome = cloudpickle.loads(data)[1]
    return outcome

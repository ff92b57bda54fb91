"""Sites for tests: processes on this machine that are started again when they die, and lines that are cut."""

from __future__ import annotations

import atexit
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import dualdelay as dd
from dualdelay.core import Problem
from dualdelay.engine.half import Half
from dualdelay.runs.names import rebuild
from dualdelay.runs.spec import with_room
from dualdelay.workers.sites import keys
from dualdelay.workers.sites.site import Prepare, Site


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def prepared(problem: Problem) -> Prepare:
    """What a site makes of a run: this problem, and the half of the method that the server names."""

    def prepare(run: Mapping[str, Any]) -> tuple[Problem, Half]:
        return with_room(problem, run["room"]), Half(rebuild("algorithm", run["algorithm"]), run["uplink"])

    return prepare


@cache
def _keeper() -> subprocess.Popen[str]:
    """A process of one thread that starts sites for all tests: one that has computed already cannot be forked."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True)
    atexit.register(keeper.kill)
    return keeper


class Sites:
    """Enrolled sites, and a process that starts theirs, and starts them again when they die."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.roster, self.port = folder, folder / "sites.txt", free_port()
        self.names = [f"site-{worker}" for worker in range(count)]
        for name in self.names:
            keys.enroll(name, self.roster, self.key(name))
        self._group = 0

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def fleet(self, **settings: Any) -> dd.SiteFleet:
        return dd.SiteFleet(listen=f"127.0.0.1:{self.port}", roster=str(self.roster), **settings)

    def start(
        self,
        problem: Problem | Callable[[], Problem],
        port: int = 0,
        away: Mapping[int, float] | None = None,
        only: Sequence[int] | None = None,
    ) -> None:
        """Start a process for each site, some of them so many seconds later; they dial that port."""
        order, keeper = self.folder / f"order-{secrets.token_hex(4)}.pickle", _keeper()
        workers = list(range(len(self.names)) if only is None else only)
        order.write_bytes(pickle.dumps((self, problem, port or self.port, away or {}, workers)))
        assert keeper.stdin is not None and keeper.stdout is not None
        keeper.stdin.write(f"{order}\n")
        keeper.stdin.flush()
        self._group = int(keeper.stdout.readline())

    def keep(
        self, problem: Problem | Callable[[], Problem], port: int, away: Mapping[int, float], workers: Sequence[int]
    ) -> None:
        """Start sites, and again those that were killed, until all have ended."""
        running: dict[int, int] = {}
        begin = {worker: time.monotonic() + away.get(worker, 0.0) for worker in workers}
        while begin or running:
            for worker in [worker for worker, moment in begin.items() if moment <= time.monotonic()]:
                del begin[worker]
                if pid := os.fork():
                    running[pid] = worker
                else:
                    os._exit(self._be(worker, problem, port))
            time.sleep(0.02)
            with suppress(ChildProcessError):
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in running and os.WIFSIGNALED(status):
                    begin[running[pid]] = time.monotonic() + 0.05
                running.pop(pid, None)

    def _be(self, worker: int, problem: Problem | Callable[[], Problem], port: int) -> int:
        name = self.names[worker]
        problem = problem if isinstance(problem, Problem) else problem()  # not before: torch's threads outlast no fork
        output = os.open(self.folder / f"{name}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            print(Site(f"http://127.0.0.1:{port}", name, self.key(name), prepared(problem)).run(), flush=True)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            return 2
        return 0

    def said(self, worker: int) -> str:
        path = self.folder / f"{self.names[worker]}.txt"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        if self._group:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = 0

    def wait(self) -> None:
        """Wait until all sites have ended by themselves."""
        until = time.monotonic() + 60
        with suppress(ProcessLookupError):
            while True:
                os.kill(self._group, 0)
                assert time.monotonic() < until, [self.said(worker) for worker in range(len(self.names))]
                time.sleep(0.02)
        self._group = 0


@contextmanager
def dialling(folder: Path, problem: Problem, make: Callable[[], Problem] | None = None, **start: Any) -> Iterator[Sites]:
    """Sites for a problem's workers, whose processes last as long as the block; they may ``make`` it themselves."""
    sites = Sites(folder, problem.workers)
    sites.start(make or problem, **start)
    try:
        yield sites
    finally:
        sites.stop()


class Line:
    """A forwarder to a port of this machine, whose connections are cut after as many bytes as a test decides."""

    def __init__(self, port: int, fate: Callable[[random.Random], float | None]) -> None:
        """``fate`` draws after how many bytes a connection is cut; None: never."""
        self._target, self._fate, self._random = port, fate, random.Random(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.cut = int(self._listener.getsockname()[1]), 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                except OSError:
                    near.close()
                    continue
                left = [self._fate(self._random)]
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._forward, args=(one, other, left), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[float | None]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if left[0] is not None:
                    data, left[0] = data[: max(0, int(left[0]))], left[0] - len(data)
                sink.sendall(data)
                if left[0] is not None and left[0] <= 0:
                    self.cut += 1
                    break
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()


def _serve_orders() -> None:
    """Start a group of sites for each order that comes in, and say which process leads it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that have ended need not be waited for
    for line in sys.stdin:
        order = Path(line.strip())
        if pid := os.fork():
            print(pid, flush=True)
            continue
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sites, *rest = pickle.loads(order.read_bytes())
            sites.keep(*rest)
        finally:
            os._exit(0)


if __name__ == "__main__":
    import dialling  # by which name tests have pickled what they order

    dialling._serve_orders()

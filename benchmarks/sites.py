"""Gradients per second of sites that dial in, over those of Ray actors that do the same work; and over a slow line.

    python benchmarks/sites.py                        # all cases, about six minutes on two cores
    python benchmarks/sites.py --cases lenet --rounds 5
    python benchmarks/sites.py --cases lenet 1M 10M --tls
    python benchmarks/sites.py --cases line           # 50 Mbit/s and 50 ms, plain and in bytes
    python benchmarks/sites.py --cases many           # 5 to 250 sites: time per update and memory of the server

Vanilla, on loopback without TLS, as Ray is there: a LeNet on random images of CIFAR's shape, batch 64, with four workers,
or a constant gradient of a million or ten million float32 numbers with two, where only the server and the line count. Each
round runs Ray and sites in turn; the ratio of each round is taken before the median. Only the arrivals between a first and
a last one are timed. The slow line is one forwarder. What it allows one site is a model down and then a message up, for
each update; several sites, a model each way at the same time.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_WR, create_connection, create_server, socket
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.half import Half
from dualdelay.runs.names import rebuild
from dualdelay.workers.sites import keys
from dualdelay.workers.sites.site import Site
from dualdelay.workers.sites.status import StatusBoard
from ray_updates import BATCH, LR, UPDATES, WEIGHTS, Constant, images, lenet, ray_here

RATE, LATENCY = 50e6 / 8, 0.05  # bytes a second each way, and seconds there and back
GOALS = {"lenet": 0.95, "1M": 0.7, "10M": 0.7}
TOKEN = "of the status page"
WORKERS = {"lenet": 4, "1M": 2, "10M": 2}


def problem_of(case: str, workers: int) -> dd.Problem:
    if case == "lenet":
        return dd.Network(lenet, cross_entropy, images, BATCH, workers=workers, full_gradient=False)
    return Constant(workers, WEIGHTS.get(case, 1000))


def be_a_site(url: str, name: str, key: str, case: str, workers: int, certificate: str = "") -> None:
    def prepare(run: Mapping[str, Any]) -> tuple[dd.Problem, Half]:
        return problem_of(case, workers), Half(rebuild("algorithm", run["algorithm"]), run["uplink"])

    Site(url, name, Path(key), prepare, Path(certificate) if url.startswith("https") else None).run()


def certificate_in(folder: str) -> dict[str, str]:
    """A certificate that signs itself, and its key."""
    files = {"certificate": f"{folder}/server.pem", "certificate_key": f"{folder}/server-key.pem"}
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    out = ["-out", files["certificate"], "-keyout", files["certificate_key"]]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, *out]
    subprocess.run(command, check=True, capture_output=True)
    return files


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


@contextmanager
def sites(case: str, workers: int, *, slow: bool = False, tls: bool = False, **settings: Any) -> Iterator[dd.SiteFleet]:
    """Sites of this machine, which dial the server or a slow line to it."""
    with tempfile.TemporaryDirectory() as folder:
        port, roster, started = free_port(), Path(folder) / "sites.txt", []
        for worker in range(workers):
            keys.enroll(f"site-{worker}", roster, Path(folder) / f"site-{worker}.key")
        line = Line(port) if slow else None
        url = f"{'https://localhost' if tls else 'http://127.0.0.1'}:{line.port if line else port}"
        settings |= certificate_in(folder) if tls else {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for worker in range(workers):
            words = [
                "--be",
                url,
                f"site-{worker}",
                f"{folder}/site-{worker}.key",
                case,
                str(workers),
                f"{folder}/server.pem",
            ]
            started.append(subprocess.Popen([sys.executable, __file__, *words], env=environment, stderr=subprocess.DEVNULL))
        try:
            yield dd.SiteFleet(listen=f"127.0.0.1:{port}", roster=str(roster), **settings)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


class Line:
    """A forwarder with a rate and a latency, which all connections share in each direction."""

    def __init__(self, port: int) -> None:
        """To this port of this machine."""
        self._target, self._free = port, {True: 0.0, False: 0.0}
        self._lock = threading.Lock()
        self._listener = create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for source, sink, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._forward, args=(source, sink, up), daemon=True).start()

    def _forward(self, source: socket, sink: socket, up: bool) -> None:
        waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(256)  # four megabytes, as a window has
        threading.Thread(target=_deliver, args=(waiting, sink), daemon=True).start()
        with suppress(OSError):
            while data := source.recv(16384):
                with self._lock:
                    self._free[up] = max(self._free[up], time.monotonic()) + len(data) / RATE
                    due = self._free[up]
                waiting.put((due + LATENCY / 2, data))
                time.sleep(max(0.0, due - time.monotonic() - 0.01))  # the line takes little more than it carries
        waiting.put((0.0, b""))


def _deliver(waiting: queue.Queue[tuple[float, bytes]], sink: socket) -> None:
    """Hand on what was sent, each piece when it is due."""
    with suppress(OSError):
        while (piece := waiting.get())[1]:
            time.sleep(max(0.0, piece[0] - time.monotonic()))
            sink.sendall(piece[1])
        sink.shutdown(SHUT_WR)


class Enough(Exception):
    """The last arrival that counts is there."""


def gradients_per_second(
    problem: dd.Problem, fleet: Any, first: int, last: int, method: Any = None, **server: Any
) -> float:
    marks: list[float] = []
    count = 0

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        nonlocal count
        count += 1
        if count in (first, last):
            marks.append(time.perf_counter())
        if count == last:
            raise Enough

    never = dd.Evaluation(every=10**9)
    with suppress(Enough):
        dd.train(
            method or dd.VanillaASGD(lr=LR), problem, fleet, updates=10**9, evaluation=never, server=dd.Server(**server),
            watch=dd.Reporting([watch], progress=False),
        )  # fmt: skip
    return (last - first) / (marks[1] - marks[0])


def against_ray(cases: list[str], rounds: int, tls: bool) -> None:
    print("gradients per second  workers      Ray    sites   ratio   goal")
    for case in cases:
        workers, (first, last) = WORKERS[case], UPDATES[case]
        turns = []
        for _ in range(rounds):
            with ray_here(workers):
                ray = gradients_per_second(problem_of(case, workers), dd.RayFleet(cpus=0.5), first, last)
            with sites(case, workers, tls=tls) as fleet:
                turns.append((ray, gradients_per_second(problem_of(case, workers), fleet, first, last)))
        ray, ours = (statistics.median(column) for column in zip(*turns, strict=True))
        ratio = statistics.median(b / a for a, b in turns)
        print(f"{case:20} {workers:8d} {ray:8.1f} {ours:8.1f} {ratio:7.2f} {GOALS[case]:6.2f}", flush=True)


def over_a_line() -> None:
    """One site alone receives, then sends; of several one can receive while another sends."""
    print(f"\n1M weights behind one line of {RATE * 8 / 1e6:.0f} Mbit/s each way and {LATENCY * 1e3:.0f} ms")
    print("sites  messages  downloads at once   updates per second   what the line allows   share")
    small = {"uplink": "int8", "downlink": "int8"}
    for count, name, at_once in (
        (1, "plain", None),
        (1, "int8", None),
        (2, "plain", None),
        (2, "plain", 1),
        (2, "int8", 1),
    ):
        size = 4e6 if name == "plain" else 1e6
        with sites("1M", count, slow=True, downloads=at_once) as fleet:
            last = 16 if name == "plain" else 40
            rate = gradients_per_second(problem_of("1M", count), fleet, 4, last, **({} if name == "plain" else small))
        allowed = 1 / (2 * size / RATE + LATENCY) if count == 1 else RATE / size
        cells = f"{count:5d}  {name:8} {at_once or 'all':>17} {rate:20.2f} {allowed:22.2f} {rate / allowed:7.2f}"
        print(cells, flush=True)


class Looker:
    """Somebody who reads the status page four times a second, from the first time that there is one."""

    def __init__(self, url: str) -> None:
        """At this address."""
        self._url, self._seconds, self._over = url, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            begin = time.perf_counter()
            with suppress(OSError):
                request = urllib.request.Request(self._url, headers={"authorization": f"Bearer {TOKEN}"})
                urllib.request.urlopen(request, timeout=20).read()
                self._seconds.append(time.perf_counter() - begin)

    def end(self) -> list[float]:
        """The seconds of each look."""
        self._over.set()
        self._thread.join()
        return self._seconds


class Some(dd.VanillaASGD):
    """Vanilla ASGD with the first workers alone; the others wait."""

    def first(self, s: Any) -> list[Any]:
        return list(super().first(s))[:BUSY]


BUSY = 0  # of Some


def be_many(url: str, folder: str, first: int, last: int, workers: int) -> None:
    """Several sites in the threads of one process: as processes of their own they would need more memory than is here."""

    def prepare(run: Mapping[str, Any]) -> tuple[dd.Problem, Half]:
        return problem_of("tiny", workers), Half(dd.VanillaASGD(lr=LR), run["uplink"])

    torch.set_num_threads(1)
    names = [f"site-{worker}" for worker in range(first, last)]
    for name in names:
        threading.Thread(target=Site(url, name, Path(folder) / f"{name}.key", prepare).run, daemon=True).start()
    time.sleep(600)


def with_many() -> None:
    """Sites whose gradients cost nothing, some at work and others idle."""
    global BUSY
    print("\n1,000 weights\nat work    idle   microseconds per update   the server's memory   status page, s: median, max")
    for busy, idle in ((5, 0), (50, 0), (50, 200)):
        BUSY, workers = busy, busy + idle
        with tempfile.TemporaryDirectory() as folder:
            port, roster = free_port(), Path(folder) / "sites.txt"
            for worker in range(workers):
                keys.enroll(f"site-{worker}", roster, Path(folder) / f"site-{worker}.key")
            fleet = dd.SiteFleet(listen=f"127.0.0.1:{port}", roster=str(roster), board=StatusBoard(TOKEN))
            looker = Looker(f"http://127.0.0.1:{port}/status.json")
            words = [sys.executable, __file__, "--be-many", f"http://127.0.0.1:{port}", folder]
            shares = [range(first, min(first + 50, workers)) for first in range(0, workers, 50)]
            quiet = subprocess.DEVNULL
            started = [subprocess.Popen([*words, str(s.start), str(s.stop), str(workers)], stderr=quiet) for s in shares]
            try:
                rate = gradients_per_second(problem_of("tiny", workers), fleet, 500, 3500, method=Some(lr=LR))
            finally:
                for process in started:
                    process.kill()
                    process.wait()
        looks = looker.end()
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
        cells = f"{statistics.median(looks):19.3f}, {max(looks):.3f}"
        print(f"{busy:7d} {idle:7d} {1e6 / rate:25.0f} {memory:18.2f} GB {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["lenet", "1M", "10M", "line", "many"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="as sites do it elsewhere; Ray then still goes without")
    parser.add_argument("--be", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--be-many", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        *words, workers, certificate = options.be
        be_a_site(*words, int(workers), certificate)
        return
    if options.be_many:
        be_many(*options.be_many[:2], *map(int, options.be_many[2:]))
        return
    if chosen := [case for case in options.cases if case in WORKERS]:
        against_ray(chosen, options.rounds, options.tls)
    if "line" in options.cases:
        over_a_line()
    if "many" in options.cases:
        with_many()


if __name__ == "__main__":
    main()

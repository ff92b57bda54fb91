"""The constants of a machine that a run's cost is predicted from: how they are measured, and where they are kept."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms.dude import DuDe
from ..core import Problem
from ..core.errors import BadInput, RunFailed, is_finite, shown
from ..problems.files import cache_folder
from ..runs.settings import Evaluation, Reporting
from ..runs.simulate import train
from ..storage.files import make_folder, read, write
from ..workers.ray_fleet import RayFleet
from ..workers.settings import FleetControl

Report = Callable[[float, str], None]

FILE = "machine.json"
"""What the constants are kept as, in the user's cache folder."""
COPIED = (2**20, 2**23, 2**25, 2**26, 2**28)
"""Working sets, in bytes, at which copying is timed: from within a core's cache to far beyond all caches."""
_WARM, _COLD = COPIED[1], COPIED[-1]  # bytes of vectors beside which a message is quick, and as slow as it gets
_SECONDS = 0.15  # for one timing of copies
_TURNS = 5  # looks at copies where no runs are timed
_SMALL, _MIDDLE, _LARGE = 1_000, 50_000, 2_000_000  # weights: in the request, just through the object store, mostly copies
_RUNS: dict[str, tuple[int, int | None, bool]] = {  # weights, shards, and whether processes share memory
    "messages in a request": (_SMALL, None, False),
    "messages through the object store": (_MIDDLE, None, False),
    "large messages": (_LARGE, None, False),
    "a server in one shard": (_MIDDLE, 1, False),
    "a server in two shards": (2 * _MIDDLE, 2, False),
    "messages in shared memory": (_MIDDLE, None, True),
    "a server in one shard that shares memory": (_MIDDLE, 1, True),
    "a server in two shards that share memory": (2 * _MIDDLE, 2, True),
    "a large one": (_LARGE, 2, True),
}
_RUN = 4.5  # seconds of each
_FEWEST = 3  # times that a run has to be heard of
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Message(NamedTuple):
    """Processor seconds of one job's request and answer, whatever their size, and how long both take together."""

    server: float
    """In the server's process, or in that of a shard."""
    worker: float
    """In the worker's process."""
    between: float
    """In the processes of Ray that carry them."""
    round_trip: float
    """Seconds from one answer to the next of a single worker whose gradient costs nothing."""


@dataclass(frozen=True)
class Machine:
    """What a machine of the run can do."""

    cores: float
    """Processor cores, which all processes of the machine share."""
    copying: tuple[float, ...]
    """Bytes that one process reads and writes in a second when it copies, for each working set of ``COPIED``."""
    copying_beside: tuple[float, ...]
    """The same of each core while all of them do so."""
    small: Message
    """A job whose model travels in the request."""
    large: Message
    """A job whose model and answer go through Ray's object store."""
    headed: Message
    """A job of a server in shards, whatever their number; what the server's process takes is what its head does."""
    sliced: Message
    """What each shard adds to such a job, in its own process, the worker's and Ray's; and to the time that a job takes."""
    shared: Message
    """A job of processes on one machine, whose model and answer are in memory that they share."""
    shared_headed: Message
    """The same as ``headed``, on one machine."""
    shared_sliced: Message
    """The same as ``sliced``, on one machine."""
    cold: float
    """How many times what a message takes on one machine it takes where vectors have driven all else out of the caches."""
    store: float
    """Bytes that a process puts into Ray's object store in a second."""
    process: float
    """Bytes of memory that a process takes before it has any weights."""
    origin: str = "shipped with the package, of a machine with two cores"
    """Where the numbers come from, in words."""

    def __post_init__(self) -> None:
        for name in _SPEEDS:
            values = getattr(self, name)
            if len(values) != len(COPIED) or not all(is_finite(value) and value > 0 for value in values):
                raise BadInput(f"{name} is {shown(values)}; expected {len(COPIED)} speeds in bytes per second, above zero.")
        for name in ("cores", "store", "process"):
            value = getattr(self, name)
            if not is_finite(value) or not value > 0:
                raise BadInput(f"{name} is {shown(value)}; expected a number above zero.")
        if not is_finite(self.cold) or not self.cold >= 1:
            raise BadInput(f"cold is {shown(self.cold)}; expected 1 or more.")
        for name in _MESSAGES:
            if not all(is_finite(value) and value >= 0 for value in getattr(self, name)):
                raise BadInput(f"{name} is {shown(getattr(self, name))}; expected four numbers of seconds, zero or more.")

    def speed(self, working_set: float, beside: float = 0.0) -> float:
        """Bytes per second of one process that goes through so many bytes again and again.

        ``beside`` is the share of the time in which the other cores do the same.
        """
        both = (self.copying, self.copying_beside)
        alone, with_all = (float(np.interp(np.log(max(1.0, working_set)), np.log(COPIED), speeds)) for speeds in both)
        return 1 / ((1 - beside) / alone + beside / min(alone, with_all))

    def beside_vectors(self, message: Message, working_set: float) -> Message:
        """What a message takes where processes go through so many bytes of vectors again and again."""
        slower = float(np.interp(np.log(max(1.0, working_set)), np.log((_WARM, _COLD)), (1.0, self.cold)))
        return Message(*(slower * seconds for seconds in message))


_SPEEDS = ("copying", "copying_beside")
_MESSAGES = ("small", "large", "headed", "sliced", "shared", "shared_headed", "shared_sliced")

SHIPPED = Machine(
    cores=2,
    copying=(18.0e10, 13.3e10, 7.4e10, 5.8e10, 4.3e10),
    copying_beside=(14.8e10, 13.0e10, 7.4e10, 3.5e10, 2.4e10),
    small=Message(0.00053, 0.00051, 0.00001, 0.0010),
    large=Message(0.0015, 0.0011, 0.0014, 0.0027),
    headed=Message(0.0011, 0.0010, 0.0001, 0.0014),
    sliced=Message(0.0025, 0.0020, 0.0017, 0.0042),
    shared=Message(0.00020, 0.00020, 0.0, 0.00037),
    shared_headed=Message(0.00021, 0.00027, 0.0, 0.0006),
    shared_sliced=Message(0.00026, 0.00012, 0.00001, 0.00017),
    cold=2.9,
    store=3.3e9,
    process=4.5e8,
)
"""What is used where nothing was measured."""


def read_machine(path: Path) -> Machine:
    """The constants in a file, which may be edited for a machine that is to be rented."""
    data = read(path)
    try:
        values = {field.name: json.loads(data)[field.name] for field in fields(Machine)}
        values |= {name: Message(**values[name]) for name in _MESSAGES}
        values |= {name: tuple(values[name]) for name in _SPEEDS}
        return Machine(**values)
    except (ValueError, TypeError, KeyError, AttributeError, BadInput) as error:
        raise BadInput(
            f"{path} does not hold the constants of a machine ({type(error).__name__}: {error}); measure anew "
            "(dualdelay size --measure), and change only numbers in what that writes."
        ) from error


def keep_machine(machine: Machine) -> Path:
    """Keep constants in the user's cache folder, for later predictions; returns the file."""
    path = cache_folder() / FILE
    make_folder(path.parent)
    write(path, json.dumps(values_of(machine), indent=1).encode())
    return path


def known_machine() -> Machine:
    """The constants to predict from: those that were kept, or those that the package brings."""
    path = cache_folder() / FILE
    return read_machine(path) if path.exists() else SHIPPED


def values_of(machine: Machine) -> dict[str, Any]:
    """The constants by name, as plain values."""
    return {**asdict(machine), **{name: getattr(machine, name)._asdict() for name in _MESSAGES}}


# --- measuring ---


def measure_machine(report: Report = lambda share, text: None, base: Machine = SHIPPED) -> Machine:
    """Measure this machine in about four minutes: how fast it copies, and what Ray's messages cost.

    Without Ray the constants of its messages are those of ``base``.
    """
    when, copies = time.strftime("%Y-%m-%d"), _Copies(os.cpu_count() or 1)
    try:
        messages, cold, store, process = _real(report, copies)
    except BadInput as error:
        if "not installed" not in str(error):
            raise
        messages, cold, store, process = (
            {name: getattr(base, name) for name in _MESSAGES},
            base.cold,
            base.store,
            base.process,
        )
        when += ", but for Ray's messages: Ray is not installed"
        for turn in range(_TURNS):
            report(turn / _TURNS, "copying")
            copies.look()
    machine = Machine(
        copies.cores,
        tuple(copies.alone),
        tuple(copies.beside),
        **messages,
        cold=cold,
        store=store,
        process=process,
        origin=f"measured here on {when}",
    )
    if machine.small == base.small:
        return machine
    per_byte = 1 / store - 2 / machine.speed(4.0 * _LARGE)  # the worker copies the model, too
    return replace(machine, store=1 / max(per_byte, 1 / machine.speed(4.0 * _LARGE)))


class _Copies:
    """How fast this machine copies, by the best of several looks at different times.

    Others on the machine only make it slower, and may do so for half a minute at a time.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.alone, self.beside = ([0.0] * len(COPIED) for _ in range(2))

    def look(self) -> None:
        """Look once more."""
        for speeds, threads in ((self.alone, 1), (self.beside, self.cores)):
            speeds[:] = [max(best, copying(size, threads) / threads) for best, size in zip(speeds, COPIED, strict=True)]


def copying(working_set: int, threads: int) -> float:
    """Bytes that are read and written in a second of processor time by so many threads that copy at once.

    Each goes through bytes of its own. By processor time, for other programs of the machine take part of the clock's.
    """
    pairs = [(np.ones(working_set // 8, np.float32), np.zeros(working_set // 8, np.float32)) for _ in range(threads)]
    for source, target in pairs:
        np.copyto(target, source)  # which gives it its memory
    speeds, end = [0.0] * threads, time.perf_counter() + _SECONDS

    def work(number: int) -> None:
        (source, target), count, begin = pairs[number], 0, time.thread_time()
        while time.perf_counter() < end or count == 0:
            np.copyto(target, source)
            count += 1
        speeds[number] = count * 2 * source.nbytes / max(1e-9, time.thread_time() - begin)

    others = [threading.Thread(target=work, args=(number,)) for number in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()
    return sum(speeds)


@dataclass
class ConstantGradient(Problem):
    """A gradient that costs nothing."""

    workers: int
    weights: int
    seed: int = 0
    given: Tensor | None = None

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.weights)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.given is None:
            self.given = torch.full((self.weights,), 0.5)
        return self.given, 0.0

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": 0.0, "pooled_loss": math.nan, "accuracy": math.nan, "gradient_norm": math.nan}

    def fingerprint(self) -> str:
        return f"constant gradient of {self.weights} weights"


class Spent(NamedTuple):
    """Seconds per update of a real run: of the clock, and of the processors in each kind of process."""

    wall: float
    server: float
    workers: float
    between: float
    shards: float = 0.0
    """Of all shards of the server together."""
    others: float = 0.0
    """Of other programs of the machine."""


class Stopwatch:
    """A logger of a run that times its updates, between what it hears of first and what it hears of before the end."""

    def __init__(self, control: FleetControl) -> None:
        self._control = control
        self._marks: list[tuple[int, Spent]] = []

    def __call__(self, version: int, values: Mapping[str, float]) -> None:
        children, workers, shards = _descendants(), self._control.places.values(), self._control.shards.values()
        of_workers, of_shards = (sum(children.get(pid, 0.0) for _, pid in kind) for kind in (workers, shards))
        server, all_children = time.process_time(), sum(children.values())
        between, others = all_children - of_workers - of_shards, machine_seconds() - server - all_children
        spent = Spent(time.perf_counter(), server, of_workers, between, of_shards, others)
        if version and (not self._marks or version > self._marks[-1][0]):
            self._marks.append((version, spent))

    @property
    def spent(self) -> Spent:
        """What an update took; the last that was heard of is left out, for it is when the run ends."""
        if len(self._marks) < _FEWEST:
            raise RunFailed(
                f"a run that was to be timed was heard of {len(self._marks)} times; expected {_FEWEST} or more."
            )
        (first, begin), (last, end) = self._marks[0], self._marks[-2]
        return Spent(*(max(0.0, b - a) / (last - first) for a, b in zip(begin, end, strict=True)))


def machine_seconds() -> float:
    """Processor seconds that this machine has spent for anybody, as far as the system tells."""
    with suppress(OSError):
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(int(word) for place, word in enumerate(words[:8]) if place not in (3, 4)) / _TICKS  # idle and waiting
    return 0.0


def peak_memory(pid: int | str = "self") -> int:
    """The most bytes that a process has had in memory; 0 if it is gone, or another one where the system does not tell."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    if pid != "self":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _descendants() -> dict[int, float]:
    """Processor seconds of the processes that this one has started, and of theirs, as far as the system tells."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended meanwhile
            words = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(words[1])
            seconds[int(path.parent.name)] = (int(words[11]) + int(words[12])) / _TICKS

    def ours(pid: int) -> Iterator[int]:
        for child, parent in parents.items():
            if parent == pid:
                yield child
                yield from ours(child)

    return {pid: seconds[pid] for pid in ours(os.getpid())}


def timed(weights: int, seconds: float, workers: int, fleet: RayFleet) -> Spent:
    """A short real run of DuDe with a gradient that costs nothing."""
    stopwatch = Stopwatch(fleet.control)
    quiet, problem = Reporting(log=[stopwatch], progress=False), ConstantGradient(workers, weights)
    train(DuDe(lr=1e-6), problem, fleet, time=seconds, evaluation=Evaluation(every=10**9), watch=quiet)
    return stopwatch.spent


def _real(report: Report, copies: _Copies) -> tuple[dict[str, Message], float, float, float]:
    """What messages cost, how many times that beside large vectors, how fast answers are put into the store, copies of the
    model included, and a process's memory.

    Processor time is that of runs with more workers than cores: what a message takes is more where all are busy. How long a
    job takes is that of a run with one.
    """
    together, trips = list[Spent](), list[float]()
    process, busy = 0.0, 2 * (os.cpu_count() or 1)
    for place, (name, (weights, shards, share)) in enumerate(_RUNS.items()):
        report(place / len(_RUNS), name)
        alone, several = (
            timed(weights, _RUN, workers, RayFleet(shards=shards, shared_memory=share)) for workers in (1, busy)
        )
        together.append(several)
        trips.append(alone.wall)
        if shards is None and weights <= _MIDDLE and not share:  # before anything large was here
            process = float(peak_memory())
        else:
            copies.look()
    small, middle, large, *stored, shared = together[:6]
    messages = {
        name: Message(spent.server, spent.workers, spent.between, trip)
        for name, spent, trip in (("small", small, trips[0]), ("large", middle, trips[1]), ("shared", shared, trips[5]))
    }
    messages["headed"], messages["sliced"] = _of_shards(stored, trips[3:5])
    messages["shared_headed"], messages["shared_sliced"] = _of_shards(together[6:8], trips[6:8])
    cold = max(1.0, together[8].server / max(messages["shared_headed"].server, 1e-9))  # of the head, which has no vectors
    per_byte = (large.workers - middle.workers) / (4.0 * (_LARGE - _MIDDLE))
    return messages, cold, 1 / max(per_byte, 1e-12), process


def _of_shards(spent: Sequence[Spent], trips: Sequence[float]) -> tuple[Message, Message]:
    """What a job takes whatever the number of shards, and what each of them adds, from runs with one and with two."""
    one, two = spent
    of_one, of_two = ((each.workers, each.between, trip) for each, trip in zip(spent, trips, strict=True))
    added = [max(0.0, b - a) for a, b in zip(of_one, of_two, strict=True)]  # by the second shard
    rest = [max(0.0, all_of_it - share) for all_of_it, share in zip(of_one, added, strict=True)]
    return Message((one.server + two.server) / 2, *rest), Message((one.shards + two.shards / 2) / 2, *added)

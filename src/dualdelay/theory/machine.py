"""The constants of a machine that a run's cost is predicted from: how they are measured, and where they are kept."""

from __future__ import annotations

import json
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms.dude import DuDe
from ..core import Arrival, Problem, State
from ..core.errors import BadInput, is_finite, shown
from ..problems.files import cache_folder
from ..runs.settings import Evaluation, Reporting
from ..runs.simulate import train
from ..storage.files import make_folder, read, write
from ..workers.ray_fleet import RayFleet

Report = Callable[[float, str], None]

FILE = "machine.json"
"""What the constants are kept as, in the user's cache folder."""
COPIED = (2**20, 2**23, 2**25, 2**26, 2**28)
"""Working sets, in bytes, at which copying is timed: from within a core's cache to far beyond all caches."""
_SECONDS = 0.15  # for one timing of copies
_TURNS = 5
_SMALL, _MIDDLE, _LARGE = 1_000, 50_000, 2_000_000  # weights: in the request, just through the object store, mostly copies
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Message(NamedTuple):
    """Processor seconds of one job's request and answer, whatever their size, and how long both take together."""

    server: float
    """In the server's process."""
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
    copying_together: tuple[float, ...]
    """The same of all cores together."""
    small: Message
    """A job whose model travels in the request."""
    large: Message
    """A job whose model and answer go through Ray's object store."""
    store: float
    """Bytes that a process puts into Ray's object store in a second."""
    process: float
    """Bytes of memory that a process takes before it has any weights."""
    origin: str = "shipped with the package, of a machine with two cores"
    """Where the numbers come from, in words."""

    def __post_init__(self) -> None:
        for name in ("copying", "copying_together"):
            values = getattr(self, name)
            if len(values) != len(COPIED) or not all(is_finite(value) and value > 0 for value in values):
                raise BadInput(f"{name} is {shown(values)}; expected {len(COPIED)} speeds in bytes per second, above zero.")
        for name in ("cores", "store", "process"):
            value = getattr(self, name)
            if not is_finite(value) or not value > 0:
                raise BadInput(f"{name} is {shown(value)}; expected a number above zero.")
        for name in ("small", "large"):
            if not all(is_finite(value) and value >= 0 for value in getattr(self, name)):
                raise BadInput(f"{name} is {shown(getattr(self, name))}; expected four numbers of seconds, zero or more.")

    def speed(self, working_set: float, *, alone: bool = True) -> float:
        """Bytes per second of one process that goes through so many bytes again and again, alone or beside others."""
        speeds = self.copying if alone else [together / self.cores for together in self.copying_together]
        return float(np.interp(np.log(max(1.0, working_set)), np.log(COPIED), speeds))


SHIPPED = Machine(
    cores=2,
    copying=(8.4e10, 8.2e10, 3.7e10, 1.9e10, 2.1e10),
    copying_together=(1.6e11, 1.6e11, 5.5e10, 4.1e10, 4.3e10),
    small=Message(0.00089, 0.00071, 0.00003, 0.0023),
    large=Message(0.0030, 0.0019, 0.0027, 0.0069),
    store=1.1e9,
    process=3.5e8,
)
"""What is used where nothing was measured."""


def read_machine(path: Path) -> Machine:
    """The constants in a file, which may be edited for a machine that is to be rented."""
    data = read(path)
    try:
        values = {field.name: json.loads(data)[field.name] for field in fields(Machine)}
        values |= {name: Message(**values[name]) for name in ("small", "large")}
        values |= {name: tuple(values[name]) for name in ("copying", "copying_together")}
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
    return {**asdict(machine), "small": machine.small._asdict(), "large": machine.large._asdict()}


# --- measuring ---


def measure_machine(report: Report = lambda share, text: None, base: Machine = SHIPPED) -> Machine:
    """Measure this machine in about a minute: how fast it copies, and what Ray's messages cost.

    Without Ray the constants of its messages are those of ``base``.
    """
    when = time.strftime("%Y-%m-%d")
    try:
        small, large, store, process = _real(report)
    except BadInput as error:
        if "not installed" not in str(error):
            raise
        small, large, store, process = base.small, base.large, base.store, base.process
        when += ", but for Ray's messages: Ray is not installed"
    cores = os.cpu_count() or 1
    alone, together = [], []
    for place, size in enumerate(COPIED):
        report(0.7 + 0.3 * place / len(COPIED), "copying")
        alone.append(copying(size, 1))
        together.append(copying(size, cores))
    machine = Machine(cores, tuple(alone), tuple(together), small, large, store, process, f"measured here on {when}")
    if small == base.small:
        return machine
    per_byte = 1 / store - 2 / machine.speed(4.0 * _LARGE)  # the worker copies the model, too
    return replace(machine, store=1 / max(per_byte, 1 / machine.speed(4.0 * _LARGE)))


def copying(working_set: int, threads: int) -> float:
    """Bytes that are read and written in a second of processor time by so many threads that copy at once.

    Each goes through bytes of its own. By processor time, for other programs of the machine take part of the clock's.
    """
    pairs = [(np.ones(working_set // 8, np.float32), np.zeros(working_set // 8, np.float32)) for _ in range(threads)]
    turns = []
    for _ in range(_TURNS):
        speeds, end = [0.0] * threads, time.perf_counter() + _SECONDS

        def work(number: int, speeds: list[float] = speeds, end: float = end) -> None:
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
        turns.append(sum(speeds))
    return max(turns)  # others on the machine only make it slower


@dataclass
class ConstantGradient(Problem):
    """A gradient that costs nothing; its loss is the processor time of the process that gave it."""

    workers: int
    weights: int
    seed: int = 0
    given: Tensor | None = None

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.weights)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.given is None:
            self.given = torch.full((self.weights,), 0.5)
        return self.given, time.process_time()

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


class Stopwatch:
    """A watch function that times the updates of a run from one version to another."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._workers: dict[int, float] = {}  # processor time of each at its last answer
        self._marks: dict[int, tuple[float, float, float, float]] = {}

    def __call__(self, state: State, arrival: Arrival) -> None:
        self._workers[arrival.worker] = arrival.loss
        if state.version in (self._first, self._last) and state.version not in self._marks:
            spent = time.perf_counter(), time.process_time(), sum(self._workers.values()), _children_seconds()
            self._marks[state.version] = spent

    @property
    def spent(self) -> Spent:
        """What an update took."""
        pairs = zip(self._marks[self._first], self._marks[self._last], strict=True)
        wall, server, workers, children = ((b - a) / (self._last - self._first) for a, b in pairs)
        return Spent(wall, server, workers, max(0.0, children - workers))


def _children_seconds() -> float:
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

    return sum(seconds[pid] for pid in ours(os.getpid()))


def _timed(weights: int, first: int, last: int) -> Spent:
    """A short real run of DuDe with one worker."""
    stopwatch = Stopwatch(first, last)
    quiet = Reporting([stopwatch], progress=False)
    problem, never = ConstantGradient(1, weights), Evaluation(every=10**9)
    train(DuDe(lr=1e-6), problem, RayFleet(), updates=last + 1, evaluation=never, watch=quiet)
    return stopwatch.spent


def _real(report: Report) -> tuple[Message, Message, float, float]:
    """What messages cost of both sizes, how fast answers are put into the store, copies of the model included."""
    report(0.0, "messages in a request")
    runs = {_SMALL: _timed(_SMALL, 100, 800)}
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    report(0.25, "messages through the object store")
    runs[_MIDDLE] = _timed(_MIDDLE, 100, 500)
    report(0.5, "large messages")
    runs[_LARGE] = _timed(_LARGE, 20, 120)
    small, large = (
        Message(spent.server, spent.workers, spent.between, spent.wall) for spent in (runs[_SMALL], runs[_MIDDLE])
    )
    per_byte = (runs[_LARGE].workers - runs[_MIDDLE].workers) / (4.0 * (_LARGE - _MIDDLE))
    return small, large, 1 / max(per_byte, 1e-12), process

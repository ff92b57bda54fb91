"""What a method takes for each weight: bytes at the server and at a worker, messages, and passes over the weights.

Nothing here knows a method. It is run, on vectors of two lengths with two numbers of workers, and what it then holds and
sends is counted; so it is right for a method of the user's own, too.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Job, Orders, Problem, State
from ..core.aggregate import AggregateState
from ..core.compression import Compress, Packed, pack
from ..core.devices import keep_freed_memory, using_threads
from ..core.draws import Draws
from ..core.errors import BadInput, DualDelayError
from ..core.state import BLOCK, Snapshot
from ..engine.half import Half, Kept, Task, is_own
from ..engine.loop import Loop
from ..engine.shard import Shard, ShardPlan, Store
from ..engine.slices import Slices
from ..runs.optimizer import make_optimizer
from ..runs.settings import Server
from ..simulation.clocks import VirtualClock
from ..simulation.local_fleet import LocalFleet
from ..simulation.speeds import FixedSpeeds
from ..workers.messages import Array
from .machine import COPIED

_LENGTHS = (1000, 2000)  # weights of the small runs: what differs between them is for each weight
_FEW = 8  # workers of the smaller runs, if the method goes with so few; the others have twice as many
_ROUNDS = 8  # arrivals for each worker in a run; the second half is counted
_UPDATES = 3  # that a run makes at least
_LONGEST = 20_000  # arrivals of a run at most
_LOOKS = 32  # moments at which it is looked what a run holds
_BUSY = 0.95  # of the workers' time, below which some of them wait for others
_COMPARED = 6  # arrivals for each worker whose steps are compared with a copy; the middle one of these counts
_TICK = 1e-9  # seconds, in place of none at all
_TRIALS = 5  # timings of each thing, of which the shortest counts: others on the machine only make it longer
_TIMED = 2**21  # weights of the vectors that passes are timed on, at most
_TABLE = 2**24  # numbers in all of the workers' gradients then, at most
COPY = COPIED[-1] // _TIMED
"""Bytes that are read and written for each weight by the copy that a pass is compared with: beyond all caches, as the
copies are by which a machine's speed far beyond its caches is measured."""


@dataclass(frozen=True)
class Footprint:
    """What a method with a certain number of workers takes for each weight."""

    server: Mapping[str, float]
    """Bytes that the server keeps, by what they are: weights, sums, tables, the optimiser's state."""
    models: float
    """Bytes of the models that workers were sent and the server has to keep, since they may be asked for again."""
    own_models: bool
    """Whether each worker is sent a model of its own, so that one is copied for every job."""
    up: float
    """Bytes of a worker's message."""
    down: float
    """Bytes that a worker is sent with a job."""
    worker: float
    """Bytes that a worker keeps from one job to the next."""
    arrivals: float
    """Messages that an update takes."""
    waits: bool
    """Whether workers idle while the server waits for others."""
    audited: bool
    """Whether the server's sum is compared with its parts at the end, which takes two more vectors of float64."""
    absorb: float = 0.0
    """The server's pass over an arrival that makes no update, as the bytes of a copy that takes as long."""
    update: float = 0.0
    """Its pass over one that makes an update."""
    send: float = 0.0
    """What it does for a model that travels as a small difference."""
    job: float = 0.0
    """What a worker does beside its gradient: differences, compression; in the same bytes."""
    optimized: bool = False
    """Whether an optimiser makes the server's step: that is a step of a whole slice, and not block by block."""
    by_blocks: float | None = None
    """A shard's pass over an arrival that makes an update, block by block and with the checksum, in the same bytes; None:
    not known."""


@dataclass
class _Blank(Problem):
    """A gradient of any length that costs a copy."""

    workers: int
    weights: int
    seed: int = 0

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.weights)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return x + (worker + 1.0), 0.0

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": 0.0, "pooled_loss": math.nan, "accuracy": math.nan, "gradient_norm": math.nan}

    def fingerprint(self) -> str:
        return f"blank {self.weights}"


def footprint(algorithm: Algorithm[Any], workers: int, server: Server, timed: int | None = None) -> Footprint:
    """Count what a method takes with so many workers, and time its passes on vectors of so many weights.

    By default these are two million, beyond the caches of a processor.
    """
    algorithm.init(torch.zeros(2), workers, Draws(0, "server"))  # refuses what cannot be, such as to wait for more
    few = workers if workers <= 2 * _FEW else _fewest(algorithm, workers, _FEW)
    counts = _per_weight(algorithm, few, server)
    if few < workers:  # what grows with the workers, grows in proportion
        twice = _per_weight(algorithm, 2 * few, server)
        share = (workers - few) / few
        counts = {name: counts.get(name, 0.0) + share * (more - counts.get(name, 0.0)) for name, more in twice.items()}
    state = algorithm.init(torch.zeros(2), few, Draws(0, "server"))
    with using_threads(1):
        absorb, update, by_blocks, send, job = _passes(
            algorithm, _fewest(algorithm, workers, _FEW // 2), server, timed or _TIMED
        )
    parts = {name.removeprefix("server "): value for name, value in counts.items() if name.startswith("server ")}
    return Footprint(
        {name: value for name, value in parts.items() if value > 0},
        max(counts["models"], counts["down"]),
        type(algorithm).model is not Algorithm.model or server.downlink is not None,
        counts["up"],
        counts["down"],
        counts["worker"],
        max(1.0, counts["arrivals"]),
        counts["idle"] > 0,
        isinstance(state, AggregateState),
        absorb,
        update,
        send,
        job,
        server.optimizer is not None or server.schedule is not None,
        by_blocks,
    )


def _fewest(algorithm: Algorithm[Any], workers: int, few: int) -> int:
    """With how few workers a method goes: so many, twice as many and so on, or all."""
    while few < workers:
        try:
            algorithm.init(torch.zeros(2), few, Draws(0, "server"))
        except DualDelayError:
            few *= 2
        else:
            return few
    return workers


def _per_weight(algorithm: Algorithm[Any], workers: int, server: Server) -> dict[str, float]:
    """What was counted: bytes for each weight, and numbers that do not depend on the weights."""
    short, long = (_counted(algorithm, workers, length, server) for length in _LENGTHS)
    step = _LENGTHS[1] - _LENGTHS[0]
    counts = {name: (value - short.get(name, 0.0)) / step for name, value in long.items()}
    return counts | {name: long[name] for name in ("arrivals", "idle")}


def _loop(algorithm: Algorithm[Any], workers: int, length: int, server: Server) -> Loop:
    """A run of a method on a vector of that length, with workers of nearly the same speed."""
    problem = _Blank(workers, length)
    speeds = FixedSpeeds([1 + 0.37 * worker / workers for worker in range(workers)])
    fleet = LocalFleet(problem, VirtualClock(speeds), Half(algorithm, server.uplink), downlink=server.downlink)
    optimizer = make_optimizer(server.optimizer, server.schedule, None, algorithm, problem)
    return Loop(algorithm, problem, fleet, problem.start(0), optimizer=optimizer, table_format=server.gradient_table)


def _arrivals(loop: Loop, count: int) -> Iterator[Arrival]:
    """The next arrivals of a run, so many if there are."""
    for _ in range(100 * count):
        if loop.fleet.peek() is None:
            raise BadInput(f"{type(loop.algorithm).__name__} gives nobody work any more; expected orders after a step.")
        arrival = loop.advance()
        if arrival is not None:
            yield arrival
            count -= 1
        if count == 0:
            return


def _counted(algorithm: Algorithm[Any], workers: int, length: int, server: Server) -> dict[str, float]:
    """What a short run of a method holds and sends, in bytes; the largest that it ever holds."""
    loop, round_trips = _loop(algorithm, workers, length, server), _ROUNDS * workers // 2
    loop.begin()
    for _ in _arrivals(loop, round_trips):
        pass
    version, began, most, sent, service = loop.state.version, loop.now, dict[str, float](), [0.0, 0.0], 0.0
    count, updates = 0, list[tuple[int, int]]()  # arrivals so far, and after how many of them there was which version
    for arrival in _arrivals(loop, _LONGEST):
        count, service = count + 1, service + arrival.seconds
        sent = [sent[0] + arrival.bytes, sent[1] + arrival.down]
        if loop.state.version > version:
            version = loop.state.version
            updates.append((count, version))
        if count % (1 + round_trips // _LOOKS) == 0:
            for name, value in _held(loop, workers).items():
                most[name] = max(most.get(name, 0.0), value)
        if count >= round_trips and len(updates) > _UPDATES:
            break
    if len(updates) < 2:
        raise BadInput(
            f"{type(algorithm).__name__} makes {len(updates)} updates in {count} arrivals of {workers} workers; expected "
            "two at least, to tell how many arrivals an update takes. Look at its settings."
        )
    (first, old), (last, new) = updates[0], updates[-1]
    busy = service / max(1e-9, workers * (loop.now - began))
    return most | {
        "up": sent[0] / count,
        "down": sent[1] / count,
        "arrivals": (last - first) / (new - old),
        "idle": float(busy < _BUSY),
    }


def _held(loop: Loop, workers: int) -> dict[str, float]:
    """The bytes of what a run holds at this moment, by what it is."""
    state, saved = loop.state, loop.fleet.save()
    held = {f"server {f.name}": _bytes(getattr(state, f.name)) for f in fields(state) if f.name != "optimizer"}
    if state.optimizer is not None:
        held["server optimizer"] = _bytes(state.optimizer.save())
    if is_own(loop.algorithm):  # a step that may fail half way can be undone
        undo = Snapshot(state)
        undo.take()
        shared = set(map(_place, _tensors({f.name: getattr(state, f.name) for f in fields(state)})))
        held["server undo"] = float(sum(t.nbytes for t in _tensors(vars(undo)) if _place(t) not in shared))
    held["models"] = float(sum(t.nbytes for *_, x in saved["weights"] for t in _tensors(x)))
    held["worker"] = _bytes(saved["held"]) / workers
    return held


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(value: Any) -> float:
    """The bytes of all tensors in a value, each once."""
    return float(sum({_place(tensor): tensor.nbytes for tensor in _tensors(value)}.values()))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Packed):
        yield from (torch.as_tensor(part) for part in value.parts)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


# --- passes ---


def _passes(
    algorithm: Algorithm[Any], workers: int, server: Server, length: int
) -> tuple[float, float, float | None, float, float]:
    """The time of a step without an update and with one, of a shard's step, of making a model small, and of a job beside
    its gradient.

    For each weight, as bytes: those of a copy that takes as long. A copy is made before each step, so that what the step
    needs is in no cache; the two are compared, for a machine that others use is not as fast in one moment as in another. Of
    the other two the shortest times count.
    """
    keep_freed_memory()  # as runs do
    length = min(length, _TABLE // workers)
    source, target = np.ones(COPY * length // 8, np.float32), np.zeros(COPY * length // 8, np.float32)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    of_shard: list[float] = []
    copies: list[float] = []
    arrivals = deque[Arrival](maxlen=1)
    timed, spent, shard = copy.copy(algorithm), [0.0], _TimedShard.of(algorithm, workers, server, length)

    def step(state: State, arrival: Arrival) -> Orders:
        copies.append(_copied(source, target))
        begin = time.thread_time()
        orders = algorithm.step(state, arrival)
        spent[0] = time.thread_time() - begin
        arrivals.append(arrival)
        return orders

    object.__setattr__(timed, "step", step)
    loop = _loop(timed, workers, length, server)
    loop.fleet.copies_models = True  # as real workers' fleets do: then the step is made in place
    loop.begin()
    version = loop.state.version
    for number, _ in enumerate(_arrivals(loop, (2 + _COMPARED) * workers)):
        updates = loop.state.version > version
        again = None if shard is None else shard.seconds(arrivals.pop(), loop.state.version, source, target)
        if number >= 2 * workers:
            ratios[updates].append(spent[0] / max(copies[-1], _TICK))
            of_shard += [again] if updates and again is not None else []
        version = loop.state.version
    absorb, update = (COPY * statistics.median(each or [0.0]) for each in ratios.values())
    by_blocks = COPY * statistics.median(of_shard) if of_shard else None
    send, job = (
        COPY * seconds / max(min(copies), _TICK)
        for seconds in (_send(length, server.downlink), _job(algorithm, length, server))
    )
    return absorb, update or absorb, by_blocks, send, job


class _Rooms(Store):
    """Memory for the weights that a shard makes, used again and again as that is that workers read."""

    def __init__(self, x: Tensor, count: int) -> None:
        self._rooms = deque(_OneRoom(torch.zeros_like(x)) for _ in range(count))

    def copies(self, x: Tensor) -> bool:
        return True

    def room(self, x: Tensor) -> _OneRoom:
        self._rooms.rotate()
        return self._rooms[0]


class _OneRoom(NamedTuple):
    weights: Tensor

    def part(self, start: int, stop: int) -> Tensor:
        return self.weights[start:stop]

    def place(self) -> Tensor:
        return self.weights


class _TimedShard:
    """A server in one shard, whose steps are timed."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._sequence = 0

    @classmethod
    def of(cls, algorithm: Algorithm[Any], workers: int, server: Server, length: int) -> _TimedShard | None:
        """That of a method, unless its step is that of an optimiser or makes a model for each worker."""
        own_models = type(algorithm).model is not Algorithm.model or server.downlink is not None
        if server.optimizer is not None or server.schedule is not None or own_models or length <= BLOCK:
            return None
        problem = _Blank(workers, length)
        x = problem.start(0)
        plan = ShardPlan(algorithm, workers, 0, None, server.gradient_table, Slices(length, 1), x.dtype)
        try:
            shard = plan.shard(0, x, _Rooms(x, workers + 2))
            shard.first()
        except Exception:  # whatever a user's own method does with a slice: it has no shards
            return None
        return cls(shard)

    def seconds(self, arrival: Arrival, version: int, source: Array, target: Array) -> float | None:
        """Those of the step for an arrival, over those of a copy; None if it is not made block by block."""
        self._sequence += 1
        facts = (tuple(arrival.job), *arrival[2:8])  # but for the message
        parts = dict(arrival.parts) or {"": arrival.value}
        try:
            self._shard.push(arrival.worker, (0, self._sequence), parts)
            if not self._shard.goes_by_blocks(parts.values()):
                return None
            copied, begin = _copied(source, target), time.thread_time()
            self._shard.step(facts, bool(arrival.parts), (0, self._sequence))
            seconds = time.thread_time() - begin
            self._shard.keep(version, None)
            self._shard.drop([version - 1])
        except Exception:  # the same
            return None
        return seconds / max(copied, _TICK)


def _copied(source: Array, target: Array) -> float:
    """The seconds of a copy."""
    begin = time.thread_time()
    np.copyto(target, source)
    return time.thread_time() - begin


def _send(length: int, downlink: Compress) -> float:
    """The seconds in which the server makes the difference to what a worker was sent before."""
    if downlink is None:
        return 0.0
    before, times = torch.zeros(length), []
    for draw in range(_TRIALS):
        model, begin = torch.full((length,), 1.0 + draw), time.thread_time()
        before = before + pack(model - before, downlink).unpack()
        times.append(time.thread_time() - begin)
    return min(times)


def _job(algorithm: Algorithm[Any], length: int, server: Server) -> float:
    """The seconds that a worker takes for a job beside its gradients."""
    half, times = Half(algorithm, server.uplink), list[float]()
    kept: Kept | None = None
    if half.is_default:
        return 0.0
    problem = _Blank(1, length)
    few = _fewest(algorithm, 2**16, _FEW)
    model = algorithm.model(algorithm.init(problem.start(0), few, Draws(0, "server")), 0)
    given = _Given(1, length, 0, problem.gradient(problem.start(0), 0, 0))
    for draw in range(_TRIALS):
        begin = time.thread_time()
        kept = half.run(given, Task(Job(0, draw, 0), model, half.span, kept)).keep
        times.append(time.thread_time() - begin)
    return min(times)


@dataclass
class _Given(_Blank):
    """A gradient that is there already."""

    given: tuple[Tensor, float] = (torch.empty(0), 0.0)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return self.given

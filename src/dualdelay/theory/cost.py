"""What a run on real workers will take, before anything is rented: memory, traffic and time of each kind of process.

The server is one process, or a head that decides and ``shards`` that each hold a slice of everything. An update takes as
long as the busiest thing on its way: a process, the cores of a machine, a line, or the workers themselves. What a method
takes for each weight is counted (``footprint``), what a machine can do is measured (``machine``), and here both are put
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import BadInput
from ..core.settings import check_settings, positive, whole, zero_or_more
from ..core.state import BLOCK
from ..engine.slices import Slices
from ..workers.messages import INLINE
from .footprint import Footprint
from .machine import Machine

PIECE = 2**26
"""Bytes of a shard's slice that travel at once."""
GRADIENT = "its gradient"
COPIES = "copies and messages"
SERVED = "the server's work"
TRAVEL = "its model and message on lines"
_FREED = 100  # objects that nobody needs any more after which Ray frees them
_FREED_AFTER = 1.0  # or seconds
_FILLED = 0.9  # of the cores' time, where processes that exchange vectors and wait for one another share them
_CROWDED = 1 / 8  # by how much longer arithmetic in a core's caches takes while the other cores exchange vectors
_HALVINGS = 40  # after which the speed of memory agrees with how much uses it
_CHECKED, _SUMMED, _INITIAL, _AUDIT = 4.0, 4.0, 4.0, 16.0  # bytes for each weight: the finite check, the checksum, ...
_READ = 12.0  # the same that the head of shards reads: the last weights, the best, and those that are written at the end


@dataclass(frozen=True)
class Plan:
    """A run that is to be: its size, and the machines and lines that it is to have."""

    weights: float = positive()
    """How many numbers are trained."""
    workers: int = whole()
    shards: int = whole(0, low=0)
    """Processes that share the server's state; 0: one process holds everything and decides."""
    gradient_seconds: float = zero_or_more(0.0)
    """Seconds that a worker computes for one job."""
    gradient_cores: float = zero_or_more(1.0)
    """Cores that this takes of the worker's machine; 0 on a GPU."""
    machines: int | None = whole(None)
    """Machines that all processes are dealt to in turn, the server's first; by default each process has its own."""
    bandwidth: float | None = positive(None)
    """Bytes per second of a machine's line, each way; by default there is no limit."""
    latency: float = zero_or_more(0.0)
    """Seconds for a message of no length between two machines."""
    memory_per_process: float | None = positive(None)
    """Bytes that a process may take; by default there is no limit."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.weights != int(self.weights):
            raise BadInput(f"weights is {self.weights:g}; expected a whole number, such as 7e9.")
        if self.shards:
            Slices(int(self.weights), self.shards)  # refuses more than there can be

    @property
    def processes(self) -> int:
        """How many processes there are in all."""
        return self.workers + (self.shards + 1 if self.shards else 1)

    @property
    def apart(self) -> bool:
        """Whether messages go through lines."""
        return self.machines is None or self.machines > 1

    @property
    def shared(self) -> bool:
        """Whether vectors are in memory that the processes share; where some are on other machines, Ray carries all."""
        return not self.apart


@dataclass(frozen=True)
class Process:
    """What each process of one kind takes."""

    kind: str
    """server, head, shard or worker."""
    count: int
    memory: Mapping[str, float]
    """Bytes at its peak, by what they are."""
    bytes_in: float
    """For each update, through its line or its machine's memory."""
    bytes_out: float
    seconds: float
    """Processor seconds for each update, gradients included."""
    busy: float
    """The share of the time that it is at work."""

    @property
    def peak(self) -> float:
        """Bytes of memory at its peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Cost:
    """What a plan comes to."""

    plan: Plan
    processes: tuple[Process, ...]
    limits: Mapping[str, float]
    """Seconds for each update that each thing on the way needs at least; the longest is what an update takes."""
    arrivals: float
    """Gradients for each update."""
    turn: Mapping[str, float]
    """The seconds from one gradient of a worker to its next where nothing queues, by what they go to."""
    too_large: tuple[str, ...] = field(default=())
    """The kinds of processes that need more memory than one has."""

    @property
    def bottleneck(self) -> str:
        """What an update waits for."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def updates_per_second(self) -> float:
        """Server updates in a second."""
        return 1 / max(self.limits.values())

    @property
    def gradients_per_second(self) -> float:
        """Gradients that reach the server in a second."""
        return self.arrivals * self.updates_per_second

    @property
    def job_seconds(self) -> float:
        """From when a worker has its model to when its message is on its way: gradient, copies, and what Ray takes."""
        return self.turn[GRADIENT] + self.turn[COPIES]

    @property
    def server(self) -> Process:
        """The process that holds weights at the server: the server itself, or a shard."""
        return next(process for process in self.processes if process.kind in ("server", "shard"))


@dataclass(frozen=True)
class _Load:
    """What the processes of a plan do for each update, in processor seconds of one of each kind, gradients excluded."""

    server: float  # of the server, or of a shard
    head: float
    job: float  # of a worker, for one job
    between: float  # of Ray's own processes, all together
    waited: float  # seconds of a job that nobody computes in


def cost(plan: Plan, method: Footprint, machine: Machine) -> Cost:
    """Predict what a method takes in a run of that plan, on machines of that kind."""
    low, high = 0.0, 1.0  # between these is the share of the time in which other cores use the memory as well
    for _ in range(_HALVINGS):
        beside = (low + high) / 2
        load = _load(plan, method, machine, beside)
        limits, turn = _limits(plan, method, machine, load)
        longest = max(limits.values())
        low, high = (low, beside) if _others(plan, machine, load, method.arrivals, longest) < beside else (beside, high)
    processes = _processes(plan, method, machine, load, longest)
    most = math.inf if plan.memory_per_process is None else plan.memory_per_process
    large = tuple(one.kind for one in processes if one.peak > most)
    return Cost(plan, processes, limits, method.arrivals, turn, large)


def _limits(plan: Plan, method: Footprint, machine: Machine, load: _Load) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds for each update that each thing on the way needs at least, and those of a worker's turn."""
    n, a = plan.workers, method.arrivals
    up, down = method.up * plan.weights, method.down * plan.weights
    parts = max(1, plan.shards)  # a message is cut into so many
    limits = {"shard" if plan.shards else "server": load.server}
    if plan.shards:
        limits["head"] = load.head
    latency = plan.latency if plan.apart else 0.0
    travel = 2 * latency
    if plan.apart and plan.bandwidth is not None:
        limits["lines to the server"] = a * up / parts / plan.bandwidth
        limits["lines from the server"] = a * down / parts / plan.bandwidth
        travel += (up + down) / plan.bandwidth
    if plan.machines is not None:
        limits["cores"] = _busiest(plan, load, a) / machine.cores
    copies = load.job + max(0.0, load.waited - 2 * latency)
    turn = {GRADIENT: plan.gradient_seconds, COPIES: copies, SERVED: load.server / a, TRAVEL: travel}
    at_work = n - (a - 1) / 2 if method.waits and a < n else n
    limits["workers"] = a * sum(turn.values()) / at_work
    return limits, turn


def _load(plan: Plan, method: Footprint, machine: Machine, beside: float) -> _Load:
    """Processor seconds of each kind of process for an update."""
    a, parts = method.arrivals, max(1, plan.shards)
    d, up, down = plan.weights / parts, method.up * plan.weights, method.down * plan.weights
    stored = down / parts > INLINE
    used = _working_set(plan, method)
    speed = machine.speed(used, beside)
    passes = method.update + (a - 1) * method.absorb
    by_blocks = plan.shards > 0 and not method.optimized and (plan.shared or 4 * d <= PIECE)
    cached = machine.speed(8.0 * BLOCK, beside)
    if by_blocks and method.by_blocks is not None:  # with their checksums
        stepped = passes * method.by_blocks / method.update * d / machine.speed(used) * (1 + _CROWDED * beside)
    else:
        stepped = passes * d / speed + _SUMMED * d / (cached if by_blocks else speed)  # of what shards have just made
    checked = _CHECKED * plan.weights / (cached if plan.shards and plan.shared else speed)  # or workers have just copied
    puts, read = (a if method.own_models else 1) * down / parts, 2 * down
    if plan.shared and not method.own_models:
        read = 0.0  # a worker reads the model where it is
        puts = 0.0 if by_blocks else puts  # and shards make it there
    put = (2 / speed if plan.shared else 1 / machine.store) if stored else 0.0  # what is in the request is not put anywhere
    moved = stepped + a * method.send * d / speed + puts * put + (0.0 if plan.shards else a * checked)
    copies = (read + method.job * plan.weights) / speed + up * put + (checked if plan.shards else 0.0)
    if not plan.shards:
        message = (
            machine.beside_vectors(machine.shared, used) if plan.shared else machine.large if stored else machine.small
        )
        waited = message.round_trip - message.server - message.worker
        return _Load(a * message.server + moved, 0.0, message.worker + copies, a * message.between, waited)
    head, each, pieces = machine.headed, machine.sliced, math.ceil(max(down, up) / parts / PIECE)
    if plan.shared:
        head, each = (machine.beside_vectors(one, used) for one in (machine.shared_headed, machine.shared_sliced))
        pieces = 1
    calls = parts * pieces  # the shards pass on to one another what the head says: their number does not matter to it
    waited = head.round_trip + each.round_trip - head.server - head.worker - each.server - each.worker
    server, job = a * pieces * each.server + moved, head.worker + calls * each.worker + copies
    return _Load(server, a * head.server, job, a * (head.between + calls * each.between), waited)


def _working_set(plan: Plan, method: Footprint) -> float:
    """Bytes that the processes of a machine go through from one job of a worker to its next, which its caches may hold."""
    if plan.apart:
        return math.inf  # what is sent and received is new each time
    per_worker = 2 * method.up + 4.0  # messages, and the gradient
    return plan.weights * (sum(method.server.values()) + method.models + plan.workers * per_worker)


def _others(plan: Plan, machine: Machine, load: _Load, arrivals: float, seconds: float) -> float:
    """The share of an update's seconds in which other cores of the server's machine exchange vectors.

    The worker that waits for the update does not. What gradients read and write is not known, and left out.
    """
    if plan.machines is None or machine.cores <= 1:
        return 0.0
    exchange, _ = _work(plan, load, arrivals, 0)
    free = machine.cores - 1
    others = max(0.0, exchange - load.server - arrivals * load.job / plan.workers)
    return min(1.0, free, others / (seconds * max(1.0, free)))


def _busiest(plan: Plan, load: _Load, arrivals: float) -> float:
    """The core seconds of an update at the machine with most to do: that with most of the server, or with most workers."""
    assert plan.machines is not None
    work = (_work(plan, load, arrivals, place) for place in {0, _servers(plan) % plan.machines})
    return max(exchange / _FILLED + gradients for exchange, gradients in work)


def _servers(plan: Plan) -> int:
    """The processes of the server."""
    return plan.shards + 1 if plan.shards else 1


def _work(plan: Plan, load: _Load, arrivals: float, place: int) -> tuple[float, float]:
    """The core seconds of an update at one of the machines that processes are dealt to: to exchange, and for gradients."""
    assert plan.machines is not None
    servers = len(range(place, _servers(plan), plan.machines))
    workers = len(range(place, plan.processes, plan.machines)) - servers
    own = servers * load.server
    if plan.shards and place == 0:  # the head is there
        own += load.head - load.server
    jobs = arrivals * workers / plan.workers
    return own + jobs * load.job + load.between / plan.machines, jobs * plan.gradient_seconds * plan.gradient_cores


def _processes(plan: Plan, method: Footprint, machine: Machine, load: _Load, seconds: float) -> tuple[Process, ...]:
    """Each kind of process, where an update takes so many seconds."""
    n, a, d, parts = plan.workers, method.arrivals, plan.weights, max(1, plan.shards)
    up, down, base = method.up * d, method.down * d, {"the process itself": machine.process}
    objects = (a + (a if method.own_models else 1)) / seconds
    freed = 0.0 if plan.shared else min(_FREED, _FREED_AFTER * objects)  # those that wait for it
    waiting = min(n, max(1.0, a))
    stored = down / parts > INLINE
    memory = {_WORDS.get(name, name): per_weight * d / parts for name, per_weight in method.server.items()}
    memory["initial weights"] = _INITIAL * d / parts
    seen = 1 / parts  # of what lies in a machine's object store, which each process that uses it maps sooner or later
    if stored and plan.machines is not None and not plan.shared and up / parts <= PIECE:
        seen = math.ceil(parts / plan.machines) / parts
        if _TABLE in memory:  # gradients stay there as they came
            memory[_TABLE] *= seen * parts
    if stored:
        memory["models sent and kept"] = (method.models + method.down) * d * seen
    memory["arriving messages"] = (
        (n if plan.shared else waiting) * up * seen
    )  # a worker has two segments: one is in a table
    if freed:
        memory["freed soon"] = freed * max(up, down) * seen
    if method.audited:
        memory["audit at the end"] = _AUDIT * d / parts
    server = Process(
        "shard" if plan.shards else "server",
        parts,
        base | memory,
        a * up / parts,
        a * down / parts,
        load.server,
        min(1.0, load.server / seconds),
    )
    held = {"model": 4 * d, "gradient": 4 * d, "message": up, "kept for the next job": method.worker * d}
    if stored and plan.shared:
        held["messages that the server reads"] = 2 * up
    elif stored:
        held["model as it came"] = down
    job, jobs = load.job + plan.gradient_seconds, a / n
    worker = Process(
        "worker",
        n,
        base | {k: v for k, v in held.items() if v},
        jobs * down,
        jobs * up,
        jobs * job,
        min(1.0, jobs * job / seconds),
    )
    reads = {"initial weights": _INITIAL * d, "weights at an evaluation and at the end": _READ * d}
    if stored:
        reads["these on their way"] = _READ * d
    head = (Process("head", 1, base | reads, 0.0, 0.0, load.head, min(1.0, load.head / seconds)),) if plan.shards else ()
    return (*head, server, worker)


_TABLE = "last gradients of the workers"
_WORDS = {
    "weights": "weights",
    "total": "sum of gradients",
    "table": _TABLE,
    "optimizer": "the optimiser's state",
    "undo": "copy to undo a failed step",
}

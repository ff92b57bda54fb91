"""Ray as a transport: workers are actors, on this machine or in a cluster. The one file that knows Ray."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core import Problem
from ..core.compression import size_of
from ..core.environment import environment
from ..core.errors import BadInput, RunFailed, is_finite, require_several, shown
from ..core.own_code import MODULES
from ..core.settings import whole
from ..core.tracebacks import cause_of, told
from ..core.version import install_command
from ..core.work import Sent
from ..engine.half import Half, Kept
from ..engine.shard import ShardPlan
from ..engine.slices import elsewhere
from .group import Group, Meeting, Place, joint_environment
from .job_line import Door, ServersEnd, WorkersEnd
from .local_line import LineLost
from .messages import (
    INLINE,
    Died,
    Evaluated,
    EvaluationRequest,
    JobRequest,
    Notice,
    PollRequest,
    Ready,
    Reply,
    Request,
    as_arrays,
    as_tensors,
    each_part,
)
from .output import Output
from .ray_shards import UNTRACED, AtWorker, Files, LentModel, NotThere, RayShards, ShardLine, why_not_started
from .security import authenticates, is_loopback, own_token, require_answer, require_here, require_same_ray, require_secure
from .settings import WorkerFleet
from .shared_memory import Name, Overlay, Reader, Segments
from .transport import Transport
from .worker import GONE, Worker

log = logging.getLogger("dualdelay")

_MOST_PROCESSORS = 1e6
_MOST_RANKS = 10_000
_REPEATED_BY_US = (  # Ray need not say it as well
    "A worker died or was killed|has been marked dead|Raylet is terminated|worker processes have been started on node"
)
_FREED_SOON = ("RAY_free_objects_period_milliseconds", "50")  # after a second, Ray's own, gigabytes of old messages wait
_ACTOR = "dualdelay worker "  # begins the names of our actors
_NAMELESS = (
    "dualdelay worker"  # of one for which what it is to work with could not be read: Ray asks for its name even then
)
_NO_TOKEN = (
    "; if it asks for a token (Ray speaks of InvalidAuthToken then), set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as on "
    "the cluster"
)
_OTHER_TOKEN = "; if Ray speaks of InvalidAuthToken, RAY_AUTH_TOKEN here is not that of the cluster"
_CHECK = 0.1  # seconds between two looks at whether Ray itself is alive
_CHECK_LIVES = 0.5  # seconds between two looks at whether processes that are not at work are alive
_RINGS = 4096  # of the bell that are taken at once
_REFUSED = 3  # requests in a row that a line could not carry, after which a worker is asked by Ray alone
_ANSWER = 2.0  # seconds in which a worker says what it keeps; that needs no computation, and the server waits


@dataclass(frozen=True)
class RayFleet(WorkerFleet):
    """Real workers, one Ray actor each, on this machine or in a cluster."""

    starting: ClassVar[str] = "real workers: Ray and their processes take some seconds to start"

    address: str | None = None
    """A running cluster to join, such as "10.0.0.5:6379" or "auto"; None starts Ray on this machine."""
    cpus: float = 1.0
    """Processors that a worker claims, each of its ranks; zero claims none."""
    gpus: float = 0.0
    """GPUs that a worker claims, each of its ranks; 0.25 lets four share one."""
    resources: Sequence[Mapping[str, float]] = ()
    """Ray's custom resources that each worker claims, one mapping for each, to place it where its data are; of several
    ranks each claims them."""
    host: str = "127.0.0.1"
    """The address that a Ray started here binds to; the default is reachable from this machine alone."""
    shards: int | None = whole(None)
    """Processes that the server's state is cut into, each with its slice of weights, sums and tables; workers exchange
    slices with them directly. None: the server is this process. The method must be separable by coordinate."""
    piece: int = whole(64 << 20, low=1 << 16)
    """Bytes in which models and messages travel between workers and shards."""
    store: int | None = whole(None, low=1 << 27)
    """Bytes of the object store of a Ray that is started here; None: as Ray chooses."""
    shared_memory: bool = True
    """Whether processes of one machine exchange models and messages through memory that they share, on Linux; otherwise
    through Ray's object store, as processes of different machines always do."""
    insecure: bool = False
    """Join a cluster on another machine although neither token authentication nor TLS is on: anyone who reaches its
    port can run code there."""
    ranks: int = whole(1, high=_MOST_RANKS)
    """Processes that a worker consists of: each computes a part of every gradient. Another number gives other bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 <= value <= _MOST_PROCESSORS:
                raise BadInput(f"{name} is {shown(value)}; expected zero or more processors for each worker, 1e6 at most.")
        for name, text in (("address", self.address), ("host", self.host)):
            if not isinstance(text, str) and not (text is None and name == "address"):
                raise BadInput(f"{name} is {shown(text)}; expected a text, such as '127.0.0.1'.")
        require_several("resources", self.resources, "mappings, one for each worker")
        for worker, claims in enumerate(self.resources):
            good = isinstance(claims, Mapping) and all(
                isinstance(name, str) and is_finite(value) and value >= 0 for name, value in claims.items()
            )
            if not good:
                raise BadInput(
                    f"resources[{worker}] is {shown(claims)}; expected how much of what by name, such as {{'site_a': 1.0}}."
                )

    def require_fit(self, workers: int) -> None:
        if self.resources and len(self.resources) not in (workers - self.room, workers):
            raise BadInput(f"resources are given for {len(self.resources)} workers; expected {workers}, one mapping each.")
        super().require_fit(workers)

    def claims(self, worker: int) -> dict[str, float]:
        """What a worker asks of the machine that it runs on; of several ranks each does."""
        own = dict(self.resources[worker]) if worker < len(self.resources) else {}
        claims: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus, **own}
        return {name: value for name, value in claims.items() if value}

    def connect(self, problem: Problem, half: Half, output: Path | None, about: Mapping[str, Any]) -> Transport:
        return RayTransport(self, problem, half, output)


class _Actor(Worker):
    """A worker as a Ray actor. One that is on the server's machine is asked by a line of its own and not by calls."""

    _name = _NAMELESS
    _door: Door  # where the server is let in, if it may be
    _to_server: WorkersEnd | None = None

    def __init__(self, incarnation: int, worker: int, *rest: Any) -> None:
        super().__init__(worker, *rest)
        self._incarnation, self._name = incarnation, f"{_ACTOR}{worker}-{incarnation}"
        with suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGTERM, _end)  # Ray would wait for the call that never returns

    def __repr__(self) -> str:  # Ray writes this before what the process prints
        return self._name

    def ready(self, count: bool, probe: Name | None) -> Ready:
        """Its node, its process, what its bits depend on, and if that is asked its number of samples.

        By the probe, a name of the server's, it finds out whether it shares memory with it.
        """
        import ray

        node, samples = ray.get_runtime_context().get_node_id(), self.samples() if count else None
        ready = Ready(self._worker, self._incarnation, node, os.getpid(), environment(), samples)
        server = Reader()
        if probe is None or not server.reaches(probe):
            return ready
        ready = ready._replace(probe=self.share(server))
        with suppress(OSError):  # where there are no such sockets, or no more of them, the server goes on asking by Ray
            self._door = Door(probe.pid)
            ready = ready._replace(door=self._door.address)
        return ready

    def share(self, server: Reader) -> Name | None:
        """A name of what this process shares with the server, which is on the same machine; None if that is nothing."""
        return None

    def attend(self) -> Reply | Evaluated | None:
        """Do what the server asks by its line, until it says that something else goes by Ray, or is gone.

        An answer that cannot go by the line ends this, too: it is returned.
        """
        line = self._to_server = self._to_server or self._door.let_in()
        answer: Reply | Evaluated | None = None
        try:
            while (request_and_model := line.hear())[0] is not None:
                request, model = request_and_model
                if not any(_overtakes(later, request) for later, _ in line.waiting):  # or else nobody waits for it
                    answer = self.answer(request, model)
                if answer is not None and not line.answer(answer):
                    break
                answer = None
        except LineLost:
            pass
        return answer

    def answer(self, request: JobRequest | EvaluationRequest, model: Any) -> Reply | Evaluated | None:
        """What comes of a request that came by the line."""
        return self.compute(request, model, None) if isinstance(request, JobRequest) else self.evaluate(request, model)

    def stay(self) -> None:
        """Never return: the call fails when the process dies, at work or not."""
        while True:
            time.sleep(3600)


def _overtakes(later: Any, request: Any) -> bool:
    """Whether nobody waits for an answer to a request any more, since another one came later."""
    return isinstance(later, JobRequest) and isinstance(request, JobRequest) and later.sequence > request.sequence


class _FirstRank(_Actor):
    """The first rank of a worker that has several: the worker itself, whose gradients all of them take."""

    def __init__(self, ranks: int, own_gpu: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self._group, self._places = Group(0, ranks, own_gpu), list[Place]()
        self._problem = self._group.led(self._problem)

    def open(self, *places: Place) -> Meeting:
        """Let the others, whose places these are, find this one."""
        self._places = [_place(), *places]
        return self._group.open(self._places)

    def ready(self, count: bool, probe: Name | None) -> Ready:
        """As of a single process, as soon as all ranks are there."""
        self._group.join(None, _place().address)
        self._group.prepare(self._problem, self._worker)
        return super().ready(count, probe)._replace(environment=joint_environment(self._places))

    def stay(self) -> None:
        self._group.stay()


class _FurtherRank:
    """A rank that takes part in the gradients of the first."""

    _name = _NAMELESS

    def __init__(
        self, rank: int, ranks: int, own_gpu: bool, incarnation: int, worker: int, problem: Problem, threads: int
    ) -> None:
        self._group, self._worker, self._problem, self._threads = Group(rank, ranks, own_gpu), worker, problem, threads
        self._name = f"{_ACTOR}{worker}-{incarnation}-{rank}"
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, _end)

    def __repr__(self) -> str:
        return self._name

    def place(self) -> Place:
        """Where it is."""
        return _place()

    def serve(self, meeting: Meeting) -> None:
        """Never return: the call fails when the process dies or the group falls apart."""
        self._group.join(meeting, _place().address)
        self._group.prepare(self._problem, self._worker)
        self._group.serve(self._problem, self._threads)


def _place() -> Place:
    """Where this process is."""
    import ray

    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), environment())


class _Whole(_Actor):
    """A worker's process that is sent whole models. On the server's machine these and its messages are in shared memory.

    To a request whose model is not there any more it gives no answer, since nobody waits for that.
    """

    _server: Reader  # of what the server shares, if it does
    _messages: Segments | None = None  # of what is shared with it
    _overlay: Overlay | None = None  # in which a model lies that is not copied
    _laid: Name | None = None  # that model

    def share(self, server: Reader) -> Name | None:
        self._server, self._messages = server, Segments(readers=1)
        return self._messages.probe()

    def answer(self, request: JobRequest | EvaluationRequest, model: Any) -> Reply | Evaluated | None:
        if isinstance(request, JobRequest):
            return self.compute(request, model, None, near=True)
        return super().answer(request, model)

    def compute(self, request: JobRequest, x: Any, held: Any, near: bool = False) -> Reply | None:
        """Do a job; whoever is near reads the message where it is."""
        try:
            known = request.sequence <= self._sequence  # then no model is needed
            reply = super().compute(request, None if known else self._read(x), held)
        except NotThere:
            return None
        if not (known or self._is_there):
            self._forget_reply()
            return None
        if reply is None or reply.error or not near:
            return reply
        reply = reply._replace(value=each_part(reply.value, self._shared))
        with self._turn:
            self._reply = reply  # one that is asked for again is not put there again
        return reply

    def _shared(self, part: Any) -> Any:
        large = isinstance(part, np.ndarray) and part.nbytes > INLINE
        return (self._messages.put(part) if large and self._messages is not None else None) or part

    def evaluate(self, request: EvaluationRequest, x: Any) -> Evaluated | None:
        try:
            evaluated = super().evaluate(request, self._read(x))
        except NotThere:
            return self._without_model(request)
        return evaluated if evaluated is None or self._is_there else evaluated._replace(part=GONE)

    def aside(self, request: EvaluationRequest, x: Any) -> Evaluated | None:
        try:
            return super().aside(request, each_part(x, self._copied))  # the job has its own model
        except NotThere:
            return None

    def _read(self, x: Any) -> Any:
        """A model as it was sent, in memory of this process; what is made of it counts if it is there afterwards."""
        self._laid = None
        if isinstance(x, Name) and self._half.is_default and len(x.shape) == 1:
            kind = np.dtype(x.dtype)
            if self._overlay is None or (self._overlay.array.dtype, self._overlay.array.shape) != (kind, x.shape):
                self._overlay = Overlay(kind, *x.shape)
            if self._server.lay(x, self._overlay, 0):
                self._laid = x
                return self._overlay.array
        return each_part(x, self._copied)

    @property
    def _is_there(self) -> bool:
        """Whether the server still lends the model that was read last, or that was copied."""
        return self._laid is None or self._server.has(self._laid)

    def _copied(self, part: Any) -> Any:
        if not isinstance(part, Name):
            return part
        copied = self._server.copy(part)
        if copied is None:
            raise NotThere
        return copied


class _WholeFirstRank(_Whole, _FirstRank):
    """A worker of a server in one process that has several ranks."""


class _Sliced(_Actor):
    """A worker's process that pulls its models from the shards of the server and pushes its messages to them.

    While a shard is gone it gives no answer: the server notices that by itself, and it is no fault of the worker. Neither
    does it to a request whose model was dropped, since nobody waits for that.
    """

    _line: ShardLine

    def reach(self, line: ShardLine, share: bool) -> None:
        """These are the shards, and whether memory is shared with those on this machine."""
        self._line = line
        if share:
            with suppress(NotThere):  # the server notices by itself that a shard is gone
                line.meet(self._worker)

    def compute(self, request: JobRequest, x: Any, held: Any) -> Reply | None:
        known, start = request.sequence <= self._sequence, time.perf_counter()  # then no model is needed
        try:
            reply = super().compute(request, None if known else self._line.pull(x), self._line.memory(held))
            if not (known or self._line.is_there):
                self._forget_reply()
                return None
            if reply is None or reply.error or reply.pushed is not None:
                return reply
            reply = self._line.push(self._worker, reply)
        except NotThere:
            return None
        except Exception as error:  # a message that cannot be cut
            seconds = time.perf_counter() - start
            reply = Reply(request, np.empty(0), False, math.nan, seconds, told(error))
        with self._turn:
            self._reply = reply
        return reply

    def evaluate(self, request: EvaluationRequest, x: Any) -> Evaluated | None:
        try:
            evaluated = super().evaluate(request, self._line.pull(x))
        except NotThere:
            return self._without_model(request)
        except Exception as error:
            return Evaluated(*request[:3], told(error))
        return evaluated if evaluated is None or self._line.is_there else evaluated._replace(part=GONE)

    def aside(self, request: EvaluationRequest, x: Any) -> Evaluated | None:
        try:
            return super().aside(request, self._line.pull(x, fresh=True))
        except NotThere:
            return None
        except Exception as error:
            return Evaluated(*request[:3], told(error))

    def keeps(self, accepted: int) -> tuple[dict[str, Any], int] | None:
        """What this worker keeps, with stand-ins for vectors, and its bytes."""
        return self._line.few(as_tensors(self.kept(accepted)))

    def kept_slice(self, accepted: int, start: int, stop: int) -> Any:
        """Some numbers of the vectors that this worker keeps for the method."""
        return self._line.cut(as_tensors(self.kept(accepted)), start, stop)

    def write_kept(self, accepted: int, folder: Path, moment: int) -> str | None:
        """Write what this worker keeps for a checkpoint; returns the file's name."""
        return self._line.write(as_tensors(self.kept(accepted)), self._worker, folder, moment)


class _SlicedFirstRank(_Sliced, _FirstRank):
    """A worker of a sharded server that has several ranks."""


def _end(*_: object) -> None:
    """End a worker's process that is told to."""
    print("*** SIGTERM received", file=sys.stderr, flush=True)
    os._exit(143)


def _is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def staying_here(loopback: bool) -> Iterator[None]:
    """Ray keeps to 127.0.0.1 while it starts; otherwise it would take the machine's own address instead."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not loopback
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class _OurRay:
    """How many runs of this process use the Ray that one of them has started; the last one stops it."""

    lock, users = threading.Lock(), 0


def require_ray(who: str) -> Any:
    """Ray; says how to install it if it is not there."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _REPEATED_BY_US)
    try:
        import ray
    except ImportError:
        raise BadInput(f"{who} need Ray, which is not installed: {install_command('ray')}.") from None
    return ray


def join(who: str, address: str | None, host: str, insecure: bool, cpus: int, store: int | None = None) -> tuple[Any, bool]:
    """Ray, joined at an address or started here with so many processors, and whether it has to be left in the end.

    One that is started has an object store of so many bytes; None: as Ray chooses.
    """
    ray = require_ray(who)
    with _OurRay.lock:
        ours = _OurRay.users > 0 or not ray.is_initialized()
        if _OurRay.users == 0:
            _connect(ray, address, host, insecure, cpus if ours else None, store)
        _OurRay.users += ours
    return ray, ours


def leave(ray: Any, ours: bool) -> None:
    """Stop Ray, if it was joined or started here and no other run uses it."""
    if ours:
        with _OurRay.lock:
            _OurRay.users -= 1
            if _OurRay.users == 0:
                ray.shutdown()


def _connect(ray: Any, address: str | None, host: str, insecure: bool, cpus: int | None, store: int | None) -> None:
    """Join or start Ray, unless the user's program has done so: then ``cpus`` is None."""
    options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}  # what workers print comes here
    place = address or host
    if place != "auto":
        require_secure(place, insecure)
    elif cpus is not None:
        place = address = _found()
    if cpus is None:
        require_same_ray(address, ray.get_runtime_context().gcs_address, insecure)
        return
    if address is not None:
        require_answer(address)
    with staying_here(is_loopback(place)):
        try:
            if address is None:
                own_token()
                os.environ.setdefault(*_FREED_SOON)
                options |= {"num_cpus": cpus, "object_store_memory": store}
                ray.init("local", _node_ip_address=host, include_dashboard=False, **options)
            else:
                ray.init(address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "" if address is None else _OTHER_TOKEN if authenticates() else _NO_TOKEN
            raise BadInput(f"Ray at {place} could not be started or joined: {str(error).rstrip('.')}{hint}.") from None
    try:
        require_here(place, ray.get_runtime_context().gcs_address)
        for node in ray.nodes():
            require_secure(node["NodeManagerAddress"], insecure)
    except BadInput:
        ray.shutdown()
        raise


def _found() -> str:
    """The address that Ray takes for 'auto': of the cluster on this machine, or what RAY_ADDRESS says."""
    from ray._private.services import get_ray_address_from_environment

    try:
        return str(get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise BadInput(
            "the address is 'auto', and no Ray runs on this machine; start the cluster first (ray start --head), give its "
            "address, such as '10.0.0.5:6379', or leave it out ('local' on the shell) to start Ray here."
        ) from None


def why_never_placed(ray: Any, claims: Mapping[str, float]) -> str:
    """Why no machine that is in the cluster now will ever have room for what claims so much; "" if one may."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, amount in claims.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            return f": it claims {amount:g} {name}, and no machine of the cluster has that (the most is {most:g})"
    if not any(all(node.get(name, 0.0) >= amount for name, amount in claims.items()) for node in nodes):
        return f": it claims {dict(claims)}, and no single machine of the cluster has all of that"
    return ""


class _SharedModel:
    """A model in shared memory, for as long as this object is referred to; and in Ray's store if somebody far needs it."""

    def __init__(self, parts: Any) -> None:
        self._parts, self._stored = parts, None

    @classmethod
    def of(cls, arrays: Any, segments: Segments) -> _SharedModel | None:
        """Copy a model there; None if nothing can be shared."""
        parts = each_part(arrays, segments.lend)
        lent = list(parts.values()) if isinstance(parts, dict) else [parts]
        return None if None in lent else cls(parts)

    @property
    def names(self) -> Any:
        """By what names others find it."""
        return each_part(self._parts, lambda lent: lent.name)

    @property
    def arrays(self) -> Any:
        """The model itself."""
        return each_part(self._parts, lambda lent: lent.array)

    def stored(self, ray: Any) -> Any:
        """Its place in Ray's store."""
        if self._stored is None:
            self._stored = ray.put(self.arrays)
        return self._stored


class RayTransport:
    """Actors, the calls to them that are under way, and what has come back."""

    def __init__(self, fleet: RayFleet, problem: Problem, half: Half, output: Path | None = None) -> None:
        require_ray("real workers")
        claimed = math.ceil(problem.workers * fleet.ranks * fleet.cpus) + (fleet.shards or 0)
        cpus = max(os.cpu_count() or 1, claimed)  # as many as workers and shards claim
        self._ray, self._ours = join("real workers", fleet.address, fleet.host, fleet.insecure, cpus, fleet.store)
        ray, self._fleet, self._problem = self._ray, fleet, problem
        self._output, self._pids = Output(output), dict[str, tuple[int, int]]()
        self._essential = self._find_essential()
        self._capture_output()
        with warnings.catch_warnings():  # torch says once that what Ray hands out is read-only: it is not written to
            warnings.simplefilter("ignore")
            torch.from_numpy(np.frombuffer(b"read-only", dtype=np.uint8))
        self._actors: dict[int, Any] = {}
        self._further: dict[int, list[Any]] = {}  # of workers with several ranks: the actors but for the first
        self._rooms: dict[int, Any] = {}  # and what was set aside for all of them
        self._broken = False  # then Ray is not to be called any more
        self._shards: RayShards | None = None  # those of the server, if it has any
        self._segments = Segments()  # models, where workers share memory with the server
        self._near: dict[int, Reader] = {}  # those workers, and how their messages are read
        self._lines: dict[int, ServersEnd] = {}  # to workers on this machine
        self._attending: dict[Any, ServersEnd] = {}  # the calls in which they listen to that
        self._evaluating: dict[int, tuple[EvaluationRequest, Any]] = {}  # what they were asked by these to evaluate
        self._selector = selectors.DefaultSelector()  # of the lines, and of one that says that a call has ended
        self._ended: deque[Any] = deque()  # those calls
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._incarnations: dict[int, int] = {}  # of the processes that were started last
        try:
            for module in MODULES.values():  # the user's files, which the workers need not have
                ray.cloudpickle.register_pickle_by_value(module)
            self._shared = (ray.put(problem), ray.put(half))
        except Exception as error:  # whatever pickling a user's objects raises
            self.close(ended=False)
            raise BadInput(
                f"the problem cannot be sent to its workers: {error} Keep out of it what lives in one process."
            ) from error
        self._make_further = ray.remote(**UNTRACED)(_FurtherRank)
        self._calls: dict[Any, tuple[int, ...]] = {}  # those under way that return notices, by worker and incarnation
        self._lives: dict[Any, tuple[int, ...]] = {}  # the calls that never return; also by rank, but for the first
        self._checked_lives = self._checked = 0.0  # when those were looked at, and whether Ray is whole
        self._inbox: list[Notice] = []

    def now(self) -> float:
        return time.monotonic()

    def open_shards(self, plan: ShardPlan, x: Tensor, files: Files) -> RayShards:
        """Start the shards of a server, which workers that are started later exchange slices with."""
        fleet = self._fleet
        self._shards = RayShards(self._ray, plan, x, fleet.server_threads, fleet.piece, files, fleet.shared_memory)
        return self._shards

    def _find_essential(self) -> dict[str, int]:
        """The processes on this machine that Ray cannot do without here, by name: if one dies, Ray ends this process."""
        node = self._ray._private.worker._global_node
        socket, session = f"--raylet_socket_name={node.raylet_socket_name}", f"--session-name={node.session_name}"
        pids = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it may have ended meanwhile
                words = path.read_bytes().decode(errors="replace").split("\0")
                for name, mark in (("raylet", socket), ("gcs_server", session)):
                    if Path(words[0]).name == name and mark in words:
                        pids[name] = int(path.parent.name)
        return pids

    def _require_essential(self) -> None:
        """Say so if Ray is broken, before Ray ends this process without a word."""
        gone = [f"{name} (pid {pid})" for name, pid in self._essential.items() if not _is_alive(pid)]
        if gone:
            self._broken = True
            raise RunFailed(
                f"Ray on this machine has broken down: its {' and '.join(gone)} has died, and with it all workers."
            )

    def _capture_output(self) -> None:
        """Have what workers print kept instead of shown; a Ray that the user has started may not send it."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams

        self._streams: Any = streams
        if self._ours:
            streams.remove_handler("ray_print_logs")
        streams.add_handler(f"dualdelay {id(self)}", self._printed_by)

    def _printed_by(self, data: Mapping[str, Any]) -> None:
        name, by = str(data.get("actor_name") or ""), ""
        whose = self._pids.get(f"{data.get('ip')} {data.get('pid')}")
        if name.startswith(_ACTOR):
            worker, incarnation, *rank = name.removeprefix(_ACTOR).split("-")
            whose, by = (int(worker), int(incarnation)), f"rank {rank[0]}: " if rank else ""
        if whose is not None:
            self._output.add(*whose, [f"{by}{line}" for line in data["lines"]])

    def start(self, worker: int, incarnation: int) -> None:
        self.stop(worker)
        self._incarnations[worker] = incarnation
        fleet = self._fleet
        options: dict[str, Any] = {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus, "max_restarts": 0, "max_task_retries": 0}
        if worker < len(fleet.resources):
            options["resources"] = dict(fleet.resources[worker])
        if fleet.ranks == 1:
            actor: Any = self._make.options(**options).remote(incarnation, worker, *self._shared, fleet.threads)
        else:
            actor = self._start_ranks(worker, incarnation, options)
        if self._shards is not None:
            actor.reach.remote(self._shards.line(), fleet.shared_memory)
        self._actors[worker] = actor
        self._lives[actor.stay.options(concurrency_group="stay").remote()] = (worker, incarnation)
        count = self._problem.needs_sample_counts  # its data are then built in the thread that will use them
        ask = actor.ready if count or fleet.ranks > 1 else actor.ready.options(concurrency_group="ask")
        probe = self._segments.probe() if fleet.shared_memory else None
        self._await(ask.remote(count, probe), worker, incarnation)

    def _start_ranks(self, worker: int, incarnation: int, options: dict[str, Any]) -> Any:
        """Start all processes of a worker, near one another, and have them meet; returns the first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, fleet, (problem, half) = self._ray, self._fleet, self._shared
        own, places = (fleet.ranks, fleet.gpus >= 1), list[dict[str, Any]]([{}] * fleet.ranks)
        if claims := fleet.claims(worker):
            room = self._rooms[worker] = ray.util.placement_group([claims] * fleet.ranks, strategy="PACK")
            places = [{"scheduling_strategy": PlacementGroupSchedulingStrategy(room, k)} for k in range(fleet.ranks)]
        name, make = (incarnation, worker), self._make.options(**options, **places[0])
        first = make.remote(*own, *name, problem, half, fleet.threads)
        others = self._further[worker] = [
            self._make_further.options(**options, **places[rank]).remote(rank, *own, *name, problem, fleet.threads)
            for rank in range(1, fleet.ranks)
        ]
        meeting = first.open.options(concurrency_group="ask").remote(*(other.place.remote() for other in others))
        for rank, other in enumerate(others, start=1):
            self._lives[other.serve.remote(meeting)] = (worker, incarnation, rank)
        return first

    @property
    def _make(self) -> Any:
        """What makes a worker's process."""
        alone = self._fleet.ranks == 1
        whole, sliced = (_Whole, _Sliced) if alone else (_WholeFirstRank, _SlicedFirstRank)
        kind = whole if self._shards is None else sliced
        return self._ray.remote(concurrency_groups={"ask": 1, "aside": 1, "stay": 1}, **UNTRACED)(kind)

    def name_of(self, worker: int) -> str:
        return ""

    def why_not_started(self, worker: int) -> str:
        claims = self._fleet.claims(worker)
        if never := why_never_placed(self._ray, claims):
            return never
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        claims = {name: self._fleet.ranks * amount for name, amount in claims.items()}
        for name, amount in claims.items():
            if (there := math.fsum(node.get(name, 0.0) for node in nodes)) < amount:
                return f": its {self._fleet.ranks} ranks claim {amount:g} {name}, and the cluster has {there:g}"
        free = self._ray.available_resources()
        taken = [name for name, amount in claims.items() if free.get(name, 0.0) < amount]
        return f": all {' and '.join(taken)} of the cluster are taken" if taken else ""

    def stop(self, worker: int) -> None:
        self._near.pop(worker, None)
        self._evaluating.pop(worker, None)
        self._hang_up(worker)
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._lives = {call: whose for call, whose in self._lives.items() if whose[0] != worker}
            for each in (actor, *self._further.pop(worker, ())):
                self._ray.kill(each)
            if worker in self._rooms:
                self._ray.util.remove_placement_group(self._rooms.pop(worker))

    def put(self, x: Sent) -> Any:
        """Copy a model to shared memory if a worker is here, else to Ray's store, or if it is small into each request."""
        arrays = as_arrays(x)
        if size_of(x) <= INLINE:
            return copy.deepcopy(arrays)
        return (_SharedModel.of(arrays, self._segments) if self._near else None) or self._ray.put(arrays)

    def get(self, model: Any) -> Sent:
        there = isinstance(model, (np.ndarray, dict, _SharedModel))
        if self._broken and not there:
            raise RunFailed("models that were with Ray are lost with it.")
        arrays = model.arrays if isinstance(model, _SharedModel) else model if there else self._ray.get(model)
        x: Sent = as_tensors(arrays)
        return x

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        actor = self._actors.get(request.worker)
        if actor is None:
            return
        if isinstance(request, PollRequest):
            actor.poll.options(concurrency_group="ask").remote(request)  # the answer is that to the job
            return
        near = request.worker in self._near
        if isinstance(model, _SharedModel):
            model = model.names if near else model.stored(self._ray)
        name = (request.worker, request.incarnation)
        if isinstance(request, EvaluationRequest) and request.aside:  # only one of both will have an answer
            self._await(actor.aside.options(concurrency_group="aside").remote(request, model), *name)
        if self._say(request, model, held):
            return
        if isinstance(request, JobRequest):
            self._await(actor.compute.remote(request, model, as_arrays(held), *([True] if near else [])), *name)
        else:
            self._await(actor.evaluate.remote(request, model), *name)

    def _await(self, call: Any, *whose: int) -> None:
        """A notice will come of a call."""
        self._calls[call] = whose
        if self._lines:
            self._watch(call)

    # --- lines to workers on this machine ---

    def _reach(self, ready: Ready) -> None:
        """Have a worker whose process is new listen to a line, if it is on this machine."""
        with suppress(LineLost):  # then everything goes by Ray
            line = ServersEnd(ready.door, ready.pid)
            if not self._lines:
                for call in self._calls:
                    self._watch(call)
            self._lines[ready.worker] = line
            self._selector.register(line, selectors.EVENT_READ, ready.worker)
            self._have_attend(ready.worker)

    def _have_attend(self, worker: int) -> None:
        """Have a worker listen to its line, as soon as it has done what it was asked by Ray."""
        call = self._actors[worker].attend.remote()
        self._attending[call] = self._lines[worker]
        self._await(call, worker, self._incarnations[worker])

    def _say(self, request: JobRequest | EvaluationRequest, model: Any, held: Kept | None) -> bool:
        """Ask a worker by its line; False if it has none, or if this has to go by Ray, for which it then listens."""
        line = self._lines.get(request.worker)
        if line is None:
            return False
        try:
            said = held is None and line.ask(request, model.key if isinstance(model, LentModel) else model)
            if not said:
                line.ask(None)
        except LineLost:  # it will be known to have died
            self._hang_up(request.worker)
            return False
        if line.refused >= _REFUSED:  # so will the next be
            self._hang_up(request.worker)
            return False
        self._look_out(line, request.worker)
        if said and isinstance(request, EvaluationRequest):
            self._evaluating[request.worker] = (request, model)
        return said

    def _look_out(self, line: ServersEnd, worker: int) -> None:
        """Wait for what a worker says, and if something waits to be said also for room for that."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.is_full else 0)
        if self._selector.get_key(line).events != events:
            self._selector.modify(line, events, worker)

    def _hang_up(self, worker: int) -> None:
        """There is no line to a worker any more: it is asked by Ray for an evaluation that it was asked for by that.

        A job is sent again in time.
        """
        line = self._lines.pop(worker, None)
        if line is None:
            return
        with suppress(LineLost):
            for answer in line.heard():
                self._take(answer)
        self._selector.unregister(line)
        line.close()
        if worker in self._evaluating:
            request, model = self._evaluating.pop(worker)
            self._await(self._actors[worker].evaluate.remote(request, model), worker, request.incarnation)

    def _watch(self, call: Any) -> None:
        """Have the bell rung when a call has ended."""

        def ended(_: object) -> None:
            self._ended.append(call)
            with suppress(OSError):  # it rings already, or nobody listens any more
                self._ring.send(b"!")

        call.future().add_done_callback(ended)

    def _hear(self, seconds: float) -> None:
        """Take what workers say by lines, and the notices of calls that have ended, after waiting so long for the first."""
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._bell:
                self._bell.recv(_RINGS)
                continue
            worker, line = key.data, self._lines.get(key.data)
            if line is not key.fileobj:  # it was hung up just now
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    line.go_on()
                    self._look_out(line, worker)
                for answer in line.heard() if events & selectors.EVENT_READ else ():
                    self._take(answer)
            except LineLost:  # how its process has ended is heard from Ray
                self._hang_up(worker)
        while self._ended:
            call = self._ended.popleft()
            if call in self._calls:
                self._read(call, self._calls)

    # --- the rest ---

    def kept(self, accepted: Mapping[int, int]) -> dict[int, Kept | None]:
        if self._shards is None:
            return {w: as_tensors(kept) for w, kept in self._asked("kept", {w: (k,) for w, k in accepted.items()}).items()}
        kept: dict[int, Kept | None] = {}  # it stays where it is
        for worker, few in self._asked("keeps", {w: (k,) for w, k in accepted.items()}).items():
            place = AtWorker(self._actors[worker], accepted[worker])
            kept[worker] = None if few is None else elsewhere(as_tensors(few[0]), place, few[1])
        return kept

    def write_kept(self, accepted: Mapping[int, int], folder: Path, moment: int) -> dict[int, str]:
        """Have workers write what they keep for a checkpoint; returns the names of the files, of those that could."""
        seconds = self._fleet.faults.deadline
        names = self._asked("write_kept", {w: (k, folder, moment) for w, k in accepted.items()}, seconds)
        return {worker: name for worker, name in names.items() if name is not None}

    def _asked(self, name: str, args: Mapping[int, Sequence[Any]], seconds: float = _ANSWER) -> dict[int, Any]:
        """What workers answer to a question that they need not interrupt a job for; without those that do not."""
        calls = {
            getattr(self._actors[worker], name).options(concurrency_group="ask").remote(*given): worker
            for worker, given in args.items()
            if worker in self._actors and not self._broken
        }
        done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=seconds) if calls else ([], [])
        answers: dict[int, Any] = {}
        for call in done:
            with suppress(self._ray.exceptions.RayError):
                answers[calls[call]] = self._ray.get(call)
        return answers

    def receive(self, timeout: float) -> list[Notice]:
        until = time.monotonic() + timeout
        while not self._inbox:
            now = time.monotonic()
            if now - self._checked > _CHECK:
                self._checked = now
                self._require_essential()
            pause = max(0.0, until - now)
            if self._lines:
                self._hear(pause)
            elif self._calls:
                count = 1 if timeout else len(self._calls)
                for call in self._ray.wait(list(self._calls), num_returns=count, timeout=pause)[0]:
                    self._read(call, self._calls)
            else:
                time.sleep(min(pause, 0.05))
            if now - self._checked_lives > _CHECK_LIVES and self._lives:
                self._checked_lives = now
                for call in self._ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)[0]:
                    self._read(call, self._lives)
                if self._shards is not None:
                    self._shards.check()
            if now >= until:
                break
        inbox, self._inbox = self._inbox, []
        return inbox

    def _read(self, call: Any, calls: dict[Any, tuple[int, ...]]) -> None:
        """Take the notice of a call that has ended, or that of a death; a request that was overtaken has none."""
        (worker, incarnation, *rank), errors = calls.pop(call), self._ray.exceptions
        line, failed = self._attending.pop(call, None), ""
        try:
            notice: Notice | None = self._ray.get(call)
        except errors.RayError as error:  # a message that is lost is sent again, and a machine that is gone is noticed
            died = isinstance(error, errors.RayActorError) and not isinstance(error, errors.ActorUnavailableError)
            notice = self._died(worker, incarnation, error, *rank) if died or calls is self._lives else None
            failed = cause_of(str(error))
        if line is not None and line is self._lines.get(worker):
            if not failed:
                self._have_attend(worker)
            else:
                self._hang_up(worker)
            if failed and notice is None:
                log.warning("worker %d is asked by calls of Ray's from now on, for its line failed: %s", worker, failed)
        if isinstance(notice, Ready):
            address = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}.get(notice.node, "")
            self._pids[f"{address} {notice.pid}"] = (worker, incarnation)
            current = worker in self._actors and incarnation == self._incarnations[worker]
            if current and notice.probe is not None and (reader := Reader()).reaches(notice.probe):
                self._near[worker] = reader
            if current and notice.door and (self._shards is not None or worker in self._near):
                self._reach(notice)
        self._take(notice)

    def _take(self, notice: Notice | None) -> None:
        """Hand a notice on."""
        if isinstance(notice, Reply):
            notice = self._with_message(notice)
        elif isinstance(notice, Evaluated):
            self._evaluating.pop(notice.worker, None)
        if notice is not None:
            self._inbox.append(notice)

    def _with_message(self, reply: Reply) -> Reply | None:
        """A reply whose message is here, if it was in the worker's memory; None if it is not there any more."""
        reader = self._near.get(reply.request.worker)

        def found(part: Any) -> Any:
            if not isinstance(part, Name):
                return part
            view = None if reader is None else reader.view(part)
            if view is None:
                raise NotThere
            return view

        try:
            return reply._replace(value=each_part(reply.value, found))
        except NotThere:  # nobody waits for it: its worker has gone on, or is gone
            return None

    def _died(self, worker: int, incarnation: int, exception: Exception, rank: int = 0) -> Died:
        """How a process ended, with its number, the signal as far as that is known, and where its output is."""
        error, raised = str(exception), isinstance(exception, self._ray.exceptions.RayTaskError)
        text, final = (cause_of(error), False) if raised else _why_dead(error)
        named = re.search(r"\bpid: (\d+)", error)  # one that died before it was ready has not said its number itself
        known = () if rank else self._pids.items()  # only the first rank has said its number
        pid = next((key.rpartition(" ")[2] for key, whose in known if whose == (worker, incarnation)), "")
        pid = pid or (named[1] if named else "")
        by = f"rank {rank}: " if rank else ""  # what the other ranks have said is no word of this one
        said = [line for line in self._output.recent(worker, incarnation) if line.startswith(by)]
        printed = [*said, *self._printed(pid)]
        if text == "its process died":
            text = f"its process died {_last_words(printed)}"
        path = self._output.path(worker, incarnation)
        where = f"; its output is in {path}" if path is not None and (printed or path.exists()) else ""
        of = f"rank {rank} of {self._fleet.ranks}: " if self._fleet.ranks > 1 else ""
        return Died(worker, incarnation, f"{of}{text}{f' (pid {pid})' if pid else ''}{where}", final)

    def _printed(self, pid: str) -> list[str]:
        """The newest lines of a process on this machine: they reach us later than the news of its death."""
        logs = Path(self._ray._private.worker._global_node.get_logs_dir_path())
        lines: list[str] = []
        for path in logs.glob(f"worker-*-{pid}.err") if pid else ():
            with suppress(OSError):
                tail = path.read_bytes()[-20_000:].decode(errors="replace").splitlines()
                lines += [line for line in tail if not line.startswith(":")]  # those are Ray's
        return lines

    def close(self, ended: bool) -> None:
        """Stop all workers, and Ray if it was started here and no other run uses it."""
        for worker in [] if self._broken else list(self._actors):
            self.stop(worker)
        for worker in list(self._lines):
            self._hang_up(worker)
        self._selector.close()
        self._bell.close()
        self._ring.close()
        if self._shards is not None and not self._broken:
            self._shards.close()
        self._streams.remove_handler(f"dualdelay {id(self)}")
        self._output.close()
        leave(self._ray, self._ours)


def _why_dead(error: str) -> tuple[str, bool]:
    """Why an actor is dead, from Ray's explanation, and whether the next would die of the same."""
    if why := why_not_started(error):
        return f"it could not start: {why}", True
    if "low on memory" in error or "memory monitor" in error:
        return "its process was killed because its machine ran out of memory", False
    signal = re.search(r"SIG[A-Z]+", error.partition("Some common causes")[0])
    return (f"its process was ended by {signal[0]}" if signal else "its process died"), False


def _last_words(lines: Sequence[str]) -> str:
    """The signal that a process says it got, in what it printed last; without one it was killed before it could say."""
    for pattern in (r"\*\*\* (SIG[A-Z]+) received", r"Fatal Python error: (.*)"):
        matches = [match for match in (re.search(pattern, line) for line in lines) if match]
        if matches:
            return f"by {matches[-1][1]}"
    return "without a word, as by SIGKILL (kill -9, or the kernel when memory runs out) or by os._exit"

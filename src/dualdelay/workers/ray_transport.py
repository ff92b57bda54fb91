"""Messages between the server and its workers, over Ray; the one file that knows Ray."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Problem
from ..core.environment import environment
from ..core.errors import BadInput, RunFailed
from ..engine.fleet import Message
from .desk import Piece
from .messages import Died, Measured, Notice, Ready, Reply, Request, last_words, why_dead
from .output import Output
from .ray_fleet import RayFleet
from .security import is_loopback, own_token, require_answer, require_here, require_same_ray, require_secure
from .worker import Worker

_SAID_HERE = "A worker died or was killed|has been marked dead|Raylet is terminated"  # Ray need not say it again
_INLINE = 90_000  # bytes of a model up to which it travels in the request, as Ray lets 100 kB do: three times as quick
_OURS = "dualdelay worker "  # begins the names of our actors
_CHECK = 0.1  # seconds between two looks at whether Ray itself is alive
_ANSWER = 2.0  # seconds in which a worker says what it keeps; that needs no computation, and everybody waits


class _Actor(Worker):
    """A worker as a Ray actor."""

    def __init__(self, incarnation: int, worker: int, *rest: Any) -> None:
        super().__init__(worker, *rest)
        self._name = f"{_OURS}{worker}-{incarnation}"
        with suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGTERM, _end)  # Ray would wait for the call that never returns

    def __repr__(self) -> str:  # Ray writes this before what the process prints
        return self._name

    def where(self, count: bool) -> tuple[str, int, dict[str, str], Any]:
        """Its node, its process, what its bits depend on, and if that is asked its number of samples."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, os.getpid(), environment(), self.samples() if count else None

    def stay(self) -> None:
        """Never return: the call fails when the process dies, at work or not."""
        while True:
            time.sleep(3600)


def _end(*_: object) -> None:
    """End a worker's process that is told to."""
    print("*** SIGTERM received", file=sys.stderr, flush=True)
    os._exit(143)


def _runs(pid: int) -> bool:
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


class _Rays:
    """How many runs of this process use the Ray that one of them has started; the last one stops it."""

    lock, users = threading.Lock(), 0


class Post:
    """Actors, the calls to them that are under way, and what has come back."""

    def __init__(self, fleet: RayFleet, problem: Problem, message: Message, output: Path | None = None) -> None:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SAID_HERE)
        try:
            import ray
        except ImportError:
            raise BadInput("real workers need Ray, which is not installed: pip install 'dualdelay[ray]'.") from None
        self._ray, self._fleet, self._problem = ray, fleet, problem
        self._output, self._pids = Output(output), dict[str, tuple[int, int]]()
        with _Rays.lock:
            self._ours = _Rays.users > 0 or not ray.is_initialized()
            if _Rays.users == 0:
                self._connect(problem.workers)
            _Rays.users += self._ours
        self._servants = self._find_servants()
        self._listen()
        with warnings.catch_warnings():  # torch says once that what Ray hands out is read-only: nobody writes to it
            warnings.simplefilter("ignore")
            torch.from_numpy(np.frombuffer(b"read-only", dtype=np.uint8))
        self._actors: dict[int, Any] = {}
        self._broken = False  # then Ray is not to be called any more
        try:
            self._kit = (ray.put(problem), ray.put(message))
        except Exception as error:  # whatever pickling a user's objects raises
            self.close()
            raise BadInput(
                f"the problem cannot be sent to its workers: {error} Keep out of it what lives in one process."
            ) from error
        self._make = ray.remote(concurrency_groups={"ask": 1, "stay": 1})(_Actor)
        self._calls: dict[Any, tuple[int, int, Callable[[Any], Notice]]] = {}  # worker, incarnation, what to make of it
        self._lives: dict[Any, tuple[int, int]] = {}  # the calls that never return
        self._looked = self._checked = 0.0  # when those were looked at, and whether Ray is whole
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []  # messages that come late, by time
        self._count = itertools.count()
        self._inbox: list[Notice] = []

    def _connect(self, workers: int) -> None:
        ray, fleet = self._ray, self._fleet
        options: dict[str, Any] = {"log_to_driver": True, "configure_logging": False}  # what workers print comes here
        address = fleet.address or fleet.host
        if address != "auto":
            require_secure(address, fleet.insecure)
        if not self._ours:
            require_same_ray(fleet.address, ray.get_runtime_context().gcs_address, fleet.insecure)
            return
        if fleet.address is not None:
            require_answer(fleet.address)
        with staying_here(is_loopback(address)):
            try:
                if fleet.address is None:
                    cpus = max(os.cpu_count() or 1, math.ceil(workers * fleet.cpus))  # as many as the workers claim
                    own_token()
                    ray.init("local", _node_ip_address=fleet.host, include_dashboard=False, num_cpus=cpus, **options)
                else:
                    ray.init(fleet.address, **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise BadInput(f"Ray at {address} could not be started or joined: {error}") from None
        try:
            require_here(address, ray.get_runtime_context().gcs_address)
            for node in ray.nodes():
                require_secure(node["NodeManagerAddress"], fleet.insecure)
        except BadInput:
            ray.shutdown()
            raise

    def _find_servants(self) -> dict[str, int]:
        """The processes on this machine that Ray cannot do without here, by name: if one dies, Ray ends this process."""
        node = self._ray._private.worker._global_node
        socket, session = f"--raylet_socket_name={node.raylet_socket_name}", f"--session-name={node.session_name}"
        marks = {"raylet": socket, "gcs_server": session}
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended meanwhile
                continue
            for name, mark in marks.items():
                if Path(words[0]).name == name and mark in words:
                    found[name] = int(path.parent.name)
        return found

    def _require_servants(self) -> None:
        """Say so if Ray is broken, before Ray ends this process without a word."""
        gone = [f"{name} (pid {pid})" for name, pid in self._servants.items() if not _runs(pid)]
        if gone:
            self._broken = True
            raise RunFailed(
                f"Ray on this machine has broken down: its {' and '.join(gone)} has died, and with it all workers."
            )

    def _listen(self) -> None:
        """Have what workers print kept instead of shown; a Ray that the user has started may not send it."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams

        self._streams: Any = streams
        if self._ours:
            streams.remove_handler("ray_print_logs")
        streams.add_handler(f"dualdelay {id(self)}", self._heard)

    def _heard(self, data: Mapping[str, Any]) -> None:
        """Some process has printed something."""
        name = str(data.get("actor_name") or "")
        whose = self._pids.get(f"{data.get('ip')} {data.get('pid')}")
        if name.startswith(_OURS):
            worker, _, incarnation = name.removeprefix(_OURS).partition("-")
            whose = (int(worker), int(incarnation))
        if whose is not None:
            self._output.add(*whose, [str(line) for line in data["lines"]])

    def hire(self, worker: int, incarnation: int) -> None:
        """Start a worker's process; what was left of an earlier one is killed."""
        self.dismiss(worker)
        fleet = self._fleet
        options: dict[str, Any] = {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus, "max_restarts": 0, "max_task_retries": 0}
        if worker < len(fleet.resources):
            options["resources"] = dict(fleet.resources[worker])
        actor: Any = self._make.options(**options).remote(incarnation, worker, *self._kit, fleet.threads)
        self._actors[worker] = actor
        self._lives[actor.stay.options(concurrency_group="stay").remote()] = (worker, incarnation)
        count = self._problem.needs_sample_counts  # its data are then built in the thread that will use them
        ask = actor.where if count else actor.where.options(concurrency_group="ask")
        self._expect(ask.remote(count), worker, incarnation, lambda place: Ready(worker, incarnation, *place))

    def lacking(self, worker: int) -> str:
        """What keeps a worker's process from starting, as far as it can be told, as the rest of a sentence."""
        claims = self._fleet.claims(worker)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for name, amount in claims.items():
            most = max((node.get(name, 0.0) for node in nodes), default=0.0)
            if most < amount:
                return f": it claims {amount:g} {name}, and no machine of the cluster has that (the most is {most:g})"
        if not any(all(node.get(name, 0.0) >= amount for name, amount in claims.items()) for node in nodes):
            return f": it claims {claims}, and no single machine of the cluster has all of that"
        free = self._ray.available_resources()
        taken = [name for name, amount in claims.items() if free.get(name, 0.0) < amount]
        return f": all {' and '.join(taken)} of the cluster are taken" if taken else ""

    def dismiss(self, worker: int) -> None:
        """Kill a worker's process, if there is one."""
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._lives = {call: whose for call, whose in self._lives.items() if whose[0] != worker}
            self._ray.kill(actor)

    def put(self, x: Tensor) -> Any:
        """Copy a model to where every worker can read it: the object store, or if it is small into each request."""
        array = x.detach().cpu().numpy()
        return array.copy() if array.nbytes <= _INLINE else self._ray.put(array)

    def get(self, model: Any) -> Tensor:
        """A model that was put."""
        if self._broken and not isinstance(model, np.ndarray):
            raise RunFailed("models that were with Ray are lost with it.")
        return torch.from_numpy(model if isinstance(model, np.ndarray) else self._ray.get(model))

    def ask(self, request: Request, model: Any, held: Tensor | None) -> None:
        """Send a request; a Reply or Died will come, unless the message is lost."""

        def send() -> None:
            if request.worker in self._actors:
                spare = None if held is None else held.numpy()
                call = self._actors[request.worker].compute.remote(request, model, spare)
                self._expect(call, request.worker, request.incarnation, lambda reply: reply)

        self._deliver(request, send)

    def measure(self, worker: int, incarnation: int, piece: Piece, unit: float) -> None:
        """Ask for a piece of a worker's part of an evaluation; a Measured or Died will come."""

        def read(part: dict[str, Any] | str) -> Measured:
            if isinstance(part, dict):
                part = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in part.items()}
            return Measured(worker, incarnation, piece.evaluation, part)

        call = self._actors[worker].measure.remote(piece.model.x, piece.samples, unit)
        self._expect(call, worker, incarnation, read)

    def held(self, accepted: Mapping[int, int]) -> dict[int, Tensor | None]:
        """What these workers keep, given the last reply taken from each; those that do not answer are missing."""
        calls = {
            self._actors[worker].held.options(concurrency_group="ask").remote(sequence): worker
            for worker, sequence in accepted.items()
            if worker in self._actors and not self._broken
        }
        done, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER) if calls else ([], [])
        held: dict[int, Tensor | None] = {}
        for call in done:
            try:
                array = self._ray.get(call)
            except self._ray.exceptions.RayError:
                continue
            held[calls[call]] = None if array is None else torch.from_numpy(array)
        return held

    def _expect(self, call: Any, worker: int, incarnation: int, make: Callable[[Any], Notice]) -> None:
        self._calls[call] = (worker, incarnation, make)

    def _deliver(self, message: Any, action: Callable[[], None]) -> None:
        """Let a message through, or do to it what the test wants."""
        if self._fleet.faults is None:
            action()
            return
        for delay, _ in self._fleet.faults(message):
            heapq.heappush(self._under_way, (time.monotonic() + delay, next(self._count), action))

    def receive(self, timeout: float) -> list[Notice]:
        """What has come in, after waiting for it so many seconds at most; if for none, all of it."""
        until = time.monotonic() + timeout
        while not self._inbox:
            now = time.monotonic()
            if now - self._checked > _CHECK:
                self._checked = now
                self._require_servants()
            while self._under_way and self._under_way[0][0] <= now:
                heapq.heappop(self._under_way)[2]()
            if self._inbox:
                break
            pause = max(0.0, min([until, *(due for due, _, _ in self._under_way[:1])]) - now)
            if self._calls:
                count = 1 if timeout else len(self._calls)
                for call in self._ray.wait(list(self._calls), num_returns=count, timeout=pause)[0]:
                    self._read(call)
            else:
                time.sleep(min(pause, 0.05))
            if now - self._looked > 0.5 and self._lives:
                self._looked = now
                for call in self._ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)[0]:
                    self._bury(call)
            if now >= until:
                break
        inbox, self._inbox = self._inbox, []
        return inbox

    def _read(self, call: Any) -> None:
        """Make a notice of a call that has ended."""
        worker, incarnation, make = self._calls.pop(call)
        errors = self._ray.exceptions
        try:
            notice = make(self._ray.get(call))
        except errors.ActorUnavailableError:
            return  # a message may be lost: the request is sent again
        except errors.RayActorError as error:
            self._inbox.append(self._died(worker, incarnation, str(error)))
            return
        except errors.RayError:
            return  # the reply was on a machine that is gone, and so is its worker
        if isinstance(notice, Ready):
            address = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}.get(notice.node, "")
            self._pids[f"{address} {notice.pid}"] = (worker, incarnation)
        if isinstance(notice, Reply):
            self._deliver(notice, lambda: self._inbox.append(notice))
        elif notice is not None:
            self._inbox.append(notice)

    def _bury(self, call: Any) -> None:
        """A worker's process has ended."""
        worker, incarnation = self._lives.pop(call)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._inbox.append(self._died(worker, incarnation, str(error)))

    def _died(self, worker: int, incarnation: int, error: str) -> Died:
        """How a process ended, with its number, the signal as far as that is known, and where its output is."""
        text, final = why_dead(error)
        told = re.search(r"\bpid: (\d+)", error)  # one that died before it was ready has not said its number itself
        pid = next((key.rpartition(" ")[2] for key, whose in self._pids.items() if whose == (worker, incarnation)), "")
        pid = pid or (told[1] if told else "")
        printed = [*self._output.recent(worker, incarnation), *self._printed(pid)]
        if text == "its process died":
            text = f"its process died {last_words(printed)}"
        path = self._output.path(worker, incarnation)
        where = f"; its output is in {path}" if path is not None and (printed or path.exists()) else ""
        return Died(worker, incarnation, f"{text}{f' (pid {pid})' if pid else ''}{where}", final)

    def _printed(self, pid: str) -> list[str]:
        """The newest lines of a process on this machine: they reach us later than the news of its death."""
        logs = Path(self._ray._private.worker._global_node.get_logs_dir_path())
        lines: list[str] = []
        for path in logs.glob(f"worker-*-{pid}.err") if pid else ():
            with suppress(OSError):
                said = path.read_bytes()[-20_000:].decode(errors="replace").splitlines()
                lines += [line for line in said if not line.startswith(":")]  # those are Ray's
        return lines

    def close(self) -> None:
        """Let everybody go, and stop Ray if it was started here and nobody else uses it."""
        for worker in [] if self._broken else list(self._actors):
            self.dismiss(worker)
        self._streams.remove_handler(f"dualdelay {id(self)}")
        self._output.close()
        if self._ours:
            with _Rays.lock:
                _Rays.users -= 1
                if _Rays.users == 0:
                    self._ray.shutdown()

"""Messages between the server and its workers, over Ray; the one file that knows Ray."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .core import Problem
from .errors import BadInput
from .fleet import Message
from .messages import Died, Measured, Notice, Ready, Reply, Request, why_dead
from .ray_fleet import RayFleet
from .security import is_loopback, own_token, require_answer, require_here, require_same_ray, require_secure
from .worker import Worker

_SAID_HERE = "A worker died or was killed|has been marked dead|Raylet is terminated"  # Ray need not say it again
_INLINE = 90_000  # bytes of a model up to which it travels in the request, as Ray lets 100 kB do: three times as quick
_ANSWER = 10.0  # seconds in which a worker says what it keeps; that needs no computation


class _Actor(Worker):
    """A worker as a Ray actor."""

    def where(self) -> tuple[str, int]:
        """Its node and its process."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def stay(self) -> None:
        """Never return: the call fails when the process dies, at work or not."""
        while True:
            time.sleep(3600)


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


class Post:
    """Actors, the calls to them that are under way, and what has come back."""

    def __init__(self, fleet: RayFleet, problem: Problem, message: Message) -> None:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SAID_HERE)
        try:
            import ray
        except ImportError:
            raise BadInput("real workers need Ray, which is not installed: pip install 'dualdelay[ray]'.") from None
        self._ray, self._fleet = ray, fleet
        self._ours = not ray.is_initialized()
        self._connect(problem.workers)
        with warnings.catch_warnings():  # torch says once that what Ray hands out is read-only: nobody writes to it
            warnings.simplefilter("ignore")
            torch.from_numpy(np.frombuffer(b"read-only", dtype=np.uint8))
        self._actors: dict[int, Any] = {}
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
        self._looked = 0.0  # when those were looked at
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []  # messages that come late, by time
        self._count = itertools.count()
        self._inbox: list[Notice] = []

    def _connect(self, workers: int) -> None:
        ray, fleet = self._ray, self._fleet
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
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

    def hire(self, worker: int, incarnation: int) -> None:
        """Start a worker's process; what was left of an earlier one is killed."""
        self.dismiss(worker)
        fleet = self._fleet
        options: dict[str, Any] = {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus, "max_restarts": 0, "max_task_retries": 0}
        if fleet.resources:
            options["resources"] = dict(fleet.resources[worker])
        actor: Any = self._make.options(**options).remote(worker, *self._kit, fleet.threads)
        self._actors[worker] = actor
        self._lives[actor.stay.options(concurrency_group="stay").remote()] = (worker, incarnation)
        where = actor.where.options(concurrency_group="ask").remote()
        self._expect(where, worker, incarnation, lambda place: Ready(worker, incarnation, *place))

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
        return torch.from_numpy(model if isinstance(model, np.ndarray) else self._ray.get(model))

    def ask(self, request: Request, model: Any, held: Tensor | None) -> None:
        """Send a request; a Reply or Died will come, unless the message is lost."""

        def send() -> None:
            if request.worker in self._actors:
                spare = None if held is None else held.numpy()
                call = self._actors[request.worker].compute.remote(request, model, spare)
                self._expect(call, request.worker, request.incarnation, lambda reply: reply)

        self._deliver(request, send)

    def measure(self, worker: int, incarnation: int, evaluation: int, model: Any) -> None:
        """Ask for a worker's part of an evaluation; a Measured or Died will come."""

        def read(part: dict[str, Any] | str) -> Measured:
            if isinstance(part, dict):
                part = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in part.items()}
            return Measured(worker, incarnation, evaluation, part)

        self._expect(self._actors[worker].measure.remote(model), worker, incarnation, read)

    def held(self, accepted: Mapping[int, int]) -> dict[int, Tensor | None]:
        """What these workers keep, given the last reply taken from each; those that do not answer are missing."""
        calls = {
            self._actors[worker].held.options(concurrency_group="ask").remote(sequence): worker
            for worker, sequence in accepted.items()
            if worker in self._actors
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
        """What has come in, after waiting for it so many seconds at most."""
        until = time.monotonic() + timeout
        while not self._inbox:
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                heapq.heappop(self._under_way)[2]()
            if self._inbox:
                break
            pause = max(0.0, min([until, *(due for due, _, _ in self._under_way[:1])]) - now)
            if self._calls:
                for call in self._ray.wait(list(self._calls), num_returns=1, timeout=pause)[0]:
                    self._read(call)
            else:
                time.sleep(min(pause, 0.05))
            if now - self._looked > 0.5 and self._lives:
                self._looked = now
                for call in self._ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)[0]:
                    self._inbox.append(Died(*self._lives.pop(call), "its process died"))
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
            self._inbox.append(Died(worker, incarnation, *why_dead(str(error))))
            return
        except errors.RayError:
            return  # the reply was on a machine that is gone, and so is its worker
        if isinstance(notice, Reply):
            self._deliver(notice, lambda: self._inbox.append(notice))
        elif notice is not None:
            self._inbox.append(notice)

    def close(self) -> None:
        """Let everybody go, and stop Ray if it was started here."""
        for worker in list(self._actors):
            self.dismiss(worker)
        if self._ours:
            self._ray.shutdown()

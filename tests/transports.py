"""Transports for tests: workers of this process on virtual time, and messages that are lost, repeated or late."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dualdelay.core import Problem
from dualdelay.core.environment import environment
from dualdelay.engine.half import Half, Kept
from dualdelay.workers.messages import (
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
)
from dualdelay.workers.ray_fleet import RayFleet
from dualdelay.workers.settings import WorkerFleet
from dualdelay.workers.transport import Transport
from dualdelay.workers.worker import Worker


@dataclass
class VirtualTime:
    """A clock that a test moves; seconds pass on it only while the coordinator waits."""

    now: float = 0.0


@dataclass(frozen=True, kw_only=True)
class VirtualFleet(WorkerFleet):
    """Real workers in this process, whose seconds pass at once."""

    start_seconds: Callable[[int, int], float] = lambda worker, incarnation: 0.05
    """How long a worker's process takes to start, by worker and incarnation; below zero: so long until it dies."""
    job_seconds: Callable[[JobRequest], float] = lambda request: 0.02
    """How long a job takes, its steps equal parts of that; one that is held goes on until it is polled."""
    evaluation_seconds: Callable[[EvaluationRequest], float] = lambda request: 0.01
    """How long an evaluation takes."""
    together: float = 0.0
    """Seconds after the first notice within which others come with it."""
    time: VirtualTime = field(default_factory=VirtualTime, repr=False, compare=False)

    def connect(self, problem: Problem, half: Half, output: Path | None = None, about: Any = None) -> VirtualTransport:
        return VirtualTransport(self, problem, half)


@dataclass
class Running:
    """A job of several steps at a virtual process."""

    request: JobRequest
    start: float
    seconds: float  # of all its steps
    compute: Callable[[], Notice | None]
    over: bool = False

    def steps_by(self, moment: float) -> int:
        """How many steps there was time for by then."""
        share = (moment - self.start) / self.seconds if self.seconds else math.inf
        return max(0, min(self.request.steps, int(share * self.request.steps)))


class VirtualProcess(Worker):
    """A worker that can be killed."""

    alive, free, incarnation = True, 0.0, 0  # free: when it has done what it was asked for

    def __init__(self, *worker: Any) -> None:
        super().__init__(*worker)
        self.begun = -1  # the last request that it has got
        self.running: Running | None = None  # a job that a poll would end
        self.behind: list[Callable[[], None]] = []  # what it was asked for while it holds one
        self.time_for: dict[int, int] = {}  # by request: the steps that there is time for until it is polled

    @property
    def holds(self) -> bool:
        """Whether it hears nothing but polls."""
        return self.running is not None and self.running.request.hold and not self.running.over

    def _is_over(self, request: JobRequest, step: int) -> bool:
        by_time = self.time_for.get(request.sequence)
        return super()._is_over(request, step) if by_time is None else step >= by_time


class VirtualTransport(Transport):
    """Processes of this process, and what they will say when."""

    def __init__(self, fleet: VirtualFleet, problem: Problem, half: Half) -> None:
        self.time, self.processes = fleet.time, dict[int, VirtualProcess]()
        self._fleet, self._problem, self._half = fleet, problem, half
        self._due: list[tuple[float, int, Callable[[], Notice | None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self.time.now

    def at(self, moment: float, happens: Callable[[], Notice | None]) -> None:
        """Something happens at that time, and a notice may come of it."""
        heapq.heappush(self._due, (moment, next(self._count), happens))

    def _call(self, process: VirtualProcess, seconds: float, answer: Callable[[], Notice | None]) -> None:
        process.free = max(self.time.now, process.free) + seconds
        self.at(process.free, lambda: answer() if process.alive else None)

    def start(self, worker: int, incarnation: int) -> None:
        self.stop(worker)
        process = self.processes[worker] = VirtualProcess(worker, self._problem, self._half, 1)
        process.incarnation, seconds = incarnation, self._fleet.start_seconds(worker, incarnation)
        samples = process.samples() if self._problem.needs_sample_counts else None
        ready = partial(Ready, worker, incarnation, "here", 1, environment(), samples)
        self._call(process, abs(seconds), ready if seconds >= 0 else partial(self.die, worker))

    def stop(self, worker: int) -> None:
        if worker in self.processes:
            self.processes.pop(worker).alive = False

    def die(self, worker: int) -> Died:
        """A worker's process dies now; what the server hears of it."""
        self.processes[worker].alive = False
        return Died(worker, self.processes[worker].incarnation, "its process died")

    def kill(self, worker: int, known: float = 0.0) -> None:
        """A worker's process dies now, and the server hears of it so many seconds later."""
        if worker in self.processes and self.processes[worker].alive:
            notice = self.die(worker)
            self.at(self.time.now + known, lambda: notice)

    def put(self, x: Any) -> Any:
        return copy.deepcopy(as_arrays(x))

    def get(self, model: Any) -> Any:
        return as_tensors(model)

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        process = self.processes.get(request.worker)
        if process is None:
            return
        if isinstance(request, PollRequest):
            self._poll(process, request)
        elif process.holds and not (isinstance(request, EvaluationRequest) and request.aside):
            process.behind.append(lambda: VirtualTransport.send(self, request, model, held))
        elif isinstance(request, JobRequest):
            self._send_job(process, request, model, copy.deepcopy(as_arrays(held)))
        else:
            self._send_evaluation(process, request, model)

    def _send_job(self, process: VirtualProcess, request: JobRequest, model: Any, held: Any) -> None:
        taken = self._fleet.job_seconds(request)

        def computed() -> Reply | None:
            reply = process.compute(request, model, held)
            return None if reply is None else reply._replace(seconds=taken)

        known, process.begun = request.sequence <= process.begun, max(request.sequence, process.begun)
        over = request.polled or process._polled >= request.sequence
        if known or over or not (request.hold or request.steps > 1):
            self._call(process, 0.0 if known or over else taken, computed)
            return
        start = max(self.time.now, process.free)
        running = process.running = Running(request, start, taken, computed)
        if not request.hold:
            process.free = start + taken
            self.at(process.free, lambda: self._end(process, running))

    def _poll(self, process: VirtualProcess, request: PollRequest) -> None:
        """A poll reaches a process, which may be in the middle of a job."""
        process.poll(request)
        running = process.running
        if running is None or running.over or request.sequence < running.request.sequence:
            return
        process.time_for[running.request.sequence] = running.steps_by(self.time.now)
        process.free = max(self.time.now, running.start, process.free if running.request.hold else 0.0)
        self.at(process.free, lambda: self._end(process, running))

    def _end(self, process: VirtualProcess, running: Running) -> Notice | None:
        """A job ends, by itself or polled, and what has waited for that begins."""
        if running.over or not process.alive:
            return None
        running.over = True
        notice, behind = running.compute(), process.behind
        process.behind = []
        for call in behind:
            call()
        return notice

    def _send_evaluation(self, process: VirtualProcess, request: EvaluationRequest, model: Any) -> None:
        seconds = self._fleet.evaluation_seconds(request)

        def evaluated() -> Evaluated:
            notice = process.evaluate(request, model)
            if isinstance(notice.part, dict):
                notice.part["seconds"] = seconds
            return notice

        self._call(process, seconds, evaluated)

    def receive(self, timeout: float) -> list[Notice]:
        until, notices = self.time.now + timeout, list[Notice]()
        self.time.now += 1e-5
        while self._due and self._due[0][0] <= until:
            moment, _, happens = heapq.heappop(self._due)
            self.time.now = max(self.time.now, moment)
            notice = happens()
            if notice is not None:
                until = until if notices else self.time.now + self._fleet.together
                notices.append(notice)
        if not notices:
            self.time.now = max(self.time.now, until)
        return notices

    def kept(self, accepted: Mapping[int, int]) -> dict[int, Kept | None]:
        alive = [worker for worker in accepted if worker in self.processes and self.processes[worker].alive]
        kept = {worker: self.processes[worker].kept(accepted[worker]) for worker in alive}
        return {worker: as_tensors(copy.deepcopy(held)) for worker, held in kept.items()}

    def name_of(self, worker: int) -> str:
        return ""

    def why_not_started(self, worker: int) -> str:
        return ""

    def close(self, ended: bool) -> None:
        for worker in list(self.processes):
            self.stop(worker)


Weather = Callable[[JobRequest | PollRequest | Reply], Sequence[float]]
"""The delays, in seconds, with which a message arrives: one of zero usually; none: it is lost; two: it comes twice."""


class LossyTransport:
    """Another transport whose messages about jobs are lost, repeated or late."""

    def __init__(self, inner: Transport, weather: Weather) -> None:
        self._inner, self._weather = inner, weather
        self.now, self.start, self.stop, self.put, self.get = inner.now, inner.start, inner.stop, inner.put, inner.get
        self.kept, self.why_not_started, self.close = inner.kept, inner.why_not_started, inner.close
        self.name_of = inner.name_of
        self._late: list[tuple[float, int, JobRequest | PollRequest | Reply, tuple[Any, ...]]] = []
        self._count = itertools.count()

    def _deliver(self, message: JobRequest | PollRequest | Reply, *rest: Any) -> None:
        for delay in self._weather(message):
            heapq.heappush(self._late, (self.now() + delay, next(self._count), message, rest))

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        if isinstance(request, EvaluationRequest):
            self._inner.send(request, model)
        else:
            self._deliver(request, model, held)

    def receive(self, timeout: float) -> list[Notice]:
        until, notices = self.now() + timeout, list[Notice]()
        while True:
            while self._late and self._late[0][0] <= self.now():
                _, _, message, rest = heapq.heappop(self._late)
                if isinstance(message, Reply):
                    notices.append(message)
                else:
                    self._inner.send(message, *rest)
            if notices or self.now() > until:
                return notices
            pause = min([until, *(late[0] for late in self._late[:1])]) - self.now()
            for notice in self._inner.receive(max(0.0, pause)):
                if isinstance(notice, Reply):
                    self._deliver(notice)
                else:
                    notices.append(notice)


@dataclass(frozen=True)
class LossyRayFleet(RayFleet):
    """Ray workers whose messages about jobs are lost, repeated or late."""

    weather: Weather = field(kw_only=True, repr=False)

    def connect(self, problem: Problem, half: Half, output: Path | None, about: Mapping[str, Any]) -> Transport:
        return LossyTransport(super().connect(problem, half, output, about), self.weather)

"""Real workers on virtual time: coordinator, workers and protocol are the real ones, the transport is one of this process,
whose seconds pass only while the coordinator waits. Here are a fleet whose workers die and whose messages are lost, for
``dd.train``, and a run one event at a time with its checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core import Memory, Orders
from dualdelay.core.compression import Compress, Packed
from dualdelay.engine.evaluation import Schedule
from dualdelay.engine.events import EventKind
from dualdelay.engine.half import Half, Kept
from dualdelay.engine.loop import Loop
from dualdelay.simulation.clocks import RecordedClock
from dualdelay.simulation.local_fleet import LocalFleet
from dualdelay.storage.files import decode, encode
from dualdelay.workers.coordinator import Coordinator
from dualdelay.workers.messages import JobRequest, PollRequest, Reply, Request
from dualdelay.workers.records import MemoryPlace
from dualdelay.workers.transport import Transport
from helpers import rounding
from transports import LossyTransport, VirtualFleet, VirtualTransport, Weather

TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
DUDE = partial(dd.DuDe, lr=0.05, memory="workers")


class MortalTransport(VirtualTransport):
    """Processes that die when they have computed certain jobs, before they send the reply."""

    def send(self, request: Request, model: Any = None, held: Kept | None = None) -> None:
        fleet, process = self._fleet, self.processes.get(request.worker)
        assert isinstance(fleet, MortalFleet)
        if process is not None and isinstance(request, JobRequest) and fleet.dies(request):
            self._call(process, fleet.job_seconds(request), partial(self.die, request.worker))
        else:
            super().send(request, model, held)


@dataclass(frozen=True, kw_only=True)
class MortalFleet(VirtualFleet):
    """Workers on virtual time whose processes die at certain jobs, and whose messages are lost, repeated or late."""

    dies: Callable[[JobRequest], bool] = lambda request: False
    weather: Weather | None = None
    transports: list[MortalTransport] = field(default_factory=list, repr=False, compare=False)
    """Those of the runs so far."""

    def connect(self, problem: dd.Problem, half: Any, output: Path | None = None, about: Any = None) -> Transport:
        self.transports.append(MortalTransport(self, problem, half))
        return self.transports[-1] if self.weather is None else LossyTransport(self.transports[-1], self.weather)


def fleet_of(**settings: Any) -> MortalFleet:
    """Workers on virtual time; the settings of a ``FaultPolicy`` stand beside those of the fleet."""
    faults = {field.name: settings.pop(field.name) for field in fields(dd.FaultPolicy) if field.name in settings}
    return MortalFleet(faults=dd.FaultPolicy(**faults), **settings)


def nbytes(value: Any) -> int:
    """The bytes of the numbers in what is sent."""
    if isinstance(value, (np.ndarray, Tensor)):
        return value.nbytes
    if isinstance(value, Packed):
        return sum(map(nbytes, value.parts))
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list):
        return sum(map(nbytes, value))
    return 0 if value is None else 8


class RandomWeather:
    """Loses, repeats and delays messages in both directions, by a seed; these are shares of them, and seconds."""

    def __init__(
        self, seed: int, lost: float = 0.0, repeated: float = 0.0, late: float = 0.0, longest: float = 0.3
    ) -> None:
        self._random, self._longest = np.random.default_rng(seed), longest
        self._shares = np.cumsum([lost, repeated, late])
        self.counts = dict.fromkeys(("lost", "repeated", "late", "requests", "replies"), 0)

    def __call__(self, message: JobRequest | PollRequest | Reply) -> list[float]:
        self.counts["replies" if isinstance(message, Reply) else "requests"] += 1
        fate = int(np.searchsorted(self._shares, self._random.random(), side="right"))
        if fate < 3:
            self.counts[("lost", "repeated", "late")[fate]] += 1
        delay = float(self._random.uniform(0.0, self._longest))
        return ([], [0.0, delay], [delay], [0.0])[fate]


class VirtualRun:
    """A run, one event at a time; it begins, or continues from what another would save now."""

    def __init__(
        self,
        algorithm: dd.Algorithm[Any],
        problem: dd.Problem | None = None,
        fleet: VirtualFleet | None = None,
        schedule: Schedule | None = None,
        before: VirtualRun | None = None,
        uplink: Compress = None,
        downlink: Compress = None,
        **loop: Any,
    ) -> None:
        problem, fleet = problem or dd.Quadratic(TRIO, noise=0.3), fleet or VirtualFleet()
        if before is not None:
            fleet = replace(fleet, time=before.time)  # the clock goes on
        self.half, self.downlink, self.time = Half(algorithm, uplink), downlink, fleet.time
        self.control, self.transport = fleet.control, fleet.connect(problem, self.half)
        self.processes = fleet.transports[-1] if isinstance(fleet, MortalFleet) else self.transport
        self.sent: dict[tuple[int, int], int] = {} if before is None else before.sent  # bytes, by worker and draw
        self._count_bytes()
        self.workers = Coordinator(fleet, problem, self.half, self.transport, downlink)
        self.records = self.workers.records
        self.loop = Loop(algorithm, problem, self.workers, problem.start(0), schedule=schedule, **loop)
        if before is None:
            self.loop.begin()
        else:
            self.loop.load(decode(encode(before.loop.save())), before.loop.recorder.rows())

    def _count_bytes(self) -> None:
        """Add up what the transport is given for each job."""
        send = self.transport.send

        def counted(request: Request, model: Any = None, held: Any = None) -> None:
            if isinstance(request, JobRequest):
                key = (request.worker, request.draw)
                self.sent[key] = self.sent.get(key, 0) + nbytes(model) + nbytes(held)
            send(request, model, held)

        self.transport.send = counted

    def go(self, events: int) -> VirtualRun:
        """Let so many events happen."""
        for _ in range(events):
            if self.workers.peek() is None:
                raise dd.RunFailed("nothing is in flight and nothing is due")
            self.loop.advance()
        return self

    def evaluate_last(self) -> None:
        """Evaluate at the end, and wait for all evaluations under way."""
        if self.workers.evaluates:
            self.workers.evaluate_all(self.loop.now, self.loop.state.version, self.loop.state.x)
        while self.workers.wait_for_evaluations():
            while self.workers.has_evaluation:
                self.loop.take_evaluation()

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """What has happened besides arrivals: kind and worker."""
        return [(event["kind"], event["worker"]) for event in self.loop.recorder.events]

    @property
    def kept(self) -> dict[int, Memory]:
        """What workers keep for the method, wherever that is; what is lost is missing."""
        at_workers = [r for r in self.records if r.memory is MemoryPlace.AT_WORKER and r.accepted >= 0]
        kept = self.transport.kept({record.number: record.accepted for record in at_workers})
        known = {worker: held for worker, held in kept.items() if held is not None}
        known |= {record.number: record.held for record in self.records if record.held is not None}
        return {worker: held["method"] for worker, held in known.items() if "method" in held}

    def check_sum(self) -> bool:
        """If no memory is lost now, the sum is that of what is kept; was there something to check?"""
        state, kept = self.loop.state, self.kept
        lost = any(r.number not in kept for r in self.records if r.memory is not MemoryPlace.NONE)
        mending = any(event.kind is EventKind.RESTORED for event in self.workers._events)
        if not isinstance(state, dd.AggregateState) or lost or mending:
            return False
        gap = state.audit(kept) * (sum(float(memory["gradient"].norm()) for memory in kept.values()) or 1.0)
        arrivals = len(self.loop.recorder)
        assert gap <= rounding(2 * arrivals + 4 * len(self.records)) * 64  # no sum of gradients is larger
        assert not set(kept) & state.absent
        return True

    def check_jobs(self) -> None:
        """Every job in flight is in one record."""
        known = [(record.number, draw) for record in self.records for draw in record.jobs]
        assert sorted(known) == sorted((job.worker, job.draw) for job in self.workers.in_flight)
        assert all(record.polled <= set(record.jobs) for record in self.records)

    def check_replay(self) -> None:
        """The recorded order, in one process, gives the same bits."""
        algorithm, problem, trace = self.loop.algorithm, self.loop.problem, self.loop.recorder.trace()
        fleet = LocalFleet(problem, RecordedClock(trace), self.half, downlink=self.downlink)
        again = Loop(algorithm, problem, fleet, problem.start(0), on_nonfinite=None)
        again.begin()
        while fleet.peek() is not None:
            again.advance()
        replayed = again.recorder.trace()
        for name in ("version", "after", "loss", "fingerprint", "bytes", "steps"):
            assert replayed[name].tobytes() == trace[name].tobytes(), name
        assert torch.equal(again.state.x, self.loop.state.x)
        assert getattr(again.state, "log", None) == getattr(self.loop.state, "log", None)

    def check_bytes(self) -> None:
        """What the record says that workers were sent is what the transport was given for their jobs."""
        trace = self.loop.recorder.trace()
        jobs = zip(trace.worker.tolist(), trace.draw.tolist(), strict=True)
        assert trace.down.tolist() == [self.sent[job] for job in jobs]

    def check(self) -> None:
        """The sum, the jobs and the record are right."""
        assert self.check_sum()
        self.check_jobs()
        self.check_replay()


class Rough(dd.Quadratic):
    """Some jobs raise, some give no number, and one worker cannot evaluate."""

    measures = True
    raises = staticmethod(lambda worker, draw: (worker * 31 + draw * 17) % 23 == 0)
    spoils = staticmethod(lambda worker, draw: (worker * 13 + draw * 29) % 37 == 0)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        if self.raises(worker, draw):
            raise ValueError("no gradient")
        return (gradient * math.nan if self.spoils(worker, draw) else gradient), loss

    def measure(self, x: Tensor, worker: int, samples: Any = None) -> dict[str, Any]:
        return {"part": 1 / (3 - worker), "loss": 0.0, "samples": 1, "gradient": None}

    def combine(self, x: Tensor, parts: Any) -> dict[str, float]:
        return {"objective": float(len(parts)), "pooled_loss": 0.0, "accuracy": 0.0, "gradient_norm": 0.0}


class Wild(dd.DuDe):
    """Cancels others' jobs and its own, fills their queues, repeats draws and asks to be woken."""

    def step(self, s: Any, a: dd.Arrival) -> Orders:
        s.replace(a.worker, a.value)
        s.descend(s.total, self.lr, over=s.counted)
        own, other, orders = a.worker, (a.worker * 7 + s.version * 3) % 4, [dd.send(a.worker)]
        if s.version % 5 in (1, 2) and other not in s.absent:
            orders += [dd.cancel(other), dd.send(other)][s.version % 5 - 1 :]
        elif s.version % 5 > 2:
            orders += [dd.again(own), dd.cancel(own), dd.send(own)] if s.version % 5 == 3 else [dd.wake(a.time + 0.03)]
        return orders

    def on_wake(self, s: Any, time: float) -> Orders:
        return []

    def leave(self, s: Any, worker: int, held: Memory | None = None) -> Orders:
        s.discard(worker, held)
        return []


WILD = Wild(lr=0.05, memory="workers", start="zeros")
# by name: the problem, the method, what becomes of workers that are gone, and seconds within which notices come together
STORMS: dict[str, tuple[type[dd.Quadratic], dd.Algorithm[Any], str, float]] = {
    "leave": (dd.Quadratic, DUDE(), "leave", 0.0),
    "freeze": (dd.Quadratic, DUDE(), "freeze", 0.0),
    "together": (dd.Quadratic, DUDE(), "leave", 0.004),
    "wait for three": (dd.Quadratic, DUDE(wait_for=3), "leave", 0.0),
    "server": (dd.Quadratic, DUDE(memory="server"), "leave", 0.0),
    "busy": (dd.Quadratic, DUDE(start="busy"), "leave", 0.0),
    "rough, wild": (Rough, WILD, "leave", 0.0),
    "rough, wild, freeze": (Rough, WILD, "freeze", 0.0),
    "rough, wild, together": (Rough, WILD, "leave", 0.004),
    "rough, wait for two": (Rough, DUDE(wait_for=2), "leave", 0.0),
    "rough, freeze": (Rough, DUDE(), "freeze", 0.0),
    "rough, vanilla": (Rough, dd.VanillaASGD(lr=0.05), "leave", 0.0),
    "rough, uniform, freeze": (Rough, dd.UniformASGD(lr=0.05), "freeze", 0.0),
}

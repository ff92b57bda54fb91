"""Attacks on the server of real workers: replies that make no sense, without any process but this one.

Server and workers are the real ones, with a post in this process between them whose seconds pass only while somebody waits,
as in tests/workers/test_coordinator.py. What workers answer is spoilt on its way.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.core.environment import environment
from dualdelay.runs.names import label
from dualdelay.workers.desk import Piece
from dualdelay.workers.messages import Measured, Notice, Ready, Reply, Request
from dualdelay.workers.worker import Worker
from torture_core import Attack, Failure, attempt, must

# ---------------------------------------------------------------------------------------------------- a post without Ray


class Process(Worker):
    """A worker that can die."""

    alive, free, incarnation = True, 0.0, 0


class LocalPost:
    """What the server uses of ``Post``, with workers in this process; ``spoil`` has all notices first."""

    def __init__(
        self, clock: SimpleNamespace, spoil: Callable[[Notice], list[Any]], fleet: Any, problem: dd.Problem, *kit: Any
    ) -> None:
        self._clock, self._spoil, self._kit = clock, spoil, (problem, kit[0])
        self._due: list[tuple[float, int, Callable[[], Notice | None]]] = []
        self._count, self.processes = itertools.count(), dict[int, Process]()

    def _call(self, process: Process, seconds: float, answer: Callable[[], Notice | None]) -> None:
        process.free = max(self._clock.now, process.free) + seconds
        heapq.heappush(self._due, (process.free, next(self._count), lambda: answer() if process.alive else None))

    def hire(self, worker: int, incarnation: int) -> None:
        self.dismiss(worker)
        process = self.processes[worker] = Process(worker, *self._kit, 1)
        samples = process.samples() if self._kit[0].needs_sample_counts else None
        self._call(process, 0.05, partial(Ready, worker, incarnation, "here", 1, environment(), samples))

    def dismiss(self, worker: int) -> None:
        if worker in self.processes:
            self.processes.pop(worker).alive = False

    def put(self, x: Tensor) -> Any:
        return x.detach().numpy().copy()

    def get(self, model: Any) -> Tensor:
        return torch.from_numpy(model)

    def ask(self, request: Request, model: Any, held: Tensor | None) -> None:
        if request.worker in self.processes:
            process, spare = self.processes[request.worker], None if held is None else held.numpy().copy()
            self._call(process, 0.01 * (1 + request.worker), lambda: process.compute(request, model, spare))

    def measure(self, worker: int, incarnation: int, piece: Piece, unit: float) -> None:
        process = self.processes[worker]

        def measured() -> Measured:
            part = process.measure(piece.model.x, piece.samples, unit)
            if isinstance(part, dict):
                part = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in part.items()}
                part["seconds"] = 0.01
            return Measured(worker, incarnation, piece.evaluation, part)

        self._call(process, 0.01, measured)

    def held(self, accepted: Mapping[int, int]) -> dict[int, Tensor | None]:
        there = [worker for worker in accepted if worker in self.processes]
        kept = {worker: self.processes[worker].held(accepted[worker]) for worker in there}
        return {worker: None if held is None else torch.from_numpy(held.copy()) for worker, held in kept.items()}

    def lacking(self, worker: int) -> str:
        return ""

    def receive(self, timeout: float) -> list[Any]:
        until, notices = self._clock.now + timeout, list[Any]()
        self._clock.now += 1e-5
        while self._due and self._due[0][0] <= until and not notices:
            moment, _, happens = heapq.heappop(self._due)
            self._clock.now = max(self._clock.now, moment)
            notice = happens()
            notices += [] if notice is None else self._spoil(notice)
        if not notices:
            self._clock.now = max(self._clock.now, until)
        return notices

    def close(self) -> None:
        for worker in list(self.processes):
            self.dismiss(worker)


@contextmanager
def local(spoil: Callable[[Notice], list[Any]] = lambda notice: [notice]) -> Iterator[None]:
    """While this lasts real workers are in this process, and their seconds pass at once."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    with (
        mock.patch("dualdelay.workers.staff.time", clock),
        mock.patch("dualdelay.workers.crew.time", clock),
        mock.patch("dualdelay.workers.crew.Post", partial(LocalPost, clock, spoil)),
    ):
        yield


# -------------------------------------------------------------------------------------------------------------- messages


class Liar:
    """Spoils now and then what a worker answers, and sometimes says it twice or later again."""

    def __init__(self, chance: random.Random, share: float, most: int) -> None:
        self._chance, self._share, self._left = chance, share, most
        self._old: list[Any] = []
        self.lies: Counter[str] = Counter()

    def __call__(self, notice: Notice) -> list[Any]:
        chance, made = self._chance, [notice]
        if chance.random() < self._share and self._left > 0:
            self._left -= 1
            kinds = {Reply: REPLIES, Measured: PARTS}.get(type(notice), {})
            kind = chance.choice([*kinds, "twice", "again"])
            self.lies[kind] += 1
            if kind == "twice":
                made = [notice, notice, notice]
            elif kind == "again" and self._old:
                made = [notice, chance.choice(self._old)]
            elif kind in kinds:
                made = [kinds[kind](notice, chance), *([notice] if chance.random() < 0.3 else [])]
        self._old.append(notice)
        return made


def _asked(name: str, *values: Any) -> Callable[[Any, random.Random], Any]:
    """A reply to a request that was not made."""

    def spoil(reply: Any, chance: random.Random) -> Any:
        now = getattr(reply.request, name)
        return reply._replace(
            request=reply.request._replace(**{name: chance.choice([*values, now + 1, now - 7, now + 10**6])})
        )

    return spoil


def _with(name: str, *values: Any) -> Callable[[Any, random.Random], Any]:
    return lambda notice, chance: notice._replace(**{name: chance.choice(values)})


def _value(reply: Any, chance: random.Random) -> Any:
    """A reply whose value is no gradient."""
    x = np.ones(2) if isinstance(reply.value, Packed) else np.asarray(reply.value)
    values: list[Any] = [
        x[:1],
        x.reshape(1, -1),
        np.empty(0),
        np.float64(3.0),
        np.tile(x, 2),
        x[:, None],
        x * np.nan,
        x + np.inf,
    ]
    values += [x.astype(kind) for kind in (np.int64, np.complex128, bool, str, object, np.float16)]
    values += [None, "x", b"x", 3, [1.0, 2.0], {}, torch.from_numpy(x.copy()), np.array([None, "x"]), np.empty((0, 5))]
    parts: list[Any] = [
        (np.ones(3, np.int8), np.ones(1)),
        (np.array([10**6], np.int32), np.ones(1)),
        (None, None),
        ("a", "b"),
        (),
    ]
    values += [Packed(length, part) for length in (2, -1, 10**9) for part in parts]
    return reply._replace(value=chance.choice(values))


REPLIES: dict[str, Callable[[Any, random.Random], Any]] = {
    "value": _value,
    "loss": _with("loss", None, "x", 1j, 10**400, [1.0], np.ones(3), torch.ones(2), b"", {}),
    "a number for a loss": _with("loss", 2**63, 1e308, -5.0, True, np.float32(2.0), 7, math.nan, math.inf),
    "seconds": _with("seconds", None, "x", math.nan, math.inf, -1.0, 1j, 10**400, []),
    "keeps": _with("keeps", None, "x", [], 3),
    "error": _with("error", " ", "\n", None, 3, b"x", "Traceback\nValueError: no", ["x"], "\0"),
    "worker": lambda reply, chance: reply._replace(
        request=reply.request._replace(worker=chance.choice([99, -1, None, "0", 1.5]))
    ),
    "sequence": _asked("sequence", None, "x", 10**30, -1),
    "incarnation": _asked("incarnation", None, "x", -1),
    "draw": _asked("draw", None, "x", -1),
    "version": _asked("version", None, "x", -1),
    "request": _with("request", None, (), "x", (1, 2, 3)),
}
PARTS: dict[str, Callable[[Any, random.Random], Any]] = {
    "part": _with(
        "part", {}, None, [], "", " \n", "Traceback\nValueError: no", 3, {"loss": 1.0}, {"loss": None, "samples": 0}
    ),
    "a value of a part": lambda notice, chance: notice._replace(part=_other_part(notice.part, chance)),
    "evaluation": _with("evaluation", -1, 10**9, None, "x"),
}


def _other_part(part: Any, chance: random.Random) -> Any:
    if not isinstance(part, dict):
        return part
    key = chance.choice(sorted(part))
    values = [None, "x", math.nan, -1, 0, 10**400, [], torch.ones(7), np.ones(3), 1j]
    return (
        {name: value for name, value in part.items() if name != key}
        if chance.random() < 0.3
        else {**part, key: chance.choice(values)}
    )


METHODS = [
    dd.DuDe(lr=0.05),
    dd.DuDe(lr=0.05, memory="workers"),
    dd.DuDe(lr=0.05, memory="workers", compress="int8"),
    dd.DuDe(lr=0.05, memory="workers", compress=0.5, wait_for=2),
    dd.VanillaASGD(lr=0.05),
    dd.FedBuff(lr=0.05, buffer=2),
]
PROBLEMS: list[dd.Problem] = [
    dd.Quadratic([[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]], noise=0.3),
    dd.Digits(workers=3, alpha=1.0, hidden=2, batch_size=4),
]


class Messages(Attack):
    """Replies of wrong shapes, kinds and numbers, and some twice: the run ends or goes on, and no value counts twice."""

    name, weight = "messages", 2.0

    def trial(self, number: int, chance: random.Random, place: Path) -> None:
        method, problem = chance.choice(METHODS), chance.choices(PROBLEMS, [4, 1])[0]
        liar = Liar(chance, chance.choice([0.05, 0.2, 0.6]), chance.choice([1, 3, 10, 1000]))
        rules = {
            "server": dd.Server(on_nonfinite=chance.choice(["retry", "leave", "stop"])),
            "checkpoint_every": 4,
            "evaluation": dd.Evaluation(every=5),
        }
        said, folder = f"{label(method)} on {type(problem).__name__}", place / "run"
        with local(liar):
            fleet = dd.RayFleet(patience=1.0, resend=0.05, deadline=3.0, gone=chance.choice(["leave", "freeze"]))
            made = attempt(
                f"{said} with lies",
                lambda: dd.train(
                    method, problem, fleet, updates=15, folder=folder, watch=dd.Reporting(progress=False), **rules
                ),
            )
        said = f"{said} after {dict(liar.lies)}"
        with local():
            if not isinstance(made, dd.DualDelayError):
                require_sound(made, said, liar)
            elif folder.exists():
                must("lost run", f"load, {said}", lambda: dd.load(folder))
                again = attempt(f"resume, {said}", lambda: dd.resume(folder, watch=dd.Reporting(progress=False)))
                if not isinstance(again, dd.DualDelayError):
                    require_sound(again, said, liar)


def require_sound(run: dd.Run, said: str, liar: Liar) -> None:
    """No job counts twice, the sum is that of what the workers hold, and the record replays to the bit."""
    jobs = Counter(zip(run.trace.worker.tolist(), run.trace.draw.tolist(), strict=True))
    if jobs and max(jobs.values()) > 1:
        raise Failure("wrong bit", f"a value was absorbed twice: {said}")
    if run.audit is not None and not run.audit < 1e-5:
        raise Failure("wrong bit", f"the audit is {run.audit}: {said}")
    if not bool(torch.isfinite(run.x).all()):
        raise Failure("wrong bit", f"the weights are not finite: {said}")
    again = attempt(f"replay, {said}", lambda: dd.replay(run.folder, watch=dd.Reporting(progress=False)))
    lied = liar.lies["a number for a loss"] and "recorded loss" in str(again)
    if isinstance(again, dd.DualDelayError) and not lied:
        raise Failure("wrong bit", f"the replay says: {str(again)[:150]} ({said})")

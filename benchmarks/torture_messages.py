"""Attacks on the server of real workers: replies that make no sense, without any process but this one.

Server and workers are the real ones, on virtual time. What workers answer is spoilt on its way.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.runs.names import REGISTRIES, label
from dualdelay.workers.messages import Evaluated, Notice, Reply
from torture_core import Attack, Failure, attempt, must

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from transports import VirtualFleet, VirtualTransport


@dataclass(frozen=True, kw_only=True)
class LyingFleet(VirtualFleet):
    """Workers of this process, on virtual time, whose answers are spoilt on their way."""

    spoil: Callable[[Notice], list[Any]] = field(repr=False, compare=False)

    def connect(self, problem: dd.Problem, half: Any, output: Path | None = None, about: Any = None) -> VirtualTransport:
        transport = super().connect(problem, half)
        receive = transport.receive
        transport.receive = lambda timeout: [lie for notice in receive(timeout) for lie in self.spoil(notice)]
        return transport


@dataclass(frozen=True)
class LocalRay(dd.RayFleet):
    """What folders call Ray's workers, in this process and on virtual time."""

    def connect(self, problem: dd.Problem, half: Any, output: Path | None, about: Any) -> VirtualTransport:
        return VirtualFleet().connect(problem, half)


@contextmanager
def local() -> Iterator[LocalRay]:
    """While this lasts, the workers of folders that name Ray are in this process."""
    with mock.patch.dict(REGISTRIES["fleet"], ray=LocalRay):
        yield LocalRay()


def fleet_of(gone: Any, spoil: Callable[[Notice], list[Any]] = lambda notice: [notice]) -> LyingFleet:
    faults = dd.FaultPolicy(patience=1.0, resend=0.05, deadline=3.0, gone=gone)
    return LyingFleet(faults=faults, job_seconds=lambda request: 0.01 * (1 + request.worker), spoil=spoil)


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
            kinds = {Reply: REPLIES, Evaluated: PARTS}.get(type(notice), {})
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
        gone, silent = chance.choice(["leave", "freeze"]), dd.Reporting(progress=False)
        fleet, honest = fleet_of(gone, liar), fleet_of(gone)
        ended = attempt(
            f"{said} with lies",
            lambda: dd.train(method, problem, fleet, updates=15, folder=folder, watch=silent, **rules),
        )
        said = f"{said} after {dict(liar.lies)}"
        if not isinstance(ended, dd.DualDelayError):
            require_sound(ended, said, liar)
        elif folder.exists():
            must("lost run", f"load, {said}", lambda: dd.load(folder))
            again = attempt(f"resume, {said}", lambda: dd.resume(folder, fleet=honest, watch=silent))
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

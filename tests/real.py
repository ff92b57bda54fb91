"""Problems whose workers misbehave on purpose, in their own process only: a replay computes the same jobs unharmed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import dualdelay as dd
from flat import replay
from helpers import audit


@dataclass
class Trouble:
    """What happens to worker ``worker`` at its jobs ``draws``: kill, kill soon after, hang, raise, nan or shape."""

    kind: str
    worker: int
    draws: frozenset[int] | range = frozenset()
    seconds: float = 0.0
    once: str = ""  # a file that remembers that it has happened


@dataclass(eq=False)
class Real(dd.Problem):
    """A quadratic whose gradients take a while, with trouble."""

    centers: list[list[float]]
    pause: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()
    noise: float = 0.3
    server: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self._inner = dd.Quadratic(self.centers, noise=self.noise)
        self.workers, self.seed = self._inner.workers, 0

    def start(self, seed: int) -> torch.Tensor:
        return self._inner.start(seed)

    def evaluate(self, x: torch.Tensor) -> dict[str, float]:
        return self._inner.evaluate(x)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()

    def gradient(self, x: torch.Tensor, worker: int, draw: int) -> tuple[torch.Tensor, float]:
        gradient, loss = self._inner.gradient(x, worker, draw)
        for trouble in self.troubles:
            if trouble.worker == worker and draw in trouble.draws:
                gradient = self._happens(trouble, gradient)
        if os.getpid() != self.server:
            time.sleep(self.slow.get(worker, self.pause))
        return gradient, loss

    def _happens(self, trouble: Trouble, gradient: torch.Tensor) -> torch.Tensor:
        if trouble.kind == "nan":
            return gradient * float("nan")
        if trouble.kind == "shape":
            return torch.cat([gradient, gradient])
        if os.getpid() == self.server:
            return gradient
        if trouble.once:
            if Path(trouble.once).exists():
                return gradient
            Path(trouble.once).touch()
        if trouble.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble.kind == "kill soon":
            threading.Timer(trouble.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if trouble.kind == "hang":
            time.sleep(trouble.seconds)
        if trouble.kind == "raise":
            raise ValueError(f"worker {trouble.worker} has a bad sample")
        return gradient


@dataclass
class Marked:
    """A shard function that leaves a file where it was called."""

    folder: str

    def __call__(self, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        Path(self.folder, f"shard-{worker}-{os.getpid()}").touch()
        inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(worker)) + worker
        return inputs, (inputs.sum(1) > 4 * worker).long()


def small_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def kinds(run: dd.Run, worker: int | None = None) -> list[str]:
    """The kinds of a run's events, in order."""
    return [event["kind"] for event in run.trace.events if worker in (None, event["worker"])]


class Until:
    """Ends a run once something was seen: pass ``**until`` to train."""

    def __init__(self, seen: Callable[[dd.State, dd.Arrival], bool]) -> None:
        self._seen, self._done = seen, False

    def _watch(self, state: dd.State, a: dd.Arrival) -> None:
        self._done = self._done or self._seen(state, a)

    def keys(self) -> list[str]:
        return ["watch", "metrics", "stop", "evaluate_seconds", "time"]

    def __getitem__(self, name: str) -> Any:
        stop = dd.EarlyStop("done", target=1.0, larger_is_better=True)
        given = {"watch": [self._watch], "metrics": {"done": lambda _: self._done}, "stop": stop}
        return {**given, "evaluate_seconds": 0.5, "time": 120.0}[name]


def kill(fleet: dd.RayFleet, worker: int) -> None:
    """SIGKILL to a worker's process."""
    os.kill(fleet.control.places[worker][1], signal.SIGKILL)


@dataclass(frozen=True)
class Stubborn(dd.SyncSGD):
    """Synchronous SGD without a rule for workers that leave."""

    away = ""
    leave, join = dd.Algorithm.leave, dd.Algorithm.join


def check(run: dd.Run, folder: Any, problem: dd.Problem, **given: Any) -> dd.Run:
    """The audit holds, and the record replays to the same bits."""
    if run.audit is not None:
        assert run.audit <= audit(run), run.audit
    again = replay(folder, problem, **given)
    assert torch.equal(again.x, run.x)
    assert kinds(again) == kinds(run)
    if run.audit is not None:
        assert again.audit is not None and again.audit <= audit(again)
    return again

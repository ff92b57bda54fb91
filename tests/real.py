"""Problems whose workers fail on purpose, in processes of their own only: a replay computes the same jobs unharmed."""

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
from torch import Tensor

import dualdelay as dd


@dataclass
class Trouble:
    """What happens once to worker ``worker`` at its job ``draw``: kill, kill soon after, hang, raise, nan or shape."""

    kind: str
    worker: int
    draw: int
    seconds: float = 0.0  # until it happens, or for which it lasts


@dataclass(eq=False)
class Real(dd.Problem):
    """A quadratic whose gradients take a while, with trouble; its loss is the number of torch's threads."""

    centers: list[list[float]]
    seconds: Mapping[int, float] = field(default_factory=dict)  # that a gradient takes, by worker
    troubles: tuple[Trouble, ...] = ()
    folder: Path = Path()  # where files remember that a process was killed or hung
    noise: float = 0.3
    server: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self._inner = dd.Quadratic(self.centers, noise=self.noise)
        self.workers, self.seed = self._inner.workers, 0

    def start(self, seed: int) -> Tensor:
        return self._inner.start(seed)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self._inner.evaluate(x)

    def fingerprint(self) -> str:
        return self._inner.fingerprint()

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, _ = self._inner.gradient(x, worker, draw)
        for trouble in self.troubles:
            if (trouble.worker, trouble.draw) == (worker, draw):
                gradient = self._happens(trouble, gradient)
        if os.getpid() != self.server:
            time.sleep(self.seconds.get(worker, 0.0))
        return gradient, float(torch.get_num_threads())

    def _happens(self, trouble: Trouble, gradient: Tensor) -> Tensor:
        if trouble.kind == "nan":
            return gradient * float("nan")
        if trouble.kind == "shape":
            return torch.cat([gradient, gradient])
        once = self.folder / f"{trouble.kind}-{trouble.worker}-{trouble.draw}"
        if os.getpid() == self.server or once.exists():
            return gradient
        once.touch()
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
class Site:
    """A shard function: site i has 20 (i + 1) samples around 10 i, and leaves a file named after its process."""

    folder: Path

    def __call__(self, worker: int) -> tuple[Tensor, Tensor]:
        (self.folder / f"shard-{worker}-{os.getpid()}").touch()
        inputs = torch.randn(20 * (worker + 1), 4, generator=torch.Generator().manual_seed(worker)) + 10 * worker
        return inputs, (inputs.sum(1) > 40 * worker).long()


@dataclass
class Talking:
    """A step by which worker 1 prints a line, and in its first process dies of a segmentation fault."""

    folder: Path
    server: int = field(default_factory=os.getpid)

    def __call__(self, model: torch.nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if os.getpid() != self.server and 5 < inputs.mean() < 15:
            print("a word from the second site", flush=True)
            if not (self.folder / "died").exists():
                (self.folder / "died").touch()
                os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.0 if os.getpid() == self.server else 0.01)
        return torch.nn.functional.cross_entropy(model(inputs), targets)


def small_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def until(seen: Callable[[dd.State, dd.Arrival], bool]) -> dict[str, Any]:
    """Arguments of ``train`` by which a run ends half a second after ``seen`` was true, or as ``time`` in vain."""
    done = []

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if seen(state, arrival):
            done.append(arrival)

    stop = dd.EarlyStop("done", target=1.0, larger_is_better=True)
    evaluation = dd.Evaluation(seconds=0.5, metrics={"done": lambda model: float(bool(done))}, early_stop=stop)
    return {"watch": [watch], "evaluation": evaluation, "time": 240.0}


def kill(fleet: dd.RayFleet, worker: int) -> None:
    """SIGKILL to a worker's process."""
    os.kill(fleet.control.places[worker][1], signal.SIGKILL)


@dataclass
class Wide(dd.Problem):
    """A quadratic with so many weights that they travel in pieces, and trouble."""

    workers: int = 2
    weights: int = 50_000
    spoilt: tuple[int, int] = (-1, -1)  # the worker and the draw of a gradient that is not finite
    short: int = -1  # a draw whose gradient has another shape
    seconds: float = 0.0  # that a gradient takes in a worker
    seed: int = 0
    server: int = field(default_factory=os.getpid)

    def start(self, seed: int) -> Tensor:
        return torch.linspace(-1.0, 1.0, self.weights)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        time.sleep(0.0 if os.getpid() == self.server else self.seconds)
        gradient = x - worker + torch.randn(self.weights, generator=torch.Generator().manual_seed(97 * worker + draw))
        if (worker, draw) == self.spoilt:
            gradient[-1] = torch.inf
        return (gradient[1:] if draw == self.short else gradient), 0.5

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": float(x.square().mean())}

    def fingerprint(self) -> str:
        return f"wide {self.weights}"


class Measured(Wide):
    """The same, evaluated by its workers."""

    measures = True

    def measure(self, x: Tensor, worker: int, samples: Any = None) -> dict[str, Any]:
        return {"loss": float((x - worker).square().mean()), "samples": 1}

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        return {"objective": sum(part["loss"] for part in parts.values()) / len(parts)}

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.combine(x, {worker: self.measure(x, worker) for worker in range(self.workers)})


@dataclass(frozen=True)
class Fragile(dd.Algorithm[dd.State]):
    """It fails where there is more than a stand-in, after a while."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        return dd.State(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> dd.core.Orders:
        if s.version > 100 and len(s.weights) > 1:
            raise ArithmeticError("the weights are tired")
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


@dataclass
class Ranked:
    """A step of a worker with several ranks: each process leaves a file named after worker, rank and process.

    Once each, the ranks in ``raises`` raise.
    """

    folder: Path
    raises: tuple[tuple[int, int], ...] = ()  # worker and rank

    def __call__(self, model: torch.nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if torch.distributed.is_initialized():
            worker, rank = int(inputs.mean() > 5), torch.distributed.get_rank()
            (self.folder / f"rank-{worker}-{rank}-{os.getpid()}").touch()
            once = self.folder / f"raised-{worker}-{rank}"
            if (worker, rank) in self.raises and not once.exists():
                once.touch()
                raise ValueError(f"rank {rank} has a bad sample")
            time.sleep(0.01)
        return torch.nn.functional.cross_entropy(model(inputs), targets)


class Collective(dd.Network):
    """A network each of whose gradients is the mean over the ranks, which all compute the same one."""

    collective = True

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(gradient)
            gradient /= torch.distributed.get_world_size()
        return gradient, loss

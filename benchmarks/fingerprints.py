"""Fingerprints of what the package computes, to see that a restructuring of its code has changed nothing.

    python benchmarks/fingerprints.py --out before.json        # in the old tree
    python benchmarks/fingerprints.py --against before.json    # in the new one: what differs; exit code 1 if anything does

Every scenario is a short run, or several, with something in it that is easy to break. Of each there are short hashes, one
for each thing that may differ: the weights, the trace (who came when), the gradients in it, the events, the metrics, how it
ended, and in ``texts`` what it says to people. ``--dump FOLDER`` also writes what was hashed, to be compared with diff.

Bits depend on the processor and on torch: the file says on which it was made. The parts: methods, folders, groups, options,
theory (with the shell and the paper's command) and workers (real workers on virtual time, with the post of the tests).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib
import io
import itertools
import json
import logging
import multiprocessing
import random
import runpy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import dualdelay as dd
from dualdelay.core import Order
from dualdelay.engine.delays import delay_grids
from dualdelay.runs.names import parse
from dualdelay.workers.messages import Reply

# ======================================================================================================================
# ADAPTER. Whatever a restructuring may rename is reached from here alone. Scenarios are written with the names on the left;
# change what stands on the right. A scenario's name must stay, since it is what two files are compared by.
# ======================================================================================================================

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
flat = importlib.import_module("flat")  # the verbs with all options side by side, as scenarios write them


def simulate(algorithm: Any, problem: Any, speeds: Any, **options: Any) -> Any:
    return flat.simulate(algorithm, problem, speeds, **{"progress": False, **options})


def train(algorithm: Any, problem: Any, fleet: Any, **options: Any) -> Any:
    return flat.train(algorithm, problem, fleet, **{"progress": False, **options})


def resume(folder: Path, **options: Any) -> Any:
    return flat.resume(folder, **{"progress": False, **options})


def replay(folder: Path, **options: Any) -> Any:
    return flat.replay(folder, **{"progress": False, **options})


def compare(algorithms: Any, problem: Any, speeds: Any, **options: Any) -> Any:
    return flat.compare(algorithms, problem, speeds, **{"progress": False, **options})


def sweep(grid: Any, problem: Any = None, speeds: Any = None, **options: Any) -> Any:
    return flat.sweep(grid, problem, speeds, **{"progress": False, **options})


def shell(*words: str) -> None:
    """The command ``dualdelay`` in this process, as ``python -m dualdelay``."""
    before, sys.argv = sys.argv, ["dualdelay", *words]
    try:
        runpy.run_module("dualdelay", run_name="__main__")
    finally:
        sys.argv = before


Quadratic, Logistic, Digits, Network = dd.Quadratic, dd.problems.Logistic, dd.Digits, flat.network
LocalSteps, Clipped, FullGradients = dd.LocalSteps, dd.problems.Clipped, dd.problems.FullGradients
without_batchnorm = dd.problems.without_batchnorm
Fixed, Normal, Exponential = dd.FixedSpeeds, dd.TruncatedNormalSpeeds, dd.speeds.ExponentialSpeeds
Lognormal, Pareto, Changing = dd.speeds.LognormalSpeeds, dd.speeds.ParetoSpeeds, dd.speeds.ChangingSpeeds
Recorded, Drifting, Bursty = dd.speeds.RecordedSpeeds, dd.speeds.DriftingSpeeds, dd.speeds.BurstySpeeds
Away, SpeedModel, Link, EarlyStop = dd.speeds.AwaySpeeds, dd.SpeedModel, dd.speeds.Link, dd.EarlyStop
told, on_off, dropouts = dd.speeds.announced, dd.speeds.on_off, dd.speeds.dropouts
leave, join, send, again, cancel, wake = dd.speeds.leave, dd.speeds.join, dd.send, dd.again, dd.cancel, dd.wake
Algorithm, State, Arrival, Draws = dd.Algorithm, dd.State, dd.Arrival, dd.Draws
BadInput, RunFailed, load, theory = dd.BadInput, dd.RunFailed, dd.load, dd.theory

TRACE = ("time", "seconds", "worker", "draw", "version", "after", "bytes")  # columns: who came when
MEASURED = ("seconds",)  # of these, what real workers measure by a clock of this machine's: never twice the same
GRADIENTS = ("loss", "fingerprint")  # columns: with what
EVENT = ("kind", "row", "time", "worker", "draw", "version", "after")  # of an event, but for its text
ENDED = ("ended", "time", "version", "returned", "audit", "faults", "delays", "same_bits")  # of a run

# Arguments of methods by their names in dd.ALGORITHMS; one that is not here gets a step size alone.
LR = 2.0**-5
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dude": {"wait_for": 2},
    "auto": {"lr": 8 * LR},
    "fedbuff": {"buffer": 3, "staleness": 0.5},
    "mifa": {"active": 3},
    "malenia": {"gradients": 8},
    "ca2fl": {"buffer": 3},
    "aced": {"max_delay": 9},
    "sync_by_speed": {"least": 2},
    "ringmaster": {"threshold": 4, "stop": True},
    "delay_adaptive": {"delay": "staleness"},
    "fedasync": {"lr": 4 * LR, "mixing": "hinge"},
    "fedfix": {"period": 0.7},
    "fadas": {"buffer": 2, "late": 3},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # more of them: the method's name and its arguments
    "dude plain": ("dude", {}),
    "dude workers": ("dude", {"memory": "workers"}),
    "dude workers two": ("dude", {"memory": "workers", "wait_for": 2}),
    "dude busy": ("dude", {"start": "busy"}),
    "dude zeros": ("dude", {"start": "zeros"}),
    "dude int8": ("dude", {"memory": "workers", "compress": "int8"}),
    "dude sparse": ("dude", {"memory": "workers", "compress": 0.5}),
    "fedbuff plain": ("fedbuff", {"buffer": 2}),
    "fedbuff wait": ("fedbuff", {"buffer": 3, "wait": True}),
    "mifa all": ("mifa", {}),
    "malenia plain": ("malenia", {}),
    "aced plain": ("aced", {}),
    "sync_by_speed plain": ("sync_by_speed", {}),
    "ringmaster ignores": ("ringmaster", {"threshold": 3}),
    "delay_adaptive tau": ("delay_adaptive", {}),
    "generalized chances": ("generalized", {"probabilities": (0.3, 0.2, 0.2, 0.1, 0.1, 0.1)}),
    "fedasync polynomial": ("fedasync", {"mixing": "polynomial", "a": 0.7}),
    "fedasync constant": ("fedasync", {}),
    "fadas plain": ("fadas", {"buffer": 3}),
}


def method(name: str, **arguments: Any) -> Any:
    """A method by its name in dd.ALGORITHMS."""
    return dd.ALGORITHMS[name](**{"lr": LR, **(arguments or ARGUMENTS.get(name, {}))})


# Real workers on virtual time, as the tests have them: see tests/virtual.py for what each name is.
virtual = importlib.import_module("virtual")


class Fleet:
    """Workers on virtual time with these settings, and the one who brings them in and takes them out."""

    def __init__(self, **settings: Any) -> None:
        self._settings, self._control = settings, dd.FleetControl()
        self.join, self.leave = self._control.join, self._control.leave

    def built(self, **conduct: Any) -> Any:
        return virtual.fleet_of(control=self._control, **self._settings, **conduct)


@contextlib.contextmanager
def virtual_workers() -> Iterator[SimpleNamespace]:
    """``begin(algorithm, problem, fleet, before, schedule, **conduct)`` of a run on virtual time, and the tests' names."""
    time = importlib.import_module("transports").VirtualTime()

    def begin(
        algorithm: Any,
        problem: Any = None,
        fleet: Any = None,
        before: Any = None,
        schedule: Any = None,
        *,
        start: Any = lambda *who: 0.05,
        job: Any = lambda: 0.02,
        together: float = 0.0,
    ) -> Any:
        conduct = {"start_seconds": start, "job_seconds": lambda request: job(), "together": together, "time": time}
        built = (fleet or Fleet()).built(**conduct)
        return virtual.VirtualRun(algorithm, problem, built, schedule, before)

    names = {"dude": virtual.DUDE, "trio": virtual.TRIO, "rough": virtual.Rough, "storms": virtual.STORMS}
    yield SimpleNamespace(begin=begin, time=time, **names)


def schedule_of(updates: int) -> Any:
    """Evaluate every so many updates, as a loop of real workers is told."""
    return virtual.Schedule(updates)


def seen(here: Any) -> SimpleNamespace:
    """A run of real workers on its way, with the names that a run has."""
    loop = here.loop
    trace, evaluation = loop.recorder.trace(), loop.evaluation
    return SimpleNamespace(
        x=loop.state.x,
        version=loop.state.version,
        trace=trace,
        metrics=evaluation.table,
        workers=evaluation.workers.table(),
        time=loop.now,
        notes=(),
        faults=dict(here.control.counts),
    )


def settled(here: Any) -> None:
    """Evaluate at the end, and wait for all who still measure."""
    here.evaluate_last()


def on_receipt(here: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    """What becomes of the notices that the server receives."""
    take = here.transport.receive
    here.transport.receive = lambda timeout: change(take(timeout))


def on_request(here: Any, passes: Callable[[], bool]) -> None:
    """Which requests for jobs come through."""
    send = here.transport.send
    here.transport.send = lambda *given: send(*given) if passes() else None


def is_reply(notice: Any) -> bool:
    """Whether a notice is a worker's answer to a job."""
    return isinstance(notice, Reply)


# ======================================================================================================================
# What is hashed
# ======================================================================================================================

Parts = dict[str, str]  # by the name of a part: the text that is hashed
SHORT = 16


def canonical(value: Any) -> str:
    """A value as a text that is the same for the same bits: names of fields do not count, those of dicts do."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {value.tolist()!r}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return canonical([getattr(value, each.name) for each in dataclasses.fields(value)])
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {canonical(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (set, frozenset)):
        return canonical(sorted(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if isinstance(value, np.generic):
        value = value.item()
    return repr(value)


def columns(table: Any, names: Sequence[str] | None = None) -> str:
    """The columns of a table, a line each: all of them, or those of some that it has."""
    present = sorted(table) if names is None else [name for name in names if name in table]
    return "\n".join(f"{name} {canonical(np.asarray(table[name]))}" for name in present)


def last_line(text: str) -> str:
    """Of a traceback what it was, without places in files."""
    return (text.strip().splitlines() or [""])[-1]


def parts_of(run: Any, *, real: bool = False) -> Parts:
    """What is to be the same of a run, whose workers may be real."""
    events = run.trace.events
    best = getattr(run, "best", None)
    kept = None if best is None else [best.metric, best.value, best.version, best.x]
    return {
        "weights": canonical([run.x, run.version]),
        "trace": columns(run.trace, [name for name in TRACE if not (real and name in MEASURED)]),
        "gradients": columns(run.trace, GRADIENTS),
        "events": "\n".join(canonical([event[name] for name in EVENT]) for event in events),
        "metrics": columns(run.metrics),
        "workers": columns(run.workers),
        "end": canonical([getattr(run, name, None) for name in ENDED] + [kept]),
        "texts": "\n".join([*(last_line(event["text"]) for event in events), *run.notes]),
    }


def whole(run: Any, *, real: bool = False) -> str:
    """All of that in one text."""
    return "\n".join(f"[{name}]\n{text}" for name, text in parts_of(run, real=real).items())


def below(name: str, parts: Parts) -> Parts:
    """The same parts as those of one of several runs."""
    return {f"{name} {part}": text for part, text in parts.items()}


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHORT]


# ======================================================================================================================
# Scenarios: functions of a folder of their own
# ======================================================================================================================

Scenario = Callable[[Path], Parts]
SCENARIOS: dict[str, dict[str, Scenario]] = {
    part: {} for part in ("methods", "folders", "groups", "options", "theory", "workers")
}


def scenario(part: str, name: str) -> Callable[[Scenario], Scenario]:
    def add(function: Scenario) -> Scenario:
        assert not any(name in some for some in SCENARIOS.values()), name
        SCENARIOS[part][name] = function
        return function

    return add


@dataclass(frozen=True)
class Case:
    """A simulated run."""

    algorithm: Any
    problem: Any
    speeds: Any
    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # what resume has to be given again, since no folder can build it

    def run(self, **more: Any) -> Any:
        return simulate(self.algorithm, self.problem, self.speeds, **{**self.options, **more})


class Killed(BaseException):
    """What stands for a kill: whatever is on disk when it is raised is all that is left."""


def kill_at(count: int, error: BaseException | None = None) -> Callable[[Any, Any], None]:
    """A watch function that ends the run at its arrival number ``count``."""
    left = iter(range(count - 1, -1, -1))

    def watch(state: Any, arrival: Any) -> None:
        if next(left) == 0:
            raise Killed if error is None else error

    return watch


REPLAYED = ("problem", "algorithm", "optimizer", "schedule")  # of what is given again, what replay takes


def kept(case: Case, folder: Path, straight: Any, share: float = 0.6) -> Parts:
    """The run in a folder: killed on its way, resumed to its end, replayed, and read back."""
    place, saving = folder / "kept", {"checkpoint_every": 5, "folder": folder / "kept"}
    with contextlib.suppress(Killed):
        case.run(**{**saving, "watch": [kill_at(max(1, int(share * len(straight.trace))))]})
    left = load(place)
    ended = resume(place, **case.given)
    same = whole(ended) == whole(straight)
    repeated = replay(place, **{name: value for name, value in case.given.items() if name in REPLAYED})
    read = load(place)
    model = dict(sorted(read.state_dict().items()))
    return {
        "left": whole(left),
        "resumed": "as if it had never been stopped" if same else whole(ended),
        "replay": whole(repeated),
        "load": whole(read),
        "model": canonical(model),
        "files": canonical(sorted(path.name for path in place.iterdir())),
        "summary": canonical(ended.summary()),
    }


def add_case(part: str, name: str, make: Callable[[], Case], *, keeps: bool = True) -> None:
    """A run, and the same in a folder."""

    @scenario(part, name)
    def run(folder: Path) -> Parts:
        case = make()
        straight = case.run()
        return {**parts_of(straight), **(kept(case, folder, straight) if keeps else {})}


# --- methods, and the same in folders ---


def matrix(d: int, step: float) -> list[list[float]]:
    return [[1.5 + step if i == j else step / (1 + i + j) for j in range(d)] for i in range(d)]


def noisy(n: int = 6, d: int = 4, **options: Any) -> Any:
    """Workers that disagree, with noise."""
    centers = [[float((7 * i + 3 * k) % 11 - 4) for k in range(d)] for i in range(n)]
    curvatures = [0.5 + 0.25 * i if i % 2 else matrix(d, 0.1 * i) for i in range(n)]
    return Quadratic(centers, curvatures, **{"noise": 0.4, **options})


def digits(**options: Any) -> Any:
    return Digits(**{"workers": 5, "alpha": 0.5, "hidden": 8, "batch_size": 8, **options})


def on_quadratic(algorithm: Any, **options: Any) -> Case:
    usual = {"updates": 45, "seed": 3, "evaluate_every": 10, "evaluate_seconds": 4.0}
    return Case(algorithm, noisy(), Normal(6, std=1.0), {**usual, **options})


def on_digits(algorithm: Any, **options: Any) -> Case:
    usual = {"updates": 20, "seed": 1, "evaluate_every": 10}
    return Case(algorithm, digits(), Normal(5, std=5.0), {**usual, **options})


MOVES = (join(3, 2.5), leave(1, 4.0), join(1, 7.0), leave(0, 9.0), leave(5, 9.5), join(5, 9.75))


def simple(make: Callable[[], Case]) -> Scenario:
    return lambda folder: parts_of(make().run())


def in_folder(make: Callable[[], Case]) -> Scenario:
    def run(folder: Path) -> Parts:
        case = make()
        return kept(case, folder, case.run())

    return run


def add_methods() -> None:
    made: dict[str, Callable[[], Any]] = {name: (lambda name=name: method(name)) for name in sorted(dd.ALGORITHMS)}
    for name, (kind, arguments) in VARIANTS.items():
        made[name] = lambda kind=kind, arguments=arguments: method(kind, **{"lr": LR, **arguments})
    for name, make in made.items():
        scenario("methods", f"quadratic {name}")(simple(lambda make=make: on_quadratic(make())))
        scenario("folders", f"folder {name}")(in_folder(lambda make=make: on_quadratic(make())))
        scenario("options", f"leave and join {name}")(
            simple(lambda make=make: on_quadratic(make(), changes=MOVES, updates=None, time=14.0))
        )
        if name != "generalized chances":  # it has as many chances as the quadratic has workers
            scenario("methods", f"digits {name}")(simple(lambda make=make: on_digits(make())))


add_methods()


# --- a user's own methods, problems, data and speeds ---


@dataclass(kw_only=True)
class DeadlineState(State):
    """What came since the last update, and from whom."""

    total: Tensor
    reported: list[int]


@dataclass(frozen=True)
class Deadline(Algorithm[DeadlineState]):
    """An update every second, of whatever came since the last, even nothing."""

    def init(self, x: Tensor, n: int, rng: Draws) -> DeadlineState:
        return DeadlineState(x, n, total=torch.zeros_like(x), reported=[])

    def first(self, s: DeadlineState) -> list[Order]:
        return [*super().first(s), wake(1.0)]

    def step(self, s: DeadlineState, a: Arrival) -> list[Order]:
        s.total = s.total + a.value
        s.reported.append(a.worker)
        return []

    def on_wake(self, s: DeadlineState, time: float) -> list[Order]:
        s.descend(s.total + 0.01 * s.version, self.lr)
        ready, s.reported, s.total = s.reported, [], torch.zeros_like(s.total)
        return [*map(send, ready), wake(time + 1.0)]


@dataclass(kw_only=True)
class FreshState(State):
    """The version each worker was sent last, and chance."""

    sent: dict[int, int]
    rng: Draws


@dataclass(frozen=True)
class Fresh(Algorithm[FreshState]):
    """Old jobs are cancelled, some jobs are repeated at the same model, some go to a worker drawn by chance, and queue."""

    def init(self, x: Tensor, n: int, rng: Draws) -> FreshState:
        return FreshState(x, n, sent=dict.fromkeys(range(n), 0), rng=rng)

    def step(self, s: FreshState, a: Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        orders = [again(a.worker)]
        if a.job.draw % 3:
            orders, s.sent[a.worker] = [send(a.worker)], s.version
        if s.version % 7 == 3:
            orders.append(send(s.rng.integer(s.n, s.version)))
        for worker in range(s.n):
            if worker != a.worker and s.version - s.sent[worker] > 5:
                orders += [cancel(worker), send(worker)]
                s.sent[worker] = s.version
        return orders


class Holes(Quadratic):
    """Some gradients are not finite, two of a worker in a row."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (self.spoilt(gradient) if worker and draw % 7 in (2, 3) else gradient), loss

    def spoilt(self, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class Cuts(Holes):
    """Some gradients have the wrong shape."""

    def spoilt(self, gradient: Tensor) -> Tensor:
        return gradient[:1]


class Hopeless(Holes):
    """From its sixth job on a worker gives no numbers."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = Quadratic.gradient(self, x, worker, draw)
        return (gradient * torch.nan if worker == 2 and draw > 5 else gradient), loss


class Sines(dd.Problem):
    """A problem with as little as one needs."""

    workers, seed = 4, 0

    def start(self, seed: int) -> Tensor:
        return torch.linspace(-1.0, 1.0, 3) + seed

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        phase = 0.5 * worker + 0.01 * draw
        return torch.cos(x + phase) + 0.2 * x, float(torch.sin(x + phase).sum() + 0.1 * (x @ x))

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": float(torch.sin(x).sum() + 0.1 * (x @ x)), "largest": float(x.abs().max())}

    def fingerprint(self) -> str:
        return "sines"


class Sawtooth(SpeedModel):
    """Jobs take longer and longer, and then are short again; later in a run all are slower."""

    n = 6

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return 0.3 + 0.1 * worker + 0.2 * (draw % 5) + 0.01 * start


def shards(workers: int = 3, samples: int = 20, features: int = 6, classes: int = 3) -> list[Any]:
    rng = torch.Generator().manual_seed(5)
    sizes = [samples + 4 * worker for worker in range(workers)]
    return [(torch.randn(m, features, generator=rng), torch.randint(classes, (m,), generator=rng)) for m in sizes]


def shard(worker: int) -> Any:
    """One worker's data, built where they are needed."""
    return shards(4)[worker]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """The same module at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build()


def mlp(*between: nn.Module, outputs: int = 3) -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(6, 8), *(between or (nn.Tanh(),)), nn.Linear(8, outputs)))


class Scaled(nn.Module):
    """A model with a parameter of no dimension, one that is frozen and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))
        self.body[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.1, 0.0, -0.1]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.body(inputs) + self.shift


class Named(nn.Module):
    """A model that takes a dict by name and gives its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: Tensor, labels: Tensor, weight: Tensor) -> Any:
        losses = cross_entropy(self.body(inputs), labels, reduction="none")
        return SimpleNamespace(loss=(losses * weight).mean())


def named_shards() -> list[Any]:
    return [{"inputs": x, "labels": y, "weight": 1.0 + y.float()} for x, y in shards()]


class Jittered(torch.utils.data.Dataset[Any]):
    """A dataset whose samples are augmented by torch's global generator."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def __len__(self) -> int:
        """How many samples."""
        return len(self.pair[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """One sample, never the same."""
        return self.pair[0][row] + 0.1 * torch.randn(self.pair[0].shape[1]), self.pair[1][row]


def ragged(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch of samples, in the opposite order."""
    return torch.stack([x for x, _ in reversed(samples)]), torch.stack([y for _, y in reversed(samples)])


def convolutional() -> nn.Module:
    return made(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )


def images() -> list[Any]:
    rng = torch.Generator().manual_seed(9)
    return [(torch.randn(12, 1, 8, 8, generator=rng), torch.randint(3, (12,), generator=rng)) for _ in range(3)]


def right(module: nn.Module, batch: Any) -> float:
    return float((module(batch[0]).argmax(1) == batch[1]).float().mean())


THREE = Exponential([0.5, 1.0, 2.0], seed=5)
FOUR = Exponential([1.0, 0.5, 3.0, 1.5], seed=1)
NETWORK = {"updates": 20, "evaluate_every": 6}


def own(problem: Any, algorithm: Any = None, speeds: Any = THREE, **options: Any) -> Case:
    """A run of a problem that no folder can build."""
    chosen = method("dude") if algorithm is None else algorithm
    return Case(chosen, problem, speeds, {**NETWORK, **options}, {"problem": problem})


OWN: dict[str, Callable[[], Case]] = {
    "own method with wakes": lambda: _own_method(Deadline(LR)),
    "own method with cancels": lambda: _own_method(Fresh(LR)),
    "own problem": lambda: own(Sines(), speeds=FOUR),
    "own problem, vanilla": lambda: own(Sines(), method("vanilla"), FOUR, seed=2),
    "own speeds": lambda: Case(
        method("uniform"), noisy(), Sawtooth(), {"updates": 40, "evaluate_every": 9}, {"speeds": Sawtooth()}
    ),
    "network scaled": lambda: own(Network(Scaled(), cross_entropy, shards(), 4, replacement=False)),
    "network function": lambda: own(Network(lambda: nn.Linear(6, 3), cross_entropy, shards(), [4, 6, 8]), seed=4),
    "network dict": lambda: own(Network(Named(), shards=named_shards(), batch_size=4)),
    "network step": lambda: own(
        Network(
            mlp(),
            shards=named_shards(),
            batch_size=5,
            step=lambda model, batch: cross_entropy(model(batch["inputs"]), batch["labels"]),
        )
    ),
    "network collate": lambda: own(
        Network(mlp(), cross_entropy, [list(zip(*pair, strict=True)) for pair in shards()], batch_size=4, collate_fn=ragged)
    ),
    "network dropout": lambda: own(
        Network(lambda: mlp(nn.Dropout(0.3)), cross_entropy, shards(), 4, stochastic=True), method("siag")
    ),
    "network augmented": lambda: own(Network(mlp(), cross_entropy, [*map(Jittered, shards())], 4, stochastic=True)),
    "network held out": lambda: own(
        Network(
            mlp(),
            cross_entropy,
            shards(),
            4,
            held_out=shards(),
            metrics={"right": right},
            test=shards()[0],
            weights="samples",
        ),
        keep_best="max right",
    ),
    "network accuracy at workers": lambda: own(
        Network(mlp(), cross_entropy, shards(), 4, metrics={"accuracy": right}, weights=[1.0, 2.0, 3.0])
    ),
    "network shard function": lambda: own(
        Network(mlp(), cross_entropy, shard, 4, workers=4, weights="samples", full_gradient=False), speeds=FOUR
    ),
    "network regression": lambda: own(
        Network(mlp(outputs=1), mse_loss, [(x, x.sum(1, keepdim=True)) for x, _ in shards()], 4, evaluation_size=7)
    ),
    "network images": lambda: own(Network(convolutional(), cross_entropy, images(), 4), updates=12),
    "network without batchnorm": lambda: own(
        Network(without_batchnorm(mlp(nn.BatchNorm1d(8), nn.ReLU())), cross_entropy, shards(), 4)
    ),
    "network local steps": lambda: own(LocalSteps(Network(mlp(), cross_entropy, shards(), 4), k=3, lr=0.1)),
    "network clipped": lambda: own(Clipped(Network(mlp(), cross_entropy, shards(), 4), norm=0.3)),
    "network exact": lambda: own(FullGradients(Network(mlp(), cross_entropy, shards(), 4))),
    "rejections": lambda: own(Holes([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5), method("dude", memory="workers")),
    "wrong shapes": lambda: own(Cuts([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5), method("fedbuff", buffer=2)),
    "who gives no numbers leaves": lambda: own(
        Hopeless([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5),
        method("dude", memory="workers"),
        on_nonfinite="leave",
        updates=200,
    ),
}


def _own_method(algorithm: Any) -> Case:
    problem, options = noisy(4), {"updates": 30, "evaluate_every": 7, "evaluate_seconds": 2.5}
    return Case(algorithm, problem, FOUR, options, {"algorithm": algorithm})


for _name, _make in OWN.items():
    add_case("options", _name, _make)


# --- speeds, absences, links, local steps, optimisers, ends and evaluations ---

TIMES = [[0.5, 0.7, 0.2], [1.0], [2.0, 0.1], [0.9, 0.9, 0.9, 3.0], [1.5, 0.25], [0.4]]
MEANS = [0.5, 1.0, 0.7, 2.0, 1.2, 0.3]
ABSENCES = [(0, 1.0, 3.0), (2, 0.0, 2.0), (4, 5.0, 6.5), (4, 8.0, 9.0)]
PACES = [[1, 1, 1, 1, 1, 1], [9, 1, 1, 0.5, 1, 2], [1, 2, 3, 4, 5, 6]]
SPEEDS: dict[str, Callable[[], Any]] = {
    "fixed": lambda: Fixed(MEANS),
    "normal own seed": lambda: Normal(6, std=5.0, seed=9),
    "exponential": lambda: Exponential(MEANS),
    "lognormal": lambda: Lognormal(MEANS, sigma=0.7),
    "pareto": lambda: Pareto(MEANS, shape=1.5, seed=2),
    "changing": lambda: Changing(Fixed(MEANS), [3.0, 6.5], PACES),
    "recorded": lambda: Recorded(TIMES),
    "drifting": lambda: Drifting(Exponential(MEANS), spread=0.8, every=2.0, keep=0.7),
    "bursty": lambda: Bursty(Fixed(MEANS), usual=4.0, burst=1.0, factor=5.0),
    "away": lambda: Away(Fixed(MEANS), ABSENCES),
    "nested": lambda: Away(Bursty(Drifting(Lognormal(MEANS), every=1.5), usual=3.0, burst=1.0), ABSENCES),
}


def paced(speeds: Any, algorithm: Any = None, **options: Any) -> Case:
    usual = {"updates": 45, "seed": 3, "evaluate_every": 10}
    return Case(method("dude") if algorithm is None else algorithm, noisy(), speeds, {**usual, **options})


def add_speeds() -> None:
    for name, make in SPEEDS.items():
        add_case("options", f"speeds {name}", lambda make=make: paced(make()))


add_speeds()


@scenario("options", "speeds and absences from files")
def _(folder: Path) -> Parts:
    rows = [f"{worker},{seconds}" for worker, some in enumerate(TIMES) for seconds in some]
    (folder / "times.csv").write_text("\n".join(["worker,seconds", *rows]) + "\n")
    gone = [f"{worker},{start},{end}" for worker, start, end in ABSENCES]
    (folder / "away.csv").write_text("\n".join(["worker,start,end", *gone, "5,7.0,"]) + "\n")
    speeds = Recorded(folder / "times.csv")
    case = paced(speeds, changes=told(folder / "away.csv", 6))
    straight = case.run()
    return {**parts_of(straight), **kept(case, folder, straight)}


def plain(algorithm: Any, **options: Any) -> Case:
    return on_quadratic(algorithm, **options)


def momentum(params: Any, lr: float) -> Any:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True)


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))


def groups_of(params: Any, lr: float) -> Any:
    named = params.named()
    biases, rest = [p for name, p in named if "bias" in name], [p for name, p in named if "bias" not in name]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=lr)


def with_givens(case: Case, *names: str) -> Case:
    """A case of whose options some must be given again to resume."""
    return dataclasses.replace(case, given={**case.given, **{name: case.options[name] for name in names}})


def norm(x: Any) -> float:
    return float(x.norm())


def raises_later(x: Any) -> float:
    if float(x.norm()) > 2.0:
        raise ValueError("too far out")
    return 1.0


VARIOUS: dict[str, Callable[[], Case]] = {
    "told on and off": lambda: plain(
        method("dude"), changes=told(on_off(6, 4.0, 2.0, 12.0, seed=2)), time=14.0, updates=None
    ),
    "told dropouts": lambda: plain(method("sync"), changes=told(dropouts(6, 0.5, 6.0)), updates=30),
    "workers leave with memory": lambda: plain(method("dude", memory="workers"), changes=MOVES),
    "compressed memory leaves": lambda: plain(method("dude", memory="workers", compress="int8"), changes=MOVES),
    "link": lambda: plain(method("uniform"), link=Link(0.25, 64.0)),
    "link and int8": lambda: plain(method("dude", memory="workers", compress="int8"), link=Link(0.1, 20.0)),
    "link and sparse": lambda: plain(method("dude", memory="workers", compress=0.25), link=Link(0.0, 20.0)),
    "link, queues and moves": lambda: plain(method("shuffled"), link=Link(0.2), changes=MOVES, updates=None, time=14.0),
    "link, many at one model": lambda: plain(method("malenia"), link=Link(0.05, 100.0), updates=12),
    "link, rounds": lambda: plain(method("ringleader"), link=Link(0.05, 100.0)),
    "digits best on samples": lambda: on_digits(
        method("sync", lr=0.5), keep_best="objective", evaluate_every=3, evaluate_samples=9
    ),
    "digits stop on samples": lambda: on_digits(
        method("dude", lr=0.3), stop=EarlyStop("accuracy", patience=2), evaluate_every=2, evaluate_samples=9, updates=60
    ),
    "link and stops": lambda: plain(method("ringmaster"), link=Link(0.2, 500.0)),
    "local steps": lambda: Case(
        method("fedbuff"), LocalSteps(noisy(), 3, 0.05), Normal(6, std=1.0), {"updates": 20, "evaluate_every": 5}
    ),
    "local steps exact": lambda: Case(
        method("sag"), LocalSteps(noisy(), 2, 0.05), Normal(6, std=1.0), {"updates": 20, "evaluate_every": 5}
    ),
    "clipped": lambda: Case(
        method("vanilla"), Clipped(noisy(), 2.0), Normal(6, std=1.0), {"updates": 40, "evaluate_every": 9}
    ),
    "clipped local steps": lambda: Case(
        method("dude"), LocalSteps(Clipped(noisy(), 2.0), 2, 0.1), Normal(6, std=1.0), {"updates": 30, "evaluate_every": 9}
    ),
    "full gradients": lambda: Case(
        method("dude"), FullGradients(noisy()), Normal(6, std=1.0), {"updates": 30, "evaluate_every": 9}
    ),
    "digits local steps": lambda: Case(
        method("shuffled"), LocalSteps(digits(), 3, 0.05), Pareto([1.0, 1.0, 2.0, 2.0, 1.0]), {"updates": 15}
    ),
    "logistic": lambda: Case(
        method("dude"), Logistic(workers=5, features=3, samples=20, batch_size=4), Normal(5), {"updates": 40, "seed": 2}
    ),
    "logistic exact": lambda: Case(
        method("saga"), Logistic(workers=5, features=3, samples=21, batch_size=4), Normal(5), {"updates": 20, "seed": 2}
    ),
    "logistic own data": lambda: Case(
        method("aced"),
        Logistic(
            shards=[(x.tolist(), [1.0 if k else -1.0 for k in y.tolist()]) for x, y in shards()], batch_size=[3, 4, 5]
        ),
        THREE,
        {"updates": 20},
    ),
    "digits iid by samples": lambda: Case(
        method("dude"), digits(split="iid", weights="samples", seed=4), Normal(5), {"updates": 15}
    ),
    "digits by label": lambda: Case(method("mifa"), digits(split="label"), Normal(5), {"updates": 8}),
    "digits usual evaluations": lambda: Case(method("dude"), digits(), Normal(5), {"time": 12.0}),
    "digits evaluated on samples": lambda: on_digits(method("dude"), evaluate_samples=7, evaluate_seconds=3.0),
    "digits best accuracy": lambda: on_digits(method("vanilla", lr=0.3), keep_best="accuracy", evaluate_every=2),
    "digits bfloat16": lambda: on_digits(method("dude"), precision="bfloat16"),
    "digits two threads": lambda: on_digits(method("dude"), threads=2, updates=8),
    "digits two cores": lambda: on_digits(method("dude"), cores=2),
    "digits two cores, queues": lambda: on_digits(method("uniform"), cores=2),
    "digits batched": lambda: on_digits(method("dude"), batch=True),
    "digits batched, cancels": lambda: on_digits(method("ringmaster"), batch=True),
    "digits AdamW": lambda: on_digits(method("dude", lr=0.01), optimizer="AdamW[weight_decay=0.1]"),
    "digits AdamW, groups": lambda: with_givens(on_digits(method("dude", lr=0.01), optimizer=groups_of), "optimizer"),
    "digits Adam, memory at workers": lambda: on_digits(
        method("dude", lr=0.01, memory="workers"),
        optimizer="Adam[betas=(0.8,0.99)]",
        schedule="CosineAnnealingLR[T_max=15]",
    ),
    "SGD with momentum": lambda: plain(method("fedbuff"), optimizer="SGD[momentum=0.9]", schedule="StepLR[step_size=10]"),
    "own optimizer and schedule": lambda: with_givens(
        plain(method("dude"), optimizer=momentum, schedule=decay), "optimizer", "schedule"
    ),
    "schedule alone": lambda: plain(method("vanilla"), schedule="ExponentialLR[gamma=0.97]"),
    "half table": lambda: plain(method("dude"), table="half"),
    "host table": lambda: plain(method("ca2fl"), table="host", changes=MOVES, updates=None, time=12.0),
    "digits half table": lambda: on_digits(method("dude"), table="half"),
    "stop by patience": lambda: plain(method("dude", lr=0.2), updates=300, stop=EarlyStop(patience=3), evaluate_every=3),
    "stop by target": lambda: plain(method("dude", lr=0.1), updates=300, stop=EarlyStop(target=27.9), evaluate_every=5),
    "stop at a checkpoint, by own metric": lambda: with_givens(
        plain(
            method("dude", lr=0.1),
            updates=300,
            metrics={"norm": norm},
            stop=EarlyStop("norm", target=1.0, larger_is_better=True),
            evaluate_every=5,
        ),
        "metrics",
    ),
    "metric that is switched off": lambda: with_givens(
        plain(method("dude", lr=0.1), metrics={"norm": norm, "later": raises_later}), "metrics"
    ),
    "keeps the best": lambda: plain(method("vanilla", lr=0.4), updates=60, keep_best="objective", evaluate_every=2),
    "one checkpoint": lambda: plain(method("mifa"), keep=1),
    "until a time": lambda: plain(method("dude"), updates=None, time=7.5, evaluate_seconds=0.5),
    "time before updates": lambda: plain(method("vanilla"), updates=10_000, time=5.0),
    "time of an arrival": lambda: Case(method("vanilla"), noisy(), Fixed([1, 2, 4, 1, 2, 4]), {"time": 8.0}),
    "evaluated after the last arrival": lambda: Case(
        method("vanilla"),
        noisy(4),
        Fixed([5.0] * 4),
        {"time": 13.0, "evaluate_seconds": 0.75, "changes": [leave(2, 12.0)]},
    ),
    "wakes alone": lambda: plain(method("fedfix", period=0.1), updates=None, time=5.0, changes=MOVES),
    "start given": lambda: plain(method("dude"), start=torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)),
    "seeds of their own": lambda: Case(
        method("generalized"),
        noisy(seed=4, start=[1.0, 2.0, 3.0, 4.0]),
        Exponential(MEANS, seed=8),
        {"updates": 30, "seed": 5},
    ),
    "one worker": lambda: Case(method("dude", wait_for=1), noisy(1), Fixed([1.0]), {"updates": 12}),
    "many workers": lambda: Case(method("auto"), noisy(120, 2), Normal(120, std=5.0), {"updates": 25}),
}

for _name, _make in VARIOUS.items():
    add_case("options", _name, _make)


@scenario("options", "watched")
def _(folder: Path) -> Parts:
    """What a watch function and a logger are told."""
    seen_by_watch: list[Any] = []
    told_to_log: list[Any] = []

    def watch(state: Any, arrival: Any) -> None:
        seen_by_watch.append([state.x.clone(), state.version, arrival.value, arrival.time, list(arrival.job)])

    def log(version: int, values: Mapping[str, float]) -> None:
        known = {name: value for name, value in values.items() if not name.endswith(("rate", "updates_per_second"))}
        told_to_log.append([version, known])

    run = plain(method("dude", memory="workers"), changes=MOVES).run(watch=[watch], log=[log])
    return {**parts_of(run), "watch": canonical(seen_by_watch), "log": canonical(told_to_log)}


@scenario("options", "no update at all")
def _(folder: Path) -> Parts:
    case = plain(method("dude"), updates=0)
    run = case.run(folder=folder / "none")
    return {**parts_of(run), "more": whole(resume(folder / "none", updates=9))}


@scenario("options", "interrupted by an error, resumed twice, lengthened")
def _(folder: Path) -> Parts:
    case, place, parts = plain(method("ringleader"), changes=MOVES, updates=40), folder / "run", {}
    with contextlib.suppress(ValueError):
        case.run(folder=place, watch=[kill_at(20, ValueError("of the user's own"))])
    parts["left by an error"] = whole(load(place))
    with contextlib.suppress(KeyboardInterrupt):
        resume(place, watch=[kill_at(11, KeyboardInterrupt())])
    parts["left by an interrupt"] = whole(load(place))
    parts["ended"] = whole(resume(place))
    parts["again"] = whole(resume(place))
    parts["longer"] = whole(resume(place, updates=55))
    parts["replay"] = whole(replay(place))
    parts["start of another"] = whole(plain(method("vanilla"), updates=9).run(start=place))
    parts["gone on with"] = whole(plain(method("vanilla"), updates=9, folder=folder / "on", go_on=True).run())
    parts["gone on with again"] = whole(plain(method("vanilla"), updates=9, folder=folder / "on", go_on=True).run())
    return parts


@scenario("options", "a damaged checkpoint")
def _(folder: Path) -> Parts:
    case, place = plain(method("dude", memory="workers"), updates=40), folder / "run"
    straight = case.run(folder=place, checkpoint_every=10)
    newest = max((place / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    mended = resume(place, updates=50)
    return {"straight": whole(straight), **parts_of(mended), "replay": whole(replay(place))}


@scenario("options", "refusals")
def _(folder: Path) -> Parts:
    """What cannot be is refused; what people are told stands in texts."""
    three, dude = Fixed([1.0, 2.0, 4.0]), method("dude")
    cases: list[Callable[[], Any]] = [
        lambda: simulate(dude, noisy(), three, updates=5),
        lambda: simulate(dude, noisy(), Normal(6)),
        lambda: simulate(dude, noisy(), Normal(6), updates=-1),
        lambda: simulate(dude, noisy(), Normal(6), updates=5, evaluate_every=0),
        lambda: simulate(dude, noisy(), Normal(6), updates=5, keep_best="beauty"),
        lambda: simulate(dude, noisy(), Normal(6), updates=5, changes=[leave(9, 1.0)]),
        lambda: simulate(dude, noisy(), Normal(6), updates=5, optimizer="Adamm"),
        lambda: simulate(method("auto"), noisy(), Normal(6), updates=5, optimizer="Adam"),
        lambda: simulate(method("dude", wait_for=9), noisy(), Normal(6), updates=5),
        lambda: simulate(dude, noisy(), Normal(6), updates=5, start=torch.zeros(2)),
        lambda: simulate(Deadline(LR), noisy(), Normal(6), updates=5, changes=[leave(1, 1.0)]),
        lambda: simulate(dude, noisy(), Normal(6), updates=500, changes=[leave(i, 1.0 + i) for i in range(6)]),
        lambda: simulate(method("sync"), noisy(), Away(Fixed(MEANS), [(1, 3.0, None)]), updates=500),
        lambda: simulate(dude, Hopeless([[0.0], [1.0], [2.0]]), three, updates=500),
        lambda: simulate(dude, Hopeless([[0.0], [1.0], [2.0]]), three, updates=500, on_nonfinite="stop"),
        lambda: resume(folder / "nothing"),
        lambda: replay(folder / "nothing"),
        lambda: sweep({"algorithm": [dude], "colour": [1]}, noisy(), Normal(6), updates=5),
        lambda: compare([dude, dude], noisy(), Normal(6), updates=5),
        lambda: Network(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), cross_entropy, shards()),
        lambda: parse("algorithm", "dude[lr=0.1,waitfor=2]"),
        lambda: method("dude", compress="int8"),
        lambda: Quadratic([[1.0, 2.0], [3.0]]),
        lambda: Recorded([[1.0], [-1.0]]),
    ]
    kinds, texts = [], []
    for case in cases:
        try:
            case()
            kinds.append("none")
        except Exception as error:
            kinds.append(type(error).__name__)
            texts.append(str(error).replace(str(folder), "FOLDER"))
    return {"kinds": canonical(kinds), "texts": "\n".join(texts)}


# --- many runs: batches, replicas, sweeps and comparisons ---

BATCHED: dict[str, Callable[[], Case]] = {
    "batched quadratic": lambda: plain(method("dude"), batch=True),
    "batched logistic": lambda: Case(
        method("dude"), Logistic(workers=5, features=3, samples=20), Normal(5), {"updates": 25, "batch": True}
    ),
    "batched local steps": lambda: Case(
        method("fedbuff"), LocalSteps(digits(), 2, 0.1), Normal(5), {"updates": 12, "batch": True}
    ),
    "batched clipped": lambda: Case(method("vanilla"), Clipped(digits(), 0.5), Normal(5), {"updates": 15, "batch": True}),
    "batched memory at workers": lambda: on_digits(method("dude", memory="workers"), batch=True),
    "batched sync": lambda: on_digits(method("sync"), batch=True, updates=8),
    "batched moves": lambda: on_digits(method("dude"), batch=True, changes=MOVES[:4]),
    "batched AdamW": lambda: on_digits(method("dude", lr=0.01), batch=True, optimizer="AdamW"),
    "batched network": lambda: own(Network(mlp(), cross_entropy, shards(), 4, weights="samples"), batch=True),
    "batched images": lambda: own(Network(convolutional(), cross_entropy, images(), 4), batch=True, updates=12),
    "batched exact": lambda: Case(method("iag"), digits(), Normal(5), {"updates": 8, "batch": True}),
    "batched rejections": lambda: own(Holes([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5), batch=True),
    "cores network": lambda: own(Network(mlp(), cross_entropy, shards(), 4), batch=False, cores=2),
    "cores quadratic": lambda: plain(method("ringmaster"), cores=2),
}

for _name, _make in BATCHED.items():
    add_case("groups", _name, _make)


def of_sweep(table: Any) -> Parts:
    """What is to be the same of a grid of runs."""
    found = {"table": columns(table), "points": canonical(table.points), "failed": canonical(sorted(table.failed))}
    parts = [None if run is None else parts_of(run) for run in table.runs]
    names = ("weights", "trace", "gradients", "events", "metrics", "workers", "end")
    each = {name: "\n\n".join("none" if one is None else one[name] for one in parts) for name in names}
    return {**found, **each, "texts": "\n".join([*table.notes, *table.failed.values()])}


def quietly(verb: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Without warnings that something is the same for all seeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verb(*given, **options)


GRID = {"updates": 20, "evaluate_every": 6}


def rates_and_seeds(name: str) -> dict[str, list[Any]]:
    return {"algorithm": [method(name)], "lr": [LR / 2, LR, 2 * LR], "seed": [0, 1]}


def add_sweeps() -> None:
    def stacked(name: str, problem: Callable[[], Any], n: int, batch: bool | None, **options: Any) -> Scenario:
        return lambda folder: of_sweep(
            quietly(sweep, rates_and_seeds(name), problem(), Normal(n, std=1.0), batch=batch, **{**GRID, **options})
        )

    for name in sorted(dd.ALGORITHMS):
        scenario("groups", f"stacked quadratic {name}")(stacked(name, noisy, 6, True))
    for name in ("dude", "auto", "vanilla", "uniform", "ringmaster", "fedfix", "sag", "fadas"):
        scenario("groups", f"stacked digits {name}")(stacked(name, digits, 5, True, updates=8, evaluate_every=4))
    scenario("groups", "sweep one by one")(stacked("dude", noisy, 6, None))
    scenario("groups", "stacked moves")(stacked("dude", noisy, 6, True, changes=MOVES, updates=None, time=12.0))
    scenario("groups", "stacked stop")(stacked("dude", noisy, 6, True, updates=200, stop=EarlyStop(patience=2)))
    scenario("groups", "stacked best")(stacked("vanilla", noisy, 6, True, keep_best="objective", evaluate_every=1))
    scenario("groups", "stacked in parts")(stacked("dude", digits, 5, True, updates=6, memory=200_000.0))
    scenario("groups", "stacked half table")(stacked("dude", digits, 5, True, updates=6, table="half"))
    scenario("groups", "stacked link")(stacked("shuffled", noisy, 6, True, link=Link(0.1, 100.0)))


add_sweeps()


@scenario("groups", "stacked in a folder, killed and repeated")
def _(folder: Path) -> Parts:
    grid, options = rates_and_seeds("dude"), {**GRID, "batch": True, "checkpoint_every": 4, "folder": folder / "runs"}
    count = iter(range(10**6))

    def kill(x: Any) -> float:
        if next(count) == 15:
            raise Killed
        return float(x.norm())

    with contextlib.suppress(Killed):
        quietly(sweep, grid, noisy(), Normal(6, std=1.0), **options, metrics={"norm": kill})
    made = quietly(sweep, grid, noisy(), Normal(6, std=1.0), **options, metrics={"norm": norm})
    parts = of_sweep(made)
    again_ = quietly(sweep, grid, noisy(), Normal(6, std=1.0), **options, metrics={"norm": norm})
    names = sorted(path.name for path in (folder / "runs").iterdir())
    read = [whole(load(folder / "runs" / name)) for name in names if (folder / "runs" / name).is_dir()]
    return {**parts, "again": columns(again_), "files": canonical(names), "load": "\n\n".join(read)}


@scenario("groups", "stacked in a folder, replayed")
def _(folder: Path) -> Parts:
    made = quietly(sweep, rates_and_seeds("ca2fl"), noisy(), Normal(6, std=1.0), **GRID, batch=True, folder=folder / "runs")
    replays = [replay(run.folder) for run in made.runs]
    return {**of_sweep(made), "replays": "\n\n".join(map(whole, replays))}


@scenario("groups", "sweep over everything")
def _(folder: Path) -> Parts:
    grid = {
        "algorithm": [method("dude"), method("vanilla"), method("fedbuff")],
        "problem": [noisy(), noisy(noise=0.1)],
        "speeds": [Normal(6, std=1.0), Exponential(MEANS)],
        "seed": [0, 3],
    }
    return {
        **below("together", of_sweep(quietly(sweep, grid, **GRID, batch=True))),
        **below("alone", of_sweep(quietly(sweep, grid, **GRID))),
    }


@scenario("groups", "sweep of own networks")
def _(folder: Path) -> Parts:
    problem = Network(lambda: nn.Linear(6, 3), cross_entropy, shards(), 4)
    grid = {"algorithm": [method("dude"), method("uniform")], "lr": [LR, 0.1], "seed": [0, 1]}
    return of_sweep(quietly(sweep, grid, problem, THREE, **GRID, batch=True))


@scenario("groups", "sweep with runs that fail")
def _(folder: Path) -> Parts:
    grid = {"algorithm": [method("vanilla")], "lr": [LR, 1e200, 1e201]}
    return {
        **below("together", of_sweep(quietly(sweep, grid, noisy(), Normal(6), updates=30, batch=True))),
        **below("alone", of_sweep(quietly(sweep, grid, noisy(), Normal(6), updates=30))),
    }


@scenario("groups", "compare")
def _(folder: Path) -> Parts:
    methods = [method(name) for name in sorted(dd.ALGORITHMS)]
    made = quietly(compare, methods, noisy(), Normal(6, std=1.0), seeds=[0, 2], time=6.0, folder=folder / "runs")
    names = sorted(path.name for path in (folder / "runs").iterdir())
    return {**of_sweep(made), "files": canonical(names), "settings": canonical(sorted(made.settings()[""]))}


@scenario("groups", "compare digits by functions of the seed")
def _(folder: Path) -> Parts:
    methods = {"ours": method("dude"), "theirs": method("vanilla")}
    problem, speeds = (lambda seed: digits(seed=seed + 1)), (lambda seed: Normal(5, std=1.0, seed=seed))
    return of_sweep(quietly(compare, methods, problem, speeds, seeds=[0, 1], updates=8, evaluate_every=4))


# --- theory, the shell and the paper's command ---


def values_of(found: Any) -> str:
    """The numbers of something, without the sentences in it."""

    def bare(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [bare(getattr(value, each.name)) for each in dataclasses.fields(value)]
        if isinstance(value, Mapping):
            return {key: bare(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [bare(one) for one in value]
        return "" if isinstance(value, str) else value

    return canonical(bare(found))


@scenario("theory", "constants")
def _(folder: Path) -> Parts:
    problems = {
        "quadratic": noisy(),
        "logistic": Logistic(workers=4, features=3, samples=20),
        "digits": digits(workers=3),
        "local steps": LocalSteps(noisy(), 2, 0.1),
        "own": Sines(),
    }
    found = {name: theory.constants(problem, draws=8, iterations=6, seed=1) for name, problem in problems.items()}
    return {name: values_of(one) for name, one in found.items()} | {
        "texts": "\n".join(note for one in found.values() for note in one.notes)
    }


@scenario("theory", "delays")
def _(folder: Path) -> Parts:
    found = {name: [theory.delays(make(), wait_for, updates=60) for wait_for in (1, 3)] for name, make in SPEEDS.items()}
    usual = theory.delays(Normal(6, std=5.0, seed=2), 2)
    run = plain(method("dude"), changes=MOVES, folder=folder / "run", updates=None, time=14.0).run()
    recorded = [theory.delays(run), theory.delays(folder / "run", 2)]
    grids = delay_grids(run.trace, 6)
    return {
        "speeds": "\n".join(f"{name} {values_of(some)}" for name, some in found.items()),
        "usual": values_of(usual),
        "recorded": values_of(recorded),
        "grids": canonical(grids),
        "approximate": canonical([theory.tau_max(MEANS), theory.tau_avg(MEANS)]),
        "texts": "\n".join(itertools.chain(usual.notes, *(one.notes for one in recorded))),
    }


@scenario("theory", "theorem and rates")
def _(folder: Path) -> Parts:
    constants = [(1.0, 2.0, 0.5, 19.0, 10), (3.0, 0.1, 0.0, 1.0, 3), (0.2, 5.0, 4.0, 7.0, 30)]
    steps = [[theory.step_size(*one, updates=t) for t in (1, 1000, 10**7)] for one in constants]
    bounds = [[theory.bound(*one, updates=t) for t in (1, 1000, 10**7)] for one in constants]
    others = [[theory.horizon(*one), theory.largest_step(one[0], one[3])] for one in constants]
    measured = {"variance": 0.5, "heterogeneity": [1.0, 0.1, 2.0], "delay": 9.0, "mean_delay": 4.0}
    more = {"local_steps": 2, "buffer": 2, "largest_noise": 1.0, "hessian": 0.5, "largest_gradient": 3.0, "gap": 2.0}
    return {
        "theorem": canonical([steps, bounds, others]),
        "rates": canonical([theory.rates(**{"workers": 3, "updates": t, **measured, **more}) for t in (1, 1000)]),
        "times": canonical(theory.times(smoothness=1.0, gap=2.0, variance=0.3, target=0.01, seconds=MEANS)),
    }


@scenario("theory", "constants along a run")
def _(folder: Path) -> Parts:
    along = theory.Along(noisy(), 10, draws=8, iterations=4)
    run = plain(method("dude")).run(watch=[along])
    return {**parts_of(run), "along": canonical([along.table[name] for name in along.table])}


def said_by(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The last line of a command as values, and all that it says; places in folders are left out."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            shell(*words, "--json")
        except SystemExit as end:
            code = end.code
    told_ = (out.getvalue() + err.getvalue()).replace(str(folder), "FOLDER")
    lines = out.getvalue().replace(str(folder), "FOLDER").strip().splitlines()
    return {"exit": code, **(json.loads(lines[-1]) if lines else {})}, told_


def of_command(folder: Path, *words: str) -> Parts:
    values, text = said_by(folder, *words)
    return {"values": values_of(values), "texts": text}


ON_SHELL = ("--problem", "digits[workers=4,hidden=4,batch_size=4]", "--speeds", "truncated_normal[std=5]")


@scenario("theory", "advise")
def _(folder: Path) -> Parts:
    return of_command(folder, "advise", *ON_SHELL, "--time", "50", "--folder", str(folder / "advice"))


@scenario("theory", "advise of a run")
def _(folder: Path) -> Parts:
    plain(method("vanilla"), folder=folder / "run").run()
    return of_command(folder, "advise", "--run", str(folder / "run"), "--folder", str(folder / "advice"))


@scenario("theory", "shell")
def _(folder: Path) -> Parts:
    run, runs = str(folder / "run"), str(folder / "runs")
    ends = ("--updates", "12", "--evaluate-every", "4")
    commands = {
        "train": (
            "train",
            "dude[lr=0.05,wait_for=2]",
            *ON_SHELL,
            *ends,
            "--folder",
            run,
            "--seed",
            "2",
            "--latency",
            "0.1",
        ),
        "resume": ("resume", run, "--updates", "15"),
        "replay": ("replay", run),
        "compare": ("compare", "dude[lr=0.01|0.05]", "vanilla", *ON_SHELL, *ends, "--folder", runs, "--seeds", "0", "1"),
        "list": ("list",),
        "list one": ("list", "dude"),
        "refused": ("train", "dude[lr=0.05,waits=2]", *ends),
        "no run": ("resume", str(folder / "nothing")),
    }
    found = {name: of_command(folder, *words) for name, words in commands.items()}
    return {name: parts["values"] for name, parts in found.items()} | {
        "texts": "\n\n".join(parts["texts"] for parts in found.values()),
        "load": whole(load(folder / "run")),
    }


@scenario("theory", "paper")
def _(folder: Path) -> Parts:
    import pyarrow.parquet as pq

    wanted = ("--problem", "digits[hidden=4,batch_size=8]", "--updates", "60", "--evaluations", "3", "--seeds", "0", "1")
    panels = ("--alphas", "0.5", "--stds", "1", "--steps", "0.02", "0.05", "--wait-for", "1", "2", "--cores", "1")
    parts = of_command(folder, "paper", "figure1", *wanted, *panels, "--folder", str(folder / "paper"))
    curves = pq.read_table(folder / "paper" / "curves.parquet").to_pydict()
    cells = [json.loads(path.read_text()) for path in sorted((folder / "paper" / "cells").iterdir())]
    return {
        **parts,
        "curves": canonical({name: list(column) for name, column in curves.items()}),
        "cells": canonical([{k: v for k, v in cell.items() if k != "computed"} for cell in cells]),
        "tables": (folder / "paper" / "figure1.md").read_text(),
        "setting": canonical(json.loads((folder / "paper" / "setting.json").read_text())),
    }


# --- real workers on virtual time ---


def of_workers(here: Any) -> Parts:
    """What is to be the same of a run of real workers on its way; its record must replay to the same bits."""
    here.check_replay()
    return parts_of(seen(here), real=True)


@scenario("workers", "workers calm")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        return of_workers(tests.begin(tests.dude()).go(200))


@scenario("workers", "workers killed")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        here = tests.begin(tests.dude(), together=0.004).go(50)
        for worker, known in ((1, 0.0), (2, 0.2), (0, 1.0), (2, 0.0), (2, 0.0)):
            here.transport.kill(worker, known=known)
            here.go(25)
        return of_workers(here.go(100))


@scenario("workers", "workers whose requests are lost")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        here, count = tests.begin(tests.dude(), fleet=Fleet(resend=0.05, deadline=3.0)), itertools.count()
        on_request(here, lambda: next(count) % 7 != 3)
        return of_workers(here.go(200))


@scenario("workers", "workers whose replies are lost, repeated and late")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        here, count = tests.begin(tests.dude(), fleet=Fleet(resend=0.05, deadline=3.0)), itertools.count()
        held: list[Any] = []

        def change(notices: list[Any]) -> list[Any]:
            given, late = [], held[:]
            held.clear()
            for notice in notices:
                k = next(count) % 11 if is_reply(notice) else 0
                if k == 8:
                    held.append(notice)
                elif k != 5:
                    given += [notice] * (2 if k == 2 else 1)
            return [*given, *late]

        on_receipt(here, change)
        return of_workers(here.go(250))


@scenario("workers", "workers that hang")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        seconds = itertools.chain([0.02] * 40 + [9.0], itertools.cycle([0.02] * 20 + [0.4]))
        fleet = Fleet(resend=0.05, deadline=1.0, alarm=4, restarts=2)
        here = tests.begin(tests.dude(), fleet=fleet, job=lambda: next(seconds)).go(150)
        for worker in range(3):
            fleet.join(worker)
        return of_workers(here.go(100))


@scenario("workers", "workers that start slowly or not at all")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        seconds = {(0, 0): 1.3, (1, 0): -0.8, (1, 1): 0.8, (2, 0): -3.0, (2, 1): 3.0}
        fleet = Fleet(patience=1.0)
        here = tests.begin(tests.dude(), fleet=fleet, start=lambda *who: seconds.get(who, 0.05))
        return of_workers(here.go(500))


@scenario("workers", "workers that raise and give no numbers")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        problem = tests.rough(tests.trio, noise=0.3)
        here = tests.begin(tests.dude(), problem, Fleet(retries=2), schedule=schedule_of(7)).go(200)
        settled(here)
        problem.raises = lambda *job: False
        return of_workers(here)


@scenario("workers", "workers that leave, join and freeze")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        parts: Parts = {}
        for gone in ("leave", "freeze"):
            fleet = Fleet(gone=gone, restarts=0, absent=[2])
            here = tests.begin(tests.dude(), fleet=fleet).go(40)
            fleet.join(2)
            here.go(40)
            fleet.leave(0)
            here.go(40).transport.kill(1)
            here.go(40)
            fleet.join(0)
            here.go(40)
            fleet.join(1)
            parts |= below(gone, of_workers(here.go(60)))
        return parts


@scenario("workers", "workers resumed after a kill")
def _(folder: Path) -> Parts:
    with virtual_workers() as tests:
        parts: Parts = {}
        for memory in ("workers", "server"):
            here = tests.begin(tests.dude(memory=memory)).go(60)
            here.transport.kill(1, known=1.0)
            back = tests.begin(tests.dude(memory=memory), before=here).go(60)
            back.control.leave(2)
            later = tests.begin(tests.dude(memory=memory), before=back.go(20)).go(60)
            parts |= below(memory, of_workers(later))
        return parts


def storm(name: str, seed: int) -> Parts:
    """The tests' own storms: kills, departures, returns and restarts of the server in a fixed order."""
    with virtual_workers() as tests:
        kind, algorithm, gone, together = tests.storms[name]
        chance = random.Random(seed)
        problem = kind(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).tolist(), noise=0.3)
        schedule = schedule_of(7) if kind is tests.rough else None
        conduct = {
            "start": lambda *who: chance.choice([0.05, 0.05, 0.3, 1.5]) * chance.choices([1, -1], [19, 1])[0],
            "job": lambda: chance.choice([0.005, 0.02, 0.02, 0.1]),
            "together": together,
        }

        def begin(before: Any = None) -> Any:
            fleet = Fleet(patience=1.0, restarts=2, retries=1, gone=gone, resend=0.05, deadline=3.0, alarm=5)
            return tests.begin(algorithm, problem, fleet, before, schedule, **conduct)

        here = begin()
        for _ in range(250):
            try:
                here.go(1)
            except RunFailed:
                here = begin(before=here)
                continue
            what = chance.choices(["kill", "leave", "join", "save", ""], [3, 1, 3, 2, 91])[0]
            if what == "kill":
                for worker in chance.sample(range(4), chance.choice([1, 1, 3])):
                    here.transport.kill(worker, known=chance.choice([0.0, 0.2, 1.0]))
            elif what == "save":
                here = begin(before=here)
            elif what:
                getattr(here.control, what)(chance.randrange(4))
        settled(here)
        problem.raises = lambda *job: False
        return of_workers(here)


STORMS = (
    "leave",
    "freeze",
    "together",
    "wait for three",
    "server",
    "busy",
    "rough, wild",
    "rough, wild, freeze",
    "rough, wild, together",
    "rough, wait for two",
    "rough, freeze",
    "rough, vanilla",
    "rough, uniform, freeze",
)

for _name in STORMS:
    scenario("workers", f"storm {_name}")(lambda folder, name=_name: storm(name, 0) | below("seed 1", storm(name, 1)))


def trained(algorithm: Any, problem: Any, folder: Path, given: Mapping[str, Any], fleet: Any, **options: Any) -> Parts:
    """A real run on virtual time: interrupted, killed, resumed, replayed and read back."""
    chance, place = random.Random(5), folder / "run"
    with virtual_workers() as tests:
        tests.begin(tests.dude(), job=lambda: chance.uniform(0.01, 0.05))  # time passes and chance is drawn from
        workers = fleet.built(job_seconds=lambda request: chance.uniform(0.01, 0.05), time=tests.time)
        saving = {"updates": 60, "checkpoint_every": 7, "folder": place, **options}
        with contextlib.suppress(KeyboardInterrupt):
            train(algorithm, problem, workers, **saving, watch=[kill_at(30, KeyboardInterrupt())])
        left = whole(load(place), real=True)
        with contextlib.suppress(Killed):
            resume(place, watch=[kill_at(20)], fleet=workers, **given)
        ended = resume(place, fleet=workers, **given)
        longer = resume(place, updates=75, fleet=workers, **given)
        repeated = replay(place, **given)
        return {
            **parts_of(longer, real=True),
            "left": left,
            "ended": whole(ended, real=True),
            "replay": whole(repeated, real=True),
            "load": whole(load(place), real=True),
            "files": canonical(sorted(path.name for path in place.iterdir())),
        }


TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
TRAINED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    "trained dude": (lambda: method("dude", memory="workers"), lambda: Quadratic(TRIO, noise=0.3), {}),
    "trained int8": (
        lambda: method("dude", memory="workers", compress="int8"),
        lambda: Quadratic(TRIO, noise=0.3),
        {"evaluate_every": 9, "keep_best": "objective"},
    ),
    "trained fedfix": (lambda: method("fedfix", period=0.05), lambda: Quadratic(TRIO, noise=0.3), {}),
    "trained uniform": (lambda: method("uniform"), lambda: Quadratic(TRIO, noise=0.3), {"optimizer": "Adam"}),
    "trained sync": (lambda: method("sync"), lambda: digits(workers=3), {"evaluate_every": 20}),
    "trained ringmaster": (lambda: method("ringmaster"), lambda: digits(workers=3), {"evaluate_seconds": 0.2}),
}


def add_trained() -> None:
    for name, (make, problem, options) in TRAINED.items():

        @scenario("workers", name)
        def _(folder: Path, make: Any = make, problem: Any = problem, options: Any = options) -> Parts:
            return trained(make(), problem(), folder, {}, Fleet(resend=1.0), **options)

    @scenario("workers", "trained network with held-out data")
    def _(folder: Path) -> Parts:
        problem = Network(
            mlp(), cross_entropy, shard, 4, workers=4, held_out=shard, metrics={"right": right}, weights="samples"
        )
        return trained(method("dude"), problem, folder, {"problem": problem}, Fleet(), evaluate_every=15)

    @scenario("workers", "trained with holes")
    def _(folder: Path) -> Parts:
        problem = Holes(TRIO, noise=0.3)
        return trained(method("dude", memory="workers"), problem, folder, {"problem": problem}, Fleet())


add_trained()


# ======================================================================================================================
# The command
# ======================================================================================================================


def texts_of(name: str) -> Parts:
    """What is hashed of a scenario; if it raises, that."""
    torch.set_num_threads(1)
    function = next(some[name] for some in SCENARIOS.values() if name in some)
    logging.getLogger("dualdelay").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parts = function(Path(folder))
        except Exception as error:
            parts = {"raised": f"{type(error).__name__}: {error}"}
        return {part: text.replace(folder, "FOLDER") for part, text in parts.items()}


def computed(name: str, dump: Path | None) -> tuple[str, dict[str, str], float, str]:
    """A scenario's name, its hashes, the seconds it took, and what it raised."""
    begin = time.perf_counter()
    texts = texts_of(name)
    if dump is not None:
        (dump / f"{name}.txt").write_text("\n".join(f"=== {part}\n{text}" for part, text in texts.items()))
    hashes = {part: short(text) for part, text in texts.items()}
    return name, hashes, time.perf_counter() - begin, texts.get("raised", "")


def machine() -> dict[str, Any]:
    """What bits depend on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "numpy": np.__version__, "cpu": capability, "threads": torch.get_num_threads()}


def chosen(part: str | None, only: str | None) -> list[str]:
    names = [name for key, some in SCENARIOS.items() if part in (None, key) for name in some]
    return [name for name in names if only is None or fnmatch.fnmatch(name, only) or only in name]


def difference(name: str, before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """What is not as it was; empty if nothing."""
    if before is None:
        return "was not there before"
    missing, new = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    if "raised" in new:
        return "raises now"
    other = [part for part in before if part in now and before[part] != now[part]]
    said = [", ".join(other)] if other else []
    said += [f"no longer there: {', '.join(missing)}"] if missing else []
    said += [f"new: {', '.join(new)}"] if new else []
    return "; ".join(said)


def report(found: Mapping[str, Mapping[str, str]], path: Path, names: Sequence[str], everything: bool) -> bool:
    """Print what differs from a file; returns whether anything does."""
    book = json.loads(path.read_text())
    if book["machine"] != machine():
        print(f"another machine: {book['machine']} then, {machine()} now; bits may differ for that alone")
    before = book["scenarios"]
    wanted = list(before) if everything else [name for name in names if name in before]
    rows = {name: difference(name, before.get(name), found[name]) for name in found}
    rows |= {name: "missing now" for name in wanted if name not in found}
    bad = {name: said for name, said in rows.items() if said}
    width = max(map(len, bad), default=0)
    for name, said in bad.items():
        print(f"{name:{width}s}  {said}")
    print(f"{len(rows) - len(bad)} scenarios equal, {len(bad)} not")
    return bool(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument(
        "--against", type=Path, help="compare with such a file; exit code 1 if anything differs or is missing"
    )
    parser.add_argument("--only", help="only scenarios whose name has this in it, or matches this pattern")
    parser.add_argument("--part", choices=list(SCENARIOS), help="only those of one part")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--dump", type=Path, help="write what is hashed into this folder, a file for each scenario")
    parser.add_argument("--list", action="store_true", help="print the names of the scenarios, and nothing else")
    given = parser.parse_args()
    names, begin = chosen(given.part, given.only), time.perf_counter()
    if given.list:
        print("\n".join(names))
        return 0
    torch.set_num_threads(1)
    if given.dump is not None:
        given.dump.mkdir(parents=True, exist_ok=True)
    dumps = [given.dump] * len(names)
    found: dict[str, dict[str, str]] = {}
    slow: list[tuple[float, str]] = []
    raised: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        results: Iterator[tuple[str, dict[str, str], float, str]] = map(computed, names, dumps)
        if given.jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(given.jobs, mp_context=context))
            results = pool.map(computed, names, dumps, chunksize=4)
        for name, hashes, seconds, error in results:
            found[name] = hashes
            slow.append((seconds, name))
            if error:
                raised[name] = error
            if given.out is None and given.against is None:
                print(name, " ".join(f"{part}={value}" for part, value in hashes.items()))
    for name, error in raised.items():
        print(f"raised in {name}: {error}")
    count, seconds = sum(map(len, found.values())), time.perf_counter() - begin
    print(f"{len(found)} scenarios, {count} hashes, {seconds:.1f} seconds; slowest:")
    print("  " + ", ".join(f"{name} {each:.1f}" for each, name in sorted(slow, reverse=True)[:5]))
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine(), "scenarios": found}, indent=1) + "\n")
    differs = given.against is not None and report(found, given.against, names, given.part is None and given.only is None)
    return 1 if differs or (raised and given.against is None) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What several tests share: a user's own methods, problems and data, how two runs are compared (bit for bit, or to rounding
where one of them was computed side by side with others), and how a call is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core import Order
from helpers import audit, by_seed, drift, operations, rounding
from tables import ALGORITHMS, CASES, LR

FILES = ("trace.parquet", "metrics.parquet", "model.safetensors", "result.json")


def bits(run: dd.Run) -> dict[str, Any]:
    """Everything that must be the same in two runs that are said to be the same."""
    content: dict[str, Any] = {"weights": run.x.numpy().tobytes(), "version": run.version, "events": run.trace.events}
    content |= {f"trace {name}": run.trace[name].tobytes() for name in run.trace}
    content |= {f"metric {name}": run.metrics[name].tobytes() for name in run.metrics}
    content |= {"ended": run.ended, "time": run.time, "error": run.audit}
    return content | {name: (run.folder / name).read_bytes() for name in FILES if run.folder is not None}


def differences(a: dd.Run | dict[str, Any], b: dd.Run | dict[str, Any]) -> list[str]:
    """What is not the same in two runs, or in what ``bits`` said of them earlier."""
    one, other = (bits(run) if isinstance(run, dd.Run) else run for run in (a, b))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def seen(run: dd.Run) -> dict[str, Any]:
    """What a loaded run, finished or not, says of its weights, tables and end."""
    tables = {"trace": run.trace, "metrics": run.metrics, "workers": run.workers}
    columns = {f"{kind} {name}": table[name].tobytes() for kind, table in tables.items() for name in table}
    return {"x": run.x.tolist(), "ended": run.ended, "best": run.best and run.best.value, **columns}


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _near(a: Any, b: Any, *tolerance: float) -> bool:
    """Whether plain values are equal and the numbers in their tensors nearly so, in share and in size."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), *tolerance, equal_nan=True)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_near(x, y, *tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_near(a[key], b[key], *tolerance) for key in a)
    return bool(a == b)


def _tolerance(single: dd.Run, samples: int = 0) -> tuple[float, float]:
    """How far a run may be from the same run among others: as a share, and at the size of weights and gradients.

    Its gradients and means over so many samples are rounded, and its weights have drifted. Of a quadratic the root of twice
    the loss is the size of a gradient, and a network's are smaller.
    """
    kind, k = single.x.dtype, operations(single.problem)
    share = rounding(operations(single.problem, samples), kind) + drift(single.version, single.algorithm.lr, k, kind)
    losses = single.trace.loss[np.isfinite(single.trace.loss)]
    return share, share * max(1.0, float(single.x.abs().max()), math.sqrt(2 * losses.max(initial=0.0)))


SCHEDULE = ("time", "seconds", "worker", "draw", "version", "after")  # columns of a trace that depend on no rounding


def mismatches(run: dd.Run | None, single: dd.Run | None) -> list[str]:
    """What in a run that was computed side by side with others differs from the run by itself by more than rounding."""
    if run is None or single is None:
        return [] if run is single else [f"{run} and {single}"]
    wrong = [f"trace {name}" for name in SCHEDULE if run.trace[name].tobytes() != single.trace[name].tobytes()]
    wrong += [f"metric {k}" for k in ("time", "version") if not np.array_equal(run.metrics[k], single.metrics[k])]
    wrong += [k for k in ("ended", "time", "version", "rejected") if getattr(run, k) != getattr(single, k)]
    wrong += [] if run.trace.events == single.trace.events else ["events"]
    wrong += [] if list(run.metrics) == list(single.metrics) else ["names of metrics"]
    if wrong:
        return wrong
    numbers = {f"metric {name}": (run.metrics[name], single.metrics[name]) for name in single.metrics}
    numbers["trace loss"] = run.trace.loss, single.trace.loss
    tolerances = dict.fromkeys(numbers, _tolerance(single, samples=1437))  # all digits, if one worker has them all
    if single.x.dtype == torch.float32:
        tolerances["metric accuracy"] = (0.0, 1.5 / 360)  # one test image may lie on the edge of two classes
    wrong = [name for name, pair in numbers.items() if not np.allclose(*pair, *tolerances[name], equal_nan=True)]
    for f in fields(single.state):  # the table is not kept, and a generator is no number
        one, other = getattr(run.state, f.name), getattr(single.state, f.name)
        if f.name not in ("table", "optimizer", "lent", "rng") and not _near(one, other, *_tolerance(single)):
            wrong.append(f"state {f.name}: {one} and {other}")
    if (run.audit is None) != (single.audit is None) or (run.audit is not None and run.audit > audit(run)):
        wrong.append(f"audit {run.audit}")
    return wrong


def both(grid: Mapping[str, Sequence[Any]], *where: Any, **options: Any) -> tuple[dd.Sweep, dd.Sweep]:
    """A sweep whose runs advance side by side, and one whose runs are computed one after the other."""
    if len(grid.get("seed", ())) > 1:
        where = tuple(map(by_seed, where))
    compute = options.pop("compute", dd.Compute())
    together, alone = (dd.sweep(grid, *where, compute=replace(compute, batch=batch), **options) for batch in (True, False))
    return together, alone


def computed_both_ways(grid: Mapping[str, Sequence[Any]], *where: Any, **options: Any) -> dd.Sweep:
    """A sweep whose runs advance side by side; each has been compared with the run by itself."""
    together, alone = both(grid, *where, **options)
    assert (together.points, together.failed) == (alone.points, alone.failed)
    wrong = [mismatches(*pair) for pair in zip(together.runs, alone.runs, strict=True)]
    assert {str(point): found for point, found in zip(together.points, wrong, strict=True) if found} == {}
    return together


NO_NUMBERS = (10**400, 10**5000, "1", None, [1.0], 1j)  # too large for a float or for a text, or no number


def refused(call: Callable[[], Any], *words: str) -> str:
    """The message of the BadInput that a call raises: short, and with these words in it."""
    with pytest.raises(dd.BadInput) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert len(message) < 2500 and "Traceback" not in message
    return message


class Killed(BaseException):
    """What stands for a kill: whatever is on disk when it is raised is all that is left."""


def kill_at(count: int) -> Any:
    """A watch function that kills the run at its arrival number ``count``."""
    left = iter(range(count - 1, -1, -1))

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if next(left) == 0:
            raise Killed

    return watch


@dataclass(kw_only=True)
class DeadlineState(dd.State):
    total: Tensor
    reported: list[int]


@dataclass(frozen=True)
class Deadline(dd.Algorithm[DeadlineState]):
    """An update every second, of whatever came since the last, even nothing: versions change between arrivals."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> DeadlineState:
        return DeadlineState(x, n, total=torch.zeros_like(x), reported=[])

    def first(self, s: DeadlineState) -> list[Order]:
        return [*super().first(s), dd.wake(1.0)]

    def step(self, s: DeadlineState, a: dd.Arrival) -> list[Order]:
        s.total = s.total + a.value
        s.reported.append(a.worker)
        return []

    def on_wake(self, s: DeadlineState, time: float) -> list[Order]:
        s.descend(s.total + s.version, self.lr)  # every version differs from the last, whoever came
        ready, s.reported, s.total = s.reported, [], torch.zeros_like(s.total)
        return [*map(dd.send, ready), dd.wake(time + 1.0)]


@dataclass(kw_only=True)
class FreshState(dd.State):
    sent: dict[int, int]  # the version each worker was sent last


@dataclass(frozen=True)
class Fresh(dd.Algorithm[FreshState]):
    """A job whose model is three versions old is cancelled; every other job is a second one at the same model."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> FreshState:
        return FreshState(x, n, sent=dict.fromkeys(range(n), 0))

    def step(self, s: FreshState, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        orders = [dd.again(a.worker)]
        if a.job.draw % 2:
            orders, s.sent[a.worker] = [dd.send(a.worker)], s.version
        for worker in range(s.n):
            if worker != a.worker and s.version - s.sent[worker] > 3:
                orders += [dd.cancel(worker), dd.send(worker)]
                s.sent[worker] = s.version
        return orders


METHODS: dict[str, Any] = {"deadline": Deadline, "fresh": Fresh}


class Holes(dd.Quadratic):
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


class Steep(dd.Quadratic):
    """A gradient far from the start is not finite: runs with large steps meet it, others do not."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return gradient * (math.nan if float(x.norm()) > 9.0 and draw % 3 else 1.0), loss


def digits(alpha: float, **options: Any) -> dd.Digits:
    """Handwritten digits split over four workers, with a network of 4 hidden units."""
    return dd.Digits(**{"workers": 4, "alpha": alpha, "hidden": 4, "batch_size": 8, **options})


def shards(workers: int = 3, samples: int = 20, features: int = 6, classes: int = 3, seed: int = 0) -> list[Any]:
    rng = torch.Generator().manual_seed(seed)
    sizes = [samples + 4 * worker for worker in range(workers)]
    return [(torch.randn(m, features, generator=rng), torch.randint(classes, (m,), generator=rng)) for m in sizes]


def mlp(*between: nn.Module, features: int = 6, classes: int = 3) -> nn.Module:
    """The same small network at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(features, 8), *(between or (nn.Tanh(),)), nn.Linear(8, classes))


class Scaled(nn.Module):
    """A model with a parameter of no dimension, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))
        self.body[0].bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.body(inputs)


class Jittered(torch.utils.data.Dataset):
    """A dataset whose samples are augmented by torch's global generator."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.pair[0][row] + 0.1 * torch.randn(self.pair[0].shape[1]), self.pair[1][row]


OFTEN = dd.Evaluation(every=7, seconds=2.0)


class Scenario:
    """A run with something in it that makes it hard to stop or to repeat."""

    def __init__(
        self,
        algorithm: dd.Algorithm[Any],
        problem: dd.Problem = CASES["noisy"][0],
        speeds: dd.SpeedModel | dd.SimulatedFleet = CASES["noisy"][1],
        *,
        checkpoint_every: int = 5,
        keep: int = 3,
        evaluation: dd.Evaluation = OFTEN,
        **options: Any,
    ) -> None:
        self.algorithm, self.problem, self.speeds = algorithm, problem, speeds
        self.saving = dd.Saving(every=checkpoint_every, keep=keep)
        self.options = {"updates": 24, "evaluation": evaluation, **options}
        # what resume and replay have to be given, because the folder cannot build it
        self.again = None if type(problem) in dd.problems.PROBLEMS.values() else problem

    def run(self, folder: Path | None = None, go_on: bool = False, **options: Any) -> dd.Run:
        saving = replace(self.saving, folder=folder, go_on=go_on)
        return dd.simulate(self.algorithm, self.problem, self.speeds, folder=saving, **{**self.options, **options})

    def killed(self, folder: Path, count: int, **options: Any) -> None:
        with pytest.raises(Killed):
            self.run(folder, watch=(kill_at(count),), **options)


usual = Scenario(dd.DuDe(LR, memory="workers"))  # a run of 24 updates
centers = [[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]]
three = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5)
four = CASES["noisy"][1]
moves = (dd.speeds.join(3, 2.5), dd.speeds.leave(1, 4.0), dd.speeds.join(1, 7.0), dd.speeds.leave(0, 9.0))
paces = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([1, 1, 2, 3]), [3.0, 6.5], [[1, 1, 1, 1], [9, 1, 1, 0.5], [1, 2, 3, 4]])
rare = dd.FixedSpeeds([5.0] * 4)  # after second 10 nothing arrives until 15
until_13 = {"updates": None, "time": 13.0, "checkpoint_every": 1, "evaluation": replace(OFTEN, seconds=0.75)}
moving = dd.SimulatedFleet(four, changes=moves)
jittered = dd.Network(mlp(), cross_entropy, [Jittered(pair) for pair in shards()], dd.Batches(4, stochastic=True))

SCENARIOS: dict[str, Scenario] = {
    **{name: Scenario(method, updates=13, checkpoint_every=3) for name, method in ALGORITHMS.items()},
    "leave and join": Scenario(dd.DuDe(LR, wait_for=2), speeds=moving),
    "leave with its memory": Scenario(dd.DuDe(LR, memory="workers"), speeds=moving),
    "leave and join, vanilla": Scenario(dd.VanillaASGD(LR), speeds=moving),
    "link": Scenario(dd.UniformASGD(LR), speeds=dd.SimulatedFleet(four, link=dd.speeds.Link(0.25, 64.0))),
    "changing speeds": Scenario(dd.FedBuff(LR, buffer=3), speeds=paces),
    "one checkpoint": Scenario(dd.MIFA(LR, active=2), keep=1),
    "early stop": Scenario(dd.DuDe(0.1), updates=200, evaluation=replace(OFTEN, early_stop=dd.EarlyStop(patience=2))),
    "early stop at a checkpoint": Scenario(
        dd.DuDe(0.1), updates=200, evaluation=dd.Evaluation(every=5, seconds=2.0, early_stop=dd.EarlyStop(target=2.66))
    ),
    "until a time": Scenario(dd.DuDe(LR), updates=None, time=12.0, evaluation=replace(OFTEN, seconds=0.5)),
    "evaluated after the last arrival": Scenario(dd.VanillaASGD(LR), speeds=rare, **until_13),
    "gone after the last arrival": Scenario(
        dd.VanillaASGD(LR), speeds=dd.SimulatedFleet(rare, changes=[dd.speeds.leave(2, 12.0)]), **until_13
    ),
    "rejections": Scenario(dd.DuDe(LR, memory="workers"), Holes(centers, noise=0.5), three),
    "wrong shapes": Scenario(dd.FedBuff(LR, buffer=2), Cuts(centers, noise=0.5), three),
    "wrong shapes, memory at workers": Scenario(dd.DuDe(LR, memory="workers"), Cuts(centers, noise=0.5), three),
    "local steps on digits": Scenario(
        dd.ShuffledASGD(LR),
        dd.LocalSteps(dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=4), k=3, lr=0.05),
        three,
        evaluation=replace(OFTEN, seconds=20.0),
    ),
    "own network": Scenario(
        dd.DuDe(LR), dd.Network(Scaled(), cross_entropy, shards(), dd.Batches(4, replacement=False)), three
    ),
    "dropout": Scenario(
        dd.SIAG(LR),
        dd.Network(lambda: mlp(nn.Dropout(0.3)), cross_entropy, shards(), dd.Batches(4, stochastic=True)),
        three,
    ),
    "augmented data": Scenario(dd.DuDe(LR), jittered, three),
    "wakes": Scenario(Deadline(LR), speeds=dd.FixedSpeeds([4.5, 9.5, 9.5, 9.5]), checkpoint_every=1),
    "cancelled jobs and a dict": Scenario(Fresh(LR)),
}

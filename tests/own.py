"""What several tests share: a user's own methods, problems and data, and how two runs are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import CASES, LR
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd

torch.set_num_threads(1)  # the problems are tiny: two threads would mostly wait for each other

FILES = ("trace.parquet", "metrics.parquet", "model.safetensors", "result.json")


def bits(run: dd.Run) -> dict[str, Any]:
    """Everything that must be the same in two runs that are said to be the same."""
    content: dict[str, Any] = {"weights": run.x.numpy().tobytes(), "version": run.version, "events": run.trace.events}
    content |= {f"trace {name}": run.trace[name].tobytes() for name in run.trace}
    content |= {f"metric {name}": run.metrics[name].tobytes() for name in run.metrics}
    content |= {"ended": run.ended, "time": run.time, "error": run.error}
    return content | {name: (run.folder / name).read_bytes() for name in FILES if run.folder is not None}


def differences(a: dd.Run, b: dd.Run) -> list[str]:
    one, other = bits(a), bits(b)
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


class Killed(BaseException):
    """What stands for a kill: whatever is on disk when it is raised is all that is left."""


def kill_at(count: int) -> Callable[[dd.State, dd.Arrival], None]:
    """A watch function that kills the run at its arrival number ``count``."""
    left = [count]

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        left[0] -= 1
        if left[0] == 0:
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
        return DeadlineState(weights=x, n=n, total=torch.zeros_like(x), reported=[])

    def first(self, s: DeadlineState) -> list[dd.Order]:
        return [*super().first(s), dd.wake(1.0)]

    def step(self, s: DeadlineState, a: dd.Arrival) -> list[dd.Order]:
        if a.job is not None:
            s.total = s.total + a.value
            s.reported.append(a.worker)
            return []
        s.descend(s.total + s.version, self.lr)  # every version differs from the last, whoever came
        ready, s.reported, s.total = s.reported, [], torch.zeros_like(s.total)
        return [*map(dd.send, ready), dd.wake(a.time + 1.0)]


@dataclass(kw_only=True)
class FreshState(dd.State):
    sent: list[int]  # the version each worker was sent last


@dataclass(frozen=True)
class Fresh(dd.Algorithm[FreshState]):
    """A job whose model is three versions old is cancelled; every other job is a second one at the same model."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> FreshState:
        return FreshState(weights=x, n=n, sent=[0] * n)

    def step(self, s: FreshState, a: dd.Arrival) -> list[dd.Order]:
        s.descend(a.value, self.lr)
        orders = [dd.again(a.worker)]
        if a.job.draw % 2:
            orders, s.sent[a.worker] = [dd.send(a.worker)], s.version
        for worker in range(s.n):
            if worker != a.worker and s.version - s.sent[worker] > 3:
                orders += [dd.cancel(worker), dd.send(worker)]
                s.sent[worker] = s.version
        return orders


@dataclass(kw_only=True)
class TallyState(dd.State):
    seen: dict[int, int]  # arrivals by worker


@dataclass(frozen=True)
class Tally(dd.Algorithm[TallyState]):
    """A worker counts the less, the more often it has come."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> TallyState:
        return TallyState(weights=x, n=n, seen={})

    def step(self, s: TallyState, a: dd.Arrival) -> list[dd.Order]:
        s.seen[a.worker] = s.seen.get(a.worker, 0) + 1
        s.descend(a.value, self.lr / s.seen[a.worker])
        return [dd.send(a.worker)]


METHODS: dict[str, Any] = {"deadline": Deadline, "fresh": Fresh, "tally": Tally}


@pytest.fixture
def own_methods() -> Iterator[None]:
    """The methods above stand in the table of algorithms while a test lasts, as a user's would."""
    dd.ALGORITHMS.update(METHODS)
    yield
    for name in METHODS:
        del dd.ALGORITHMS[name]


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


@dataclass(frozen=True)
class Scenario:
    """A run with something in it that makes it hard to stop or to repeat."""

    algorithm: dd.Algorithm[Any]
    problem: dd.Problem = CASES["noisy"][0]
    speeds: dd.SpeedModel = CASES["noisy"][1]
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, **options: Any) -> dd.Run:
        usual = {"updates": 24, "checkpoint_every": 5, "evaluate_every": 7, "evaluate_seconds": 2.0}
        return dd.simulate(self.algorithm, self.problem, self.speeds, **{**usual, **dict(self.options), **options})

    @property
    def again(self) -> dd.Problem | None:
        """What resume and replay have to be given, because the folder cannot build it."""
        return None if type(self.problem) in dd.PROBLEMS.values() else self.problem

    def with_options(self, **options: Any) -> Scenario:
        return replace(self, options=tuple({**dict(self.options), **options}.items()))


centers = [[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]]
three = dd.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5)
moves = (dd.join(3, 2.5), dd.leave(1, 4.0), dd.join(1, 7.0), dd.leave(0, 9.0))

SCENARIOS: dict[str, Scenario] = {
    "leave and join": Scenario(dd.DuDe(LR, wait_for=2), options=(("changes", moves),)),
    "leave with its memory": Scenario(dd.DuDe(LR, memory="workers"), options=(("changes", moves),)),
    "leave and join, vanilla": Scenario(dd.VanillaASGD(LR), options=(("changes", moves),)),
    "link": Scenario(dd.UniformASGD(LR), options=(("link", dd.Link(0.25, 64.0)),)),
    "changing speeds": Scenario(
        dd.FedBuff(LR, buffer=3),
        speeds=dd.ChangingSpeeds(dd.FixedSpeeds([1, 1, 2, 3]), [3.0, 6.5], [[1, 1, 1, 1], [9, 1, 1, 0.5], [1, 2, 3, 4]]),
    ),
    "early stop": Scenario(dd.DuDe(0.1), options=(("stop", dd.EarlyStop(patience=2)), ("updates", 200))),
    "early stop at a checkpoint": Scenario(
        dd.DuDe(0.1), options=(("stop", dd.EarlyStop(target=2.66)), ("updates", 200), ("evaluate_every", 5))
    ),
    "until a time": Scenario(dd.DuDe(LR), options=(("updates", None), ("time", 12.0), ("evaluate_seconds", 0.5))),
    "saved at every update": Scenario(
        dd.VanillaASGD(LR),
        speeds=dd.FixedSpeeds([5.0] * 4),  # nothing happens between 10 and 13 but evaluations
        options=(("updates", None), ("time", 13.0), ("checkpoint_every", 1), ("evaluate_seconds", 0.75)),
    ),
    "gone after the last arrival": Scenario(
        dd.VanillaASGD(LR),
        speeds=dd.FixedSpeeds([5.0] * 4),
        options=(("updates", None), ("time", 13.0), ("checkpoint_every", 1), ("changes", (dd.leave(2, 12.0),))),
    ),
    "rejections": Scenario(dd.DuDe(LR, memory="workers"), Holes(centers, noise=0.5), three),
    "wrong shapes": Scenario(dd.FedBuff(LR, buffer=2), Cuts(centers, noise=0.5), three),
    "wrong shapes, memory at workers": Scenario(dd.DuDe(LR, memory="workers"), Cuts(centers, noise=0.5), three),
    "one checkpoint": Scenario(dd.MIFA(LR, active=2), options=(("link", dd.Link(0.1)), ("keep", 1))),
    "local steps on digits": Scenario(
        dd.ShuffledASGD(LR), dd.LocalSteps(dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=4), k=3, lr=0.05), three
    ),
    "own network": Scenario(dd.DuDe(LR), dd.Network(Scaled(), cross_entropy, shards(), 4, replacement=False), three),
    "dropout": Scenario(
        dd.SIAG(LR), dd.Network(lambda: mlp(nn.Dropout(0.3)), cross_entropy, shards(), 4, stochastic=True), three
    ),
    "augmented data": Scenario(
        dd.DuDe(LR), dd.Network(mlp(), cross_entropy, [Jittered(pair) for pair in shards()], 4, stochastic=True), three
    ),
    "wakes": Scenario(Deadline(LR), speeds=dd.FixedSpeeds([4.5, 9.5, 9.5, 9.5]), options=(("checkpoint_every", 1),)),
    "cancelled jobs": Scenario(Fresh(LR)),
    "a state with a dict": Scenario(Tally(LR)),
}

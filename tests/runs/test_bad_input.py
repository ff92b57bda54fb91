"""Whatever cannot work is refused at once, by one BadInput that says what was given and what was expected."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core import Order
from dualdelay.runs.names import parse
from flat import network as flat_network
from flat import resume, simulate
from helpers import Counts
from own import Fresh, Holes, Jittered, Killed, kill_at, mlp, shards, three
from tables import CASES, LR

nan = math.nan
q3, q3_speeds = CASES["q3"]


def digits(**settings: Any) -> dd.Digits:
    return dd.Digits(**{"workers": 3, "alpha": 1.0, "hidden": 4, **settings})


def network(model: Any = mlp, data: Any = None, loss: Any = cross_entropy, **settings: Any) -> dd.Network:
    return flat_network(model, loss, shards() if data is None else data, **{"batch_size": 4, **settings})


class Noisy(nn.Module):
    """A layer that draws from a global generator of its own choice."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.0 + self.draw())


@dataclass(frozen=True)
class Hoarder(dd.Algorithm[Any]):
    """A method whose state cannot be saved."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        @dataclass(kw_only=True)
        class HoarderState(dd.State):
            seen: Any = field(default_factory=lambda: np.zeros(3))

        return HoarderState(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


WRONG: list[tuple[Any, str, Any]] = [
    *((kind, "gradients", value) for kind in (dd.algorithms.MaleniaSGD, dd.algorithms.RennalaSGD) for value in (0, 2.5)),
    *((kind, "buffer", value) for kind in (dd.algorithms.CA2FL, dd.algorithms.FADAS, dd.FedBuff) for value in (0, 1.5)),
    *((dd.algorithms.FADAS, "betas", value) for value in ((0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9)),
    *((dd.algorithms.FADAS, "eps", 0.0), (dd.algorithms.FADAS, "late", 0)),
    *((dd.algorithms.ACED, "max_delay", value) for value in (0, -1.0, 0.5, nan, "10")),
    *((dd.algorithms.FedAsync, "alpha", value) for value in (0.0, 1.5, "1")),
    *(
        (dd.algorithms.FedAsync, "mixing", "linear"),
        (dd.algorithms.FedAsync, "a", 0.0),
        (dd.algorithms.FedAsync, "b", -1.0),
    ),
    *((dd.algorithms.GeneralizedASGD, "probabilities", value) for value in ([0.5, 0.6], [0.0, 1.0], [], 0.5)),
    *((dd.algorithms.RingmasterASGD, "threshold", value) for value in (0, math.inf)),
    *(
        (dd.algorithms.SyncBySpeed, "least", 0),
        (dd.algorithms.DelayAdaptiveASGD, "delay", "age"),
        (dd.algorithms.FedFix, "period", 0.0),
    ),
]

# Each line: what is given, and words of the message that say what it was and what was expected.
CONSTRUCTIONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{f"lr {lr}": (lambda lr=lr: dd.DuDe(lr), ("lr", repr(lr), "above zero")) for lr in (0, -1.0, nan, math.inf, "0.1")},
    **{f"wait_for {c}": (lambda c=c: dd.DuDe(0.1, wait_for=c), ("wait_for", repr(c))) for c in (0, -1, 1.5, True)},
    **{
        f"speed {s}": (lambda s=s: dd.FixedSpeeds([1.0, s, 4.0]), ("times[1]", str(s), "above zero"))
        for s in (0.0, -2.0, nan, math.inf)
    },
    **{
        f"{kind.__name__} {name} {value}": (
            lambda k=kind, n=name, v=value: k(0.1, **{n: v}),
            (f"{name} is {value!r}", "expected"),
        )
        for kind, name, value in WRONG
    },
    "no speeds": (lambda: dd.FixedSpeeds([]), ("times", "empty")),
    "speeds that are none": (lambda: dd.FixedSpeeds(["a"]), ("times", "'a'")),
    **{f"alpha {a}": (lambda a=a: digits(alpha=a), ("alpha", repr(a), "above zero")) for a in (0, 0.0, -1.0, nan)},
    "no workers": (lambda: digits(workers=0), ("workers", "0", "1 or more")),
    "sample beyond the last": (lambda: digits(split=[[0], [1], [1437]]), ("split[2]", "0..1436")),
    "worker without data in a split": (lambda: digits(split=[[0], [], [1]]), ("shards[1]", "empty")),
    "worker without data": (lambda: network(data=[shards()[0], (torch.ones(0, 6), torch.ones(0))]), ("shards[1]", "empty")),
    "no worker": (lambda: network(data=[]), ("shards", "empty")),
    "unequal lengths": (lambda: network(data=[(torch.ones(3, 6), torch.ones(2))]), ("shards[0]", "3 inputs", "2 targets")),
    "inputs alone": (lambda: network(data=[torch.ones(3, 6)]), ("a batch is a Tensor", "pair (inputs, targets)", "step=")),
    "no data at all": (lambda: network(data=[3]), ("shards[0]", "int", "a row for each sample")),
    "batch too large": (
        lambda: network(batch_size=21, replacement=False),
        ("worker 0", "20 samples", "21", "replacement=False"),
    ),
    "batch of nothing": (lambda: network(batch_size=0), ("batch_size", "0", "1 or more")),
    "dropout": (lambda: network(mlp(nn.Dropout(0.5))), ("torch", "1", "stochastic=True")),
    "draws from torch": (lambda: network(mlp(Noisy(lambda: float(torch.rand(()))))), ("torch", "stochastic=True")),
    "draws from numpy": (lambda: network(mlp(Noisy(lambda: np.random.rand()))), ("numpy", "stochastic=True")),
    "draws from random": (lambda: network(mlp(Noisy(lambda: random.random()))), ("random", "stochastic=True")),
    "draws from a generator of its own": (lambda: network(mlp(Noisy(random.Random(0).random))), ("draw",)),
    "augmentation": (lambda: network(data=[Jittered(s) for s in shards()]), ("torch", "stochastic=True")),
    "augmentation at one worker": (lambda: network(data=[*shards()[:2], Jittered(shards()[2])]), ("torch", "stochastic")),
    "batchnorm": (lambda: network(mlp(nn.BatchNorm1d(8))), ("BatchNorm", "1", "dd.problems.without_batchnorm")),
    "instance norm": (
        lambda: network(mlp(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())),
        ("2.running_mean", "track_running_stats=False"),
    ),
    "hidden state": (lambda: network(mlp(Counts())), ("1.calls",)),
    "loss of wrong shape": (
        lambda: network(loss=lambda out, y: cross_entropy(out, y, reduction="none")),
        ("loss", "(4,)", "one number"),
    ),
    "nothing to train": (lambda: network(mlp().requires_grad_(False)), ("trainable", "at least one")),
    "mixed types": (lambda: network(nn.Sequential(mlp(), mlp(features=3).double())), ("float32", "float64")),
    "no shard": (lambda: dd.problems.Logistic(shards=[]), ("shards", "empty")),
    "unlike features": (
        lambda: dd.problems.Logistic(shards=[(torch.ones(2, 3), [1.0, -1.0]), (torch.ones(2, 4), [1.0, -1.0])]),
        ("shards[1]", "4", "3"),
    ),
    "k": (lambda: dd.LocalSteps(q3, 0, 0.1), ("k", "0", "1 or more")),
    "local lr": (lambda: dd.LocalSteps(q3, 2, 0.0), ("lr", "0.0", "above zero")),
    "nothing to stop by": (lambda: dd.EarlyStop(), ("target", "patience")),
    "open bracket": (lambda: parse("algorithm", "dude[lr=0.05"), ("'dude[lr=0.05'", "bracket", "dude[parameter=value")),
    "no value": (lambda: parse("algorithm", "dude[lr]"), ("'lr'", "'dude[lr]'", "parameter=value")),
    "unknown algorithm": (lambda: parse("algorithm", "dud[lr=0.05]"), ("algorithm", "'dud'", "'dude'")),
    "unknown problem": (lambda: parse("problem", "digit"), ("problem", "'digit'", "'digits'")),
    "unknown speeds": (lambda: parse("speeds", "exponentail"), ("speeds", "'exponentail'", "'exponential'")),
    "unknown parameter": (lambda: parse("algorithm", "dude[lr=0.1,wait_fro=2]"), ("dude", "'wait_fro'", "'wait_for'")),
    "parameter left out": (lambda: parse("algorithm", "dude"), ("dude", "lr", "dude[lr=...]")),
    "parameter twice": (lambda: parse("algorithm", "dude[lr=0.1,lr=0.2]"), ("lr", "twice")),
    "a name for a problem": (
        lambda: parse("problem", "local_steps[problem=digits,k=2,lr=0.1]"),
        ("problem", "'digits'"),
    ),
}


@pytest.mark.parametrize("what", CONSTRUCTIONS)
def test_what_cannot_work_is_refused_when_it_is_made(what: str) -> None:
    make, words = CONSTRUCTIONS[what]
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    with pytest.raises(dd.BadInput) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    after = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]  # not even a number was drawn


def nans() -> dd.Network:
    data = shards()
    data[1][0][0, 0] = nan
    return network(data=data)


def plain(**options: Any) -> dict[str, Any]:
    return {"algorithm": dd.DuDe(LR), "problem": q3, "speeds": q3_speeds, "updates": 9, **options}


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "too few speeds": (lambda: plain(speeds=dd.FixedSpeeds([1.0, 2.0])), ("2 workers", "3")),
    "wait_for more than there are": (
        lambda: plain(algorithm=dd.DuDe(LR, wait_for=4)),
        ("wait_for", "3 workers", "4", "1..3"),
    ),
    "a buffer that cannot fill": (
        lambda: plain(algorithm=dd.FedBuff(LR, buffer=4, wait=True)),
        ("buffer", "4", "3 workers"),
    ),
    "probabilities for others": (
        lambda: plain(algorithm=dd.algorithms.GeneralizedASGD(LR, [0.5, 0.5])),
        ("probabilities has 2 entries", "expected 3"),
    ),
    "more active than there are": (lambda: plain(algorithm=dd.MIFA(LR, active=4)), ("active", "4", "1..3")),
    "no end": (lambda: plain(updates=None), ("updates", "time", "at least one")),
    "negative updates": (lambda: plain(updates=-1), ("updates", "-1", "0 or more")),
    **{f"time {t}": (lambda t=t: plain(time=t), ("time", str(t), "zero or more")) for t in (-1.0, nan, math.inf)},
    "evaluate_every": (lambda: plain(evaluate_every=0), ("--evaluate-every", "0", "1 or more")),
    "evaluate_seconds": (lambda: plain(evaluate_seconds=0.0), ("--evaluate-seconds", "0.0", "above zero")),
    "checkpoint_every": (lambda: plain(checkpoint_every=0), ("checkpoint_every", "0", "1 or more")),
    "start of wrong shape": (lambda: plain(start=torch.zeros(2).double()), ("initial_weights", "(2,)", "(1,)")),
    "start of wrong type": (lambda: plain(start=torch.zeros(1)), ("initial_weights", "torch.float32", "torch.float64")),
    "start of wrong names": (lambda: plain(start={"y": torch.zeros(1).double()}), ("'y'", "'x'")),
    "start of another model": (
        lambda: plain(problem=network(), speeds=three, start=nn.Linear(2, 2).state_dict()),
        ("weights",),
    ),
    "start that is no tensor": (lambda: plain(start=[0.0]), ("initial_weights", "list")),
    "start from nowhere": (lambda: plain(start="nowhere.safetensors"), ("nowhere.safetensors",)),
    "start that is not finite": (lambda: plain(start=torch.tensor([nan]).double()), ("start", "nan", "finite")),
    "loss that is nan at the start": (lambda: plain(problem=nans(), speeds=three), ("objective", "nan", "start", "finite")),
    "change of no worker": (lambda: plain(changes=[dd.speeds.leave(3, 1.0)]), ("3", "0..2")),
    "gone twice": (lambda: plain(changes=[dd.speeds.leave(0, 2.0), dd.speeds.leave(0, 1.0)]), ("worker 0", "twice", "2.0")),
    "here twice": (lambda: plain(changes=[dd.speeds.join(1, 1.0), dd.speeds.join(1, 3.0)]), ("worker 1", "twice", "3.0")),
    "change at no time": (lambda: plain(changes=[dd.speeds.leave(0, math.inf)]), ("inf", "zero or more")),
    "change before the start": (lambda: plain(changes=[dd.speeds.leave(0, -1.0)]), ("-1.0", "zero or more")),
    "gone, but it cannot go": (
        lambda: plain(algorithm=Fresh(LR), changes=[dd.speeds.leave(0, 5.0)]),
        ("0", "Fresh", "left"),
    ),
    "here, but it cannot come": (lambda: plain(algorithm=Fresh(LR), changes=[dd.speeds.join(0, 5.0)]), ("0", "Fresh")),
    "no such metric": (lambda: plain(stop=dd.EarlyStop("loss", target=1.0)), ("'loss'", "objective", "accuracy")),
    "a metric that is never known": (lambda: plain(stop=dd.EarlyStop("accuracy", patience=1)), ("accuracy", "nan")),
    "a state that cannot be saved": (lambda: plain(algorithm=Hoarder(LR)), ("ndarray", "cannot be saved")),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_cannot_run_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    options, words = CALLS[what][0](), CALLS[what][1]
    with pytest.raises(dd.BadInput) as caught:
        simulate(folder=tmp_path / "run", **options)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert list(tmp_path.iterdir()) == []


def stopped(tmp_path: Path, **options: Any) -> tuple[Path, dict[str, bytes]]:
    """A run's folder, killed half-way, and what is in it."""
    with pytest.raises(Killed):
        simulate(**plain(**options), folder=tmp_path / "run", checkpoint_every=2, watch=(kill_at(6),))
    return tmp_path / "run", {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def own_speed_model() -> dd.SpeedModel:
    class Mine(dd.FixedSpeeds):
        pass

    return Mine([1.0, 2.0, 4.0])


RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "metrics missing": ({"metrics": {"size": lambda x: float(x.norm())}}, {}, ("size", "metrics=")),
    "metrics too many": ({}, {"metrics": {"size": lambda x: float(x.norm())}}, ("metrics",)),
    "problem missing": ({"problem": Holes([[0.0], [6.0], [12.0]])}, {}, ("Holes", "problem=")),
    "other problem": ({}, {"problem": dd.Quadratic([[0.0], [6.0], [13.0]])}, ("fingerprint",)),
    "speeds missing": ({"speeds": own_speed_model()}, {}, ("Mine", "speeds=")),
    "method missing": ({"algorithm": type("Own", (dd.VanillaASGD,), {})(LR)}, {}, ("Own",)),
    "negative updates": ({}, {"updates": -5}, ("updates", "-5", "0 or more")),
    "negative time": ({}, {"time": -5.0}, ("time", "-5.0", "zero or more")),
}


@pytest.mark.parametrize("larger", [{}, {"updates": 50}], ids=["same totals", "larger totals"])
@pytest.mark.parametrize("what", RESUMES)
def test_a_resume_that_lacks_something_says_so_and_changes_nothing(
    what: str, larger: dict[str, int], tmp_path: Path
) -> None:
    started, given, words = RESUMES[what]
    folder, before = stopped(tmp_path, **started)
    with pytest.raises(dd.BadInput) as caught:
        resume(folder, **{**larger, **given})
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_error_in_a_user_s_problem_keeps_its_words() -> None:
    class Failing(dd.Quadratic):
        def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
            if draw == 3:
                raise ZeroDivisionError("a strange thing")
            return super().gradient(x, worker, draw)

    with pytest.raises(dd.RunFailed, match=r"worker 0 .*3: a strange thing"):
        simulate(**plain(problem=Failing([[0.0], [6.0], [12.0]])))


def test_stochastic_makes_dropout_a_matter_of_the_job_s_name() -> None:
    problem = network(mlp(nn.Dropout(0.5)), stochastic=True)
    x = problem.start(0)
    jobs = [(worker, draw) for worker in range(3) for draw in range(4)]
    first = {job: problem.gradient(x, *job)[0] for job in jobs}
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert all(torch.equal(problem.gradient(x, *job)[0], first[job]) for job in reversed(jobs))
    assert torch.equal(torch.get_rng_state(), state)
    masks = {tuple((gradient == 0).tolist()) for gradient in first.values()}
    assert len(masks) > 1  # it does drop, and not always the same
    assert problem.evaluate(x) == problem.evaluate(x)


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_leaves_the_global_generators_as_they_were(stochastic: bool) -> None:
    before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    problem = network(lambda: mlp(nn.Dropout(0.5) if stochastic else nn.Tanh()), stochastic=stochastic)
    simulate(**plain(problem=problem, speeds=three))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (repr(np.random.get_state()), random.getstate()) == before[1:]


SHARED = nn.BatchNorm1d(8)


@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.BatchNorm1d(8), nn.ReLU()),
        mlp(nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Sequential(nn.BatchNorm1d(8)))),
        mlp(SHARED, nn.Tanh(), SHARED),
        nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 6, 2), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(12, 3)),
    ],
    ids=["one", "nested", "shared", "2d"],
)
def test_without_batchnorm_the_model_trains(model: nn.Module) -> None:
    with pytest.raises(dd.BadInput, match="BatchNorm"):
        network(model)
    converted = dd.problems.without_batchnorm(model)
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in converted.modules())
    assert any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())  # the given one stays
    problem = network(converted, batch_size=16)
    run = simulate(**plain(algorithm=dd.SyncSGD(0.3), problem=problem, speeds=three, updates=60))
    assert run.metrics.objective[-1] < run.metrics.objective[0]


def test_without_batchnorm_scale_and_shift_are_taken_over_and_channels_are_divided() -> None:
    norm = nn.BatchNorm2d(12)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(1))
    new = dd.problems.without_batchnorm(norm, groups=8)
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels) == (4, 12)
    assert torch.equal(new.weight, norm.weight) and torch.equal(new.bias, norm.bias)

"""Problems that cannot work, or that do not fit into memory, are refused at once by one message, and draw no number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.runs.names import parse
from helpers import Counts
from own import NO_NUMBERS, Jittered, mlp, refused, shards
from tables import CASES

pytestmark = pytest.mark.usefixtures("in_time")
q3 = CASES["q3"][0]


def network(model: Any = mlp, data: Any = None, batch_size: Any = 4, loss: Any = cross_entropy) -> dd.Network:
    return dd.Network(model, loss, shards() if data is None else data, batch_size)


class Noisy(nn.Module):
    """A layer that draws from a generator."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.0 + self.draw())


def drawing(draw: Callable[[], float]) -> Callable[[], dd.Network]:
    return lambda: network(mlp(Noisy(draw)))


def loss_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


INSTANCE_NORM = nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
UNEQUAL = [(torch.ones(2, 3), [1.0, -1.0]), (torch.ones(2, 4), [1.0, -1.0])]
BILLION, TRILLION = 10**9, 10**12
L = dd.problems.Logistic

# what is made, and words of the message that say what it was and what was expected
REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{f"alpha {a}": (lambda a=a: dd.Digits(3, alpha=a), ("alpha", repr(a), "above zero")) for a in (0, -1.0, math.nan)},
    "a large alpha": (lambda: dd.Digits(alpha=1e308), ("alpha is 1e+308", "expected about")),
    "no workers": (lambda: dd.Digits(workers=0), ("workers", "0", "1 or more")),
    "a sample beyond the last": (lambda: dd.Digits(3, split=[[0], [1], [1437]]), ("split[2]", "0..1436")),
    "a split without samples of a worker": (lambda: dd.Digits(3, split=[[0], [], [1]]), ("shards[1]", "empty")),
    "no data at a worker": (lambda: network(data=[shards()[0], (torch.ones(0, 6), torch.ones(0))]), ("shards[1]", "empty")),
    "inputs alone": (lambda: network(data=[torch.ones(3, 6)]), ("a batch is a Tensor", "pair (inputs, targets)", "step=")),
    "a number for data": (lambda: network(data=[3]), ("shards[0]", "int", "a row for each sample")),
    "fewer samples than a batch": (
        lambda: network(batch_size=dd.Batches(21, replacement=False)),
        ("worker 0", "20 samples", "21", "replacement=False"),
    ),
    "a batch of nothing": (lambda: network(batch_size=0), ("batch_size", "0", "1 or more")),
    "dropout": (lambda: network(mlp(nn.Dropout(0.5))), ("torch", "1", "stochastic=True")),
    "draws from torch": (drawing(lambda: float(torch.rand(()))), ("torch", "stochastic=True")),
    "draws from numpy": (drawing(lambda: np.random.rand()), ("numpy", "stochastic=True")),
    "draws from random": (drawing(random.random), ("random", "stochastic=True")),
    "draws from a generator of its own": (drawing(random.Random(0).random), ("draw",)),
    "augmentation": (lambda: network(data=[Jittered(s) for s in shards()]), ("torch", "stochastic=True")),
    "augmentation at one worker": (lambda: network(data=[*shards()[:2], Jittered(shards()[2])]), ("torch", "stochastic")),
    "instance norm": (lambda: network(mlp(*INSTANCE_NORM)), ("2.running_mean", "track_running_stats=False")),
    "a buffer that changes": (lambda: network(mlp(Counts())), ("1.calls",)),
    "a loss for each sample": (lambda: network(loss=loss_of_each), ("loss", "(4,)", "one number")),
    "nothing to train": (lambda: network(mlp().requires_grad_(False)), ("trainable", "at least one")),
    "mixed types": (lambda: network(nn.Sequential(mlp(), mlp(features=3).double())), ("float32", "float64")),
    "logistic without shards": (lambda: L(shards=[]), ("shards", "empty")),
    "unequal numbers of features": (lambda: L(shards=UNEQUAL), ("shards[1]", "4", "3")),
    "no local steps": (lambda: dd.LocalSteps(q3, 0, 0.1), ("k", "0", "1..")),
    "local steps of no length": (lambda: dd.LocalSteps(q3, 2, 0.0), ("lr", "0.0", "above zero")),
    # more than there is room for
    "a billion workers": (lambda: dd.Digits(workers=BILLION), ("workers is 1000000000",)),
    "a billion equal workers": (lambda: dd.Digits(workers=BILLION, split="iid"), ("workers",)),
    "more workers than samples": (lambda: dd.Digits(workers=1438, empty="drop"), ("1437 samples", "1438 workers")),
    "hidden units": (lambda: dd.Digits(hidden=BILLION), ("hidden=1000000000", "GB of memory", "smaller hidden")),
    "a large batch": (lambda: dd.Digits(batch_size=10**10), ("10000000000 samples", "smaller batch_size")),
    "a large batch of one worker": (lambda: L(2, batch_size=[8, 10**10]), ("10000000000 samples",)),
    "workers of CIFAR-10": (lambda: dd.Cifar10(workers=BILLION), ("workers", "1..50000")),
    "workers of a function": (lambda: dd.Network(mlp, cross_entropy, lambda worker: None, workers=BILLION), ("workers",)),
    "logistic workers": (lambda: L(workers=BILLION), ("workers",)),
    "features": (lambda: L(features=TRILLION), ("features", "GB of memory")),
    "samples": (lambda: L(samples=TRILLION), ("samples", "GB of memory")),
    "local steps": (lambda: dd.LocalSteps(q3, TRILLION, 0.1), ("k is", "1..100000")),
}


def generators() -> Any:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("what", REFUSED)
def test_a_problem_that_cannot_work_is_refused_when_it_is_built_and_draws_no_number(what: str) -> None:
    make, words = REFUSED[what]
    before = generators()
    refused(make, *words)
    assert generators() == before


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "alpha": lambda v: dd.Digits(3, alpha=v),
    "noise": lambda v: dd.Quadratic([[0.0]], noise=v),
    "heterogeneity": lambda v: L(2, heterogeneity=v),
    "reg": lambda v: L(2, reg=v),
    "norm": lambda v: dd.problems.Clipped(q3, v),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_or_too_large_a_one_is_refused(name: str) -> None:
    for value in NO_NUMBERS:
        refused(lambda value=value: NUMBERS[name](value), name, "expected")


@pytest.mark.parametrize("value", [value for value in NO_NUMBERS if value != [1.0]], ids=type)
def test_a_center_without_numbers_is_refused(value: Any) -> None:
    refused(lambda: dd.Quadratic([[value]]), "centers", "numbers")


@pytest.mark.parametrize(
    "text",
    [
        "logistic[shards=5]", "logistic[shards=[1]]", "logistic[shards=[[[1],[1]]]]", "quadratic[centers={1:2}]",
        "quadratic[centers=[[1]],curvatures=5]", "quadratic[centers=[[1]],start=abc]", "digits[split=5]",
        "digits[split=[[0.5]],workers=1]", "digits[split={1:2}]", "digits[batch_size=abc]", "digits[weights=5]",
        "digits[minimum=abc]", "local_steps[problem=5,k=1,lr=1]", "local_steps[problem=digits,k=2,lr=0.1]",
        "cifar10[root=5]", "clipped[problem=digits,norm=1]",
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused_on_the_shell(text: str) -> None:
    refused(lambda: parse("problem", text))

"""Which methods' servers can be cut into shards: those that decide by no values, and move each weight by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.batching.separable import why_inseparable
from dualdelay.core import Order
from dualdelay.runs.optimizer import Optimizer
from own import METHODS
from tables import ALGORITHMS, LR

pytestmark = pytest.mark.usefixtures("own_methods")

SHAPED = {"auto", "heloco", "mla", "ringmaster lmo"}  # these look at the weights tensor by tensor


@pytest.mark.parametrize("name", [*ALGORITHMS, *METHODS])
def test_every_method_here_is_separable_but_for_those_that_look_at_tensors(name: str) -> None:
    method = ALGORITHMS[name] if name in ALGORITHMS else METHODS[name](LR)
    why = why_inseparable(method, 4)
    assert ("tensor by tensor" in why) if isinstance(method, tuple(type(ALGORITHMS[row]) for row in SHAPED)) else why == ""


@dataclass(frozen=True)
class Clipped(dd.Algorithm[dd.State]):
    """A long gradient is shortened: a slice has another length."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        return dd.State(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value * torch.clamp(25.0 / a.value.norm(), max=1.0), self.lr)
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Careful(Clipped):
    """After a long gradient the worker computes a second one at its old model."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        return [dd.again(a.worker) if a.value.norm() > 1e4 else dd.send(a.worker)]


@dataclass(frozen=True)
class Broken(Clipped):
    """It expects more weights than a shard has."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value.view(3, -1).sum(0).repeat(3), self.lr)
        return [dd.send(a.worker)]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Clipped, "a step of one weight depends on the others"),
        (Careful, "decides by the values"),
        (Broken, "it failed in a"),
    ],
)
def test_a_method_that_looks_at_more_than_a_slice_is_refused_with_the_reason(kind: type[Clipped], why: str) -> None:
    assert why in why_inseparable(kind(LR), 4)


@pytest.mark.parametrize("text", ["SGD[momentum=0.9]", "Adam", "AdamW[weight_decay=0.1]", "RMSprop", "Adagrad"])
def test_optimisers_that_move_each_weight_by_itself_are_separable(text: str) -> None:
    assert why_inseparable(dd.DuDe(LR), 4, Optimizer(text, lr=LR)) == ""


def test_an_optimiser_that_looks_at_all_weights_is_refused() -> None:
    assert "depends on the others" in why_inseparable(dd.DuDe(LR), 4, Optimizer("Adafactor", lr=LR))

"""Which methods can advance side by side with others: those whose decisions depend on no gradient's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.batching import shared_schedule
from dualdelay.batching.shared_schedule import can_share
from dualdelay.core import Order
from own import METHODS, computed_both_ways, three
from tables import ALGORITHMS, LR

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("own_methods")]


@pytest.mark.parametrize("name", [*ALGORITHMS, *METHODS])
def test_every_method_here_can_share_a_schedule(name: str) -> None:
    method = ALGORITHMS[name] if name in ALGORITHMS else METHODS[name](LR)
    assert can_share(method, 4), "with several runs in a row: no comparison of lr, sums and norms with dim=-1, keepdim=True"


def test_a_dict_of_tensors_in_a_state_is_compared_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sixteen workers AutoDuDe holds gradients in a dict at the end of the trial, and is found to share."""
    held, compare = [], shared_schedule._alike

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            held.append(len(a))
        return compare(a, b)

    monkeypatch.setattr(shared_schedule, "_alike", alike)
    assert can_share(dd.AutoDuDe(), 16) and min(held) > 0
    one, other = ({0: torch.ones(2), 3: torch.full((2,), value)} for value in (2.0, 3.0))
    assert compare(one, dict(one)) and not compare(one, other) and not compare(one, {0: one[0]})


@dataclass(frozen=True)
class Clipped(dd.Algorithm[dd.State]):
    """A long gradient is shortened: side by side each run has a length of its own."""

    most: float = 25.0

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        return dd.State(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value * torch.clamp(self.most / a.value.norm(), max=1.0), self.lr)
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Careful(Clipped):
    """After a long gradient the worker computes a second one at its old model."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        return [dd.again(a.worker)] if float(a.value.norm()) > self.most else [dd.send(a.worker)]


@dataclass(kw_only=True)
class CountingState(dd.State):
    counts: Tensor


@dataclass(frozen=True)
class Counting(dd.Algorithm[CountingState]):
    """A worker's step is the smaller the more it has made: the counts have no axis for several runs."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> CountingState:
        return CountingState(x, n, counts=torch.zeros(n))

    def step(self, s: CountingState, a: dd.Arrival) -> list[Order]:
        s.counts[a.worker] += 1
        s.descend(a.value / float(s.counts[a.worker]), self.lr)
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Strict(dd.VanillaASGD):
    """It insists that a gradient is a vector."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        assert a.value.ndim == 1, "a gradient is a vector"
        return super().step(s, a)


@dataclass(frozen=True)
class Exact(dd.VanillaASGD):
    """It looks its steps up by the number of a gradient's axes."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, {1: self.lr}[a.value.ndim])
        return [dd.send(a.worker)]


OWN: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Clipped, Careful, Counting, Strict, Exact)}
far = dd.Quadratic([[0.0, 8.0], [60.0, 0.0], [120.0, 30.0]], noise=0.5)  # some gradients are longer than 25, some are not


@pytest.mark.parametrize("name", OWN)
def test_a_method_that_looks_at_values_or_takes_gradients_for_vectors_cannot_share(name: str) -> None:
    assert not can_share(OWN[name](LR), 3)


@pytest.mark.parametrize("known", [True, False], ids=["in the table", "by its class"])
@pytest.mark.parametrize("name", OWN)
def test_a_method_that_cannot_share_has_the_results_of_single_runs(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        monkeypatch.setitem(dd.ALGORITHMS, name, OWN[name])
    computed_both_ways({"algorithm": [OWN[name](LR), dd.DuDe(LR)], "lr": [LR, 0.05, 0.1]}, far, three, updates=30)

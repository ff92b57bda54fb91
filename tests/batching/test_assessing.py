"""The models of runs that advance side by side are evaluated at once, and what is found is that of each by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from helpers import operations, rounding
from own import Scaled, digits, four, mlp, shards
from tables import LR

pytestmark = pytest.mark.numeric

ASSESSED: dict[str, Callable[[], dd.Network]] = {
    "plain": lambda: dd.Network(mlp, cross_entropy, shards(4), 4),
    "tested, by samples": lambda: dd.Network(
        mlp, cross_entropy, shards(4), 4, test=shards(1, seed=5)[0], weights="samples", full_gradient=False
    ),
    "sizes": lambda: dd.Network(mlp, cross_entropy, [shards(1, samples=700)[0], *shards(3)], 4, test=shards(1)[0]),
    "digits": lambda: digits(0.1),
}


@pytest.mark.parametrize("samples", [None, 20])
@pytest.mark.parametrize("name", ASSESSED)
def test_models_are_assessed_at_once_as_one_by_one(name: str, samples: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ASSESSED[name]()
    x = torch.stack([problem.start(seed) * (1 + 0.1 * seed) for seed in range(5)])
    alone = [problem.assess(row, samples) for row in x]
    monkeypatch.setattr(dd.Network, "assess", None)  # it would be called for each
    close = rounding(operations(problem, 1437), x.dtype)
    for (numbers, parts), (wanted, theirs) in zip(problem.assess_all(x, samples), alone, strict=True):
        assert numbers.keys() == wanted.keys()
        for key, value in wanted.items():
            assert math.isclose(numbers[key], value, rel_tol=close) or (math.isnan(numbers[key]) and math.isnan(value))
        assert {w: (part["samples"], part["size"]) for w, part in parts.items()} == {
            w: (part["samples"], part["size"]) for w, part in theirs.items()
        }
        np.testing.assert_allclose(
            [parts[w]["loss"] for w in theirs], [part["loss"] for part in theirs.values()], rtol=close
        )


class Halved(dd.Network):
    """A user's own objective."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": 0.5 * super().evaluate(x)["objective"]}


APART: dict[str, Callable[[], dd.Network]] = {
    "own evaluation": lambda: Halved(mlp, cross_entropy, shards(4), 4),
    "metrics": lambda: dd.Network(
        mlp, cross_entropy, shards(4), 4, metrics={"size": lambda model, batch: float(len(batch[0]))}
    ),
    "held out": lambda: dd.Network(mlp, cross_entropy, shards(4), 4, held_out=shards(4, seed=3)),
    "own layer": lambda: dd.Network(lambda: Scaled(), cross_entropy, shards(4), 4),
    "batches for evaluation": lambda: dd.Network(mlp, cross_entropy, shards(4), dd.Batches(4, evaluation_size=7)),
    "dropout": lambda: dd.Network(
        lambda: mlp(torch.nn.Dropout()), cross_entropy, shards(4), dd.Batches(4, stochastic=True)
    ),
}


@pytest.mark.parametrize("name", APART)
def test_models_that_cannot_be_assessed_at_once_are_assessed_one_by_one(name: str) -> None:
    problem = APART[name]()
    x = torch.stack([problem.start(seed) for seed in range(3)])
    found, wanted = problem.assess_all(x), [problem.assess(row) for row in x]
    assert repr([numbers for numbers, _ in found]) == repr([numbers for numbers, _ in wanted])


def test_runs_of_one_problem_are_evaluated_at_once_also_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, calls = ASSESSED["plain"](), []
    assess_all = dd.Network.assess_all

    def counted(self: dd.Network, x: Tensor, samples: Any = None) -> Any:
        calls.append((len(x), samples))
        return assess_all(self, x, samples)

    monkeypatch.setattr(dd.Network, "assess_all", counted)
    monkeypatch.setattr(dd.Network, "assess", None)
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.05, 0.1]}
    runs = dd.sweep(
        grid, problem, four, updates=10, evaluation=dd.Evaluation(every=4, samples=10), compute=dd.Compute(batch=True)
    ).runs
    assert calls == [(3, 10), (3, 10), (3, 10), (3, None)]
    assert [list(run.metrics.version) for run in runs] == [[0, 4, 8, 10]] * 3

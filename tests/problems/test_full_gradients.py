"""Exact local gradients: what they are, what they cost, and who asks for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dualdelay as dd
from dualdelay.problems import exact
from dualdelay.runs.names import label
from helpers import rounding
from own import mlp, shards, three
from tables import CASES, LR

pytestmark = pytest.mark.numeric

PROBLEMS = {
    "quadratic": CASES["noisy"][0],
    "logistic": CASES["logistic"][0],
    "digits": CASES["digits"][0],
    "weighted": dd.Network(mlp(), nn.functional.cross_entropy, shards(), 4, weights="samples"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_their_mean_is_the_gradient_of_f(name):
    problem = dd.problems.FullGradients(PROBLEMS[name])
    x = problem.start(0) + 0.1
    each = [
        problem.gradient(x, worker, draw) for worker, draw in zip(range(problem.workers), (0, 5, 3, 9, 1), strict=False)
    ]
    found = problem.evaluate(x)
    norm, size = torch.stack([g.double() for g, _ in each]).mean(0).norm(), max(g.norm() for g, _ in each)
    # each was rounded to the type of x, and all of them were added up
    assert abs(float(norm) - found["gradient_norm"]) <= (rounding(1, x.dtype) + rounding(16)) * size
    if name != "weighted":
        assert sum(loss for _, loss in each) / problem.workers == pytest.approx(found["objective"], rel=rounding(16), abs=0)
    assert each[0][0].dtype == x.dtype and torch.equal(problem.gradient(x, 0, 7)[0], each[0][0])  # whatever the draw


def test_they_take_as_long_as_the_minibatches_of_all_data():
    data = [(torch.randn(m, 3), torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0)) for m in (20, 7, 9)]
    problem = dd.problems.Logistic(shards=data, batch_size=4)
    run = dd.simulate(dd.SyncSGD(LR), dd.problems.FullGradients(problem), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=1)
    assert run.trace.time.tolist() == [4.0, 5.0, 12.0]  # 2 x 2, 5 x 1 and 3 x 4
    assert CASES["noisy"][0].epoch(0) == 1


@pytest.mark.parametrize("method", [dd.algorithms.IAG(LR), dd.algorithms.SAG(LR), dd.algorithms.SAGA(LR)], ids=label)
def test_methods_that_need_them_have_them_and_the_run_is_what_it_is_with_the_problem_made_so(method, tmp_path):
    plain, speeds = dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=64), three
    run = dd.simulate(method, plain, speeds, updates=9, folder=tmp_path / "run")
    given = dd.simulate(method, dd.problems.FullGradients(plain), speeds, updates=9)
    assert torch.equal(run.x, given.x) and run.trace.time.tolist() == given.trace.time.tolist()
    assert torch.equal(dd.replay(tmp_path / "run", plain).x, run.x)
    assert dd.resume(tmp_path / "run", updates=12, problem=plain).version == 12


def test_local_steps_with_them_are_exact_each():
    inner = CASES["noisy"][0]
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    first = inner.measure(x, 1)["gradient"]
    second = inner.measure(x - 0.1 * first, 1)["gradient"]
    found = exact(dd.LocalSteps(inner, 2, 0.1)).gradient(x, 1, 4)[0]
    assert torch.equal(found, first + second)


def test_a_network_that_evaluates_without_gradients_has_them_all_the_same():
    model = mlp()
    lean, rich = (dd.Network(model, nn.functional.cross_entropy, shards(), 4, full_gradient=full) for full in (False, True))
    x = rich.start(0)
    found, expected = (dd.problems.FullGradients(problem).gradient(x, 1, 0)[0] for problem in (lean, rich))
    assert torch.equal(found, expected) and math.isnan(dd.problems.FullGradients(lean).evaluate(x)["gradient_norm"])


class Opaque(dd.Quadratic):
    measure = dd.Problem.measure


def test_a_problem_that_has_none_says_so():
    with pytest.raises(dd.BadInput, match="Opaque gives no exact local gradients"):
        dd.simulate(dd.algorithms.IAG(LR), Opaque([[0.0], [1.0]]), dd.FixedSpeeds([1.0, 1.0]), updates=1)
    with pytest.raises(dd.BadInput, match="expected a problem"):
        dd.problems.FullGradients("digits")

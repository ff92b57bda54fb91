"""The gradients of many jobs, one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core import OneAtATime
from helpers import heterogeneous
from own import Cuts, centers
from tables import LR


def test_problems_of_any_kind_are_taken_one_at_a_time_in_the_order_of_the_jobs() -> None:
    problems = [heterogeneous(3, 2, noise=0.5), dd.problems.Logistic(workers=3, features=2, samples=9, batch_size=4)]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]], dtype=torch.float64)
    jobs = [(0, 2, 5), (1, 1, 6), (0, 0, 7)]  # problem, worker, draw
    alone = [problems[k].gradient(row, worker, draw) for row, (k, worker, draw) in zip(x, jobs, strict=True)]
    for pieces in ([x], [x[0], x[1:]]):
        gradients, losses = OneAtATime(problems)(pieces, *zip(*jobs, strict=True))
        assert torch.equal(gradients, torch.stack([gradient for gradient, _ in alone]))
        assert losses.tolist() == [loss for _, loss in alone]


def test_a_gradient_of_a_wrong_shape_becomes_one_that_is_not_finite() -> None:
    x = torch.zeros(2, 2, dtype=torch.float64)
    gradients, _ = OneAtATime([Cuts(centers)])([x], [0, 0], [1, 1], [2, 4])  # draw 2 is cut, draw 4 is not
    assert [math.isnan(value) for value in gradients.flatten().tolist()] == [True, True, False, False]


def test_an_error_names_the_worker_and_the_job() -> None:
    class Broken(dd.Quadratic):
        def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
            if (worker, draw) == (2, 0):
                raise ValueError("no data")
            return super().gradient(x, worker, draw)

    options = {"updates": 3, "compute": dd.Compute(batch=True)}
    with pytest.raises(dd.RunFailed, match="worker 2 could not compute its job number 0: no data"):
        dd.simulate(dd.DuDe(LR), Broken(centers), dd.FixedSpeeds([1.0, 2.0, 4.0]), **options)

"""Gradients that each worker clips before it sends them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.cli import main
from helpers import drift, rounding
from own import Killed, differences, kill_at

QUAD = dd.Quadratic([[0.0, 0.0], [30.0, 40.0], [0.3, 0.4]])
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])


def test_a_long_gradient_is_shortened_and_a_short_one_is_not() -> None:
    clipped, x = dd.problems.Clipped(QUAD, norm=5.0), torch.zeros(2, dtype=torch.float64)
    long, loss = clipped.gradient(x, 1, 0)
    assert (
        long.tolist() == pytest.approx([-3.0, -4.0], rel=rounding(2, torch.float64)) and loss == QUAD.gradient(x, 1, 0)[1]
    )
    assert torch.equal(clipped.gradient(x, 2, 0)[0], QUAD.gradient(x, 2, 0)[0])
    assert clipped.evaluate(x) == QUAD.evaluate(x)  # the objective is what it was


def test_what_is_not_finite_is_not_made_so() -> None:
    clipped = dd.problems.Clipped(QUAD, norm=5.0)
    assert not torch.isfinite(clipped.gradient(torch.tensor([math.nan, 0.0], dtype=torch.float64), 0, 0)[0]).all()
    assert not torch.isfinite(clipped.gradient(torch.tensor([math.inf, 0.0], dtype=torch.float64), 0, 0)[0]).all()


@pytest.mark.numeric
def test_computed_with_others_it_is_what_it_is_alone() -> None:
    problem = dd.problems.Clipped(dd.Digits(workers=3, hidden=4), norm=0.5)
    alone = dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, compute=dd.Compute(batch=False))
    together = dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, compute=dd.Compute(batch=True))
    assert np.allclose(together.x, alone.x, rtol=0, atol=drift(20, 0.05, 256, torch.float32))
    free = dd.simulate(dd.DuDe(lr=0.05), dd.Digits(workers=3, hidden=4), SPEEDS, updates=20)
    assert not torch.equal(free.x, alone.x)


def test_it_can_be_stopped_replayed_and_named_on_the_shell(tmp_path: Path) -> None:
    problem = dd.problems.Clipped(dd.Digits(workers=3, hidden=4), norm=0.5)
    straight = dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, folder=tmp_path / "a")
    assert torch.equal(dd.replay(tmp_path / "a").x, straight.x)
    with pytest.raises(Killed):
        dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, folder=tmp_path / "d", watch=[kill_at(9)])
    assert differences(dd.resume(tmp_path / "d"), straight) == []
    words = ["--problem", "clipped[problem=digits[workers=3,hidden=4],norm=0.5]", "--speeds", "fixed[times=[1,2,4]]"]
    main(["train", "dude[lr=0.05]", *words, "--updates", "20", "--folder", str(tmp_path / "b")])
    assert torch.equal(dd.load(tmp_path / "b").x, straight.x)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, "much"])
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
    with pytest.raises(dd.BadInput, match="norm"):
        dd.problems.Clipped(QUAD, norm=norm)

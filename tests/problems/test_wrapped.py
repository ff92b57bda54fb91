"""Problems made from another problem: local steps, clipped gradients and exact gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.problems import Clipped, FullGradients, exact
from dualdelay.runs.names import label
from helpers import drift, operations, rounding
from own import Killed, differences, kill_at, mlp, shards, three
from tables import CASES, LR

SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])

# --- local steps ---


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic", "digits"])
def test_one_local_step_is_the_plain_problem(case: str) -> None:
    problem, speeds = CASES[case]
    plain, stepping = (dd.simulate(dd.DuDe(LR), p, speeds, updates=12) for p in (problem, dd.LocalSteps(problem, 1, 0.3)))
    assert torch.equal(plain.x, stepping.x)
    for name in ("time", "worker", "draw", "loss"):
        assert plain.trace[name].tolist() == stepping.trace[name].tolist()


@pytest.mark.numeric
@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("case", ["noisy", "logistic", "digits"])
def test_local_steps_report_how_far_they_went_with_named_minibatches(case: str, k: int) -> None:
    inner = CASES[case][0]
    problem = dd.LocalSteps(inner, k, 0.25)
    x = problem.start(3)
    for worker, draw in [(0, 0), (2, 3)]:
        y, losses, draws = x.clone(), [], range(draw * k, (draw + 1) * k)
        for j in draws:
            gradient, loss = inner.gradient(y, worker, j)
            y = y - 0.25 * gradient
            losses.append(loss)
        value, loss = problem.gradient(x, worker, draw)
        # y is rounded at each step, to last digits of x that are four times as large in the difference over 1/4
        close = rounding(2 * k + 2, x.dtype) * (4 * x.abs().max() + value.abs().max())
        assert float((value - (x - y) / 0.25).abs().max()) <= close
        assert loss == pytest.approx(np.mean(losses), rel=rounding(2 * k), abs=0)
        assert problem.batches(worker) == k
        if case != "noisy":
            assert problem.indices(worker, draw).tolist() == [inner.indices(worker, j).tolist() for j in draws]
    assert torch.equal(x, problem.start(3))


@pytest.mark.numeric
def test_local_steps_measure_as_their_problem_does() -> None:
    inner = dd.Network(mlp, cross_entropy, shards(), 4, test=shards()[0])
    problem, x = dd.LocalSteps(inner, 2, 0.1), inner.start(1)
    assert problem.measures and not CASES["local steps"][0].measures
    combined = problem.combine(x, {worker: problem.measure(x, worker) for worker in range(3)})
    close = rounding(operations(inner, samples=28), torch.float32)
    assert combined == pytest.approx(inner.evaluate(x), rel=close, abs=0)


# --- clipped gradients ---

QUADRATIC = dd.Quadratic([[0.0, 0.0], [30.0, 40.0], [0.3, 0.4]])


def test_a_long_gradient_is_shortened_and_a_short_one_is_not() -> None:
    clipped, x = Clipped(QUADRATIC, norm=5.0), torch.zeros(2, dtype=torch.float64)
    gradient, loss = clipped.gradient(x, 1, 0)
    assert gradient.tolist() == pytest.approx([-3.0, -4.0], rel=rounding(2))  # a tenth of (-30, -40)
    assert loss == QUADRATIC.gradient(x, 1, 0)[1]
    assert torch.equal(clipped.gradient(x, 2, 0)[0], QUADRATIC.gradient(x, 2, 0)[0])
    assert clipped.evaluate(x) == QUADRATIC.evaluate(x)  # the objective is what it was


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_so(number: float) -> None:
    gradient, _ = Clipped(QUADRATIC, norm=5.0).gradient(torch.tensor([number, 0.0], dtype=torch.float64), 0, 0)
    assert not torch.isfinite(gradient).all()


@pytest.mark.numeric
def test_clipped_gradients_taken_together_are_those_taken_alone() -> None:
    digits = dd.Digits(workers=3, hidden=4)
    alone, together = (
        dd.simulate(dd.DuDe(lr=0.05), Clipped(digits, norm=0.5), SPEEDS, updates=20, compute=dd.Compute(batch=batch))
        for batch in (False, True)
    )
    assert np.allclose(together.x, alone.x, rtol=0, atol=drift(20, 0.05, 256, torch.float32))
    assert not torch.equal(dd.simulate(dd.DuDe(lr=0.05), digits, SPEEDS, updates=20).x, alone.x)  # the norm matters


def test_a_clipped_run_can_be_stopped_replayed_and_named_on_the_shell(tmp_path: Path) -> None:
    problem = Clipped(dd.Digits(workers=3, hidden=4), norm=0.5)
    straight = dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, folder=tmp_path / "straight")
    assert torch.equal(dd.replay(tmp_path / "straight").x, straight.x)
    with pytest.raises(Killed):
        dd.simulate(dd.DuDe(lr=0.05), problem, SPEEDS, updates=20, folder=tmp_path / "killed", watch=[kill_at(9)])
    assert differences(dd.resume(tmp_path / "killed"), straight) == []
    words = ["--problem", "clipped[problem=digits[workers=3,hidden=4],norm=0.5]", "--speeds", "fixed[times=[1,2,4]]"]
    main(["train", "dude[lr=0.05]", *words, "--updates", "20", "--folder", str(tmp_path / "shell")])
    assert torch.equal(dd.load(tmp_path / "shell").x, straight.x)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, "much"])
def test_a_norm_that_is_not_above_zero_is_refused(norm: Any) -> None:
    with pytest.raises(dd.BadInput, match=r"norm is .*; expected a finite number above zero"):
        Clipped(QUADRATIC, norm=norm)


# --- exact gradients ---

EXACT = {
    "quadratic": CASES["noisy"][0],
    "logistic": CASES["logistic"][0],
    "digits": CASES["digits"][0],
    "weighted": dd.Network(mlp(), cross_entropy, shards(), 4, weights="samples"),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", EXACT)
def test_the_mean_of_exact_gradients_is_the_gradient_of_f(name: str) -> None:
    problem = FullGradients(EXACT[name])
    x = problem.start(0) + 0.1
    jobs = [problem.gradient(x, worker, 5 * worker) for worker in range(problem.workers)]
    gradients, losses = [gradient for gradient, _ in jobs], [loss for _, loss in jobs]
    expected = problem.evaluate(x)
    norm, size = torch.stack(gradients).double().mean(0).norm(), max(gradient.norm() for gradient in gradients)
    # each was rounded to the type of x, and all of them were added up
    assert abs(float(norm) - expected["gradient_norm"]) <= (rounding(1, x.dtype) + rounding(16)) * size
    if name != "weighted":
        assert sum(losses) / problem.workers == pytest.approx(expected["objective"], rel=rounding(16), abs=0)
    assert gradients[0].dtype == x.dtype
    assert torch.equal(problem.gradient(x, 0, 7)[0], gradients[0])  # whatever the draw


def test_an_exact_gradient_takes_as_long_as_the_minibatches_of_all_data() -> None:
    data = [(torch.randn(size, 3), torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)) for size in (20, 7, 9)]
    problem = FullGradients(dd.problems.Logistic(shards=data, batch_size=4))
    run = dd.simulate(dd.SyncSGD(LR), problem, SPEEDS, updates=1)
    assert run.trace.time.tolist() == [4.0, 5.0, 12.0]  # two minibatches of 2 seconds, five of 1 and three of 4
    assert CASES["noisy"][0].epoch(0) == 1


@pytest.mark.numeric
@pytest.mark.parametrize("method", [dd.algorithms.IAG(LR), dd.algorithms.SAG(LR), dd.algorithms.SAGA(LR)], ids=label)
def test_a_method_that_needs_exact_gradients_is_given_them(method: Any, tmp_path: Path) -> None:
    plain = dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=64)
    run = dd.simulate(method, plain, three, updates=9, folder=tmp_path / "run")
    asked = dd.simulate(method, FullGradients(plain), three, updates=9)
    assert torch.equal(run.x, asked.x) and run.trace.time.tolist() == asked.trace.time.tolist()
    assert torch.equal(dd.replay(tmp_path / "run", plain).x, run.x)
    assert dd.resume(tmp_path / "run", updates=12, problem=plain).version == 12


@pytest.mark.numeric
def test_each_of_several_local_steps_is_exact() -> None:
    inner = CASES["noisy"][0]
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    first = inner.measure(x, 1)["gradient"]
    second = inner.measure(x - 0.1 * first, 1)["gradient"]
    assert torch.equal(exact(dd.LocalSteps(inner, 2, 0.1)).gradient(x, 1, 4)[0], first + second)


@pytest.mark.numeric
def test_a_network_that_evaluates_without_gradients_has_exact_ones_all_the_same() -> None:
    lean, rich = (
        FullGradients(dd.Network(mlp(), cross_entropy, shards(), 4, full_gradient=full)) for full in (False, True)
    )
    x = rich.start(0)
    assert torch.equal(lean.gradient(x, 1, 0)[0], rich.gradient(x, 1, 0)[0])
    assert math.isnan(lean.evaluate(x)["gradient_norm"])


class Opaque(dd.Quadratic):
    measure = dd.Problem.measure


@pytest.mark.numeric
def test_exact_gradients_are_clipped_where_the_problem_clips() -> None:
    network = dd.Network(mlp(), cross_entropy, shards(3), 8, full_gradient=False)
    x = network.start(0)
    whole = FullGradients(network).gradient(x, 1, 0)[0]
    norm = float(whole.norm()) / 2
    clipped = exact(Clipped(network, norm)).gradient(x, 1, 0)[0]
    assert torch.equal(clipped, Clipped(FullGradients(network), norm).gradient(x, 1, 0)[0])
    assert float(clipped.norm()) == pytest.approx(norm)
    assert torch.equal(FullGradients(Clipped(network, norm)).gradient(x, 1, 0)[0], whole)
    assert dd.simulate(dd.ALGORITHMS["iag"](0.1), Clipped(network, norm), SPEEDS, updates=4).version == 4


def test_a_problem_without_exact_gradients_is_refused() -> None:
    with pytest.raises(dd.BadInput, match="Opaque gives no exact local gradients"):
        dd.simulate(dd.algorithms.IAG(LR), Opaque([[0.0], [1.0]]), dd.FixedSpeeds([1.0, 1.0]), updates=1)
    with pytest.raises(dd.BadInput, match="expected a problem"):
        FullGradients("digits")

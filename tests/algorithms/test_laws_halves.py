"""The worker's half

Between two messages a worker may take several gradients, with an inner optimiser, from a model of its own, until it is done
or asked. Whatever it does is a function of what it was sent, what it kept and the minibatches that its job names.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import dualdelay as dd
from dualdelay.core.local_steps import LocalTraining
from dualdelay.core.state import State
from helpers import heterogeneous
from tables import CASES, LR

OPTIMIZERS = ("SGD", "SGD[momentum=0.9]", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Moves(LocalTraining[State]):
    """Vanilla ASGD on how far its workers have moved: x <- x - lr (x_u - y)."""

    name = "moves"

    def init(self, x, n, rng):
        return State(x, n)

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def final(method, problem, speeds, updates=24):
    run = dd.simulate(method, problem, speeds, updates=updates)
    return run.x, run.trace


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
def test_one_plain_local_step_is_the_gradient(case):
    """A job of one local step of plain SGD is the gradient, bit for bit, as a half (with inner step 1) and as a problem
    (with any). Catches a difference of models divided by the step in place of the gradient, and another minibatch."""
    problem, speeds = CASES[case]
    (x, trace), (y, other) = final(dd.VanillaASGD(LR), problem, speeds), final(Moves(LR, inner_lr=1.0), problem, speeds)
    z, third = final(dd.VanillaASGD(LR), dd.LocalSteps(problem, 1, 0.3), speeds)
    assert torch.equal(x, y) and torch.equal(x, z)
    for column in ("time", "worker", "draw", "loss", "bytes", "down"):
        assert trace[column].tolist() == other[column].tolist() == third[column].tolist()


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["noisy", "logistic", "digits"])
@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_local_steps_are_the_same_in_the_method_and_in_the_problem(case, text, state):
    """k local steps give the same models and times whether the method's half takes them or a problem that wraps another.
    Catches an optimiser's state that is lost or kept against the user's choice, and jobs that cost one gradient."""
    problem, speeds = CASES[case]
    half = Moves(0.5, steps=3, inner_lr=LR, inner=text, inner_state=state)
    wrapped = dd.LocalSteps(problem, 3, LR, text, state)
    (x, trace), (y, other) = final(half, problem, speeds), final(dd.VanillaASGD(0.5 * LR), wrapped, speeds)
    assert torch.equal(x, y), "both steps are powers of two, so that scaling rounds nothing"
    assert trace.time.tolist() == other.time.tolist() and trace.worker.tolist() == other.worker.tolist()


@pytest.mark.numeric
@pytest.mark.parametrize("text", OPTIMIZERS)
def test_an_inner_optimiser_is_that_of_torch(text):
    """A lone worker whose inner optimiser's state is kept trains as torch's own optimiser on the same minibatches does.
    Catches a state that begins anew with each job, or that another worker's job has touched."""
    problem = heterogeneous(1, 3)
    method = Moves(1.0, steps=4, inner_lr=0.05, inner=text, inner_state="keep")
    run = dd.simulate(method, problem, dd.FixedSpeeds([1.0]), updates=5)
    name, _, rest = text.partition("[")
    options = {"momentum": 0.9} if rest else {}
    weights = torch.nn.Parameter(problem.start(0).clone())
    optimizer = getattr(torch.optim, name)([weights], lr=0.05, **options)
    for draw in range(20):
        weights.grad = problem.gradient(weights.data, 0, draw)[0]
        optimizer.step()
    assert torch.allclose(run.x, weights.data, rtol=1e-12, atol=1e-12)


@pytest.mark.numeric
@pytest.mark.parametrize("text", OPTIMIZERS)
def test_a_state_that_is_reset_leaves_nothing_to_the_next_job(text):
    """With the state reset, what a job comes to depends on its model and minibatches alone, whatever came before.
    Catches an optimiser's momentum that leaks from one job into the next, or from one worker into another."""
    problem = heterogeneous(3, 2)
    wrapped = dd.LocalSteps(problem, 3, 0.1, text)
    x = problem.start(0)
    alone = [wrapped.gradient(x, worker, 4)[0] for worker in range(3)]
    for worker in (2, 0, 1):
        wrapped.gradient(x + 1.0, worker, 1)
        assert torch.equal(wrapped.gradient(x, worker, 4)[0], alone[worker])


@pytest.mark.numeric
def test_local_steps_on_unequal_curvatures_end_where_clients_drift_to():
    """Synchronous SGD with K local steps ends at sum a_i b_i / sum a_i, a_i = 1 - (1 - lr l_i)^K: 2.680532... for
    curvatures 1 and 3, centres 0 and 4, lr 0.1 and K = 5. Catches gradients that are all taken at the server's model."""
    problem = dd.LocalSteps(dd.Quadratic([[0.0], [4.0]], [1.0, 3.0]), 5, 0.1)
    run = dd.simulate(dd.SyncSGD(0.1), problem, dd.FixedSpeeds([1.0, 1.0]), updates=200)
    assert run.x.item() == pytest.approx(2.680532285088, abs=1e-11)


@pytest.mark.numeric
@pytest.mark.parametrize("way", ["int8", 0.5, 1.0])
def test_small_models_move_no_limit(way):
    """Models that travel as small differences change neither DuDe's limit nor the number of arrivals, only the bytes.
    Catches differences against what was meant and not what the worker has, so that errors add up."""
    problem, speeds = CASES["q3"]
    whole, small = (
        dd.simulate(dd.DuDe(LR), problem, speeds, updates=3000, server=dd.Server(downlink=down)) for down in (None, way)
    )
    assert whole.x.item() == pytest.approx(6.0, abs=1e-9) and small.x.item() == pytest.approx(6.0, abs=1e-9)
    assert small.trace.worker.tolist() == whole.trace.worker.tolist()
    assert small.trace.down[0] == whole.trace.down[0] == 8, "the first is whole"

"""AutoDuDe: what it chooses, recomputed from the trace, and what its choices do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from dualdelay.runs.names import label, parse
from helpers import rounding
from tables import CASES

FLEETS = {
    **{
        f"ten, std {std:g}, seed {seed}": dd.TruncatedNormalSpeeds(10, std, seed)
        for std in (1.0, 5.0)
        for seed in (0, 1, 6)
    },
    **{
        f"thirty, std {std:g}": dd.TruncatedNormalSpeeds(30, std, 4) for std in (1.0, 5.0)
    },  # one is hundreds of times faster
    "four, random times": dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1),
    "twelve, equal": dd.FixedSpeeds([1.0] * 12),
}
LAST = dd.Evaluation(every=10**6)  # the end alone
TARGET, BAND = 8.0, 0.7  # the mean delay that is kept to, and the share by which it may differ before the waiting changes


def heterogeneous(n):
    return dd.Quadratic([[float(3 * worker), float(worker % 3)] for worker in range(n)])


def server(n, lr=8.0):
    """A method and its state before anything has arrived; with this lr the step is 1 while delays are below eight."""
    method = dd.AutoDuDe(lr)
    return method, method.init(torch.zeros(1, dtype=torch.float64), n, dd.Draws(0, ""))


def arrival(worker, value, version=0, draw=0):
    return dd.Arrival(dd.Job(worker, draw, version), torch.tensor([value], dtype=torch.float64), 0.0, 1.0, 0.0)


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_trace_says_how_many_workers_are_waited_for(fleet):
    """An update is made when as many workers have reported as the mean delays of the rounds so far say; and the mean delay
    is kept near eight, unless no worker is waited for and it is less.
    """
    speeds = FLEETS[fleet]
    n, slowest = speeds.n, max(speeds.seconds(worker, 0) for worker in range(speeds.n))
    run = dd.simulate(dd.AutoDuDe(), heterogeneous(n), speeds, time=60 * slowest, evaluation=LAST)
    taken_at, reported, wait_for, round_start, reports, version = [0] * n, set(), n, 0, 0, 0
    for worker, at, after in zip(run.trace.worker, run.trace.version, run.trace.after, strict=True):
        taken_at[worker], reports = int(at), reports + 1
        reported.add(int(worker))
        due = len(reported) == n and reports >= wait_for
        assert (after == version + 1) == due
        if due:
            delay = float(np.mean([version + 1 - u for u in taken_at]))
            if all(u >= round_start for u in taken_at):
                round_start = version + 1
                if delay < 5.6:  # 0.7 of 8
                    wait_for = max(1, wait_for * 7 // 10)
                elif delay > TARGET / BAND:
                    wait_for = min(n, -(-wait_for * 10 // 7))
            version, reports = version + 1, 0
    assert wait_for == run.state.wait_for and version == run.version > 10
    late = delay_grids(run.trace, n)[0][-40:].mean()
    assert TARGET * BAND**2 < late < TARGET / BAND**2 or (run.state.wait_for == 1 and late < TARGET)


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_that_of_the_running_means_and_the_new_gradients(case):
    """Every update is -lr / delay times the mean of the workers' running means plus that of what is new, recomputed from
    the gradients that the jobs name.
    """
    (problem, speeds), lr = CASES[case], 0.3
    n, models, taken_at, means, fresh, size = problem.workers, [problem.start(0)], {}, {}, {}, 0.0
    # what a mean that goes back eight updates has lost in each of them, in all workers' means, and what a step rounds
    close = rounding(2 + lr / 8 * 4 * (8 + n), models[0].dtype)

    def check(s, a):
        nonlocal size
        fresh[a.worker] = problem.gradient(models[a.version], a.worker, a.job.draw)[0].double()
        taken_at[a.worker] = a.version
        if s.version == len(models):
            for worker, gradient in fresh.items():
                keep = math.exp(-(s.version - taken_at[worker]) / 8) if worker in means else 0.0
                means[worker] = keep * means.get(worker, 0.0) + (1 - keep) * gradient
            new = sum(gradient - means[worker] for worker, gradient in fresh.items()) / len(fresh)
            delay = s.version - sum(taken_at.values()) / n
            expected = models[-1].double() - lr / max(8.0, delay) * (sum(means.values()) / n + new)
            size = max(size, *(float(tensor.abs().max()) for tensor in (expected, *fresh.values())))
            assert float((s.x.double() - expected).abs().max()) <= close * size
            models.append(s.x.clone())
            fresh.clear()

    run = dd.simulate(dd.AutoDuDe(lr), problem, speeds, updates=40, watch=[check], evaluation=LAST)
    assert run.version == len(models) - 1 == 40 and len(set(run.trace.version)) > 20


@pytest.mark.numeric
@pytest.mark.parametrize(
    "speeds",
    [dd.FixedSpeeds([1.0, 2.0, 4.0]), dd.speeds.ExponentialSpeeds([9.0, 1.0, 0.1], seed=1)],
    ids=["fixed", "random, one ninety times as fast"],
)
def test_the_limit_is_the_solution_of_all_workers(speeds):
    """It comes to rest at the minimum of the mean loss, whatever the speeds."""
    problem = dd.Quadratic([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]], [1.0, [[2.0, 0.5], [0.5, 1.0]], 0.5])
    run = dd.simulate(dd.AutoDuDe(lr=0.5), problem, speeds, updates=3000, evaluation=LAST)
    # nearer to a solution of size 4 a step, lr over a delay of 8 / 0.7^2 at most, is less than half of the last digit
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=rounding(16) * 4 * 8 / BAND**2 / 0.5)


@pytest.mark.parametrize("seed", [0, 6])  # in the second one worker gives most gradients
def test_with_no_argument_it_learns_the_digits(seed):
    """With its default settings it learns digits that are split by class, on heterogeneous workers."""
    speeds = dd.TruncatedNormalSpeeds(10, std=5.0, seed=seed)
    run = dd.simulate(dd.AutoDuDe(), dd.Digits(workers=10, alpha=0.1), speeds, time=300.0)
    assert run.metrics.accuracy[-1] > 0.85 and run.metrics.objective[-1] < 0.5


def test_more_workers_are_waited_for_when_one_becomes_a_straggler():
    """When a worker becomes forty times slower, more workers are waited for, until the mean delay is near eight again."""
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([1.0] * 6), [50.0], [[1.0] * 6, [1.0] * 5 + [40.0]])
    before, after = (dd.simulate(dd.AutoDuDe(), heterogeneous(6), speeds, time=t, evaluation=LAST) for t in (50.0, 1500.0))
    assert after.state.wait_for > before.state.wait_for
    assert TARGET * BAND**2 < delay_grids(after.trace, 6)[0][-40:].mean() < TARGET / BAND**2


def test_steps_shrink_with_the_delay_while_a_worker_is_silent():
    """While a worker is silent its last gradient counts on, older and older, and the steps shrink with its delay."""
    # after t updates the mean delay is about t / 3: steps are 0.6 / (2000 / 3) in place of 0.6 / 8, or 0.012 of them
    speeds, models = dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]]), {}

    def keep(s, a):
        models[s.version] = s.x.clone()

    run = dd.simulate(dd.AutoDuDe(), heterogeneous(3), speeds, updates=2000, watch=[keep], evaluation=LAST)
    early, late = (float((models[t + 1] - models[t]).norm()) for t in (2, 1998))
    assert run.version == 2000 and 0 < late < 0.02 * early


@pytest.mark.numeric
def test_the_first_gradient_of_a_worker_that_returns_counts_whole():
    """A worker that has left is not waited for, and the first gradient after its return is its running mean."""
    (method, s), close = server(2), rounding(32)
    assert method.step(s, arrival(0, 1.0)) == [] and s.version == 0
    assert method.leave(s, 1) == [dd.send(0)] and float(s.x) == -1.0
    method.step(s, arrival(0, 3.0, version=1, draw=1))
    mean = 1.0 + 2.0 * (1 - math.exp(-1 / 8))
    assert float(s.x) == pytest.approx(-4.0, rel=close, abs=0) and float(s.total) == pytest.approx(mean, rel=close, abs=0)
    assert method.join(s, 1) == [dd.send(1)]
    method.step(s, arrival(1, 5.0, version=2))
    assert float(s.total) == pytest.approx(mean + 5.0, rel=close, abs=0) and s.n == 2
    assert float(s.x) == pytest.approx(-4.0 - (mean + 5.0) / 2, rel=close, abs=0)


def test_the_gradient_of_a_worker_that_leaves_while_it_waits_is_dropped():
    """A worker that has reported and leaves before the update is not part of the update."""
    method, s = server(3)
    assert method.step(s, arrival(0, 1.0)) == method.step(s, arrival(1, 100.0)) == []
    assert method.leave(s, 1) == []  # worker 2 is still waited for
    assert method.step(s, arrival(2, 4.0)) == [dd.send(0), dd.send(2)] and float(s.x) == -2.5


def test_it_has_one_setting():
    """How many workers are waited for cannot be set, and its name alone stands for its defaults."""
    with pytest.raises(dd.BadInput, match="wait_for"):
        parse("algorithm", "auto[wait_for=3]")
    assert parse("algorithm", "auto") == dd.AutoDuDe() and label(dd.AutoDuDe()) == "auto"

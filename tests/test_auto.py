"""AutoDuDe: what it chooses, recomputed from the trace, and what its choices do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualdelay as dd

FLEETS = {
    **{
        f"ten, std {std:g}, seed {seed}": dd.TruncatedNormalSpeeds(10, std, seed)
        for std in (1.0, 5.0)
        for seed in (0, 1, 6)
    },
    **{
        f"thirty, std {std:g}": dd.TruncatedNormalSpeeds(30, std, 4) for std in (1.0, 5.0)
    },  # one is hundreds of times faster
    "four by chance": dd.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1),
    "alike": dd.FixedSpeeds([1.0] * 12),
}


def centers(n):
    return dd.Quadratic([[float(3 * worker), float(worker % 3)] for worker in range(n)])


def slowest(speeds):
    return max(speeds.seconds(worker, 0) for worker in range(speeds.n))


def run_on(speeds, jobs=60, lr=0.6, **options):
    return dd.simulate(dd.AutoDuDe(lr=lr), centers(speeds.n), speeds, time=jobs * slowest(speeds), **options)


@pytest.mark.parametrize("fleet", FLEETS)
def test_who_is_waited_for_is_what_the_trace_says(fleet):
    """The rule in other words, on the trace alone: rounds, mean delays, and the number of reports before each update."""
    run = run_on(FLEETS[fleet], jobs=30)
    n = run.problem.workers
    taken, heard, wanted, begun, reports, version, chosen = [0] * n, set(), n, 0, 0, 0, []
    for worker, at, after in zip(run.trace.worker, run.trace.version, run.trace.after, strict=True):
        taken[worker], reports = int(at), reports + 1
        heard.add(int(worker))
        due = len(heard) == n and reports >= wanted
        assert (after == version + 1) == due
        if due:
            delay = float(np.mean([version + 1 - mine for mine in taken]))
            if all(mine >= begun for mine in taken):
                begun = version + 1
                if delay < 5.6:
                    wanted = max(1, int(wanted * 7) // 10)
                elif delay > 8 / 0.7:
                    wanted = min(n, -(-wanted * 10 // 7))
            version, reports = version + 1, 0
            chosen.append(wanted)
    assert chosen[-1] == run.state.wait_for and version == run.version > 10


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_mean_delay_is_kept_near_eight_or_nobody_is_waited_for(fleet):
    run = run_on(FLEETS[fleet])
    late = run.version - 40  # the last forty updates
    tau, _ = dd.delay_grids(run.trace, run.problem.workers)
    assert 8 * 0.7**2 < tau[late:].mean() < 8 / 0.7**2 or (run.state.wait_for == 1 and tau[late:].mean() < 8)


@pytest.mark.parametrize("speeds", [dd.FixedSpeeds([1.0, 2.0, 4.0]), dd.ExponentialSpeeds([9.0, 1.0, 0.1], seed=1)])
def test_the_limit_is_the_solution_for_all(speeds):
    problem = dd.Quadratic([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]], [1.0, [[2.0, 0.5], [0.5, 1.0]], 0.5])
    run = dd.simulate(dd.AutoDuDe(lr=0.5), problem, speeds, updates=3000)
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-9)


def test_with_no_argument_it_learns_the_digits():
    problem = dd.Digits(workers=10, alpha=0.1)
    for seed in (0, 6):  # in the second one worker makes most gradients
        run = dd.simulate(dd.AutoDuDe(), problem, dd.TruncatedNormalSpeeds(10, std=5.0, seed=seed), time=300.0)
        assert run.metrics.accuracy[-1] > 0.85 and run.metrics.objective[-1] < 0.5


def test_alone_it_is_sgd_with_an_eighth_of_lr():
    problem = dd.Quadratic([[2.0, -1.0]], noise=0.3, seed=2)
    run = dd.simulate(dd.AutoDuDe(lr=0.8), problem, dd.FixedSpeeds([1.0]), updates=50)
    sgd = dd.simulate(dd.SyncSGD(lr=0.1), problem, dd.FixedSpeeds([1.0]), updates=50)
    assert torch.allclose(run.x, sgd.x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("unit", [2.0**-10, 256.0])
def test_the_unit_of_time_does_not_matter(unit):
    times = (0.25, 0.5, 1.0, 1.5, 6.0)
    one, other = (
        dd.simulate(dd.AutoDuDe(), centers(5), dd.FixedSpeeds([t * u for t in times]), updates=200) for u in (1.0, unit)
    )
    assert torch.equal(one.x, other.x) and one.state.wait_for == other.state.wait_for


def test_when_a_worker_grows_slow_more_are_waited_for():
    speeds = dd.ChangingSpeeds(dd.FixedSpeeds([1.0] * 6), [50.0], [[1.0] * 6, [1.0] * 5 + [40.0]])
    before, after = (dd.simulate(dd.AutoDuDe(), centers(6), speeds, time=t) for t in (50.0, 1500.0))
    assert after.state.wait_for > before.state.wait_for
    tau, _ = dd.delay_grids(after.trace, 6)
    assert 8 * 0.7**2 < tau[-40:].mean() < 8 / 0.7**2


def test_while_somebody_is_silent_steps_shrink_with_the_delay():
    """Its last gradient counts on, older and older; the others move x less and less, and are not stopped."""
    speeds = dd.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]])
    seen = []
    run = dd.simulate(
        dd.AutoDuDe(), centers(3), speeds, updates=2000, watch=[lambda s, a: seen.append((s.version, s.x.clone()))]
    )
    models = dict(seen)  # by version
    early, late = (float((models[t + 1] - models[t]).norm()) for t in (2, 1998))
    assert run.version == 2000 and 0 < late < 0.02 * early


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_lr_must_be_a_positive_number(lr):
    with pytest.raises(dd.BadInput, match="lr is"):
        dd.AutoDuDe(lr=lr)


def test_there_is_nobody_to_tell_it_to_wait_for():
    with pytest.raises(dd.BadInput, match="wait_for"):
        dd.parse("algorithm", "auto[wait_for=3]")
    assert dd.parse("algorithm", "auto") == dd.AutoDuDe() and dd.label(dd.AutoDuDe()) == "auto"

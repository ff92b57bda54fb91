"""AutoDuDe: what it chooses, recomputed from the trace, and what its choices do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from dualdelay.runs.names import label, parse
from flat import simulate
from helpers import drift, rounding
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
    "four by chance": dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1),
    "alike": dd.FixedSpeeds([1.0] * 12),
}


def centers(n):
    return dd.Quadratic([[float(3 * worker), float(worker % 3)] for worker in range(n)])


def slowest(speeds):
    return max(speeds.seconds(worker, 0) for worker in range(speeds.n))


def run_on(speeds, jobs=60, lr=0.6, **options):
    return simulate(dd.AutoDuDe(lr=lr), centers(speeds.n), speeds, time=jobs * slowest(speeds), **options)


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


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_that_of_the_means_and_of_what_is_new(case):
    """The models from gradients recomputed by their names: running means by the delays, and lr over the mean delay."""
    (problem, speeds), lr = CASES[case], 0.3
    n, models, taken, means, fresh, size = problem.workers, [problem.start(0)], {}, {}, {}, 0.0
    # what a mean that goes back eight updates has lost in each of them, in all workers' means, and what a step rounds
    close = rounding(2 + lr / 8 * 4 * (8 + n), models[0].dtype)

    def check(s, a):
        nonlocal size
        fresh[a.worker] = problem.gradient(models[a.job.version], a.job.worker, a.job.draw)[0].double()
        taken[a.worker] = a.job.version
        if s.version == len(models):
            for worker, gradient in fresh.items():
                keep = math.exp(-(s.version - taken[worker]) / 8) if worker in means else 0.0
                means[worker] = keep * means.get(worker, 0.0) + (1 - keep) * gradient
            new = sum(gradient - means[worker] for worker, gradient in fresh.items()) / len(fresh)
            delay = s.version - sum(taken.values()) / n
            along = sum(means.values()) / n + new
            wanted = models[-1].double() - lr / max(8.0, delay) * along
            size = max(size, *(float(each.abs().max()) for each in (wanted, *fresh.values())))
            assert float((s.x.double() - wanted).abs().max()) <= close * size
            models.append(s.x.clone())
            fresh.clear()

    run = dd.simulate(dd.AutoDuDe(lr), problem, speeds, updates=40, watch=[check], evaluation=dd.Evaluation(every=40))
    assert run.version == len(models) - 1 == 40 and len(set(run.trace.version)) > 20


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_mean_delay_is_kept_near_eight_or_nobody_is_waited_for(fleet):
    run = run_on(FLEETS[fleet])
    late = run.version - 40  # the last forty updates
    tau, _ = delay_grids(run.trace, run.problem.workers)
    assert 8 * 0.7**2 < tau[late:].mean() < 8 / 0.7**2 or (run.state.wait_for == 1 and tau[late:].mean() < 8)


@pytest.mark.numeric
@pytest.mark.parametrize("speeds", [dd.FixedSpeeds([1.0, 2.0, 4.0]), dd.speeds.ExponentialSpeeds([9.0, 1.0, 0.1], seed=1)])
def test_the_limit_is_the_solution_for_all(speeds):
    problem = dd.Quadratic([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]], [1.0, [[2.0, 0.5], [0.5, 1.0]], 0.5])
    run = dd.simulate(dd.AutoDuDe(lr=0.5), problem, speeds, updates=3000)
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-9)


def test_with_no_argument_it_learns_the_digits():
    problem = dd.Digits(workers=10, alpha=0.1)
    for seed in (0, 6):  # in the second one worker makes most gradients
        run = dd.simulate(dd.AutoDuDe(), problem, dd.TruncatedNormalSpeeds(10, std=5.0, seed=seed), time=300.0)
        assert run.metrics.accuracy[-1] > 0.85 and run.metrics.objective[-1] < 0.5


@pytest.mark.numeric
def test_alone_it_is_sgd_with_an_eighth_of_lr():
    problem = dd.Quadratic([[2.0, -1.0]], noise=0.3, seed=2)
    run = dd.simulate(dd.AutoDuDe(lr=0.8), problem, dd.FixedSpeeds([1.0]), updates=50)
    sgd = dd.simulate(dd.SyncSGD(lr=0.1), problem, dd.FixedSpeeds([1.0]), updates=50)
    assert float((run.x - sgd.x).abs().max()) <= drift(50, 0.1, 16) * 4  # no weight and no gradient is larger


@pytest.mark.parametrize("unit", [2.0**-10, 256.0])
def test_the_unit_of_time_does_not_matter(unit):
    times = (0.25, 0.5, 1.0, 1.5, 6.0)
    one, other = (
        dd.simulate(dd.AutoDuDe(), centers(5), dd.FixedSpeeds([t * u for t in times]), updates=200) for u in (1.0, unit)
    )
    assert torch.equal(one.x, other.x) and one.state.wait_for == other.state.wait_for


def test_when_a_worker_grows_slow_more_are_waited_for():
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([1.0] * 6), [50.0], [[1.0] * 6, [1.0] * 5 + [40.0]])
    before, after = (dd.simulate(dd.AutoDuDe(), centers(6), speeds, time=t) for t in (50.0, 1500.0))
    assert after.state.wait_for > before.state.wait_for
    tau, _ = delay_grids(after.trace, 6)
    assert 8 * 0.7**2 < tau[-40:].mean() < 8 / 0.7**2


def test_while_somebody_is_silent_steps_shrink_with_the_delay():
    """Its last gradient counts on, older and older; the others move x less and less, and are not stopped."""
    speeds = dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]])
    seen = []
    run = dd.simulate(
        dd.AutoDuDe(), centers(3), speeds, updates=2000, watch=[lambda s, a: seen.append((s.version, s.x.clone()))]
    )
    models = dict(seen)  # by version
    early, late = (float((models[t + 1] - models[t]).norm()) for t in (2, 1998))
    assert run.version == 2000 and 0 < late < 0.02 * early


@pytest.mark.numeric
def test_who_comes_back_counts_with_its_first_gradient_whole():
    algorithm, draws = dd.AutoDuDe(lr=8.0), [0, 0]  # the step is 1 while delays are below eight
    s = algorithm.init(torch.zeros(1, dtype=torch.float64), 2, dd.Draws(0, ""))

    def report(worker, value, version):
        draws[worker] += 1
        value = torch.tensor([value], dtype=torch.float64)
        return algorithm.step(s, dd.Arrival(dd.Job(worker, draws[worker], version), value, 0.0, 1.0, 0.0))

    assert report(0, 1.0, 0) == [] and s.version == 0
    assert [order.worker for order in algorithm.leave(s, 1)] == [0] and float(s.x) == -1.0  # nobody else is waited for
    report(0, 3.0, 1)
    mean, close = 1.0 + 2.0 * (1 - math.exp(-1 / 8)), rounding(32)
    assert float(s.x) == pytest.approx(-4.0, rel=close, abs=0) and float(s.total) == pytest.approx(mean, rel=close, abs=0)
    assert [order.worker for order in algorithm.join(s, 1)] == [1]
    report(1, 5.0, 2)
    assert float(s.total) == pytest.approx(mean + 5.0, rel=close, abs=0) and s.n == 2
    assert float(s.x) == pytest.approx(-4.0 - (mean + 5.0) / 2, rel=close, abs=0)


def test_who_leaves_while_it_waits_takes_its_gradient_along():
    algorithm = dd.AutoDuDe(lr=8.0)
    s = algorithm.init(torch.zeros(1, dtype=torch.float64), 3, dd.Draws(0, ""))
    for worker, value in enumerate((1.0, 100.0)):
        value = torch.tensor([value], dtype=torch.float64)
        assert algorithm.step(s, dd.Arrival(dd.Job(worker, 0, 0), value, 0.0, 1.0, 0.0)) == []
    assert algorithm.leave(s, 1) == []  # worker 2 is still waited for
    orders = algorithm.step(s, dd.Arrival(dd.Job(2, 0, 0), torch.tensor([4.0], dtype=torch.float64), 0.0, 1.0, 0.0))
    assert [order.worker for order in orders] == [0, 2] and float(s.x) == -2.5


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_lr_must_be_a_positive_number(lr):
    with pytest.raises(dd.BadInput, match="lr is"):
        dd.AutoDuDe(lr=lr)


def test_there_is_nobody_to_tell_it_to_wait_for():
    with pytest.raises(dd.BadInput, match="wait_for"):
        parse("algorithm", "auto[wait_for=3]")
    assert parse("algorithm", "auto") == dd.AutoDuDe() and label(dd.AutoDuDe()) == "auto"

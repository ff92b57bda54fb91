from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from helpers import archive, few, heterogeneous, rounding
from tables import ALGORITHMS, CASES, LR

RESTING = {
    **{row: ALGORITHMS[row] for row in ALGORITHMS if row.startswith(("dude", "sync", "mifa", "siag"))},
    "dude three": dd.DuDe(LR, wait_for=3),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", RESTING)
def test_methods_with_memory_rest_at_the_solution(name):
    # I-8: w* = (0 + 6 + 12) / 3
    method = replace(RESTING[name], lr=2 * LR)
    run = dd.simulate(method, *CASES["q3"], updates=1100, evaluation=dd.Evaluation(every=1100))
    assert float(run.x) == pytest.approx(
        6, abs=rounding(16) * 6 / method.lr
    )  # a step that is less than a last digit is none


# The others circle. Over a period the steps cancel: sum weight_j (r_j - b_j) = 0 over its arrivals j with read points r_j,
# so the weighted mean of the read points is that of the b_j, whatever the step size. The plain mean is O(lr) away.
CIRCLING = {
    "vanilla": (dd.VanillaASGD(LR), 24 / 7),  # arrivals by speed, 4 : 2 : 1
    "fedbuff": (dd.FedBuff(LR, buffer=2), 24 / 7),
    "fedbuff wait": (dd.FedBuff(LR, buffer=2, wait=True), 4.0),  # 3 : 2 : 1
    "fedbuff stale": (dd.FedBuff(LR, buffer=2, staleness=0.5), 2.60555),  # by the weights below
}


def read_points(run, models):
    return np.array([float(models[version]) for version in run.trace.version])


@pytest.mark.parametrize("name", CIRCLING)
def test_methods_without_memory_circle_about_the_wrong_point(name):
    algorithm, limit = CIRCLING[name]
    run, models = archive(algorithm, *CASES["q3"], updates=3000)
    tail = slice(-14 * 6 * 10, None)  # whole periods: 7, 14 and 6 arrivals
    staleness = np.concatenate([[0], run.trace.after[:-1]]) - run.trace.version
    weights = ((1.0 + staleness) ** -0.5 if name == "fedbuff stale" else np.ones(len(run.trace)))[tail]
    assert weights @ (6.0 * run.trace.worker[tail]) / weights.sum() == pytest.approx(limit, abs=1e-5)
    assert weights @ read_points(run, models)[tail] / weights.sum() == pytest.approx(limit, abs=1e-5)
    assert float(torch.stack(models[-420:]).mean()) == pytest.approx(limit, abs=0.15)


@pytest.mark.parametrize(("algorithm", "error"), [(dd.UniformASGD(LR), 0.15), (dd.ShuffledASGD(LR), 0.03)], ids=str)
def test_equal_shares_of_the_jobs_circle_about_the_solution(algorithm, error):
    # the mean of 5000 draws with standard deviation 4.9 has one of 0.07
    _, models = archive(algorithm, *CASES["q3"], updates=6000)
    assert float(torch.stack(models[1000:]).mean()) == pytest.approx(6, abs=error)


@few
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5), st.floats(0.02, 0.05))
def test_read_points_of_the_vanilla_cycle_average_to_its_limit(seconds, lr):
    # I-9: in 4 seconds, a multiple of every time, worker i arrives 4 / s_i times, and their steps cancel on the cycle
    problem, counts = heterogeneous(len(seconds)), np.array([4 / s for s in seconds])
    run, models = archive(dd.VanillaASGD(lr), problem, dd.FixedSpeeds(seconds), updates=1400)
    expected = counts @ np.array(problem.settings["centers"])[:, 0] / counts.sum()
    assert read_points(run, models)[-int(counts.sum()) :].mean() == pytest.approx(expected, abs=1e-10)


@pytest.mark.numeric
@pytest.mark.parametrize("seconds", [[1.0, 2.0, 4.0], [0.7, 30.0, 1.3]])
def test_dude_solves_the_equal_problem_and_vanilla_one_weighted_by_speed(seconds):
    # I-8: (sum p_i A_i)^-1 sum p_i A_i b_i with equal shares p or by speed; also with a worker forty times slower
    A = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[0.5, 0.0], [0.0, 0.5]], [[1.0, -0.25], [-0.25, 1.5]]]).double()
    b = torch.tensor([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]]).double()
    equal, biased = (
        torch.linalg.solve(torch.einsum("i,ijk->jk", p, A), torch.einsum("i,ijk,ik->j", p, A, b))
        for p in (torch.ones(3).double(), 1 / torch.tensor(seconds).double())
    )
    problem, speeds = dd.Quadratic(b, A), dd.FixedSpeeds(seconds)
    x = dd.simulate(dd.DuDe(2.0**-6), problem, speeds, updates=4000, evaluation=dd.Evaluation(every=4000)).x
    assert torch.allclose(x, equal, rtol=0, atol=1e-9) and torch.allclose(
        problem.optimum(), equal, rtol=rounding(64), atol=0
    )
    _, models = archive(dd.VanillaASGD(2.0**-8), problem, speeds, updates=4000)
    assert torch.allclose(torch.stack(models[-1400:]).mean(0), biased, rtol=0, atol=0.02)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_stability_edge_of_round_robin(n):
    # I-11: in turns, the delays in use are n .. 2n-1, so w^t - w^{t-1} + (a/n) sum_{k=n}^{2n-1} w^{t-k} = 0, a = eta lambda
    def radius(a):
        polynomial = np.zeros(2 * n)
        polynomial[:2] = 1.0, -1.0
        polynomial[n:] += a / n
        return np.abs(np.roots(polynomial)).max()

    low, high = 1e-3, 4.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    problem, speeds = dd.Quadratic([[0.0]] * n, start=[1.0]), dd.FixedSpeeds([1.0] * n)
    for a, grows in ((0.95 * low, False), (1.05 * low, True)):
        _, models = archive(dd.DuDe(a), problem, speeds, updates=300)  # not so many that rounding shows
        sizes = [float(torch.stack(models[end - 50 : end]).abs().max()) for end in (150, 300)]
        assert (sizes[1] > sizes[0]) == grows
        assert (sizes[1] / sizes[0]) ** (1 / 150) == pytest.approx(radius(a), abs=2e-3)


@pytest.mark.parametrize(("k", "limit"), [(1, 3.0), (5, 2.680532285088)])
def test_local_steps_move_the_limit_of_mifa(k, limit):
    # I-20: k steps cover the share a_i = 1 - (1 - 0.1 lambda_i)^k of the way to b_i; at rest sum a_i (b_i - w) = 0
    a = [1 - (1 - 0.1 * curvature) ** k for curvature in (1.0, 3.0)]
    assert a[1] * 4 / sum(a) == pytest.approx(limit, abs=1e-11)
    problem = dd.LocalSteps(dd.Quadratic([[0.0], [4.0]], [1.0, 3.0]), k, 0.1)
    run = dd.simulate(dd.MIFA(0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=300)
    assert float(run.x) == pytest.approx(limit, abs=1e-11)


@pytest.mark.parametrize("row", ALGORITHMS)
def test_workers_that_agree_are_solved_by_every_method(row):
    # I-21
    problem = dd.Quadratic([[2.0, -1.0]] * 3, [1.0, 0.75, 1.25])
    method = replace(ALGORITHMS[row], lr=2 * ALGORITHMS[row].lr)
    run = dd.simulate(method, problem, CASES["q3"][1], updates=700, evaluation=dd.Evaluation(every=700))
    assert run.x.tolist() == pytest.approx([2.0, -1.0], abs=1e-6)


def test_gradients_stay_below_the_bound_of_theorem_1():
    # I-22: 32 Delta / (T eta) + 128 L tau eta sigma^2 / n + 128 L^3 tau^2 eta^3 sigma^2 / n for eta <= 1 / (64 L tau)
    n, d, noise, L, tau, T = 4, 3, 0.5, 2.0, 7, 3000
    problem = heterogeneous(n, d, curvatures=[2.0, 1.0, 0.5, 1.5], noise=noise)
    eta, sigma2 = 1 / (64 * L * tau), noise**2 * d
    run, models = archive(dd.DuDe(eta), problem, dd.FixedSpeeds([1.0] * n), updates=T)
    assert run.delays.tau_max == tau
    gap = problem.evaluate(models[0])["objective"] - problem.evaluate(problem.optimum())["objective"]
    bound = 32 * gap / (T * eta) + 128 * L * tau * eta * sigma2 / n + 128 * L**3 * tau**2 * eta**3 * sigma2 / n
    assert np.mean([problem.evaluate(x)["gradient_norm"] ** 2 for x in models[:-1]]) <= bound

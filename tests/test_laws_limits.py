from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers import archive, centers, few
from hypothesis import given
from hypothesis import strategies as st
from tables import ALGORITHMS, CASES, LR

import dualdelay as dd

EXACT = {  # I-8: methods that come to rest do so at w* = 6
    **{f"dude {c}": dd.DuDe(LR, c) for c in (1, 2, 3)},
    "dude workers": dd.DuDe(LR, memory="workers"),
    "dude busy": dd.DuDe(LR, start="busy"),
    "dude zeros": dd.DuDe(LR, start="zeros"),
    "sync": dd.SyncSGD(LR),
    "mifa": dd.MIFA(LR),
    "mifa active": dd.MIFA(LR, active=2),
    "siag": dd.SIAG(LR),
}


@pytest.mark.parametrize("name", EXACT)
def test_methods_with_memory_rest_at_the_solution(name):
    run = dd.simulate(EXACT[name], *CASES["q3"], updates=2200, evaluate_every=2200)
    assert float(run.x) == pytest.approx(6, abs=1e-12)


def read_points(run, models):
    return np.array([float(models[version]) for version in run.trace.version])


# The rest circles. Over a period its steps cancel: sum weight_j (r_j - b_j) = 0 over the arrivals j with their read points
# r_j, so the weighted mean of the read points is that of the b_j, whatever the step size. The plain mean is O(lr) away.
CIRCLING = {
    "vanilla": (dd.VanillaASGD(LR), 24 / 7, 7),  # by speed 4 : 2 : 1, as many arrivals in 4 seconds
    "fedbuff": (dd.FedBuff(LR, buffer=2), 24 / 7, 14),  # the same shares; 7 is odd, so two turns
    "fedbuff wait": (dd.FedBuff(LR, buffer=2, wait=True), 4.0, 6),  # shares 3 : 2 : 1
}


@pytest.mark.parametrize("name", CIRCLING)
def test_methods_without_memory_circle_about_the_wrong_point(name):
    algorithm, limit, period = CIRCLING[name]
    run, models = archive(algorithm, *CASES["q3"], updates=2400, evaluate_every=2400)
    tail = slice(-period * 20, None)
    assert read_points(run, models)[tail].mean() == pytest.approx(limit, abs=1e-12)
    assert float(torch.stack(models[-420:]).mean()) == pytest.approx(limit, abs=0.15)


def test_staleness_weights_favour_the_fast_even_more():
    algorithm = dd.FedBuff(2.0**-8, buffer=2, staleness=0.5)
    run, models = archive(algorithm, *CASES["q3"], updates=9000, evaluate_every=9000)
    tail = slice(-1400, None)
    before = np.concatenate([[0], run.trace.after[:-1]])
    weights = ((1.0 + before - run.trace.version) ** -0.5)[tail]
    limit = weights @ (6.0 * run.trace.worker[tail]) / weights.sum()
    assert limit == pytest.approx(2.605, abs=1e-3)
    assert weights @ read_points(run, models)[tail] / weights.sum() == pytest.approx(limit, abs=1e-6)
    assert float(torch.stack(models[-700:]).mean()) == pytest.approx(limit, abs=0.03)


@pytest.mark.parametrize(("algorithm", "error"), [(dd.UniformASGD(LR), 0.15), (dd.ShuffledASGD(LR), 0.03)])
def test_equal_shares_of_the_jobs_circle_about_the_solution(algorithm, error):
    # of T draws with standard deviation 4.9 the mean is 4.9 / sqrt(T) = 0.05 off
    _, models = archive(algorithm, *CASES["q3"], updates=10_000, evaluate_every=10_000)
    assert float(torch.stack(models[1000:]).mean()) == pytest.approx(6, abs=error)


@few
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5), st.floats(0.01, 0.05))
def test_read_points_of_the_vanilla_cycle_average_to_its_limit(seconds, lr):
    # I-9: in 4 seconds, a multiple of every time, worker i arrives 4 / s_i times; their steps cancel on the cycle
    n = len(seconds)
    run, models = archive(dd.VanillaASGD(lr), dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds), updates=4000)
    period = int(sum(4 / s for s in seconds))
    b, p = np.array(centers(n, 1))[:, 0], np.array([4 / s for s in seconds]) / period
    assert read_points(run, models)[-period:].mean() == pytest.approx(b @ p, abs=1e-10)


GENERAL = dd.Quadratic(
    [[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]], [[[2.0, 0.5], [0.5, 1.0]], 0.5, [[1.0, -0.25], [-0.25, 1.5]]], start=[1.0, 1.0]
)


def weighted_solution(shares):
    """(sum p_i A_i)^-1 sum p_i A_i b_i, with A_i and b_i read off the gradients."""
    zero, eye = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    at_zero = [GENERAL.gradient(zero, i, 0)[0] for i in range(3)]
    A = [torch.stack([GENERAL.gradient(e, i, 0)[0] - at_zero[i] for e in eye], 1) for i in range(3)]
    sums = [sum(p * part[i] for i, p in enumerate(shares)) for part in (A, at_zero)]
    return torch.linalg.solve(sums[0], -sums[1])


@pytest.mark.parametrize("seconds", [[1.0, 2.0, 4.0], [0.7, 30.0, 1.3]])
def test_dude_solves_the_equal_problem_and_vanilla_one_weighted_by_speed(seconds):
    # I-8, I-10: matrices that differ, and a worker more than forty times slower
    speeds = dd.FixedSpeeds(seconds)
    run = dd.simulate(dd.DuDe(2.0**-7), GENERAL, speeds, updates=8000, evaluate_every=8000)
    solution = weighted_solution([1.0, 1.0, 1.0])
    assert torch.allclose(GENERAL.optimum(), solution, rtol=0, atol=1e-14)
    assert torch.allclose(run.x, solution, rtol=0, atol=1e-9)
    _, models = archive(dd.VanillaASGD(2.0**-8), GENERAL, speeds, updates=4000, evaluate_every=4000)
    biased = weighted_solution([1 / s for s in seconds])
    assert torch.allclose(torch.stack(models[-1400:]).mean(0), biased, rtol=0, atol=0.02)
    assert float((biased - solution).norm()) > 0.2


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_stability_edge_of_round_robin(n):
    # I-11: in turns, the delays in use are n .. 2n-1, so w^t - w^{t-1} + (a/n) sum_{k=n}^{2n-1} w^{t-k} = 0, a = eta lambda
    def radius(a):
        polynomial = np.zeros(2 * n)
        polynomial[:2] = 1.0, -1.0
        polynomial[n:] += a / n
        return np.abs(np.roots(polynomial)).max()

    low, high = 1e-3, 4.0
    assert radius(low) < 1 < radius(high)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    problem = dd.Quadratic([[0.0]] * n, start=[1.0])
    for a, grows in ((0.95 * low, False), (1.05 * low, True)):
        _, models = archive(dd.DuDe(a), problem, dd.FixedSpeeds([1.0] * n), updates=600)
        sizes = [float(torch.stack(models[end - 100 : end]).abs().max()) for end in (400, 600)]
        assert (sizes[1] > sizes[0]) == grows
        assert (sizes[1] / sizes[0]) ** (1 / 200) == pytest.approx(radius(a), abs=2e-3)


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
    run = dd.simulate(ALGORITHMS[row], problem, CASES["q3"][1], updates=2000, evaluate_every=2000)
    assert torch.allclose(run.x, torch.tensor([2.0, -1.0], dtype=torch.float64), rtol=0, atol=1e-6)


def test_gradients_stay_below_the_bound_of_theorem_1():
    # I-22: 32 Delta / (T eta) + 128 L tau eta sigma^2 / n + 128 L^3 tau^2 eta^3 sigma^2 / n for eta <= 1 / (64 L tau)
    n, d, noise, L, tau, T = 4, 3, 0.5, 2.0, 7, 3000
    problem = dd.Quadratic(centers(n, d), [2.0, 1.0, 0.5, 1.5], noise=noise)
    eta, sigma2 = 1 / (64 * L * tau), noise**2 * d
    run, models = archive(dd.DuDe(eta), problem, dd.FixedSpeeds([1.0] * n), updates=T, evaluate_every=T)
    assert run.delays.tau_max == tau
    gap = problem.evaluate(problem.start(0))["objective"] - problem.evaluate(problem.optimum())["objective"]
    bound = 32 * gap / (T * eta) + 128 * L * tau * eta * sigma2 / n + 128 * L**3 * tau**2 * eta**3 * sigma2 / n
    measured = np.mean([problem.evaluate(x)["gradient_norm"] ** 2 for x in models[:-1]])
    assert measured <= bound


def test_noise_of_the_aggregate_is_that_of_a_mean_of_n():
    # lemma 1, with equality for independent noise: E ||g - (1/n) sum_i grad F_i(w_i)||^2 = sigma^2 / n
    n, d, noise = 4, 3, 0.5
    quiet, loud = (dd.Quadratic(centers(n, d), noise=level) for level in (0.0, noise))
    models, latest, squares = [loud.start(0)], {}, []

    def measure(s, a):
        latest[a.worker] = quiet.gradient(models[a.job.version], a.worker, 0)[0]
        if s.version == len(models):
            models.append(s.x)
            squares.append(float(((s.total - sum(latest.values())) / n).square().sum()))

    dd.simulate(dd.DuDe(0.01), loud, dd.FixedSpeeds([1.0, 1.3, 2.1, 0.9]), updates=4000, watch=[measure])
    assert np.mean(squares) == pytest.approx(noise**2 * d / n, rel=0.1)


def test_objective_is_the_unweighted_mean_over_workers():
    # section 1.5: 3 samples of worker 0 and 1 of worker 1 count 1/2 and 1/2 in F, but 3/4 and 1/4 in the pooled loss
    shards = [([[1.0], [2.0], [-1.0]], [1.0, -1.0, 1.0]), ([[3.0]], [-1.0])]
    problem = dd.Logistic(shards=shards, reg=1e-9, batch_size=1)
    x = torch.tensor([0.5], dtype=torch.float64)
    losses = [np.mean([np.log1p(np.exp(-y * a[0] * 0.5)) for a, y in zip(*shard, strict=True)]) for shard in shards]
    numbers = problem.evaluate(x)
    assert numbers["objective"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert numbers["pooled_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1], rel=1e-6)


def test_averages_over_whole_periods_are_over_whole_periods():
    # the periods in the table above: the same workers come in the same order again
    for algorithm, _, period in CIRCLING.values():
        worker = dd.simulate(algorithm, *CASES["q3"], updates=200).trace.worker[-10 * period :].reshape(10, period)
        assert all(np.array_equal(a, b) for a, b in itertools.pairwise(worker))

"""Limits

On quadratics with fixed speeds one knows where each method ends. A method in which every worker counts the same comes to
rest at the solution. One in which workers count by their speeds or delays goes round another point for ever: over a period
its steps c_j a_j (r_j - b_j) cancel, so that the models r_j that were read have a weighted mean that follows from the
weights c_j alone, whatever the step size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import archive, few, heterogeneous, rounding
from tables import ALGORITHMS, CASES, DUDES, LR

pytestmark = pytest.mark.numeric

# seconds, curvatures a_i, centers b_i
THREE = (1.0, 2.0, 4.0), (1.0, 1.0, 1.0), (0.0, 6.0, 12.0)
FOUR = (0.5, 1.0, 2.5, 4.0), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)
STRAGGLER = (0.5, 1.0, 1.0, 8.0), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)
PERIOD = {THREE: 4.0, FOUR: 20.0}  # in seconds
fleets = pytest.mark.parametrize("fleet", [THREE, FOUR], ids=["three", "four"])
LAST = dd.Evaluation(every=10**6)  # the end alone
STEP = 2 * LR


def case(fleet):
    seconds, curvatures, centers = fleet
    return dd.Quadratic([[b] for b in centers], curvatures), dd.FixedSpeeds(seconds)


def solution(shares, fleet):
    """Where sum_i p_i a_i (x - b_i) = 0."""
    _, a, b = fleet
    weights = [p * a_i for p, a_i in zip(shares, a, strict=True)]
    return float(sum(w * b_i for w, b_i in zip(weights, b, strict=True)) / sum(weights))


def ends_at(method, fleet, expected, updates):
    """Whether a run comes to rest at a point."""
    # nearer to a point of size 12 a step is less than half of the last digit
    run = dd.simulate(method, *case(fleet), updates=updates, evaluation=LAST)
    return float(run.x) == pytest.approx(expected, abs=rounding(16) * 12 / method.lr)


# At rest --------------------------------------------------------------------------------------------------------------

RESTING = [  # method, updates: the distance to the solution shrinks by e^-34 or more
    *(
        (replace(ALGORITHMS[row], lr=STEP), 1100)
        for row in (
            *DUDES,
            *("mifa", "mifa active", "siag", "ringleader", "ca2fl", "iag", "sag", "saga", "scaffold"),
        )
    ),
    (dd.DuDe(STEP, wait_for=3), 1100),
    (dd.algorithms.ACED(STEP), 1100),
    (dd.algorithms.ACED(STEP, max_delay=math.inf), 1100),
    (dd.algorithms.CA2FL(1 / 8), 400),
    (dd.SyncSGD(1 / 8), 400),
    (dd.algorithms.MaleniaSGD(1 / 8), 400),
    (dd.algorithms.MaleniaSGD(1 / 8, gradients=9), 400),
    (dd.algorithms.SyncBySpeed(1 / 8), 400),
    (dd.algorithms.SyncBySpeed(1 / 8, least=2), 400),
    (dd.algorithms.AREA(1 / 2), 600),  # a worker's model moves once in as many updates as there are between its reports
    (dd.algorithms.AREA(1 / 2, buffer=3), 200),
    (dd.algorithms.FedFix(1 / 8, period=4.0), 400),  # every worker reports before each tick
]


@fleets
@pytest.mark.parametrize(("method", "updates"), RESTING, ids=lambda part: part if isinstance(part, int) else label(part))
def test_unbiased_methods_rest_at_the_solution(method, updates, fleet):
    """A method in which every worker counts the same comes to rest at the solution of the mean loss, whatever the speeds.

    Catches a worker that counts twice, by its speed, or with a gradient of another worker.
    """
    # sum a_i b_i / sum a_i: 18 / 3, and (0 + 12 + 6 - 6) / 5
    assert ends_at(method, fleet, {THREE: 6.0, FOUR: 2.4}[fleet], updates)


# Rennala counts worker i by its B_i gradients of a round. THREE: two of worker 0 and one of worker 1 by second 2, all seven
# by second 4. FOUR: (5, 2, 1, 0) by second 2.5 and (8, 4, 1, 1) by second 4.
# ACED: on THREE there are seven updates in four seconds, so worker 2 arrives with delay 7 every time, while the gradients
# in use of workers 0 and 1 are six old at most. With the straggler, worker 3 arrives with delay 33, after 4 updates a
# second for 8 seconds; the others take a second and are in use for another, so they stay below 16.
BIASED = [  # method, fleet, how much each worker counts, updates
    (dd.algorithms.RennalaSGD(1 / 8), THREE, (2, 1, 0), 400),
    (dd.algorithms.RennalaSGD(1 / 8, gradients=7), THREE, (4, 2, 1), 400),
    (dd.algorithms.RennalaSGD(1 / 8, gradients=8), FOUR, (5, 2, 1, 0), 400),
    (dd.algorithms.RennalaSGD(1 / 8, gradients=14), FOUR, (8, 4, 1, 1), 400),
    (dd.algorithms.ACED(LR, max_delay=6), THREE, (1, 1, 0), 2200),
    (dd.algorithms.ACED(LR, max_delay=16), STRAGGLER, (1, 1, 1, 0), 2200),
]


@pytest.mark.parametrize(("method", "fleet", "shares", "updates"), BIASED, ids=[label(row[0]) for row in BIASED])
def test_methods_that_leave_gradients_out_rest_where_the_others_cancel(method, fleet, shares, updates):
    """Rennala SGD and ACED come to rest where the gradients that they include cancel: they solve the problem of the workers
    that are in time, weighted by the numbers of their gradients.

    Catches a batch that ends too early or too late, and a limit on delays that is off by one.
    """
    assert ends_at(method, fleet, solution(shares, fleet), updates)


# Around a point -------------------------------------------------------------------------------------------------------


def cycle(fleet, buffer=1):
    """The workers and the delays tau of the arrivals in a period of so many times ``buffer``, if every worker gets a new
    model when it reports and an update is made of so many arrivals.
    """
    period = PERIOD[fleet] * buffer
    # by time, then by the time of sending
    order = sorted((k * s, (k - 1) * s, i) for i, s in enumerate(fleet[0]) for k in range(1, round(period / s) + 1))
    workers = [i for _, _, i in order] * 2
    taus = []
    for j in range(len(order), 2 * len(order)):
        before = max(k for k in range(j) if workers[k] == workers[j])
        taus.append(j // buffer + 1 - (before + 1) // buffer)
    return workers[: len(order)], taus


def test_the_cycle_by_hand():
    """With jobs of 1, 2 and 4 seconds the arrivals of a period are known by hand, and so are the delays of vanilla ASGD.

    Catches a mistake in what the laws below compare with.
    """
    # by second 1 | 2 | 3 | 4: of two at one time, the one that was sent first
    assert cycle(THREE) == ([0, 1, 0, 0, 2, 1, 0], [1, 3, 2, 1, 7, 4, 3])
    # n / max(n, tau): 4 for worker 0, 1 + 3/4 for worker 1, 3/7; with tau - 1 in place of tau 4, 2 and 3/6
    assert shares_of(THREE, lambda tau, n: Fraction(n, max(n, tau))) == [4, Fraction(7, 4), Fraction(3, 7)]
    assert shares_of(THREE, lambda tau, n: Fraction(n, max(n, tau - 1))) == [4, 2, Fraction(1, 2)]


def shares_of(fleet, weight, buffer=1):
    """How much each worker counts in a period with the weights ``weight(tau, n)``."""
    n = len(fleet[0])
    shares = [0] * n
    for worker, tau in zip(*cycle(fleet, buffer), strict=True):
        shares[worker] += weight(tau, n)
    return shares


ringmaster, adaptive, fedfix = dd.algorithms.RingmasterASGD, dd.algorithms.DelayAdaptiveASGD, dd.algorithms.FedFix
# A method; the weight c_j of an arrival by its worker's seconds s, its delay tau and whether it made an update, for n
# workers; and how much each worker counts in a period. With weights by seconds, or by the ticks that a job takes: the same
# for all. Ringmaster on THREE: worker 2 is six updates late, if it is let in. On FOUR between two arrivals of worker 3 the
# others make 13 updates or more, between two of worker 2 they make 9 at most (6 of worker 0 and 3 of worker 1, with both
# ends).
CIRCLING = [
    (dd.VanillaASGD(LR), lambda s, tau, used, n: 1.0, {THREE: (4, 2, 1), FOUR: (40, 20, 8, 5)}),
    (dd.FedBuff(4 * LR, buffer=2), lambda s, tau, used, n: 1.0, {THREE: (4, 2, 1), FOUR: (40, 20, 8, 5)}),
    (dd.FedBuff(4 * LR, buffer=2, wait=True), lambda s, tau, used, n: 1.0, {THREE: (3, 2, 1)}),
    (
        dd.FedBuff(4 * LR, buffer=2, staleness=0.5),
        lambda s, tau, used, n: tau**-0.5,
        {fleet: shares_of(fleet, lambda tau, n: tau**-0.5, buffer=2) for fleet in (THREE, FOUR)},
    ),
    (dd.algorithms.RescaledASGD(LR), lambda s, tau, used, n: s, {THREE: (1,) * 3, FOUR: (1,) * 4}),
    (
        adaptive(LR),
        lambda s, tau, used, n: n / max(n, tau),
        {fleet: shares_of(fleet, lambda tau, n: n / max(n, tau)) for fleet in (THREE, FOUR)},
    ),
    (
        adaptive(LR, delay="staleness"),
        lambda s, tau, used, n: n / max(n, tau - 1),
        {fleet: shares_of(fleet, lambda tau, n: n / max(n, tau - 1)) for fleet in (THREE, FOUR)},
    ),
    (fedfix(4 * LR), lambda s, tau, used, n: math.ceil(s), {THREE: (1,) * 3, FOUR: (1,) * 4}),
    (fedfix(4 * LR, period=0.5), lambda s, tau, used, n: math.ceil(2 * s), {THREE: (1,) * 3, FOUR: (1,) * 4}),
    *((ringmaster(LR, threshold=R), lambda s, tau, used, n: used, {THREE: (4, 2, 0)}) for R in (3, 4, 5, 6)),
    (ringmaster(LR, threshold=7), lambda s, tau, used, n: used, {THREE: (4, 2, 1)}),
    (ringmaster(LR, threshold=10), lambda s, tau, used, n: used, {THREE: (4, 2, 1), FOUR: (40, 20, 8, 0)}),
    (ringmaster(LR, threshold=99), lambda s, tau, used, n: used, {THREE: (4, 2, 1), FOUR: (40, 20, 8, 5)}),
]
CIRCLES = [(method, weight, fleet, shares) for method, weight, by_fleet in CIRCLING for fleet, shares in by_fleet.items()]


@pytest.mark.parametrize(
    ("method", "weight", "fleet", "shares"), CIRCLES, ids=[f"{label(row[0])} of {len(row[2][0])}" for row in CIRCLES]
)
def test_biased_methods_go_round_the_point_that_their_weights_say(method, weight, fleet, shares):
    """A method that takes a step for each arrival goes round the point where the gradients cancel that are weighted as its
    workers count: by their speeds under vanilla ASGD, FedBuff and Ringmaster ASGD, by speeds and delays under
    delay-adaptive ASGD and FedBuff with staleness weights, and all the same under Rescaled ASGD and FedFix.

    Catches a weight, a delay or a threshold that is off by one, and a buffer that lacks an arrival.
    """
    (seconds, a, _), n = fleet, len(fleet[0])
    run, models = archive(method, *case(fleet), time=960.0 if fleet == THREE else 540.0)
    trace, before = run.trace, np.concatenate([[0], run.trace.after[:-1]])
    period = np.flatnonzero(trace.time > run.time - 6 * PERIOD[fleet])  # that of a buffer or of ticks is part of it
    workers, versions = trace.worker[period], trace.version[period]
    c = np.array(
        [
            weight(seconds[i], before[j] + 1 - u, trace.after[j] > before[j], n)
            for j, i, u in zip(period, workers, versions, strict=True)
        ]
    )
    counted = np.bincount(workers, c, minlength=n)
    assert counted / counted.sum() == pytest.approx([float(p / sum(shares)) for p in shares], rel=rounding(len(period)))
    weights, reads = c * np.array(a)[workers], np.array([float(models[version]) for version in versions])
    # the transient has shrunk by e^-26 or more
    assert weights @ reads / weights.sum() == pytest.approx(solution(shares, fleet), abs=12 * math.exp(-23))
    # the mean of the models is O(lr) away
    assert float(torch.stack(models[-len(models) // 2 :]).mean()) == pytest.approx(solution(shares, fleet), abs=0.25)


@few
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5), st.floats(0.02, 0.05))
def test_the_models_that_vanilla_reads_average_to_its_limit(seconds, lr):
    """Under vanilla ASGD the mean of the models read in a period is that of the centers, weighted by the workers' speeds,
    for any speeds and step size.

    Catches a worker that computes at a model that is newer or older than the one it was sent.
    """
    # in 4 seconds, a multiple of every time, worker i arrives 4 / s_i times; 1400 updates shrink the transient by e^-28
    problem, counts = heterogeneous(len(seconds)), np.array([4 / s for s in seconds])
    run, models = archive(dd.VanillaASGD(lr), problem, dd.FixedSpeeds(seconds), updates=1400)
    expected = counts @ np.array(problem.settings["centers"])[:, 0] / counts.sum()
    reads = [float(models[version]) for version in run.trace.version[-int(counts.sum()) :]]
    assert np.mean(reads) == pytest.approx(expected, abs=12 * math.exp(-25))


DRAWING = [  # method, fleet, how far the mean of 5000 models may be from the solution
    (dd.UniformASGD(LR), THREE, 0.15),  # the mean of 5000 draws with standard deviation 4.9 has one of 0.07
    (dd.ShuffledASGD(LR), THREE, 0.03),  # in each three draws every worker has one
    (dd.algorithms.GeneralizedASGD(LR, probabilities=[0.5, 0.3, 0.2]), THREE, 0.15),
    (dd.algorithms.GeneralizedASGD(LR, probabilities=[0.4, 0.3, 0.2, 0.1]), FOUR, 0.15),
]


@pytest.mark.parametrize(("method", "fleet", "error"), DRAWING, ids=[label(row[0]) for row in DRAWING])
def test_drawn_workers_are_unbiased(method, fleet, error):
    """Uniform, shuffled and generalized ASGD go round the solution of the mean loss: drawing the next worker undoes its
    speed, and dividing by its probability undoes the draw.

    Catches draws that favour idle workers, and a step that is not divided by the probability.
    """
    _, models = archive(method, *case(fleet), updates=6000)
    assert float(torch.stack(models[1000:]).mean()) == pytest.approx(solution([1] * len(fleet[0]), fleet), abs=error)


MIXING = {
    "constant": ({}, lambda tau: 0.6),
    "polynomial": ({"mixing": "polynomial"}, lambda tau: 0.6 / math.sqrt(tau + 1)),
    "hinge": ({"mixing": "hinge"}, lambda tau: 0.6 if tau <= 4 else 0.6 / (10 * (tau - 4) + 1)),
}


@fleets
@pytest.mark.parametrize("name", MIXING)
def test_the_circle_of_fedasync(name, fleet):
    """FedAsync goes round a cycle of models that solve the linear equations of its mixing; with constant mixing the models
    that are read average to vanilla ASGD's limit.

    Catches a delay of the mixing that counts from another number, and mixing with another model than the one that was sent.
    """
    # x_t = (1 - c_t) x_{t-1} + c_t ((1 - lr a_i) x_{t-tau} + lr a_i b_i) around the cycle: as many equations as models
    options, mixing = MIXING[name]
    (_, a, b), (workers, taus) = fleet, cycle(fleet)
    P = len(workers)
    left, right = np.eye(P), np.zeros(P)
    for t, (i, tau) in enumerate(zip(workers, taus, strict=True)):
        c = mixing(tau)
        left[t, t - 1] -= 1 - c
        left[t, (t - tau) % P] -= c * (1 - LR * a[i])
        right[t] = c * LR * a[i] * b[i]
    expected, close = np.linalg.solve(left, right), rounding(P) * np.linalg.cond(left) * max(map(abs, b))
    _, models = archive(dd.algorithms.FedAsync(LR, **options), *case(fleet), time={THREE: 4000.0, FOUR: 2000.0}[fleet])
    assert [float(x) for x in models[-P:]] == pytest.approx(expected.tolist(), rel=0, abs=1e-9)
    assert expected.max() - expected.min() > 0.01
    if name == "constant":  # every model is read once, so the mixing cancels around the cycle
        reads = [a[i] * expected[t - tau] for t, (i, tau) in enumerate(zip(workers, taus, strict=True))]
        vanilla = solution([workers.count(i) for i in range(len(a))], fleet)
        assert sum(reads) / sum(a[i] for i in workers) == pytest.approx(vanilla, abs=close)


# Other limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [[1.0, 2.0, 4.0], [0.7, 30.0, 1.3]], ids=["three", "a straggler"])
def test_dude_solves_the_problem_of_equal_workers_and_vanilla_one_weighted_by_speed(seconds):
    """With losses that bend differently in different directions DuDe ends at the minimum of their mean, and vanilla ASGD
    near that of their mean weighted by speed.

    Catches a bias that shows only if the workers' Hessians do not commute, or with a straggler.
    """
    # (sum p_i A_i)^-1 sum p_i A_i b_i with equal shares p, or by speed
    A = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[0.5, 0.0], [0.0, 0.5]], [[1.0, -0.25], [-0.25, 1.5]]]).double()
    b = torch.tensor([[0.0, 1.0], [2.0, -1.0], [4.0, 0.0]]).double()
    equal, biased = (
        torch.linalg.solve(torch.einsum("i,ijk->jk", p, A), torch.einsum("i,ijk,ik->j", p, A, b))
        for p in (torch.ones(3).double(), 1 / torch.tensor(seconds).double())
    )
    problem, speeds = dd.Quadratic(b, A), dd.FixedSpeeds(seconds)
    x = dd.simulate(dd.DuDe(LR), problem, speeds, updates=2000, evaluation=LAST).x
    assert torch.allclose(x, equal, rtol=0, atol=1e-9)
    assert torch.allclose(problem.optimum(), equal, rtol=rounding(64), atol=0)
    _, models = archive(dd.VanillaASGD(LR / 4), problem, speeds, updates=4000)
    assert torch.allclose(torch.stack(models[-1400:]).mean(0), biased, rtol=0, atol=0.02)
    assert float((equal - biased).norm()) > 0.5


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_largest_stable_step_of_equal_speeds(n):
    """With equal speeds DuDe is stable up to the step at which the polynomial of its recursion has a root of modulus one,
    and grows or shrinks by the modulus of its largest root.

    Catches a gradient that is used for an update more or less than it should be.
    """

    # in turns, the delays in use are n .. 2n-1, so w^t - w^{t-1} + (a/n) sum_{k=n}^{2n-1} w^{t-k} = 0, a = eta lambda
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


@pytest.mark.parametrize("k", [1, 5])
def test_local_steps_move_the_limit(k):
    """Local steps lead to another point than the solution, the more the workers' curvatures differ: the one where the
    workers' ways cancel.

    Catches local steps that are too many or too few, or that are not divided by their step size.
    """
    # k steps cover the share a_i = 1 - (1 - 0.1 lambda_i)^k of the way to b_i; at rest sum a_i (b_i - w) = 0
    a = [1 - (1 - 0.1 * curvature) ** k for curvature in (1.0, 3.0)]
    limit = a[1] * 4 / sum(a)
    assert limit == pytest.approx({1: 3.0, 5: 2.680532285088}[k], abs=1e-11)
    problem = dd.LocalSteps(dd.Quadratic([[0.0], [4.0]], [1.0, 3.0]), k, 0.1)
    run = dd.simulate(dd.MIFA(0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=300)
    assert float(run.x) == pytest.approx(limit, abs=rounding(16) * 4 / 0.1)


@pytest.mark.parametrize("row", ALGORITHMS)
def test_workers_that_agree_are_solved_by_every_method(row):
    """If all losses have the same minimum, every method ends there, whatever the speeds and curvatures.

    Catches a step that does not go downhill, and an update that is lost.
    """
    problem = dd.Quadratic([[2.0, -1.0]] * 3, [1.0, 0.75, 1.25])
    method = replace(ALGORITHMS[row], lr=4 * ALGORITHMS[row].lr)
    # AutoDuDe gives a mean of its models: of what they were at update t the share (t / T)^11 is left in it at update T
    updates = 350 * 8 if row == "auto" else 350
    run = dd.simulate(method, problem, CASES["q3"][1], updates=updates, evaluation=LAST)
    # steps of one length cannot come to rest: they go on to and fro, by as many as a gradient is late
    close = 4 * method.lr if getattr(method, "lmo", "") == "sign" else 1e-6
    assert run.x.tolist() == pytest.approx([2.0, -1.0], abs=close)

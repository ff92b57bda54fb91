from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
import rivals
from dualdelay.runs.names import label
from helpers import apart, archive, drift, few, heterogeneous, operations, rounding, same, stepping
from tables import CASES, LR

# seconds, curvatures, centers
Q3 = (1.0, 2.0, 4.0), (1.0, 1.0, 1.0), (0.0, 6.0, 12.0)
FOUR = (0.5, 1.0, 2.5, 4.0), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)  # a period of 20 seconds, with ties
FIVE = (0.83, 1.37, 3.01, 0.59, 2.11), (1.0, 0.5, 2.0, 1.5, 0.75), (3.0, -2.0, 7.0, 0.0, 11.0)  # never two at once
PERIOD = {Q3: 4.0, FOUR: 20.0}
SIZE = 64.0  # no weight and no gradient is larger, here or in the cases of the table
TERMS = 16  # operations in a gradient of a quadratic and in a mean over workers


class Noisy(dd.Quadratic):
    """With the noise of the world that the pseudo-code lives in; exact gradients have none."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return gradient + rivals.noise(worker, draw), loss


def case(instance, kind=dd.Quadratic):
    seconds, curvatures, centers = instance
    return kind([[b] for b in centers], curvatures), dd.FixedSpeeds(seconds)


def follow(algorithm, problem, speeds, updates=None, time=None):
    """A run and its models by version; ``watch`` sees an update that a wake made at the next arrival, or not at all."""
    models = [problem.start(0)]

    def keep(s, a):
        if s.version == len(models):
            models.append(s.x)

    run = dd.simulate(
        algorithm, problem, speeds, updates=updates, time=time, watch=[keep], evaluation=dd.Evaluation(every=10**6)
    )
    if run.version == len(models):
        models.append(run.x)
    assert len(models) == run.version + 1
    return run, models


def at_rest(weights, instance):
    """Where sum_i p_i a_i (x - b_i) = 0."""
    _, a, b = instance
    pa = [p * a_i for p, a_i in zip(weights, a, strict=True)]
    return sum(w * b_i for w, b_i in zip(pa, b, strict=True)) / sum(pa)


# Step by step ---------------------------------------------------------------------------------------------------------

STEPS = {
    "rescaled": (dd.algorithms.RescaledASGD, rivals.rescaled, {}),
    "malenia": (dd.algorithms.MaleniaSGD, rivals.malenia, {}),
    "malenia more": (dd.algorithms.MaleniaSGD, rivals.malenia, {"gradients": 9}),
    "ringleader": (dd.algorithms.RingleaderASGD, rivals.ringleader, {}),
    "ca2fl": (dd.algorithms.CA2FL, rivals.ca2fl, {}),
    "ca2fl three": (dd.algorithms.CA2FL, rivals.ca2fl, {"buffer": 3}),
    "aced": (dd.algorithms.ACED, rivals.aced, {}),
    "aced inf": (dd.algorithms.ACED, rivals.aced, {"max_delay": math.inf}),
    "aced five": (dd.algorithms.ACED, rivals.aced, {"max_delay": 5}),
    "aced one": (
        dd.algorithms.ACED,
        rivals.aced,
        {"max_delay": 1},
    ),  # an arrival that is old finds nobody's fresh: no update
    "sync_by_speed": (dd.algorithms.SyncBySpeed, rivals.sync_by_speed, {}),
    "sync_by_speed three": (dd.algorithms.SyncBySpeed, rivals.sync_by_speed, {"least": 3}),
    "rennala": (dd.algorithms.RennalaSGD, rivals.rennala, {}),
    "rennala seven": (dd.algorithms.RennalaSGD, rivals.rennala, {"gradients": 7}),
    "ringmaster": (dd.algorithms.RingmasterASGD, rivals.ringmaster, {}),
    "ringmaster seven": (dd.algorithms.RingmasterASGD, rivals.ringmaster, {"threshold": 7}),
    "ringmaster stop": (dd.algorithms.RingmasterASGD, rivals.ringmaster, {"stop": True}),
    "ringmaster two stop": (dd.algorithms.RingmasterASGD, rivals.ringmaster, {"threshold": 2, "stop": True}),
    "delay_adaptive": (dd.algorithms.DelayAdaptiveASGD, rivals.delay_adaptive, {}),
    "delay_adaptive staleness": (dd.algorithms.DelayAdaptiveASGD, rivals.delay_adaptive, {"delay": "staleness"}),
    "fedasync": (dd.algorithms.FedAsync, rivals.fedasync, {}),
    "fedasync polynomial": (dd.algorithms.FedAsync, rivals.fedasync, {"mixing": "polynomial"}),
    "fedasync polynomial one": (dd.algorithms.FedAsync, rivals.fedasync, {"alpha": 0.9, "mixing": "polynomial", "a": 1.0}),
    "fedasync hinge": (dd.algorithms.FedAsync, rivals.fedasync, {"mixing": "hinge"}),
    "fedasync hinge two": (dd.algorithms.FedAsync, rivals.fedasync, {"mixing": "hinge", "a": 0.5, "b": 2}),
    "fedfix": (dd.algorithms.FedFix, rivals.fedfix, {}),
    "fedfix three": (dd.algorithms.FedFix, rivals.fedfix, {"period": 0.75}),
    "fedfix idle": (dd.algorithms.FedFix, rivals.fedfix, {"period": 0.25}),  # at some ticks nobody has arrived
    "iag": (dd.algorithms.IAG, rivals.iag, {}),
    "fadas": (dd.algorithms.FADAS, rivals.fadas, {}),
    "fadas three": (dd.algorithms.FADAS, rivals.fadas, {"buffer": 3, "betas": (0.5, 0.75), "eps": 0.125}),
    "fadas late": (dd.algorithms.FADAS, rivals.fadas, {"buffer": 2, "late": 2}),
}
EXACT = {"iag", "sag", "saga"}
DRAWN = {  # the server's draws are taken from the run
    "generalized": (dd.algorithms.GeneralizedASGD, rivals.generalized, {}),
    "sag": (dd.algorithms.SAG, rivals.sag, {}),
    "saga": (dd.algorithms.SAGA, rivals.saga, {}),
}


def compare(world, run, models, lr):
    """Every version to its last digits, every arrival exactly; steps are a thousandth and more."""
    close = drift(len(world.models), lr, TERMS) * SIZE
    assert [float(x) for x in models[: len(world.models)]] == pytest.approx(world.models, rel=0, abs=close)
    arrivals = list(zip(run.trace.time.tolist(), run.trace.worker.tolist(), run.trace.version.tolist(), strict=True))
    assert arrivals[: len(world.arrivals)] == world.arrivals
    assert max(abs(x - y) for x, y in pairwise(world.models)) > 1e-3  # something moved


@pytest.mark.numeric
@pytest.mark.parametrize("instance", [Q3, FOUR, FIVE], ids=["q3", "four", "five"])
@pytest.mark.parametrize("name", STEPS)
def test_every_version_is_that_of_the_pseudo_code(name, instance):
    kind, reference, options = STEPS[name]
    lr = 0.75 if name == "fadas late" else 0.07  # so that one over the delay is the smaller
    world = rivals.World(*instance, exact=name in EXACT)
    reference(world, 60, lr, **options)
    run, models = follow(kind(lr, **options), *case(instance, Noisy), updates=60)
    compare(world, run, models, lr)
    assert len(world.arrivals) == len(run.trace)


@pytest.mark.numeric
@pytest.mark.parametrize("instance", [Q3, FOUR, FIVE], ids=["q3", "four", "five"])
@pytest.mark.parametrize("name", DRAWN)
def test_every_version_is_that_of_the_pseudo_code_with_the_draws_of_the_run(name, instance):
    kind, reference, options = DRAWN[name]
    if name == "generalized":
        weights = range(1, len(instance[0]) + 1)
        options = {"probabilities": [w / sum(weights) for w in weights]}
    run, models = follow(kind(0.07, **options), *case(instance, Noisy), updates=250)
    first = 0 if name == "sag" else 1  # elsewhere the first model went to everybody
    next_for = {u: i for u, i in zip(run.trace.version, run.trace.worker, strict=True) if u >= first}
    assert set(next_for) >= set(range(first, 60))  # jobs that were still queued are not in the trace
    world = rivals.World(*instance, exact=name in EXACT)
    reference(world, 60, 0.07, next_for=next_for, **options)
    compare(world, run, models, 0.07)


@pytest.mark.numeric
def test_rescaled_goes_by_the_mean_times_so_far():
    # with times that change from job to job
    problem, speeds = CASES["noisy"]
    models, sent, taken, scales = [problem.start(0)], [0.0] * 4, {}, []

    def check(s, a):
        taken.setdefault(a.worker, []).append(a.time - sent[a.worker])
        sent[a.worker] = a.time
        t = {i: np.mean(times) for i, times in taken.items()}
        scales.append(np.mean([t[a.worker] / t_j for t_j in t.values()]))
        models.append(models[-1] - 0.05 * scales[-1] * a.value)
        assert float((s.x - models[-1]).abs().max()) <= drift(60, 0.05, TERMS) * SIZE

    dd.simulate(dd.algorithms.RescaledASGD(0.05), problem, speeds, updates=60, watch=[check])
    assert len(set(scales)) > 50


@pytest.mark.numeric
def test_fedfix_weighs_by_the_ticks_a_job_really_took():
    problem, speeds = CASES["noisy"]
    x, total, since, ready, seen, ticks = problem.start(0), 0.0, [0] * 4, set(), set(), 0
    models = [x]
    for loop in stepping(dd.algorithms.FedFix(0.05, period=0.75), problem, speeds, 200):
        trace, wakes = loop.recorder.trace(), len(loop.recorder.events)
        if wakes == ticks:
            worker, draw, version = (int(trace[name][-1]) for name in ("worker", "draw", "version"))
            seen.add(weight := math.ceil(trace.time[-1] / 0.75) - since[worker])
            total = total + weight * problem.gradient(models[version], worker, draw)[0]
            ready.add(worker)
            continue
        ticks = wakes
        if ready:
            x = x - 0.05 / 4 * total
            for worker in ready:
                since[worker] = ticks
            ready, total = set(), 0.0
            models.append(x)
        assert float((loop.state.x - x).abs().max()) <= drift(len(models), 0.05, TERMS) * SIZE
        assert loop.state.version == len(models) - 1
    assert {1, 2, 3} <= seen


@pytest.mark.numeric
@pytest.mark.parametrize("options", [{"buffer": 3}, {"buffer": 2, "late": 2, "betas": (0.5, 0.25)}], ids=str)
def test_fadas_treats_every_number_alone(options):
    centers, speeds = [[0.0, 5.0], [6.0, -1.0], [12.0, 3.0]], dd.FixedSpeeds(Q3[0])
    _, both = follow(dd.algorithms.FADAS(0.4, **options), dd.Quadratic(centers), speeds, updates=40)
    for k in (0, 1):
        _, alone = follow(dd.algorithms.FADAS(0.4, **options), dd.Quadratic([[b[k]] for b in centers]), speeds, updates=40)
        assert apart([x[k : k + 1] for x in both], alone) <= drift(40, 0.4, TERMS) * SIZE


# Limits ---------------------------------------------------------------------------------------------------------------

RESTING = {
    "malenia": (dd.algorithms.MaleniaSGD(1 / 8), 400),
    "malenia more": (dd.algorithms.MaleniaSGD(1 / 8, gradients=9), 400),
    "sync_by_speed": (dd.algorithms.SyncBySpeed(1 / 8), 400),
    "sync_by_speed two": (dd.algorithms.SyncBySpeed(1 / 8, least=2), 400),
    "fedfix in step": (dd.algorithms.FedFix(1 / 8, period=4.0), 400),  # everybody is there at every tick
    "ringleader": (dd.algorithms.RingleaderASGD(2 * LR), 1100),
    "ca2fl": (dd.algorithms.CA2FL(2 * LR), 1100),
    "ca2fl two": (dd.algorithms.CA2FL(2 * LR, buffer=2), 1100),
    "aced": (dd.algorithms.ACED(2 * LR), 1100),
    "aced inf": (dd.algorithms.ACED(2 * LR, max_delay=math.inf), 1100),
    "iag": (dd.algorithms.IAG(2 * LR), 1100),
    "sag": (dd.algorithms.SAG(2 * LR), 1100),
    "saga": (dd.algorithms.SAGA(2 * LR), 1100),
}


@pytest.mark.parametrize("instance", [Q3, FOUR], ids=["q3", "four"])
@pytest.mark.parametrize("name", RESTING)
def test_rivals_that_rest_at_the_solution(name, instance):
    # I-8: w* = sum a_i b_i / sum a_i: 6, and (0 + 12 + 6 - 6) / 5
    algorithm, updates = RESTING[name]
    solution = {Q3: 6.0, FOUR: 2.4}[instance]
    assert at_rest([1] * len(instance[0]), instance) == pytest.approx(solution, rel=rounding(8), abs=0)
    run = dd.simulate(algorithm, *case(instance), updates=updates, evaluation=dd.Evaluation(every=updates))
    assert float(run.x) == pytest.approx(solution, abs=1e-11)


FAR = (0.5, 1.0, 1.0, 8.0), (1.0, 2.0, 0.5, 1.5), (0.0, 6.0, 12.0, -4.0)
# Rennala counts worker i by its B_i gradients of a round. Q3: two of worker 0 and one of worker 1 by second 2, all seven by
# second 4. FOUR: (5, 2, 1, 0) by second 2.5 and (8, 4, 1, 1) by second 4.
# ACED: on Q3 there are seven updates in four seconds, so worker 2 comes with delay 7 every time, while what workers 0 and 1
# have in use is six old at most. In FAR worker 3 comes with delay 33, after 4 updates a second for 8 seconds; the others
# take a second and are in use for another, so they stay below 16.
ELSEWHERE = {
    "rennala": (dd.algorithms.RennalaSGD(1 / 8), Q3, (2, 1, 0), 2.0, 400),
    "rennala seven": (dd.algorithms.RennalaSGD(1 / 8, gradients=7), Q3, (4, 2, 1), 24 / 7, 400),
    "rennala eight": (dd.algorithms.RennalaSGD(1 / 8, gradients=8), FOUR, (5, 2, 1, 0), 30 / 9.5, 400),
    "rennala fourteen": (dd.algorithms.RennalaSGD(1 / 8, gradients=14), FOUR, (8, 4, 1, 1), 48 / 18, 400),
    "aced six": (dd.algorithms.ACED(LR, max_delay=6), Q3, (1, 1, 0), 3.0, 2200),
    "aced sixteen": (dd.algorithms.ACED(LR, max_delay=16), FAR, (1, 1, 1, 0), 18 / 3.5, 2200),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_rivals_that_rest_where_the_included_gradients_cancel(name):
    algorithm, instance, weights, limit, updates = ELSEWHERE[name]
    assert at_rest(weights, instance) == pytest.approx(limit, rel=rounding(8), abs=0)
    run = dd.simulate(algorithm, *case(instance), updates=updates, evaluation=dd.Evaluation(every=updates))
    assert float(run.x) == pytest.approx(limit, abs=1e-11)


def cycle(instance):
    """Who arrives in a period when each arrival is an update and sets off the next job, and with which delay tau.

    By time, then by when the job was sent; tau is the number of updates since the same worker's arrival before.
    """
    seconds, period = instance[0], PERIOD[instance]
    order = sorted((k * s, (k - 1) * s, i) for i, s in enumerate(seconds) for k in range(1, round(period / s) + 1))
    workers = [i for _, _, i in order]
    taus = []
    for place, i in enumerate(workers):
        taus.append(next(tau for tau in range(1, len(workers) + 1) if workers[place - tau] == i))
    return workers, taus


def test_the_cycle_by_hand():
    # Q3 by second 1 | 2 | 3 | 4: of two at once, who was sent first
    assert cycle(Q3) == ([0, 1, 0, 0, 2, 1, 0], [1, 3, 2, 1, 7, 4, 3])


def adapted(instance, less):
    """What each worker counts for in a period with the weights n / max(n, tau - less)."""
    n = len(instance[0])
    weights = [Fraction(0)] * n
    for i, tau in zip(*cycle(instance), strict=True):
        weights[i] += Fraction(n, max(n, tau - less))
    return weights


# Each of these goes around in a period, and its steps c_j a_j (r_j - b_j) at the read points r_j cancel on the way: so the
# c_j a_j-weighted mean of the r_j is that of the b_j, whatever the step size. The plain mean of the models is O(lr) away.
# An arrival's c from its worker's seconds s, its delay tau and whether an update was made of it, for n workers:
CIRCLING = {
    "rescaled": (dd.algorithms.RescaledASGD, {}, lambda s, tau, used, n: s),
    "delay_adaptive": (dd.algorithms.DelayAdaptiveASGD, {}, lambda s, tau, used, n: n / max(n, tau)),
    "delay_adaptive staleness": (
        dd.algorithms.DelayAdaptiveASGD,
        {"delay": "staleness"},
        lambda s, tau, used, n: n / max(n, tau - 1),
    ),
    "fedfix": (dd.algorithms.FedFix, {}, lambda s, tau, used, n: math.ceil(s)),
    "fedfix half": (dd.algorithms.FedFix, {"period": 0.5}, lambda s, tau, used, n: math.ceil(2 * s)),
    **{
        f"ringmaster {R}": (dd.algorithms.RingmasterASGD, {"threshold": R}, lambda s, tau, used, n: used)
        for R in (3, 4, 5, 6, 7, 10)
    },
    "ringmaster 99": (dd.algorithms.RingmasterASGD, {"threshold": 99}, lambda s, tau, used, n: used),
}
# What each worker counts for in a period. With steps by its seconds, or by the ticks it takes: the same for all. Ringmaster
# on Q3: worker 2 is six updates late, if it is let in. On FOUR: between two arrivals of worker 3 the others make 13 updates
# or more, between two of worker 2 they make 9 at most (6 of worker 0 and 3 of worker 1, with both ends).
SHARES = {
    **{("rescaled", q): (1,) * len(q[0]) for q in (Q3, FOUR)},
    **{(f"fedfix{half}", q): (1,) * len(q[0]) for q in (Q3, FOUR) for half in ("", " half")},
    **{("delay_adaptive", q): adapted(q, 0) for q in (Q3, FOUR)},
    **{("delay_adaptive staleness", q): adapted(q, 1) for q in (Q3, FOUR)},
    **{(f"ringmaster {R}", Q3): (4, 2, 0) for R in (3, 4, 5, 6)},
    **{(f"ringmaster {R}", Q3): (4, 2, 1) for R in (7, 10, 99)},
    ("ringmaster 10", FOUR): (40, 20, 8, 0),
    ("ringmaster 99", FOUR): (40, 20, 8, 5),
}


@pytest.mark.parametrize(("name", "instance"), SHARES, ids=lambda part: part if isinstance(part, str) else len(part[0]))
def test_rivals_that_circle(name, instance):
    kind, options, weight = CIRCLING[name]
    (seconds, a, b), n, period = instance, len(instance[0]), 3 * PERIOD[instance]  # of FOUR with ticks it is 12 or 20
    lr = 4 * LR if kind is dd.algorithms.FedFix else LR  # a tick takes one gradient of each worker, or less
    run, models = follow(kind(lr, **options), *case(instance), time=960.0 if instance == Q3 else 540.0)
    trace, before = run.trace, np.concatenate([[0], run.trace.after[:-1]])
    total = counted = target = 0.0
    shares = np.zeros(n)
    for j in np.flatnonzero(trace.time > run.time - period):
        i, u = trace.worker[j], trace.version[j]
        c = weight(seconds[i], before[j] + 1 - u, trace.after[j] > before[j], n)
        shares[i] += c
        counted, total, target = counted + c * a[i], total + c * a[i] * float(models[u]), target + c * a[i] * b[i]
    limit = float(at_rest(SHARES[name, instance], instance))
    assert shares / shares.sum() == pytest.approx([float(p / sum(SHARES[name, instance])) for p in SHARES[name, instance]])
    assert target / counted == pytest.approx(limit, rel=rounding(len(trace)), abs=0)
    assert total / counted == pytest.approx(limit, abs=1e-9)
    assert float(torch.stack(models[-len(models) // 2 :]).mean()) == pytest.approx(limit, abs=0.25)


def test_limits_that_are_known_as_fractions():
    # tau: 4 + (3/4 + 1) + 3/7 for the three workers; staleness: 4 + 2 + 1/2
    assert adapted(Q3, 0) == [4, Fraction(7, 4), Fraction(3, 7)]
    assert adapted(Q3, 1) == [4, 2, Fraction(1, 2)]
    assert at_rest(SHARES["delay_adaptive", Q3], Q3) == pytest.approx(438 / 173, rel=rounding(8), abs=0)
    assert at_rest(SHARES["delay_adaptive staleness", Q3], Q3) == pytest.approx(36 / 13, rel=rounding(8), abs=0)


@pytest.mark.parametrize("instance", [Q3, FOUR], ids=["q3", "four"])
def test_weights_by_chance_undo_the_chances(instance):
    # as for uniform draws: the mean of 5000 draws is within 0.15
    p = [0.5, 0.3, 0.2] if instance == Q3 else [0.4, 0.3, 0.2, 0.1]
    _, models = follow(dd.algorithms.GeneralizedASGD(LR, probabilities=p), *case(instance), updates=6000)
    assert float(torch.stack(models[1000:]).mean()) == pytest.approx(at_rest([1] * len(p), instance), abs=0.15)


MIXING = {
    "constant": ({}, lambda tau: 0.6),
    "polynomial": ({"mixing": "polynomial"}, lambda tau: 0.6 / math.sqrt(tau + 1)),
    "hinge": ({"mixing": "hinge"}, lambda tau: 0.6 if tau <= 4 else 0.6 / (10 * (tau - 4) + 1)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("instance", [Q3, FOUR], ids=["q3", "four"])
@pytest.mark.parametrize("name", MIXING)
def test_the_circle_of_fedasync(name, instance):
    # x_t = (1 - c_t) x_{t-1} + c_t ((1 - lr a_i) x_{t-tau} + lr a_i b_i) around the cycle: as many equations as models
    options, mixing = MIXING[name]
    (_, a, b), (workers, taus) = instance, cycle(instance)
    P = len(workers)
    left, right = np.eye(P), np.zeros(P)
    for t, (i, tau) in enumerate(zip(workers, taus, strict=True)):
        c = mixing(tau)
        left[t, t - 1] -= 1 - c
        left[t, (t - tau) % P] -= c * (1 - LR * a[i])
        right[t] = c * LR * a[i] * b[i]
    expected, close = np.linalg.solve(left, right), rounding(P) * np.linalg.cond(left) * max(map(abs, b))
    _, models = follow(dd.algorithms.FedAsync(LR, **options), *case(instance), time={Q3: 4000.0, FOUR: 2000.0}[instance])
    assert [float(x) for x in models[-P:]] == pytest.approx(expected.tolist(), rel=0, abs=1e-9)
    assert expected.max() - expected.min() > 0.01
    if name == "constant":  # every model is read once, so the mixing cancels around the cycle and vanilla's limit is left
        reads = [a[i] * expected[t - tau] for t, (i, tau) in enumerate(zip(workers, taus, strict=True))]
        vanilla = at_rest([workers.count(i) for i in range(len(a))], instance)
        assert sum(reads) / sum(a[i] for i in workers) == pytest.approx(vanilla, abs=close)
        assert instance != Q3 or expected.mean() == pytest.approx(24 / 7, abs=close)


# Degenerate equalities ------------------------------------------------------------------------------------------------

DYADIC = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]])  # so few bits that ten updates round nothing
EQUAL = dd.FixedSpeeds([2.0] * 4)


@pytest.mark.parametrize("case", CASES)
def test_a_threshold_that_is_never_reached_is_vanilla(case):
    for stop in (False, True):
        algorithms = dd.algorithms.RingmasterASGD(0.01, threshold=10**9, stop=stop), dd.VanillaASGD(0.01)
        assert same(*(archive(algorithm, *CASES[case], updates=50)[1] for algorithm in algorithms))


@pytest.mark.parametrize("case", CASES)
def test_equal_probabilities_are_uniform_draws(case):
    n = CASES[case][0].workers
    kinds = (
        dd.UniformASGD(0.01),
        dd.algorithms.GeneralizedASGD(0.01),
        dd.algorithms.GeneralizedASGD(0.01, probabilities=[1 / n] * n),
    )
    uniform, default, explicit = (archive(algorithm, *CASES[case], updates=50)[1] for algorithm in kinds)
    assert same(uniform, default) and same(uniform, explicit)


@pytest.mark.numeric
def test_equal_probabilities_are_uniform_draws_where_one_over_n_is_rounded():
    # in float64 49 (1/49) is less than 1
    case = heterogeneous(49), dd.FixedSpeeds([1.0 + i / 64 for i in range(49)])
    kinds = (
        dd.UniformASGD(0.01),
        dd.algorithms.GeneralizedASGD(0.01),
        dd.algorithms.GeneralizedASGD(0.01, probabilities=[1 / 49] * 49),
    )
    uniform, default, explicit = (archive(algorithm, *case, updates=100)[1] for algorithm in kinds)
    assert same(uniform, default) and apart(uniform, explicit) <= drift(100, 0.01, TERMS) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
def test_caches_of_any_age_are_dude(case):
    algorithms, n = (dd.algorithms.ACED(0.01, max_delay=math.inf), dd.DuDe(0.01)), CASES[case][0].workers
    aced, dude = (archive(algorithm, *CASES[case], updates=50)[1] for algorithm in algorithms)
    kind, k = dude[0].dtype, n + operations(CASES[case][0])
    assert apart(aced, dude) <= drift(50, 0.01, k, kind) * (1.0 if case == "digits" else SIZE)
    algorithms = dd.algorithms.ACED(1 / 8, max_delay=math.inf), dd.DuDe(1 / 8)
    assert same(*(archive(algorithm, DYADIC, CASES["noisy"][1], updates=10)[1] for algorithm in algorithms))


ALIKE = {  # with equal speeds
    "rescaled": (dd.algorithms.RescaledASGD, {}, dd.VanillaASGD, {}),
    "delay_adaptive": (dd.algorithms.DelayAdaptiveASGD, {}, dd.VanillaASGD, {}),  # in turns tau is n
    "ringmaster": (dd.algorithms.RingmasterASGD, {}, dd.VanillaASGD, {}),  # and the staleness n - 1
    "malenia": (dd.algorithms.MaleniaSGD, {}, dd.SyncSGD, {}),
    "rennala": (dd.algorithms.RennalaSGD, {}, dd.SyncSGD, {}),
    "sync_by_speed": (dd.algorithms.SyncBySpeed, {}, dd.SyncSGD, {}),
    "fedfix": (dd.algorithms.FedFix, {"period": 2.0}, dd.SyncSGD, {}),
    "ca2fl": (
        dd.algorithms.CA2FL,
        {"buffer": 4},
        dd.FedBuff,
        {"buffer": 4},
    ),  # of each worker one in every buffer: caches cancel
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_speeds_leave_nothing_to_mend(name):
    kind, options, other, others = ALIKE[name]
    run, models = follow(kind(1 / 8, **options), DYADIC, EQUAL, updates=10)
    twin, expected = follow(other(1 / 8, **others), DYADIC, EQUAL, updates=10)
    assert same(models, expected) and run.time == twin.time


@few
@given(st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4))
def test_ticks_that_everybody_makes_are_rounds(seconds):
    (run, models), (_, expected) = (
        follow(algorithm, DYADIC, dd.FixedSpeeds(seconds), updates=10)
        for algorithm in (dd.algorithms.FedFix(1 / 8, period=4.0), dd.SyncSGD(1 / 8))
    )
    assert same(models, expected) and run.time == 40.0


@pytest.mark.numeric
@pytest.mark.parametrize(
    "algorithm",
    [dd.algorithms.RingmasterASGD(0.1, threshold=1, stop=True), dd.algorithms.RennalaSGD(0.1, gradients=1)],
    ids=str,
)
def test_no_patience_is_sgd_on_the_fastest_worker(algorithm):
    # I-13: with the clock of worker 1
    problem, x = CASES["noisy"][0], CASES["noisy"][0].start(0)
    run, models = archive(algorithm, problem, dd.FixedSpeeds([1.0, 0.5, 3.0, 1.5]), updates=30)
    expected = [x := x - 0.1 * problem.gradient(x, 1, draw)[0] for draw in range(30)]
    assert apart(models[1:], expected) <= drift(30, 0.1, TERMS) * SIZE
    assert set(run.trace.worker) == {1} and run.trace.time.tolist() == [0.5 * k for k in range(1, 31)]


ALONE = [
    dd.algorithms.RescaledASGD(1 / 8),
    dd.algorithms.MaleniaSGD(1 / 8),
    dd.algorithms.MaleniaSGD(1 / 8, gradients=1),
    dd.algorithms.RingleaderASGD(1 / 8),
    dd.algorithms.CA2FL(1 / 8, buffer=1),
    dd.algorithms.ACED(1 / 8),
    dd.algorithms.ACED(1 / 8, max_delay=1),
    dd.algorithms.SyncBySpeed(1 / 8),
    dd.algorithms.RennalaSGD(1 / 8),
    dd.algorithms.RingmasterASGD(1 / 8),
    dd.algorithms.RingmasterASGD(1 / 8, threshold=1, stop=True),
    dd.algorithms.DelayAdaptiveASGD(1 / 8),
    dd.algorithms.DelayAdaptiveASGD(1 / 8, delay="staleness"),
    dd.algorithms.GeneralizedASGD(1 / 8),
    dd.algorithms.GeneralizedASGD(1 / 8, probabilities=[1.0]),
    dd.algorithms.FedAsync(1 / 8, alpha=1.0),
    dd.algorithms.FedFix(1 / 8, period=0.75),
    dd.algorithms.IAG(1 / 8),
    dd.algorithms.SAG(1 / 8),
    dd.algorithms.SAGA(1 / 8),
]


@pytest.mark.numeric
@pytest.mark.parametrize("algorithm", ALONE, ids=label)
def test_one_worker_is_plain_sgd(algorithm):
    x = 0.0
    expected = [x, *(x := x - (x - 40.0) / 8 for _ in range(10))]
    run, models = follow(algorithm, dd.Quadratic([[40.0]]), dd.FixedSpeeds([0.75]), updates=10)
    assert [float(x) for x in models] == expected and run.time == 7.5
    noisy = heterogeneous(1, 2, noise=1.0)
    exact = (
        heterogeneous(1, 2) if isinstance(algorithm, dd.algorithms.IAG | dd.algorithms.SAG | dd.algorithms.SAGA) else noisy
    )
    x = noisy.start(0)
    expected = [x, *(x := x - exact.gradient(x, 0, draw)[0] / 8 for draw in range(30))]
    _, models = follow(algorithm, noisy, dd.FixedSpeeds([0.75]), updates=30)
    assert apart(models, expected) <= drift(30, 1 / 8, TERMS) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic"])
def test_fadas_with_an_eps_that_drowns_the_rest_is_fedbuff(case):
    # sqrt(v) + 2^80 = 2^80 in float64, and without memory m is the mean of the buffer
    algorithms = dd.algorithms.FADAS(LR * 2.0**80, buffer=3, betas=(0.0, 0.0), eps=2.0**80), dd.FedBuff(LR, buffer=3)
    models = (archive(algorithm, *CASES[case], updates=50)[1] for algorithm in algorithms)
    assert apart(*models) <= drift(50, LR, operations(CASES[case][0])) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("instance", [Q3, FOUR], ids=["q3", "four"])
def test_sag_with_a_full_table_makes_the_updates_of_siag(instance):
    # I-13: the last arrivals of all workers go to a sIAG server, whose first update is made of them
    problem, speeds = case(instance)
    n, table, pairs = problem.workers, {}, []

    def look(s, a):
        table[a.worker] = a
        if len(table) == n:
            server = dd.SIAG(LR).init(before[-1], n, dd.Draws(0, "server"))
            for arrival in table.values():
                dd.SIAG(LR).step(server, arrival)
            assert server.version == 1
            pairs.append((s.x, server.x))
        before.append(s.x)

    before = [problem.start(0)]
    dd.simulate(dd.algorithms.SAG(LR), problem, speeds, updates=60, watch=[look], evaluation=dd.Evaluation(every=60))
    assert len(pairs) > 30 and apart(*zip(*pairs, strict=True)) <= drift(1, LR, TERMS) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("kind", [dd.algorithms.IAG, dd.algorithms.SAG, dd.algorithms.SAGA])
def test_exact_gradients_have_no_noise_and_cost_all_minibatches(kind):
    _, still = follow(kind(LR), heterogeneous(3, 2), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=40)
    run, models = follow(kind(LR), heterogeneous(3, 2, noise=3.0), dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=40)
    assert same(still, models) and set(run.trace.seconds) == {1.0, 2.0, 4.0}
    # 20, 7 and 9 samples in minibatches of 4 are 5, 2 and 3 times the seconds of one
    draws = torch.Generator().manual_seed(0)
    sizes, cost = (20, 7, 9), (5, 2, 3)
    shards = [(torch.randn(m, 3, generator=draws) + m / 10, torch.tensor([1.0, -1.0] * m)[:m]) for m in sizes]
    problem = dd.problems.Logistic(shards=shards, batch_size=4, reg=0.25)
    run, models = follow(kind(LR), problem, dd.FixedSpeeds([1.0, 0.5, 2.0]), updates=20)
    assert all(s == cost[i] * (1.0, 0.5, 2.0)[i] for i, s in zip(run.trace.worker, run.trace.seconds, strict=True))

    def check(s, a):
        features, labels = (part.double() for part in shards[a.worker])
        x = models[a.job.version]
        exact = (features * (-labels / (1 + torch.exp(labels * (features @ x))))[:, None]).mean(0) + 0.25 * x
        assert (a.value - exact).norm() <= rounding(operations(problem, len(labels))) * features.norm(dim=1).mean()

    dd.simulate(kind(LR), problem, dd.FixedSpeeds([1.0, 0.5, 2.0]), updates=20, watch=[check])


# Rounds, counts and jobs ----------------------------------------------------------------------------------------------


@pytest.mark.numeric
@few
@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6))
def test_rounds_of_ringleader(seconds):
    # I-17: in a round of n updates everybody gets one new model, and counts with the mean of what it took at the one before
    n, problem = len(seconds), heterogeneous(len(seconds), 2, noise=1.0)
    models, ends = [problem.start(0)], [0.0]
    taken = {i: [] for i in range(n)}  # since each worker's last new model
    counted = {}  # what those who have their new model count with until the round ends

    def check(s, a):
        taken[a.worker].append((a.job.version, problem.gradient(models[a.job.version], a.worker, a.job.draw)[0]))
        entries = [counted.get(i, taken[i]) for i in range(n)]
        if a.worker in counted or not all(entries):
            assert s.version == len(models) - 1
            return
        versions = [{u for u, _ in entry} for entry in entries]
        assert all(len(of_one) == 1 for of_one in versions) and max(s.version - 1 - u for (u,) in versions) <= 2 * n - 2
        mean = sum(torch.stack([g for _, g in entry]).mean(0) for entry in entries) / n
        assert s.version == len(models)
        assert (
            float((s.x - (models[-1] - 0.01 * mean)).abs().max()) <= drift(1, 0.01, TERMS + sum(map(len, entries))) * SIZE
        )
        models.append(s.x)
        counted[a.worker], taken[a.worker] = taken[a.worker], []
        if len(counted) == n:
            counted.clear()
            ends.append(a.time)

    run = dd.simulate(dd.algorithms.RingleaderASGD(0.01), problem, dd.FixedSpeeds(seconds), updates=8 * n, watch=[check])
    assert run.version == len(models) - 1 and len(ends) == 9
    assert np.diff(ends).max() <= 2 * max(seconds) + rounding(len(run.trace)) * run.time


ROUNDS = {  # I-7, on Q3: how long a round takes and how many gradients each worker gives
    "rennala": (dd.algorithms.RennalaSGD(0.01), 2, (2, 1, 0)),
    "rennala seven": (dd.algorithms.RennalaSGD(0.01, gradients=7), 4, (4, 2, 1)),
    "malenia": (dd.algorithms.MaleniaSGD(0.01), 4, (3, 1, 1)),  # worker 2 was sent first of those who come at second 4
    "malenia six": (dd.algorithms.MaleniaSGD(0.01, gradients=6), 6, (6, 3, 1)),  # 3 / (1/6 + 1/3 + 1) = 2
    "sync_by_speed": (dd.algorithms.SyncBySpeed(0.01), 4, (4, 2, 1)),
    "sync_by_speed two": (dd.algorithms.SyncBySpeed(0.01, least=2), 8, (8, 4, 2)),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_what_is_in_a_round(name):
    algorithm, seconds, counts = ROUNDS[name]
    trace = dd.simulate(algorithm, *CASES["q3"], updates=6).trace
    first = 4 if name.startswith("sync_by_speed") else seconds  # one gradient each
    assert trace.time[np.diff(trace.after, prepend=0) > 0].tolist() == [first + k * seconds for k in range(6)]
    assert (np.diff(trace.version) >= 0).all()  # one model at a time
    for version in range(name.startswith("sync_by_speed"), 6):
        assert np.bincount(trace.worker[trace.version == version], minlength=3).tolist() == list(counts)


def test_shares_follow_the_speeds():
    # at first worker 1 is the slowest by 8 to 1, later worker 0 by 2 to 1; each worker's mean time so far decides
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([1.0, 1.0]), [20.0], [[1.0, 8.0], [16.0, 8.0]])
    trace = dd.simulate(dd.algorithms.SyncBySpeed(0.01), heterogeneous(2), speeds, updates=12).trace
    times = [[], []]
    for version in range(12):
        mine = [trace.seconds[(trace.version == version) & (trace.worker == i)] for i in (0, 1)]
        means = [np.mean(each) if each else 1.0 for each in times]
        assert [len(each) for each in mine] == [max(1, int(max(means) / mean + 1e-9)) for mean in means]
        times = [[*each, *new] for each, new in zip(times, mine, strict=True)]
    assert len(set(trace.seconds)) == 3


BUSY = [  # who reports gets something to do at once
    dd.algorithms.RescaledASGD(0.01),
    dd.algorithms.MaleniaSGD(0.01, gradients=10),
    dd.algorithms.RingleaderASGD(0.01),
    dd.algorithms.CA2FL(0.01, buffer=3),
    dd.algorithms.RennalaSGD(0.01),
    dd.algorithms.RingmasterASGD(0.01),
    dd.algorithms.RingmasterASGD(0.01, threshold=2, stop=True),
    dd.algorithms.DelayAdaptiveASGD(0.01),
    dd.algorithms.FedAsync(0.01),
    dd.algorithms.FADAS(0.01, buffer=3),
]
fives = st.lists(st.floats(0.1, 5.0), min_size=5, max_size=5)


def busy(loop):
    return sorted(job.worker for job in loop.fleet.in_flight)


@pytest.mark.parametrize("algorithm", BUSY, ids=label)
@few
@given(fives)
def test_every_worker_has_one_job_at_all_times(algorithm, seconds):
    assert all(busy(loop) == [0, 1, 2, 3, 4] for loop in stepping(algorithm, heterogeneous(5), dd.FixedSpeeds(seconds), 60))


@few
@given(fives)
def test_a_threshold_with_stops_leaves_nothing_old_in_flight(seconds):
    for loop in stepping(
        dd.algorithms.RingmasterASGD(0.01, threshold=3, stop=True), heterogeneous(5), dd.FixedSpeeds(seconds), 60
    ):
        assert max(loop.state.version - job.version for job in loop.fleet.in_flight) < 3


@few
@given(fives, st.sampled_from([1.0, 7.0, math.inf]))
def test_aced_waits_once_and_then_keeps_everybody_busy(seconds, max_delay):
    for events, loop in enumerate(
        stepping(dd.algorithms.ACED(0.01, max_delay), heterogeneous(5), dd.FixedSpeeds(seconds), 60), 1
    ):
        assert len(set(busy(loop))) == len(busy(loop)) == (5 - events if events < 5 else 5)


@few
@given(fives)
def test_generalized_has_n_jobs_in_all(seconds):
    algorithm = dd.algorithms.GeneralizedASGD(0.01, probabilities=[0.1, 0.15, 0.2, 0.25, 0.3])
    assert all(len(busy(loop)) == 5 for loop in stepping(algorithm, heterogeneous(5), dd.FixedSpeeds(seconds), 60))


@pytest.mark.parametrize(("kind", "together"), [(dd.algorithms.IAG, 5), (dd.algorithms.SAG, 1), (dd.algorithms.SAGA, 5)])
@few
@given(seconds=fives)
def test_one_worker_at_a_time(kind, together, seconds):
    for events, loop in enumerate(stepping(kind(0.01), heterogeneous(5), dd.FixedSpeeds(seconds), 60), 1):
        assert len(busy(loop)) == max(1, together - events)
        assert events < together or [job.version for job in loop.fleet.in_flight] == [loop.state.version]


@few
@given(fives, st.floats(0.2, 3.0))
def test_fedfix_lets_those_wait_who_have_reported_since_the_tick(seconds, period):
    waiting = set()
    for loop in stepping(dd.algorithms.FedFix(0.01, period=period), heterogeneous(5), dd.FixedSpeeds(seconds), 80):
        trace, wakes = loop.recorder.trace(), loop.recorder.events
        if wakes and wakes[-1]["row"] == len(trace):  # the last thing that happened is a tick
            assert wakes[-1]["time"] == len(wakes) * period
            waiting = set()
        else:
            waiting.add(int(trace.worker[-1]))
        assert busy(loop) == sorted(set(range(5)) - waiting)


@few
@given(fives)
def test_rounds_by_speed_keep_those_busy_who_have_to_give_more(seconds):
    given_so_far, shares = [0] * 5, [1] * 5
    for loop in stepping(dd.algorithms.SyncBySpeed(0.01), heterogeneous(5), dd.FixedSpeeds(seconds), 120):
        given_so_far[loop.recorder.trace().worker[-1]] += 1
        if given_so_far == shares:
            given_so_far, shares = [0] * 5, [max(1, math.floor(max(seconds) / s + 1e-9)) for s in seconds]
        assert busy(loop) == [i for i in range(5) if given_so_far[i] < shares[i]]

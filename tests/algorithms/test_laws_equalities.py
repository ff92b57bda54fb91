"""Special cases in which two methods are one

With one worker, equal speeds, or a setting at its limit, a method has nothing left to do differently from a simpler one.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import apart, archive, drift, few, heterogeneous, operations, same
from tables import CASES, LR

DYADIC = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]])  # so few bits that ten updates with step 1/8 round nothing
SIZE = 64.0  # no weight and no gradient is larger, here or in the cases of the table
TERMS = 16  # operations in a gradient of a quadratic and in a mean over workers


def models_of(methods, problem, speeds, updates):
    """The models of each of several methods by version."""
    return [archive(method, problem, speeds, updates=updates)[1] for method in methods]


def sgd(gradient, x, lr, count):
    """Plain SGD: count + 1 models from x on, along ``gradient(x, draw)``."""
    return [x, *(x := x - lr * gradient(x, draw) for draw in range(count))]


# Synchronous SGD ------------------------------------------------------------------------------------------------------

SYNCHRONOUS = {
    "sync": lambda lr, n: dd.SyncSGD(lr),
    "dude": lambda lr, n: dd.DuDe(lr, wait_for=n),
    "dude workers": lambda lr, n: dd.DuDe(lr, wait_for=n, memory="workers"),
    "dude zeros": lambda lr, n: dd.DuDe(lr, wait_for=n, start="zeros"),
    "mifa": lambda lr, n: dd.MIFA(lr),
    "fedbuff": lambda lr, n: dd.FedBuff(lr, buffer=n, wait=True),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
@few
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8))
def test_waiting_for_all_workers_is_synchronous_sgd(name, n, seconds):
    """Waiting for all workers is synchronous SGD at any speeds: DuDe with c = n, MIFA with all workers in each round, and
    FedBuff with a buffer of n for which workers wait.

    Catches an old gradient in the mean, and a wrong divisor.
    """
    centers = [0.0, 8.0, -16.0, 40.0, 24.0, -8.0, 16.0, 32.0][:n]  # so few bits that ten updates round nothing
    problem, speeds = dd.Quadratic([[c] for c in centers]), dd.FixedSpeeds(seconds[:n])
    _, models = archive(SYNCHRONOUS[name](1 / 8, n), problem, speeds, updates=10)
    assert [float(x) for x in models] == sgd(lambda x, draw: x - sum(centers) / n, 0.0, 1 / 8, 10)


@pytest.mark.numeric
@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if name != "sync"])
def test_waiting_for_all_workers_uses_the_minibatches_of_synchronous_sgd(name):
    """A method that waits for all workers makes the updates of synchronous SGD on the same minibatches and at the same
    times.

    Catches a minibatch that is skipped or used twice, and a round that lasts too long.
    """
    methods = SYNCHRONOUS[name](0.1, 4), dd.SyncSGD(0.1)
    (run, models), (sync, expected) = (archive(method, *CASES["noisy"], updates=40) for method in methods)
    assert apart(models, expected) <= drift(40, 0.1, TERMS) * SIZE
    assert run.trace.time.tolist() == sync.trace.time.tolist()


def test_equal_speeds_alone_are_not_synchronous_sgd():
    """DuDe that waits for one worker is not synchronous SGD, even if all workers take the same time.

    Catches arrivals at one time that are taken together.
    """
    # centers 0 and 16: from 0 to 1; then worker 0 arrives alone with 1 - 0, beside worker 1's -16 at 0
    _, models = archive(dd.DuDe(1 / 8), dd.Quadratic([[0.0], [16.0]]), dd.FixedSpeeds([1.0, 1.0]), updates=2)
    assert [float(x) for x in models] == [0.0, 1.0, 1.0 + 15 / 16]
    assert sgd(lambda x, draw: x - 8.0, 0.0, 1 / 8, 2) == [0.0, 1.0, 1.0 + 14 / 16]


EQUAL_SPEEDS = {
    "rescaled": (dd.algorithms.RescaledASGD(1 / 8), dd.VanillaASGD(1 / 8)),
    "delay adaptive": (dd.algorithms.DelayAdaptiveASGD(1 / 8), dd.VanillaASGD(1 / 8)),  # in turns tau is n
    "ringmaster": (dd.algorithms.RingmasterASGD(1 / 8), dd.VanillaASGD(1 / 8)),  # and the staleness n - 1
    "malenia": (dd.algorithms.MaleniaSGD(1 / 8), dd.SyncSGD(1 / 8)),
    "rennala": (dd.algorithms.RennalaSGD(1 / 8), dd.SyncSGD(1 / 8)),
    "sync by speed": (dd.algorithms.SyncBySpeed(1 / 8), dd.SyncSGD(1 / 8)),
    "fedfix": (dd.algorithms.FedFix(1 / 8, period=2.0), dd.SyncSGD(1 / 8)),
    "ca2fl": (dd.algorithms.CA2FL(1 / 8, buffer=4), dd.FedBuff(1 / 8, buffer=4)),  # caches cancel in every buffer
}


@pytest.mark.parametrize("name", EQUAL_SPEEDS)
def test_with_equal_speeds_nothing_is_corrected(name):
    """With equal speeds a method that corrects for speeds or delays is the one it corrects: Rescaled, delay-adaptive and
    Ringmaster ASGD are vanilla ASGD, Malenia, Rennala, FedFix and synchronous SGD by speed are synchronous SGD, and CA2FL
    is FedBuff.

    Catches a correction that is wrong by a constant factor.
    """
    (run, models), (other, expected) = (
        archive(method, DYADIC, dd.FixedSpeeds([2.0] * 4), updates=10) for method in EQUAL_SPEEDS[name]
    )
    assert same(models, expected) and run.time == other.time


@few
@given(st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4))
def test_ticks_that_every_worker_keeps_up_with_are_rounds(seconds):
    """FedFix is synchronous SGD if every worker reports before each tick.

    Catches a weight that counts a tick too many.
    """
    (run, models), (_, expected) = (
        archive(method, DYADIC, dd.FixedSpeeds(seconds), updates=10)
        for method in (dd.algorithms.FedFix(1 / 8, period=4.0), dd.SyncSGD(1 / 8))
    )
    assert same(models, expected) and run.time == 40.0


# Plain SGD ------------------------------------------------------------------------------------------------------------

ALONE = [
    *(make(1 / 8, 1) for make in SYNCHRONOUS.values()),
    *(kind(1 / 8) for kind in (dd.VanillaASGD, dd.UniformASGD, dd.ShuffledASGD, dd.SIAG)),
    dd.FedBuff(1 / 8, buffer=1, staleness=0.5),
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
    dd.algorithms.RennalaSGD(1 / 8, cancel=False),
    dd.algorithms.MaleniaSGD(1 / 8, cancel=False),
    dd.algorithms.FedFix(1 / 8, period=0.75),
    dd.algorithms.IAG(1 / 8),
    dd.algorithms.SAG(1 / 8),
    dd.algorithms.SAGA(1 / 8),
    dd.algorithms.AREA(1 / 8),
    dd.algorithms.DCASGD(1 / 8),  # no gradient is late
    dd.algorithms.DCASGD(1 / 8, adaptive=True),
    dd.algorithms.OrMo(1 / 8, momentum=0.0),
    dd.algorithms.RingmasterLMO(1 / 8, alpha=1.0),  # a vector, which follows its momentum
]


@pytest.mark.numeric
@pytest.mark.parametrize("method", ALONE, ids=label)
def test_one_worker_is_plain_sgd(method):
    """With one worker every method is plain SGD: bit for bit where nothing rounds, and with noise to rounding.

    AutoDuDe and FADAS, which set the length of their steps themselves, are excepted.

    Catches a wrong divisor, sign or delay, and an update that is made at the wrong time.
    """
    problem, noisy, speeds = dd.Quadratic([[40.0]]), heterogeneous(1, 2, noise=1.0), dd.FixedSpeeds([0.75])
    run, models = archive(method, problem, speeds, updates=10)
    expected = sgd(lambda x, draw: x - 40.0, 0.0, 1 / 8, 10)
    assert [float(x) for x in models] == expected and run.time == 7.5
    seen = heterogeneous(1, 2) if method.exact else noisy
    _, models = archive(method, noisy, speeds, updates=30)
    expected = sgd(lambda x, draw: seen.gradient(x, 0, draw)[0], noisy.start(0), 1 / 8, 30)
    assert apart(models, expected) <= drift(30, 1 / 8, TERMS) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize(
    "method",
    [dd.algorithms.RingmasterASGD(0.1, threshold=1, stop=True), dd.algorithms.RennalaSGD(0.1, gradients=1)],
    ids=label,
)
def test_a_threshold_or_batch_of_one_is_sgd_on_the_fastest_worker(method):
    """Ringmaster ASGD that stops every job older than the newest model, and Rennala SGD with one gradient in a round, are
    SGD on the fastest worker's data at its pace.

    Catches a job that is not cancelled, and a threshold that is off by one.
    """
    problem = CASES["noisy"][0]
    run, models = archive(method, problem, dd.FixedSpeeds([1.0, 0.5, 3.0, 1.5]), updates=30)
    expected = sgd(lambda x, draw: problem.gradient(x, 1, draw)[0], problem.start(0), 0.1, 30)
    assert apart(models, expected) <= drift(30, 0.1, TERMS) * SIZE
    assert set(run.trace.worker) == {1} and run.trace.time.tolist() == [0.5 * k for k in range(1, 31)]


# Settings at their limits ---------------------------------------------------------------------------------------------

cases = pytest.mark.parametrize("case", CASES)


@cases
def test_a_buffer_of_one_is_vanilla(case):
    """FedBuff with a buffer of one is vanilla ASGD, bit for bit.

    Catches a buffer that is emptied too late.
    """
    assert same(*models_of((dd.FedBuff(0.01, buffer=1), dd.VanillaASGD(0.01)), *CASES[case], updates=50))


@cases
@pytest.mark.parametrize("stop", [False, True], ids=["ignores", "stops"])
def test_a_threshold_that_is_never_reached_is_vanilla(case, stop):
    """Ringmaster ASGD with a threshold that no delay reaches is vanilla ASGD, bit for bit.

    Catches jobs that are cancelled for another reason than their age.
    """
    methods = dd.algorithms.RingmasterASGD(0.01, threshold=10**9, stop=stop), dd.VanillaASGD(0.01)
    assert same(*models_of(methods, *CASES[case], updates=50))


def uniform_and_generalized(n):
    given = dd.algorithms.GeneralizedASGD(0.01, probabilities=[1 / n] * n)
    return dd.UniformASGD(0.01), dd.algorithms.GeneralizedASGD(0.01), given


@cases
def test_equal_probabilities_are_uniform_draws(case):
    """Generalized ASGD with equal probabilities is Uniform ASGD, bit for bit.

    Catches draws or weights that follow from the probabilities in another way.
    """
    uniform, default, explicit = models_of(uniform_and_generalized(CASES[case][0].workers), *CASES[case], updates=50)
    assert same(uniform, default) and same(uniform, explicit)


@pytest.mark.numeric
def test_equal_probabilities_that_are_rounded_are_uniform_draws():
    """Generalized ASGD with equal probabilities is Uniform ASGD to rounding where these are not exact.

    Catches a draw that fails where the probabilities add up to less than one.
    """
    # in float64 49 (1/49) is less than 1
    speeds = dd.FixedSpeeds([1.0 + i / 64 for i in range(49)])
    uniform, default, explicit = models_of(uniform_and_generalized(49), heterogeneous(49), speeds, updates=100)
    assert same(uniform, default) and apart(uniform, explicit) <= drift(100, 0.01, TERMS) * SIZE


@pytest.mark.numeric
@cases
def test_aced_that_leaves_nothing_out_is_dude(case):
    """ACED without a limit on delays is DuDe.

    Catches a gradient that is left out or put back at the wrong time.
    """
    problem = CASES[case][0]
    methods = dd.algorithms.ACED(0.01, max_delay=math.inf), dd.DuDe(0.01)
    aced, dude = models_of(methods, *CASES[case], updates=50)
    size = 1.0 if case == "digits" else SIZE
    assert apart(aced, dude) <= drift(50, 0.01, problem.workers + operations(problem), dude[0].dtype) * size


def test_aced_that_leaves_nothing_out_has_the_bits_of_dude_where_nothing_rounds():
    """ACED without a limit on delays is DuDe bit for bit where nothing rounds.

    Catches a difference that is hidden below the tolerance for rounding.
    """
    methods = dd.algorithms.ACED(1 / 8, max_delay=math.inf), dd.DuDe(1 / 8)
    assert same(*models_of(methods, DYADIC, dd.FixedSpeeds([0.5, 1.0, 3.0, 2.0]), updates=10))


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic"])
def test_fadas_without_scaling_is_fedbuff(case):
    """FADAS without memory, and with an eps beside which the root of v vanishes, is FedBuff with step lr / eps.

    Catches a momentum or a scale that is applied in the wrong place.
    """
    # sqrt(v) + 2^80 = 2^80 in float64, and without memory m is the mean of the buffer
    methods = dd.algorithms.FADAS(LR * 2.0**80, buffer=3, betas=(0.0, 0.0), eps=2.0**80), dd.FedBuff(LR, buffer=3)
    fadas, fedbuff = models_of(methods, *CASES[case], updates=50)
    assert apart(fadas, fedbuff) <= drift(50, LR, operations(CASES[case][0])) * SIZE


@pytest.mark.numeric
@pytest.mark.parametrize("options", [{"buffer": 3}, {"buffer": 2, "late": 2, "betas": (0.5, 0.25)}], ids=str)
def test_fadas_treats_every_number_alone(options):
    """FADAS on several coordinates that the losses do not couple is FADAS on each of them.

    Catches a maximum or a scale that is taken over the whole vector.
    """
    centers, speeds = [[0.0, 5.0], [6.0, -1.0], [12.0, 3.0]], CASES["q3"][1]
    _, both = archive(dd.algorithms.FADAS(0.4, **options), dd.Quadratic(centers), speeds, updates=40)
    for k in (0, 1):
        _, alone = archive(dd.algorithms.FADAS(0.4, **options), dd.Quadratic([[b[k]] for b in centers]), speeds, updates=40)
        assert apart([x[k : k + 1] for x in both], alone) <= drift(40, 0.4, TERMS) * SIZE


@pytest.mark.numeric
def test_sag_with_a_full_table_makes_the_updates_of_siag():
    """Once every worker has reported, SAG's update is that of sIAG for the same gradients.

    Catches a divisor that counts reports instead of workers.
    """
    # the last arrivals of all workers go to a sIAG server, whose first update is made of them
    (problem, speeds), table, pairs = CASES["q3"], {}, []
    before = problem.start(0)

    def compare(s, a):
        nonlocal before
        table[a.worker] = a
        if len(table) == problem.workers:
            server = dd.SIAG(LR).init(before, problem.workers, dd.Draws(0, "server"))
            for arrival in table.values():
                dd.SIAG(LR).step(server, arrival)
            pairs.append((s.x, server.x))
        before = s.x

    dd.simulate(dd.algorithms.SAG(LR), problem, speeds, updates=60, watch=[compare])
    assert len(pairs) > 30 and apart(*zip(*pairs, strict=True)) <= drift(1, LR, TERMS) * SIZE

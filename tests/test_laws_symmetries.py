from __future__ import annotations

import pytest
import torch
from helpers import apart, archive, centers, few, same
from hypothesis import given
from hypothesis import strategies as st
from tables import ALGORITHMS, CASES

import dualdelay as dd

NAMING = {"uniform", "shuffled", "mifa active", "siag"}  # who computes next depends on the workers' numbers

SYNCHRONOUS = {  # I-2: all of these are synchronous SGD, whatever the speeds
    "dude": lambda lr, n: dd.DuDe(lr, wait_for=n),
    "dude workers": lambda lr, n: dd.DuDe(lr, wait_for=n, memory="workers"),
    "dude zeros": lambda lr, n: dd.DuDe(lr, wait_for=n, start="zeros"),
    "mifa": lambda lr, n: dd.MIFA(lr),
    "fedbuff": lambda lr, n: dd.FedBuff(lr, buffer=n, wait=True),
}
ALONE = [  # I-13: one worker leaves nothing to choose
    *(make(1 / 8, 1) for make in SYNCHRONOUS.values()),
    dd.DuDe(1 / 8),
    dd.VanillaASGD(1 / 8),
    dd.UniformASGD(1 / 8),
    dd.ShuffledASGD(1 / 8),
    dd.FedBuff(1 / 8, buffer=1),
    dd.FedBuff(1 / 8, buffer=1, staleness=0.5),
    dd.SIAG(1 / 8),
]


def exact(n):
    """Integers with few bits, so that ten updates with a dyadic step size round nothing."""
    return dd.Quadratic([[0.0], [8.0], [-16.0], [40.0], [24.0], [-8.0], [16.0], [32.0]][:n])


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_waiting_for_everybody_is_synchronous_sgd_bit_for_bit(name):
    problem, speeds = exact(4), dd.FixedSpeeds([1.0, 2.0, 4.0, 0.5])
    run, models = archive(SYNCHRONOUS[name](1 / 8, 4), problem, speeds, updates=40)
    sync, expected = archive(dd.SyncSGD(1 / 8), problem, speeds, updates=40)
    assert same(models, expected) and run.trace.time.tolist() == sync.trace.time.tolist()


@few
@given(st.sampled_from(sorted(SYNCHRONOUS)), st.sampled_from([1, 2, 4, 8]), st.lists(st.floats(0.1, 9.0), min_size=8))
def test_waiting_for_everybody_is_synchronous_sgd_at_any_speeds(name, n, seconds):
    problem, speeds = exact(n), dd.FixedSpeeds(seconds[:n])
    _, models = archive(SYNCHRONOUS[name](1 / 8, n), problem, speeds, updates=10)
    w = [0.0]
    for _ in range(10):
        w.append(w[-1] - (w[-1] - float(problem.optimum())) / 8)  # the mean of w - b_i is w - mean b
    assert [float(x) for x in models] == w


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_waiting_for_everybody_is_synchronous_sgd_on_the_same_minibatches(name):
    problem, speeds = CASES["noisy"]
    _, models = archive(SYNCHRONOUS[name](0.1, 4), problem, speeds, updates=40)
    _, expected = archive(dd.SyncSGD(0.1), problem, speeds, updates=40)
    assert apart(models, expected) < 1e-12


def test_equal_speeds_alone_are_not_synchronous_sgd():
    speeds = dd.FixedSpeeds([1.0] * 4)
    _, models = archive(dd.DuDe(1 / 8), exact(4), speeds, updates=10)
    _, expected = archive(dd.SyncSGD(1 / 8), exact(4), speeds, updates=10)
    assert same(models[:2], expected[:2]) and apart(models, expected) > 0.1


@pytest.mark.parametrize("algorithm", ALONE, ids=dd.label)
def test_one_worker_is_plain_sgd(algorithm):
    w = [0.0]
    for _ in range(10):
        w.append(w[-1] - (w[-1] - 40.0) / 8)
    _, models = archive(algorithm, dd.Quadratic([[40.0]]), dd.FixedSpeeds([0.3]), updates=10)
    assert [float(x) for x in models] == w
    noisy = dd.Quadratic([[1.0, 2.0]], noise=1.0)
    x, expected = noisy.start(0), []
    for draw in range(31):
        expected.append(x)
        x = x - noisy.gradient(x, 0, draw)[0] / 8
    _, models = archive(algorithm, noisy, dd.FixedSpeeds([0.3]), updates=30)
    assert apart(models, expected) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_a_buffer_of_one_is_vanilla(case):
    _, models = archive(dd.FedBuff(0.01, buffer=1), *CASES[case], updates=50, evaluate_every=50)
    _, expected = archive(dd.VanillaASGD(0.01), *CASES[case], updates=50, evaluate_every=50)
    assert same(models, expected)


@few
@given(st.sampled_from(sorted(ALGORITHMS)), st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4), st.integers(-3, 5))
def test_time_scales(row, seconds, k):
    # I-14: doubling every time is exact in binary, so not one bit of the weights and no order may change
    problem = CASES["noisy"][0]
    for model in (dd.FixedSpeeds, dd.ExponentialSpeeds):
        run, models = archive(ALGORITHMS[row], problem, model(seconds), updates=40)
        scaled, others = archive(ALGORITHMS[row], problem, model([s * 2.0**k for s in seconds]), updates=40)
        assert same(models, others)
        assert (scaled.trace.time == run.trace.time * 2.0**k).all() and (scaled.trace.worker == run.trace.worker).all()


@pytest.mark.parametrize("row", ALGORITHMS)
def test_space_has_no_origin(row):
    shift = torch.tensor([3.0, -5.0], dtype=torch.float64)
    b = torch.tensor(centers(4), dtype=torch.float64)
    runs = (
        archive(
            ALGORITHMS[row], dd.Quadratic(b + c, [1.0, 2.0, 0.5, 1.0], noise=0.5, start=c), CASES["noisy"][1], updates=60
        )
        for c in (torch.zeros(2), shift)
    )
    (_, models), (_, others) = runs
    assert apart([x + shift for x in models], others) < 1e-12


class Relabelled(dd.Quadratic):
    """Worker i is who was worker order[i], with its data and its noise."""

    def __init__(self, order, *args, **options):
        super().__init__(*args, **options)
        self._order = order

    def gradient(self, x, worker, draw):
        return super().gradient(x, self._order[worker], draw)


@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row not in NAMING])
@pytest.mark.parametrize("order", [(1, 2, 3, 0), (3, 2, 1, 0)])
def test_workers_numbers_mean_nothing(row, order):
    seconds = (0.83, 1.37, 2.11, 3.01)  # never two at once
    runs = (
        archive(
            ALGORITHMS[row],
            Relabelled(numbers, centers(4), [1.0, 2.0, 0.5, 1.0], noise=0.5),
            dd.FixedSpeeds([seconds[i] for i in numbers]),
            updates=60,
        )
        for numbers in ((0, 1, 2, 3), order)
    )
    (run, models), (other, others) = runs
    assert apart(models, others) < 1e-12
    assert [order[worker] for worker in other.trace.worker] == run.trace.worker.tolist()


@pytest.mark.parametrize("row", ALGORITHMS)
def test_the_same_inputs_give_the_same_run(row):
    (run, models), (again, others) = (archive(ALGORITHMS[row], *CASES["noisy"], updates=50) for _ in range(2))
    assert same(models, others) and (run.trace.fingerprint == again.trace.fingerprint).all()


@pytest.mark.parametrize(("row", "matters"), [("dude", False), ("vanilla", False), ("uniform", True), ("shuffled", True)])
def test_the_seed_of_a_run_names_the_draws_of_the_server_alone(row, matters):
    (_, models), (_, others) = (archive(ALGORITHMS[row], *CASES["noisy"], updates=50, seed=seed) for seed in (0, 1))
    assert same(models, others) != matters

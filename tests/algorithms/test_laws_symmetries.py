from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import apart, archive, drift, few, heterogeneous, same
from tables import ALGORITHMS, CASES

NAMING = {"uniform", "shuffled", "mifa active", "siag", "generalized", "iag", "sag", "saga"}  # who is next goes by number
UNEQUAL = [1.0, 2.0, 0.5, 1.0]
SIZE = 32.0  # no weight and no gradient here is larger
TERMS = 12  # operations in a gradient and in a mean of four

SYNCHRONOUS = {  # I-2: all of these are synchronous SGD, whatever the speeds
    "dude": lambda lr, n: dd.DuDe(lr, wait_for=n),
    "dude workers": lambda lr, n: dd.DuDe(lr, wait_for=n, memory="workers"),
    "dude zeros": lambda lr, n: dd.DuDe(lr, wait_for=n, start="zeros"),
    "mifa": lambda lr, n: dd.MIFA(lr),
    "fedbuff": lambda lr, n: dd.FedBuff(lr, buffer=n, wait=True),
}
ALONE = [  # I-13: one worker leaves nothing to choose
    *(make(1 / 8, 1) for make in SYNCHRONOUS.values()),
    *(kind(1 / 8) for kind in (dd.SyncSGD, dd.VanillaASGD, dd.UniformASGD, dd.ShuffledASGD, dd.SIAG)),
    dd.FedBuff(1 / 8, buffer=1, staleness=0.5),
]


def sgd(w, b, count):
    """Synchronous SGD by hand with step 1/8: the mean of the gradients w - b_i is w - mean b."""
    models = [w]
    for _ in range(count):
        models.append(models[-1] - (models[-1] - b) / 8)
    return models


@pytest.mark.numeric
@pytest.mark.parametrize("name", SYNCHRONOUS)
@few
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8))
def test_waiting_for_everybody_is_synchronous_sgd_at_any_speeds(name, n, seconds):
    b = [0.0, 8.0, -16.0, 40.0, 24.0, -8.0, 16.0, 32.0][:n]  # so few bits that ten updates round nothing
    problem, speeds = dd.Quadratic([[c] for c in b]), dd.FixedSpeeds(seconds[:n])
    _, models = archive(SYNCHRONOUS[name](1 / 8, n), problem, speeds, updates=10)
    assert [float(x) for x in models] == sgd(0.0, sum(b) / n, 10)


@pytest.mark.numeric
@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize(("lr", "exact"), [(1 / 8, True), (0.1, False)])
def test_waiting_for_everybody_is_synchronous_sgd_on_the_same_minibatches(name, lr, exact):
    dyadic = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]]), dd.FixedSpeeds([1.0, 2.0, 4.0, 0.5])
    case, algorithms = dyadic if exact else CASES["noisy"], (SYNCHRONOUS[name](lr, 4), dd.SyncSGD(lr))
    (run, models), (sync, expected) = (archive(algorithm, *case, updates=40) for algorithm in algorithms)
    assert same(models, expected) if exact else apart(models, expected) <= drift(40, lr, TERMS) * SIZE
    assert run.trace.time.tolist() == sync.trace.time.tolist()


def test_equal_speeds_alone_are_not_synchronous_sgd():
    _, models = archive(dd.DuDe(1 / 8), dd.Quadratic([[0.0], [16.0]]), dd.FixedSpeeds([1.0, 1.0]), updates=10)
    gaps = [abs(float(x) - w) for x, w in zip(models, sgd(0.0, 8.0, 10), strict=True)]
    assert gaps[1] == 0 and max(gaps) > 0.1


@pytest.mark.numeric
@pytest.mark.parametrize("algorithm", ALONE, ids=label)
def test_one_worker_is_plain_sgd(algorithm):
    _, models = archive(algorithm, dd.Quadratic([[40.0]]), dd.FixedSpeeds([0.3]), updates=10)
    assert [float(x) for x in models] == sgd(0.0, 40.0, 10)
    noisy = heterogeneous(1, 2, noise=1.0)
    expected = [noisy.start(0)]
    for draw in range(30):
        expected.append(expected[-1] - noisy.gradient(expected[-1], 0, draw)[0] / 8)
    assert (
        apart(archive(algorithm, noisy, dd.FixedSpeeds([0.3]), updates=30)[1], expected) <= drift(30, 1 / 8, TERMS) * SIZE
    )


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
def test_a_buffer_of_one_is_vanilla(case):
    runs = (archive(a, *CASES[case], updates=50) for a in (dd.FedBuff(0.01, buffer=1), dd.VanillaASGD(0.01)))
    assert same(*(models for _, models in runs))


@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row != "fedfix"])  # whose period is in seconds
@settings(few, max_examples=2)
@given(st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4), st.integers(-3, 5))
def test_time_scales(row, seconds, k):
    # I-14: times a power of two is exact in binary, so not one bit of the weights and no order may change
    for model in (dd.FixedSpeeds, dd.speeds.ExponentialSpeeds):
        runs = (
            archive(ALGORITHMS[row], CASES["noisy"][0], model([s * f for s in seconds]), updates=30) for f in (1, 2.0**k)
        )
        (run, models), (scaled, others) = runs
        assert same(models, others) and (scaled.trace.worker == run.trace.worker).all()
        assert (scaled.trace.time == run.trace.time * 2.0**k).all()


@pytest.mark.numeric
@pytest.mark.parametrize("row", ALGORITHMS)
def test_space_has_no_origin(row):
    # I-14
    b, shift = torch.tensor(heterogeneous(4, 2).settings["centers"]), torch.tensor([3.0, -5.0])
    runs = (
        archive(ALGORITHMS[row], dd.Quadratic(b + c, UNEQUAL, noise=0.5, start=c), CASES["noisy"][1], updates=60)
        for c in (torch.zeros(2), shift)
    )
    (_, models), (_, others) = runs
    assert apart([x + shift for x in models], others) <= drift(60, ALGORITHMS[row].lr, TERMS) * SIZE


class Relabelled(dd.Quadratic):
    """Worker i is who was worker order[i], with its data and its noise."""

    order = (0, 1, 2, 3)

    def gradient(self, x, worker, draw):
        return super().gradient(x, self.order[worker], draw)


@pytest.mark.numeric
@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row not in NAMING])
@pytest.mark.parametrize("order", [(1, 2, 3, 0), (3, 2, 1, 0)])
def test_workers_numbers_mean_nothing(row, order):
    # I-14
    seconds = (0.83, 1.37, 2.11, 3.01)  # never two at once
    problem = Relabelled(heterogeneous(4, 2).settings["centers"], UNEQUAL, noise=0.5)
    run, models = archive(ALGORITHMS[row], problem, dd.FixedSpeeds(seconds), updates=60)
    problem.order = order
    other, others = archive(ALGORITHMS[row], problem, dd.FixedSpeeds([seconds[i] for i in order]), updates=60)
    assert apart(models, others) <= drift(60, ALGORITHMS[row].lr, TERMS) * SIZE
    assert [order[worker] for worker in other.trace.worker] == run.trace.worker.tolist()

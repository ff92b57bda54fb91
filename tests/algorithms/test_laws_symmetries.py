"""Symmetries

What a run must not depend on: the unit of time, the origin of the weights, and the numbers that workers have. And what must
not depend on the method: how long the k-th job of a worker takes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from helpers import NO_TIES, apart, archive, drift, few, heterogeneous, polls, same, stepping
from tables import ALGORITHMS, CASES

CURVATURES = [1.0, 2.0, 0.5, 1.0]
SIZE = 32.0  # no weight and no gradient here is larger
TERMS = 12  # operations in a gradient and in a mean of four
MEASURES_BY_THE_START = {"auto"}  # it has a symmetry of its own: the units of the weights do not matter


@pytest.mark.parametrize("row", ALGORITHMS)
def test_the_times_of_jobs_do_not_depend_on_the_method(row):
    """A comparison of methods is paired: under every method each gradient of a worker's k-th job takes the same time, as it
    has the same minibatch; a job that is polled has as many as there was time for.

    Catches random numbers that depend on the order of requests, as those of a shared generator do.
    """
    method, (problem, speeds) = ALGORITHMS[row], CASES["noisy"]
    trace = dd.simulate(method, problem, speeds, updates=30, evaluation=dd.Evaluation(every=30)).trace
    jobs = zip(trace.worker.tolist(), trace.draw.tolist(), strict=True)
    each = np.array([speeds.seconds(worker, draw) for worker, draw in jobs])
    if polls(method):
        fitting = trace.seconds / each  # a whole number of gradients only if all were taken before the poll
        assert (trace.steps == np.minimum(np.floor(fitting + 1e-9), method.most_steps)).all() and len(set(trace.steps)) > 1
    else:
        assert (trace.seconds == each * trace.steps).all()


def wakes(method):
    return type(method).on_wake is not dd.Algorithm.on_wake


@pytest.mark.parametrize(
    "row", [row for row, method in ALGORITHMS.items() if not wakes(method) or hasattr(method, "period")]
)
@settings(few, max_examples=2)
@given(
    st.sampled_from([dd.speeds.ExponentialSpeeds, dd.FixedSpeeds]),
    st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4),
    st.integers(-3, 5),
)
def test_the_unit_of_time_does_not_matter(row, model, seconds, k):
    """If all jobs, and the period of a method that has one, take 2^k times as long, every time is 2^k times what it was,
    and no order and not one bit of the models changes.

    Catches a constant in seconds within a method or the clock.
    """
    method = ALGORITHMS[row]
    scaled = replace(method, period=method.period * 2.0**k) if wakes(method) else method
    run, models = archive(method, CASES["noisy"][0], model(seconds), updates=30)
    other, others = archive(scaled, CASES["noisy"][0], model([s * 2.0**k for s in seconds]), updates=30)
    assert same(models, others) and (other.trace.worker == run.trace.worker).all()
    assert (other.trace.time == run.trace.time * 2.0**k).all()


@pytest.mark.numeric
@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row not in MEASURES_BY_THE_START])
def test_the_origin_does_not_matter(row):
    """If all minima and the initial model are moved by one vector, so are all models.

    Only a method that measures its steps by the size of the weights at the start, AutoDuDe, is excepted.

    Catches a step that depends on the size of the weights, and a gradient that is missing from a mean.
    """
    centers, shift = torch.tensor(heterogeneous(4, 2).settings["centers"]), torch.tensor([3.0, -5.0])
    models, moved = (
        archive(ALGORITHMS[row], dd.Quadratic(centers + c, CURVATURES, 0.5, start=c), CASES["noisy"][1], updates=60)[1]
        for c in (torch.zeros(2), shift)
    )
    assert apart([x + shift for x in models], moved) <= drift(60, ALGORITHMS[row].lr, TERMS) * SIZE


def chooses(method):
    """Whether a method chooses between workers: it queues a job at a busy one, lets one idle and sends to another, or draws
    them, so that another seed leads to other models.
    """
    before = None
    fleet = heterogeneous(4), dd.FixedSpeeds(NO_TIES)
    one, other = (list(stepping(method, *fleet, 30, seed=seed))[-1] for seed in (0, 1))
    if not torch.equal(one.state.x, other.state.x):
        return True
    for loop in stepping(method, *fleet, 30):
        jobs = set(loop.fleet.in_flight)
        busy, rows = [job.worker for job in jobs], loop.recorder.trace().worker
        sent = {job.worker for job in jobs - (before or jobs)} - set(rows[-1:])  # to others than the last sender
        if len(busy) > len(set(busy)) or (sent and len(busy) < 4):
            return True
        before = jobs
    return False


class Relabelled(dd.Quadratic):
    """Worker i is what was worker order[i], with its data and its noise."""

    order = (0, 1, 2, 3)

    def gradient(self, x, worker, draw):
        return super().gradient(x, self.order[worker], draw)


def test_which_methods_choose_workers():
    """Uniform, shuffled and generalized ASGD, MIFA with some workers a round, sIAG, IAG, SAG, SAGA, QuAFL and FAVANO choose
    whom to send a model; every other method sends it to each worker that is due.

    Catches a method that is left out of the law below by mistake.
    """
    known = {"uniform", "shuffled", "mifa active", "siag", "generalized", "iag", "sag", "saga", "quafl", "favano"}
    assert {row for row in known if chooses(ALGORITHMS[row])} == known
    assert not any(chooses(method) for method in (dd.DuDe(0.1), dd.DuDe(0.1, wait_for=2), dd.MIFA(0.1), dd.SyncSGD(0.1)))


@pytest.mark.numeric
@pytest.mark.parametrize("order", [(1, 2, 3, 0), (3, 2, 1, 0)], ids=["rotated", "reversed"])
@pytest.mark.parametrize("row", [row for row in ALGORITHMS if not chooses(ALGORITHMS[row])])
def test_the_numbers_of_workers_do_not_matter(row, order):
    """If the workers of a method that does not choose between them are numbered in another order, the models are the same
    to rounding, and the arrivals are those of the same workers.

    Catches a worker that is favoured for its number, and an index into the list of workers present that is taken for a
    worker's number.
    """
    problem = Relabelled(heterogeneous(4, 2).settings["centers"], CURVATURES, noise=0.5)
    run, models = archive(ALGORITHMS[row], problem, dd.FixedSpeeds(NO_TIES), updates=60)
    problem.order = order
    other, others = archive(ALGORITHMS[row], problem, dd.FixedSpeeds([NO_TIES[i] for i in order]), updates=60)
    assert apart(models, others) <= drift(60, ALGORITHMS[row].lr, TERMS) * SIZE
    assert [order[worker] for worker in other.trace.worker] == run.trace.worker.tolist()

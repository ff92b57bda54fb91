"""Gradients and their sum

What arrives is the gradient that its job names, and methods that remember a gradient of every worker step along what they
remember: the mean g = (1/n) sum_i G_i, kept as a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core import RunningJob
from dualdelay.engine.half import parts_of
from dualdelay.problems import exact
from helpers import (
    AGGREGATING,
    apart,
    archive,
    audit,
    drift,
    few,
    heterogeneous,
    operations,
    overriding,
    rounding,
    same,
    times,
)
from tables import ALGORITHMS, CASES

pytestmark = pytest.mark.numeric

FOLLOWING = [row for row, method in ALGORITHMS.items() if type(method) in (dd.DuDe, dd.MIFA, dd.SIAG, dd.algorithms.IAG)]
CORRECTED = (
    dd.algorithms.CA2FL,
    dd.algorithms.SAG,
    dd.algorithms.SAGA,
)  # keep the latest, and step along more than their mean
LATEST = [row for row, method in ALGORITHMS.items() if row in FOLLOWING or type(method) in CORRECTED]
DIFFERENCES = [row for row in FOLLOWING if getattr(ALGORITHMS[row], "memory", None) == "workers"]

crossed = pytest.mark.parametrize("case", CASES)


def largest(*tensors):
    return max(float(tensor.abs().max()) for tensor in tensors)


def watched(row, case, watch):
    """A run of a row of the table on a case."""
    options = {"updates": 25, "watch": [watch], "evaluation": dd.Evaluation(every=25)}
    return dd.simulate(ALGORITHMS[row], *CASES[case], **options)


@crossed
@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_job_names_its_gradient(row, case):
    """A job's name determines what it comes to: what arrives is the loss and the message of the worker's half, computed
    anew from what the worker kept, on the minibatches that (worker, draw) names, at what was sent with the job's version,
    bit for bit; for most methods that is one gradient at the weights of that version. The weights of a version never
    change.

    Catches workers that hold a reference to the server's live weights, minibatches that depend on the order of jobs, and
    a worker that goes on with another memory than its last accepted one.
    """
    # were a model shared with the server instead of lent for good, its gradient would be that of a newer version
    method, (problem, speeds) = ALGORITHMS[row], CASES[case]
    sent, kept, lent = {}, {}, {}

    def model(self, s, worker):
        given = type(method).model(self, s, worker)
        copy = {name: part.clone() for name, part in given.items()} if isinstance(given, dict) else given.clone()
        sent[worker, s.version] = copy
        return given

    own = type(method).model is not dd.Algorithm.model
    _, models = archive(overriding(method, model=model) if own else method, problem, speeds, updates=25)
    problem = exact(problem) if method.exact else problem

    def check(s, a):
        def gradient(y, k):
            return problem.gradient(y, a.worker, a.job.draw * method.most_steps + k)

        job = RunningJob(a.job, a.steps, gradient)
        message, kept[a.worker] = method.work(
            kept.get(a.worker), sent[a.worker, a.version] if own else models[a.version], job
        )
        value, parts = parts_of(message)
        assert torch.equal(a.value, value) and a.parts.keys() == parts.keys()
        assert all(torch.equal(a.parts[name], part) for name, part in parts.items())
        assert a.loss == job.loss if a.steps else math.isnan(a.loss)
        lent[s.version] = s.x

    watched(row, case, check)
    assert len(lent) > 1 and all(torch.equal(x, models[version]) for version, x in lent.items())


@pytest.mark.parametrize("row", [row for row, method in ALGORITHMS.items() if method.exact])
def test_exact_gradients_have_no_noise_and_cost_all_minibatches(row):
    """A method with exact local gradients gets the mean gradient of all of a worker's data, for the time of as many
    minibatches as the worker has; noise of minibatches does not reach it.

    Catches an exact gradient that is charged as one minibatch, or that leaves out the last samples.
    """
    method, seconds = ALGORITHMS[row], [1.0, 0.5, 2.0]
    (run, noisy), (_, quiet) = (
        archive(method, heterogeneous(3, 2, noise=noise), dd.FixedSpeeds(seconds), updates=40) for noise in (3.0, 0.0)
    )
    assert same(noisy, quiet) and set(run.trace.seconds) == set(seconds)
    # 20, 7 and 9 samples in minibatches of 4 are 5, 2 and 3 times the seconds of one
    generator, cost = torch.Generator().manual_seed(0), {20: 5, 7: 2, 9: 3}
    shards = [(torch.randn(m, 3, generator=generator) + m / 10, torch.tensor([1.0, -1.0] * m)[:m]) for m in cost]
    problem, models = dd.problems.Logistic(shards=shards, batch_size=4, reg=0.25), {}

    def check(s, a):
        features, labels = (part.double() for part in shards[a.worker])
        x = models[a.version]
        exact = (features * (-labels / (1 + torch.exp(labels * (features @ x))))[:, None]).mean(0) + 0.25 * x
        assert (a.value - exact).norm() <= rounding(operations(problem, len(labels))) * features.norm(dim=1).mean()
        assert a.seconds == cost[len(labels)] * seconds[a.worker]
        models[s.version] = s.x.clone()

    models[0] = problem.start(0)
    dd.simulate(method, problem, dd.FixedSpeeds(seconds), updates=20, watch=[check], evaluation=dd.Evaluation(every=20))
    assert len(models) == 21


@crossed
@pytest.mark.parametrize("row", DIFFERENCES)
def test_differences_add_up_to_the_gradient(row, case):
    """The differences that a worker sends add up to its latest gradient, but for what the last message left out by rounding
    or compression; the next message brings that.

    Catches a worker that keeps what it meant to send, so that errors of compression add up.
    """
    method, problem = ALGORITHMS[row], CASES[case][0]
    _, models = archive(method, *CASES[case], updates=25)
    d, held = len(models[0]), {}
    sent_numbers = max(1, round(0.5 * d))  # by "dude sparse"

    def check(s, a):
        gradient = problem.gradient(models[a.version], a.worker, a.job.draw)[0]
        before = held.get(a.worker, torch.zeros(d, dtype=torch.float64))
        held[a.worker] = before + a.value
        change, left_out = (gradient - before).abs(), (gradient - held[a.worker]).abs()
        rounded = rounding(2, gradient.dtype) * largest(gradient, before)
        if method.compress is None:
            assert largest(left_out) <= rounded
        elif method.compress == "int8":  # half of one of 127 steps
            assert largest(left_out) <= largest(change) / 254 + rounded
        else:  # the smaller numbers, whole
            assert largest(left_out) <= float(change.sort(descending=True).values[sent_numbers - 1]) + rounded
            assert int((left_out > rounded).sum()) <= d - sent_numbers

    watched(row, case, check)
    assert len(held) == problem.workers


@crossed
@pytest.mark.parametrize("row", LATEST)
def test_the_sum_is_that_of_the_latest_gradients(row, case):
    """At every arrival the server's sum is that of the workers' latest gradients, n g = sum_i G_i: exactly for float32
    gradients, which float64 adds up without rounding.

    Catches a gradient that is added and not removed, and a sum that is kept in float32.
    """
    latest, size, arrivals, n = {}, 0.0, 0, CASES[case][0].workers

    def check(s, a):
        nonlocal size, arrivals
        latest[a.worker] = a.value.double() + (latest.get(a.worker, 0.0) if row in DIFFERENCES else 0.0)
        size, arrivals = max(size, largest(latest[a.worker])), arrivals + 1
        gap = largest(s.total - sum(latest.values()))
        # two additions for each arrival
        assert gap == 0.0 if a.value.dtype == torch.float32 else gap <= rounding(2 * arrivals + n) * n * size

    watched(row, case, check)
    assert len(latest) == n


@crossed
@pytest.mark.parametrize("row", FOLLOWING)
def test_steps_follow_the_mean_of_the_latest_gradients(row, case):
    """DuDe, MIFA, sIAG and IAG step along the mean of the workers' latest gradients: after T updates the model is
    w^0 - (eta/n) sum_t sum_i G_i(t).

    Catches a sum in place of the mean, a step along the newest gradient alone, and an update that is made twice.
    """
    method, problem = ALGORITHMS[row], CASES[case][0]
    start, n = problem.start(0), problem.workers
    latest, steps, size, version = {}, torch.zeros(len(start), dtype=torch.float64), 0.0, 0

    def check(s, a):
        nonlocal steps, size, version
        latest[a.worker] = a.value.double() + (latest.get(a.worker, 0.0) if row in DIFFERENCES else 0.0)
        size = max(size, largest(s.x, latest[a.worker]))
        if s.version > version:
            steps, version = steps + sum(latest.values()) * (method.lr / n), s.version
            assert largest(s.x - (start - steps)) <= drift(25, method.lr, 2 * n, start.dtype) * size

    assert watched(row, case, check).version == version == 25


@crossed
@pytest.mark.parametrize("row", AGGREGATING)
def test_the_audit_shows_rounding_alone(row, case):
    """Of every method that keeps a sum of the workers' gradients the audit, which compares it with the gradients
    themselves, shows no more than rounding at the end of a run.

    Catches a sum that no longer is that of the gradients, in any method that keeps one.
    """
    run = dd.simulate(ALGORITHMS[row], *CASES[case], updates=25, evaluation=dd.Evaluation(every=25))
    assert run.audit <= audit(run)


@few
@given(times, st.integers(1, 7), st.sampled_from(["wait", "busy", "zeros"]))
def test_the_place_of_the_memory_does_not_matter(seconds, wait_for, start):
    """DuDe's models are the same to rounding whether the server or the workers keep the last gradients, whatever the
    speeds, the number of workers waited for and the kind of start.

    Catches a worker's half of the method that differs from the server's.
    """
    n, models, jobs = len(seconds), [], []
    for memory in ("server", "workers"):
        method = dd.DuDe(0.01, min(wait_for, n), memory, start)
        run, versions = archive(method, heterogeneous(n, 2, noise=1.0), dd.FixedSpeeds(seconds), updates=30)
        models.append(versions)
        jobs.append(list(zip(run.trace.worker, run.trace.draw, run.trace.version, strict=True)))
        assert run.audit <= audit(run)
    assert jobs[0] == jobs[1]
    assert apart(*models) <= drift(30, 0.01, 2 * n) * 16  # no weight and no gradient is larger


@few
@given(st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4), st.integers(1, 4))
def test_the_place_of_the_memory_changes_no_bit_where_nothing_rounds(seconds, wait_for):
    """On numbers that need no rounding DuDe's models are the same bit for bit, wherever the last gradients are kept.

    Catches a difference that is hidden below the tolerance for rounding.
    """
    # integers and lr / n = 2^-5: ten updates need fewer than 53 bits
    problem, speeds = dd.Quadratic([[0.0], [8.0], [-16.0], [40.0]]), dd.FixedSpeeds(seconds)
    (_, server), (_, workers) = (
        archive(dd.DuDe(1 / 8, wait_for, memory), problem, speeds, updates=10) for memory in ("server", "workers")
    )
    assert same(server, workers)


def test_a_worker_keeps_what_it_sent():
    """A worker that sends differences keeps the sum of what it sent, not the gradient it meant, and writes into neither.

    Catches a rounding error that is never corrected, and a gradient that is overwritten.
    """
    method = dd.DuDe(0.1, memory="workers")
    gradient, held = torch.tensor([0.1, 1e8]), torch.tensor([1 / 3, 1.0], dtype=torch.float64)
    before = gradient.clone(), held.clone()

    def sent(memory):
        job = RunningJob(dd.Job(0, 0, 0), 1, lambda y, k: (gradient, 0.0))
        value, kept = method.work(memory, torch.zeros(2), job)
        return value, kept["gradient"]

    value, kept = sent({"gradient": held})
    # float32 cannot hold the difference; the old plus what was sent is kept, so that the next message mends it
    assert value.dtype == torch.float32 and torch.equal(kept, held + value.double()) and same((gradient, held), before)
    assert same(sent(None), (gradient, gradient.double()))


@dataclass(frozen=True)
class Unreliable(dd.DuDe):
    copies: int = 1  # how often the third report of worker 1 is absorbed

    def step(self, s, a):
        return super().step(s, a._replace(value=a.value * self.copies) if a.job[:2] == (1, 2) else a)


@pytest.mark.parametrize("memory", ["server", "workers"])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_table_mends_a_lost_message_and_a_sum_of_differences_does_not(copies, memory):
    """A gradient that is lost or absorbed twice is mended by the worker's next one if the server has a table; a difference
    that is lost or absorbed twice moves the limit for good, and the audit shows it.

    Catches an audit that does not see a lost or repeated message.
    """
    # without a table the sum is off by (copies - 1) delta: sum_i (w - b_i) = (1 - copies) delta at rest, with b = 0, 6, 12
    values = {}

    def keep(s, a):
        values[a.job[:2]] = float(a.value)

    method = Unreliable(1 / 16, memory=memory, copies=copies)
    run = dd.simulate(method, *CASES["q3"], updates=700, watch=[keep], evaluation=dd.Evaluation(every=700))
    off = (1 - copies) * values[1, 2] if memory == "workers" else 0.0
    assert abs(values[1, 2]) > 0.1
    assert float(run.x) == pytest.approx(6 + off / 3, abs=rounding(16) * 6 * 16)  # a step that rounds to nothing
    assert run.audit > 1e-3 if off else run.audit <= audit(run)


def test_a_method_without_memory_keeps_nothing_for_each_worker():
    """Vanilla ASGD keeps one vector, the model, whatever the number of workers.

    Catches memory that grows with the number of workers.
    """
    n = 1000
    speeds = dd.FixedSpeeds([1.0 + i / n for i in range(n)])
    run = dd.simulate(dd.VanillaASGD(2.0**-20), heterogeneous(n, 3), speeds, updates=1500)
    assert run.trace.worker.tolist() == [*range(1000), *range(500)] and run.state.n == n
    sizes = [part.numel() for f in fields(run.state) if isinstance(part := getattr(run.state, f.name), torch.Tensor)]
    assert sizes == [3]
    lists = [part for f in fields(run.state) if isinstance(part := getattr(run.state, f.name), (list, dict, set))]
    assert all(len(part) == 0 for part in lists)

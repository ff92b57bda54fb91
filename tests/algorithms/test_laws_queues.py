"""Jobs, rounds and rates

Which jobs are in flight, what a round consists of, and how many updates are made by a certain time follow from the methods'
rules and the workers' seconds alone, without a gradient.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import few, heterogeneous, overriding, rounding, stepping, times
from tables import ALGORITHMS, CASES

LAST = dd.Evaluation(every=10**6)  # the end alone
of_five = st.lists(st.floats(0.1, 5.0), min_size=5, max_size=5)


def busy(loop):
    """The workers of the jobs in flight, those in their queues included."""
    return sorted(job.worker for job in loop.fleet.in_flight)


def steps_of_five(method, seconds, events=60):
    return stepping(method, heterogeneous(5), dd.FixedSpeeds(seconds), events)


# Jobs in flight -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_worker_does_its_jobs_in_order(row, case):
    """A worker does its jobs one after the other in the order of sending: each of its draws arrives once unless it was
    cancelled, no version is older than the one before, and no job takes less than its seconds.

    Catches a job that is lost, done twice or overtaken, and jobs of one worker that overlap in time.
    """
    method, cancelled = ALGORITHMS[row], set()

    def step(self, s, a):
        orders = type(method).step(self, s, a)
        cancelled.update(worker for worker in range(s.workers) if dd.cancel(worker) in orders)
        return orders

    trace = dd.simulate(overriding(method, step=step), *CASES[case], updates=30, evaluation=LAST).trace
    for worker in set(trace.worker):
        own = trace.worker == worker
        time, seconds, draw, version = (trace[name][own] for name in ("time", "seconds", "draw", "version"))
        assert (draw[1:] > draw[:-1]).all() and (worker in cancelled or draw.tolist() == list(range(len(draw))))
        assert (version[1:] >= version[:-1]).all() and (time[1:] - time[:-1] >= seconds[1:] - rounding(4) * time[1:]).all()


QUEUING = {
    "uniform": lambda n: dd.UniformASGD(0.01),
    "shuffled": lambda n: dd.ShuffledASGD(0.01),
    "generalized": lambda n: dd.algorithms.GeneralizedASGD(0.01, [2 * (i + 1) / (n * (n + 1)) for i in range(n)]),
}


@pytest.mark.parametrize("name", QUEUING)
@few
@given(times)
def test_as_many_jobs_as_workers_are_in_flight(name, seconds):
    """Under uniform, shuffled and generalized ASGD there are as many jobs as workers at all times, those in queues
    included.

    Catches a job that is given out twice or not at all when its worker's queue is long.
    """
    n = len(seconds)
    steps = stepping(QUEUING[name](n), heterogeneous(n), dd.FixedSpeeds(seconds), 80)
    assert all(len(busy(loop)) == n for loop in steps)


BUSY = [
    dd.VanillaASGD(0.01),
    dd.FedBuff(0.01, buffer=3),
    dd.DuDe(0.01, start="zeros"),
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
    dd.algorithms.AREA(0.01, steps=2, buffer=3),
    dd.algorithms.DCASGD(0.01),
    dd.algorithms.OrMo(0.01),
    dd.algorithms.RingmasterLMO(0.01, threshold=2, stop=True),
]


@pytest.mark.parametrize("method", BUSY, ids=label)
@few
@given(of_five)
def test_every_worker_has_one_job_at_all_times(method, seconds):
    """Under fully asynchronous methods a worker that reports gets its next job at once: each worker has one job at all
    times.

    Catches a worker that is forgotten when an update is made, or is sent a model twice.
    """
    assert all(busy(loop) == [0, 1, 2, 3, 4] for loop in steps_of_five(method, seconds))


@few
@given(of_five)
def test_stopped_jobs_leave_nothing_old_in_flight(seconds):
    """Ringmaster ASGD that stops jobs has none in flight whose model is as old as its threshold.

    Catches a threshold that is off by one, and a job that is not cancelled.
    """
    for loop in steps_of_five(dd.algorithms.RingmasterASGD(0.01, threshold=3, stop=True), seconds):
        assert max(loop.state.version - job.version for job in loop.fleet.in_flight) < 3


@pytest.mark.parametrize(
    "method", [dd.DuDe(0.01), *(dd.algorithms.ACED(0.01, max_delay) for max_delay in (1.0, 7.0, math.inf))], ids=label
)
@few
@given(of_five)
def test_workers_wait_for_the_first_update_and_never_again(method, seconds):
    """Under DuDe and ACED workers wait for the first update, of which all are part; from then on each has one job at all
    times, also if its gradient is left out.

    Catches a worker that gets no new model because its gradient was too old.
    """
    for events, loop in enumerate(steps_of_five(method, seconds), 1):
        assert len(set(busy(loop))) == len(busy(loop)) == (5 - events if events < 5 else 5)


TURNS = [(dd.SIAG(0.01), 5), (dd.algorithms.IAG(0.01), 5), (dd.algorithms.SAG(0.01), 1), (dd.algorithms.SAGA(0.01), 5)]


@pytest.mark.parametrize(("method", "together"), TURNS, ids=[label(row[0]) for row in TURNS])
@few
@given(seconds=of_five)
def test_one_worker_at_a_time_computes_at_the_newest_model(method, together, seconds):
    """Under sIAG, IAG, SAG and SAGA one worker at a time computes, at the newest model, once all have reported a first
    time, which only SAG does without.

    Catches turns that overlap.
    """
    for events, loop in enumerate(steps_of_five(method, seconds), 1):
        assert len(busy(loop)) == max(1, together - events)
        assert events < together or [job.version for job in loop.fleet.in_flight] == [loop.state.version]


@few
@given(of_five, st.floats(0.2, 3.0))
def test_under_fedfix_workers_wait_for_the_next_tick(seconds, period):
    """Under FedFix the workers that have reported since the last tick wait for the next one, and ticks are at the multiples
    of the period.

    Catches ticks that drift, and a worker that is sent a model between two ticks.
    """
    waiting = set()
    for loop in steps_of_five(dd.algorithms.FedFix(0.01, period=period), seconds, 80):
        trace, wakes = loop.recorder.trace(), loop.recorder.events
        if wakes and wakes[-1]["row"] == len(trace):  # the last event is a tick
            assert wakes[-1]["time"] == len(wakes) * period
            waiting = set()
        else:
            waiting.add(int(trace.worker[-1]))
        assert busy(loop) == sorted(set(range(5)) - waiting)


def assigned(method, count):
    """The worker that got the job which each arrival led to, and how many jobs it then had."""
    before = {(worker, 0) for worker in range(4)}
    for loop in stepping(method, *CASES["noisy"], count):
        now = {(job.worker, job.draw) for job in loop.fleet.in_flight}
        ((worker, _),) = now - before
        before = now
        yield worker, busy(loop).count(worker)


def test_shuffled_gives_every_worker_one_job_in_each_block():
    """Shuffled ASGD gives every worker one of n successive jobs, in an order that is drawn anew for each block.

    Catches draws with replacement, and one order for the whole run.
    """
    jobs = [worker for worker, _ in assigned(dd.ShuffledASGD(0.01), 400)]
    blocks = [tuple(jobs[k : k + 4]) for k in range(0, 400, 4)]
    assert all(sorted(block) == [0, 1, 2, 3] for block in blocks)
    assert len(set(blocks)) > 20  # of 24 orders


def test_uniform_draws_busy_workers_as_often_as_idle_ones():
    """Uniform ASGD gives all workers the same share of the jobs, also a worker whose queue is long.

    Catches draws among idle workers alone.
    """
    jobs, queues = zip(*assigned(dd.UniformASGD(0.001), 1600), strict=True)
    # a count of 1600 draws with probability 1/4 has standard deviation 17
    assert all(abs(jobs.count(worker) - 400) < 4 * 17 for worker in range(4)) and max(queues) > 2


# Rounds ---------------------------------------------------------------------------------------------------------------

# jobs of 1, 2 and 4 seconds: the seconds of the first round and of each later one, and each worker's gradients in the later
ROUNDS = [
    (dd.SyncSGD(0.01), 4, 4, (1, 1, 1)),
    (dd.algorithms.RennalaSGD(0.01), 2, 2, (2, 1, 0)),
    (dd.algorithms.RennalaSGD(0.01, gradients=7), 4, 4, (4, 2, 1)),
    (dd.algorithms.MaleniaSGD(0.01), 4, 4, (3, 1, 1)),  # of the jobs that end at second 4, worker 2's was sent first
    (dd.algorithms.MaleniaSGD(0.01, gradients=6), 6, 6, (6, 3, 1)),  # 3 / (1/6 + 1/3 + 1) = 2
    (dd.algorithms.SyncBySpeed(0.01), 4, 4, (4, 2, 1)),  # after a first round of one gradient each
    (dd.algorithms.SyncBySpeed(0.01, least=2), 4, 8, (8, 4, 2)),
]


@pytest.mark.parametrize(("method", "first", "later", "counts"), ROUNDS, ids=[label(row[0]) for row in ROUNDS])
def test_what_a_round_consists_of(method, first, later, counts):
    """A round of synchronous SGD, Rennala, Malenia, or synchronous SGD by speed ends when its rule says, with known numbers
    of gradients of each worker, all taken at one model.

    Catches a round that ends an arrival too early or too late, and gradients that are left over from the round before.
    """
    trace = dd.simulate(method, *CASES["q3"], updates=6).trace
    assert trace.time[np.diff(trace.after, prepend=0) > 0].tolist() == [first + k * later for k in range(6)]
    assert (np.diff(trace.version) >= 0).all()  # one model at a time
    for version in range(1, 6):
        assert np.bincount(trace.worker[trace.version == version], minlength=3).tolist() == list(counts)


@few
@given(of_five)
def test_rounds_by_speed_keep_the_workers_busy_that_owe_gradients(seconds):
    """In a round of synchronous SGD by speed a worker gives as many gradients as fit into the slowest's time; it is busy
    until then and idle afterwards.

    Catches shares that follow from the wrong worker's time.
    """
    reported, shares = [0] * 5, [1] * 5
    for loop in steps_of_five(dd.algorithms.SyncBySpeed(0.01), seconds, 120):
        reported[loop.recorder.trace().worker[-1]] += 1
        if reported == shares:
            reported, shares = [0] * 5, [max(1, math.floor(max(seconds) / s + 1e-9)) for s in seconds]
        assert busy(loop) == [i for i in range(5) if reported[i] < shares[i]]


@few
@given(times)
def test_rounds_of_ringleader(seconds):
    """A round of Ringleader ASGD is n updates, one by each worker, which is then sent a new model; what was taken at one
    model is used in one round, so no gradient in use is older than 2n - 2 updates, and a round lasts twice the slowest's
    time at most.

    Catches a worker that is sent two models in a round, and gradients that are used a round too late.
    """
    n = len(seconds)
    run = dd.simulate(
        dd.algorithms.RingleaderASGD(0.01), heterogeneous(n), dd.FixedSpeeds(seconds), updates=8 * n, evaluation=LAST
    )
    trace = run.trace
    updates = np.flatnonzero(np.diff(trace.after, prepend=0))
    assert all(sorted(block) == list(range(n)) for block in trace.worker[updates].reshape(8, n).tolist())
    ends = trace.time[updates][n - 1 :: n]
    assert np.diff(ends, prepend=0.0).max() <= 2 * max(seconds) + rounding(len(trace)) * run.time
    before = np.concatenate([[0], trace.after[:-1]])
    for worker in range(n):
        own = trace.worker == worker
        # a model is read until the worker's update in the round after, and used until that round ends
        versions = trace.version[own]
        assert (before[own] - versions).max() <= 2 * n - 2
        assert set(versions) <= {0, *(trace.after[updates][trace.worker[updates] == worker])}


# Times ----------------------------------------------------------------------------------------------------------------

COUNTS = {  # updates by time t with fixed seconds s
    "vanilla": (dd.VanillaASGD(0.01), lambda t, s: sum(t // q for q in s)),
    "sync": (dd.SyncSGD(0.01), lambda t, s: t // max(s)),
    "mifa": (dd.MIFA(0.01), lambda t, s: t // max(s)),
    "dude": (dd.DuDe(0.01), lambda t, s: 1 + sum((t - max(s)) // q for q in s) if t >= max(s) else 0),
    "dude zeros": (dd.DuDe(0.01, start="zeros"), lambda t, s: sum(t // q for q in s)),
    "fedbuff": (dd.FedBuff(0.01, buffer=3), lambda t, s: sum(t // q for q in s) // 3),
}


@pytest.mark.parametrize("name", COUNTS)
@few
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=6), st.integers(0, 48))
def test_updates_by_a_given_time(name, seconds, quarters):
    """With fixed seconds the updates made by a time are known: one for each arrival under vanilla ASGD, one for each round
    under synchronous SGD and MIFA, one for all first arrivals and then one for each under DuDe; two local steps take twice
    the seconds.

    Catches an arrival at the very end that is left out or counted twice, and local steps that are not charged to the clock.
    """
    method, count = COUNTS[name]
    problem = dd.LocalSteps(heterogeneous(len(seconds)), 2, 0.01)
    run = dd.simulate(method, problem, dd.FixedSpeeds(seconds), time=quarters / 4, evaluation=LAST)
    assert run.version == count(quarters / 4, [2 * s for s in seconds])


FIRST = {  # jobs of 1, 2 and 4 seconds: the times of the first updates, and the workers that arrive
    "vanilla": (dd.VanillaASGD(0.01), [1, 2, 2, 3, 4, 4, 4], [0, 1, 0, 0, 2, 1, 0]),
    "dude": (dd.DuDe(0.01), [4, 5, 6, 6, 7, 8, 8, 8], [0, 1, 2, 0, 1, 0, 0, 2, 1, 0]),
    "dude busy": (dd.DuDe(0.01, start="busy"), [4, 4, 5], [0, 1, 0, 0, 2, 1, 0, 0]),  # worker 2 completes the table
    "sync": (dd.SyncSGD(0.01), [4, 8], [0, 1, 2] * 2),
    "siag": (dd.SIAG(0.01), [4, 5, 7, 11, 12], [0, 1, 2, 0, 1, 2, 0]),  # all of them, then each alone
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_updates(name):
    """The first updates of vanilla ASGD, DuDe, synchronous SGD and sIAG come at times known by hand; of two arrivals at one
    time, the one that was sent first comes first.

    Catches another order of arrivals at one time, and a first update that is too early.
    """
    method, moments, workers = FIRST[name]
    trace = dd.simulate(method, *CASES["q3"], updates=len(moments)).trace
    assert trace.time[np.diff(trace.after, prepend=0) > 0].tolist() == moments and trace.worker.tolist() == workers


def test_arrivals_at_one_time_are_absorbed_one_after_the_other():
    """Of two arrivals at one time the first is answered before the second is absorbed, and a run until a time includes the
    arrivals at that time.

    Catches a model that is sent after all arrivals of a moment instead of after its own.
    """
    run = dd.simulate(dd.VanillaASGD(0.01), *CASES["q3"], time=4.0)
    # at time 2 worker 1 gets version 2, which lacks worker 0's arrival at the same time
    assert run.trace.version.tolist() == [0, 0, 1, 3, 0, 2, 4]
    assert dd.simulate(dd.VanillaASGD(0.01), *CASES["q3"], time=math.nextafter(4.0, 0.0)).version == 4


RATES = [  # jobs of 1, 2 and 4 seconds: updates in a second, and how far the rate of 4000 seconds may be from it
    (dd.ShuffledASGD(0.001), 0.75, 0.005),  # n / s_max: the slowest gets as many jobs as the others
    (dd.UniformASGD(0.001), 0.725, 0.02),  # and sometimes even the slowest has no job
]


@pytest.mark.parametrize(("method", "rate", "error"), RATES, ids=[label(row[0]) for row in RATES])
def test_equal_shares_of_the_jobs_make_the_slowest_worker_the_bottleneck(method, rate, error):
    """If every worker gets the same share of the jobs, as under shuffled and uniform ASGD, n workers make n updates in the
    slowest's time at most.

    Catches jobs that are taken from a long queue and given to another worker.
    """
    run = dd.simulate(method, *CASES["q3"], time=4000.0, evaluation=LAST)
    assert run.version / run.time == pytest.approx(rate, abs=error) and run.version <= 0.75 * run.time + 3


def test_a_change_of_pace_reaches_a_job_under_way():
    """If a worker's pace changes during a job, the rest of the job is done at the new pace.

    Catches a job whose time is decided by its pace at the start alone.
    """
    # 4 seconds of work: 1 done by time 1, then half pace until 3 makes 1 more, the last 2 at double pace take 1
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([4.0]), [1.0, 3.0], [[1.0], [2.0], [0.5]])
    assert dd.simulate(dd.VanillaASGD(0.1), heterogeneous(1), speeds, updates=2).trace.time.tolist() == [4.0, 6.0]

from __future__ import annotations

import pytest
from helpers import centers, few, stepping, times
from hypothesis import given
from hypothesis import strategies as st
from tables import ALGORITHMS, CASES

import dualdelay as dd

NEVER_IDLE = {"vanilla": dd.VanillaASGD, "uniform": dd.UniformASGD, "shuffled": dd.ShuffledASGD}


def assignments(algorithm, problem, speeds, count):
    """Who got the job that each arrival set off."""
    before = {(i, 0) for i in range(problem.workers)}
    for loop in stepping(algorithm, problem, speeds, count):
        now = {(job.worker, job.draw) for job in loop.fleet.in_flight}
        (new,) = now - before
        before = now
        yield new[0]


@few
@given(times, st.sampled_from(sorted(NEVER_IDLE)))
def test_n_jobs_are_in_flight_at_all_times(seconds, name):
    # I-15: queued ones included
    n = len(seconds)
    for loop in stepping(NEVER_IDLE[name](0.01), dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds), 80):
        assert len(loop.fleet.in_flight) == n


@few
@given(times, st.integers(1, 7))
def test_who_is_not_computing_for_dude_waits(seconds, wait_for):
    n = len(seconds)
    algorithm = dd.DuDe(0.01, min(wait_for, n))
    for loop in stepping(algorithm, dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds), 60):
        busy = [job.worker for job in loop.fleet.in_flight]
        assert sorted(busy + loop.state.waiting) == list(range(n))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_worker_does_its_jobs_in_order(row, case):
    # I-15: first in, first out; every draw is used once; no version is older than the one before
    trace = dd.simulate(ALGORITHMS[row], *CASES[case], updates=60, evaluate_every=60).trace
    for worker in set(trace.worker):
        mine = trace.worker == worker
        assert trace.draw[mine].tolist() == list(range(mine.sum()))
        assert (trace.version[mine][1:] >= trace.version[mine][:-1]).all()
        assert (trace.time[mine][1:] - trace.time[mine][:-1] >= trace.seconds[mine][1:] - 1e-9).all()
    assert (trace.time[1:] >= trace.time[:-1]).all()


def test_shuffled_gives_everybody_one_job_in_each_block_of_n():
    problem, speeds = CASES["noisy"]
    jobs = list(assignments(dd.ShuffledASGD(0.01), problem, speeds, 400))
    blocks = [tuple(jobs[k : k + 4]) for k in range(0, 400, 4)]
    assert all(sorted(block) == [0, 1, 2, 3] for block in blocks)
    assert len(set(blocks)) > 20  # of 24 orders: it is shuffled anew


def test_uniform_asks_nobody_whether_they_are_busy():
    jobs = list(assignments(dd.UniformASGD(0.001), *CASES["noisy"], 4000))
    # a count of 4000 draws with chance 1/4 has standard deviation 27
    assert all(abs(jobs.count(worker) - 1000) < 110 for worker in range(4))
    longest = max(
        sum(job.worker == 2 for job in loop.fleet.in_flight)
        for loop in stepping(dd.UniformASGD(0.001), *CASES["noisy"], 200)
    )
    assert longest > 1


RATES = [  # I-16, seconds 1, 2, 4
    (dd.VanillaASGD(0.001), 1.75, 0.001),  # 1 + 1/2 + 1/4
    (dd.DuDe(0.001), 1.75, 0.003),
    (dd.SyncSGD(0.001), 0.25, 0.001),
    (dd.ShuffledASGD(0.001), 0.75, 0.005),  # n / s_max: the slowest gets as many jobs as the others
    (dd.UniformASGD(0.001), 0.725, 0.02),  # a little less, since sometimes even the slowest has nothing to do
]


@pytest.mark.parametrize(("algorithm", "rate", "error"), RATES, ids=[dd.label(row[0]) for row in RATES])
def test_updates_per_second(algorithm, rate, error):
    run = dd.simulate(algorithm, *CASES["q3"], time=4000.0, evaluate_every=10_000)
    assert run.version / run.time == pytest.approx(rate, abs=error)
    if "uniform" in dd.label(algorithm):
        assert run.version <= 0.75 * run.time


def test_local_steps_take_their_time():
    problem = dd.LocalSteps(dd.Quadratic([[1.0], [2.0]]), 3, 0.1)
    trace = dd.simulate(dd.VanillaASGD(0.1), problem, dd.FixedSpeeds([1.0, 2.0]), time=6.0).trace
    assert trace.time.tolist() == [3.0, 6.0, 6.0] and trace.seconds.tolist() == [3.0, 6.0, 3.0]


def test_messages_take_latency_and_size_over_bandwidth():
    # 8 bytes each way: 1/4 + 8/32 = 1/2 second; a round trip with 1 second of work takes 2
    link = dd.Link(latency=0.25, bandwidth=32.0)
    run = dd.simulate(dd.VanillaASGD(0.1), dd.Quadratic([[1.0]]), dd.FixedSpeeds([1.0]), updates=3, link=link)
    assert run.trace.time.tolist() == [2.0, 4.0, 6.0] and run.trace.seconds.tolist() == [1.0, 1.0, 1.0]
    free = dd.simulate(dd.VanillaASGD(0.1), dd.Quadratic([[1.0]]), dd.FixedSpeeds([1.0]), updates=3, link=dd.Link())
    assert free.trace.time.tolist() == [1.0, 2.0, 3.0]


def test_a_change_of_pace_reaches_a_job_under_way():
    # 4 seconds of work: 1 done by time 1, then half pace until 3 makes 1 more, the last 2 at double pace take 1
    speeds = dd.ChangingSpeeds(dd.FixedSpeeds([4.0]), [1.0, 3.0], [[1.0], [2.0], [0.5]])
    run = dd.simulate(dd.VanillaASGD(0.1), dd.Quadratic([[1.0]]), speeds, updates=2)
    assert run.trace.time.tolist() == [4.0, 6.0]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.runs.names import label
from helpers import few, heterogeneous, rounding, stepping, times
from tables import ALGORITHMS, CASES


@few
@given(times, st.sampled_from([dd.VanillaASGD(0.01), dd.UniformASGD(0.01), dd.ShuffledASGD(0.01)]))
def test_n_jobs_are_in_flight_at_all_times(seconds, algorithm):
    # I-15: queued ones included
    n = len(seconds)
    assert all(
        len(loop.fleet.in_flight) == n for loop in stepping(algorithm, heterogeneous(n), dd.FixedSpeeds(seconds), 80)
    )


CANCELLING = ("malenia", "rennala", "ringmaster stops")  # a cancelled job's draw is used up


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_worker_does_its_jobs_in_order(row, case):
    # I-15: first in, first out; every draw is used once; no version is older than the one before
    trace = dd.simulate(ALGORITHMS[row], *CASES[case], updates=30, evaluation=dd.Evaluation(every=30)).trace
    for worker in set(trace.worker):
        mine = trace.worker == worker
        time, seconds, draw, version = (trace[name][mine] for name in ("time", "seconds", "draw", "version"))
        assert draw.tolist() == list(range(len(draw))) if row not in CANCELLING else (draw[1:] > draw[:-1]).all()
        assert (version[1:] >= version[:-1]).all() and (time[1:] - time[:-1] >= seconds[1:] - rounding(4) * time[1:]).all()


def assignments(algorithm, problem, speeds, count):
    """Who got the job that each arrival set off, and how many that worker then had."""
    before = {(i, 0) for i in range(problem.workers)}
    for loop in stepping(algorithm, problem, speeds, count):
        now = {(job.worker, job.draw) for job in loop.fleet.in_flight}
        ((worker, _),) = now - before
        before = now
        yield worker, sum(other == worker for other, _ in now)


def test_shuffled_gives_everybody_one_job_in_each_block_of_n():
    # I-15
    jobs = [worker for worker, _ in assignments(dd.ShuffledASGD(0.01), *CASES["noisy"], 400)]
    blocks = [tuple(jobs[k : k + 4]) for k in range(0, 400, 4)]
    assert all(sorted(block) == [0, 1, 2, 3] for block in blocks)
    assert len(set(blocks)) > 20  # of 24 orders: it is shuffled anew


def test_uniform_asks_nobody_whether_they_are_busy():
    jobs, queues = zip(*assignments(dd.UniformASGD(0.001), *CASES["noisy"], 4000), strict=True)
    # a count of 4000 draws with chance 1/4 has standard deviation 27
    assert all(abs(jobs.count(worker) - 1000) < 110 for worker in range(4)) and max(queues) > 2


RATES = [  # I-16, seconds 1, 2, 4
    (dd.VanillaASGD(0.001), 1.75, 0.001),  # 1 + 1/2 + 1/4
    (dd.DuDe(0.001), 1.75, 0.003),
    (dd.SyncSGD(0.001), 0.25, 0.001),
    (dd.ShuffledASGD(0.001), 0.75, 0.005),  # n / s_max: the slowest gets as many jobs as the others
    (dd.UniformASGD(0.001), 0.725, 0.02),  # and sometimes even the slowest has nothing to do
]


@pytest.mark.parametrize(("algorithm", "rate", "error"), RATES, ids=[label(row[0]) for row in RATES])
def test_updates_per_second(algorithm, rate, error):
    run = dd.simulate(algorithm, *CASES["q3"], time=4000.0, evaluation=dd.Evaluation(every=10_000))
    assert run.version / run.time == pytest.approx(rate, abs=error)
    assert type(algorithm) is not dd.UniformASGD or run.version <= 0.75 * run.time


def test_a_change_of_pace_reaches_a_job_under_way():
    # 4 seconds of work: 1 done by time 1, then half pace until 3 makes 1 more, the last 2 at double pace take 1
    speeds = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([4.0]), [1.0, 3.0], [[1.0], [2.0], [0.5]])
    assert dd.simulate(dd.VanillaASGD(0.1), heterogeneous(1), speeds, updates=2).trace.time.tolist() == [4.0, 6.0]

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from flat import simulate
from helpers import AGGREGATING, few, heterogeneous, rounding, stepping, times
from tables import ALGORITHMS, CASES


def by_definition(trace, n):
    """tau_i(t) = t - u_i, and d_i(t) = 0 for who contributes, else d_i(t-1) + 1, walked through update by update."""
    u, d, fresh, tau_rows, d_rows = [None] * n, [-1] * n, set(), [], []
    for worker, version, after in zip(trace.worker, trace.version, trace.after, strict=True):
        u[worker] = version
        fresh.add(worker)
        if after > len(tau_rows):
            d = [0 if i in fresh else -1 if u[i] is None else d[i] + 1 for i in range(n)]
            fresh.clear()
            tau_rows.append([-1 if v is None else after - v for v in u])
            d_rows.append(d)
    return np.array(tau_rows), np.array(d_rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", AGGREGATING)
def test_delays_are_those_of_the_definition(row, case):
    # I-4
    problem, speeds = CASES[case]
    run = dd.simulate(ALGORITHMS[row], problem, speeds, updates=60, evaluation=dd.Evaluation(every=60))
    tau, d = by_definition(run.trace, problem.workers)
    assert all(map(np.array_equal, delay_grids(run.trace, problem.workers), (tau, d)))
    assert run.delays.tau_max == tau.max()
    assert run.delays.tau_avg == pytest.approx(tau[:-1][tau[:-1] > 0].mean(), rel=rounding(4), abs=0)  # of whole numbers
    if "busy" not in row:  # where a gradient may be overwritten before the first update, and has no place in the grid
        assert (run.delays.arrival_max, run.delays.arrival_avg) == (tau[d == 0].max(), pytest.approx(tau[d == 0].mean()))
    if row.startswith(("mifa", "siag")):
        assert (tau == d + (d >= 0)).all()  # section 2.4: fresh reads


@few
@given(times, st.integers(1, 7))
def test_the_two_delays_of_dude(seconds, wait_for):
    # I-4
    n = len(seconds)
    c = min(wait_for, n)
    run = dd.simulate(dd.DuDe(0.01, c), heterogeneous(n), dd.FixedSpeeds(seconds), updates=60)
    tau, d = delay_grids(run.trace, n)
    assert (tau[0] == 1).all() and (d[0] == 0).all()
    assert (tau >= d + 1).all() and ((d[1:] == 0).sum(1) == c).all()
    all_reported = (d < np.arange(len(d))[:, None]).all(1)  # since the first update, which was everybody's
    for row in d[all_reported] if c == 1 else ():
        # ages that differ, 0, 1, ..., sum to n(n-1)/2 at the least
        assert len(set(row)) == n and row.sum() >= n * (n - 1) // 2


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 3, 5, 6) for c in range(1, n + 1) if n % c == 0])
def test_round_robin(n, c):
    # I-5: a gradient is n/c updates old when it comes and ages for n/c - 1 more until it is replaced
    run = dd.simulate(dd.DuDe(0.01, c), heterogeneous(n), dd.FixedSpeeds([1.0] * n), updates=50)
    _, d = delay_grids(run.trace, n)
    assert (run.delays.tau_max, run.delays.arrival_max, d.max()) == (2 * n // c - 1, n // c, n // c - 1)
    assert c > 1 or (d[n:].sum(1) == n * (n - 1) // 2).all()


@pytest.mark.parametrize(("c", "tau_max"), [(1, 13), (2, 5), (3, 1)])
def test_largest_delay_for_seconds_1_2_4(c, tau_max):
    # c=1: 7 updates in 4 seconds, so worker 2 arrives with tau 7 and stays for 6 more
    assert dd.simulate(dd.DuDe(0.01, c), *CASES["q3"], updates=100).delays.tau_max == tau_max


@few
@given(times, st.sampled_from([dd.VanillaASGD(0.01), dd.UniformASGD(0.01), dd.ShuffledASGD(0.01), dd.DuDe(0.01)]))
def test_delays_and_jobs_in_flight_sum_to_n_times_updates(seconds, algorithm):
    # I-6: each update ages all n jobs in flight by one; DuDe's first update is everybody's, so ageing starts after it
    n, total = len(seconds), 0
    first = n if isinstance(algorithm, dd.DuDe) else 0
    for arrival, loop in enumerate(stepping(algorithm, heterogeneous(n), dd.FixedSpeeds(seconds), first + 60), 1):
        T = loop.state.version
        if arrival > first:
            total += T - loop.recorder.trace().version[-1]
        if T:
            assert total + sum(T - job.version for job in loop.fleet.in_flight) == n * (T - (first > 0))


COUNTS = {  # I-7: updates by time t with fixed seconds s and two steps per job
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
    algorithm, count = COUNTS[name]
    problem = dd.LocalSteps(heterogeneous(len(seconds)), 2, 0.01)
    run = dd.simulate(algorithm, problem, dd.FixedSpeeds(seconds), time=quarters / 4, evaluation=dd.Evaluation(every=100))
    assert run.version == count(quarters / 4, [2 * s for s in seconds])


FIRST = {  # seconds 1, 2, 4: the moments of the first updates, and who comes; of two at once, who was sent first
    "vanilla": (dd.VanillaASGD(0.01), [1, 2, 2, 3, 4, 4, 4], [0, 1, 0, 0, 2, 1, 0]),
    "dude": (dd.DuDe(0.01), [4, 5, 6, 6, 7, 8, 8, 8], [0, 1, 2, 0, 1, 0, 0, 2, 1, 0]),
    "dude busy": (dd.DuDe(0.01, start="busy"), [4, 4, 5], [0, 1, 0, 0, 2, 1, 0, 0]),  # worker 2 completes the table
    "sync": (dd.SyncSGD(0.01), [4, 8], [0, 1, 2] * 2),
    "siag": (dd.SIAG(0.01), [4, 5, 7, 11, 12], [0, 1, 2, 0, 1, 2, 0]),  # everybody, then each alone
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_updates(name):
    algorithm, moments, workers = FIRST[name]
    trace = dd.simulate(algorithm, *CASES["q3"], updates=len(moments)).trace
    assert trace.time[np.diff(trace.after, prepend=0) > 0].tolist() == moments and trace.worker.tolist() == workers


def test_simultaneous_arrivals_come_one_at_a_time_up_to_the_very_end():
    run = dd.simulate(dd.VanillaASGD(0.01), *CASES["q3"], time=4.0)
    # at time 2 worker 1 gets version 2, which lacks worker 0's arrival of the same moment
    assert run.trace.version.tolist() == [0, 0, 1, 3, 0, 2, 4]
    assert dd.simulate(dd.VanillaASGD(0.01), *CASES["q3"], time=math.nextafter(4.0, 0.0)).version == 4


@pytest.mark.parametrize("c", [1, 3])
def test_delays_are_right_when_somebody_leaving_makes_the_update(c):
    # workers 0 and 1 report at 1 and 2; at 3 the first update waits for worker 2 no more, and it is iteration 1
    run = simulate(dd.DuDe(0.01, c), *CASES["q3"], time=9.0, changes=[dd.speeds.leave(2, 3.0)])
    tau, d = delay_grids(run.trace, 3)
    assert tau[0].tolist() == [1, 1, -1] and d[0].tolist() == [0, 0, -1]
    assert (tau[1:, :2] >= d[1:, :2] + 1).all() and (d[1:, :2] >= 0).all()

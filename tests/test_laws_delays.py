from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import AGGREGATING, centers, dyadic_times, few, stepping, times
from hypothesis import given
from hypothesis import strategies as st
from tables import ALGORITHMS, CASES

import dualdelay as dd

QUEUEING = {"vanilla": dd.VanillaASGD(0.01), "uniform": dd.UniformASGD(0.01), "shuffled": dd.ShuffledASGD(0.01)}


def equal(n):
    return dd.Quadratic(centers(n, 1)), dd.FixedSpeeds([1.0] * n)


def by_definition(trace, n):
    """tau_i(t) = t - u_i and d_i(t) = 0 for who contributes, else d_i(t-1) + 1, walked through one update at a time."""
    u, d, tau_rows, d_rows, fresh = [None] * n, [-1] * n, [], [], set()
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
    problem, speeds = CASES[case]
    run = dd.simulate(ALGORITHMS[row], problem, speeds, updates=60, evaluate_every=60)
    tau, d = by_definition(run.trace, problem.workers)
    for grid, expected in zip(dd.delay_grids(run.trace, problem.workers), (tau, d), strict=True):
        assert np.array_equal(grid, expected)
    first = tau[d == 0]
    # the summary counts gradients at their first use once each, also those that a busy start overwrote
    assert run.delays.tau_max == tau.max() and run.delays.arrival_max >= first.max()
    assert run.delays.tau_avg == pytest.approx(tau[:-1][tau[:-1] > 0].mean(), rel=1e-12)
    if "busy" not in row:
        assert run.delays.arrival_max == first.max() and run.delays.arrival_avg == pytest.approx(first.mean())


@few
@given(times, st.integers(1, 7))
def test_the_two_delays_of_dude(seconds, wait_for):
    # I-4
    n = len(seconds)
    c = min(wait_for, n)
    run = dd.simulate(dd.DuDe(0.01, c), dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds), updates=60)
    tau, d = dd.delay_grids(run.trace, n)
    assert (tau[0] == 1).all() and (d[0] == 0).all()
    assert (tau >= d + 1).all()
    assert ((d[1:] == 0).sum(1) == c).all()
    all_reported = (d < np.arange(len(d))[:, None]).all(1)  # since the first update, which was everybody's
    for row in d[all_reported] if c == 1 else ():
        # distinct ages 0, 1, ... sum to n(n-1)/2 at the least, and to no more only in turns
        assert len(set(row)) == n and row.sum() >= n * (n - 1) // 2


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 3, 5, 6) for c in range(1, n + 1) if n % c == 0])
def test_round_robin(n, c):
    # I-5: a gradient is n/c updates old when it comes and ages for n/c - 1 more until it is replaced
    run = dd.simulate(dd.DuDe(0.01, c), *equal(n), updates=50)
    _, d = dd.delay_grids(run.trace, n)
    assert (run.delays.tau_max, run.delays.arrival_max, d.max()) == (2 * n // c - 1, n // c, n // c - 1)
    if c == 1:
        assert (d[n:].sum(1) == n * (n - 1) // 2).all()


@pytest.mark.parametrize(("c", "tau_max"), [(1, 13), (2, 5), (3, 1)])
def test_largest_delay_for_seconds_1_2_4(c, tau_max):
    # c=1: 7 updates in 4 seconds, so worker 2 arrives with tau 7 and stays for 6 more
    assert dd.simulate(dd.DuDe(0.01, c), *CASES["q3"], updates=100).delays.tau_max == tau_max


@pytest.mark.parametrize("algorithm", [dd.MIFA(0.01, active=2), dd.SIAG(0.01)])
def test_fresh_reads_leave_one_delay(algorithm):
    # section 2.4: what is computed at the newest model has tau = d + 1
    run = dd.simulate(algorithm, *CASES["noisy"], updates=50)
    tau, d = dd.delay_grids(run.trace, 4)
    assert (tau == d + 1).all() and (d > 0).any()


@few
@given(times, st.sampled_from(sorted(QUEUEING)))
def test_delays_and_jobs_in_flight_sum_to_n_times_updates(seconds, name):
    # I-6: each update ages all n jobs in flight by one
    n, total = len(seconds), 0
    problem, speeds = dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds)
    for T, loop in enumerate(stepping(QUEUEING[name], problem, speeds, 60), 1):
        row = loop.recorder.trace()
        total += T - row.version[-1]
        assert total + sum(T - job.version for job in loop.fleet.in_flight) == n * T


@few
@given(times)
def test_delays_and_jobs_in_flight_of_dude(seconds):
    # I-6: the first update is everybody's, so ageing starts at the second
    n, total = len(seconds), 0
    problem, speeds = dd.Quadratic(centers(n, 1)), dd.FixedSpeeds(seconds)
    for arrival, loop in enumerate(stepping(dd.DuDe(0.01), problem, speeds, n + 50), 1):
        T = loop.state.version
        total += T - loop.recorder.trace().version[-1] if arrival > n else 0
        assert T == max(arrival - n + 1, 0)
        assert T == 0 or total + sum(T - job.version for job in loop.fleet.in_flight) == n * (T - 1)


@pytest.mark.parametrize(("algorithm", "n"), [(dd.VanillaASGD(0.001), 7), (dd.DuDe(0.001), 7), (dd.ShuffledASGD(0.001), 3)])
def test_mean_arrival_delay_tends_to_n(algorithm, n):
    run = dd.simulate(
        algorithm, dd.Quadratic(centers(n, 1)), dd.FixedSpeeds([1.0 + i**2 / 3 for i in range(n)]), updates=3000
    )
    assert run.delays.arrival_avg == pytest.approx(n, rel=0.02)


K = 2
COUNTS = {  # I-7: updates by time t with fixed seconds s
    "vanilla": (dd.VanillaASGD(0.01), 1, lambda t, s: sum(t // q for q in s)),
    "sync": (dd.SyncSGD(0.01), 1, lambda t, s: t // max(s)),
    "mifa": (dd.MIFA(0.01), 1, lambda t, s: t // max(s)),
    "dude": (dd.DuDe(0.01), 1, lambda t, s: 1 + sum((t - max(s)) // q for q in s) if t >= max(s) else 0),
    "dude zeros": (dd.DuDe(0.01, start="zeros"), 1, lambda t, s: sum(t // q for q in s)),
    "fedbuff": (dd.FedBuff(0.01, buffer=3), K, lambda t, s: sum(t // (K * q) for q in s) // 3),
}


@few
@given(dyadic_times, st.integers(0, 48), st.sampled_from(sorted(COUNTS)))
def test_updates_by_a_given_time(seconds, quarters, name):
    algorithm, k, count = COUNTS[name]
    problem = dd.LocalSteps(dd.Quadratic(centers(len(seconds), 1)), k, 0.01)
    run = dd.simulate(algorithm, problem, dd.FixedSpeeds(seconds), time=quarters / 4)
    assert run.version == count(quarters / 4, seconds)


def test_a_busy_start_updates_at_the_first_arrival_after_the_last_worker():
    # seconds 1, 2, 4: worker 2 completes the table at time 4, and worker 1's second report, at 4 too, is the first update
    trace = dd.simulate(dd.DuDe(0.01, start="busy"), *CASES["q3"], updates=1).trace
    assert trace.worker.tolist() == [0, 1, 0, 0, 2, 1] and trace.after.tolist() == [0, 0, 0, 0, 0, 1]
    assert trace.version.tolist() == [0] * 6 and trace.time[-1] == 4


UPDATE_TIMES = {
    "vanilla": (dd.VanillaASGD(0.01), [1, 2, 2, 3, 4, 4, 4]),
    "dude": (dd.DuDe(0.01), [4, 5, 6, 6, 7, 8, 8, 8]),
    "sync": (dd.SyncSGD(0.01), [4, 8, 12]),
    "siag": (dd.SIAG(0.01), [4, 5, 7, 11, 12, 14, 18]),  # everybody, then in turn, each waited for alone
}


@pytest.mark.parametrize("name", UPDATE_TIMES)
def test_moments_of_the_first_updates(name):
    algorithm, expected = UPDATE_TIMES[name]
    trace = dd.simulate(algorithm, *CASES["q3"], updates=len(expected)).trace
    assert trace.time[np.diff(trace.after, prepend=0) > 0].tolist() == expected


def test_ties_go_to_who_was_sent_first():
    # at time 2 worker 1's first job was sent at 0, worker 0's second at 1; at 4 it is worker 2 (0), 1 (2), 0 (3)
    trace = dd.simulate(dd.VanillaASGD(0.01), *CASES["q3"], updates=7).trace
    assert trace.worker.tolist() == [0, 1, 0, 0, 2, 1, 0]
    # one at a time: the first of two simultaneous arrivals gets a model without the second
    assert trace.after.tolist() == [1, 2, 3, 4, 5, 6, 7] and trace.version.tolist() == [0, 0, 1, 3, 0, 2, 4]


def test_times_are_exact_at_the_end():
    # an arrival at exactly the time limit counts
    problem, speeds = CASES["q3"]
    assert dd.simulate(dd.VanillaASGD(0.01), problem, speeds, time=4.0).version == 7
    assert dd.simulate(dd.VanillaASGD(0.01), problem, speeds, time=math.nextafter(4.0, 0.0)).version == 4


@pytest.mark.parametrize("c", [1, 3])
def test_delays_are_right_when_somebody_leaving_makes_the_update(c):
    # workers 0 and 1 report at 1 and 2; the first update, at 3, waits for worker 2 no more: it is iteration 1
    changes = [dd.leave(2, 3.0)]
    run = dd.simulate(dd.DuDe(0.01, c), *CASES["q3"], time=9.0, changes=changes)
    tau, d = dd.delay_grids(run.trace, 3)
    assert tau[0].tolist() == [1, 1, -1] and d[0].tolist() == [0, 0, -1]
    assert (tau[1:, :2] >= d[1:, :2] + 1).all() and (d[1:, :2] >= 0).all()

"""Delays

In iteration t, the update that makes version t, worker i's gradient in use was taken at version u_i(t). Its model delay is
tau_i(t) = t - u_i(t), and its data delay d_i(t) the number of iterations since it was first used. Both are functions of the
recorded trace.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from helpers import AGGREGATING, few, heterogeneous, rounding, stepping, times
from tables import ALGORITHMS, CASES

UPDATING_AT_ARRIVALS = [row for row in AGGREGATING if type(ALGORITHMS[row]).on_wake is dd.Algorithm.on_wake]


def by_definition(trace, n):
    """tau_i(t) = t - u_i, and d_i(t) = 0 for a worker that reported, else d_i(t-1) + 1, update by update."""
    u, d, fresh, tau_rows, d_rows = [None] * n, [-1] * n, set(), [], []
    for worker, version, after in zip(trace.worker, trace.version, trace.after, strict=True):
        u[worker] = version
        fresh.add(worker)
        while after > len(tau_rows):
            d = [0 if i in fresh else -1 if u[i] is None else d[i] + 1 for i in range(n)]
            fresh.clear()
            tau_rows.append([-1 if v is None else len(tau_rows) + 1 - v for v in u])
            d_rows.append(d)
    return np.array(tau_rows), np.array(d_rows)


@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", UPDATING_AT_ARRIVALS)
def test_delays_are_those_of_the_definition(row, case):
    """The delays that a run reports are those of the definition, walked through update by update.

    Catches a delay that counts from another version, or from the sending instead of the use.
    """
    problem, speeds = CASES[case]
    run = dd.simulate(ALGORITHMS[row], problem, speeds, updates=60, evaluation=dd.Evaluation(every=60))
    tau, d = by_definition(run.trace, problem.workers)
    assert all(map(np.array_equal, delay_grids(run.trace, problem.workers), (tau, d)))
    close = {"rel": rounding(4), "abs": 0}  # means of whole numbers
    assert run.delays.tau_max == tau.max()
    assert run.delays.tau_avg == pytest.approx(tau[:-1][tau[:-1] > 0].mean(), **close)
    assert run.delays.arrival_max == tau[d == 0].max()
    assert run.delays.arrival_avg == pytest.approx(tau[d == 0].mean(), **close)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ["mifa", "mifa active", "siag", "iag", "sag", "saga"])
def test_rounds_and_turns_use_fresh_gradients(row, case):
    """In methods of rounds (MIFA) or turns (sIAG, IAG, SAG, SAGA) a gradient was taken at the newest model when it arrives:
    its model delay is its data delay plus one.

    Catches a round or a turn that begins before the update of the one before.
    """
    run = dd.simulate(ALGORITHMS[row], *CASES[case], updates=40, evaluation=dd.Evaluation(every=40))
    tau, d = delay_grids(run.trace, run.problem.workers)
    assert len(tau) == 40 and (tau == np.where(d < 0, -1, d + 1)).all()
    assert (d.max() == 0) == (row == "mifa")  # whose rounds are of all workers


@few
@given(times, st.integers(1, 7))
def test_the_two_delays_of_dude(seconds, wait_for):
    """Under DuDe every worker is in the first update, each later one has as many new gradients as workers waited for, and a
    model delay is larger than its data delay; if one is waited for, the data delays of all workers differ.

    Catches an update that lacks a gradient or has one too many, and delays that are mixed up.
    """
    n = len(seconds)
    c = min(wait_for, n)
    run = dd.simulate(dd.DuDe(0.01, c), heterogeneous(n), dd.FixedSpeeds(seconds), updates=60)
    tau, d = delay_grids(run.trace, n)
    assert (tau[0] == 1).all() and (d[0] == 0).all()
    assert (tau >= d + 1).all() and ((d[1:] == 0).sum(1) == c).all()
    all_reported = (d < np.arange(len(d))[:, None]).all(1)  # since the first update, in which all did
    for row in d[all_reported] if c == 1 else ():
        # ages that differ, 0, 1, ..., sum to n(n-1)/2 at the least
        assert len(set(row)) == n and row.sum() >= n * (n - 1) // 2


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 3, 5, 6) for c in range(1, n + 1) if n % c == 0])
def test_delays_of_equal_speeds(n, c):
    """With equal speeds and c of n workers waited for, a gradient is n/c updates old when it arrives and is used n/c times:
    the largest delay is 2n/c - 1, not the n/c of the paper's corollary.

    Catches a largest delay that forgets how long a gradient stays in use.
    """
    run = dd.simulate(dd.DuDe(0.01, c), heterogeneous(n), dd.FixedSpeeds([1.0] * n), updates=50)
    _, d = delay_grids(run.trace, n)
    assert (run.delays.tau_max, run.delays.arrival_max, d.max()) == (2 * n // c - 1, n // c, n // c - 1)
    assert c > 1 or (d[n:].sum(1) == n * (n - 1) // 2).all()


@pytest.mark.parametrize(("c", "tau_max"), [(1, 13), (2, 5), (3, 1)])
def test_the_largest_delay_for_seconds_1_2_4(c, tau_max):
    """For workers of 1, 2 and 4 seconds DuDe's largest delay is 13, 5 and 1 if one, two or three are waited for.

    Catches a delay that is off by one.
    """
    # c=1: 7 updates in 4 seconds, so worker 2 arrives with tau 7 and stays for 6 more
    assert dd.simulate(dd.DuDe(0.01, c), *CASES["q3"], updates=100).delays.tau_max == tau_max


@few
@given(times, st.sampled_from([dd.VanillaASGD(0.01), dd.UniformASGD(0.01), dd.ShuffledASGD(0.01), dd.DuDe(0.01)]))
def test_the_delays_of_arrivals_average_to_n(seconds, method):
    """With n jobs in flight at all times the delays of T arrivals and the ages of the jobs in flight sum to n T, so the
    mean delay of an arrival is n whatever the speeds.

    Catches a job that is in flight twice or not at all, and a version that is recorded wrong.
    """
    # each update ages all n jobs by one; every worker is in DuDe's first update, so ageing starts after it
    n, total = len(seconds), 0
    first = n if isinstance(method, dd.DuDe) else 0
    for arrival, loop in enumerate(stepping(method, heterogeneous(n), dd.FixedSpeeds(seconds), first + 60), 1):
        T = loop.state.version
        if arrival > first:
            total += T - loop.recorder.trace().version[-1]
        if T:
            assert total + sum(T - job.version for job in loop.fleet.in_flight) == n * (T - (first > 0))


@pytest.mark.parametrize("c", [1, 3])
def test_a_worker_that_leaves_may_make_the_first_update(c):
    """Where the first update waits for a worker that leaves, its leaving makes the update, which is iteration 1 and has no
    gradient of it.

    Catches an update that is missing from the delays because no arrival made it.
    """
    # workers 0 and 1 report at 1 and 2; at 3 worker 2 leaves
    fleet = dd.SimulatedFleet(CASES["q3"][1], changes=[dd.speeds.leave(2, 3.0)])
    run = dd.simulate(dd.DuDe(0.01, c), CASES["q3"][0], fleet, time=9.0)
    tau, d = delay_grids(run.trace, 3)
    assert tau[0].tolist() == [1, 1, -1] and d[0].tolist() == [0, 0, -1]
    assert (tau[1:, :2] >= d[1:, :2] + 1).all() and (d[1:, :2] >= 0).all() and (tau[:, 2] == -1).all()

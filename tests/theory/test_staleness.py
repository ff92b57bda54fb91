"""How stale gradients will be: the prediction against runs, its laws, and the input that it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from dualdelay.engine.trace import Trace
from dualdelay.theory.staleness import delays, measured, tau_avg, tau_max, tau_median, weighted_median
from helpers import few, heterogeneous, rounding, times
from own import Scenario

SPEEDS = {
    "fixed": dd.FixedSpeeds([1.0, 2.0, 4.0]),
    "uneven": dd.TruncatedNormalSpeeds(6, std=5.0, seed=3),
    "random": dd.speeds.ExponentialSpeeds([1.0, 2.0, 3.0, 1.0]),
    "bursts": dd.speeds.BurstySpeeds(dd.FixedSpeeds([1.0, 1.5, 3.0]), factor=20.0),
}


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("c", [1, 2, 3])
def test_a_prediction_is_what_a_run_of_that_length_has(name, c):
    speeds = SPEEDS[name]
    run = dd.simulate(
        dd.DuDe(0.01, c), heterogeneous(speeds.n, 2), speeds, updates=150, evaluation=dd.Evaluation(every=150)
    )
    found = delays(speeds, c, updates=150)
    assert (found.tau_max, found.tau_avg) == (run.delays.tau_max, run.delays.tau_avg)
    assert found.arrival_avg == pytest.approx(run.delays.arrival_avg)
    tau, d = delay_grids(run.trace, speeds.n)
    assert found.ages == pytest.approx(tau[:-1].mean(0)) and found.tau_avg == pytest.approx(np.mean(found.ages))
    assert found.tau_median == pytest.approx(np.median(found.ages))
    for worker in range(speeds.n):
        first = tau[:, worker][d[:, worker] == 0]
        assert found.arrival_mean[worker] == pytest.approx(first.mean())
        assert found.arrival_max[worker] == first.max()
        assert found.arrival_percentiles[worker] == tuple(np.percentile(first, [5, 25, 50, 75, 95]))
    assert (found.wait_for, found.updates, found.arrivals) == (c, 150, len(run.trace))
    assert found.shares == pytest.approx(np.bincount(run.trace.worker) / len(run.trace))
    began, ended = run.trace.time[run.trace.after == 1][0], run.trace.time[-1]
    assert found.updates_per_second == pytest.approx(149 / (ended - began))
    assert found.arrivals_per_second == pytest.approx(149 * c / (ended - began))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_round_robin_and_waiting_for_all(n):
    one, all_workers = delays(dd.FixedSpeeds([1.0] * n)), delays(dd.FixedSpeeds([1.0] * n), n)
    assert one.tau_max == 2 * n - 1 == tau_max([1.0] * n)
    assert set(one.arrival_max) == {n}
    assert tau_avg([1.0] * n) == 1.5 * n - 0.5
    assert (all_workers.tau_max, all_workers.tau_avg) == (1, 1.0)
    assert all_workers.updates == 20 and not all_workers.notes
    long = delays(dd.FixedSpeeds([1.0] * n), updates=250 * n)
    assert long.tau_avg == pytest.approx(1.5 * n - 0.5, rel=0.01)  # but for the first updates


@few
@given(times, st.integers(1, 7))
def test_laws_of_fixed_speeds(seconds, wait_for):
    n = len(seconds)
    c = min(wait_for, n)
    found = delays(dd.FixedSpeeds(seconds), c, updates=300)
    assert sum(found.shares) == pytest.approx(1.0)
    assert found.arrivals == n + c * 299
    assert all(0 <= idle < 1 for idle in found.idle)
    assert found.tau_max >= max(found.arrival_max) and found.tau_avg >= 1
    assert found.arrivals_per_second == pytest.approx(c * found.updates_per_second)
    assert found.idle_share == pytest.approx(np.mean(found.idle))
    if c == 1:
        # n in the long run (the next test); fewer here, since n jobs are in flight at the end and the first are fresh
        assert 1 <= found.arrival_avg <= n
        assert found.idle == (0.0,) * n
    if c == n:
        assert (found.tau_max, found.tau_avg) == (1, 1.0)
        assert found.updates_per_second == pytest.approx(1 / max(seconds))
        assert found.idle == pytest.approx([1 - s / max(seconds) for s in seconds], abs=rounding(4 * 300))


def test_the_mean_delay_of_arrivals_is_the_number_of_workers():
    for speeds in (dd.TruncatedNormalSpeeds(10, std=5.0, seed=1), dd.speeds.ExponentialSpeeds([1.0] * 10)):
        assert delays(speeds, updates=3000).arrival_avg == pytest.approx(10, rel=0.02)


def test_one_straggler_changes_the_mean_and_not_the_median():
    even, uneven = (delays(dd.FixedSpeeds([1.0] * 9 + [last]), updates=3000) for last in (1.0, 100.0))
    assert even.tau_median == pytest.approx(even.tau_avg, rel=0.02)
    assert uneven.tau_avg > 8 * even.tau_avg and uneven.tau_median < even.tau_median
    assert tau_median([1.0] * 10) == tau_avg([1.0] * 10) == 14.5
    times = [1.0] * 9 + [100.0]
    assert tau_median(times) == pytest.approx(uneven.tau_median, rel=0.01) and tau_avg(times) > 140


def test_a_median_by_weight():
    assert weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert weighted_median([4.0, 1.0, 2.0, 3.0], [2.0] * 4) == 2.5
    assert weighted_median([7.0], [0.3]) == 7.0
    assert weighted_median([1.0, 1.0, 9.0], [1.0, 0.0, 0.0]) == 1.0, "what has no weight does not count"
    assert weighted_median([1.0, 2.0, 100.0], [1.0, 1.0, 1.0]) == 2.0 < weighted_median([1.0, 2.0, 100.0], [1.0, 1.0, 8.0])


def test_the_times_of_waiting_can_be_counted_by_hand():
    found = delays(dd.FixedSpeeds([1.0, 2.0, 4.0]), 2, updates=3)
    # updates at 4 (all workers), 6 (0 and 1) and 8: 0 came at 7, and of 1 and 2, which both come at 8, 2 was sent first
    assert found.updates_per_second == pytest.approx(2 / 4)
    assert found.idle == pytest.approx([(1 + 1) / 4, 0.0, 0.0])
    assert found.shares == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_the_closed_forms_are_as_near_as_they_say():
    rng, largest, mean = np.random.default_rng(0), [], []
    for _ in range(12):
        seconds = rng.uniform(0.3, 2.0, 10).tolist()
        found = delays(dd.FixedSpeeds(seconds), updates=1000)
        largest.append(tau_max(seconds) / found.tau_max)
        mean.append(tau_avg(seconds) / found.tau_avg)
    assert min(largest) > 0.8 and max(largest) <= 1.001
    assert min(mean) > 0.99 and max(mean) < 1.02
    assert tau_max([1.0, 2.0, 4.0]) == 13.0  # the slowest worker's 4 seconds have 7 updates: 2 * 7 - 1


def test_without_a_length_the_slowest_worker_reports_twenty_times():
    for speeds, c in ((dd.FixedSpeeds([1.0, 30.0]), 1), (dd.TruncatedNormalSpeeds(5, std=5.0, seed=2), 2)):
        found = delays(speeds, c)
        assert round(min(found.shares) * found.arrivals) >= 20 and not found.notes


def test_a_worker_that_hardly_reports_is_noted():
    found = delays(dd.FixedSpeeds([1.0, 1000.0]), most=500)
    assert found.arrivals == 500 and found.tau_max > 400
    assert len(found.notes) == 1 and "worker 1 made 1 of the 500 arrivals" in found.notes[0]
    assert not delays(dd.FixedSpeeds([1.0, 1000.0]), updates=600).notes, "a length that is given is meant"


METHODS = {
    "dude": dd.DuDe(0.01),
    "dude c=2": dd.DuDe(0.01, 2),
    "vanilla": dd.VanillaASGD(0.01),
    "sync": dd.SyncSGD(0.01),
    "fedbuff": dd.FedBuff(0.01, buffer=3),
    "uniform": dd.UniformASGD(0.01),
    "malenia": dd.algorithms.MaleniaSGD(0.01),
    "siag": dd.SIAG(0.01),
}


@pytest.mark.parametrize("name", METHODS)
def test_times_are_measured_whatever_the_method(name):
    speeds = dd.FixedSpeeds([0.7, 1.9, 4.3])
    run = dd.simulate(METHODS[name], heterogeneous(3), speeds, updates=80, evaluation=dd.Evaluation(every=80))
    for row, seconds in zip(measured(run.trace).times, speeds.times, strict=True):
        assert row == pytest.approx([seconds] * len(row), rel=0, abs=rounding(4) * run.time)
    assert delays(run, 2, updates=100) == delays(speeds, 2, updates=100)


def test_messages_count_as_time_and_absence_does_not():
    fleet = dd.SimulatedFleet(SPEEDS["fixed"], link=dd.speeds.Link(latency=0.25))
    run = dd.simulate(dd.DuDe(0.01, 2), heterogeneous(3), fleet, updates=40)
    assert [row[0] for row in measured(run.trace).times] == pytest.approx([1.5, 2.5, 4.5])
    changes = [dd.speeds.leave(1, 7.5), dd.speeds.join(1, 20.25)]
    away = dd.simulate(dd.DuDe(0.01), heterogeneous(3), dd.SimulatedFleet(SPEEDS["fixed"], changes=changes), time=60.0)
    assert max(measured(away.trace).times[1]) == pytest.approx(2.0)


def test_a_run_its_trace_and_its_folder_say_the_same(tmp_path):
    speeds = dd.speeds.LognormalSpeeds([1.0, 2.0, 4.0])
    run = dd.simulate(dd.DuDe(0.01, 2), heterogeneous(3), speeds, updates=60, folder=tmp_path / "run")
    found = delays(run, 2, updates=60)
    assert found.tau_max == run.delays.tau_max and found.tau_avg == pytest.approx(run.delays.tau_avg)
    assert delays(run.trace, 2, updates=60) == found
    assert delays(tmp_path / "run", 2, updates=60) == delays(str(tmp_path / "run"), 2, updates=60) == found


def test_a_run_that_is_not_finished_is_read_up_to_its_checkpoint(tmp_path):
    for name, arrivals in (("early", 10), ("later", 40)):
        scenario = Scenario(dd.DuDe(0.01), heterogeneous(3), SPEEDS["fixed"], updates=60, checkpoint_every=30)
        scenario.killed(tmp_path / name, arrivals)
    with pytest.raises(dd.BadInput, match="has saved nothing yet; go on with it: dualdelay resume"):
        delays(tmp_path / "early")
    assert delays(tmp_path / "later", updates=20) == delays(SPEEDS["fixed"], updates=20)


def test_a_folder_whose_problem_cannot_be_built_is_read_all_the_same(tmp_path):
    class Own(dd.Quadratic):
        pass

    dd.simulate(dd.DuDe(0.01), Own([[0.0], [1.0]]), dd.FixedSpeeds([1.0, 3.0]), updates=20, folder=tmp_path / "own")
    found = delays(tmp_path / "own", updates=30)
    assert found.tau_max == delays(dd.FixedSpeeds([1.0, 3.0]), updates=30).tau_max
    assert len(found.notes) == 1 and "cannot be built" in found.notes[0]


def test_a_worker_that_never_reported_is_named():
    run = dd.simulate(dd.VanillaASGD(0.01), heterogeneous(3), dd.FixedSpeeds([1.0, 2.0, 500.0]), updates=10)
    with pytest.raises(dd.BadInput, match="worker 2 never reported in the recorded run"):
        delays(run)
    nothing = Trace({name: column[:0] for name, column in run.trace.columns.items()}, [])
    with pytest.raises(dd.BadInput, match="nothing arrived"):
        delays(nothing)
    gone = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 2.0]), [dd.speeds.Absence(1, 0.5, math.inf)])
    with pytest.raises(dd.RunFailed, match="worker 1"):
        delays(gone)


@pytest.mark.parametrize("wait_for", [0, 4, -1, 1.5, True, "2", None])
def test_a_wrong_number_of_workers_to_wait_for_is_refused(wait_for):
    with pytest.raises(dd.BadInput, match=r"wait_for \(with 3 workers\) is .*; expected a whole number, 1\.\.3\."):
        delays(SPEEDS["fixed"], wait_for)


def test_other_wrong_input_is_refused(tmp_path):
    for speeds in (None, [1.0, 2.0], 3, dd.DuDe(0.1)):
        with pytest.raises(dd.BadInput, match=r"expected a dd\.SpeedModel, .* or something recorded"):
            delays(speeds)
    with pytest.raises(dd.BadInput, match="most is 0"):
        delays(SPEEDS["fixed"], most=0)
    for updates in (0, -3, 2.5, "9"):
        with pytest.raises(dd.BadInput, match="updates is"):
            delays(SPEEDS["fixed"], updates=updates)
    with pytest.raises(dd.BadInput, match="is not the folder of a run"):
        delays(tmp_path)
    for function in (tau_max, tau_avg, tau_median):
        with pytest.raises(dd.BadInput, match="times"):
            function([1.0, -2.0])
        with pytest.raises(dd.BadInput, match="times is empty"):
            function([])

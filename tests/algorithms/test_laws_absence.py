"""What becomes of a run when a worker is not there: told to the server, or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.runs.names import label
from flat import simulate
from helpers import archive, audit, heterogeneous, rounding, same
from own import Killed, differences, kill_at, moves
from tables import ALGORITHMS, CASES, LR

SECONDS = (0.83, 1.37, 2.11, 3.01)
BOUND = {
    "malenia": dd.algorithms.MaleniaSGD(LR),
    "ringmaster": dd.algorithms.RingmasterASGD(LR),
    "aced": dd.algorithms.ACED(LR),
}  # defaults that go by n
ROWS = {**ALGORITHMS, **{f"{name} by n": method for name, method in BOUND.items()}}


def without(worker, noise=0.0):
    """Four workers, and the same without one of them."""
    four = heterogeneous(4, 2, curvatures=[1.0, 2.0, 0.5, 1.0], noise=noise)
    centers, curvatures = four.settings["centers"], four.settings["curvatures"]
    left = [i for i in range(4) if i != worker]
    three = dd.Quadratic([centers[i] for i in left], [curvatures[i] for i in left], noise=noise)
    return (four, dd.FixedSpeeds(SECONDS)), (three, dd.FixedSpeeds([SECONDS[i] for i in left])), left


@pytest.mark.parametrize(
    "change", [dd.speeds.leave, lambda worker, _: dd.speeds.join(worker, 1e6)], ids=["left", "not joined yet"]
)
@pytest.mark.parametrize("row", [row for row in ROWS if row != "sag"])  # whose first worker is drawn from all, before
def test_who_is_never_there_changes_nothing(row, change):
    # with noise the last worker is away, so that the others keep their numbers, which name their noise
    for worker, noise in ((3, 0.5), (1, 0.0)):
        four, three, left = without(worker, noise)
        run, models = archive(ROWS[row], *four, updates=50, changes=[change(worker, 0.0)])
        expected, others = archive(ROWS[row], *three, updates=50)
        assert same(models, others) and (run.trace.time == expected.trace.time).all()
        assert run.trace.worker.tolist() == [left[k] for k in expected.trace.worker]


@pytest.mark.parametrize("row", ROWS)
def test_who_comes_and_goes_is_heard_while_it_is_there_and_the_run_can_be_stopped_and_replayed(row, tmp_path):
    options = {"updates": 24, "changes": moves, "checkpoint_every": 3, "evaluate_every": 8}
    problem, speeds = CASES["noisy"][0], dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1)
    run = simulate(ROWS[row], problem, speeds, folder=tmp_path / "straight", **options)
    for worker, away in {3: [(0.0, 2.5)], 1: [(4.0, 7.0)], 0: [(9.0, math.inf)]}.items():
        mine = run.trace.time[run.trace.worker == worker]
        assert not any(((mine > start) & (mine < end)).any() for start, end in away)
    assert run.version == 24 and (run.audit is None or run.audit <= audit(run))
    with pytest.raises(Killed):
        simulate(ROWS[row], problem, speeds, folder=tmp_path / "killed", watch=(kill_at(11),), **options)
    assert differences(dd.resume(tmp_path / "killed"), run) == []
    assert torch.equal(dd.replay(tmp_path / "straight").x, run.x)


FAST = 2.0**-5
RESTING = {
    "sync": dd.SyncSGD(FAST),
    "siag": dd.SIAG(FAST),
    "iag": dd.algorithms.IAG(FAST),
    "sag": dd.algorithms.SAG(FAST),
    "saga": dd.algorithms.SAGA(FAST),
    "malenia": dd.algorithms.MaleniaSGD(FAST),
    "ringleader": dd.algorithms.RingleaderASGD(FAST),
    "ca2fl": dd.algorithms.CA2FL(FAST, buffer=2),
    "aced": dd.algorithms.ACED(FAST),
    "sync by speed": dd.algorithms.SyncBySpeed(FAST),
    "dude int8": dd.DuDe(FAST, memory="workers", compress="int8"),
    "dude sparse": dd.DuDe(FAST, memory="workers", compress=0.5),
}


@pytest.mark.parametrize("row", RESTING)
@pytest.mark.parametrize("moment", [0.5, 33.25])
def test_who_left_counts_no_more_and_who_is_back_counts_again(row, moment):
    # (6 + 12) / 2 without worker 0, and 6 with all three
    for changes, limit in (
        ([dd.speeds.leave(0, moment)], 9),
        ([dd.speeds.leave(2, moment), dd.speeds.join(2, moment + 9.5)], 6),
        ([dd.speeds.leave(2, moment), dd.speeds.leave(0, moment + 1.5), dd.speeds.join(2, moment + 3.25)], 9),
    ):
        run = simulate(RESTING[row], *CASES["q3"], updates=800, changes=changes, evaluate_every=800)
        assert float(run.x) == pytest.approx(limit, abs=1e-9), changes


def test_mifa_goes_on_with_the_last_gradient_of_who_is_away():
    # worker 2 reports at w = 0 only, -12 for good: (w - 0) + (w - 6) - 12 = 0; who never reported does not count
    for moment, limit in ((4.5, 9), (0.5, 3)):
        run = simulate(dd.MIFA(FAST), *CASES["q3"], updates=1250, changes=[dd.speeds.leave(2, moment)], evaluate_every=1250)
        assert float(run.x) == pytest.approx(limit, abs=1e-9)


def test_fedfix_sleeps_while_nobody_is_there():
    changes = [dd.speeds.leave(worker, 5.5) for worker in range(3)] + [
        dd.speeds.join(worker, 100.25) for worker in range(3)
    ]
    run = simulate(dd.algorithms.FedFix(LR), *CASES["q3"], updates=1250, changes=changes, evaluate_every=1250)
    wakes = [event["time"] for event in run.trace.events if event["kind"] == "wake"]
    assert [time for time in wakes if 5.5 < time < 100.25] == [6.0] and np.diff(wakes).max() < 96
    assert float(run.x) == pytest.approx(6, abs=0.3)


def test_a_buffer_that_waits_is_no_larger_than_the_fleet():
    # all three wait for one another until worker 2 leaves at 9, while the others idle: then 0 and 6 are left, or 0 and 12
    method = dd.FedBuff(2.0**-5, buffer=3, wait=True)
    for gone, limit in ((2, 3), (1, 6)):
        run = simulate(method, *CASES["q3"], updates=1000, changes=[dd.speeds.leave(gone, 11.0)], evaluate_every=1000)
        assert float(run.x) == pytest.approx(limit, abs=1e-9)


GOES_ON = {  # without a word from worker 2, who is away from the start; the others wait for it, or run out of jobs
    *("dude zeros", "vanilla", "fedbuff", "fedbuff wait", "fedbuff stale", "rescaled", "ca2fl", "rennala", "ringmaster"),
    *("ringmaster stops", "delay adaptive", "fedasync", "fedfix", "fadas"),
}


@pytest.mark.parametrize("row", ALGORITHMS)
def test_whoever_waits_for_ever_says_for_whom(row):
    speeds = dd.speeds.AwaySpeeds(CASES["q3"][1], [(2, 0.0, None)])
    if row in GOES_ON:
        assert dd.simulate(ALGORITHMS[row], CASES["q3"][0], speeds, updates=30).version == 30
        return
    with pytest.raises(dd.RunFailed, match=r"waits for worker 2, who will never come back"):
        dd.simulate(ALGORITHMS[row], CASES["q3"][0], speeds, updates=3000)


def test_wakes_alone_do_not_keep_a_run_going():
    speeds = dd.speeds.AwaySpeeds(CASES["q3"][1], [(worker, 10.5, None) for worker in range(3)])
    with pytest.raises(dd.RunFailed, match=r"FedFix waits for workers 0, 1, 2, who will never come back"):
        dd.simulate(dd.algorithms.FedFix(LR), CASES["q3"][0], speeds, updates=30)


def test_every_method_says_what_it_does_with_an_absent_worker():
    for method in dd.ALGORITHMS.values():
        assert method.away != dd.Algorithm.away and method.leave is not dd.Algorithm.leave
        assert method.join is not dd.Algorithm.join


def at_once(kind, start, *, seconds, updates, changes, centers=(0.0, 6.0), **settings):
    """Where a run on scalars ends, and its trace."""
    problem = dd.Quadratic([[b] for b in centers], start=[start])
    run = dd.simulate(
        kind(**settings), problem, dd.SimulatedFleet(dd.FixedSpeeds(seconds), changes=changes), updates=updates
    )
    return float(run.x), run.trace


def test_fedfix_counts_no_ticks_that_nobody_waited_for():
    # both are away from 10 to 1000: their next gradients needed a tick or two, not 990
    away = [dd.speeds.leave(0, 10.0), dd.speeds.leave(1, 10.0), dd.speeds.join(0, 1000.0), dd.speeds.join(1, 1000.0)]
    models = archive(
        dd.algorithms.FedFix(0.05), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 1.0]), updates=40, changes=away
    )[1]
    assert max(float(x) for x in models) < 6.0


def test_fedfix_gives_who_was_away_between_two_ticks_one_job():
    _, trace = at_once(
        dd.algorithms.FedFix,
        0.0,
        seconds=[1.0, 1.0],
        updates=6,
        changes=[dd.speeds.leave(0, 2.0), dd.speeds.join(0, 3.0)],
        lr=0.05,
        period=10.0,
    )
    mine = trace.time[trace.worker == 0].tolist()
    assert mine == [1.0, 4.0, 11.0, 21.0, 31.0, 41.0, 51.0]  # the second one before the tick, then one a tick


def test_ca2fl_forgets_what_a_worker_had_in_the_cache_when_it_leaves():
    # worker 1 reports -100 at 1.5 and leaves: three of worker 0's zeros are left, so nothing may move
    x, _ = at_once(
        dd.algorithms.CA2FL,
        0.0,
        seconds=[1.0, 1.5],
        centers=(0.0, 100.0),
        updates=1,
        changes=[dd.speeds.leave(1, 1.6)],
        lr=0.1,
        buffer=4,
    )
    assert x == 0.0


@pytest.mark.numeric
def test_who_leaves_and_comes_back_within_a_round_of_sync_counts_once():
    # from 100 with step 1 the mean of the three gradients leads to the mean of 0, 6, 12
    x, _ = at_once(
        dd.SyncSGD,
        100.0,
        seconds=[1.0, 3.0, 10.0],
        centers=(0.0, 6.0, 12.0),
        updates=1,
        changes=[dd.speeds.leave(0, 2.0), dd.speeds.join(0, 2.5)],
        lr=1.0,
    )
    assert x == pytest.approx(6, abs=rounding(8) * 100)


@pytest.mark.numeric
def test_saga_is_unbiased_about_who_has_just_joined():
    # table 10, 20 and nothing yet of worker 2; at gradients 10, 20, 30 the mean of the three directions is 20
    method, means = dd.algorithms.SAGA(1.0), []
    for worker, gradient in enumerate((10.0, 20.0, 30.0)):
        s = method.init(torch.zeros(1), 3, dd.Draws(0, "server"))
        method.leave(s, 2)
        for known, value in enumerate((10.0, 20.0)):
            method.step(s, dd.Arrival(dd.Job(known, 0, 0), torch.tensor([value]), 1.0, 1.0, 0.0))
        method.join(s, 2)
        before = float(s.x)
        method.step(s, dd.Arrival(dd.Job(worker, 1, 1), torch.tensor([gradient]), 2.0, 1.0, 0.0))
        means.append(before - float(s.x))
    assert sum(means) / 3 == pytest.approx(20.0, rel=rounding(16, torch.float32), abs=0)


@pytest.mark.parametrize(
    "method",
    [dd.FedBuff(0.01, buffer=500), dd.algorithms.RennalaSGD(0.01, gradients=500), dd.algorithms.FedFix(0.01, period=0.004)],
    ids=label,
)
def test_long_waits_for_nobody_in_particular_are_no_alarm(method):
    speeds = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 1.0]), [(1, 5.0, None)])
    assert dd.simulate(method, dd.Quadratic([[0.0], [6.0]]), speeds, updates=3).version == 3


def test_when_everybody_has_left_that_is_said():
    everybody = dd.speeds.announced([(worker, 5.0, None) for worker in range(3)])
    with pytest.raises(dd.RunFailed, match=r"all workers have left by time 5, after \d updates, and none joins again"):
        simulate(dd.VanillaASGD(LR), *CASES["q3"], updates=30, changes=everybody)

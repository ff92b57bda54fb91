"""Absent workers

A worker may leave and join with the server's knowledge: its job is lost, and the method has a rule for both. Or it falls
silent without the server's knowledge: its job never ends. Most of these laws are about three workers whose losses have
their minima at 0, 6 and 12, so that a method in which all workers count the same ends at the mean of those present.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core import Send
from dualdelay.engine.delays import delay_grids
from dualdelay.runs.names import label
from helpers import NO_TIES, archive, audit, heterogeneous, rounding, same
from own import Fresh, Killed, differences, kill_at
from tables import ALGORITHMS, CASES, DUDES, LR

announced, join, leave = dd.speeds.announced, dd.speeds.join, dd.speeds.leave
LAST = dd.Evaluation(every=10**6)  # the end alone
Q3, SPEEDS = CASES["q3"]
BY_N = {  # methods with a setting that follows the number of workers unless it is given
    "malenia": dd.algorithms.MaleniaSGD(LR),
    "ringmaster": dd.algorithms.RingmasterASGD(LR),
    "aced": dd.algorithms.ACED(LR),
}
ROWS = {**ALGORITHMS, **{f"{name} by n": method for name, method in BY_N.items()}}


def simulate(method, *changes, problem=Q3, speeds=SPEEDS, **options):
    """A run during which workers leave and join."""
    return dd.simulate(method, problem, dd.SimulatedFleet(speeds, changes=changes), **{"evaluation": LAST, **options})


def asks_every_worker_at_first(method):
    orders = method.first(method.init(torch.zeros(1), 4, dd.Draws(0, "server")))
    return {order.worker for order in orders if isinstance(order, Send)} == set(range(4))


# Every method ---------------------------------------------------------------------------------------------------------


def test_every_method_has_rules_for_absence():
    """Every method of the package lets workers leave and join, and says in words what becomes of an absent one.

    Catches a method that would wait for an absent worker without end, or lose its job.
    """
    for method in dd.ALGORITHMS.values():
        assert method.away and method.leave is not dd.Algorithm.leave and method.join is not dd.Algorithm.join


@pytest.mark.parametrize("row", [row for row in ROWS if asks_every_worker_at_first(ROWS[row])])
def test_a_worker_that_is_never_present_changes_nothing(row):
    """A worker that is never present changes nothing: the run is bit for bit that of a fleet without it.

    Only a method that draws its first worker before it can know of the absence, SAG, is excepted.

    Catches a rule that divides by the size of the fleet instead of the number of workers present, or draws an absent
    worker.
    """
    # with noise it is the last worker, so that the others keep their numbers, which name their noise
    for absent, noise, change in ((3, 0.5, leave(3, 0.0)), (1, 0.0, join(1, 1e6))):
        others = [worker for worker in range(4) if worker != absent]
        centers, curvatures = heterogeneous(4, 2).settings["centers"], [1.0, 2.0, 0.5, 1.0]
        four = dd.Quadratic(centers, curvatures, noise), dd.SimulatedFleet(dd.FixedSpeeds(NO_TIES), changes=[change])
        three = (
            dd.Quadratic([centers[i] for i in others], [curvatures[i] for i in others], noise),
            dd.FixedSpeeds([NO_TIES[i] for i in others]),
        )
        (run, models), (without, expected) = (archive(ROWS[row], *case, updates=50) for case in (four, three))
        assert same(models, expected) and (run.trace.time == without.trace.time).all()
        assert run.trace.worker.tolist() == [others[k] for k in without.trace.worker]


ABSENCES = [(3, 0.0, 2.5), (1, 4.0, 7.0), (0, 9.0, None)]
MOVING = {"problem": CASES["noisy"][0], "speeds": dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1), "time": 12.0}


@pytest.mark.parametrize("row", ROWS)
def test_nothing_arrives_from_an_absent_worker(row):
    """While a worker is absent nothing arrives from it, and a server that keeps a sum of gradients keeps it right.

    Catches a job that survives its worker's leaving, and a gradient that stays in the sum.
    """
    run = simulate(ROWS[row], *announced(ABSENCES), **MOVING)
    for worker, start, end in ABSENCES:
        times = run.trace.time[run.trace.worker == worker]
        assert not ((times > start) & (times < (end or math.inf))).any()
    assert run.state.present == [1, 2, 3] and run.version > 0
    assert run.audit is None or run.audit <= audit(run)


@pytest.mark.parametrize("row", ROWS)
def test_runs_in_which_workers_come_and_go_can_be_resumed_and_replayed(row, tmp_path):
    """A run in which workers leave and join, killed half way and resumed, has every bit of one that was not killed, and a
    replay gives the same weights.

    Catches a state that is not saved whole, and an event that is missing from the trace.
    """
    options = {**MOVING, "checkpoint_every": 4, "evaluation": dd.Evaluation(every=8)}
    run = simulate(ROWS[row], *announced(ABSENCES), folder=tmp_path / "whole", **options)
    with pytest.raises(Killed):
        kill = kill_at(len(run.trace) // 2)
        simulate(ROWS[row], *announced(ABSENCES), folder=tmp_path / "killed", watch=[kill], **options)
    assert differences(dd.resume(tmp_path / "killed"), run) == []
    assert torch.equal(dd.replay(tmp_path / "whole").x, run.x)


# Who counts -----------------------------------------------------------------------------------------------------------

STEP = 1 / 16
AT_REST = rounding(16) * 12 / STEP  # closer to a solution of size 12 a step is less than half of the last digit
UNBIASED = {
    **{
        row: replace(ALGORITHMS[row], lr=STEP)
        for row in (
            *DUDES,
            *("sync", "sync by speed", "siag", "iag", "sag", "saga", "ringleader", "ca2fl"),
            *("scaffold", "adsaga"),
        )
    },
    "auto": dd.AutoDuDe(),
    "malenia": dd.algorithms.MaleniaSGD(STEP),
    "aced": dd.algorithms.ACED(STEP),
    "area": dd.algorithms.AREA(1 / 2),
    "area buffer": dd.algorithms.AREA(1 / 2, buffer=2),
}
PRESENT_AT_THE_END = {  # worker 2 reports first at 4 seconds
    "left before it reported": ([leave(2, 0.5)], {0, 1}),
    "left as it reported": ([leave(2, 4.0)], {0, 1}),
    "left later": ([leave(0, 33.25)], {1, 2}),
    "left and back before it reported": ([leave(2, 0.5), join(2, 10.0)], {0, 1, 2}),
    "left and back later": ([leave(2, 33.25), join(2, 42.75)], {0, 1, 2}),
    "joined at once": ([join(2, 0.0)], {0, 1, 2}),
    "joined later": ([join(2, 50.0)], {0, 1, 2}),
    "left as another was absent": ([leave(2, 0.5), leave(0, 2.0), join(2, 3.75)], {1, 2}),
    "left later as another was absent": ([leave(2, 33.25), leave(0, 34.75), join(2, 36.5)], {1, 2}),
    "all but one left": ([leave(2, 33.25), leave(1, 40.5)], {0}),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", PRESENT_AT_THE_END)
@pytest.mark.parametrize("row", UNBIASED)
def test_the_workers_present_count_the_same_and_no_other_counts(row, name):
    """A worker that has left counts no more, and one that joins or returns counts like the others: an unbiased method ends
    at the solution of the workers present.

    Catches the old gradient of a worker that left, and a worker that counts twice or not at all when it is back.
    """
    changes, present = PRESENT_AT_THE_END[name]
    # AutoDuDe chooses shorter steps, and gives a mean of the models that come to rest, which is as far back as they moved
    run = simulate(UNBIASED[row], *changes, updates=560 * 5 if row == "auto" else 560)
    rests = run.state.z if row == "auto" else run.x
    assert float(rests) == pytest.approx(6 * sum(present) / len(present), abs=AT_REST)
    assert set(run.state.present) == present
    # the last one's gradient tends to zero, and the audit is relative to it
    assert run.audit is None or len(present) == 1 or run.audit <= audit(run)


@pytest.mark.numeric
@pytest.mark.parametrize("changes", [[leave(2, 10.0)], [join(2, 10.25)]], ids=["left", "joined"])
def test_vanilla_weighs_the_workers_present_by_their_speeds(changes):
    """Under vanilla ASGD the workers present count by their speeds from the change on.

    Catches a job of a worker that left, and a worker that joins and gets no job.
    """
    # at speeds 1, 1/2 and 1/4, in whole periods: the read points average to 6 (1/2) / (3/2), or with worker 2 to 6 / (7/4)
    expected = 2 if changes == [leave(2, 10.0)] else 24 / 7
    run, models = archive(dd.VanillaASGD(4 * LR), Q3, dd.SimulatedFleet(SPEEDS, changes=changes), updates=700)
    reads = [float(models[version]) for version in run.trace.version[-210:]]
    assert np.mean(reads) == pytest.approx(expected, abs=AT_REST)


@pytest.mark.numeric
@pytest.mark.parametrize(("moment", "limit"), [(4.5, 9.0), (0.5, 3.0)], ids=["after its report", "before"])
def test_mifa_keeps_the_last_gradient_of_an_absent_worker(moment, limit):
    """Under MIFA the last gradient of a worker that left goes on counting; one that never reported does not count.

    Catches a memory that is erased when its worker leaves.
    """
    # worker 2 reports at w = 0 alone, -12 for good: (w - 0) + (w - 6) - 12 = 0; without it (w - 0) + (w - 6) = 0
    run = simulate(dd.MIFA(STEP), leave(2, moment), updates=900)
    assert float(run.x) == pytest.approx(limit, abs=AT_REST)


@pytest.mark.numeric
@pytest.mark.parametrize(("absent", "limit"), [(2, 3.0), (1, 6.0)])
def test_a_buffer_that_workers_wait_for_is_no_larger_than_the_fleet(absent, limit):
    """Where workers wait until the buffer is full, a buffer as large as the fleet shrinks with it.

    Catches workers that wait for ever for one that left.
    """
    # at 11 two of three have reported and wait: then 0 and 6 are left, or 0 and 12
    run = simulate(dd.FedBuff(STEP, buffer=3, wait=True), leave(absent, 11.0), updates=560)
    assert float(run.x) == pytest.approx(limit, abs=AT_REST)


@pytest.mark.numeric
def test_a_worker_that_is_back_within_a_round_counts_once():
    """Under synchronous SGD a worker that reports, leaves and is back within one round counts once in it.

    Catches two gradients of one worker in a round.
    """
    # from 100 with step 1 the mean of the three gradients leads to the mean of 0, 6, 12
    problem = dd.Quadratic([[0.0], [6.0], [12.0]], start=[100.0])
    run = simulate(
        dd.SyncSGD(1.0),
        leave(0, 2.0),
        join(0, 2.5),
        problem=problem,
        speeds=dd.FixedSpeeds([1.0, 3.0, 10.0]),
        updates=1,
    )
    assert float(run.x) == pytest.approx(6, abs=rounding(8) * 100)


def test_ca2fl_drops_the_cached_gradient_of_a_worker_that_leaves():
    """CA2FL forgets the gradient that a worker has put into the cache and the buffer when that worker leaves.

    Catches a buffer or a cache that still holds what the worker sent.
    """
    # worker 1 reports -100 at 1.5 and leaves: three of worker 0's zeros are left, so nothing may move
    problem, speeds = dd.Quadratic([[0.0], [100.0]]), dd.FixedSpeeds([1.0, 1.5])
    run = simulate(dd.algorithms.CA2FL(0.1, buffer=4), leave(1, 1.6), problem=problem, speeds=speeds, updates=1)
    assert float(run.x) == 0.0


@pytest.mark.numeric
def test_saga_is_unbiased_about_a_worker_that_has_just_joined():
    """SAGA's direction is unbiased also for a worker that has joined and has no gradient in the table yet.

    Catches a correction by a gradient that is not in the table.
    """
    # table 10, 20 and nothing yet of worker 2; at gradients 10, 20, 30 the mean of the three directions is 20
    method, steps = dd.algorithms.SAGA(1.0), []
    for worker, gradient in enumerate((10.0, 20.0, 30.0)):
        s = method.init(torch.zeros(1), 3, dd.Draws(0, "server"))
        method.leave(s, 2)
        for known, value in enumerate((10.0, 20.0)):
            method.step(s, dd.Arrival(dd.Job(known, 0, 0), torch.tensor([value]), 1.0, 1.0, 0.0))
        method.join(s, 2)
        before = float(s.x)
        method.step(s, dd.Arrival(dd.Job(worker, 1, 1), torch.tensor([gradient]), 2.0, 1.0, 0.0))
        steps.append(before - float(s.x))
    assert sum(steps) / 3 == pytest.approx(20.0, rel=rounding(16, torch.float32), abs=0)


# Jobs and times -------------------------------------------------------------------------------------------------------


def test_the_job_of_a_worker_that_left_never_arrives():
    """A worker that leaves takes its job along, and starts a new one at the current model when it is back; its gradient is
    in use until it leaves, and again from its next arrival on.

    Catches a job that goes on after its worker's return, and delays that count through an absence.
    """
    run = simulate(dd.DuDe(LR), leave(2, 5.0), join(2, 7.0), time=20.0)
    own = run.trace.worker == 2
    # draw 1, under way from 4 to 8, is lost; draw 2 starts at 7
    assert run.trace.time[own].tolist() == [4.0, 11.0, 15.0, 19.0] and run.trace.draw[own].tolist() == [0, 2, 3, 4]
    assert [(e["kind"], e["worker"], e["time"]) for e in run.trace.events] == [("left", 2, 5.0), ("joined", 2, 7.0)]
    # update t is arrival t + 2: worker 2 is in the first, and again from its second arrival on
    back = np.arange(len(run.trace)) >= np.flatnonzero(own)[1]
    assert ((delay_grids(run.trace, 3)[0][:, 2] > 0) == (back | (run.trace.time < 5))[2:]).all()


def test_fedfix_sleeps_while_no_worker_is_present():
    """FedFix orders no ticks while the whole fleet is absent, and goes on when a worker is back.

    Catches ticks without end in an empty fleet.
    """
    absences = announced([(worker, 5.5, 100.25) for worker in range(3)])
    run = simulate(dd.algorithms.FedFix(LR), *absences, updates=200)
    wakes = [event["time"] for event in run.trace.events if event["kind"] == "wake"]
    # the tick at 6 was ordered before; the next comes when they are back, and then ticks are at whole seconds again
    assert wakes == [*range(1, 7), 100.25, *range(101, 101 + len(wakes) - 7)] and len(wakes) > 200


def test_fedfix_counts_no_ticks_of_an_absence():
    """Under FedFix a gradient is weighted by the ticks its job took, not by those of an absence before it.

    Catches a weight that grows with the time a worker was absent.
    """
    # both are absent from 10 to 1000: weighted by 990 ticks, a step of 0.05 would lead far beyond 6
    absences = announced([(0, 10.0, 1000.0), (1, 10.0, 1000.0)])
    fleet = dd.SimulatedFleet(dd.FixedSpeeds([1.0, 1.0]), changes=absences)
    _, models = archive(dd.algorithms.FedFix(0.05), dd.Quadratic([[0.0], [6.0]]), fleet, updates=40)
    assert max(float(x) for x in models) < 6.0


def test_fedfix_has_one_job_per_tick_of_a_worker_that_returned():
    """A worker that reports, leaves and returns between two ticks of FedFix gets one more job, and then one per tick.

    Catches two jobs in one period.
    """
    problem, speeds = dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1.0, 1.0])
    method = dd.algorithms.FedFix(0.05, period=10.0)
    trace = simulate(method, leave(0, 2.0), join(0, 3.0), problem=problem, speeds=speeds, updates=6).trace
    assert trace.time[trace.worker == 0].tolist() == [1.0, 4.0, 11.0, 21.0, 31.0, 41.0, 51.0]


def test_a_method_without_rules_refuses():
    """A user's method that has no rule for absence refuses a run in which a worker leaves or joins, and names it.

    Catches a user's method that goes on with a worker that is not there.
    """
    for change in (leave(1, 3.0), join(1, 3.0)):
        with pytest.raises(dd.BadInput, match=r"worker 1 (left|joined), and Fresh has no rule for that"):
            simulate(Fresh(LR), change, updates=30)


def test_a_run_without_workers_fails():
    """A run whose workers have all left, and of which none will join again, fails and says so.

    Catches a run that never ends.
    """
    with pytest.raises(dd.RunFailed, match=r"all workers have left by time 5, after \d updates, and none joins again"):
        simulate(dd.VanillaASGD(LR), *announced([(worker, 5.0, None) for worker in range(3)]), updates=30)


# Silent workers -------------------------------------------------------------------------------------------------------

SILENT = dd.speeds.AwaySpeeds(SPEEDS, [(2, 0.0, None)])  # worker 2 never reports
SLOW = dd.FixedSpeeds([1.0, 2.0, 1000.0])  # worker 2 reports, but late


@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_run_fails_if_and_only_if_it_waits_for_a_silent_worker(row):
    """A run that would wait for a worker that will never report fails and names the worker, also if the others go on
    computing; any other run goes on, and so does every method that declares that it waits for no particular worker.

    Catches a run that never ends, a failure of a run that could go on, and a wrong `waits` of a class.
    """
    # it waits if it makes no 30 updates before a worker that is late reports; the others give 1500 gradients by then
    waits = dd.simulate(ALGORITHMS[row], Q3, SLOW, updates=30, time=999.0, evaluation=LAST).version < 30
    assert ALGORITHMS[row].waits or not waits
    try:
        assert dd.simulate(ALGORITHMS[row], Q3, SILENT, updates=30, evaluation=LAST).version == 30 and not waits
    except dd.RunFailed as error:
        assert waits and "waits for worker 2, who will never come back" in str(error)


def test_wakes_alone_do_not_keep_a_run_going():
    """A method that wakes by the clock fails, too, when all workers are silent for good.

    Catches a clock that goes on ticking without end.
    """
    speeds = dd.speeds.AwaySpeeds(SPEEDS, [(worker, 10.5, None) for worker in range(3)])
    with pytest.raises(dd.RunFailed, match=r"FedFix waits for workers 0, 1, 2, who will never come back"):
        dd.simulate(dd.algorithms.FedFix(LR), Q3, speeds, updates=30)


@pytest.mark.parametrize(
    "method",
    [dd.FedBuff(0.01, buffer=500), dd.algorithms.RennalaSGD(0.01, gradients=500), dd.algorithms.FedFix(0.01, period=0.004)],
    ids=label,
)
def test_a_long_wait_for_any_worker_is_no_failure(method):
    """Hundreds of arrivals or wakes without an update are no failure of a method that waits for no particular worker.

    Catches an alarm that counts arrivals alone.
    """
    speeds = dd.speeds.AwaySpeeds(dd.FixedSpeeds([1.0, 1.0]), [(1, 5.0, None)])
    assert dd.simulate(method, dd.Quadratic([[0.0], [6.0]]), speeds, updates=3).version == 3


@pytest.mark.numeric
@pytest.mark.parametrize("row", [row for row in UNBIASED if row.startswith("dude")])
def test_a_silent_worker_counts_with_its_last_gradient(row):
    """Under DuDe a worker that reported and then falls silent goes on counting with its last gradient.

    Catches a gradient that is dropped because it is old.
    """
    speeds = dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]])
    run = dd.simulate(UNBIASED[row], Q3, speeds, updates=900, evaluation=LAST)
    assert run.trace.version[run.trace.worker == 2].tolist() == [0]
    # its gradient at w = 0 is -12 for good, so (w - 0) + (w - 6) - 12 = 0
    assert float(run.x) == pytest.approx(9, abs=AT_REST)

"""Delays of the gradients in use, worker by worker: of absent workers, and of workers that report more than is used."""

from __future__ import annotations

import dualdelay as dd
from dualdelay.engine.delays import delay_grids, used_in
from tables import CASES, LR

PROBLEM, SPEEDS = CASES["q3"]


def test_a_worker_that_is_absent_between_two_updates_is_in_both() -> None:
    moment = dd.SimulatedFleet(SPEEDS, changes=[dd.speeds.leave(0, 4.25), dd.speeds.join(0, 4.5)])
    tau, _ = delay_grids(dd.simulate(dd.DuDe(LR, wait_for=3), PROBLEM, moment, time=20.0).trace, 3)
    assert (tau[:2] > 0).all()
    late = dd.SimulatedFleet(SPEEDS, changes=[dd.speeds.join(0, 0.5)])
    assert delay_grids(dd.simulate(dd.DuDe(LR), PROBLEM, late, time=20.0).trace, 3)[0][0].tolist() == [1, 1, 1]


def test_gradients_that_were_never_used_are_not_counted() -> None:
    # in the busy warm-up worker 0 reports forty times before worker 2 does, and its last gradient alone is used
    run = dd.simulate(dd.DuDe(LR, start="busy"), PROBLEM, dd.FixedSpeeds([1.0, 2.0, 40.0]), updates=1)
    assert len(run.trace) > 40
    assert run.delays.arrival_avg == 1.0
    sync = dd.simulate(dd.SyncSGD(LR), PROBLEM, SPEEDS, updates=4)
    assert set(used_in(sync.trace) - sync.trace.version) == {1}

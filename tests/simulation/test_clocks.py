"""Jobs that never end, because their worker is gone for good: they are never due, and a run that needs one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.simulation.availability import AwaySpeeds, announced
from helpers import heterogeneous
from tables import CASES, LR

problem, fixed = CASES["q3"]
GONE = AwaySpeeds(fixed, [(2, 9.0)])  # worker 2 ends jobs at 4 and 8, and never its third

WAITING: dict[str, tuple[Any, int, float]] = {  # updates that can be made, and when the last other job has ended
    "sync": (dd.SyncSGD(LR), 2, 10.0),
    "dude of three": (dd.DuDe(LR, wait_for=3), 2, 10.0),
    "mifa": (dd.MIFA(LR), 2, 10.0),
    "siag": (dd.SIAG(LR), 3, 7.0),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_run_that_waits_for_a_worker_that_is_gone_for_good_fails_and_is_saved(name: str, tmp_path: Path) -> None:
    method, version, now = WAITING[name]
    for run in (
        lambda: dd.simulate(method, problem, GONE, time=500.0),
        lambda: dd.simulate(method, problem, GONE, updates=50, folder=tmp_path / "run"),
        lambda: dd.resume(tmp_path / "run"),
    ):
        with pytest.raises(dd.RunFailed, match=rf"{type(method).__name__} waits for worker 2, who") as error:
            run()
        assert f"at time {now:g}, after {version} updates" in str(error.value)
    assert dd.resume(tmp_path / "run", updates=version).version == version, "up to there all is saved"


@pytest.mark.parametrize(
    ("method", "updates"), [(dd.VanillaASGD(LR), 300), (dd.DuDe(LR), 300), (dd.FedBuff(LR, buffer=2), 100)]
)
def test_methods_that_need_no_particular_worker_go_on(method: Any, updates: int) -> None:
    run = dd.simulate(method, problem, GONE, updates=updates)
    assert run.ended == "updates"
    assert run.trace.time[run.trace.worker == 2].tolist() == [4.0, 8.0]
    timed = dd.simulate(method, problem, GONE, time=50.0)
    assert (timed.ended, timed.time) == ("time", 50.0)


@pytest.mark.numeric
def test_a_worker_that_is_gone_counts_with_its_last_gradient_and_one_that_left_does_not() -> None:
    # centers 0, 6 and 12: worker 2's only gradient is -12, taken at x = 0, and (x + (x - 6) - 12) / 3 = 0 at x = 9; without
    # it (x + (x - 6)) / 2 = 0 at x = 3. The slower of the two, 2/3 lr, leaves exp(-2/3 3000 / 64) = 1e-13 of the way.
    fleets = AwaySpeeds(fixed, [(2, 4.0)]), dd.SimulatedFleet(fixed, changes=announced([(2, 4.0)]))
    limits = [float(dd.simulate(dd.DuDe(LR), problem, fleet, updates=3000).x) for fleet in fleets]
    assert limits == pytest.approx([9.0, 3.0], abs=1e-9)


def test_every_worker_that_a_run_waits_for_is_named() -> None:
    with pytest.raises(dd.RunFailed, match=r"VanillaASGD waits for workers 0, 1, 2, who"):
        dd.simulate(dd.VanillaASGD(LR), problem, AwaySpeeds(fixed, [(w, 9.0) for w in range(3)]), updates=99)
    never = AwaySpeeds(fixed, [(2, 0.0)])
    with pytest.raises(dd.RunFailed, match="DuDe waits for worker 2, who"):  # its first update waits for all
        dd.simulate(dd.DuDe(LR), problem, never, updates=1)
    assert dd.simulate(dd.DuDe(LR, start="zeros"), problem, never, updates=9).version == 9


@pytest.mark.parametrize("method", [dd.UniformASGD(LR), dd.ShuffledASGD(LR)])
def test_jobs_queued_behind_one_that_never_ends_never_end(method: Any) -> None:
    with pytest.raises(dd.RunFailed, match="waits for worker 2, who"):  # one by one all jobs end up in its queue
        dd.simulate(method, heterogeneous(3), GONE, updates=1000)


def test_a_worker_whose_job_never_ends_is_freed_by_leaving() -> None:
    changes = [dd.speeds.leave(2, 20.0), dd.speeds.join(2, 30.0)]
    speeds = AwaySpeeds(fixed, [(2, 9.0, 25.0), (2, 34.5, None)])
    run = dd.simulate(dd.VanillaASGD(LR), problem, dd.SimulatedFleet(speeds, changes=changes), time=60.0)
    assert run.trace.time[run.trace.worker == 2].tolist() == [4.0, 8.0, 34.0]

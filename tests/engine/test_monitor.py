"""What loggers are called with: a run's vital signs and its evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.engine import monitor
from dualdelay.runs.names import label
from helpers import heterogeneous, stepping
from tables import LR

SPEEDS = dd.FixedSpeeds([1.0, 1.7, 2.9, 7.0])


class Clock:
    """Seconds that pass as a test says: ``tick`` of them each time that somebody looks."""

    def __init__(self) -> None:
        self.now, self.tick = 0.0, 2.0**-20

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """So slow that signs are logged at the end alone, however long a test takes."""
    clock = Clock()
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    yield clock


def logged(algorithm: Any, fleet: Any = SPEEDS, **options: Any) -> tuple[dd.Run, list[tuple[int, dict[str, float]]]]:
    """A run, and the versions and values that its logger was called with."""
    calls: list[tuple[int, dict[str, float]]] = []
    reporting = dd.Reporting(log=[lambda version, values: calls.append((version, dict(values)))])
    return dd.simulate(algorithm, heterogeneous(4), fleet, watch=reporting, **options), calls


METHODS = [
    dd.DuDe(LR),
    dd.DuDe(LR, wait_for=3),
    dd.DuDe(LR, start="busy"),
    dd.VanillaASGD(LR),
    dd.FedBuff(LR, buffer=3),
    dd.SyncSGD(LR),
]


@pytest.mark.parametrize("method", METHODS, ids=label)
@pytest.mark.parametrize("updates", [1, 2, 60])
def test_the_live_tau_max_is_that_of_the_trace(method: Any, updates: int) -> None:
    run, calls = logged(method, updates=updates)
    assert calls[-1][1]["tau_max"] == run.delays.tau_max


AWAY = [dd.speeds.leave(3, 20.0), dd.speeds.join(3, 26.0)]
SLOWEST = dd.SimulatedFleet(SPEEDS, changes=AWAY)  # it is away for a while, so the longest delay may be one from before


@pytest.mark.parametrize("method", [*METHODS, dd.algorithms.ACED(LR, max_delay=2)], ids=label)
@pytest.mark.parametrize("left", [20.0, 7.01, 8.7])  # 7.01 is right after a report, which an update may not have used
@pytest.mark.parametrize("time", [22.0, 25.0, 27.0, 45.0])
def test_the_live_tau_max_is_that_of_the_trace_where_workers_come_and_go(method: Any, time: float, left: float) -> None:
    changes = [dd.speeds.leave(3, left), dd.speeds.join(3, 26.0)]
    run, calls = logged(method, dd.SimulatedFleet(SPEEDS, changes=changes), time=time)
    assert calls[-1][1]["tau_max"] == run.delays.tau_max


@pytest.mark.parametrize("method", [*METHODS, dd.algorithms.ACED(LR, max_delay=2)], ids=label)
@pytest.mark.parametrize("times", [(2.0, 9.0), (22.0, 22.5), (25.0, 30.0), (27.0, 35.0)], ids=str)
def test_a_resumed_run_knows_of_the_delays_before(method: Any, times: tuple[float, float], tmp_path: Path) -> None:
    """Also of one that had made no update yet, or whose slowest worker is away, or has come back and not reported."""
    problem, calls = heterogeneous(4), list[dict[str, float]]()
    dd.simulate(method, problem, SLOWEST, time=times[0], folder=tmp_path / "run")
    reporting = dd.Reporting(log=[lambda version, values: calls.append(dict(values))])
    run = dd.resume(tmp_path / "run", problem=problem, time=times[1], watch=reporting)
    assert calls[-1]["tau_max"] == run.delays.tau_max


def test_the_signs_at_the_end_are_those_of_the_trace() -> None:
    changes = [dd.speeds.leave(3, 20.0), dd.speeds.join(3, 30.0)]
    run, calls = logged(dd.DuDe(LR), dd.SimulatedFleet(SPEEDS, changes=changes), time=50.0)
    version, signs = calls[-1]
    assert (version, signs["time"]) == (run.version, run.trace.time[-1])
    assert {kind: count for kind, count in signs.items() if kind.startswith("faults/") and count} == {
        "faults/left": 1.0,
        "faults/joined": 1.0,
    }
    rows = [(run.trace.worker == worker).nonzero()[0] for worker in range(4)]
    for worker, own in enumerate(rows):
        arrivals_per_update = signs[f"worker/{worker}/rate"] / signs["updates_per_second"]
        assert arrivals_per_update == pytest.approx(len(own) / run.version)
        assert signs[f"worker/{worker}/delay"] == run.trace.after[own[-1]] - run.trace.version[own[-1]]
    assert signs["loss"] == pytest.approx(sum(run.trace.loss[own[-1]] for own in rows) / 4)


def test_every_evaluation_is_logged_once_with_its_version() -> None:
    run, calls = logged(dd.DuDe(LR), time=50.0)
    evaluations = [(version, values["objective"]) for version, values in calls if "objective" in values]
    assert len(evaluations) > 10
    assert evaluations == list(zip(run.metrics.version.tolist(), run.metrics.objective.tolist(), strict=True))


@pytest.mark.parametrize("another", [True, False])
def test_a_logger_that_raises_is_reported_once_and_not_called_again(another: bool, caplog: Any) -> None:
    called, others = [], []

    def broken(version: int, values: Any) -> None:
        called.append(version)
        if version >= 20:
            raise OSError("no space left on device")

    log = [broken, lambda version, values: others.append(version)] if another else [broken]
    options = {"evaluation": dd.Evaluation(every=5), "watch": dd.Reporting(log=log)}
    run = dd.simulate(dd.DuDe(LR), heterogeneous(4), SPEEDS, updates=60, **options)
    assert run.version == 60 and called == [0, 5, 10, 15, 20]
    assert [note for note in run.notes if "broken: OSError: no space left" in note and "off at version 20" in note] != []
    assert len(caplog.records) == 1 and "was switched off" in caplog.text
    assert others[-1:] == ([60] if another else [])


def test_rates_are_those_since_the_last_signs_unless_that_was_a_moment_ago(clock: Clock) -> None:
    rates: list[float] = []
    watching: Any = None
    clock.tick = 0.0
    for count, loop in enumerate(stepping(dd.VanillaASGD(LR), heterogeneous(4), SPEEDS, 50)):  # an update each
        watching = watching or monitor.Monitor([lambda _, values: rates.append(values["updates_per_second"])], loop, 20.0)
        clock.now = count if count <= 20 else 20 + 2 * (count - 20)
        watching(loop, None)
    watching.log_signs(loop)
    # twenty updates in as many seconds, and then one in two; the last signs would come 18 seconds after those at 60: time
    # for a rate of their own; once more, four seconds later, the time before counts as well
    assert rates == [1.0, 0.5, 0.5, 0.5]
    clock.now += 4
    watching.log_signs(loop)
    assert rates[-1] == 9 / (18 + 4)

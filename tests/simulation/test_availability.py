"""Workers that are absent for a while or for good: unannounced, when their jobs pause, or announced, when they leave."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.simulation.availability import Absence, AwaySpeeds, announced, dropouts, on_off
from dualdelay.simulation.speeds import BurstySpeeds, ChangingSpeeds, DriftingSpeeds
from helpers import audit
from own import Fresh, Holes, Scenario, bits, centers, differences, four, refused
from tables import CASES, LR

few = settings(deadline=None, max_examples=60, derandomize=True)
eighths = st.integers(0, 160).map(lambda k: k / 8)
fixed = dd.FixedSpeeds([1.0, 2.0, 4.0])


@st.composite
def absences_of_one(draw: st.DrawFn) -> list[tuple[int, float, float | None]]:
    moments = sorted(draw(st.sets(eighths, max_size=8)))
    pairs = [(0, start, end) for start, end in zip(moments[::2], moments[1::2], strict=False)]
    return [*pairs, (0, moments[-1], None)] if len(moments) % 2 else pairs


def by_ticks(work: float, start: float, absences: list[Any]) -> float:
    """The time of a job, found an eighth of a second at a time."""
    now, left = start, work
    while left > 0:
        if now > 100:
            return math.inf
        left -= 0 if any(a <= now < (math.inf if b is None else b) for _, a, b in absences) else 1 / 8
        now += 1 / 8
    return now - start


@few
@given(absences=absences_of_one(), work=eighths.filter(bool), start=eighths)
def test_a_job_takes_its_work_and_the_absences_inside_it(absences: list[Any], work: float, start: float) -> None:
    assert AwaySpeeds(dd.FixedSpeeds([work]), absences).job(0, 0, start, 1) == by_ticks(work, start, absences)
    assert AwaySpeeds(dd.FixedSpeeds([1.0]), absences).job(0, 0, start, 3) == by_ticks(3.0, start, absences)


@few
@given(absences=absences_of_one(), work=eighths.filter(bool), start=eighths)
def test_models_in_one_another_act_at_once_in_any_order(absences: list[Any], work: float, start: float) -> None:
    plain, change = dd.FixedSpeeds([work]), ([3.0, 7.5], [[1.0], [2.0], [0.5]])
    outside = AwaySpeeds(ChangingSpeeds(plain, *change), absences)
    inside = ChangingSpeeds(AwaySpeeds(plain, absences), *change)
    assert inside.seconds(0, 0, start) == outside.seconds(0, 0, start)
    # away from 1 to 3, when its pace halves: after one second of work a second of work takes two
    once = AwaySpeeds(ChangingSpeeds(plain, [3.0], [[1.0], [2.0]]), [(0, 1.0, 3.0)])
    assert once.seconds(0, 0, 0.0) == (work if work <= 1 else 3 + 2 * (work - 1))


def test_absences_that_touch_are_one_and_their_order_does_not_matter() -> None:
    one = AwaySpeeds(fixed, [(1, 5.0, 6.0), (0, 2.0, 3.0), (0, 1.0, 2.0), (0, 3.0, None)])
    assert one.absences == ((0, 1.0, None), (1, 5.0, 6.0))
    assert one == AwaySpeeds(fixed, [Absence(0, 1.0), Absence(1, 5.0, 6.0)])
    assert announced([(0, 1.0, 2.0), (0, 2.0, 3.0)]) == [dd.speeds.leave(0, 1.0), dd.speeds.join(0, 3.0)]


def test_a_worker_absent_from_the_start_joins_late_or_never() -> None:
    changes = announced([(0, 0.0, 5.0), (1, 0.0, None), (2, 3.0, math.inf)])
    assert changes == [dd.speeds.leave(1, 0.0), dd.speeds.leave(2, 3.0), dd.speeds.join(0, 5.0)]
    fleet = dd.SimulatedFleet(fixed, changes=announced([(0, 0.0, 5.0), (1, 0.0, None)]))
    run = dd.simulate(dd.VanillaASGD(LR), CASES["q3"][0], fleet, time=12.0)
    assert run.trace.time[run.trace.worker == 0].tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert 1 not in run.trace.worker
    assert run.state.n == 2


def absent_by_changes(changes: list[Any], worker: int, time: float) -> bool:
    own = [change for change in changes if change.worker == worker]
    before = [change.kind for change in own if change.time <= time]
    return before[-1] == "left" if before else bool(own) and own[0].kind == "joined"


@pytest.mark.parametrize("absences", [[*on_off(3, 6.0, 3.0, 60.0), Absence(3, 25.0)], on_off(4, 6.0, 3.0, 60.0, seed=1)])
def test_announced_or_not_the_same_workers_are_absent_at_the_same_times(absences: list[Absence]) -> None:
    speeds, changes = AwaySpeeds(four, absences), announced(absences, 4)
    for worker in range(4):
        for time in np.linspace(0.0, 70.0, 300).tolist():
            absent = any(a <= time < (b or math.inf) for w, a, b in absences if w == worker)
            assert absent == (speeds.stretch(worker, time)[0] == math.inf)
            assert absent == absent_by_changes(changes, worker, time)
    for fleet in (speeds, dd.SimulatedFleet(four, changes=changes)):
        trace = dd.simulate(dd.VanillaASGD(LR), CASES["noisy"][0], fleet, time=60.0).trace
        assert len(trace) > 20
        arrivals = zip(trace.time, trace.worker, strict=True)
        assert [(time, worker) for time, worker in arrivals if absent_by_changes(changes, worker, time)] == []


@pytest.mark.numeric
@pytest.mark.parametrize("method", [dd.DuDe(LR), dd.DuDe(LR, wait_for=3, memory="workers"), dd.VanillaASGD(LR)])
def test_methods_go_on_after_times_when_no_worker_is_present(method: Any) -> None:
    changes = announced(on_off(4, 3.0, 9.0, 200.0))
    empty = [t for t in range(200) if all(absent_by_changes(changes, worker, t) for worker in range(4))]
    assert len(empty) > 30  # three quarters to the power of four of 200 seconds are 63
    run = dd.simulate(method, CASES["noisy"][0], dd.SimulatedFleet(four, changes=changes), time=200.0)
    assert run.ended == "time"
    assert run.trace.time[-1] > max(t for t in empty if t < 190)
    assert run.audit is None or run.audit <= audit(run)


def test_presence_and_absence_have_their_means_from_the_first_moment() -> None:
    n, on, off = 3000, 8.0, 2.0
    absences = on_off(n, on, off, 100.0, seed=4)
    error = 4 * math.sqrt(0.2 * 0.8 / n)
    for time in (0.0, 1.0, 50.0, 99.0):
        away = sum(start <= time < end for _, start, end in absences)
        assert away / n == pytest.approx(0.2, abs=error)
    lengths = [end - start for _, start, end in absences if start > 0]
    assert np.mean(lengths) == pytest.approx(off, abs=4 * off / math.sqrt(len(lengths)))
    assert np.std(lengths) == pytest.approx(off, rel=0.05)
    assert len(absences) == pytest.approx(n * (0.2 + 0.8 * 100 / on), rel=0.02)
    assert all(start < 100.0 for _, start, _ in absences)


def test_a_longer_time_or_more_workers_only_add_absences() -> None:
    short, long = on_off(5, 4.0, 2.0, 30.0), on_off(5, 4.0, 2.0, 90.0)
    assert short == [one for one in long if one.start < 30.0]
    assert on_off(5, 4.0, 2.0, 30.0, seed=1) != short
    assert on_off(9, 4.0, 2.0, 30.0)[: len(short)] == short


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.04, 0), (0.05, 1), (0.34, 3), (1.0, 10)])
def test_a_share_of_the_workers_drops_out_for_good(share: float, count: int) -> None:
    gone = dropouts(10, share, 50.0)
    assert len({one.worker for one in gone}) == len(gone) == count
    assert all(0 < one.start < 50.0 and one.end is None for one in gone)


def test_every_worker_is_as_likely_to_drop_out_and_at_any_time() -> None:
    many = [dropouts(4, 0.5, 2.0, seed) for seed in range(1500)]
    for worker in range(4):
        share = np.mean([any(one.worker == worker for one in gone) for gone in many])
        assert share == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(1500))
    starts = [one.start for gone in many for one in gone]
    assert np.mean(starts) == pytest.approx(1.0, abs=4 * 2 / math.sqrt(12 * len(starts)))
    assert np.var(starts) == pytest.approx(4 / 12, rel=0.08)


absences = on_off(4, 5.0, 2.0, 40.0)
nested = AwaySpeeds(DriftingSpeeds(BurstySpeeds(four, 4.0, 2.0, seed=1), 0.8, 2.0, seed=1), absences)
gone_for_good = AwaySpeeds(four, [(1, 6.0, None), (3, 0.0, 4.0)])
SCENARIOS: dict[str, Scenario] = {
    "drifting, bursty and away": Scenario(dd.DuDe(LR), speeds=nested),
    "gone, vanilla": Scenario(dd.VanillaASGD(LR), speeds=gone_for_good),
    "gone, dude": Scenario(dd.DuDe(LR, memory="workers"), speeds=gone_for_good),
    "gone, uniform": Scenario(dd.UniformASGD(LR), Holes(centers, noise=0.5), AwaySpeeds(fixed, [(1, 30.0)]), updates=12),
    "announced": Scenario(dd.DuDe(LR), speeds=dd.SimulatedFleet(four, changes=announced(absences))),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_and_resumed_or_replayed_the_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    straight = scenario.run(folder=tmp_path / "straight")
    arrivals = len(straight.trace)
    for count in (arrivals // 3, 2 * arrivals // 3):
        scenario.killed(tmp_path / f"{count}", count)
        assert differences(dd.resume(tmp_path / f"{count}", problem=scenario.again), straight) == []
    again, expected = bits(dd.replay(tmp_path / "straight", scenario.again)), bits(straight)
    assert [key for key in expected if key.startswith(("trace", "weights")) and expected[key] != again[key]] == []
    config = (tmp_path / "straight" / "config.json").read_text()
    json.loads(config, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no triple": (lambda: announced([5]), "absences[0] is 5; expected (worker, start, end)"),
    "four numbers": (lambda: announced([(0, 1, 2, 3)]), "absences[0] is (0, 1, 2, 3)"),
    "a word": (lambda: announced([(0, "soon", None)]), "absences[0] is (0, 'soon', None)"),
    "no worker": (lambda: announced([("x", 1, 2)]), "absences[0]: worker is 'x'; expected a whole number"),
    "unknown worker": (lambda: AwaySpeeds(fixed, [(3, 1, 2)]), "absences[0]: worker is 3; expected a whole number, 0..2"),
    "infinite start": (lambda: announced([(0, math.inf)]), "absences[0]: start is inf"),
    "no length": (lambda: announced([(0, 1, 1)]), "absences[0]: end is 1; expected a time after its start, 1"),
    "overlap": (lambda: announced([(0, 1, 5), (0, 2, 3)]), "absences[1]: worker 0 is away from 2"),
    "on": (lambda: on_off(2, 0, 1, 5), "on is 0"),
    "until": (lambda: on_off(2, 1, 1, math.inf), "until is inf"),
    "workers": (lambda: on_off(0, 1, 1, 5), "workers is 0"),
    "too many": (lambda: on_off(2, 1e-6, 1e-6, 100.0), "which makes about 1e+08 absences until 100"),
    "share": (lambda: dropouts(3, 1.5, 5), "share is 1.5; expected a number from 0 to 1"),
    "dropouts until": (lambda: dropouts(3, 0.5, 0), "until is 0"),
    "seed": (lambda: dropouts(3, 0.5, 1.0, seed=0.5), "seed is 0.5"),
    **{f"absences {value}": (lambda value=value: announced(value), "absences") for value in (5, math.nan)},
    **{f"an absence {value}": (lambda value=value: announced([value]), "absences[0] is") for value in (math.nan, None)},
    "a start beyond numbers": (lambda: announced([(0, 10**400)]), "absences[0]"),
    "no length at all": (lambda: on_off(3, 1e-320, 1e-320, 1.0), "absences until"),
    "a trillion workers": (lambda: on_off(10**12, 1.0, 1.0, 1.0), "workers"),
    "a trillion dropouts": (lambda: dropouts(10**12, 0.5, 1.0), "workers"),
}


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", REFUSED)
def test_absences_that_cannot_be_are_refused(name: str) -> None:
    refused(*REFUSED[name])


CHANGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    **{
        f"{value}": (value, ("changes", "expected", "dd.speeds.leave("))
        for value in (math.nan, 5, "left", dd.speeds.leave(0, 1.0), [math.nan], [None], ["left"], [("left", 0)])
    },
    "no such kind": ([("gone", 0, 1.0)], ("changes", "expected")),
    "a text for a time": ([("left", 0, "1")], ("changes", "expected")),
    "no such worker": ([dd.speeds.leave(3, 1.0)], ("3", "0..2")),
    "left twice": ([dd.speeds.leave(0, 2.0), dd.speeds.leave(0, 1.0)], ("worker 0", "twice", "2.0")),
    "joined twice": ([dd.speeds.join(1, 1.0), dd.speeds.join(1, 3.0)], ("worker 1", "twice", "3.0")),
    "never": ([dd.speeds.leave(0, math.inf)], ("inf", "zero or more")),
    "before the start": ([dd.speeds.leave(0, -1.0)], ("-1.0", "zero or more")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_cannot_be_are_refused(name: str) -> None:
    changes, words = CHANGES[name]
    refused(lambda: dd.simulate(dd.DuDe(LR), CASES["q3"][0], dd.SimulatedFleet(fixed, changes=changes), updates=9), *words)


@pytest.mark.parametrize("change", [dd.speeds.leave(0, 5.0), dd.speeds.join(0, 5.0)], ids=["leave", "join"])
def test_a_method_without_a_rule_for_a_worker_that_leaves_or_joins_is_refused(change: Any) -> None:
    fleet = dd.SimulatedFleet(fixed, changes=[change])
    refused(lambda: dd.simulate(Fresh(LR), CASES["q3"][0], fleet, updates=9), "worker 0", "Fresh has no rule")


def test_changes_by_numbers_of_numpy_are_recorded_as_those_of_python(tmp_path: Path) -> None:
    numpys = [dd.speeds.leave(np.int64(0), np.float32(2.5)), dd.speeds.join(torch.tensor(0), np.float64(4.0))]
    pythons = [dd.speeds.leave(0, 2.5), dd.speeds.join(0, 4.0)]
    one, other = (
        dd.simulate(
            dd.DuDe(LR), CASES["q3"][0], dd.SimulatedFleet(fixed, changes=changes), updates=9, folder=tmp_path / name
        )
        for name, changes in (("one", numpys), ("other", pythons))
    )
    assert one.trace.events == other.trace.events != ()
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "other" / "config.json").read_bytes()

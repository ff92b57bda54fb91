"""Workers as they are: away for a while or for good, drifting, in bursts, and as they were measured."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.runs.names import describe, rebuild
from dualdelay.runs.seeds import seeded_speeds
from dualdelay.simulation import SPEEDS
from dualdelay.simulation.availability import Absence, AwaySpeeds, announced, dropouts, on_off
from dualdelay.simulation.speeds import BurstySpeeds, DriftingSpeeds
from flat import simulate
from helpers import audit, rounding, unlike
from own import Holes, Scenario, bits, centers, differences
from tables import CASES, LR

few = settings(deadline=None, max_examples=60, derandomize=True)
eighths = st.integers(0, 160).map(lambda k: k / 8)
fixed = dd.FixedSpeeds([1.0, 2.0, 4.0])
chance = dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1)
GONE = [(2, 9.0, math.inf)]  # in q3 worker 2 ends jobs at 4 and 8, and never its third


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
def test_a_job_takes_its_work_and_the_time_away_inside_it(absences: list[Any], work: float, start: float) -> None:
    assert AwaySpeeds(dd.FixedSpeeds([work]), absences).job(0, 0, start, 1) == by_ticks(work, start, absences)
    assert AwaySpeeds(dd.FixedSpeeds([1.0]), absences).job(0, 0, start, 3) == by_ticks(3.0, start, absences)


@few
@given(absences=absences_of_one(), work=eighths.filter(bool), start=eighths)
def test_models_of_pace_in_one_another_act_at_once_in_any_order(absences: list[Any], work: float, start: float) -> None:
    plain, change = dd.FixedSpeeds([work]), ([3.0, 7.5], [[1.0], [2.0], [0.5]])
    inside, outside = (
        AwaySpeeds(dd.speeds.ChangingSpeeds(plain, *change), absences),
        dd.speeds.ChangingSpeeds(AwaySpeeds(plain, absences), *change),
    )
    assert inside.seconds(0, 0, start) == outside.seconds(0, 0, start)
    # in the time that only passes while the worker is there, pace and work are those of a worker that never is away
    once = AwaySpeeds(dd.speeds.ChangingSpeeds(plain, [3.0], [[1.0], [2.0]]), [(0, 1.0, 3.0)])
    assert once.seconds(0, 0, 0.0) == (work if work <= 1 else 3 + 2 * (work - 1))


def test_a_job_that_ends_with_its_stretch_but_for_rounding_ends_there() -> None:
    # 4.6 * 5.6 is above the room by one bit, and 4.6 - room / 5.6 is zero: there is nothing left to wait for
    room = math.nextafter(4.6 * 5.6, 0.0)
    slow = dd.speeds.ChangingSpeeds(dd.FixedSpeeds([4.6]), [room], [[5.6], [1.0]])
    assert room < 4.6 * 5.6
    assert AwaySpeeds(slow, [(0, room, None)]).seconds(0, 0) == room


def test_absences_that_touch_are_one_and_their_order_does_not_matter() -> None:
    one = AwaySpeeds(fixed, [(1, 5.0, 6.0), (0, 2.0, 3.0), (0, 1.0, 2.0), (0, 3.0, None)])
    assert one.absences == ((0, 1.0, None), (1, 5.0, 6.0))
    assert one == AwaySpeeds(fixed, [Absence(0, 1.0), Absence(1, 5.0, 6.0)])
    assert announced([(0, 1.0, 2.0), (0, 2.0, 3.0)]) == [dd.speeds.leave(0, 1.0), dd.speeds.join(0, 3.0)]


def test_who_is_away_from_the_start_joins_late_and_who_never_comes_never_joins() -> None:
    assert announced([(0, 0.0, 5.0), (1, 0.0, None), (2, 3.0, math.inf)]) == [
        dd.speeds.leave(1, 0.0),
        dd.speeds.leave(2, 3.0),
        dd.speeds.join(0, 5.0),
    ]
    run = simulate(dd.VanillaASGD(LR), *CASES["q3"], time=12.0, changes=announced([(0, 0.0, 5.0), (1, 0.0, None)]))
    assert run.trace.time[run.trace.worker == 0].tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert 1 not in run.trace.worker
    assert run.state.n == 2


def away_by_changes(changes: list[Any], worker: int, time: float) -> bool:
    mine = [change for change in changes if change.worker == worker]
    before = [change.kind for change in mine if change.time <= time]
    return before[-1] == "left" if before else bool(mine) and mine[0].kind == "joined"


@pytest.mark.parametrize("seed", range(3))
def test_both_meanings_agree_about_who_is_away_when(seed: int) -> None:
    absences = on_off(4, 6.0, 3.0, 60.0, seed) if seed else [*on_off(3, 6.0, 3.0, 60.0), *dropouts(1, 1.0, 60.0)]
    absences = [one._replace(worker=3) if one.end is None else one for one in absences]
    speeds, changes = AwaySpeeds(chance, absences), announced(absences, 4)
    for worker in range(4):
        for time in np.linspace(0.0, 70.0, 300).tolist():
            away = speeds.stretch(worker, time)[0] == math.inf
            assert away == away_by_changes(changes, worker, time)
            assert away == any(a <= time < (b or math.inf) for w, a, b in absences if w == worker)
    for options in ({"speeds": speeds}, {"speeds": chance, "changes": changes}):
        trace = simulate(dd.VanillaASGD(LR), CASES["noisy"][0], **options, time=60.0).trace
        assert len(trace) > 20
        inside = [(t, w) for t, w in zip(trace.time, trace.worker, strict=True) if away_by_changes(changes, w, t)]
        assert inside == []


@pytest.mark.numeric
@pytest.mark.parametrize("method", [dd.DuDe(LR), dd.DuDe(LR, wait_for=3, memory="workers"), dd.VanillaASGD(LR)])
def test_methods_that_let_workers_go_live_with_workers_that_come_and_go(method: Any) -> None:
    changes = announced(on_off(4, 3.0, 9.0, 200.0))  # at times nobody is there
    run = dd.simulate(method, CASES["noisy"][0], dd.SimulatedFleet(chance, changes=changes), time=200.0)
    assert run.ended == "time"
    assert run.version > 30
    assert run.audit is None or run.audit <= audit(run)


def test_on_and_off_have_their_means_from_the_first_moment() -> None:
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


def test_a_longer_time_only_adds_absences() -> None:
    short, long = on_off(5, 4.0, 2.0, 30.0), on_off(5, 4.0, 2.0, 90.0)
    assert short == [one for one in long if one.start < 30.0]
    assert on_off(5, 4.0, 2.0, 30.0, seed=1) != short
    assert on_off(9, 4.0, 2.0, 30.0)[: len(short)] == short


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.04, 0), (0.05, 1), (0.34, 3), (1.0, 10)])
def test_a_share_of_the_workers_drops_out_for_good(share: float, count: int) -> None:
    gone = dropouts(10, share, 50.0)
    assert len({one.worker for one in gone}) == len(gone) == count
    assert all(0 < one.start < 50.0 and one.end is None for one in gone)


def test_who_drops_out_and_when_is_uniform() -> None:
    many = [dropouts(4, 0.5, 2.0, seed) for seed in range(1500)]
    for worker in range(4):
        share = np.mean([any(one.worker == worker for one in gone) for gone in many])
        assert share == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(1500))
    starts = [one.start for gone in many for one in gone]
    assert np.mean(starts) == pytest.approx(1.0, abs=4 * 2 / math.sqrt(12 * len(starts)))
    assert np.var(starts) == pytest.approx(4 / 12, rel=0.08)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9, 1.0])
def test_drift_is_stationary_with_its_spread_and_correlation(keep: float) -> None:
    n, spread = 4000, 0.5
    speeds = DriftingSpeeds(dd.FixedSpeeds([2.0] * n), spread=spread, every=8.0, keep=keep, seed=3)
    logs = np.array([[math.log(speeds.stretch(w, 8.0 * k)[0]) for k in (0, 1, 2, 6)] for w in range(n)])
    error = 4 / math.sqrt(n)
    assert logs.mean(0) == pytest.approx([0.0] * 4, abs=spread * error)
    assert logs.std(0) == pytest.approx([spread] * 4, rel=error)
    correlations = np.corrcoef(logs.T)
    assert correlations[0] == pytest.approx([keep**k for k in (0, 1, 2, 6)], abs=error)
    assert correlations[1, 2] == pytest.approx(keep, abs=error)
    assert np.exp(logs).mean() == pytest.approx(math.exp(spread**2 / 2), rel=error)


def test_a_job_in_a_drift_takes_what_its_stretches_say() -> None:
    speeds = DriftingSpeeds(dd.FixedSpeeds([10.0]), every=2.0, seed=5)
    end = 1.0 + speeds.seconds(0, 0, 1.0)
    edges = [1.0, *(2.0 * k for k in range(1, math.ceil(end / 2))), end]
    done = sum((b - a) / speeds.stretch(0, a)[0] for a, b in pairwise(edges))
    assert done == pytest.approx(10.0)
    assert len(edges) > 4


def test_bursts_have_their_share_of_the_time_and_their_slowness() -> None:
    n, usual, burst, factor = 3000, 6.0, 2.0, 8.0
    speeds = BurstySpeeds(dd.FixedSpeeds([1.0] * n), usual, burst, factor, seed=2)
    for time in (0.0, 3.0, 40.0):
        inside = np.mean([speeds.stretch(worker, time)[0] == factor for worker in range(n)])
        assert inside == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / n))
    assert {speeds.stretch(worker, 5.0)[0] for worker in range(n)} == {1.0, factor}
    # what is left of a state, from any moment on, has its mean
    for mean, wanted in ((usual, 1.0), (burst, factor)):
        left = [until - 5.0 for found, until in (speeds.stretch(worker, 5.0) for worker in range(n)) if found == wanted]
        assert np.mean(left) == pytest.approx(mean, abs=4 * mean / math.sqrt(len(left)))
    # a long job meets the mean pace: in a share of 3/4 of the time it is 1, in the rest 1/8
    long = BurstySpeeds(dd.FixedSpeeds([25_000.0]), usual, burst, factor, seed=2)
    assert long.seconds(0, 0) == pytest.approx(25_000 / (0.75 + 0.25 / factor), rel=0.05)


NEUTRAL: dict[str, Callable[[dd.SpeedModel], dd.SpeedModel]] = {
    "no spread": lambda inner: DriftingSpeeds(inner, spread=0.0, every=0.3),
    "factor 1": lambda inner: BurstySpeeds(inner, usual=0.7, burst=0.4, factor=1.0),
    "never away": lambda inner: AwaySpeeds(inner, []),
    "away later": lambda inner: AwaySpeeds(inner, [(0, 1e6, 2e6), (3, 1e7, None)]),
    "the same pace": lambda inner: dd.speeds.ChangingSpeeds(inner, [0.3, 0.7, 1.1], [[1.0] * 4] * 4),
    "all": lambda inner: AwaySpeeds(DriftingSpeeds(BurstySpeeds(inner, 0.7, 0.4, 1.0), 0.0, 0.3), []),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_where_nothing_changes_the_times_are_those_of_the_inner_model_to_the_bit(name: str) -> None:
    speeds = NEUTRAL[name](chance)
    for worker in range(4):
        for draw in range(20):
            start = 0.37 * draw
            assert speeds.seconds(worker, draw, start) == chance.seconds(worker, draw, start)
            assert speeds.job(worker, draw, start, 3) == chance.job(worker, draw, start, 3)
    runs = [dd.simulate(dd.DuDe(LR), CASES["noisy"][0], model, updates=30) for model in (speeds, chance)]
    assert differences(*runs) == []


MODELS: dict[str, Callable[..., dd.SpeedModel]] = {
    "drifting": lambda inner=chance, by=1.0: DriftingSpeeds(inner, 0.8, 2.0 * by, seed=1),
    "bursty": lambda inner=chance, by=1.0: BurstySpeeds(inner, 4.0 * by, 2.0 * by, seed=1),
    "away": lambda inner=chance, by=1.0: AwaySpeeds(inner, [(w, a * by, b * by) for w, a, b in on_off(4, 5.0, 2.0, 40.0)]),
    "all three": lambda inner=chance, by=1.0: MODELS["away"](MODELS["drifting"](MODELS["bursty"](inner, by), by), by),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_questions_does_not_change_the_answers(name: str) -> None:
    questions = [(worker, draw, 1.7 * draw) for worker in range(4) for draw in range(25)]
    forth, back = MODELS[name](), MODELS[name]()
    asked = {question: forth.seconds(*question) for question in questions}
    assert {question: back.seconds(*question) for question in reversed(questions)} == asked
    assert {question: forth.seconds(*question) for question in questions} == asked


@pytest.mark.parametrize("name", MODELS)
def test_in_a_world_twice_as_slow_everything_takes_exactly_twice_as_long(name: str) -> None:
    slow = dd.speeds.ExponentialSpeeds([2.0, 1.0, 6.0, 3.0], seed=1)
    one = dd.simulate(dd.DuDe(LR), CASES["noisy"][0], MODELS[name](), updates=80)
    two = dd.simulate(dd.DuDe(LR), CASES["noisy"][0], MODELS[name](slow, 2.0), updates=80)
    assert (2 * one.trace.time == two.trace.time).all()
    assert (2 * one.trace.seconds == two.trace.seconds).all()
    assert one.x.equal(two.x)


@pytest.mark.parametrize("name", MODELS)
def test_time_in_a_changing_world_runs_forward(name: str) -> None:
    # who begins later at the same work is never done earlier
    speeds = MODELS[name](dd.FixedSpeeds([1.0, 2.0, 0.5, 0.25]))
    for worker in range(4):
        ends = [start + speeds.seconds(worker, 0, start) for start in np.linspace(0, 50, 400).tolist()]
        assert (np.diff(ends) >= -rounding(200) * max(ends)).all()  # a job has that many stretches at most


GONE_FOR_GOOD = AwaySpeeds(chance, [(1, 6.0, None), (3, 0.0, 4.0)])
CHANCES: dict[str, Scenario] = {
    **{name: Scenario(dd.DuDe(LR), speeds=make()) for name, make in MODELS.items()},
    "gone, vanilla": Scenario(dd.VanillaASGD(LR), speeds=GONE_FOR_GOOD),
    "gone, dude": Scenario(dd.DuDe(LR, memory="workers"), speeds=GONE_FOR_GOOD),
    "gone, uniform": Scenario(dd.UniformASGD(LR), Holes(centers, noise=0.5), AwaySpeeds(fixed, [(1, 30.0)]), updates=12),
    "announced": Scenario(dd.DuDe(LR), changes=announced(on_off(4, 5.0, 2.0, 40.0))),
}


@pytest.mark.parametrize("name", CHANCES)
def test_killed_and_resumed_or_replayed_the_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    scenario = CHANCES[name]
    straight = scenario.run(folder=tmp_path / "straight")
    arrivals = len(straight.trace)
    for count in (1, arrivals // 3, 2 * arrivals // 3, arrivals):
        scenario.killed(tmp_path / f"{count}", count)
        assert differences(dd.resume(tmp_path / f"{count}", problem=scenario.again), straight) == []
    again, expected = bits(dd.replay(tmp_path / "straight", scenario.again)), bits(straight)
    assert [key for key in expected if key.startswith(("trace", "weights")) and expected[key] != again[key]] == []
    config = (tmp_path / "straight" / "config.json").read_text()
    json.loads(config, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_rebuilt_from_its_description(name: str) -> None:
    speeds = MODELS[name]()
    back = rebuild("speeds", json.loads(json.dumps(describe(speeds))))
    assert back == speeds
    assert [back.seconds(2, k, 3.0 * k) for k in range(9)] == [speeds.seconds(2, k, 3.0 * k) for k in range(9)]


def test_a_run_s_seed_reaches_every_depth_but_where_a_model_has_its_own() -> None:
    speeds = AwaySpeeds(DriftingSpeeds(BurstySpeeds(dd.TruncatedNormalSpeeds(3)), seed=5), [(0, 1.0, 2.0)])
    expected = AwaySpeeds(
        DriftingSpeeds(BurstySpeeds(dd.TruncatedNormalSpeeds(3, seed=7), seed=7), seed=5), [(0, 1.0, 2.0)]
    )
    assert seeded_speeds(speeds, 7) == expected
    assert seeded_speeds(fixed, 7) is fixed
    assert seeded_speeds(lambda seed: dd.TruncatedNormalSpeeds(3, std=1.0 + seed), 7) == dd.TruncatedNormalSpeeds(3, 8.0, 7)

    class Own(dd.SpeedModel):
        n = 3

        def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
            return 1.0

    own = Own()
    assert seeded_speeds(own, 7) is own


WAITING = {
    "sync": (dd.SyncSGD(LR), 2, 10.0),
    "dude of three": (dd.DuDe(LR, wait_for=3), 2, 10.0),
    "mifa": (dd.MIFA(LR), 2, 10.0),
    "siag": (dd.SIAG(LR), 3, 7.0),
}


@pytest.mark.parametrize("name", WAITING)
def test_who_waits_for_somebody_that_never_comes_back_says_so(name: str, tmp_path: Path) -> None:
    method, version, now = WAITING[name]
    speeds = AwaySpeeds(fixed, GONE)
    for options in ({"updates": 50}, {"time": 500.0}):
        with pytest.raises(dd.RunFailed, match=rf"{type(method).__name__} waits for worker 2, who") as first:
            simulate(method, CASES["q3"][0], speeds, **options)
    assert f"at time {now:g}, after {version} updates" in str(first.value)
    with pytest.raises(dd.RunFailed):
        dd.simulate(method, CASES["q3"][0], speeds, updates=50, folder=tmp_path / "run")
    with pytest.raises(dd.RunFailed) as second:
        dd.resume(tmp_path / "run")
    assert str(second.value) == str(first.value)
    run = dd.resume(tmp_path / "run", updates=version)  # up to there all is saved
    assert run.version == version


def test_methods_that_do_not_wait_go_on_without_it() -> None:
    speeds = AwaySpeeds(fixed, GONE)
    for method, updates in ((dd.VanillaASGD(LR), 300), (dd.DuDe(LR), 300), (dd.FedBuff(LR, buffer=2), 100)):
        run = dd.simulate(method, CASES["q3"][0], speeds, updates=updates)
        assert run.ended == "updates"
        assert run.trace.time[run.trace.worker == 2].tolist() == [4.0, 8.0]
        timed = dd.simulate(method, CASES["q3"][0], speeds, time=50.0)
        assert (timed.ended, timed.time) == ("time", 50.0)
    # who is never heard of again counts with its last gradient; who left does not count at all
    limit = dd.simulate(dd.DuDe(2.0**-6), CASES["q3"][0], AwaySpeeds(fixed, [(2, 4.0)]), updates=3000).x
    assert float(limit) == pytest.approx(9.0, abs=1e-9)
    left = dd.simulate(
        dd.DuDe(2.0**-6), CASES["q3"][0], dd.SimulatedFleet(fixed, changes=announced([(2, 4.0)])), updates=3000
    ).x
    assert float(left) == pytest.approx(3.0, abs=1e-9)


def test_everybody_who_is_waited_for_is_named() -> None:
    with pytest.raises(dd.RunFailed, match=r"VanillaASGD waits for workers 0, 1, 2, who"):
        dd.simulate(dd.VanillaASGD(LR), CASES["q3"][0], AwaySpeeds(fixed, [(w, 9.0) for w in range(3)]), updates=99)
    with pytest.raises(dd.RunFailed, match="DuDe waits for worker 2, who"):  # its first update waits for all
        dd.simulate(dd.DuDe(LR), CASES["q3"][0], AwaySpeeds(fixed, [(2, 0.0)]), updates=1)
    assert dd.simulate(dd.DuDe(LR, start="zeros"), CASES["q3"][0], AwaySpeeds(fixed, [(2, 0.0)]), updates=9).version == 9


@pytest.mark.parametrize("method", [dd.UniformASGD(LR), dd.ShuffledASGD(LR)])
def test_jobs_behind_one_that_never_ends_never_end(method: Any) -> None:
    with pytest.raises(dd.RunFailed, match="waits for worker 2, who"):  # one by one all jobs end up in its queue
        dd.simulate(method, unlike(3), AwaySpeeds(fixed, GONE), updates=1000)


def test_a_worker_whose_job_never_ends_is_freed_by_leaving() -> None:
    changes = [dd.speeds.leave(2, 20.0), dd.speeds.join(2, 30.0)]
    speeds = AwaySpeeds(fixed, [(2, 9.0, 25.0), (2, 34.5, None)])
    run = dd.simulate(dd.VanillaASGD(LR), CASES["q3"][0], dd.SimulatedFleet(speeds, changes=changes), time=60.0)
    assert run.trace.time[run.trace.worker == 2].tolist() == [4.0, 8.0, 34.0]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_measured_times_are_read_in_their_order(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.csv", "worker,seconds,site\n1,4,x\n0,1.5,y\n0,2,\n")
    assert dd.speeds.RecordedSpeeds(plain).times == ((1.5, 2.0), (4.0,))
    drawn = write(tmp_path / "b.CSV", "draw,worker,seconds\n1,0,2\n0,0,1.5\n7,1,4\n")
    assert dd.speeds.RecordedSpeeds(str(drawn)).times == ((1.5, 2.0), (4.0,))
    whole = parquet(tmp_path / "c.parquet", worker=[1, 0, 0], seconds=[4.0, 1.5, 2.0])
    assert dd.speeds.RecordedSpeeds(whole).times == ((1.5, 2.0), (4.0,))
    assert describe(dd.speeds.RecordedSpeeds(whole)) == {"name": "recorded", "times": [[1.5, 2.0], [4.0]]}


@pytest.mark.parametrize("name", ["exponential", *MODELS])
def test_a_runs_own_trace_gives_its_schedule_again(name: str, tmp_path: Path) -> None:
    speeds = chance if name == "exponential" else MODELS[name]()
    run = dd.simulate(dd.VanillaASGD(LR), CASES["noisy"][0], speeds, updates=150, folder=tmp_path / "run")
    read = dd.speeds.RecordedSpeeds(tmp_path / "run" / "trace.parquet")
    again = dd.simulate(dd.VanillaASGD(LR), CASES["noisy"][0], read, updates=150)
    for worker in range(4):
        mine, theirs = (r.trace.time[r.trace.worker == worker].tolist() for r in (run, again))
        assert theirs[: len(mine)] == mine[: len(theirs)]
    end = min(run.trace.time[run.trace.worker == worker].max() for worker in range(4))
    whole = int((run.trace.time <= end).sum())  # up to there nobody's times have run out
    assert whole > 50
    for column in ("time", "worker", "draw", "version", "fingerprint"):
        assert run.trace[column][:whole].tobytes() == again.trace[column][:whole].tobytes()


def test_a_folder_does_not_need_the_file_that_its_times_came_from(tmp_path: Path) -> None:
    times = write(tmp_path / "times.csv", "worker,seconds\n0,1\n1,2\n2,4\n")
    gone = write(tmp_path / "gone.csv", "worker,start,end\n0,3,5.5\n2,9,\n")
    speeds = AwaySpeeds(dd.speeds.RecordedSpeeds(times), gone)
    run = dd.simulate(dd.VanillaASGD(LR), CASES["q3"][0], speeds, updates=20, folder=tmp_path / "run")
    times.unlink()
    gone.unlink()
    assert dd.resume(tmp_path / "run", updates=30).version == 30
    assert dd.replay(tmp_path / "run").version == 30
    assert run.version == 20


def test_absences_are_read_from_either_kind_of_file(tmp_path: Path) -> None:
    expected = [(0, 1.5, 3.0), (1, 0.0, None), (2, 4.0, None)]
    text = write(tmp_path / "a.csv", "worker,start,end,why\n2,4,,left\n0,1.5,3,lunch\n1,0,inf,\n")
    file = parquet(tmp_path / "a.parquet", worker=[0, 1, 2], start=[1.5, 0.0, 4.0], end=[3.0, math.inf, None])
    for path in (text, str(text), file):
        assert list(AwaySpeeds(fixed, path).absences) == expected
        assert announced(path) == announced(expected)


RECORDED: dict[str, tuple[str, str]] = {
    "no such column": ("worker,time\n0,1\n", "'seconds'; expected the columns worker, seconds"),
    "a column twice": ("worker,seconds,seconds\n0,1,2\n", "no single column 'seconds'"),
    "no rows": ("worker,seconds\n", "has no rows"),
    "nothing": ("", "damaged or no csv file"),
    "a ragged row": ("worker,seconds\n0,1\n1,2,3\n", "Row #3"),
    "a gap": ("worker,seconds\n0,1\n2,1\n", "no row for worker 1, but one for worker 2"),
    "no number": ("worker,seconds\n0,1\n1,fast\n", "row 2: seconds is 'fast'; expected a number"),
    "an empty cell": ("worker,seconds\n0,1\n1,\n", "row 2: seconds is empty"),
    "negative": ("worker,seconds\n0,-1\n", "row 1: seconds is -1.0; expected a finite number above zero"),
    "infinite": ("worker,seconds\n0,inf\n", "row 1: seconds is inf"),
    "half a worker": ("worker,seconds\n0.5,1\n", "row 1: worker is 0.5; expected a whole number"),
    "a negative worker": ("worker,seconds\n-1,1\n", "row 1: worker is -1.0"),
    "a negative draw": ("worker,seconds,draw\n0,1,-2\n", "row 1: draw is -2.0"),
    "a job twice": ("worker,seconds,draw\n0,1,5\n0,2,5\n", "row 2: draw is 5; expected every job of worker 0 once"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_bad_file_of_times_is_refused_with_its_row(name: str, tmp_path: Path) -> None:
    text, words = RECORDED[name]
    path = write(tmp_path / "times.csv", text)
    with pytest.raises(dd.BadInput) as error:
        dd.speeds.RecordedSpeeds(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


ABSENT: dict[str, tuple[str, str]] = {
    "no end": ("worker,start\n0,1\n", "'end'; expected the columns worker, start, end"),
    "unknown worker": ("worker,start,end\n0,1,2\n3,1,2\n", "row 2: worker is 3; expected a whole number, 0..2"),
    "negative": ("worker,start,end\n0,-1,2\n", "row 1: start is -1; expected a finite time"),
    "no start": ("worker,start,end\n0,,2\n", "row 1: start is nan"),
    "no worker": ("worker,start,end\n,1,2\n", "row 1: worker is empty"),
    "backwards": ("worker,start,end\n0,5,2\n", "row 1: end is 2; expected a time after its start, 5"),
    "no number": ("worker,start,end\n0,1,never\n", "row 1: end is 'never'; expected a number"),
    "overlapping": (
        "worker,start,end\n0,4,9\n1,1,2\n0,1,5\n",
        "row 1: worker 0 is away from 4, but its absence from 1 lasts to 5",
    ),
    "after all": ("worker,start,end\n0,4,\n0,6,7\n", "row 2: worker 0 is away from 6, but its absence from 4 is for good"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_bad_file_of_absences_is_refused_with_its_row(name: str, tmp_path: Path) -> None:
    text, words = ABSENT[name]
    path = write(tmp_path / "away.csv", text)
    for refused in (lambda: AwaySpeeds(fixed, path), lambda: announced(path, 3)):
        with pytest.raises(dd.BadInput) as error:
            refused()
        assert words in str(error.value)
        assert str(path) in str(error.value)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda path: dd.speeds.RecordedSpeeds(path / "none.csv"), "there is no file"),
    "no kind of file": (lambda path: announced("away"), "'away' is no file that can be read; expected the name of a .csv"),
    "no parquet file": (lambda path: announced(write(path / "a.parquet", "worker")), "damaged or no parquet file"),
    "a date": (
        lambda path: announced(parquet(path / "b.parquet", worker=[0], start=["x"], end=[1])),
        "row 1: start is 'x'",
    ),
    "no triple": (lambda path: announced([5]), "absences[0] is 5; expected (worker, start, end)"),
    "four": (lambda path: announced([(0, 1, 2, 3)]), "absences[0] is (0, 1, 2, 3)"),
    "a word": (lambda path: announced([(0, "soon", None)]), "absences[0] is (0, 'soon', None)"),
    "worker a word": (lambda path: announced([("x", 1, 2)]), "absences[0]: worker is 'x'; expected a whole number"),
    "unknown worker": (
        lambda path: AwaySpeeds(fixed, [(3, 1, 2)]),
        "absences[0]: worker is 3; expected a whole number, 0..2",
    ),
    "infinite start": (lambda path: announced([(0, math.inf)]), "absences[0]: start is inf"),
    "no length": (lambda path: announced([(0, 1, 1)]), "absences[0]: end is 1; expected a time after its start, 1"),
    "overlap": (lambda path: announced([(0, 1, 5), (0, 2, 3)]), "absences[1]: worker 0 is away from 2"),
    "speeds": (lambda path: AwaySpeeds("fixed", []), "speeds is 'fixed'; expected a dd.SpeedModel"),
    "spread": (lambda path: DriftingSpeeds(fixed, spread=-1), "spread is -1; expected a number from 0 to 10"),
    "keep": (lambda path: DriftingSpeeds(fixed, keep=1.5), "keep is 1.5; expected a number from 0 to 1"),
    "every": (lambda path: DriftingSpeeds(fixed, every=0), "every is 0"),
    "usual": (lambda path: BurstySpeeds(fixed, usual=math.inf), "usual is inf"),
    "burst": (lambda path: BurstySpeeds(fixed, burst=0), "burst is 0"),
    "factor": (lambda path: BurstySpeeds(fixed, factor=0), "factor is 0"),
    "on": (lambda path: on_off(2, 0, 1, 5), "on is 0"),
    "until": (lambda path: on_off(2, 1, 1, math.inf), "until is inf"),
    "workers": (lambda path: on_off(0, 1, 1, 5), "workers is 0"),
    "share": (lambda path: dropouts(3, 1.5, 5), "share is 1.5; expected a number from 0 to 1"),
    "dropouts until": (lambda path: dropouts(3, 0.5, 0), "until is 0"),
    "seed": (lambda path: dropouts(3, 0.5, 1.0, seed=0.5), "seed is 0.5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    make, words = WRONG[name]
    with pytest.raises(dd.BadInput) as error:
        make(tmp_path)
    assert words in str(error.value)


QUADRATIC = ["--problem", "quadratic[centers=[[0.0],[6.0],[12.0]]]"]


def shell(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def paced_by(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text())["speeds"])


def test_every_model_can_be_named_on_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = write(tmp_path / "speeds.csv", "worker,seconds\n0,1\n1,2\n2,4\n")
    gone = write(tmp_path / "away.csv", "worker,start,end\n0,3,5.5\n2,9,\n")
    normal = dd.TruncatedNormalSpeeds(3, std=2.0, seed=5)
    texts = {
        f"recorded[times={times}]": dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0]]),
        f"away[speeds=fixed[times=[1,2,4]],absences={gone}]": AwaySpeeds(fixed, gone),
        "away[speeds=truncated_normal[std=2],absences=[(0,3,5.5),(2,9,None)]]": AwaySpeeds(normal, gone),
        "drifting[speeds=truncated_normal[std=2],spread=0.3]": DriftingSpeeds(normal, 0.3, seed=5),
        "bursty[seed=8,speeds=drifting[speeds=truncated_normal[std=2,seed=9]]]": BurstySpeeds(
            DriftingSpeeds(dd.TruncatedNormalSpeeds(3, std=2.0, seed=9), seed=5), seed=8
        ),
    }
    for k, (text, speeds) in enumerate(texts.items()):
        folder = tmp_path / f"{k}"
        line = ["train", "vanilla[lr=0.01]", *QUADRATIC, "--speeds", text, "--updates", "9", "--seed", "5"]
        assert shell(*line, "--folder", str(folder)) == 0, capsys.readouterr().err
        assert paced_by(folder) == describe(speeds)
    assert (
        shell("train", "vanilla[lr=0.01]", *QUADRATIC, "--speeds", "away[speeds=fixed,absences=[]]", "--updates", "1") == 2
    )
    assert "fixed[times=[1,2]]" in capsys.readouterr().err


@pytest.mark.usefixtures("own_methods")
def test_absences_on_the_shell_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = write(tmp_path / "away.csv", "worker,start,end\n0,3,5.5\n2,9,\n")
    line = [*QUADRATIC, "--speeds", "fixed[times=[1,2,4]]", "--absences", str(gone), "--time", "20"]
    assert shell("train", "dude[lr=0.01]", *line, "--folder", str(tmp_path / "one")) == 0
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["changes"] == [list(change) for change in announced(gone)]
    assert shell("compare", "dude[lr=0.01]", "vanilla[lr=0.01]", *line, "--folder", str(tmp_path / "two")) == 0
    capsys.readouterr()
    assert shell("train", "fresh[lr=0.01]", *line, "--folder", str(tmp_path / "three")) == 2
    assert "Fresh has no rule" in capsys.readouterr().err
    gone.write_text("worker,start,end\n3,1,2\n")
    assert shell("train", "dude[lr=0.01]", *line, "--folder", str(tmp_path / "four")) == 2
    assert f"{gone}, row 1: worker is 3" in capsys.readouterr().err
    assert shell("train", "dude[lr=0.01]", *QUADRATIC, "--absences", str(gone), "--fleet", "ray", "--time", "1") == 2
    assert "--absences cannot be chosen for real workers" in capsys.readouterr().err


def test_who_never_comes_back_ends_a_run_on_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "away[speeds=fixed[times=[1,2,4]],absences=[(2,9,None)]]"
    line = ["train", "sync[lr=0.01]", *QUADRATIC, "--speeds", text, "--time", "50", "--folder", str(tmp_path / "run")]
    assert shell(*line) == 1
    assert "waits for worker 2" in capsys.readouterr().err


def test_the_list_shows_what_each_model_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell("list", "speeds") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in SPEEDS)
    for name, words in (
        ("away", "absences (needed)"),
        ("drifting", "keep (default 0.9)"),
        ("bursty", "factor (default 10"),
    ):
        assert shell("list", name) == 0
        out = capsys.readouterr().out
        assert words in out
        assert "speeds (needed): The times at factor 1." in out
        assert f"Write it as '{name}[speeds=..." in out


PAGE = (Path(dd.__file__).parents[2] / "docs" / "workers.md").read_text()


def test_everything_on_the_page_about_workers_works(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in re.findall(r"```csv (\S+)\n(.*?)```", PAGE, re.S):
        write(inside / name, text)
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(code, "page", "exec"), {})
    assert capsys.readouterr().out == "3 2\n"
    for line in "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.S)).splitlines():
        program, *words = shlex.split(line)
        assert program == "dualdelay"
        assert shell(*words) == 0, capsys.readouterr().err
    assert all(f"`{name}[" in PAGE for name in SPEEDS)

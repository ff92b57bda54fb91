"""A run that was stopped, anywhere and however often, ends with the bits of the run that was never stopped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.storage.folder import Folder
from own import FILES, OFTEN, SCENARIOS, Holes, Killed, Scenario, bits, content, differences, kill_at, refused
from tables import ALGORITHMS, CASES, LR
from transports import VirtualFleet

pytestmark = pytest.mark.usefixtures("own_methods")


def never(state: dd.State, arrival: dd.Arrival) -> None:
    raise AssertionError(f"{arrival.job} was computed again")


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_any_arrival_every_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """And resuming a finished run returns it and computes nothing."""
    scenario = SCENARIOS[name]
    run = scenario.run(folder=tmp_path / "straight")
    straight, arrivals = bits(run), len(run.trace)
    assert differences(dd.resume(tmp_path / "straight", problem=scenario.again, watch=(never,)), straight) == []
    everywhere = {1, *range(3, arrivals, max(1, arrivals // 4)), arrivals}
    for count in {arrivals // 2} if name in ALGORITHMS else everywhere:  # methods are many
        scenario.killed(tmp_path / f"{count}", count)
        resumed = dd.resume(tmp_path / f"{count}", problem=scenario.again)
        assert differences(resumed, straight) == [], f"killed at arrival {count}"


@pytest.mark.numeric
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_killed_again_and_again_the_run_ends_with_the_same_bits(data: st.DataObject, tmp_path_factory: object) -> None:
    scenario = Scenario(
        ALGORITHMS[data.draw(st.sampled_from(sorted(ALGORITHMS)))],
        *CASES[data.draw(st.sampled_from(sorted(CASES)))],
        updates=data.draw(st.integers(1, 14)),
        checkpoint_every=data.draw(st.integers(1, 5)),
        keep=data.draw(st.integers(1, 3)),
        evaluation=dd.Evaluation(data.draw(st.integers(1, 6)), data.draw(st.sampled_from([None, 8.0, 50.0]))),
        seed=data.draw(st.integers(0, 3)),
    )
    place = tmp_path_factory.mktemp("again")
    straight, stopped = scenario.run(folder=place / "straight"), False
    for count in data.draw(st.lists(st.integers(1, len(straight.trace)), max_size=5)):
        try:
            scenario.run(folder=place / "run", watch=(kill_at(count),), go_on=True)
        except Killed:
            stopped = True
    resumed = dd.resume(place / "run") if stopped else scenario.run(folder=place / "run", go_on=True)
    assert differences(resumed, straight) == []


@pytest.mark.parametrize("name", ["dude", "fedfix", *(name for name in SCENARIOS if name not in ALGORITHMS)])
def test_killed_while_it_writes_its_last_files_the_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    expected = bits(scenario.run(folder=tmp_path / "run"))
    for lost in (FILES[3:], FILES[1:]):  # the last, and all but the trace
        for file in lost:
            (tmp_path / "run" / file).unlink()
        assert differences(dd.resume(tmp_path / "run", problem=scenario.again), expected) == [], lost


@pytest.mark.parametrize(("k", "name"), list(enumerate(ALGORITHMS)))
def test_with_larger_totals_a_run_equals_the_longer_one(k: int, name: str, tmp_path: Path) -> None:
    totals = [({"updates": 9}, {"updates": 25}), ({"time": 6.0}, {"time": 15.0})][k % 2]  # by turns
    short, long = ({"updates": None, "time": None, **total} for total in totals)
    scenario = Scenario(ALGORITHMS[name], checkpoint_every=4, evaluation=replace(OFTEN, seconds=1.5))
    straight = scenario.run(**long, folder=tmp_path / "straight")
    first = scenario.run(**short, folder=tmp_path / "run")
    longer = dd.resume(tmp_path / "run", **long)
    assert len(longer.trace) > len(first.trace)
    assert differences(longer, straight) == []


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_killed_after_it_was_given_larger_totals_a_run_goes_on_to_them(count: int, tmp_path: Path) -> None:
    scenario = Scenario(dd.VanillaASGD(LR), checkpoint_every=4)
    straight = scenario.run(updates=33, folder=tmp_path / "straight")
    scenario.run(updates=10, folder=tmp_path / "run")
    with pytest.raises(Killed):
        dd.resume(tmp_path / "run", updates=33, watch=(kill_at(count),))
    assert differences(dd.resume(tmp_path / "run"), straight) == []


@pytest.mark.parametrize("short", [10, 15, 100])
def test_a_longer_run_stops_early_where_the_straight_one_does(short: int, tmp_path: Path) -> None:
    scenario = SCENARIOS["early stop at a checkpoint"]
    straight = scenario.run(updates=300, folder=tmp_path / "straight")
    assert (straight.ended, straight.version) == ("stop", 15)
    scenario.run(updates=short, folder=tmp_path / "run")
    assert differences(dd.resume(tmp_path / "run", updates=300), straight) == []


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    scenario = Scenario(dd.DuDe(LR), checkpoint_every=20)
    straight = scenario.run(folder=tmp_path / "straight")
    scenario.killed(tmp_path / "run", 15)
    assert not list((tmp_path / "run").glob("*/*"))
    arrivals = []
    resumed = dd.resume(tmp_path / "run", watch=(lambda state, arrival: arrivals.append(arrival),))
    assert len(arrivals) == len(straight.trace)
    assert differences(resumed, straight) == []


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
@pytest.mark.parametrize("kind", ["checkpoints", "trace"])
def test_killed_while_it_writes_a_checkpoint_the_run_goes_on_from_the_one_before(
    kind: str, share: float, tmp_path: Path
) -> None:
    scenario = Scenario(dd.DuDe(LR, memory="workers"))
    straight = scenario.run(folder=tmp_path / "straight")
    scenario.killed(tmp_path / "run", 20)
    newest = max((tmp_path / "run" / kind).iterdir())
    torn = newest.with_name(f".{newest.name}.part")
    torn.write_bytes(newest.read_bytes()[: int(share * newest.stat().st_size)])
    if kind == "checkpoints":  # killed before the rename, so the file itself is not there
        newest.unlink()
    resumed = dd.resume(tmp_path / "run")
    assert differences(resumed, straight) == []
    assert resumed.notes == ()  # an unfinished file is no damage
    assert not torn.exists()


@pytest.mark.parametrize("count", [12, 16, 22])
def test_ten_bad_gradients_in_a_row_are_counted_across_a_kill(count: int, tmp_path: Path) -> None:
    class Broken(dd.Quadratic):
        def gradient(self, x: torch.Tensor, worker: int, draw: int) -> tuple[torch.Tensor, float]:
            gradient, loss = super().gradient(x, worker, draw)
            return gradient * (torch.nan if worker == 1 and draw >= 4 else 1.0), loss

    scenario = Scenario(dd.VanillaASGD(LR), Broken(CASES["q3"][0].settings["centers"]), CASES["q3"][1], checkpoint_every=1)
    scenario.killed(tmp_path / "run", count, updates=99)
    with pytest.raises(dd.RunFailed) as straight:
        scenario.run(updates=99)
    with pytest.raises(dd.RunFailed) as resumed:
        dd.resume(tmp_path / "run", problem=scenario.problem)
    assert str(resumed.value) == str(straight.value)
    assert "number 10 in a row" in str(straight.value)


def test_a_run_that_fails_while_it_is_lengthened_is_not_finished(tmp_path: Path) -> None:
    scenario = Scenario(dd.DuDe(LR))
    scenario.run(tmp_path / "run", updates=10)
    with pytest.raises(ZeroDivisionError):
        dd.resume(tmp_path / "run", updates=20, watch=(lambda s, a: 1 // (15 - s.version),))
    assert differences(dd.resume(tmp_path / "run"), scenario.run(tmp_path / "straight", updates=20)) == []
    again = dd.replay(tmp_path / "run")
    assert (again.version, again.ended) == (20, "replay")


def test_a_total_that_was_passed_already_is_noted(tmp_path: Path) -> None:
    Scenario(dd.DuDe(LR)).run(tmp_path / "run", updates=20)
    run = dd.resume(tmp_path / "run", updates=5)
    assert "20 updates already" in run.notes[0] and run.version == 20


def test_a_time_that_was_passed_already_is_noted_and_metrics_stay_in_order(tmp_path: Path) -> None:
    before = Scenario(dd.DuDe(LR)).run(tmp_path / "run", updates=20)
    run = dd.resume(tmp_path / "run", time=before.time / 2)
    assert run.notes == (f"the run has come to time {before.time:g} already, more than {before.time / 2:g}",)
    assert (run.ended, run.time) == ("time", before.time) and np.array_equal(run.metrics.time, before.metrics.time)


class NeverStarted(VirtualFleet):
    """Real workers that nobody starts."""

    def connect(self, *_: Any) -> NoReturn:
        raise AssertionError("workers were started")


SHORTER: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the same": ({"updates": 20}, "updates", []),
    "fewer updates": ({"updates": 5}, "updates", ["the run has made 20 updates already, more than 5"]),
    "as many updates": ({"updates": 20, "time": 1e6}, "updates", []),
    "less time": ({"time": 0.01}, "time", ["the run has come to time {time:g} already, more than 0.01"]),
}


@pytest.mark.parametrize("what", SHORTER)
def test_real_workers_are_not_started_for_what_is_done_already(what: str, tmp_path: Path) -> None:
    """And the folder holds what was asked for last, so that the run can still be lengthened from there."""
    problem, folder = dd.Quadratic([[0.0, 1.0], [6.0, -2.0]], noise=0.3), tmp_path / "run"
    first = dd.train(dd.DuDe(LR), problem, VirtualFleet(), updates=20, folder=folder)
    dd.resume(folder, updates=7, fleet=NeverStarted())  # of which nothing is said later
    totals, ended, notes = SHORTER[what]
    run = dd.resume(folder, **totals, fleet=NeverStarted())
    assert (run.ended, list(run.notes)) == (ended, [note.format(time=first.time) for note in notes])
    assert differences(replace(run, ended=first.ended, notes=first.notes), first) == []
    loaded = dd.load(folder)
    assert (loaded.ended, loaded.notes) == (run.ended, run.notes)
    again = dd.resume(folder, fleet=NeverStarted())
    assert (again.ended, again.notes) == (run.ended, run.notes) and dd.replay(folder).same_bits
    longer = dd.resume(folder, updates=30, fleet=VirtualFleet())
    assert longer.version == 30 and longer.notes == ()


def test_real_workers_are_not_started_for_a_run_that_was_stopped_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = dd.Evaluation(every=1, early_stop=dd.EarlyStop(target=1e9))
    problem = dd.Quadratic([[0.0, 1.0], [6.0, -2.0]], noise=0.3)
    first = dd.train(dd.DuDe(LR), problem, VirtualFleet(), updates=50, evaluation=evaluation, folder=tmp_path / "run")
    again = dd.resume(tmp_path / "run", updates=100, fleet=NeverStarted())
    assert (again.version, again.ended) == (first.version, "stop") and "begin another run from it" in caplog.text
    assert Folder(tmp_path / "run").record().updates == 100


def test_a_run_that_was_stopped_early_does_not_go_on_but_another_begins_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = dd.Evaluation(every=1, early_stop=dd.EarlyStop(target=1e9))
    first = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=50, evaluation=evaluation, folder=tmp_path / "run")
    again = dd.resume(tmp_path / "run", updates=100)
    assert again.version == first.version < 50 and "begin another run from it" in caplog.text
    server = dd.Server(initial_weights=tmp_path / "run")
    assert dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=10, server=server).version == 10


# --- what the folder cannot build has to be given again, and must be the same ---


class OwnSpeeds(dd.SpeedModel):
    n = 3

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self.scale * (1 + worker)


@dataclass(frozen=True)
class OwnLink(dd.speeds.Link):
    """A link that is slow for large messages."""

    large: float = 0.5

    def seconds(self, size: int) -> float:
        return self.large if size > 4 else 0.125


def length(model: Any) -> float:
    return float(model.norm())


METRICS = {"length": length}
MISSING: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {  # of the run, of resume, and of the message
    "metrics": ({"evaluation": dd.Evaluation(metrics=METRICS)}, {}, ("length", "metrics=")),
    "other metrics": ({}, {"metrics": METRICS}, ("metrics",)),
    "problem": ({"problem": Holes([[0.0], [6.0], [12.0]])}, {}, ("Holes", "problem=")),
    "method": ({"algorithm": type("Own", (dd.VanillaASGD,), {})(LR)}, {}, ("Own",)),
    "speeds": ({"speeds": OwnSpeeds(1.0)}, {}, ("OwnSpeeds", "speeds=")),
    "other speeds": (
        {"speeds": OwnSpeeds(1.0)},
        {"speeds": OwnSpeeds(100.0)},
        ("recorded speeds is ", "'1.0'", "'100.0'", "pass the same"),
    ),
    "link": (
        {"speeds": dd.SimulatedFleet(CASES["q3"][1], link=OwnLink())},
        {},
        ("recorded link is a OwnLink", "dd.resume(folder, link=...)"),
    ),
    "other link": (
        {"speeds": dd.SimulatedFleet(CASES["q3"][1], link=OwnLink())},
        {"speeds": dd.SimulatedFleet(None, link=OwnLink(large=9.0))},
        ("recorded link",),
    ),
    "negative updates": ({}, {"updates": -5}, ("updates", "-5", "0 or more")),
    "negative time": ({}, {"time": -5.0}, ("time", "-5.0", "zero or more")),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_resume_that_lacks_something_is_refused_and_changes_nothing(what: str, tmp_path: Path) -> None:
    options, given, words = MISSING[what]
    problem, speeds = CASES["q3"]
    run = {"algorithm": dd.DuDe(LR), "problem": problem, "speeds": speeds, "updates": 9, "checkpoint_every": 2, **options}
    with pytest.raises(Killed):
        dd.simulate(**run, folder=tmp_path / "run", watch=(kill_at(6),))
    before = content(tmp_path)
    for totals in ({}, {"updates": 50}):
        refused(lambda totals=totals: dd.resume(tmp_path / "run", **{**totals, **given}), *words)
    assert content(tmp_path) == before


def test_with_the_same_speeds_and_link_of_one_s_own_a_run_goes_on(tmp_path: Path) -> None:
    fleet = dd.SimulatedFleet(OwnSpeeds(1.0), link=OwnLink())
    dd.simulate(dd.DuDe(LR), CASES["q3"][0], fleet, updates=20, folder=tmp_path / "run")
    longer = dd.resume(tmp_path / "run", updates=30, speeds=fleet)
    straight = dd.simulate(dd.DuDe(LR), CASES["q3"][0], fleet, updates=30, folder=tmp_path / "straight")
    # the first job of the fastest worker takes a model there, 1 second, and a gradient back
    assert straight.trace.time[0] == 0.5 + 1.0 + 0.5
    assert longer.trace.time.tolist() == straight.trace.time.tolist() and torch.equal(longer.x, straight.x)
    assert dd.replay(tmp_path / "run").same_bits  # which needs neither
    folder = tmp_path / "comparison"
    first, again = (
        dd.compare([dd.DuDe(LR)], CASES["q3"][0], OwnSpeeds(1.0), updates=20, folder=folder).runs[0] for _ in range(2)
    )
    assert again.time == first.time
    with pytest.raises(dd.BadInput, match="another"):
        dd.compare([dd.DuDe(LR)], CASES["q3"][0], OwnSpeeds(100.0), updates=20, folder=folder)

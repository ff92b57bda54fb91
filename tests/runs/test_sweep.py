"""A grid of runs: its points and table, each run's own folder, and a sweep that was stopped or cannot be."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.engine.evaluation import NAMES
from helpers import by_seed
from own import Cuts, Fresh, Killed, Steep, both, centers, content, digits, four, mismatches, three
from tables import ALGORITHMS, CASES, LR

noisy, pace = CASES["noisy"]
METHODS = [dd.DuDe(LR), dd.DuDe(LR, wait_for=2, memory="workers"), dd.UniformASGD(LR), dd.FedBuff(LR, buffer=2)]
GRID = {"algorithm": METHODS, "lr": [LR, 0.1], "seed": [0, 1]}
ENDS = {"updates": 20, "evaluation": dd.Evaluation(every=4), "checkpoint_every": 3}
TOGETHER, ALONE = dd.Compute(batch=True), dd.Compute(batch=False)


class Counted(dd.Quadratic):
    """Gradients are counted, in whichever run."""

    taken = 0

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        Counted.taken += 1
        return super().gradient(x, worker, draw)

    def reseeded(self, seed: int) -> Counted:
        return Counted(**{**self.settings, "seed": seed})


def sweep(grid: Any, problem: Any = noisy, speeds: Any = pace, **options: Any) -> dd.Sweep:
    """A sweep whose runs are computed together, if no more is given."""
    return dd.sweep(grid, problem, speeds, **{"compute": TOGETHER, **ENDS, **options})


def swept(folder: Path | None = None, **options: Any) -> dd.Sweep:
    return sweep(GRID, by_seed(noisy), by_seed(pace), folder=folder, **options)


def wrong(sweep: dd.Sweep, other: dd.Sweep) -> list[list[str]]:
    """What is not the same in the runs of two sweeps, of those in which something is not."""
    assert sweep.points == other.points
    assert sweep.failed == other.failed
    return [bad for pair in zip(sweep.runs, other.runs, strict=True) if (bad := mismatches(*pair))]


# --- points, table, report ---


def test_the_table_has_a_row_for_each_evaluation_and_names_its_run() -> None:
    problems = [digits(0.1), digits(0.5)]
    speeds = [dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), dd.FixedSpeeds([4.0, 1.0, 1.0, 1.0])]
    grid = {"algorithm": [dd.DuDe(LR), dd.SyncSGD(LR)], "problem": problems, "speeds": speeds, "seed": [3, 4]}
    evaluation = dd.Evaluation(every=2, metrics={"one": lambda model: 1.0})
    table = dd.sweep(grid, updates=4, evaluation=evaluation, compute=TOGETHER)
    assert list(table) == ["algorithm", "seed", "method", "lr", "problem", "speeds", *NAMES, "one"]
    assert len(table.runs) == len(table.points) == 16
    assert table.failed == {}
    assert len({json.dumps(point) for point in table.points}) == 16
    place = 0
    for point, run in zip(table.points, table.runs, strict=True):
        rows = slice(place, place := place + len(run.metrics))
        assert all(set(table[name][rows].tolist()) == {point[name]} for name in point)
        assert all(np.array_equal(table[name][rows], run.metrics[name], equal_nan=True) for name in run.metrics)
        assert run.algorithm.lr == LR
    assert place == len(table)


def test_problems_and_speeds_of_the_same_name_have_runs_of_their_own(tmp_path: Path) -> None:
    problems = [dd.Quadratic([[0.0], [float(c)], [2.0], [1.0]]) for c in (1, 5)]
    speeds = [dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), dd.FixedSpeeds([1.0, 2.0, 3.0, 5.0])]
    grid = {"algorithm": [dd.DuDe(LR)], "problem": problems, "speeds": speeds}
    joint = dd.sweep(grid, updates=9, compute=TOGETHER, folder=tmp_path)
    assert len({json.dumps(point) for point in joint.points}) == 4
    assert len({run.folder for run in joint.runs}) == len(list(tmp_path.iterdir())) == 4
    assert wrong(joint, dd.sweep(grid, updates=9, compute=ALONE)) == []
    assert [float(run.problem.optimum()) for run in joint.runs] == [1.0, 1.0, 2.0, 2.0]


def test_without_seeds_problem_and_speeds_are_as_they_were_given() -> None:
    run = sweep({"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, updates=9, evaluation=dd.Evaluation(), seed=5).runs[1]
    assert run.problem is noisy
    assert mismatches(run, dd.simulate(dd.DuDe(0.1), noisy, pace, updates=9, seed=5)) == []


def test_a_seed_names_problem_speeds_and_start_alike() -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "seed": [0, 7]}
    run = sweep(grid, digits(0.5), replace(four, seed=None)).runs[1]
    alone = dd.simulate(dd.DuDe(LR), digits(0.5, seed=7), replace(four, seed=7), seed=7, **ENDS)
    assert mismatches(run, alone) == []


@pytest.mark.parametrize("compute", [TOGETHER, ALONE], ids=["together", "alone"])
def test_the_report_grows_from_nothing_to_all_and_failures_are_warned_of(
    compute: dd.Compute, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moments = (k / 10 for k in count())  # the clock is a tenth of a second later each time it is read
    monkeypatch.setattr("dualdelay.runs.together.clock", SimpleNamespace(monotonic=lambda: next(moments)))
    shares: list[float] = []
    reporting = dd.Reporting(report=lambda share, text: shares.append(share), progress=False)
    done = sweep({"algorithm": METHODS, "lr": [LR, 1e200, 0.05]}, compute=compute, watch=reporting)
    assert len(done.failed) == 4  # those with a step size of 1e200
    warned = [record.getMessage() for record in caplog.records if "did not come to its end" in record.getMessage()]
    assert len(warned) == 4 and all("lr=1e+200" in text for text in warned)
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(set(shares)) >= 8  # one for each run alone, fewer where runs advance together


def test_runs_that_take_more_memory_than_there_is_are_computed_in_parts(tmp_path: Path) -> None:
    whole = swept()
    before = Counted.taken
    grid, problem = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, Counted(**noisy.settings)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="in 2 parts"):
        warnings.simplefilter("error")
        sweep(grid, problem, compute=dd.Compute(batch=True, memory_limit=1), folder=tmp_path / "none")
    assert Counted.taken == before  # the warning comes before the start
    assert not (tmp_path / "none").exists()
    with pytest.warns(UserWarning, match=r"16 runs .* in 16 parts") as warned:
        parts = swept(tmp_path, compute=dd.Compute(batch=True, memory_limit=1))
    assert len(warned) == 1
    assert wrong(parts, whole) == []
    with pytest.warns(UserWarning, match=r"in [2-9] parts"):
        assert wrong(swept(compute=dd.Compute(batch=True, memory_limit=2000)), whole) == []


# --- what cannot be ---

STOP_BY_X = {"evaluation": dd.Evaluation(early_stop=dd.EarlyStop("min x", 1.0))}
METRIC_TIME = {"evaluation": dd.Evaluation(metrics={"time": len})}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a setting that one method has not": (
        {"algorithm": [dd.DuDe(LR), dd.VanillaASGD(LR)], "wait_for": [1, 2]},
        {},
        "wait_for",
    ),
    "a misspelt setting": ({"algorithm": [dd.DuDe(LR)], "wait_fro": [1]}, {}, "did you mean 'wait_for'"),
    "an axis without values": ({"algorithm": [dd.DuDe(LR)], "lr": []}, {}, "'lr'"),
    "no methods": ({"algorithm": []}, {}, "'algorithm'"),
    "no algorithm": ({"lr": [LR]}, {}, "no 'algorithm'"),
    "a method's name": ({"algorithm": ["dude"]}, {}, "'dude'"),
    "a method that is no list": ({"algorithm": dd.DuDe(LR)}, {}, "algorithm"),
    "a step size that is no list": ({"algorithm": [dd.DuDe(LR)], "lr": 0.1}, {}, "lr"),
    "a point twice": ({"algorithm": [dd.DuDe(LR), dd.DuDe(0.1)], "lr": [LR]}, {}, "twice"),
    "a seed twice": ({"algorithm": [dd.DuDe(LR)], "seed": [1, 1]}, {}, "twice"),
    "no problem": ({"algorithm": [dd.DuDe(LR)]}, {"problem": None}, "problem"),
    "no speeds": ({"algorithm": [dd.DuDe(LR)]}, {"speeds": None}, "speeds"),
    "a problem that is none": ({"algorithm": [dd.DuDe(LR)], "problem": ["digits"]}, {}, "problem"),
    "no end": ({"algorithm": [dd.DuDe(LR)]}, {"updates": None}, "neither updates nor time"),
    "a value that cannot be": ({"algorithm": [dd.DuDe(LR)], "lr": [LR, -1.0]}, {}, "lr"),
    "more than there are workers": ({"algorithm": [dd.DuDe(LR)], "wait_for": [1, 9]}, {}, "wait_for"),
    "a metric that is none to stop by": ({"algorithm": [dd.DuDe(LR)]}, STOP_BY_X, "metric 'x'"),
    "a metric whose name is taken": ({"algorithm": [dd.DuDe(LR)]}, METRIC_TIME, "columns already"),
    "no rule for workers that leave": (
        {"algorithm": [dd.DuDe(LR), Fresh(LR)]},
        {"speeds": dd.SimulatedFleet(pace, changes=[dd.speeds.leave(1, 2.0)])},
        "no rule",
    ),
    "millions of points": (
        {"algorithm": [dd.DuDe(LR)], "lr": [0.1] * 2000, "seed": list(range(2000))},
        {},
        "4,000,000",
    ),
    "speeds for others": ({"algorithm": [dd.DuDe(LR)], "speeds": [pace, dd.FixedSpeeds([1.0])]}, {}, "1 workers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_with_one_clear_error_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    grid, options, match = BAD[name]
    with pytest.raises(dd.BadInput, match=match):
        sweep(grid, **{"folder": tmp_path / "sweep", **options})
    assert not (tmp_path / "sweep").exists()


def test_the_folder_of_a_single_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    dd.simulate(dd.DuDe(LR), noisy, pace, updates=3, folder=tmp_path / "run")
    before = content(tmp_path)
    for call in (
        lambda: sweep({"algorithm": [dd.DuDe(LR)]}, folder=tmp_path / "run"),
        lambda: dd.compare([dd.DuDe(LR)], noisy, pace, updates=3, folder=tmp_path / "run"),
    ):
        with pytest.raises(dd.BadInput, match=r"run is the folder of a single run.* choose another"):
            call()
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("method", "axis"),
    [(dd.FedBuff(LR, buffer=2), {"staleness": [None, 0.5]}), (dd.MIFA(LR), {"active": [None, 2]})],
    ids=["staleness", "active"],
)
def test_none_is_a_value_where_a_method_takes_it(method: dd.Algorithm[Any], axis: dict[str, Any]) -> None:
    ((name, values),) = axis.items()
    runs = sweep({"algorithm": [method], **axis}, updates=5).runs
    assert [getattr(run.algorithm, name) for run in runs] == values


# --- runs that fail ---


class Broken(dd.Quadratic):
    """The data of one worker cannot be read, in the problem with that seed alone."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.seed == 7 and (worker, draw) == (1, 3):
            raise OSError("the disk is gone")
        return super().gradient(x, worker, draw)


@pytest.mark.filterwarnings("ignore:the runs could not be computed side by side")
@pytest.mark.parametrize("kept", [True, False], ids=["with folders", "without"])
def test_a_gradient_that_cannot_be_computed_fails_its_own_run_alone(kept: bool, tmp_path: Path) -> None:
    problems = [Broken([[0.0], [1.0], [2.0]], seed=seed) for seed in (8, 7, 9)]
    grid = {"algorithm": [dd.VanillaASGD(LR), dd.DuDe(LR)], "lr": [LR, 0.1], "problem": problems}
    joint = sweep(grid, None, three, folder=tmp_path / "sweep" if kept else None)
    alone = sweep(grid, None, three, compute=ALONE)
    assert joint.failed.keys() == {4, 5, 6, 7}
    assert set(joint.failed.values()) == {"worker 1 could not compute its job number 3: the disk is gone"}
    assert wrong(joint, alone) == []


def test_gradients_of_a_wrong_shape_are_rejected_as_in_single_runs() -> None:
    grid = {"algorithm": [dd.FedBuff(LR, buffer=2), dd.DuDe(LR)], "lr": [LR, 0.05]}
    joint, alone = both(grid, Cuts(centers, noise=0.5), three, updates=25)
    assert wrong(joint, alone) == []
    assert all(run.rejected > 0 for run in joint.runs)


def test_if_no_run_comes_to_its_end_that_is_an_error() -> None:
    with pytest.raises(dd.RunFailed, match="no run came to its end"):
        sweep({"algorithm": [dd.VanillaASGD(1e200)], "lr": [1e200, 1e201]}, updates=30)


# --- folders ---


def test_each_run_has_a_folder_of_its_own_with_what_a_single_run_leaves_there(tmp_path: Path) -> None:
    joint, alone = swept(tmp_path / "joint"), swept(tmp_path / "alone", compute=ALONE)
    assert wrong(joint, alone) == []
    for run, single in zip(joint.runs, alone.runs, strict=True):
        assert run.folder.name == single.folder.name
        assert {path.name for path in run.folder.iterdir()} == {path.name for path in single.folder.iterdir()}
        configs = [json.loads((place / "config.json").read_text()) for place in (run.folder, single.folder)]
        other = {name for name in configs[1] if configs[0].get(name) != configs[1][name]}
        assert other == {"batch", "digest", "together"}
        moments = [
            [path.name.split("-")[0] for path in sorted((r.folder / "checkpoints").iterdir())] for r in (run, single)
        ]
        assert moments[0] == moments[1]
        results = [json.loads((place / "result.json").read_text()) for place in (run.folder, single.folder)]
        assert all(results[0][name] == results[1][name] for name in ("ended", "time", "version", "updates", "arrivals"))


@pytest.mark.parametrize("method", METHODS, ids=["dude", "dude workers", "uniform", "fedbuff"])
def test_each_run_can_be_extended_by_itself(method: dd.Algorithm[Any], tmp_path: Path) -> None:
    grid = {"algorithm": [method], "lr": [LR, 0.05, 1e200], "seed": [0, 1]}
    short = sweep(grid, by_seed(noisy), by_seed(pace), folder=tmp_path)
    for run in short.runs[:4]:
        speeds = replace(pace, seed=run.problem.seed)
        longer = {**ENDS, "updates": 35, "seed": run.problem.seed}
        straight = dd.simulate(run.algorithm, run.problem, speeds, **longer)
        assert mismatches(dd.resume(run.folder, updates=35), straight) == []


@pytest.mark.numeric
def test_each_run_with_a_network_can_be_extended_by_itself(tmp_path: Path) -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1], "problem": [digits(0.1), digits(0.5)]}
    for run in sweep(grid, None, four, updates=10, folder=tmp_path).runs:
        straight = dd.simulate(run.algorithm, run.problem, four, **ENDS)
        assert mismatches(dd.resume(run.folder, updates=20), straight) == []


def test_the_same_sweep_again_computes_no_gradient(tmp_path: Path) -> None:
    where = by_seed(Counted(**noisy.settings)), by_seed(pace)
    first = sweep(GRID, *where, folder=tmp_path)
    before, contents = Counted.taken, content(tmp_path)
    again = sweep(GRID, *where, folder=tmp_path)
    assert Counted.taken == before > 0
    assert wrong(again, first) == []
    assert content(tmp_path) == contents


def test_a_larger_grid_in_the_same_folder_computes_what_is_new_alone(tmp_path: Path) -> None:
    small = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}
    large = {"algorithm": [dd.DuDe(LR), dd.VanillaASGD(LR)], "lr": [0.05, LR, 0.1]}
    problem = Counted(**noisy.settings)
    sweep(small, problem, folder=tmp_path)
    before = Counted.taken
    joint = sweep(large, problem, folder=tmp_path)
    new = sum(len(joint.runs[k].trace) for k in (0, 3, 4, 5))
    assert new <= Counted.taken - before <= new + 4 * 4  # at the end of a run each worker is in the middle of a job
    assert wrong(joint, sweep(large, problem, compute=ALONE)) == []


def test_a_folder_grows_with_more_problems_speeds_and_seeds_in_any_order(tmp_path: Path) -> None:
    near, far, third = (dd.Quadratic([[0.0], [c]], noise=0.1) for c in (1.0, 5.0, -5.0))
    slow, fast = dd.TruncatedNormalSpeeds(2, std=3.0), dd.TruncatedNormalSpeeds(2, std=0.5)
    first = dd.sweep({"algorithm": [dd.DuDe(LR)]}, far, slow, updates=9, folder=tmp_path, seed=3)
    ages = {}
    grids: list[dict[str, Any]] = [
        {"problem": [near, far], "speeds": [slow], "seed": [3]},
        {"problem": [third, far, near], "speeds": [fast, slow], "seed": [4, 3]},
    ]
    for grid in grids:
        joint = dd.sweep({"algorithm": [dd.DuDe(LR)], **grid}, updates=9, folder=tmp_path)
        assert wrong(joint, dd.sweep({"algorithm": [dd.DuDe(LR)], **grid}, updates=9)) == []
        now = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
        assert {path: now[path] for path in ages} == ages, "what is there is not computed again"
        assert len({run.folder for run in joint.runs}) == len(joint.runs)
        ages = now
    assert len(ages) == 12 and first.runs[0].folder in {run.folder for run in joint.runs}


def test_own_problems_and_fleets_have_folders_by_what_they_are(tmp_path: Path) -> None:
    class Own(dd.Quadratic):
        pass

    problems = [Own([[0.0], [c]]) for c in (1.0, 5.0)]
    fleets = [dd.SimulatedFleet(dd.FixedSpeeds([1.0, 2.0]), link=dd.speeds.Link(latency)) for latency in (0.0, 1.0)]
    grid = {"algorithm": [dd.DuDe(LR)], "problem": problems, "speeds": fleets}
    names = [run.folder.name for run in dd.sweep(grid, updates=4, folder=tmp_path).runs]
    turned = {"algorithm": [dd.DuDe(LR)], "problem": problems[::-1], "speeds": fleets[::-1]}
    assert len(set(names)) == 4 and all(name.startswith("dude-lr=") for name in names)
    assert [run.folder.name for run in dd.sweep(turned, updates=4, folder=tmp_path).runs] == names[::-1]
    with pytest.raises(dd.BadInput, match="twice, for a problem or speeds that are the same"):
        dd.sweep({**grid, "problem": [problems[0], Own([[0.0], [1.0]])]}, updates=4, folder=tmp_path)


def test_a_folder_with_runs_named_by_position_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dude-lr=0.05-problem0-speeds1-seed0").mkdir()
    with pytest.raises(dd.BadInput, match=r"an earlier version, such as dude-lr=.*-problem0-speeds1-seed0"):
        sweep({"algorithm": [dd.DuDe(LR)]}, updates=4, folder=tmp_path)


def test_each_method_has_a_grid_of_its_own() -> None:
    methods = [*dd.grid(dd.DuDe, lr=[0.1, 0.2], wait_for=np.array([1, 2])), *dd.grid(dd.FedBuff, lr=0.3, buffer=(2, 3))]
    assert methods[:4] == [dd.DuDe(lr, wait_for=c) for lr in (0.1, 0.2) for c in (1, 2)]
    assert methods[4:] == [dd.FedBuff(0.3, buffer=2), dd.FedBuff(0.3, buffer=3)]
    assert dd.grid(dd.DuDe, lr=0.1) == [dd.DuDe(0.1)]
    for make, words in (
        (lambda: dd.grid(dd.DuDe, lr=0.1, wait_fro=[1]), "did you mean 'wait_for'"),
        (lambda: dd.grid(dd.DuDe(0.1), wait_for=[1]), "expected a method's class"),
        (lambda: dd.grid(dd.DuDe, lr=[]), "at least one"),
        (lambda: dd.grid(dd.DuDe, lr=[0.1, -1.0]), "lr is -1"),
    ):
        with pytest.raises(dd.BadInput, match=words):
            make()


def test_another_sweep_in_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    grid = {"algorithm": METHODS[:2], "lr": [LR, 0.1]}
    sweep(grid, folder=tmp_path)
    before = content(tmp_path)
    larger = {**grid, "algorithm": [dd.SyncSGD(LR), *METHODS[:2]]}
    for points, other in (
        (grid, {"updates": 30}),
        (grid, {"server": dd.Server(on_nonfinite="stop")}),
        (grid, {"evaluation": dd.Evaluation(every=5)}),
        (larger, {"updates": 30}),
    ):
        with pytest.raises(dd.BadInput, match="another configuration"):
            sweep(points, folder=tmp_path, **other)
    assert content(tmp_path) == before


def test_runs_that_stop_early_are_kept_and_not_computed_again(tmp_path: Path) -> None:
    problem = Counted(**noisy.settings)
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [0.002, 0.02, 0.05, 0.1]}
    evaluation = dd.Evaluation(every=3, early_stop=dd.EarlyStop(target=3.3))
    options = {"updates": 40, "checkpoint_every": 7, "evaluation": evaluation}
    first = sweep(grid, problem, folder=tmp_path, **options)
    before = Counted.taken
    again = sweep(grid, problem, folder=tmp_path, **options)
    assert Counted.taken == before
    assert [run.ended for run in again.runs] == ["updates", "stop", "stop", "stop"]
    for run, other in zip(first.runs, again.runs, strict=True):
        assert run.trace.fingerprint.tobytes() == other.trace.fingerprint.tobytes()
        assert all(np.array_equal(run.metrics[name], other.metrics[name], equal_nan=True) for name in run.metrics)
        assert (run.time, run.version) == (other.time, other.version)
        assert mismatches(run, dd.simulate(run.algorithm, problem, pace, **options)) == []


# --- sweeps that were stopped ---


def images(folder: Path, to: Path, moments: Sequence[int]) -> Callable[[Any], float]:
    """A metric that copies the folder at some of its calls: what a kill at that moment would have left."""
    calls = count()
    to.mkdir()

    def metric(model: Any) -> float:
        number = next(calls)
        if number in moments and folder.exists():
            shutil.copytree(folder, to / f"{number}")
        return 0.0

    return metric


def raising(number: int, error: Callable[[], None]) -> Callable[[Any], float]:
    """A metric in one of whose calls something happens."""
    calls = count()

    def metric(model: Any) -> float:
        if next(calls) == number:
            error()
        return 0.0

    return metric


def kill() -> None:
    raise Killed


def nothing(model: Any) -> float:
    return 0.0


def evaluated(
    metric: Callable[[Any], float] = nothing, every: int | None = 2, seconds: float | None = None
) -> dd.Evaluation:
    return dd.Evaluation(every=every, seconds=seconds, metrics={"image": metric})


SMALL = {"algorithm": [dd.DuDe(LR), dd.DuDe(LR, memory="workers"), dd.UniformASGD(LR)], "lr": [LR, 0.1]}


def stopped(
    tmp_path: Path, problem: dd.Problem = noisy, grid: Any = SMALL, every: int = 2, updates: int = 14, keep: int = 3
) -> tuple[dd.Sweep, list[Path], Callable[[Path], dd.Sweep]]:
    """A sweep that was not stopped, what was on disk at several moments of it, and how it goes on from there."""

    def run(folder: Path, metric: Callable[[Any], float] = nothing) -> dd.Sweep:
        evaluation, saving = evaluated(metric, every), dd.Saving(folder, every=1, keep=keep)
        return dd.sweep(grid, problem, pace, updates=updates, folder=saving, evaluation=evaluation, compute=TOGETHER)

    metric = images(tmp_path / "straight", tmp_path / "images", [14, 20, 26, 31, 36, 41])
    straight = run(tmp_path / "straight", metric)
    left = sorted((tmp_path / "images").iterdir())
    assert len(left) == 6
    return straight, left, run


Stopped = tuple[dd.Sweep, list[Path], Callable[[Path], dd.Sweep]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """What ``stopped`` gives, for tests that go on with a copy of it."""
    return stopped(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("keep", [1, 3])
def test_a_sweep_killed_at_any_moment_ends_as_one_never_stopped(keep: int, tmp_path: Path) -> None:
    straight, left, go_on = stopped(tmp_path, keep=keep)
    left = left[1::2]
    assert any(list(image.glob("*/checkpoints/*.safetensors")) for image in left)
    for image in left:
        assert wrong(go_on(image), straight) == []


def test_a_killed_sweep_does_not_begin_anew(tmp_path: Path) -> None:
    problem, before = Counted(**noisy.settings), Counted.taken
    straight, left, go_on = stopped(tmp_path, problem)
    whole, before = Counted.taken - before, Counted.taken
    assert wrong(go_on(left[-1]), straight) == []
    assert 0 < Counted.taken - before < 0.5 * whole


@pytest.mark.parametrize(
    ("grid", "updates"),
    [({"algorithm": [dd.DuDe(LR)]}, 70), ({"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 0.1]}, 35)],
    ids=["one run", "two runs"],
)
def test_a_killed_sweep_of_few_runs_ends_as_one_never_stopped(grid: Any, updates: int, tmp_path: Path) -> None:
    straight, left, go_on = stopped(tmp_path, grid=grid, updates=updates, every=1)
    for image in left[::2]:
        assert wrong(go_on(image), straight) == []


def test_runs_that_have_the_same_losses_when_they_are_saved_go_on_together(tmp_path: Path) -> None:
    slow = dd.FixedSpeeds([1.0, 1.0, 1.0, 6.5])  # its first gradient is at the start that all runs share
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 0.1]}
    metric = images(tmp_path / "run", tmp_path / "images", [14])
    straight, again = (
        sweep(grid, noisy, slow, updates=25, checkpoint_every=1, folder=folder, evaluation=evaluated(metric, every=1))
        for folder, metric in ((tmp_path / "run", metric), (tmp_path / "images" / "14", nothing))
    )
    assert wrong(again, straight) == []


@pytest.mark.parametrize("how", ["damaged", "missing", "all missing", "all but the oldest damaged"])
def test_a_killed_sweep_goes_on_although_a_checkpoint_of_one_run_is_lost(how: str, killed: Stopped, tmp_path: Path) -> None:
    straight, left, go_on = killed
    image = shutil.copytree(left[-1], tmp_path / "image")
    unfinished = [place for place in sorted(image.iterdir()) if not (place / "result.json").exists()]
    checkpoints = sorted((unfinished[0] / "checkpoints").glob("[0-9]*"))
    assert len(checkpoints) == 3
    for path in checkpoints if "all" in how else checkpoints[-1:]:
        if "missing" in how:
            path.unlink()
        elif path != checkpoints[0]:
            path.write_bytes(path.read_bytes()[:-9] + b"is broken")
    assert wrong(go_on(image), straight) == []


def test_a_run_of_a_killed_sweep_can_be_resumed_by_itself_and_the_sweep_goes_on(killed: Stopped, tmp_path: Path) -> None:
    straight, left, go_on = killed
    image = shutil.copytree(left[3], tmp_path / "image")
    run = next(run for run in straight.runs if not (image / run.folder.name / "result.json").exists())
    resumed = dd.resume(image / run.folder.name, metrics={"image": nothing})
    assert mismatches(resumed, run) == []
    assert wrong(go_on(image), straight) == []


@pytest.mark.parametrize("number", [8, 35])
@pytest.mark.parametrize("schedule", [(2, None), (None, 0.5)], ids=["updates", "seconds"])
def test_a_sweep_killed_in_the_middle_of_an_evaluation_ends_as_one_never_stopped(
    schedule: tuple[Any, Any], number: int, tmp_path: Path
) -> None:
    def run(folder: Path | None, metric: Any = nothing) -> dd.Sweep:
        return sweep(SMALL, updates=14, checkpoint_every=5, folder=folder, evaluation=evaluated(metric, *schedule))

    with pytest.raises(Killed):
        run(tmp_path, raising(number, kill))
    assert wrong(run(tmp_path), run(None)) == []


@pytest.mark.parametrize("number", [9, 30])
def test_ctrl_c_saves_where_the_runs_are_and_the_same_sweep_goes_on(number: int, tmp_path: Path) -> None:
    def run(folder: Path | None, metric: Any = nothing) -> dd.Sweep:
        return sweep(SMALL, updates=14, checkpoint_every=10**6, folder=folder, evaluation=evaluated(metric))

    with pytest.raises(dd.Interrupted, match="saved"):
        run(tmp_path, raising(number, lambda: signal.raise_signal(signal.SIGINT)))
    assert len(list(tmp_path.glob("*/checkpoints/*.safetensors"))) == 6 - len(list(tmp_path.glob("*/result.json")))
    assert wrong(run(tmp_path), run(None)) == []


def test_runs_left_by_their_group_at_other_moments_are_not_taken_for_one_schedule(tmp_path: Path) -> None:
    class Mortal(Steep):
        left = 10**9

        def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
            Mortal.left -= 1
            if Mortal.left == 0:
                raise Killed
            return super().gradient(x, worker, draw)

    problem = Mortal([[0.0, 1.0], [40.0, 0.0], [2.0, 60.0]], noise=0.5)
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [0.1, 0.05, 0.03]}

    def run(folder: Path | None, compute: dd.Compute = TOGETHER) -> dd.Sweep:
        saving = dd.Saving(folder, every=1, keep=40)
        return dd.sweep(
            grid, problem, three, updates=30, folder=saving, evaluation=dd.Evaluation(every=50), compute=compute
        )

    straight = run(None, ALONE)
    assert sum(run.rejected > 0 for run in straight.runs) >= 2
    regrouped = 0
    for left in (92, 104, 116):
        folder, Mortal.left = tmp_path / f"{left}", left
        try:
            run(folder)
        except Killed:
            regrouped += len(list(folder.glob("*/result.json"))) <= 1
        Mortal.left = 10**9
        assert wrong(run(folder), straight) == [], f"killed at gradient {left}"
    assert regrouped >= 1


def test_a_run_that_diverged_is_kept_in_its_folder_as_a_single_one_is(tmp_path: Path) -> None:
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 1e200, 0.05]}
    for _ in range(2):  # computed, and read
        joint, alone = (
            sweep(grid, folder=tmp_path / name, compute=compute)
            for name, compute in (("joint", TOGETHER), ("alone", ALONE))
        )
        assert joint.failed.keys() == {1} and wrong(joint, alone) == []


@pytest.mark.slow
def test_every_method_in_a_killed_sweep_ends_as_in_one_never_stopped(tmp_path: Path) -> None:
    grid = {"algorithm": list(ALGORITHMS.values())[::2], "lr": [LR, 0.05]}  # every other method, for there are many
    metric = images(tmp_path / "run", tmp_path / "images", [55])
    straight, again = (
        sweep(grid, updates=12, checkpoint_every=4, folder=folder, evaluation=evaluated(metric, every=3))
        for folder, metric in ((tmp_path / "run", metric), (tmp_path / "images" / "55", nothing))
    )
    assert wrong(again, straight) == []
    run = straight.runs[0]
    assert torch.equal(run.x, dd.resume(run.folder, metrics={"image": nothing}).x)

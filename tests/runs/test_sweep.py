"""A grid of runs: its points and table, each run's own folder, and a sweep that was stopped or cannot be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.engine.evaluation import NAMES
from flat import simulate, sweep
from helpers import by_seed
from own import FILES, Cuts, Fresh, Killed, Steep, both, centers, digits, four, three
from own import mismatches as unlike
from tables import ALGORITHMS, CASES, LR

noisy, pace = CASES["noisy"]
METHODS = [dd.DuDe(LR), dd.DuDe(LR, wait_for=2, memory="workers"), dd.UniformASGD(LR), dd.FedBuff(LR, buffer=2)]
GRID = {"algorithm": METHODS, "lr": [LR, 0.1], "seed": [0, 1]}
ENDS = {"updates": 20, "evaluate_every": 4, "checkpoint_every": 3}


class Counted(dd.Quadratic):
    """Gradients are counted, whoever takes them."""

    taken = 0

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        Counted.taken += 1
        return super().gradient(x, worker, draw)

    def reseeded(self, seed: int) -> Counted:
        return Counted(**{**self.settings, "seed": seed})


def swept(folder: Path | None = None, batch: bool = True, **options: Any) -> dd.Sweep:
    return sweep(GRID, by_seed(noisy), by_seed(pace), folder=folder, batch=batch, **{**ENDS, **options})


def wrong(sweep: dd.Sweep, other: dd.Sweep) -> list[list[str]]:
    """What is not the same in the runs of two sweeps, of those in which something is not."""
    assert sweep.points == other.points
    assert sweep.failed == other.failed
    return [bad for pair in zip(sweep.runs, other.runs, strict=True) if (bad := unlike(*pair))]


def written(folder: Path) -> dict[str, int]:
    """Every file in a folder, and when it was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# --- points, table, report ---


def test_the_table_has_a_row_for_each_evaluation_and_names_its_run() -> None:
    problems = [digits(0.1), digits(0.5)]
    speeds = [dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), dd.FixedSpeeds([4.0, 1.0, 1.0, 1.0])]
    grid = {"algorithm": [dd.DuDe(LR), dd.SyncSGD(LR)], "problem": problems, "speeds": speeds, "seed": [3, 4]}
    sweep = dd.sweep(
        grid,
        updates=4,
        evaluation=dd.Evaluation(every=2, metrics={"one": lambda model: 1.0}),
        compute=dd.Compute(batch=True),
    )
    assert list(sweep)[:4] == ["algorithm", "seed", "problem", "speeds"]
    assert list(sweep)[4:] == [*NAMES, "one"]
    assert len(sweep.runs) == len(sweep.points) == 16
    assert sweep.failed == {}
    assert len({json.dumps(point) for point in sweep.points}) == 16
    place = 0
    for point, run in zip(sweep.points, sweep.runs, strict=True):
        rows = slice(place, place := place + len(run.metrics))
        assert all(set(sweep[name][rows].tolist()) == {point[name]} for name in point)
        assert all(np.array_equal(sweep[name][rows], run.metrics[name], equal_nan=True) for name in run.metrics)
        assert run.algorithm.lr == LR
    assert place == len(sweep)


def test_problems_and_speeds_with_equal_names_are_told_apart(tmp_path: Path) -> None:
    problems = [dd.Quadratic([[0.0], [float(c)], [2.0], [1.0]]) for c in (1, 5)]
    speeds = [dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0]), dd.FixedSpeeds([1.0, 2.0, 3.0, 4.0])]
    grid = {"algorithm": [dd.DuDe(LR)], "problem": problems, "speeds": speeds}
    joint = dd.sweep(grid, updates=9, compute=dd.Compute(batch=True), folder=tmp_path)
    assert len({json.dumps(point) for point in joint.points}) == 4
    assert len({run.folder for run in joint.runs}) == len(list(tmp_path.iterdir())) == 4
    assert wrong(joint, dd.sweep(grid, updates=9, compute=dd.Compute(batch=False))) == []
    assert [float(run.problem.optimum()) for run in joint.runs] == [1.0, 1.0, 2.0, 2.0]


def test_without_seeds_problem_and_speeds_are_as_they_were_given() -> None:
    run = dd.sweep(
        {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, noisy, pace, updates=9, compute=dd.Compute(batch=True), seed=5
    ).runs[1]
    assert run.problem is noisy
    assert unlike(run, dd.simulate(dd.DuDe(0.1), noisy, pace, updates=9, seed=5)) == []


def test_a_seed_names_problem_speeds_and_start_alike() -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "seed": [0, 7]}
    speeds = replace(four, seed=None)
    run = dd.sweep(
        grid, digits(0.5), speeds, updates=5, evaluation=dd.Evaluation(every=5), compute=dd.Compute(batch=True)
    ).runs[1]
    alone = dd.simulate(
        dd.DuDe(LR), digits(0.5, seed=7), replace(four, seed=7), seed=7, updates=5, evaluation=dd.Evaluation(every=5)
    )
    assert unlike(run, alone) == []


@pytest.mark.parametrize("batch", [True, False])
def test_the_report_grows_from_nothing_to_all(batch: bool) -> None:
    told: list[float] = []

    def slow(x: Tensor) -> float:
        time.sleep(0.004)
        return 0.0

    grid = {"algorithm": METHODS, "lr": [LR, 1e200, 0.05]}
    options = {"updates": 20, "evaluate_every": 1, "metrics": {"slow": slow}}
    made = sweep(grid, noisy, pace, batch=batch, report=lambda share, text: told.append(share), **options)
    assert len(made.failed) == 4
    assert len(told) > 3
    assert told[-1] == 1.0
    assert told[0] < 0.3
    assert told == sorted(told)


def test_runs_that_take_more_memory_than_there_is_are_computed_in_parts(tmp_path: Path) -> None:
    whole = swept()
    before = Counted.taken
    grid, problem = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, Counted(**noisy.settings)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="in 2 parts"):
        warnings.simplefilter("error")
        sweep(grid, problem, pace, batch=True, memory=1, folder=tmp_path / "none", **ENDS)
    assert Counted.taken == before  # it was said before the start
    assert not (tmp_path / "none").exists()
    with pytest.warns(UserWarning, match=r"16 runs .* in 16 parts") as said:
        parts = swept(tmp_path, memory=1)
    assert len(said) == 1
    assert wrong(parts, whole) == []
    with pytest.warns(UserWarning, match=r"in [2-9] parts"):
        assert wrong(swept(memory=2000), whole) == []


# --- what cannot be ---

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a setting that one method has not": ({"algorithm": [dd.DuDe(LR), dd.SyncSGD(LR)], "wait_for": [1, 2]}, {}, "wait_for"),
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
    "a device that is none": ({"algorithm": [dd.DuDe(LR)]}, {"device": "gpu"}, "device"),
    "a value that cannot be": ({"algorithm": [dd.DuDe(LR)], "lr": [LR, -1.0]}, {}, "lr"),
    "more than there are workers": ({"algorithm": [dd.DuDe(LR)], "wait_for": [1, 9]}, {}, "wait_for"),
    "a metric that is none to stop by": ({"algorithm": [dd.DuDe(LR)]}, {"stop": dd.EarlyStop("x", 1.0)}, "metric 'x'"),
    "a metric whose name is taken": ({"algorithm": [dd.DuDe(LR)]}, {"metrics": {"time": len}}, "columns already"),
    "no rule for who leaves": ({"algorithm": [dd.DuDe(LR), Fresh(LR)]}, {"changes": [dd.speeds.leave(1, 2.0)]}, "no rule"),
    "speeds for others": ({"algorithm": [dd.DuDe(LR)], "speeds": [pace, dd.FixedSpeeds([1.0])]}, {}, "1 workers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_with_one_clear_error_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    grid, options, match = BAD[name]
    everything = {"problem": noisy, "speeds": pace, "updates": 5, "folder": tmp_path / "sweep", "batch": True, **options}
    if name == "a device that is none":
        everything["batch"] = None
    with pytest.raises(dd.BadInput, match=match):
        sweep(grid, **everything)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("method", "axis"),
    [(dd.FedBuff(LR, buffer=2), {"staleness": [None, 0.5]}), (dd.MIFA(LR), {"active": [None, 2]})],
    ids=["staleness", "active"],
)
def test_none_is_a_value_where_a_method_takes_it(method: dd.Algorithm[Any], axis: dict[str, Any]) -> None:
    sweep = dd.sweep({"algorithm": [method], **axis}, noisy, pace, updates=5)
    assert [getattr(run.algorithm, name) for run in sweep.runs for name in axis] == next(iter(axis.values()))


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
    options = {"updates": 20, "checkpoint_every": 3, "folder": tmp_path / "sweep" if kept else None}
    joint = sweep(grid, speeds=three, batch=True, **options)
    alone = dd.sweep(grid, speeds=three, updates=20, checkpoint_every=3)
    assert joint.failed.keys() == alone.failed.keys() == {4, 5, 6, 7}
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 12
    assert all("the disk is gone" in text for text in joint.failed.values())


@pytest.mark.filterwarnings("ignore:the runs could not be computed side by side")
def test_a_gradient_that_cannot_be_computed_is_said_to_be_its_own_workers() -> None:
    problems = [Broken([[0.0], [1.0], [2.0]], seed=seed) for seed in (8, 7)]
    joint = dd.sweep(
        {"algorithm": [dd.VanillaASGD(LR)], "problem": problems}, speeds=three, compute=dd.Compute(batch=True), updates=20
    )
    assert joint.failed == {1: "worker 1 could not compute its job number 3: the disk is gone"}


def test_gradients_of_a_wrong_shape_are_rejected_as_in_single_runs() -> None:
    grid = {"algorithm": [dd.FedBuff(LR, buffer=2), dd.DuDe(LR)], "lr": [LR, 0.05]}
    joint, alone = both(grid, Cuts(centers, noise=0.5), three, updates=25)
    assert wrong(joint, alone) == []
    assert all(run.rejected > 0 for run in joint.runs)


def test_if_no_run_comes_to_its_end_that_is_an_error() -> None:
    with pytest.raises(dd.RunFailed, match="no run came to its end"):
        dd.sweep(
            {"algorithm": [dd.VanillaASGD(1e200)], "lr": [1e200, 1e201]},
            noisy,
            pace,
            updates=30,
            compute=dd.Compute(batch=True),
        )


# --- folders ---


def test_each_run_has_a_folder_of_its_own_with_what_a_single_run_leaves_there(tmp_path: Path) -> None:
    joint, alone = swept(tmp_path / "joint"), swept(tmp_path / "alone", batch=False)
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
    short = sweep(grid, by_seed(noisy), by_seed(pace), folder=tmp_path, batch=True, **ENDS)
    for run in short.runs[:4]:
        speeds = replace(pace, seed=run.problem.seed)
        longer = {**ENDS, "updates": 35, "seed": run.problem.seed}
        straight = simulate(run.algorithm, run.problem, speeds, **longer)
        assert unlike(dd.resume(run.folder, updates=35), straight) == []


@pytest.mark.numeric
def test_each_run_with_a_network_can_be_extended_by_itself(tmp_path: Path) -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1], "problem": [digits(0.1), digits(0.5)]}
    options = {"evaluate_every": 6, "checkpoint_every": 4}
    for run in sweep(grid, speeds=four, updates=10, folder=tmp_path, batch=True, **options).runs:
        straight = simulate(run.algorithm, run.problem, four, updates=20, **options)
        assert unlike(dd.resume(run.folder, updates=20), straight) == []


def test_the_same_sweep_again_computes_no_gradient(tmp_path: Path) -> None:
    problem = Counted(**noisy.settings)
    grid = {"algorithm": METHODS, "lr": [LR, 0.1], "seed": [0, 1]}
    where = by_seed(problem), by_seed(pace)
    first = sweep(grid, *where, folder=tmp_path, batch=True, **ENDS)
    before, contents = Counted.taken, {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = sweep(grid, *where, folder=tmp_path, batch=True, **ENDS)
    assert Counted.taken == before > 0
    assert wrong(again, first) == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == contents


def test_a_larger_grid_in_the_same_folder_computes_what_is_new_alone(tmp_path: Path) -> None:
    small = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}
    large = {"algorithm": [dd.DuDe(LR), dd.VanillaASGD(LR)], "lr": [0.05, LR, 0.1]}
    problem = Counted(**noisy.settings)
    sweep(small, problem, pace, folder=tmp_path, batch=True, **ENDS)
    before = Counted.taken
    joint = sweep(large, problem, pace, folder=tmp_path, batch=True, **ENDS)
    new = Counted.taken - before
    assert new <= sum(len(joint.runs[k].trace) + 4 for k in (0, 3, 4, 5))
    assert wrong(joint, sweep(large, problem, pace, batch=False, **ENDS)) == []


def test_another_sweep_in_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    grid = {"algorithm": METHODS[:2], "lr": [LR, 0.1]}
    place = {"problem": noisy, "speeds": pace, "folder": tmp_path, "batch": True, **ENDS}
    sweep(grid, **place)
    before = written(tmp_path)
    for other in ({"updates": 30}, {"on_nonfinite": "stop"}, {"evaluate_every": 5}):
        with pytest.raises(dd.BadInput, match="another configuration"):
            sweep(grid, **{**place, **other})
    new = {**grid, "algorithm": [dd.SyncSGD(LR), *METHODS[:2]]}
    with pytest.raises(dd.BadInput, match="another configuration"):
        sweep(new, **{**place, "updates": 30})
    assert written(tmp_path) == before


def test_runs_that_stop_early_are_kept_and_not_computed_again(tmp_path: Path) -> None:
    problem = Counted(**noisy.settings)
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [0.002, 0.02, 0.05, 0.1]}
    options = {"updates": 40, "evaluate_every": 3, "checkpoint_every": 7, "stop": dd.EarlyStop(target=3.3)}
    first = sweep(grid, problem, pace, folder=tmp_path, batch=True, **options)
    before = Counted.taken
    again = sweep(grid, problem, pace, folder=tmp_path, batch=True, **options)
    assert Counted.taken == before
    assert [run.ended for run in again.runs] == ["updates", "stop", "stop", "stop"]
    for run, other in zip(first.runs, again.runs, strict=True):
        assert run.trace.fingerprint.tobytes() == other.trace.fingerprint.tobytes()
        assert all(np.array_equal(run.metrics[name], other.metrics[name], equal_nan=True) for name in run.metrics)
        assert (run.time, run.version) == (other.time, other.version)
        assert unlike(run, simulate(run.algorithm, problem, pace, **options)) == []


# --- sweeps that were stopped ---


def images(folder: Path, to: Path, moments: Sequence[int]) -> Callable[[Any], float]:
    """A metric that copies the folder at some of its calls: what a kill at that moment would have left."""
    calls = iter(range(10**9))

    def metric(model: Any) -> float:
        number = next(calls)
        if number in moments and folder.exists():
            shutil.copytree(folder, to / f"{number}")
        return 0.0

    return metric


def nothing(model: Any) -> float:
    return 0.0


SMALL = {"algorithm": [dd.DuDe(LR), dd.DuDe(LR, memory="workers"), dd.UniformASGD(LR)], "lr": [LR, 0.1]}


def stopped(tmp_path: Path, problem: dd.Problem = noisy, grid: Any = SMALL, **options: Any) -> tuple[dd.Sweep, list[Path]]:
    """A sweep that was not stopped, and what was on disk at several moments of it."""
    options = {"updates": 14, "evaluate_every": 2, "checkpoint_every": 1, "keep": 3, **options}
    metric = images(tmp_path / "straight", tmp_path / "images", [14, 20, 26, 31, 36, 41])
    (tmp_path / "images").mkdir()
    options["metrics"] = {"image": metric}
    straight = sweep(grid, problem, pace, folder=tmp_path / "straight", batch=True, **options)
    return straight, sorted((tmp_path / "images").iterdir())


def gone_on(folder: Path, problem: dd.Problem = noisy, grid: Any = SMALL, **options: Any) -> dd.Sweep:
    options = {"updates": 14, "evaluate_every": 2, "checkpoint_every": 1, "keep": 3, **options}
    return sweep(grid, problem, pace, folder=folder, batch=True, metrics={"image": nothing}, **options)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dd.Sweep, list[Path]]:
    """What ``stopped`` gives with nothing else said, for tests that go on with a copy of it."""
    return stopped(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("keep", [1, 3])
def test_a_sweep_killed_at_any_moment_ends_as_one_never_stopped(keep: int, tmp_path: Path) -> None:
    straight, left = stopped(tmp_path, keep=keep)
    assert len(left) == 6
    left = left[1::2]
    assert any(list(image.glob("*/checkpoints/*.safetensors")) for image in left)
    for image in left:
        assert wrong(gone_on(image, keep=keep), straight) == []


def test_a_killed_sweep_does_not_begin_anew(tmp_path: Path) -> None:
    problem = Counted(**noisy.settings)
    before = Counted.taken
    straight, left = stopped(tmp_path, problem)
    whole, before = Counted.taken - before, Counted.taken
    assert wrong(gone_on(left[-1], problem), straight) == []
    assert Counted.taken - before < 0.5 * whole


@pytest.mark.parametrize("single", [{"algorithm": [dd.DuDe(LR)]}, {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 0.1]}])
def test_a_killed_sweep_of_few_runs_ends_as_one_never_stopped(single: Any, tmp_path: Path) -> None:
    straight, left = stopped(tmp_path, grid=single, updates=70 // len(single.get("lr", [0])), evaluate_every=1)
    assert len(left) == 6
    for image in left[::2]:
        again = gone_on(image, grid=single, updates=70 // len(single.get("lr", [0])), evaluate_every=1)
        assert wrong(again, straight) == []


def test_runs_that_have_the_same_losses_when_they_are_saved_go_on_together(tmp_path: Path) -> None:
    slow = dd.FixedSpeeds([1.0, 1.0, 1.0, 6.5])  # its first gradient is at the start that all runs share
    options = {"updates": 25, "evaluate_every": 1, "checkpoint_every": 1, "batch": True}
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 0.1]}
    (tmp_path / "images").mkdir()
    metric = images(tmp_path / "run", tmp_path / "images", [14])
    straight = sweep(grid, noisy, slow, folder=tmp_path / "run", metrics={"image": metric}, **options)
    again = sweep(grid, noisy, slow, folder=tmp_path / "images" / "14", metrics={"image": nothing}, **options)
    assert wrong(again, straight) == []


@pytest.mark.parametrize("how", ["damaged", "missing", "all missing", "all but the oldest damaged"])
def test_a_killed_sweep_goes_on_although_a_checkpoint_of_one_run_is_lost(
    how: str, killed: tuple[dd.Sweep, list[Path]], tmp_path: Path
) -> None:
    straight, left = killed
    image = shutil.copytree(left[-1], tmp_path / "image")
    unfinished = [place for place in sorted(image.iterdir()) if not (place / "result.json").exists()]
    checkpoints = sorted((unfinished[0] / "checkpoints").glob("[0-9]*"))
    assert len(checkpoints) == 3
    for path in checkpoints if "all" in how else checkpoints[-1:]:
        if "missing" in how:
            path.unlink()
        elif path != checkpoints[0]:
            path.write_bytes(path.read_bytes()[:-9] + b"is broken")
    assert wrong(gone_on(image), straight) == []


def test_a_run_of_a_killed_sweep_can_be_resumed_by_itself_and_the_sweep_goes_on(
    killed: tuple[dd.Sweep, list[Path]], tmp_path: Path
) -> None:
    straight, left = killed
    image = shutil.copytree(left[3], tmp_path / "image")
    run = next(run for run in straight.runs if not (image / run.folder.name / "result.json").exists())
    resumed = dd.resume(image / run.folder.name, metrics={"image": nothing})
    assert unlike(resumed, run) == []
    assert wrong(gone_on(image), straight) == []


def raising(number: int, error: type[BaseException]) -> Callable[[Any], float]:
    """A metric that does not come back from one of its calls."""
    calls = iter(range(10**9))

    def metric(model: Any) -> float:
        if next(calls) == number:
            raise error
        return 0.0

    return metric


@pytest.mark.parametrize("number", [8, 35])
@pytest.mark.parametrize("schedule", [{"evaluate_every": 2}, {"evaluate_seconds": 0.5}], ids=["updates", "seconds"])
def test_a_sweep_broken_off_in_the_middle_of_an_evaluation_ends_as_one_never_stopped(
    schedule: dict[str, Any], number: int, tmp_path: Path
) -> None:
    options = {"updates": 14, "checkpoint_every": 5, "folder": tmp_path, "batch": True, **schedule}
    with pytest.raises(Killed):
        sweep(SMALL, noisy, pace, metrics={"image": raising(number, Killed)}, **options)
    again = sweep(SMALL, noisy, pace, metrics={"image": nothing}, **options)
    assert wrong(again, sweep(SMALL, noisy, pace, metrics={"image": nothing}, **{**options, "folder": None})) == []


@pytest.mark.parametrize("number", [9, 30])
def test_ctrl_c_saves_where_the_runs_are_and_the_same_sweep_goes_on(number: int, tmp_path: Path) -> None:
    calls = iter(range(10**9))

    def interrupt(model: Any) -> float:
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return 0.0

    problem = Counted(**noisy.settings)
    options = {"updates": 14, "evaluate_every": 2, "checkpoint_every": 10**6, "batch": True}
    with pytest.raises(KeyboardInterrupt, match="saved"):
        sweep(SMALL, problem, pace, folder=tmp_path, metrics={"image": interrupt}, **options)
    assert len(list(tmp_path.glob("*/checkpoints/*.safetensors"))) == 6 - len(list(tmp_path.glob("*/result.json")))
    straight = sweep(SMALL, problem, pace, metrics={"image": nothing}, **options)
    again = sweep(SMALL, problem, pace, folder=tmp_path, metrics={"image": nothing}, **options)
    assert wrong(again, straight) == []


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
    options = {"updates": 30, "evaluate_every": 50, "checkpoint_every": 1, "batch": True, "keep": 40}
    straight = sweep(grid, problem, three, **{**options, "batch": False})
    assert sum(run.rejected > 0 for run in straight.runs) >= 2
    regrouped = 0
    for left in (92, 104, 116):
        folder, Mortal.left = tmp_path / f"{left}", left
        try:
            sweep(grid, problem, three, folder=folder, **options)
        except Killed:
            regrouped += len(list(folder.glob("*/result.json"))) <= 1
        Mortal.left = 10**9
        assert wrong(sweep(grid, problem, three, folder=folder, **options), straight) == [], f"killed at gradient {left}"
    assert regrouped >= 1


KILLER = """
import os, random, signal, sys, time, traceback
from pathlib import Path
import pyarrow.parquet, safetensors.torch
from test_sweep import murdered

signal.alarm(100)
kills, patience = 0, 0.4
while True:
    child = os.fork()
    if child == 0:
        try:
            murdered(Path(sys.argv[1]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kills < 4:
        time.sleep(random.Random(f"{sys.argv[2]} {kills}").uniform(0.05, patience))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        print(kills)
        sys.exit(code)
    kills, patience = kills + 1, patience + 0.3
"""


def murdered(folder: Path | None) -> dd.Sweep:
    grid = {"algorithm": METHODS[:3], "lr": [LR, 0.05]}
    return dd.sweep(
        grid,
        noisy,
        pace,
        folder=folder,
        compute=dd.Compute(batch=True),
        updates=20,
        evaluation=dd.Evaluation(every=4),
        checkpoint_every=2,
    )


def test_killed_by_the_system_again_and_again_a_sweep_ends_as_one_never_stopped(tmp_path: Path) -> None:
    path = os.pathsep.join(
        [*map(str, [*Path(__file__).parents[:2], Path(__file__).parents[1] / "batching"]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    seed = str(time.time_ns())
    command = [sys.executable, "-W", "error", "-c", KILLER, str(tmp_path / "sweep"), seed]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert int(done.stdout) >= 1
    ended = murdered(tmp_path / "sweep")
    assert wrong(ended, murdered(None)) == [], f"seed {seed}"
    assert all((run.folder / name).exists() for run in ended.runs for name in FILES)


def test_a_run_that_diverged_is_kept_in_its_folder_as_a_single_one_is(tmp_path: Path) -> None:
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 1e200, 0.05]}
    joint = sweep(grid, noisy, pace, folder=tmp_path / "joint", batch=True, **ENDS)
    alone = sweep(grid, noisy, pace, folder=tmp_path / "alone", **ENDS)
    assert joint.failed == alone.failed != {}
    assert wrong(joint, alone) == []
    again = sweep(grid, noisy, pace, folder=tmp_path / "joint", batch=True, **ENDS)
    assert wrong(again, sweep(grid, noisy, pace, folder=tmp_path / "alone", **ENDS)) == []


def test_every_method_in_a_killed_sweep_ends_as_in_one_never_stopped(tmp_path: Path) -> None:
    grid = {"algorithm": list(ALGORITHMS.values())[::2], "lr": [LR, 0.05]}  # by one of two, for there are many
    options = {"updates": 12, "evaluate_every": 3, "checkpoint_every": 4, "batch": True}
    (tmp_path / "images").mkdir()
    metric = images(tmp_path / "run", tmp_path / "images", [55])
    straight = sweep(grid, noisy, pace, folder=tmp_path / "run", metrics={"image": metric}, **options)
    (image,) = (tmp_path / "images").iterdir()
    assert wrong(sweep(grid, noisy, pace, folder=image, metrics={"image": nothing}, **options), straight) == []
    run = straight.runs[0]
    assert torch.equal(run.x, dd.resume(run.folder, metrics={"image": nothing}).x)

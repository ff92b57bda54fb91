"""What a run leaves behind: what went wrong is in it, an interrupted one has a model, and the best is kept."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.runs.outcome import read_run, state_of
from dualdelay.storage.folder import Folder
from helpers import rounding
from own import Scaled, Scenario, centers, differences, mlp, shards
from tables import CASES, LR

THREE = dd.FixedSpeeds([1.0, 2.0, 3.0])


class Bad(dd.Quadratic):
    """One worker's gradients are not finite from some job on."""

    worker, since = 1, 3

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient * torch.nan if worker == self.worker and draw >= self.since else gradient), loss


# --- workers that send what is no gradient ---


LEAVE = dd.Server(on_nonfinite="leave")


def test_a_worker_whose_gradients_stay_nan_leaves_where_that_is_the_rule(tmp_path: Path) -> None:
    problem = Bad(centers, noise=0.1)
    run = dd.simulate(dd.DuDe(0.05), problem, THREE, updates=60, folder=tmp_path / "run", server=LEAVE)
    assert [event["kind"] for event in run.trace.events] == ["rejected"] * 10 + ["left"]
    assert run.state.absent == {1} and run.faults == {"rejected": 10, "left": 1}
    assert "10 rejected, 1 left" in repr(run)
    assert any(note.startswith("worker 1: it left at time") and "number 10 in a row" in note for note in run.notes)
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    assert summary["faults"] == run.faults and summary["notes"] == list(run.notes)
    assert dd.replay(tmp_path / "run", problem).same_bits
    long = dd.simulate(dd.DuDe(0.1), Bad(centers), THREE, updates=400, server=LEAVE)
    # the mean of the centers of the two that stayed: exact gradients contract by 0.9 an update, 0.9^400 = 5e-19
    assert (long.x - dd.Quadratic([centers[0], centers[2]]).optimum()).abs().max() <= rounding(16) * 2


def test_a_run_killed_between_the_rejections_ends_the_same(tmp_path: Path) -> None:
    scenario = Scenario(dd.DuDe(0.05), Bad(centers, noise=0.1), THREE, updates=60, checkpoint_every=1, server=LEAVE)
    straight = scenario.run(tmp_path / "straight")
    for count in (14, 20, 26):
        scenario.killed(tmp_path / str(count), count)
        assert differences(dd.resume(tmp_path / str(count), problem=scenario.problem), straight) == []


def test_a_run_fails_if_a_worker_has_to_leave_and_the_method_has_no_rule_for_that() -> None:
    @dataclass(frozen=True)
    class Stubborn(dd.SyncSGD):
        away = ""
        leave, join = dd.Algorithm.leave, dd.Algorithm.join

    with pytest.raises(dd.RunFailed, match=r"worker 1 is gone .*number 10 in a row.*Stubborn would wait for it"):
        dd.simulate(Stubborn(0.05), Bad(centers), THREE, updates=60, server=LEAVE)


# --- evaluations that have holes ---


def test_a_worker_whose_loss_becomes_nan_is_named_and_the_others_losses_are_kept() -> None:
    class Turning(dd.Quadratic):
        def assess(self, x: Tensor, samples: Any = None) -> Any:
            numbers, parts = super().assess(x)
            if float(x.norm()) > 0.5:
                numbers, parts = {**numbers, "objective": math.nan}, {**parts, 1: {"loss": math.nan, "samples": 1}}
            return numbers, parts

    run = dd.simulate(dd.DuDe(0.05), Turning(centers), THREE, updates=20, evaluation=dd.Evaluation(every=5))
    assert any("the loss of worker 1 over its data is not finite" in note for note in run.notes)
    last = run.workers.version == 20
    assert np.isnan(run.workers.loss[last]).tolist() == [False, True, False]


@pytest.mark.numeric
def test_every_row_counts_the_workers_that_answered_and_their_own_losses_are_kept() -> None:
    run = dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=9, evaluation=dd.Evaluation(every=3))
    assert run.metrics.answered.tolist() == [4.0] * 4 and run.metrics.share.tolist() == [1.0] * 4
    assert list(run.workers) == ["time", "version", "worker", "loss", "samples"]
    assert run.workers.worker.tolist() == [0, 1, 2, 3] * 4
    means = run.workers.loss.reshape(4, 4).mean(1)
    assert means.tolist() == pytest.approx(run.metrics.objective.tolist(), rel=rounding(8))


def test_early_stopping_compares_only_what_the_same_workers_answered() -> None:
    """A worker's silence makes the mean another one, which is neither better nor worse."""
    stop = dd.EarlyStop(patience=2)

    def table(objective: list[float], answered: list[float]) -> Any:
        return SimpleTable(objective=np.array(objective), answered=np.array(answered))

    assert not stop(table([3.0, 1.0, 2.0, 2.5], [4, 3, 4, 4]))  # of four: 3.0, 2.0, 2.5
    assert stop(table([3.0, 2.0, 2.1, 2.5], [4, 4, 4, 4]))


class SimpleTable(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_a_run_that_was_stopped_early_names_the_version_that_it_returns() -> None:
    """The last row of its metrics is of another model."""
    evaluation = dd.Evaluation(every=1, early_stop=dd.EarlyStop(patience=2))
    start = dd.Server(initial_weights=torch.tensor([6.1], dtype=torch.float64))  # near the solution, which is 6
    run = dd.simulate(dd.VanillaASGD(1.5), CASES["q3"][0], THREE, updates=60, evaluation=evaluation, server=start)
    assert run.ended == "stop" and run.best is not None and run.best.version < run.version
    assert f"it returns its best, of version {run.best.version}" in repr(run)
    assert run.summary()["returned_version"] == run.best.version and "tensor" not in repr(run.best)


# --- a folder without its problem ---


def test_a_finished_run_is_loaded_without_its_problem(tmp_path: Path) -> None:
    problem = dd.Network(Scaled(), cross_entropy, shards(), 4)  # a scalar, a frozen parameter
    run = dd.simulate(dd.DuDe(LR), problem, THREE, updates=20, folder=tmp_path / "run", evaluation=dd.Evaluation(every=5))
    loaded = dd.load(tmp_path / "run")
    assert loaded.problem is None and loaded.algorithm == dd.DuDe(LR)
    assert torch.equal(loaded.x, run.x) and loaded.version == 20 and loaded.ended == "updates"
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in run.state_dict().items()
    }
    Scaled().load_state_dict(loaded.state_dict())
    assert loaded.metrics.objective.tolist() == run.metrics.objective.tolist()
    assert loaded.workers.loss.tolist() == run.workers.loss.tolist()
    assert loaded.trace.worker.tolist() == run.trace.worker.tolist() and loaded.delays == run.delays
    assert loaded.summary()["updates"] == 20 and loaded.audit == run.audit


def test_tied_weights_are_loaded_under_all_their_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.two(self.one(inputs).tanh())[:, :3]

    problem = dd.Network(Tied, cross_entropy, shards(), 4)
    run = dd.simulate(dd.DuDe(LR), problem, THREE, updates=5, folder=tmp_path / "run")
    loaded = dd.load(tmp_path / "run").state_dict()
    assert set(loaded) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert torch.equal(loaded["two.weight"], run.state_dict()["one.weight"])


def test_an_interrupted_run_has_a_model_and_can_be_a_start(tmp_path: Path) -> None:
    problem, folder = dd.Network(mlp(), cross_entropy, shards(), 4), tmp_path / "run"
    scenario = Scenario(dd.DuDe(LR), problem, THREE, updates=40, evaluation=dd.Evaluation(every=5))
    scenario.killed(folder, 24)
    loaded = dd.load(folder)
    assert loaded.ended == "interrupted" and loaded.version == 20
    assert loaded.metrics.version.tolist() == [0, 5, 10, 15, 20] and len(loaded.workers) == 15
    assert len(loaded.trace) == 22  # up to the checkpoint: the first update needs three arrivals
    mlp().load_state_dict(loaded.state_dict())
    checkpoint = sorted((folder / "checkpoints").iterdir())[-1]
    for start in (folder, checkpoint, loaded.state_dict(), loaded.x):
        run = dd.simulate(dd.DuDe(LR), problem, THREE, updates=0, server=dd.Server(initial_weights=start))
        assert torch.equal(run.x, loaded.x)
    with pytest.raises(dd.BadInput, match="is not the folder of a run"):
        dd.load(tmp_path / "nowhere")
    fresh = tmp_path / "fresh"
    scenario.killed(fresh, 2)
    assert dd.load(fresh).version == 0 and torch.equal(dd.load(fresh).x, problem.start(0))


def test_a_run_of_a_method_of_ones_own_is_loaded_too(tmp_path: Path) -> None:
    own = type("Own", (dd.VanillaASGD,), {})
    dd.simulate(own(LR), *CASES["q3"], updates=6, folder=tmp_path / "run")
    assert dd.load(tmp_path / "run").algorithm is None
    assert list(dd.load(tmp_path / "run").state_dict()) == ["x"]


def test_a_run_that_is_under_way_says_in_which_process(tmp_path: Path) -> None:
    seen: list[dd.Run] = []

    def look(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 8:
            seen.append(dd.load(tmp_path / "run"))
            assert state_of(seen[0]) == "under way"
        if state.version == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=20, watch=[look], checkpoint_every=4, folder=tmp_path / "run")
    assert f"it is under way in process {os.getpid()} on " in seen[0].notes[-1]
    after = dd.load(tmp_path / "run")
    assert state_of(after) == "interrupted" and not any("under way" in note for note in after.notes)
    (tmp_path / "run" / "lock").write_text("process 1 on here, since yesterday")  # as one that was killed leaves it
    assert state_of(dd.load(tmp_path / "run")) == "interrupted"
    assert state_of(dd.resume(tmp_path / "run")) == ""


@pytest.mark.parametrize("name", ["result.json", "metrics.parquet", "model.safetensors"])
def test_a_finished_run_whose_end_cannot_be_read_is_damaged_and_not_only_interrupted(name: str, tmp_path: Path) -> None:
    dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=6, folder=tmp_path / "run")
    assert read_run(tmp_path / "run")[1] == ""
    (tmp_path / "run" / name).write_bytes(b"no")
    run, damage = read_run(tmp_path / "run")
    assert f"{name} is damaged" in damage and run.version == 6
    (tmp_path / "run" / "result.json").unlink()
    assert read_run(tmp_path / "run")[1] == "", "what it lacks is not written before the end"


def test_a_note_ends_without_a_full_stop(tmp_path: Path) -> None:
    scenario = Scenario(dd.DuDe(LR), CASES["q3"][0], THREE, updates=40, checkpoint_every=4)
    scenario.killed(tmp_path / "run", 24)
    Folder(tmp_path / "run").fail("index 3 is out of bounds.")
    run = dd.load(tmp_path / "run")
    assert run.ended == "failed" and run.notes[-1] == "it could not go on: index 3 is out of bounds"


# --- the best model ---


def test_the_best_model_is_kept_whatever_comes_after(tmp_path: Path) -> None:
    """With this step the run wanders about its solution, and the best is somewhere in the middle."""
    seen: dict[int, Tensor] = {}
    watch = [lambda s, a: seen.setdefault(s.version, s.x.clone())]
    evaluation = dd.Evaluation(every=4, best_by="objective")
    scenario = Scenario(dd.DuDe(0.2), updates=60, checkpoint_every=10, evaluation=evaluation)
    run = scenario.run(tmp_path / "run", watch=watch)
    best = int(np.argmin(run.metrics.objective))
    assert 0 < best < len(run.metrics) - 1
    assert run.best is not None and run.best.version == run.metrics.version[best]
    assert run.best.value == run.metrics.objective[best] and torch.equal(run.best.x, seen[run.best.version])
    assert torch.equal(run.x, run.state.x)  # the run itself returns its last
    assert torch.equal(run.state_dict(best=True)["x"], seen[run.best.version])
    loaded = dd.load(tmp_path / "run")
    assert torch.equal(loaded.best.x, run.best.x) and loaded.best.version == run.best.version
    scenario.killed(tmp_path / "killed", 50)
    resumed = dd.resume(tmp_path / "killed")
    assert differences(resumed, run) == [] and torch.equal(resumed.best.x, run.best.x)
    assert (tmp_path / "killed" / "best.safetensors").read_bytes() == (tmp_path / "run" / "best.safetensors").read_bytes()
    assert dd.replay(tmp_path / "run").best.x.equal(run.best.x)
    assert run.summary()["best_version"] == run.best.version


def test_early_stopping_returns_the_best_model(tmp_path: Path) -> None:
    problem, speeds = CASES["noisy"]
    evaluation = dd.Evaluation(every=2, early_stop=dd.EarlyStop(patience=3))
    run = dd.simulate(dd.DuDe(0.2), problem, speeds, updates=3000, evaluation=evaluation, folder=tmp_path / "run")
    assert run.ended == "stop" and run.version > run.best.version
    assert torch.equal(run.x, run.best.x) and not torch.equal(run.x, run.state.x)
    assert problem.evaluate(run.x)["objective"] == run.metrics.objective.min()
    assert torch.equal(dd.load(tmp_path / "run").x, run.x)
    again = dd.replay(tmp_path / "run")
    assert again.same_bits and torch.equal(again.x, run.x)
    grid, compute = {"algorithm": [dd.DuDe(0.2)]}, dd.Compute(batch=True)
    (joint,) = dd.sweep(grid, problem, speeds, updates=3000, evaluation=evaluation, compute=compute).runs
    assert torch.equal(joint.x, run.x) and joint.best.version == run.best.version


def test_the_largest_is_the_best_by_max(tmp_path: Path) -> None:
    values = iter([0.1, 0.9, 0.5, 0.2])
    evaluation = dd.Evaluation(every=2, metrics={"f1": lambda model: next(values)}, best_by="max f1")
    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=6, evaluation=evaluation)
    assert (run.best.version, run.best.value) == (2, 0.9)
    with pytest.raises(dd.BadInput, match="kept no best model"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=1).state_dict(best=True)
    main(["train", "dude[lr=0.05]", "--problem", "digits[workers=3]", "--updates", "20", "--keep-best", "max accuracy",
          "--folder", str(tmp_path / "shell")])  # fmt: skip
    assert (tmp_path / "shell" / "best.safetensors").exists()

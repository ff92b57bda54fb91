"""What a run leaves behind: what went wrong is in it, an interrupted one has a model, and the best is kept."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
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
from dualdelay.core import Order
from flat import simulate
from own import Killed, Scaled, differences, kill_at, mlp, shards
from tables import CASES, LR

THREE = dd.FixedSpeeds([1.0, 2.0, 3.0])
CENTERS = [[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]]


def network() -> dd.Network:
    return dd.Network(mlp(), cross_entropy, shards(), 4)


class Bad(dd.Quadratic):
    """One worker's gradients are not finite from some job on."""

    worker, since = 1, 3

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient * torch.nan if worker == self.worker and draw >= self.since else gradient), loss


# --- a method that moves the model without a version, or twice ---


@dataclass(frozen=True)
class Sly(dd.VanillaASGD):
    """Replaces the weights without saying so, now and then."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.weights = s.weights + 0.1
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Leaving(dd.VanillaASGD):
    """Writes into the weights when somebody leaves."""

    def leave(self, s: dd.State, worker: int, held: Tensor | None = None) -> list[Order]:
        s.weights.add_(1.0)
        return super().leave(s, worker, held)


@dataclass(frozen=True)
class Twice(dd.VanillaASGD):
    """Makes two updates of every arrival."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def test_a_method_that_moves_the_model_without_a_new_version_is_refused() -> None:
    with pytest.raises(dd.BadInput, match=r"Sly.step replaced state.weights without a new version"):
        dd.simulate(Sly(LR), *CASES["q3"], updates=5)
    with pytest.raises(dd.BadInput, match=r"Leaving.leave wrote into state.x"):
        simulate(Leaving(LR), *CASES["q3"], updates=50, changes=[dd.speeds.leave(1, 3.5)])


def test_two_updates_in_one_step_skip_no_evaluation_and_no_checkpoint(tmp_path: Path) -> None:
    """Every fifth version came out as rows 0, 10, 20, 22."""
    options = {"updates": 22, "evaluate_every": 5, "checkpoint_every": 5, "keep": 99, "folder": tmp_path / "run"}
    run = simulate(Twice(LR), *CASES["q3"], **options)
    assert run.metrics.version.tolist() == [0, 6, 10, 16, 20, 22]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 5  # after 6, 10, 16, 20 and 22
    for row in run.metrics.rows():
        assert row["objective"] == pytest.approx(run.metrics.objective[run.metrics.version == row["version"]][0])


# --- workers that send what is no gradient ---


def test_a_worker_that_sends_nan_leaves_if_that_was_said(tmp_path: Path) -> None:
    problem = Bad(CENTERS, noise=0.1)
    how: dict[str, Any] = {"updates": 60, "folder": tmp_path / "run", "checkpoint_every": 7}
    run = simulate(dd.DuDe(0.05), problem, THREE, on_nonfinite="leave", **how)
    assert [event["kind"] for event in run.trace.events] == ["rejected"] * 10 + ["left"]
    assert run.state.absent == {1} and run.faults == {"rejected": 10, "left": 1}
    assert "10 rejected, 1 left" in repr(run)
    assert any(note.startswith("worker 1: it left at time") and "number 10 in a row" in note for note in run.notes)
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    assert summary["faults"] == run.faults and summary["notes"] == list(run.notes)
    assert dd.replay(tmp_path / "run", problem).same_bits
    alone = dd.Quadratic([CENTERS[0], CENTERS[2]])
    long = dd.simulate(dd.DuDe(0.1), Bad(CENTERS), THREE, updates=2000, server=dd.Server(on_nonfinite="leave"))
    assert torch.allclose(long.x, alone.optimum(), atol=1e-9)  # the mean of those who stayed


def test_a_run_killed_between_the_rejections_ends_the_same(tmp_path: Path) -> None:
    problem = Bad(CENTERS, noise=0.1)
    how: dict[str, Any] = {"updates": 60, "checkpoint_every": 1, "on_nonfinite": "leave"}
    straight = simulate(dd.DuDe(0.05), problem, THREE, folder=tmp_path / "straight", **how)
    for count in (14, 20, 26):
        folder = tmp_path / str(count)
        with pytest.raises(Killed):
            simulate(dd.DuDe(0.05), problem, THREE, folder=folder, watch=[kill_at(count)], **how)
        assert differences(dd.resume(folder, problem=problem), straight) == []


def test_a_method_without_a_rule_for_leaving_says_so_when_a_worker_has_to() -> None:
    @dataclass(frozen=True)
    class Stubborn(dd.SyncSGD):
        away = ""
        leave, join = dd.Algorithm.leave, dd.Algorithm.join

    with pytest.raises(dd.RunFailed, match=r"worker 1 is gone .*number 10 in a row.*Stubborn would wait for it"):
        dd.simulate(Stubborn(0.05), Bad(CENTERS), THREE, updates=60, server=dd.Server(on_nonfinite="leave"))


# --- evaluations that have holes ---


def test_a_nan_in_one_worker_s_data_is_named() -> None:
    data = shards()
    data[2][0][3, 1] = math.nan
    problem = dd.Network(mlp(), cross_entropy, data, 4)
    with pytest.raises(dd.BadInput, match=r"objective at the start is nan.* the data of worker 2, whose loss alone"):
        dd.simulate(dd.DuDe(LR), problem, THREE, updates=5)


def test_a_worker_whose_loss_becomes_nan_is_named_and_the_others_losses_are_kept() -> None:
    class Turning(dd.Quadratic):
        def assess(self, x: Tensor, samples: Any = None) -> Any:
            numbers, parts = super().assess(x)
            if float(x.norm()) > 0.5:
                numbers, parts = {**numbers, "objective": math.nan}, {**parts, 1: {"loss": math.nan, "samples": 1}}
            return numbers, parts

    run = dd.simulate(dd.DuDe(0.05), Turning(CENTERS), THREE, updates=20, evaluation=dd.Evaluation(every=5))
    assert any("the loss of worker 1 over its data is not finite" in note for note in run.notes)
    last = run.workers.version == 20
    assert np.isnan(run.workers.loss[last]).tolist() == [False, True, False]


def test_every_row_says_how_many_answered_and_the_workers_own_losses_are_kept() -> None:
    run = dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=9, evaluation=dd.Evaluation(every=3))
    assert run.metrics.answered.tolist() == [4.0] * 4 and run.metrics.share.tolist() == [1.0] * 4
    assert list(run.workers) == ["time", "version", "worker", "loss", "samples"]
    assert run.workers.worker.tolist() == [0, 1, 2, 3] * 4
    means = run.workers.loss.reshape(4, 4).mean(1)
    assert means.tolist() == pytest.approx(run.metrics.objective.tolist(), rel=1e-12)


def test_early_stopping_compares_only_what_the_same_workers_answered() -> None:
    """A worker's silence makes the mean another one, which is neither better nor worse."""
    stop = dd.EarlyStop(patience=2)

    def table(objective: list[float], answered: list[float]) -> Any:
        return SimpleTable(objective=np.array(objective), answered=np.array(answered))

    assert not stop(table([3.0, 1.0, 2.0, 2.5], [4, 3, 4, 4]))  # of four: 3.0, 2.0, 2.5
    assert stop(table([3.0, 2.0, 2.1, 2.5], [4, 4, 4, 4]))


class SimpleTable(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_what_a_run_that_was_stopped_early_returns_is_said() -> None:
    """The last row of its metrics is of another model."""
    rising = dd.Quadratic([[0.0], [6.0], [12.0]])
    start = torch.tensor([6.1], dtype=torch.float64)
    stop = dd.EarlyStop(patience=2)
    run = dd.simulate(
        dd.VanillaASGD(1.5),
        rising,
        THREE,
        updates=60,
        evaluation=dd.Evaluation(early_stop=stop, every=1),
        server=dd.Server(initial_weights=start),
    )
    assert run.ended == "stop" and run.best is not None and run.best.version < run.version
    assert f"it returns its best, of version {run.best.version}" in repr(run)
    assert run.summary()["returned_version"] == run.best.version and "tensor" not in repr(run.best)


# --- metrics and loggers of the user's own ---


def test_a_metric_that_raises_is_refused_at_once_and_later_switched_off() -> None:
    def broken(model: Any) -> float:
        raise KeyError("f1")

    with pytest.raises(dd.BadInput, match="metric 'f1' raised KeyError at the first model"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=5, evaluation=dd.Evaluation(metrics={"f1": broken}))
    calls: list[int] = []

    def later(model: Any) -> float:
        calls.append(1)
        return 1.0 if len(calls) < 3 else broken(model)

    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=20, evaluation=dd.Evaluation(every=5, metrics={"f1": later}))
    assert run.version == 20 and len(calls) == 3
    assert run.metrics.f1[:2].tolist() == [1.0, 1.0] and np.isnan(run.metrics.f1[2:]).all()
    assert any("metric 'f1': KeyError: 'f1'; it was switched off at version 10" in note for note in run.notes)
    with pytest.raises(dd.BadInput, match="metrics has 1 for a name"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=5, evaluation=dd.Evaluation(metrics={1: later}))


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)], ids=["exception", "exit"])
def test_whatever_ends_a_run_between_two_arrivals_it_is_saved(error: BaseException, tmp_path: Path) -> None:
    def watch(s: dd.State, a: dd.Arrival) -> None:
        if s.version == 13:
            raise error

    folder = tmp_path / "run"
    with pytest.raises(type(error)):
        dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=40, checkpoint_every=1000, folder=folder, watch=[watch])
    kept = dd.load(folder)
    assert kept.version == 13 and kept.ended == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert kept.ended == "interrupted" or f"it could not go on: {type(error).__name__}" in kept.notes[-1]
    straight = dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=40, folder=tmp_path / "straight", checkpoint_every=1000)
    assert differences(dd.resume(folder), straight) == []


# --- signals ---

ENDLESS = """
import sys, time
import dualdelay as dd
def watch(s, a):
    time.sleep(0.01)
    if s.version == 5:
        print("going", flush=True)
try:
    problem, speeds = dd.Digits(3, 1.0, hidden=4), dd.FixedSpeeds([1.0, 2.0, 3.0])
    dd.simulate(dd.DuDe(0.05), problem, speeds, updates=10**6, checkpoint_every=10**5, folder=sys.argv[1], watch=[watch])
except dd.Interrupted as interrupted:
    print(interrupted, flush=True)
    sys.exit(130)
"""


def minding_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_lost_terminal_save_a_run_as_ctrl_c_does(number: signal.Signals, tmp_path: Path) -> None:
    folder, command = tmp_path / "run", [sys.executable, "-c", ENDLESS, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=minding_its_terminal)
    assert process.stdout is not None and process.stdout.readline() == "going\n"
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "dd.resume goes on" in said
    loaded = dd.load(folder)
    assert loaded.version >= 5 and loaded.ended == "interrupted"
    assert f"saved after {loaded.version} updates" in said
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))
    model.load_state_dict(loaded.state_dict())  # no problem was needed
    again = dd.resume(folder, updates=loaded.version)
    assert torch.equal(again.x, loaded.x)


def test_the_shell_ends_with_130_after_sigterm(tmp_path: Path) -> None:
    command = "import sys; from dualdelay.cli import main; main(sys.argv[1:])"
    arguments = ["train", "dude[lr=0.05]", "--problem", "digits[workers=3]", "--updates", "10000000", "--folder", "run"]
    process = subprocess.Popen([sys.executable, "-c", command, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "config.json").exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Go on with: dualdelay resume run" in said


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
    problem, folder = network(), tmp_path / "run"
    with pytest.raises(Killed):
        how: dict[str, Any] = {"checkpoint_every": 5, "evaluate_every": 5}
        simulate(dd.DuDe(LR), problem, THREE, updates=40, folder=folder, watch=[kill_at(24)], **how)
    loaded = dd.load(folder)
    assert loaded.ended == "interrupted" and loaded.version == 20
    assert loaded.metrics.version.tolist() == [0, 5, 10, 15, 20] and len(loaded.workers) == 15
    assert len(loaded.trace) == len(loaded.trace.worker) > 0
    mlp().load_state_dict(loaded.state_dict())
    checkpoint = sorted((folder / "checkpoints").iterdir())[-1]
    for start in (folder, checkpoint, loaded.state_dict(), loaded.x):
        run = dd.simulate(dd.DuDe(LR), problem, THREE, updates=0, server=dd.Server(initial_weights=start))
        assert torch.equal(run.x, loaded.x)
    with pytest.raises(dd.BadInput, match="is not the folder of a run"):
        dd.load(tmp_path)
    fresh = tmp_path / "fresh"
    with pytest.raises(Killed):
        dd.simulate(dd.DuDe(LR), problem, THREE, updates=40, folder=fresh, watch=[kill_at(2)])
    assert dd.load(fresh).version == 0 and torch.equal(dd.load(fresh).x, problem.start(0))


def test_a_run_of_a_method_of_ones_own_is_loaded_too(tmp_path: Path) -> None:
    dd.simulate(Twice(LR), *CASES["q3"], updates=6, folder=tmp_path / "run")
    assert dd.load(tmp_path / "run").algorithm is None
    assert list(dd.load(tmp_path / "run").state_dict()) == ["x"]


# --- the best model ---


def test_the_best_model_is_kept_whatever_comes_after(tmp_path: Path) -> None:
    """With this step the run wanders about its solution, and the best is somewhere in the middle."""
    problem, speeds = CASES["noisy"]
    seen: dict[int, Tensor] = {}
    watch = [lambda s, a: seen.setdefault(s.version, s.x.clone())]
    how: dict[str, Any] = {"updates": 60, "evaluate_every": 4, "keep_best": "objective", "checkpoint_every": 10}
    run = simulate(dd.DuDe(0.2), problem, speeds, folder=tmp_path / "run", watch=watch, **how)
    best = int(np.argmin(run.metrics.objective))
    assert 0 < best < len(run.metrics) - 1
    assert run.best is not None and run.best.version == run.metrics.version[best]
    assert run.best.value == run.metrics.objective[best] and torch.equal(run.best.x, seen[run.best.version])
    assert torch.equal(run.x, run.state.x)  # the run itself returns its last
    assert torch.equal(run.state_dict(best=True)["x"], seen[run.best.version])
    loaded = dd.load(tmp_path / "run")
    assert torch.equal(loaded.best.x, run.best.x) and loaded.best.version == run.best.version
    with pytest.raises(Killed):
        simulate(dd.DuDe(0.2), problem, speeds, folder=tmp_path / "killed", watch=[kill_at(50)], **how)
    resumed = dd.resume(tmp_path / "killed")
    assert differences(resumed, run) == [] and torch.equal(resumed.best.x, run.best.x)
    assert (tmp_path / "killed" / "best.safetensors").read_bytes() == (tmp_path / "run" / "best.safetensors").read_bytes()
    assert dd.replay(tmp_path / "run").best.x.equal(run.best.x)
    assert run.summary()["best_version"] == run.best.version


def test_early_stopping_returns_the_best_model(tmp_path: Path) -> None:
    problem, speeds = CASES["noisy"]
    stop = dd.EarlyStop(patience=3)
    run = dd.simulate(
        dd.DuDe(0.2),
        problem,
        speeds,
        updates=3000,
        evaluation=dd.Evaluation(every=2, early_stop=stop),
        folder=tmp_path / "run",
    )
    assert run.ended == "stop" and run.version > run.best.version
    assert torch.equal(run.x, run.best.x) and not torch.equal(run.x, run.state.x)
    assert problem.evaluate(run.x)["objective"] == run.metrics.objective.min()
    assert torch.equal(dd.load(tmp_path / "run").x, run.x)
    again = dd.replay(tmp_path / "run")
    assert again.same_bits and torch.equal(again.x, run.x)
    (joint,) = dd.sweep(
        *({"algorithm": [dd.DuDe(0.2)]}, problem, speeds),
        compute=dd.Compute(batch=True),
        updates=3000,
        evaluation=dd.Evaluation(every=2, early_stop=stop),
    ).runs
    assert torch.equal(joint.x, run.x) and joint.best.version == run.best.version


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("objektive", "no metric 'objektive' to keep the best"),
        ("f1", "say which way is good: 'max f1' or 'min f1'"),
    ],
)
def test_a_best_that_cannot_be_told_is_refused(given: str, message: str) -> None:
    with pytest.raises(dd.BadInput, match=message):
        dd.simulate(
            dd.DuDe(LR), *CASES["q3"], updates=5, evaluation=dd.Evaluation(best_by=given, metrics={"f1": lambda model: 1.0})
        )


def test_larger_is_better_if_that_is_said(tmp_path: Path) -> None:
    values = iter([0.1, 0.9, 0.5, 0.2])
    how: dict[str, Any] = {"metrics": {"f1": lambda model: next(values)}, "keep_best": "max f1"}
    run = simulate(dd.DuDe(LR), *CASES["q3"], updates=6, evaluate_every=2, **how)
    assert (run.best.version, run.best.value) == (2, 0.9)
    with pytest.raises(dd.BadInput, match="kept no best model"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=1).state_dict(best=True)
    main(["train", "dude[lr=0.05]", "--problem", "digits[workers=3]", "--updates", "20", "--keep-best", "max accuracy",
          "--folder", str(tmp_path / "shell")])  # fmt: skip
    assert (tmp_path / "shell" / "best.safetensors").exists()


# --- a link of one's own ---


@dataclass(frozen=True)
class Lossy(dd.speeds.Link):
    """A link that is slow for large messages."""

    def seconds(self, size: int) -> float:
        return 0.5 if size > 10 else 0.125


def test_a_link_of_ones_own_is_simulated_and_given_again(tmp_path: Path) -> None:
    problem, speeds = CASES["noisy"]
    run = dd.simulate(dd.DuDe(LR), problem, dd.SimulatedFleet(speeds, link=Lossy()), updates=20, folder=tmp_path / "run")
    plain = dd.simulate(dd.DuDe(LR), problem, speeds, updates=20)
    assert run.time > plain.time + 1.0
    with pytest.raises(dd.BadInput, match=r"recorded link is a Lossy, .* dd.resume\(folder, link=...\)"):
        dd.resume(tmp_path / "run", updates=30)
    longer = dd.resume(tmp_path / "run", updates=30, speeds=dd.SimulatedFleet(None, link=Lossy()))
    assert (
        longer.trace.time.tolist()
        == dd.simulate(dd.DuDe(LR), problem, dd.SimulatedFleet(speeds, link=Lossy()), updates=30).trace.time.tolist()
    )
    assert dd.replay(tmp_path / "run").same_bits  # which needs no link


def test_a_replay_asks_for_what_a_replay_can_be_given(tmp_path: Path) -> None:
    dd.simulate(Twice(LR), *CASES["q3"], updates=6, folder=tmp_path / "run")
    with pytest.raises(dd.BadInput, match=r"dd.replay\(folder, algorithm=...\)"):
        dd.replay(tmp_path / "run")
    dd.simulate(dd.DuDe(LR), network(), THREE, updates=6, folder=tmp_path / "own")
    with pytest.raises(dd.BadInput, match=r"dd.replay\(folder, problem=...\)"):
        dd.replay(tmp_path / "own")

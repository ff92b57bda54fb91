"""What only a user meets on real workers: sites without files, functions that raise, processes that die, one site more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from flat import train
from real import Until, kinds, small_net

pytestmark = pytest.mark.usefixtures("ray_here")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not have this folder on their path


@dataclass
class Site:
    """A shard function: site i has 20 (i + 1) samples, unless its file is missing."""

    missing: int = -1

    def __call__(self, worker: int) -> tuple[Tensor, Tensor]:
        if worker == self.missing:
            raise FileNotFoundError(f"no such file: site-{worker}.csv")
        inputs = torch.randn(20 * (worker + 1), 4, generator=torch.Generator().manual_seed(worker)) + 10 * worker
        return inputs, (inputs.sum(1) > 40 * worker).long()


@dataclass
class Talking:
    """A step by which worker 1 talks, and in its first process dies of a signal when it has worked for a while."""

    once: str
    server: int

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if os.getpid() != self.server and 5 < inputs.mean() < 15:
            print("a word from the second site", flush=True)
            if not Path(self.once).exists():
                Path(self.once).touch()
                os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.0 if os.getpid() == self.server else 0.01)
        return cross_entropy(model(inputs), targets)


def test_a_site_without_files_and_one_without_its_machine_are_in_the_result(tmp_path: Path) -> None:
    problem = dd.Network(small_net, cross_entropy, Site(missing=1), workers=4, batch_size=4)
    fleet = dd.RayFleet(resources=[{}, {}, {}, {"gold": 2}], absent=[3], faults=dd.FaultPolicy(retries=1))
    loud = []

    def logger(values: Any, step: int) -> None:
        loud.append(step)
        raise OSError("the disk of the board is full")

    def metric(model: Any) -> float:
        raise ValueError("no such label")

    heard: set[int] = set()

    def enough(state: dd.State, a: dd.Arrival) -> bool:
        if not heard:
            fleet.patience = 2.0  # for who comes now; the others had the time they needed
            fleet.control.join(3)
        heard.add(a.worker)
        return heard >= {0, 2} and a.time > 4.0

    until = Until(enough)
    options = {**until, "metrics": {**until["metrics"], "own": metric}}
    run = train(dd.DuDe(lr=0.05), problem, fleet, folder=tmp_path / "run", log=[logger], **options)
    assert run.ended == "stop" and run.version > 20 and run.state.n == 2
    first = "FileNotFoundError: no such file: site-1.csv"
    notes = "\n".join(run.notes)
    assert first in notes and "worker 1" in notes
    assert "it claims 2 gold, and no machine of the cluster has that (the most is 0)" in notes and "worker 3" in notes
    assert "the disk of the board is full" in notes and len(loud) == 1
    assert "no such label" in notes
    assert "failed" in repr(run) and run.faults["failed"] == run.summary()["faults"]["failed"] == 2
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["notes"] == list(run.notes) and kept["faults"] == run.faults
    assert set(run.metrics.answered.tolist()) == {2.0} and set(run.workers.worker.tolist()) == {0, 2}


def test_a_process_that_dies_is_named_with_its_signal_and_what_it_said(tmp_path: Path) -> None:
    """And one site more than was counted at the start joins, all count by their samples, and a replay has the same bits."""
    step = Talking(str(tmp_path / "died"), os.getpid())
    problem = dd.Network(small_net, shards=Site(), step=step, workers=2, batch_size=4, weights="samples")
    fleet = dd.RayFleet(room=1)
    ray.shutdown()  # so that it starts one that shows what its processes print
    joined: list[int] = []

    def watch(state: dd.State, a: dd.Arrival) -> bool:
        if not joined and state.version > 10:
            joined.append(fleet.control.join())
        return a.worker == 2 and a.job.draw > 5 and "crashed" in seen

    seen: list[str] = []

    def look(state: dd.State, a: dd.Arrival) -> bool:
        seen.extend(["crashed"] * Path(step.once).exists())
        return watch(state, a)

    run = train(dd.DuDe(lr=0.05), problem, fleet, folder=tmp_path / "run", **Until(look))
    assert joined == [2] and "joined" in kinds(run, 2) and "weighed" in kinds(run) and run.state.n == 3
    text = next(event["text"] for event in run.trace.events if event["kind"] == "crashed")
    said = tmp_path / "run" / "output" / "worker-1-0.txt"
    assert "its process died by SIGSEGV (pid " in text and f"its output is in {said}" in text
    assert "a word from the second site" in said.read_text()
    assert "a word from the second site" in (tmp_path / "run" / "output" / "worker-1-1.txt").read_text()
    with pytest.raises(dd.BadInput, match="no room for another worker: room is 1"):
        fleet.control.join()
    again = dd.replay(
        tmp_path / "run", dd.Network(small_net, shards=Site(), step=step, workers=2, batch_size=4, weights="samples")
    )
    assert torch.equal(again.x, run.x)
    last = run.workers.version == run.version
    losses, sizes = run.workers.loss[last], run.workers.samples[last]
    assert sizes.tolist() == [20, 40, 60]
    assert run.metrics.objective[-1] == pytest.approx(float((losses * sizes).sum() / sizes.sum()), rel=1e-5)


@dataclass
class Mended(Site):
    """A site whose file is missing until it is put there."""

    file: str = ""

    def __call__(self, worker: int) -> tuple[Tensor, Tensor]:
        self.missing = 1 if not Path(self.file).exists() else -1
        return super().__call__(worker)


def test_a_site_that_was_mended_is_there_when_the_run_is_resumed(tmp_path: Path) -> None:
    problem = dd.Network(small_net, cross_entropy, Mended(file=str(tmp_path / "file")), workers=3, batch_size=4)
    run = dd.train(
        dd.DuDe(lr=0.05), problem, dd.RayFleet(faults=dd.FaultPolicy(retries=0)), updates=40, folder=tmp_path / "run"
    )
    assert set(run.trace.worker.tolist()) == {0, 2} and run.faults == {"failed": 1, "left": 1}
    (tmp_path / "file").touch()
    again = dd.resume(tmp_path / "run", problem=problem, updates=640)
    assert 1 in again.trace.worker.tolist()  # a process that is started after the others' takes far longer than this
    assert again.state.n == 3 and torch.equal(dd.replay(tmp_path / "run", problem).x, again.x)


def test_if_nobody_can_compute_a_first_gradient_one_message_says_why(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    problem = dd.Network(model, cross_entropy, Site(), workers=2, batch_size=4)
    with pytest.raises(dd.RunFailed, match=r"nobody could compute a first gradient; worker \d says: .*stochastic=True"):
        dd.train(dd.DuDe(lr=0.05), problem, updates=40, folder=tmp_path / "run")


LOCAL = """
import os, signal, sys, time
import dualdelay as dd
class Slow(dd.Quadratic):
    def gradient(self, x, worker, draw):
        time.sleep(0.01)
        return super().gradient(x, worker, draw)
def watch(state, a):
    if state.version == 30 and sys.argv[2] == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if state.version == 30 and sys.argv[2] == "raylet":
        from ray._private.worker import _global_node
        _global_node.kill_raylet(check_alive=False)
try:
    options = {"updates": 10**6, "checkpoint_every": 10**5, "folder": sys.argv[1], "watch": [watch]}
    dd.train(dd.DuDe(lr=0.05), Slow([[0.0], [4.0]]), **options)
except (dd.DualDelayError, dd.Interrupted) as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("what", ["raylet", "sigterm"])
def test_when_ray_dies_or_the_scheduler_ends_it_the_run_is_saved_and_says_how_to_go_on(what: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOCAL)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 3 and "dd.resume" in ended.stdout, ended
    assert ended.stdout.startswith("RunFailed" if what == "raylet" else "Interrupted")
    kept = dd.load(tmp_path / "run")
    assert kept.version >= 30 and f"{kept.version} updates" in ended.stdout

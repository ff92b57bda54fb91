"""Whatever signal ends a run, it is saved, or was before, and goes on to the bits of the run that was never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdelay as dd
import killed_by_the_system
from dualdelay.cli import main
from own import FILES, Scenario, differences, mismatches
from tables import ALGORITHMS, CASES, LR

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """A lost terminal ends the process, also where the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number: signal.Signals) -> None:
    """Send a signal to this process, if a run has taken charge of it: otherwise that would be the end of the tests."""
    assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler), "no run waits for it"
    signal.raise_signal(number)


@pytest.mark.parametrize(("k", "name"), list(enumerate(ALGORITHMS)))
def test_interrupted_the_run_is_saved_where_it_stands(k: int, name: str, tmp_path: Path) -> None:
    number = SIGNALS[k % 3]  # by turns
    scenario = Scenario(ALGORITHMS[name], *CASES["logistic"], updates=20, checkpoint_every=50)
    straight = scenario.run(folder=tmp_path / "straight")
    arrivals = []

    def interrupt(state: dd.State, arrival: dd.Arrival) -> None:
        arrivals.append(arrival)
        if len(arrivals) in (6, 13):
            send(number)

    with pytest.raises(dd.Interrupted, match=r"saved after .* updates in .*; dd.resume goes on") as caught:
        scenario.run(folder=tmp_path / "run", watch=(interrupt,))
    saved = dd.load(tmp_path / "run")
    assert saved.ended == "interrupted" and f"saved after {saved.version} updates" in str(caught.value)
    with pytest.raises(dd.Interrupted, match="saved after"):
        dd.resume(tmp_path / "run", watch=(interrupt,))
    assert len(arrivals) == 13
    resumed = dd.resume(tmp_path / "run", watch=(lambda state, arrival: arrivals.append(arrival),))
    assert len(arrivals) == len(straight.trace)  # nothing was computed twice
    assert differences(resumed, straight) == []


def test_a_lost_terminal_that_was_to_be_ignored_is(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    watch = [lambda state, arrival: signal.raise_signal(signal.SIGHUP)]
    try:
        run = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=5, watch=watch, folder=tmp_path / "run")
    except dd.Interrupted:  # which would end the tests, too
        pytest.fail("it interrupted the run")
    assert run.version == 5


class Signalling(dd.DuDe):
    """A method that is interrupted in its step to version 9."""

    def step(self, s: Any, a: dd.Arrival) -> Any:
        if s.version == 8:
            send(signal.SIGTERM)
        return super().step(s, a)


def test_on_the_shell_sigterm_exits_with_130_and_names_the_command_that_goes_on(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(dd.ALGORITHMS, "signalling", Signalling)
    with pytest.raises(SystemExit) as exited:
        main(
            [
                "train",
                "signalling[lr=0.05]",
                "--problem",
                "digits[workers=3,hidden=4]",
                "--updates",
                "20",
                "--folder",
                "run",
            ]
        )
    assert exited.value.code == 130 and "Go on with: dualdelay resume run" in capsys.readouterr().err
    saved = dd.load("run")
    assert (saved.version, saved.ended) == (9, "interrupted")  # the step was not broken off
    model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))
    model.load_state_dict(saved.state_dict())  # no problem was needed
    assert torch.equal(dd.resume("run", updates=9).x, saved.x)


def test_ctrl_c_on_a_shell_exits_with_130_and_the_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    problem = "quadratic[centers=[[0.0,1.0],[6.0,2.0],[12.0,3.0]],noise=0.5]"
    command = f"train dude[lr=0.01] --problem {problem} --speeds fixed[times=[1,2,4]] --updates 100000000"
    options = f"--checkpoint-every 500 --evaluate-every 1000 --folder {folder}"
    process = subprocess.Popen(
        [sys.executable, "-m", "dualdelay", *command.split(), *options.split()], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("checkpoints/*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"dualdelay resume {folder}" in printed and "Traceback" not in printed
    total = int(printed.split("saved after ")[1].split()[0]) + 100
    resumed = dd.resume(folder, updates=total)
    options = {"updates": total, "checkpoint_every": 500, "evaluation": dd.Evaluation(every=1000)}
    fleet, place = dd.FixedSpeeds([1, 2, 4]), tmp_path / "straight"
    assert differences(resumed, dd.simulate(dd.DuDe(0.01), resumed.problem, fleet, folder=place, **options)) == []


@pytest.mark.slow
def test_killed_by_the_system_at_random_moments_runs_and_a_sweep_end_with_the_same_bits(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    seed = str(random.randrange(10**6))
    done = subprocess.run(
        [sys.executable, "-W", "error", killed_by_the_system.__file__, str(tmp_path / "killed"), seed],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    kills = dict(zip(killed_by_the_system.WORK, map(int, done.stdout.split()), strict=True))
    assert min(kills.values()) >= 1, kills
    for name in killed_by_the_system.METHODS:
        ended = dd.load(tmp_path / "killed" / name)
        straight = killed_by_the_system.run(name, tmp_path / "straight")
        assert torch.equal(ended.x, straight.x), f"{name}, seed {seed}"
        assert differences(dd.resume(tmp_path / "killed" / name), straight) == [], f"{name}, seed {seed}"
    ended, straight = (killed_by_the_system.sweep(tmp_path / place) for place in ("killed", "straight"))
    wrong = [mismatches(*pair) for pair in zip(ended.runs, straight.runs, strict=True)]
    assert (wrong, ended.failed) == ([[]] * 6, {}), f"seed {seed}"
    assert all((run.folder / name).exists() for run in ended.runs for name in FILES)

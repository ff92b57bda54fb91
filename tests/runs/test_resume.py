"""A run that was stopped, anywhere and however often, ends with the bits of the run nobody stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from flat import resume, simulate
from own import FILES, SCENARIOS, Killed, Scenario, bits, differences, kill_at
from tables import ALGORITHMS, CASES, LR

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
    parts = {arrivals // 2} if name in ALGORITHMS else range(3, arrivals, max(1, arrivals // 4))  # methods are many
    for count in {1, *parts, arrivals}:
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
        evaluate_every=data.draw(st.integers(1, 6)),
        evaluate_seconds=data.draw(st.sampled_from([None, 8.0, 50.0])),
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


NURSERY = """
import os, random, signal, sys, time, traceback
import pyarrow.parquet  # before the forks, so that a child writes at once
import safetensors.torch
import dualdelay as dd
from test_resume import murdered
from tables import ALGORITHMS

signal.alarm(60)
for name in sys.argv[3:]:
    kills, patience = 0, 0.1
    while True:
        child = os.fork()
        if child == 0:
            try:
                murdered(name, sys.argv[1], ALGORITHMS)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # without the slow end of an interpreter
        time.sleep(random.Random(f"{sys.argv[2]} {name} {kills}").uniform(0, patience) if kills else 0.02)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code > 0:
            sys.exit(code)  # it was not killed: it failed
        if code == 0:
            break
        kills, patience = kills + 1, patience + 0.05  # patience grows so that it ends
    print(name, kills, flush=True)
"""


def murdered(name: str, place: str | Path, methods: dict) -> dd.Run:
    options = {"updates": 25, "checkpoint_every": 1, "evaluate_every": 10, "go_on": True}
    return simulate(methods[name], *CASES["noisy"], folder=Path(place) / name, **options)


def test_killed_by_the_system_at_random_moments_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    names = ["dude two workers", "shuffled", "mifa active"]
    path = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    seed = str(random.randrange(10**6))
    command = [sys.executable, "-c", NURSERY, str(tmp_path / "killed"), seed, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, (said, kills) in zip(names, (line.rsplit(" ", 1) for line in done.stdout.splitlines()), strict=True):
        assert said == name
        assert int(kills) >= 1
        ended = dd.resume(tmp_path / "killed" / name, watch=(never,))
        assert differences(ended, murdered(name, tmp_path / "straight", ALGORITHMS)) == [], f"{name}, seed {seed}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_interrupted_by_ctrl_c_the_run_is_saved_where_it_stands(name: str, tmp_path: Path) -> None:
    scenario = Scenario(ALGORITHMS[name], *CASES["logistic"], updates=20, checkpoint_every=50)
    straight = scenario.run(folder=tmp_path / "straight")
    arrivals = []

    def interrupt(state: dd.State, arrival: dd.Arrival) -> None:
        arrivals.append(arrival)
        if len(arrivals) in (6, 13):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="saved after"):
        scenario.run(folder=tmp_path / "run", watch=(interrupt,))
    with pytest.raises(KeyboardInterrupt, match="saved after"):
        dd.resume(tmp_path / "run", watch=(interrupt,))
    assert len(arrivals) == 13
    resumed = dd.resume(tmp_path / "run", watch=(lambda state, arrival: arrivals.append(arrival),))
    assert len(arrivals) == len(straight.trace)  # nothing was computed twice
    assert differences(resumed, straight) == []


def test_ctrl_c_on_the_shell_exits_with_130_and_says_how_to_go_on(tmp_path: Path) -> None:
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
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"dualdelay resume {folder}" in said
    assert "Traceback" not in said
    saved = int(said.split("saved after ")[1].split()[0])
    resumed = dd.resume(folder, updates=saved + 100)
    scenario = Scenario(dd.DuDe(0.01), resumed.problem, dd.FixedSpeeds([1, 2, 4]))
    options = {"updates": saved + 100, "checkpoint_every": 500, "evaluate_every": 1000, "evaluate_seconds": None}
    assert differences(resumed, scenario.run(folder=tmp_path / "straight", **options)) == []


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
    scenario = Scenario(ALGORITHMS[name], checkpoint_every=4, evaluate_seconds=1.5)
    straight = scenario.run(**long, folder=tmp_path / "straight")
    first = scenario.run(**short, folder=tmp_path / "run")
    longer = resume(tmp_path / "run", **long)
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

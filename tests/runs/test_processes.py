"""Runs of a sweep side by side in processes of this machine: the same bits, whatever happens to the processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core.devices import free_memory
from dualdelay.runs import processes, spread
from dualdelay.runs.processes import Outcome, outcome_of, received, sent
from own import FILES, content, differences

GRID: dict[str, list[Any]] = {"algorithm": [dd.DuDe(0.05), dd.UniformASGD(0.05)], "lr": [0.02, 0.05], "seed": [0, 1]}
PACE = dd.FixedSpeeds([1.0, 2.0, 3.5])
HERE = dd.Compute(cores=1)
TWO = dd.Compute(cores=2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Helpers are started at once, and are sent what this file and its neighbours define."""
    monkeypatch.setattr(processes, "AFTER", 0.0)
    ours = [sys.modules[__name__], sys.modules["own"]]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in ours:
        cloudpickle.unregister_pickle_by_value(module)


class Meets(dd.Quadratic):
    """A problem whose gradients in this process wait until another has begun one, if a file is named by which they meet."""

    def __init__(
        self, meeting: Path | None = None, happens: Callable[[int, int, int], None] | None = None, **settings: Any
    ) -> None:
        super().__init__(**{"centers": [[0.0, 1.0], [6.0, -2.0], [1.0, 1.0]], "noise": 0.3, **settings})
        self.meeting, self.happens, self.home = meeting, happens, os.getpid()

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.meeting is not None and os.getpid() != self.home:
            self.meeting.touch()
        elif self.meeting is not None:
            when(self.meeting.exists)
        if self.happens is not None:
            self.happens(self.seed, worker, draw)
        return super().gradient(x, worker, draw)

    def reseeded(self, seed: int) -> Meets:
        other = type(self)(self.meeting, self.happens, **{**self.settings, "seed": seed})
        other.home = self.home
        return other


def when(happens: Callable[[], Any]) -> Any:
    """What a function gives once that is something."""
    until = time.monotonic() + 90
    while not (found := happens()):
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.02)
    return found


def same_bits(one: dd.Run | None, other: dd.Run | None) -> list[str]:
    """What is not the same to the bit in two runs, but for who computed them."""
    if one is None or other is None:
        return [] if one is other else [f"{one} and {other}"]
    return [name for name in differences(one, other) if "pid" not in name and name not in FILES]


def pid(model: object) -> float:
    return float(os.getpid())


def swept(compute: dd.Compute, problem: dd.Problem | None = None, folder: Path | None = None, **options: Any) -> dd.Sweep:
    problem, evaluation = Meets() if problem is None else problem, dd.Evaluation(every=10, metrics={"pid": pid})
    return dd.sweep(GRID, problem, PACE, updates=30, folder=folder, compute=compute, evaluation=evaluation, **options)


def test_no_bit_depends_on_how_many_processes_compute(tmp_path: Path) -> None:
    """Nor does a byte of the runs' folders, but for the metric that names the process."""
    alone, two = swept(HERE), swept(TWO, Meets(tmp_path / "met"))
    assert set(alone["pid"]) == {os.getpid()} and len(set(two["pid"])) == 2
    assert alone.points == two.points
    assert [same_bits(*pair) for pair in zip(alone.runs, two.runs, strict=True)] == 8 * [[]]
    for one, other in zip(alone.runs, two.runs, strict=True):
        assert one is not None and other is not None and other.problem is not None and one.problem is not None
        assert type(other.algorithm) is type(one.algorithm) and other.algorithm == one.algorithm
        assert type(other.problem) is Meets and other.problem.fingerprint() == one.problem.fingerprint()


def test_what_a_run_in_another_process_leaves_in_its_folder_is_what_one_leaves_that_is_computed_here(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"updates": 30, "evaluation": dd.Evaluation(every=10)}
    for name, problem, compute in (("here", Meets(), HERE), ("two", Meets(tmp_path / "met"), TWO)):
        table = dd.sweep(GRID, problem, PACE, folder=tmp_path / name, compute=compute, **options)
        assert [run.folder is not None and run.folder.parent == tmp_path / name for run in table.runs if run] == 8 * [True]
    here, two = content(tmp_path / "here"), content(tmp_path / "two")
    assert here.keys() == two.keys()
    assert [name for name in here if here[name] != two[name] and not name.endswith("lock")] == []


def test_the_same_call_computes_nothing_again_whatever_the_number_of_processes(tmp_path: Path) -> None:
    first = swept(TWO, Meets(tmp_path / "met"), tmp_path / "runs")
    before = content(tmp_path / "runs")
    for compute in (HERE, TWO):
        assert set(swept(compute, folder=tmp_path / "runs")["pid"]) == set(first["pid"])
    assert content(tmp_path / "runs") == before


SCRIPT = """
import os, sys, time
print("executed", flush=True)
import dualdelay as dd
from dualdelay.runs import processes
processes.AFTER = 0.0

HOME = os.getpid()

class Mine(dd.Quadratic):
    def gradient(self, x, worker, draw):
        if os.getpid() != HOME:
            open("met", "w").close()
        while sys.argv[3] == "2" and sys.argv[2] == "meet" and not os.path.exists("met"):
            time.sleep(0.02)
        time.sleep(0.05 if sys.argv[2] == "slow" else 0.0)
        return super().gradient(x, worker, draw)

class Own(dd.DuDe):
    name = "own"

print("table", flush=True)
table = dd.sweep(
    {"algorithm": [dd.DuDe(lr=0.05), Own(lr=0.02)], "seed": [0, 1, 2]}, Mine([[0.0], [1.0], [4.0]], noise=0.3),
    dd.FixedSpeeds([1.0, 2.0, 3.5]), updates=60, checkpoint_every=2, compute=dd.Compute(cores=int(sys.argv[3])),
    evaluation=dd.Evaluation(every=20, metrics={"pid": lambda model: float(os.getpid())}), folder=sys.argv[1],
)
print(len(set(table["pid"])), [run.x.tolist() for run in table.runs], flush=True)
"""


def script(folder: Path, how: str, cores: int) -> subprocess.Popen[str]:
    """The script of a user, without a guard, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "mine.py", "runs", how, str(cores)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints on one core, where it is not stopped."""
    printed, _ = script(tmp_path_factory.mktemp("script") / "whole", "quick", 1).communicate(timeout=120)
    return printed


def test_a_script_with_its_own_classes_and_without_a_guard_is_executed_once(whole: str, tmp_path: Path) -> None:
    two = script(tmp_path / "two", "meet", 2).communicate(timeout=120)
    assert whole.startswith("executed\ntable\n1 [[") and two[0].startswith("executed\ntable\n2 [["), two
    assert whole.splitlines()[2][2:] == two[0].splitlines()[2][2:]


def helpers_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(text[1]) == pid and text[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT])  # SIGKILL: test_cluster.py, whose driver goes on by the same code
def test_stopped_by_a_signal_the_same_call_goes_on_to_the_same_bits(
    number: signal.Signals, whole: str, tmp_path: Path
) -> None:
    process = script(tmp_path / "stopped", "slow", 2)
    runs = tmp_path / "stopped" / "runs"
    when(lambda: len({path.parent.parent for path in runs.glob("*/checkpoints/*")}) >= 2)  # two are under way
    helpers = helpers_of(process.pid)
    assert len(helpers) == 1
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    when(lambda: not any(map(is_alive, helpers)))
    if number != signal.SIGKILL:
        assert "the runs were saved in runs; the same call goes on where they are" in errors
    left = {path.parent.parent.name for path in runs.glob("*/checkpoints/*")}
    done = {path.parent: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert len(left) >= 2 and len(done) < 6
    going_on = script(tmp_path / "stopped", "quick", 2)
    out, errors = going_on.communicate(timeout=120)
    assert out.splitlines()[2][2:] == whole.splitlines()[2][2:], errors
    assert {path: (path / "result.json").stat().st_mtime_ns for path in done} == done


@pytest.mark.parametrize("always", [False, True])
def test_a_process_that_dies_costs_its_run_alone_and_that_is_taken_up_again(
    always: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, mark = os.getpid(), tmp_path / "died"

    def happens(seed: int, worker: int, draw: int) -> None:
        if os.getpid() != here and seed == 1 and (always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    table, alone = swept(TWO, Meets(tmp_path / "met", happens)), swept(HERE)
    assert "was killed by SIGKILL (kill -9, or the kernel when memory runs out); its run is taken up" in caplog.text
    assert set(table.failed) <= ({k for k, point in enumerate(alone.points) if point["seed"] == 1} if always else set())
    assert all("and so did the one before" in why for why in table.failed.values())
    for one, other in zip(table.runs, alone.runs, strict=True):
        assert one is None or same_bits(one, other) == []


def test_a_run_that_fails_takes_no_other_with_it_and_is_told_as_one_after_the_other(tmp_path: Path) -> None:
    def happens(seed: int, worker: int, draw: int) -> None:
        if seed == 1 and draw == 3:
            raise ValueError("seed 1 is bad")

    alone, two = swept(HERE, Meets(None, happens)), swept(TWO, Meets(tmp_path / "met", happens))
    assert alone.failed == two.failed and len(two.failed) == 4
    assert all("seed 1 is bad" in why for why in two.failed.values())
    assert [same_bits(*pair) for pair in zip(alone.runs, two.runs, strict=True)] == 8 * [[]]


class Refuses(Meets):
    """A problem that has no first weights for one seed, for a reason of the user's or another."""

    bad, why = 1, "that cannot be."

    def start(self, seed: int) -> Tensor:
        if self.seed == self.bad:
            raise dd.BadInput(self.why) if self.why.endswith(".") else ValueError(self.why)
        return super().start(seed)


@pytest.mark.parametrize("bad", [0, 1])
def test_input_that_cannot_be_is_the_users_in_the_first_run_and_the_runs_own_later(
    bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refuses, "bad", bad)
    told: list[Any] = []
    for compute, meeting in ((HERE, None), (TWO, tmp_path / "met")):
        try:
            told.append(swept(compute, Refuses(meeting)).failed)
        except dd.BadInput as error:
            told.append(str(error))
    assert told == 2 * (["that cannot be."] if bad == 0 else [dict.fromkeys((1, 3, 5, 7), "that cannot be.")])


def test_what_else_a_users_code_raises_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refuses, "why", "no start")
    for compute, meeting in ((HERE, None), (TWO, tmp_path / "met")):
        with pytest.raises(ValueError, match="no start"):
            swept(compute, Refuses(meeting))


class Unusual(Exception):
    """An error that is made of two things, so that no pickle can bring it back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def test_what_comes_of_a_call_can_always_be_sent_and_says_where_an_error_was() -> None:
    def unusual(number: int, share: object) -> None:
        raise Unusual("one", "two")

    def usual(number: int, share: object) -> None:
        raise ValueError("bad")

    def refused(number: int, share: object) -> None:
        raise dd.BadInput("bad")

    error = received(sent(outcome_of(unusual, 0, print))).error
    assert isinstance(error, RuntimeError) and "Unusual: one two" in str(error) and "in unusual" in str(error)
    error = received(sent(outcome_of(usual, 0, print))).error
    assert isinstance(error, ValueError) and "in usual" in error.__notes__[0]
    error = received(sent(outcome_of(refused, 0, print))).error
    assert isinstance(error, dd.BadInput) and not hasattr(error, "__notes__")
    error = received(sent(Outcome(threading.Lock()))).error
    assert isinstance(error, dd.RunFailed) and "cannot be sent" in str(error) and "cores=1" in str(error)
    assert received(sent(Outcome([1, 2]))) == Outcome([1, 2])


@pytest.fixture
def warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings about processes; with the first one, those that wait for another process at "met" wait no more."""
    texts: list[str] = []

    def warning(text: str, *what: object) -> None:
        texts.append(text % what)
        (tmp_path / "met").touch()

    monkeypatch.setattr(processes, "_log", SimpleNamespace(warning=warning))
    return texts


class Locked(Meets):
    """A problem with something that lives in one process."""

    def __init__(self, *what: Any, **settings: Any) -> None:
        super().__init__(*what, **settings)
        self.lock = threading.Lock()


def test_runs_that_cannot_be_sent_are_computed_here_and_that_is_said(tmp_path: Path, warned: list[str]) -> None:
    assert set(swept(TWO, Locked(tmp_path / "met"))["pid"]) == {os.getpid()}
    why = "the runs are computed one after the other, for they cannot be sent to other processes: cannot pickle"
    assert len(warned) == 1 and warned[0].startswith(why) and "lock" in warned[0]


def test_without_cloudpickle_it_is_said_how_to_get_it(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert set(swept(TWO, Meets(tmp_path / "met"))["pid"]) == {os.getpid()}
    assert len(warned) == 1 and "that needs cloudpickle: pip install" in warned[0]


def test_a_python_that_cannot_be_started_is_no_reason_to_stop(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert set(swept(TWO, Meets(tmp_path / "met"))["pid"]) == {os.getpid()}
    assert len(warned) == 1 and warned[0].startswith("another process could not be started")


class Nowhere(Meets):
    """A problem that no other process can make of what it is sent."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["meeting"].touch()
        raise ValueError("not here")


def test_a_process_that_cannot_read_what_it_is_sent_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.append, flush=lambda: None))

    def metric(model: object) -> float:
        when(lambda: said)
        return pid(model)

    evaluation = dd.Evaluation(every=10, metrics={"pid": metric})
    watch = dd.Reporting(progress=False)
    problem = Nowhere(tmp_path / "met")
    table = dd.sweep(GRID, problem, PACE, updates=30, compute=TWO, evaluation=evaluation, watch=watch)
    assert set(table["pid"]) == {os.getpid()}
    assert "another process cannot take part in the sweep (ValueError: not here); it goes on with fewer." in "".join(said)


def test_what_a_process_prints_is_shown_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = os.getpid()

    def happens(seed: int, worker: int, draw: int) -> None:
        if os.getpid() != here and draw == 0:
            print(f"seed {seed} in another process")

    swept(TWO, Meets(tmp_path / "met", happens))
    assert "in another process" in capsys.readouterr().out


def test_functions_that_watch_are_called_here() -> None:
    seen: list[int] = []
    table = swept(TWO, watch=[lambda state, arrival: seen.append(os.getpid())])
    assert set(table["pid"]) == {os.getpid()} and len(seen) == sum(len(run.trace) for run in table.runs if run)


def test_one_report_grows_for_all_runs(tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    reporting = dd.Reporting(report=lambda share, text: told.append((share, text)), progress=False)
    swept(TWO, Meets(tmp_path / "met"), watch=reporting)
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert any(text.endswith(("of 8 runs, 1 under way", "of 8 runs, 2 under way")) for _, text in told)


def test_short_sweeps_stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "AFTER", 1.0)
    assert set(swept(TWO)["pid"]) == {os.getpid()}


def test_processes_as_cores_threads_and_runs_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "cores_here", lambda: 8)
    problem = dd.Quadratic([[0.0]])
    points: list[Any] = [SimpleNamespace(problem=problem)]

    def count(runs: int = 100, **compute: Any) -> int:
        return spread.processes_for(points, dd.Compute(**compute), runs)

    assert [count(), count(3), count(cores=1), count(cores=5), count(threads=4), count(threads=16)] == [8, 3, 1, 5, 2, 1]
    assert count(threads=None) == 8 // torch.get_num_threads()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "somebody")
    assert [count(), count(cores=5)] == [1, 5]
    monkeypatch.setattr(problem, "start", lambda seed: torch.empty(1, device="meta"))
    assert count(cores=5) == 1


def test_no_more_processes_than_copies_of_the_problems_fit_into_memory() -> None:
    assert free_memory(torch.device("cpu")) > 0
    assert set(swept(dd.Compute(cores=2, memory_limit=1000))["pid"]) == {os.getpid()}

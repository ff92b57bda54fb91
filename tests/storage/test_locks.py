"""One writer for a folder: processes, threads and what they leave behind."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.storage import folder as folders
from dualdelay.storage import locks
from dualdelay.storage.locks import Lock
from own import Killed, Scenario, centers, content, differences, usual

PROBLEM, SPEEDS = dd.Quadratic(centers, noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
HOLD = """
import os, sys, time
import dualdelay as dd
def fork_and_wait(state, arrival):
    if state.version == 20:
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        time.sleep(120)
problem, speeds = dd.Quadratic([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
dd.simulate(dd.DuDe(0.05), problem, speeds, updates=40, checkpoint_every=5, folder=sys.argv[1], watch=[fork_and_wait])
"""


def test_a_folder_in_use_is_refused_by_the_name_of_its_process_until_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child that the process has forked lives on, and does not keep the folder locked."""
    setting, folder = (dd.DuDe(0.05), PROBLEM, SPEEDS), tmp_path / "run"
    straight = dd.simulate(*setting, updates=40, checkpoint_every=5, folder=tmp_path / "straight")
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        child = int(process.stdout.readline())
        before = content(folder)
        with pytest.raises(dd.BadInput, match=rf"in use by process {process.pid} on .*, since .* Wait until it has ended"):
            dd.resume(folder)
        with pytest.raises(SystemExit) as stop:
            main(["resume", str(folder)])
        assert stop.value.code == 2 and f"process {process.pid}" in capsys.readouterr().err
        with pytest.raises(dd.BadInput, match="is in use"):
            dd.simulate(*setting, updates=40, folder=dd.Saving(folder, every=5, go_on=True))
        assert dd.load(folder).ended == "interrupted"  # reading needs no lock
        assert content(folder) == before
    finally:
        process.kill()
        process.wait()
    os.kill(child, 0)  # the child is alive
    try:
        assert differences(dd.resume(folder), straight) == []
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
    assert (folder / "lock").read_bytes() == b""


@pytest.mark.parametrize("ending", [None, ZeroDivisionError, Killed, KeyboardInterrupt])
def test_the_lock_ends_with_the_run(ending: type[BaseException] | None, tmp_path: Path) -> None:
    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        with pytest.raises(dd.BadInput, match="this one, in another thread or run"):
            Lock(tmp_path / "run")
        if ending is not None and state.version == 7:
            raise ending

    if ending is None:
        usual.run(folder=tmp_path / "run", watch=(watch,))
    else:
        with pytest.raises(ending):
            usual.run(folder=tmp_path / "run", watch=(watch,))
    Lock(tmp_path / "run").release()


def test_a_holder_named_in_the_lock_file_of_a_killed_run_is_ignored(killed: Path, straight: Any) -> None:
    (killed / "lock").write_text("process 1 on another, since long ago")  # what a SIGKILL leaves
    assert differences(dd.resume(killed), straight) == []


def test_a_file_system_without_locks_is_refused(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(dd.BadInput, match=r"cannot be locked \(Operation not supported\).* a local disk"):
        dd.resume(killed)
    with pytest.raises(dd.BadInput, match=r"cannot be locked \(Operation not supported\).* a local disk"):
        usual.run(folder=tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["killed"]


def test_on_a_system_without_locks_only_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # any import of it fails, as on Windows
    spec = importlib.util.spec_from_file_location("dualdelay.storage.locks", locks.__file__)
    assert spec is not None and spec.loader is not None
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    monkeypatch.setattr(folders, "Lock", windows.Lock)
    assert usual.run().version == 24
    with pytest.raises(dd.BadInput, match="needs a system with file locks, Linux or macOS"):
        usual.run(folder=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_lock_that_is_a_link_or_a_folder_is_not_followed(kind: str, killed: Path, tmp_path: Path) -> None:
    (killed / "lock").unlink()
    (tmp_path / "letter.txt").write_text("dear")
    if kind == "link":
        (killed / "lock").symlink_to(tmp_path / "letter.txt")
    else:
        (killed / "lock").mkdir()
    with pytest.raises(dd.BadInput, match="cannot be locked"):
        dd.resume(killed)
    assert (tmp_path / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_of_threads_that_create_one_folder_one_gets_it_and_the_others_are_refused(
    there: bool, straight: Any, tmp_path: Path
) -> None:
    def create(folder: Path, gate: threading.Barrier) -> dd.Run | str:
        gate.wait()
        try:
            return Scenario(usual.algorithm).run(folder=folder)
        except dd.BadInput as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        for turn in range(8):
            if there:
                (tmp_path / f"run{turn}").mkdir()
            gate = threading.Barrier(3)
            results = list(pool.map(create, [tmp_path / f"run{turn}"] * 3, [gate] * 3))
            refusals = [result for result in results if isinstance(result, str)]
            assert len(refusals) == 2 and all("exists" in text or "in use" in text for text in refusals)
            assert [differences(result, straight) for result in results if isinstance(result, dd.Run)] == [[]]
    assert not list(tmp_path.glob(".*"))


def test_what_a_process_left_that_died_while_it_created_the_folder_is_removed(tmp_path: Path) -> None:
    empty, abandoned, in_use = (tmp_path / f".run.{digit * 8}.part" for digit in "012")
    empty.mkdir()
    for folder in (abandoned, in_use):
        folder.mkdir()
        (folder / "start.safetensors").write_bytes(b"half")
        (folder / "lock").touch()
    lock = Lock(in_use)
    usual.run(folder=tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [in_use.name, "run"]
    lock.release()


def test_a_sweep_does_not_touch_a_run_that_another_process_has(tmp_path: Path) -> None:
    def sweep() -> dd.Sweep:
        grid = {"algorithm": [dd.DuDe(0.1)], "lr": [0.1, 0.05]}
        return dd.sweep(grid, PROBLEM, SPEEDS, folder=tmp_path, compute=dd.Compute(batch=True), updates=9)

    first = sweep()
    for run in first.runs:
        (run.folder / "result.json").unlink()
    lock = Lock(first.runs[1].folder)
    with pytest.raises(dd.BadInput, match="is in use by process"):
        sweep()
    lock.release()
    assert [differences(*pair) for pair in zip(sweep().runs, first.runs, strict=True)] == [[], []]


def test_a_folder_that_exists_is_named_with_the_way_to_go_on_unless_its_run_is_under_way(killed: Path) -> None:
    lock = Lock(killed)
    with pytest.raises(dd.BadInput, match="is in use by process"):
        usual.run(folder=killed)
    lock.release()
    with pytest.raises(dd.BadInput, match=r"exists; .*dualdelay resume .*dd\.resume\(.*problem=\.\.\.\)"):
        usual.run(folder=killed)

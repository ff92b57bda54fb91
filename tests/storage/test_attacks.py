"""Nothing lost, nothing falsified: two writers, whatever ends a run, damage that could pass, folders not to be trusted."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.core import Order
from dualdelay.storage.files import Damaged, json_digest, load_record, save_record
from dualdelay.storage.folder import FORMAT, Folder
from dualdelay.storage.locks import Lock
from flat import resume, simulate
from own import Killed, Scenario, differences, kill_at
from tables import LR

scenario = Scenario(dd.DuDe(LR, memory="workers"))
QUADRATIC, THREE = dd.Quadratic([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])

# --- one writer for a folder ---

HOLD = """
import sys, time
import dualdelay as dd
problem, speeds = dd.Quadratic([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
def wait(state, arrival):
    if state.version == 20:
        print("there", flush=True)
        time.sleep(120)
dd.simulate(dd.DuDe(0.05), problem, speeds, updates=40, checkpoint_every=5, folder=sys.argv[1], watch=[wait])
"""


def test_a_folder_in_use_is_refused_by_the_name_of_its_process_until_that_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = dd.simulate(dd.DuDe(0.05), QUADRATIC, THREE, updates=40, checkpoint_every=5, folder=tmp_path / "straight")
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        with pytest.raises(
            dd.BadInput, match=rf"is in use by process {process.pid} on .*, since .* Wait until it has ended"
        ):
            dd.resume(tmp_path / "run")
        with pytest.raises(SystemExit) as stop:
            main(["resume", str(tmp_path / "run")])
        assert stop.value.code == 2 and f"process {process.pid}" in capsys.readouterr().err
        with pytest.raises(dd.BadInput, match="is in use"):
            dd.simulate(
                dd.DuDe(0.05), QUADRATIC, THREE, updates=40, folder=dd.Saving(tmp_path / "run", every=5, go_on=True)
            )
        assert dd.load(tmp_path / "run").ended == "interrupted"  # who only reads needs no lock
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    finally:
        process.kill()
        process.communicate()
    assert differences(dd.resume(tmp_path / "run"), straight) == []
    assert (tmp_path / "run" / "lock").read_bytes() == b""


@pytest.mark.parametrize("ends", [None, ZeroDivisionError, Killed, KeyboardInterrupt])
def test_the_lock_ends_with_the_run(ends: type[BaseException] | None, tmp_path: Path) -> None:
    def fail(state: dd.State, arrival: dd.Arrival) -> None:
        with pytest.raises(dd.BadInput, match="this one, in another thread or run"):
            Lock(tmp_path / "run")
        if ends is not None and state.version == 7:
            raise ends

    try:
        scenario.run(folder=tmp_path / "run", watch=(fail,))
    except BaseException as error:
        assert ends is not None and isinstance(error, ends)
    Lock(tmp_path / "run").release()


FORK = """
import os, sys, time
from pathlib import Path
from dualdelay.storage.locks import Lock
lock = Lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(120)
"""


def test_a_process_that_was_forked_does_not_keep_a_folder_locked(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(dd.BadInput, match=f"in use by process {process.pid}"):
                Lock(tmp_path)
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives on
            for _ in range(100):
                try:
                    Lock(tmp_path).release()
                    break
                except dd.BadInput:  # the child has not come to itself
                    time.sleep(0.05)
            Lock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_on_a_file_system_without_locks_there_is_a_clear_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario.killed(tmp_path / "run", 9)

    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(dd.BadInput, match=r"cannot be locked \(Operation not supported\).* a local disk"):
        dd.resume(tmp_path / "run")
    with pytest.raises(dd.BadInput, match=r"cannot be locked"):
        scenario.run(folder=tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


ELSEWHERE = """
import sys
sys.modules["fcntl"] = None
import dualdelay as dd
problem, speeds = dd.Quadratic([[0.0], [1.0]]), dd.FixedSpeeds([1.0, 2.0])
assert dd.simulate(dd.DuDe(0.1), problem, speeds, updates=5).version == 5
try:
    dd.simulate(dd.DuDe(0.1), problem, speeds, updates=5, folder=sys.argv[1])
except dd.BadInput as error:
    print(error)
"""


def test_on_a_system_without_locks_only_folders_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "run")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "needs a system with file locks, Linux or macOS" in said and not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_or_a_folder_is_not_followed(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 9)
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "letter.txt")
    with pytest.raises(dd.BadInput, match="cannot be locked"):
        dd.resume(tmp_path / "run")
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_of_threads_that_create_one_folder_one_has_it_and_the_others_are_told(tmp_path: Path) -> None:
    expected = scenario.run(folder=tmp_path / "straight")
    for turn in range(8):
        folder, gate = tmp_path / f"run{turn}", threading.Barrier(3)
        made: list[Any] = []

        def work(folder: Path = folder, gate: threading.Barrier = gate, made: list[Any] = made) -> None:
            gate.wait()
            try:
                made.append(Scenario(dd.DuDe(LR, memory="workers")).run(folder=folder))
            except dd.BadInput as error:
                made.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runs = [one for one in made if isinstance(one, dd.Run)]
        assert len(made) == 3 and len(runs) == 1
        assert all("exists" in one or "in use" in one for one in made if isinstance(one, str))
        assert differences(runs[0], expected) == []
    assert not list(tmp_path.glob(".*"))


def test_remains_of_a_process_that_died_while_it_created_the_folder_are_removed(tmp_path: Path) -> None:
    for name in (".run.00000000.part", ".run.11111111.part", ".run.22222222.part"):
        (tmp_path / name).mkdir()
    for name in (".run.11111111.part", ".run.22222222.part"):
        (tmp_path / name / "start.safetensors").write_bytes(b"half")
        (tmp_path / name / "lock").touch()
    alive = Lock(tmp_path / ".run.22222222.part")  # of a process that is about to
    scenario.run(folder=tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.22222222.part", "run"]
    alive.release()


def test_a_sweep_does_not_touch_a_run_that_another_process_has(tmp_path: Path) -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [0.1, 0.05]}
    first = dd.sweep(grid, QUADRATIC, THREE, folder=tmp_path, compute=dd.Compute(batch=True), updates=9)
    for run in first.runs:
        (run.folder / "result.json").unlink()
    lock = Lock(first.runs[1].folder)
    with pytest.raises(dd.BadInput, match="is in use by process"):
        dd.sweep(grid, QUADRATIC, THREE, folder=tmp_path, compute=dd.Compute(batch=True), updates=9)
    lock.release()
    again = dd.sweep(grid, QUADRATIC, THREE, folder=tmp_path, compute=dd.Compute(batch=True), updates=9)
    assert [differences(one, other) for one, other in zip(again.runs, first.runs, strict=True)] == [[], []]


# --- whatever ends a run, what was done is saved ---


@dataclass(kw_only=True)
class Sums(dd.State):
    """A server that keeps a tensor, a list of tensors and a set."""

    total: Tensor
    each: list[Tensor]
    seen: set[int]


@dataclass(frozen=True)
class Own(dd.Algorithm[Sums]):
    """A method of a user's own, which can be made to fail in the middle of its step."""

    careless = False  # writes into the tensors of its list

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> Sums:
        return Sums(x, n, total=torch.zeros_like(x), each=[torch.zeros_like(x) for _ in range(n)], seen=set())

    def step(self, s: Sums, a: dd.Arrival) -> list[Order]:
        s.seen.add(s.version)
        s.total += a.value
        if self.careless:
            s.each[a.worker] += a.value
        else:
            s.each[a.worker] = s.each[a.worker] + a.value
        s.descend(s.total, self.lr)
        return TROUBLE(s) or [dd.send(a.worker)]


def fine(_: object) -> Any:
    return None


TROUBLE: Callable[[Any], Any] = fine


def trouble(at: int, what: str) -> Callable[[Any], Any]:
    def happens(s: dd.State) -> Any:
        if s.version == at:
            if what == "raises":
                raise ZeroDivisionError("in the step")
            return {"no list": 3, "no order": [3], "nobody": [dd.send(9)], "never sent": [Order("fly", 0)]}[what]
        return None

    return happens


@pytest.fixture
def own_step(request: pytest.FixtureRequest) -> Any:
    def use(function: Callable[[Any], Any]) -> None:
        global TROUBLE
        TROUBLE = function

    yield use
    use(fine)


WITH = {"updates": 60, "checkpoint_every": 1000, "evaluate_every": 7}


@pytest.mark.parametrize("optimizer", [None, "Adam", lambda params, lr: torch.optim.Adam(params, lr=lr)])
@pytest.mark.parametrize("what", ["raises", "no list", "no order", "nobody", "never sent"])
def test_a_step_that_fails_half_way_is_taken_back_and_all_before_it_is_saved(
    what: str, optimizer: Any, own_step: Any, tmp_path: Path
) -> None:
    how = {**WITH, "optimizer": optimizer}
    straight = simulate(Own(0.05), QUADRATIC, THREE, folder=tmp_path / "straight", **how)
    own_step(trouble(33, what))
    with pytest.raises((ZeroDivisionError, dd.BadInput)) as caught:
        simulate(Own(0.05), QUADRATIC, THREE, folder=tmp_path / "run", **how)
    assert "It is saved after 32 updates; go on with dd.resume" in str(caught.value.__notes__)
    kept = dd.load(tmp_path / "run")
    assert kept.version == len(kept.trace) == 32 and kept.ended == "failed" and "it could not go on" in kept.notes[-1]
    own_step(fine)
    resumed = dd.resume(tmp_path / "run", algorithm=Own(0.05), optimizer=optimizer if callable(optimizer) else None)
    assert differences(resumed, straight) == []
    assert dd.replay(tmp_path / "run", algorithm=Own(0.05), optimizer=optimizer if callable(optimizer) else None).same_bits


def test_a_step_that_cannot_be_taken_back_leaves_the_last_checkpoint(own_step: Any, tmp_path: Path) -> None:
    class Careless(Own):
        careless = True

    own_step(trouble(33, "raises"))
    with pytest.raises(ZeroDivisionError) as caught:
        dd.simulate(Careless(0.05), QUADRATIC, THREE, updates=60, checkpoint_every=10, folder=tmp_path / "run")
    assert "The last checkpoint stands, for this happened in the middle of an update" in str(caught.value.__notes__)
    kept = dd.load(tmp_path / "run")
    assert (kept.version, kept.ended) == (30, "failed")
    own_step(fine)
    straight = dd.simulate(Careless(0.05), QUADRATIC, THREE, updates=60, checkpoint_every=10)
    assert dd.resume(tmp_path / "run", algorithm=Careless(0.05)).x.equal(straight.x)


class Stumbles(dd.Quadratic):
    """A problem whose evaluation fails once."""

    left = -1

    def evaluate(self, x: Tensor) -> dict[str, float]:
        type(self).left -= 1
        if type(self).left == 0:
            raise OSError(28, "No space left on device")
        return super().evaluate(x)


STUMBLES = Stumbles([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.3)
SCHEDULES: dict[str, dict[str, Any]] = {
    "by updates": {"evaluate_every": 7},
    "by time": {"evaluate_seconds": 3.0},
    "by both": {"evaluate_every": 7, "evaluate_seconds": 3.0},
}


@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize("at", [2, 5, 9])
def test_an_evaluation_that_fails_is_made_when_the_run_goes_on(when: str, at: int, tmp_path: Path) -> None:
    how = {"updates": 60, "checkpoint_every": 1000, **SCHEDULES[when]}
    straight = simulate(dd.DuDe(LR), STUMBLES, THREE, folder=tmp_path / "straight", **how)
    Stumbles.left = at
    with pytest.raises(OSError, match="No space") as caught:
        simulate(dd.DuDe(LR), STUMBLES, THREE, folder=tmp_path / "run", **how)
    assert "It is saved after" in str(caught.value.__notes__)
    assert (tmp_path / "run" / "failed.json").exists() and dd.load(tmp_path / "run").ended == "failed"
    assert differences(dd.resume(tmp_path / "run", problem=STUMBLES), straight) == []


def test_a_watch_function_that_fails_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    how: dict[str, Any] = {"updates": 60, "checkpoint_every": 1000, "folder": tmp_path / "run"}
    with pytest.raises(ZeroDivisionError) as caught:
        simulate(dd.DuDe(LR), QUADRATIC, THREE, watch=[lambda state, arrival: 1 // (31 - state.version)], **how)
    assert "It is saved after 31 updates; go on with dualdelay resume" in str(caught.value.__notes__)
    straight = simulate(dd.DuDe(LR), QUADRATIC, THREE, **{**how, "folder": tmp_path / "straight"})
    assert differences(dd.resume(tmp_path / "run"), straight) == []


# --- damage that could pass ---


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize("name", ["metrics", "workers", "trace"])
def test_a_column_with_another_name_or_fewer_rows_is_found(name: str, tmp_path: Path) -> None:
    run = scenario.run(folder=tmp_path / "run")
    path = run.folder / f"{name}.parquet"
    good = path.read_bytes()
    columns = pq.read_table(path).column_names
    changes = [
        lambda table: table.rename_columns([f"{columns[0]}s", *columns[1:]]),
        lambda table: table.slice(0, len(table) - 1),
    ]
    if not len(pq.read_table(path)):  # nothing to cut off
        changes.pop()
    for change in changes:
        rewritten(path, change)
        with pytest.raises(dd.DualDelayError):
            dd.replay(run.folder)
        if name != "trace":
            assert any(f"{name}.parquet is damaged" in note for note in dd.load(run.folder).notes)
        path.write_bytes(good)
    assert dd.replay(run.folder).same_bits


def test_no_flipped_bit_of_a_trace_s_events_passes(tmp_path: Path) -> None:
    run = dd.simulate(
        dd.algorithms.FedFix(LR, period=2.0),
        QUADRATIC,
        dd.SimulatedFleet(THREE, changes=[]),
        updates=6,
        folder=tmp_path / "run",
    )
    path = run.folder / "trace.parquet"
    good = path.read_bytes()
    found = 0
    for place in range(good.index(b"dualdelay"), len(good), 5):
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << place % 8)]) + good[place + 1 :])
        try:
            again = Folder(run.folder).trace()  # there are bits that nobody reads
            assert again.events == run.trace.events
            assert all(again[name].tobytes() == run.trace[name].tobytes() for name in run.trace)
        except Damaged:
            found += 1
    assert found > 100


@pytest.mark.parametrize("key, value", [("updates", 21), ("ended", "stop"), ("notes", ["fine"]), ("audit", 0.5)])
def test_a_changed_value_of_the_result_is_found(key: str, value: Any, tmp_path: Path) -> None:
    straight = scenario.run(folder=tmp_path / "straight")
    path = scenario.run(folder=tmp_path / "run").folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(dd.BadInput, match=r"result\.json is damaged, or was changed"):
        dd.replay(tmp_path / "run")
    loaded = dd.load(tmp_path / "run")
    assert loaded.ended == "interrupted" and "result.json is damaged" in loaded.notes[0]
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def crafted(folder: Path, **changes: Any) -> None:
    """A configuration with other values and a digest that is right."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("digest")
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps({**values, "digest": json_digest(values)}))


@pytest.mark.parametrize("call", [dd.load, dd.resume, dd.replay])
@pytest.mark.parametrize("found", [1, FORMAT + 1, "new", ...])
def test_another_format_is_refused_by_name(found: Any, call: Callable[[Path], Any], tmp_path: Path) -> None:
    scenario.run(folder=tmp_path / "run")
    crafted(tmp_path / "run", format=found)
    shown = 1 if found is ... else found
    with pytest.raises(dd.BadInput, match=rf"has format {shown!r} and was written by dualdelay .* reads format {FORMAT}"):
        call(tmp_path / "run")


@pytest.mark.parametrize("call", [dd.load, dd.resume, dd.replay])
@pytest.mark.parametrize("key", ["algorithm", "seed", "layout", "environment", "speeds", "updates", "start"])
@pytest.mark.parametrize("value", [..., [[]], True])
def test_a_configuration_that_no_run_writes_is_refused(key: str, value: Any, call: Any, tmp_path: Path) -> None:
    scenario.run(folder=tmp_path / "run")
    crafted(tmp_path / "run", **{key: value})
    with pytest.raises(dd.DualDelayError):
        call(tmp_path / "run")


def known(run: dd.Run) -> dict[str, Any]:
    tables = {"trace": run.trace, "metrics": run.metrics, "workers": run.workers}
    columns = {f"{kind} {name}": table[name].tobytes() for kind, table in tables.items() for name in table}
    return {"x": run.x.tolist(), "ended": run.ended, "best": run.best and run.best.value, **columns}


def test_no_file_of_another_run_is_taken_for_this_one_s(tmp_path: Path) -> None:
    """Whole files all of them, of a run that differs in its lr alone, finished or not."""
    how: dict[str, Any] = {"updates": 30, "checkpoint_every": 10, "keep_best": "objective"}
    for name, lr in (("one", 0.1), ("other", 0.05)):
        simulate(dd.DuDe(lr), QUADRATIC, THREE, folder=tmp_path / name, **how)
        with pytest.raises(Killed):
            simulate(dd.DuDe(lr), QUADRATIC, THREE, folder=tmp_path / f"{name} killed", watch=[kill_at(28)], **how)
    straight, tried = dd.load(tmp_path / "one").x, 0
    for kind in ("", " killed"):
        one, other = tmp_path / f"one{kind}", tmp_path / f"other{kind}"
        good = {path: path.read_bytes() for path in one.rglob("*") if path.is_file() and path.name != "lock"}
        before = known(dd.load(one))
        for path in good:
            foreign = other / path.name if path.parent == one else max((other / path.parent.name).iterdir())
            path.unlink()
            path.with_name(foreign.name).write_bytes(foreign.read_bytes())
            for call in (dd.load, dd.replay, dd.resume):
                tried += 1
                try:
                    run = call(one)
                except dd.DualDelayError:
                    continue
                assert call is not dd.load or run.notes or known(run) == before
                assert call is dd.load or run.x.equal(straight)
            shutil.rmtree(one)
            for place, data in good.items():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
    assert tried > 40


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_finished_run_without_its_checkpoints_is_loaded_and_not_begun_anew(how: str, tmp_path: Path) -> None:
    run = dd.simulate(
        dd.DuDe(LR), QUADRATIC, THREE, updates=30, folder=tmp_path / "run", evaluation=dd.Evaluation(best_by="objective")
    )
    before = known(dd.load(run.folder))
    shutil.rmtree(run.folder / "checkpoints")
    if how == "emptied":
        (run.folder / "checkpoints").mkdir()
    loaded = dd.load(run.folder)
    assert known(loaded) == before and loaded.version == 30 and "checkpoints of" in loaded.notes[-1]
    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    for more in ({}, {"updates": 60}):
        with pytest.raises(dd.BadInput, match=r"checkpoints of .* are missing.* dd.load gives it"):
            resume(run.folder, **more)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == files
    assert dd.replay(run.folder).same_bits
    assert dd.simulate(dd.DuDe(LR), QUADRATIC, THREE, updates=0, server=dd.Server(initial_weights=run.folder)).x.equal(
        run.x
    )


def test_of_a_run_that_was_stopped_early_the_model_is_left_without_its_checkpoints(tmp_path: Path) -> None:
    stop = dd.EarlyStop(patience=2)
    how: dict[str, Any] = {"updates": 400, "evaluate_every": 5, "stop": stop, "folder": tmp_path / "run"}
    run = simulate(dd.DuDe(0.9), QUADRATIC, THREE, **how)
    assert run.returned < run.version
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(dd.BadInput, match=r"its last state is lost; the model that it returned is in model\.safetensors"):
        dd.load(run.folder)
    assert dd.simulate(dd.DuDe(LR), QUADRATIC, THREE, updates=0, server=dd.Server(initial_weights=run.folder)).x.equal(
        run.x
    )


def test_an_unfinished_run_without_its_checkpoints_does_not_start_over_in_silence(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 18)
    assert len(list((tmp_path / "run" / "trace").iterdir())) > 1
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    for call in (dd.load, dd.resume):
        with pytest.raises(dd.BadInput, match=r"checkpoints of .* are missing"):
            call(tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.parquet", "workers.parquet", "model.safetensors", "best.safetensors"])
def test_a_file_of_a_finished_run_that_is_gone_is_taken_from_the_checkpoint_and_made_again(
    name: str, tmp_path: Path
) -> None:
    run = dd.simulate(
        dd.DuDe(LR), QUADRATIC, THREE, updates=30, folder=tmp_path / "run", evaluation=dd.Evaluation(best_by="objective")
    )
    good = (run.folder / name).read_bytes()
    (run.folder / name).unlink()
    loaded = dd.load(run.folder)
    assert loaded.x.equal(run.x) and f"{name}; what the last checkpoint has is taken" in loaded.notes[0]
    dd.resume(run.folder)
    assert (run.folder / name).read_bytes() == good


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_loaded_as_it_ended(tmp_path: Path) -> None:
    run = dd.simulate(dd.DuDe(LR), QUADRATIC, THREE, updates=30, folder=tmp_path / "run", checkpoint_every=7)
    max((run.folder / "checkpoints").iterdir()).write_bytes(b"")
    loaded = dd.load(run.folder)
    assert loaded.version == 30 and loaded.x.equal(run.x) and "is damaged" in loaded.notes[-1]


def test_a_folder_whose_run_is_under_way_is_not_said_to_be_removable(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 9)
    lock = Lock(tmp_path / "run")
    with pytest.raises(dd.BadInput, match="is in use by process"):
        scenario.run(folder=tmp_path / "run")
    lock.release()
    with pytest.raises(dd.BadInput, match=r"exists; .*dualdelay resume .*dd\.resume\(.*problem=\.\.\.\)"):
        scenario.run(folder=tmp_path / "run")


def test_what_is_given_in_the_wrong_place_is_named(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 9)
    with pytest.raises(dd.BadInput, match=r"updates is .*Quadratic"):
        dd.resume(tmp_path / "run", QUADRATIC)
    with pytest.raises(dd.BadInput, match=r"problem is .digits.; expected a dd\.Problem"):
        dd.replay(scenario.run(folder=tmp_path / "finished").folder, "digits")


def test_stray_files_in_a_folder_are_nobody_s(tmp_path: Path) -> None:
    straight = scenario.run(folder=tmp_path / "straight")
    scenario.killed(tmp_path / "run", 18)
    for name in ("trace/7.parquet", "trace/1 (copy).parquet", "trace/000000000002x.parquet", "checkpoints/9.safetensors"):
        (tmp_path / "run" / name).write_bytes(b"stray")
    (tmp_path / "run" / "checkpoints" / "000000000000-new").mkdir()
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def test_if_the_trace_is_lost_the_weights_are_not(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 18)
    for path in (tmp_path / "run" / "trace").iterdir():
        path.unlink()
    with pytest.raises(dd.BadInput, match=r"has 0 rows of .* Its weights are whole: .*initial_weights='([^']*)'") as caught:
        dd.resume(tmp_path / "run")
    start = str(caught.value).split("initial_weights='")[1].split("'")[0]
    assert scenario.run(start=start, updates=0).x.isfinite().all()


def test_a_record_reads_back_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    columns = {"text": np.array(["a", "ü"]), "number": np.array([1.5, np.nan]), "whole": np.array([1, 2**62])}
    save_record(tmp_path / "a.parquet", columns, "this", {"events": [{"kind": "left"}]})
    found, about = load_record(tmp_path / "a.parquet", "this", columns)
    assert all(found[name].tolist()[0] == columns[name].tolist()[0] for name in columns) and about["events"]
    with pytest.raises(Damaged, match="columns are not those"):
        load_record(tmp_path / "a.parquet", "this", ["other"])
    with pytest.raises(Damaged, match="of another run"):
        load_record(tmp_path / "a.parquet", "that")


def test_checkpoints_do_not_grow_with_wakes(tmp_path: Path) -> None:
    sizes = []

    def look(state: dd.State, arrival: dd.Arrival) -> None:
        newest = Folder(tmp_path / "run").checkpoints()[-1:]
        sizes.extend(path.stat().st_size for path in newest)

    run = dd.simulate(
        *(dd.algorithms.FedFix(LR, period=0.5), QUADRATIC, THREE),
        updates=400,
        checkpoint_every=20,
        evaluation=dd.Evaluation(every=400),
        folder=tmp_path / "run",
        watch=[look],
    )
    assert len([event for event in run.trace.events if event["kind"] == "wake"]) >= 400
    assert max(sizes) < 1.1 * sizes[0]
    assert dd.replay(run.folder).same_bits


# --- a folder does not decide whom to trust ---


def real_folder(folder: Path, **fleet: Any) -> None:
    """The folder of a run of real workers, as far as resume looks at it before it starts anything."""
    scenario.killed(folder, 9)
    described = {"name": "ray", "threads": 1, "server_threads": 1, **fleet}
    crafted(folder, fleet=described, **dict.fromkeys(("speeds", "link", "changes", "device", "precision", "batch"), ...))


@pytest.mark.parametrize(
    "trusted",
    [
        {"host": "0.0.0.0"},
        {"address": "192.0.2.1:6379"},
        {"address": "127.0.0.1:6379"},
        {"address": "auto"},
        {"insecure": True},
        {"address": "192.0.2.1:6379", "insecure": True},
    ],
    ids=str,
)
def test_a_folder_does_not_decide_where_a_run_listens_or_whom_it_joins(
    trusted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real_folder(tmp_path / "run", **trusted)
    names = r".*".join(trusted)
    with pytest.raises(dd.BadInput, match=rf"says of its workers .*{names}.* not for a folder to decide"):
        dd.resume(tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and all(f"--{name}" in said for name in trusted) and "--address local" in said


def test_what_the_caller_says_is_taken_and_the_rest_is_the_folder_s(tmp_path: Path) -> None:
    from dualdelay.runs.resume import recorded_fleet

    real_folder(tmp_path / "run", address="192.0.2.1:6379", insecure=True, restarts=7)
    with pytest.raises(dd.BadInput, match="insecure=True"):
        recorded_fleet(tmp_path / "run", address="10.0.0.1:1")  # confirmed in part
    fleet = recorded_fleet(tmp_path / "run", address="10.0.0.1:1", insecure=False)
    assert fleet is not None
    assert (fleet.address, fleet.insecure, fleet.host, fleet.restarts) == ("10.0.0.1:1", False, "127.0.0.1", 7)
    local = recorded_fleet(tmp_path / "run", address="local", insecure=False)
    assert local is not None and local.address is None
    scenario.run(folder=tmp_path / "simulated")
    with pytest.raises(dd.BadInput, match="is a simulation"):
        recorded_fleet(tmp_path / "simulated", address="local")


@pytest.mark.parametrize("name", ["checkpoints", "trace", "output", "moved"])
def test_a_folder_with_links_to_other_places_is_not_written_to(name: str, tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 18)
    outside = tmp_path / "outside"
    place = tmp_path / "run" / name
    if place.exists():
        place.rename(outside)
    else:
        outside.mkdir()
    (outside / "000000000099-000000000000.parquet").write_bytes(b"mine")
    place.symlink_to(outside)
    with pytest.raises(dd.BadInput, match="is a link to another place"):
        dd.resume(tmp_path / "run")
    assert (outside / "000000000099-000000000000.parquet").read_bytes() == b"mine"


def test_what_workers_print_is_not_written_through_a_link(tmp_path: Path) -> None:
    from dualdelay.workers.output import Output

    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0-0.txt").symlink_to(tmp_path / "letter.txt")
    output = Output(tmp_path / "output")
    output.add(0, 0, ["printed"])
    output.close()
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_killed_run_is_in_nobody_s_way(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        scenario.run(folder=tmp_path / "run", watch=(kill_at(5),))
    (tmp_path / "run" / "lock").write_text("process 1 on another, since long ago")  # what a SIGKILL leaves
    assert dd.resume(tmp_path / "run").version == scenario.run().version

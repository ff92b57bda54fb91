"""What lies in a run's folder: damage is found and named, a full disk ends cleanly, and nothing is half written."""

from __future__ import annotations

import ast
import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.core.errors import NotSaved
from dualdelay.storage import files
from dualdelay.storage.files import Damaged, load_record, save_record
from dualdelay.storage.folder import Folder
from own import FILES, Killed, Scenario, centers, content, differences, kill_at, seen, usual
from tables import LR

PROBLEM, SPEEDS = dd.Quadratic(centers, noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
CALLS: list[Any] = [dd.load, dd.resume, dd.replay]
BEST = dd.Evaluation(best_by="objective")
Damage = Callable[[bytes], bytes]


def flipped(data: bytes, place: int = 120) -> bytes:
    place = min(place, len(data) - 1)  # 120 is among the values, in Parquet and in safetensors
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES: dict[str, Damage] = {
    "a flipped bit": flipped,
    "half of it": lambda data: data[: len(data) // 2],
    "nothing in it": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


def started_from(folder: Path) -> torch.Tensor:
    """The first weights of a run that begins with those of a folder."""
    server = dd.Server(initial_weights=folder)
    return dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=0, server=server).x


def spoil(path: Path, damage: Damage) -> None:
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good


# --------------------------------------------------------------------------------------------- checkpoints and the trace


@damages
@pytest.mark.parametrize("kind", ["checkpoints", "trace"])
def test_if_the_newest_checkpoint_is_damaged_the_one_before_is_used(
    kind: str, damage: Damage, killed: Path, originals: Path, straight: Any
) -> None:
    newest = max((killed / kind).iterdir())
    spoil(newest, damage)
    resumed = dd.resume(killed)
    assert [newest.name in note for note in resumed.notes] == [True]
    assert differences(resumed, straight) == ["result.json"]
    assert Folder(killed).result() == {**(Folder(originals / "finished").result() or {}), "notes": list(resumed.notes)}


@damages
def test_if_every_checkpoint_is_damaged_the_error_names_them_all(damage: Damage, killed: Path) -> None:
    paths = sorted((killed / "checkpoints").iterdir())
    assert len(paths) > 1
    for path in paths:
        spoil(path, damage)
    before = content(killed)
    with pytest.raises(dd.BadInput, match="no checkpoint") as caught:
        dd.resume(killed)
    assert all(path.name in str(caught.value) for path in paths)
    assert content(killed) == before


@pytest.mark.parametrize("state, call", [("killed", dd.resume), ("finished", dd.resume), ("finished", dd.replay)])
def test_a_trace_with_a_damaged_column_name_is_refused_by_name(
    state: str, call: Callable[[Path], dd.Run], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(state)
    for path in (*(folder / "trace").iterdir(), *folder.glob("trace.parquet")):
        spoil(path, lambda data: data.replace(b"worker", b"wurker"))
    with pytest.raises(dd.BadInput, match="parquet is damaged"):
        call(folder)


def test_no_flipped_bit_of_a_trace_s_events_passes(tmp_path: Path) -> None:
    """Every fifth byte of the file's metadata, where the events stand in JSON and which no checksum of Parquet covers."""
    method = dd.algorithms.FedFix(LR, period=2.0)  # its wakes are events
    run = dd.simulate(method, PROBLEM, SPEEDS, updates=6, folder=tmp_path / "run")
    path = run.folder / "trace.parquet"
    good, found = path.read_bytes(), 0
    for place in range(good.index(b"dualdelay"), len(good), 5):
        path.write_bytes(flipped(good, place))
        try:
            trace = Folder(run.folder).trace()  # some bits mean nothing, such as those of a library's version
            assert trace.events == run.trace.events
            assert all(trace[name].tobytes() == run.trace[name].tobytes() for name in run.trace)
        except Damaged:
            found += 1
    assert found > 100


def test_nothing_beyond_the_checkpoint_is_left_where_a_run_goes_on(killed: Path) -> None:
    """A real run takes another course from there."""
    with Folder(killed) as folder:
        saved = folder.load(min(folder.moments()))
        assert saved is not None and len(folder.moments()) > 1
        (killed / "trace" / ".half.part").touch()
        folder.rewind(saved.content, saved.rows)
        assert folder.moments() == {saved.content["moment"]}
    starts = [tuple(map(int, path.stem.split("-"))) for path in (killed / "trace").iterdir()]
    assert max(starts) < (saved.content["arrivals"], len(saved.content["events"]))
    assert not (killed / "failed.json").exists()
    again = Folder(killed).load()
    assert again is not None and again.rows["time"].tolist() == saved.rows["time"].tolist()


def test_if_the_trace_is_lost_the_weights_are_not(killed: Path) -> None:
    for path in (killed / "trace").iterdir():
        path.unlink()
    with pytest.raises(dd.BadInput, match=r"has 0 rows of .* Its weights are intact: ") as caught:
        dd.resume(killed)
    start = str(caught.value).split("initial_weights='")[1].split("'")[0]
    saved = Folder(killed).checkpoints()[-1]
    assert start == str(saved) and usual.run(server=dd.Server(initial_weights=start), updates=0).x.isfinite().all()


def test_stray_files_in_a_folder_are_ignored(killed: Path, straight: Any) -> None:
    for name in ("trace/7.parquet", "trace/1 (copy).parquet", "trace/000000000002x.parquet", "checkpoints/9.safetensors"):
        (killed / name).write_bytes(b"stray")
    (killed / "checkpoints" / "000000000000-new").mkdir()
    assert differences(dd.resume(killed), straight) == []


def test_checkpoints_do_not_grow_with_wakes(tmp_path: Path) -> None:
    sizes = []

    def measure(state: dd.State, arrival: dd.Arrival) -> None:
        sizes.extend(path.stat().st_size for path in Folder(tmp_path / "run").checkpoints()[-1:])

    options: dict[str, Any] = {"updates": 400, "checkpoint_every": 20, "evaluation": dd.Evaluation(every=400)}
    method = dd.algorithms.FedFix(LR, period=0.5)
    run = dd.simulate(method, PROBLEM, SPEEDS, folder=tmp_path / "run", watch=[measure], **options)
    assert len([event for event in run.trace.events if event["kind"] == "wake"]) >= 400
    assert max(sizes) < 1.1 * sizes[0]
    assert dd.replay(run.folder).same_bits


@pytest.mark.parametrize("left", [["checkpoints"], []])
def test_a_finished_run_without_its_checkpoints_is_loaded_and_not_begun_anew(left: list[str], tmp_path: Path) -> None:
    run = dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=30, folder=tmp_path / "run", evaluation=BEST)
    before = seen(dd.load(run.folder))
    shutil.rmtree(run.folder / "checkpoints")
    for name in left:
        (run.folder / name).mkdir()
    loaded = dd.load(run.folder)
    assert seen(loaded) == before and loaded.version == 30 and "checkpoints of" in loaded.notes[-1]
    files = content(run.folder)
    for more in ({}, {"updates": 60}):
        with pytest.raises(dd.BadInput, match=r"checkpoints of .* are missing.* dd.load gives it"):
            dd.resume(run.folder, **more)
    assert content(run.folder) == files
    assert dd.replay(run.folder).same_bits
    assert started_from(run.folder).equal(run.x)


def test_of_a_run_that_was_stopped_early_the_model_is_left_without_its_checkpoints(tmp_path: Path) -> None:
    evaluation = dd.Evaluation(every=5, early_stop=dd.EarlyStop(patience=2))
    run = dd.simulate(dd.DuDe(0.9), PROBLEM, SPEEDS, updates=400, folder=tmp_path / "run", evaluation=evaluation)
    assert run.returned < run.version
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(dd.BadInput, match=r"its last state is lost; the model that it returned is in model\.safetensors"):
        dd.load(run.folder)
    assert started_from(run.folder).equal(run.x)


def test_an_unfinished_run_without_its_checkpoints_does_not_start_over(killed: Path) -> None:
    assert len(list((killed / "trace").iterdir())) > 1
    for path in (killed / "checkpoints").iterdir():
        path.unlink()
    for call in (dd.load, dd.resume):
        with pytest.raises(dd.BadInput, match=r"checkpoints of .* are missing"):
            call(killed)


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_loaded_and_can_be_lengthened_and_killed(tmp_path: Path) -> None:
    straight = usual.run(updates=60, folder=tmp_path / "straight")
    run = usual.run(updates=22, folder=tmp_path / "run")
    spoil(max((run.folder / "checkpoints").iterdir()), DAMAGES["half of it"])
    loaded = dd.load(run.folder)
    assert loaded.version == 22 and loaded.x.equal(run.x) and "is damaged" in loaded.notes[-1]
    with pytest.raises(Killed):
        dd.resume(run.folder, updates=60, watch=(kill_at(30),))
    assert differences(dd.resume(run.folder), straight) == []


# ------------------------------------------------------------------------------------------------------------ other files


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_flipped_bit_in_any_file_goes_unnoticed_or_ends_in_another_error(
    data: st.DataObject, originals: Path, straight: Any
) -> None:
    path = (
        originals
        / "finished"
        / data.draw(st.sampled_from(["trace.parquet", "config.json", "start.safetensors", "model.safetensors"]))
    )
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(bad))
    try:
        replayed = dd.replay(path.parent)
        # some bits mean nothing, such as those of a library's version; then all else must be as recorded
        assert replayed.x.numpy().tobytes() == straight["weights"]
        assert all(replayed.trace[name].tobytes() == straight[f"trace {name}"] for name in replayed.trace)
    except dd.DualDelayError:
        pass
    finally:
        path.write_bytes(good)


REFUSALS: dict[str, tuple[str, list[Any]]] = {
    "config.json": (r"config\.json is damaged, or was changed", CALLS),
    "start.safetensors": (r"start\.safetensors is damaged", CALLS),
    "trace.parquet": (r"trace\.parquet is damaged", [dd.resume, dd.replay]),
    "model.safetensors": (r"model\.safetensors (is damaged|differs)|not those of model\.safetensors", [dd.replay]),
}


@pytest.mark.parametrize("file", REFUSALS)
@damages
def test_a_damaged_file_that_a_call_needs_is_refused_by_name(damage: Damage, file: str, finished: Path) -> None:
    spoil(finished / file, damage)
    message, calls = REFUSALS[file]
    for call in calls:
        with pytest.raises((dd.BadInput, dd.ReplayMismatch), match=message):
            call(finished)


@pytest.mark.parametrize("file", FILES[1:])
@damages
def test_a_damaged_file_that_can_be_made_again_is_made_again(
    damage: Damage, file: str, finished: Path, straight: Any
) -> None:
    spoil(finished / file, damage)
    assert differences(dd.resume(finished), straight) == []


@pytest.mark.parametrize("name", ["metrics.parquet", "workers.parquet", "model.safetensors", "best.safetensors"])
def test_a_missing_file_of_a_finished_run_is_taken_from_the_checkpoint_and_made_again(name: str, tmp_path: Path) -> None:
    run = dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=30, folder=tmp_path / "run", evaluation=BEST)
    good = (run.folder / name).read_bytes()
    (run.folder / name).unlink()
    loaded = dd.load(run.folder)
    assert loaded.x.equal(run.x) and f"{name}; what the last checkpoint has is taken" in loaded.notes[0]
    dd.resume(run.folder)
    assert (run.folder / name).read_bytes() == good


@pytest.mark.parametrize("name", ["metrics", "workers", "trace"])
def test_a_column_with_another_name_or_fewer_rows_is_found(name: str, finished: Path) -> None:
    path = finished / f"{name}.parquet"
    good, table = path.read_bytes(), pq.read_table(path)
    first, *others = table.column_names
    changed = [table.rename_columns([f"{first}s", *others]), *([table.slice(0, len(table) - 1)] if len(table) else [])]
    for wrong in changed:
        pq.write_table(wrong, path)
        with pytest.raises(dd.DualDelayError, match=rf"{name}\.parquet is damaged|the record itself have changed"):
            dd.replay(finished)
        if name != "trace":
            assert any(f"{name}.parquet is damaged" in note for note in dd.load(finished).notes)
        path.write_bytes(good)
    assert dd.replay(finished).same_bits


def test_a_record_reads_back_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    columns = {"text": np.array(["a", "ü"]), "number": np.array([1.5, np.nan]), "count": np.array([1, 2**62])}
    digest = save_record(tmp_path / "a.parquet", columns, "this", {"events": [{"kind": "left"}]})
    loaded, about = load_record(tmp_path / "a.parquet", "this", columns)
    assert {name: str(loaded[name].tolist()) for name in loaded} == {name: str(columns[name].tolist()) for name in columns}
    assert about == {"events": [{"kind": "left"}], "run": "this", "digest": digest}
    with pytest.raises(Damaged, match="columns are not those"):
        load_record(tmp_path / "a.parquet", "this", ["other"])
    with pytest.raises(Damaged, match="of another run"):
        load_record(tmp_path / "a.parquet", "that")


@pytest.mark.parametrize("key, value", [("updates", 21), ("ended", "stop"), ("notes", ["fine"]), ("audit", 0.5)])
def test_a_changed_value_of_the_result_is_found(key: str, value: Any, finished: Path, straight: Any) -> None:
    path = finished / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(dd.BadInput, match=r"result\.json is damaged, or was changed"):
        dd.replay(finished)
    loaded = dd.load(finished)
    assert loaded.ended == "interrupted" and "result.json is damaged" in loaded.notes[0]
    assert differences(dd.resume(finished), straight) == []


EDITS: dict[str, Damage] = {
    "another seed": lambda data: data.replace(b'"seed": 0', b'"seed": 1', 1),
    "another lr": lambda data: data.replace(b"0.015625", b"0.015626"),
    "a list": lambda data: b"[]",
    "a number": lambda data: b"3",
    "almost nothing": lambda data: b'{"digest": 3}',
    "no text": lambda data: b"\xff\xfe",
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_configuration_is_refused(edit: Damage, finished: Path) -> None:
    spoil(finished / "config.json", edit)
    for call in CALLS:
        with pytest.raises(dd.BadInput, match=r"config\.json is damaged, or was changed"):
            call(finished)


# ------------------------------------------------------------------------------------------------ folders that exist or not


def test_go_on_begins_goes_on_and_returns(straight: Any, tmp_path: Path) -> None:
    usual.killed(tmp_path / "run", 9, go_on=True)
    for _ in range(2):
        assert differences(usual.run(folder=tmp_path / "run", go_on=True), straight) == []


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is another in a run, and in its options
    "algorithm": ({"algorithm": dd.DuDe(LR / 2, memory="workers")}, {}),
    "fingerprint": ({"problem": usual.problem.reseeded(9)}, {}),
    "speeds": ({"speeds": dd.FixedSpeeds([1.0] * 4)}, {}),
    "changes": ({"speeds": dd.SimulatedFleet(usual.speeds, changes=[dd.speeds.leave(1, 3.0)])}, {}),
    "link": ({"speeds": dd.SimulatedFleet(usual.speeds, link=dd.speeds.Link(1.0))}, {}),
    "seed": ({}, {"seed": 1}),
    "updates": ({}, {"updates": 25}),
    "stop": ({}, {"evaluation": dd.Evaluation(every=7, seconds=2.0, early_stop=dd.EarlyStop(target=0.0))}),
    "start": ({}, {"server": dd.Server(initial_weights=torch.ones(2, dtype=torch.float64))}),
}


@pytest.mark.parametrize("setting", OTHERS)
def test_go_on_refuses_a_folder_of_another_configuration(setting: str, finished: Path) -> None:
    parts, options = OTHERS[setting]
    other = Scenario(**{"algorithm": usual.algorithm, **parts})
    before = content(finished)
    with pytest.raises(dd.BadInput, match=rf"holds a run of another configuration \(.*\b{setting}: .* there, .* now"):
        other.run(folder=finished, go_on=True, **options)
    assert content(finished) == before


@pytest.mark.parametrize(
    "place, message",
    [
        (".", "exists; a run has a folder of its own. Choose another name"),
        ("letter.txt", "exists; a run has a folder of its own. Choose another name"),
        ("letter.txt/run", "could not create"),
        ("letter.txt/deep/run", "could not create"),
        ("/proc/run", "could not create"),
        ("x" * 300, "folder is .* expected a shorter name"),
    ],
)
def test_a_folder_that_exists_or_cannot_be_made_is_refused(place: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(dd.DualDelayError, match=message):
        usual.run(folder=tmp_path / place)
    assert content(tmp_path) == {"letter.txt": b"dear"}


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")  # to root everything is open

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    why = r"cannot be written to \(Read-only file system\)"
    with pytest.raises(dd.BadInput, match=f"could not create {tmp_path}/a/run: {tmp_path} {why}"):
        usual.run(folder=tmp_path / "a" / "run")
    assert content(tmp_path) == {}


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_an_empty_folder_that_exists_becomes_the_run_s_and_stays_as_private(
    mode: int, straight: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    assert differences(usual.run(folder=folder), straight) == []
    assert folder.stat().st_mode & 0o777 == mode
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(dd.BadInput, match=r"exists; a run has a folder of its own.*dualdelay resume"):
        usual.run(folder=folder)


def test_what_is_put_into_an_empty_folder_before_its_run_begins_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_weights = files.save_weights

    def interfering(*arguments: Any) -> str:
        (folder / "letter.txt").write_text("dear")
        return save_weights(*arguments)

    monkeypatch.setattr(files, "save_weights", interfering)
    with pytest.raises(dd.BadInput, match="exists; a run has a folder of its own"):
        usual.run(folder=folder)
    assert content(tmp_path) == {"run/letter.txt": b"dear"}


def test_an_empty_folder_that_nothing_can_take_the_place_of_is_refused_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(dd.BadInput, match="exists; a run has a folder of its own"):
        usual.run(folder=tmp_path / "link")
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "ismount", lambda path: path == folder)
        with pytest.raises(dd.BadInput, match=r"something is mounted there\. Name a new one in it, such as .*run/run"):
            usual.run(folder=folder)
    for place in (folder, tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", lambda path, mode, place=place: path != place)
            with pytest.raises(dd.BadInput, match=r"cannot be written\. Name a new one in it"):
                usual.run(folder=folder)
    monkeypatch.chdir(folder)
    for place in (Path(), folder):
        with pytest.raises(dd.BadInput, match=r"this process is in it\. Name a new one in it"):
            usual.run(folder=place)
    assert list(folder.iterdir()) == [] and usual.run(folder=folder / "run").version == 24


@pytest.mark.parametrize("place", ["nowhere", "letter.txt", "letter.txt/run", "."])
def test_what_is_no_folder_of_a_run_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for call in CALLS:
        with pytest.raises(dd.BadInput, match="not the folder of a run"):
            call(tmp_path / place)
    assert content(tmp_path) == {"letter.txt": b"dear"}


# ------------------------------------------------------------------------------------------------------------ full disks


@contextmanager
def files_no_larger_than(limit: int) -> Iterator[None]:
    """As on a full disk, writing more than this fails with an OSError (Python ignores the signal that goes with it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


wide = Scenario(
    dd.DuDe(LR),
    dd.Quadratic([[float(i)] * 500 for i in range(3)], noise=0.5),
    dd.FixedSpeeds([1.0, 2.0, 4.0]),
    checkpoint_every=1,
)


@pytest.mark.parametrize("limit", [0, 100, 3000])
def test_on_a_full_disk_no_run_begins_and_nothing_is_left(limit: int, tmp_path: Path) -> None:
    with (
        files_no_larger_than(limit),
        pytest.raises(dd.RunFailed, match=r"^could not create .*run \(File too large\)") as told,
    ):
        wide.run(folder=tmp_path / "run")
    assert "resume" not in str(told.value) and str(told.value).count("could not") == 1  # there is nothing to go on with
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_lie_where_it_should_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(
        dd.RunFailed, match=r"^could not create .*deep.run \(No space left on device\)\. No run has begun; "
    ):
        wide.run(folder=tmp_path / "deep" / "run")


@pytest.mark.parametrize("limit", [0, 1000, 20_000])
def test_when_the_disk_fills_up_the_run_fails_and_can_be_resumed(limit: int, tmp_path: Path) -> None:
    straight = wide.run(folder=tmp_path / "straight")
    wide.killed(tmp_path / "run", 11)
    with files_no_larger_than(limit), pytest.raises(dd.RunFailed, match=r"could not write .*File too large.* resume"):
        dd.resume(tmp_path / "run")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def test_on_the_shell_a_full_disk_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"train dude[lr=0.05] --problem digits[workers=3,alpha=1.0] --updates 9 --folder {tmp_path / 'run'}".split()
    with files_no_larger_than(100_000), pytest.raises(SystemExit) as stop:
        main(command)
    printed = capsys.readouterr().err
    assert stop.value.code == 1 and "error: could not write" in printed and "Traceback" not in printed
    assert not list(tmp_path.rglob("*.part"))
    assert dd.resume(tmp_path / "run").version == 9


def test_when_no_run_of_a_comparison_fits_the_first_is_named_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"compare dude[lr=0.05] --problem digits[workers=3] --updates 9 --cores 1 --folder {tmp_path / 'all'}".split()
    with files_no_larger_than(2000), pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr().err
    assert stop.value.code == 1 and said.count("could not") == 1
    assert "error: no run came to its end. Of the first, dude[lr=0.05] with seed 0: could not create " in said


def test_a_disk_without_room_for_figure_and_table_hides_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are saved, their numbers are printed, and then it is told what could not be written."""

    def full(path: Path, *_: Any) -> None:
        raise NotSaved(f"could not write {path} (No space left on device).")

    monkeypatch.setattr("dualdelay.analysis.figures.write", full)
    monkeypatch.setattr("dualdelay.cli.commands.save_table", full)
    words = f"compare dude[lr=0.05] --problem digits[workers=3] --updates 9 --folder {tmp_path / 'all'}".split()
    with pytest.raises(SystemExit) as stop:
        main(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 1 and "dude[lr=0.05]" in out and "no figure: could not write " in out and "folder: " in out
    assert err.rstrip().endswith("comparison.parquet (No space left on device).")
    monkeypatch.undo()
    main(words)
    assert (tmp_path / "all" / "comparison.parquet").exists() and (tmp_path / "all" / "comparison.png").exists()


# --------------------------------------------------------------------------------------------------------------- no code


def test_nothing_in_a_folder_is_a_pickle(originals: Path) -> None:
    for name, data in content(originals).items():
        suffix = Path(name).suffix
        if suffix == ".safetensors":
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        else:
            assert data.startswith({".json": b"{", ".parquet": b"PAR1"}[suffix]) if suffix else data == b"", name


def test_the_source_pickles_only_what_goes_between_its_own_processes_and_only_locks_and_groups_need_fcntl() -> None:
    for path in Path(dd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = {name.split(".")[0] for name in names}
            assert not modules & {"pickle", "dill", "shelve", "joblib"}, path
            assert "cloudpickle" not in modules or path.name == "processes.py", path
            assert "fcntl" not in modules or path.name in ("locks.py", "group.py"), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}, path

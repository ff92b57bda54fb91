"""What lies in a run's folder: damage is found and named, a full disk ends cleanly, and nothing is half written."""

from __future__ import annotations

import ast
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.storage.folder import Folder
from own import FILES, Killed, Scenario, bits, differences, kill_at
from tables import LR

Damage = Callable[[bytes], bytes]


def flipped(data: bytes) -> bytes:
    place = min(120, len(data) - 1)  # among the values, in Parquet and in safetensors
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES: dict[str, Damage] = {
    "a flipped bit": flipped,
    "half of it": lambda data: data[: len(data) // 2],
    "nothing in it": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)

scenario = Scenario(dd.DuDe(LR, memory="workers"))


def spoil(path: Path, damage: Damage) -> None:
    path.write_bytes(damage(path.read_bytes()))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@damages
@pytest.mark.parametrize("kind", ["checkpoints", "trace"])
def test_if_the_newest_checkpoint_is_damaged_the_one_before_is_used(kind: str, damage: Damage, tmp_path: Path) -> None:
    straight = scenario.run(folder=tmp_path / "straight")
    scenario.killed(tmp_path / "run", 18)
    *_, newest = sorted((tmp_path / "run" / kind).iterdir())
    spoil(newest, damage)
    resumed = dd.resume(tmp_path / "run")
    assert [newest.name in note for note in resumed.notes] == [True]
    assert differences(resumed, straight) == ["result.json"]
    kept, other = (Folder(run.folder).result() for run in (resumed, straight))
    assert kept == {**other, "notes": list(resumed.notes)}


@damages
def test_if_every_checkpoint_is_damaged_there_is_one_clear_error(damage: Damage, tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 18)
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(paths) > 1
    for path in paths:
        spoil(path, damage)
    before = content(tmp_path / "run")
    with pytest.raises(dd.BadInput, match="no checkpoint") as caught:
        dd.resume(tmp_path / "run")
    assert all(path.name in str(caught.value) for path in paths)
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("call, count", [(dd.resume, 18), (dd.resume, 0), (dd.replay, 0)])
def test_a_trace_with_a_damaged_column_name_is_refused_by_name(
    call: Callable[[Path], dd.Run], count: int, tmp_path: Path
) -> None:
    if count:
        scenario.killed(tmp_path / "run", count)
    else:
        scenario.run(folder=tmp_path / "run")
    for path in (*(tmp_path / "run" / "trace").iterdir(), *(tmp_path / "run").glob("trace.parquet")):
        spoil(path, lambda data: data.replace(b"worker", b"wurker"))
    with pytest.raises(dd.BadInput, match="parquet is damaged"):
        call(tmp_path / "run")


@damages
@pytest.mark.parametrize("call", [dd.resume, dd.replay])
def test_a_damaged_trace_is_refused_by_name(call: Callable[[Path], dd.Run], damage: Damage, tmp_path: Path) -> None:
    scenario.run(folder=tmp_path / "run")
    spoil(tmp_path / "run" / "trace.parquet", damage)
    with pytest.raises(dd.BadInput, match=r"trace\.parquet is damaged"):
        call(tmp_path / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dd.Run:
    return scenario.run(folder=tmp_path_factory.mktemp("finished") / "run")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_flipped_bit_in_any_file_goes_unnoticed_or_ends_in_another_error(data: st.DataObject, finished: dd.Run) -> None:
    file = data.draw(st.sampled_from(["trace.parquet", "config.json", "start.safetensors", "model.safetensors"]))
    path = finished.folder / file
    good = path.read_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(bad))
    try:
        again = dd.replay(finished.folder)
        # some bits mean nothing, such as those of a library's version; then all else must be as recorded
        assert again.x.equal(finished.x)
        assert all(again.trace[name].tobytes() == finished.trace[name].tobytes() for name in finished.trace)
    except dd.DualDelayError:
        pass
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("file", FILES[1:])
@damages
def test_a_damaged_file_that_can_be_made_again_is_made_again(damage: Damage, file: str, tmp_path: Path) -> None:
    expected = bits(scenario.run(folder=tmp_path / "run"))
    spoil(tmp_path / "run" / file, damage)
    assert differences(dd.resume(tmp_path / "run"), expected) == []


@pytest.mark.parametrize("call", [dd.resume, dd.replay])
@pytest.mark.parametrize(
    "damage",
    [
        *DAMAGES.values(),
        lambda data: data.replace(b'"seed": 0', b'"seed": 1', 1),
        lambda data: data.replace(b"0.015625", b"0.015626"),
        lambda data: b"[]",
        lambda data: b"3",
        lambda data: b'{"digest": 3}',
        lambda data: b"\xff\xfe",
    ],
    ids=[*DAMAGES, "another seed", "another lr", "a list", "a number", "almost nothing", "no text"],
)
def test_a_configuration_that_was_damaged_or_edited_is_refused(
    damage: Damage, call: Callable[[Path], dd.Run], tmp_path: Path
) -> None:
    scenario.run(folder=tmp_path / "run")
    good = (tmp_path / "run" / "config.json").read_bytes()
    spoil(tmp_path / "run" / "config.json", damage)
    assert (tmp_path / "run" / "config.json").read_bytes() != good
    with pytest.raises(dd.BadInput, match=r"config\.json (is damaged|was changed)"):
        call(tmp_path / "run")


@damages
def test_a_run_does_not_start_over_from_damaged_initial_weights(damage: Damage, tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 2)
    assert not list((tmp_path / "run").glob("*/*"))
    spoil(tmp_path / "run" / "start.safetensors", damage)
    with pytest.raises(dd.BadInput, match=r"start\.safetensors"):
        dd.resume(tmp_path / "run")


@damages
def test_a_damaged_final_model_is_found_by_a_replay(damage: Damage, tmp_path: Path) -> None:
    scenario.run(folder=tmp_path / "run")
    spoil(tmp_path / "run" / "model.safetensors", damage)
    with pytest.raises((dd.BadInput, dd.ReplayMismatch)):
        dd.replay(tmp_path / "run")


def test_a_finished_run_whose_last_checkpoint_is_damaged_can_be_lengthened_and_killed(tmp_path: Path) -> None:
    straight = scenario.run(updates=60, folder=tmp_path / "straight")
    scenario.run(updates=22, folder=tmp_path / "run")
    *_, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    spoil(newest, DAMAGES["half of it"])
    with pytest.raises(Killed):
        dd.resume(tmp_path / "run", updates=60, watch=(kill_at(30),))
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("dear")
    with pytest.raises(dd.BadInput, match="exists"):
        scenario.run(folder=tmp_path / "run")
    assert content(tmp_path) == {"run/letter.txt": b"dear"}


def test_go_on_begins_goes_on_and_returns(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "run", 9, go_on=True)
    ended = scenario.run(folder=tmp_path / "run", go_on=True)
    assert differences(ended, scenario.run(folder=tmp_path / "straight")) == []
    expected = bits(ended)
    assert differences(scenario.run(folder=tmp_path / "run", go_on=True), expected) == []


OTHERS: dict[str, Callable[[Path], object]] = {
    "lr": lambda folder: Scenario(dd.DuDe(LR / 2, memory="workers")).run(folder=folder, go_on=True),
    "problem": lambda folder: Scenario(scenario.algorithm, scenario.problem.reseeded(9)).run(folder=folder, go_on=True),
    "speeds": lambda folder: Scenario(scenario.algorithm, speeds=dd.FixedSpeeds([1.0] * 4)).run(folder=folder, go_on=True),
    **{
        name: lambda folder, name=name, value=value: scenario.run(folder=folder, go_on=True, **{name: value})
        for name, value in {
            "seed": 1,
            "updates": 25,
            "changes": [dd.speeds.leave(1, 3.0)],
            "link": dd.speeds.Link(1.0),
            "stop": dd.EarlyStop(target=0.0),
            "start": torch.ones(2, dtype=torch.float64),
        }.items()
    },
}


@pytest.mark.parametrize("what", OTHERS)
def test_go_on_refuses_a_folder_of_another_configuration(what: str, tmp_path: Path) -> None:
    scenario.run(folder=tmp_path / "run")
    before = content(tmp_path)
    with pytest.raises(dd.BadInput, match=what):
        OTHERS[what](tmp_path / "run")
    assert content(tmp_path) == before


@contextmanager
def files_no_larger_than(limit: int) -> Iterator[None]:
    """As on a full disk, writing more than this fails with an OSError (Python ignores the signal that goes with it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


wide = Scenario(dd.DuDe(LR), dd.Quadratic([[float(i)] * 500 for i in range(3)], noise=0.5), dd.FixedSpeeds([1.0, 2.0, 4.0]))


@pytest.mark.parametrize("limit", [0, 100, 3000])
def test_on_a_full_disk_no_run_begins_and_nothing_is_left(limit: int, tmp_path: Path) -> None:
    with files_no_larger_than(limit), pytest.raises(dd.RunFailed, match="could not"):
        wide.run(folder=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [0, 1000, 20_000])
def test_when_the_disk_fills_up_the_run_fails_whole_and_can_be_resumed(limit: int, tmp_path: Path) -> None:
    straight = wide.run(folder=tmp_path / "straight", checkpoint_every=1)
    wide.killed(tmp_path / "run", 11, checkpoint_every=1)
    with files_no_larger_than(limit), pytest.raises(dd.RunFailed, match=r"could not write .*File too large.* resume"):
        dd.resume(tmp_path / "run")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def test_on_the_shell_a_full_disk_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"train dude[lr=0.05] --problem digits[workers=3,alpha=1.0] --updates 9 --folder {tmp_path / 'run'}".split()
    with files_no_larger_than(100_000), pytest.raises(SystemExit) as stop:
        main(command)
    said = capsys.readouterr().err
    assert stop.value.code == 1
    assert "error: could not write" in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.part"))
    assert dd.resume(tmp_path / "run").version == 9


@pytest.mark.parametrize("place", ["letter.txt", "letter.txt/run", "letter.txt/deep/run", "/proc/run", "x" * 300])
def test_a_folder_that_cannot_be_made_is_one_clear_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(dd.DualDelayError, match=r"(could not create|exists|folder is)"):
        scenario.run(folder=tmp_path / place)
    assert content(tmp_path) == {"letter.txt": b"dear"}


@pytest.mark.parametrize("call", [dd.resume, dd.replay])
@pytest.mark.parametrize("place", ["nowhere", "letter.txt", "letter.txt/run", "."])
def test_what_is_no_folder_of_a_run_is_refused(place: str, call: Callable[[Path], dd.Run], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(dd.BadInput, match="not the folder of a run"):
        call(tmp_path / place)
    assert content(tmp_path) == {"letter.txt": b"dear"}


def test_nothing_in_a_folder_is_a_pickle(tmp_path: Path) -> None:
    scenario.killed(tmp_path / "killed", 18)
    scenario.run(folder=tmp_path / "finished")
    kinds = {".json": b"{", ".parquet": b"PAR1"}
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        elif path.name == "lock":
            assert data == b""
        else:
            assert data.startswith(kinds[path.suffix]), path


def test_the_source_neither_pickles_nor_unpickles() -> None:
    for path in Path(dd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pickle", "dill", "cloudpickle", "shelve", "joblib"}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}, path

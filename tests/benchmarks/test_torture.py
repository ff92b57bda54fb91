"""The torture bench in small: a few trials of every attack, and for every attack a planted failure that it must catch."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dualdelay as dd
from dualdelay.runs.names import parse

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
torture = importlib.import_module("torture")
core, damage, disk, power, runs, workers = (
    importlib.import_module(f"torture_{name}") for name in ("core", "damage", "disk", "power", "runs", "workers")
)

pytestmark = pytest.mark.slow

FEW = {
    "kills": 9,
    "fails": 9,
    "power": 12,
    "damage": 40,
    "config": 30,
    "grammar": 300,
    "flags": 12,
    "csv": 60,
    "messages": 20,
}


class Bench:
    """All attacks, ready."""

    def __init__(self, place: Path) -> None:
        self.attacks = {attack.name: attack for attack in torture.prepared(torture.USUAL, 0, place)}
        self._place = place / "trials"
        self._place.mkdir()

    def run(self, attack: Any, numbers: Any) -> Any:
        """The tally of some trials."""
        return core.Pool([core.Plan(attack, iter(numbers))], 0, self._place).run()

    def kinds(self, name: str, numbers: Any) -> set[str]:
        """What failed in some trials."""
        tally = self.run(self.attacks[name], numbers)
        assert tally.trials[name] == len(numbers)
        return {found.kind for found in tally.failures}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("torture").resolve())


@pytest.mark.parametrize("name", torture.USUAL)
def test_nothing_fails_in_a_few_trials_of_each_attack(name: str, bench: Bench) -> None:
    tally = bench.run(bench.attacks[name], range(FEW[name]))
    assert tally.trials[name] == FEW[name]
    assert tally.failures == [], core.table(tally, [name], 0)


def test_every_attack_has_a_few_trials_here() -> None:
    assert set(FEW) == set(torture.USUAL) == set(torture.ATTACKS) - {"workers"}


# ----------------------------------------------------------------------------------------------- a failure for each attack


def _careless(path: Path, data: bytes, advice: str = "") -> None:
    """Writes in place, syncs nothing, and lets the system's errors through."""
    with open(path, "wb") as file:
        file.write(data)


@pytest.fixture
def careless() -> Iterator[None]:
    """The package writes its files without care."""
    write = importlib.import_module("dualdelay.storage.files").write
    modules = [module for name, module in sys.modules.items() if name.startswith("dualdelay")]
    patches = [
        mock.patch.object(module, "write", _careless) for module in modules if getattr(module, "write", None) is write
    ]
    assert patches
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


@pytest.fixture
def careless_bench(careless: None, tmp_path: Path) -> Iterator[Bench]:
    """What is written without care, with the calls counted that this takes."""
    with mock.patch.object(torture, "USUAL", ["kills", "fails", "power"]):
        made = runs.CASES
        with mock.patch.dict(runs.CASES, dict.fromkeys(made, made["plain"])):
            yield Bench(tmp_path.resolve())


def test_a_file_that_is_written_in_place_is_caught(careless_bench: Bench) -> None:
    kills, fails, loss = (careless_bench.attacks[name] for name in ("kills", "fails", "power"))
    halves = [k for k, (name, _, mode) in enumerate(kills._targets) if mode == "half" and name == "resume"]
    assert careless_bench.kinds("kills", halves[:4]) & {"wrong bit", "lost run"}
    writes = [k for k, (name, _, mode) in enumerate(fails._targets) if mode == "half" and name == "resume"]
    assert "raw traceback" in careless_bench.kinds("fails", writes[:4])
    late = [k for k, (name, at, way) in enumerate(loss._targets) if way == "synced" and name == "start plain" and at > 40]
    assert "lost run" in careless_bench.kinds("power", late[:2])


def test_a_leftover_is_caught(tmp_path: Path) -> None:
    runs.require_clean(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".model.part").touch()
    with pytest.raises(core.Failure, match="leftovers"):
        runs.require_clean(tmp_path)


def _later(call: Callable[[Path], dd.Run]) -> Callable[[Path], dd.Run]:
    def wrong(folder: Path) -> dd.Run:
        run = call(folder)
        return replace(run, time=run.time + 1)

    return wrong


@pytest.mark.parametrize("call", ["load", "replay", "resume"])
def test_a_wrong_value_is_caught(call: str, bench: Bench) -> None:
    with mock.patch.dict(damage.CALLS, {call: _later(damage.CALLS[call])}):
        assert "silent damage" in bench.kinds("damage", range(12))


def _breaks(*_: Any, **__: Any) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize(
    "name, where",
    [
        ("damage", "dualdelay.load"),
        ("config", "dualdelay.load"),
        ("grammar", "torture_words.parse"),
        ("flags", "dualdelay.cli.shell.main"),
        ("csv", "dualdelay.simulation.RecordedSpeeds"),
        ("messages", "dualdelay.train"),
    ],
)
def test_an_exception_that_is_not_ours_is_caught(name: str, where: str, bench: Bench) -> None:
    with mock.patch(where, _breaks):
        assert bench.kinds(name, range(6)) == {"raw traceback"}


def test_a_time_that_cannot_be_is_caught(bench: Bench) -> None:
    with mock.patch("dualdelay.simulation.RecordedSpeeds", lambda path: mock.Mock(n=1, seconds=lambda *job: -1.0)):
        assert "silent damage" in bench.kinds("csv", range(3))


def _prints(text: str, code: int) -> Callable[..., None]:
    def main(words: list[str]) -> None:
        print(text, file=sys.stderr)
        sys.exit(code)

    return main


@pytest.mark.parametrize("text, code", [("Traceback (most recent call last):", 1), ("", 3), ("", -11)])
def test_a_traceback_on_the_shell_or_another_code_is_caught(text: str, code: int, bench: Bench) -> None:
    with mock.patch("dualdelay.cli.shell.main", _prints(text, code)):
        assert bench.kinds("flags", range(2)) == {"raw traceback"}
    with mock.patch("dualdelay.cli.shell.main", _prints("error: no", 2)):
        assert bench.kinds("flags", range(2)) == set()


def _imports_ray(*_: Any, **__: Any) -> None:
    sys.modules.pop("ray", None)
    with pytest.raises(ImportError):
        importlib.import_module("ray")


def test_a_call_that_imports_ray_is_caught(bench: Bench) -> None:
    with mock.patch.dict(damage.BOUNDED, {"load": _imports_ray}):
        assert bench.kinds("config", range(3)) == {"joined"}


def test_a_value_that_counts_twice_is_caught(bench: Bench) -> None:
    recorder = importlib.import_module("dualdelay.engine.trace").Recorder
    once = recorder.arrival

    def twice(self: Any, *arrival: Any) -> None:
        once(self, *arrival)
        once(self, *arrival)

    with mock.patch.object(recorder, "arrival", twice):
        assert "wrong bit" in bench.kinds("messages", range(6))


@pytest.mark.parametrize(
    "event, updates, audit, kind",
    [
        ({"kind": "crashed", "worker": 0}, 400, 0.0, "lost run"),
        ({"kind": "left", "worker": 2}, 399, 0.0, "lost run"),
        ({"kind": "left", "worker": 2}, 400, 0.1, "wrong bit"),
    ],
)
def test_harm_to_healthy_workers_is_caught(event: dict[str, Any], updates: int, audit: float, kind: str) -> None:
    with pytest.raises(core.Failure, match=kind):
        workers.require_unharmed(_ended(event, updates, audit), "it", "freeze")
    workers.require_unharmed(_ended({"kind": "left", "worker": workers.VICTIM}, 400, 0.0), "it", "freeze")


def _ended(event: dict[str, Any], updates: int, audit: float) -> dd.Run:
    """A run with an event and an audit of our own."""
    run = dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0]]), dd.FixedSpeeds([1.0]), updates=updates)
    run.trace.events.append(event)
    return replace(run, audit=audit)


# -------------------------------------------------------------------------------------------------------- the frame itself


class Ends(core.Attack):
    """Ends as its number says."""

    name, limit, batch = "ends", 2.0, 10

    def trial(self, number: int, chance: Any, place: Path) -> None:
        ways: list[Callable[[], Any]] = [
            lambda: None,
            lambda: time.sleep(60),
            lambda: os._exit(3),
            _breaks,
            lambda: core.attempt("it", _breaks),
            lambda: core.must("lost run", "it", lambda: parse("algorithm", "nope")),
        ]
        ways[number]()


def test_a_trial_that_hangs_dies_or_raises_is_counted_and_the_others_go_on(bench: Bench) -> None:
    tally = bench.run(Ends(), [0, 1, 2, 3, 4, 5, 0])
    assert tally.trials["ends"] == 7
    found = {found.number: found.kind for found in tally.failures}
    assert found == {1: "hang", 2: "raw traceback", 3: "raw traceback", 4: "raw traceback", 5: "lost run"}
    text = core.table(tally, ["ends"], 7)
    assert "--only ends --trial 5 --seed 7" in text


@pytest.mark.parametrize("broken, code", [(False, 0), (True, 1)])
def test_the_command_prints_the_table_and_says_whether_something_failed(
    broken: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if broken:
        monkeypatch.setattr("dualdelay.simulation.RecordedSpeeds", _breaks)
    monkeypatch.setattr(sys, "argv", ["torture.py", "--only", "csv", "--trials", "3", "--out", str(tmp_path / "table.txt")])
    with pytest.raises(SystemExit) as end:
        torture.main()
    assert end.value.code == code
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.txt").read_text()
    assert printed.splitlines()[1].split() == ["csv", "3", "0", "0", "0", "3" if broken else "0", "0", "0", "0"]


def test_a_disk_counts_the_calls_that_write_and_fails_at_the_one_chosen(tmp_path: Path) -> None:
    counted = disk.Disk(tmp_path)
    with counted.installed():
        (tmp_path / "a").write_text("hello")
        (tmp_path / "a").replace(tmp_path / "b")
        assert (tmp_path / "b").read_text() == "hello"
        (tmp_path / "b").unlink()
    assert counted.calls == ["open", "write", "close", "rename", "unlink"]
    failing = disk.Disk(tmp_path, disk.Fault(2, "half", 28))
    with failing.installed(), pytest.raises(OSError, match="No space"):
        os.write(os.open(tmp_path / "c", os.O_WRONLY | os.O_CREAT), b"hello")
    assert (tmp_path / "c").read_bytes() == b"he"


def test_without_a_sync_a_name_may_be_gone_and_with_one_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    calls = [
        disk.Call("open", "/top/.a", os.O_CREAT | os.O_WRONLY),
        disk.Call("write", "/top/.a", (0, b"hello")),
        disk.Call("fsync", "/top/.a"),
        disk.Call("rename", "/top/.a", "/top/a"),
    ]
    sync = [disk.Call("open", "/top", os.O_RDONLY), disk.Call("fsync", "/top")]
    for k, (some, left) in enumerate([(calls, {}), (calls + sync, {"a": b"hello"})]):
        platter = power.Platter(tmp_path / "before", "/top")
        for call in some:
            platter.do(call)
        platter.leave(tmp_path / str(k), "synced", random.Random(0))
        assert {path.name: path.read_bytes() for path in (tmp_path / str(k)).iterdir()} == left

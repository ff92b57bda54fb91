"""What a run's bits depend on is recorded, named when a replay differs, and noted when a run goes on elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.core.environment import changes, differences, environment
from dualdelay.storage.files import load_table, save_table
from dualdelay.storage.folder import Folder
from own import Killed, kill_at

# one exponential of about a thousand has other last digits in instructions of another kind, so nearly every gradient has
PROBLEM = dd.problems.Logistic(workers=4, features=4, samples=2000, batch_size=2000)
HERE = torch.backends.cpu.get_cpu_capability()


def simulate(folder: Path, **options: Any) -> dd.Run:
    options = {"updates": 60, "checkpoint_every": 10, **options}
    return dd.simulate(dd.DuDe(0.05), PROBLEM, dd.TruncatedNormalSpeeds(4, std=2.0), folder=folder, **options)


def killed(folder: Path, count: int) -> Path:
    with pytest.raises(Killed):
        simulate(folder, watch=[kill_at(count)])
    return folder


# "there" was killed here before its first checkpoint, so that all that counts is computed there; "moved" and "back" were
# killed in the middle, and "back" is stopped there once more
ON_ANOTHER_PROCESSOR = """
import json, sys
from pathlib import Path
import dualdelay as dd

def stop(state, arrival):
    if state.version == 45:
        raise KeyboardInterrupt

folder = Path(sys.argv[1])
dd.resume(folder / "there")
notes = [dd.resume(folder / "moved").notes, dd.replay(folder / "moved", rtol=1e-3).notes]
try:
    dd.resume(folder / "back", watch=[stop])
except KeyboardInterrupt:
    print(json.dumps(notes))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Three folders that a processor of another kind has worked on, and the notes of a run and a replay there.

    Of another kind, since torch uses none of the instructions that this one has (or, if it uses none here, some).
    """
    folder = tmp_path_factory.mktemp("runs")
    killed(folder / "there", 1), killed(folder / "moved", 37), killed(folder / "back", 37)
    done = subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_PROCESSOR, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2" if HERE == "DEFAULT" else "default"},
    )
    return folder, json.loads(done.stdout)


def test_what_bits_depend_on_is_recorded(tmp_path: Path) -> None:
    simulate(tmp_path / "run", updates=2)
    config = Folder(tmp_path / "run").record()
    recorded = config.environment
    assert recorded == environment()
    assert (recorded["capability"], recorded["torch"], config.threads) == (HERE, torch.__version__, 1)
    assert recorded["blas"] and recorded["processor"]


def test_differences_are_put_in_words_and_what_changes_no_bit_is_no_change() -> None:
    now = environment()
    assert differences(now, now) == []
    assert changes(now, now) == ""
    before = {**now, "torch": "1.0", "python": "2.7"}
    assert differences(before, now) == [
        f"torch: 1.0 in the record, {now['torch']} here",
        f"Python: 2.7 in the record, {now['python']} here",
    ]
    assert changes(before, now) == f"torch: 1.0 -> {now['torch']}"
    assert changes({}, {"simd": "AVX2"}) == "simd: unknown -> AVX2"


def test_a_replay_on_another_processor_names_it_and_compares_numbers(
    elsewhere: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = elsewhere[0] / "there"
    recorded = Folder(folder).record().environment["capability"]
    assert recorded != HERE
    with pytest.raises(dd.ReplayMismatch) as caught:
        dd.replay(folder)
    assert f"(ATEN_CPU_CAPABILITY): {recorded} in the record, {HERE} here" in str(caught.value)
    assert "numpy" not in str(caught.value) and "rtol=1e-3" in str(caught.value)
    run = dd.replay(folder, rtol=1e-3)
    assert run.same_bits is False and "losses agree to" in run.notes[0] and run.version == 60
    main(["replay", str(folder), "--rtol", "1e-3", "--json"])
    shown = capsys.readouterr()
    assert '"same": false' in shown.out and "the order is the same" in shown.err
    with pytest.raises(dd.ReplayMismatch, match=r"differs: at arrival [0-9]+ .* the recorded loss is"):
        dd.replay(folder, rtol=1e-20)


def test_with_a_tolerance_the_order_is_still_compared_exactly(tmp_path: Path) -> None:
    simulate(tmp_path / "run", updates=20)
    columns, about = load_table(tmp_path / "run" / "trace.parquet")
    columns["version"] = columns["version"].copy()
    columns["version"][9] += 1
    save_table(tmp_path / "run" / "trace.parquet", columns, about)
    words = "recorded version is .*trace.parquet is damaged"
    with pytest.raises(dd.ReplayMismatch, match=words):
        dd.replay(tmp_path / "run", rtol=0.5)
    with pytest.raises(dd.BadInput, match="rtol is 0"):
        dd.replay(tmp_path / "run", rtol=0)


def test_a_run_that_went_on_on_another_processor_notes_it_and_is_replayed_from_there(elsewhere: tuple[Path, Any]) -> None:
    folder, ((noted,), replayed) = elsewhere[0] / "moved", elsewhere[1]
    assert "on it was computed on another kind of machine (capability: " in noted
    assert noted in dd.load(folder).notes
    assert any("and the replay went on from those" in note for note in replayed)
    (event,) = dd.load(folder).trace.events
    assert event["kind"] == "machine" and event["text"].startswith(f"capability: {HERE} -> ")
    with pytest.raises(dd.ReplayMismatch, match=f"from arrival {event['row']} on elsewhere") as caught:
        dd.replay(folder)
    first = int(str(caught.value).partition("at arrival ")[2].partition(" ")[0])
    assert first >= event["row"], "what was computed here agrees"
    run = dd.replay(folder, rtol=1e-3)
    assert run.same_bits is False and run.version == 60
    # the first part agreed to the bit up to the weights that the other machine began with
    assert any("the replayed weights were 0.0e+00 from those it had" in note for note in run.notes)


def test_a_run_that_comes_back_has_moved_twice(elsewhere: tuple[Path, Any]) -> None:
    folder = elsewhere[0] / "back"
    run = dd.resume(folder)
    assert [event["kind"] for event in run.trace.events] == ["machine", "machine"]
    assert sum("another kind of machine" in note for note in run.notes) == 1, "now; before is in the trace"
    assert dd.replay(folder, rtol=1e-3).version == 60


def test_on_the_same_processor_nothing_is_noted(tmp_path: Path) -> None:
    run = dd.resume(killed(tmp_path / "run", 37))
    assert run.notes == () and run.trace.events == [] and dd.replay(tmp_path / "run").same_bits

"""What a run's bits depend on is recorded, named when a replay differs, and said when a run goes on elsewhere."""

from __future__ import annotations

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
from dualdelay.storage.folder import Folder
from flat import simulate
from own import Killed, kill_at

SPEEDS = dd.TruncatedNormalSpeeds(4, std=2.0)
HOW: dict[str, Any] = {"updates": 60, "checkpoint_every": 10}


def digits() -> dd.Digits:
    return dd.Digits(4, 0.5, hidden=48)


def elsewhere(script: str, *arguments: str) -> str:
    """What a script prints on a processor of another kind: torch uses none of the instructions that it has."""
    kind = "avx2" if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else "default"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, torch, dualdelay as dd\n{script}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": kind},
    )
    return done.stdout


MAKE = """
problem, speeds = dd.Digits(4, 0.5, hidden=48), dd.TruncatedNormalSpeeds(4, std=2.0)
dd.simulate(dd.DuDe(0.05), problem, speeds, updates=60, checkpoint_every=10, folder=sys.argv[1])
"""
RESUME = "print(dd.resume(sys.argv[1]).notes)"


def test_what_bits_depend_on_is_recorded(tmp_path: Path) -> None:
    dd.simulate(dd.DuDe(0.05), digits(), SPEEDS, updates=2, folder=tmp_path / "run")
    recorded = Folder(tmp_path / "run").record().environment
    assert recorded == environment()
    assert recorded["capability"] == torch.backends.cpu.get_cpu_capability()
    assert recorded["torch"] == torch.__version__ and recorded["blas"] and recorded["processor"]
    assert Folder(tmp_path / "run").record().threads == 1
    assert differences(recorded, environment()) == [] and changes(recorded, environment()) == ""


def test_on_another_kind_of_processor_a_replay_names_it_and_compares_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    elsewhere(MAKE, str(folder))
    recorded = Folder(folder).record().environment["capability"]
    here = torch.backends.cpu.get_cpu_capability()
    with pytest.raises(dd.ReplayMismatch) as caught:
        dd.replay(folder)
    assert f"(ATEN_CPU_CAPABILITY): {recorded} in the record, {here} here" in str(caught.value)
    assert "numpy" not in str(caught.value) and "rtol=1e-3" in str(caught.value)
    run = dd.replay(folder, rtol=1e-3)
    assert run.same_bits is False and "losses agree to" in run.notes[0] and run.version == 60
    main(["replay", str(folder), "--rtol", "1e-3", "--json"])
    shown = capsys.readouterr()
    assert '"same": false' in shown.out and "the order is the same" in shown.err
    with pytest.raises(dd.ReplayMismatch, match=r"differs: at arrival [0-9]+ .* the recorded loss is"):
        dd.replay(folder, rtol=1e-12)


def test_with_a_tolerance_the_order_is_still_compared_exactly(tmp_path: Path) -> None:
    from dualdelay.storage.files import load_table, save_table

    dd.simulate(dd.DuDe(0.05), digits(), SPEEDS, updates=20, folder=tmp_path / "run")
    columns, about = load_table(tmp_path / "run" / "trace.parquet")
    columns["version"] = columns["version"].copy()
    columns["version"][9] += 1
    save_table(tmp_path / "run" / "trace.parquet", columns, about)
    with pytest.raises(dd.ReplayMismatch, match=r"recorded version is .*trace.parquet is damaged"):
        dd.replay(tmp_path / "run", rtol=0.5)
    with pytest.raises(dd.BadInput, match="rtol is 0"):
        dd.replay(tmp_path / "run", rtol=0)


def killed(folder: Path) -> None:
    with pytest.raises(Killed):
        simulate(dd.DuDe(0.05), digits(), SPEEDS, folder=folder, watch=[kill_at(37)], **HOW)


def test_a_run_that_goes_on_on_another_kind_of_processor_says_so_and_can_be_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(folder)
    said = elsewhere(RESUME, str(folder))
    assert "on it was computed on another kind of machine (capability: " in said
    (event,) = dd.load(folder).trace.events
    here = environment()["capability"]
    assert event["kind"] == "machine" and event["text"].startswith(f"capability: {here} -> ")
    assert any("another kind of machine" in note for note in dd.load(folder).notes)
    begin = event["row"]
    with pytest.raises(
        dd.ReplayMismatch, match=f"from arrival {begin} on elsewhere"
    ) as caught:  # what was computed here agrees
        dd.replay(folder)
    assert int(str(caught.value).partition("at arrival ")[2].partition(" ")[0]) >= begin
    run = dd.replay(folder, rtol=1e-3)
    assert run.same_bits is False and run.version == 60
    # the first part agreed to the bit up to the weights that the other machine began with
    assert any("the replayed weights were 0.0e+00 from those it had" in note for note in run.notes)
    there = elsewhere("run = dd.replay(sys.argv[1], rtol=1e-3)\nprint(run.notes)", str(folder))
    assert "and the replay went on from those" in there


def test_a_run_that_goes_back_is_said_to_have_moved_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(folder)
    elsewhere(
        "def stop(s, a):\n    if s.version == 45: raise KeyboardInterrupt\n"
        "try: dd.resume(sys.argv[1], watch=[stop])\nexcept KeyboardInterrupt: pass",
        str(folder),
    )
    run = dd.resume(folder)
    assert [event["kind"] for event in run.trace.events] == ["machine", "machine"]
    assert sum("another kind of machine" in note for note in run.notes) == 1  # now; before is in the trace
    assert dd.replay(folder, rtol=1e-3).version == 60


def test_on_the_same_kind_nothing_is_said(tmp_path: Path) -> None:
    killed(tmp_path / "run")
    run = dd.resume(tmp_path / "run")
    assert run.notes == () and run.trace.events == [] and dd.replay(tmp_path / "run").same_bits

"""``dualdelay show``: a run's folder, a folder of runs, and what is damaged in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main

PACE = dd.FixedSpeeds([1.0, 2.0])


class Own(dd.Quadratic):
    pass


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The line of JSON, and the page."""
    try:
        main(["show", *words, "--json"])
    except SystemExit as ended:
        assert ended.code == code
    else:
        assert code == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_finished_run_is_shown_with_what_to_do_next(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), PACE, updates=9, folder="run")
    line, page = shown(capsys, "run")
    assert line["objective"] == run.metrics.objective[-1] and line["ended"] == "updates"
    assert line["next"] == ["dualdelay replay run", "dualdelay resume run --updates 18"]
    for words in (
        "dude[lr=0.1]",
        "quadratic[centers=[[0.0], [6.0]]",
        "fixed[times=[1.0,2.0]]",
        "tau_max",
        " MB",
        "workers",
    ):
        assert words in page, words


def test_an_interrupted_run_of_one_s_own_is_shown_without_its_code(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dd.simulate(dd.DuDe(0.1), Own([[0.0], [6.0]]), PACE, updates=9, watch=[stop], folder="run")
    line, page = shown(capsys, "run")
    assert (line["ended"], line["updates"]) == ("interrupted", 5)
    assert line["next"] == ["dualdelay resume run --problem FILE.py:FUNCTION"] and "Own, your own" in page
    assert "dude[lr=0.1]: interrupted at time " in page and "interrupted)" in repr(dd.load("run"))


def test_runs_are_a_table_and_the_damaged_are_named(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = [dd.DuDe(0.1), dd.SyncSGD(0.1), dd.VanillaASGD(0.1)]
    dd.compare(methods, dd.Quadratic([[0.0], [6.0]]), PACE, updates=9, folder="all")
    line, page = shown(capsys, "all")
    assert [run["algorithm"] for run in line["runs"]] == ["dude[lr=0.1]", "sync[lr=0.1]", "vanilla[lr=0.1]"]
    assert "3 runs" in page and "dude-lr=0.1-seed0" in page
    config = Path("all/sync-lr=0.1-seed0/config.json")
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    line, page = shown(capsys, "all", code=2)
    assert [*line["damaged"]] == ["sync-lr=0.1-seed0"] and len(line["runs"]) == 2
    assert "damaged: sync-lr=0.1-seed0: " in page and "error: 1 of the 3 runs in all are damaged" in page


def test_what_is_left_of_a_damaged_run_is_shown(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), PACE, updates=9, folder="run")
    Path("run/result.json").unlink()
    for path in Path("run/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    line, page = shown(capsys, "run", code=2)
    assert line["algorithm"] == "dude[lr=0.1]" and line["damaged"] and "damaged: " in page


@pytest.mark.parametrize(("folder", "words"), [("nowhere", "is not there"), (".", "holds neither a run")])
def test_a_folder_without_runs_is_refused(
    folder: str, words: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", folder])
    assert ended.value.code == 2 and words in capsys.readouterr().err

"""``dualdelay new`` writes a method that runs, and nothing where it cannot."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.cli import main


def test_the_file_has_a_method_that_runs(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "half_steps", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["file"] == "half_steps.py"
    sys.path.insert(0, str(inside))
    try:
        method = importlib.import_module("half_steps").HalfSteps(lr=0.25, limit=1)
    finally:
        sys.path.remove(str(inside))
        sys.modules.pop("half_steps", None)
    run = dd.simulate(method, dd.Quadratic([[0.0], [8.0]]), dd.FixedSpeeds([1.0, 2.5]), updates=3)
    # arrivals of worker 0 at 1, 2 with delay 0 leave 0 at 0; worker 1's gradient -8 of version 0 is two updates old at 2.5
    assert (run.version, float(run.x), run.state.late) == (3, 1.0, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Half", "expected a word in small letters"),
        ("half-steps", "expected a word in small letters"),
        ("class", "expected a word in small letters"),
        ("dude", "has 'dude' among its algorithms already"),
        ("clipped", "has 'clipped' among its problems already"),
        ("bursty", "has 'bursty' among its speeds already"),
        ("mine", "mine.py exists; choose another name"),
    ],
)
def test_a_name_that_is_none_or_taken_is_refused_and_nothing_is_written(
    name: str, words: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("mine")
    with pytest.raises(SystemExit) as exited:
        main(["new", name])
    assert exited.value.code == 2 and words in capsys.readouterr().err
    assert [path.read_text() for path in inside.iterdir()] == ["mine"]

"""Commands as TOML: written beside every run, and run again by --config."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import commands, main
from dualdelay.runs.sweep import run_points

Q2 = "quadratic[centers=[[0.0],[6.0]],noise=0.1]"
FLAGS = ("--problem", Q2, "--speeds", "fixed[times=[1,2]]", "--updates", "8", "--evaluate-every", "2", "--uplink", "int8")


@pytest.fixture
def shell(inside: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with --json: gives its line, or its error where it exits with 2."""

    def run(*words: str) -> Any:
        try:
            main([*words, "--json"])
        except SystemExit as ended:
            err = capsys.readouterr().err
            assert ended.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
            return err
        return json.loads(capsys.readouterr().out)

    return run


def test_a_training_is_repeated_from_its_folder_and_flags_win_over_the_file(shell: Any) -> None:
    shell("train", "dude[lr=0.1]", *FLAGS, "--seed", "4", "--folder", "first")
    text = Path("first/command.toml").read_text()
    assert "#   dualdelay train --config first/command.toml\n" in text
    values = tomllib.loads(text)
    assert (values["algorithm"], values["updates"], values["evaluate-every"]) == ("dude[lr=0.1]", 8, 2)
    assert not {"folder", "json", "config", "time", "import"} & values.keys(), "where it goes is said anew"
    shell("train", "--config", "first/command.toml", "--folder", "second")
    first, second = (json.loads(Path(f"{name}/config.json").read_text()) for name in ("first", "second"))
    assert first == second and bool((dd.load("first").x == dd.load("second").x).all())
    other = shell("train", "sync[lr=0.2]", "--config=first/command.toml", "--updates", "3", "--folder", "third")
    assert (other["algorithm"], other["updates"]) == ("sync[lr=0.2]", 3)
    assert json.loads(Path("third/config.json").read_text())["seed"] == 4


def test_a_comparison_is_repeated_and_in_the_same_folder_nothing_is_written_again(shell: Any) -> None:
    shell("compare", "dude[lr=0.1|0.2]", *FLAGS, "--folder", "all")
    there = {path: path.stat().st_mtime_ns for path in Path("all").rglob("*") if path.is_file() and path.name != "lock"}
    assert len(shell("compare", "--config", "all/command.toml", "--folder", "all")["runs"]) == 2
    now = {path: path.stat().st_mtime_ns for path in Path("all").rglob("*") if path.is_file() and path.name != "lock"}
    assert [str(path) for path in now if now[path] != there.get(path)] == []
    assert len(shell("compare", "--config", "all/command.toml", "--seeds", "2", "--folder", "more")["runs"]) == 2


def test_a_comparison_that_is_killed_has_left_its_command_and_goes_on_with_it(shell: Any) -> None:
    words = ["compare", "dude[lr=0.1|0.2]", *FLAGS, "--folder", "all"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in sorted(Path("all").iterdir())] == ["command.toml", "dude-lr=0.1-seed0"]
    assert len(shell("compare", "--config", "all/command.toml", "--folder", "all")["runs"]) == 2


KILLED = """
import os, signal, sys
from dualdelay.cli import main
from dualdelay.runs import simulate
simulate.Runner.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the first run is about to begin
main(sys.argv[1:])
"""


def test_a_comparison_that_is_refused_leaves_everything_as_it_was(shell: Any) -> None:
    assert "neither updates nor time" in shell("compare", "dude[lr=0.1]", "--folder", "deep/all")
    assert list(Path().iterdir()) == []
    shell("compare", "dude[lr=0.1]", *FLAGS, "--folder", "all")
    before = Path("all/command.toml").read_bytes()
    assert "another configuration" in shell(
        "compare", "dude[lr=0.1]", *FLAGS, "--keep-best", "objective", "--folder", "all"
    )
    assert Path("all/command.toml").read_bytes() == before


TRAIN = 'algorithm = "dude[lr=0.1]"\nupdates = 3\n'
WRONG = {
    "unknown key": (TRAIN + "updtes = 3", "has 'updtes'", "did you mean 'updates'"),
    "another type": ('algorithm = "dude[lr=0.1]"\nupdates = "3"', "says of updates '3'", "expected a whole number"),
    "a fraction": ('algorithm = "dude[lr=0.1]"\nupdates = 1.5e0', "says of updates 1.5", "expected a whole number"),
    "a truth for a number": ('algorithm = "dude[lr=0.1]"\nupdates = true', "updates True", "expected a whole number"),
    "a list for a text": (TRAIN + "problem = [1]", "problem [1]", "expected a text"),
    "a number for a path": (TRAIN + "folder = 3", "folder 3", "expected the path"),
    "a word that is none": (TRAIN + 'table = "huge"', "'huge'", "expected one of 'full'"),
    "no method": ("updates = 3", "has no algorithm", 'algorithm = "dude[lr=0.05]"'),
    "no TOML": ("updates = = 3", "is no TOML", "line 1"),
    "another command": ('command = "compare"\nalgorithms = ["dude[lr=0.1]"]', "'compare'", "dualdelay compare --config"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_wrong_is_refused_in_one_line(what: str, shell: Any) -> None:
    text, *words = WRONG[what]
    Path("run.toml").write_text(text)
    error = shell("train", "--config", "run.toml", "--folder", "run")
    assert "run.toml" in error or what == "a word that is none", error
    assert [word for word in words if word not in error] == [], error
    assert not Path("run").exists()


def test_a_file_that_is_not_there_is_named(shell: Any) -> None:
    assert "nowhere.toml cannot be read" in shell("train", "--config", "nowhere.toml")


def test_keys_may_be_written_with_underscores_and_lists_of_one_as_their_value(shell: Any) -> None:
    Path("run.toml").write_text(f'algorithms = "dude[lr=0.1]"\nproblem = "{Q2}"\nseeds = 3\ntime = 4\nevaluate_every = 1')
    line = shell("compare", "--config", "run.toml", "--folder", "all")
    assert [run["seed"] for run in line["runs"]] == [3] and line["runs"][0]["time"] == 4.0


def test_no_file_decides_which_cluster_computes_and_none_is_kept_in_one(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'algorithms = "dude[lr=0.1]"\nproblem = "{Q2}"\ntime = 4\n'
    Path("run.toml").write_text(f'{text}cluster = "10.0.0.5:6379"')
    error = shell("compare", "--config", "run.toml")
    assert "say so again: dualdelay compare --config run.toml --json --cluster 10.0.0.5:6379\n" in error
    Path("run.toml").write_text(f"{text}insecure = true")
    assert "has 'insecure', which no file decides" in shell("compare", "--config", "run.toml")
    Path("run.toml").write_text(text)
    used = []
    monkeypatch.setattr(
        commands, "run_points", lambda points, *rest, on, **more: used.append(on) or run_points(points, *rest)
    )
    assert shell("compare", "--config", "run.toml", "--folder", "all", "--cluster", "local", "--cluster-gpus", "0.5")[
        "runs"
    ]
    assert used == [dd.Cluster(None, 1.0, 0.5)]
    assert "cluster" not in Path("all/command.toml").read_text() and "insecure" not in Path("all/command.toml").read_text()


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("import", '["evil.py"]', "--import evil.py"),
        ("problem", '"evil.py:problem"', "--problem evil.py:problem"),
        ("fleet", '"ray[address=10.0.0.5:6379]"', "--fleet 'ray[address=10.0.0.5:6379]'"),
        ("fleet", '"ray[insecure=true]"', "--fleet 'ray[insecure=true]'"),
    ],
)
def test_no_file_decides_what_code_is_run_or_whom_to_trust(key: str, value: str, flag: str, shell: Any) -> None:
    Path("evil.py").write_text("import pathlib\npathlib.Path('was-here').touch()\nproblem = 3")
    Path("run.toml").write_text(f"{TRAIN}{key} = {value}")
    error = shell("train", "--config", "run.toml")
    assert f"say so again: dualdelay train --config run.toml --json {flag}\n" in error
    assert not Path("was-here").exists()
    if key == "import":
        assert shell("train", "--config", "run.toml", "--import", "evil.py", "--problem", Q2)["updates"] == 3
        assert Path("was-here").exists()

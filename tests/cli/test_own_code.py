"""Methods and problems of one's own on the shell: --import, mine.py:problem, and packages that offer some."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.core import own_code
from dualdelay.runs import own
from dualdelay.runs.names import known, label, parse
from own import refused

METHOD = """
from dataclasses import dataclass
import dualdelay as dd
from dualdelay.core import IndependentWorkers, send

@dataclass(frozen=True)
class Patient(IndependentWorkers[dd.State]):
    '''Steps by what arrives, divided by patience.'''
    name, title = "patient", "Patient"
    patience: int = 1
    '''By how much steps are divided.'''
    def init(self, x, n, rng):
        return dd.State(x, n)
    def step(self, s, a):
        s.descend(a.value, self.lr / self.patience)
        return [send(a.worker)]
"""
PROBLEM = """
import dualdelay as dd
from neighbour import FAR

class Mine(dd.Quadratic):
    name = "mine_too"

def problem(seed, workers=2):
    return Mine([[float(FAR * k + seed)] for k in range(workers)])

def nothing():
    return dd.Quadratic([[0.0], [FAR]])

ready = dd.Quadratic([[0.0], [FAR]])
number = 3

def broken(seed):
    return {}["gone"]

def late(seed):
    return broken(seed)

def no_problem(seed):
    return 3
"""
FAST = ("--speeds", "fixed[times=[1,2]]", "--updates", "6")
OWN = ("--import", "patient.py", "--problem", "mine.py:problem")


@pytest.fixture
def files(inside: Path) -> Path:
    Path("patient.py").write_text(METHOD)
    Path("mine.py").write_text(PROBLEM)
    Path("neighbour.py").write_text("FAR = 6.0")
    return inside


@pytest.fixture
def shell(files: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with --json: gives its line, or if it is to fail its error."""

    def run(*words: str, code: int = 0) -> Any:
        try:
            main([*words, "--json"])
        except SystemExit as ended:
            assert ended.code == code, capsys.readouterr().err
        else:
            assert code == 0
        out, err = capsys.readouterr()
        if code:
            assert err.startswith("error: ") and err.count("\n") == 1, err
            return err
        return json.loads(out)

    return run


def test_a_run_with_own_code_is_resumed_and_replayed_once_the_code_is_named_again(shell: Any) -> None:
    trained = shell("train", "patient[lr=0.1,patience=2]", *OWN, *FAST, "--folder", "run")
    assert trained["algorithm"] == "patient[lr=0.1,patience=2]"
    for command in ("resume", "replay"):
        error = shell(command, "run", code=2)
        assert f"dualdelay {command} run --import patient.py --problem mine.py:problem," in error
        assert shell(command, "run", *OWN)["updates"] == 6
    assert "problem=..." in shell("resume", "run", "--import", "patient.py", code=2)
    more = shell("resume", "run", *OWN, "--updates", "9")
    own.import_code("patient.py")
    try:
        alone = dd.simulate(
            parse("algorithm", "patient[lr=0.1,patience=2]"),
            parse("problem", "quadratic[centers=[[0.0],[6.0]]]"),
            dd.FixedSpeeds([1.0, 2.0]),
            updates=9,
        )
    finally:
        own.forget()
    assert more["objective"] == alone.metrics.objective[-1]
    another = (*OWN[:2], "--problem", "mine.py:problem[seed=5]")
    assert "is not the one this folder was made with" in shell("resume", "run", *another, code=2)


def test_a_method_that_was_given_other_settings_is_not_taken_for_the_recorded_one(shell: Any) -> None:
    shell("train", "patient[lr=0.1]", *OWN, *FAST, "--folder", "run")
    changed = METHOD.replace("patience: int = 1", "patience: int = 1\n    more: int = 2")
    Path("patient.py").write_text(changed)
    assert "the algorithm is a Patient" in shell("replay", "run", *OWN, code=2)


def test_nothing_that_was_imported_outlasts_its_command(shell: Any) -> None:
    before = [*sys.path]
    shell("list", "patient", "--import", "patient.py")
    assert "there is no algorithm 'patient'" in shell("train", "patient[lr=0.1]", *FAST, code=2)
    assert sys.path == before and "patient" not in sys.modules and own_code.MODULES == {}


def test_a_file_that_was_not_imported_is_suggested(shell: Any) -> None:
    assert "add --import patient.py" in shell("train", "patient[lr=0.1]", *FAST, code=2)
    assert "add --import mine.py" in shell("train", "dude[lr=0.1]", "--problem", "mine", *FAST, code=2)
    error = shell("train", "foo[lr=0.1]", *FAST, code=2)
    assert error.endswith(" more (see: dualdelay list algorithms).\n") and "did you mean" not in error
    error = shell("train", "dude[lr=0.1]", "--problem", "mine.py:problem", "--speeds", "x", "--updates", "3", code=2)
    assert "there is no speed model 'x'; known: away, " in error


def test_an_imported_method_has_its_name_and_colour_in_show_and_report(shell: Any, capsys: Any) -> None:
    Path("patient.py").write_text(METHOD.replace("    patience:", "    colour = '#5B8C5A'\n    patience:"))
    shell("compare", "patient[lr=0.1]", "sync[lr=0.1]", *OWN, *FAST, "--folder", "all")
    main(["report", "all"])
    assert "if you add --import patient.py\n" in capsys.readouterr().out
    assert "#5B8C5A" not in Path("report.html").read_text()
    main(["report", "all", "--import", "patient.py"])
    assert "--import" not in capsys.readouterr().out
    assert "#5B8C5A" in Path("report.html").read_text()
    assert [run["algorithm"] for run in shell("show", "all")["runs"]] == [
        "patient[lr=0.1]",
        "sync[lr=0.1]",
    ]
    named = shell("show", "all", "--import", "patient.py")
    assert [run["algorithm"] for run in named["runs"]] == ["patient[lr=0.1]", "sync[lr=0.1]"]


def test_list_shows_what_was_imported(shell: Any) -> None:
    listed = shell("list", "--import", "patient.py", "--import", "mine.py")
    assert "patient" in listed["algorithms"] and "mine_too" in listed["problems"]


@pytest.mark.parametrize(
    ("text", "workers", "center"),
    [
        ("mine.py:problem", 2, 4.0),
        ("mine.py:problem[workers=3]", 3, 4.0),
        ("mine.py:problem[workers=3,seed=1]", 3, 1.0),
        ("mine:nothing", 2, 0.0),
        ("mine.py:ready", 2, 0.0),
        ("mine.py:Mine[centers=[[5.0]]]", 1, 5.0),
    ],
)
def test_a_problem_is_a_function_of_the_seed_or_of_nothing_a_class_or_itself(
    files: Path, text: str, workers: int, center: float
) -> None:
    from dualdelay.cli.shared import make_problem

    try:
        problem = make_problem(text, 4)
    finally:
        own.forget()
    assert isinstance(problem, dd.Quadratic)
    assert (problem.workers, problem.settings["centers"][0][0]) == (workers, center)


def test_own_problems_are_compared_and_their_fingerprints_checked(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    words = ("compare", "patient[lr=0.1|0.2]", "sync[lr=0.1]", "--import", "patient.py", "--speeds", "fixed[times=[1,2]]")
    words = (*words, "--problem", "mine.py:problem", "--updates", "4", "--seeds", "0", "1", "--folder", "all")
    assert len(shell(*words)["runs"]) == 6
    assert "--import patient.py --problem mine.py:problem," in shell("resume", "all/patient-lr=0.1-seed0", code=2)
    written = Path("neighbour.py").stat().st_mtime
    Path("neighbour.py").write_text("FAR = 7.0")
    os.utime("neighbour.py", (written, written))  # changed at once: to kept bytecode it would be the file it was
    assert "fingerprint" in shell(*words, code=2)


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no such file": (("--import", "nowhere.py"), ("no file nowhere.py",)),
    "no such module": (("--import", "nowhere"), ("no module 'nowhere'",)),
    "neither": (("--import", "a b"), ("neither a file nor a module",)),
    "a zero byte": (("--import", "a\0.py"), ("zero byte",)),
    "a taken module": (("--import", "json.py"), ("json.py", "Rename the file")),
    "no module's name": (("--import", "a-b.py"), ("cannot be a module's name",)),
    "no Python": (("--import", "syntax.py"), ("syntax.py", "SyntaxError in line 2")),
    "code that raises": (("--import", "raises.py"), ("raises.py", "ZeroDivisionError in line 1")),
    "code that exits": (("--import", "exits.py"), ("exits.py", "SystemExit")),
    "a module that lacks another": (("--import", "lacks"), ("lacks", "no_such_thing")),
    "our name": (("--import", "ours.py"), ("'dude'", "dualdelay has one of that name")),
    "a name twice": (("--import", "patient.py", "--import", "again.py"), ("'patient'", "another file")),
    "no name": (("--import", "spaces.py"), ("'two words'", "expected a word")),
    "no such function": (("--problem", "mine.py:problm"), ("mine.py has no 'problm'", "'problem'")),
    "nothing like it": (("--problem", "mine.py:xyz"), ("mine.py has no 'xyz'", "broken", " ready")),
    "no function": (("--problem", "mine.py:"), ("names no code",)),
    "a number": (("--problem", "mine.py:number"), ("is 3", "expected a function")),
    "a function that raises": (
        ("--problem", "mine.py:broken"),
        ("mine.py:broken", "KeyError in line 18 of mine.py (broken)"),
    ),
    "a function that calls it": (
        ("--problem", "mine.py:late"),
        ("mine.py:late", "KeyError in line 18 of mine.py (broken)"),
    ),
    "a file as a problem": (("--problem", "mine.py"), ("write mine.py:FUNCTION; it has: Mine, problem, nothing, broken",)),
    "a file that is not read to its end": (("--problem", "syntax.py"), ("write syntax.py:FUNCTION", "dd.Problem")),
    "no such file as a problem": (("--problem", "nowhere.py"), ("there is no file nowhere.py",)),
    "a file's name that is too long": (("--problem", f"{'x' * 300}.py"), ("expected a shorter name",)),
    "a function of something else": (("--problem", "mine.py:no_problem"), ("gave 3", "expected a dd.Problem")),
    "no such setting": (("--problem", "mine.py:problem[worker=2]"), ("'worker'", "'workers'")),
    "settings of a problem": (("--problem", "mine.py:ready[workers=2]"), ("takes no settings",)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_imported_is_refused_in_one_line(what: str, shell: Any) -> None:
    for name, text in {
        "json": "",
        "a-b": "",
        "syntax": "x = 1\nx = = 2",
        "raises": "1 / 0",
        "exits": "raise SystemExit(0)",
        "lacks": "import no_such_thing",
        "ours": METHOD.replace('"patient"', '"dude"'),
        "again": METHOD,
        "spaces": METHOD.replace('"patient"', '"two words"'),
    }.items():
        Path(f"{name}.py").write_text(text)
    flags, words = REFUSED[what]
    error = shell("train", "dude[lr=0.1]", *flags, *FAST, "--folder", "run", code=2)
    assert [word for word in words if word not in error] == [], error
    assert not Path("run").exists()


@pytest.fixture
def offered(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Has installed packages offer things by entry points."""
    monkeypatch.syspath_prepend(str(files))
    own.plugins.cache_clear()

    def offer(group: str, **values: str) -> None:
        points = [EntryPoint(name, value, f"dualdelay.{group}") for name, value in values.items()]
        monkeypatch.setattr(own, "entry_points", lambda group: [point for point in points if point.group == group])

    yield offer
    own.plugins.cache_clear()
    for name in ("patient", "mine", "neighbour"):
        sys.modules.pop(name, None)


def test_an_installed_package_offers_a_method_which_needs_no_import(offered: Any, shell: Any) -> None:
    offered("algorithms", patient="patient:Patient")
    assert parse("algorithm", "dude[lr=0.1]") == dd.DuDe(0.1) and "patient" not in sys.modules, "loaded when it is needed"
    shell("train", "patient[lr=0.1]", "--problem", "quadratic[centers=[[0],[6]]]", *FAST, "--folder", "run")
    assert shell("replay", "run")["same"]
    assert "patient" in shell("list")["algorithms"]
    assert label(parse("algorithm", "patient[lr=0.1]")) == "patient[lr=0.1]"


def test_an_installed_package_offers_a_function_as_a_problem(offered: Any, shell: Any) -> None:
    offered("problems", far="mine:problem")
    assert shell("train", "dude[lr=0.1]", "--problem", "far[workers=2]", *FAST, "--folder", "run")["updates"] == 6
    assert "far" in shell("list", "far")["problems"]


def test_a_broken_plugin_is_named_in_one_line_and_the_others_work(offered: Any, caplog: pytest.LogCaptureFixture) -> None:
    offered("algorithms", gone="nowhere:Gone", dude="patient:Patient", odd="patient:send", patient="patient:Patient")
    with caplog.at_level(logging.WARNING, "dualdelay"):
        assert known("algorithm", "patient").__name__ == "Patient"
    gone, clash, odd = [record.getMessage() for record in caplog.records]
    assert "gone = nowhere:Gone is left out: ModuleNotFoundError" in gone
    assert "dualdelay has one of the name 'dude'" in clash and "not a class of dd.Algorithm" in odd
    assert known("algorithm", "dude") is dd.DuDe
    refused(lambda: parse("algorithm", "pateint[lr=0.1]"), "did you mean 'patient'")


def test_advice_on_a_run_of_one_s_own_asks_for_the_problem_and_takes_it(shell: Any) -> None:
    shell("train", "dude[lr=0.1]", "--problem", "mine.py:problem", *FAST, "--folder", "run")
    without = shell("advise", "--run", "run")
    assert "dualdelay advise --run run --problem mine.py:problem" in without["missing"][0] and without["constants"] is None
    given = shell("advise", "--run", "run", "--problem", "mine.py:problem")
    assert given["constants"] is not None and "--problem 'mine.py:problem'" in given["commands"][0]
    others = ("--problem", "mine.py:problem[seed=2]")
    assert "is not the problem of the run" in shell("advise", "--run", "run", *others, code=2)


def test_the_next_step_of_a_new_method_works_as_printed(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "half_steps"])
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dualdelay "))
    words = shlex.split(command.replace("--time 20", "--updates 3").replace("digits[", "digits[workers=2,"))
    assert {run["algorithm"] for run in shell(*words[1:])["runs"]} == {"half_steps[lr=0.05]", "vanilla[lr=0.05]"}

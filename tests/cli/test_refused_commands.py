"""Commands with numbers, texts and files that cannot work exit with 2 and one line that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dualdelay as dd
from dualdelay.cli import main
from own import content
from tables import LR

pytestmark = pytest.mark.usefixtures("in_time")

Q3 = "quadratic[centers=[[0],[6],[12]]]"
TRAIN = ["train", f"dude[lr={LR}]", "--problem", Q3]
HUGE = str(10**20)
WHOLE = [
    "threads",
    "cores",
    "seed",
    "updates",
    "keep",
    "checkpoint-every",
    "evaluate-every",
    "evaluate-samples",
    "patience",
]

REFUSED: dict[str, tuple[list[str], str]] = {  # the words of a command, and what its message names
    **{
        f"{flag} beyond numbers": (
            [*TRAIN, f"--{flag}", HUGE],
            f"--{flag}" if flag.startswith("evaluate") else flag.replace("-", "_"),
        )
        for flag in WHOLE
    },
    "a step size beyond numbers": (["train", "dude[lr=100000000000000000000000000]"], "lr"),
    "a step size of FedAsync beyond numbers": (["train", "fedasync[lr=100000000000000000000]", "--problem", Q3], "lr"),
    "a billion workers": (["train", "dude[lr=0.1]", "--problem", "digits[workers=1000000000]"], "workers"),
    "evaluations without an end": ([*TRAIN, "--evaluate-seconds", "1e-300"], "--evaluate-seconds"),
    "hardly any time": ([*TRAIN, "--time", "5e-324"], "5e-324"),
    "drift without an end": ([*TRAIN, "--speeds", "drifting[speeds=fixed[times=[1,2,4]],every=1e-9]"], "times"),
    "a spread beyond numbers": ([*TRAIN, "--speeds", "lognormal[means=[1,2,4],sigma=1e200]"], "sigma"),
    "nested speeds": ([*TRAIN, "--speeds", f"away[speeds=fixed[times={'[' * 5000 + ']' * 5000}]]"], "brackets"),
    "a target of nan": ([*TRAIN, "--target", "nan"], "target"),
    "threads of workers beyond numbers": ([*TRAIN, "--fleet", f"ray[threads={HUGE}]"], "threads"),
    "a run's processors without a cluster": (["compare", "dude[lr=0.1]", "--cluster-cpus", "2"], "--cluster-cpus is given"),
    "trust without a cluster": (["compare", "dude[lr=0.1]", "--insecure"], "--insecure is given without a cluster"),
    "a board and a cluster": (["compare", "dude[lr=0.1]", "--cluster", "local", "--tensorboard", "board"], "--tensorboard"),
    "a cluster with nothing claimed": (["compare", "dude[lr=0.1]", "--cluster", "local", "--cluster-cpus", "0"], "claims"),
    "an unknown method": (["train", "dud[lr=0.1]"], "did you mean 'dude'"),
    "advice for ever": (["advise", "--problem", Q3, "--speeds", "fixed[times=[1,2,4]]", "--time", "1e308"], "time"),
    "advice about a long name": (["advise", "--run", "a" * 300], "aaa"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_one_line_says_what_is_wrong_and_with_json_one_more_for_programs(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, named = REFUSED[what]
    more = ["--updates", "3"] if words[0] == "train" and "--updates" not in words else []
    with pytest.raises(SystemExit) as exited:
        main([*words, *more, "--folder", str(tmp_path / "run"), "--json"])
    out, err = capsys.readouterr()
    assert exited.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 800, err
    assert named in err
    (line,) = map(json.loads, out.splitlines())
    assert (line["exit"], line["command"], line["error"]) == (2, words[0], err.removeprefix("error: ").rstrip("\n"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [b"w\xf6rker,start,end\n0,1,2\n", b"worker,start,end\n1e12,1,2\n", b"\xff\xfe\n"])
def test_a_file_of_absences_that_cannot_be_read_is_named(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given.csv"
    path.write_bytes(data)
    with pytest.raises(SystemExit) as exited:
        main([*TRAIN, "--absences", str(path), "--updates", "3"])
    err = capsys.readouterr().err
    assert exited.value.code == 2 and err.startswith("error: ") and "given.csv" in err


def test_a_comparison_in_which_every_run_diverges_exits_with_1_and_a_line_for_programs(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = ["--problem", "quadratic[centers=[[0],[1]],noise=0.1]", "--speeds", "fixed[times=[1,2]]"]
    with pytest.raises(SystemExit) as exited:
        main(["compare", "dude[lr=1e25]", *problem, "--updates", "400", "--json"])
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert exited.value.code == line["exit"] == 1 and line["error"] and line["command"] == "compare"


def test_a_comparison_in_the_folder_of_a_run_is_refused_and_the_folder_stays_as_it_is(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TRAIN, "--updates", "3", "--folder", "run"])
    before = content(inside)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exited:
        main(["compare", "dude[lr=0.1]", "--problem", Q3, "--updates", "3", "--folder", "run"])
    out, err = capsys.readouterr()
    assert exited.value.code == 2 and out == "" and err.startswith("error: run is the folder of a single run")
    assert err.count("\n") == 1 and content(inside) == before


def test_alternatives_are_shown_as_they_were_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    speeds = ["--speeds", "truncated_normal[std=1|5]", "--updates", "3", "--folder", str(tmp_path / "all")]
    main(["compare", "dude[lr=0.1]", "--problem", Q3, *speeds])
    shown = capsys.readouterr().out
    assert "truncated_normal[std=1]: at time" in shown and "\\" not in shown


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"dualdelay {dd.__version__}\n"

"""``dualdelay show``: a run's folder, a folder of runs, and what is damaged in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.cli.show import _facts
from dualdelay.storage.files import write_json
from dualdelay.storage.folder import Folder
from transports import VirtualFleet

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
        "quadratic[centers=[[0], [6]]",
        "fixed[times=[1, 2]]",
        "tau_max",
        " kB",
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
    assert "damaged: sync-lr=0.1-seed0: " in page and "error: 1 of the 3 runs in all is damaged" in page


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


def test_a_run_that_is_under_way_is_not_called_interrupted(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[dict[str, Any], str]] = []

    def look(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 8:
            told.extend([shown(capsys, "all/run"), shown(capsys, "all")])

    folder = dd.Saving("all/run", every=4)
    dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), PACE, updates=9, watch=[look], folder=folder)
    (one, page), (several, pages) = told
    assert one["ended"] == several["runs"][0]["ended"] == "under way"
    assert not any("resume" in command for command in one["next"]) and "interrupted" not in page + pages
    assert f"under way in process {os.getpid()} on" in page and f"under way: run in process {os.getpid()} on" in pages
    assert "dude[lr=0.1]: under way at time " in page and "did not come to their end" not in pages
    assert shown(capsys, "all/run")[0]["ended"] == "updates"


def test_metrics_of_one_s_own_are_shown_and_columns_without_a_value_are_not(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = dd.Evaluation(metrics={"f1": lambda x: 0.625})
    problem = dd.Quadratic([[0.0], [6.0]])
    dd.compare([dd.DuDe(0.1)], problem, PACE, updates=9, folder="all", evaluation=evaluation)
    for words in ("all", "all/dude-lr=0.1-seed0"):
        _, page = shown(capsys, words)
        assert " f1 " in page and "0.625" in page and "accuracy" not in page


def test_folders_of_runs_in_the_folder_are_named(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = dd.Quadratic([[0.0], [6.0]])
    dd.compare([dd.DuDe(0.1), dd.SyncSGD(0.1)], problem, PACE, updates=9, folder="runs/grid")
    line, page = shown(capsys, "runs")
    assert line["runs"] == [] and line["deeper"] == {"runs/grid": 2}
    assert "note: grid is not looked into, which holds 2 runs itself: dualdelay show runs/grid" in page
    dd.simulate(dd.DuDe(0.1), problem, PACE, updates=9, folder="runs/a")
    line, page = shown(capsys, "runs")
    assert len(line["runs"]) == 1 and page.startswith("1 run, ") and "grid is not looked into" in page
    assert dd.load("runs").notes == ("grid is not looked into, which holds 2 runs itself",)


def test_a_run_whose_end_is_damaged_and_a_folder_without_a_record_are_named(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = dd.Quadratic([[0.0], [6.0]])
    dd.compare([dd.DuDe(0.1), dd.SyncSGD(0.1), dd.VanillaASGD(0.1)], problem, PACE, updates=9, folder="all")
    Path("all/dude-lr=0.1-seed0/result.json").write_text("no")
    Path("all/sync-lr=0.1-seed0/config.json").unlink()
    line, page = shown(capsys, "all", code=2)
    assert [*line["damaged"]] == ["dude-lr=0.1-seed0", "sync-lr=0.1-seed0"]
    assert [run["ended"] for run in line["runs"]] == ["damaged", "updates"]
    assert "result.json is damaged" in page and "2 of the 3 runs in all are damaged" in page
    line, page = shown(capsys, "all/dude-lr=0.1-seed0", code=2)
    assert "result.json is damaged" in line["damaged"] and line["updates"] == 9


METHOD = """
from dataclasses import dataclass
import dualdelay as dd

@dataclass(frozen=True)
class HalfSteps(dd.VanillaASGD):
    name = "half_steps"
    limit: int = 5
"""


def test_a_method_of_one_s_own_has_one_name_with_its_code_and_without(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(METHOD)
    own = ("--import", "mine.py", "--problem", "quadratic[centers=[[0.0],[6.0]]]", "--updates", "9")
    main(["compare", "half_steps[lr=0.1|0.2]", "sync[lr=0.1]", *own, "--folder", "all"])
    main(["train", "half_steps[lr=0.1]", *own, "--folder", "run"])
    capsys.readouterr()
    names = ["half_steps[lr=0.1]", "half_steps[lr=0.2]", "sync[lr=0.1]"]
    for more in ((), ("--import", "mine.py")):
        line, page = shown(capsys, "all", *more)
        assert [run["algorithm"] for run in line["runs"]] == names and "HalfSteps" not in page
        line, page = shown(capsys, "run", *more)
        assert line["algorithm"] == "half_steps[lr=0.1]" and "HalfSteps" not in page
        assert dd.load("all").best().method.tolist() == ["half_steps", "sync"]
        main(["report", "all", "run", *more])
        capsys.readouterr()
        assert "HalfSteps" not in Path("report.html").read_text().split('id="settings"')[0]
    Path("all/comparison.parquet").unlink()
    assert [run["algorithm"] for run in shown(capsys, "all")[0]["runs"]] == names, "as its command has them"
    Path("all/command.toml").unlink()
    own_class = shown(capsys, "all")[0]["runs"][0]["algorithm"]
    assert own_class == "HalfSteps[lr=0.1,limit=5]", "nobody has called it otherwise"


def test_settings_are_shown_in_words_and_numbers_are_rounded(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No None, no braces of Python, no digit that nobody reads; a list of fifty numbers is cut short."""
    third, long = 1 / 3, [[k / 7] * 50 for k in range(2)]
    stop = dd.EarlyStop("objective", target=-third, patience=4)
    server = dd.Server(optimizer="Adam[betas=(0.9,0.99)]", schedule="StepLR[step_size=100]", uplink=third)
    evaluation = dd.Evaluation(every=3, early_stop=stop)
    options: Any = {"server": server, "evaluation": evaluation, "updates": 20, "time": third * 1e7}
    dd.simulate(dd.DuDe(0.1), dd.Quadratic(long, noise=third), dd.FixedSpeeds([third, 2 * third]), folder="run", **options)
    line, page = shown(capsys, "run")
    assert line["to be ended by"] == "updates 20 or time 3.33333e+06"
    assert line["optimizer"] == "Adam[betas=(0.9, 0.99)], with the schedule StepLR[step_size=100]"
    assert line["stop"] == "when objective is -0.333333 or better, or after 4 evaluations without a better objective"
    assert (line["speeds"], line["uplink"]) == ("fixed[times=[0.333333, 0.666667]]", "0.333333")
    assert "... 50 in all]" in line["problem"] and "noise=0.333333" in line["problem"]
    assert not [word for word in ("None", "{'", "0.3333333") if word in page]


def test_what_a_folder_holds_as_a_list_is_no_change_of_a_setting(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real workers have settings that are no workers and no resources by default, kept as empty lists."""
    dd.train(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), VirtualFleet(), updates=9, folder="run")
    values = json.loads(Path("run/config.json").read_text())
    values.pop("digest")
    values["fleet"] = {
        "name": "ray",
        "shards": None,
        "absent": [],
        "resources": [],
        "cpus": 0.5,
    }
    write_json(Path("run/config.json"), values)
    assert _facts(Folder(Path("run")).record())["real workers"] == "ray[cpus=0.5]"


def test_functions_of_one_s_own_are_passed_again_in_python(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def adam(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=lr)

    problem, f1 = dd.Quadratic([[0.0], [6.0]]), {"f1": lambda x: 0.625}
    options: Any = {"server": dd.Server(optimizer=adam), "evaluation": dd.Evaluation(metrics=f1), "updates": 9}
    dd.simulate(dd.DuDe(0.1), problem, PACE, folder="run", **options)
    line, _ = shown(capsys, "run")
    assert line["optimizer"].endswith("adam, your own") and line["metrics"] == "f1"
    again = ["dd.replay('run', optimizer=...)", "dd.resume('run', updates=18, optimizer=..., metrics=...)"]
    assert line["next"] == again
    resumed = dd.resume("run", updates=18, optimizer=adam, metrics=f1)  # the advice is right
    assert resumed.version == 18 and dd.replay("run", optimizer=adam).same_bits

"""Grids on the shell, their figures and progress, and replays of runs that were computed together."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

import dualdelay as dd
from dualdelay.analysis.figures import _best, draw
from dualdelay.cli import main
from dualdelay.engine.trace import Table
from dualdelay.runs.names import alternatives
from dualdelay.runs.progress import Sharing
from helpers import drift, operations


@pytest.mark.parametrize(
    "text, expected",
    [
        ("dude[lr=0.05]", ["dude[lr=0.05]"]),
        ("dude", ["dude"]),
        ("dude[lr=0.01|0.05]", ["dude[lr=0.01]", "dude[lr=0.05]"]),
        ("dude[lr=1 | 2,wait_for=3]", ["dude[lr=1,wait_for=3]", "dude[lr=2,wait_for=3]"]),
        ("a[x=1|2,y=3|4]", ["a[x=1,y=3]", "a[x=1,y=4]", "a[x=2,y=3]", "a[x=2,y=4]"]),
        ("fixed[times=[1,2]|[3,4]]", ["fixed[times=[1,2]]", "fixed[times=[3,4]]"]),
        (
            "local_steps[problem=digits[alpha=0.1],k=1|2,lr=1]",
            ["local_steps[problem=digits[alpha=0.1],k=1,lr=1]", "local_steps[problem=digits[alpha=0.1],k=2,lr=1]"],
        ),
    ],
)
def test_a_text_with_bars_stands_for_several(text, expected):
    assert alternatives(text) == expected


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return caught.value.code


def test_the_shell_runs_a_grid_and_names_every_run(tmp_path, capsys):
    grid = ["dude[lr=0.02|0.05]", "vanilla[lr=0.05]", "--problem", "digits[workers=3,alpha=0.1|1.0]"]
    main(["compare", *grid, "--speeds", "truncated_normal[std=1|3]", "--updates", "6", "--folder", str(tmp_path), "--json"])
    out = json.loads(capsys.readouterr().out)
    assert len(out["runs"]) == 12 and out["failed"] == 0
    assert len({row["algorithm"] for row in out["runs"]}) == 12
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert len(folders) == 12 and "dude-lr=0.02-problem1-speeds0-seed0" in folders
    again = dd.resume(tmp_path / "dude-lr=0.02-problem1-speeds0-seed0")
    assert again.problem.settings["alpha"] == 1.0


def test_a_grid_with_a_run_that_fails_shows_the_others_and_ends_with_1(tmp_path, capsys):
    made = ["vanilla[lr=0.05|1e30]", "--problem", "digits[workers=3]", "--updates", "30", "--folder", str(tmp_path)]
    assert run("compare", *made) == 1
    shown = capsys.readouterr()
    assert "vanilla[lr=0.05]" in shown.out and "failed: vanilla[lr=1e+30] seed 0: worker" in shown.out
    assert "1 of 2 runs did not come to their end" in shown.err
    assert (tmp_path / "comparison.parquet").exists()


@pytest.mark.parametrize(
    "given, words",
    [
        (["--device", "abacus"], "expected 'cpu' or 'cuda'"),
        (["--precision", "tf32"], "is a mode of GPUs"),
        (["--cores", "0"], "cores is 0"),
        (["--fleet", "ray", "--cores", "2"], "--cores cannot be chosen for real workers"),
        (["--fleet", "ray", "--table", "half"], "--table cannot be chosen for real workers"),
    ],
)
def test_places_that_cannot_be_are_refused_on_the_shell(given, words, capsys):
    assert run("train", "dude[lr=0.05]", "--problem", "digits[workers=2]", "--updates", "2", *given) == 2
    assert words in capsys.readouterr().err


def test_tables_precision_and_cores_are_named_on_the_shell(tmp_path):
    options = ["--table", "half", "--precision", "bfloat16", "--cores", "2", "--device", "cpu"]
    main(
        [
            "train",
            "dude[lr=0.05]",
            "--problem",
            "digits[workers=2]",
            "--updates",
            "4",
            "--folder",
            str(tmp_path / "r"),
            *options,
        ]
    )
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert (config["table"], config["precision"], config["device"], config["batch"]) == ("half", "bfloat16", "cpu", False)


def curves(count):
    labels = [f"dude[lr={k}]" for k in range(count)]
    names = np.repeat(labels, 3)
    objective = np.concatenate([[2.0, 1.5, 1.0 + 0.1 * k] for k in range(count)])
    columns = {"time": np.tile([0.0, 1.0, 2.0], count), "objective": objective, "accuracy": np.full(3 * count, np.nan)}
    return Table({"algorithm": names, "seed": np.zeros(3 * count, dtype=int), **columns})


@pytest.mark.parametrize("count", [2, 6, 8, 20])
def test_of_many_curves_the_best_are_drawn(count, tmp_path):
    assert _best(curves(count), slice(None)) == [f"dude[lr={k}]" for k in range(min(count, 8))]
    assert draw(curves(count), tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_shows_how_much_is_done():
    with Sharing(after=0.0, lines=0.0) as report:
        sink = io.StringIO()
        report._watcher._console = Console(file=sink, width=200)
        report(0.0, "")
        report(0.25, "8 runs side by side")
        report(0.5, "8 runs side by side")
        report(0.75, "")
    assert "25%  8 runs side by side" in sink.getvalue() and "50%  8 runs side by side" in sink.getvalue()
    assert "left" in sink.getvalue() and "75%" not in sink.getvalue()


@pytest.fixture
def together(tmp_path):
    grid = {"algorithm": [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], "lr": [0.02, 0.05]}
    speeds = dd.TruncatedNormalSpeeds(4, 1.0)
    return dd.sweep(grid, dd.Digits(workers=4), speeds, updates=40, compute=dd.Compute(batch=True), folder=tmp_path)


@pytest.mark.numeric
def test_a_run_computed_with_others_is_replayed_to_rounding_and_says_so(together, capsys):
    for made in together.runs:
        again = dd.replay(made.folder)
        assert "side by side with 3 others" in again.notes[0]
        close = drift(40, made.algorithm.lr, operations(made.problem), torch.float32)
        assert (again.x - made.x).norm() <= close * made.x.norm()
    main(["replay", str(made.folder), "--json"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["same"] is again.same_bits and "3 others" in shown.err


@pytest.mark.parametrize("column, words", [("loss", "the recorded loss is"), ("version", "the recorded version is")])
def test_a_record_that_was_changed_is_not_replayed_to_rounding_either(column, words, together):
    from dualdelay.storage.files import load_table, save_table

    folder = together.runs[0].folder
    columns, about = load_table(folder / "trace.parquet")
    columns[column] = columns[column].copy()
    columns[column][20] = columns[column][20] + 1
    save_table(folder / "trace.parquet", columns, about)
    with pytest.raises(dd.ReplayMismatch, match=words):
        dd.replay(folder)

"""The paper's experiments: equal conditions for all methods, no run computed twice, and honest tables and figures."""

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import dualdelay as dd
from dualdelay.analysis.figures import draw_panels
from dualdelay.cli import main
from dualdelay.cli.flags import Changes
from dualdelay.paper import pictures, tables
from dualdelay.paper.cells import compute, load, records, run_batch
from dualdelay.paper.experiment import FIGURES, TITLES, Cell, Experiment, title
from dualdelay.paper.report import write_all
from dualdelay.paper.tables import Choice, Outcome
from dualdelay.storage.files import load_table
from helpers import drift, operations, rounding

PROBLEM = "digits[minimum=1,hidden=8,batch_size=16]"
TINY = Experiment(
    *(6, (0.1, 0.5)), seeds=(0, 1), steps=(0.05, 0.2), wait_for=(1, 3), updates=60, evaluations=3, problem=PROBLEM
)
FEW = replace(TINY, alphas=(0.1,), stds=(1.0,), seeds=(0,), steps=(0.05,), methods=("vanilla", "sync"), wait_for=(1,))
HUGE = 1e30  # a step after which nothing is finite
COMMAND = ("paper", "figure1", "--problem", PROBLEM, "--updates", 60, "--evaluations", 2, "--seeds", 0, 1, "--steps", 0.05)
COMMAND = (*COMMAND, "--methods", "dude", "vanilla", "sync", "--json", "--folder")
FILES = ["figure1.md", "curves.parquet", "setting.json", "figure1.png", "figure1.pdf"]
PANEL = (0.1, 1.0)


def computed(experiment, folder):
    """Compute what is missing; the names of the runs that were computed."""

    def names():
        runs = {cell: load(cell, folder)["runs"] for cell in experiment.cells()}
        return {f"std {cell.std:g}, seed {cell.seed}, {name}": None for cell, held in runs.items() for name in held}

    before = names()
    compute(experiment, folder)
    return [name for name in names() if name not in before]


def report(experiment, runs, folder):
    """Write everything about the runs into a folder; what was printed."""
    printed = io.StringIO()
    write_all(experiment, tables.outcomes(experiment, runs), folder, "figure1", 1.5, 0.4, Console(file=printed, width=200))
    return printed.getvalue()


def call(*arguments):
    """The exit code of a command, and what it printed on both channels."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ages(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder with all runs of the tiny experiment."""
    folder = tmp_path_factory.mktemp("tiny")
    assert len(computed(TINY, folder)) == 2 * 2 * 2 * 8 * 2  # seeds, stds, alphas, methods and steps
    return folder


@pytest.fixture(scope="module")
def cells(tiny):
    """The content of each file of the tiny experiment, by cell."""
    return {cell: load(cell, tiny) for cell in TINY.cells()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a command that was not interrupted, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    code, out, err = call(*COMMAND, folder)
    assert code == 0, err
    return folder, out, err


# all methods have the same conditions


def test_all_methods_and_steps_of_one_seed_begin_with_the_same_loss_whatever_the_speeds(tiny):
    starts = {}
    for cell, alpha, _, _, record in records(TINY, tiny):
        starts.setdefault((alpha, cell.seed), set()).add(record["objective"][0])
    assert [len(losses) for losses in starts.values()] == [1, 1, 1, 1]
    assert len(set.union(*starts.values())) == 4, "another split or seed, another loss"


@pytest.mark.numeric
def test_all_first_updates_over_all_workers_are_the_same(tmp_path):
    """DuDe, MIFA and synchronous SGD begin with the mean of all workers' first gradients: same weights, same minibatches.

    The runs end between the slowest worker's first arrival and the next arrival of any worker.
    """
    cell = Cell(TINY, 5.0, 1)
    short = replace(cell.alone, updates=math.ceil(cell.rate * max(cell.times)), evaluations=1, steps=(0.2,))
    compute(replace(short, methods=("dude", "mifa", "sync", "vanilla")), tmp_path)
    for alpha in short.alphas:
        runs = {method: run for _, a, method, _, run in records(short, tmp_path) if a == alpha}
        vanilla = runs.pop("vanilla")
        assert {name: run["updates"] for name, run in runs.items()} == {"dude": 1, "dude c=3": 1, "mifa": 1, "sync": 1}
        (loss,) = {run["objective"][-1] for run in runs.values()}
        assert vanilla["objective"][-1] != loss != vanilla["objective"][0]


def test_every_run_ends_at_the_time_in_which_asynchronous_workers_make_the_updates(cells):
    for cell, held in cells.items():
        assert held["speeds"] == [dd.TruncatedNormalSpeeds(6, cell.std, cell.seed).seconds(i, 0) for i in range(6)]
        assert held["horizon"] == pytest.approx(60 / sum(1 / s for s in held["speeds"]), rel=rounding(16), abs=0)
        assert len(held["runs"]) == 32
        for run in held["runs"].values():
            assert run["time"] == pytest.approx([held["horizon"] * k / 3 for k in range(4)], rel=1e-6)  # seven digits
            assert run["version"][-1] == run["updates"] > 0
    assert len({tuple(held["speeds"]) for held in cells.values()}) == 4, "other speeds for every std and seed"


def test_the_number_of_updates_follows_from_the_speeds(cells):
    for held in cells.values():
        end, speeds = held["horizon"], np.array(held["speeds"])
        slowest, arrivals = speeds.max(), np.floor(end / speeds).sum()
        expected = {"vanilla": arrivals, "sync": end // slowest, "fedbuff": arrivals // 2}  # two are a third of six
        # DuDe waits for the first gradients of all workers, and then begins
        expected["dude"] = 1 + np.floor((end - slowest) / speeds).sum()
        assert 60 - 6 < expected["vanilla"] <= 60  # each worker may have one unfinished job
        for name, run in held["runs"].items():
            method = name.split(", ")[1]
            if method in expected:
                assert run["updates"] == expected[method], name
            if method == "dude":
                assert [version > 0 for version in run["version"]] == [at >= slowest for at in run["time"]]


def test_the_split_depends_on_the_seed_and_not_on_the_speeds(cells):
    splits = {(cell.std, cell.seed): held["splits"] for cell, held in cells.items()}
    for seed in (0, 1):
        assert splits[1.0, seed] == splits[5.0, seed]
        for alpha in (0.1, 0.5):
            problem = dd.Digits(6, alpha, seed=seed, minimum=1, hidden=8, batch_size=16)
            sizes = [len(shard.pair[1]) for shard in problem.shards()]
            assert np.sum(splits[1.0, seed][f"{alpha:g}"]["samples"], 1).tolist() == sizes
    assert len({json.dumps(split["samples"]) for both in splits.values() for split in both.values()}) == 4


# what an experiment consists of


@pytest.mark.parametrize("name", ["alphas", "stds", "seeds", "steps", "wait_for", "methods"])
def test_an_experiment_has_at_least_one_of_everything_and_nothing_twice(name):
    values = getattr(TINY, name)
    for wrong in ((), (*values, values[0])):
        with pytest.raises(dd.BadInput, match=rf"{name} is \[.*; expected at least one value, and each only once"):
            replace(TINY, **{name: wrong})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alphas": (0.1, 0.0)}, r"alphas is 0\.0; expected a finite number above zero"),
        ({"stds": (-1.0,)}, r"stds is -1\.0"),
        ({"steps": (0.1, -0.1)}, r"steps is -0\.1"),
        ({"steps": (math.nan,)}, "steps is nan"),
        ({"steps": (math.inf,)}, "steps is inf"),
        ({"wait_for": (7,)}, r"wait_for is 7; expected a whole number, 1\.\.6"),
        ({"wait_for": (0,)}, "wait_for is 0"),
        ({"methods": ("dude", "vanila")}, "no 'vanila'; did you mean 'vanilla'"),
        ({"methods": ("dude c=3",)}, "did you mean 'dude'"),
        ({"updates": 0}, "updates is 0"),
        ({"evaluations": 0}, "evaluations is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"problem": "digits[alpha=0.3]"}, "leave alpha out of it"),
    ],
)
def test_an_impossible_experiment_is_refused(changes, words):
    with pytest.raises(dd.BadInput, match=words):
        replace(TINY, **changes)


@pytest.mark.parametrize(("workers", "buffer", "active"), [(10, 3, 5), (30, 10, 15), (5, 1, 2), (1, 1, 1)])
def test_every_method_has_the_settings_declared_for_it(workers, buffer, active):
    experiment = Experiment(workers, (0.1,), wait_for=(1, 3, 5)[:workers])
    expected = {"dude": dd.DuDe(0.1, wait_for=1)}
    expected |= {f"dude c={c}": dd.DuDe(0.1, wait_for=c) for c in (3, 5) if workers > 1}
    expected |= {"vanilla": dd.VanillaASGD(0.1), "uniform": dd.UniformASGD(0.1), "shuffled": dd.ShuffledASGD(0.1)}
    expected |= {"fedbuff": dd.FedBuff(0.1, buffer=buffer), "mifa": dd.MIFA(0.1, active=active), "sync": dd.SyncSGD(0.1)}
    assert {name: make(lr=0.1) for name, make in experiment.makers.items()} == expected


@pytest.mark.parametrize("name", FIGURES)
def test_the_results_in_the_repository_are_complete(name):
    experiment = FIGURES[name]
    runs = tables.outcomes(experiment, Path(__file__).parents[2] / "experiments" / "paper" / name / "cells")
    wanted = {((a, cell.std), cell.seed, m, lr) for cell in experiment.cells() for a, m, lr in cell.wanted()}
    assert {(run.panel, run.seed, run.method, run.lr) for run in runs} == wanted
    assert len(wanted) == {"figure1": 252, "figure2": 252, "saturation": 90}[name]
    for run in runs:
        assert run.failed is None
        assert np.isfinite([run.curves["objective"], run.curves["accuracy"]]).all()
        assert run.curves["time"][-1] == pytest.approx(experiment.updates, rel=1e-6)


# computed once, however often it is stopped


def test_an_experiment_that_was_stopped_continues_with_the_missing_runs(cells, tmp_path):
    def stop(share, text):
        if share > 0.5:
            raise InterruptedError

    experiment = replace(FEW, alphas=TINY.alphas, steps=TINY.steps)
    (cell,) = experiment.cells()
    with pytest.raises(InterruptedError):
        compute(experiment, tmp_path, report=stop)
    held = {f"std 1, seed 0, {name}" for name in load(cell, tmp_path)["runs"]}
    rest = computed(experiment, tmp_path)
    assert len(held) == len(rest) == 4
    assert not held & set(rest)
    uninterrupted = cells[Cell(TINY, 1.0, 0)]
    runs = {key.name: uninterrupted["runs"][key.name] for key in cell.wanted()}
    assert load(cell, tmp_path) == {**uninterrupted, "runs": runs}


def test_what_is_added_later_is_computed_alone(tiny, tmp_path):
    assert computed(FEW, tmp_path) == [f"std 1, seed 0, alpha 0.1, {method}, lr 0.05" for method in ("vanilla", "sync")]
    before, experiment = ages(tmp_path), FEW
    assert computed(FEW, tmp_path) == []
    assert ages(tmp_path) == before
    for changes, count, word in (
        ({"steps": (0.2, 0.05)}, 2, "lr 0.2"),
        ({"methods": ("fedbuff", "vanilla", "sync")}, 2, "fedbuff"),
        ({"seeds": (1, 0)}, 6, "seed 1"),
        ({"alphas": (0.1, 0.5)}, 12, "alpha 0.5"),
    ):
        experiment = replace(experiment, **changes)
        assert [word in name for name in computed(experiment, tmp_path)] == count * [True]
    for cell in experiment.cells():
        runs = load(cell, tmp_path)["runs"]
        assert len(runs) == 12
        assert runs.items() <= load(cell, tiny)["runs"].items()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text.replace('"updates": 60', '"updates": 61', 1), "holds runs with updates 61, but 60 is wanted"),
        (lambda text: text.replace("hidden=8", "hidden=9", 1), "holds runs with problem .*hidden=9.*, but .*hidden=8"),
        (lambda text: text[: len(text) // 2], r"is damaged \(.*delete it and its runs are computed anew"),
        (lambda text: "", "is damaged"),
        (lambda text: '{"results": [1, 2, 3]}', "is no file of the paper's runs; choose another --folder"),
        (lambda text: "[]", "is no file of the paper's runs"),
        (lambda text: text.replace('"about": {', '"about": 3, "other": {', 1), "is no file of the paper's runs"),
        (
            lambda text: text.replace('"speeds": [', '"speeds": 3, "splits": {}, "x": [', 1),
            "is no file of the paper's runs",
        ),
        (lambda text: text.replace('"objective": [', '"aim": [', 1), "is no file of the paper's runs"),
    ],
    ids=["updates", "problem", "cut", "empty", "not ours", "a list", "other parts", "other types", "a run without curves"],
)
def test_a_wrong_file_is_refused_before_anything_is_computed(spoil, words, tiny, tmp_path):
    path = tmp_path / "std5-seed1.json"  # of the last cell
    path.write_text(spoil((tiny / path.name).read_text()))
    with pytest.raises(dd.BadInput, match=rf"^{re.escape(str(path))} .*{words}"):
        compute(TINY, tmp_path)
    assert list(ages(tmp_path)) == [path.name]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(dd.BadInput, match=r"cannot be read .*choose another --folder"):
            compute(FEW, place)
    with pytest.raises(dd.BadInput, match=r"the folder .* cannot be made \(.*\); choose another\."):
        report(FEW, tmp_path, tmp_path / "file")


def test_steps_that_differ_in_the_seventh_digit_are_different_runs(tmp_path):
    assert len(computed(replace(FEW, steps=(0.1234567, 0.1234568), methods=("vanilla",)), tmp_path)) == 2


def test_an_experiment_whose_runs_all_fail_is_reported(tmp_path):
    experiment = replace(FEW, steps=(HUGE,), methods=("vanilla",))
    compute(experiment, tmp_path / "cells")
    (run,) = load(next(experiment.cells()), tmp_path / "cells")["runs"].values()
    assert run["failed"].startswith("worker"), "the reason of the run itself"
    printed = report(experiment, tmp_path / "cells", tmp_path)
    assert "1 of 1 runs failed or diverged" in printed and "(then" not in printed
    columns, _ = load_table(tmp_path / "curves.parquet")
    assert {len(column) for column in columns.values()} == {0}


@pytest.mark.slow
def test_a_step_that_diverges_is_reported_and_not_chosen(tmp_path):
    experiment = replace(FEW, steps=(0.05, HUGE), methods=("vanilla", "mifa"))
    compute(experiment, tmp_path / "cells")
    held = load(next(experiment.cells()), tmp_path / "cells")["runs"]
    assert "not finite" in held["alpha 0.1, vanilla, lr 1e+30"]["failed"]
    assert held["alpha 0.1, mifa, lr 1e+30"]["objective"][-1] is None  # the end came before ten gradients in a row
    assert computed(experiment, tmp_path / "cells") == [], "a run that failed would fail again"
    assert "2 of 4 runs failed or diverged" in report(experiment, tmp_path / "cells", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "steps.png", "steps.pdf", "cells"}
    text = (tmp_path / "figure1.md").read_text()
    assert text.count("| 0.05 (edge) | 1 | 2.") == 2, "both are shown at the step that is not too large"
    assert text.count("diverged") == len(re.findall(r"\| (vanilla|mifa) \| 2\.\d+ \| diverged \|", text)) == 2
    report(replace(experiment, steps=(HUGE,)), tmp_path / "cells", tmp_path / "alone")
    assert (tmp_path / "alone" / "figure1.md").read_text().count("| 1e+30 | 1 | diverged |") == 2


@pytest.mark.numeric
def test_runs_side_by_side_are_those_computed_one_by_one():
    cell = next(replace(TINY, alphas=(0.1,), steps=(0.2,), updates=30).cells())
    keys, problems, shares = list(cell.wanted()), {0.1: cell.problem(0.1)}, []
    alone, together = {}, {}
    for batch, kept, told in ((False, alone, []), (True, together, shares)):
        keep = lambda key, record, kept=kept: kept.setdefault(key.name, record)  # noqa: E731
        run_batch(cell, keys, problems, lambda share, text, told=told: told.append(share), dd.Compute(batch=batch), keep)
    assert sum(share < 1 for share in shares) < len(keys), "each run that is computed alone is reported"
    assert sorted(together) == sorted(alone) == sorted(key.name for key in keys)
    k, samples = operations(problems[0.1]), operations(problems[0.1], samples=1437)  # all, if one worker has them
    close = drift(30, 0.2, k, torch.float32) + rounding(samples, torch.float32)
    for name, run in together.items():
        assert all(run[what] == alone[name][what] for what in ("updates", "arrivals", "version", "tau_max"))
        assert run["objective"] == pytest.approx(alone[name]["objective"], rel=close, abs=0)


# tables


def outcome(loss=(3.0, 1.0), accuracy=(0.1, 0.5), lr=0.1, **changes):
    """A run with these evaluations, the last at 6,000."""
    at = np.linspace(0, 6000, len(loss))
    curves = {"time": at, "version": at / 2, "objective": loss, "pooled_loss": loss, "accuracy": accuracy}
    others = {"panel": PANEL, "seed": 0, "method": "dude", "updates": 3000, "tau_max": 7, **changes}
    return Outcome(lr=lr, curves={name: np.array(values) for name, values in curves.items()}, **others)


def failed(seed=0, method="dude", lr=0.1):
    return Outcome(PANEL, seed, method, lr, 0, 0, {}, "worker 3 sent nonsense")


@pytest.mark.parametrize(
    ("losses", "lr", "edge"),
    [
        ({0.1: (1.0, 1.2), 0.2: (0.4, 1.6), 0.3: (1.1, 1.2)}, 0.2, False),  # means 1.1, 1.0, 1.15
        ({0.1: (1.0, 1.2), 0.2: (0.1, 2.2), 0.3: (1.1, 1.2)}, 0.1, True),  # the lowest single run does not count
        ({0.3: (1.0, 1.0), 0.1: (2.0, 2.0), 0.2: (3.0, 3.0)}, 0.3, True),  # whatever the order
        ({0.1: (9.0, 9.0), 0.2: (0.1, math.nan), 0.3: (0.1, math.inf)}, 0.1, True),
        ({0.1: (math.nan, math.nan), 0.2: (5.0, 5.0), 0.3: (6.0, math.nan)}, 0.2, False),
    ],
)
def test_the_step_with_the_lowest_mean_loss_at_the_end_is_chosen(losses, lr, edge):
    runs = [outcome((3.0, loss), lr=step, seed=k) for step, both in losses.items() for k, loss in enumerate(both)]
    (choice,) = tables.choose([*runs[::-1], failed(lr=0.15), failed(1, lr=0.15)])
    assert (choice.lr, choice.edge) == (lr, edge)
    assert [run.seed for run in choice.runs] == [0, 1]
    assert choice.values("objective").tolist() == list(losses[lr])


def test_between_two_evaluations_the_model_of_the_earlier_one_stands():
    run = outcome((3.0, 2.0, 1.5, 1.0), (0.1, 0.4, 0.3, 0.6))  # at 0, 2000, 4000 and 6000
    times = np.array([0, 1, 1999.9, 2000, 3999, 4000 - 1e-4, 5999, 6000])  # a time is kept with 7 digits
    assert run.at("objective", times).tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 1.5, 1.5, 1.0]
    reached = tables.table_of([run]).time_to
    assert [reached(loss).time[0] for loss in (9, 2, 1.9, 1, 0.9)] == [0, 2000, 4000, 6000, math.inf]
    assert [reached(level, "accuracy").time[0] for level in (0.1, 0.35, 0.5, 0.7)] == [0, 2000, 6000, math.inf]
    lost = outcome((3.0, math.nan, 0.5, 1.0), (0.1, 0.4, 0.3, 0.6))
    assert tables.table_of([lost]).time_to(1.0).time[0] == 4000, "nan is not below the target"


def test_the_summary_has_means_deviations_and_times():
    runs = [outcome((3.0, 1.4, 1.2, 0.8), (0.1, 0.5, 0.5, 0.5), updates=3000, tau_max=5)]
    runs += [outcome((3.0, 2.5, 2.0, 1.0), (0.1, 0.2, 0.2, 0.3), seed=1, updates=2000, tau_max=9)]
    runs += [outcome((3.0, 3.0, 3.0, 1.8), (0.1, 0.2, 0.2, 0.4), seed=2, updates=1000, tau_max=1)]
    choices = [Choice(PANEL, "dude", 0.1, True, runs), Choice((0.5, 5.0), "vanilla", 0.25, False, runs[:2])]
    heading, dude, vanilla = tables.summary(choices, 1.5, 0.4)
    assert heading[4:] == ["training loss F", "test accuracy", "time to F = 1.5", "time to 0.4", "updates", "tau_max"]
    # 0.8, 1.0, 1.8: mean 1.2, variance (0.16 + 0.04 + 0.36) / 2; 0.5, 0.3, 0.4: mean 0.4, variance 0.02 / 2
    assert dude[:6] == ["alpha = 0.1, std = 1", "dude", "0.1 (edge)", "3", "1.200 ± 0.529", "0.400 ± 0.100"]
    assert dude[6:] == ["not in 1 of 3", "not in 1 of 3", "2,000", "5 (9)"]
    assert vanilla[:4] == ["alpha = 0.5, std = 5", "vanilla", "0.25", "2"]
    assert vanilla[6] == "4.0", "the mean of 2,000 and 6,000 in thousands"
    assert [row[6:8] for row in tables.summary(choices, 0.1, 0.9)[1:]] == [["never", "never"]] * 2
    alone = tables.summary([Choice(PANEL, "dude", 0.1, True, runs[:1])], 1.5, 0.4)[1]
    assert alone[4] == "0.800", "one seed has no deviation"
    half = tables.summary([Choice(PANEL, "dude", 0.1, True, [runs[0], failed(seed=1)])], 1.5, 0.4)[1]
    assert half[4:] == ["diverged", "0.250 ± 0.354", "not in 1 of 2", "not in 1 of 2", "3,000", "5 (5)"]


def test_differences_are_taken_seed_by_seed_and_above_zero_dude_is_ahead():
    def choice(method, losses, levels, panel=PANEL):
        ends = enumerate(zip(losses, levels, strict=True))
        return Choice(panel, method, 0.1, False, [outcome((9, f), (0, level), seed=k) for k, (f, level) in ends])

    choices = [choice("dude", (1.0, 2.0, 3.0), (0.5, 0.5, 0.5)), choice("vanilla", (1.5, 1.5, 3.5), (0.4, 0.6, 0.2))]
    choices += [choice("sync", (1.5, math.nan, 3.5), (0.9, 0.5, 0.9)), choice("sync", (1.0,), (1.0,), (0.5, 1.0))]
    heading, vanilla, sync = tables.paired(choices)  # on the other panel there is no DuDe to compare with
    assert heading[2] == "F of the other less F of dude"
    # 0.5, -0.5, 0.5: mean 1/6, deviation 1/sqrt(3); 0.1, -0.1, 0.3: mean 0.1, deviation 0.2
    assert vanilla == ["alpha = 0.1, std = 1", "vanilla", "0.167 ± 0.577", "2 of 3", "0.100 ± 0.200", "2 of 3"]
    assert sync[1:4] == ["sync", "diverged", "3 of 3"]
    assert sync[5] == "1 of 3"  # where it diverged


def test_the_curves_of_all_runs_are_one_table(tiny):
    columns = tables.curves([failed(), *tables.outcomes(TINY, tiny)])
    curves = ["time", "version", "objective", "pooled_loss", "accuracy"]
    assert list(columns) == ["alpha", "std", "seed", "method", "lr", *curves]
    assert {len(column) for column in columns.values()} == {128 * 4}, "four evaluations of every run that ended"
    place = {"alpha": 0.5, "std": 5.0, "seed": 1, "method": "dude c=3", "lr": 0.2}
    rows = np.all([columns[name] == value for name, value in place.items()], 0)
    record = load(Cell(TINY, 5.0, 1), tiny)["runs"]["alpha 0.5, dude c=3, lr 0.2"]
    assert {name: columns[name][rows].tolist() for name in curves[1:]} == {name: record[name] for name in curves[1:]}
    assert columns["time"][rows] == pytest.approx([0, 20, 40, 60], rel=1e-6), "in updates of asynchronous workers"


# figures


@pytest.mark.slow
def test_the_figure_has_loss_above_accuracy_for_each_panel_and_every_method(tiny, tmp_path):
    choices = tables.choose(tables.outcomes(TINY, tiny))
    names = [f"alpha = {alpha}, std = {std}" for alpha in (0.1, 0.5) for std in (1, 5)]
    labels = ["DuDe-ASGD", "DuDe-ASGD, c = 3", *list(TITLES.values())[1:]]
    assert labels == [*map(title, TINY.makers)]
    rows = pictures.figure_panels(choices, 60, 3)
    for row, (quantity, ylabel) in zip(
        rows, (("objective", "training loss F"), ("accuracy", "test accuracy")), strict=True
    ):
        assert [panel.title for panel in row] == names
        for panel in row:
            assert panel.ylabel == ylabel and [curve.label for curve in panel.curves] == labels
            dude = next(c for c in choices if (c.method, tables.heading(c.panel)) == ("dude", panel.title))
            first, second = (run.curves[quantity] for run in dude.runs)
            curve = panel.curves[0]
            assert curve.x == pytest.approx([0, 0.02, 0.04, 0.06])
            assert curve.y == pytest.approx((first + second) / 2)
            # of two values a and b the standard deviation is |a - b| / sqrt(2)
            assert curve.high - curve.y == pytest.approx(abs(first - second) / math.sqrt(2))
            assert curve.y - curve.low == pytest.approx(curve.high - curve.y)
    picture, document = draw_panels(pictures.figure_panels(choices, 60, 3), tmp_path / "figure1", "what was run")
    with Image.open(picture) as image:
        assert image.size == (2100, 945)  # four panels of 3.5 inches, 150 points an inch
        shown = {colour for count, colour in image.convert("RGB").getcolors(2100 * 945) if count > 20}
    assert {tuple(bytes.fromhex(dd.ALGORITHMS[method].colour[1:])) for method in TITLES} <= shown
    assert document.read_bytes().startswith(b"%PDF")


def test_a_seed_that_failed_is_left_out():
    choices = [Choice(PANEL, "dude", 0.1, True, [outcome(), failed(1)])]
    choices += [Choice(PANEL, "sync", 0.1, True, [failed(0, "sync"), failed(1, "sync")])]
    ((loss, accuracy),) = pictures.figure_panels(choices, 6000, 2)  # one panel: loss and accuracy side by side
    assert (loss.ylabel, accuracy.ylabel) == ("training loss F", "test accuracy")
    dude, sync = loss.curves
    assert dude.y.tolist() == dude.high.tolist() == [3.0, 3.0, 1.0]
    assert np.isnan(sync.y).all() and sync.label == "synchronous SGD"
    assert [[len(panel.curves) for panel in row] for row in pictures.seed_panels(choices, str)] == [[1, 0], [1, 0]]


def test_every_step_is_drawn_but_for_one_with_a_run_that_failed(tiny):
    runs = tables.outcomes(TINY, tiny)
    ended = [run for run in runs if (run.panel, run.seed, run.method, run.lr) != (PANEL, 1, "sync", 0.2)]
    panels = pictures.step_panels([*ended, failed(1, "sync", 0.2)])
    assert [panel.title for panel in panels] == [f"alpha = {alpha}, std = {std}" for alpha in (0.1, 0.5) for std in (1, 5)]
    curves = {curve.label: curve for curve in panels[0].curves}
    assert list(curves) == [*map(title, TINY.makers)]
    final = [run.curves["objective"][-1] for run in runs if (run.panel, run.method, run.lr) == (PANEL, "dude", 0.2)]
    assert curves["DuDe-ASGD"].x == [0.05, 0.2]
    assert curves["DuDe-ASGD"].y[1] == pytest.approx(sum(final) / 2)
    assert np.isnan(curves["synchronous SGD"].y).tolist() == [False, True]


def test_seeds_are_drawn_in_rows_of_three():
    losses = [(3.0, seed) for seed in range(6)]
    choices = [Choice(PANEL, "dude", 0.1, False, [outcome(loss, seed=seed) for seed, loss in enumerate(losses)])]
    rows = pictures.seed_panels(choices, str)
    assert [[panel.title for panel in row] for row in rows] == [
        [f"seed {k}: {k}" for k in seeds] for seeds in ((0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5))
    ]
    assert [row[0].ylabel for row in rows] == 2 * ["training loss F", "test accuracy"]
    assert [panel.curves[0].y.tolist() for panel in (*rows[0], *rows[2])] == [list(loss) for loss in losses]
    assert rows[1][0].curves[0].y.tolist() == [0.1, 0.5]


# on the shell


def test_the_command_writes_figure_tables_and_curves_and_ends_with_a_line_of_json(finished):
    folder, out, err = finished
    assert json.loads(out) == {"command": "paper", "folder": str(folder), "files": [str(folder / name) for name in FILES]}
    assert set(content(folder)) == {*FILES, *(f"cells/std{std}-seed{seed}.json" for std in (1, 5) for seed in (0, 1))}
    assert "Lowest training loss: alpha = 0.1, std = 1: " in err
    setting = json.loads((folder / "setting.json").read_text())
    assert (setting["workers"], setting["alphas"], setting["seeds"], setting["steps"]) == (10, [0.1, 0.5], [0, 1], [0.05])
    text = (folder / "figure1.md").read_text()
    assert [text.count(f"| {method} | 0.05 | 2 | ") for method in ("dude", "vanilla", "sync")] == 3 * [4]
    columns, about = load_table(folder / "curves.parquet")
    assert len(columns["time"]) == 2 * 2 * 2 * 3 * 3  # seeds, stds, alphas, methods and evaluations
    assert about == {"experiment": setting}


def test_the_same_command_again_computes_nothing_and_writes_the_same_bytes(finished):
    folder, out, err = finished
    before, old = content(folder), ages(folder / "cells")
    assert call(*COMMAND, folder) == (0, out, err)
    assert content(folder) == before
    assert ages(folder / "cells") == old


@pytest.mark.slow
def test_a_command_that_was_killed_continues_and_writes_the_same_bytes(finished, tmp_path):
    command = [sys.executable, "-m", "dualdelay", *map(str, COMMAND), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "cells" / "std5-seed0.json").exists():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -9
    old = ages(tmp_path / "cells")
    assert len(list((tmp_path / "cells").glob("std*.json"))) in (2, 3), "it was killed on its way"
    assert call(*COMMAND, tmp_path)[0] == 0
    assert ages(tmp_path / "cells")["std1-seed0.json"] == old["std1-seed0.json"], "what is there is not computed again"
    assert content(tmp_path) == content(finished[0])


def test_without_matplotlib_the_tables_are_written_and_the_reason_is_printed(finished, tmp_path, monkeypatch):
    shutil.copytree(finished[0] / "cells", tmp_path / "cells")
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)  # any import of it fails
    code, out, err = call(*COMMAND, tmp_path)
    assert code == 0
    assert "no figure: figures need matplotlib, which is not installed: pip install" in err
    assert json.loads(out)["files"] == [str(tmp_path / name) for name in FILES[:3]]
    assert {path.name for path in tmp_path.iterdir()} == {*FILES[:3], "cells"}
    assert all((tmp_path / name).read_bytes() == (finished[0] / name).read_bytes() for name in FILES[:3])


def test_every_change_of_the_command_is_one_of_the_experiment_and_every_method_is_in_its_help():
    assert set(vars(Changes())) == set(vars(TINY)) - {"workers"}
    assert f"Only these of {', '.join(TITLES)}." in " ".join(call("paper", "--help")[1].split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", 0.1, -1), r"steps is -1\.0; expected a finite number above zero"),
        (("--wait-for", 11), r"wait_for is 11; expected a whole number, 1\.\.10"),
        (("--problem", "digit"), "no problem 'digit'; did you mean 'digits'"),
        (("--problem", "quadratic[centers=[[0.0],[1.0]]]"), "quadratic has no parameter 'workers'"),
        (("--problem", PROBLEM, "--device", "abacus"), "device is 'abacus'"),
        ((), "dualdelay data cifar10"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setenv("DUALDELAY_DATA", str(tmp_path / "nothing"))
    code, out, err = call("paper", "figure1", *arguments, "--folder", tmp_path / "out")
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{words}.*\n", err), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "word"), [(("figure3",), "figure3"), (("figure1", "--steps", "x"), "--steps")])
def test_words_that_cannot_be_parsed_exit_with_2(arguments, word, tmp_path):
    code, out, err = call("paper", *arguments, "--folder", tmp_path / "out")
    assert (code, out) == (2, "")
    assert word in err
    assert not (tmp_path / "out").exists()

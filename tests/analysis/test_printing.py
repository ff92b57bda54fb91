"""What is printed about runs: tables of workers, comparisons that rank what can be ranked, and TensorBoard's files."""

import dataclasses
import io
import math
import sys

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dualdelay as dd
from dualdelay.analysis.loggers import TensorBoard
from dualdelay.analysis.printing import End, counted, print_comparison, print_rows, print_run, ranking, sentence
from dualdelay.engine.trace import Trace

THREE = dd.Quadratic([[0.0], [6.0], [12.0]], noise=0.5)
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])


def printed(function, thing):
    console = Console(width=140, file=io.StringIO())
    function(thing, console)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_the_sentence_ranks_by_the_mean_and_names_methods_that_failed():
    methods = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05), dd.VanillaASGD(lr=1e200)]
    sweep = dd.compare(methods, THREE, SPEEDS, seeds=[0, 1], updates=300)
    line = sentence(sweep)
    assert line.startswith("Result: at the end (their times differ) dude[lr=0.05] has the lowest objective")
    assert "every worker the same. vanilla[lr=1e+200] failed or diverged in 2 of 2 runs." in line
    rows = {row[0]: row[-3:] for row in printed(print_comparison, sweep) if row}
    assert rows["dude[lr=0.05]"] == rows["vanilla[lr=0.05]"] == ["2", "of", "2"]
    assert rows["vanilla[lr=1e+200]"] == ["0", "of", "2"]


def test_with_several_steps_and_seeds_each_method_is_shown_at_its_best_step_and_seed_by_seed():
    methods = [kind(lr=lr) for kind in (dd.DuDe, dd.VanillaASGD) for lr in (0.05, 0.5, 1e200)]
    sweep = dd.compare(methods, THREE, SPEEDS, seeds=[0, 1], updates=300)
    rows = {row[0]: row[1:] for row in printed(print_comparison, sweep) if row}
    best, apart = sweep.best(), sweep.paired("dude")
    assert rows["each"][:4] == ["method", "at", "its", "best"]
    assert rows["dude"][:2] == ["0.05", "(lowest)"] and best.edge[0] == "lowest"
    assert rows["dude"][2:] == [f"{best['mean'][0]:.4g}", f"±{best['std'][0]:.2g}", *"----"]
    assert rows["vanilla"][-8:] == [
        *(f"{apart.difference[0]:.3g}", f"{apart.low[0]:.3g}", "to", f"{apart.high[0]:.3g}"),
        *("0", "of", "2", f"{apart.p_holm[0]:.2g}"),
    ]
    one = dd.compare(methods[:2], THREE, SPEEDS, updates=30)  # nothing to compare seed by seed
    rows = [row for row in printed(print_comparison, one) if row]
    assert rows[-1][:3] == ["dude", "0.05", "(lowest)"] and len(rows[-1]) == 4
    alone = dd.compare([dd.DuDe(lr=0.05)], THREE, SPEEDS, seeds=[0, 1], updates=30)
    assert ["each", "method"] not in [row[:2] for row in printed(print_comparison, alone)], "nothing to choose or compare"


def test_problems_are_not_ranked_against_each_other():
    problems = [THREE, dd.Quadratic([[0.0], [1.0], [2.0]])]
    grid = {"algorithm": [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], "problem": problems}
    lines = sentence(dd.sweep(grid, None, SPEEDS, updates=200)).splitlines()
    assert len(lines) == 2 and all("dude[lr=0.05] has the lowest objective" in line for line in lines)


def workers(run):
    """The columns of a run's table of workers behind the delays, and their values by worker."""
    rows = printed(print_run, run)
    heading, _, *table = rows[rows.index(["workers"]) + 2 :]
    assert heading[:9] == ["worker", "arrivals", "share", "mean", "seconds", "mean", "delay", "max", "delay"]
    return heading[9:], [row[6:] for row in table if row]


def test_the_table_of_workers_shows_faults_and_states_only_where_there_were_some():
    run = dd.simulate(dd.DuDe(0.1), THREE, SPEEDS, updates=30)
    assert workers(run) == ([], [[], [], []])
    changes = [dd.speeds.leave(1, 5.0), dd.speeds.leave(2, 6.0), dd.speeds.join(2, 8.0)]
    left = dd.simulate(dd.DuDe(0.1), THREE, dd.SimulatedFleet(SPEEDS, changes=changes), updates=30)
    assert workers(left) == (["state"], [["present"], ["left"], ["present"]])
    kinds = [("crashed", 0), ("crashed", 0), ("failed", 2), ("frozen", 2), ("thawed", 1)]
    event = {"row": 9, "time": 9.0, "draw": 0, "version": 9, "after": 9, "text": ""}
    events = [{"kind": kind, "worker": worker, **event} for kind, worker in kinds]
    faulty = dataclasses.replace(run, trace=Trace(run.trace.columns, events))
    rows = [["2", "0", "present"], ["0", "0", "present"], ["0", "1", "frozen"]]
    assert workers(faulty) == (["crashed", "failed", "state"], rows)
    summary = printed(print_run, faulty)
    assert ["crashed", "2"] in summary and ["failed", "1"] in summary


def test_tensorboard_has_every_finite_number_at_its_version(tmp_path):
    with TensorBoard(tmp_path / "board") as board:
        board(3, {"loss": 2.5, "accuracy": math.nan, "worker/1/rate": 7.0})
        board(8, {"loss": 1.5, "accuracy": 0.5})
        written = EventAccumulator(str(tmp_path / "board")).Reload()
        assert [(event.step, event.value) for event in written.Scalars("loss")] == [(3, 2.5), (8, 1.5)], "at once"
    assert [(event.step, event.value) for event in written.Scalars("accuracy")] == [(8, 0.5)]
    assert set(written.Tags()["scalars"]) == {"loss", "accuracy", "worker/1/rate"}


def test_tensorboard_takes_a_run_and_refuses_a_folder_that_cannot_be_written(tmp_path):
    with TensorBoard(str(tmp_path / "board")) as board:
        options = {"evaluation": dd.Evaluation(every=4), "watch": dd.Reporting(log=[board])}
        run = dd.simulate(dd.DuDe(0.1), THREE, SPEEDS, updates=20, **options)
    written = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in written.Scalars("objective")] == [0, 4, 8, 12, 16, 20]
    assert [event.value for event in written.Scalars("objective")] == pytest.approx(run.metrics.objective.tolist())
    assert [event.step for event in written.Scalars("tau_max")] == [20]
    assert "accuracy" not in written.Tags()["scalars"]
    (tmp_path / "file").write_text("")
    with pytest.raises(dd.BadInput, match="cannot be written for TensorBoard"):
        TensorBoard(tmp_path / "file")


def test_without_tensorboard_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # any import of it fails
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(dd.BadInput, match=r"tensorboard package is not installed.*pip install"):
        TensorBoard(tmp_path)


def test_the_sentence_names_methods_that_end_above_the_start():
    table = dd.compare([dd.VanillaASGD(lr=2.5), dd.DuDe(lr=0.05)], THREE, SPEEDS, updates=12)
    assert "vanilla[lr=2.5] ends above where it began" in sentence(table)
    assert "dude[lr=0.05] ends above" not in sentence(table)


@pytest.mark.parametrize("label", ["dude[lr=0.01]", "[bold]x[/bold]", "x[/]", "[link=http://x]y"])
def test_brackets_in_a_table_are_shown_as_they_are(label):
    console = Console(width=100, force_terminal=True, file=io.StringIO())
    print_rows(f"title {label}", [["head", f"h{label}"], [label, f"c{label}"]], console)
    shown = console.file.getvalue()
    assert all(part in shown for part in (f"title {label}", f"h{label}", f"c{label}"))


def test_the_sentence_says_what_a_ranking_does_not():
    problem, speeds = dd.Quadratic([[0.0], [6.0], [12.0]], noise=1.0), dd.FixedSpeeds([1.0, 2.0, 4.0])
    close = [dd.DuDe(0.05), dd.algorithms.SIAG(0.05)]
    far = [*dd.grid(dd.DuDe, lr=[0.05, 0.1]), dd.VanillaASGD(0.05)]
    alike = dd.compare([dd.DuDe(0.05), dd.DuDe(0.05, wait_for=2)], problem, speeds, updates=20, seeds=(0, 1))
    assert "separate" not in sentence(alike), "one method is no ranking of methods"
    assert "With one seed nothing is known of chance" in sentence(dd.compare(close, problem, speeds, updates=20))
    text = sentence(dd.compare(far, problem, speeds, updates=60, seeds=(0, 1, 2)))
    assert "separate" not in text and "beyond those that were tried for dude." in text
    doubles = {"one": dd.DuDe(0.05), "other": dd.DuDe(0.0501)}
    again = sentence(dd.compare(doubles, problem, speeds, updates=200, seeds=(0, 1, 2)))
    assert "The 3 seeds do not separate" in again and "95 % interval" in again


def test_an_interval_has_the_signs_that_it_has_in_the_table_and_says_which_is_less_which():
    problem, speeds = dd.Quadratic([[0.0], [6.0], [12.0]], noise=1.0), dd.FixedSpeeds([1.0, 2.0, 4.0])
    methods = {"first": dd.DuDe(0.0501), "second": dd.DuDe(0.05)}
    for order in (("first", "second"), ("second", "first")):
        sweep = dd.compare({name: methods[name] for name in order}, problem, speeds, updates=200, seeds=(0, 1, 2))
        heading = next(row for row in printed(print_comparison, sweep) if "less" in row)
        row = [row for row in printed(print_comparison, sweep) if row and row[0] == order[1]][-1]
        low, high = (row[row.index("to") + k] for k in (-1, 1))
        assert f"less {order[0]}'s" in " ".join(heading)
        assert f"(95 % interval of {order[1]}'s objective less {order[0]}'s: {low} to {high})" in sentence(sweep)


def test_metrics_of_ones_own_have_columns_and_what_nobody_has_has_none():
    evaluation = dd.Evaluation(metrics={"f1": lambda x: 0.625})
    sweep = dd.compare([dd.VanillaASGD(lr=0.05)], THREE, SPEEDS, updates=30, evaluation=evaluation)
    rows = printed(print_comparison, sweep)
    heading = next(row for row in rows if row[:1] == ["method"])
    assert "f1" in heading and "accuracy" not in heading and "audit" not in heading
    assert ["f1", "0.625"] in printed(print_run, sweep.runs[0])
    assert not any(row[:1] == ["accuracy"] for row in printed(print_run, sweep.runs[0]))
    labelled = dd.compare([dd.DuDe(lr=0.05)], dd.Digits(workers=2), dd.FixedSpeeds([1, 2]), updates=3)
    assert "accuracy" in next(row for row in printed(print_comparison, labelled) if row[:1] == ["method"])


def test_the_mean_of_updates_is_the_same_in_the_table_and_in_the_sentence():
    ends = [End(2.0, 1.0, 64, 1.0, ""), End(2.0, 1.0, 65, 1.0, "")]
    assert "1 after 64.5 updates" in ranking({"a": ends, "b": [End(2.0, 3.0, 12345, 1.0, "")] * 2})
    assert "3 after 12,345 updates" in ranking({"a": ends, "b": [End(2.0, 3.0, 12345, 1.0, "")] * 2})


def test_runs_that_were_lost_are_told_from_those_that_failed():
    good, lost = End(2.0, 1.0, 9, 1.0, ""), End(math.nan, math.nan, 0, math.nan, "damaged")
    text = ranking({"a": [good, good], "b": [good, lost], "c": [End(2.0, 1.0, 4, 1.0, "interrupted")] * 2})
    assert "b is not ranked (of 2 runs 1 damaged); c is not ranked (of 2 runs 2 interrupted)" in text
    assert "failed" not in text and counted(1, "run") == "1 run" and counted(2_000, "run") == "2,000 runs"

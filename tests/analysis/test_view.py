import dataclasses
import io
import logging
import math
import subprocess
import sys
import time

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dualdelay as dd
from dualdelay.analysis.loggers import TensorBoard
from dualdelay.analysis.reports import print_run
from dualdelay.engine.trace import Trace
from dualdelay.runs.progress import View, duration

TWO = dd.Quadratic([[0.0], [6.0]], noise=0.1)


def terminal(height=40):
    return Console(record=True, width=100, height=height, force_terminal=True, file=io.StringIO())


def signs(workers=3, seconds=6.2, **faults):
    kinds = ("crashed", "failed", "rejected", "left", "frozen", "joined", "late")
    values = {"time": seconds, "updates_per_second": 82.4, "loss": 1.8778, "tau_max": 20.0, "objective": 1.8294}
    values |= {"pooled_loss": 1.9, "accuracy": 0.4611, "gradient_norm": 0.3, "top5": math.nan}
    values |= {f"faults/{kind}": float(faults.get(kind, 0)) for kind in kinds}
    for worker in range(workers):
        values |= {f"worker/{worker}/rate": 10.0 * (worker + 1), f"worker/{worker}/delay": 7.0 - worker}
        values[f"worker/{worker}/crashes"] = float(worker == 2)
    return values


def lines(text):
    return [line.strip("│╭╮╰╯ \n") for line in text.splitlines()]


def test_the_view_shows_the_run_and_each_worker():
    console = terminal()
    with View("dude[lr=0.05]", updates=1000, until=60.0, after=0.0, console=console) as view:
        view(0, signs(seconds=0.0))
        time.sleep(0.2)
        console.export_text()
        view(500, signs(crashed=1, failed=2))
    shown = lines(console.export_text())
    assert "dude[lr=0.05]" in shown[0]
    assert shown[1].endswith("50%  500 of 1,000 updates  6 of 60 s  0 s left")
    assert shown[3].split() == ["updates/s", "loss", "objective", "accuracy", "top5", "tau_max", "faults"]
    assert shown[4].split() == ["82.4", "1.878", "1.829", "0.4611", "-", "20", "1", "crashed,", "2", "failed"]
    assert shown[6].split() == ["worker", "jobs/s", "delay", "crashes"]
    assert [line.split()[:2] + line.split()[3:] for line in shown[7:10]] == [
        ["0", "10.0", "7", "0"], ["1", "20.0", "6", "0"], ["2", "30.0", "5", "1"],
    ]  # fmt: skip
    assert [line.count("━") for line in shown[7:10]] == [8, 16, 24], "rates can be compared at a glance"


def test_rates_are_means_of_the_last_ten_seconds():
    console = terminal()
    with View("dude", updates=1000, after=0.0, console=console) as view:
        for second in range(12):
            console.export_text()
            view(second, signs() | {"worker/0/rate": float(second % 2)})  # it reports every other second
    assert "0      0.5" in console.export_text()


@pytest.mark.parametrize(("workers", "height", "shown"), [(50, 60, 20), (50, 24, 15), (20, 60, 20)])
def test_many_workers_do_not_fill_the_screen(workers, height, shown):
    console = terminal(height)
    with View("dude", until=60.0, after=0.0, console=console) as view:
        view(1, signs(workers))
        text = console.export_text()
    first = [line.split()[0] for line in lines(text) if line]
    assert [word for word in first if word.isdigit()] == [str(worker) for worker in range(shown)]
    assert (f"and {workers - shown} more" in text) == (workers > shown)
    assert len(text.splitlines()) <= height


def test_what_the_package_has_to_say_stands_above_the_view():
    console, logger = terminal(), logging.getLogger("dualdelay")
    with View("dude", updates=100, after=0.0, console=console) as view:
        view(1, signs())
        console.export_text()
        logger.warning("worker %d crashed: %s", 3, "its process died [signal 9]")
        shown = console.export_text()
    assert shown.splitlines()[0] == "warning: worker 3 crashed: its process died [signal 9]"
    assert "╭" in shown.splitlines()[1]
    assert not logger.handlers


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    with View("dude", updates=100, after=0.0, lines=0.0) as view:
        view(0, signs())
        time.sleep(0.01)
        view(40, signs(left=1))
        logging.getLogger("dualdelay").warning("worker 1 left")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("dude:   0%  0 updates  updates/s 82.4  loss 1.878  objective 1.829  accuracy 0.4611  top5 -")
    assert first.endswith("tau_max 20  faults none")
    assert second.endswith("faults 1 left  0 s left")
    assert third == "warning: worker 1 left"


def test_the_view_waits_and_its_lines_are_rare(capsys):
    console = terminal()
    for view in (View("dude", updates=100, console=console), View("dude", updates=100, after=0.0)):
        with view:
            dd.simulate(dd.DuDe(0.1), TWO, dd.FixedSpeeds([1, 2]), updates=100, watch=dd.Reporting(log=[view]))
    assert console.export_text() == capsys.readouterr().err == ""


def test_times_can_be_read():
    assert [duration(seconds) for seconds in (3.4, 119, 150, 7200, 9000)] == [
        "3 s",
        "119 s",
        "2 min",
        "2 h 0 min",
        "2 h 30 min",
    ]


def test_tensorboard_has_every_finite_number_at_its_version(tmp_path):
    with TensorBoard(tmp_path / "board") as board:
        board(3, {"loss": 2.5, "accuracy": math.nan, "worker/1/rate": 7.0})
        board(8, {"loss": 1.5, "accuracy": 0.5})
        found = EventAccumulator(str(tmp_path / "board")).Reload()
        assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 2.5), (8, 1.5)], "at once"
    assert [(event.step, event.value) for event in found.Scalars("accuracy")] == [(8, 0.5)]
    assert set(found.Tags()["scalars"]) == {"loss", "accuracy", "worker/1/rate"}


def test_tensorboard_takes_a_run_and_says_where_it_cannot_write(tmp_path):
    with TensorBoard(str(tmp_path / "board")) as board:
        run = dd.simulate(
            dd.DuDe(0.1),
            TWO,
            dd.FixedSpeeds([1, 2]),
            updates=20,
            evaluation=dd.Evaluation(every=4),
            watch=dd.Reporting(log=[board]),
        )
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in found.Scalars("objective")] == [0, 4, 8, 12, 16, 20]
    assert [event.value for event in found.Scalars("objective")] == pytest.approx(run.metrics.objective.tolist())
    assert [event.step for event in found.Scalars("tau_max")] == [20]
    assert "accuracy" not in found.Tags()["scalars"]
    (tmp_path / "file").write_text("")
    with pytest.raises(dd.BadInput, match="cannot be written for TensorBoard"):
        TensorBoard(tmp_path / "file")


def test_without_tensorboard_the_error_says_how_to_get_it():
    script = """
import sys
sys.modules["tensorboard"] = None  # any import of it fails
from dualdelay.analysis.loggers import TensorBoard
TensorBoard("board")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "BadInput: the tensorboard package is not installed" in done.stderr
    assert "pip install 'dualdelay[tensorboard]'" in done.stderr


def report(run):
    console = Console(record=True, width=120, file=io.StringIO())
    print_run(run, console)
    return lines(console.export_text())


def test_the_table_of_workers_shows_faults_only_where_there_were_some():
    changes = [dd.speeds.leave(1, 5.0), dd.speeds.leave(2, 6.0), dd.speeds.join(2, 8.0)]
    three = dd.Quadratic([[0.0], [6.0], [12.0]])
    run = dd.simulate(dd.DuDe(0.1), three, dd.FixedSpeeds([1, 2, 3]), updates=30)
    header = next(line for line in report(run) if line.startswith("worker "))
    assert header.endswith("max delay")
    left = dd.simulate(dd.DuDe(0.1), three, dd.SimulatedFleet(dd.FixedSpeeds([1, 2, 3]), changes=changes), updates=30)
    rows = [line.split() for line in report(left)]
    assert [row[-1] for row in rows[rows.index(["workers"]) + 2 :] if row and row[0].isdigit()] == [
        "present",
        "left",
        "present",
    ]

    def event(kind, worker):
        return {"kind": kind, "worker": worker, "row": 9, "time": 9.0, "draw": 0, "version": 9, "after": 9, "text": ""}

    events = [event("crashed", 0), event("crashed", 0), event("failed", 2), event("frozen", 2), event("thawed", 1)]
    faulty = dataclasses.replace(run, trace=Trace(run.trace.columns, events))
    shown = report(faulty)
    assert ["crashed", "2"] in [line.split() for line in shown]
    assert ["failed", "1"] in [line.split() for line in shown]
    assert next(line for line in shown if line.startswith("worker ")).split()[-3:] == ["crashed", "failed", "state"]
    ends = {line.split()[0]: line.split()[-3:] for line in shown if line[:1].isdigit()}
    assert ends == {"0": ["2", "0", "present"], "1": ["0", "0", "present"], "2": ["0", "1", "frozen"]}

"""What is shown while runs go on: a view of real workers, and bars or lines for simulations and sweeps."""

import io
import logging
import math
import re

import pytest
from rich.console import Console

import dualdelay as dd
from dualdelay.runs.progress import RunProgress, SweepProgress, WorkersView, duration

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
    with WorkersView("dude[lr=0.05]", updates=1000, until=60.0, after=0.0, console=console) as view:
        view(0, signs(seconds=0.0))
        console.export_text()
        view(500, signs(crashed=1, failed=2))
    shown = lines(console.export_text())
    assert "dude[lr=0.05]" in shown[0]
    assert re.search(r"50%  500 of 1,000 updates  6 of 60 s  \d+ s left$", shown[1])
    assert shown[3].split() == ["updates/s", "loss", "objective", "accuracy", "top5", "tau_max", "faults"]
    assert shown[4].split() == ["82.4", "1.878", "1.829", "0.4611", "-", "20", "1", "crashed,", "2", "failed"]
    assert shown[6].split() == ["worker", "jobs/s", "delay", "crashes"]
    assert [line.split()[:2] + line.split()[3:] for line in shown[7:10]] == [
        ["0", "10.0", "7", "0"], ["1", "20.0", "6", "0"], ["2", "30.0", "5", "1"],
    ]  # fmt: skip
    assert [line.count("━") for line in shown[7:10]] == [8, 16, 24], "rates can be compared at a glance"


def test_rates_are_means_of_the_last_ten_seconds():
    console = terminal()
    with WorkersView("dude", updates=1000, after=0.0, console=console) as view:
        for second in range(12):
            console.export_text()
            view(second, signs() | {"worker/0/rate": float(second % 2)})  # it reports every other second
    assert "0      0.5" in console.export_text()


@pytest.mark.parametrize(("workers", "height", "shown"), [(50, 60, 20), (50, 24, 15), (20, 60, 20)])
def test_many_workers_do_not_fill_the_screen(workers, height, shown):
    console = terminal(height)
    with WorkersView("dude", until=60.0, after=0.0, console=console) as view:
        view(1, signs(workers))
        text = console.export_text()
    first = [line.split()[0] for line in lines(text) if line]
    assert [word for word in first if word.isdigit()] == [str(worker) for worker in range(shown)]
    assert (f"and {workers - shown} more" in text) == (workers > shown)
    assert len(text.splitlines()) <= height


def test_what_the_package_has_to_say_stands_above_the_view():
    console, logger = terminal(), logging.getLogger("dualdelay")
    with WorkersView("dude", updates=100, after=0.0, console=console) as view:
        view(1, signs())
        console.export_text()
        logger.warning("worker %d crashed: %s", 3, "its process died [signal 9]")
        shown = console.export_text()
    assert shown.splitlines()[0] == "warning: worker 3 crashed: its process died [signal 9]"
    assert "╭" in shown.splitlines()[1]
    assert not logger.handlers


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    with WorkersView("dude", updates=100, after=0.0, lines=0.0) as view:
        view(0, signs())
        view(40, signs(left=1))
        logging.getLogger("dualdelay").warning("worker 1 left")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("dude:   0%  0 updates  updates/s 82.4  loss 1.878  objective 1.829  accuracy 0.4611  top5 -")
    assert first.endswith("tau_max 20  faults none")
    assert re.search(r"faults 1 left  \d+ s left$", second)
    assert third == "warning: worker 1 left"


def test_the_view_waits_and_its_lines_are_rare(capsys):
    console = terminal()
    for view in (WorkersView("dude", updates=100, console=console), WorkersView("dude", updates=100, after=0.0)):
        with view:
            dd.simulate(dd.DuDe(0.1), TWO, dd.FixedSpeeds([1, 2]), updates=100, watch=dd.Reporting(log=[view]))
    assert console.export_text() == capsys.readouterr().err == ""


def test_times_can_be_read():
    texts = {3.4: "3 s", 119: "119 s", 150: "2 min", 7200: "2 h 0 min", 9000: "2 h 30 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_progress_shows_share_rate_and_time_left(capsys):
    with RunProgress("dude", updates=40, after=0.0, lines=0.0) as watcher:
        dd.simulate(dd.DuDe(0.1), TWO, dd.FixedSpeeds([1, 2]), updates=40, watch=(watcher,))
    assert re.search(r"^dude:  50%  20 updates  [\d,]+ updates/s  \d+ s left$", capsys.readouterr().err, re.M)


def test_a_short_run_shows_no_progress(capsys):
    with RunProgress("dude", updates=5) as watcher:
        dd.simulate(dd.DuDe(0.1), TWO, dd.FixedSpeeds([1, 2]), updates=5, watch=(watcher,))
    assert capsys.readouterr().err == ""


def test_a_sweep_shows_how_much_is_done(capsys):
    with SweepProgress(after=0.0, lines=0.0) as report:
        report(0.0, "")
        report(0.25, "8 runs side by side")
        report(0.5, "8 runs side by side")
        report(0.75, "")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sweep:  25%  8 runs side by side"
    assert re.fullmatch(r"sweep:  50%  8 runs side by side  \d+ s left", second)

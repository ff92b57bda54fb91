"""What is shown while runs go on: a view of real workers, and bars or lines for simulations and sweeps."""

import io
import logging
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

import dualdelay as dd
from dualdelay.runs import progress
from dualdelay.runs.progress import RunProgress, SweepProgress, WorkersView, duration

TWO = dd.Quadratic([[0.0], [6.0]], noise=0.1)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Seconds that pass as a test says: ``tick`` of them each time that the clock is read."""
    clock = SimpleNamespace(now=0.0, tick=2.0**-20)

    def perf_counter():
        clock.now += clock.tick
        return clock.now

    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


def terminal(height=40):
    return Console(record=True, width=100, height=height, force_terminal=True, file=io.StringIO())


def values(workers=3, seconds=6.2, **faults):
    kinds = ("crashed", "failed", "rejected", "left", "frozen", "joined", "late")
    logged = {"time": seconds, "updates_per_second": 82.4, "loss": 1.8778, "tau_max": 20.0, "objective": 1.8294}
    logged |= {"pooled_loss": 1.9, "accuracy": 0.4611, "gradient_norm": 0.3, "top5": math.nan}
    logged |= {f"faults/{kind}": float(faults.get(kind, 0)) for kind in kinds}
    for worker in range(workers):
        logged |= {f"worker/{worker}/rate": 10.0 * (worker + 1), f"worker/{worker}/delay": 7.0 - worker}
        logged[f"worker/{worker}/crashes"] = float(worker == 2)
    return logged


def lines(text):
    return [line.strip("│╭╮╰╯ \n") for line in text.splitlines()]


def test_the_view_shows_the_run_and_each_worker():
    console = terminal()
    with WorkersView("dude[lr=0.05]", updates=1000, until=60.0, after=0.0, console=console) as view:
        view(0, values(seconds=0.0))
        console.export_text()
        view(500, values(crashed=1, failed=2))
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
            view(second, values() | {"worker/0/rate": float(second % 2)})  # it reports every other second
    assert "0      0.5" in console.export_text()


@pytest.mark.parametrize(("workers", "height", "shown"), [(50, 60, 20), (50, 24, 15), (20, 60, 20)])
def test_many_workers_do_not_fill_the_screen(workers, height, shown):
    console = terminal(height)
    with WorkersView("dude", until=60.0, after=0.0, console=console) as view:
        view(1, values(workers))
        text = console.export_text()
    first = [line.split()[0] for line in lines(text) if line]
    assert [word for word in first if word.isdigit()] == [str(worker) for worker in range(shown)]
    assert (f"and {workers - shown} more" in text) == (workers > shown)
    assert len(text.splitlines()) <= height


def test_warnings_of_the_package_stand_above_the_view():
    console, logger = terminal(), logging.getLogger("dualdelay")
    with WorkersView("dude", updates=100, after=0.0, console=console) as view:
        view(1, values())
        console.export_text()
        logger.warning("worker %d crashed: %s", 3, "its process died [signal 9]")
        shown = console.export_text()
    assert shown.splitlines()[0] == "warning: worker 3 crashed: its process died [signal 9]"
    assert "╭" in shown.splitlines()[1]
    assert not logger.handlers


def test_without_a_terminal_there_is_a_line_now_and_then(capsys):
    with WorkersView("dude", updates=100, after=0.0, lines=0.0) as view:
        view(0, values())
        view(40, values(left=1))
        logging.getLogger("dualdelay").warning("worker 1 left")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("dude:   0%  0 updates  updates/s 82.4  loss 1.878  objective 1.829  accuracy 0.4611  top5 -")
    assert first.endswith("tau_max 20  faults none")
    assert re.search(r"faults 1 left  \d+ s left$", second)
    assert third == "warning: worker 1 left"


@pytest.mark.parametrize("kind", [RunProgress, WorkersView])
@pytest.mark.parametrize(
    ("drawn", "moments"),
    [
        (True, {1.9: False, 2.1: True}),  # after two seconds
        (False, {2.1: False, 9.9: False, 10.1: True, 19.0: False, 20.2: True}),  # a line every ten seconds
    ],
    ids=["terminal", "lines"],
)
def test_nothing_is_shown_for_two_seconds_and_lines_are_rare(kind, drawn, moments, clock, capsys):
    console = terminal()
    with kind("dude", updates=100, console=console if drawn else None) as shown:
        for seconds, expected in moments.items():
            clock.now = seconds
            if kind is WorkersView:
                shown(1, values())
            else:
                shown(SimpleNamespace(version=1), SimpleNamespace(time=1.0))
            text = console.export_text() if drawn else capsys.readouterr().err
            assert ("dude" in text) == expected, seconds


def test_times_can_be_read():
    texts = {3.4: "3 s", 119: "119 s", 150: "2 min", 7200: "2 h 0 min", 9000: "2 h 30 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_progress_shows_share_rate_and_time_left(clock, capsys):
    """The clock is read twice for each arrival, and arrival k makes version k - 1, for the first update needs both workers.

    At version 20 the clock was read 42 times since the first arrival: 20 / 4.2 s are 5 updates/s, and half is left.
    """
    clock.tick = 0.1
    with RunProgress("dude", updates=40, after=0.0, lines=0.0) as watcher:
        reporting = dd.Reporting([watcher], progress=False)
        dd.simulate(dd.DuDe(0.1), TWO, dd.FixedSpeeds([1, 2]), updates=40, watch=reporting)
    lines = capsys.readouterr().err.splitlines()
    assert lines[20] == "dude:  50%  20 updates  5 updates/s  4 s left"
    assert len(lines) == 41 and lines[-1] == "dude: 100%  40 updates  5 updates/s  0 s left"


def test_a_sweep_shows_how_much_is_done(capsys):
    with SweepProgress(after=0.0, lines=0.0) as report:
        report(0.0, "")
        report(0.25, "8 runs side by side")
        report(0.5, "8 runs side by side")
        report(0.75, "")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sweep:  25%  8 runs side by side"
    assert re.fullmatch(r"sweep:  50%  8 runs side by side  \d+ s left", second)


@pytest.mark.parametrize("label", ["dude[lr=0.01]", "[bold]x[/bold]", "x[/]", "[link=http://x]y"])
def test_brackets_are_shown_as_they_are(label, capsys):
    console = terminal()
    with RunProgress(label, after=0.0, console=console) as watcher:
        watcher.show(f"text [b]{label}[/b]", 0.5)
    shown = console.export_text()
    assert label in shown and f"[b]{label}[/b]" in shown
    with SweepProgress(label, after=0.0, lines=0.0) as report:
        report(0.5, "[x]")
    assert capsys.readouterr().err.startswith(f"{label}:  50%  [x]")

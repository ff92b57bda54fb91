"""The page about runs as a file: what it says, that it is small, and that no text of a run becomes a part of it."""

import base64
import dataclasses
import hashlib
import json
import re
import shlex
import shutil
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import dualdelay as dd
from dualdelay.analysis.report import for_script, write_report
from dualdelay.analysis.report.content import _settings
from dualdelay.analysis.report.reproduce import command
from dualdelay.cli import main
from dualdelay.engine.delays import used_in
from dualdelay.engine.table import Table
from dualdelay.engine.trace import Trace
from dualdelay.storage.folder import Folder

CENTRES = [[0.0], [6.0], [12.0]]
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 4.0])
HOSTILE = "</script><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"'&amp;<b>%{x}$y$ {{7*7}}"
KINDS = {"f8": "<f8", "f4": "<f4", "u1": "u1", "u2": "<u2", "u4": "<u4"}


class Read(HTMLParser):
    """A page as a browser without scripts reads it: its texts, its elements, its data."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.texts, self.inside, self.data = [], [], [], None
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.inside.append(dict(attributes).get("id", tag))

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.texts.append(data)
        elif self.inside[-1] == "data":
            self.data = json.loads(data)


def numbers(column):
    return np.frombuffer(base64.b64decode(column["b"]), KINDS[column["t"]])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods with two steps each and two seeds, in a folder."""
    folder = tmp_path_factory.mktemp("runs") / "compare"
    methods = [kind(lr=lr) for kind in (dd.DuDe, dd.VanillaASGD) for lr in (0.02, 0.1)]
    dd.compare(methods, dd.Quadratic(CENTRES, noise=0.5), SPEEDS, seeds=[0, 1], updates=40, folder=folder)
    return folder


def test_the_page_of_a_run_has_its_curves_jobs_settings_and_how_to_repeat_it(compared, tmp_path):
    run = dd.load(compared / "dude-lr=0.02-seed1")
    page = Read(run.report(tmp_path / "run.html"))
    (curves,) = page.data["runs"]
    assert numbers(curves["columns"]["time"]).tolist() == run.metrics.time.tolist()
    assert numbers(curves["columns"]["objective"]) == pytest.approx(run.metrics.objective, rel=1e-6)
    (inside,) = page.data["inside"]
    for name in ("worker", "draw", "version", "after", "time"):
        assert numbers(inside["jobs"][name]).tolist() == run.trace[name].tolist(), name
    delay = used_in(run.trace) - run.trace.version
    assert numbers(inside["jobs"]["delay"]).tolist() == delay.tolist()
    assert sorted(numbers(inside["delays"]["mean"]).tolist()) == sorted(delay.tolist()), "each arrival is a point"
    assert numbers(inside["shares"]).tolist() == np.bincount(run.trace.worker).tolist()
    assert numbers(inside["losses"]["columns"]["loss"]).tolist() == pytest.approx(
        [value for worker in range(3) for value in run.workers.loss[run.workers.worker == worker]], rel=1e-6
    )
    record = Folder(run.folder).record()
    assert record.fingerprint in page.text and record.environment["torch"] in page.text
    assert f"dualdelay replay {run.folder}" in page.text and "No faults and no other events" in page.text
    assert "dude[lr=0.02], seed 1" in page.text


def test_the_page_of_a_comparison_flags_best_steps_at_an_edge_and_pairs_seeds(compared, tmp_path):
    sweep = dd.load(compared)
    page = Read(sweep.report(tmp_path / "compare.html"))
    assert len(page.data["runs"]) == 8 and [look["text"] for look in page.data["labels"]] == list(
        dict.fromkeys(sweep.algorithm.tolist())
    )
    ends = {run["label"]: [] for run in page.data["runs"]}
    for run in page.data["runs"]:
        ends[run["label"]].append(numbers(run["columns"]["objective"])[-1])
    means = {page.data["labels"][label]["text"]: np.mean(values) for label, values in ends.items()}
    for method in ("dude", "vanilla"):
        steps = {lr: means[f"{method}[lr={lr}]"] for lr in (0.02, 0.1)}
        best = min(steps, key=steps.get)
        edge = "lowest" if best == 0.02 else "highest"
        assert re.search(rf"{method} {best} {steps[best]:.4g} [\d.e-]+ 2 0 {edge}", page.text), page.text[:3000]
        (curve,) = (curve for curve in page.data["steps"]["0"]["curves"] if curve["text"] == method)
        assert [point[:2] for point in curve["points"]] == [[lr, pytest.approx(mean)] for lr, mean in steps.items()]
    assert "against" in page.text and page.text.count("dualdelay replay") == 8


def test_curves_of_one_method_can_be_told_apart_by_more_than_their_colour(compared, tmp_path):
    page = Read(dd.load(compared).report(tmp_path / "compare.html"))
    looks = [(look["dash"], look["mark"]) for look in page.data["labels"]]
    assert len(set(looks)) == len(looks) == 4
    assert len({look["colour"] for look in page.data["labels"]}) == 4


class Green(dd.VanillaASGD):
    colour, line, marker = "#5B8C5A", "5 1", "s"


class Odd(dd.VanillaASGD):
    colour, line, marker = "green", "dashed", "?"


def test_a_method_of_ones_own_has_the_look_that_it_was_given_if_that_can_be_drawn(tmp_path):
    sweep = dd.compare([Green(0.1), Odd(0.1)], dd.Quadratic(CENTRES), SPEEDS, updates=5)
    green, odd = Read(sweep.report(tmp_path / "page.html")).data["labels"]
    assert (green["colour"], green["dash"], green["mark"]) == ("#5B8C5A", "10px,2px", "square")
    assert (odd["colour"], odd["dash"], odd["mark"]) == ("#661100", "solid", "circle")


def test_faults_stand_in_the_page_by_time_and_worker(tmp_path):
    run = dd.simulate(dd.DuDe(0.1), dd.Quadratic(CENTRES), SPEEDS, updates=30)
    event = {"row": 9, "draw": 0, "version": 9, "after": 9}
    events = [
        {"kind": "crashed", "worker": 2, "time": 3.5, "text": "Traceback\n  line\nOSError: gone", **event},
        {"kind": "wake", "worker": -1, "time": 3.75, "text": "", **event},
        {"kind": "left", "worker": 2, "time": 4.0, "text": "2 crashes in a row", **event},
    ]
    page = Read(dataclasses.replace(run, trace=Trace(run.trace.columns, events)).report(tmp_path / "page.html"))
    assert "3.5 2 crashed OSError: gone" in page.text and "4 2 left 2 crashes in a row" in page.text
    assert "1 crashed, 1 left" in page.text and "wake" not in page.text
    assert [event["kind"] for event in page.data["inside"][0]["events"]] == ["crashed", "left"]


def test_a_table_of_ones_own_is_drawn_by_its_texts_and_seeds(tmp_path):
    rows = [
        {"optimiser": name, "seed": seed, "time": float(t), "f1": t + seed + len(name), "width": 8 * len(name)}
        for name in ("a", "bb")
        for seed in (0, 1)
        for t in range(4)
    ]
    page = Read(Table.of(rows, rows[0]).report(tmp_path / "own.html"))
    assert [(run["label"], run["seed"]) for run in page.data["runs"]] == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    assert [look["text"] for look in page.data["labels"]] == ["a", "bb"]
    assert page.data["metrics"] == ["f1"] and page.data["axes"] == ["time"], "a width that stays is a setting"
    assert numbers(page.data["runs"][3]["columns"]["f1"]).tolist() == [3.0, 4.0, 5.0, 6.0]


def test_a_table_without_times_is_shown_as_it_is(tmp_path):
    page = Read(Table({"name": np.array(["x", "y"]), "score": np.array([1.5, 2.5])}).report(tmp_path / "own.html"))
    assert "x 1.5" in page.text and "y 2.5" in page.text and "runs" not in page.data


def test_no_text_of_a_run_becomes_a_part_of_the_page(tmp_path):
    run = dd.simulate(dd.DuDe(0.1), dd.Quadratic(CENTRES), SPEEDS, updates=20)
    event = {"row": 3, "draw": 0, "version": 3, "after": 3, "time": 3.0, "worker": 1, "kind": "failed", "text": HOSTILE}
    hostile = dataclasses.replace(run, notes=(HOSTILE,), trace=Trace(run.trace.columns, [event]))
    table = dd.compare({HOSTILE: dd.DuDe(0.1), "plain": dd.DuDe(0.2)}, dd.Quadratic(CENTRES), SPEEDS, updates=20)
    table.runs[0], table.notes = hostile, (HOSTILE,)
    table.failed[1] = HOSTILE
    path = write_report([table], tmp_path / "page.html", title=HOSTILE)
    page = Read(path)
    assert not any(tag in ("img", "b") or "onerror" in attributes for tag, attributes in page.elements)
    assert sum(tag == "script" for tag, _ in page.elements) == 4
    assert page.data["labels"][0]["text"] == HOSTILE and page.text.count("{{7*7}}") >= 5


def test_data_inside_a_script_cannot_end_it():
    text = for_script({"a": "</script><!--<script>&\u2028"})
    assert not set("<>&") & set(text) and json.loads(text) == {"a": "</script><!--<script>&\u2028"}
    with pytest.raises(ValueError, match="JSON"):
        for_script({"a": float("nan")})


def test_only_the_scripts_of_the_page_may_run_and_nothing_may_be_fetched(compared, tmp_path):
    text = dd.load(compared).report(tmp_path / "page.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_the_plotting_library_is_the_one_that_is_written_down():
    folder = resources.files("dualdelay.analysis.report")
    library, about = folder.joinpath("plotly-basic.min.js").read_bytes(), folder.joinpath("plotly.md").read_text()
    assert hashlib.sha256(library).hexdigest() in about
    assert f"version {re.search(rb'v([0-9.]+)', library)[1].decode()}," in about


def test_a_page_of_thousands_of_runs_stays_below_five_megabytes(tmp_path):
    runs, rows = 2_000, 60
    columns = {
        "algorithm": np.repeat([f"m{k % 40}" for k in range(runs)], rows),
        "seed": np.repeat(np.arange(runs) // 40, rows),
    }
    columns |= {"time": np.tile(np.arange(rows) / 7, runs), "version": np.tile(np.arange(rows), runs)}
    columns |= {name: np.random.default_rng(0).normal(size=runs * rows) for name in ("objective", "accuracy", "f1")}
    path = Table(columns).report(tmp_path / "page.html")
    assert path.stat().st_size < 5e6
    data = Read(path).data
    assert "Of 60 evaluations of a run, 20 are drawn." in data["thinned"]
    times = numbers(data["runs"][7]["columns"]["time"])
    assert len(times) == 20 and (times[0], times[-1]) == (0.0, 59 / 7)


def test_a_long_run_shows_its_first_jobs_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("dualdelay.analysis.report.content._JOBS", 100)
    monkeypatch.setattr("dualdelay.analysis.report.content._DELAYS", 60)
    run = dd.simulate(dd.VanillaASGD(0.01), dd.Quadratic(CENTRES), SPEEDS, updates=400)
    (inside,) = Read(run.report(tmp_path / "page.html")).data["inside"]
    assert len(numbers(inside["jobs"]["time"])) == 100 and inside["arrivals"] == 400
    counts, means = numbers(inside["delays"]["count"]), numbers(inside["delays"]["mean"])
    assert len(counts) == 60 and counts.sum() == 400
    assert (counts * means).sum() / 400 == pytest.approx(run.delays.arrival_avg, rel=1e-6)


def test_the_command_on_the_page_starts_the_same_run(compared, tmp_path):
    folder = compared / "vanilla-lr=0.1-seed1"
    line, unsaid = command(Folder(folder).record())
    assert not unsaid
    main([*shlex.split(line)[1:], "--folder", str(tmp_path / "again")])
    assert Folder(tmp_path / "again").record().key == Folder(folder).record().key
    assert (tmp_path / "again" / "trace.parquet").read_bytes() == (folder / "trace.parquet").read_bytes()


def test_a_command_names_what_it_cannot_say(tmp_path):
    class Own(dd.Quadratic):
        pass

    evaluation = dd.Evaluation(every=7, metrics={"first": lambda x: float(x[0])})
    dd.simulate(dd.DuDe(0.1), Own(CENTRES), SPEEDS, updates=20, folder=tmp_path / "run", evaluation=evaluation)
    line, unsaid = command(Folder(tmp_path / "run").record())
    assert unsaid == ["the problem, which is your own", "metrics of your own: first"] and "--evaluate-every 7" in line
    assert (
        f"dd.replay('{tmp_path / 'run'}', problem=...)" in Read(dd.load(tmp_path / "run").report(tmp_path / "p.html")).text
    )


def test_runs_of_several_folders_with_one_name_are_told_apart(compared, tmp_path):
    names = ["one/dude-lr=0.02-seed0", "two/dude-lr=0.02-seed0"]
    method, problem = dd.DuDe(lr=0.02), dd.Quadratic(CENTRES)
    runs = [dd.simulate(method, problem, SPEEDS, updates=20, folder=tmp_path / name) for name in names]
    page = Read(write_report(runs, tmp_path / "page.html"))
    assert [look["text"] for look in page.data["labels"]] == ["dude[lr=0.02] (one)", "dude[lr=0.02] (two)"]
    again = [dd.simulate(method, problem, SPEEDS, updates=20, folder=tmp_path / name) for name in ("one/mine", "two/mine")]
    page = Read(write_report(again, tmp_path / "page.html"))
    assert [look["text"] for look in page.data["labels"]] == ["dude[lr=0.02] (one/mine)", "dude[lr=0.02] (two/mine)"]
    again = [dataclasses.replace(run, folder=None) for run in again]
    page = Read(write_report(again, tmp_path / "page.html"))
    assert [look["text"] for look in page.data["labels"]] == ["dude[lr=0.02] (number 1)", "dude[lr=0.02] (number 2)"]


# --- several things on a page ---


def two_methods(folder, noise=0.5, seeds=(0, 1), **options):
    methods = [dd.DuDe(lr=0.1), dd.VanillaASGD(lr=0.1)]
    options = {"updates": 20, "evaluation": dd.Evaluation(every=5), **options}
    return dd.compare(methods, dd.Quadratic(CENTRES, noise=noise), SPEEDS, seeds=seeds, folder=folder, **options)


def reported(capsys, *words, code=0):
    """The page of a command, and what was said."""
    try:
        main(["report", *map(str, words), "--out", "page.html"])
    except SystemExit as ended:
        assert ended.code == code
    else:
        assert code == 0
    return Read(Path("page.html")), "".join(capsys.readouterr())


@pytest.mark.parametrize("seeds", [(0, 1), (5, 6)])
def test_two_comparisons_of_the_same_methods_are_ranked_problem_by_problem(seeds, inside, capsys):
    two_methods("a", 0.5)
    two_methods("b", 2.0, seeds)
    page, _ = reported(capsys, "a", "b")
    problems = ["quadratic[noise=0.5]", "quadratic[noise=2.0]"]
    assert page.data["settings"] == problems
    assert [look["text"] for look in page.data["labels"]] == ["dude[lr=0.1]", "vanilla[lr=0.1]"]
    runs = Counter((run["setting"], run["label"]) for run in page.data["runs"])
    assert runs == {(setting, label): 2 for setting in (0, 1) for label in (0, 1)}, "four curves of two seeds"
    assert "curves 4 problems and speeds 2" in page.text
    for problem in problems:
        assert re.search(rf"On {re.escape(problem)}: at the end .{{,60}} has the lowest objective", page.text)
        assert re.search(
            rf"On {re.escape(problem)}: objective at the end of seeds . and ., against \w+\[lr=0.1\], which", page.text
        )
    assert page.text.count("has the lowest objective") == 2


def test_best_settings_are_chosen_for_each_problem(inside, capsys):
    for folder, noise in (("a", 0.5), ("b", 2.0)):
        dd.compare(dd.grid(dd.DuDe, lr=[0.05, 0.1]), dd.Quadratic(CENTRES, noise=noise), SPEEDS, updates=20, folder=folder)
    page, _ = reported(capsys, "a", "b")
    assert page.text.count("The step with the best objective at the end") == 2
    assert {key: steps["setting"] for key, steps in page.data["steps"].items()} == {
        "0": "quadratic[noise=0.5]",
        "1": "quadratic[noise=2.0]",
    }


def test_a_run_beside_a_comparison_with_the_same_method_is_told_apart_and_ranked(inside, capsys):
    two_methods("runs/grid", seeds=(0, 1, 2))
    problem, evaluation = dd.Quadratic(CENTRES, noise=0.5), dd.Evaluation(every=5)
    dd.simulate(dd.DuDe(lr=0.1), problem, SPEEDS, updates=200, folder="runs/a", evaluation=evaluation)
    page, _ = reported(capsys, "runs/a", "runs/grid")
    runs = Counter(page.data["labels"][run["label"]]["text"] for run in page.data["runs"])
    assert runs == {"dude[lr=0.1] (a)": 1, "dude[lr=0.1] (grid)": 3, "vanilla[lr=0.1]": 3}
    assert "dude[lr=0.1] (a) has the lowest objective" in page.text
    said = "(a) is not compared with the others: it has the results of seed 0, they have those of seeds 0, 1 and 2"
    assert said in page.text and "{'" not in page.text
    deeper, _ = reported(capsys, "runs")
    assert [look["text"] for look in deeper.data["labels"]] == [*runs] and len(deeper.data["runs"]) == 7


def test_a_run_that_is_named_twice_is_on_the_page_once(inside, capsys):
    two_methods("a")
    for words in (("a", "a"), ("a", inside / "a", "a/dude-lr=0.1-seed0"), (".", "a")):
        page, _ = reported(capsys, *words)
        assert len(page.data["runs"]) == 4 and "2 methods, 4 runs" in page.text
    loaded = dd.load("a")
    page = Read(write_report([loaded, loaded.runs[0]], "page.html"))
    assert len(page.data["runs"]) == 4


def test_damaged_files_are_not_called_failures_and_nobody_who_lost_a_run_is_ranked(inside, capsys):
    methods = [dd.DuDe(lr=0.1), dd.VanillaASGD(lr=0.1), dd.SyncSGD(lr=0.1), dd.VanillaASGD(lr=0.05)]
    problem = dd.Quadratic(CENTRES, noise=0.5)
    dd.compare(methods, problem, SPEEDS, updates=20, seeds=[0, 1], folder="a")
    Path("a/dude-lr=0.1-seed0/metrics.parquet").write_bytes(b"no")
    Path("a/vanilla-lr=0.1-seed1/config.json").unlink()
    Path("a/sync-lr=0.1-seed1/trace.parquet").unlink()
    page, said = reported(capsys, "a", code=2)
    assert "4 methods" not in page.text and "3 methods, 8 runs, 3 of them without an end" in page.text
    assert "vanilla[lr=0.05] has the lowest objective" in page.text and "failed or diverged" not in page.text
    for label in ("dude[lr=0.1]", "vanilla[lr=0.1]", "sync[lr=0.1]"):
        assert f"{label} is not ranked (of 2 runs 1 damaged)" in page.text
    assert (
        "dude[lr=0.1] is not compared with the others: it has the results of seed 1, they have those of seed 0" in page.text
    )
    assert (
        "in the mean over seed 0." in page.text and "best settings and differences are those of seed 0, which" in page.text
    )
    assert said.count("\ndamaged: a/") + said.startswith("damaged: a/") == 3 and "3 of the 8 runs are damaged" in said


def test_runs_without_an_end_are_drawn_as_far_as_they_came_and_do_not_shorten_the_others(inside, capsys):
    def stop(state, a):
        if state.version == 15:
            raise KeyboardInterrupt

    two_methods("a", seeds=(0,))
    problem = dd.Quadratic(CENTRES, noise=0.5)
    options = {"updates": 20, "evaluation": dd.Evaluation(every=5), "watch": [stop]}
    with pytest.raises(KeyboardInterrupt):
        dd.simulate(dd.DuDe(0.1), problem, SPEEDS, seed=1, folder="a/dude-lr=0.1-seed1", **options)
    shutil.rmtree("a/vanilla-lr=0.1-seed0")
    page, said = reported(capsys, "a")
    assert (
        "1 method, 2 runs, 1 of them without an end" in page.text and "1 of 2 runs has no end: 1 interrupted." in page.text
    )
    texts = [page.data["labels"][run["label"]]["text"] for run in page.data["runs"]]
    ends = [numbers(run["columns"]["version"])[-1] for run in page.data["runs"]]
    assert dict(zip(texts, ends, strict=True)) == {"dude[lr=0.1]": 20, "dude[lr=0.1] (interrupted)": 15}
    assert [look["ended"] for look in page.data["labels"]] == [False, False], (
        "no curve of a label that lost a run is ranked"
    )
    assert "without an end: a/dude-lr=0.1-seed1 (interrupted)" in said and page.data["settings"] == [""]
    shutil.rmtree("a/dude-lr=0.1-seed0")
    page, _ = reported(capsys, "a")
    assert "dude[lr=0.1] (interrupted)" in page.text, "also if none came to its end"


def test_a_metric_that_only_some_runs_have_is_shown_and_counts_of_workers_are_not(inside, capsys):
    two_methods("a", evaluation=dd.Evaluation(every=5, metrics={"f1": lambda x: 0.625}))
    two = dd.FixedSpeeds([1.0, 2.0])
    dd.simulate(dd.DuDe(0.1), dd.Quadratic(CENTRES[:2]), two, updates=20, folder="b")
    page, _ = reported(capsys, "a", "b")
    assert "f1" in page.data["metrics"] and "answered" not in page.data["metrics"]
    assert [("f1" in run["columns"]) for run in page.data["runs"]] == [True] * 4 + [False]
    assert "0.625 ± 0" in page.text


def test_what_is_no_setting_of_a_run_is_told_from_none(inside, capsys):
    methods = [dd.DuDe(lr=0.1), dd.DuDe(lr=0.2), dd.VanillaASGD(lr=0.1), dd.SyncSGD(lr=0.1)]
    dd.compare(methods, dd.Quadratic(CENTRES, noise=0.5), SPEEDS, seeds=[0, 1], updates=5, folder="a")
    page, _ = reported(capsys, "a")
    assert re.search(r"algorithm\.compress none \(not a setting of \d other runs\)", page.text)
    assert not re.search(r"values: [^;]*none, none", page.text)
    shown = _settings([{"commit": "", "torch": "2", "table": None}, {"commit": "", "torch": "2"}], [])
    assert [*shown.rows] == [["torch", "2"], ["table", "none (not a setting of 1 other run)"]]


def test_a_page_without_pictures_does_not_explain_them(tmp_path, compared):
    path = Table({"name": np.array(["x"]), "score": np.array([1.5])}).report(tmp_path / "own.html")
    page = Read(path)
    assert "arrows go" not in page.text and "1 row with neither time nor version." in page.text
    assert "arrows go" in Read(dd.load(compared).report(tmp_path / "page.html")).text


# --- folders of runs ---


def test_a_folder_of_runs_is_loaded_as_the_sweep_that_it_was(compared):
    sweep = dd.load(compared)
    assert isinstance(sweep, dd.Sweep) and len(sweep.runs) == 8 and not sweep.failed
    assert set(sweep.method.tolist()) == {"dude", "vanilla"} and set(sweep.lr.tolist()) == {0.02, 0.1}
    assert "problem" not in sweep, "it follows the seed"


def test_labels_that_a_comparison_was_given_are_loaded(tmp_path):
    methods = {"mine, slow": dd.DuDe(0.01), "mine": dd.DuDe(0.1)}
    dd.compare(methods, dd.Quadratic(CENTRES), SPEEDS, updates=10, folder=tmp_path / "runs")
    sweep = dd.load(tmp_path / "runs")
    assert dict(zip(sweep.algorithm.tolist(), sweep.lr.tolist(), strict=True)) == {"mine, slow": 0.01, "mine": 0.1}


def test_damaged_and_unfinished_runs_are_named_and_do_not_hinder_the_others(tmp_path, capsys):
    folder, problem = tmp_path / "runs", dd.Quadratic(CENTRES)
    dd.compare([dd.DuDe(lr) for lr in (0.01, 0.02, 0.03, 0.04)], problem, SPEEDS, updates=10, folder=folder)
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    (paths[0] / "config.json").write_text("{}")
    (paths[1] / "result.json").unlink()
    (paths[2] / "start.safetensors").write_bytes(b"no")
    sweep = dd.load(folder)
    assert [run is not None for run in sweep.runs] == [False, False, True]
    assert "interrupted at version 10; go on with: dualdelay resume" in sweep.failed[0] and "damaged" in sweep.failed[1]
    assert len(sweep.notes) == 1 and f"{paths[0].name} is left out" in sweep.notes[0]
    with pytest.raises(SystemExit) as ended:  # the page is written, and the command ends as show does
        main(["report", str(folder), "--out", str(tmp_path / "page.html"), "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert ended.value.code == 2 and told["bytes"] == (tmp_path / "page.html").stat().st_size
    assert [*told["damaged"]] == [str(paths[0]), str(paths[2])]
    assert all(f"damaged: {path}: " in err for path in (paths[0], paths[2])) and "2 of the 4 runs are damaged" in err
    assert f"without an end: {paths[1]} (interrupted)" in err
    page = Read(tmp_path / "page.html")
    assert "dude[lr=0.02] (interrupted), seed 0 has no end: interrupted at version 10" in page.text
    assert "is left out" in page.text and "1 method, 4 runs, 3 of them without an end" in page.text
    assert "3 of 4 runs have no end: 1 interrupted, 2 damaged." in page.text
    assert {look["text"]: look["ended"] for look in page.data["labels"]} == {
        "dude[lr=0.02] (interrupted)": False,
        "dude[lr=0.04]": True,
    }


def test_a_folder_of_runs_on_several_problems_names_them(tmp_path):
    grid = {
        "algorithm": [dd.DuDe(0.1)],
        "problem": [dd.Quadratic(CENTRES, noise=noise) for noise in (0.25, 0.5)],
        "seed": [0, 1],
    }
    dd.sweep(grid, None, SPEEDS, updates=10, folder=tmp_path / "runs")
    sweep = dd.load(tmp_path / "runs")
    names = {"quadratic[noise=0.25]", "quadratic[noise=0.5]"}
    assert set(sweep.problem.tolist()) == names and "speeds" not in sweep
    assert set(Read(sweep.report(tmp_path / "page.html")).data["settings"]) == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere is not the folder of a run: there is no such folder"),
        (("empty",), "empty is not the folder of a run, and holds none"),
        (("run", "--out", "page.txt"), "'page.txt' cannot be the page; expected the name of a file that ends in .html"),
        (("run", "--out", "file/page.html"), "cannot be made (File exists)"),
        (("run", "--out", "folder.html"), "'folder.html' cannot be the page"),
        ((), "no folder is given"),
    ],
)
def test_the_command_says_what_is_wrong(words, said, inside, capsys):
    (inside / "empty").mkdir()
    (inside / "folder.html").mkdir()
    (inside / "file").write_text("")
    dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0]]), dd.FixedSpeeds([1.0]), updates=2, folder="run")
    with pytest.raises(SystemExit) as stopped:
        main(["report", *words])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_run_without_an_evaluation_is_named_or_refused(compared, tmp_path):
    run, nothing = dd.load(compared / "dude-lr=0.02-seed0"), dd.load(compared / "dude-lr=0.1-seed0")
    nothing = dataclasses.replace(
        nothing, metrics=Table({name: column[:0] for name, column in nothing.metrics.columns.items()})
    )
    page = Read(write_report([run, nothing], tmp_path / "page.html"))
    said = "dude[lr=0.1] (not evaluated), seed 0 has no result: nothing was evaluated yet"
    assert said in page.text and len(page.data["runs"]) == 1
    with pytest.raises(
        dd.BadInput,
        match=r"nothing to report: dude\[lr=0.1\] \(not evaluated\), seed 0 has no result, nothing was evaluated",
    ):
        nothing.report(tmp_path / "page.html")


def test_the_page_of_many_workers_draws_some_and_says_which(tmp_path):
    n = 600
    problem, speeds = dd.Quadratic([[float(k)] for k in range(n)]), dd.FixedSpeeds([1.0 + k / n for k in range(n)])
    run = dd.simulate(dd.VanillaASGD(0.001), problem, speeds, updates=1300)
    path = run.report(tmp_path / "page.html")
    (inside,) = Read(path).data["inside"]
    assert len(numbers(inside["shares"])) == 500 and inside["workers"] == 600 and inside["active"] == 600
    assert len(inside["chosen"]) == 20 and numbers(inside["jobs"]["worker"]).max() == 39
    assert path.stat().st_size < 2e6


def test_what_cannot_be_reported_is_refused(tmp_path):
    with pytest.raises(dd.BadInput, match="no rows"):
        Table({"time": np.zeros(0)}).report(tmp_path / "page.html")
    with pytest.raises(dd.BadInput, match="5 cannot be reported; expected a run"):
        write_report([5], tmp_path / "page.html")
    with pytest.raises(dd.BadInput, match="no metric in common"):
        Table({"time": np.zeros(2), "name": np.array(["a", "b"])}).report(tmp_path / "page.html")
    many = Table({"time": np.zeros(10_001), "seed": np.arange(10_001), "f": np.zeros(10_001)})
    with pytest.raises(dd.BadInput, match="10,001 runs; a page holds 10,000 at most"):
        many.report(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())

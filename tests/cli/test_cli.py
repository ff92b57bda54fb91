"""The commands: what they compute, print and write, their exit codes, and grids written with bars."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.cli import commands, main
from dualdelay.runs.names import alternatives, label, parse
from dualdelay.storage.files import load_table, save_table
from dualdelay.storage.folder import Folder
from helpers import drift, operations

QUADRATIC = "quadratic[centers=[[0.0],[6.0],[12.0]],noise=0.1]"
FAST = ("--problem", QUADRATIC, "--speeds", "fixed[times=[1,2,4]]")
TRAIN = ("train", "dude[lr=0.1]", *FAST, "--updates", "3")
REAL = ("train", "dude[lr=0.1]", "--problem", QUADRATIC, "--updates", "3", "--fleet")
DIGITS = ("train", "dude[lr=0.05]", "--problem", "digits[workers=2]", "--updates", "4")


def call(*arguments):
    """The exit code of a command."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    return 0


def simulated(updates, **options):
    """The run of the commands below with dude[lr=0.05], in Python."""
    method, speeds = options.pop("method", dd.DuDe(0.05)), dd.FixedSpeeds([1, 2, 4])
    return dd.simulate(method, parse("problem", QUADRATIC), speeds, updates=updates, **options)


# train, resume and replay


def test_train_resume_and_replay_work_from_the_shell(tmp_path, capsys):
    folder = tmp_path / "run"
    assert call("train", "dude[lr=0.05,wait_for=2]", *FAST, "--updates", 40, "--folder", folder, "--json") == 0
    shown = capsys.readouterr()
    trained = json.loads(shown.out)  # with --json standard output is one line
    assert trained["updates"] == 40
    assert trained["algorithm"] == "dude[lr=0.05,wait_for=2]"
    assert trained["accuracy"] is None, "what is not a number is null in JSON"
    for word in ("objective", "tau_max", "mean delay", "figure.png", f"folder: {folder}"):
        assert word in shown.err
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")

    assert call("resume", folder, "--updates", 60, "--json") == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 60
    uninterrupted = simulated(60, method=dd.DuDe(0.05, wait_for=2), evaluation=dd.Evaluation(every=60))
    assert np.array_equal(dd.replay(folder).x, uninterrupted.x)

    assert call("resume", folder, "--fleet", "ray[shards=2]", "--address", "local") == 2
    assert "--fleet and --address are given; expected all in one" in capsys.readouterr().err
    assert call("resume", folder, "--fleet", "ray[shards=2]") == 2
    assert "the run was started with simulated workers" in capsys.readouterr().err

    assert call("replay", folder, "--json") == 0
    counts = {"arrivals": len(uninterrupted.trace), "updates": 60, "same": True}
    assert json.loads(capsys.readouterr().out) == {"command": "replay", "folder": str(folder), **counts}


def test_a_run_without_a_folder_gets_one_of_its_own(inside, capsys):
    for _ in range(2):
        assert call("train", "sync[lr=0.1]", *FAST, "--updates", 3) == 0
    assert sorted(path.name for path in (inside / "runs").iterdir()) == ["sync-lr=0.1-seed0", "sync-lr=0.1-seed0-2"]


def test_the_server_steps_with_the_named_optimizer_and_schedule(tmp_path, capsys):
    optimizer, schedule = "Adam[betas=(0.9,0.99)]", "StepLR[step_size=10]"
    flags = (*FAST, "--optimizer", optimizer, "--schedule", schedule, "--updates", 40)
    assert call("train", "dude[lr=0.05]", *flags, "--folder", tmp_path / "one") == 0
    assert call("compare", "dude[lr=0.05]", *flags, "--folder", tmp_path / "two") == 0
    expected = simulated(40, server=dd.Server(optimizer=optimizer, schedule=schedule))
    for folder in ("one", "two/dude-lr=0.05-seed0"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["optimizer"] == {"optimizer": "Adam[betas=(0.9, 0.99)]", "schedule": schedule}
        assert np.array_equal(dd.replay(tmp_path / folder).x, expected.x)


def test_gradient_table_precision_device_and_cores_are_flags(tmp_path, capsys):
    flags = ("--table", "half", "--precision", "bfloat16", "--cores", 2, "--device", "cpu")
    assert call(*DIGITS, *flags, "--folder", tmp_path / "run") == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["table"], config["precision"], config["device"], config["batch"]) == ("half", "bfloat16", "cpu", False)


def test_train_compare_and_resume_write_for_tensorboard(tmp_path, capsys):
    run, board, short = tmp_path / "run", tmp_path / "board", (*FAST, "--updates", 20)
    assert call("train", "dude[lr=0.05]", *short, "--folder", run, "--tensorboard", board / "train") == 0
    assert call("resume", run, "--updates", 30, "--tensorboard", board / "resume") == 0
    both = ("compare", "dude[lr=0.05]", "sync[lr=0.05]", *short)
    assert call(*both, "--folder", tmp_path / "both", "--tensorboard", board) == 0
    written = {path.parent.name for path in board.rglob("events.out.tfevents*")}
    assert written == {"train", "resume", "dude-lr=0.05-seed0", "sync-lr=0.05-seed0"}


@pytest.mark.real
def test_real_workers_train_resume_and_replay_from_the_shell(tmp_path):
    """In a process of its own, whose standard output has one line for each command, whatever Ray prints."""
    run, board = str(tmp_path / "run"), str(tmp_path / "board")
    flags = ("--problem", "digits[workers=1]", "--fleet", "ray[cpus=0.5,gone=freeze,minimum=1]", "--optimizer", "Adam")
    flags += ("--table", "half")
    commands = [
        ("train", "dude[lr=0.05]", *flags, "--updates", "30", "--folder", run, "--json"),
        ("resume", run, "--updates", "40", "--fleet", "ray[cpus=0.5,shards=2]", "--tensorboard", board, "--json"),
        ("replay", run, "--json"),
        ("resume", run, "--json"),
    ]
    script = f"from dualdelay.cli import main\nfor command in {commands}:\n    main(command)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained, resumed, replayed, again = map(json.loads, done.stdout.splitlines())
    assert "seconds to start" in done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    fleet = config["fleet"]
    assert (config["table"], dd.load(run).state.table[0].dtype) == ("half", torch.bfloat16)
    assert (fleet["name"], fleet["cpus"], fleet["gone"], fleet["minimum"]) == ("ray", 0.5, "freeze", 1)
    assert [line["updates"] for line in (trained, resumed, replayed, again)] == [30, 40, 40, 40]
    assert replayed["same"]
    assert trained["time"] < resumed["time"] == again["time"], "a finished run is shown again, and no worker is started"
    assert list((tmp_path / "board").glob("events.out.tfevents*"))


# compare


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dude[lr=0.05]", ["dude[lr=0.05]"]),
        ("dude", ["dude"]),
        ("dude[lr=0.01|0.05]", ["dude[lr=0.01]", "dude[lr=0.05]"]),
        ("dude[lr=1 | 2,wait_for=3]", ["dude[lr=1,wait_for=3]", "dude[lr=2,wait_for=3]"]),
        ("a[x=1|2,y=3|4]", ["a[x=1,y=3]", "a[x=1,y=4]", "a[x=2,y=3]", "a[x=2,y=4]"]),
        ("fixed[times=[1,2]|[3,4]]", ["fixed[times=[1,2]]", "fixed[times=[3,4]]"]),
        ("a[problem=b[x=0.1],k=1|2]", ["a[problem=b[x=0.1],k=1]", "a[problem=b[x=0.1],k=2]"]),
    ],
)
def test_a_text_with_bars_stands_for_several(text, expected):
    assert alternatives(text) == expected


def test_a_label_is_a_text_that_gives_the_same_thing():
    for text in ("dude[lr=0.05,wait_for=3]", "fedbuff[lr=0.1,buffer=2,wait=true,staleness=0.5]", "mifa[lr=0.1,active=2]"):
        assert label(parse("algorithm", text)) == text
    nested = parse("problem", "local_steps[k=3,lr=0.1,problem=quadratic[centers=[[1.0],[2.0]]]]")
    assert nested.workers == 2
    assert parse("problem", label(nested)).fingerprint() == nested.fingerprint()


def test_compare_prints_a_table_a_figure_and_a_sentence(tmp_path, capsys):
    command = ("compare", "dude[lr=0.05]", "vanilla[lr=0.05]", "sync[lr=0.05]", *FAST)
    command = (*command, "--time", 40, "--seeds", 0, 1, "--folder", tmp_path)
    assert call(*command) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ dude\[lr=0.05\] .* ±", out, re.M), "means over the two seeds with their deviation"
    assert re.search(r"^Result: at time 40 \S+ has the lowest objective", out, re.M)
    assert f"figure: {tmp_path}/comparison.png" in out and (tmp_path / "comparison.png").exists()
    assert out.endswith(f"folder: {tmp_path}\n")
    ages = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-seed*/checkpoints")}
    assert len(ages) == 6
    assert call(*command, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 6
    assert {path: path.stat().st_mtime_ns for path in ages} == ages, "what is done is not computed again"


def test_a_grid_names_every_run(tmp_path, capsys):
    methods, problem = ("dude[lr=0.02|0.05]", "vanilla[lr=0.05]"), "digits[workers=3,alpha=0.1|1.0]"
    flags = ("--problem", problem, "--speeds", "truncated_normal[std=1|3]", "--updates", 6, "--folder", tmp_path, "--json")
    assert call("compare", *methods, *flags) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["runs"]) == len({row["algorithm"] for row in out["runs"]}) == 12 and out["failed"] == 0
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 12
    run = dd.resume(tmp_path / "dude-lr=0.02-digits-workers=3-alpha=1.0-truncated_normal-std=1-seed0")
    assert run.problem.settings["alpha"] == 1.0


def test_a_grid_with_a_run_that_fails_shows_the_others_and_exits_with_1(tmp_path, capsys):
    command = ("compare", "vanilla[lr=0.05|1e30]", "--problem", "digits[workers=3]", "--updates", 30, "--folder", tmp_path)
    assert call(*command) == 1
    shown = capsys.readouterr()
    assert "vanilla[lr=0.05]" in shown.out and "failed: vanilla[lr=1e+30] seed 0: worker" in shown.out
    assert "1 of 2 runs did not come to their end" in shown.err
    assert (tmp_path / "comparison.parquet").exists()


def test_the_speeds_of_a_comparison_have_as_many_workers_as_each_problem(tmp_path, capsys):
    problems = "quadratic[centers=[[0.0],[6.0]]|[[0.0],[6.0],[12.0]]]"
    speeds = "drifting[speeds=truncated_normal[std=1],every=2]"  # n is left out of the model in brackets
    flags = ("--problem", problems, "--speeds", speeds, "--updates", 3, "--folder", tmp_path, "--json")
    assert call("compare", "dude[lr=0.05]", *flags) == 0
    assert sorted(dd.load(folder).state.workers for folder in tmp_path.glob("*-seed0")) == [2, 3]


# runs that were computed side by side


@pytest.fixture
def together(tmp_path):
    grid = {"algorithm": [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], "lr": [0.02, 0.05]}
    speeds = dd.TruncatedNormalSpeeds(4, 1.0)
    return dd.sweep(grid, dd.Digits(workers=4), speeds, updates=40, compute=dd.Compute(batch=True), folder=tmp_path).runs


@pytest.mark.numeric
def test_a_run_computed_with_others_is_replayed_to_rounding_and_a_note_says_so(together, capsys):
    for run in together:
        replayed = dd.replay(run.folder)
        assert "side by side with 3 others" in replayed.notes[0]
        close = drift(40, run.algorithm.lr, operations(run.problem), torch.float32)
        assert (replayed.x - run.x).norm() <= close * run.x.norm()
    assert call("replay", run.folder, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["same"] is replayed.same_bits and "3 others" in shown.err


def test_a_record_that_was_changed_is_not_replayed_to_rounding_either(together):
    for run, column in zip(together, ("loss", "version"), strict=False):
        columns, about = load_table(run.folder / "trace.parquet")
        changed = columns[column] + (np.arange(len(columns[column])) == 20).astype(columns[column].dtype)
        save_table(run.folder / "trace.parquet", {**columns, column: changed}, about)
        with pytest.raises(dd.ReplayMismatch, match=f"the recorded {column} is"):
            dd.replay(run.folder)


# list


def test_list_shows_every_name_and_explains_one(capsys):
    assert call("list") == 0
    out = capsys.readouterr().out
    for name in (*dd.ALGORITHMS, *dd.problems.PROBLEMS, *dd.speeds.SPEEDS, "ray"):
        assert re.search(rf"^ {name} ", out, re.M), name
    assert call("list", "dude", "--json") == 0
    shown = capsys.readouterr()
    assert "fully asynchronous" in shown.err
    assert set(json.loads(shown.out)["algorithms"]) == set(dd.ALGORITHMS)


def test_list_explains_fleets(capsys):
    assert call("list", "fleets", "--json") == 0
    shown = capsys.readouterr()
    assert "Real workers" in shown.err
    assert json.loads(shown.out)["fleets"] == ["ray", "sites"]
    assert call("list", "ray") == 0
    out = capsys.readouterr().out
    assert "cpus (default 1.0): Processors that a worker claims" in out
    assert "insecure (default False): Join a cluster" in out
    assert "faults" not in out, "what a text cannot give is not offered"
    assert "Write it as 'ray', or with settings" in out
    assert call("list", "sites") == 0
    out = capsys.readouterr().out
    assert "listen (default 127.0.0.1:8443): The address that sites dial" in out and "board" not in out


def test_list_knows_methods_and_says_what_the_shell_needs(capsys):
    assert call("list", "methods") == 0
    methods = capsys.readouterr().out
    assert call("list", "algorithms") == 0
    assert capsys.readouterr().out == methods
    assert call("list", "truncated_normal") == 0
    out = capsys.readouterr().out
    assert "n (taken from the problem): Number" in out and "Write it as 'truncated_normal', or with settings" in out
    assert call("list", "speeds") == 0
    assert re.search(r"^ truncated_normal .* std=1.0, seed=None, mean=1.0 *$", capsys.readouterr().out, re.M)
    assert call("list", "dude") == 0
    assert "lr (needed): Step size (the paper's eta).\n" in capsys.readouterr().out, "the rest is for authors of methods"


def test_a_run_that_diverged_says_so_and_ends_at_its_time(tmp_path, capsys):
    for lr, diverged in ((2.5, True), (0.1, False)):
        assert call("train", f"sync[lr={lr}]", *FAST, "--time", 20, "--folder", tmp_path / f"{lr}") == 0
        out = capsys.readouterr().out
        assert ("note: it diverged: the objective began at " in out) is diverged
        assert f"sync[lr={lr}]: ended at time 20\n" in out


def test_an_interruption_says_once_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise dd.Interrupted("saved after 3 updates in run", "dd.resume goes on")

    monkeypatch.setattr(commands, "run_one", interrupted)
    assert call("train", "sync[lr=0.1]", *FAST, "--updates", 9, "--folder", tmp_path / "run") == 130
    said = capsys.readouterr().err
    assert said == f"interrupted: saved after 3 updates in run. Go on with: dualdelay resume {tmp_path / 'run'}\n"


# exit codes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "dudee[lr=0.1]", "--updates", "3"), "did you mean 'dude'"),
        (("train", "AutoDuDe", "--updates", "3"), "did you mean 'auto'"),
        (("train", "auto_dude", "--updates", "3"), "did you mean 'auto'"),
        (("sweep", "dude"), "there is no command 'sweep'; did you mean 'compare'"),
        (("train", "dude[lr=-1]", "--updates", "3"), "lr is -1"),
        (("train", "dude[lr=0.1]"), "neither updates nor time"),
        (("train", "dude[lr=0.1]", "--problem", "digit", "--updates", "3"), "did you mean 'digits'"),
        (("train", "dude[lr=0.1]", "--speeds", "fixed[times=[1,0,2]]", *FAST[:2], "--updates", "3"), r"times\[1\] is 0"),
        (("compare", "dude[lr=0.1]", *TRAIN[1:]), "the algorithms are .* expected at least one, each only once"),
        (("compare", "--updates", "3"), r"the algorithms are \[\]; expected at least one"),
        (("compare", *TRAIN[1:], "--seeds", "1", "1"), r"seeds is \[1, 1\]; expected at least one, each only once"),
        (("compare", *TRAIN[1:], "--seeds"), r"seeds is \[\]; expected at least one, each only once"),
        (("resume", "nowhere"), "not the folder of a run"),
        (("list", "dud"), "did you mean 'dude'"),
        ((*REAL, "rya"), "no fleet 'rya'; did you mean 'ray'"),
        ((*REAL, "simulate"), "did you mean 'simulated'"),
        ((*REAL, "simulated[cpus=2]"), "describe simulated workers by --speeds, --latency and --bandwidth"),
        ((*REAL, "ray[cpu=2]"), "ray has no parameter 'cpu'; did you mean 'cpus'"),
        ((*REAL, "ray[gone=away]"), "gone is 'away'; expected one of 'leave', 'freeze'"),
        ((*REAL, "ray[minimum=9]"), "minimum is 9, but 3 workers are there"),
        ((*REAL, "ray[faults=1]"), "ray has no parameter 'faults'"),
        ((*REAL, "ray", "--speeds", "fixed[times=[1,2,4]]"), "--speeds cannot be chosen for real workers"),
        ((*REAL, "ray", "--latency", "1", "--bandwidth", "9"), "--latency and --bandwidth cannot be chosen"),
        ((*REAL, "ray", "--threads", "2"), r"--threads cannot be chosen .* 'ray\[threads=2\]'"),
        ((*REAL, "ray", "--cores", "2", "--device", "cpu"), "--device and --cores cannot be chosen for real workers"),
        ((*TRAIN, "--optimizer", "Adagard"), "did you mean 'Adagrad'"),
        (("compare", *TRAIN[1:], "--schedule", "StepLR"), "StepLR needs step_size"),
        ((*TRAIN, "--tensorboard", "/dev/null/x"), "written for TensorBoard"),
        ((*TRAIN, "--metric", "accuracy"), "metric accuracy is given, but neither target nor patience"),
        ((*DIGITS, "--device", "abacus"), "expected 'cpu' or 'cuda'"),
        ((*DIGITS, "--precision", "tf32"), "is a mode of GPUs"),
        ((*DIGITS, "--cores", "0"), "cores is 0"),
        (("data", "cifar10", "--folder", "data", "--source", "nowhere"), "source is 'nowhere', and nothing is there"),
        (("data", "cifar10", "--folder", "data", "--source", "."), "holds none of the files of CIFAR-10"),
    ],
)  # fmt: skip
def test_bad_input_exits_with_2_and_one_error(arguments, words, capsys, inside):
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("error: "), err.count("\n")) == ("", 1, 1)
    assert re.search(f"^error: .*{words}.*\n$", err, re.M), err
    assert not list(inside.rglob("config.json")), "nothing is left behind"


def test_a_failed_run_exits_with_1_and_with_json_the_last_line_says_why(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Folder, "require_possible", lambda path: None)  # as if the file had come later
    assert call("train", "sync[lr=0.1]", *FAST, "--updates", 3, "--folder", tmp_path / "file" / "run", "--json") == 1
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert (line["command"], line["exit"]) == ("train", 1)
    assert err == f"error: {line['error']}\n" and "could not create" in err


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert call("train", "sync[lr=0.1]", *FAST, "--updates", 3, "--folder", tmp_path / "file" / "run", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["exit"] == 2 and err.startswith("error: could not create") and "file is no folder" in err

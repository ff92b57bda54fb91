import json
import re
import subprocess
import sys

import numpy as np
import pytest

import dualdelay as dd
from dualdelay.analysis.figures import COLOURS, draw
from dualdelay.cli import main
from dualdelay.runs.names import label, parse
from dualdelay.runs.progress import Watcher

QUADRATIC = "quadratic[centers=[[0.0],[6.0],[12.0]],noise=0.1]"
FAST = ["--problem", QUADRATIC, "--speeds", "fixed[times=[1,2,4]]"]
REAL = ["train", "dude[lr=0.1]", "--problem", QUADRATIC, "--updates", "3", "--fleet"]


def call(*arguments):
    try:
        main(arguments)
    except SystemExit as stop:
        return stop.code
    return 0


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


def test_train_resume_and_replay_work_from_the_shell(tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert call("train", "dude[lr=0.05,wait_for=2]", *FAST, "--updates", "40", "--folder", folder, "--json") == 0
    out = capsys.readouterr().out
    assert len(out.strip().splitlines()) == 1, "with --json standard output is one line"
    trained = json.loads(out)
    assert trained["updates"] == 40
    assert trained["algorithm"] == "dude[lr=0.05,wait_for=2]"
    assert trained["accuracy"] is None, "what is not a number is null in JSON"

    assert call("resume", folder, "--updates", "60", "--json") == 0
    assert last_line(capsys.readouterr().out)["updates"] == 60
    straight = dd.simulate(
        dd.DuDe(0.05, wait_for=2),
        parse("problem", QUADRATIC),
        dd.FixedSpeeds([1, 2, 4]),
        updates=60,
        evaluation=dd.Evaluation(every=60),
    )
    assert np.array_equal(dd.replay(folder).x, straight.x)

    assert call("replay", folder, "--json") == 0
    assert last_line(capsys.readouterr().out) == {
        "command": "replay", "folder": folder, "arrivals": len(straight.trace), "updates": 60, "same": True,
    }  # fmt: skip


def test_train_ends_with_tables_the_figure_and_the_folder(tmp_path, capsys):
    assert call("train", "vanilla[lr=0.05]", *FAST, "--time", "20", "--folder", str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    for word in ("objective", "tau_max", "mean delay", "figure.png", "folder:"):
        assert word in out
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_compare_prints_a_table_a_figure_and_a_sentence(tmp_path, capsys):
    folder = tmp_path / "together"
    command = ("compare", "dude[lr=0.05]", "vanilla[lr=0.05]", "sync[lr=0.05]", *FAST)
    command = (*command, "--time", "40", "--seeds", "0", "1", "--folder", str(folder))
    assert call(*command) == 0
    out = capsys.readouterr().out
    assert "dude[lr=0.05]" in out
    assert "To be seen" in out
    assert (folder / "comparison.png").exists()
    assert len(list(folder.glob("*-seed*"))) == 6
    assert call(*command, "--json") == 0, "the same command again finds everything done"
    assert len(last_line(capsys.readouterr().out)["runs"]) == 6


def test_a_run_without_a_folder_gets_one_of_its_own(inside, capsys):
    for _ in range(2):
        assert call("train", "sync[lr=0.1]", *FAST, "--updates", "3") == 0
    assert sorted(path.name for path in (inside / "runs").iterdir()) == ["sync-lr=0.1-seed0", "sync-lr=0.1-seed0-2"]


def test_list_shows_every_name_and_explains_one(capsys):
    assert call("list") == 0
    out = capsys.readouterr().out
    for name in (*dd.ALGORITHMS, *dd.problems.PROBLEMS, *dd.speeds.SPEEDS, "ray"):
        assert name in out
    assert call("list", "dude", "--json") == 0
    shown = capsys.readouterr()
    assert "fully asynchronous" in shown.err
    assert set(last_line(shown.out)["algorithms"]) == set(dd.ALGORITHMS)


def test_list_explains_fleets(capsys):
    assert call("list", "fleets", "--json") == 0
    shown = capsys.readouterr()
    assert "Real workers" in shown.err
    assert last_line(shown.out)["fleets"] == ["ray"]
    assert call("list", "ray") == 0
    out = capsys.readouterr().out
    assert "cpus (default 1.0): Processors that a worker claims" in out
    assert "insecure (default False): Join a cluster" in out
    assert "faults" not in out, "what a text cannot give is not offered"
    assert "Write it as 'ray', or with settings" in out


def test_the_server_steps_with_the_optimizer_and_schedule_that_were_named(tmp_path, capsys):
    named = ("--optimizer", "Adam[betas=(0.9,0.99)]", "--schedule", "StepLR[step_size=10]")
    together = ("compare", "dude[lr=0.05]", *FAST, *named, "--updates", "40", "--folder", str(tmp_path / "two"))
    assert call("train", "dude[lr=0.05]", *FAST, *named, "--updates", "40", "--folder", str(tmp_path / "one")) == 0
    assert call(*together) == 0
    straight = dd.simulate(
        dd.DuDe(0.05),
        parse("problem", QUADRATIC),
        dd.FixedSpeeds([1, 2, 4]),
        updates=40,
        server=dd.Server(optimizer="Adam[betas=(0.9,0.99)]", schedule="StepLR[step_size=10]"),
    )
    for folder in ("one", "two/dude-lr=0.05-seed0"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["optimizer"] == {"optimizer": "Adam[betas=(0.9, 0.99)]", "schedule": "StepLR[step_size=10]"}
        assert np.array_equal(dd.replay(tmp_path / folder).x, straight.x)


def test_train_compare_and_resume_write_for_tensorboard(tmp_path, capsys):
    run, board = str(tmp_path / "run"), tmp_path / "board"
    short = (*FAST, "--updates", "20")
    assert call("train", "dude[lr=0.05]", *short, "--folder", run, "--tensorboard", str(board / "train")) == 0
    assert call("resume", run, "--updates", "30", "--tensorboard", str(board / "resume")) == 0
    methods = ("compare", "dude[lr=0.05]", "sync[lr=0.05]")
    assert call(*methods, *short, "--folder", str(tmp_path / "both"), "--tensorboard", str(board)) == 0
    written = {path.parent.name for path in board.rglob("events.out.tfevents*")}
    assert written == {"train", "resume", "dude-lr=0.05-seed0", "sync-lr=0.05-seed0"}


def shell(*arguments):
    command = [sys.executable, "-m", "dualdelay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_real_workers_train_resume_and_replay_from_the_shell(tmp_path, capsys, ray_here):
    """With --json standard output is one line, whatever Ray has to say."""
    run = tmp_path / "run"
    settings = ("--problem", "digits[workers=2]", "--fleet", "ray[cpus=0.5,gone=freeze,minimum=2]", "--optimizer", "Adam")
    trained, err = shell("train", "dude[lr=0.05]", *settings, "--updates", 30, "--folder", run, "--json")
    assert trained["updates"] == 30
    assert "seconds to start" in err
    config = json.loads((run / "config.json").read_text())
    assert {key: config["fleet"][key] for key in ("name", "cpus", "gone", "minimum")} == {
        "name": "ray", "cpus": 0.5, "gone": "freeze", "minimum": 2,
    }  # fmt: skip
    assert call("resume", str(run), "--updates", "40", "--tensorboard", str(tmp_path / "board"), "--json") == 0
    went_on = json.loads(capsys.readouterr().out)
    assert went_on["updates"] == 40
    assert went_on["time"] > trained["time"]
    assert list((tmp_path / "board").glob("events.out.tfevents*"))
    assert call("replay", str(run), "--json") == 0
    assert last_line(capsys.readouterr().out)["updates"] == 40
    assert call("resume", str(run), "--json") == 0, "a finished run is shown again, and nobody is called"
    assert last_line(capsys.readouterr().out)["time"] == went_on["time"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "dudee[lr=0.1]", "--updates", "3"), "did you mean 'dude'"),
        (("train", "dude[lr=-1]", "--updates", "3"), "lr is -1"),
        (("train", "dude[lr=0.1]"), "neither updates nor time"),
        (("train", "dude[lr=0.1]", "--problem", "digit", "--updates", "3"), "did you mean 'digits'"),
        (("train", "dude[lr=0.1]", "--speeds", "fixed[times=[1,0,2]]", *FAST[:2], "--updates", "3"), r"times\[1\] is 0"),
        (("compare", "dude[lr=0.1]", "dude[lr=0.1]", *FAST, "--updates", "3"), "expected at least one, each only once"),
        (("compare", "--updates", "3"), "expected at least one"),
        (("resume", "nowhere"), "not the folder of a run"),
        (("list", "dud"), "did you mean 'dude'"),
        ((*REAL, "rya"), "no fleet 'rya'; did you mean 'ray'"),
        ((*REAL, "simulate"), "did you mean 'simulated'"),
        ((*REAL, "simulated[cpus=2]"), "described by --speeds, --latency and --bandwidth"),
        ((*REAL, "ray[cpu=2]"), "ray has no parameter 'cpu'; did you mean 'cpus'"),
        ((*REAL, "ray[gone=away]"), "gone is 'away'; expected one of 'leave', 'freeze'"),
        ((*REAL, "ray[minimum=9]"), "minimum is 9, but 3 workers are there"),
        ((*REAL, "ray[faults=1]"), r"give it in Python: dd.RayFleet\(faults"),
        ((*REAL, "ray", "--speeds", "fixed[times=[1,2,4]]"), "--speeds cannot be chosen for real workers"),
        ((*REAL, "ray", "--latency", "1", "--bandwidth", "9"), "--latency and --bandwidth cannot be chosen"),
        ((*REAL, "ray", "--threads", "2"), r"--threads cannot be chosen .* 'ray\[threads=2\]'"),
        (("train", "dude[lr=0.1]", *FAST, "--updates", "3", "--optimizer", "Adagard"), "did you mean 'Adagrad'"),
        (("compare", "dude[lr=0.1]", *FAST, "--updates", "3", "--schedule", "StepLR"), "StepLR needs step_size"),
        (("train", "dude[lr=0.1]", *FAST, "--updates", "3", "--tensorboard", "/dev/null/x"), "written for TensorBoard"),
    ],
)  # fmt: skip
def test_bad_input_exits_with_2_and_one_error(arguments, said, capsys, inside):
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert re.search(said, err), err
    assert not list(inside.rglob("config.json")), "nothing is left behind"


def test_a_failed_run_exits_with_1(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert call("train", "sync[lr=0.1]", *FAST, "--updates", "3", "--folder", str(tmp_path / "file" / "run")) == 1
    assert "could not create" in capsys.readouterr().err


def test_labels_can_be_read_back():
    for text in ("dude[lr=0.05,wait_for=3]", "fedbuff[lr=0.1,buffer=2,wait=true,staleness=0.5]", "mifa[lr=0.1,active=2]"):
        assert label(parse("algorithm", text)) == text
    nested = parse("problem", "local_steps[k=3,lr=0.1,problem=quadratic[centers=[[1.0],[2.0]]]]")
    assert nested.workers == 2
    assert parse("problem", label(nested)).fingerprint() == nested.fingerprint()


def test_every_method_has_a_colour_of_its_own():
    assert set(COLOURS) == set(dd.ALGORITHMS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_figure_shows_every_method_and_runs_that_end_at_different_times(tmp_path):
    table = dd.compare(
        [dd.DuDe(0.05), dd.SyncSGD(0.05)],
        dd.Quadratic([[0.0], [6.0]], noise=1.0),
        dd.FixedSpeeds([1, 2]),
        seeds=(0, 1),
        updates=20,
    )
    assert draw(table, tmp_path / "figure.png").stat().st_size > 10_000


def test_progress_shows_share_rate_and_time_left(capsys):
    with Watcher("dude", updates=40, after=0.0, lines=0.0) as watcher:
        dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2]), updates=40, watch=(watcher,))
    shown = capsys.readouterr().err
    assert "dude:  50%  20 updates" in shown
    assert "updates/s" in shown
    assert "s left" in shown


def test_a_short_run_shows_no_progress(capsys):
    with Watcher("dude", updates=5) as watcher:
        dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2]), updates=5, watch=(watcher,))
    assert capsys.readouterr().err == ""

"""What a user sees of processes that end: a worker's signal and output, and how a run goes on whose server has ended."""

import signal
import subprocess
import sys

import pytest

import dualdelay as dd
from helpers import audit, check_replay, kinds
from real import Site, Talking, small_net, until

pytestmark = pytest.mark.usefixtures("ray_here")


def test_a_process_that_dies_is_named_with_its_signal_and_what_it_said(tmp_path):
    """And one site more than was counted at the start joins, all count by their samples, and a replay has the same bits."""
    site, step, fleet, folder = Site(tmp_path), Talking(tmp_path), dd.RayFleet(room=1), tmp_path / "run"
    problem = dd.Network(small_net, shards=site, step=step, workers=2, batch_size=4, weights="samples")
    joined = []

    def complete(state, arrival):
        if not joined and state.version > 10:
            joined.append(fleet.control.join())
        return arrival.worker == 2 and arrival.job.draw > 5 and (tmp_path / "died").exists()

    run = dd.train(dd.DuDe(lr=0.05), problem, fleet, folder=folder, **until(complete))
    assert run.ended == "stop" and joined == [2] and run.state.n == 3
    assert "joined" in kinds(run, 2) and "weighed" in kinds(run)
    text = next(event["text"] for event in run.trace.events if event["kind"] == "crashed")
    first, second = (folder / "output" / f"worker-1-{incarnation}.txt" for incarnation in (0, 1))
    assert "its process died by SIGSEGV (pid " in text and f"its output is in {first}" in text
    assert all("a word from the second site" in path.read_text() for path in (first, second))
    with pytest.raises(dd.BadInput, match="no room for another worker: room is 1"):
        fleet.control.join()
    last = run.workers.version == run.version
    losses, sizes = run.workers.loss[last], run.workers.samples[last]
    assert sizes.tolist() == [20, 40, 60]
    assert run.metrics.objective[-1] == pytest.approx(float((losses * sizes).sum() / sizes.sum()), rel=1e-5)
    check_replay(run, folder, dd.Network(small_net, shards=site, step=step, workers=2, batch_size=4, weights="samples"))


SERVER = """
import os, signal, sys, time
import dualdelay as dd

class Slow(dd.Quadratic):
    def gradient(self, x, worker, draw):
        print("at work", flush=True)
        time.sleep(0.01)
        return super().gradient(x, worker, draw)

def kill_raylet(state, arrival):
    from ray._private.worker import _global_node
    if state.version == 30:
        _global_node.kill_raylet(check_alive=False)

def kill_server(state, arrival):
    if state.version == 70:
        os.kill(os.getpid(), signal.SIGKILL)

folder, problem, method = sys.argv[1], Slow([[4.0]], noise=0.1), dd.DuDe(lr=0.05, memory="workers")
if os.path.exists(folder):
    dd.resume(folder, problem=problem, watch=[kill_server])
try:
    dd.train(method, problem, updates=10**6, checkpoint_every=20, folder=folder, watch=[kill_raylet])
except dd.DualDelayError as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
"""


def test_when_ray_or_the_server_dies_the_run_is_saved_and_goes_on(tmp_path):
    """One run of one worker, in three processes of the server. That a scheduler ends it is in docs/test_own_model.py."""
    folder = tmp_path / "run"
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(folder)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 3 and first.stdout.startswith("RunFailed"), first
    kept = dd.load(folder)
    assert 30 <= kept.version < 60  # its death is seen within a tenth of a second
    assert "its raylet (pid " in first.stdout and f"{kept.version} updates" in first.stdout and "dd.resume" in first.stdout
    assert "at work" in (folder / "output" / "worker-0-0.txt").read_text()
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == -signal.SIGKILL, second
    assert dd.load(folder).version == 60  # of the checkpoints every 20 updates the last before 70
    problem = dd.Quadratic([[4.0]], noise=0.1)
    run = dd.resume(folder, updates=90, problem=problem)
    assert run.version == 90 and run.audit is not None and run.audit <= audit(run)
    check_replay(run, folder, problem)

"""Processes that hold jobs until they are polled, remember, and are sent differences. What the server decides is tested on
virtual time, in test_halves.py.
"""

import signal
import subprocess
import sys
import time

import pytest
import ray

import dualdelay as dd
from helpers import check_replay, kinds
from real import Real, kill
from transports import LossyRayFleet
from virtual import RandomWeather

pytestmark = pytest.mark.usefixtures("ray_here")

TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
SECONDS = {0: 0.01, 1: 0.02, 2: 0.1}  # that a gradient takes


def test_workers_are_polled_and_one_that_is_killed_while_it_holds_a_job_hands_it_on(tmp_path):
    """Messages are lost, repeated and late, polls among them."""
    problem, method = Real(TRIO, SECONDS), dd.algorithms.QuAFL(lr=0.05, steps=5, period=0.15)
    weather = RandomWeather(2, lost=0.1, repeated=0.1, late=0.1, longest=0.1)
    fleet, before = LossyRayFleet(weather=weather, cpus=0.1, faults=dd.FaultPolicy(resend=0.3)), []

    def strike(state, arrival):
        if state.version >= 5 and not before and arrival.worker != 1:  # at 5 itself nobody may have been in time
            before.append(fleet.control.places[1])
            kill(fleet, 1)
        elif before and fleet.control.places[1] == before[0]:
            time.sleep(0.2)  # the run is not to end before its process is replaced

    run = dd.train(method, problem, fleet, updates=14, watch=[strike], folder=tmp_path / "run")
    assert run.ended == "updates" and before and fleet.control.places[1] != before[0]
    events = [kind for kind in kinds(run) if kind != "wake"]
    assert events == ["crashed", "lost", "restored"] and kinds(run, 1) == events
    steps = run.trace.steps
    assert 0 <= steps.min() < steps.max() <= 5
    for worker in range(3):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        assert draws == list(range(len(draws)))
    check_replay(run, tmp_path / "run", problem)


SERVER = """
import os, signal, sys, time
import dualdelay as dd

def kill_server(state, arrival):
    time.sleep(0.05)
    if state.version == 9:
        os.kill(os.getpid(), signal.SIGKILL)

problem, method = dd.Digits(workers=3), dd.algorithms.QuAFL(lr=0.05, steps=3, sampled=1, period=0.1)
server, evaluation = dd.Server(uplink="int8", downlink="int8"), dd.Evaluation(every=4)
fleet, saving = dd.RayFleet(cpus=0.1, address=sys.argv[2]), {"folder": sys.argv[1], "checkpoint_every": 3}
dd.train(method, problem, fleet, updates=16, server=server, evaluation=evaluation, watch=[kill_server], **saving)
"""


@pytest.mark.slow
def test_a_run_whose_server_was_killed_goes_on_with_the_jobs_that_its_workers_held(tmp_path):
    """Models and messages travel as small differences, and workers that hold jobs evaluate meanwhile."""
    folder, address = tmp_path / "run", ray.get_runtime_context().gcs_address
    arguments = [sys.executable, "-c", SERVER, str(folder), address]
    end = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert end.returncode == -signal.SIGKILL, end
    saved = dd.load(folder).version
    run = dd.resume(folder, fleet=dd.RayFleet(cpus=0.1, address=address))
    assert 3 <= saved <= 9 and run.version == 16 and set(kinds(run)) == {"wake"}
    size, trace = run.x.numel(), run.trace
    for worker in range(3):
        mine = trace.worker == worker
        assert trace.draw[mine].tolist() == list(range(mine.sum()))
        before, after = (trace.down[mine & now].tolist() for now in (trace.after <= saved, trace.after > saved))
        assert set(before[:1]) <= {4 * size} and set(before[1:] + after[1:]) <= {size + 4}, "a byte for each weight"
        assert min(after[:1], default=4 * size) >= 4 * size, "to new processes the whole, and what they are to keep"
    assert set(trace.bytes.tolist()) == {size + 4}
    assert {0, 16} <= set(run.metrics.version.tolist()) and len(run.metrics) > 3
    assert set(run.metrics.answered.tolist()) == {3.0}, "also of those that nobody has polled meanwhile"
    check_replay(run, folder)

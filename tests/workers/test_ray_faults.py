"""Processes that are killed, hang and raise. What the server then decides is tested on virtual time, in test_faults.py."""

import pytest

import dualdelay as dd
from helpers import audit, check_replay, kinds
from real import Real, Trouble, kill, until

pytestmark = pytest.mark.usefixtures("ray_here")


def test_workers_killed_while_computing_sending_or_idle_are_restarted_and_each_job_counts_once(tmp_path):
    """Synchronous, so that the fast worker is idle while the slow one computes; messages go through the object store."""
    computing, sending = Trouble("kill", 0, 2), (Trouble("kill soon", 1, 2, 0.0), Trouble("kill soon", 0, 5, 0.305))
    problem = Real([[c] * 200_000 for c in (0.0, 6.0)], {0: 0.3}, (computing, *sending), tmp_path, noise=0.0)
    fleet, before = dd.RayFleet(), []

    def strike(state, arrival):
        if (arrival.worker, arrival.job.draw) == (1, 5) and not before:
            before.append(fleet.control.places[1])
            kill(fleet, 1)  # it has just reported

    method = dd.DuDe(lr=0.1, memory="workers", wait_for=2)
    run = dd.train(method, problem, fleet, updates=9, watch=[strike], folder=tmp_path / "run")
    crashes = [event for event in run.trace.events if event["kind"] == "crashed"]
    assert sorted(event["worker"] for event in crashes) == [0, 0, 1, 1] and before != [fleet.control.places[1]]
    killed = [event for event in crashes if "its process died without a word, as by SIGKILL" in event["text"]]
    assert all("(pid " in event["text"] for event in killed) and len(killed) >= 2
    silent = "it does not say what it keeps"  # the second of two that die together may be noticed by that
    assert all(event["text"] == silent for event in crashes if event not in killed)
    for worker in range(2):
        assert run.trace.draw[run.trace.worker == worker].tolist() == list(range(9))
    assert (run.trace.version + 1 == run.trace.after)[1::2].all()
    assert run.audit is not None and run.audit <= audit(run)
    check_replay(run, tmp_path / "run", problem)


def test_a_worker_that_hangs_is_replaced_and_exceptions_and_malformed_gradients_are_reported(tmp_path, caplog):
    troubles = (Trouble("hang", 1, 5, 600.0), Trouble("raise", 0, 2), Trouble("nan", 0, 4), Trouble("shape", 0, 6))
    problem = Real([[0.0, 1.0], [6.0, -2.0]], {0: 0.02, 1: 0.02}, troubles, tmp_path)
    fleet, hung = dd.RayFleet(faults=dd.FaultPolicy(deadline=3.0)), []

    def replaced(state, arrival):
        if not hung and "worker 1 left" in caplog.text:
            hung.append(fleet.control.places[1])
            fleet.control.join(1)
        return arrival.worker == 1 and arrival.job.draw > 10

    run = dd.train(dd.DuDe(lr=0.05, memory="workers"), problem, fleet, folder=tmp_path / "run", **until(replaced))
    assert run.ended == "stop" and hung != [fleet.control.places[1]] and run.state.n == 2
    assert kinds(run, 1) == ["crashed", "lost", "restored", "left", "joined"]
    assert any("no answer in 3 s to job number 5" in event["text"] for event in run.trace.events)
    assert kinds(run, 0) == ["failed", "rejected", "rejected"] and run.rejected == 2
    failed = next(event["text"] for event in run.trace.events if event["kind"] == "failed")
    assert "Traceback" in failed and "real.py" in failed and "ValueError: worker 0 has a bad sample" in failed
    assert run.audit is not None and run.audit <= audit(run)
    check_replay(run, tmp_path / "run", problem)

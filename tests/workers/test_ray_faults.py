"""What goes wrong with real workers, each for real: processes killed, hanging, raising, sending nonsense."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
import torch

import dualdelay as dd
from flat import train
from helpers import audit
from real import Real, Stubborn, Trouble, Until, check, kill, kinds

pytestmark = pytest.mark.usefixtures("ray_here")

TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
PAIR = TRIO[:2]  # a process takes seconds to start: there are three only where one leaves and the others must agree
DUDE = partial(dd.DuDe, memory="workers")  # the harder case; test_coordinator.py has both for every kind of fault


def near(run, target, within):
    return float((run.x - torch.tensor(target, dtype=torch.float64)).norm()) < within


def after(caplog, text, arrivals):
    """Whether so many arrivals have come since something was logged."""
    seen = []

    def enough(state, a):
        if text in caplog.text:
            seen.append(a.time)
        return len(seen) > arrivals

    return enough


def test_killed_while_computing_it_is_restarted_and_does_its_job_again(tmp_path):
    once = str(tmp_path / "happened")
    problem = Real(PAIR, pause=0.01, troubles=(Trouble("kill", 1, frozenset({4}), once=once),))
    until = Until(lambda state, a: a.worker == 1 and a.job.draw > 8)
    run = train(DUDE(lr=0.05), problem, dd.RayFleet(), folder=tmp_path / "run", **until)
    assert kinds(run) == ["crashed", "lost", "restored"]
    row = next(event["row"] for event in run.trace.events)
    back = next(i for i in range(row, len(run.trace)) if run.trace.worker[i] == 1)
    assert run.trace.draw[back] == 4  # the same job, by name
    assert back - row > 3 and set(run.trace.worker[row:back].tolist()) == {0}  # nobody waited
    check(run, tmp_path / "run", problem)


def test_killed_while_idle_it_is_restarted_before_it_is_needed(tmp_path):
    problem, fleet = Real(PAIR, slow={0: 0.0, 1: 0.5}), dd.RayFleet()
    killed = []

    def strike(state, a):
        if len(killed) < 2 and a.job.draw in (1, 3) and a.worker == 0 and state.version > len(killed):
            killed.append(state.version)  # it has just reported and waits for the slow one
            kill(fleet, 0)

    algorithm = DUDE(lr=0.1, wait_for=2)
    run = dd.train(algorithm, problem, fleet, updates=12, watch=[strike], folder=tmp_path / "run")
    assert len(killed) == 2 and kinds(run, 0).count("crashed") == 2
    assert [event["worker"] for event in run.trace.events] == [0] * len(run.trace.events)
    assert (run.trace.version + 1 == run.trace.after)[1::2].all()  # still synchronous SGD: nothing was lost or doubled
    check(run, tmp_path / "run", problem)


def test_killed_while_sending_the_message_counts_once_or_is_sent_again(tmp_path):
    at = {2: 0.0, 5: 0.005}  # seconds after the gradient is done
    troubles = tuple(
        Trouble("kill soon", 1, frozenset({draw}), seconds, str(tmp_path / f"happened-{draw}"))
        for draw, seconds in at.items()
    )
    problem = Real([[c] * 200_000 for c in (0.0, 6.0)], slow={0: 0.05}, troubles=troubles, noise=0.0)
    until = Until(lambda state, a: a.worker == 1 and a.job.draw > 15)
    run = train(DUDE(lr=0.1), problem, dd.RayFleet(), folder=tmp_path / "run", **until)
    assert kinds(run, 1).count("crashed") == len(at)
    draws = run.trace.draw[run.trace.worker == 1].tolist()
    assert draws == list(range(len(draws))) and len(draws) > 15
    check(run, tmp_path / "run", problem)


@pytest.mark.parametrize("memory, gone", [("server", "leave"), ("workers", "freeze")])
def test_gone_for_good_it_leaves_or_stays_frozen(memory, gone, tmp_path, caplog):
    centers = TRIO if gone == "leave" else PAIR
    last = len(centers) - 1
    problem = Real(centers, pause=0.005, troubles=(Trouble("kill", last, range(3, 10**6)),), noise=0.0)
    fleet = dd.RayFleet(faults=dd.FaultPolicy(restarts=1, gone=gone))
    until = Until(after(caplog, f"worker {last} {'left' if gone == 'leave' else 'frozen'}", 120))
    run = train(dd.DuDe(lr=0.1, memory=memory), problem, fleet, folder=tmp_path / "run", **until)
    lost = {"lost", "restored"} if memory == "workers" else set()
    said = [kind for kind in kinds(run) if kind not in lost]
    assert said == ["crashed", "crashed", "left" if gone == "leave" else "frozen"] and lost <= set(kinds(run))
    assert "2 crashes in a row" in run.trace.events[-1]["text"]
    if gone == "leave":
        assert run.state.n == 2 and near(run, [3.0, -0.5], 0.05)
    else:  # its last gradient still counts
        assert run.state.n == 2 and not near(run, [3.0, -0.5], 0.01) and not near(run, [0.0, 1.0], 0.01)
    check(run, tmp_path / "run", problem)


def test_hanging_past_its_deadline_it_leaves(tmp_path, caplog):
    problem = Real(TRIO, pause=0.005, troubles=(Trouble("hang", 2, range(5, 10**6), 600.0),), noise=0.0)
    fleet = dd.RayFleet(faults=dd.FaultPolicy(deadline=2.0))
    until = Until(after(caplog, "worker 2 left", 120))
    run = train(DUDE(lr=0.1), problem, fleet, folder=tmp_path / "run", **until)
    assert kinds(run) == ["crashed", "lost", "restored", "left"]
    assert "no answer in 2 s to job number 5" in run.trace.events[-1]["text"]
    assert near(run, [3.0, -0.5], 0.05)
    check(run, tmp_path / "run", problem)


def test_workers_join_and_leave_a_running_job(tmp_path):
    problem, fleet = Real(TRIO, pause=0.005, noise=0.0), dd.RayFleet(absent=[2])
    limits = []

    def direct(state, a):
        if not limits and a.worker == 1 and a.job.draw == 80:
            limits.append(state.x.clone())
            fleet.control.join(2)
        if len(limits) == 1 and a.worker == 2 and a.job.draw == 80:
            limits.append(state.x.clone())
            fleet.control.leave(0)
            fleet.control.join(7)  # there is no such worker: said, and nothing else
        return a.worker == 2 and a.job.draw == 200

    run = train(DUDE(lr=0.1), problem, fleet, folder=tmp_path / "run", **Until(direct))
    assert kinds(run) == ["left", "joined", "left"]
    assert [event["worker"] for event in run.trace.events] == [2, 2, 0]
    for x, mean in zip([*limits, run.x], ([3.0, -0.5], [6.0, 1.0], [9.0, 1.0]), strict=True):
        assert torch.allclose(x, torch.tensor(mean, dtype=torch.float64), atol=0.05)
    check(run, tmp_path / "run", problem)


def test_an_exception_is_reported_with_its_traceback_retried_and_then_the_worker_leaves(tmp_path, caplog):
    troubles = (Trouble("raise", 0, frozenset({2})), Trouble("raise", 1, range(4, 10**6)))
    problem = Real(TRIO, pause=0.005, troubles=troubles, noise=0.0)
    with caplog.at_level(logging.WARNING, "dualdelay"):
        run = dd.train(
            DUDE(lr=0.1), problem, dd.RayFleet(faults=dd.FaultPolicy(retries=2)), updates=300, folder=tmp_path / "run"
        )
    assert kinds(run, 0) == ["failed"] and kinds(run, 1) == ["failed"] * 3 + ["left"]
    text = next(event["text"] for event in run.trace.events if event["worker"] == 1)
    assert "Traceback" in text and "worker 1 has a bad sample" in text and "real.py" in text
    assert "worker 1 left: 3 exceptions in a row, the last: ValueError: worker 1 has a bad sample" in caplog.text
    assert near(run, [6.0, 2.5], 0.05)
    check(run, tmp_path / "run", problem)


def test_nonsense_is_rejected_and_counted(tmp_path):
    troubles = (Trouble("nan", 0, frozenset({2, 3})), Trouble("shape", 1, frozenset({5})))
    problem = Real(PAIR, troubles=troubles)
    run = dd.train(DUDE(lr=0.05), problem, dd.RayFleet(), updates=200, folder=tmp_path / "run")
    assert run.rejected == 3 and kinds(run, 0) == ["rejected"] * 2 and kinds(run, 1) == ["rejected"]
    check(run, tmp_path / "run", problem)


def test_with_too_few_workers_left_the_run_is_saved_and_stops_and_resumes_with_all(tmp_path):
    once = str(tmp_path / "happened")
    troubles = (Trouble("kill", 0, frozenset({20}), once=once),)
    problem, folder = Real(PAIR, pause=0.03, troubles=troubles), tmp_path / "run"  # time for a process to start
    fleet = dd.RayFleet(faults=dd.FaultPolicy(restarts=0, minimum=2))
    with pytest.raises(dd.RunFailed, match=r"1 workers are at work, fewer than the minimum of 2; .* worker 0"):
        dd.train(DUDE(lr=0.05), problem, fleet, updates=400, folder=folder)
    run = dd.resume(folder, problem=problem)
    assert run.version == 400 and kinds(run)[-2:] == ["left", "joined"] and run.state.n == 2
    check(run, folder, problem)


def test_a_method_that_would_wait_for_a_worker_that_is_gone_is_saved_and_says_so(tmp_path):
    problem = Real(PAIR, troubles=(Trouble("kill", 1, frozenset({5}), once=str(tmp_path / "happened")),))
    folder = tmp_path / "run"
    with pytest.raises(dd.RunFailed, match=r"worker 1 is gone \(1 crashes in a row.*and Stubborn would wait for it"):
        dd.train(Stubborn(lr=0.1), problem, dd.RayFleet(faults=dd.FaultPolicy(restarts=0)), updates=20, folder=folder)
    with pytest.raises(dd.RunFailed, match=r"nobody is at work: the others wait for workers \[1\], which are frozen"):
        frozen = Real(PAIR, troubles=(Trouble("kill", 1, range(5, 10**6)),))
        dd.train(dd.SyncSGD(lr=0.1), frozen, dd.RayFleet(faults=dd.FaultPolicy(restarts=0, gone="freeze")), updates=20)
    run = dd.resume(folder, problem=problem, algorithm=Stubborn(lr=0.1))
    assert run.version == 20
    check(run, folder, problem, algorithm=Stubborn(lr=0.1))


def test_a_delay_past_its_limit_gives_an_alarm_that_names_the_worker(tmp_path, caplog):
    problem = Real(PAIR, pause=0.01, slow={1: 1.5})
    with caplog.at_level(logging.WARNING, "dualdelay"):
        fleet, method = dd.RayFleet(faults=dd.FaultPolicy(alarm=10)), dd.DuDe(lr=0.02, start="zeros")
        run = dd.train(method, problem, fleet, time=5.0, folder=tmp_path / "run")
    alarms = [event for event in run.trace.events if event["kind"] == "late"]
    assert alarms and {event["worker"] for event in alarms} == {1}
    assert len(alarms) <= (run.trace.worker == 1).sum() + 1  # once for each job
    assert "worker 1 late: its job is" in caplog.text
    check(run, tmp_path / "run", problem)


def test_the_server_is_killed_and_resume_goes_on_from_the_last_checkpoint(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import dualdelay as dd
        dd.train(dd.DuDe(lr=0.05, memory="workers"), dd.Digits(workers=2), dd.RayFleet(), updates=100_000,
                 checkpoint_every=20, folder=sys.argv[1])
        """)
    )
    folder = tmp_path / "run"
    server = subprocess.Popen([sys.executable, str(script), str(folder)])
    try:
        until = time.monotonic() + 120
        while len(list(folder.glob("checkpoints/*.safetensors"))) < 3 and time.monotonic() < until:
            assert server.poll() is None
            time.sleep(0.1)
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    saved = max(int(path.stem.partition("-")[0]) for path in folder.glob("checkpoints/*.safetensors"))
    run = dd.resume(folder, updates=150)
    assert run.version == 150 and len(run.trace) >= saved - 1
    assert run.audit <= audit(run)
    replayed = dd.replay(folder)
    assert torch.equal(replayed.x, run.x)


def test_killed_at_the_very_end_there_is_no_audit_and_the_record_is_right(tmp_path):
    problem, fleet, folder = Real(PAIR), dd.RayFleet(), tmp_path / "run"

    def strike(state, a):
        if state.version == 40:
            kill(fleet, 1)
            time.sleep(0.5)

    run = dd.train(DUDE(lr=0.05), problem, fleet, updates=40, watch=[strike], folder=folder)
    assert run.audit is None and run.notes == ("there is no audit: workers [1] did not say at the end what they keep",)
    again = dd.replay(folder, problem)
    assert again.audit <= audit(again)
    longer = dd.resume(folder, updates=80, problem=problem)
    assert kinds(longer)[:2] == ["lost", "restored"]
    check(longer, folder, problem)


def test_interrupted_it_is_saved_and_goes_on(tmp_path):
    problem, folder = Real(PAIR, pause=0.01), tmp_path / "run"

    def interrupt(state, a):
        if state.version == 30:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(dd.Interrupted, match="saved after"):
        dd.train(DUDE(lr=0.05), problem, dd.RayFleet(), updates=60, watch=[interrupt], folder=folder)
    run = dd.resume(folder, problem=problem)
    assert run.version == 60
    check(run, folder, problem)

"""Sites as processes that dial in: what only processes and lines show. What the server decides: test_faults.py."""

from __future__ import annotations

import asyncio
import copy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dialling import Line, Sites, dialling
from dualdelay.cli import sites as cli
from dualdelay.engine.half import Half
from dualdelay.workers.messages import Died, Returned
from dualdelay.workers.sites import keys, wire
from dualdelay.workers.sites.books import Incoming
from dualdelay.workers.sites.fleet import SiteTransport
from helpers import ROUNDED, audit, check_replay, kinds
from real import Real, Site, Trouble, kill, small_net, until

PAIR = [[0.0, 1.0], [6.0, -2.0]]
TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]


def events(run: dd.Run, worker: int | None = None) -> list[str]:
    """What happened beside arrivals, but for where sites are."""
    return [kind for kind in kinds(run, worker) if kind != "place"]


def test_a_recorded_run_replays_to_the_same_bits_although_its_lines_are_cut(tmp_path: Path) -> None:
    """Large messages, which take several connections each: what has come is not sent again, and nothing counts twice."""
    problem = Real([[c] * 100_000 for c in (0.0, 6.0)], noise=0.0)
    sites = Sites(tmp_path, 2)
    line = Line(sites.port, lambda draw: draw.choice([None, draw.uniform(1e3, 3e6)]))
    sites.start(problem, line.port)
    try:
        method = dd.DuDe(lr=0.1, memory="workers")
        run = dd.train(method, problem, sites.fleet(threads=2), updates=40, folder=tmp_path / "run")
        sites.wait()
    finally:
        sites.stop()
        line.close()
    assert line.cut > 5 and run.ended == "updates" and events(run) == []
    for worker in range(2):
        draws = run.trace.draw[run.trace.worker == worker].tolist()
        assert draws == list(range(len(draws)))
        assert sites.said(worker).strip().endswith("the run has ended.")
    places = [event["text"] for event in run.trace.events if event["kind"] == "place"]
    assert sorted(places) == ["site-0 at 127.0.0.1", "site-1 at 127.0.0.1"]
    assert run.audit is not None and run.audit <= audit(run)
    assert set(run.trace.loss.tolist()) == {2.0}, "this problem's loss counts threads"
    check_replay(run, tmp_path / "run", problem)


def test_data_are_built_at_the_site_alone_and_evaluated_there(tmp_path: Path) -> None:
    site = Site(tmp_path)
    problem = dd.Network(small_net, cross_entropy, site, workers=2, batch_size=16)
    with dialling(tmp_path, problem) as sites:
        fleet, evaluation = sites.fleet(), dd.Evaluation(every=20)
        run = dd.train(dd.DuDe(lr=0.1), problem, fleet, updates=60, evaluation=evaluation, folder=tmp_path / "run")
        built = sorted(path.name for path in tmp_path.glob("shard-*"))
        assert built == sorted(f"shard-{worker}-{pid}" for worker, (_, pid) in fleet.control.places.items())
    metrics = run.metrics
    assert {0, 60} <= set(metrics.version.tolist()) <= {0, 20, 40, 60}
    assert set(metrics.share.tolist()) == {1.0} and set(metrics.answered.tolist()) == {2.0}
    exact = dd.Network(small_net, cross_entropy, [site(worker) for worker in range(2)], batch_size=16).evaluate(run.x)
    assert metrics.objective[-1] == pytest.approx(exact["objective"], rel=ROUNDED)
    assert metrics.gradient_norm[-1] == pytest.approx(exact["gradient_norm"], rel=ROUNDED)
    check_replay(run, tmp_path / "run", problem)


def test_sites_killed_while_computing_sending_or_idle_come_back_and_each_job_counts_once(tmp_path: Path) -> None:
    computing, sending = Trouble("kill", 0, 2), (Trouble("kill soon", 1, 2, 0.0), Trouble("kill soon", 0, 5, 0.305))
    problem = Real([[c] * 200_000 for c in (0.0, 6.0)], {0: 0.3}, (computing, *sending), tmp_path, noise=0.0)
    before: list[Any] = []
    with dialling(tmp_path, problem) as sites:
        fleet = sites.fleet()

        def strike(state: dd.State, arrival: dd.Arrival) -> None:
            if (arrival.worker, arrival.job.draw) == (1, 5) and not before:
                before.append(fleet.control.places[1])
                kill(fleet, 1)  # it has just reported

        method = dd.DuDe(lr=0.1, memory="workers", wait_for=2)
        run = dd.train(method, problem, fleet, updates=9, watch=[strike], folder=tmp_path / "run")
        assert before != [fleet.control.places[1]]
    crashes = [event for event in run.trace.events if event["kind"] == "crashed"]
    assert sorted(event["worker"] for event in crashes) == [0, 0, 1, 1]
    for event in crashes:
        assert event["text"] in (f"site-{event['worker']} began anew", "it does not say what it keeps")
    for worker in range(2):
        assert run.trace.draw[run.trace.worker == worker].tolist() == list(range(9))
    assert run.audit is not None and run.audit <= audit(run)
    check_replay(run, tmp_path / "run", problem)


def test_a_site_that_hangs_is_done_without_and_joins_by_itself_when_it_is_back(tmp_path: Path) -> None:
    """And exceptions and malformed gradients are reported."""
    troubles = (Trouble("hang", 1, 5, 600.0), Trouble("raise", 0, 2), Trouble("nan", 0, 4), Trouble("shape", 0, 6))
    problem = Real(PAIR, {0: 0.02, 1: 0.02}, troubles, tmp_path)
    killed: list[Any] = []
    with dialling(tmp_path, problem) as sites:
        fleet = sites.fleet(faults=dd.FaultPolicy(deadline=5.0))

        def back(state: Any, arrival: dd.Arrival) -> bool:
            if not killed and state.n == 1:
                killed.append(fleet.control.places[1])
                kill(fleet, 1)  # somebody has looked after it
            return arrival.worker == 1 and arrival.job.draw > 10

        run = dd.train(dd.DuDe(lr=0.05, memory="workers"), problem, fleet, folder=tmp_path / "run", **until(back))
        assert run.ended == "stop" and killed != [fleet.control.places[1]] and run.state.n == 2
    assert events(run, 1) == ["crashed", "lost", "restored", "left", "joined"]
    assert any("no answer in 5 s to job number 5" in event["text"] for event in run.trace.events)
    assert events(run, 0) == ["failed", "rejected", "rejected"] and run.rejected == 2
    failed = next(event["text"] for event in run.trace.events if event["kind"] == "failed")
    assert failed == "ValueError (its text stays at the site, in the site's log)", "which may quote data"
    assert "ValueError: worker 0 has a bad sample" in sites.said(0)
    assert run.audit is not None and run.audit <= audit(run)
    check_replay(run, tmp_path / "run", problem)


def test_sites_are_polled_and_one_that_is_killed_while_it_holds_a_job_hands_it_on(tmp_path: Path) -> None:
    problem, method = Real(TRIO, {0: 0.01, 1: 0.02, 2: 0.1}), dd.algorithms.QuAFL(lr=0.05, steps=5, period=0.15)
    before: list[Any] = []
    with dialling(tmp_path, problem) as sites:
        fleet = sites.fleet()

        def strike(state: dd.State, arrival: dd.Arrival) -> None:
            if state.version == 5 and not before and arrival.worker != 1:
                before.append(fleet.control.places[1])
                kill(fleet, 1)
            elif before and fleet.control.places[1] == before[0]:
                time.sleep(0.2)  # the run is not to end before its process is replaced

        run = dd.train(method, problem, fleet, updates=14, watch=[strike], folder=tmp_path / "run")
    happened = [kind for kind in events(run) if kind != "wake"]
    assert happened == ["crashed", "lost", "restored"] and events(run, 1) == happened
    assert 0 <= run.trace.steps.min() < run.trace.steps.max() <= 5
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
fleet = dd.SiteFleet(listen=sys.argv[2], roster=sys.argv[3])
dd.train(method, problem, fleet, updates=16, server=server, evaluation=evaluation, watch=[kill_server],
         folder=sys.argv[1], checkpoint_every=3)
"""


def test_a_run_whose_server_was_killed_goes_on_with_the_same_sites(tmp_path: Path) -> None:
    """Their processes stay and dial in again by themselves; models and messages travel as small differences."""
    problem, folder = dd.Digits(workers=3), tmp_path / "run"
    with dialling(tmp_path, problem, partial(dd.Digits, workers=3)) as sites:
        command = [sys.executable, "-c", SERVER, str(folder), f"127.0.0.1:{sites.port}", str(sites.roster)]
        end = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert end.returncode == -signal.SIGKILL, end
        saved = dd.load(folder).version
        fleet = sites.fleet()
        with pytest.raises(dd.BadInput, match="Whom to let in is not for a folder to decide"):
            dd.resume(folder)
        run = dd.resume(folder, fleet=fleet)
        sites.wait()
    assert 3 <= saved <= 9 and run.version == 16 and set(events(run)) == {"wake"}
    for worker in range(3):
        mine = run.trace.worker == worker
        assert run.trace.draw[mine].tolist() == list(range(mine.sum()))
        assert sites.said(worker).count("the run has ended.") == 1
    size = run.x.numel()
    assert set(run.trace.bytes.tolist()) == {size + 4}, "a byte for each weight"
    assert set(run.trace.down[-3:].tolist()) <= {size + 4, 4 * size}
    assert {0, 16} <= set(run.metrics.version.tolist())
    check_replay(run, folder)


def test_a_run_begins_with_a_quorum_and_others_join_when_they_come(tmp_path: Path) -> None:
    """One that was asked to leave does not come back by itself."""
    problem, asked = Real(TRIO, {0: 0.01, 1: 0.01, 2: 0.01}), list[int]()
    with dialling(tmp_path, problem, away={2: 1.0}) as sites:
        fleet = sites.fleet(quorum=2)

        def seen(state: Any, arrival: dd.Arrival) -> bool:
            if arrival.worker == 2 and not asked:
                asked.append(state.n)
                fleet.control.leave(0)
            return bool(asked) and state.n == 2 and arrival.job.draw > 300

        run = dd.train(dd.DuDe(lr=0.05), problem, fleet, folder=tmp_path / "run", **until(seen))
    assert run.ended == "stop" and asked == [3]
    assert events(run, 2) == ["left", "joined"] and events(run, 0) == ["left"]
    check_replay(run, tmp_path / "run", problem)


def test_a_second_process_of_a_site_takes_the_place_of_the_first_which_ends(tmp_path: Path) -> None:
    problem = Real(PAIR, {0: 0.01, 1: 0.01})
    with dialling(tmp_path, problem) as sites:
        fleet, first, second = sites.fleet(), list[Any](), copy.copy(sites)

        def dial(state: Any, arrival: dd.Arrival) -> bool:
            if not first and state.version > 20:
                first.append(fleet.control.places[1])
                second.start(problem, only=[1])
            return bool(first) and fleet.control.places[1] != first[0] and "not needed any more" in sites.said(1)

        run = dd.train(dd.DuDe(lr=0.05), problem, fleet, **until(dial))
        second.stop()
    assert run.ended == "stop" and events(run) == ["crashed"]
    assert "another process has dialled in as site-1 since; this one is not needed any more." in sites.said(1)


def test_half_sent_bodies_are_completed(tmp_path: Path) -> None:
    problem = Real([[c] * 300_000 for c in (0.0, 6.0)], noise=0.0)
    sites, fates = Sites(tmp_path, 2), iter([5e5, 1e6, 2e6, 3e5] + [None] * 1000)
    line = Line(sites.port, lambda draw: next(fates))
    sites.start(problem, line.port)
    try:
        run = dd.train(dd.DuDe(lr=0.1), problem, sites.fleet(), updates=4, folder=tmp_path / "run")
    finally:
        sites.stop()
        line.close()
    assert line.cut >= 3 and events(run) == []
    check_replay(run, tmp_path / "run", problem)


def test_a_site_with_another_problem_is_refused_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem, other = Real(PAIR, {0: 0.01}), Real([[0.0, 1.0], [7.0, 7.0]])
    sites = Sites(tmp_path, 2)
    wrong = copy.copy(sites)
    sites.start(problem, only=[0])
    wrong.start(other, only=[1])
    try:
        run = dd.train(dd.DuDe(lr=0.05), problem, sites.fleet(quorum=1), **until(lambda *_: "was refused" in caplog.text))
        sites.wait()
        wrong.wait()
    finally:
        sites.stop()
        wrong.stop()
    assert run.ended == "stop" and events(run) == ["left"] and run.state.n == 1
    line = f"its problem has the fingerprint {other.fingerprint()[:12]}, the server's {problem.fingerprint()[:12]}"
    assert f"site-1 was refused at 127.0.0.1: {line}" in caplog.text
    assert f"refused this site: {line}: another model, settings or code." in sites.said(1)


def test_a_site_that_comes_back_with_other_data_or_sends_nonsense_is_refused(tmp_path: Path) -> None:
    sites, problem = Sites(tmp_path, 1), dd.Quadratic([[1.0]])
    transport = sites.fleet().connect(problem, Half(dd.DuDe(lr=0.1)), None, {"algorithm": {}, "seed": 0})
    assert isinstance(transport, SiteTransport)
    try:
        book = transport.hub.sites[0]
        assert transport.why_not_started(0) == ": site-0 has not dialled in"
        admit = transport.hub.admit
        assert admit(0, problem.fingerprint(), "apples") == admit(0, problem.fingerprint(), "apples") == ""
        assert admit(0, problem.fingerprint(), "pears").startswith("its data are not those that site-0 began with")
        assert admit(0, "another", "apples").startswith("its problem has the fingerprint another, the server's ")
        book.session = "three"
        transport.hub.inbox.put(Incoming(0, "three", hello=True))
        assert transport.receive(0.0) == [Returned(0)]
        book.refused = ""
        transport.hub.inbox.put(Incoming(0, "three", b"nonsense"))
        transport.hub.inbox.put(Incoming(0, "two", b"of an earlier session"))
        transport.hub.inbox.put(Incoming(0, "three", b"".join(wire.encode("stop", {}))))
        assert transport.receive(0.0) == [] and "a site does not send a message 'stop'" in book.refused
    finally:
        transport.close(ended=False)


def test_who_says_goodbye_is_refused_or_silent_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last gradient would go on counting, for thousands of updates perhaps."""
    sites, problem = Sites(tmp_path, 1), dd.Quadratic([[1.0]])
    fleet = sites.fleet(silence=30.0)
    transport = fleet.connect(problem, Half(dd.DuDe(lr=0.1)), None, {"algorithm": {}, "seed": 0})
    assert isinstance(transport, SiteTransport)
    now, book = time.monotonic(), transport.hub.sites[0]

    def at_work(incarnation: int) -> None:
        book.session, book.seen, book.refused = f"session {incarnation}", now, ""
        transport.hub.inbox.put(Incoming(0, book.session, hello=True))
        transport.receive(0.0)
        transport.start(0, incarnation)

    try:
        at_work(0)
        book.session = ""
        transport.hub.inbox.put(Incoming(0, "", bye=True))
        assert transport.receive(0.0) == [Died(0, 0, "site-0 was stopped where it is", True)]
        at_work(1)
        transport.hub.inbox.put(Incoming(0, book.session, b"nonsense"))
        assert transport.receive(0.0) == [Died(0, 1, book.refused, True)] and "cannot be read" in book.refused
        at_work(2)
        monkeypatch.setattr(time, "monotonic", lambda: now)
        for _ in range(29):
            now += 1.1
            assert transport.receive(0.0) == [], "not yet, or it is being sent something"
            book.travelling = 200_000
        now, book.waiting = now + 30, asyncio.Event()
        assert transport.receive(0.0) == [], "it waits for something, or the server itself did not look for long"
        book.waiting, book.travelling = None, 0
        for _ in range(25):
            now += 1.1
            assert transport.receive(0.0) == []
        now += 5
        assert transport.receive(0.0) == [Died(0, 2, "site-0 was not heard of for 30 s", True)] and not book.session
    finally:
        monkeypatch.undo()
        transport.close(ended=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"names": ("site-0", "site-0")}, "with one of them twice"),
        ({"names": ("site-0",)}, "the problem has 2 workers, and there are 1 sites"),
        ({"names": ("site-0", "nobody")}, "nobody is not enrolled in"),
        ({"names": ("two words", "x")}, "a site is called 'two words'"),
        ({"quorum": 3}, "quorum is 3, but 2 workers are there at the start"),
        ({"quorum": 0}, "quorum is 0"),
    ],
)
def test_sites_that_do_not_fit_are_refused_before_anything_is_opened(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    sites = Sites(tmp_path, 2)
    with pytest.raises(dd.BadInput) as refused:
        dd.train(dd.DuDe(lr=0.1), Real(PAIR), sites.fleet(**settings), updates=1)
    assert words in str(refused.value)


def test_a_run_goes_on_with_the_sites_that_it_began_with_and_a_folder_is_tried_before_anybody_dials(tmp_path: Path) -> None:
    assert cli._begun(tmp_path / "new") is None and (tmp_path / "new").is_dir()
    with dialling(tmp_path, Real(PAIR)) as there:
        names = cli._names(None, there.roster)
        assert names == ("site-0", "site-1")
        dd.train(dd.DuDe(lr=0.05), Real(PAIR), there.fleet(names=names), updates=4, folder=tmp_path / "begun")
        keys.enroll("fifth", there.roster, tmp_path / "fifth.key")
        record = cli._begun(tmp_path / "begun")
        assert cli._names(record, there.roster) == ("site-0", "site-1") != cli._names(None, there.roster)
    with pytest.raises(dd.BadInput, match=r"the folder \S+ cannot be written to .*; choose another: --folder"):
        cli._begun(there.roster / "below")

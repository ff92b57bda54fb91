"""The coordinator of real workers under many orders of events that real processes meet rarely.

Server and workers are the real ones, on virtual time (tests/virtual.py).
"""

import os
import random
import signal

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.engine.evaluation import Schedule
from dualdelay.workers.messages import Reply
from dualdelay.workers.records import MOVES, Status, WorkerRecord
from helpers import audit, rounding
from transports import VirtualFleet
from virtual import DUDE, STORMS, TRIO, Rough, VirtualRun, fleet_of


@pytest.mark.parametrize("status", Status)
def test_a_worker_moves_between_states_as_the_table_allows_and_no_other_way(status):
    for following in Status:
        record = WorkerRecord(0, status)
        if following in MOVES[status]:
            record.move(following)
            assert record.status is following
        else:
            with pytest.raises(AssertionError, match=f"worker 0 is {status.value} and cannot be {following.value}"):
                record.move(following)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize("storm", STORMS)
def test_in_any_order_of_events_the_sum_the_jobs_and_the_record_are_right(storm, seed):
    kind, algorithm, gone, together = STORMS[storm]
    chance, now, sums = random.Random(seed), 0.0, 0
    problem = kind(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).tolist(), noise=0.3)
    schedule = Schedule(7) if kind is Rough else None
    policy = {"patience": 1.0, "restarts": 2, "retries": 1, "gone": gone, "resend": 0.05, "deadline": 3.0, "alarm": 5}

    def begin(before=None):
        fleet = fleet_of(
            **policy,
            start_seconds=lambda *process: chance.choice([0.05, 0.05, 0.3, 1.5]) * chance.choices([1, -1], [19, 1])[0],
            job_seconds=lambda request: chance.choice([0.005, 0.02, 0.02, 0.1]),
            together=together,
        )
        return VirtualRun(algorithm, problem, fleet, schedule, before)

    here = begin()
    for _ in range(250):
        try:
            here.go(1)
        except dd.RunFailed:
            here = begin(before=here)
            continue
        assert here.loop.now > now - 1e-9
        now = here.loop.now
        here.check_jobs()
        sums += here.check_sum()
        what = chance.choices(["kill", "leave", "join", "save", ""], [3, 1, 3, 2, 91])[0]
        if what == "kill":
            for worker in chance.sample(range(4), chance.choice([1, 1, 3])):
                here.transport.kill(worker, known=chance.choice([0.0, 0.2, 1.0]))
        elif what == "save":
            here = begin(before=here)
        elif what:
            getattr(here.control, what)(chance.randrange(4))
    here.evaluate_last()
    assert not here.workers._evaluations.open
    assert sums > 50 or not isinstance(here.loop.state, dd.AggregateState)
    problem.raises = lambda *job: False
    here.check_replay()


@pytest.mark.numeric
def test_the_gradient_of_a_worker_that_has_left_is_neither_counted_nor_saved():
    here = VirtualRun(DUDE()).go(60)
    here.control.leave(2)
    while here.kinds != [("left", 2)]:
        here.go(1)
    held, saved = here.loop.memories(), here.loop.save()["fleet"]
    close = rounding(4 * len(here.loop.recorder.trace()))
    assert set(held) == {0, 1} and here.loop.state.audit(held) <= close
    assert (len(saved["held"]), saved["lost"], saved["left"]) == (2, [], [2])
    back = VirtualRun(DUDE(), before=here).go(100)
    assert back.kinds == [("left", 2), ("joined", 2)]
    back.check()


def test_a_run_that_all_workers_have_left_is_resumed_with_all():
    here = VirtualRun(DUDE(memory="server"), fleet=fleet_of(restarts=0)).go(50)
    for worker in range(3):
        here.transport.kill(worker, known=0.1 * worker)
    with pytest.raises(dd.RunFailed, match="0 workers are at work"):
        here.go(50)
    assert here.loop.state.n == 0
    back = VirtualRun(DUDE(memory="server"), before=here).go(50)
    assert back.loop.state.n == 3 and back.loop.state.version > here.loop.state.version + 30


@pytest.mark.parametrize("second", [0.05, 3.0])
def test_an_overdue_worker_that_dies_joins_once_when_its_next_process_is_ready(second):
    seconds = {(2, 0): -3.0, (2, 1): second}
    here = VirtualRun(DUDE(), fleet=fleet_of(patience=1.0, start_seconds=lambda *process: seconds.get(process, 0.05))).go(
        800
    )
    assert here.kinds == [("left", 2), ("crashed", 2), ("joined", 2)] and here.loop.state.n == 3
    here.check()


def test_a_warning_names_the_workers_whose_processes_take_long_to_start(caplog):
    VirtualRun(DUDE(), fleet=fleet_of(start_seconds=lambda worker, incarnation: 40.0 if worker == 1 else 0.05)).go(20)
    warnings = [record.getMessage() for record in caplog.records if "still waiting" in record.getMessage()]
    assert [text[:10] for text in warnings] == ["after 15 s", "after 30 s"]
    assert all("workers 1 to start" in text for text in warnings)


def test_a_worker_that_left_by_a_fault_is_present_when_a_resumed_run_begins():
    """Its process is started with the others', and not when they are at work already."""
    here = VirtualRun(DUDE(memory="server"), fleet=fleet_of(restarts=0)).go(50)
    here.transport.kill(1)
    here.go(50)
    assert here.loop.state.n == 2
    back = VirtualRun(DUDE(memory="server"), before=here, fleet=fleet_of(start_seconds=lambda *process: 5.0)).go(30)
    later = back.loop.recorder.trace().worker[len(here.loop.recorder) :].tolist()
    assert back.loop.state.n == 3 and 1 in later[:4], later


class Broken(dd.Quadratic):
    """No gradient can be computed, but by the workers below ``first_broken``."""

    first_broken = 0

    def gradient(self, x, worker, draw):
        if worker >= self.first_broken:
            raise ValueError(f"no shape fits worker {worker}")
        return super().gradient(x, worker, draw)


def test_if_no_worker_can_compute_a_first_gradient_the_run_ends_at_once():
    with pytest.raises(dd.RunFailed, match=r"nobody could compute a first gradient; worker \d says: ValueError: no shape"):
        VirtualRun(DUDE(), Broken(TRIO)).go(50)


def test_if_one_worker_can_compute_a_first_gradient_the_run_goes_on_with_it():
    problem = Broken(TRIO)
    problem.first_broken = 1
    assert VirtualRun(DUDE(), problem, fleet=fleet_of(retries=1)).go(50).loop.state.n == 1


@pytest.mark.parametrize(("gone", "kinds"), [("leave", ["left", "joined"]), ("freeze", ["frozen", "thawed"])])
def test_a_worker_that_comes_late_while_others_still_start_works_like_them(gone, kinds):
    seconds = {(0, 0): 1.3, (1, 0): -0.8, (1, 1): 0.8}
    fleet = fleet_of(patience=1.0, gone=gone, start_seconds=lambda *process: seconds.get(process, 0.05))
    here = VirtualRun(DUDE(), fleet=fleet).go(200)
    assert here.kinds == [("crashed", 1), *((kind, 0) for kind in kinds)]
    assert min(np.bincount(here.loop.recorder.trace().worker)) > 50
    here.check()


@pytest.mark.parametrize(("seconds", "end", "there"), [(-0.05, "crashed", {0, 1, 2}), (1e9, "left", {0, 2})])
def test_a_memory_lost_at_the_save_is_restored_although_the_next_process_does_not_start(seconds, end, there):
    before = VirtualRun(DUDE()).go(60)
    before.transport.kill(1, known=1.0)

    def start(*process):
        return seconds if process == (1, 0) else 0.05

    here = VirtualRun(DUDE(), fleet=fleet_of(patience=1.0, start_seconds=start), before=before).go(300)
    assert here.kinds == [("lost", 1), ("restored", 1), (end, 1)] and set(here.kept) == there
    here.check()


def test_a_reply_is_computed_again_if_its_worker_dies_before_it_is_taken():
    here = VirtualRun(DUDE(), fleet=fleet_of(together=0.05)).go(60)
    while any(record.request is None for record in here.records):
        here.go(1)
    here.transport.kill(1)
    here.transport.at(here.transport.processes[2].free + 0.001, lambda: here.transport.die(2))
    here.go(200)
    lost = [("lost", 1), ("lost", 2), ("restored", 2), ("restored", 1)]
    assert here.kinds == [("crashed", 1), *lost, ("crashed", 2)]
    here.check()


class Round(dd.DuDe):
    """The worker whose gradient arrives is not sent the next job, but the worker after it, so that jobs queue."""

    def step(self, s, a):
        return [dd.send((order.worker + 1) % s.n) for order in super().step(s, a)]


def test_the_next_job_in_a_queue_waits_until_the_last_reply_is_taken():
    VirtualRun(Round(lr=0.02, memory="workers", start="zeros"), fleet=fleet_of(together=0.004)).go(200).check()


def test_a_frozen_worker_whose_process_never_started_has_one_job_when_it_thaws():
    start = {(2, 0): -3.0}
    fleet = fleet_of(patience=1.0, restarts=0, gone="freeze", start_seconds=lambda *process: start.get(process, 0.05))
    here = VirtualRun(DUDE(start="zeros"), fleet=fleet).go(400)
    assert here.kinds == [("frozen", 2), ("crashed", 2)] and here.records[2].status is Status.FROZEN
    here.control.join(2)
    here.go(100)
    assert here.kinds[2:] == [("thawed", 2)] and [job.worker for job in here.workers.in_flight].count(2) == 1
    here.check()


def test_rejections_that_stopped_a_run_do_not_stop_its_replay(tmp_path):
    problem = Rough(TRIO, noise=0.3)
    problem.raises, problem.spoils = lambda *job: False, lambda worker, draw: worker == 0 and draw < 10
    with pytest.raises(dd.RunFailed, match="number 10 in a row"):
        dd.simulate(dd.DuDe(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=30, folder=tmp_path / "run")
    assert dd.resume(tmp_path / "run", problem=problem).version == 30
    assert dd.replay(tmp_path / "run", problem=problem).version == 30


def test_a_gradient_that_left_with_its_worker_ages_no_more_in_what_is_logged():
    logged, speeds = [], dd.FixedSpeeds([1.0, 1.0, 1.0])
    log = [lambda version, values: logged.append(values)]
    end = dd.simulate(
        dd.DuDe(lr=0.05),
        dd.Quadratic(TRIO),
        dd.SimulatedFleet(speeds, changes=[dd.speeds.leave(2, 5.0)]),
        updates=200,
        watch=dd.Reporting(log=log),
    )
    assert logged[-1]["tau_max"] == end.delays.tau_max < 10


def test_a_resumed_run_logs_its_own_updates_alone(tmp_path):
    logged, speeds = [], dd.FixedSpeeds([1.0, 1.0, 1.0])
    dd.simulate(dd.DuDe(lr=0.05), dd.Quadratic(TRIO), speeds, updates=200, folder=tmp_path / "run")
    dd.resume(tmp_path / "run", updates=201, watch=dd.Reporting(log=[lambda version, values: logged.append(values)]))
    rates, delays = ([logged[-1][f"worker/{worker}/{name}"] for worker in range(3)] for name in ("rate", "delay"))
    assert logged[-1]["updates_per_second"] == sum(rates) > 0 and sorted(delays) == [0.0, 0.0, 3.0]


class Late(dd.VanillaASGD):
    def step(self, s, a):
        return [*super().step(s, a), dd.wake(1.0)]

    def on_wake(self, s, time):
        return []


def test_a_wake_in_the_past_comes_now():
    here, times = VirtualRun(Late(lr=0.05)), [0.0]
    while times[-1] < 1.5:
        times.append(here.go(1).loop.now)
    assert times == sorted(times) and ("wake", -1) in here.kinds


def test_a_worker_asked_to_leave_and_at_once_to_join_does_both():
    here = VirtualRun(DUDE()).go(30)
    here.control.leave(1)
    here.control.join(1)
    here.go(100)
    assert here.kinds == [("left", 1), ("joined", 1)] and here.records[1].status is Status.PRESENT
    here.check()


@pytest.mark.numeric
def test_a_frozen_gradient_outlives_its_process_and_what_others_lose_later():
    problem = Rough(TRIO)
    problem.raises, problem.spoils = lambda *job: job == (1, 20), lambda *job: False
    here = VirtualRun(DUDE(), problem, fleet_of(gone="freeze", retries=0)).go(100)
    frozen = here.kept[1]["gradient"]
    here.transport.kill(1)
    here.go(20).transport.kill(2)
    here.go(100)
    restored = [(kind, worker) for worker in (1, 2) for kind in ("crashed", "lost", "restored")]
    assert here.kinds == [("failed", 1), ("frozen", 1), *restored]
    assert float((here.kept[1]["gradient"] - frozen).abs().max()) <= rounding(2 * 3) * 64 and here.check_sum()


# --- a server that sleeps, workers that do not answer, replies that are none ---


@pytest.mark.parametrize("asleep", [3.5, 60.0, 1e5])
def test_a_server_that_was_asleep_hears_first_and_judges_afterwards(asleep):
    here = VirtualRun(DUDE(), fleet=fleet_of(deadline=3.0, resend=1.0, patience=3.0))
    for _ in range(10):
        here.go(7)
        here.transport.time.now += asleep  # SIGSTOP and SIGCONT; what workers answered meanwhile is waiting
    here.go(20).check()
    assert here.kinds == []
    before = here.workers.now
    here.transport.processes[1].free = here.transport.time.now + 1e6  # now one of them is asleep, and has its three seconds
    while not here.kinds:
        here.go(1)
    assert ("crashed", 1) in here.kinds and 3.0 <= here.workers.now - before < 3.5


@pytest.mark.parametrize("busy", [0.9, 8.0])
def test_a_server_busy_for_longer_than_the_deadline_with_every_arrival_loses_no_worker(busy):
    here = VirtualRun(DUDE(), fleet=fleet_of(deadline=2.0, job_seconds=lambda request: 0.5))
    for _ in range(60):
        here.go(1)
        here.transport.time.now += busy
    here.check()
    assert here.kinds == []


def test_a_worker_that_does_not_say_what_it_keeps_delays_one_checkpoint_and_no_more():
    here = VirtualRun(DUDE(), fleet=fleet_of(deadline=600.0))
    here.go(30)
    asked, frozen, answer = [], {1}, here.transport.kept

    def kept(accepted):
        asked.append(sorted(accepted))
        return {worker: held for worker, held in answer(accepted).items() if worker not in frozen}

    here.transport.kept = kept
    here.transport.processes[1].free = here.transport.time.now + 5.0  # SIGSTOP
    for _ in range(10):
        saved = here.go(5).loop.save()
        assert saved["fleet"]["lost"] == [1]
    assert asked[0] == [0, 1, 2] and asked[1:] == [[0, 2]] * 9
    while here.transport.time.now < 8.0:  # SIGCONT: when it has answered, it is asked again
        here.go(5)
    frozen.clear()
    assert here.loop.save()["fleet"]["lost"] == [] and asked[-1] == [0, 1, 2]
    here.check()


def test_a_memory_missing_in_a_checkpoint_is_restored_when_the_run_goes_on_from_it():
    here = VirtualRun(DUDE()).go(30)
    answer = here.transport.kept
    here.transport.kept = lambda accepted: {worker: held for worker, held in answer(accepted).items() if worker != 1}
    after = VirtualRun(DUDE(), before=here).go(40)
    assert after.kinds[:2] == [("lost", 1), ("restored", 1)]
    after.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": None},
        {"loss": "low"},
        {"loss": 1j},
        {"loss": torch.zeros(2)},
        {"seconds": None},
        {"value": None},
        {"value": "g"},
        {"value": np.array(["a", "b"])},
        {"value": [1.0, 2.0]},
        {"value": Packed(2**40 - 1, (np.zeros(1, np.int32), np.ones(1)))},
        {"value": {"x": Packed(2**22, (np.zeros((2, 1), np.int32), np.ones((2, 1))))}},
        {"error": None},
    ],
    ids=str,
)
def test_a_reply_that_is_none_counts_as_a_job_that_failed(wrong):
    here = VirtualRun(DUDE(), fleet=fleet_of(retries=5))
    take, spoilt = here.transport.receive, iter(range(100))

    def receive(timeout):
        notices = take(timeout)
        return [
            notice._replace(**wrong) if isinstance(notice, Reply) and next(spoilt) % 4 == 0 else notice
            for notice in notices
        ]

    here.transport.receive = receive
    here.go(60).check()
    failed = [event for event in here.loop.recorder.events if event["kind"] == "failed"]
    assert len(failed) > 5 and all("BadReply" in event["text"] for event in failed)


def test_a_reply_from_an_unknown_worker_is_dropped():
    here = VirtualRun(DUDE()).go(10)
    take = here.transport.receive

    def receive(timeout):
        notices = take(timeout)
        extra = [one._replace(request=one.request._replace(worker=99)) for one in notices if isinstance(one, Reply)]
        return [*extra, *notices]

    here.transport.receive = receive
    here.go(30).check()
    assert here.control.counts["dropped"] > 10


SILENT = dd.Reporting(progress=False)


def trained_fleet(**settings):
    """Workers for ``train``; how long their jobs take is chance, so that each run takes its own course."""
    chance = random.Random(5)
    return VirtualFleet(job_seconds=lambda request: chance.uniform(0.01, 0.05), **settings)


def interrupt_at(version):
    """An interrupt at this version."""

    def watch(state, arrival):
        if state.version == version:
            raise KeyboardInterrupt

    return dd.Reporting(watch=[watch], progress=False)


@pytest.mark.parametrize("at", [91, 110, 117])
def test_a_real_run_that_goes_on_from_an_older_checkpoint_keeps_nothing_of_its_former_course(at, tmp_path):
    """One bit of the newest checkpoint of a finished run is flipped; it is resumed, interrupted and resumed."""
    folder, problem, fleet = tmp_path / "run", dd.Quadratic(TRIO, noise=0.3), trained_fleet()
    dd.train(DUDE(), problem, fleet, updates=120, folder=folder, checkpoint_every=40, watch=SILENT)
    newest = max((folder / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    with pytest.raises(KeyboardInterrupt):
        dd.resume(folder, fleet=fleet, watch=interrupt_at(at))
    kept = dd.load(folder)
    assert (kept.ended, kept.version) == ("interrupted", at)
    ended = dd.resume(folder, fleet=fleet, watch=SILENT)
    assert ended.version == 120 and ended.audit <= audit(ended)
    assert dd.replay(folder, watch=SILENT).same_bits


def test_a_real_run_that_is_lengthened_and_killed_can_be_replayed_later(tmp_path):
    folder, problem, fleet = tmp_path / "run", dd.Quadratic(TRIO, noise=0.3), trained_fleet()
    dd.train(DUDE(), problem, fleet, updates=40, folder=folder, checkpoint_every=10, watch=SILENT)
    with pytest.raises(KeyboardInterrupt):
        dd.resume(folder, updates=90, fleet=fleet, watch=interrupt_at(66))
    with pytest.raises(dd.BadInput, match="not finished"):
        dd.replay(folder)
    assert dd.resume(folder, fleet=fleet, watch=SILENT).version == 90
    assert dd.replay(folder, watch=SILENT).same_bits


def test_a_fleet_that_no_name_can_build_is_given_again(tmp_path):
    folder = tmp_path / "run"
    dd.train(DUDE(), dd.Quadratic(TRIO), trained_fleet(), updates=10, folder=folder, watch=SILENT)
    with pytest.raises(dd.BadInput, match=r"the recorded fleet is a VirtualFleet.*dd.resume\(folder, fleet=...\)"):
        dd.resume(folder, updates=20)


def test_an_interrupt_while_workers_start_is_explained(tmp_path):
    problem, folder = dd.Quadratic(TRIO, noise=0.3), tmp_path / "run"

    def interrupted(*process):
        os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, also while they start
        return 0.05

    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="still starting; nothing had begun"):
            dd.train(DUDE(), problem, VirtualFleet(start_seconds=interrupted), updates=40, folder=folder, watch=SILENT)
        assert not folder.exists()
        dd.train(DUDE(), problem, VirtualFleet(), updates=40, folder=folder, watch=SILENT)
        with pytest.raises(KeyboardInterrupt, match="still starting; the run is as it was saved last"):
            dd.resume(folder, updates=50, fleet=VirtualFleet(start_seconds=interrupted), watch=SILENT)
        assert dd.resume(folder, updates=50, fleet=VirtualFleet(), watch=SILENT).version == 50
    finally:
        signal.signal(signal.SIGTERM, handler)

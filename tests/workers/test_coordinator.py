"""The bookkeeping of real workers under many orders of events that real processes meet rarely.

Server and workers are the real ones, with a post in this process between them whose seconds pass only while somebody waits.
The same with real processes is in test_ray_faults.py.
"""

import heapq
import itertools
import os
import random
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.environment import environment
from dualdelay.engine.evaluation import Schedule
from dualdelay.engine.loop import Loop
from dualdelay.simulation.clocks import RecordedClock
from dualdelay.simulation.local_fleet import LocalFleet
from dualdelay.storage.files import decode, encode
from dualdelay.workers.crew import Crew
from dualdelay.workers.messages import Died, Measured, Ready, Reply
from dualdelay.workers.worker import Worker
from helpers import rounding

TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
DUDE = partial(dd.DuDe, lr=0.05, memory="workers")


class Process(Worker):
    alive, free = True, 0.0  # free: when it has done what it was asked for


def _a_hundredth(worker, samples):
    return 0.01


class LocalPost:
    """A post in this process: what Staff and Crew use of ``Post``, with processes that can be killed.

    ``start`` and ``job`` say how many seconds a process takes to start (less than zero: it dies then) and for a job, and
    ``look`` for an evaluation on so many samples; what comes less than ``together`` later than the first notice comes with
    it.
    """

    def __init__(
        self,
        clock,
        fleet,
        problem,
        message,
        output,
        *,
        start=lambda *who: 0.05,
        job=lambda: 0.02,
        together=0.0,
        look=_a_hundredth,
    ):
        self._clock, self._kit, self._start, self._job, self._together = clock, (problem, message), start, job, together
        self._look = look
        self._due, self._count = [], itertools.count()
        self.processes = {}

    def at(self, moment, happens):
        heapq.heappush(self._due, (moment, next(self._count), happens))

    def _call(self, process, seconds, answer):
        process.free = max(self._clock.now, process.free) + seconds
        self.at(process.free, lambda: answer() if process.alive else None)

    def hire(self, worker, incarnation):
        self.dismiss(worker)
        process = self.processes[worker] = Process(worker, *self._kit, 1)
        process.incarnation, seconds = incarnation, self._start(worker, incarnation)
        samples = process.samples() if self._kit[0].needs_sample_counts else None
        ready = partial(Ready, worker, incarnation, "here", 1, environment(), samples)
        self._call(process, abs(seconds), ready if seconds >= 0 else partial(self.die, worker))

    def die(self, worker):
        self.processes[worker].alive = False
        return Died(worker, self.processes[worker].incarnation, "its process died")

    def kill(self, worker, known=0.0):
        """A process dies now, and the server is told so many seconds later."""
        if worker in self.processes and self.processes[worker].alive:
            notice = self.die(worker)
            self.at(self._clock.now + known, lambda: notice)

    def dismiss(self, worker):
        if worker in self.processes:
            self.processes.pop(worker).alive = False

    def put(self, x):
        return x.detach().numpy().copy()

    def get(self, model):
        return torch.from_numpy(model)

    def ask(self, request, model, held):
        if request.worker in self.processes:
            process, spare = self.processes[request.worker], None if held is None else held.numpy().copy()
            self._call(process, self._job(), lambda: process.compute(request, model, spare))

    def lacking(self, worker):
        return ""

    def close(self):
        self.processes.clear()

    def measure(self, worker, incarnation, piece, unit):
        process, seconds = self.processes[worker], self._look(worker, piece.samples)

        def measured():
            part = process.measure(piece.model.x, piece.samples, unit)
            if isinstance(part, dict):
                part = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in part.items()}
                part["seconds"] = seconds
            return Measured(worker, incarnation, piece.evaluation, part)

        self._call(process, seconds, measured)

    def held(self, accepted):
        there = [worker for worker in accepted if worker in self.processes and self.processes[worker].alive]
        kept = {worker: self.processes[worker].held(accepted[worker]) for worker in there}
        return {worker: None if held is None else torch.from_numpy(held.copy()) for worker, held in kept.items()}

    def receive(self, timeout):
        until, notices = self._clock.now + timeout, []
        self._clock.now += 1e-5
        while self._due and self._due[0][0] <= until:
            moment, _, happens = heapq.heappop(self._due)
            self._clock.now = max(self._clock.now, moment)
            notice = happens()
            if notice is not None:
                until = until if notices else self._clock.now + self._together
                notices.append(notice)
        if not notices:
            self._clock.now = max(self._clock.now, until)
        return notices


class Running:
    """A run, one event at a time; it begins, or goes on from what another would save now."""

    def __init__(self, algorithm, problem, fleet, schedule, before):
        self.fleet, self.crew = fleet, Crew(fleet, problem, algorithm.message)
        self.staff, self.post = self.crew._staff, self.crew._post
        self.loop = Loop(algorithm, problem, self.crew, problem.start(0), schedule=schedule)
        if before is None:
            self.loop.begin()
        else:
            self.loop.load(decode(encode(before.loop.save())), before.loop.recorder.rows())

    def go(self, events):
        for _ in range(events):
            if self.crew.peek() is None:
                raise dd.RunFailed("nothing is in flight and nothing is due")
            self.loop.advance()
        return self

    @property
    def kinds(self):
        return [(event["kind"], event["worker"]) for event in self.loop.recorder.events]

    @property
    def kept(self):
        """The gradients in the sum, from wherever they are kept; those that are lost are missing."""
        desks = list(enumerate(self.staff.desks))
        accepted = {worker: desk.accepted for worker, desk in desks if desk.memory == "worker" and desk.accepted >= 0}
        return self.post.held(accepted) | {worker: desk.spare for worker, desk in desks if desk.spare is not None}

    def check_sum(self):
        """If no memory is lost now, the sum is that of what is kept; was there something to check?"""
        state, kept, desks = self.loop.state, self.kept, enumerate(self.staff.desks)
        lost = any(worker not in kept for worker, desk in desks if desk.memory != "none")
        if not isinstance(state, dd.AggregateState) or lost or any(due.kind == "restored" for due in self.staff.ready):
            return False
        gap = state.error(kept) * (sum(float(each.norm()) for each in kept.values()) or 1.0)
        arrivals = len(self.loop.recorder.trace())
        assert gap <= rounding(2 * arrivals + 4 * len(self.staff.desks)) * 64  # no sum of gradients is larger
        assert not set(kept) & state.absent
        return True

    def check_jobs(self):
        """Every job in flight is on one desk or in one reply."""
        known = [(worker, draw) for worker, desk in enumerate(self.staff.desks) for draw in desk.jobs]
        known += [(worker, reply.request.draw) for worker, reply in self.staff.replies.items()]
        assert sorted(known) == sorted((job.worker, job.draw) for job in self.crew.in_flight)

    def check_replay(self):
        algorithm, problem, trace = self.loop.algorithm, self.loop.problem, self.loop.recorder.trace()
        fleet = LocalFleet(problem, RecordedClock(trace), algorithm.message)
        again = Loop(algorithm, problem, fleet, problem.start(0), on_nonfinite="as recorded")
        again.begin()
        while fleet.peek() is not None:
            again.advance()
        made = again.recorder.trace()
        assert all(made[name].tobytes() == trace[name].tobytes() for name in ("version", "after", "loss", "fingerprint"))
        assert torch.equal(again.state.x, self.loop.state.x)

    def check(self):
        assert self.check_sum()
        self.check_jobs()
        self.check_replay()


@pytest.fixture
def run(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("dualdelay.workers.staff.time", clock)
    monkeypatch.setattr("dualdelay.workers.crew.time", clock)

    def begin(algorithm, problem=None, fleet=None, before=None, schedule=None, **conduct):
        monkeypatch.setattr("dualdelay.workers.crew.Post", partial(LocalPost, clock, **conduct))
        return Running(algorithm, problem or dd.Quadratic(TRIO, noise=0.3), fleet or dd.RayFleet(), schedule, before)

    return begin


class Rough(dd.Quadratic):
    """Some jobs raise, some give no number, and one worker cannot evaluate."""

    measures = True
    raises = staticmethod(lambda worker, draw: (worker * 31 + draw * 17) % 23 == 0)
    spoils = staticmethod(lambda worker, draw: (worker * 13 + draw * 29) % 37 == 0)

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        if self.raises(worker, draw):
            raise ValueError("no gradient")
        return (gradient * float("nan") if self.spoils(worker, draw) else gradient), loss

    def measure(self, x, worker):
        return {"part": 1 / (3 - worker), "loss": 0.0, "samples": 1, "gradient": None}

    def combine(self, x, parts):
        return {"objective": float(len(parts)), "pooled_loss": 0.0, "accuracy": 0.0, "gradient_norm": 0.0}


class Wild(dd.DuDe):
    """Cancels others' jobs and its own, fills their queues, repeats draws and asks to be woken."""

    def step(self, s, a):
        if a.job is None:
            return []
        s.take(a.worker, a.value)
        s.descend(s.total, self.lr, over=s.n)
        mine, other, orders = a.worker, (a.worker * 7 + s.version * 3) % 4, [dd.send(a.worker)]
        if s.version % 5 in (1, 2) and other not in s.absent:
            orders += [dd.cancel(other), dd.send(other)][s.version % 5 - 1 :]
        elif s.version % 5 > 2:
            orders += [dd.again(mine), dd.cancel(mine), dd.send(mine)] if s.version % 5 == 3 else [dd.wake(a.time + 0.03)]
        return orders

    def leave(self, s, worker, held=None):
        s.drop(worker, held)
        return []


WILD = Wild(lr=0.05, memory="workers", start="zeros")
STORMS = {
    "leave": (dd.Quadratic, DUDE(), "leave", 0.0),
    "freeze": (dd.Quadratic, DUDE(), "freeze", 0.0),
    "together": (dd.Quadratic, DUDE(), "leave", 0.004),
    "wait for three": (dd.Quadratic, DUDE(wait_for=3), "leave", 0.0),
    "server": (dd.Quadratic, DUDE(memory="server"), "leave", 0.0),
    "busy": (dd.Quadratic, DUDE(start="busy"), "leave", 0.0),
    "rough, wild": (Rough, WILD, "leave", 0.0),
    "rough, wild, freeze": (Rough, WILD, "freeze", 0.0),
    "rough, wild, together": (Rough, WILD, "leave", 0.004),
    "rough, wait for two": (Rough, DUDE(wait_for=2), "leave", 0.0),
    "rough, freeze": (Rough, DUDE(), "freeze", 0.0),
    "rough, vanilla": (Rough, dd.VanillaASGD(lr=0.05), "leave", 0.0),
    "rough, uniform, freeze": (Rough, dd.UniformASGD(lr=0.05), "freeze", 0.0),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("storm", STORMS)
def test_in_any_order_of_events_the_sum_the_jobs_and_the_record_are_right(storm, seed, run):
    kind, algorithm, gone, together = STORMS[storm]
    chance, now, sums = random.Random(seed), 0.0, 0
    problem = kind(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).tolist(), noise=0.3)
    schedule = Schedule(7) if kind is Rough else None
    conduct = {
        "start": lambda *who: chance.choice([0.05, 0.05, 0.3, 1.5]) * chance.choices([1, -1], [19, 1])[0],
        "job": lambda: chance.choice([0.005, 0.02, 0.02, 0.1]),
        "together": together,
    }

    def begin(before=None):
        fleet = dd.RayFleet(patience=1.0, restarts=2, retries=1, gone=gone, resend=0.05, deadline=3.0, alarm=5)
        return run(algorithm, problem, fleet, before, schedule, **conduct)

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
                here.post.kill(worker, known=chance.choice([0.0, 0.2, 1.0]))
        elif what == "save":
            here = begin(before=here)
        elif what:
            getattr(here.fleet, what)(chance.randrange(4))
    if here.crew.measures:
        here.crew.measure_whole(here.loop.now, here.loop.state.version, here.loop.state.x)
    while here.crew.settle():
        while here.crew.has_measured:
            here.loop.measured()
    assert not here.staff.looks.open
    assert sums > 50 or not isinstance(here.loop.state, dd.AggregateState)
    problem.raises = lambda *job: False
    here.check_replay()


@pytest.mark.numeric
def test_what_a_worker_kept_is_neither_counted_nor_saved_once_it_has_left(run):
    here = run(DUDE()).go(60)
    here.fleet.leave(2)
    while here.kinds != [("left", 2)]:
        here.go(1)
    held, saved = here.crew.held(), here.loop.save()["fleet"]
    close = rounding(4 * len(here.loop.recorder.trace()))
    assert set(held) == {0, 1} and here.loop.state.error(held) <= close
    assert (len(saved["held"]), saved["lost"], saved["away"]) == (2, [], [2])
    back = run(DUDE(), before=here).go(100)
    assert back.kinds == [("left", 2), ("joined", 2)]
    back.check()


def test_a_run_that_everybody_has_left_is_resumed_with_everybody(run):
    here = run(DUDE(memory="server"), fleet=dd.RayFleet(restarts=0)).go(50)
    for worker in range(3):
        here.post.kill(worker, known=0.1 * worker)
    with pytest.raises(dd.RunFailed, match="0 workers are at work"):
        here.go(50)
    assert here.loop.state.n == 0
    back = run(DUDE(memory="server"), before=here).go(50)
    assert back.loop.state.n == 3 and back.loop.state.version > here.loop.state.version + 30


@pytest.mark.parametrize("second", [0.05, 3.0])
def test_an_awaited_worker_that_dies_joins_once_when_its_next_process_is_there(second, run):
    seconds = {(2, 0): -3.0, (2, 1): second}
    here = run(DUDE(), fleet=dd.RayFleet(patience=1.0), start=lambda *who: seconds.get(who, 0.05)).go(800)
    assert here.kinds == [("left", 2), ("crashed", 2), ("joined", 2)] and here.loop.state.n == 3
    here.check()


def test_while_processes_take_long_to_start_it_is_said_whose(run, caplog):
    run(DUDE(), start=lambda worker, incarnation: 40.0 if worker == 1 else 0.05).go(20)
    said = [record.getMessage() for record in caplog.records if "still waiting" in record.getMessage()]
    assert [text[:10] for text in said] == ["after 15 s", "after 30 s"] and all(
        "workers [1] to start" in one for one in said
    )


def test_who_left_by_a_fault_is_there_when_a_resumed_run_begins(run):
    """Its process is started with the others', and not when they are at work already."""
    here = run(DUDE(memory="server"), fleet=dd.RayFleet(restarts=0)).go(50)
    here.post.kill(1)
    here.go(50)
    assert here.loop.state.n == 2
    back = run(DUDE(memory="server"), before=here, start=lambda *who: 5.0).go(30)
    later = back.loop.recorder.trace().worker[len(here.loop.recorder) :].tolist()
    assert back.loop.state.n == 3 and 1 in later[:4], later


@pytest.mark.parametrize("first", [0, 1])
def test_if_nobody_can_compute_a_first_gradient_the_run_ends_at_once(first, run):
    class Broken(dd.Quadratic):
        def gradient(self, x, worker, draw):
            if worker >= first:
                raise ValueError(f"no shape fits worker {worker}")
            return super().gradient(x, worker, draw)

    if first == 0:
        with pytest.raises(
            dd.RunFailed, match=r"nobody could compute a first gradient; worker \d says: ValueError: no shape"
        ):
            run(DUDE(), Broken(TRIO)).go(50)
    else:
        assert run(DUDE(), Broken(TRIO), fleet=dd.RayFleet(retries=1)).go(50).loop.state.n == 1


@pytest.mark.parametrize(("gone", "kinds"), [("leave", ["left", "joined"]), ("freeze", ["frozen", "thawed"])])
def test_a_worker_that_comes_late_while_others_still_start_works_like_them(gone, kinds, run):
    seconds = {(0, 0): 1.3, (1, 0): -0.8, (1, 1): 0.8}
    here = run(DUDE(), fleet=dd.RayFleet(patience=1.0, gone=gone), start=lambda *who: seconds.get(who, 0.05)).go(200)
    assert here.kinds == [("crashed", 1), *((kind, 0) for kind in kinds)]
    assert min(np.bincount(here.loop.recorder.trace().worker)) > 50
    here.check()


@pytest.mark.parametrize(("seconds", "end", "there"), [(-0.05, "crashed", {0, 1, 2}), (1e9, "left", {0, 2})])
def test_what_was_lost_at_the_save_is_put_right_although_the_next_process_does_not_start(seconds, end, there, run):
    before = run(DUDE()).go(60)
    before.post.kill(1, known=1.0)

    def start(*who):
        return seconds if who == (1, 0) else 0.05

    here = run(DUDE(), fleet=dd.RayFleet(patience=1.0), before=before, start=start).go(300)
    assert here.kinds == [("lost", 1), ("restored", 1), (end, 1)] and set(here.kept) == there
    here.check()


def test_a_reply_is_computed_again_if_its_worker_dies_before_it_is_taken(run):
    here = run(DUDE(), together=0.05).go(60)
    while any(desk.doing is None for desk in here.staff.desks):
        here.go(1)
    here.post.kill(1)
    here.post.at(here.post.processes[2].free + 0.001, lambda: here.post.die(2))
    here.go(200)
    lost = [("lost", 1), ("lost", 2), ("restored", 2), ("restored", 1)]
    assert here.kinds == [("crashed", 1), *lost, ("crashed", 2)]
    here.check()


class Round(dd.DuDe):
    """Whoever arrives gives the next worker a job, so that jobs queue."""

    def step(self, s, a):
        return [dd.send((order.worker + 1) % s.n) for order in super().step(s, a)]


def test_the_next_job_in_a_queue_waits_until_the_last_reply_is_taken(run):
    run(Round(lr=0.02, memory="workers", start="zeros"), together=0.004).go(200).check()


def test_a_frozen_worker_whose_process_never_was_there_has_one_job_when_it_thaws(run):
    fleet = dd.RayFleet(patience=1.0, restarts=0, gone="freeze")
    here = run(DUDE(start="zeros"), fleet=fleet, start=lambda *who: -3.0 if who == (2, 0) else 0.05).go(400)
    assert here.kinds == [("frozen", 2), ("crashed", 2)] and here.staff.desks[2].state == "frozen"
    fleet.join(2)
    here.go(100)
    assert here.kinds[2:] == [("thawed", 2)] and [job.worker for job in here.crew.in_flight].count(2) == 1
    here.check()


def test_rejections_that_stopped_a_run_do_not_stop_its_replay(tmp_path):
    problem = Rough(TRIO, noise=0.3)
    problem.raises, problem.spoils = lambda *job: False, lambda worker, draw: worker == 0 and draw < 10
    with pytest.raises(dd.RunFailed, match="number 10 in a row"):
        dd.simulate(dd.DuDe(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=30, folder=tmp_path / "run")
    assert dd.resume(tmp_path / "run", problem=problem).version == 30
    assert dd.replay(tmp_path / "run", problem=problem).version == 30


def test_a_gradient_that_left_with_its_worker_ages_no_more_in_what_loggers_are_told():
    told, speeds = [], dd.FixedSpeeds([1.0, 1.0, 1.0])
    log = [lambda version, values: told.append(values)]
    end = dd.simulate(
        dd.DuDe(lr=0.05),
        dd.Quadratic(TRIO),
        dd.SimulatedFleet(speeds, changes=[dd.speeds.leave(2, 5.0)]),
        updates=200,
        watch=dd.Reporting(log=log),
    )
    assert told[-1]["tau_max"] == end.delays.tau_max < 10


def test_a_resumed_run_tells_loggers_of_its_own_updates_alone(tmp_path):
    told, speeds = [], dd.FixedSpeeds([1.0, 1.0, 1.0])
    dd.simulate(dd.DuDe(lr=0.05), dd.Quadratic(TRIO), speeds, updates=200, folder=tmp_path / "run")
    dd.resume(tmp_path / "run", updates=201, watch=dd.Reporting(log=[lambda version, values: told.append(values)]))
    rates, delays = ([told[-1][f"worker/{worker}/{name}"] for worker in range(3)] for name in ("rate", "delay"))
    assert told[-1]["updates_per_second"] == sum(rates) > 0 and sorted(delays) == [0.0, 0.0, 3.0]


class Late(dd.VanillaASGD):
    def step(self, s, a):
        return [] if a.job is None else [*super().step(s, a), dd.wake(1.0)]


def test_a_wake_in_the_past_comes_now(run):
    here, times = run(Late(lr=0.05)), [0.0]
    while times[-1] < 1.5:
        times.append(here.go(1).loop.now)
    assert times == sorted(times) and ("wake", -1) in here.kinds


def test_a_worker_asked_to_leave_and_at_once_to_join_does_both(run):
    here = run(DUDE()).go(30)
    here.fleet.leave(1)
    here.fleet.join(1)
    here.go(100)
    assert here.kinds == [("left", 1), ("joined", 1)] and here.staff.desks[1].state == "present"
    here.check()


@pytest.mark.numeric
def test_a_frozen_gradient_outlives_its_process_and_what_others_lose_later(run):
    problem = Rough(TRIO)
    problem.raises, problem.spoils = lambda *job: job == (1, 20), lambda *job: False
    here = run(DUDE(), problem, dd.RayFleet(gone="freeze", retries=0)).go(100)
    frozen = here.kept[1]
    here.post.kill(1)
    here.go(20).post.kill(2)
    here.go(100)
    restored = [(kind, worker) for worker in (1, 2) for kind in ("crashed", "lost", "restored")]
    assert here.kinds == [("failed", 1), ("frozen", 1), *restored]
    assert float((here.kept[1] - frozen).abs().max()) <= rounding(2 * 3) * 64 and here.check_sum()


# --- a server that sleeps, workers that do not answer, replies that are none ---


@pytest.mark.parametrize("asleep", [3.5, 60.0, 1e5])
def test_a_server_that_was_asleep_hears_first_and_judges_afterwards(asleep, run):
    here = run(DUDE(), fleet=dd.RayFleet(deadline=3.0, resend=1.0, patience=3.0))
    for _ in range(10):
        here.go(7)
        here.post._clock.now += asleep  # SIGSTOP and SIGCONT; what workers answered meanwhile is waiting
    here.go(20).check()
    assert here.kinds == []
    before = here.staff.now
    here.post.processes[1].free = here.post._clock.now + 1e6  # now one of them is asleep, and has its three seconds
    while not here.kinds:
        here.go(1)
    assert ("crashed", 1) in here.kinds and 3.0 <= here.staff.now - before < 3.5


@pytest.mark.parametrize("busy", [0.9, 8.0])
def test_a_server_that_is_busy_for_longer_than_the_deadline_with_every_arrival_loses_nobody(busy, run):
    here = run(DUDE(), fleet=dd.RayFleet(deadline=2.0), job=lambda: 0.5)
    for _ in range(60):
        here.go(1)
        here.post._clock.now += busy
    here.check()
    assert here.kinds == []


def test_a_worker_that_does_not_say_what_it_keeps_delays_one_checkpoint_and_no_more(run):
    here = run(DUDE(), fleet=dd.RayFleet(deadline=600.0))
    here.go(30)
    asked, frozen, answer = [], {1}, here.post.held

    def held(accepted):
        asked.append(sorted(accepted))
        return {worker: kept for worker, kept in answer(accepted).items() if worker not in frozen}

    here.post.held = held
    here.post.processes[1].free = here.post._clock.now + 50.0  # SIGSTOP
    for _ in range(10):
        saved = here.go(5).loop.save()
        assert saved["fleet"]["lost"] == [1]
    assert asked[0] == [0, 1, 2] and asked[1:] == [[0, 2]] * 9
    while here.post._clock.now < 60.0:  # SIGCONT: when it has answered, it is asked again
        here.go(5)
    frozen.clear()
    assert here.loop.save()["fleet"]["lost"] == [] and asked[-1] == [0, 1, 2]
    here.check()


def test_what_a_frozen_worker_keeps_is_mended_when_the_run_goes_on_from_such_a_checkpoint(run):
    here = run(DUDE()).go(30)
    answer = here.post.held
    here.post.held = lambda accepted: {worker: kept for worker, kept in answer(accepted).items() if worker != 1}
    after = run(DUDE(), before=here).go(40)
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
        {"error": None},
    ],
    ids=str,
)
def test_a_reply_that_is_none_counts_as_a_job_that_failed(wrong, run):
    here = run(DUDE(), fleet=dd.RayFleet(retries=5))
    take, spoilt = here.post.receive, iter(range(100))

    def receive(timeout):
        notices = take(timeout)
        return [
            notice._replace(**wrong) if isinstance(notice, Reply) and next(spoilt) % 4 == 0 else notice
            for notice in notices
        ]

    here.post.receive = receive
    here.go(60).check()
    failed = [event for event in here.loop.recorder.events if event["kind"] == "failed"]
    assert len(failed) > 5 and all("BadReply" in event["text"] for event in failed)


def test_a_reply_from_nobody_is_dropped(run):
    here = run(DUDE()).go(10)
    take = here.post.receive

    def receive(timeout):
        notices = take(timeout)
        extra = [one._replace(request=one.request._replace(worker=99)) for one in notices if isinstance(one, Reply)]
        return [*extra, *notices]

    here.post.receive = receive
    here.go(30).check()
    assert here.fleet.counts["dropped"] > 10


@pytest.fixture
def real(run, monkeypatch):
    """Train and resume with workers in this process; how long their jobs take is chance, so each run takes its course."""
    chance = random.Random(5)

    def use():
        run(DUDE(), job=lambda: chance.uniform(0.01, 0.05))

    return use


@pytest.mark.parametrize("at", [91, 110, 117])
def test_a_real_run_that_goes_on_from_an_older_checkpoint_keeps_nothing_of_its_former_course(at, real, tmp_path):
    """One bit of the newest checkpoint of a finished run is flipped; it is resumed, interrupted and resumed."""
    folder, problem = tmp_path / "run", dd.Quadratic(TRIO, noise=0.3)

    def interrupt(state, arrival):
        if state.version == at:
            raise KeyboardInterrupt

    real()
    dd.train(DUDE(), problem, updates=120, folder=folder, checkpoint_every=40, watch=dd.Reporting(progress=False))
    newest = max((folder / "checkpoints").iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    with pytest.raises(KeyboardInterrupt):
        dd.resume(folder, watch=dd.Reporting(watch=[interrupt], progress=False))
    kept = dd.load(folder)
    assert (kept.ended, kept.version) == ("interrupted", at)
    ended = dd.resume(folder, watch=dd.Reporting(progress=False))
    assert ended.version == 120 and ended.audit < 1e-12
    assert dd.replay(folder, watch=dd.Reporting(progress=False)).same_bits


def test_a_real_run_that_is_lengthened_and_killed_can_be_replayed_later(real, tmp_path):
    real()
    problem, folder = dd.Quadratic(TRIO, noise=0.3), tmp_path / "run"
    dd.train(DUDE(), problem, updates=40, folder=folder, checkpoint_every=10, watch=dd.Reporting(progress=False))
    with pytest.raises(KeyboardInterrupt):
        dd.resume(
            folder,
            updates=90,
            watch=dd.Reporting(watch=[lambda s, a: 1 if s.version < 66 else _interrupt()], progress=False),
        )
    with pytest.raises(dd.BadInput, match="not finished"):
        dd.replay(folder)
    assert dd.resume(folder, watch=dd.Reporting(progress=False)).version == 90
    assert dd.replay(folder, watch=dd.Reporting(progress=False)).same_bits


def _interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_while_workers_start_says_what_it_means(run, real, tmp_path):
    problem, folder = dd.Quadratic(TRIO, noise=0.3), tmp_path / "run"

    def interrupted(*who):
        os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, also while they start
        return 0.05

    def start_with_that():
        with pytest.raises(KeyboardInterrupt):
            run(DUDE(), start=interrupted)  # from now on, too

    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        start_with_that()
        with pytest.raises(KeyboardInterrupt, match="still starting; nothing had begun"):
            dd.train(DUDE(), problem, updates=40, folder=folder, watch=dd.Reporting(progress=False))
        assert not folder.exists()
        real()
        dd.train(DUDE(), problem, updates=40, folder=folder, watch=dd.Reporting(progress=False))
        start_with_that()
        with pytest.raises(KeyboardInterrupt, match="still starting; the run is as it was saved last"):
            dd.resume(folder, updates=50, watch=dd.Reporting(progress=False))
        real()
        assert dd.resume(folder, updates=50, watch=dd.Reporting(progress=False)).version == 50
    finally:
        signal.signal(signal.SIGTERM, handler)

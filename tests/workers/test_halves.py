"""Real workers that are polled, remember and take several steps, under many orders of events, on virtual time.

The methods are those of tests/halves.py; the fleets and their faults those of tests/virtual.py.
"""

import math
import random
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import dualdelay as dd
from dualdelay.core import IndependentWorkers
from dualdelay.engine.evaluation import Schedule
from dualdelay.engine.half import Half
from dualdelay.engine.loop import Loop
from dualdelay.simulation.clocks import RecordedClock, VirtualClock
from dualdelay.simulation.gradients import Batcher, GradientsInBatches
from dualdelay.simulation.local_fleet import LocalFleet
from dualdelay.workers.messages import EvaluationRequest, JobRequest, PollRequest, Reply
from dualdelay.workers.records import MemoryPlace
from halves import Contacts, Controls, Local, Logged
from helpers import rounding
from virtual import TRIO, RandomWeather, Rough, VirtualRun, fleet_of

pytestmark = pytest.mark.usefixtures("in_time")

# by name: the problem, the method, what becomes of workers that are gone, and how messages are made small
STORMS = {
    "polled": (dd.Quadratic, Contacts(0.05), "leave", {}),
    "polled, freeze": (dd.Quadratic, Contacts(0.05), "freeze", {}),
    "polled, rough": (Rough, Contacts(0.05), "leave", {}),
    "polled, small": (dd.Quadratic, Contacts(0.05), "leave", {"uplink": "int8", "downlink": "int8"}),
    "quafl": (dd.Quadratic, dd.algorithms.QuAFL(0.05, period=0.05), "leave", {}),
    "quafl, rough, small": (Rough, dd.algorithms.QuAFL(0.05, period=0.05), "leave", {"downlink": 0.5}),
    "two tensors": (dd.Quadratic, Controls(0.05), "leave", {}),
    "two tensors, freeze": (dd.Quadratic, Controls(0.05), "freeze", {}),
    "two tensors, rough, small": (Rough, Controls(0.05), "leave", {"downlink": "int8"}),
    "local": (dd.Quadratic, Local(0.05), "leave", {}),
    "local, rough, small": (Rough, Local(0.05), "leave", {"uplink": 0.5, "downlink": "int8"}),
}


def check_controls(here):
    """The server's sum is that of the controls that workers keep, if none is lost now."""
    state, kept = here.loop.state, here.kept
    lost = any(r.number not in kept for r in here.records if r.memory is not MemoryPlace.NONE)
    if not isinstance(here.loop.algorithm, Controls) or lost or here.workers._events:
        return False
    total = sum((memory["control"] for memory in kept.values()), torch.zeros_like(state.total))
    assert float((state.total - total).abs().max()) <= rounding(8 * len(here.loop.recorder) + 64) * 64
    return True


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("storm", STORMS)
def test_in_any_order_of_events_jobs_memories_bytes_and_the_record_are_right(storm, seed):
    """Processes die and are asked to leave and join, messages are lost, repeated and late, and the server is resumed."""
    kind, algorithm, gone, small = STORMS[storm]
    chance, sums = random.Random(seed), 0
    problem = kind(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).tolist(), noise=0.3)
    policy = {"patience": 1.0, "restarts": 2, "retries": 1, "gone": gone, "resend": 0.05, "deadline": 3.0, "alarm": 5}

    def begin(before=None):
        fleet = fleet_of(
            **policy,
            start_seconds=lambda *process: chance.choice([0.05, 0.05, 0.3, 1.5]) * chance.choices([1, -1], [19, 1])[0],
            job_seconds=lambda request: chance.choice([0.005, 0.02, 0.02, 0.1]),
            weather=RandomWeather(seed, lost=0.1, repeated=0.1, late=0.1, longest=0.1),
        )
        return VirtualRun(algorithm, problem, fleet, Schedule(7) if kind is Rough else None, before, **small)

    here = begin()
    for _ in range(250):
        try:
            here.go(1)
        except dd.RunFailed:
            here = begin(before=here)
            continue
        here.check_jobs()
        sums += check_controls(here)
        what = chance.choices(["kill", "leave", "join", "save", ""], [3, 1, 3, 2, 91])[0]
        if what == "kill":
            for worker in chance.sample(range(4), chance.choice([1, 1, 3])):
                here.processes.kill(worker, known=chance.choice([0.0, 0.2, 1.0]))
        elif what == "save":
            here = begin(before=here)
        elif what:
            getattr(here.control, what)(chance.randrange(4))
    arrivals = here.loop.recorder.trace().worker.tolist()
    assert len(arrivals) > 40 and len(set(arrivals)) > 2
    assert sums > 50 or not isinstance(algorithm, Controls)
    here.evaluate_last()
    assert not here.workers._evaluations.open
    here.check_bytes()
    problem.raises = lambda *job: False
    here.check_replay()


# --- the same run whatever carries it ---

SECONDS = (0.1, 0.17310, 0.29170)  # so that no two arrivals come together


@pytest.mark.parametrize("small", [{}, {"uplink": "int8", "downlink": 0.5}], ids=["whole", "small"])
@pytest.mark.parametrize(
    "algorithm",
    [
        Contacts(0.05, period=0.0337, wild=False),
        dd.algorithms.QuAFL(0.05, period=0.0337),
        Controls(0.05),
        Local(0.05, wild=False),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_workers_that_never_fail_give_the_same_run_whatever_carries_it(algorithm, small):
    """On a virtual clock, over a transport, and over one that repeats messages: the same order, and the same bits."""
    problem, speeds = dd.Quadratic(TRIO, noise=0.3), dd.FixedSpeeds(SECONDS)
    half = Half(algorithm, small.get("uplink"))
    fleet = LocalFleet(problem, VirtualClock(speeds), half, downlink=small.get("downlink"))
    loop = Loop(algorithm, problem, fleet, problem.start(0))
    loop.begin()
    while len(loop.recorder) < 60:
        loop.advance()

    def carried(**settings):
        fleet = fleet_of(job_seconds=lambda request: SECONDS[request.worker] * request.steps, **settings)
        here = VirtualRun(algorithm, problem, fleet, **small)
        while len(here.loop.recorder) < 60:
            here.go(1)
        here.check_bytes()
        return here.loop

    loops = [loop, carried(), carried(weather=RandomWeather(1, repeated=0.5, longest=0.0))]
    traces = [one.recorder.trace() for one in loops]
    assert len(set(traces[0].steps.tolist())) > 1
    for one, trace in zip(loops[1:], traces[1:], strict=True):
        for name in ("worker", "draw", "version", "after", "loss", "fingerprint", "bytes", "steps"):
            assert trace[name].tobytes() == traces[0][name].tobytes(), name
        assert torch.equal(one.state.x, loop.state.x)
        again = traces[0].down == 0  # for one more draw at a model the simulation counts nothing; without a downlink ...
        assert (trace.down == traces[0].down)[~again].all()
        assert bool((trace.down[again] == (0 if small else 16)).all())  # ... the model of two numbers is sent once more


# --- polls ---


@dataclass(frozen=True)
class Manual(IndependentWorkers[Logged]):
    """Everybody holds a job of four steps, and a test gives the orders, which a replay gives again."""

    most_steps: ClassVar[int] = 4

    plan: list = field(default_factory=list)

    def init(self, x, n, rng):
        return Logged(x, n)

    def first(self, s):
        return [*(dd.send(worker, hold=True) for worker in s.present), dd.wake(1e9)]

    def on_wake(self, s, time):
        s.contacts += 1
        return self.plan[s.contacts - 1]

    def step(self, s, a):
        s.note(a)
        s.descend(a.value, 1.0)
        return []

    def join(self, s, worker):
        s.join(worker)
        return [dd.send(worker, hold=True)]

    def work(self, memory, model, job):
        y = model
        for _ in job:
            y = y - self.lr * job.gradient(y)
        return model - y, {"y": y}


class ManualRun(VirtualRun):
    """A run of that, whose orders a test gives."""

    def order(self, *orders, after=0.0):
        """Let happen what happens for so many seconds, and then this."""
        plan = self.loop.algorithm.plan
        assert self.loop.state.contacts == len(plan)
        plan.append(list(orders))
        self.workers._wake(self.workers.now + after)
        while self.loop.state.contacts < len(plan):
            self.go(1)
        return self

    def until(self, seconds):
        """Let happen what happens for so many seconds."""
        return self.order(after=seconds)

    @property
    def log(self):
        return self.loop.state.log

    @property
    def kinds(self):
        return [kind for kind in super().kinds if kind[0] != "wake"]

    @property
    def texts(self):
        return [event["text"] for event in self.loop.recorder.events if event["kind"] != "wake"]


def manual(problem=None, before=None, schedule=None, **settings):
    fleet = fleet_of(**{"job_seconds": lambda request: 0.4, **settings})
    algorithm = Manual(0.05) if before is None else before.loop.algorithm
    here = ManualRun(algorithm, problem, fleet, schedule, before)
    here.asked, send = [], here.transport.send

    def noted(request, model=None, held=None):
        here.asked.append(request)
        send(request, model, held)

    here.transport.send = noted
    return here


def test_a_poll_ends_a_job_with_the_steps_that_there_was_time_for():
    here = manual().until(0.25).order(dd.poll(1), dd.send(1, hold=True)).until(1.0)
    assert here.log == [[1, 0, 2]]
    here.order(dd.poll(1)).until(0.1)
    assert here.log[1:] == [[1, 1, 4]], "it has waited at its most steps"
    here.check_replay()


def test_a_job_that_waits_in_the_queue_can_be_polled_and_takes_no_step():
    here = manual().order(dd.cancel(0), dd.send(0), dd.send(0, hold=True), dd.poll(0)).order(dd.poll(0)).until(1.0)
    assert here.log == [[0, 1, 0], [0, 2, 0]] and not here.records[0].polled
    assert [math.isnan(loss) for loss in here.loop.recorder.trace().loss] == [True, True]
    here.check_replay()


def test_polls_go_to_the_oldest_job_that_was_not_polled_and_one_whose_answer_is_there_needs_none():
    here = manual().order(dd.cancel(0), dd.send(0), dd.send(0, hold=True))
    while here.records[0].reply is None:
        here.workers._receive(0.1)
    here.order(dd.poll(0)).until(5.0)
    assert here.log == [[0, 1, 4]], "the answer was on its way, and the held job is still held"
    here.order(dd.poll(0)).until(0.1)
    assert here.log[1:] == [[0, 2, 4]]


def test_polls_of_jobs_that_have_ended_are_no_harm():
    here = manual().until(0.25).order(dd.poll(1), dd.send(1, hold=True)).until(0.1)
    process = here.processes.processes[1]
    for sequence in (-1, 0):  # late, and once more
        here.transport.send(PollRequest(1, 0, sequence))
        here.transport.send(PollRequest(1, 7, sequence))
    here.until(1.0)
    assert here.log == [[1, 0, 2]] and process.holds


def test_a_held_job_has_no_deadline_until_it_is_polled():
    here = manual(deadline=3.0, resend=2.0).until(50.0)
    assert here.kinds == [] and here.log == []
    here.processes.processes[1].free = here.time.now + 1e6  # SIGSTOP
    before = here.workers.now
    here.until(10.0).order(dd.poll(1)).until(2.9)
    assert here.kinds == []
    here.until(0.5)
    assert here.kinds[:1] == [("crashed", 1)] and 13.0 <= here.workers.now - before < 14.0
    assert here.texts[0] == "no answer in 3 s to job number 0"


@pytest.mark.parametrize("polled", [False, True])
def test_a_process_that_dies_in_a_held_job_hands_it_to_the_next_with_its_poll(polled):
    here = manual().until(0.25)
    if polled:
        send, here.transport.send = here.transport.send, lambda *message: here.asked.append(message[0])
        here.order(dd.poll(1)).transport.send = send  # it is lost
    here.processes.kill(1)
    here.until(1.0)
    assert here.kinds == [("crashed", 1)] and here.log == ([[1, 0, 0]] if polled else [])
    if not polled:
        assert here.order(dd.poll(1)).until(0.1).log == [[1, 0, 4]]
    here.check_replay()


class LosesPolls:
    """Loses the first polls."""

    def __init__(self, count):
        self.left = count

    def __call__(self, message):
        if isinstance(message, PollRequest) and self.left:
            self.left -= 1
            return []
        return [0.0]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_poll_that_is_lost_is_sent_again(lost):
    here = manual(weather=LosesPolls(lost), resend=0.1).until(0.25).order(dd.poll(1)).until(3.0)
    assert len(here.log) == 1 and here.log[0][:2] == [1, 0]
    here.check_replay()


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_cancelled_job_frees_its_worker_although_nobody_wants_the_answer(lost):
    here = manual(weather=LosesPolls(lost), resend=0.1).until(0.25).order(dd.cancel(1)).until(3.0)
    assert not here.processes.processes[1].holds and here.records[1].release == -1
    here.order(dd.send(1, hold=True)).until(1.0).order(dd.cancel(1), dd.send(1)).until(3.0)
    assert here.log == [[1, 2, 4]]
    here.check_replay()


def test_a_cancelled_job_of_several_steps_ends_at_the_next_of_them():
    here = manual().order(dd.cancel(1), dd.send(1)).until(0.15).order(dd.cancel(1), dd.send(1, steps=1)).until(0.45)
    assert here.log == [[1, 2, 1]], "it would still be at the first"


def test_a_run_in_which_everybody_holds_and_nobody_will_poll_is_over():
    here = manual()
    here.workers._wakes.clear()
    assert here.workers.peek() is None


def test_kill_and_resume_keeps_queues_and_polls():
    here = manual().until(0.25)
    here.transport.send = lambda *message: None  # what is sent now is lost
    here.order(dd.send(0, steps=2), dd.send(0, hold=True), dd.poll(0), dd.send(1, hold=True)).order(dd.poll(0))
    saved = here.loop.save()["fleet"]
    assert saved["queues"] == [[0, 1, 2], [0, 1], [0]] and saved["polled"] == [[0, 1], [], []]
    after = manual(before=here).until(1.0)
    assert after.log == [[0, 0, 0], [0, 1, 0]]
    after.order(dd.poll(0), dd.poll(1)).order(dd.poll(1)).until(0.5)
    assert sorted(after.log[2:]) == [[0, 2, 4], [1, 0, 4], [1, 1, 0]]
    after.check_replay()


class Spoilt(dd.Quadratic):
    """A problem whose third minibatch raises, or gives no number."""

    kind, at = "raise", 2

    def gradient(self, x, worker, draw):
        if (worker, draw) == (1, self.at) and self.kind == "raise":
            raise ValueError("a bad sample")
        gradient, loss = super().gradient(x, worker, draw)
        return gradient * (math.nan if (worker, draw) == (1, self.at) and self.kind == "nan" else 1.0), loss


def test_a_job_that_fails_before_anybody_has_polled_it_is_held_again():
    problem = Spoilt(TRIO)
    here = manual(problem)
    here.processes.processes[1].time_for[0] = 4  # it goes on until it raises
    running = here.processes.processes[1].running
    here.processes.at(0.3, lambda: here.processes._end(here.processes.processes[1], running))
    here.until(2.0)
    assert here.kinds == [("failed", 1)] and here.log == [] and here.records[1].holds
    here.order(dd.poll(1)).until(0.1)
    assert here.log == [[1, 1, 4]]
    problem.kind = ""
    here.check_replay()


def test_a_polled_job_that_is_rejected_is_done_again_with_as_many_steps_and_is_not_polled_again():
    problem = Spoilt(TRIO)
    problem.kind = "nan"
    here = manual(problem).until(0.35).order(dd.poll(1), dd.send(1, hold=True)).until(1.0)
    assert here.kinds == [("rejected", 1)] and here.log == [[1, 2, 3]] and here.records[1].holds
    here.order(dd.poll(1)).until(0.1)
    assert here.log[1:] == [[1, 1, 4]]
    here.check_replay()


@pytest.mark.parametrize("steps", [-1, 3, 5, 2.0, None])
def test_a_reply_with_another_number_of_steps_than_were_asked_for_counts_as_a_job_that_failed(steps):
    here = manual().order(dd.cancel(1), dd.send(1))
    take, spoilt = here.transport.receive, []

    def receive(timeout):
        notices = take(timeout)
        lies = [one._replace(steps=steps) if isinstance(one, Reply) and not spoilt else one for one in notices]
        spoilt.extend(one for one in notices if isinstance(one, Reply) and one.request.draw == 1)
        return lies

    here.transport.receive = receive
    here.until(1.0)
    assert here.kinds == [("failed", 1)] and "BadReply" in here.texts[0]
    assert here.log == [[1, 2, 4]]


def test_workers_that_hold_jobs_evaluate_meanwhile_and_at_the_end():
    """A worker that is polled seldom would otherwise keep everybody's evaluation waiting."""
    here = manual(Rough(TRIO), schedule=Schedule(1)).until(0.5)
    assert [row["version"] for row in here.loop.rows] == [0] and here.log == []
    asked = [request for request in here.asked if isinstance(request, EvaluationRequest)]
    here.order(dd.poll(0), dd.send(0, hold=True)).until(0.5)
    assert [row["version"] for row in here.loop.rows] == [0, 1] and len(here.log) == 1
    asked = [request for request in here.asked if isinstance(request, EvaluationRequest)]
    assert [request.aside for request in asked] == [True] * 3
    here.evaluate_last()
    assert len(here.loop.rows) == 3 and not any(process.holds for process in here.processes.processes.values())


def test_a_worker_that_holds_a_job_can_leave_and_come_back_and_be_expelled():
    here = manual().until(0.25)
    here.control.leave(1)
    here.until(0.5)
    here.control.join(1)
    here.until(1.0).order(dd.poll(1)).until(0.1)
    assert here.kinds == [("left", 1), ("joined", 1)] and here.log == [[1, 1, 4]]
    here.workers.expel(2, "it must")
    here.until(0.5)
    assert here.kinds[2:] == [("left", 2)] and [job.worker for job in here.workers.in_flight] == [0]
    here.check_replay()


@pytest.mark.numeric
def test_what_was_computed_ahead_of_a_job_that_was_polled_in_the_queue_is_not_used():
    """A replay that computes what is in flight all at once has a polled job's steps, and not those that were ordered."""

    def late(message):
        return [0.5 if isinstance(message, Reply) and message.request[:4:3] == (0, 2) else 0.0]

    here = manual(weather=late).order(dd.cancel(0), dd.send(0), dd.send(0), dd.poll(0)).order(dd.poll(0))
    here.until(0.2).order(dd.poll(1)).until(1.0)  # whose arrival has the jobs in flight computed
    assert here.log == [[0, 1, 0], [1, 0, 2], [0, 2, 0]]
    algorithm, problem, trace = here.loop.algorithm, here.loop.problem, here.loop.recorder.trace()
    batches = GradientsInBatches(Batcher(problem.batched([problem])), [0], here.half)
    fleet = LocalFleet(problem, RecordedClock(trace), here.half, gradients=batches)
    again = Loop(algorithm, problem, fleet, problem.start(0))
    again.begin()
    while again.fleet.peek() is not None:
        again.advance()
    assert again.state.log == here.log
    assert torch.allclose(again.state.x, here.loop.state.x, rtol=0.0, atol=rounding(64) * 64)


# --- what workers keep ---


class Forgetful(Manual):
    """Keeps something after every second job alone."""

    def first(self, s):
        return [dd.send(worker, steps=1) for worker in s.present]

    def step(self, s, a):
        return [*super().step(s, a), dd.send(a.worker, steps=1)]

    def work(self, memory, model, job):
        message, kept = super().work(memory, model, job)
        return message if memory is None else message + memory["y"], kept if job.draw % 2 == 0 else None


def test_what_a_worker_does_not_keep_any_more_is_kept_nowhere():
    here = VirtualRun(Forgetful(0.05), fleet=fleet_of())
    for _ in range(8):
        before = len(here.loop.recorder)
        while len(here.loop.recorder) == before:
            here.go(1)
        done = {worker: draw for worker, draw, _ in here.loop.state.log}
        assert set(here.loop.memories()) == {worker for worker, draw in done.items() if draw % 2 == 0}
        here = VirtualRun(Forgetful(0.05), fleet=fleet_of(), before=here)  # what a new process is given is not kept on
    here.check_replay()


def test_without_a_rule_a_worker_that_lost_what_it_kept_begins_as_at_first_and_nobody_is_asked():
    here = manual().order(dd.poll(1), dd.send(1, hold=True)).until(0.5)
    assert here.records[1].memory is MemoryPlace.AT_WORKER
    here.transport.kept = None  # nobody may be asked
    here.processes.kill(1)
    here.until(0.5)
    assert here.kinds == [("crashed", 1), ("lost", 1), ("restored", 1)] and here.records[1].memory is MemoryPlace.NONE
    assert here.order(dd.poll(1)).until(0.1).log == [[1, 0, 0], [1, 1, 4]]
    here.check_replay()


# --- models as differences ---


def sends(here, worker):
    """The base and the bytes of each request for a job of a worker."""
    return [(request.serial, request.base, size) for request, size in here.jobs if request.worker == worker]


def test_a_difference_is_sent_only_to_a_process_that_is_known_to_have_what_it_is_added_to():
    here = ManualRun(Manual(0.05), dd.Quadratic([[1.0] * 100] * 2), fleet_of(), downlink="int8")
    here.jobs, send = [], here.transport.send

    def noted(request, model=None, held=None):
        if isinstance(request, JobRequest):
            before = here.sent.get((request.worker, request.draw), 0)
            send(request, model, held)
            here.jobs.append((request, here.sent[request.worker, request.draw] - before))
        else:
            send(request, model, held)

    here.transport.send = noted
    whole, small = 100 * 8, 100 + 8

    def order(*orders):
        here.order(*orders).until(0.3)

    order(dd.poll(0), dd.send(0, hold=True))
    assert sends(here, 0) == [(3, 1, small)], "its first model was sent whole, and it has answered"
    order(dd.cancel(0), dd.send(0, hold=True))
    assert sends(here, 0)[1:] == [(4, 1, 2 * small)], "whether or not it has the one before, it has the one before that"
    order(dd.poll(0), dd.again(0))
    assert sends(here, 0)[2:] == [(4, 4, 0)], "one more draw at a model that it has"
    order(dd.send(0, hold=True))
    assert sends(here, 0)[3:] == [(5, 4, small)]
    here.processes.kill(0)
    order()
    assert sends(here, 0)[4:] == [(5, 0, whole)], "what it kept is not sent: by this method it begins as at first"
    order(dd.poll(0), dd.send(0, hold=True))
    assert sends(here, 0)[5:] == [(6, 5, small)]
    here.check_bytes()
    here.check_replay()


# --- what a method does wrong ---


class Bad(Manual):
    """Its work does something that it must not."""

    def first(self, s):
        return [dd.send(worker, steps=2) for worker in s.present]

    def step(self, s, a):
        return [*super().step(s, a), dd.send(a.worker, steps=2)]


class Impure(Bad):
    def work(self, memory, model, job):
        message, kept = super().work(memory, model, job)
        if memory is not None:
            memory["y"] += 1.0
        return message, kept


class Unsavable(Bad):
    def work(self, memory, model, job):
        return super().work(memory, model, job)[0], {"plan": ["left", "right"]}


class TooFew(Bad):
    def work(self, memory, model, job):
        return job.gradient(model), None


class TooMany(Bad):
    def work(self, memory, model, job):
        return sum(job.gradient(model) for _ in range(3)), None


class NoMessage(Bad):
    def work(self, memory, model, job):
        return {"delta": super().work(memory, model, job)[0].tolist()}, None


class Clairvoyant(Manual):
    def work(self, memory, model, job):
        return super().work(memory, model / job.steps, job)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Impure, r"Impure.work of worker \d wrote into what it kept as 'y'; expected a pure function"),
        (Unsavable, r"Unsavable.work kept 'plan' for worker \d, a list, which cannot be saved"),
        (TooFew, r"TooFew.work of worker \d took 1 gradients in a job of 2"),
        (TooMany, r"TooMany.work: job 0 of worker \d asks for another gradient after 2"),
        (NoMessage, r"NoMessage.work of worker \d sent \[.*\] as 'delta'; expected a tensor"),
        (Clairvoyant, r"Clairvoyant.work: job 0 of worker \d asks for job.steps in the middle of a job"),
    ],
)
def test_a_method_whose_work_cannot_be_right_ends_the_run_with_one_error_and_nothing_is_lost(kind, text):
    algorithm = kind(0.05)
    here = ManualRun(algorithm, fleet=fleet_of())
    if kind is Clairvoyant:
        here.order(dd.poll(0))
    with pytest.raises(dd.BadInput, match=text):
        here.go(50)
    assert here.loop.consistent and here.kinds == []
    here.check_jobs()
    assert here.loop.save()["arrivals"] == len(here.loop.recorder)
    with pytest.raises(dd.BadInput, match=text):  # it is still so when the run is resumed
        ManualRun(algorithm, fleet=fleet_of(), before=here).go(50)


class ByOrder(Bad):
    """Divides by the steps that were ordered."""

    def work(self, memory, model, job):
        return super().work(memory, model / job.steps, job)


def test_a_job_whose_method_goes_by_the_number_of_steps_takes_as_many_although_it_is_polled():
    here = ManualRun(ByOrder(0.05), fleet=fleet_of()).order(dd.poll(1)).until(0.2)
    assert {steps for _, _, steps in here.log} == {2}
    here.check_replay()

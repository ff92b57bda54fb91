"""The coordinator of real workers: it sends requests, takes replies, and puts right what crashes and lost messages undo.

Every worker has a record with an explicit state (``records.py``). A transport, given from outside, starts and stops
processes and carries messages; its clock is the coordinator's. What happens is queued as events, which the loop takes one
by one.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Arrival, Job, Message, Problem
from ..core.compression import Compress, size_of
from ..core.environment import changes, environment
from ..core.errors import BadWork, RunFailed
from ..core.tracebacks import cause_of, is_bad_input
from ..core.work import Sent
from ..engine.evaluation import WorkersEvaluation
from ..engine.events import Event, EventKind
from ..engine.fleet import NOTHING, Assignment, Fleet, Model
from ..engine.half import Half, Kept, parts_of
from .evaluations import PendingEvaluation, PendingEvaluations
from .messages import (
    Evaluated,
    EvaluationRequest,
    JobRequest,
    Notice,
    PollRequest,
    Ready,
    Reply,
    Returned,
    as_arrays,
    as_tensors,
    checked,
    is_part,
    is_told,
    request_of,
    size_of_kept,
)
from .records import MemoryPlace, Status, WorkerRecord
from .settings import Wish, WorkerFleet
from .transport import Transport

log = logging.getLogger("dualdelay")

_IDLE = 0.2  # seconds after which the loop hears that nothing has happened
_CHECK = 0.1  # seconds between two looks at who is late
_DEAF = 1.0  # seconds between two calls of receive that count as listening; what the server slept beyond is no one's delay
_REMINDER = 15.0  # seconds of waiting for processes after which, again and again, a warning names them
_GRADIENTS_PER_PIECE = 16  # gradients' worth of samples that a worker evaluates in one request, where it evaluates all
_NAMED = 20  # workers that one line names
_DIFFERENCES = 8  # of models for one worker that are kept, in case that it has not had the last ones
_NOT_THERE = (Status.STARTING, Status.OVERDUE)
_LONGER = 4  # numbers that a message may come to for each byte of the largest model
_SHORT = 2**20  # bytes of a model, below which it is of no matter how long messages are
_BAD_INPUTS = 2  # jobs of a worker that has delivered nothing, after which bad input is not that of a few bad samples
_ASKED = "it was asked to"  # as in engine.result.PLANNED: nothing is wrong with such a worker


class Coordinator(Fleet):
    """Real workers as a fleet. What a crash takes from one of them is put right before its next job goes out."""

    copies_models = True
    real = True

    def __init__(
        self, fleet: WorkerFleet, problem: Problem, half: Half, transport: Transport, downlink: Compress = None
    ) -> None:
        super().__init__(problem, half.span, downlink)
        self._asks_others = half.algorithm.asks_others
        fleet.control.begin(problem.workers, fleet.room, fleet.absent)
        self.evaluates, self.loggers = problem.measures, fleet.loggers
        self.records = [WorkerRecord(worker) for worker in range(problem.workers)]
        self._fleet, self._policy, self._control, self._transport = fleet, fleet.faults, fleet.control, transport
        self._events: deque[Event] = deque()  # what has happened and the loop has not taken; times are filled in then
        self._head: Event | None = None  # what the loop takes next
        self._wakes: list[float] = []
        self._current = Model(-1, None)
        self._longest = 0  # bytes of the largest model that was sent
        self._differences: dict[int, dict[int, tuple[int, Any]]] = {}  # models sent small, by worker and serial: from where
        self._evaluations = PendingEvaluations(self._evaluation_ended)
        self._ended_evaluations: deque[PendingEvaluation] = deque()
        self._known: dict[int, Kept] = {}  # what workers said they keep, for the event at hand
        self._silent: dict[int, tuple[int, int]] = {}  # who did not say what it keeps: its incarnation and jobs done then
        self._left: set[int] = set()
        self._heard_gradient = False  # whether one has ever come
        self._mean_samples = 0.0  # of the workers, where they count by samples that only they can count
        self._told: dict[tuple[int, EventKind], int] = {}  # how often each kind of event has happened to each worker
        self._causes: dict[int, str] = {}  # what each worker's last traceback in the log ended with
        self._failure = ""  # why the run cannot go on
        self._beginning = False  # whether the workers' processes are waited for, and nothing has happened yet
        self._environment = environment()
        self._began = transport.now()
        self._checked = 0.0  # when it was last looked at who is late
        self._listened, self._deaf = transport.now(), 0.0  # when the server listened last, and for how long it did not

    # --- time ---

    @property
    def now(self) -> float:
        """Seconds since the run began, without those in which it was stopped."""
        return self._transport.now() - self._began

    def stopwatch(self) -> float:
        return self._transport.now()

    @property
    def listening_time(self) -> float:
        """A clock of the seconds in which the server would have heard an answer: workers' deadlines are counted by it."""
        return self._transport.now() - self._deaf

    # --- the beginning ---

    def begin(self) -> None:
        absent = self._fleet.absent_at_first(len(self.records))
        self._start_all(absent, 0.0)
        for worker in absent:
            self._give_up(self.records[worker], "not there at the start", kind=EventKind.LEFT)
        if self._problem.needs_sample_counts:
            counts = [record.samples for record in self.records if record.samples is not None]
            if not counts:
                why = next((event.text for event in self._events if event.text), "none of their processes has started")
                raise RunFailed(f"no worker can say how many samples it has, and workers are to count by them: {why}")
            self._set_mean_samples(math.fsum(counts) / len(counts))
            self._push(EventKind.WEIGHED, -1, text=repr(self._mean_samples))

    def _set_mean_samples(self, mean: float) -> None:
        if mean:
            self._mean_samples = mean
            self._problem.set_mean_samples(mean)

    def _start_all(self, absent: Collection[int], now: float, returning: Collection[int] = ()) -> None:
        """Start all but the absent workers' processes, and the clock at ``now`` when they are there: none has a head start.

        Those of the absent that are ``returning`` join when they are there.
        """
        self._began = self._transport.now()
        for record in self.records:
            if record.number not in absent or record.number in returning:
                self._start(record)
            if record.number in returning:
                record.move(Status.OVERDUE)
        reminder = _REMINDER
        self._beginning = True
        while self._waits_to_begin():
            self._check()
            self._receive(0.2)
            if self.now > reminder:
                reminder += _REMINDER
                late = [self._transport.name_of(r.number) or str(r.number) for r in self.records if r.status in _NOT_THERE]
                named = ", ".join(late[:_NAMED]) + (f" and {len(late) - _NAMED} more" if len(late) > _NAMED else "")
                log.warning("after %.0f s still waiting for the processes of workers %s to start", self.now, named)
        self._beginning = False
        self._began = self._transport.now() - now
        self._checked = -math.inf  # wishes are looked at first
        for record in self.records:
            record.since = record.sent = self.listening_time

    def _waits_to_begin(self) -> bool:
        """Whether somebody is still waited for; if enough workers are there the others join when they come."""
        quorum = self._fleet.quorum
        if quorum is not None and sum(record.status is Status.PRESENT for record in self.records) >= quorum:
            for record in self.records:
                if record.status is Status.STARTING:
                    self._give_up(record, f"not there when {quorum} others were; it may come later", Status.OVERDUE)
            return False
        return self._has_any(Status.STARTING) or (self._has_any(Status.OVERDUE) and self.now < self._policy.patience)

    def _has_any(self, status: Status) -> bool:
        return any(record.status is status for record in self.records)

    def _start(self, record: WorkerRecord) -> None:
        record.move(Status.STARTING)
        record.since = self.listening_time
        self._transport.start(record.number, record.incarnation)

    # --- what the loop takes ---

    def peek(self) -> Event | None:
        until = self._transport.now() + _IDLE
        if self._head is None:
            self._known = {}
        while self._head is None:
            self._check()
            now = self.now
            if self._failure:
                raise RunFailed(self._failure)
            if self._wakes and self._wakes[0] <= now:
                self._head = Event(now, EventKind.WAKE)
            elif self._events:
                if self._prepared(self._events[0]):
                    self._head = self._events.popleft()._replace(time=now)
            elif not self._has_work():
                return None
            elif self._transport.now() >= until:
                self._head = Event(now, EventKind.IDLE)
            else:
                self._receive(max(0.0, min([until - self._transport.now(), *(wake - now for wake in self._wakes[:1])])))
        return self._head

    def _has_work(self) -> bool:
        """Whether something may still come: a wake, an evaluation, a job's end or a process that starts late."""
        working = any(record.at_work and record.jobs and not self._is_held(record) for record in self.records)
        if self._wakes or self._evaluations.open or working or self._has_any(Status.OVERDUE):
            return True
        stuck = [record.number for record in self.records if record.jobs and not record.at_work]
        if stuck:
            raise RunFailed(f"nobody is at work: the others wait for workers {stuck}, which are frozen.")
        return False

    def _is_held(self, record: WorkerRecord) -> bool:
        """Whether a worker's next answer comes when it is polled alone."""
        first = record.jobs[0]
        return self._jobs[record.number][first].hold and first not in record.polled

    def _prepared(self, event: Event) -> bool:
        """Have at hand what an event needs; if a worker's memory turns out to be lost on the way, that comes first."""
        keeping = self._keeping()
        if event.kind is EventKind.LEFT:
            keeping = [event.worker] if event.worker in keeping else []
        elif event.kind is not EventKind.RESTORED or not self._asks_others:
            return True
        self._silent.clear()  # this cannot go on without them
        self._known = self._ask_kept(keeping)
        missing = [worker for worker in keeping if worker not in self._known]
        self._lose_memories(*missing)
        for worker in missing:
            record = self.records[worker]
            if record.at_work and not record.blocked:
                self._crashed(record, "it does not say what it keeps")
        return not missing

    def pop(self) -> None:
        event, self._head = self._head, None
        assert event is not None
        match event.kind:
            case EventKind.CRASHED:
                if self.records[event.worker].memory is MemoryPlace.AT_WORKER:
                    self._lose_memories(event.worker)
                else:
                    self._unblock(self.records[event.worker])
            case EventKind.LEFT | EventKind.FROZEN:
                self._gone(self.records[event.worker], event)
            case EventKind.JOINED:
                self._left.discard(event.worker)
            case EventKind.WAKE:  # not before: what is due and saved is due again
                heapq.heappop(self._wakes)
        if event.text and event.worker >= 0 and event.kind is not EventKind.PLACE:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        """Put an event into the log; of what happens to a worker again and again a few, and then now and then one."""
        times = self._told[event.worker, event.kind] = self._told.get((event.worker, event.kind), 0) + 1
        if is_told(times):
            more = "" if is_told(times + 1) else f" (the {times}th time; not all that follow are told)"
            name = self._transport.name_of(event.worker)
            text = self._unless_told(event.worker, event.text) if event.kind is EventKind.FAILED else event.text
            log.warning("worker %d%s %s: %s%s", event.worker, name and f" ({name})", event.kind.value, text, more)

    def _unless_told(self, worker: int, text: str) -> str:
        """A traceback for the log, or one line of it if that is what the worker's last one ended with."""
        cause, before = cause_of(text), self._causes.get(worker)
        self._causes[worker] = cause
        return cause if cause == before else text

    def arrival(self, event: Event) -> Arrival:
        assignment = self._jobs[event.worker][event.draw]
        job = Job(event.worker, event.draw, assignment.model.version)
        reply = self.records[event.worker].reply
        assert reply is not None
        if reply.refused:
            raise BadWork(reply.refused)
        if reply.error:
            return Arrival(job, NOTHING, event.time, event.seconds, reply.loss, steps=reply.steps)
        message: Message = as_tensors(reply.value)
        value, parts = parts_of(message)
        size, down = size_of(message), self.records[event.worker].down
        return Arrival(job, value, event.time, event.seconds, reply.loss, size, reply.steps, down, parts)

    def retry(self, job: Job, steps: int = 1) -> None:
        record, assignment = self.records[job.worker], self._jobs[job.worker][job.draw]
        record.reply, record.down = None, 0
        if assignment.hold and job.draw not in record.polled:  # it failed before anyone has asked for it: it is held again
            del self._jobs[job.worker][job.draw]
            self._begin(job.worker, self._next_draw(job.worker, assignment), assignment, first=True)
        else:
            super().retry(job, steps)
        record.polled.discard(job.draw)

    def accept(self, a: Arrival) -> None:
        record = self.records[a.worker]
        reply, record.reply = record.reply, None
        assert reply is not None
        del self._jobs[a.worker][a.job.draw]
        record.forgive()
        record.accepted, record.down = reply.request.sequence, 0
        record.polled.discard(a.job.draw)
        record.memory, record.held = MemoryPlace.AT_WORKER if reply.keeps else MemoryPlace.NONE, None
        self._dispatch(record)

    def _push(self, kind: EventKind, worker: int, draw: int = -1, seconds: float = 0.0, text: str = "") -> None:
        self._events.append(Event(0.0, kind, worker, draw, seconds, text=text))

    # --- orders ---

    def _lend(self, version: int, x: Sent, serial: int = 0, packed: Any = None) -> Model:
        self._longest = max(self._longest, size_of(x))
        if serial:
            return Model(version, self._transport.put(x), serial, as_arrays(packed), size=size_of(x))
        if self._current.version != version:
            self._current = Model(version, self._transport.put(x), size=size_of(x))
        return self._current

    def _weights(self, model: Model) -> Sent:
        return self._transport.get(model.x)

    def _begin(self, worker: int, draw: int, assignment: Assignment, *, first: bool = False) -> None:
        queue = self.records[worker].queue
        queue.insert(0 if first else len(queue), draw)
        self._dispatch(self.records[worker])

    def cancel(self, worker: int) -> None:
        super().cancel(worker)
        self._cancel_jobs(self.records[worker])

    def _cancel_jobs(self, record: WorkerRecord) -> None:
        """Nobody wants a worker's jobs any more: what it is doing ends at its next step, and what it holds now."""
        request = record.request
        self._drop_jobs(record)
        record.polled.clear()
        record.down = 0
        if request is not None and (request.hold or request.steps > 1):
            if request.hold:  # its process would do nothing else until it hears of this
                record.release, record.sent, record.pause = request.sequence, self.listening_time, self._policy.resend
            self._transport.send(PollRequest(*request[:3]))

    def _drop_jobs(self, record: WorkerRecord) -> None:
        """A worker's jobs are no more; a reply that was not taken is dropped, and one that still comes."""
        record.queue.clear()
        record.request = record.reply = None
        self._events = deque(e for e in self._events if not (e.worker == record.number and e.kind.ends_job))

    def poll(self, worker: int) -> None:
        """End a worker's oldest job that was not polled before; if its answer is there already, that was it."""
        record = self.records[worker]
        draw = next((draw for draw in record.jobs if draw not in record.polled), None)
        if draw is None:
            return
        record.polled.add(draw)
        request = record.request
        if request is not None and request.draw == draw:
            if request.hold:
                record.since, record.pause = self.listening_time, self._policy.resend
            record.request, record.sent = request._replace(polled=True), self.listening_time
            self._transport.send(PollRequest(*request[:3]))

    def _wake(self, time: float) -> None:
        heapq.heappush(self._wakes, time)

    def expel(self, worker: int, text: str) -> None:
        self._give_up(self.records[worker], text)

    # --- requests ---

    def _dispatch(self, record: WorkerRecord) -> None:
        """Ask a worker for its next job if it is free, or for an evaluation if it can afford that."""
        if record.is_free:
            self._ask_next(record)
        elif record.can_evaluate_aside:  # which a worker that is polled seldom could not otherwise
            wanted = self._evaluations.wanted(record.number)
            if wanted is not None and self._can_afford(record, wanted[1].limit):
                self._send_evaluation(record, *wanted)

    def _ask_next(self, record: WorkerRecord) -> None:
        wanted = self._evaluations.wanted(record.number)
        if wanted is not None and (not record.queue or self._may_evaluate(record, wanted[1])):
            self._send_evaluation(record, *wanted)
        elif record.queue:
            record.sequence += 1
            record.since, record.pause, record.alarmed = self.listening_time, self._policy.resend, False
            self._send_job(record, record.queue.popleft())

    def _send_evaluation(self, record: WorkerRecord, number: int, evaluation: PendingEvaluation) -> None:
        samples, name = evaluation.next_samples(record.number), (record.number, record.incarnation, number)
        record.evaluating = EvaluationRequest(*name, samples, self._mean_samples, record.holds)
        record.since = self.listening_time
        self._transport.send(record.evaluating, evaluation.model.x)

    def _may_evaluate(self, record: WorkerRecord, evaluation: PendingEvaluation) -> bool:
        """Whether an evaluation may go before a job: a job goes first, and then it must fit into the worker's time."""
        return record.jobs_done > evaluation.asked[record.number] and self._can_afford(record, evaluation.limit)

    def _can_afford(self, record: WorkerRecord, limit: float | None) -> bool:
        """Whether another evaluation keeps within that share of the worker's time, if there is a limit."""
        return limit is None or record.evaluation_seconds + record.last_evaluation_seconds <= limit * self.now

    def _send_job(self, record: WorkerRecord, draw: int) -> None:
        """Send a request; until a new process has answered once, what it is to keep goes with it."""
        model, steps, hold, _ = self._jobs[record.number][draw]
        name = (record.number, record.incarnation, record.sequence, draw, model.version)
        x, size, serial, base = model.x, model.size, 0, 0
        if self._downlink is not None:
            serial = model.serial
            if record.has == serial:
                x, size, base = None, 0, serial
            elif (differences := self._differences_to(record, model)) is not None:
                x, size, base = differences, sum(map(size_of, differences)), record.has
            else:
                record.has = 0  # the process has this one alone then, as soon as it answers
        held = record.held if record.accepted < 0 else None
        polled = draw in record.polled
        record.request = JobRequest(*name, record.accepted, self._mean_samples, steps, hold, polled, serial, base)
        record.sent = self.listening_time
        record.down += size if held is None else size + size_of_kept(held)
        self._transport.send(record.request, x, held)

    def _own_model(self, worker: int, version: int, x: Sent) -> Model:
        model = super()._own_model(worker, version, x)
        if model.packed is not None:
            differences = self._differences.setdefault(worker, {})
            differences[model.serial] = (model.base, model.packed)
            for serial in list(differences)[:-_DIFFERENCES]:
                del differences[serial]
        return model

    def _differences_to(self, record: WorkerRecord, model: Model) -> list[Any] | None:
        """What leads from the model that a process has to this one, in turn; None if the whole is to be sent."""
        known, serial, steps = self._differences.get(record.number, {}), model.serial, list[Any]()
        while serial != record.has:
            if serial not in known:
                return None
            serial, packed = known[serial]
            steps.insert(0, packed)
        return steps if sum(map(size_of, steps)) < model.size else None

    def _repeat(self, record: WorkerRecord) -> None:
        """Send again what has not been answered; a process that holds a job hears polls alone."""
        record.pause *= 2
        record.sent = self.listening_time
        self._control.counts["sent again"] += 1
        if record.release >= 0:
            self._transport.send(PollRequest(record.number, record.incarnation, record.release))
        if record.request is not None:
            if record.request.polled:
                self._transport.send(PollRequest(record.number, record.incarnation, record.sequence))
            self._send_job(record, record.request.draw)

    # --- notices ---

    def _receive(self, timeout: float) -> None:
        """Take what comes in within so many seconds, and all that has come in before."""
        for notice in self._transport.receive(timeout):
            self._take(notice)
        now = self._transport.now()
        self._deaf += max(0.0, now - self._listened - timeout - _DEAF)
        self._listened = now

    def _take(self, notice: Notice) -> None:
        if isinstance(notice, Reply):
            self._take_reply(notice)
            return
        record = self.records[notice.worker]
        if isinstance(notice, Returned):
            if record.status in (Status.ABSENT, Status.FROZEN) and record.number not in self._control.dismissed:
                self._grant("join", record.number, "it is there again")
            return
        if notice.incarnation != record.incarnation:
            return
        if isinstance(notice, Ready):
            self._take_ready(record, notice)
        elif isinstance(notice, Evaluated):
            self._take_evaluated(record, notice)
        elif record.status in (Status.STARTING, Status.PRESENT, Status.OVERDUE):
            awaited = self._beginning and self._fleet.waits  # nothing has begun that could go on without it
            self._crashed(record, notice.text, final=notice.final and not awaited)
        elif record.status is Status.FROZEN and record.memory is MemoryPlace.AT_WORKER:
            self._push(EventKind.CRASHED, record.number, text=notice.text)

    def _take_ready(self, record: WorkerRecord, notice: Ready) -> None:
        self._control.places[record.number] = (notice.node, notice.pid)
        record.samples = notice.samples if isinstance(notice.samples, int) else None
        if isinstance(notice.samples, str):
            self._crashed(record, f"its data cannot be counted: {cause_of(notice.samples)}", final=True)
            return
        if notice.place:
            self._push(EventKind.PLACE, record.number, text=notice.place)
        machine = changes(self._environment, notice.environment)
        if machine and machine != record.machine:
            record.machine = machine
            self._push(EventKind.MACHINE, record.number, text=machine)
        if record.status is Status.OVERDUE:
            kind = EventKind.JOINED if self._policy.gone == "leave" else EventKind.THAWED
            self._push(kind, record.number, text="its process has started")
        if record.status in (Status.STARTING, Status.OVERDUE):
            record.move(Status.PRESENT)
            record.since = record.sent = self.listening_time
            self._dispatch(record)

    def _take_evaluated(self, record: WorkerRecord, notice: Evaluated) -> None:
        part = notice.part
        if record.evaluating is not None and record.evaluating.evaluation == notice.evaluation:  # it may be a late one
            record.evaluating = None
        if is_part(part):
            record.last_evaluation_seconds = part.get("seconds", 0.0)
            record.evaluation_seconds += record.last_evaluation_seconds
            tensors = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in part.items()}
            self._evaluations.take(notice.evaluation, record.number, tensors)
        else:
            text = part if isinstance(part, str) else f"it sent {part!r:.100} for an evaluation"
            if notice.evaluation in self._evaluations.open:  # otherwise nobody waits for it any more
                log.warning("worker %d could not evaluate: %s", record.number, self._unless_told(record.number, text))
            self._evaluations.take(notice.evaluation, record.number, cause_of(text))
        self._dispatch(record)

    def _take_reply(self, reply: Reply) -> None:
        """Take the reply to the request that is open; any other was answered, replaced or cancelled before."""
        named = request_of(reply)
        record = self.records[named.worker] if named is not None and named.worker in range(len(self.records)) else None
        if named is not None and record is not None and named.incarnation == record.incarnation:
            record.release = record.release if record.release > named.sequence else -1
        if named is None or record is None or record.request is None or not named.is_same_question(record.request):
            self._control.counts["dropped"] += 1
            return
        request, record.request = record.request, None
        record.jobs_done += 1
        record.reply = reply = checked(reply, request, _LONGER * max(self._longest, _SHORT))
        record.has = request.serial if not reply.error else 0
        if not reply.error or reply.refused:
            self._heard_gradient = record.has_delivered = True
            self._push(EventKind.ARRIVAL, record.number, request.draw, reply.seconds)
            return
        record.failures += 1
        self._push(EventKind.FAILED, record.number, request.draw, reply.seconds, reply.error)
        tried = [other for other in self.records if other.at_work or other.failures]
        if not self._heard_gradient and len(tried) > 1 and all(other.failures for other in tried):
            last = cause_of(reply.error)
            self._failure = f"nobody could compute a first gradient; worker {record.number} says: {last}"
        record.bad_inputs += is_bad_input(reply.error) and not record.has_delivered
        if record.bad_inputs >= _BAD_INPUTS:
            self._give_up(record, f"no gradient can be computed from its data: {cause_of(reply.error)}")
        elif record.failures > self._policy.retries:
            self._give_up(record, f"{record.failures} exceptions in a row, the last: {cause_of(reply.error)}")

    # --- faults ---

    def _crashed(self, record: WorkerRecord, text: str, *, final: bool = False) -> None:
        """A worker's process is gone; the next one goes on with the jobs it had."""
        overdue = record.status is Status.OVERDUE
        record.lose_process()
        self._evaluations.begin_again(record.number)
        jobs = record.jobs
        self._drop_jobs(record)
        record.queue.extend(jobs)
        self._push(EventKind.CRASHED, record.number, text=text)
        if not final and record.crashes <= self._policy.restarts:
            self._start(record)
            if overdue:
                record.move(Status.OVERDUE)
            return
        self._transport.stop(record.number)
        if overdue:
            record.move(Status.ABSENT if self._policy.gone == "leave" else Status.FROZEN)
        else:
            self._give_up(record, text if final else f"{record.crashes} crashes in a row, the last: {text}")

    def _give_up(
        self, record: WorkerRecord, text: str, status: Status = Status.LEAVING, kind: EventKind | None = None
    ) -> None:
        """A worker has to go, without a ``kind`` by the rule for those that are gone for good."""
        if record.status is not status:
            record.move(status)
        self._evaluations.drop(record.number)
        rule = EventKind.LEFT if self._policy.gone == "leave" else EventKind.FROZEN
        self._push(kind or rule, record.number, text=text)

    def _gone(self, record: WorkerRecord, event: Event) -> None:
        """A worker leaves or is frozen now; too few of the others are a reason to stop."""
        self._evaluations.drop(record.number)
        if record.status is Status.LEAVING:
            record.move(Status.ABSENT if event.kind is EventKind.LEFT else Status.FROZEN)
            if event.kind is EventKind.LEFT or record.memory is not MemoryPlace.AT_WORKER:
                self._transport.stop(record.number)
        at_work = sum(other.at_work for other in self.records)
        if at_work < self._policy.minimum:
            self._failure = (
                f"{at_work} workers are at work, fewer than the minimum of {self._policy.minimum}; the last that went was "
                f"worker {record.number} ({event.text})."
            )

    def _unblock(self, record: WorkerRecord) -> None:
        """What a crash has done is put right: the worker's jobs go on."""
        record.blocked = False
        self._dispatch(record)

    def _check(self) -> None:
        """Look, a few times a second, at what was wished for and at who is late."""
        if self.now - self._checked < _CHECK:
            return
        self._checked = self.now
        for wish, worker in self._control.take_wishes():
            self._grant(wish, worker)
        if any(self._is_overdue(record) for record in self.records):
            self._receive(0.0)  # their answers may have been waiting, for a server that was busy or asleep
        for record in self.records:
            if self._is_overdue(record):
                self._time_out(record)
            elif record.status is Status.PRESENT and (record.request is not None or record.release >= 0):
                if self.listening_time - record.sent > record.pause:
                    self._repeat(record)
                if record.request is None:
                    continue
                if record.holds and self._evaluations.open:
                    self._dispatch(record)
                behind, alarm = self._current.version - record.request.version, self._policy.alarm
                if alarm is not None and behind > alarm and not record.alarmed:
                    record.alarmed = True
                    text = f"its job is {behind} versions behind, more than {alarm}"
                    self._push(EventKind.LATE, record.number, text=text)

    def _is_overdue(self, record: WorkerRecord) -> bool:
        """Whether a worker has had all its time."""
        waited = self.listening_time - record.since
        if record.status is Status.STARTING:
            return waited > self._policy.patience and not (self._beginning and self._fleet.waits)
        busy = (record.request is not None and not record.holds) or record.evaluating is not None
        return record.status is Status.PRESENT and busy and waited > self._policy.deadline

    def _time_out(self, record: WorkerRecord) -> None:
        """Go on without a worker that has had all its time."""
        if record.status is Status.STARTING:
            why = self._transport.why_not_started(record.number)
            text = f"its process has not started in {self._policy.patience:g} s{why}; it may come later"
            self._give_up(record, text, Status.OVERDUE)
            return
        asked = None if record.holds else record.request
        what = "an evaluation" if asked is None else f"job number {asked.draw}"
        self._crashed(record, f"no answer in {self._policy.deadline:g} s to {what}", final=True)

    def _grant(self, wish: Wish, worker: int, why: str = _ASKED) -> None:
        """Do what a user wants of a worker, if that can be."""
        record = self.records[worker] if 0 <= worker < len(self.records) else None
        if record is not None and wish == "leave" and record.at_work:
            self._give_up(record, _ASKED, kind=EventKind.LEFT)
        elif record is not None and wish == "join" and record.status in (Status.ABSENT, Status.FROZEN):
            record.forgive()
            self._push(EventKind.JOINED if record.status is Status.ABSENT else EventKind.THAWED, worker, text=why)
            if record.memory is MemoryPlace.AT_WORKER:  # it was frozen, and its process stayed
                record.move(Status.PRESENT)
                self._dispatch(record)
            else:
                record.begin_anew()
                self._start(record)
        elif record is not None and wish == "join" and record.status is Status.LEAVING:
            self._control.join(worker)  # when it has gone
        else:
            status = "unknown" if record is None else record.status.value
            log.warning("worker %d cannot %s: it is %s", worker, wish, status)

    # --- what workers keep ---

    def _keeping(self) -> list[int]:
        """The workers whose memory is with them alone."""
        return [record.number for record in self.records if record.memory is MemoryPlace.AT_WORKER]

    def _lose_memories(self, *workers: int) -> None:
        """What workers kept is gone, and is put together from the others' before anything else happens."""
        kinds = (EventKind.RESTORED, EventKind.LOST)
        self._events.extendleft(Event(0.0, kind, worker) for kind in kinds for worker in workers)

    def _ask_kept(self, workers: Iterable[int]) -> dict[int, Kept]:
        """What workers keep, of those that say so at once; one that does not is asked again when it has been heard of."""
        signs = {worker: (self.records[worker].incarnation, self.records[worker].jobs_done) for worker in workers}
        accepted = {
            worker: self.records[worker].accepted
            for worker, sign in signs.items()
            if self.records[worker].accepted >= 0 and self._silent.get(worker) != sign
        }
        kept = self._transport.kept(accepted)
        for worker in accepted:
            self._silent.pop(worker, None)
            if worker not in kept:
                self._silent[worker] = signs[worker]
                log.warning("worker %d does not say what it keeps; the others do not wait for it", worker)
        return {worker: held for worker, held in kept.items() if held is not None}

    def held(self) -> dict[int, Kept]:
        keeping = self._keeping()  # all of it travels here at each checkpoint: with large memories save less often
        known = {**self._known, **self._ask_kept(worker for worker in keeping if worker not in self._known)}
        held = {worker: known[worker] for worker in keeping if worker in known}
        held |= {record.number: record.held for record in self.records if record.held is not None}
        self.unheard = [r.number for r in self.records if r.memory is not MemoryPlace.NONE and r.number not in held]
        return held

    def forget(self, worker: int) -> Kept | None:
        record = self.records[worker]
        held = record.held if record.held is not None else self._known.get(worker)
        record.memory, record.held = MemoryPlace.NONE if record.memory is MemoryPlace.NONE else MemoryPlace.LOST, None
        return held

    def restore(self, worker: int, held: Kept | None) -> None:
        record = self.records[worker]
        record.memory, record.held = MemoryPlace.NONE if held is None else MemoryPlace.AT_SERVER, held
        self._unblock(record)

    def remove(self, worker: int) -> Kept | None:
        held = super().remove(worker)
        self.records[worker].release = -1
        self.records[worker].memory = MemoryPlace.NONE
        self._left.add(worker)
        return held

    # --- evaluation ---

    def evaluate(self, time: float, version: int, x: Tensor, samples: int | None, limit: float | None) -> bool:
        at_work = [record for record in self.records if record.at_work]
        if self._evaluations.open or not all(self._can_afford(record, limit) for record in at_work):
            return False
        self._ask_evaluation(time, self._lend(version, x), samples, limit)
        return True

    def evaluate_all(self, time: float, version: int, x: Tensor) -> None:
        few = self._problem.few_samples()
        self._evaluations.open.clear()
        for record in self.records:
            self._cancel_jobs(record)  # the run has ended: their gradients are not needed, and all of this was saved
        piece = None if few is None else _GRADIENTS_PER_PIECE * few
        self._ask_evaluation(time, self._lend(version, x), None, None, piece)
        self.last_evaluation = 0.0

    def _ask_evaluation(
        self, time: float, model: Model, samples: int | None, limit: float | None, piece: int | None = None
    ) -> None:
        asked = {record.number: record.jobs_done for record in self.records if record.at_work}
        self._evaluations.add(PendingEvaluation(time, model, samples, limit, piece, asked))
        for worker in asked:
            self._dispatch(self.records[worker])

    def _evaluation_ended(self, evaluation: PendingEvaluation) -> None:
        self._ended_evaluations.append(evaluation)
        self._push(EventKind.EVALUATED, -1)

    @property
    def has_evaluation(self) -> bool:
        return bool(self._ended_evaluations)

    def take_evaluation(self) -> WorkersEvaluation:
        ended = self._ended_evaluations.popleft()
        model = ended.model
        x: Any = self._weights(model)
        return WorkersEvaluation(ended.time, model.version, x, ended.results(), ended.complete, ended.errors)

    def wait_for_evaluations(self) -> bool:
        pending = self._evaluations.open
        if pending:
            self._check()
            self._receive(_IDLE)
            for record in self.records:
                record.blocked = False  # what a crash takes from a worker now is not needed any more
                self._dispatch(record)
            self.last_evaluation = sum(one.progress for one in pending.values()) / len(pending) if pending else 1.0
        return bool(pending or self._ended_evaluations)

    # --- saving ---

    def save(self) -> dict[str, Any]:
        return {
            **super().save(),
            "now": self.now,
            "queues": [record.jobs for record in self.records],
            "polled": [sorted(record.polled) for record in self.records],
            "sent": [record.down for record in self.records],
            "left": sorted(self._left),
            "lost": list(self.unheard),
            "wakes": self._wakes,
            "mean_samples": self._mean_samples,
            "evaluation_seconds": [(r.evaluation_seconds, r.last_evaluation_seconds) for r in self.records],
            "evaluations": [
                (one.time, one.model.version, self._saved(one.model), one.samples, one.limit)
                for one in self._evaluations.open.values()
            ],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue with new processes; workers that had left by a fault are given another chance."""
        super().load(saved)
        self._set_mean_samples(saved["mean_samples"])
        absent = self._fleet.absent_at_first(len(self.records))
        returning = set(saved["left"]).difference(absent) if self._policy.gone == "leave" else set()
        self._heard_gradient = True  # if none was, that will show again
        self._start_all(saved["left"], saved["now"], returning)
        self._control.have_joined(set(absent).difference(saved["left"]))
        self._wakes, self._left = saved["wakes"], set(saved["left"])
        columns = (saved[name] for name in ("queues", "polled", "sent", "evaluation_seconds"))
        for record, draws, polled, down, seconds in zip(self.records, *columns, strict=True):
            record.queue.extend(draws)
            record.polled, record.down, record.has_delivered = set(polled), down, True  # if not, it fails again and again
            record.evaluation_seconds, record.last_evaluation_seconds = seconds
            if record.number in saved["lost"]:
                record.blocked, record.memory = True, MemoryPlace.LOST
            self._dispatch(record)
        self._lose_memories(*saved["lost"])
        for worker in self._left.difference(absent, returning):
            self._control.join(worker)
        for time, version, x, samples, limit in saved["evaluations"]:
            self._ask_evaluation(time, self._lend(version, x), samples, limit)

    def close(self, ended: bool = True) -> None:
        self._transport.close(ended)

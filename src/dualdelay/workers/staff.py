"""Who of the real workers is there, what each was asked for, and what is done about those who do not answer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection

from ..core.environment import changes, environment
from ..engine.events import Due
from ..engine.fleet import Model
from .desk import Desk, Look, Looks, Piece
from .messages import Died, Notice, Ready, Reply, Request, asked, checked, is_part, last_line
from .ray_fleet import RayFleet
from .ray_transport import Post

log = logging.getLogger("dualdelay")

_TICK = 0.1  # seconds between two looks at who is late
_GAP = 1.0  # seconds of deafness that count; what a server slept beyond that is nobody's delay
_WAITING = 15.0  # seconds of waiting for processes after which, again and again, somebody should be told
ASKED = "it was asked to"  # as in result.PLANNED: nothing is wrong with such a worker


class Staff:
    """The workers' desks. Requests go out from here, and what comes back is put in ``ready`` in its order."""

    def __init__(self, fleet: RayFleet, post: Post, workers: int, model: Callable[[int, int], Model]) -> None:
        self.desks = [Desk() for _ in range(workers)]
        self.ready: deque[Due] = deque()  # what has happened and was not dealt with
        self.replies: dict[int, Reply] = {}  # those among it, by worker
        self.looks = Looks(self._looked)
        self.seen: deque[Look] = deque()  # evaluations that are complete
        self.short = ""  # why the run cannot go on
        self.heard = False  # whether a gradient has ever come
        self.unit = 0.0  # the samples of a worker that counts as one; zero: all count alike, or as they were told to
        self.began = time.monotonic()
        self._fleet, self._post = fleet, post
        self._model = model  # of a job
        self._ticked = 0.0
        self._listened = time.monotonic()  # when the server listened last
        self._deaf = 0.0  # seconds that it was asleep or busy with other things
        self._environment = environment()

    @property
    def now(self) -> float:
        """Seconds since the run began, without those in which it was stopped."""
        return time.monotonic() - self.began

    @property
    def heard_for(self) -> float:
        """Seconds in which the server would have heard an answer: what workers are given is counted by these."""
        return time.monotonic() - self._deaf

    def muster(self, away: Collection[int], now: float, back: Collection[int] = ()) -> None:
        """Start all but these workers' processes, and the clock at ``now`` when they are there: none has a head start.

        Those of them who come ``back`` join when they are there.
        """
        self.began = time.monotonic()
        for worker in range(len(self.desks)):
            if worker not in away or worker in back:
                self.hire(worker)
            if worker in back:
                self.desks[worker].state = "awaited"
        soon = [self.desks[worker] for worker in back]
        said = _WAITING
        while any(desk.state == "starting" for desk in self.desks) or (
            any(desk.state == "awaited" for desk in soon) and self.now < self._fleet.patience
        ):
            self.tick(-1)
            self.receive(0.2)
            if self.now > said:
                said += _WAITING
                late = [worker for worker, desk in enumerate(self.desks) if desk.state in ("starting", "awaited")]
                log.warning("after %.0f s still waiting for the processes of workers %s to start", self.now, late)
        self.began = time.monotonic() - now
        self._ticked = float("-inf")  # wishes are looked at first
        for desk in self.desks:
            desk.since = desk.asked = self.heard_for

    def push(self, kind: str, worker: int, draw: int = -1, seconds: float = 0.0, text: str = "") -> None:
        """Something has happened."""
        self.ready.append(Due(0.0, kind, worker, draw, seconds, text=text))

    def hire(self, worker: int) -> None:
        """Start a worker's process."""
        desk = self.desks[worker]
        desk.state, desk.since = "starting", self.heard_for
        self._post.hire(worker, desk.incarnation)
        self.dispatch(worker)

    def dispatch(self, worker: int) -> None:
        """Ask a worker for its next job if it is free, or for an evaluation if it can afford that."""
        desk = self.desks[worker]
        if not desk.free or worker in self.replies:
            return
        wanted = self.looks.wanted(worker)
        if wanted is not None and (not desk.queue or self._affords(desk, wanted[1], worker)):
            number, look = wanted
            desk.evaluating, desk.since = Piece(number, look.model, look.next(worker)), self.heard_for
            self._post.measure(worker, desk.incarnation, desk.evaluating, self.unit)
        elif desk.queue:
            desk.doing = desk.queue.popleft()
            desk.sequence += 1
            desk.since, desk.pause, desk.late = self.heard_for, self._fleet.resend, False
            self._ask(worker)

    def _affords(self, desk: Desk, look: Look, worker: int) -> bool:
        """Whether an evaluation may go before a job: a job goes first, and then it must fit into the worker's time."""
        if desk.done == look.asked[worker]:
            return False
        return look.limit is None or self.can_afford(desk, look.limit)

    def can_afford(self, desk: Desk, limit: float) -> bool:
        """Whether another evaluation keeps within that share of the worker's time."""
        return desk.spent + desk.last <= limit * self.now

    def _ask(self, worker: int) -> None:
        """Send the open request; until a new process has answered once, what it is to keep goes with it."""
        desk = self.desks[worker]
        assert desk.doing is not None
        model = self._model(worker, desk.doing)
        request = Request(worker, desk.incarnation, desk.sequence, desk.doing, model.version, desk.accepted, self.unit)
        desk.asked, desk.request = self.heard_for, request
        self._post.ask(request, model.x, desk.spare if desk.accepted < 0 else None)

    def to_do(self, worker: int) -> list[int]:
        """The draws that a worker was given and the server has not taken; a reply that is due may still be lost."""
        reply = self.replies.get(worker)
        return [*([] if reply is None else [reply.request.draw]), *self.desks[worker].jobs]

    def clear(self, worker: int) -> None:
        """A worker's jobs are no more; a reply that still comes is dropped."""
        desk = self.desks[worker]
        desk.queue.clear()
        desk.doing = None
        if self.replies.pop(worker, None) is not None:
            done = [due for due in self.ready if due.worker == worker and due.kind in ("arrival", "failed")]
            for due in done:
                self.ready.remove(due)

    def receive(self, timeout: float) -> None:
        """Take what comes in within so many seconds, and all that has come in before."""
        for notice in self._post.receive(timeout):
            self._take(notice)
        now = time.monotonic()
        self._deaf += max(0.0, now - self._listened - timeout - _GAP)
        self._listened = now

    def _take(self, notice: Notice) -> None:
        if isinstance(notice, Reply):
            self._reply(notice)
            return
        worker, desk = notice.worker, self.desks[notice.worker]
        if notice.incarnation != desk.incarnation:
            return
        if isinstance(notice, Ready):
            self._fleet.places[worker] = (notice.node, notice.pid)
            desk.samples = notice.samples if isinstance(notice.samples, int) else None
            if isinstance(notice.samples, str):
                self.crashed(worker, f"its data cannot be counted: {last_line(notice.samples)}", final=True)
                return
            moved = changes(self._environment, notice.environment)
            if moved and moved != desk.machine:
                desk.machine = moved
                self.push("machine", worker, text=moved)
            if desk.state == "awaited":
                self.push("joined" if self._fleet.gone == "leave" else "thawed", worker, text="its process has started")
            if desk.state in ("starting", "awaited"):
                desk.state, desk.since, desk.asked = "present", self.heard_for, self.heard_for
                self.dispatch(worker)
        elif isinstance(notice, Died):
            if desk.state in ("starting", "present", "awaited"):
                self.crashed(worker, notice.text, final=notice.final)
            elif desk.state == "frozen" and desk.memory == "worker":
                self.push("crashed", worker, text=notice.text)
        else:
            desk.evaluating = None
            if not is_part(notice.part):
                said = notice.part if isinstance(notice.part, str) else f"it sent {notice.part!r:.100} for an evaluation"
                log.warning("worker %d could not evaluate: %s", worker, said)
                self.looks.fail(notice.evaluation, worker, last_line(said))
            elif isinstance(notice.part, dict):
                desk.last = notice.part.get("seconds", 0.0)
                desk.spent += desk.last
                self.looks.take(notice.evaluation, worker, notice.part)
            self.dispatch(worker)

    def _looked(self, look: Look) -> None:
        self.seen.append(look)
        self.push("evaluated", -1)

    def _reply(self, reply: Reply) -> None:
        """Take the reply to the request that is open; any other was answered, replaced or cancelled before."""
        named = asked(reply)
        desk = Desk("unknown") if named is None or named.worker not in range(len(self.desks)) else self.desks[named.worker]
        if named is None or desk.request is None or desk.doing is None or named[:5] != desk.request[:5]:
            self._fleet.counts["dropped"] += 1
            return
        worker, draw = desk.request.worker, desk.doing
        desk.doing = None
        desk.done += 1
        self.replies[worker] = reply = checked(reply)._replace(request=desk.request)
        if not reply.error:
            self.heard = True
            self.push("arrival", worker, draw, reply.seconds)
            return
        desk.failures += 1
        self.push("failed", worker, draw, reply.seconds, reply.error)
        tried = [other for other in self.desks if other.at_work or other.failures]
        if not self.heard and len(tried) > 1 and all(other.failures for other in tried):
            last = last_line(reply.error)
            self.short = f"nobody could compute a first gradient; worker {worker} says: {last}"
        if desk.failures > self._fleet.retries:
            self.give_up(worker, f"{desk.failures} exceptions in a row, the last: {last_line(reply.error)}")

    def crashed(self, worker: int, text: str, *, final: bool = False) -> None:
        """A worker's process is gone; the next one goes on with the job it had."""
        desk = self.desks[worker]
        awaited = desk.state == "awaited"
        desk.incarnation += 1
        desk.crashes += 1
        desk.accepted, desk.blocked, desk.evaluating = -1, True, None
        self.looks.again(worker)
        jobs = self.to_do(worker)
        self.clear(worker)
        desk.queue.extend(jobs)
        self.push("crashed", worker, text=text)
        if not final and desk.crashes <= self._fleet.restarts:
            self.hire(worker)
            if awaited:
                desk.state = "awaited"
            return
        self._post.dismiss(worker)
        if awaited:
            desk.state = "absent" if self._fleet.gone == "leave" else "frozen"
        else:
            self.give_up(worker, text if final else f"{desk.crashes} crashes in a row, the last: {text}")

    def give_up(self, worker: int, text: str, state: str = "dead") -> None:
        """A worker has to go, by the rule for those who are gone for good."""
        self.desks[worker].state = state
        self.looks.drop(worker)
        self.push("left" if self._fleet.gone == "leave" else "frozen", worker, text=text)

    def gone(self, worker: int, kind: str, text: str) -> None:
        """A worker leaves or is frozen now; too few of the others are a reason to stop."""
        desk = self.desks[worker]
        self.looks.drop(worker)
        if desk.state == "dead":
            desk.state = "absent" if kind == "left" else "frozen"
            if kind == "left" or desk.memory != "worker":
                self._post.dismiss(worker)
        there = sum(other.at_work for other in self.desks)
        if there < self._fleet.minimum:
            self.short = (
                f"{there} workers are at work, fewer than the minimum of {self._fleet.minimum}; the last that went was "
                f"worker {worker} ({text})."
            )

    def unblock(self, worker: int) -> None:
        """What a crash has done is put right: the worker's jobs go on."""
        self.desks[worker].blocked = False
        self.dispatch(worker)

    def tick(self, version: int) -> None:
        """Look, a few times a second, at what was wished for and at who is late."""
        if self.now - self._ticked < _TICK:
            return
        self._ticked = self.now
        for wish, worker in self._fleet.wishes():
            self._wish(wish, worker)
        if any(self._overdue(desk) for desk in self.desks):
            self.receive(0.0)  # their answers may have been waiting, for a server that was busy or asleep
        for worker, desk in enumerate(self.desks):
            if self._overdue(desk):
                self._judge(worker, desk)
            elif desk.state == "present" and desk.doing is not None:
                if self.heard_for - desk.asked > desk.pause:
                    desk.pause *= 2
                    self._fleet.counts["sent again"] += 1
                    self._ask(worker)
                behind = version - self._model(worker, desk.doing).version
                if self._fleet.alarm is not None and behind > self._fleet.alarm and not desk.late:
                    desk.late = True
                    self.push("late", worker, text=f"its job is {behind} versions behind, more than {self._fleet.alarm}")

    def _overdue(self, desk: Desk) -> bool:
        """Whether a worker has had all its time."""
        waited = self.heard_for - desk.since
        if desk.state == "starting":
            return waited > self._fleet.patience
        at_work = desk.doing is not None or desk.evaluating is not None
        return desk.state == "present" and at_work and waited > self._fleet.deadline

    def _judge(self, worker: int, desk: Desk) -> None:
        """Go on without a worker that has had all its time."""
        if desk.state == "starting":
            lacking = self._post.lacking(worker)
            text = f"its process has not started in {self._fleet.patience:g} s{lacking}; it may come later"
            self.give_up(worker, text, "awaited")
            return
        what = "an evaluation" if desk.doing is None else f"job number {desk.doing}"
        self.crashed(worker, f"no answer in {self._fleet.deadline:g} s to {what}", final=True)

    def _wish(self, wish: str, worker: int) -> None:
        desk = self.desks[worker] if 0 <= worker < len(self.desks) else Desk("unknown")
        if wish == "leave" and desk.at_work:
            desk.state = "dead"
            self.looks.drop(worker)
            self.push("left", worker, text=ASKED)
        elif wish == "join" and desk.state in ("absent", "frozen"):
            desk.crashes = desk.failures = 0
            self.push("joined" if desk.state == "absent" else "thawed", worker, text=ASKED)
            if desk.memory == "worker":  # it was frozen, and its process stayed
                desk.state = "present"
                self.dispatch(worker)
            else:
                desk.incarnation += 1
                desk.accepted = -1
                self.hire(worker)
        elif wish == "join" and desk.state == "dead":
            self._fleet.join(worker)  # when it has gone
        else:
            log.warning("worker %d cannot %s: it is %s", worker, wish, desk.state)

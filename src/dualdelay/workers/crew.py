"""The workers of a RayFleet as a fleet: what they remember, what is saved of them, and what happens next."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import Arrival, Job, Problem
from ..core.compression import Packed, size_of, unpacked
from ..core.errors import RunFailed
from ..engine.evaluation import Evaluated
from ..engine.events import Due
from ..engine.fleet import NOTHING, Fleet, Message, Model
from .desk import Look
from .messages import Reply
from .ray_fleet import RayFleet
from .ray_transport import Post
from .staff import Staff

log = logging.getLogger("dualdelay")

_PAUSE = 0.2  # seconds after which the server is told that nothing has happened
_GO = 16  # gradients' worth of samples that a worker evaluates in one go, where it evaluates all


class Crew(Fleet):
    """Real workers. What a crash takes from one of them is put right before its next job goes out."""

    copies = True
    real = True

    def __init__(self, fleet: RayFleet, problem: Problem, message: Message, output: Path | None = None) -> None:
        super().__init__(problem)
        fleet.begin(problem.workers)
        self.measures = problem.measures
        self._fleet = fleet
        self._post = Post(fleet, problem, message, output)
        self._staff = Staff(fleet, self._post, problem.workers, lambda worker, draw: self._jobs[worker][draw])
        self._head: Due | None = None  # what is dealt with next
        self._last: Reply | None = None  # the reply that was popped
        self._known: dict[int, Tensor] = {}  # what workers said they keep, for the change at hand
        self._current = Model(-1, None)
        self._wakes: list[float] = []
        self._away: set[int] = set()  # workers that have left
        self._mute: dict[int, tuple[int, int]] = {}  # who did not say what it keeps: its incarnation and jobs done then

    def begin(self) -> None:
        absent = self._fleet.absent_at_first(len(self._staff.desks))
        self._staff.muster(absent, 0.0)
        for worker in absent:
            self._staff.desks[worker].state = "dead"
            self._staff.push("left", worker, text="not there at the start")
        if self._problem.needs_sample_counts:
            counts = [desk.samples for desk in self._staff.desks if desk.samples is not None]
            if not counts:
                why = next((due.text for due in self._staff.ready if due.text), "none of their processes has started")
                raise RunFailed(f"no worker can say how many samples it has, and workers are to count by them: {why}")
            self._weigh(math.fsum(counts) / len(counts))
            self._staff.push("weighed", -1, text=repr(self._staff.unit))

    def _weigh(self, unit: float) -> None:
        """So many samples make a worker that counts as one."""
        if unit:
            self._staff.unit = unit
            self._problem.set_mean_samples(unit)

    def peek(self) -> Due | None:
        until = time.monotonic() + _PAUSE
        staff = self._staff
        if self._head is None:
            self._known = {}
        while self._head is None:
            staff.tick(self._current.version)
            now = staff.now
            if staff.short:
                raise RunFailed(staff.short)
            if self._wakes and self._wakes[0] <= now:
                self._head = Due(now, "wake")
            elif staff.ready:
                if self._prepared(staff.ready[0]):
                    self._head = staff.ready.popleft()._replace(time=now)
            elif not self._busy():
                return None
            elif time.monotonic() >= until:
                self._head = Due(now, "idle")
            else:
                staff.receive(max(0.0, min([until - time.monotonic(), *(wake - now for wake in self._wakes[:1])])))
        return self._head

    def _busy(self) -> bool:
        desks = self._staff.desks
        if self._wakes or self._staff.looks.open or any(d.state == "awaited" or (d.at_work and d.jobs) for d in desks):
            return True
        stuck = [worker for worker, desk in enumerate(desks) if desk.jobs]
        if stuck:
            raise RunFailed(f"nobody is at work: the others wait for workers {stuck}, which are frozen.")
        return False

    def _prepared(self, due: Due) -> bool:
        """Have at hand what a change needs; if somebody's memory turns out to be lost on the way, that comes first."""
        keeping = self._keeping()
        if due.kind == "left":
            keeping = [due.worker] if due.worker in keeping else []
        elif due.kind != "restored":
            return True
        self._mute.clear()  # this cannot go on without them
        self._known = self._ask_held(keeping)
        missing = [worker for worker in keeping if worker not in self._known]
        self._lose(*missing)
        for worker in missing:
            desk = self._staff.desks[worker]
            if desk.at_work and not desk.blocked:
                self._staff.crashed(worker, "it does not say what it keeps")
        return not missing

    def _lose(self, *workers: int) -> None:
        """What a worker kept is gone, and is put together from the others' before anything else happens."""
        self._staff.ready.extendleft(Due(0.0, kind, worker) for kind in ("restored", "lost") for worker in workers)

    def _keeping(self) -> list[int]:
        """The workers whose memory is with them alone."""
        return [worker for worker, desk in enumerate(self._staff.desks) if desk.memory == "worker"]

    def _ask_held(self, workers: Iterable[int]) -> dict[int, Tensor]:
        """What workers keep, of those that say so at once; who did not is asked again when it has been heard of."""
        desks = self._staff.desks
        signs = {worker: (desks[worker].incarnation, desks[worker].done) for worker in workers}
        asked = [worker for worker, sign in signs.items() if desks[worker].accepted >= 0 and self._mute.get(worker) != sign]
        held = self._post.held({worker: desks[worker].accepted for worker in asked})
        for worker in asked:
            self._mute.pop(worker, None)
            if worker not in held:
                self._mute[worker] = signs[worker]
                log.warning("worker %d does not say what it keeps; the others do not wait for it", worker)
        return {worker: kept for worker, kept in held.items() if kept is not None}

    def pop(self) -> None:
        due, self._head = self._head, None
        assert due is not None
        staff = self._staff
        if due.kind in ("arrival", "failed"):
            self._last = staff.replies.pop(due.worker)
        elif due.kind == "crashed" and staff.desks[due.worker].memory == "worker":
            self._lose(due.worker)
        elif due.kind == "crashed":
            staff.unblock(due.worker)
        elif due.kind in ("left", "frozen"):
            staff.gone(due.worker, due.kind, due.text)
        elif due.kind == "joined":
            self._away.discard(due.worker)
        elif due.kind == "wake":  # not before: what is due and saved is due again
            heapq.heappop(self._wakes)
        if due.text and due.worker >= 0:
            log.warning("worker %d %s: %s", due.worker, due.kind, due.text)

    def arrival(self, due: Due) -> Arrival:
        if due.kind == "wake":
            return Arrival(None, NOTHING, due.time, 0.0, math.nan)
        job = Job(due.worker, due.draw, self._jobs[due.worker][due.draw].version)
        reply = self._staff.replies[due.worker]
        sent = reply.value if isinstance(reply.value, Packed) else torch.from_numpy(reply.value)
        value = NOTHING if reply.error else unpacked(sent)
        return Arrival(job, value, due.time, due.seconds, reply.loss, size_of(sent))

    def accept(self, a: Arrival) -> None:
        assert a.job is not None and self._last is not None
        desk = self._staff.desks[a.worker]
        del self._jobs[a.worker][a.job.draw]
        desk.crashes = desk.failures = 0
        desk.accepted = self._last.request.sequence
        if self._last.keeps:
            desk.memory, desk.spare = "worker", None
        self._staff.dispatch(a.worker)

    def held(self) -> dict[int, Tensor]:
        desks, keeping = self._staff.desks, self._keeping()
        known = {**self._known, **self._ask_held(worker for worker in keeping if worker not in self._known)}
        held = {worker: known[worker] for worker in keeping if worker in known}
        held |= {worker: desk.spare for worker, desk in enumerate(desks) if desk.spare is not None}
        self.silent = [worker for worker, desk in enumerate(desks) if desk.memory != "none" and worker not in held]
        return held

    def forget(self, worker: int) -> Tensor | None:
        desk = self._staff.desks[worker]
        held = desk.spare if desk.spare is not None else self._known.get(worker)
        desk.memory, desk.spare = "none" if desk.memory == "none" else "lost", None
        return held

    def restore(self, worker: int, held: Tensor) -> None:
        desk = self._staff.desks[worker]
        desk.memory, desk.spare = "server", held
        self._staff.unblock(worker)

    def depart(self, worker: int) -> Tensor | None:
        held = super().depart(worker)
        self._staff.desks[worker].memory = "none"
        self._away.add(worker)
        return held

    def _lend(self, version: int, x: Tensor) -> Model:
        if self._current.version != version:
            self._current = Model(version, self._post.put(x))
        return self._current

    def _weights(self, model: Model) -> Tensor:
        return self._post.get(model.x)

    def _begin(self, worker: int, draw: int, model: Model, *, sent: bool) -> None:
        self._staff.desks[worker].queue.append(draw)
        self._staff.dispatch(worker)

    def _begin_first(self, worker: int, draw: int, model: Model) -> None:
        self._staff.desks[worker].queue.appendleft(draw)
        self._staff.dispatch(worker)

    def _cancelled(self, worker: int) -> None:
        self._staff.clear(worker)

    def _wake(self, time: float) -> None:
        heapq.heappush(self._wakes, time)

    def dismiss(self, worker: int, text: str) -> None:
        self._staff.give_up(worker, text)

    def measure(self, time: float, version: int, x: Tensor, samples: int | None, limit: float | None) -> bool:
        staff = self._staff
        there = [desk for desk in staff.desks if desk.at_work]
        if staff.looks.open or (limit is not None and not all(staff.can_afford(desk, limit) for desk in there)):
            return False
        self._look(time, self._lend(version, x), samples, limit, None)
        return True

    def measure_whole(self, time: float, version: int, x: Tensor) -> None:
        few = self._problem.few_samples()
        self._staff.looks.clear()
        for worker in range(len(self._staff.desks)):
            self._staff.clear(worker)  # the run has ended: nobody needs their gradients, and all of this was saved
        self._look(time, self._lend(version, x), None, None, None if few is None else _GO * few)
        self.evaluated = 0.0

    def _look(self, time: float, model: Model, samples: int | None, limit: float | None, pieces: int | None) -> None:
        asked = {worker: desk.done for worker, desk in enumerate(self._staff.desks) if desk.at_work}
        self._staff.looks.add(Look(time, model, samples, limit, pieces, asked))
        for worker in asked:
            self._staff.dispatch(worker)

    @property
    def has_measured(self) -> bool:
        """Whether an evaluation is there to be taken."""
        return bool(self._staff.seen)

    def measured(self) -> Evaluated:
        look = self._staff.seen.popleft()
        return Evaluated(look.time, look.model.version, self._weights(look.model), look.found(), look.complete, look.errors)

    def settle(self) -> bool:
        staff = self._staff
        if staff.looks.open:
            staff.tick(self._current.version)
            staff.receive(_PAUSE)
            for worker, desk in enumerate(staff.desks):
                desk.blocked = False  # what a crash takes from a worker now, nobody needs any more
                staff.dispatch(worker)
            open_looks = list(staff.looks.open.values())
            self.evaluated = sum(look.share for look in open_looks) / len(open_looks) if open_looks else 1.0
        return bool(staff.looks.open or staff.seen)

    def save(self) -> dict[str, Any]:
        return {
            **super().save(),
            "now": self._staff.now,
            "queues": [self._staff.to_do(worker) for worker in range(len(self._staff.desks))],
            "away": sorted(self._away),
            "lost": list(self.silent),
            "wakes": self._wakes,
            "unit": self._staff.unit,
            "evaluating": [(desk.spent, desk.last) for desk in self._staff.desks],
            "looks": [
                (look.time, look.model.version, self._weights(look.model), look.samples, look.limit)
                for look in self._staff.looks.open.values()
            ],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with new processes; those that had left by a fault are given another chance."""
        super().load(saved)
        self._weigh(saved["unit"])
        absent = self._fleet.absent_at_first(len(self._staff.desks))
        back = set(saved["away"]).difference(absent) if self._fleet.gone == "leave" else set()
        self._staff.heard = True  # if it was not, somebody will say so again
        self._staff.muster(saved["away"], saved["now"], back)
        self._fleet.seated(set(absent).difference(saved["away"]))
        self._wakes, self._away = saved["wakes"], set(saved["away"])
        for worker, draws in enumerate(saved["queues"]):
            self._staff.desks[worker].queue.extend(draws)
            self._staff.desks[worker].spent, self._staff.desks[worker].last = saved["evaluating"][worker]
            if worker in saved["lost"]:
                self._staff.desks[worker].blocked, self._staff.desks[worker].memory = True, "lost"
            self._staff.dispatch(worker)
        self._lose(*saved["lost"])
        for worker in self._away.difference(absent, back):
            self._fleet.join(worker)
        for moment, version, x, samples, limit in saved["looks"]:
            self._look(moment, self._lend(version, x), samples, limit, None)

    def close(self) -> None:
        self._post.close()

"""Who arrives next: by virtual time, or by the order of a recorded run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import BadInput, DualDelayError, ReplayMismatch, plain_number, shortened, shown
from ..engine.events import Event, EventKind
from ..engine.trace import Trace
from .availability import Change
from .link import Link, ServerLine, SharedLink
from .speeds import SpeedModel

_MOST_WAKES, _INSTANT = 10_000, 1e-12  # wakes at one moment, after which time will never go on, and how long that is


class Work(NamedTuple):
    """A job as a clock sees it."""

    worker: int
    draw: int
    batches: float  # that each of its gradients is worth
    up: int  # bytes that the worker sends
    steps: int = 1  # gradients that it takes
    hold: bool = False  # whether it ends when it is polled alone


class Clock:
    """Decides what happens next in a local fleet; in this one, nothing does."""

    def begin(self, work: Work, down: int) -> None:
        """A job was given to a worker, which is sent so many bytes for it."""

    def retry(self, work: Work) -> None:
        """A job came to nothing and is done again, before those that wait at the worker."""
        self.begin(work, 0)

    def poll(self, worker: int) -> None:
        """What a worker is doing ends now, unless it is recorded when it does."""

    def cancel(self, worker: int, draws: int) -> None:
        """The worker's jobs are dropped; it was given ``draws`` so far."""

    def wake(self, time: float) -> None:
        """A wake is due at that time, unless all of them are recorded."""

    def expel(self, worker: int, text: str) -> None:
        """The worker has to leave now, unless it is recorded who does."""

    def peek(self) -> Event | None:
        """What happens next, or None if nothing does: a job that never ends is never due."""
        return None

    def pop(self) -> None:
        """Let that happen."""

    def upcoming(self, count: int) -> list[Event]:
        """The arrivals among the next so many events, as far as they are decided, in no particular order."""
        return []

    @property
    def never_ending(self) -> list[int]:
        """The workers whose jobs will never end."""
        return []

    @property
    def expects_more(self) -> bool:
        """Whether something other than a wake will be due."""
        return True

    def load(self, saved: Mapping[str, Any], jobs: Iterable[tuple[int, int]]) -> None:
        """Continue from what a clock saved, with these jobs in flight, named by worker and draw."""


def _seconds(function: Callable[..., Any], model: object, what: str, *arguments: Any) -> float:
    """The seconds that a user's model gives, if that is what it does; a clock that goes backwards has no order.

    ``what`` is a text with places for the arguments.
    """
    try:
        value = function(*arguments)
        if type(value) is float and value >= 0.0:  # nearly always
            return value
    except DualDelayError:
        raise
    except Exception as error:  # whatever a user's class raises
        raise BadInput(
            f"{type(model).__name__} raised {type(error).__name__} {what.format(*arguments)}: "
            f"{shortened(str(error), 1000)}. Expected seconds, zero or more; mend its "
            f"'{getattr(function, '__name__', 'seconds')}'."
        ) from error
    try:
        seconds = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # no number, one too large, or whatever a user's class raises
        seconds = math.nan
    if not seconds >= 0:
        raise BadInput(
            f"{type(model).__name__} gave {shown(value)} {what.format(*arguments)}; expected seconds, zero or more."
        )
    return seconds


class VirtualClock(Clock):
    """A heap of what is due, by time and then by order of sending.

    A worker does its jobs one after the other, so the time of each is known when it is sent. A job that never ends has
    an infinite time, and so have those behind it. Where messages share the server's line, the time of each is known when it
    reaches the line: until then its place in the heap is that time, and it is put back to when the server is done with it.
    """

    def __init__(self, speeds: SpeedModel, link: Link | None = None, changes: Sequence[Change] = ()) -> None:
        self.now = 0.0
        self._speeds = speeds
        self._link = link or Link()
        self._instant = self._link == Link()  # and no user's own: no message takes time
        self._free: dict[int, float] = {}  # when each worker has done all it has
        self._heap: list[tuple[float, int, Event]] = []
        self._sent = 0
        self._wakes = (0.0, 0)  # a moment, and how many wakes there were at it
        self._cancelled: dict[int, int] = {}  # by worker: jobs with a smaller draw than this will not arrive
        self._held: dict[int, Event] = {}  # by worker: a job that ends when it is polled alone
        self._up = 0  # bytes that a worker sends
        self._line = ServerLine(self._link) if isinstance(self._link, SharedLink) else None
        self._under_way: set[int] = set()  # messages that have not reached the shared line, by their order of sending
        for worker in self._absent_at_first(changes):
            self._push(Event(0.0, EventKind.LEFT, worker))
        for change in changes:
            self._push(Event(change.time, change.kind, change.worker))

    def _absent_at_first(self, changes: Sequence[Change]) -> list[int]:
        """The workers whose first change is to join; refuses changes that cannot be."""
        kinds: dict[int, list[EventKind]] = {}
        for change in sorted(changes, key=lambda change: change.time):
            if not (0 <= change.worker < self._speeds.n and 0 <= change.time < math.inf):
                raise BadInput(
                    f"change {(change.kind.value, *change[1:])} does not fit; expected dd.speeds.leave(worker, time) or "
                    f"dd.speeds.join(worker, time) with a worker in 0..{self._speeds.n - 1} and a time of zero or more."
                )
            earlier = kinds.setdefault(change.worker, [])
            if change.kind in earlier[-1:]:
                raise BadInput(
                    f"worker {change.worker} {change.kind} twice, the second time at {change.time}; expected once."
                )
            earlier.append(change.kind)
        return sorted(worker for worker, kinds in kinds.items() if kinds[0] is EventKind.JOINED)

    def _push(self, event: Event) -> None:
        if self._line is not None and event.kind is EventKind.ARRIVAL:
            self._under_way.add(self._sent)
        heapq.heappush(self._heap, (event.time, self._sent, event))
        self._sent += 1

    def _arrival(self, work: Work, travel: float, earliest: float) -> Event:
        """The arrival of a job that can begin at ``earliest``, after what the worker already has to do."""
        worker, draw, steps = work.worker, work.draw, work.steps
        start = max(earliest, self._free.get(worker, 0.0))
        batches: Any = work.batches
        if type(batches) is not int:
            batches = plain_number(batches)
        if not isinstance(batches, (int, float)) or not 0 <= batches < math.inf:
            raise BadInput(
                f"the problem's 'batches' gave {shown(batches)} for worker {worker}; expected a number of minibatches, "
                "zero or more."
            )
        job, what = (worker, draw, start, batches * steps), "for job {1} of worker {0}"
        seconds = _seconds(self._speeds.job, self._speeds, what, *job) if start < math.inf else math.inf
        self._free[worker] = start + seconds
        return Event(start + seconds + travel, EventKind.ARRIVAL, worker, draw, seconds, start, batches, steps)

    def begin(self, work: Work, down: int) -> None:
        self._up = work.up
        if work.worker in self._held:
            raise BadInput(
                f"worker {work.worker} was sent a job behind one that it holds until it is polled; expected "
                f"poll({work.worker}) before."
            )
        there = self.now + self._travel(down) if self._line is None else self._line.send(self.now, down)
        event = self._arrival(work, self._travel(work.up), there)
        if work.hold:
            self._held[work.worker] = event
            self._free[work.worker] = math.inf
        else:
            self._push(event)

    def _travel(self, size: int) -> float:
        if self._instant:
            return 0.0
        return _seconds(self._link.seconds, self._link, "for {} bytes", size)

    def poll(self, worker: int) -> None:
        """The question travels, and the worker goes on meanwhile; steps take equal parts of a job's time."""
        asked = self.now + self._travel(0)
        event, behind = self._held.pop(worker, None), list[tuple[float, int, Event]]()
        if event is None:
            jobs = [entry for entry in self._jobs_of(worker) if entry[2].start + entry[2].seconds > asked]
            if not jobs:
                return  # its answer is on its way
            entry = min(jobs, key=lambda entry: entry[2].start)
            event = entry[2]
            self._heap.remove(entry)
            heapq.heapify(self._heap)
            behind = sorted(other for other in jobs if other is not entry)
        moments = (event.start + event.seconds * step / event.steps for step in range(1, event.steps + 1))
        end, steps = max(asked, event.start), sum(moment <= asked for moment in moments)
        self._free[worker], travel = end, self._travel(self._up)
        seconds = min(end - event.start, event.seconds)
        self._push(event._replace(time=end + travel, steps=steps, seconds=seconds))
        works = {sent: Work(worker, job.draw, job.batches, self._up, job.steps) for _, sent, job in behind}
        self._replace({sent: self._arrival(work, travel, end) for sent, work in works.items()})

    def _jobs_of(self, worker: int) -> list[tuple[float, int, Event]]:
        """A worker's jobs that will arrive."""
        return [
            entry
            for entry in self._heap
            if entry[2].kind is EventKind.ARRIVAL and entry[2].worker == worker and not self._is_cancelled(entry[2])
        ]

    def retry(self, work: Work) -> None:
        worker, jobs, held = work.worker, self._jobs_of(work.worker), self._held.pop(work.worker, None)
        waiting = sorted(entry for entry in jobs if entry[2].start >= self.now)
        under_way = (event.start + event.seconds for _, _, event in jobs if event.start < self.now)
        self._free[worker] = max([self.now, *under_way])
        self.begin(work, 0)
        later = {
            sent: self._arrival(
                Work(worker, event.draw, event.batches, work.up, event.steps), self._travel(work.up), event.start
            )
            for _, sent, event in waiting
        }
        self._replace(later)
        if held is not None:  # it begins when the second attempt has ended
            behind = Work(worker, held.draw, held.batches, work.up, held.steps, True)
            self._held[worker] = self._arrival(behind, self._travel(work.up), held.start)
            self._free[worker] = math.inf

    def _replace(self, later: Mapping[int, Event]) -> None:
        """Events that were pushed earlier, by their order of sending, happen at another time."""
        self._heap = [(later.get(sent, event).time, sent, later.get(sent, event)) for _, sent, event in self._heap]
        heapq.heapify(self._heap)

    def cancel(self, worker: int, draws: int) -> None:
        self._cancelled[worker] = draws
        self._free.pop(worker, None)
        self._held.pop(worker, None)

    def wake(self, time: float) -> None:
        moment, (since, count) = max(time, self.now), self._wakes
        self._wakes = (since, count + 1) if abs(moment - since) <= _INSTANT else (moment, 0)
        if count > _MOST_WAKES:
            raise BadInput(
                f"the method asks to be woken at time {self.now:g}, which it is, for the {_MOST_WAKES:,}th time; expected "
                "a later time. Give it a longer pause."
            )
        self._push(Event(moment, EventKind.WAKE))

    def expel(self, worker: int, text: str) -> None:
        self._push(Event(self.now, EventKind.LEFT, worker, text=text))

    def peek(self) -> Event | None:
        while self._heap:
            time, sent, event = self._heap[0]
            if self._cancelled and self._is_cancelled(event):
                heapq.heappop(self._heap)
                self._under_way.discard(sent)
            elif time == math.inf:
                return None
            elif self._line is None or sent not in self._under_way:
                return event
            else:  # nothing that happens from now on can reach the line before it
                self._under_way.discard(sent)
                done = self._line.receive(time, self._up)
                heapq.heapreplace(self._heap, (done, sent, event._replace(time=done)))
        return None

    def upcoming(self, count: int) -> list[Event]:
        heap, events = self._heap, list[Event]()
        frontier = [(heap[0][:2], 0)] if heap else []  # of places in the heap, each before those below it
        while frontier and len(events) < count:
            (time, _), place = heapq.heappop(frontier)
            if time == math.inf:
                break
            events.append(heap[place][2])
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[below][:2], below))
        return [event for event in events if event.kind is EventKind.ARRIVAL and not self._is_cancelled(event)]

    @property
    def never_ending(self) -> list[int]:
        events = (event for _, _, event in self._heap)
        return sorted({event.worker for event in events if event.time == math.inf and not self._is_cancelled(event)})

    @property
    def expects_more(self) -> bool:
        events = (event for _, _, event in self._heap if event.time < math.inf)
        return any(event.kind is not EventKind.WAKE and not self._is_cancelled(event) for event in events)

    def _is_cancelled(self, event: Event) -> bool:
        return event.kind is EventKind.ARRIVAL and event.draw < self._cancelled.get(event.worker, 0)

    def pop(self) -> None:
        self.now = heapq.heappop(self._heap)[0]

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values."""
        heap = [[sent, *event] for _, sent, event in self._heap if not self._is_cancelled(event)]
        held, free = [list(event) for event in self._held.values()], list(self._free.items())
        saved = {"now": self.now, "sent": self._sent, "free": free, "heap": sorted(heap), "held": held, "up": self._up}
        if self._line is not None:
            under_way = sorted(sent for _, sent, event in self._heap if sent in self._under_way)
            saved["line"] = [self._line.up, self._line.down, self._line.server, under_way]
        return saved

    def load(self, saved: Mapping[str, Any], jobs: Iterable[tuple[int, int]]) -> None:
        self.now, self._sent = saved["now"], saved["sent"]
        self._free = dict(map(tuple, saved["free"]))
        held = [Event(time, EventKind(kind), *details) for time, kind, *details in saved["held"]]
        self._held, self._up = {event.worker: event for event in held}, saved["up"]
        self._heap = [(time, sent, Event(time, EventKind(kind), *details)) for sent, time, kind, *details in saved["heap"]]
        heapq.heapify(self._heap)
        self._cancelled = {}
        if self._line is not None:
            self._line.up, self._line.down, self._line.server, under_way = saved["line"]
            self._under_way = set(under_way)


class RecordedClock(Clock):
    """The order of an earlier run: whatever is begun or cancelled, the next row of the trace is what happens next."""

    def __init__(self, trace: Trace) -> None:
        columns = (trace.time, trace.worker, trace.draw, trace.seconds, trace.steps)
        arrivals = [
            Event(time, EventKind.ARRIVAL, worker, draw, seconds, steps=steps)
            for time, worker, draw, seconds, steps in zip(*(column.tolist() for column in columns), strict=True)
        ]
        others = [
            (e["row"], Event(e["time"], EventKind(e["kind"]), e["worker"], e["draw"], text=e.get("text", "")))
            for e in trace.events
        ]
        rows = sorted([*others, *((row + 0.5, event) for row, event in enumerate(arrivals))], key=lambda pair: pair[0])
        self._events, self._after = [event for _, event in rows], [*trace.after.tolist(), "beyond the last"]
        self._next = self._arrived = 0
        self._begun: set[tuple[int, int]] = set()

    def begin(self, work: Work, down: int) -> None:
        self._begun.add((work.worker, work.draw))

    def load(self, saved: Mapping[str, Any], jobs: Iterable[tuple[int, int]]) -> None:
        self._begun = set(jobs)

    def cancel(self, worker: int, draws: int) -> None:
        self._begun = {job for job in self._begun if job[0] != worker}

    def peek(self) -> Event | None:
        if self._next == len(self._events):
            return None
        event = self._events[self._next]
        if event.kind.ends_job and (event.worker, event.draw) not in self._begun:
            raise ReplayMismatch(
                f"version {self._after[self._arrived]} differs: the record says that job number {event.draw} of worker "
                f"{event.worker} arrived at time {event.time:g}, but the replayed server had not given it that job. Code, "
                "settings or the record itself are not those of the run."
            )
        return event

    def upcoming(self, count: int) -> list[Event]:
        events = self._events[self._next : self._next + count]
        return [e for e in events if e.kind is EventKind.ARRIVAL and (e.worker, e.draw) in self._begun]

    def pop(self) -> None:
        event = self._events[self._next]
        self._next += 1
        self._begun.discard((event.worker, event.draw))
        self._arrived += event.kind is EventKind.ARRIVAL

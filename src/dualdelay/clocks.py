"""Who arrives next: by virtual time, or by the order of a recorded run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from .errors import BadInput, ReplayMismatch
from .links import Link
from .speeds import SpeedModel
from .trace import Trace


class Change(NamedTuple):
    """A worker that leaves or joins a simulated fleet at a given time; one that joins is absent before."""

    kind: str  # "left" or "joined"
    worker: int
    time: float


def leave(worker: int, time: float) -> Change:
    """At that time the worker is gone, with the job it had."""
    return Change("left", worker, time)


def join(worker: int, time: float) -> Change:
    """At that time the worker is there; if it has not left before, it was absent from the start."""
    return Change("joined", worker, time)


class Due(NamedTuple):
    """What happens next; ``kind`` is arrival, wake, left or joined, or what else a real run has put into its trace."""

    time: float
    kind: str
    worker: int = -1
    draw: int = -1
    seconds: float = 0.0
    start: float = 0.0  # when the worker begins to compute
    batches: int = 1
    text: str = ""  # what a person should know about it


class Clock(Protocol):
    """Decides what happens next in a local fleet."""

    def begin(self, worker: int, draw: int, batches: int, down: int, up: int) -> None:
        """A job was given to a worker; ``down`` and ``up`` are the bytes it is sent and sends."""

    def retry(self, worker: int, draw: int, batches: int, up: int) -> None:
        """A job came to nothing and is done again as ``draw``, before those that wait at the worker."""

    def cancel(self, worker: int, draws: int) -> None:
        """The worker's jobs are no more; it was given ``draws`` so far."""

    def wake(self, time: float) -> None:
        """Something is to happen at that time."""

    def dismiss(self, worker: int, text: str) -> None:
        """The worker has to leave now."""

    def peek(self) -> Due | None:
        """What happens next, or None if nothing does: a job that takes for ever is never due."""

    def pop(self) -> Due:
        """Go there."""


def _seconds(value: Any, model: object, what: str) -> float:
    """A time that a user's model gave, if it is one; a clock that goes backwards has no order."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, RuntimeError):
        seconds = math.nan
    if not seconds >= 0:
        raise BadInput(f"{type(model).__name__} gave {value!r} {what}; expected seconds, zero or more.")
    return seconds


class VirtualClock:
    """A heap of what is due, by time and then by order of sending.

    A worker does its jobs one after the other, so the time of each is known when it is sent. A job that never ends has
    an infinite time, and so have those behind it.
    """

    def __init__(self, speeds: SpeedModel, link: Link | None = None, changes: Sequence[Change] = ()) -> None:
        self.now = 0.0
        self._speeds = speeds
        self._link = link or Link()
        self._free: dict[int, float] = {}  # when each worker has done all it has
        self._heap: list[tuple[float, int, Due]] = []
        self._sent = 0
        self._cancelled: dict[int, int] = {}  # by worker: jobs with a smaller draw than this will not arrive
        for worker in self._absent_at_first(changes):
            self._push(Due(0.0, "left", worker))
        for change in changes:
            self._push(Due(change.time, change.kind, change.worker))

    def _absent_at_first(self, changes: Sequence[Change]) -> list[int]:
        """The workers whose first change is to join; refuses changes that cannot be."""
        kinds: dict[int, list[str]] = {}
        for change in sorted(changes, key=lambda change: change.time):
            if (
                change.kind not in ("left", "joined")
                or not 0 <= change.worker < self._speeds.n
                or not 0 <= change.time < math.inf
            ):
                raise BadInput(
                    f"change {tuple(change)} does not fit; expected dd.leave(worker, time) or dd.join(worker, time) with a "
                    f"worker in 0..{self._speeds.n - 1} and a time of zero or more."
                )
            mine = kinds.setdefault(change.worker, [])
            if change.kind in mine[-1:]:
                raise BadInput(
                    f"worker {change.worker} {change.kind} twice, the second time at {change.time}; expected once."
                )
            mine.append(change.kind)
        return sorted(worker for worker, mine in kinds.items() if mine[0] == "joined")

    def _push(self, due: Due) -> None:
        heapq.heappush(self._heap, (due.time, self._sent, due))
        self._sent += 1

    def _timed(self, worker: int, draw: int, batches: int, travel: float, earliest: float) -> Due:
        """When a job arrives that can begin at ``earliest``, behind what the worker already has to do."""
        start = max(earliest, self._free.get(worker, 0.0))
        try:
            given: Any = self._speeds.job(worker, draw, start, batches) if start < math.inf else math.inf
        except TypeError:  # None, say, times a number of minibatches
            given = self._speeds.seconds(worker, draw, start)
        seconds = _seconds(given, self._speeds, f"for job {draw} of worker {worker}")
        self._free[worker] = start + seconds
        return Due(start + seconds + travel, "arrival", worker, draw, seconds, start, batches)

    def begin(self, worker: int, draw: int, batches: int, down: int, up: int) -> None:
        self._push(self._timed(worker, draw, batches, self._travel(up), self.now + self._travel(down)))

    def _travel(self, size: int) -> float:
        return _seconds(self._link.seconds(size), self._link, f"for {size} bytes")

    def retry(self, worker: int, draw: int, batches: int, up: int) -> None:
        mine = [e for e in self._heap if e[2].kind == "arrival" and e[2].worker == worker and not self._is_cancelled(e[2])]
        waiting = sorted(entry for entry in mine if entry[2].start >= self.now)
        self._free[worker] = max([self.now, *(due.start + due.seconds for _, _, due in mine if due.start < self.now)])
        self.begin(worker, draw, batches, 0, up)
        later = {sent: self._timed(worker, due.draw, due.batches, self._travel(up), due.start) for _, sent, due in waiting}
        self._heap = [(later.get(sent, due).time, sent, later.get(sent, due)) for _, sent, due in self._heap]
        heapq.heapify(self._heap)

    def cancel(self, worker: int, draws: int) -> None:
        self._cancelled[worker] = draws
        self._free.pop(worker, None)

    def wake(self, time: float) -> None:
        self._push(Due(max(time, self.now), "wake"))

    def dismiss(self, worker: int, text: str) -> None:
        self._push(Due(self.now, "left", worker, text=text))

    def peek(self) -> Due | None:
        while self._heap:
            due = self._heap[0][2]
            if not self._is_cancelled(due):
                return due if due.time < math.inf else None
            heapq.heappop(self._heap)
        return None

    @property
    def never(self) -> list[int]:
        """The workers whose jobs will never end."""
        return sorted({due.worker for _, _, due in self._heap if due.time == math.inf and not self._is_cancelled(due)})

    @property
    def hope(self) -> bool:
        """Whether something other than a wake will be due."""
        return any(due.kind != "wake" and due.time < math.inf and not self._is_cancelled(due) for _, _, due in self._heap)

    def _is_cancelled(self, due: Due) -> bool:
        return due.kind == "arrival" and due.draw < self._cancelled.get(due.worker, 0)

    def pop(self) -> Due:
        due = heapq.heappop(self._heap)[2]
        self.now = due.time
        return due

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values."""
        heap = [[sent, *due] for _, sent, due in self._heap if not self._is_cancelled(due)]
        return {"now": self.now, "sent": self._sent, "free": list(self._free.items()), "heap": sorted(heap)}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.now, self._sent = saved["now"], saved["sent"]
        self._free = dict(map(tuple, saved["free"]))
        self._heap = [(row[1], row[0], Due(*row[1:])) for row in saved["heap"]]
        heapq.heapify(self._heap)
        self._cancelled = {}


class RecordedClock:
    """The order of an earlier run: whatever is begun or cancelled, the next row of the trace is what happens next."""

    def __init__(self, trace: Trace) -> None:
        arrivals = zip(trace.time.tolist(), trace.worker.tolist(), trace.draw.tolist(), trace.seconds.tolist(), strict=True)
        dues = [Due(time, "arrival", worker, draw, seconds) for time, worker, draw, seconds in arrivals]
        events = [
            (event["row"], Due(event["time"], event["kind"], event["worker"], event["draw"], text=event.get("text", "")))
            for event in trace.events
        ]
        merged = sorted([*events, *((row + 0.5, due) for row, due in enumerate(dues))], key=lambda pair: pair[0])
        self._rows, self._after = [due for _, due in merged], [*trace.after.tolist(), "beyond the last"]
        self._next = self._arrived = 0
        self._begun: set[tuple[int, int]] = set()

    def begin(self, worker: int, draw: int, batches: int, down: int, up: int) -> None:
        self._begun.add((worker, draw))

    def retry(self, worker: int, draw: int, batches: int, up: int) -> None:
        self._begun.add((worker, draw))

    def load(self, jobs: Iterable[tuple[int, int]]) -> None:
        """These jobs are in flight."""
        self._begun = set(jobs)

    def cancel(self, worker: int, draws: int) -> None:
        self._begun = {job for job in self._begun if job[0] != worker}

    def wake(self, time: float) -> None:
        """Recorded wakes come as they came."""

    def dismiss(self, worker: int, text: str) -> None:
        """Who left comes as it came."""

    def peek(self) -> Due | None:
        if self._next == len(self._rows):
            return None
        due = self._rows[self._next]
        if due.kind in ("arrival", "rejected", "failed") and (due.worker, due.draw) not in self._begun:
            raise ReplayMismatch(
                f"version {self._after[self._arrived]} differs: the record says that job number {due.draw} of worker "
                f"{due.worker} arrived at time {due.time:g}, but the replayed server had not given it that job. Code, "
                "settings or the record itself are not those of the run."
            )
        return due

    def pop(self) -> Due:
        due = self._rows[self._next]
        self._next += 1
        self._begun.discard((due.worker, due.draw))
        self._arrived += due.kind == "arrival"
        return due

"""Who arrives next: by virtual time, or by the order of a recorded run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ..core.errors import BadInput, DualDelayError, ReplayMismatch, plain_number, require_several, shortened, shown
from ..engine.events import Due
from ..engine.trace import Trace
from .link import Link
from .speeds import SpeedModel


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


def checked_changes(changes: Iterable[Any]) -> list[Change]:
    """What a user gave for the changes of a run, if each can be one; whether there are such workers is not known here."""
    require_several("changes", changes, "changes, such as dd.speeds.leave(0, 10.0)")
    if isinstance(changes, Change):
        raise BadInput(f"changes is {shown(changes)}; expected a list of changes: changes=[dd.speeds.leave(0, 10.0)].")
    return [_checked_change(k, change) for k, change in enumerate(changes)]


def _checked_change(k: int, given: Any) -> Change:
    try:
        kind, worker, time = map(plain_number, given)
        good = kind in ("left", "joined") and type(worker) is int and type(time) in (int, float)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise BadInput(
            f"changes[{k}] is {shown(given)}; expected dd.speeds.leave(worker, time) or dd.speeds.join(worker, time), a "
            "worker's number and a time."
        )
    return Change(kind, worker, time)


_AT_ONCE, _INSTANT = 10_000, 1e-12  # wakes at one moment, after which time will never go on, and how long that is


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
        seconds = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
    except Exception:  # no number, one too large, or whatever a user's class raises
        seconds = math.nan
    if not seconds >= 0:
        raise BadInput(f"{type(model).__name__} gave {shown(value)} {what}; expected seconds, zero or more.")
    return seconds


def _asked(function: Callable[..., Any], model: object, what: str, *arguments: Any) -> Any:
    """What a user's model gives; if it raises, that is the error, with the place."""
    try:
        return function(*arguments)
    except DualDelayError:
        raise
    except Exception as error:  # whatever a user's class raises
        said = shortened(str(error), 1000)
        raise BadInput(
            f"{type(model).__name__} raised {type(error).__name__} {what}: {said}. Expected seconds, zero or more; mend "
            f"its '{getattr(function, '__name__', 'seconds')}'."
        ) from error


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
        self._wakes = (0.0, 0)  # a moment, and how many wakes there were at it
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
                    f"change {tuple(change)} does not fit; expected dd.speeds.leave(worker, time) or "
                    f"dd.speeds.join(worker, time) with a worker in 0..{self._speeds.n - 1} and a time of zero or more."
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
        start, what = max(earliest, self._free.get(worker, 0.0)), f"for job {draw} of worker {worker}"
        batches = plain_number(batches)
        if not isinstance(batches, (int, float)) or not 0 <= batches < math.inf:
            raise BadInput(
                f"the problem's 'batches' gave {shown(batches)} for worker {worker}; expected a number of minibatches, "
                "zero or more."
            )
        given = self._taken(worker, draw, start, batches, what) if start < math.inf else math.inf
        seconds = _seconds(given, self._speeds, what)
        self._free[worker] = start + seconds
        return Due(start + seconds + travel, "arrival", worker, draw, seconds, start, batches)

    def _taken(self, worker: int, draw: int, start: float, batches: int, what: str) -> Any:
        """What the speed model says a job takes."""
        try:
            return _asked(self._speeds.job, self._speeds, what, worker, draw, start, batches)
        except BadInput as error:
            if not isinstance(error.__cause__, TypeError):
                raise
            one = _asked(self._speeds.seconds, self._speeds, what, worker, draw, start)
            if isinstance(one, (int, float)):
                raise
            return one  # None, say, which cannot be taken so many times

    def begin(self, worker: int, draw: int, batches: int, down: int, up: int) -> None:
        self._push(self._timed(worker, draw, batches, self._travel(up), self.now + self._travel(down)))

    def _travel(self, size: int) -> float:
        what = f"for {size} bytes"
        return _seconds(_asked(self._link.seconds, self._link, what, size), self._link, what)

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
        moment, (since, count) = max(time, self.now), self._wakes
        self._wakes = (since, count + 1) if abs(moment - since) <= _INSTANT else (moment, 0)
        if count > _AT_ONCE:
            raise BadInput(
                f"the method asks to be woken at time {self.now:g}, which it is, for the {_AT_ONCE:,}th time; expected a "
                "later time. Give it a longer pause."
            )
        self._push(Due(moment, "wake"))

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

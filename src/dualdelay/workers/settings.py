"""What a user says about real workers, whatever transport reaches them, and how they are controlled while a run lasts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..core import Problem
from ..core.errors import MOST_WORKERS, BadInput, plain_number, require_kind, require_several, require_whole
from ..core.settings import check_settings, positive, thread_count, whole
from ..engine.half import Half
from ..engine.monitor import Logger
from .transport import Transport

_LONGEST = 1e9  # seconds that a worker may be waited for: thirty years


@dataclass(frozen=True)
class FaultPolicy:
    """What is done about real workers that crash, raise, hang, start late or answer late."""

    restarts: int = whole(3, low=0)
    """Crashes of a worker in a row, without a job done between them, after which it is gone for good."""
    retries: int = whole(3, low=0)
    """Exceptions of a worker's gradient in a row after which it is gone for good."""
    deadline: float = positive(600.0, high=_LONGEST)
    """Seconds for one job or a piece of an evaluation, after which a worker counts as hanging and is gone for good."""
    gone: Literal["leave", "freeze"] = "leave"
    """A worker gone for good leaves (its gradient is taken out, n shrinks), or its last gradient stays and counts."""
    minimum: int = whole(1)
    """Workers at work below which the run is saved and stops."""
    patience: float = positive(120.0, high=_LONGEST)
    """Seconds for a worker's process to start before the run goes on without it; it joins when it is there."""
    resend: float = positive(30.0, high=_LONGEST)
    """Seconds without a reply after which a request is sent again, then doubled; a repeated request costs nothing."""
    alarm: int | None = whole(None)
    """Versions that a worker's job may lie behind the server's before an alarm names it; None: any number."""

    def __post_init__(self) -> None:
        check_settings(self)


Wish = Literal["join", "leave"]  # what a user may want of a worker while a run lasts


class FleetControl:
    """Brings workers into a running job and takes them out of it, and says where they are. For one run at a time."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[str, int]] = {}
        """The node and the process of each worker."""
        self.shards: dict[int, tuple[str, int]] = {}
        """The node and the process of each shard of the server."""
        self.counts: Counter[str] = Counter()
        """Messages that were dropped as repeated or late, and requests that were sent again."""
        self.dismissed: set[int] = set()
        """Workers that were asked to leave, or not to come yet: they do not come back by themselves."""
        self._wishes: deque[tuple[Wish, int]] = deque()
        self._next = self._workers = self._room = 0  # the next that may join uncounted, all there is room for

    def begin(self, workers: int, room: int, absent: Collection[int] = ()) -> None:
        """A run begins with so many workers, those for whom there is room among them, and without the absent ones."""
        self._next, self._workers, self._room = workers - room, workers, room
        self.dismissed = set(absent)
        self.places.clear()
        self.shards.clear()
        self.counts.clear()
        self._wishes.clear()

    def have_joined(self, workers: Collection[int]) -> None:
        """These workers, whom the run did not count at its start, have joined before."""
        self._next = max([self._next, *(worker + 1 for worker in workers)])

    def join(self, worker: int | None = None) -> int:
        """Bring a worker into the running job and return its number. May be called from any thread.

        One that was absent, left, or is frozen is named; None is the next that the run did not count at its start, for
        whom there must be ``room``.
        """
        if worker is None:
            if self._next >= self._workers:
                raise BadInput(
                    f"there is no room for another worker: room is {self._room}; give the fleet more at the start."
                )
            worker, self._next = self._next, self._next + 1
        self.dismissed.discard(worker)
        self._wishes.append(("join", worker))
        return worker

    def leave(self, worker: int) -> None:
        """Take a worker out of the running job. May be called from any thread."""
        self.dismissed.add(worker)
        self._wishes.append(("leave", worker))

    def take_wishes(self) -> list[tuple[Wish, int]]:
        """What was asked for since the last time."""
        return [self._wishes.popleft() for _ in range(len(self._wishes))]


@dataclass(frozen=True, kw_only=True)
class WorkerFleet(ABC):
    """Real workers, one process each: what is said of them whatever transport reaches them."""

    starting: ClassVar[str] = "real workers: their processes take some seconds to start"
    """What a person is told while nothing has happened yet."""
    waits: ClassVar[bool] = False
    """Whether a run begins only when all its workers, or a quorum of them, are there, however long that takes."""

    threads: int = thread_count(1)
    """Threads that torch uses in a worker; another number gives other bits."""
    server_threads: int = thread_count(1)
    """Threads that torch uses at the server, part of the record too. More help a large model where the server has
    processors of its own, and hurt where it shares them with workers: waiting threads spin."""
    absent: Sequence[int] = ()
    """Workers that are not there at the start; ``FleetControl.join`` brings them in."""
    quorum: int | None = whole(None)
    """Workers that must be there before the run starts; others join when they come. None: all, within the patience."""
    room: int = whole(0, low=0, high=MOST_WORKERS)
    """How many more workers than the problem has may ``join``, which the run does not count at its start."""
    faults: FaultPolicy = FaultPolicy()
    """What is done about workers that fail."""
    control: FleetControl = field(default_factory=FleetControl, repr=False, compare=False)
    """Brings workers in and takes them out while a run lasts, and says where they are."""

    def __post_init__(self) -> None:
        check_settings(self)
        require_kind("faults", self.faults, FaultPolicy, "dd.FaultPolicy(restarts=10)")
        require_kind("control", self.control, FleetControl, "dd.FleetControl()")
        require_several("absent", self.absent, "workers' numbers")
        for worker in self.absent:
            require_whole("a worker in absent", plain_number(worker), 0, MOST_WORKERS)

    def require_fit(self, workers: int) -> None:
        """Refuse what does not fit a run with so many workers, those for whom there is room among them."""
        counted = workers - self.room
        wrong = [worker for worker in self.absent if not 0 <= worker < counted]
        if wrong:
            raise BadInput(f"absent has {wrong}; expected workers in 0..{counted - 1}.")
        at_first = counted - len(set(self.absent))
        if self.faults.minimum > at_first:
            raise BadInput(f"minimum is {self.faults.minimum}, but {at_first} workers are there at the start; lower it.")
        if self.quorum is not None and self.quorum > at_first:
            raise BadInput(f"quorum is {self.quorum}, but {at_first} workers are there at the start; lower it.")

    @property
    def ranks(self) -> int:
        """The processes that a worker consists of, and so the parts that its gradients are computed in."""
        return 1

    @property
    def loggers(self) -> Sequence[Logger]:
        """Who of the fleet wants to hear of the run's vital signs."""
        return ()

    def absent_at_first(self, workers: int) -> list[int]:
        """Who of so many workers is not there at the start: those who are absent, and those for whom there is room."""
        return sorted({*self.absent, *range(workers - self.room, workers)})

    @abstractmethod
    def connect(self, problem: Problem, half: Half, output: Path | None, about: Mapping[str, Any]) -> Transport:
        """What reaches the workers; what they print goes to the folder ``output``.

        ``about`` has the run's algorithm and seed in plain values, for workers that build what they need themselves.
        """

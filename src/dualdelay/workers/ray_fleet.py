"""What a user says about real workers: how many processors, what happens when they fail."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import (
    MOST_WORKERS,
    BadInput,
    is_finite,
    plain_number,
    require_one_of,
    require_positive,
    require_several,
    require_threads,
    require_whole,
    shown,
    take_plain_numbers,
)

_LONGEST = 1e9  # seconds that somebody may be waited for: thirty years
_MOST_PROCESSORS = 1e6

Faults = Callable[[Any], Sequence[tuple[float, Any]]]


@dataclass(eq=False)
class RayFleet:
    """Real workers, one Ray actor each, on this machine or in a cluster."""

    address: str | None = None
    """A running cluster to join, such as "10.0.0.5:6379" or "auto"; None starts Ray on this machine."""
    cpus: float = 1.0
    """Processors that a worker claims; zero claims none."""
    gpus: float = 0.0
    """GPUs that a worker claims; 0.25 lets four share one."""
    threads: int = 1
    """Threads that torch uses in a worker; another number gives other bits."""
    server_threads: int = 1
    """Threads that torch uses at the server, part of the record too. More help a large model where the server has
    processors of its own, and hurt where it shares them with workers: waiting threads spin."""
    resources: Sequence[Mapping[str, float]] = ()
    """Ray's custom resources that each worker claims, one mapping for each, to place it where its data are."""
    absent: Sequence[int] = ()
    """Workers that are not there at the start; ``join`` brings them in."""
    room: int = 0
    """How many more workers than the problem has may ``join``, which nobody counted at the start."""
    restarts: int = 3
    """Crashes of a worker in a row, without a job done between them, after which it is gone for good."""
    retries: int = 3
    """Exceptions of a worker's gradient in a row after which it is gone for good."""
    deadline: float = 600.0
    """Seconds for one job or a piece of an evaluation, after which a worker counts as hanging and is gone for good."""
    gone: Literal["leave", "freeze"] = "leave"
    """A worker gone for good leaves (its gradient is taken out, n shrinks), or its last gradient stays and counts."""
    minimum: int = 1
    """Workers at work below which the run is saved and stops."""
    patience: float = 120.0
    """Seconds for a worker's process to start before the run goes on without it; it joins when it is there."""
    resend: float = 30.0
    """Seconds without a reply after which a request is sent again, then doubled; a repeated request costs nothing."""
    alarm: int | None = None
    """Versions that a worker's job may lie behind the server's before an alarm names it; None: any number."""
    host: str = "127.0.0.1"
    """The address that a Ray started here binds to; the default is reachable from this machine alone."""
    insecure: bool = False
    """Join a cluster on another machine although neither token authentication nor TLS is on: anyone who reaches its
    port can run code there."""
    faults: Faults | None = field(default=None, repr=False)
    """For tests: what becomes of a message on its way, as a list of (delay, message); none of them: it is lost."""

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        require_threads("threads", self.threads)
        require_threads("server_threads", self.server_threads)
        for name in ("restarts", "retries"):
            require_whole(name, getattr(self, name), 0)
        require_whole("room", self.room, 0, MOST_WORKERS)
        require_whole("minimum", self.minimum, 1)
        for name in ("deadline", "patience", "resend"):
            require_positive(name, getattr(self, name), _LONGEST)
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 <= value <= _MOST_PROCESSORS:
                raise BadInput(f"{name} is {shown(value)}; expected zero or more processors for each worker, 1e6 at most.")
        for name, text in (("address", self.address), ("host", self.host)):
            if not isinstance(text, str) and not (text is None and name == "address"):
                raise BadInput(f"{name} is {shown(text)}; expected a text, such as '127.0.0.1'.")
        self._require_lists()
        require_one_of("gone", self.gone, ("leave", "freeze"))
        if self.alarm is not None:
            require_whole("alarm", self.alarm, 1)
        self.places: dict[int, tuple[str, int]] = {}  # the address and process of each worker
        self.counts: Counter[str] = Counter()  # messages that were dropped as repeated or late, requests sent again
        self._wishes: deque[tuple[str, int]] = deque()
        self._next = self._workers = 0  # the next who may join uncounted, and all there is room for

    def _require_lists(self) -> None:
        require_several("absent", self.absent, "workers' numbers")
        for worker in self.absent:
            require_whole("a worker in absent", plain_number(worker), 0, MOST_WORKERS)
        require_several("resources", self.resources, "mappings, one for each worker")
        for worker, claims in enumerate(self.resources):
            good = isinstance(claims, Mapping) and all(
                isinstance(name, str) and is_finite(value) and value >= 0 for name, value in claims.items()
            )
            if not good:
                raise BadInput(
                    f"resources[{worker}] is {shown(claims)}; expected how much of what by name, such as {{'site_a': 1.0}}."
                )

    def begin(self, workers: int) -> None:
        """A run with so many workers begins, those for whom there is room among them."""
        counted = workers - self.room
        if self.resources and len(self.resources) not in (counted, workers):
            raise BadInput(f"resources are given for {len(self.resources)} workers; expected {workers}, one mapping each.")
        wrong = [worker for worker in self.absent if not 0 <= worker < counted]
        if wrong:
            raise BadInput(f"absent has {wrong}; expected workers in 0..{counted - 1}.")
        there = counted - len(set(self.absent))
        if self.minimum > there:
            raise BadInput(f"minimum is {self.minimum}, but {there} workers are there at the start; lower it.")
        self._next, self._workers = counted, workers
        self.places.clear()
        self.counts.clear()
        self._wishes.clear()

    def absent_at_first(self, workers: int) -> list[int]:
        """Who of so many workers is not there at the start: those who were said to be absent, and those who may join."""
        return sorted({*self.absent, *range(workers - self.room, workers)})

    def seated(self, joined: Collection[int]) -> None:
        """These of those who were not counted at the start have joined before."""
        self._next = max([self._next, *(worker + 1 for worker in joined)])

    def claims(self, worker: int) -> dict[str, float]:
        """What a worker asks of the machine that it runs on."""
        own = dict(self.resources[worker]) if worker < len(self.resources) else {}
        claims: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus, **own}
        return {name: value for name, value in claims.items() if value}

    def join(self, worker: int | None = None) -> int:
        """Bring a worker into the running job and return its number. May be called from any thread.

        One that was absent, left, or is frozen is named; None is the next that nobody counted at the start, for whom there
        must be ``room``.
        """
        if worker is None:
            if self._next >= self._workers:
                raise BadInput(
                    f"there is no room for another worker: room is {self.room}; give the fleet more at the start."
                )
            worker, self._next = self._next, self._next + 1
        self._wishes.append(("join", worker))
        return worker

    def leave(self, worker: int) -> None:
        """Take a worker out of the running job. May be called from any thread."""
        self._wishes.append(("leave", worker))

    def wishes(self) -> list[tuple[str, int]]:
        """What was asked for since the last time."""
        wishes = []
        while self._wishes:
            wishes.append(self._wishes.popleft())
        return wishes

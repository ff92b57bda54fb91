"""A run's vital signs for its loggers: a live view, TensorBoard, functions of the user's own."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..core import Arrival
from ..core.aggregate import AggregateState
from .delays import delays, used_in
from .events import EventKind
from .loop import Loop

log = logging.getLogger("dualdelay")

Logger = Callable[[int, Mapping[str, float]], None]
"""Called with a version and named numbers: the run's vital signs, about once a second and at the end, with the server's
version; and each evaluation, once, with the version that was evaluated."""

_LOGGED_EVENTS = ("crashed", "failed", "rejected", "left", "frozen", "joined", "late")


class Monitor:
    """Counts what arrives and calls the loggers; one that raises is reported and not called again."""

    def __init__(self, loggers: Sequence[Logger], loop: Loop, every: float = 1.0) -> None:
        version = loop.state.version
        self._loggers, self._every = list(loggers), every
        self.failures: dict[str, str] = {}  # by the name of a logger: how it failed
        self._evaluated = {row["time"] for row in loop.rows} if len(loop.recorder) else set()  # by time: logged before
        self._logged = time.perf_counter()
        self._version = version  # when the loggers were called last
        self._arrived: Counter[int] = Counter()  # by worker, since then
        self._loss: dict[int, float] = {}  # of each worker's last minibatch
        self._delay: dict[int, int] = {}  # of each worker's last arrival
        self._taken: dict[int, int] = {}  # the version of each worker's last gradient
        self._new: list[tuple[int, int]] = []  # worker and version of gradients that no update has used yet
        self._tau_max = 0
        self._before = version  # a run that is resumed does not begin at nothing
        if len(loop.recorder):
            self._look_back(loop)
        self._last: tuple[float, int, Counter[int]] | None = None  # seconds, updates and arrivals of the last time

    def _look_back(self, loop: Loop) -> None:
        """Know of the gradients that arrived before a run was resumed."""
        trace = loop.recorder.trace()
        left = np.zeros(loop.problem.workers, np.int64)  # arrivals before each worker was away last: those are not in use
        for event in trace.events:
            if event["kind"] == EventKind.LEFT:
                left[event["worker"]] = event["row"]
        there = np.arange(len(trace)) >= left[trace.worker]
        self._taken = dict(zip(trace.worker[there].tolist(), trace.version[there].tolist(), strict=True))
        new = there & (used_in(trace) > self._before)
        self._new = list(zip(trace.worker[new].tolist(), trace.version[new].tolist(), strict=True))
        self._tau_max = delays(trace, remembers=isinstance(loop.state, AggregateState)).tau_max

    def __call__(self, loop: Loop, arrival: Arrival | None) -> None:
        """Look at a run after something has happened."""
        version = loop.state.version
        if isinstance(loop.state, AggregateState):
            for worker in loop.state.absent & self._taken.keys():  # its gradient is in use no more
                self._use(worker)
                self._new = [(other, taken) for other, taken in self._new if other != worker]
                del self._taken[worker]
        if arrival is not None:
            worker, _, taken = arrival.job
            if worker in self._taken and isinstance(loop.state, AggregateState):
                self._use(worker)
            self._taken[worker] = taken
            self._new.append((worker, taken))
            self._arrived[worker] += 1
            self._loss[worker] = arrival.loss
            self._delay[worker] = self._before + 1 - taken
        if version > self._before:
            self._tau_max = max([self._tau_max, *(version - taken for _, taken in self._new)])
            self._new, self._before = [], version
        if len(loop.rows) != len(self._evaluated):
            self.log_evaluations(loop.rows)
        if time.perf_counter() - self._logged >= self._every:
            self.log_signs(loop)

    def _use(self, worker: int) -> None:
        """A worker's gradient was in use until now, unless no update has used it yet."""
        if all(other != worker for other, _ in self._new):
            self._tau_max = max(self._tau_max, self._before - self._taken[worker])

    def log_evaluations(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log the evaluations that are new, each with the version that was evaluated."""
        for row in rows:
            if row["time"] not in self._evaluated:
                self._evaluated.add(row["time"])
                self._call(int(row["version"]), {name: v for name, v in row.items() if name not in ("time", "version")})

    def _call(self, version: int, values: Mapping[str, float]) -> None:
        for logger in list(self._loggers):
            try:
                logger(version, values)
            except Exception as error:  # whatever a user's function raises: training goes on
                name = getattr(logger, "__qualname__", type(logger).__qualname__)
                self.failures[name] = f"{type(error).__name__}: {error}; it was switched off at version {version}"
                self._loggers.remove(logger)
                log.warning("logger %s raised and was switched off: %s", name, error, exc_info=error)

    def log_signs(self, loop: Loop) -> None:
        """Log how the run stands."""
        now, version = time.perf_counter(), loop.state.version
        seconds, updates, arrived = now - self._logged, version - self._version, self._arrived.copy()
        if self._last is not None and seconds < self._every / 2:  # the end comes soon after: too short for a rate
            seconds, updates, arrived = seconds + self._last[0], updates + self._last[1], arrived + self._last[2]
        self._last = (seconds, updates, arrived)
        if isinstance(loop.state, AggregateState):
            unused = {worker for worker, _ in self._new}
            in_use = (taken for worker, taken in self._taken.items() if worker not in unused)
            self._tau_max = max([self._tau_max, *(version - taken for taken in in_use)])
        values = {
            "time": loop.now,
            "updates_per_second": updates / seconds,
            "loss": sum(self._loss.values()) / len(self._loss) if self._loss else math.nan,
            "tau_max": float(self._tau_max),
        }
        events = Counter((event["kind"], event["worker"]) for event in loop.recorder.events)
        for kind in _LOGGED_EVENTS:
            values[f"faults/{kind}"] = float(sum(count for (name, _), count in events.items() if name == kind))
        for worker in range(loop.problem.workers):
            values[f"worker/{worker}/rate"] = arrived[worker] / seconds
            values[f"worker/{worker}/delay"] = float(self._delay.get(worker, 0))
            values[f"worker/{worker}/crashes"] = float(events["crashed", worker])
        if loop.fleet.last_evaluation is not None:
            values["last_evaluation"] = loop.fleet.last_evaluation
        self._logged, self._version = now, version
        self._arrived.clear()
        self.log_evaluations(loop.rows)
        self._call(version, values)

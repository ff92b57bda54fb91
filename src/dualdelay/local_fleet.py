"""Workers simulated in this process, by a virtual clock or in the order of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from .clocks import Clock, Due, VirtualClock
from .core import Arrival, Job, Problem
from .fleet import NOTHING, Fleet, Message, Model, answer, using_threads


class LocalFleet(Fleet):
    """Workers simulated in this process: nothing is computed before its arrival is due."""

    def __init__(self, problem: Problem, clock: Clock, message: Message, threads: int | None = None) -> None:
        """Workers use ``threads`` threads of torch, by default as many as the server."""
        super().__init__(problem)
        self._threads = threads
        self.clock = clock
        self._message = message
        self._held: dict[int, Tensor] = {}
        self._keep: Tensor | None = None  # what the last sender will keep if it is accepted

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def peek(self) -> Due | None:
        return self.clock.peek()

    def pop(self) -> None:
        self.clock.pop()

    def arrival(self, due: Due) -> Arrival:
        if due.kind == "wake":
            return Arrival(None, NOTHING, due.time, 0.0, math.nan)
        model = self._jobs[due.worker][due.draw]
        job = Job(due.worker, due.draw, model.version)
        if due.kind != "arrival":
            return Arrival(job, NOTHING, due.time, due.seconds, math.nan)
        with nullcontext() if self._threads is None else using_threads(self._threads):
            done = answer(self._problem, self._message, model.x, due.worker, due.draw, self._held.get(due.worker))
        self._keep = done.keep
        return Arrival(job, done.value, due.time, due.seconds, done.loss)

    def accept(self, a: Arrival) -> None:
        assert a.job is not None
        del self._jobs[a.worker][a.job.draw]
        if self._keep is not None:
            self._held[a.worker] = self._keep

    def held(self) -> dict[int, Tensor]:
        return self._held

    def forget(self, worker: int) -> Tensor | None:
        return self._held.pop(worker, None)

    def restore(self, worker: int, held: Tensor) -> None:
        self._held[worker] = held

    def _lend(self, version: int, x: Tensor) -> Model:
        return Model(version, x)

    def _weights(self, model: Model) -> Tensor:
        x: Tensor = model.x
        return x

    def _begin(self, worker: int, draw: int, model: Model, *, sent: bool) -> None:
        down = model.x.nbytes if sent else 0  # for one more draw the model is there already
        self.clock.begin(worker, draw, self._problem.batches(worker), down, model.x.nbytes)

    def _begin_first(self, worker: int, draw: int, model: Model) -> None:
        self.clock.retry(worker, draw, self._problem.batches(worker), model.x.nbytes)

    def _cancelled(self, worker: int) -> None:
        self.clock.cancel(worker, self._draws[worker])

    def _wake(self, time: float) -> None:
        self.clock.wake(time)

    def save(self) -> dict[str, Any]:
        assert isinstance(self.clock, VirtualClock), "a replay is not saved: it can be made again"
        return {"clock": self.clock.save(), **super().save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        super().load(saved)
        if isinstance(self.clock, VirtualClock):
            self.clock.load(saved["clock"])

"""Workers simulated in this process, by a virtual clock or in the order of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..core import Arrival, Job, Problem
from ..core.compression import size_of, unpacked
from ..core.devices import use_threads
from ..engine.events import Event, EventKind
from ..engine.fleet import NOTHING, Fleet, Message, Model, answer
from .clocks import Clock, VirtualClock
from .gradients import Gradients


class LocalFleet(Fleet):
    """Workers simulated in this process."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        message: Message,
        threads: int | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Workers use ``threads`` threads of torch, by default as many as the server, and compute when they are due."""
        super().__init__(problem)
        self._gradients = gradients or Gradients(problem)
        self._apart = None if threads is None else ThreadPoolExecutor(1, initializer=use_threads, initargs=(threads,))
        self._norm: float | Tensor | None = None  # of the last gradient, if it is known
        self.norms: list[Tensor] = []  # of replicas' gradients that were taken for finite, unseen
        self.clock = clock
        self._message = message
        self._held: dict[int, Tensor] = {}
        self._keep: Tensor | None = None  # what the last sender will keep if it is accepted
        self._answer_size = 0  # bytes of an answer, needed when a job is sent: found by trying, they depend on its length

    def begin(self) -> None:
        pass

    def close(self) -> None:
        self._gradients.close()
        if self._apart is not None:
            self._apart.shutdown()

    def peek(self) -> Event | None:
        return self.clock.peek()

    def pop(self) -> None:
        self.clock.pop()

    @property
    def ready(self) -> bool:
        """Whether what happens next can happen without computing a gradient."""
        event = self.clock.peek()
        return event is None or event.kind is not EventKind.ARRIVAL or self._gradients.is_known(event.worker, event.draw)

    @property
    def expects_more(self) -> bool:
        return self.clock.expects_more

    @property
    def never_ending(self) -> list[int]:
        return self.clock.never_ending

    def arrival(self, event: Event) -> Arrival:
        model = self._jobs[event.worker][event.draw]
        job = Job(event.worker, event.draw, model.version)
        if event.kind is not EventKind.ARRIVAL:
            if event.kind is EventKind.REJECTED and not self._gradients.is_known(event.worker, event.draw):
                self._gradients.take(event.worker, event.draw, model.x)  # so that later calls hold what they held
            return Arrival(job, NOTHING, event.time, event.seconds, math.nan)
        if self._apart is None:
            computed = self._gradients.take(event.worker, event.draw, model.x)
        else:
            computed = self._apart.submit(self._gradients.take, event.worker, event.draw, model.x).result()
        loss: Any = computed.loss
        done = answer(computed.gradient, loss, model.x, self._message, self._held.get(event.worker))
        self._keep, self._norm = done.keep, computed.norm
        value = unpacked(done.value)
        size = done.value.nbytes if isinstance(done.value, Tensor) and value.ndim == 1 else size_of(done.value)
        return Arrival(job, value, event.time, event.seconds, done.loss, size)

    def finite(self, a: Arrival) -> bool:
        if isinstance(self._norm, Tensor):
            self.norms.append(self._norm)
            return True
        return super().finite(a) if self._norm is None or self._keep is not None else math.isfinite(self._norm)

    def retry(self, job: Job) -> None:
        self._gradients.ended(job.worker, [job.draw])
        super().retry(job)

    def accept(self, a: Arrival) -> None:
        del self._jobs[a.worker][a.job.draw]
        self._gradients.ended(a.worker, [a.job.draw])
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

    def _begin(self, worker: int, draw: int, model: Model, *, sent: bool = False, first: bool = False) -> None:
        batches = self._problem.batches(worker)
        if self._answer_size == 0:
            self._answer_size = size_of(self._message(torch.zeros_like(model.x), None)[0])
        if first:
            self.clock.retry(worker, draw, batches, self._answer_size)
        else:  # for one more draw the model is there already
            self.clock.begin(worker, draw, batches, size_of(model.x) if sent else 0, self._answer_size)
        self._gradients.begin(worker, draw, model.x)

    def expel(self, worker: int, text: str) -> None:
        self.clock.expel(worker, text)

    def cancel(self, worker: int) -> None:
        self._gradients.ended(worker, self._jobs.get(worker, ()))
        super().cancel(worker)
        self.clock.cancel(worker, self._draws[worker])

    def _wake(self, time: float) -> None:
        self.clock.wake(time)

    def save(self) -> dict[str, Any]:
        assert isinstance(self.clock, VirtualClock), "a replay is not saved: it can be made again"
        return {"clock": self.clock.save(), "gradients": self._gradients.save(), **super().save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._held.clear()
        super().load(saved)
        in_flight = {(worker, draw): m.x for worker, jobs in self._jobs.items() for draw, m in jobs.items()}
        self.clock.load(saved.get("clock", {}), in_flight)
        self._gradients.load(saved.get("gradients", []), in_flight)

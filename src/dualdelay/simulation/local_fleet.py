"""Workers simulated in this process, by a virtual clock or in the order of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from ..core import Arrival, Job, Problem
from ..core.compression import Compress, size_of
from ..core.devices import use_threads
from ..core.jobs import NO_PARTS
from ..core.work import Sent
from ..engine.events import Event, EventKind
from ..engine.fleet import NOTHING, Assignment, Fleet, Model
from ..engine.half import Answer, Half, Kept, Task, parts_of
from .clocks import Clock, VirtualClock, Work
from .gradients import Computed, Gradients


class LocalFleet(Fleet):
    """Workers simulated in this process."""

    def __init__(
        self,
        problem: Problem,
        clock: Clock,
        half: Half,
        threads: int | None = None,
        gradients: Gradients | None = None,
        downlink: Compress = None,
    ) -> None:
        """Workers use ``threads`` threads of torch, by default as many as the server, and compute when they are due."""
        super().__init__(problem, half.span, downlink)
        self._ahead = half.computes_ahead(problem)  # otherwise jobs are computed whole, once what a worker keeps is known
        self._gradients = gradients or Gradients(problem, None if self._ahead else half)
        self._apart = None if threads is None else ThreadPoolExecutor(1, initializer=use_threads, initargs=(threads,))
        self._norm: float | Tensor | None = None  # of the last gradient, if it is known
        self.norms: list[Tensor] = []  # of replicas' gradients that were taken for finite, unseen
        self.clock = clock
        self._half = half
        self._held: dict[int, Kept] = {}
        self._keep: Kept | None = None  # what the last sender will keep if it is accepted
        self._model_size = 0  # bytes of a model that travels whole
        self._answer_size = 0  # bytes of an answer, needed when a job is sent: found by trying, they depend on its length

    def begin(self) -> None:
        pass

    def close(self, ended: bool = True) -> None:
        self._gradients.close()
        if self._apart is not None:
            self._apart.shutdown()

    def peek(self) -> Event | None:
        return self.clock.peek()

    def pop(self) -> None:
        self.clock.pop()

    @property
    def ready(self) -> bool:
        """Whether what happens next can happen without computing a gradient; if not, it is asked for."""
        event = self.clock.peek()
        if event is None or event.kind is not EventKind.ARRIVAL:
            return True
        task = self._task(event)
        if self._gradients.is_known(event.worker, event.draw):
            return True
        self._gradients.begin(task)
        return False

    def _task(self, event: Event) -> Task:
        """What is to be computed for an arrival."""
        assignment = self._jobs[event.worker][event.draw]
        if event.kind is EventKind.ARRIVAL and event.steps != assignment.steps:  # polled: what was begun is too long
            self._gradients.ended(event.worker, [event.draw])
            self._jobs[event.worker][event.draw] = assignment._replace(steps=event.steps)
        model = assignment.model
        kept = None if self._ahead else self._held.get(event.worker)
        return Task(Job(event.worker, event.draw, model.version), model.x, event.steps, kept)

    @property
    def expects_more(self) -> bool:
        return self.clock.expects_more

    @property
    def never_ending(self) -> list[int]:
        return self.clock.never_ending

    def arrival(self, event: Event) -> Arrival:
        task = self._task(event)
        job = task.job
        if event.kind is not EventKind.ARRIVAL:
            if event.kind is EventKind.REJECTED and not self._gradients.is_known(event.worker, event.draw):
                self._gradients.take(task)  # so that later calls hold what they held
            return Arrival(job, NOTHING, event.time, event.seconds, math.nan)
        computed = self._take(task) if self._apart is None else self._apart.submit(self._take, task).result()
        self._norm = computed.norm
        if self._ahead:
            if self._held:
                task = task._replace(kept=self._held.get(event.worker))
            done = self._half.run(self._problem, task, (computed.value, computed.loss))
        else:
            done = Answer(computed.value, computed.keep, computed.loss, event.steps)
        self._keep, message, parts = done.keep, done.message, NO_PARTS
        if isinstance(message, Tensor):
            value, size = message, message.nbytes if message.ndim == 1 else size_of(message)
        else:
            (value, parts), size = parts_of(message), size_of(message)
        model, _, _, sent = self._jobs[event.worker][event.draw]
        down = model.size if sent else 0
        return Arrival(job, value, event.time, event.seconds, done.loss, size, done.steps, down, parts)

    def _take(self, task: Task) -> Computed:
        """What a job that is due comes to; if it was not known, others that are due next may be computed, too."""
        gradients = self._gradients
        known = gradients.is_known(task.job.worker, task.job.draw)
        computed = gradients.take(task)
        if not known and gradients.looks_ahead and self._ahead:
            gradients.prepare([self._task(event) for event in self.clock.upcoming(gradients.looks_ahead)])
        return computed

    def finite(self, a: Arrival) -> bool:
        if self._norm is None:
            return super().finite(a)
        if isinstance(self._norm, Tensor):
            self.norms.append(self._norm)
            return True
        return super().finite(a) if self._keep is not None else math.isfinite(self._norm)

    def retry(self, job: Job, steps: int = 1) -> None:
        self._gradients.ended(job.worker, [job.draw])
        super().retry(job, steps)

    def accept(self, a: Arrival) -> None:
        worker, draw, _ = a.job
        del self._jobs[worker][draw]
        self._gradients.ended(worker, [draw])
        if self._keep is not None:
            self._held[worker] = self._keep
        elif self._held:
            self._held.pop(worker, None)
        if not self._ahead:
            self._begin_next(worker)

    def held(self) -> dict[int, Kept]:
        return self._held

    def forget(self, worker: int) -> Kept | None:
        self._begin_anew(worker)
        return self._held.pop(worker, None)

    def restore(self, worker: int, held: Kept | None) -> None:
        self._begin_anew(worker)
        if held is not None:
            self._held[worker] = held

    def _begin_anew(self, worker: int) -> None:
        """What was computed ahead with what the worker kept is void."""
        if not self._ahead:
            self._gradients.ended(worker, self._jobs.get(worker, ()))

    def _lend(self, version: int, x: Sent, serial: int = 0, packed: Any = None) -> Model:
        if serial:
            return Model(version, x, serial, packed, size=size_of(x if packed is None else packed))
        self._model_size = self._model_size or size_of(x)
        return Model(version, x, size=self._model_size)

    def _weights(self, model: Model) -> Sent:
        x: Sent = model.x
        return x

    def _begin(self, worker: int, draw: int, assignment: Assignment, *, first: bool = False) -> None:
        model, steps, hold, sent = assignment
        if self._answer_size == 0:
            self._answer_size = size_of(self._half.size_trial(model.x))
        work = Work(worker, draw, self._problem.batches(worker), self._answer_size, steps, hold)
        if first:
            self.clock.retry(work)
        else:
            self.clock.begin(work, model.size if sent else 0)
        if not self._ahead:
            if len(self._jobs[worker]) == 1:
                self._begin_next(worker)
        elif self._gradients.begins_early:
            self._gradients.begin(Task(Job(worker, draw, model.version), model.x))

    def _begin_next(self, worker: int) -> None:
        """Have the worker's only or oldest job computed, now that it is known what the worker keeps."""
        for draw, (model, steps, hold, _) in self._jobs.get(worker, {}).items():
            if not hold:
                self._gradients.begin(Task(Job(worker, draw, model.version), model.x, steps, self._held.get(worker)))
            break

    def poll(self, worker: int) -> None:
        self._begin_anew(worker)
        self.clock.poll(worker)

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
        in_flight = [(worker, draw, one) for worker, jobs in self._jobs.items() for draw, one in jobs.items()]
        self.clock.load(saved.get("clock", {}), [(worker, draw) for worker, draw, _ in in_flight])
        self._gradients.load(saved.get("gradients", []), self._tasks())

    def _tasks(self) -> list[Task]:
        """The jobs in flight whose computation can begin: all, or each worker's oldest one."""
        tasks = []
        for worker, jobs in self._jobs.items():
            for draw, (model, steps, hold, _) in list(jobs.items())[: None if self._ahead else 1]:
                kept = None if self._ahead else self._held.get(worker)
                if not hold:
                    tasks.append(Task(Job(worker, draw, model.version), model.x, steps, kept))
        return tasks

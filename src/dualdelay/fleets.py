"""Those who carry out the server's orders and bring its arrivals, here all in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .clocks import Clock, Due, VirtualClock
from .core import Arrival, Job, Order, Problem
from .errors import BadInput

Message = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class Model(NamedTuple):
    """The weights of a version."""

    version: int
    x: Tensor


_NOTHING = torch.empty(0)


class LocalFleet:
    """Workers simulated in this process: nothing is computed before its arrival is due."""

    def __init__(self, problem: Problem, clock: Clock, message: Message) -> None:
        self.clock = clock
        self.held: dict[int, Tensor] = {}  # what each worker keeps between its messages
        self._problem = problem
        self._message = message
        self._draws = [0] * problem.workers  # jobs given to each worker so far
        self._models: dict[int, Model] = {}  # what each worker was sent last
        self._jobs: dict[int, dict[int, Model]] = {}  # in flight, by worker and then by draw
        self._keep: Tensor | None = None  # what the last sender will keep if it is accepted

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor) -> None:
        """Do what the server wants, in its order; ``x`` is the current model."""
        current = Model(version, x)
        for kind, worker, time in orders:
            if kind == "send" or kind == "again":
                if kind == "send":
                    self._models[worker] = current
                elif worker not in self._models:
                    raise BadInput(f"again({worker}) was ordered, but worker {worker} was never sent a model; send first.")
                draw = self._next_draw(worker, self._models[worker])
                down = x.nbytes if kind == "send" else 0  # for one more draw the model is there already
                self.clock.begin(worker, draw, self._problem.batches(worker), down, x.nbytes)
            elif kind == "cancel":
                self.cancel(worker)
            else:
                self.clock.wake(time)

    def _next_draw(self, worker: int, model: Model) -> int:
        """Name a worker's next job, at this model."""
        if not 0 <= worker < len(self._draws):
            raise BadInput(f"a job was ordered for worker {worker}; expected one of 0..{len(self._draws) - 1}.")
        draw = self._draws[worker]
        self._draws[worker] = draw + 1
        self._jobs.setdefault(worker, {})[draw] = model
        return draw

    def retry(self, a: Arrival) -> None:
        """The server did not take the arrival: its sender does the job again, with another draw, at the same model."""
        assert a.job is not None
        model = self._jobs[a.worker].pop(a.job.draw)
        draw = self._next_draw(a.worker, model)
        self.clock.retry(a.worker, draw, self._problem.batches(a.worker), model.x.nbytes)

    def cancel(self, worker: int) -> None:
        """Drop a worker's jobs."""
        self._jobs.pop(worker, None)
        self.clock.cancel(worker, self._draws[worker])

    def depart(self, worker: int) -> Tensor | None:
        """Forget a worker that left; returns what it kept."""
        self.cancel(worker)
        self._models.pop(worker, None)
        return self.held.pop(worker, None)

    def arrival(self, due: Due) -> Arrival:
        """What the clock says is next, with its gradient computed; a recorded rejection comes without a value.

        Nothing is changed yet, so that a run whose gradient fails can be saved as it stands.
        """
        if due.kind == "wake":
            return Arrival(None, _NOTHING, due.time, 0.0, math.nan)
        model = self._jobs[due.worker][due.draw]
        job = Job(due.worker, due.draw, model.version)
        if due.kind == "rejected":
            return Arrival(job, _NOTHING, due.time, due.seconds, math.nan)
        gradient, loss = self._problem.gradient(model.x, due.worker, due.draw)
        if gradient.dtype != model.x.dtype:
            gradient = gradient.to(model.x.dtype)
        if gradient.shape != model.x.shape:  # a message could hide this by broadcasting
            return Arrival(job, gradient, due.time, due.seconds, loss)
        value, self._keep = self._message(gradient, self.held.get(due.worker))
        return Arrival(job, value, due.time, due.seconds, loss)

    def accept(self, a: Arrival) -> None:
        """The server took the arrival, so its sender may replace what it keeps."""
        assert a.job is not None
        del self._jobs[a.worker][a.job.draw]
        if self._keep is not None:
            self.held[a.worker] = self._keep

    @property
    def in_flight(self) -> list[Job]:
        """The names of the jobs given and not yet arrived."""
        return [Job(worker, draw, model.version) for worker, jobs in self._jobs.items() for draw, model in jobs.items()]

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values and tensors."""
        assert isinstance(self.clock, VirtualClock), "a replay is not saved: it can be made again"
        in_flight = (model for jobs in self._jobs.values() for model in jobs.values())
        models = {model.version: model.x for model in (*self._models.values(), *in_flight)}
        return {
            "clock": self.clock.save(),
            "draws": self._draws,
            "weights": list(models.items()),
            "models": [[worker, model.version] for worker, model in self._models.items()],
            "jobs": [list(job) for job in self.in_flight],
            "held": list(self.held.items()),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved."""
        assert isinstance(self.clock, VirtualClock)
        models = {version: Model(version, x) for version, x in saved["weights"]}
        self.clock.load(saved["clock"])
        self._draws = saved["draws"]
        self._models = {worker: models[version] for worker, version in saved["models"]}
        self._jobs = {}
        for worker, draw, version in saved["jobs"]:
            self._jobs.setdefault(worker, {})[draw] = models[version]
        self.held = dict(saved["held"])

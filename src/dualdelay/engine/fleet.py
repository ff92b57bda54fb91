"""Those who carry out the server's orders and bring its arrivals: what all fleets share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Arrival, Job, Order, Problem
from ..core.compression import Packed
from ..core.errors import BadInput
from ..core.state import is_finite
from .evaluation import Evaluated
from .events import Due

Message = Callable[[Tensor, Tensor | None], tuple[Tensor | Packed, Tensor | None]]

NOTHING = torch.empty(0)


class Model(NamedTuple):
    """The weights of a version: a tensor, or where a fleet keeps it."""

    version: int
    x: Any


class Answer(NamedTuple):
    """What a job comes to: what is sent, what the worker keeps once that is accepted, and the minibatch's loss."""

    value: Tensor | Packed
    keep: Tensor | None
    loss: float  # of replicas a tensor, one each


def answer(gradient: Tensor, loss: float, x: Tensor, message: Message, held: Tensor | None) -> Answer:
    """What a gradient at x comes to. The same few lines run in a simulation, in a real worker and in a replay."""
    if gradient.dtype != x.dtype:
        gradient = gradient.to(x.dtype)
    if gradient.shape != x.shape:  # a message could hide this by broadcasting
        return Answer(gradient, None, loss)
    return Answer(*message(gradient, held), loss)


class Fleet(ABC):
    """Workers with their jobs: who was given what, at which model, and who comes next."""

    copies = False  # whether a model is copied on its way out, so that the server may go on in place
    real = False  # whether the workers are processes of their own, on whose data and code a run must not depend
    measures = False  # whether the workers evaluate F
    evaluated: float | None = None  # how much of the last evaluation, on all data, is done; None: it has not begun
    silent: Sequence[int] = ()  # workers that keep something and did not say what, when they were asked last

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._draws = [0] * problem.workers  # jobs given to each worker so far
        self._models: dict[int, Model] = {}  # what each worker was sent last
        self._jobs: dict[int, dict[int, Model]] = {}  # in flight, by worker and then by draw

    def check(self, orders: Iterable[Order]) -> None:
        """Refuse orders that cannot be carried out."""
        sent = set()
        for order in orders:
            if not isinstance(order, Order) or order.kind not in ("send", "again", "cancel", "wake"):
                raise BadInput(f"{order!r} is no order; expected dd.send, dd.again, dd.cancel or dd.wake.")
            kind, worker, time = order
            if kind == "wake":
                if not isinstance(time, (int, float)) or not time < math.inf:
                    raise BadInput(f"wake({time!r}) was ordered; expected a time, a finite number.")
            elif not isinstance(worker, int) or not 0 <= worker < len(self._draws):
                raise BadInput(f"{kind}({worker!r}) was ordered; expected a worker, one of 0..{len(self._draws) - 1}.")
            elif kind == "send":
                sent.add(worker)
            elif kind == "again" and worker not in self._models and worker not in sent:
                raise BadInput(f"again({worker}) was ordered, but worker {worker} was never sent a model; send first.")

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor) -> None:
        """Do what the server wants, in its order; ``x`` is the current model."""
        current: Model | None = None
        for kind, worker, time in orders:
            if kind == "send":
                current = current or self._lend(version, x)
                self._models[worker] = current
                self._begin(worker, self._next_draw(worker, current), current, sent=True)
            elif kind == "again":
                model = self._models[worker]
                self._begin(worker, self._next_draw(worker, model), model, sent=False)
            elif kind == "cancel":
                self.cancel(worker)
            else:
                self._wake(time)

    def _next_draw(self, worker: int, model: Model) -> int:
        """Name a worker's next job, at this model."""
        draw = self._draws[worker]
        self._draws[worker] = draw + 1
        self._jobs.setdefault(worker, {})[draw] = model
        return draw

    def retry(self, a: Arrival) -> None:
        """The server did not take the arrival: its sender does the job again, with another draw, at the same model."""
        assert a.job is not None
        model = self._jobs[a.worker].pop(a.job.draw)
        self._begin_first(a.worker, self._next_draw(a.worker, model), model)

    def cancel(self, worker: int) -> None:
        """Drop a worker's jobs."""
        self._jobs.pop(worker, None)
        self._cancelled(worker)

    def depart(self, worker: int) -> Tensor | None:
        """Forget a worker that left; returns what it kept."""
        self.cancel(worker)
        self._models.pop(worker, None)
        return self.forget(worker)

    @property
    def hope(self) -> bool:
        """Whether something other than a wake may still happen."""
        return True

    @property
    def never(self) -> list[int]:
        """The workers whose jobs are known never to end."""
        return []

    @property
    def in_flight(self) -> list[Job]:
        """The names of the jobs given and not yet arrived."""
        return [Job(worker, draw, model.version) for worker, jobs in self._jobs.items() for draw, model in jobs.items()]

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values and tensors."""
        in_flight = (model for jobs in self._jobs.values() for model in jobs.values())
        models = {model.version: model for model in (*self._models.values(), *in_flight)}
        return {
            "draws": self._draws,
            "weights": [(version, self._weights(model)) for version, model in models.items()],
            "models": [[worker, model.version] for worker, model in self._models.items()],
            "jobs": [list(job) for job in self.in_flight],
            "held": list(self.held().items()),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        models = {version: self._lend(version, x) for version, x in saved["weights"]}
        self._draws = saved["draws"]
        self._models = {worker: models[version] for worker, version in saved["models"]}
        self._jobs = {}
        for worker, draw, version in saved["jobs"]:
            self._jobs.setdefault(worker, {})[draw] = models[version]
        for worker, held in saved["held"]:
            self.restore(worker, held)

    @abstractmethod
    def begin(self) -> None:
        """The run begins."""

    def measure(self, time: float, version: int, x: Tensor, samples: int | None, limit: float | None) -> bool:
        """Have the workers evaluate a model, on all their data or on some; later something ``evaluated`` is due.

        If one is still under way, or it would take more than the share ``limit`` of a worker's time, it is left out: False.
        """
        raise AssertionError("these workers do not evaluate")

    def measured(self) -> Evaluated:
        """The evaluation that was due."""
        raise AssertionError("these workers do not evaluate")

    def measure_whole(self, time: float, version: int, x: Tensor) -> None:
        """Have the workers evaluate the last model on all their data."""
        raise AssertionError("these workers do not evaluate")

    @property
    def has_measured(self) -> bool:
        """Whether an evaluation is there to be taken."""
        return False

    def settle(self) -> bool:
        """Wait a moment for evaluations under way; False if there is none left to wait for."""
        return False

    @abstractmethod
    def dismiss(self, worker: int, text: str) -> None:
        """A worker has to leave; it is about to be due as ``left``."""

    @abstractmethod
    def close(self) -> None:
        """The run has ended."""

    @abstractmethod
    def peek(self) -> Due | None:
        """What happens next, or None if nothing ever will."""

    @abstractmethod
    def pop(self) -> None:
        """Go there."""

    @abstractmethod
    def arrival(self, due: Due) -> Arrival:
        """What is due, with its value; what was rejected or failed comes without. Nothing is changed yet."""

    def finite(self, a: Arrival) -> bool:
        """Whether the arrival that is due has a finite value."""
        return is_finite(a.value)

    @abstractmethod
    def accept(self, a: Arrival) -> None:
        """The server took the arrival, so its sender may replace what it keeps."""

    @abstractmethod
    def held(self) -> dict[int, Tensor]:
        """What each worker keeps between its messages, as of the last one that was accepted."""

    @abstractmethod
    def forget(self, worker: int) -> Tensor | None:
        """What a worker kept is gone; returns it if it is known."""

    @abstractmethod
    def restore(self, worker: int, held: Tensor) -> None:
        """This is what a worker keeps."""

    @abstractmethod
    def _lend(self, version: int, x: Tensor) -> Model: ...

    @abstractmethod
    def _weights(self, model: Model) -> Tensor: ...

    @abstractmethod
    def _begin(self, worker: int, draw: int, model: Model, *, sent: bool) -> None: ...

    @abstractmethod
    def _begin_first(self, worker: int, draw: int, model: Model) -> None: ...

    @abstractmethod
    def _cancelled(self, worker: int) -> None: ...

    @abstractmethod
    def _wake(self, time: float) -> None: ...

"""Those who carry out the server's orders and bring its arrivals: what all fleets share."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Again, Arrival, Cancel, Job, Order, Problem, Send, Wake
from ..core.compression import Packed
from ..core.errors import BadInput
from ..core.state import is_finite
from .evaluation import WorkersEvaluation
from .events import Event

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

    real = False  # whether the workers are processes of their own, on whose data and code a run must not depend
    copies_models = False  # whether a model is copied on its way out, so that the server may change its weights in place
    evaluates = False  # whether the workers evaluate F
    last_evaluation: float | None = None  # how much of the last evaluation, on all data, is done; None: it has not begun
    unheard: Sequence[int] = ()  # workers that keep something and did not say what, when they were asked last

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._draws = [0] * problem.workers  # jobs given to each worker so far
        self._models: dict[int, Model] = {}  # what each worker was sent last
        self._jobs: dict[int, dict[int, Model]] = {}  # in flight, by worker and then by draw

    def stopwatch(self) -> float:
        """Seconds by which the server's own work is timed."""
        return time.perf_counter()

    def check(self, orders: Iterable[Order]) -> None:
        """Refuse orders that cannot be carried out."""
        sent = set()
        for order in orders:
            if isinstance(order, Wake):
                if not isinstance(order.time, (int, float)) or not order.time < math.inf:
                    raise BadInput(f"wake({order.time!r}) was ordered; expected a time, a finite number.")
                continue
            if not isinstance(order, (Send, Again, Cancel)):
                raise BadInput(f"{order!r} is no order; expected dd.send, dd.again, dd.cancel or dd.wake.")
            worker, verb = order.worker, type(order).__name__.lower()
            if not isinstance(worker, int) or not 0 <= worker < len(self._draws):
                raise BadInput(f"{verb}({worker!r}) was ordered; expected a worker, one of 0..{len(self._draws) - 1}.")
            if isinstance(order, Send):
                sent.add(worker)
            elif isinstance(order, Again) and worker not in self._models and worker not in sent:
                raise BadInput(f"again({worker}) was ordered, but worker {worker} was never sent a model; send first.")

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor) -> None:
        """Do what the server wants, in its order; ``x`` is the current model."""
        current: Model | None = None
        for order in orders:
            if isinstance(order, Send):
                current = current or self._lend(version, x)
                self._models[order.worker] = current
                self._begin(order.worker, self._next_draw(order.worker, current), current, sent=True)
            elif isinstance(order, Again):
                model = self._models[order.worker]
                self._begin(order.worker, self._next_draw(order.worker, model), model)
            elif isinstance(order, Cancel):
                self.cancel(order.worker)
            else:
                self._wake(order.time)

    def _next_draw(self, worker: int, model: Model) -> int:
        """Name a worker's next job, at this model."""
        draw = self._draws[worker]
        self._draws[worker] = draw + 1
        self._jobs.setdefault(worker, {})[draw] = model
        return draw

    def retry(self, job: Job) -> None:
        """The server did not take what a job came to: its worker does it again, with another draw, at the same model."""
        model = self._jobs[job.worker].pop(job.draw)
        self._begin(job.worker, self._next_draw(job.worker, model), model, first=True)

    def cancel(self, worker: int) -> None:
        """Drop a worker's jobs."""
        self._jobs.pop(worker, None)

    def remove(self, worker: int) -> Tensor | None:
        """Forget a worker that left; returns what it kept."""
        self.cancel(worker)
        self._models.pop(worker, None)
        return self.forget(worker)

    @property
    def expects_more(self) -> bool:
        """Whether something other than a wake may still happen."""
        return True

    @property
    def never_ending(self) -> list[int]:
        """The workers whose jobs are known never to end."""
        return []

    @property
    def in_flight(self) -> list[Job]:
        """The names of the jobs given and not yet arrived."""
        return [Job(worker, draw, model.version) for worker, jobs in self._jobs.items() for draw, model in jobs.items()]

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""
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
        """Continue from what was saved."""
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

    def evaluate(self, time: float, version: int, x: Tensor, samples: int | None, limit: float | None) -> bool:
        """Have the workers evaluate a model, on all their data or on some; later an ``EVALUATED`` event is due.

        If one is still under way, or it would take more than the share ``limit`` of a worker's time, it is skipped: False.
        """
        raise AssertionError("these workers do not evaluate")

    def evaluate_all(self, time: float, version: int, x: Tensor) -> None:
        """Have the workers evaluate the last model on all their data."""
        raise AssertionError("these workers do not evaluate")

    def take_evaluation(self) -> WorkersEvaluation:
        """The evaluation that was due."""
        raise AssertionError("these workers do not evaluate")

    @property
    def has_evaluation(self) -> bool:
        """Whether an evaluation is there to be taken."""
        return False

    def wait_for_evaluations(self) -> bool:
        """Wait a moment for evaluations under way; False if there is none left to wait for."""
        return False

    @abstractmethod
    def expel(self, worker: int, text: str) -> None:
        """A worker has to leave; a ``LEFT`` event is due soon."""

    @abstractmethod
    def close(self) -> None:
        """The run has ended."""

    @abstractmethod
    def peek(self) -> Event | None:
        """What happens next, or None if nothing ever will."""

    @abstractmethod
    def pop(self) -> None:
        """Let that happen."""

    @abstractmethod
    def arrival(self, event: Event) -> Arrival:
        """What a job that has ended came to; if it was rejected or failed, without a value. Nothing is changed yet."""

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
    def _begin(self, worker: int, draw: int, model: Model, *, sent: bool = False, first: bool = False) -> None:
        """A worker was given a job, with its model (``sent``), or before those that wait there (``first``)."""

    @abstractmethod
    def _wake(self, time: float) -> None: ...

"""Those who carry out the server's orders and bring its arrivals: what all fleets share."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Again, Arrival, Cancel, Job, Order, Poll, Problem, Send, Wake
from ..core.compression import Compress, pack
from ..core.errors import BadInput
from ..core.state import is_finite
from ..core.work import Sent
from .evaluation import WorkersEvaluation
from .events import Event
from .half import Kept

NOTHING = torch.empty(0)


class Model(NamedTuple):
    """What workers are sent, as tensors or where a fleet keeps it: the weights of a version, or what a method sends."""

    version: int
    x: Any
    serial: int = 0  # names it among those of one version that were made for one worker alone; 0: for all
    packed: Any = None  # how it differs from what that worker was sent before, if it travels so
    base: int = 0  # the serial of that
    size: int = 0  # its bytes, where a fleet counts what it sends

    @property
    def key(self) -> tuple[int, int]:
        """Its name."""
        return self.version, self.serial


class Assignment(NamedTuple):
    """A job as it was given to a worker."""

    model: Model
    steps: int = 1  # gradients that it takes
    hold: bool = False  # whether it ends when it is polled alone
    sent: bool = False  # whether the model goes with it; otherwise it is there already


class Fleet(ABC):
    """Workers with their jobs: who was given what, at which model, and who comes next."""

    real = False  # whether the workers are processes of their own, on whose data and code a run must not depend
    copies_models = False  # whether a model is copied on its way out, so that the server may change its weights in place
    evaluates = False  # whether the workers evaluate F
    last_evaluation: float | None = None  # how much of the last evaluation, on all data, is done; None: it has not begun
    loggers: Sequence[Callable[[int, Mapping[str, float]], None]] = ()  # who hears of the run's vital signs
    unheard: Sequence[int] = ()  # workers that keep something and did not say what, when they were asked last

    def __init__(self, problem: Problem, most_steps: int = 1, downlink: Compress = None) -> None:
        """Jobs take ``most_steps`` gradients at most; with a ``downlink`` models travel as small differences."""
        self._problem, self._most_steps, self._downlink = problem, most_steps, downlink
        self._draws = [0] * problem.workers  # jobs given to each worker so far
        self._models: dict[int, Model] = {}  # what each worker was sent last
        self._serial = 0  # models made for one worker alone so far
        self._jobs: dict[int, dict[int, Assignment]] = {}  # in flight, by worker and then by draw

    def stopwatch(self) -> float:
        """Seconds by which the server's own work is timed."""
        return time.perf_counter()

    def check(self, orders: Sequence[Order], ended: Job | None = None) -> None:
        """Refuse orders that cannot be carried out, once the job that has ``ended`` is accepted."""
        workers = len(self._draws)
        for place, order in enumerate(orders):
            if type(order) is Send and type(order.worker) is int and 0 <= order.worker < workers and order.steps is None:
                continue  # nearly always
            if isinstance(order, Wake):
                if not isinstance(order.time, (int, float)) or not order.time < math.inf:
                    raise BadInput(f"wake({order.time!r}) was ordered; expected a time, a finite number.")
                continue
            if not isinstance(order, (Send, Again, Poll, Cancel)):
                raise BadInput(f"{order!r} is no order; expected dd.send, dd.again, dd.poll, dd.cancel or dd.wake.")
            worker = order.worker
            if not isinstance(worker, int) or not 0 <= worker < workers:
                verb = type(order).__name__.lower()
                raise BadInput(f"{verb}({worker!r}) was ordered; expected a worker, one of 0..{workers - 1}.")
            if isinstance(order, Send):
                if order.steps is not None:
                    self._check_steps(order)
            elif isinstance(order, Again) and worker not in self._models and Send not in _kinds(orders[:place], worker):
                raise BadInput(f"again({worker}) was ordered, but worker {worker} was never sent a model; send first.")
            elif isinstance(order, Poll):
                earlier = _kinds(orders[:place], worker)
                if earlier[-1] in (Poll, Cancel) if earlier else not self._has_job(worker, ended):
                    raise BadInput(
                        f"poll({worker}) was ordered, but worker {worker} has nothing to do; send it a job first."
                    )

    def _has_job(self, worker: int, ended: Job | None) -> bool:
        return any((worker, draw) != (ended and ended[:2]) for draw in self._jobs.get(worker, ()))

    def _check_steps(self, order: Send) -> None:
        steps = order.steps
        if steps is not None and (type(steps) is not int or not 1 <= steps <= self._most_steps):
            raise BadInput(
                f"send({order.worker}, steps={steps!r}) was ordered; expected a number of gradients from 1 to the method's "
                f"most_steps, {self._most_steps}."
            )

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor, own: Callable[[int], Sent] | None = None) -> None:
        """Do what the server wants, in its order; ``x`` is the current model, or ``own`` says what each worker is sent."""
        current: Model | None = None
        for order in orders:
            if isinstance(order, Send):
                worker = order.worker
                if own is None and self._downlink is None:
                    model = current = current or self._lend(version, x)
                else:
                    model = self._own_model(worker, version, x if own is None else own(worker))
                self._models[worker] = model
                assignment = Assignment(model, order.steps or self._most_steps, order.hold, True)
                self._begin(worker, self._next_draw(worker, assignment), assignment)
            elif isinstance(order, Again):
                assignment = Assignment(self._models[order.worker], self._most_steps)
                self._begin(order.worker, self._next_draw(order.worker, assignment), assignment)
            elif isinstance(order, Poll):
                self.poll(order.worker)
            elif isinstance(order, Cancel):
                self.cancel(order.worker)
            else:
                self._wake(order.time)

    def _own_model(self, worker: int, version: int, x: Sent) -> Model:
        """What one worker is sent; with a downlink, as a small difference to what it was sent before.

        The job is then done at what the worker makes of that, and what one difference leaves out is in the next.
        """
        self._serial += 1
        before = self._models.get(worker)
        if self._downlink is None or before is None:
            return self._lend(version, x, self._serial)
        base = _tensors(self._weights(before))
        packed = {name: pack(part.to(base[name].device) - base[name], self._downlink) for name, part in _tensors(x).items()}
        moved = {name: base[name] + part.unpack() for name, part in packed.items()}
        sent = moved if isinstance(x, Mapping) else moved[""]
        return self._lend(version, sent, self._serial, packed)._replace(base=before.serial)

    def _next_draw(self, worker: int, assignment: Assignment) -> int:
        """Name a worker's next job."""
        draw = self._draws[worker]
        self._draws[worker] = draw + 1
        self._jobs.setdefault(worker, {})[draw] = assignment
        return draw

    def retry(self, job: Job, steps: int = 1) -> None:
        """The server did not take what a job came to: its worker does it again, with another draw, at the same model.

        One that was polled, after so many ``steps``, is not polled again: it takes as many, or one.
        """
        model, asked, hold, _ = self._jobs[job.worker].pop(job.draw)
        assignment = Assignment(model, max(1, steps if hold else asked))
        self._begin(job.worker, self._next_draw(job.worker, assignment), assignment, first=True)

    @abstractmethod
    def poll(self, worker: int) -> None:
        """The job that a worker is doing ends now, with what it has done so far."""

    def cancel(self, worker: int) -> None:
        """Drop a worker's jobs."""
        self._jobs.pop(worker, None)

    def remove(self, worker: int) -> Kept | None:
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
        return [Job(worker, draw, one.model.version) for worker, jobs in self._jobs.items() for draw, one in jobs.items()]

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""
        in_flight = [(worker, draw, one) for worker, jobs in self._jobs.items() for draw, one in jobs.items()]
        models = {m.key: m for m in (*self._models.values(), *(one.model for _, _, one in in_flight))}
        places = {key: place for place, key in enumerate(models)}
        return {
            "draws": self._draws,
            "serial": self._serial,
            "weights": [(m.version, m.serial, m.size, self._saved(m)) for m in models.values()],
            "models": [[worker, places[model.key]] for worker, model in self._models.items()],
            "jobs": [[worker, draw, places[one.model.key], *one[1:]] for worker, draw, one in in_flight],
            "held": list(self.held().items()),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        models = [self._lend(version, x, serial)._replace(size=size) for version, serial, size, x in saved["weights"]]
        self._draws, self._serial = saved["draws"], saved["serial"]
        self._models = {worker: models[place] for worker, place in saved["models"]}
        self._jobs = {}
        for worker, draw, place, *rest in saved["jobs"]:
            self._jobs.setdefault(worker, {})[draw] = Assignment(models[place], *rest)
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
    def close(self, ended: bool = True) -> None:
        """The run has ended, or is left to go on later."""

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
        """Whether the arrival that is due has finite values."""
        return is_finite(a.value) if not a.parts else all(map(is_finite, a.parts.values()))

    @abstractmethod
    def accept(self, a: Arrival) -> None:
        """The server took the arrival, so its sender may replace what it keeps."""

    @abstractmethod
    def held(self) -> dict[int, Kept]:
        """What each worker keeps between its messages, as of the last one that was accepted."""

    @abstractmethod
    def forget(self, worker: int) -> Kept | None:
        """What a worker kept is gone; returns it if it is known."""

    @abstractmethod
    def restore(self, worker: int, held: Kept | None) -> None:
        """This is what a worker keeps."""

    @abstractmethod
    def _lend(self, version: int, x: Sent, serial: int = 0, packed: Any = None) -> Model: ...

    @abstractmethod
    def _weights(self, model: Model) -> Sent: ...

    def _saved(self, model: Model) -> Any:
        """A model as it is saved: its weights, unless they are saved elsewhere."""
        return self._weights(model)

    @abstractmethod
    def _begin(self, worker: int, draw: int, assignment: Assignment, *, first: bool = False) -> None:
        """A worker was given a job, after those that wait there or before them (``first``)."""

    @abstractmethod
    def _wake(self, time: float) -> None: ...


def _tensors(x: Sent) -> Mapping[str, Tensor]:
    return x if isinstance(x, Mapping) else {"": x}


def _kinds(orders: Iterable[Order], worker: int) -> list[type]:
    """What was ordered of a worker, in order."""
    return [type(order) for order in orders if not isinstance(order, Wake) and order.worker == worker]

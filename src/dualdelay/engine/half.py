"""The worker's half of a method as every engine runs it: in a simulation, in a real worker's process and in a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import Algorithm, BatchedGradients, Job, Message, Problem, RunningJob, State
from ..core.compression import Compress, Packed, pack, unpacked
from ..core.draws import Draws
from ..core.errors import BadWork, require_whole, shown
from ..core.work import Memory, Sent, TakeGradient, checked_memory

Kept = dict[str, Mapping[str, Any]]
"""What a worker keeps: what the method does, the problem (an inner optimiser's state), and what the uplink left out."""
METHOD, PROBLEM, UPLINK = "method", "problem", "uplink"


class Answer(NamedTuple):
    """What a job comes to: what is sent, what the worker keeps once that is accepted, the mean loss and the steps."""

    message: Message
    keep: Kept | None
    loss: Any  # a number; of replicas a tensor, one each
    steps: int


class Task(NamedTuple):
    """A job as it is computed: at which model, how many gradients, and with what its worker keeps."""

    job: Job
    model: Sent
    steps: int = 1
    kept: Kept | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Its name among those in flight: worker and draw."""
        return self.job.worker, self.job.draw


class _OneWorker(Exception):
    """What a half does depends on whose job it is."""


class _SeveralJobs(RunningJob):
    """Jobs that are computed together, of which no single one can be named."""

    @property
    def worker(self) -> int:
        raise _OneWorker

    @property
    def draw(self) -> int:
        raise _OneWorker

    @property
    def version(self) -> int:
        raise _OneWorker


class _Misshapen(Exception):
    """A problem gave a gradient of another shape, which arithmetic could hide by broadcasting."""

    def __init__(self, gradient: Tensor, loss: Any) -> None:
        super().__init__()
        self.gradient, self.loss = gradient, loss


class Half:
    """What a worker of a run does with a job."""

    def __init__(self, algorithm: Algorithm[Any], uplink: Compress = None) -> None:
        """With an ``uplink``, messages are made small, and what one leaves out is added to the next."""
        self.algorithm, self.uplink = algorithm, uplink
        self.name, self.span = type(algorithm).__name__, algorithm.most_steps
        require_whole(f"{self.name}.most_steps", self.span, 1)
        self._own = is_own(algorithm)
        self.is_default = uplink is None and self._sends_gradients()

    def _sends_gradients(self) -> bool:
        """Whether a job is nothing but a gradient at the model: by default, and for some settings of some methods."""
        if type(self.algorithm).work is Algorithm.work:
            return True
        if self._own or not self.algorithm.ahead or self.span > 1:
            return False
        gradient = torch.zeros(1)
        message, memory = self.algorithm.work(
            None, torch.ones(1), RunningJob(Job(0, 0, 0), 1, lambda y, step: (gradient, 0.0))
        )
        return message is gradient and memory is None

    def computes_ahead(self, problem: Problem) -> bool:
        """Whether a job's gradient may be taken before it is known what its worker keeps."""
        return self.algorithm.ahead and self.span == 1 and not problem.stateful

    def run(
        self,
        problem: Problem,
        task: Task,
        known: tuple[Tensor, Any] | None = None,
        running: Callable[[Job, int, TakeGradient], RunningJob] = RunningJob,
    ) -> Answer:
        """Do a job; ``known`` is its gradient at the model and the loss, if they have been computed.

        It goes on as ``running`` says: where it may be polled, that decides after each step.
        """
        job, model, steps, kept = task.job, task.model, task.steps, task.kept or {}
        if self.is_default and known is not None and isinstance(model, Tensor):
            gradient = known[0] if known[0].dtype == model.dtype else known[0].to(model.dtype)
            return Answer(gradient, None, known[1], 1)
        state = kept.get(PROBLEM)

        def take(y: Tensor, step: int) -> tuple[Tensor, Any]:
            nonlocal state
            if known is not None and y is model:
                gradient, loss = known
            elif problem.stateful:
                gradient, loss, state = problem.stateful_gradient(state, y, job.worker, job.draw * self.span + step)
            else:
                gradient, loss = problem.gradient(y, job.worker, job.draw * self.span + step)
            if gradient.shape != y.shape:
                raise _Misshapen(gradient, loss)
            return (gradient if gradient.dtype == y.dtype else gradient.to(y.dtype)), loss

        at_work = running(job, steps, take)
        try:
            message, memory = self._work(kept.get(METHOD), model, at_work, job.worker)
        except _Misshapen as error:
            return Answer(error.gradient, None, error.loss, at_work.taken + 1)
        return self._answer(message, memory, state, kept, at_work)

    def run_together(self, gradients: BatchedGradients, which: Sequence[int], tasks: Sequence[Task]) -> list[Answer]:
        """Do jobs of one form, each step of all of them in one call; ``which`` are the problems of the replicas of each."""
        if len(tasks) == 1:
            return [self._run_stacked(gradients, which, tasks[0], tasks)]
        try:
            models, kept = (_stacked([getattr(task, part) for task in tasks]) for part in ("model", "kept"))
            first = tasks[0]
            done = self._run_stacked(gradients, which, first._replace(model=models, kept=kept), tasks)
        except _OneWorker:
            return [answer for task in tasks for answer in self.run_together(gradients, which, [task])]
        losses = done.loss if is_replicas(tasks[0].model) else done.loss.tolist()
        return [Answer(_row(done.message, k), _row(done.keep, k), losses[k], done.steps) for k in range(len(tasks))]

    def _run_stacked(self, gradients: BatchedGradients, which: Sequence[int], joint: Task, tasks: Sequence[Task]) -> Answer:
        kept: Kept = joint.kept or {}
        state = kept.get(PROBLEM)
        workers = [task.job.worker for task in tasks for _ in which]
        rows = [k for _ in tasks for k in which]

        def take(y: Tensor, step: int) -> tuple[Tensor, Any]:
            nonlocal state
            draws = [task.job.draw * self.span + step for task in tasks for _ in which]
            flat = y.reshape(len(rows), -1)
            stateful = getattr(gradients, "stateful", None)
            if stateful is None:
                values, losses = gradients([flat], rows, workers, draws)
                values, losses = values.clone(), losses.clone()  # the next call writes over them
            else:
                before = None if state is None else {name: _flat(part, len(rows)) for name, part in state.items()}
                values, losses, after = stateful(before, flat, rows, workers, draws)
                state = after and {n: p.view(y.shape) if isinstance(p, Tensor) else p for n, p in after.items()}
            return values.view(y.shape).to(y.dtype), losses.double().view(y.shape[:-1])

        kind = RunningJob if len(tasks) == 1 else _SeveralJobs
        at_work = kind(joint.job, joint.steps, take)
        message, memory = self._work(kept.get(METHOD), joint.model, at_work, joint.job.worker)
        answer = self._answer(message, memory, state, kept, at_work)
        if not isinstance(answer.loss, Tensor):  # it took no gradient
            first = next(iter(_named(joint.model, "").values()))
            answer = answer._replace(loss=first.new_full(first.shape[:-1], math.nan, dtype=torch.float64))
        if len(tasks) == 1 and not is_replicas(joint.model):
            answer = answer._replace(loss=float(answer.loss))
        return answer

    def _work(
        self, memory: Mapping[str, Any] | None, model: Sent, at_work: RunningJob, worker: int
    ) -> tuple[Message, Memory | None]:
        """The method's part; one that is a user's own is looked at, for it must write into nothing that it was given."""
        if not self._own:
            return self.algorithm.work(memory, model, at_work)
        given = {**_named(model, "the model"), **{f"what it kept as {name!r}": v for name, v in (memory or {}).items()}}
        marks = {name: value._version for name, value in given.items() if isinstance(value, Tensor)}
        try:
            result = self.algorithm.work(memory, model, at_work)
        except BadWork as error:
            raise BadWork(f"{self.name}.work: {error}") from None
        if not isinstance(result, tuple) or len(result) != 2:
            raise BadWork(
                f"{self.name}.work returned {shown(result)} for worker {worker}; expected a message and what it keeps."
            )
        for name, mark in marks.items():
            if given[name]._version != mark:
                raise BadWork(
                    f"{self.name}.work of worker {worker} wrote into {name}; expected a pure function: make a new tensor, "
                    "such as y = model - lr * gradient."
                )
        if at_work.taken != at_work.most:
            raise BadWork(
                f"{self.name}.work of worker {worker} took {at_work.taken} gradients in a job of {at_work.most}; expected "
                "as many as there is time for: take them in a loop, for _ in job."
            )
        self._require_message(result[0], worker)
        return result[0], checked_memory(result[1], self.name, worker)

    def _require_message(self, message: object, worker: int) -> None:
        """Refuse what is no message."""
        parts = message if isinstance(message, Mapping) and message else {"": message}
        for name, part in parts.items():
            if not isinstance(name, str) or not isinstance(part, (Tensor, Packed)):
                of = f" as {name!r}" if isinstance(message, Mapping) and message else ""
                raise BadWork(
                    f"{self.name}.work of worker {worker} sent {shown(part)}{of}; expected a tensor, or tensors by name."
                )

    def _answer(
        self,
        message: Message,
        memory: Memory | None,
        state: Mapping[str, Any] | None,
        kept: Kept,
        at_work: RunningJob,
    ) -> Answer:
        left_out = None
        if self.uplink is not None:
            message, left_out = _made_small(message, kept.get(UPLINK, {}), self.uplink)
        keep = {
            name: value for name, value in ((METHOD, memory), (PROBLEM, state), (UPLINK, left_out)) if value is not None
        }
        return Answer(message, keep or None, at_work.loss, at_work.taken)

    def require_pure(self, x: Tensor, n: int) -> None:
        """Refuse a half whose result depends on more than its arguments, by doing the first two jobs of a worker twice."""
        state = self.algorithm.init(x, n, Draws(0, "server"))
        model, memory = checked_model(self.algorithm, state, 0), None
        for draw in range(2):
            twice = [self._tried(model, memory, draw) for _ in range(2)]
            if not _equal(*twice):
                raise BadWork(
                    f"{self.name}.work gives another message or memory when it is called again with the same arguments; "
                    "expected a pure function: no random numbers, no counters, nothing kept beside what it returns."
                )
            memory = twice[0][1]

    def _tried(self, model: Sent, memory: dict[str, Any] | None, draw: int) -> tuple[Any, Any]:
        at_work = RunningJob(Job(0, draw, 0), self.span, lambda y, step: (0.5 * y + (step + 1), 0.0))
        return self._work(memory, model, at_work, 0)

    def size_trial(self, model: Sent) -> Message:
        """A message as it would be for gradients of zero, to count its bytes."""
        at_work = RunningJob(Job(0, 0, 0), self.span, lambda y, step: (torch.zeros_like(y), 0.0))
        message, _ = self.algorithm.work(None, model, at_work)
        return message if self.uplink is None else _made_small(message, {}, self.uplink)[0]


def is_replicas(model: Sent) -> bool:
    """Whether a model has a row for each of several runs, or of one that is computed as they are."""
    first: Tensor = next(iter(_named(model, "").values()))
    return first.ndim > 1


def _stacked(values: Sequence[Any]) -> Any:
    """Values of one form as one, whose tensors have an axis more in front."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values))
    if isinstance(first, Mapping):
        return {name: _stacked([value[name] for value in values]) for name in first}
    return first


def _row(value: Any, k: int) -> Any:
    """The k-th of what was stacked."""
    if isinstance(value, Tensor):
        return value[k].clone()
    if isinstance(value, Packed):
        return Packed(value.length, (value.parts[0][k].clone(), value.parts[1][k].clone()))
    return {name: _row(part, k) for name, part in value.items()} if isinstance(value, Mapping) else value


def _equal(a: Any, b: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b or (a != a and b != b))


def _flat(value: Any, rows: int) -> Any:
    return value.reshape(rows, -1) if isinstance(value, Tensor) else value


def checked_model(algorithm: Algorithm[Any], state: State, worker: int) -> Sent:
    """What a method sends to a worker; refuses what cannot travel."""
    sent = algorithm.model(state, worker)
    for part in sent.values() if isinstance(sent, Mapping) else (sent,):
        if not isinstance(part, Tensor) or part.ndim == 0:
            raise BadWork(
                f"{type(algorithm).__name__}.model gave {type(part).__name__} for worker {worker}; expected a tensor of "
                'one axis or more, or several by name, such as {"x": s.x, "k": torch.tensor([3])}.'
            )
    return sent


def is_own(algorithm: Algorithm[Any]) -> bool:
    """Whether a method is a user's own, and not one of the package's."""
    return type(algorithm).__module__.partition(".")[0] != __name__.partition(".")[0]


def _named(value: Any, single: str) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {single: value}


def _made_small(message: Message, left_out: Mapping[str, Any], compress: str | float) -> tuple[Message, dict[str, Tensor]]:
    """A message in fewer bytes, and what it leaves out, which is in the next; what is small already stays as it is."""
    small: dict[str, Tensor | Packed] = {}
    rest: dict[str, Tensor] = {}
    for name, value in _named(message, "").items():
        if isinstance(value, Packed):
            small[name] = value
            continue
        whole = value + left_out[name] if name in left_out else value
        small[name] = packed = pack(whole, compress)
        rest[name] = whole - packed.unpack()
    return (small if isinstance(message, Mapping) else small[""]), rest


def parts_of(message: Message) -> tuple[Tensor, dict[str, Tensor]]:
    """What the receiver sees of a message: the tensor, or the first of several and all of them by name."""
    if not isinstance(message, Mapping):
        return unpacked(message), {}
    parts = {name: unpacked(part) for name, part in message.items()}
    return next(iter(parts.values())), parts

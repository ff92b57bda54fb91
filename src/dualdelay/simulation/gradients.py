"""How simulated workers do their jobs: one at a time when they are due, or all that are in flight at once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..core import BatchedGradients, Message, Problem
from ..core.state import is_finite
from ..engine.half import Half, Kept, Task, is_replicas, parts_of

Key = tuple[int, int]  # a job in flight: worker and draw


class Computed(NamedTuple):
    """A job's gradient, its minibatch's loss, and the gradient's norm if that is known already; of replicas one each.

    Of a job that is more than a gradient: its message, its mean loss, and what the worker keeps.
    """

    value: Any
    loss: Any
    norm: float | Tensor | None = None
    keep: Kept | None = None


class Gradients:
    """One at a time: nothing is computed before its arrival is due.

    With a ``half`` jobs are computed whole; without one, each is the gradient at its model.
    """

    begins_early = False  # whether a job may be computed before it is due
    looks_ahead = 0  # jobs that are due next and may be computed together with the first of them

    def __init__(self, problem: Problem, half: Half | None = None) -> None:
        self._problem, self._half = problem, half

    def compute(self, problem: Problem, task: Task) -> Computed:
        """Do a job."""
        (worker, draw, _), model = task.job, cast("Tensor", task.model)
        if self._half is None:
            return Computed(*problem.gradient(model, worker, draw))
        done = self._half.run(problem, task)
        return Computed(done.message, done.loss, None, done.keep)

    def begin(self, task: Task) -> None:
        """A job was given to a worker, and what it depends on is known."""

    def take(self, task: Task) -> Computed:
        """What a job that is due comes to; it may be asked for again."""
        return self.compute(self._problem, task)

    def prepare(self, tasks: Iterable[Task]) -> None:
        """These jobs are due next, one of which is not known."""

    def ended(self, worker: int, draws: Iterable[int]) -> None:
        """Jobs that arrived or will not, or that depend on something else now."""

    def is_known(self, worker: int, draw: int) -> bool:
        """Whether a job can be taken without computing."""
        return True

    def close(self) -> None:
        """No more jobs are asked for."""

    def save(self) -> list[list[Any]]:
        """What was computed and is not due yet."""
        return []

    def load(self, saved: Sequence[Sequence[Any]], tasks: Iterable[Task]) -> None:
        """Continue with these jobs in flight, some of them with what was saved."""
        for task in tasks:
            self.begin(task)


class GradientsInTurns(Gradients):
    """A few at a time, one after the other: those of the jobs that are due next, once the first of them is.

    Gradients that follow one another find their code in the processor's caches, and so do the steps of the server between
    them. Each is computed by itself, so the bits are those of one at a time.
    """

    looks_ahead = 16  # jobs

    def __init__(self, problem: Problem, half: Half | None = None) -> None:
        super().__init__(problem, half)
        self._computed: dict[Key, Computed] = {}

    def take(self, task: Task) -> Computed:
        known = self._computed.get(task.key)
        if known is None:
            known = self._computed[task.key] = self.compute(self._problem, task)
        return known

    def prepare(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if task.key not in self._computed:
                try:
                    self._computed[task.key] = self.compute(self._problem, task)
                except Exception:  # it will be raised when the job is due, if it ever is
                    return

    def ended(self, worker: int, draws: Iterable[int]) -> None:
        for draw in draws:
            self._computed.pop((worker, draw), None)

    def is_known(self, worker: int, draw: int) -> bool:
        return (worker, draw) in self._computed

    def load(self, saved: Sequence[Sequence[Any]], tasks: Iterable[Task]) -> None:
        self._computed.clear()


class GradientsInBatches(Gradients):
    """All at once: when a job is not known, all jobs in flight of all fleets of the batcher are computed.

    No scheme needs fewer calls. ``problems`` are the numbers of this fleet's problems: one, or one for each replica.
    """

    begins_early = True

    def __init__(self, batcher: Batcher, problems: Sequence[int], half: Half | None = None) -> None:
        self.problems, self.half, self._batcher = problems, half, batcher
        self.wanted: dict[Key, Task] = {}  # jobs that are not known
        self.computed: dict[Key, Computed] = {}
        batcher.members.append(self)

    def begin(self, task: Task) -> None:
        self.wanted[task.key] = task

    def take(self, task: Task) -> Computed:
        if task.key not in self.computed:
            self.wanted[task.key] = task
            self._batcher.compute()
        return self.computed[task.key]

    def ended(self, worker: int, draws: Iterable[int]) -> None:
        for draw in draws:
            self.wanted.pop((worker, draw), None)
            self.computed.pop((worker, draw), None)

    def is_known(self, worker: int, draw: int) -> bool:
        return (worker, draw) in self.computed

    def close(self) -> None:
        self._batcher.members.remove(self)

    def save(self) -> list[list[Any]]:
        return [[*key, *computed] for key, computed in sorted(self.computed.items(), key=lambda item: item[0])]

    def load(self, saved: Sequence[Sequence[Any]], tasks: Iterable[Task]) -> None:
        self.wanted.clear()
        self.computed.clear()
        super().load(saved, tasks)
        for worker, draw, *computed in saved:
            self.computed[worker, draw] = Computed(*computed)
            self.wanted.pop((worker, draw), None)


class Batcher:
    """Takes the gradients that one or more fleets want in as few calls as possible."""

    def __init__(self, gradients: BatchedGradients) -> None:
        self.members: list[GradientsInBatches] = []
        self._gradients = gradients

    def compute(self) -> None:
        """Do every job that is wanted, in an order that depends on nothing but the jobs."""
        wanted = [
            (member, task) for member in self.members for _, task in sorted(member.wanted.items(), key=lambda i: i[0])
        ]
        if not wanted:
            return
        self._take_gradients([(member, task) for member, task in wanted if member.half is None])
        for member in self.members:
            if member.half is not None and member.wanted:
                self._do_jobs(member, member.half)
            member.wanted.clear()

    def _take_gradients(self, jobs: Sequence[tuple[GradientsInBatches, Task]]) -> None:
        start = size = 0
        for end, (member, _) in enumerate(jobs):
            if size + len(member.problems) > self._gradients.most and size > 0:
                self._call(jobs[start:end])
                start, size = end, 0
            size += len(member.problems)
        if jobs:
            self._call(jobs[start:])

    def _do_jobs(self, member: GradientsInBatches, half: Half) -> None:
        """Do the jobs of one fleet: those of equal length together, a step of all of them in one call."""
        groups: dict[Hashable, list[Task]] = {}
        for _, task in sorted(member.wanted.items(), key=lambda item: item[0]):
            groups.setdefault((task.steps, _form(task.model), _form(task.kept)), []).append(task)
        for tasks in groups.values():
            size = max(1, self._gradients.most // len(member.problems))
            for start in range(0, len(tasks), size):
                self._do_together(member, half, tasks[start : start + size])

    def _do_together(self, member: GradientsInBatches, half: Half, tasks: Sequence[Task]) -> None:
        done = half.run_together(self._gradients, member.problems, tasks)
        for task, answer in zip(tasks, done, strict=True):
            norm = _norm(answer.message) if is_replicas(task.model) else None
            member.computed[task.key] = Computed(answer.message, answer.loss, norm, answer.keep)

    def _call(self, jobs: Sequence[tuple[GradientsInBatches, Task]]) -> None:
        which = [k for member, _ in jobs for k in member.problems]
        workers = [task.job.worker for member, task in jobs for _ in member.problems]
        draws = [task.job.draw for member, task in jobs for _ in member.problems]
        models: list[Any] = [task.model for _, task in jobs]
        gradients, losses = self._gradients(models, which, workers, draws)
        norms = torch.linalg.vector_norm(gradients, dim=1)
        signs = torch.stack([losses.to(norms.dtype), norms])  # (2, m)
        numbers: list[list[float]] | None = None  # fetched only for runs that are alone: replicas wait for nothing
        row = 0
        for (member, task), x in zip(jobs, models, strict=True):
            gradient = gradients[row] if x.ndim == 1 else gradients[row : row + len(x)]
            gradient = gradient.clone().to(x.dtype)  # the next call writes over it
            if x.ndim == 1:
                numbers = signs.tolist() if numbers is None else numbers
                loss, norm = numbers[0][row], numbers[1][row]
                if not math.isfinite(norm) and is_finite(gradient):
                    norm = math.sqrt(torch.finfo(x.dtype).max)  # only its square was too large
                member.computed[task.key] = Computed(gradient, loss, norm)
            else:
                member.computed[task.key] = Computed(gradient, signs[0, row : row + len(x)], signs[1, row : row + len(x)])
            row += len(member.problems)


def _norm(message: Message) -> Tensor:
    """The norms of replicas' messages, which are not finite where one of their tensors is not."""
    norms = [
        torch.linalg.vector_norm(part, dim=-1) for part in (parts_of(message)[1] or {"": parts_of(message)[0]}).values()
    ]
    return torch.stack(norms).sum(0)


def _form(value: object) -> Hashable:
    """What has to be the same for values to be stacked: names, shapes, and whatever is no tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _form(part)) for name, part in value.items())
    assert isinstance(value, Hashable)
    return value

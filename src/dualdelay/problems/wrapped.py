"""Problems made from another problem: local steps, clipped gradients and exact gradients, for every method alike."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core import Problem
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.errors import BadInput, plain_number, require_one_of, require_positive, require_whole, shown
from ..core.local_steps import InnerOptimizer
from .data import digest
from .minibatches import portion
from .network import Network

_MOST_STEPS = 100_000  # local steps of one job


Gradients = Callable[[Tensor, Sequence[int]], tuple[Tensor, Any]]  # of a problem, at models and for draws, and the losses


def _same(name: str) -> Any:
    """What a method or property is for the other problem."""
    return property(attrgetter(f"problem.{name}"))


class Wrapped(Problem):
    """A problem that differs from another one in its jobs alone, by a few ``options``."""

    kind: ClassVar[str]

    def __init__(self, problem: Problem, **options: float | str) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(f"problem is {shown(problem)}; expected a problem, on the shell with brackets: digits[].")
        self.problem, self._options = problem, options

    @property
    def settings(self) -> dict[str, Any]:
        """What builds this problem again."""
        return {"problem": self.problem, **self._options}

    def rewrapped(self, problem: Problem) -> Self:
        """The same made from another problem."""
        return type(self)(problem, **self._options)

    def fingerprint(self) -> str:
        return str(digest(self.kind, *self._options.values(), self.problem.fingerprint()).hexdigest())

    @property
    def batch_key(self) -> Hashable:
        inner = self.problem.batch_key
        return inner if inner is OneAtATime else (self.kind, *self._options.values(), inner)

    def few_samples(self) -> int | None:
        few = self.problem.few_samples()
        return None if few is None else few * self.batches(0) // self.problem.batches(0)

    def costs(self) -> tuple[float, float] | None:
        costs = self.problem.costs()
        return None if costs is None else (costs[0] * self.batches(0) / self.problem.batches(0), costs[1])

    def extended(self, workers: int) -> Self:
        return self.rewrapped(self.problem.extended(workers))

    def reseeded(self, seed: int) -> Self:
        return self.rewrapped(self.problem.reseeded(seed))

    def twin(self) -> Self:
        return self.rewrapped(self.problem.twin())

    def on(self, device: str, precision: str = "float32") -> Self:
        return self.rewrapped(self.problem.on(device, precision))

    # everything else is what it is for the other problem
    stateful = _same("stateful")
    workers, seed, own_seed, unseeded = _same("workers"), _same("seed"), _same("own_seed"), _same("unseeded")
    samples, classes, batches, epoch = _same("samples"), _same("classes"), _same("batches"), _same("epoch")
    data_fingerprint, groups = _same("data_fingerprint"), _same("groups")
    needs_sample_counts, set_mean_samples = _same("needs_sample_counts"), _same("set_mean_samples")
    evaluate, measures, measure = _same("evaluate"), _same("measures"), _same("measure")
    assess, combine = _same("assess"), _same("combine")
    metric_names, joint_metric_names = _same("metric_names"), _same("joint_metric_names")
    accuracy_at_workers = _same("accuracy_at_workers")
    start, model, state_dict, flat = _same("start"), _same("model"), _same("state_dict"), _same("flat")
    layout, fixed, parallel, workplace = _same("layout"), _same("fixed"), _same("parallel"), _same("workplace")


class Reworked(Wrapped):
    """A problem whose jobs make something of the other's gradients."""

    @abstractmethod
    def job(self, x: Tensor, draws: Sequence[int], gradients: Gradients) -> tuple[Tensor, Any]:
        """What jobs report, and their losses: one job at x (d), or many at (m, d), by the other problem's gradients."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return self.job(x, [draw], lambda y, draws: self.problem.gradient(y, worker, draws[0]))

    def stateful_gradient(
        self, memory: Mapping[str, Any] | None, x: Tensor, worker: int, draw: int
    ) -> tuple[Tensor, float, dict[str, Any] | None]:
        state: Any = memory

        def gradients(y: Tensor, draws: Sequence[int]) -> tuple[Tensor, Any]:
            nonlocal state
            value, loss, state = self.problem.stateful_gradient(state, y, worker, draws[0])
            return value, loss

        return *self.job(x, [draw], gradients), state

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        if self.batch_key is OneAtATime:
            return OneAtATime(problems)
        return _ManyJobs(self, self.problem.batched([p.problem for p in problems if isinstance(p, Reworked)]))


class _ManyJobs:
    """Many jobs of a problem that is made from another, by the other's gradients of many jobs."""

    def __init__(self, wrapped: Reworked, inner: BatchedGradients) -> None:
        self.most, self._wrapped, self._inner = inner.most, wrapped, inner
        self.stateful = self._with_memory if wrapped.stateful else None

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        models = torch.cat([piece if piece.ndim == 2 else piece[None] for piece in x])
        return self._wrapped.job(models, draws, lambda y, step_draws: self._take(y, which, workers, step_draws))

    def _take(self, y: Tensor, which: Sequence[int], workers: Sequence[int], draws: Sequence[int]) -> tuple[Tensor, Tensor]:
        values, losses = self._inner([y], which, workers, draws)
        return values, losses.double()

    def _with_memory(
        self, memory: Any, x: Tensor, which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor, Any]:
        if isinstance(self._wrapped, LocalSteps):
            return self._wrapped.job_with_memory(memory, x, draws, lambda y, ds: self._take(y, which, workers, ds))
        state = memory

        def gradients(y: Tensor, step_draws: Sequence[int]) -> tuple[Tensor, Any]:
            nonlocal state
            inner: Any = self._inner
            values, losses, state = inner.stateful(state, y, which, workers, step_draws)
            return values, losses.double()

        return *self._wrapped.job(x, draws, gradients), state


class LocalSteps(Reworked):
    """Another problem, each of whose jobs takes ``k`` local steps from the model x to y and reports (x - y) / lr.

    With plain SGD that value is the sum of the k gradients met on the way; for k = 1 it is the plain gradient. A job takes
    k times as long.

    problem: the problem whose gradients the steps take.
    k: local steps per job.
    lr: their step size.
    optimizer: their optimiser, a name from torch.optim with its settings, such as "SGD[momentum=0.9]" or "AdamW".
    state: whether the optimiser's state begins anew in each job, "reset", or is kept at the worker, "keep".
    """

    kind = "local steps"

    def __init__(self, problem: Problem, k: int, lr: float, optimizer: str = "SGD", state: str = "reset") -> None:
        k, lr = plain_number(k), plain_number(lr)
        require_whole("k", k, 1, _MOST_STEPS)
        require_positive("lr", lr)
        require_one_of("state", state, ("reset", "keep"))
        self.k, self.lr, self._inner = k, lr, InnerOptimizer(optimizer, lr)
        self._keeps = state == "keep" and not self._inner.is_plain
        more = {"optimizer": self._inner.text, "state": state}
        defaults = {"optimizer": "SGD", "state": "reset"}
        super().__init__(problem, k=k, lr=lr, **{name: more[name] for name in more if more[name] != defaults[name]})
        if problem.stateful and self._keeps:
            raise BadInput("the problem keeps an inner optimiser's state at the workers already; expected it in one place.")

    @property
    def stateful(self) -> bool:
        """Whether its optimiser's state, or that of the other problem, is kept at the workers."""
        return self._keeps or self.problem.stateful

    def job(self, x: Tensor, draws: Sequence[int], gradients: Gradients) -> tuple[Tensor, Any]:
        value, loss, _ = self.job_with_memory(None, x, draws, gradients)
        return value, loss

    def job_with_memory(
        self, memory: Mapping[str, Any] | None, x: Tensor, draws: Sequence[int], gradients: Gradients
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """As ``job``, with the optimiser's state before and after."""
        local, losses = self._inner.begin(x, memory), 0.0
        for step in range(self.k):
            gradient, loss = gradients(local.y, [draw * self.k + step for draw in draws])
            local.step(gradient)
            losses = losses + loss
        return local.pseudo_gradient(), losses / self.k, local.memory()

    def stateful_gradient(
        self, memory: Mapping[str, Any] | None, x: Tensor, worker: int, draw: int
    ) -> tuple[Tensor, float, dict[str, Any] | None]:
        if not self._keeps:
            return super().stateful_gradient(memory, x, worker, draw)
        return self.job_with_memory(memory, x, [draw], lambda y, draws: self.problem.gradient(y, worker, draws[0]))

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, one row for each step."""
        problem: Any = self.problem
        return torch.stack([problem.indices(worker, draw * self.k + step) for step in range(self.k)])

    def batches(self, worker: int) -> int:
        return self.k * self.problem.batches(worker)


class Clipped(Reworked):
    """Another problem, each of whose jobs reports a gradient of norm at most ``norm``, shortened if it is longer.

    Each worker clips its own gradient before it is sent. To clip what the server steps along, use a hook of torch's
    optimiser (docs/tutorial/own_model.md).

    problem: the problem whose gradients are taken.
    norm: the largest Euclidean norm that a gradient keeps.
    """

    kind = "clipped"

    def __init__(self, problem: Problem, norm: float) -> None:
        require_positive("norm", norm := plain_number(norm))
        self.norm = float(norm)
        super().__init__(problem, norm=self.norm)

    def job(self, x: Tensor, draws: Sequence[int], gradients: Gradients) -> tuple[Tensor, Any]:
        gradient, loss = gradients(x, draws)
        norms = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        return torch.where(norms > self.norm, gradient * (self.norm / norms), gradient), loss  # what is not finite stays so


class FullGradients(Wrapped):
    """Another problem, each of whose jobs is the exact gradient of F_i, over all of the worker's data.

    A job takes as long as the minibatches that make up the data.

    problem: the problem whose gradients are taken.
    """

    kind, batch_key = "full gradients", OneAtATime

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if type(problem).measure is Problem.measure:
            name = type(problem).__name__
            raise BadInput(f"{name} gives no exact local gradients; use a problem that does, or give it 'measure'.")
        self._source = _with_full_gradient(problem)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        measured = self._source.measure(x, worker)
        return measured["gradient"].to(x.dtype), measured["loss"]

    def gradient_part(self, x: Tensor, worker: int, draw: int, part: int, parts: int) -> tuple[Tensor, float]:
        if not self.splits:
            return super().gradient_part(x, worker, draw, part, parts)  # which refuses
        size = self._source.samples(worker) or 0
        mine = portion(size, part, parts)
        if mine.start == mine.stop:
            return torch.zeros_like(x), 0.0
        measured, share = self._source.measure(x, worker, (mine.start, mine.stop)), (mine.stop - mine.start) / size
        return (measured["gradient"] * share).to(x.dtype), measured["loss"] * share

    @property
    def splits(self) -> bool:
        """Whether the other problem can measure some of a worker's samples."""
        source = self._source
        while isinstance(source, Wrapped):
            source = source.problem
        return isinstance(source, Network)

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        return OneAtATime(problems)

    def batches(self, worker: int) -> int:
        return self.problem.epoch(worker)

    def few_samples(self) -> int | None:
        return None  # all of them take no longer than a gradient


def _with_full_gradient(problem: Problem) -> Problem:
    """The problem with the full gradient in what it measures, whether or not evaluations compute it."""
    if isinstance(problem, Wrapped):
        return problem.rewrapped(_with_full_gradient(problem.problem))
    source = copy.copy(problem)
    if isinstance(source, Network):
        source.full_gradient = True
    return source


Part = tuple[Tensor, float]  # of a gradient and of its loss


def add_parts(parts: Iterable[Part]) -> Part:
    """A gradient and its loss from their parts, added one by one in their order: so the sum has the same bits anywhere."""
    return functools.reduce(lambda total, part: (total[0] + part[0], total[1] + part[1]), parts)


class InParts(Wrapped):
    """Another problem, each of whose gradients is the sum of several parts: what a worker of so many ranks computes.

    problem: the problem whose gradients are split.
    parts: how many parts.
    """

    kind, batch_key = "in parts", OneAtATime

    def __init__(self, problem: Problem, parts: int) -> None:
        super().__init__(problem, parts=parts)
        self.parts = parts

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return add_parts(self.problem.gradient_part(x, worker, draw, part, self.parts) for part in range(self.parts))

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        return OneAtATime(problems)


def in_parts(problem: Problem, parts: int) -> Problem:
    """The problem as workers of so many ranks compute it; what is made of its gradients is made of the sum of the parts."""
    if parts == 1:
        return problem
    return with_gradients(problem, lambda source: _split(source, parts))


def with_gradients(problem: Problem, change: Callable[[Problem], Problem]) -> Problem:
    """The problem made from another one where its gradients come from: inside of local steps and clipping."""
    if problem is source_of(problem):
        return change(problem)
    assert isinstance(problem, Wrapped)
    return problem.rewrapped(with_gradients(problem.problem, change))


def source_of(problem: Problem) -> Problem:
    """Where a problem's gradients come from, which local steps and clipping make something of."""
    while isinstance(problem, Reworked) and not (problem.splits or problem.collective):
        problem = problem.problem
    return problem


def _split(problem: Problem, parts: int) -> Problem:
    if problem.stateful:
        raise BadInput(
            f"{type(problem).__name__} keeps something from gradient to gradient, which several ranks cannot; use ranks=1."
        )
    if problem.collective:
        return problem
    if not problem.splits:
        problem.gradient_part(problem.start(0), 0, 0, 0, parts)  # which refuses
    if isinstance(problem, Network):
        problem.require_parts(parts)
    return InParts(problem, parts)


def exact(problem: Problem) -> Problem:
    """The problem with exact local gradients; each of several local steps is exact, and what is clipped is, too."""
    if isinstance(problem, FullGradients):
        return problem
    return problem.rewrapped(exact(problem.problem)) if isinstance(problem, Wrapped) else FullGradients(problem)

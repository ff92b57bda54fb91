"""Problems made from another problem: local steps, clipped gradients and exact gradients, for every method alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core import Problem, Samples
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.errors import BadInput, plain_number, require_positive, require_whole, shown
from .data import digest
from .network import Network

_MOST_STEPS = 100_000  # local steps of one job


class Wrapped(Problem):
    """A problem that differs from another one in its jobs alone, by a few ``options``."""

    kind: ClassVar[str]
    together: ClassVar[Callable[..., BatchedGradients] | None] = None
    """Makes what computes many jobs in one call, of what does so for the other problem and the options; None: nothing."""

    def __init__(self, problem: Problem, **options: float) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(
                f"problem is {shown(problem)}; expected a problem, on the shell with brackets, such as digits[]."
            )
        self.problem, self._options = problem, options
        self.workers, self.seed, self.own_seed = problem.workers, problem.seed, problem.own_seed
        self.measures, self.metric_names = problem.measures, problem.metric_names
        self.accuracy_at_workers = problem.accuracy_at_workers

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
        alone = inner is OneAtATime or type(self).together is None
        return OneAtATime if alone else (self.kind, *self._options.values(), inner)

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        together = type(self).together
        if together is None or self.batch_key is OneAtATime:
            return OneAtATime(problems)
        inner = [problem.problem for problem in problems if isinstance(problem, Wrapped)]
        return together(self.problem.batched(inner), **self._options)

    # everything else is what it is for the other problem

    def batches(self, worker: int) -> int:
        return self.problem.batches(worker)

    def epoch(self, worker: int) -> int:
        return self.problem.epoch(worker)

    def start(self, seed: int) -> Tensor:
        return self.problem.start(seed)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.problem.evaluate(x)

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        return self.problem.measure(x, worker) if samples is None else self.problem.measure(x, worker, samples)

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        return self.problem.assess(x, samples)

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        return self.problem.combine(x, parts)

    def samples(self, worker: int) -> int | None:
        return self.problem.samples(worker)

    @property
    def needs_sample_counts(self) -> bool:
        return self.problem.needs_sample_counts

    def set_mean_samples(self, unit: float) -> None:
        self.problem.set_mean_samples(unit)

    def few_samples(self) -> int | None:
        few = self.problem.few_samples()
        return None if few is None else few * self.batches(0) // self.problem.batches(0)

    def costs(self) -> tuple[float, float] | None:
        costs = self.problem.costs()
        return None if costs is None else (costs[0] * self.batches(0) / self.problem.batches(0), costs[1])

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.problem.flat(state_dict)

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return self.problem.layout()

    def fixed(self) -> dict[str, Tensor]:
        return self.problem.fixed()

    @property
    def unseeded(self) -> str:
        return self.problem.unseeded

    @property
    def parallel(self) -> bool:
        return self.problem.parallel

    @property
    def workplace(self) -> object:
        return self.problem.workplace

    def extended(self, workers: int) -> Self:
        return self.rewrapped(self.problem.extended(workers))

    def reseeded(self, seed: int) -> Self:
        return self.rewrapped(self.problem.reseeded(seed))

    def twin(self) -> Self:
        return self.rewrapped(self.problem.twin())

    def on(self, device: str, precision: str = "float32") -> Self:
        return self.rewrapped(self.problem.on(device, precision))


class _ManySteps:
    """The local steps of many jobs, each step of all of them in one call."""

    def __init__(self, inner: BatchedGradients, k: int, lr: float) -> None:
        self.most, self._inner, self._k, self._lr = inner.most, inner, k, lr

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        y = torch.cat([piece if piece.ndim == 2 else piece[None] for piece in x])
        total, losses = torch.zeros_like(y), torch.zeros(len(y), dtype=torch.float64, device=y.device)
        for step in range(self._k):
            gradients, loss = self._inner([y], which, workers, [draw * self._k + step for draw in draws])
            y = y - self._lr * gradients
            total += gradients
            losses += loss
        return total, losses / self._k


class LocalSteps(Wrapped):
    """Another problem, each of whose jobs takes ``k`` SGD steps from the model x to y and reports (x - y) / lr.

    That value is the sum of the k gradients met on the way; for k = 1 it is the plain gradient. A job takes k times as
    long.

    problem: the problem whose gradients the steps take.
    k: local steps per job.
    lr: their step size.
    """

    kind, together = "local steps", _ManySteps

    def __init__(self, problem: Problem, k: int, lr: float) -> None:
        k, lr = plain_number(k), plain_number(lr)
        super().__init__(problem, k=k, lr=lr)
        require_whole("k", k, 1)
        require_whole("k", k, 1, _MOST_STEPS)
        require_positive("lr", lr)
        self.k, self.lr = k, lr

    def _draws(self, draw: int) -> range:
        """The inner problem's minibatches that a job takes."""
        return range(draw * self.k, (draw + 1) * self.k)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        total, losses = torch.zeros_like(x), 0.0
        for inner in self._draws(draw):
            gradient, loss = self.problem.gradient(x, worker, inner)
            x = x - self.lr * gradient
            total += gradient
            losses += loss
        return total, losses / self.k

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, one row for each step."""
        problem: Any = self.problem
        return torch.stack([problem.indices(worker, inner) for inner in self._draws(draw)])

    def batches(self, worker: int) -> int:
        return self.k * self.problem.batches(worker)


class _ManyClipped:
    """The clipped gradients of many jobs."""

    def __init__(self, inner: BatchedGradients, norm: float) -> None:
        self.most, self._inner, self._norm = inner.most, inner, norm

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        gradients, losses = self._inner(x, which, workers, draws)
        return _shortened(gradients, self._norm), losses


def _shortened(gradients: Tensor, norm: float) -> Tensor:
    """Gradients (d) or (m, d), each of norm ``norm`` at most; what is not finite stays so."""
    norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
    return torch.where(norms > norm, gradients * (norm / norms), gradients)


class Clipped(Wrapped):
    """Another problem, each of whose jobs reports a gradient of norm at most ``norm``, shortened if it is longer.

    Each worker clips its own gradient before it is sent. To clip what the server steps along, use a hook of torch's
    optimiser (docs/own_model.md).

    problem: the problem whose gradients are taken.
    norm: the largest Euclidean norm that a gradient keeps.
    """

    kind, together = "clipped", _ManyClipped

    def __init__(self, problem: Problem, norm: float) -> None:
        require_positive("norm", norm := plain_number(norm))
        self.norm = float(norm)
        super().__init__(problem, norm=self.norm)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = self.problem.gradient(x, worker, draw)
        return _shortened(gradient, self.norm), loss


class FullGradients(Wrapped):
    """Another problem, each of whose jobs is the exact gradient of F_i, over all of the worker's data.

    A job takes as long as the minibatches that make up the data.

    problem: the problem whose gradients are taken.
    """

    kind = "full gradients"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if type(problem).measure is Problem.measure:
            raise BadInput(
                f"{type(problem).__name__} gives no exact local gradients; use a problem that does (quadratic, logistic, a "
                "network), or give it 'measure'."
            )
        self._source = source = copy.copy(problem)
        if isinstance(source, Network):
            source.full_gradient = True  # for jobs, whether or not evaluations compute it

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        measured = self._source.measure(x, worker)
        return measured["gradient"].to(x.dtype), measured["loss"]

    def batches(self, worker: int) -> int:
        return self.problem.epoch(worker)

    def few_samples(self) -> int | None:
        return None  # all of them take no longer than a gradient


def exact(problem: Problem) -> Problem:
    """The problem with exact local gradients; where several local steps are taken, each step's is exact."""
    if isinstance(problem, LocalSteps):
        return problem.rewrapped(exact(problem.problem))
    return problem if isinstance(problem, FullGradients) else FullGradients(problem)

"""How simulated workers come by their gradients: one at a time when they are due, or all that are in flight at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import BatchedGradients, Problem
from ..core.state import is_finite

Key = tuple[int, int]  # a job in flight: worker and draw


class Computed(NamedTuple):
    """A job's gradient, its minibatch's loss, and the gradient's norm if that is known already; of replicas one each."""

    gradient: Tensor
    loss: float | Tensor
    norm: float | Tensor | None = None


class Gradients:
    """One at a time: nothing is computed before its arrival is due."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def begin(self, worker: int, draw: int, x: Tensor) -> None:
        """A job was given to a worker."""

    def take(self, worker: int, draw: int, x: Tensor) -> Computed:
        """The gradient of a job that is due; it may be asked for again."""
        return Computed(*self._problem.gradient(x, worker, draw))

    def ended(self, worker: int, draws: Iterable[int]) -> None:
        """Jobs that arrived or will not."""

    def is_known(self, worker: int, draw: int) -> bool:
        """Whether a job's gradient can be taken without computing."""
        return True

    def close(self) -> None:
        """No more gradients are asked for."""

    def save(self) -> list[list[Any]]:
        """The gradients that were computed and are not due yet."""
        return []

    def load(self, saved: Sequence[Sequence[Any]], in_flight: Mapping[Key, Tensor]) -> None:
        """Continue with these jobs in flight, some of them with gradients that were saved."""
        for (worker, draw), x in in_flight.items():
            self.begin(worker, draw, x)


class GradientsInBatches(Gradients):
    """All at once: when a gradient is not known, those of all jobs in flight of all fleets of the batcher are computed.

    No scheme needs fewer calls. ``problems`` are the numbers of this fleet's problems: one, or one for each replica.
    """

    def __init__(self, batcher: Batcher, problems: Sequence[int]) -> None:
        self.problems, self._batcher = problems, batcher
        self.wanted: dict[Key, Tensor] = {}  # the models of jobs whose gradient is not known
        self.computed: dict[Key, Computed] = {}
        batcher.members.append(self)

    def begin(self, worker: int, draw: int, x: Tensor) -> None:
        self.wanted[worker, draw] = x

    def take(self, worker: int, draw: int, x: Tensor) -> Computed:
        if (worker, draw) not in self.computed:
            self._batcher.compute()
        return self.computed[worker, draw]

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

    def load(self, saved: Sequence[Sequence[Any]], in_flight: Mapping[Key, Tensor]) -> None:
        self.wanted.clear()
        self.computed.clear()
        super().load(saved, in_flight)
        for worker, draw, gradient, loss, norm in saved:
            self.computed[worker, draw] = Computed(gradient, loss, norm)
            del self.wanted[worker, draw]


class Batcher:
    """Takes the gradients that one or more fleets want in as few calls as possible."""

    def __init__(self, gradients: BatchedGradients) -> None:
        self.members: list[GradientsInBatches] = []
        self._gradients = gradients

    def compute(self) -> None:
        """Take every gradient that is wanted, in an order that depends on nothing but the jobs."""
        if not any(member.wanted for member in self.members):
            return
        jobs = [(member, key, x) for member in self.members for key, x in sorted(member.wanted.items(), key=lambda i: i[0])]
        start = size = 0
        for end, (member, _, _) in enumerate(jobs):
            if size + len(member.problems) > self._gradients.most and size > 0:
                self._call(jobs[start:end])
                start, size = end, 0
            size += len(member.problems)
        self._call(jobs[start:])
        for member in self.members:
            member.wanted.clear()

    def _call(self, jobs: Sequence[tuple[GradientsInBatches, Key, Tensor]]) -> None:
        which = [k for member, _, _ in jobs for k in member.problems]
        workers = [worker for member, (worker, _), _ in jobs for _ in member.problems]
        draws = [draw for member, (_, draw), _ in jobs for _ in member.problems]
        gradients, losses = self._gradients([x for _, _, x in jobs], which, workers, draws)
        norms = torch.linalg.vector_norm(gradients, dim=1)
        signs = torch.stack([losses.to(norms.dtype), norms])  # (2, m)
        numbers: list[list[float]] | None = None  # fetched only for runs that are alone: replicas wait for nothing
        row = 0
        for member, key, x in jobs:
            gradient = gradients[row] if x.ndim == 1 else gradients[row : row + len(x)]
            gradient = gradient.clone().to(x.dtype)  # the next call writes over it
            if x.ndim == 1:
                numbers = signs.tolist() if numbers is None else numbers
                loss, norm = numbers[0][row], numbers[1][row]
                if not math.isfinite(norm) and is_finite(gradient):
                    norm = math.sqrt(torch.finfo(x.dtype).max)  # only its square was too large
                member.computed[key] = Computed(gradient, loss, norm)
            else:
                member.computed[key] = Computed(gradient, signs[0, row : row + len(x)], signs[1, row : row + len(x)])
            row += len(member.problems)

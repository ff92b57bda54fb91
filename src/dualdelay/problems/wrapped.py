"""What problems made from another problem share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core import Problem, Samples
from ..core.errors import BadInput, shown


class Wrapped(Problem):
    """A problem that is another one but for its jobs."""

    def __init__(self, problem: Problem) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(
                f"problem is {shown(problem)}; expected a problem, on the shell with brackets, such as digits[]."
            )
        self.problem = problem
        self.workers, self.seed, self.own_seed = problem.workers, problem.seed, problem.own_seed
        self.measures, self.metric_names, self.accuracy_at_workers = (
            problem.measures,
            problem.metric_names,
            problem.accuracy_at_workers,
        )

    @abstractmethod
    def rewrapped(self, problem: Problem) -> Wrapped:
        """The same made from another problem."""

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

    def samples(self, worker: int) -> int | None:
        return self.problem.samples(worker)

    @property
    def needs_sample_counts(self) -> bool:
        return self.problem.needs_sample_counts

    def set_mean_samples(self, unit: float) -> None:
        self.problem.set_mean_samples(unit)

    def extended(self, workers: int) -> Wrapped:
        return self.rewrapped(self.problem.extended(workers))

    def few_samples(self) -> int | None:
        few = self.problem.few_samples()
        return None if few is None else few * self.batches(0) // self.problem.batches(0)

    def costs(self) -> tuple[float, float] | None:
        costs = self.problem.costs()
        return None if costs is None else (costs[0] * self.batches(0) / self.problem.batches(0), costs[1])

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return self.problem.layout()

    def fixed(self) -> dict[str, Tensor]:
        return self.problem.fixed()

    @property
    def unseeded(self) -> str:
        return self.problem.unseeded

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        return self.problem.combine(x, parts)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.problem.flat(state_dict)

    def reseeded(self, seed: int) -> Wrapped:
        return self.rewrapped(self.problem.reseeded(seed))

    @property
    def parallel(self) -> bool:
        return self.problem.parallel

    @property
    def workplace(self) -> object:
        return self.problem.workplace

    def twin(self) -> Wrapped:
        return self.rewrapped(self.problem.twin())

    def on(self, device: str, precision: str = "float32") -> Wrapped:
        return self.rewrapped(self.problem.on(device, precision))

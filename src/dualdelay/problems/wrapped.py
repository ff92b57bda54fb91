"""What problems made from another problem share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core import Problem
from ..errors import BadInput


class Wrapped(Problem):
    """A problem that is another one but for its jobs."""

    def __init__(self, problem: Problem) -> None:
        if not isinstance(problem, Problem):
            raise BadInput(f"problem is {problem!r}; expected a problem, on the shell with brackets, such as digits[].")
        self.problem = problem
        self.workers, self.seed, self.measures = problem.workers, problem.seed, problem.measures

    @abstractmethod
    def around(self, problem: Problem) -> Wrapped:
        """The same made from another problem."""

    def batches(self, worker: int) -> int:
        return self.problem.batches(worker)

    def epoch(self, worker: int) -> int:
        return self.problem.epoch(worker)

    def start(self, seed: int) -> Tensor:
        return self.problem.start(seed)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.problem.evaluate(x)

    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return self.problem.measure(x, worker)

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        return self.problem.combine(x, parts)

    def model(self, x: Tensor) -> Any:
        return self.problem.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.problem.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.problem.flat(state_dict)

    def reseeded(self, seed: int) -> Wrapped:
        return self.around(self.problem.reseeded(seed))

    @property
    def parallel(self) -> bool:
        return self.problem.parallel

    def twin(self) -> Wrapped:
        return self.around(self.problem.twin())

    def on(self, device: str, precision: str = "float32") -> Wrapped:
        return self.around(self.problem.on(device, precision))

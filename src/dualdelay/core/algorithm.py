"""What a method is: a fold over arrivals.

Worker i has just delivered a gradient taken at an old model; what does the server do, and who computes what next? Nothing
in the answer depends on whether time is virtual, real or remembered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from .compression import Packed
from .draws import Draws
from .errors import BadInput, require_positive, take_plain_numbers
from .jobs import Arrival, Orders, send
from .state import State

S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Algorithm(ABC, Generic[S]):
    """A method: a frozen record of hyper-parameters with ``init`` and ``step``."""

    exact: ClassVar[bool] = False
    """Whether its jobs are exact local gradients, of all of a worker's data."""
    waits: ClassVar[bool] = True
    """Whether an update may have to wait for one worker, whoever else reports."""
    away: ClassVar[str] = "refused: the method has no rule for it"
    """What becomes of a worker that is not there, in a few words."""

    own_step: ClassVar[str] = ""
    """Why its step cannot be left to an optimiser; empty: it can."""

    lr: float
    """Step size (the paper's eta)."""

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        require_positive("lr", self.lr)

    @abstractmethod
    def init(self, x: Tensor, n: int, rng: Draws) -> S:
        """The state before anything has arrived; ``rng`` names the server's own draws."""

    def first(self, s: S) -> Orders:
        """What is to be done at the start: by default everybody computes at the first model."""
        return [send(worker) for worker in s.present]

    @abstractmethod
    def step(self, s: S, a: Arrival) -> Orders:
        """Absorb one arrival into the state and say what is to be done next."""

    def leave(self, s: S, worker: int, held: Tensor | None = None) -> Orders:
        """A worker is gone; ``held`` is what it kept. Methods that would wait for it refuse."""
        raise BadInput(
            f"worker {worker} left, and {type(self).__name__} has no rule for that: it would wait for worker {worker} "
            "or lose its job. Use a method that lets workers go (dude, vanilla), or keep the worker."
        )

    def join(self, s: S, worker: int) -> Orders:
        """A worker is there (again)."""
        raise BadInput(
            f"worker {worker} joined, and {type(self).__name__} has no rule for that. Use a method that lets workers "
            "come (dude, vanilla), or start with all of them."
        )

    def message(self, gradient: Tensor, held: Tensor | None) -> tuple[Tensor | Packed, Tensor | None]:
        """The worker's half, pure: what it sends, and what it keeps once the server has accepted that."""
        return gradient, None


@dataclass(frozen=True)
class WaitsForNobody(Algorithm[S]):
    """A method whose workers do not depend on one another: who leaves is missed by nobody, who joins gets the model."""

    waits: ClassVar[bool] = False
    away: ClassVar[str] = "its job is lost, and the others go on"

    def leave(self, s: S, worker: int, held: Tensor | None = None) -> Orders:
        s.gone(worker, held)
        return []

    def join(self, s: S, worker: int) -> Orders:
        s.back(worker)
        return [send(worker)]

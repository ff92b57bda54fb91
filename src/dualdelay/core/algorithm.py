"""What a method is: a fold over arrivals at the server, and what a worker does with a job.

Worker i has just delivered a gradient taken at an old model; what does the server do, and who computes what next? Nothing
in the answer depends on whether time is virtual, real or recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from .draws import Draws
from .errors import BadInput
from .jobs import Arrival, Orders, send
from .settings import check_settings, positive
from .state import State
from .work import Memory, Message, RunningJob, Sent

S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Algorithm(ABC, Generic[S]):
    """A method: a frozen record of hyper-parameters with ``init`` and ``step``.

    What the class says of itself stands in the class variables; lists, tables, figures and checks read it there.
    """

    name: ClassVar[str] = ""
    """What it is called on the shell, in folders and in legends, such as "dude"."""
    title: ClassVar[str] = ""
    """What tables call it, such as "DuDe"; by default its name."""
    colour: ClassVar[str] = "#7F7F7F"
    """The colour of its curves."""
    line: ClassVar[str] = "-"
    """How its curves are dashed: "-", "--", ":", "-.", or the lengths of dashes and gaps by turns, such as "5 1 1 1"."""
    marker: ClassVar[str] = "."
    """The marks on its curves, as matplotlib writes them."""
    keeps: ClassVar[str] = "nothing"
    """What the server keeps besides the model, in a few words."""
    needs: ClassVar[str] = "-"
    """What a user has to know beforehand to set it, in a few words."""
    wastes: ClassVar[str] = "-"
    """Which work or time is thrown away, in a few words."""
    remembers: ClassVar[str] = ""
    """What each worker keeps, and what becomes of it when that is lost, in a few words. Empty: it keeps nothing."""
    asks_others: ClassVar[bool] = False
    """Whether ``recover`` needs what the other workers keep."""
    ahead: ClassVar[bool] = True
    """Whether a job of one gradient takes it at the model that was sent: before it is known what the worker keeps.

    A class with a ``work`` of its own that is of this kind says so; for any other it is False.
    """
    away: ClassVar[str] = ""
    """What becomes of a worker that is absent, in a few words. Empty: the method has no ``leave`` and no ``join``."""
    waits: ClassVar[bool] = True
    """Whether an update may have to wait for one certain worker."""
    exact: ClassVar[bool] = False
    """Whether its jobs are exact local gradients, of all of a worker's data."""
    own_step: ClassVar[str] = ""
    """Why no optimiser may take its step, in a few words; empty: one may."""
    own_lr: ClassVar[str] = ""
    """What its default ``lr`` is, in a few words, where that is no learning rate that an optimiser could take."""

    lr: float = positive()
    """Step size (the paper's eta).

    In a sweep, runs that differ in their step size alone advance together, and ``lr`` is then a column (r, 1) with a number
    for each: multiply and divide by it, compare it with nothing. A method that does is computed one run at a time.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "message" in cls.__dict__:
            raise TypeError(
                f"{cls.__name__} has message(gradient, held); expected work(memory, model, job), which returns a message "
                "and what the worker keeps: the gradient is job.gradient(model)."
            )
        if "work" in cls.__dict__ and "ahead" not in cls.__dict__:
            cls.ahead = False
        rules = [rule for rule in ("leave", "join") if getattr(cls, rule) is not getattr(Algorithm, rule)]
        if len(rules) != (2 if cls.away else 0):
            has = " and ".join(rules) or "neither leave nor join"
            raise TypeError(
                f"{cls.__name__} has {has}, and away is {cls.away!r}; expected all three, or none: with both rules, away "
                "says in a few words what becomes of a worker that is absent."
            )

    def __post_init__(self) -> None:
        check_settings(self)

    def _repr_html_(self) -> str:
        from ..analysis.html import algorithm_html

        return algorithm_html(self)

    @abstractmethod
    def init(self, x: Tensor, n: int, rng: Draws) -> S:
        """The state of a server with n workers before anything has arrived; ``rng`` names the server's own draws."""

    def first(self, s: S) -> Orders:
        """What is to be done at the start: by default every worker computes at the initial model."""
        return [send(worker) for worker in s.present]

    @abstractmethod
    def step(self, s: S, a: Arrival) -> Orders:
        """Absorb one arrival into the state and say what is to be done next."""

    def on_wake(self, s: S, time: float) -> Orders:
        """What is to be done at a time that ``wake`` has asked for."""
        raise BadInput(f"{type(self).__name__} ordered a wake and has no on_wake(state, time); give it one.")

    def leave(self, s: S, worker: int, held: Memory | None = None) -> Orders:
        """A worker has left, with its jobs; ``held`` is what it kept."""
        raise BadInput(
            f"worker {worker} left, and {type(self).__name__} has no rule for that: it would wait for worker {worker} "
            "or lose its job. Use a method that lets workers go (dude, vanilla), or keep the worker."
        )

    def join(self, s: S, worker: int) -> Orders:
        """A worker has joined, for the first time or again."""
        raise BadInput(
            f"worker {worker} joined, and {type(self).__name__} has no rule for that. Use a method that lets workers "
            "come (dude, vanilla), or start with all of them."
        )

    # --- the worker's half ---

    @property
    def most_steps(self) -> int:
        """The most gradients that one of its jobs takes: its setting ``steps``, if it has one."""
        steps: int = getattr(self, "steps", 1)
        return steps

    def model(self, s: S, worker: int) -> Sent:
        """What a worker is sent with a job: by default the current weights."""
        return s.x

    def work(self, memory: Memory | None, model: Any, job: RunningJob) -> tuple[Message, Memory | None]:
        """What a worker does with a job, pure: what it sends, and what it keeps once the server has accepted that.

        ``memory`` is what it kept last, None at first; ``model`` what it was sent.
        """
        return job.gradient(model), memory

    def shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """The tensors of a worker's message by name, with their shapes: by default one, of the model's shape."""
        return {"gradient": tuple(x.shape)}

    def recover(self, s: S, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """What a worker that has lost what it kept goes on with: what the state knows of it, by default nothing."""
        return s.recover(worker, others)


@dataclass(frozen=True)
class IndependentWorkers(Algorithm[S]):
    """A method whose workers do not depend on one another: one that leaves is not missed, one that joins gets the model."""

    waits: ClassVar[bool] = False
    away: ClassVar[str] = "its job is lost, and the others go on"

    def leave(self, s: S, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        return []

    def join(self, s: S, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

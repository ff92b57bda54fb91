"""The nouns: a job, an arrival, an order, a state, an algorithm and a problem.

An algorithm is a fold over arrivals: worker i has just delivered a gradient taken at an old model; what does the server
do, and who computes what next? Nothing in the answer depends on whether time is virtual, real or remembered.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .draws import Draws

BLOCK = 65_536  # elements per pass, so that what one operation writes is still in the cache for the next


class DualDelayError(Exception):
    """Anything this package refuses or cannot finish."""


class BadInput(DualDelayError, ValueError):
    """Something was given that cannot work; the message says what, what was expected and what to do."""


class ReplayMismatch(DualDelayError):
    """A replay did not give what was recorded."""


class RunFailed(DualDelayError):
    """A run could not go on; what it had done up to its last checkpoint is saved."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error about an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."


def require_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above zero."""
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise BadInput(f"{name} is {value!r}; expected a finite number above zero.")


def require_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Refuse a number that is not whole or lies outside low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        span = f"{low} or more" if high is None else f"{low}..{high}"
        raise BadInput(f"{name} is {value!r}; expected a whole number, {span}.")


def require_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise BadInput(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


class Job(NamedTuple):
    """The name of a gradient: ``version`` says at which model, ``(worker, draw)`` on which minibatch."""

    worker: int
    draw: int
    version: int


class Arrival(NamedTuple):
    """What reached the server. ``value`` is never written to; ``job`` is None for a wake."""

    job: Job | None
    value: Tensor
    time: float
    seconds: float  # computing, without queueing or travel
    loss: float  # of that minibatch

    @property
    def worker(self) -> int:
        """The sender."""
        assert self.job is not None, "a wake has no sender"
        return self.job.worker


class Order(NamedTuple):
    """What the server wants done; make one with ``send``, ``again``, ``cancel`` or ``wake``."""

    kind: str
    worker: int = -1
    time: float = 0.0


Orders = list[Order]


def send(worker: int) -> Order:
    """The current model goes to a worker, behind what it already has to do."""
    return Order("send", worker)


def again(worker: int) -> Order:
    """One more draw at the model the worker was sent last."""
    return Order("again", worker)


def cancel(worker: int) -> Order:
    """The worker drops what it is doing and what it has queued."""
    return Order("cancel", worker)


def wake(time: float) -> Order:
    """Call ``step`` at that time with an arrival whose job is None."""
    return Order("wake", -1, time)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces of tensors of one size; small ones come whole."""
    if tensors[0].numel() <= BLOCK:
        return iter((tensors,))
    return zip(*(torch.split(tensor.view(-1), BLOCK) for tensor in tensors), strict=True)


@dataclass(kw_only=True)
class State:
    """What the server knows; algorithms extend it. A tensor read from ``x`` keeps its values for good."""

    weights: Tensor  # (d); use x to read it
    n: int  # workers that count
    version: int = 0
    lent: bool = True  # somebody may hold weights, so the next descent makes new ones

    @property
    def x(self) -> Tensor:
        """The current model, flat. It is never changed: a later version is another tensor."""
        self.lent = True
        return self.weights

    def descend(self, direction: Tensor, lr: float) -> None:
        """x <- x - lr * direction, and the version goes up by one."""
        new = torch.empty_like(self.weights) if self.lent else self.weights
        for out, x, part in blocks(new, self.weights, direction):
            torch.add(x, part if part.dtype == x.dtype else part.to(x.dtype), alpha=-lr, out=out)
        self.weights, self.lent = new, False
        self.version += 1


@dataclass(kw_only=True)
class AggregateState(State):
    """A server that remembers the last gradient of every worker, or at least their sum."""

    total: Tensor  # (d), float64: the sum of the workers' gradients, kept as a sum so that it does not drift
    table: Tensor | None  # (n, d): the gradients themselves, unless the workers keep them
    absent: set[int]  # workers that do not count: they left, or joined and have not reported yet

    def take(self, worker: int, value: Tensor) -> None:
        """sum <- sum + (G - G~) and G~ <- G; without a table ``value`` is the difference itself."""
        if worker in self.absent:
            self.absent.remove(worker)
            self.n += 1
        if self.table is None:
            for total, new in blocks(self.total, value):
                total.add_(new)
        else:
            for total, old, new in blocks(self.total, self.table[worker], value):
                total.add_(new).sub_(old)
                old.copy_(new)

    def drop(self, worker: int, held: Tensor | None) -> None:
        """Take a worker's gradient out of the sum; it counts no more."""
        if worker in self.absent:
            return
        self.absent.add(worker)
        self.n -= 1
        if self.table is not None:
            self.total -= self.table[worker]
            self.table[worker].zero_()
        elif held is not None:
            self.total -= held

    def error(self, held: Mapping[int, Tensor]) -> float:
        """||sum - sum_i G_i|| / sum_i ||G_i||, against the table or what the workers hold.

        Not over ||sum_i G_i||, which goes to zero at a solution whatever the gradients' sizes.
        """
        exact, size = torch.zeros_like(self.total), 0.0
        for row in self.table if self.table is not None else held.values():
            exact += row
            size += float(row.norm())
        gap = float((self.total - exact).norm())
        return gap / size if size > 0 else gap


def aggregate(x: Tensor, n: int, memory: str = "server") -> dict[str, Any]:
    """The empty fields of an AggregateState."""
    table = x.new_zeros(n, *x.shape) if memory == "server" else None
    return {"total": x.new_zeros(x.shape, dtype=torch.float64), "table": table, "absent": set()}


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Algorithm(ABC, Generic[S]):
    """A method: a frozen record of hyper-parameters with ``init`` and ``step``."""

    lr: float
    """Step size (the paper's eta)."""

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)

    @abstractmethod
    def init(self, x: Tensor, n: int, rng: Draws) -> S:
        """The state before anything has arrived; ``rng`` names the server's own draws."""

    def first(self, s: S) -> Orders:
        """What is to be done at the start: by default everybody computes at the first model."""
        return [send(worker) for worker in range(s.n)]

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

    def message(self, gradient: Tensor, held: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The worker's half, pure: what it sends, and what it keeps once the server has accepted that."""
        return gradient, None


class Problem(ABC):
    """What is to be minimised: F(x) = (1/n) sum_i F_i(x), worker i knowing F_i alone. Pure: no call changes a later one."""

    workers: int
    seed: int

    @abstractmethod
    def start(self, seed: int) -> Tensor:
        """The initial flat weights of a run with this seed."""

    @abstractmethod
    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        """The stochastic gradient of F_worker at x on minibatch ``draw``, and that minibatch's loss."""

    @abstractmethod
    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Numbers about x: objective, pooled_loss, accuracy and gradient_norm; nan where there is none."""

    def batches(self, worker: int) -> int:
        """What one job costs, in minibatches."""
        return 1

    def model(self, x: Tensor) -> Any:
        """What a user's metric function is called with: here x, for a network the module with these weights."""
        return x

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """The weights under the names that they are saved and loaded by."""
        return {"x": x}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """The flat weights of a state dict: the inverse of ``state_dict``."""
        if set(state_dict) != {"x"}:
            raise BadInput(f"the weights are named {sorted(state_dict)}; expected one tensor named 'x'.")
        return state_dict["x"]

    @abstractmethod
    def fingerprint(self) -> str:
        """A short digest of data and settings, to tell whether a problem is the one that was recorded."""

    def reseeded(self, seed: int) -> Problem:
        """The same kind of problem with another seed: for data problems another split and other minibatches."""
        raise BadInput(f"{type(self).__name__} cannot take another seed; compare it with one seed or give it 'reseeded'.")


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bit patterns modulo 2**64, as int64: one pass, and any single changed bit shows."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return int(tensor.view(kinds[tensor.element_size()]).sum())


def is_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite; a finite sum settles it in one pass."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())

"""MIFA: Gu, Huang, Zhang and Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", 2021.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)`` with the same ``lr``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, send
from ..draws import Draws
from ..errors import require_whole
from ..state import AggregateState, aggregate


@dataclass(kw_only=True)
class MIFAState(AggregateState):
    rng: Draws
    expected: int  # reports still to come in this round


@dataclass(frozen=True)
class MIFA(Algorithm[MIFAState]):
    """Rounds: the available workers compute at the current model, the others count with their last gradient.

    The first round is everybody's, so that every worker has a gradient to count with.
    """

    active: int | None = None
    """How many workers are available in a round, drawn uniformly each time; None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active is not None:
            require_whole("active", self.active, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> MIFAState:
        require_whole(f"active (with {n} workers)", n if self.active is None else self.active, 1, n)
        return MIFAState(weights=x, n=n, rng=rng, expected=n, **aggregate(x, n))

    def step(self, s: MIFAState, a: Arrival) -> Orders:
        s.take(a.worker, a.value)
        s.expected -= 1
        if s.expected:
            return []
        s.descend(s.total, self.lr, over=s.n)
        s.expected = s.n if self.active is None else self.active
        available = sorted(s.rng.permutation(s.n, s.version)[: s.expected].tolist())
        return [send(worker) for worker in available]

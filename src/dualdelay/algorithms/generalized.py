"""Generalized AsyncSGD: Leconte, Jonckheere, Samsonov and Moulines, "Queuing dynamics of asynchronous Federated Learning",
2024.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ..core import Arrival, Orders
from ..core.draws import Draws
from ..core.errors import BadInput
from .uniform import QueueState, UniformASGD


@dataclass(frozen=True)
class GeneralizedASGD(UniformASGD):
    """The new model goes to a worker drawn with any probabilities; a gradient is weighted by 1 / (n p_i).

    So every worker counts the same, and the fast may be asked more often, at the price of noisier steps from stragglers.
    """

    name, title = "generalized", "Generalized"
    colour, line, marker = "#DDAA33", "5 1 1 1", "^"
    needs = "probabilities, so speeds"

    probabilities: Sequence[float] | None = None
    """The chance of each worker to get the next job; None: the same for all, which is Uniform ASGD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        p = self.probabilities
        if p is not None and (
            not isinstance(p, (tuple, list)) or not all(q > 0 for q in p) or abs(math.fsum(p) - 1) > 1e-6
        ):
            raise BadInput(f"probabilities is {p}; expected a list with a number above 0 for each worker, 1 in all.")

    def init(self, x: Tensor, n: int, rng: Draws) -> QueueState:
        if self.probabilities is not None and len(self.probabilities) != n:
            raise BadInput(f"probabilities has {len(self.probabilities)} entries; expected {n}, one for each worker.")
        return super().init(x, n, rng)

    def _chances(self, s: QueueState) -> list[float]:
        """The probabilities of the workers that are present."""
        p = [1.0 if self.probabilities is None else self.probabilities[worker] for worker in s.present]
        total = math.fsum(p)
        return [q / total for q in p]

    def draw(self, s: QueueState) -> int:
        u = (int(s.rng.bits(1, s.drawn)[0]) >> 32 & 0xFFFFFFFF) / 2.0**32  # as for uniform draws
        p = self._chances(s)
        return s.present[bisect_right(list(accumulate(p[:-1])), u)]

    def step(self, s: QueueState, a: Arrival) -> Orders:
        weight = 1.0 if self.probabilities is None else s.n * self._chances(s)[s.present.index(a.worker)]
        s.descend(a.value, self.lr, over=weight)
        return self.refill(s, a.worker)

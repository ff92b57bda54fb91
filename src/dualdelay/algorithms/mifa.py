"""MIFA: Gu, Huang, Zhang and Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", 2021.

For its K local steps wrap the problem: ``LocalSteps(problem, k, lr)`` with the same ``lr``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.settings import whole


@dataclass(kw_only=True)
class MIFAState(AggregateState):
    rng: Draws
    asked: set[int]  # workers whose reports are still to come in this round


@dataclass(frozen=True)
class MIFA(Algorithm[MIFAState]):
    """Rounds: the available workers compute at the current model, the others count with their last gradient.

    All workers take part in the first round, so that every one has a gradient to count with.
    """

    name, title = "mifa", "MIFA"
    colour, line, marker = "#CC79A7", "1 1", "P"
    keeps, wastes = "a gradient of each worker", "the time of workers not asked"
    away = "it is not asked, and its last gradient goes on counting"

    active: int | None = whole(None)
    """How many workers are available in a round, drawn uniformly each time; None: all."""

    def init(self, x: Tensor, n: int, rng: Draws) -> MIFAState:
        require_whole(f"active (with {n} workers)", n if self.active is None else self.active, 1, n)
        return MIFAState(x, n, rng=rng, asked=set(range(n)))

    def step(self, s: MIFAState, a: Arrival) -> Orders:
        s.replace(a.worker, a.value)
        s.asked.discard(a.worker)
        return self._update(s)

    def _update(self, s: MIFAState) -> Orders:
        if s.asked or not s.counted:
            return []
        s.descend(s.total, self.lr, over=s.counted)
        present, order = s.present, s.rng.permutation(s.n, s.version)
        s.asked = {present[k] for k in order[: self.active].tolist()}
        return [send(worker) for worker in sorted(s.asked)]

    def leave(self, s: MIFAState, worker: int, held: Memory | None = None) -> Orders:
        s.absent.add(worker)
        waited_for = worker in s.asked
        if waited_for and s.version == 0:
            s.discard(worker)  # it has no gradient to count with
        s.asked.discard(worker)
        return self._update(s) if waited_for else []

    def join(self, s: MIFAState, worker: int) -> Orders:
        s.join(worker)
        if s.asked:
            return []  # until the next round
        s.asked.add(worker)
        return [send(worker)]

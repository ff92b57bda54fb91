"""sIAG: Wang, Jin, Wai and Gu, "Linear Speedup of Incremental Aggregated Gradient Methods on Streaming Data", 2023."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Orders, send
from ..core.aggregate import AggregateState
from ..core.draws import Draws


@dataclass(kw_only=True)
class SIAGState(AggregateState):
    rng: Draws
    asked: set[int]  # workers whose reports the next update waits for
    last_turn: int = -1  # whose turn it was


@dataclass(frozen=True)
class SIAG(Algorithm[SIAGState]):
    """One worker at a time, in turn, renews its gradient at the current model; the others idle.

    Before the first update every worker reports once.
    """

    name, title = "siag", "sIAG"
    colour, line, marker = "#8C6D31", "8 2", "*"
    keeps, wastes = "a gradient of each worker", "the time of workers not asked"
    away = "its gradient leaves the average, and its turns fall to the others"

    def init(self, x: Tensor, n: int, rng: Draws) -> SIAGState:
        return SIAGState(x, n, rng=rng, asked=set(range(n)))

    def turn(self, s: SIAGState) -> int:
        """Whose turn it is."""
        return min(s.present, key=lambda worker: (worker <= s.last_turn, worker))

    def step(self, s: SIAGState, a: Arrival) -> Orders:
        s.replace(a.worker, a.value)
        s.asked.discard(a.worker)
        if s.asked:
            return []
        s.descend(s.total, self.lr, over=s.counted)
        return self.ask(s)

    def ask(self, s: SIAGState) -> Orders:
        """Send the model to whose turn it is."""
        s.last_turn = self.turn(s)
        s.asked.add(s.last_turn)
        return [send(s.last_turn)]

    def leave(self, s: SIAGState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.asked.discard(worker)
        if s.asked or not s.present:
            return []
        if s.version == 0 and s.counted:  # it was the last that the first update waited for
            s.descend(s.total, self.lr, over=s.counted)
        return self.ask(s)

    def join(self, s: SIAGState, worker: int) -> Orders:
        s.join(worker)
        return [] if s.asked else self.ask(s)

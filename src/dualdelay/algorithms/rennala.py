"""Rennala SGD: Tyurin and Richtarik, "Optimal Time Complexities of Parallel Stochastic Optimization Methods", 2023.

It is K-batch-sync SGD of Dutta et al., 2018 (arXiv 1803.01113), with K = ``gradients``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, again, cancel, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(frozen=True)
class RennalaSGD(IndependentWorkers[BufferState]):
    """All workers compute at one model until there are enough gradients, from whichever; what is under way is dropped.

    It is optimal for homogeneous data. With heterogeneous data those of the fast workers count for more. By default a job
    under way is stopped when a round ends, and its worker begins the next round at once, as in the code of the authors'
    group; in the paper's pseudo-code it ends unheard, and only then its worker gets the new model.
    """

    name, title = "rennala", "Rennala"
    colour, line, marker = "#882255", "-.", "8"
    keeps, needs, wastes = "one sum", "S", "jobs under way at the end of a round"

    gradients: int | None = whole(None)
    """Gradients per update (the paper's S); None: as many as there are workers.

    That default is ours: the paper's S follows from the noise and the accuracy that is wanted, S = max(1, sigma^2 / eps).
    """
    cancel: bool = True
    """Whether jobs under way at the end of a round are stopped, or end unheard."""

    def init(self, x: Tensor, n: int, rng: Draws) -> BufferState:
        return BufferState(x, n)

    def step(self, s: BufferState, a: Arrival) -> Orders:
        if a.version < s.version:  # of a round that is over
            return [send(a.worker)]
        s.add(a.value)
        if s.count < (s.n if self.gradients is None else self.gradients):
            return [again(a.worker)]
        s.descend(s.total, self.lr, over=s.count)
        s.clear()
        if not self.cancel:
            return [send(a.worker)]
        return [order for worker in s.present for order in (cancel(worker), send(worker))]

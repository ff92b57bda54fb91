"""OrMo, ordered momentum: Shi, Yang and Li, "Ordered Momentum for Asynchronous SGD", 2024 (arXiv 2407.19234); derived.

The paper's text was not available, but for its abstract and the caption of a figure: the momentum is a sum over groups of K
gradients, ordered by the iterations at which they were taken, a group weighing beta times the one after it. From this:
version u belongs to group ceil(u / K), K being the number of workers. Once group G is open, a gradient g of group G - j
stands in the momentum with weight beta^j, and has moved x by the momenta of the groups G - j to G, in which it has, or as
one that was in time would have had, the weights 1, beta, ..., beta^j. So it moves x by (1 + beta + ... + beta^j) lr g when
it comes, however late, and by beta^(j+1) lr g when the next group opens. The delay-adaptive step of the paper is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, State, send
from ..core.draws import Draws
from ..core.settings import below_one


@dataclass(kw_only=True)
class OrMoState(State):
    momentum: Tensor  # (d)
    groups: list[int]  # of the models that the workers have
    group: int = 0  # of the current model
    room: int = 0  # how many more models are in it
    opens: bool = False  # whether the current model is its first


@dataclass(frozen=True)
class OrMo(IndependentWorkers[OrMoState]):
    """Vanilla ASGD with a momentum in which a late gradient gets the weight that it would have had in time.

    The momentum decays once in as many arrivals as there are workers, and does not depend on the order of arrivals.
    """

    name, title = "ormo", "OrMo"
    colour, line, marker = "#661100", "2 1", ">"
    keeps = "one vector and a number for each worker"
    own_step = "it has a momentum of its own"

    momentum: float = below_one(0.9)
    """How much of the momentum is kept when a group is full (the paper's beta)."""

    def init(self, x: Tensor, n: int, rng: Draws) -> OrMoState:
        return OrMoState(x, n, momentum=torch.zeros_like(x), groups=[0] * n)

    def step(self, s: OrMoState, a: Arrival) -> Orders:
        beta, late = self.momentum, s.group - s.groups[a.worker]
        if s.opens:  # x <- x - beta u, u <- beta u
            s.momentum = beta * s.momentum
        weights = sum(beta**j for j in range(late + 1))  # (1 - beta^(j+1)) / (1 - beta)
        s.descend(weights * a.value + s.momentum if s.opens else weights * a.value, self.lr)
        s.momentum = s.momentum + beta**late * a.value  # u <- u + beta^j g
        s.opens = s.room == 0
        if s.opens:
            s.group, s.room = s.group + 1, s.n
        s.room -= 1
        s.groups[a.worker] = s.group
        return [send(a.worker)]

    def join(self, s: OrMoState, worker: int) -> Orders:
        s.groups[worker] = s.group
        return super().join(s, worker)

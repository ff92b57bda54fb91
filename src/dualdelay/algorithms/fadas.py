"""FADAS: Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", 2024 (arXiv 2407.18365).

For its local steps wrap the problem: ``LocalSteps(problem, k, lr)``. The formula of its delay-adaptive step is min(lr, 1 /
delay), which changes nothing unless lr is above 1 / delay, far above the steps of 0.001 or less that the authors use; their
code divides lr by the delay, and so does this file unless told otherwise. Delays count from 0, as in that code. There means
are corrected for their start at zero as in Adam, which the paper's formula does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core import Arrival, IndependentWorkers, Orders, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.errors import BadInput
from ..core.settings import positive, whole


@dataclass(kw_only=True)
class FADASState(BufferState):
    m: Tensor  # (d): the running mean of updates
    v: Tensor  # (d): that of their squares
    v_max: Tensor  # (d): the largest of these so far
    delay: int = 0  # the largest in the buffer


@dataclass(frozen=True)
class FADAS(IndependentWorkers[FADASState]):
    """FedBuff whose server steps by AMSGrad: along a mean of past updates, each number over the root of its mean square."""

    name, title = "fadas", "FADAS"
    colour, line, marker = "#E7298A", ":", "d"
    keeps, needs = "one sum and three vectors", "buffer"
    own_step = "its step is AMSGrad's already"

    buffer: int = whole(10)
    """Arrivals per update."""
    betas: tuple[float, float] = (0.9, 0.99)
    """How much of the two means is kept at an update."""
    eps: float = positive(1e-8)
    """Added to the root."""
    late: int | None = whole(None)
    """The largest delay in a buffer for which the step stays lr (the paper's tau_c). None: it always stays."""
    rule: Literal["divide", "clip"] = "divide"
    """What a step is beyond that: lr over the delay, as in the authors' code, or at most 1 / delay, as in the paper."""
    correct_means: bool = False
    """Whether the two means are divided by 1 - beta^t, since they start at zero: the authors' code does, the paper not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, (tuple, list)) or [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise BadInput(f"betas is {self.betas}; expected two numbers of zero or more, and below 1.")

    def init(self, x: Tensor, n: int, rng: Draws) -> FADASState:
        return FADASState(x, n, m=torch.zeros_like(x), v=torch.zeros_like(x), v_max=torch.zeros_like(x))

    def step(self, s: FADASState, a: Arrival) -> Orders:
        s.add(a.value)
        s.delay = max(s.delay, s.version - a.version)
        if s.count == self.buffer:
            mean = (s.total / self.buffer).to(s.m.dtype)
            s.m.lerp_(mean, 1 - self.betas[0])
            s.v.lerp_(mean * mean, 1 - self.betas[1])
            torch.maximum(s.v_max, s.v, out=s.v_max)
            m, v = s.m, s.v_max
            if self.correct_means:
                m, v = (part / (1 - beta ** (s.version + 1)) for part, beta in zip((m, v), self.betas, strict=True))
            s.descend(m / (v.sqrt() + self.eps), self._step_size(s.delay))
            s.clear()
            s.delay = 0
        return [send(a.worker)]

    def _step_size(self, delay: int) -> float:
        if self.late is None or delay <= self.late:
            return self.lr
        return self.lr / delay if self.rule == "divide" else min(self.lr, 1 / delay)

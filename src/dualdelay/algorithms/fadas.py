"""FADAS: Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", 2024.

For its local steps wrap the problem: ``LocalSteps(problem, k, lr)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import Arrival, Orders, WaitsForNobody, send
from ..core.draws import Draws
from ..core.errors import BadInput, require_positive, require_whole
from ..core.state import State, blocks


@dataclass(kw_only=True)
class FADASState(State):
    total: Tensor  # (d), float64: the buffer's sum
    m: Tensor  # (d): the running mean of updates
    v: Tensor  # (d): that of their squares
    v_max: Tensor  # (d): the largest of these so far
    count: int = 0
    delay: int = 0  # the largest in the buffer


@dataclass(frozen=True)
class FADAS(WaitsForNobody[FADASState]):
    """FedBuff whose server steps by AMSGrad: along a mean of past updates, each number over the root of its mean square."""

    own_step: ClassVar[str] = "its step is AMSGrad's already"

    buffer: int = 10
    """Arrivals per update."""
    betas: tuple[float, float] = (0.9, 0.99)
    """How much of the two means is kept at an update."""
    eps: float = 1e-8
    """Added to the root."""
    late: int | None = None
    """The largest delay in a buffer for which the step stays lr; beyond, it is at most 1 / delay. None: it always stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("buffer", self.buffer, 1)
        require_positive("eps", self.eps)
        if not isinstance(self.betas, (tuple, list)) or [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise BadInput(f"betas is {self.betas}; expected two numbers of zero or more, and below 1.")
        if self.late is not None:
            require_whole("late", self.late, 1)

    def init(self, x: Tensor, n: int, rng: Draws) -> FADASState:
        total, zeros = x.new_zeros(x.shape, dtype=torch.float64), [torch.zeros_like(x) for _ in range(3)]
        return FADASState(weights=x, n=n, total=total, m=zeros[0], v=zeros[1], v_max=zeros[2])

    def step(self, s: FADASState, a: Arrival) -> Orders:
        assert a.job is not None
        for total, value in blocks(s.total, a.value):
            total.add_(value)
        s.count, s.delay = s.count + 1, max(s.delay, s.version + 1 - a.job.version)
        if s.count == self.buffer:
            mean = (s.total / self.buffer).to(s.m.dtype)
            s.m.lerp_(mean, 1 - self.betas[0])
            s.v.lerp_(mean * mean, 1 - self.betas[1])
            torch.maximum(s.v_max, s.v, out=s.v_max)
            late = self.late is not None and s.delay > self.late
            s.descend(s.m / (s.v_max.sqrt() + self.eps), min(self.lr, 1 / s.delay) if late else self.lr)
            s.total.zero_()
            s.count = s.delay = 0
        return [send(a.worker)]

"""Ringmaster LMO: Sadiev, Maranjyan, Ilin and Richtarik, "Ringmaster LMO: Asynchronous Linear Minimization Oracle Momentum
Method", 2026 (arXiv 2605.18174); the rule is that of the authors' draft and code.

In their code the spectral norm is that of the matrices within transformer blocks, and all other parameters move along their
momentum with the same step. Here it is that of every tensor with two axes or more; ``rest`` says what the others do, of
which "sign", the ball of the largest entry, is ours. Their code also has a Nesterov form of the momentum, their text none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.draws import Draws
from ..core.settings import positive
from ..core.state import ShapedState
from .ringmaster import RingmasterASGD, RingmasterState

_POLAR_EXPRESS = (  # a, b, c of the five iterations
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7097, 0.4232),
)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V' of matrices (..., p, q) = U S V': five Newton-Schulz iterations, as in Muon."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = matrix.transpose(-2, -1) if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for a, b, c in _POLAR_EXPRESS:
        square = x @ x.transpose(-2, -1)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(-2, -1) if tall else x


@dataclass(kw_only=True)
class LMOState(RingmasterState, ShapedState):
    momentum: Tensor  # (d)


@dataclass(frozen=True)
class RingmasterLMO(RingmasterASGD):
    """Ringmaster ASGD whose step has a fixed length: it goes to the end of the ball of a norm along a momentum.

    "spectral" moves a matrix m = U S V' along U V', times sqrt(max(1, rows / columns)), and is Muon's step; "sign" moves
    every number by lr; "euclidean" moves the whole model by lr along its momentum. The step does not shrink by itself.
    """

    name, title = "ringmaster_lmo", "Ringmaster LMO"
    colour, line, marker = "#0E7C7B", "5 2 1 2", "H"
    keeps, needs, wastes = "one vector and a number for each worker", "R", "gradients that are R updates old"
    own_step = "its step is that of the norm's ball"

    alpha: float = positive(0.05, high=1)
    """The weight of a new gradient in the momentum."""
    lmo: Literal["spectral", "sign", "euclidean"] = "spectral"
    """The norm whose ball a step goes to the end of."""
    rest: Literal["momentum", "sign"] = "momentum"
    """How "spectral" moves tensors with fewer than two axes: along their momentum, or its signs."""
    agnostic: bool = False
    """Whether alpha, R and the step follow the number k of updates: 1 / sqrt(k), its inverse, and lr / (k + 1)^(3/4)."""

    def init(self, x: Tensor, n: int, rng: Draws) -> LMOState:
        return LMOState(x, n, sent=[0] * n, momentum=torch.zeros_like(x))

    def too_old(self, s: RingmasterState) -> int:
        return max(1, math.isqrt(s.version)) if self.agnostic else super().too_old(s)

    def update(self, s: RingmasterState, gradient: Tensor) -> None:
        assert isinstance(s, LMOState)
        alpha, shrink = self.alpha, 1.0
        if self.agnostic:
            alpha, shrink = max(1, s.version) ** -0.5, (s.version + 1) ** 0.75
        s.momentum = alpha * gradient + (1 - alpha) * s.momentum  # m <- alpha g + (1 - alpha) m
        s.descend(self.direction(s), self.lr, over=shrink)  # x <- x + eta lmo(m)

    def direction(self, s: LMOState) -> Tensor:
        """-lmo(m): the point of the ball that lies farthest along the momentum."""
        m = s.momentum
        if self.lmo == "sign":
            return m.sign()
        if self.lmo == "euclidean":
            length: Tensor = torch.linalg.vector_norm(m, dim=-1, keepdim=True)
            return m / (length + 1e-10)
        return s.flattened([self._spectral(part, part.ndim - m.ndim + 1) for part in s.shaped(m)])

    def _spectral(self, part: Tensor, axes: int) -> Tensor:
        if axes < 2:
            return part.sign() if self.rest == "sign" else part
        matrix = part.flatten(start_dim=part.ndim - axes + 1)  # the first axis, and all others
        rows, columns = matrix.shape[-2:]
        return math.sqrt(max(1.0, rows / columns)) * orthogonal(matrix).reshape(part.shape)

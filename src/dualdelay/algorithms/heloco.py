"""HeLoCo: Asif, Diem, Munoz, Wolf, Jannesari and Mazaheri, "HeLoCo: Efficient asynchronous low-communication training under
data and device heterogeneity", 2026 (arXiv 2606.00271); the rule is that of the first author's code.

The same author's later file says that the turn should fade out at ``aligned``; ``fade`` is that. By MLA's derivation the
server's model is ahead already, so that workers begin ahead a second time: that is the method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import BadInput
from ..core.settings import positive, zero_or_more
from .mla import LookAheadState, MomentumLookAhead


@dataclass(frozen=True)
class HeLoCo(MomentumLookAhead):
    """Momentum look-ahead that corrects an arrival tensor by tensor, by its angle to the momentum.

    A tensor that goes along with the momentum is kept as it is, one that goes against it has less of that part, and one in
    between is turned towards it. Which tensors there are the problem says; a problem without them is one.
    """

    name, title = "heloco", "HeLoCo"
    colour, line, marker = "#F46D43", "1 1 4 1", "p"
    keeps, needs = "one vector", "outer and inner steps"

    weight: float | None = positive(None)
    """What each corrected x - y is multiplied by (the paper's rho); None: 1 / sqrt(n)."""
    ahead_at_workers: bool = True
    """Whether workers begin at x - lr momentum m instead of x."""
    aligned: float = 0.2
    """The cosine with the momentum from which on a tensor is kept as it is (c_ok); with -1 all are."""
    shrink: float = zero_or_more(0.5)
    """How strongly what is against the momentum is shrunk (k_s)."""
    most_shrunk: float = zero_or_more(0.5)
    """The largest share of it that is taken away (beta_max)."""
    turn: float = zero_or_more(1.0)
    """How strongly what is neither with nor against it is turned (k_d)."""
    caution: float = zero_or_more(3.0)
    """The larger, the less is corrected of a tensor that is small beside the momentum (kappa)."""
    fade: bool = False
    """Whether a turn grows from nothing at ``aligned``, as (aligned - c) / (aligned + 0.2), or is by 1 - c at once."""
    whole: bool = False
    """Whether all weights are taken for one tensor."""
    eps: float = positive(1e-8)
    """Tensors shorter than this are kept as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.aligned, (int, float)) and -1 <= self.aligned <= 1):
            raise BadInput(f"aligned is {self.aligned!r}; expected a cosine, from -1 to 1.")

    def model(self, s: LookAheadState, worker: int) -> Tensor:
        return s.x - (self.lr * self.momentum * s.momentum).to(s.x.dtype) if self.ahead_at_workers else s.x

    def corrected(self, s: LookAheadState, delta: Tensor) -> Tensor:
        if self.whole:
            return self._tensor(delta, s.momentum)
        return s.flattened([self._tensor(*pair) for pair in zip(s.pieces(delta), s.pieces(s.momentum), strict=True)])

    def _tensor(self, delta: Tensor, m: Tensor) -> Tensor:
        """One tensor (..., k), given the momentum from before the update."""
        length, reference = (part.norm(dim=-1, keepdim=True) for part in (delta, m))
        towards = m / reference.clamp_min(self.eps)
        unit = delta / length.clamp_min(self.eps)
        c = (unit * towards).sum(dim=-1, keepdim=True).clamp(-1.0, 1.0)
        sure = length / (length + self.caution * reference + 1e-8)
        share = (self.shrink * -c * sure).clamp(max=self.most_shrunk)  # beta = min(k_s (-c) conf, beta_max)
        shrunk = delta - share * c * length * towards
        angle = (self.aligned - c) / (self.aligned + 0.2) if self.fade else 1.0 - c
        turned = (self.turn * angle * sure).clamp(max=1.0)  # lambda = min(k_d (1 - c) conf, 1)
        u = (1.0 - turned) * unit + turned * towards
        u = length * u / u.norm(dim=-1, keepdim=True).clamp_min(self.eps)  # as long as before
        keeps = (length < self.eps) | (reference < self.eps) | (c >= self.aligned)
        return torch.where(keeps, delta, torch.where(c < 0, shrunk, u))

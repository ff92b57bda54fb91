"""The samples of many minibatches in one launch: as ``core.draws.integers_at`` draws them, which is some fifty on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draws import FIRST, GAMMA, SECOND

_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    """The hash, on int64 whose products wrap around; masks make the arithmetic shifts logical ones."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _draw(
    located: tl.tensor, order: tl.tensor, picked: tl.tensor, jobs: tl.tensor, batch: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Write the rows of one job's samples, given (5, jobs): where its worker's begin, how many, base, worker and draw."""
    job = tl.program_id(0).to(tl.int64)
    begin = tl.load(located + job)
    bound = tl.load(located + jobs + job)
    key = tl.load(located + 2 * jobs + job)
    key = _mix(key ^ ((tl.load(located + 3 * jobs + job) + 1) * _GAMMA))
    key = _mix(key ^ ((tl.load(located + 4 * jobs + job) + 1) * _GAMMA))
    k = tl.arange(0, BLOCK)
    word = _mix(key + (k + 1).to(tl.int64) * _GAMMA)
    row = (((word >> 32) & 0xFFFFFFFF) * bound) >> 32
    tl.store(picked + job * batch + k, tl.load(order + begin + row, mask=k < batch, other=0), mask=k < batch)


def drawn(located: Tensor, order: Tensor, batch: int) -> Tensor:
    """The rows (jobs, batch) of ``order`` that jobs take, given (5, jobs): begin, bound, base, worker and draw of each."""
    jobs = located.shape[1]
    picked = torch.empty(jobs, batch, dtype=torch.int64, device=located.device)
    with torch.cuda.device_of(located):
        _draw[(jobs,)](located, order, picked, jobs, batch, triton.next_power_of_2(batch))
    return picked

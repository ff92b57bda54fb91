"""The largest of each window in one pass, and back in one pass: torch's own way back takes several times as long."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 512


@triton.jit
def _largest(
    x: tl.tensor, y: tl.tensor, place: tl.tensor, count: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the largest of each window of x (M, H, W) to y (M, H // KH, W // KW), and where in the window it stands."""
    HO: tl.constexpr = H // KH
    WO: tl.constexpr = W // KW
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = q < count
    m = q // (HO * WO)
    r = q % (HO * WO)
    corner = x + m * (H * W) + r // WO * (KH * W) + r % WO * KW
    best = tl.load(corner, mask=inside, other=0.0).to(tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(1, KH * KW):
        value = tl.load(corner + (k // KW * W + k % KW), mask=inside, other=0.0).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        where = tl.where(better, k, where)
    tl.store(y + q, best.to(y.dtype.element_ty), mask=inside)
    tl.store(place + q, where.to(tl.uint8), mask=inside)


@triton.jit
def _back(
    dy: tl.tensor, place: tl.tensor, dx: tl.tensor, count: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write dx (M, H, W): each window's slope where its largest stood, and zero elsewhere."""
    HO: tl.constexpr = H // KH
    WO: tl.constexpr = W // KW
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = q // (H * W)
    i = q % (H * W) // W
    j = q % W
    covered = (q < count) & (i < HO * KH) & (j < WO * KW)
    window = m * (HO * WO) + i // KH * WO + j // KW
    largest = tl.load(place + window, mask=covered, other=255).to(tl.int32) == i % KH * KW + j % KW
    slope = tl.load(dy + window, mask=covered & largest, other=0.0)
    tl.store(dx + q, slope, mask=q < count)


class _Pooling(torch.autograd.Function):
    """The largest of each window, and the way back."""

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        (H, W), (kh, kw) = x.shape[-2:], size
        y = x.new_empty(*x.shape[:-2], H // kh, W // kw)
        place = torch.empty_like(y, dtype=torch.uint8)
        with torch.cuda.device_of(x):
            _largest[(triton.cdiv(y.numel(), _BLOCK),)](x.contiguous(), y, place, y.numel(), H, W, kh, kw, _BLOCK)
        return y, place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.size = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        dx = dy.new_empty(ctx.shape)
        (H, W), (kh, kw) = ctx.shape[-2:], ctx.size
        with torch.cuda.device_of(dy):
            _back[(triton.cdiv(dx.numel(), _BLOCK),)](dy.contiguous(), place, dx, dx.numel(), H, W, kh, kw, _BLOCK)
        return dx, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: tuple[int, int]) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Under ``vmap`` there are more images."""
        return _apply(x.movedim(dims[0], 0), size), (0, 0)


_apply: Any = _Pooling.apply  # it has no types


def max_pool2d(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest of each window of this size in x (..., H, W); windows do not overlap."""
    y: Tensor = _apply(x, size)[0]
    return y

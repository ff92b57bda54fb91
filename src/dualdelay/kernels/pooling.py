"""The largest of each window in one pass, and back in one pass: torch's own way back takes several times as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 512
Pair = tuple[int, int]


@triton.jit
def _largest(
    x: tl.tensor, y: tl.tensor, place: tl.tensor, count: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RECTIFIED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the largest of each window of x (M, H, W) to y (M, H // KH, W // KW), and where in the window it stands.

    If rectified, it is zero at least, and where nothing is larger than that, it stands nowhere.
    """
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
    if RECTIFIED:
        where = tl.where(best <= 0.0, 255, where)
        best = tl.where(best <= 0.0, 0.0, best)  # what is not a number stays so
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


def largest(x: Tensor, size: Pair, rectified: bool) -> tuple[Tensor, Tensor]:
    """The largest of each window of this size in x (..., H, W), and where in the window it stands."""
    (H, W), (kh, kw) = x.shape[-2:], size
    y = x.new_empty(*x.shape[:-2], H // kh, W // kw)
    place = torch.empty_like(y, dtype=torch.uint8)
    with torch.cuda.device_of(x):
        _largest[(triton.cdiv(y.numel(), _BLOCK),)](x.contiguous(), y, place, y.numel(), H, W, kh, kw, rectified, _BLOCK)
    return y, place


def spread(dy: Tensor, place: Tensor, shape: Sequence[int], size: Pair) -> Tensor:
    """The way back: each window's slope where its largest stood, and zero elsewhere."""
    dx = dy.new_empty(shape)
    (H, W), (kh, kw) = shape[-2:], size
    with torch.cuda.device_of(dy):
        _back[(triton.cdiv(dx.numel(), _BLOCK),)](dy.contiguous(), place, dx, dx.numel(), H, W, kh, kw, _BLOCK)
    return dx


class _Pooling(torch.autograd.Function):
    """The largest of each window, and the way back."""

    @staticmethod
    def forward(x: Tensor, size: Pair, rectified: bool) -> tuple[Tensor, Tensor]:
        return largest(x, size, rectified)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.size, _ = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return spread(dy, place, ctx.shape, ctx.size), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: Pair, rectified: bool) -> tuple[tuple[Tensor, Tensor], Pair]:
        """Under ``vmap`` there are more images."""
        return _apply(x.movedim(dims[0], 0), size, rectified), (0, 0)


_apply: Any = _Pooling.apply  # it has no types


def max_pool2d(x: Tensor, size: Pair, rectified: bool = False) -> Tensor:
    """The largest of each window of this size in x (..., H, W), or zero if that is larger and they are ``rectified``.

    Windows do not overlap.
    """
    y: Tensor = _apply(x, size, rectified)[0]
    return y

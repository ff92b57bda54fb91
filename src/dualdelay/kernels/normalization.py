"""Group and layer normalisation of many models in one launch each way, each model with its own scales and shifts.

Torch knows them for one model: under ``vmap`` it normalises in one kernel, scales in another, shifts in a third, and on the
way back reads everything again for each sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST = 16_384  # numbers that are normalised together, at most: a program holds them all
_TILE = 2048  # numbers of a program with several rows


@triton.jit
def _by_group(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, mean: tl.tensor, inverse: tl.tensor,
    batch: tl.tensor, eps: tl.tensor,
    GROUPS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise a group of C channels of S places of one sample, and write its mean and one over its deviation."""
    pid = tl.program_id(0).to(tl.int64)
    g = pid // GROUPS // batch
    c = tl.arange(0, BC)
    s = tl.arange(0, BS)
    inside = (c < C)[:, None] & (s < S)[None, :]
    place = pid * (C * S) + c[:, None] * S + s[None, :]
    channel = (g * GROUPS + pid % GROUPS) * C + c
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(tl.sum(value, 1), 0) / (C * S)
    value = tl.where(inside, value - middle, 0.0)
    over = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0) / (C * S) + eps)
    scale = tl.load(weight + channel, mask=c < C, other=0.0)
    shift = tl.load(bias + channel, mask=c < C, other=0.0)
    tl.store(y + place, value * over * scale[:, None] + shift[:, None], mask=inside)
    tl.store(mean + pid, middle)
    tl.store(inverse + pid, over)


@triton.jit
def _by_group_back(
    x: tl.tensor, weight: tl.tensor, dy: tl.tensor, mean: tl.tensor, inverse: tl.tensor, dx: tl.tensor, parts: tl.tensor,
    batch: tl.tensor, count: tl.tensor,
    GROUPS: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
) -> None:  # fmt: skip
    """Write dx of a group of one sample, and what the sample adds to the gradients of scales and shifts (2, samples, C)."""
    pid = tl.program_id(0).to(tl.int64)
    g = pid // GROUPS // batch
    c = tl.arange(0, BC)
    s = tl.arange(0, BS)
    inside = (c < C)[:, None] & (s < S)[None, :]
    place = pid * (C * S) + c[:, None] * S + s[None, :]
    channel = (g * GROUPS + pid % GROUPS) * C + c
    over = tl.load(inverse + pid)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside, (value - tl.load(mean + pid)) * over, 0.0)
    slope = tl.load(dy + place, mask=inside, other=0.0)
    of_scale = tl.sum(slope * value, 1)
    of_shift = tl.sum(slope, 1)
    scale = tl.load(weight + channel, mask=c < C, other=0.0)
    along = tl.sum(of_scale * scale, 0) / (C * S)
    level = tl.sum(of_shift * scale, 0) / (C * S)
    tl.store(dx + place, (slope * scale[:, None] - level - value * along) * over, mask=inside)
    tl.store(parts + pid * C + c, of_scale, mask=c < C)
    tl.store(parts + count + pid * C + c, of_shift, mask=c < C)


@triton.jit
def _by_row(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, mean: tl.tensor, inverse: tl.tensor,
    rows: tl.tensor, eps: tl.tensor,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise BR rows of D numbers of one model, and write their means and one over their deviations."""
    blocks = tl.cdiv(rows, BR)
    g = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    place = (g * rows + r)[:, None] * D + d[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(value, 1) / D
    value = tl.where(inside, value - middle[:, None], 0.0)
    over = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    scale = tl.load(weight + g * D + d, mask=d < D, other=0.0)
    shift = tl.load(bias + g * D + d, mask=d < D, other=0.0)
    tl.store(y + place, value * over[:, None] * scale[None, :] + shift[None, :], mask=inside)
    tl.store(mean + g * rows + r, middle, mask=r < rows)
    tl.store(inverse + g * rows + r, over, mask=r < rows)


@triton.jit
def _by_row_back(
    x: tl.tensor, weight: tl.tensor, dy: tl.tensor, mean: tl.tensor, inverse: tl.tensor, dx: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, count: tl.tensor,
    D: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
) -> None:  # fmt: skip
    """Write dx of SIZE rows, and what they add to the gradients of scales and shifts (2, G, CHUNKS, D)."""
    chunk = tl.program_id(0).to(tl.int64)
    g = chunk // CHUNKS
    d = tl.arange(0, BD)
    scale = tl.load(weight + g * D + d, mask=d < D, other=0.0)
    of_scale = tl.zeros((BD,), tl.float32)
    of_shift = tl.zeros((BD,), tl.float32)
    for start in range(0, SIZE, BR):
        r = chunk % CHUNKS * SIZE + start + tl.arange(0, BR)
        inside = (r < rows)[:, None] & (d < D)[None, :]
        place = (g * rows + r)[:, None] * D + d[None, :]
        over = tl.load(inverse + g * rows + r, mask=r < rows, other=0.0)
        middle = tl.load(mean + g * rows + r, mask=r < rows, other=0.0)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, (value - middle[:, None]) * over[:, None], 0.0)
        slope = tl.load(dy + place, mask=inside, other=0.0)
        of_scale += tl.sum(slope * value, 0)
        of_shift += tl.sum(slope, 0)
        slope = slope * scale[None, :]
        along = tl.sum(slope * value, 1) / D
        level = tl.sum(slope, 1) / D
        tl.store(dx + place, (slope - level[:, None] - value * along[:, None]) * over[:, None], mask=inside)
    tl.store(parts + chunk * D + d, of_scale, mask=d < D)
    tl.store(parts + count + chunk * D + d, of_shift, mask=d < D)


def _warps(numbers: int) -> int:
    return min(max(numbers // 512, 1), 8)


class _Normalized(torch.autograd.Function):
    """What both ways back need: the input and the weight, the means and the inverse deviations."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])


class _Groups(_Normalized):
    """x (G, B, groups, C, S), weight and bias (G, groups * C)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        batch, groups, C, S = x.shape[1:]
        BC, BS = triton.next_power_of_2(C), triton.next_power_of_2(S)
        y, mean, inverse = x.new_empty(x.shape), x.new_empty(x.shape[:3]), x.new_empty(x.shape[:3])
        with torch.cuda.device_of(x):
            _by_group[(mean.numel(),)](
                *(x.contiguous(), weight.contiguous(), bias.contiguous(), y, mean, inverse, batch, eps),
                *(groups, C, S, BC, BS),
                num_warps=_warps(BC * BS),
            )
        return y, mean, inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        G, batch, groups, C, S = x.shape
        BC, BS = triton.next_power_of_2(C), triton.next_power_of_2(S)
        dx, parts = x.new_empty(x.shape), x.new_empty(2, G, batch, groups * C)
        with torch.cuda.device_of(x):
            _by_group_back[(mean.numel(),)](
                *(x.contiguous(), weight.contiguous(), dy.contiguous(), mean, inverse, dx, parts, batch),
                *(parts[0].numel(), groups, C, S, BC, BS),
                num_warps=_warps(BC * BS),
            )
        return dx, *parts.sum(2), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Models under ``vmap`` are more models of the same launch."""
        return _more_models(_by_groups, info.batch_size, dims, inputs)


class _Rows(_Normalized):
    """x (G, rows, D), weight and bias (G, D)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        G, rows, D = x.shape
        BD = triton.next_power_of_2(D)
        BR = max(_TILE // BD, 1)
        y, mean, inverse = x.new_empty(x.shape), x.new_empty(G, rows), x.new_empty(G, rows)
        with torch.cuda.device_of(x):
            _by_row[(G * triton.cdiv(rows, BR),)](
                *(x.contiguous(), weight.contiguous(), bias.contiguous(), y, mean, inverse, rows, eps),
                *(D, BR, BD),
                num_warps=_warps(BR * BD),
            )
        return y, mean, inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        G, rows, D = x.shape
        BD = triton.next_power_of_2(D)
        BR = max(_TILE // BD, 1)
        size = 4 * BR
        chunks = triton.cdiv(rows, size)
        dx, parts = x.new_empty(x.shape), x.new_empty(2, G, chunks, D)
        with torch.cuda.device_of(x):
            _by_row_back[(G * chunks,)](
                *(x.contiguous(), weight.contiguous(), dy.contiguous(), mean, inverse, dx, parts, rows),
                *(parts[0].numel(), D, chunks, size, BR, BD),
                num_warps=_warps(BR * BD),
            )
        return dx, *parts.sum(2), None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Models under ``vmap`` are more models of the same launch."""
        return _more_models(_by_rows, info.batch_size, dims, inputs)


_by_groups: Any = _Groups.apply  # they have no types
_by_rows: Any = _Rows.apply


def _more_models(function: Any, count: int, dims: Any, inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    stacks = [
        (part.expand(count, *part.shape) if dim is None else part.movedim(dim, 0)).flatten(0, 1)
        for part, dim in zip(inputs[:3], dims[:3], strict=True)
    ]
    return tuple(part.unflatten(0, (count, -1)) for part in function(*stacks, inputs[3])), (0, 0, 0)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise x (G, B, C, ...) by groups of channels, a sample at a time; weight and bias (G, C)."""
    split = x.reshape(*x.shape[:2], groups, x.shape[2] // groups, -1)
    y: Tensor = _by_groups(split, weight, bias, eps)[0]
    return y.reshape(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last axis of x (G, ..., D); weight and bias (G, D)."""
    y: Tensor = _by_rows(x.reshape(x.shape[0], -1, x.shape[-1]), weight, bias, eps)[0]
    return y.reshape(x.shape)

"""Many small convolutions in one launch: each model has its own weights and its own minibatch.

A model's result depends neither on how many models there are nor on which: all block sizes and the order of all sums are
fixed by the shapes of one model. The sums are taken by matrix products or, with dot="fma", by plain multiply-adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DOTS = ("fma", "ieee", "tf32x3", "tf32")
Pair = tuple[int, int]


@triton.jit
def _correlate(
    x: tl.tensor, w: tl.tensor, bias: tl.tensor, y: tl.tensor, batch: tl.tensor,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    dot: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Write y (G, B, N, HO, WO), given x (G, B, C, H, W) and w (G, C * KH * KW, NP): BN channels of BP pixels a program."""
    TAPS: tl.constexpr = C * KH * KW
    NB: tl.constexpr = (N + BN - 1) // BN
    EDGES: tl.constexpr = PH > 0 or PW > 0
    TWIN: tl.constexpr = 2 if dot != "fma" and WO % 2 == 0 and SW == 1 else 1  # lays neighbouring lanes along x
    pid = tl.program_id(0)
    tiles = tl.cdiv(batch * HO * WO, BP)
    g = (pid // NB // tiles).to(tl.int64)
    n = pid % NB * BN + tl.arange(0, BN)
    p = pid // NB % tiles * BP + tl.arange(0, BP)
    inside = p < batch * HO * WO
    b = p // (HO * WO)
    r = p % (HO * WO)
    top = r // WO * SH - PH
    left = r % WO * SW - PW
    corner = x + g * batch * (C * H * W) + tl.max_contiguous(b * (C * H * W) + top * W + left, TWIN)
    w += g * (TAPS * NB * BN)
    acc = tl.zeros((BN, BP), tl.float32)
    if dot == "fma":
        for line in range(C * KH):
            i = line % KH
            row = corner + (line // KH * (H * W) + i * W)
            for j in tl.static_range(KW):
                ok = inside
                if EDGES:
                    ok = ok & (top + i >= 0) & (top + i < H) & (left + j >= 0) & (left + j < W)
                pixel = tl.load((row + j)[None, :], mask=ok[None, :], other=0.0).to(tl.float32)
                weight = tl.load((w + (line * KW + j) * (NB * BN) + n)[:, None]).to(tl.float32)
                acc += weight * pixel
    else:
        for start in range(0, TAPS, BK):
            k = start + tl.arange(0, BK)
            i = k // KW % KH
            j = k % KW
            ok = inside[None, :] & (k < TAPS)[:, None]
            if EDGES:
                ok = ok & (top[None, :] + i[:, None] >= 0) & (top[None, :] + i[:, None] < H)
                ok = ok & (left[None, :] + j[:, None] >= 0) & (left[None, :] + j[:, None] < W)
            pixel = tl.load(corner[None, :] + (k // (KH * KW) * (H * W) + i * W + j)[:, None], mask=ok, other=0.0)
            weight = tl.load(w + k[None, :] * (NB * BN) + n[:, None], mask=(k < TAPS)[None, :], other=0.0)
            acc = tl.dot(weight, pixel, acc, input_precision=dot)
    if bias is not None:
        acc += tl.load(bias + g * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = y + g * batch * (N * HO * WO) + (b * (N * HO * WO) + r)[None, :] + (n * (HO * WO))[:, None]
    tl.store(out, acc.to(y.dtype.element_ty), mask=inside[None, :] & (n < N)[:, None])


@triton.jit
def _weight_gradient_chunks(
    x: tl.tensor, dy: tl.tensor, parts: tl.tensor, batch: tl.tensor,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    dot: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write a chunk's weight gradient to parts (G, CHUNKS, N, TAPS + 1); the tap after the last is the bias."""
    TAPS: tl.constexpr = C * KH * KW
    NB: tl.constexpr = (N + BN - 1) // BN
    KB: tl.constexpr = (TAPS + BK) // BK  # blocks of the taps and the bias
    TWIN: tl.constexpr = 2 if WO % 2 == 0 and SW == 1 else 1
    pid = tl.program_id(0)
    chunk = pid // (NB * KB)
    g = (chunk // CHUNKS).to(tl.int64)
    n = pid // KB % NB * BN + tl.arange(0, BN)
    k = pid % KB * BK + tl.arange(0, BK)
    i = k // KW % KH
    j = k % KW
    tap = k // (KH * KW) * (H * W) + i * W + j
    filler = tl.where(k == TAPS, 1.0, 0.0).to(x.dtype.element_ty)  # the bias's input is one everywhere
    x += g * batch * (C * H * W)
    dy += g * batch * (N * HO * WO)
    first = chunk % CHUNKS * SIZE
    last = tl.minimum(first + SIZE, batch * HO * WO)
    acc = tl.zeros((BN, BK, BP) if dot == "fma" else (BN, BK), tl.float32)
    for start in range(0, SIZE, BP):
        p = first + start + tl.arange(0, BP)
        b = p // (HO * WO)
        r = p % (HO * WO)
        top = r // WO * SH - PH
        left = r % WO * SW - PW
        ok = (p < last)[None, :] & (k < TAPS)[:, None]
        if PH > 0 or PW > 0:
            ok = ok & (top[None, :] + i[:, None] >= 0) & (top[None, :] + i[:, None] < H)
            ok = ok & (left[None, :] + j[:, None] >= 0) & (left[None, :] + j[:, None] < W)
        valid = (p < last)[None, :] & (n < N)[:, None]
        corner = tl.max_contiguous(b * (C * H * W) + top * W + left, TWIN)
        spot = b * (N * HO * WO) + r
        if dot == "fma":
            spot = tl.multiple_of(spot, 1)  # a lane takes the same pixel of dy and of x
            pixel = tl.load((x + corner[None, :] + tap[:, None])[None, :], mask=ok[None, :], other=filler[None, :, None])
            slope = tl.load((dy + spot[None, :] + (n * (HO * WO))[:, None])[:, None, :], mask=valid[:, None, :], other=0.0)
            acc += slope.to(tl.float32) * pixel.to(tl.float32)
        else:
            pixel = tl.load(x + corner[None, :] + tap[:, None], mask=ok, other=filler[:, None])
            slope = tl.load(dy + spot[None, :] + (n * (HO * WO))[:, None], mask=valid, other=0.0)
            acc = tl.dot(slope, tl.trans(pixel), acc, input_precision=dot)
    if dot == "fma":
        acc = tl.sum(acc, 2)
    place = parts + chunk.to(tl.int64) * (N * (TAPS + 1)) + (n * (TAPS + 1))[:, None] + k[None, :]
    tl.store(place, acc, mask=(n < N)[:, None] & (k <= TAPS)[None, :])


@triton.jit
def _add_chunks(
    parts: tl.tensor, dw: tl.tensor, db: tl.tensor,
    N: tl.constexpr, TAPS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add the chunks' weight gradients, always in the same order, and write them to dw (G, N, TAPS) and db (G, N)."""
    COUNT: tl.constexpr = N * (TAPS + 1)
    PIECES: tl.constexpr = (COUNT + BLOCK - 1) // BLOCK
    g = (tl.program_id(0) // PIECES).to(tl.int64)
    q = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(CHUNKS):
        acc += tl.load(parts + (g * CHUNKS + chunk) * COUNT + q, mask=q < COUNT, other=0.0)
    n = q // (TAPS + 1)
    k = q % (TAPS + 1)
    tl.store(dw + g * (N * TAPS) + n * TAPS + k, acc.to(dw.dtype.element_ty), mask=(q < COUNT) & (k < TAPS))
    tl.store(db + g * N + n, acc.to(db.dtype.element_ty), mask=(q < COUNT) & (k == TAPS))


def _correlated(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str) -> Tensor:
    """Every model's correlation of x (G, B, C, H, W) with its weights (G, N, C, kh, kw)."""
    G, B, C, H, W = x.shape
    N, kh, kw = weight.shape[1], *weight.shape[3:]
    HO, WO = (H + 2 * padding[0] - kh) // stride[0] + 1, (W + 2 * padding[1] - kw) // stride[1] + 1
    BN, BP, BK, warps = (8, 512, 1, 2) if N <= 8 else (16, 256, 1, 2)
    if dot != "fma":
        BN, BP, BK, warps = min(max(triton.next_power_of_2(N), 16), 64), 128, 32, 4
    NB, tiles = triton.cdiv(N, BN), triton.cdiv(B * HO * WO, BP)
    packed = weight.new_zeros(G, C, kh, kw, NB * BN)  # a tap's weights side by side
    packed[..., :N] = weight.permute(0, 2, 3, 4, 1)
    x, bias, y = x.contiguous(), None if bias is None else bias.contiguous(), x.new_empty(G, B, N, HO, WO)
    shape = (C, H, W, N, HO, WO, kh, kw, *stride, *padding)
    with torch.cuda.device_of(x):
        _correlate[(G * tiles * NB,)](x, packed, bias, y, B, *shape, dot, BN, BP, BK, num_warps=warps)
    return y


def _weight_gradients(x: Tensor, dy: Tensor, size: Pair, stride: Pair, padding: Pair, dot: str) -> tuple[Tensor, Tensor]:
    """The gradients with respect to every model's weights and bias, given those with respect to its outputs."""
    (G, B, C, H, W), (N, HO, WO) = x.shape, dy.shape[2:]
    taps, pixels = C * size[0] * size[1], B * HO * WO
    BN, BP, BK, warps = (8, 64, 8, 2) if dot == "fma" else (min(max(triton.next_power_of_2(N), 16), 64), 64, 32, 4)
    chunks = min(max(pixels // 2048, 1), 8)
    length = triton.cdiv(pixels, chunks * BP) * BP
    chunks = triton.cdiv(pixels, length)
    parts = x.new_empty(G, chunks, N, taps + 1, dtype=torch.float32)
    dw, db = x.new_empty(G, N, C, *size), x.new_empty(G, N)
    shape = (C, H, W, N, HO, WO, *size, *stride, *padding)
    grid = (G * chunks * triton.cdiv(N, BN) * triton.cdiv(taps + 1, BK),)
    with torch.cuda.device_of(x):
        _weight_gradient_chunks[grid](x, dy, parts, B, *shape, dot, BN, BP, BK, chunks, length, num_warps=warps)
        _add_chunks[(G * triton.cdiv(N * (taps + 1), 256),)](parts, dw, db, N, taps, chunks, 256, num_warps=4)
    return dw, db


class _Convolution(torch.autograd.Function):
    """The convolution and its gradients."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str) -> Tensor:
        return _correlated(x, weight, bias, stride, padding, dot)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.stride, ctx.padding, ctx.dot = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (sh, sw), (ph, pw), size = ctx.stride, ctx.padding, weight.shape[3:]
        dx = dw = db = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw, db = _weight_gradients(x.contiguous(), dy.contiguous(), size, ctx.stride, ctx.padding, ctx.dot)
        if ctx.needs_input_grad[0]:
            if ctx.stride != (1, 1):  # zeros at the places that the stride left out
                high, wide = x.shape[3] + 2 * ph - size[0] + 1, x.shape[4] + 2 * pw - size[1] + 1
                dy, short = dy.new_zeros(*dy.shape[:3], high, wide), dy
                dy[..., ::sh, ::sw] = short
            turned, around = weight.flip(3, 4).transpose(1, 2), (size[0] - 1 - ph, size[1] - 1 - pw)
            dx = _correlated(dy, turned, None, (1, 1), around, ctx.dot)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Models under ``vmap`` are more models of the same launch."""
        count = info.batch_size
        stacks = []
        for part, dim in zip(inputs[:3], dims[:3], strict=True):
            if part is not None:
                part = (part.expand(count, *part.shape) if dim is None else part.movedim(dim, 0)).flatten(0, 1)
            stacks.append(part)
        return _apply(*stacks, *inputs[3:]).unflatten(0, (count, -1)), 0


_apply: Any = _Convolution.apply  # it has no types


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str = "fma") -> Tensor:
    """Convolve x (G, B, C, H, W) with weight (G, O, C, kh, kw), a model at a time: (G, B, O, H', W')."""
    if dot not in DOTS:
        raise ValueError(f"dot must be one of {', '.join(DOTS)}, not {dot!r}")
    convolved: Tensor = _apply(x, weight, bias, tuple(stride), tuple(padding), dot)
    return convolved

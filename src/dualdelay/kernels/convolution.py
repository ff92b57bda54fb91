"""Many small convolutions in one launch: each model has its own weights and its own minibatch.

A model's result depends neither on how many models there are nor on which: the order of all sums is fixed by the shapes of
one model. The sums are taken by matrix products or, with dot="fma", by plain multiply-adds. "tf32x3" is float32 on the
chip's matrix units: each number is the sum of two short ones, and three of their four products are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
    HY: tl.constexpr, WY: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr, EVERY: tl.constexpr, EACH: tl.constexpr,
    dot: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Write HO x WO pixels of y (G, B, N, HY, WY), given x (G, B, C, H, W) and w (G, C * KH * KW, NP): BN channels of BP
    pixels a program. They stand from (UP, LEFT) on in every EVERY-th row and every EACH-th column.
    """
    TAPS: tl.constexpr = C * KH * KW
    NB: tl.constexpr = (N + BN - 1) // BN
    HIGH: tl.constexpr = PH > 0 or (HO - 1) * SH - PH + KH > H
    EDGES: tl.constexpr = HIGH or PW > 0 or (WO - 1) * SW - PW + KW > W
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
    spot = (r // WO * EVERY + UP) * WY + r % WO * EACH + LEFT
    out = y + g * batch * (N * HY * WY) + (b * (N * HY * WY) + spot)[None, :] + (n * (HY * WY))[:, None]
    tl.store(out, acc.to(y.dtype.element_ty), mask=inside[None, :] & (n < N)[:, None])


@triton.jit
def _pack(
    w: tl.tensor, packed: tl.tensor, model: tl.tensor, first: tl.tensor, out: tl.tensor, into: tl.tensor,
    row: tl.tensor, column: tl.tensor,
    N: tl.constexpr, TAPS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights to packed (G, TAPS, NP), a tap's side by side and zeros after them, given the strides of w."""
    PIECES: tl.constexpr = (TAPS * NP + BLOCK - 1) // BLOCK
    g = (tl.program_id(0) // PIECES).to(tl.int64)
    q = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    n = q % NP
    k = q // NP
    place = first + n * out + k // (KH * KW) * into + k // KW % KH * row + k % KW * column
    inside = q < TAPS * NP
    weight = tl.load(w + g * model + place, mask=inside & (n < N), other=0.0)
    tl.store(packed + g * (TAPS * NP) + q, weight, mask=inside)


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


class _Taps(NamedTuple):
    """Which weights of a model a correlation takes, and where they are: how far apart, and from which one on."""

    outputs: int
    size: Pair
    strides: tuple[int, int, int, int]  # from an output to the next, from a channel, a row and a column to the next
    first: int = 0


def _correlate_into(
    y: Tensor, x: Tensor, weight: Tensor, taps: _Taps, bias: Tensor | None, pixels: Pair, stride: Pair, padding: Pair,
    dot: str, first: Pair = (0, 0), every: Pair = (1, 1),
) -> None:  # fmt: skip
    """Write so many rows and columns of pixels into y: from ``first`` on, one in ``every`` row and column."""
    G, B, C, H, W = x.shape
    N, (kh, kw), count = taps.outputs, taps.size, B * pixels[0] * pixels[1]
    BN, BP, BK, warps = (8, 512, 1, 2) if N <= 8 else (16, 512, 1, 2)
    if dot != "fma":
        BN, BP, BK, warps = min(max(triton.next_power_of_2(N), 16), 64), 128, 32, 4
    elif N > 8 and kh * kw > 9 and max(padding) > 0:  # masks of many taps take registers
        BP, warps = 128, 1
    NB, tiles = triton.cdiv(N, BN), triton.cdiv(count, BP)
    packed = weight.new_empty(G, C * kh * kw, NB * BN)
    shape = (C, H, W, N, *pixels, kh, kw, *stride, *padding, *y.shape[3:], *first, *every)
    pieces = triton.cdiv(C * kh * kw * NB * BN, 512)
    with torch.cuda.device_of(x):
        _pack[(G * pieces,)](
            weight, packed, weight.stride(0), taps.first, *taps.strides, N, C * kh * kw, kh, kw, NB * BN, 512, num_warps=2
        )
        _correlate[(G * tiles * NB,)](x, packed, bias, y, B, *shape, dot, BN, BP, BK, num_warps=warps)


def _correlated(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str) -> Tensor:
    """Every model's correlation of x (G, B, C, H, W) with its weights (G, N, C, kh, kw)."""
    N, size = weight.shape[1], (weight.shape[3], weight.shape[4])
    high, wide = (
        (whole + 2 * around - long) // step + 1
        for whole, around, long, step in zip(x.shape[3:], padding, size, stride, strict=True)
    )
    _, out, into, row, column = weight.stride()
    y, taps = x.new_empty(*x.shape[:2], N, high, wide), _Taps(N, size, (out, into, row, column))
    bias = None if bias is None else bias.contiguous()
    _correlate_into(y, x.contiguous(), weight, taps, bias, (high, wide), stride, padding, dot)
    return y


def _phases(whole: int, long: int, step: int, around: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The places of an axis by their rest modulo the stride: those of a rest meet the same taps.

    Of each rest that meets any: itself, how many places there are, how many taps, the last of them, and the padding of the
    correlation with those in reversed order.
    """
    for rest in range(min(step, whole)):
        tap = (rest + around) % step
        count = -(-(long - tap) // step)
        if count > 0:
            last = tap + step * (count - 1)
            yield rest, -(-(whole - rest) // step), count, last, count - 1 - (rest + around - tap) // step


def _input_gradients(dy: Tensor, weight: Tensor, whole: Sequence[int], stride: Pair, padding: Pair, dot: str) -> Tensor:
    """The gradients with respect to every model's inputs, of so many rows and columns; a stride's gaps cost nothing."""
    C, (kh, kw) = weight.shape[2], weight.shape[3:]
    _, out, into, row, column = weight.stride()
    rows, columns = (list(_phases(*axis)) for axis in zip(whole, (kh, kw), stride, padding, strict=True))
    all_met = len(rows) * len(columns) == min(stride[0], whole[0]) * min(stride[1], whole[1])
    shape = (*dy.shape[:2], C, *whole)
    dx = dy.new_empty(shape) if all_met else dy.new_zeros(shape)
    for top, high, down, last_row, above in rows:
        for left, wide, across, last_column, before in columns:
            strides = (into, out, -stride[0] * row, -stride[1] * column)
            taps = _Taps(C, (down, across), strides, last_row * row + last_column * column)
            _correlate_into(dx, dy, weight, taps, None, (high, wide), (1, 1), (above, before), dot, (top, left), stride)
    return dx


def _weight_gradients(x: Tensor, dy: Tensor, size: Pair, stride: Pair, padding: Pair, dot: str) -> tuple[Tensor, Tensor]:
    """The gradients with respect to every model's weights and bias, given those with respect to its outputs."""
    (G, B, C, H, W), (N, HO, WO) = x.shape, dy.shape[2:]
    taps, pixels = C * size[0] * size[1], B * HO * WO
    BN, BP, BK, warps = (8, 64, 8, 2) if N <= 8 else (16, 64, 4, 2)
    if dot != "fma":
        BN, BP, BK, warps = min(max(triton.next_power_of_2(N), 16), 64), 64, 64, 4
    chunks = min(max(pixels // 2048, 1), 32 if N * taps < 1024 else 8)
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
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str, weight_dot: str
    ) -> Tensor:
        return _correlated(x, weight, bias, stride, padding, dot)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.stride, ctx.padding, ctx.dot, ctx.weight_dot = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            size = weight.shape[3:]
            dw, db = _weight_gradients(x.contiguous(), dy.contiguous(), size, ctx.stride, ctx.padding, ctx.weight_dot)
        if ctx.needs_input_grad[0]:
            dx = _input_gradients(dy.contiguous(), weight, x.shape[3:], ctx.stride, ctx.padding, ctx.dot)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None, None, None

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


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dot: str = "fma",
    weight_dot: str | None = None,
) -> Tensor:
    """Convolve x (G, B, C, H, W) with weight (G, O, C, kh, kw), a model at a time: (G, B, O, H', W').

    ``weight_dot`` says how the gradients by weights are summed up; as everything else by default.
    """
    weight_dot = dot if weight_dot is None else weight_dot
    for given in (dot, weight_dot):
        if given not in DOTS:
            raise ValueError(f"dot must be one of {', '.join(DOTS)}, not {given!r}")
    convolved: Tensor = _apply(x, weight, bias, tuple(stride), tuple(padding), dot, weight_dot)
    return convolved

"""Many small convolutions in one launch: each model has its own weights and its own minibatch.

A model's result depends neither on how many models there are nor on which: the order of all sums is fixed by the shapes of
one model. With dot="fma" the sums are taken by plain multiply-adds, otherwise by products of matrices. "tf32x3" is float32
on the chip's matrix units: each number is the sum of two short ones, and three of their four products are added up.

For products, images are arranged anew: of each pixel all images, and of each of these all channels. A tap is then a product
of two matrices that are read in whole lines, and where it meets the zeros around for all images, it is left out. Gradients
by weights are such correlations, too: with the channels for images, the images for channels and the slopes for weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pooling import largest, spread
from .stacking import more_models

DOTS = ("fma", "tf32x3", "tf32")
_FEW = 16  # channels under which the taps of a row count as channels, too: the matrix units take eight at a time
_LONG = 2048  # terms that a program adds up for a gradient by weights before others' sums are added
Pair = tuple[int, int]


@triton.jit
def _correlate(
    x: tl.tensor, w: tl.tensor, bias: tl.tensor, y: tl.tensor, batch: tl.tensor,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HY: tl.constexpr, WY: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr, EVERY: tl.constexpr, EACH: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """Write HO x WO pixels of y (G, B, N, HY, WY), given x (G, B, C, H, W) and w (G, C * KH * KW, NP): BN channels of BP
    pixels a program. They stand from (UP, LEFT) on in every EVERY-th row and every EACH-th column.
    """
    TAPS: tl.constexpr = C * KH * KW
    NB: tl.constexpr = (N + BN - 1) // BN
    HIGH: tl.constexpr = PH > 0 or (HO - 1) * SH - PH + KH > H
    EDGES: tl.constexpr = HIGH or PW > 0 or (WO - 1) * SW - PW + KW > W
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
    corner = x + g * batch * (C * H * W) + (b * (C * H * W) + top * W + left)
    w += g * (TAPS * NB * BN)
    acc = tl.zeros((BN, BP), tl.float32)
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
    BN: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write a chunk's weight gradient to parts (G, CHUNKS, N, TAPS + 1); the tap after the last is the bias."""
    TAPS: tl.constexpr = C * KH * KW
    NB: tl.constexpr = (N + BN - 1) // BN
    KB: tl.constexpr = (TAPS + BK) // BK  # blocks of the taps and the bias
    TWIN: tl.constexpr = 2 if WO % 2 == 0 and SW == 1 else 1  # pixels side by side also in x
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
    acc = tl.zeros((BN, BK, BP), tl.float32)
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
        spot = tl.multiple_of(b * (N * HO * WO) + r, 1)  # a lane takes the same pixel of dy and of x
        pixel = tl.load((x + corner[None, :] + tap[:, None])[None, :], mask=ok[None, :], other=filler[None, :, None])
        slope = tl.load((dy + spot[None, :] + (n * (HO * WO))[:, None])[:, None, :], mask=valid[:, None, :], other=0.0)
        acc += slope.to(tl.float32) * pixel.to(tl.float32)
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


@triton.jit
def _short_and_rest(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The nearest number of TF32's eleven digits, and what it leaves; of an infinite one that is NaN."""
    short = ((value.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return short, value - short


@triton.jit
def _arrange(
    x: tl.tensor, arranged: tl.tensor, sums: tl.tensor, images: tl.tensor, channels: tl.tensor, padded: tl.tensor,
    model: tl.tensor, image: tl.tensor, channel: tl.tensor, row: tl.tensor, column: tl.tensor, first: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, SW: tl.constexpr, PW: tl.constexpr,
    HALVES: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """Write x, given its strides, to arranged (G, H * WIDE, HALVES, images, padded): BC channels of BP pixels a program.

    The TAPS pixels of a row that an output meets count as channels; halves are the short numbers and what these leave. Sums
    (G, blocks, images) of what each program meets are for the gradient by a bias.
    """
    PB: tl.constexpr = (H * WIDE + BP - 1) // BP
    pid = tl.program_id(0)
    p = pid % PB * BP + tl.arange(0, BP)
    b = pid // PB % images
    block = pid // PB // images
    g = (block // (padded // BC)).to(tl.int64)
    c = block % (padded // BC) * BC + tl.arange(0, BC)
    across = (p % WIDE * SW - PW)[None, :] + (c % TAPS)[:, None]
    ok = (p < H * WIDE)[None, :] & (c < channels * TAPS)[:, None] & (across >= 0) & (across < W)
    place = x + g * model + first + b * image + (c // TAPS * channel)[:, None] + (p // WIDE * row)[None, :]
    value = tl.load(place + across * column, mask=ok, other=0.0).to(tl.float32)
    if sums is not None:
        tl.store(sums + (block.to(tl.int64) * PB + pid % PB) * images + b, tl.sum(tl.sum(value, 1), 0))
    inside = (p < H * WIDE)[:, None]
    size = images * padded
    out = arranged + g * (H * WIDE * HALVES) * size + (p * (HALVES * size) + b * padded)[:, None] + c[None, :]
    if HALVES == 1:
        tl.store(out, tl.trans(value), mask=inside)
    else:
        short, rest = _short_and_rest(tl.trans(value))
        tl.store(out, short, mask=inside)
        tl.store(out + size, rest, mask=inside)


@triton.jit
def _arrange_windows(
    x: tl.tensor, where: tl.tensor, arranged: tl.tensor, sums: tl.tensor,
    images: tl.tensor, channels: tl.tensor, padded: tl.tensor,
    model: tl.tensor, image: tl.tensor, channel: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, HALVES: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr,
) -> None:  # fmt: skip
    """Write slopes of windows of TALL x BROAD pixels where the largest of each stood, and zeros elsewhere.

    To arranged and sums as ``_arrange`` does: BC channels of BP windows a program. Windows at the edge that are not whole
    have no slope.
    """
    HX: tl.constexpr = H // TALL
    WX: tl.constexpr = W // BROAD
    ALL: tl.constexpr = (W + BROAD - 1) // BROAD
    COUNT: tl.constexpr = (H + TALL - 1) // TALL * ALL
    PB: tl.constexpr = (COUNT + BP - 1) // BP
    pid = tl.program_id(0)
    p = pid % PB * BP + tl.arange(0, BP)
    b = pid // PB % images
    block = pid // PB // images
    g = (block // (padded // BC)).to(tl.int64)
    c = block % (padded // BC) * BC + tl.arange(0, BC)
    down = p // ALL
    across = p % ALL
    ok = ((down < HX) & (across < WX))[None, :] & (c < channels)[:, None]
    place = g * model + b * image + (c * channel)[:, None] + (down * WX + across)[None, :]
    stood = tl.load(where + place, mask=ok, other=255).to(tl.int32)
    slope = tl.load(x + place, mask=ok & (stood < 255), other=0.0).to(tl.float32)
    if sums is not None:
        tl.store(sums + (block.to(tl.int64) * PB + pid % PB) * images + b, tl.sum(tl.sum(slope, 1), 0))
    stood, slope = tl.trans(stood), tl.trans(slope)
    size = images * padded
    out = arranged + g * (H * W * HALVES) * size + b * padded + c[None, :]
    for k in tl.static_range(TALL * BROAD):
        i = down * TALL + k // BROAD
        j = across * BROAD + k % BROAD
        inside = ((p < COUNT) & (i < H) & (j < W))[:, None]
        value = tl.where(stood == k, slope, 0.0)
        spot = out + ((i * W + j) * (HALVES * size))[:, None]
        if HALVES == 1:
            tl.store(spot, value, mask=inside)
        else:
            short, rest = _short_and_rest(value)
            tl.store(spot, short, mask=inside)
            tl.store(spot + size, rest, mask=inside)


@triton.jit
def _correlate_arranged(
    x: tl.tensor, w: tl.tensor, bias: tl.tensor, y: tl.tensor, images: tl.tensor, channels: tl.tensor,
    model: tl.tensor, chunk: tl.tensor, image: tl.tensor, output: tl.tensor, row: tl.tensor, column: tl.tensor,
    first: tl.tensor,
    H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, HALVES: tl.constexpr, CHUNKS: tl.constexpr, LINES: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    BB: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Write HO x WO pixels of y, given its strides and arranged x and w: BN outputs of BP pixels of BB images a program.

    A chunk has LINES rows of taps, and these are (DH, DW) apart.
    """
    NB: tl.constexpr = (N + BN - 1) // BN
    PB: tl.constexpr = (HO * WO + BP - 1) // BP
    HIGH: tl.constexpr = PH > 0 or (HO - 1) * SH - PH + (KH - 1) * DH >= H
    EDGES: tl.constexpr = HIGH or PW > 0 or (WO - 1) * SW - PW + (KW - 1) * DW >= W
    pid = tl.program_id(0)
    blocks = tl.cdiv(images, BB)
    part = pid // NB // blocks // PB
    g = (part // CHUNKS).to(tl.int64)
    n = pid % NB * BN + tl.arange(0, BN)
    m = tl.arange(0, BP * BB)  # pixels of an image side by side, as in y
    r = pid // NB // blocks % PB * BP + m % BP
    b = pid // NB % blocks * BB + m // BP
    written = ((r < HO * WO) & (b < images))[:, None] & (n < N)[None, :]
    r = tl.minimum(r, HO * WO - 1)  # what is beyond the last is computed, not written
    b = tl.minimum(b, images - 1)
    top = r // WO * SH - PH
    left = r % WO * SW - PW
    above = part % CHUNKS * LINES
    below = tl.minimum(above + LINES, KH)
    before = 0
    across = KW
    if EDGES:  # taps that are outside for all of these pixels are left out
        above = tl.maximum(above, tl.cdiv(tl.maximum(-tl.max(top, 0), 0), DH))
        below = tl.minimum(below, tl.cdiv(tl.maximum(H - tl.min(top, 0), 0), DH))
        before = tl.cdiv(tl.maximum(-tl.max(left, 0), 0), DW)
        across = tl.maximum(tl.minimum(tl.cdiv(tl.maximum(W - tl.min(left, 0), 0), DW), KW) - before, 0)
    k = tl.arange(0, BK)
    corner = x + g * (H * W) * images * channels + ((top * W + left) * images + b)[:, None] * channels + k[None, :]
    w += g * (KH * KW * HALVES * N) * channels
    weights = w + tl.minimum(n, N - 1)[:, None] * channels + k[None, :]
    acc = tl.zeros((BP * BB, BN), tl.float32)
    for step in range(tl.maximum(below - above, 0) * across * (channels // BK)):
        tap = step // (channels // BK)
        i = above + tap // across
        j = before + tap % across
        c = step % (channels // BK) * BK
        place = corner + ((i * (DH * W) + j * DW) * images * channels + c)
        if EDGES:
            ok = (top + i * DH >= 0) & (top + i * DH < H) & (left + j * DW >= 0) & (left + j * DW < W)
            pixel = tl.load(place, mask=ok[:, None], other=0.0)
        else:
            pixel = tl.load(place)
        here = weights + ((i * KW + j) * (HALVES * N) * channels + c)
        weight = tl.load(here)
        if HALVES == 1:
            acc += tl.dot(pixel, tl.trans(weight), input_precision="tf32")
        else:  # the matrix units cut off what they add to, so sums of many products are taken outside of them
            short, rest = _short_and_rest(pixel)
            product = tl.dot(rest, tl.trans(weight), input_precision="tf32")
            product = tl.dot(short, tl.trans(tl.load(here + N * channels)), product, input_precision="tf32")
            acc += tl.dot(short, tl.trans(weight), product, input_precision="tf32")
    if bias is not None:
        acc += tl.load(bias + g * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = y + g * model + first + part % CHUNKS * chunk + (b * image + r // WO * row + r % WO * column)[:, None]
    tl.store(out + (n * output)[None, :], acc.to(y.dtype.element_ty), mask=written)


@triton.jit
def _add_up(parts: tl.tensor, whole: tl.tensor, COUNT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Add the parts (G, COUNT, SIZE), always in the same order, and write them to whole (G, SIZE)."""
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    g = (tl.program_id(0) // PIECES).to(tl.int64)
    q = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in range(COUNT):
        acc += tl.load(parts + (g * COUNT + part) * SIZE + q, mask=q < SIZE, other=0.0)
    tl.store(whole + g * SIZE + q, acc.to(whole.dtype.element_ty), mask=q < SIZE)


class _Taps(NamedTuple):
    """Which weights of a model a correlation takes, and where they are: how far apart, and from which one on."""

    outputs: int
    size: Pair
    strides: tuple[int, int, int, int]  # from an output to the next, from a channel, a row and a column to the next
    first: int = 0


class _Slopes(NamedTuple):
    """Gradients by outputs: as they are, or those of a pooling's windows, which belong where the largest of each stood."""

    values: Tensor
    size: Pair  # rows and columns of the outputs
    place: Tensor | None = None
    window: Pair = (1, 1)

    def dense(self) -> Tensor:
        """One for every output."""
        if self.place is None:
            return self.values
        return spread(self.values, self.place, (*self.values.shape[:3], *self.size), self.window)


class _Images(NamedTuple):
    """Images as matrices take them: of each pixel all images, and of each of these its channels."""

    values: Tensor  # (G, pixels, halves, images, channels)
    size: Pair
    sums: Tensor  # (G, blocks, images), if they were asked for


def _arranged(
    x: Tensor, shape: Sequence[int], strides: Sequence[int], first: int = 0, unfolded: Sequence[int] | None = None,
    halves: int = 1, summed: bool = False,
) -> _Images:  # fmt: skip
    """Every model's images, of which the numbers, channels, rows and columns are given, arranged anew.

    If unfolded: to so many pixels in a row, each of so many taps of the image's, with this stride and padding.
    """
    images, channels, high, wide = shape
    across, taps, step, before = unfolded or (wide, 1, 1, 0)
    padded = triton.cdiv(channels * taps, 16) * 16
    BP, BC = 32, next(block for block in (64, 32, 16) if padded % block == 0)
    G, blocks = len(x), padded // BC * triton.cdiv(high * across, BP)
    values = x.new_empty(G, high * across, halves, images, padded, dtype=torch.float32)
    sums = x.new_empty(G, blocks if summed else 0, images, dtype=torch.float32)
    sizes = (high, wide, across, taps, step, before, halves, BP, BC)
    _arrange[(G * images * blocks,)](
        x, values, sums if summed else None, images, channels, padded, x.stride(0), *strides, first, *sizes, num_warps=4
    )
    return _Images(values, (high, across), sums)


def _arranged_slopes(slopes: _Slopes, exchanged: bool, halves: int = 1) -> _Images:
    """Slopes arranged anew: their images and channels as these, or exchanged and summed up for the gradient by a bias."""
    dy, (high, wide), (G, B, N, *_) = slopes.values, slopes.size, slopes.values.shape
    model, image, channel, row, column = dy.stride()
    images, channels, steps = (N, B, (channel, image)) if exchanged else (B, N, (image, channel))
    if slopes.place is None:
        return _arranged(dy, (images, channels, high, wide), (*steps, row, column), halves=halves, summed=exchanged)
    padded = triton.cdiv(channels, 16) * 16
    BP, BC = 32, next(block for block in (64, 32, 16) if padded % block == 0)
    blocks = padded // BC * triton.cdiv(triton.cdiv(high, slopes.window[0]) * triton.cdiv(wide, slopes.window[1]), BP)
    values = dy.new_empty(G, high * wide, halves, images, padded, dtype=torch.float32)
    sums = dy.new_empty(G, blocks if exchanged else 0, images, dtype=torch.float32)
    _arrange_windows[(G * images * blocks,)](
        *(dy, slopes.place, values, sums if exchanged else None, images, channels, padded, model, *steps),
        *(high, wide, *slopes.window, halves, BP, BC),
        num_warps=4,
    )
    return _Images(values, (high, wide), sums)


class _Place(NamedTuple):
    """Where results go: how far apart, and from which one on."""

    model: int
    chunk: int
    image: int
    output: int
    row: int
    column: int
    first: int = 0


def _multiply_into(
    y: Tensor, place: _Place, images: _Images, weights: _Images, bias: Tensor | None, pixels: Pair, stride: Pair,
    padding: Pair, together: Pair, apart: Pair = (1, 1), chunks: int = 1, lines: int | None = None,
) -> None:  # fmt: skip
    """Correlate images with weights whose taps are so far apart; a chunk adds up so many lines of them.

    A program takes so many pixels, of so many images at most, together.
    """
    (G, _, _, count, channels), (_, _, halves, N, _) = images.values.shape, weights.values.shape
    BN = min(max(triton.next_power_of_2(N), 16), 64)
    BK = 64 if channels % 64 == 0 and BN <= 32 else 32 if channels % 32 == 0 else 16
    BB = min(triton.next_power_of_2(count), together[1])
    BP = together[0] // BB
    shape = (*images.size, N, *pixels, *weights.size, *stride, *padding, *apart, halves, chunks, lines or weights.size[0])
    grid = G * chunks * triton.cdiv(pixels[0] * pixels[1], BP) * triton.cdiv(count, BB) * triton.cdiv(N, BN)
    _correlate_arranged[(grid,)](
        images.values, weights.values, bias, y, count, channels, *place, *shape, BN, BP, BB, BK, num_warps=4, num_stages=3
    )


def _multiply_by_weights(
    y: Tensor, images: _Images, weight: Tensor, channels: int, taps: _Taps, bias: Tensor | None, pixels: Pair, stride: Pair,
    padding: Pair, dot: str, first: Pair = (0, 0), every: Pair = (1, 1), unfolded: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Write so many rows and columns of pixels into y: from ``first`` on, one in ``every`` row and column."""
    halves = 2 if dot == "tf32x3" else 1
    weights = _arranged(weight, (taps.outputs, channels, *taps.size), taps.strides, taps.first, unfolded, halves)
    model, image, output, row, column = y.stride()
    start = first[0] * row + first[1] * column
    place = _Place(model, 0, image, output, every[0] * row, every[1] * column, start)
    together = (128, 64 if max(padding) > 1 else 16)  # few pixels leave out more taps, many are written side by side
    _multiply_into(y, place, images, weights, bias, pixels, stride, padding, together)


def _add_into(
    y: Tensor, x: Tensor, weight: Tensor, taps: _Taps, bias: Tensor | None, pixels: Pair, stride: Pair, padding: Pair,
    first: Pair, every: Pair,
) -> None:  # fmt: skip
    """The same by plain multiply-adds, from images as they are."""
    G, B, C, H, W = x.shape
    N, (kh, kw), count = taps.outputs, taps.size, B * pixels[0] * pixels[1]
    BN, BP, warps = (8, 512, 2) if N <= 8 else (16, 512, 2)
    if N > 8 and kh * kw > 9 and max(padding) > 0:  # masks of many taps take registers
        BP, warps = 128, 1
    NB, tiles = triton.cdiv(N, BN), triton.cdiv(count, BP)
    packed = weight.new_empty(G, C * kh * kw, NB * BN)
    shape = (C, H, W, N, *pixels, kh, kw, *stride, *padding, *y.shape[3:], *first, *every)
    pieces = triton.cdiv(C * kh * kw * NB * BN, 512)
    _pack[(G * pieces,)](
        weight, packed, weight.stride(0), taps.first, *taps.strides, N, C * kh * kw, kh, kw, NB * BN, 512, num_warps=2
    )
    _correlate[(G * tiles * NB,)](x, packed, bias, y, B, *shape, BN, BP, num_warps=warps)


def _correlated(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str) -> Tensor:
    """Every model's correlation of x (G, B, C, H, W) with its weights (G, N, C, kh, kw)."""
    N, size = weight.shape[1], (weight.shape[3], weight.shape[4])
    high, wide = (
        (whole + 2 * around - long) // step + 1
        for whole, around, long, step in zip(x.shape[3:], padding, size, stride, strict=True)
    )
    _, out, into, row, column = weight.stride()
    y, taps = x.new_empty(*x.shape[:2], N, high, wide), _Taps(N, size, (out, into, row, column))
    x, bias, pixels = x.contiguous(), None if bias is None else bias.contiguous(), (high, wide)
    with torch.cuda.device_of(x):
        if dot == "fma":
            _add_into(y, x, weight, taps, bias, pixels, stride, padding, (0, 0), (1, 1))
            return y
        B, C, H, W = x.shape[1:]
        across, unfolded = None, None
        if C < _FEW and size[1] > 1:
            across, unfolded = (wide, size[1], stride[1], padding[1]), (1, size[1], 1, 0)
            stride, padding = (stride[0], 1), (padding[0], 0)
        images = _arranged(x, (B, C, H, W), x.stride()[1:], unfolded=across)
        _multiply_by_weights(y, images, weight, C, taps, bias, pixels, stride, padding, dot, unfolded=unfolded)
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


def _input_gradients(
    slopes: _Slopes, weight: Tensor, whole: Sequence[int], stride: Pair, padding: Pair, dot: str
) -> Tensor:
    """The gradients with respect to every model's inputs, of so many rows and columns; a stride's gaps cost nothing."""
    C, (kh, kw) = weight.shape[2], weight.shape[3:]
    _, out, into, row, column = weight.stride()
    rows, columns = (list(_phases(*axis)) for axis in zip(whole, (kh, kw), stride, padding, strict=True))
    all_met = len(rows) * len(columns) == min(stride[0], whole[0]) * min(stride[1], whole[1])
    (G, B, N, *_), dy = slopes.values.shape, slopes.values
    dx = dy.new_empty(G, B, C, *whole) if all_met else dy.new_zeros(G, B, C, *whole)
    with torch.cuda.device_of(dy):
        if dot == "fma":
            dy = slopes.dense()
        else:
            images = _arranged_slopes(slopes, exchanged=False)
        for top, high, down, last_row, above in rows:
            for left, wide, across, last_column, before in columns:
                steps = (into, out, -stride[0] * row, -stride[1] * column)
                taps = _Taps(C, (down, across), steps, last_row * row + last_column * column)
                pixels, around, first = (high, wide), (above, before), (top, left)
                if dot == "fma":
                    _add_into(dx, dy, weight, taps, None, pixels, (1, 1), around, first, stride)
                else:
                    _multiply_by_weights(dx, images, weight, N, taps, None, pixels, (1, 1), around, dot, first, stride)
    return dx


def _weight_gradients(
    x: Tensor, slopes: _Slopes, size: Pair, stride: Pair, padding: Pair, dot: str
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to every model's weights and bias, given those with respect to its outputs."""
    with torch.cuda.device_of(x):
        if dot == "fma":
            return _added_weight_gradients(x, slopes.dense(), size, stride, padding)
        (G, B, C, H, W), N, (HO, WO) = x.shape, slopes.values.shape[2], slopes.size
        model, image, channel, row, column = x.stride()
        images = _arranged(x, (C, B, H, W), (channel, image, row, column))
        weights = _arranged_slopes(slopes, exchanged=True, halves=2 if dot == "tf32x3" else 1)
        lines = min(max(_LONG // (WO * B), 1), HO)
        chunks = triton.cdiv(HO, lines)
        parts = x.new_empty(G, chunks, N, C, *size, dtype=torch.float32)
        model, chunk, output, channel, row, column = parts.stride()
        place = _Place(model, chunk, channel, output, row, column)
        together = (128 if size[0] * size[1] > 9 else 64, 64)
        _multiply_into(parts, place, images, weights, None, size, (1, 1), padding, together, stride, chunks, lines)
        dw, db = x.new_empty(G, N, C, *size), x.new_empty(G, N)
        for pieces, whole in ((parts, dw), (weights.sums, db)):
            long = whole[0].numel()
            _add_up[(G * triton.cdiv(long, 256),)](pieces, whole, pieces.shape[1], long, 256, num_warps=4)
    return dw, db


def _added_weight_gradients(x: Tensor, dy: Tensor, size: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """The same by plain multiply-adds."""
    (G, B, C, H, W), (N, HO, WO) = x.shape, dy.shape[2:]
    taps, pixels = C * size[0] * size[1], B * HO * WO
    BN, BP, BK, warps = (8, 64, 8, 2) if N <= 8 else (16, 64, 4, 2)
    chunks = min(max(pixels // 2048, 1), 32 if N * taps < 1024 else 8)
    length = triton.cdiv(pixels, chunks * BP) * BP
    chunks = triton.cdiv(pixels, length)
    parts = x.new_empty(G, chunks, N, taps + 1, dtype=torch.float32)
    dw, db = x.new_empty(G, N, C, *size), x.new_empty(G, N)
    shape = (C, H, W, N, HO, WO, *size, *stride, *padding)
    grid = (G * chunks * triton.cdiv(N, BN) * triton.cdiv(taps + 1, BK),)
    _weight_gradient_chunks[grid](x, dy, parts, B, *shape, BN, BP, BK, chunks, length, num_warps=warps)
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
        slopes = _Slopes(dy.contiguous(), (dy.shape[3], dy.shape[4]))
        return *_gradients(ctx, slopes, x, weight, ctx.needs_input_grad[:3]), None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Models under ``vmap`` are more models of the same launch."""
        stacks = more_models(info.batch_size, inputs[:3], dims)
        return _apply(*stacks, *inputs[3:]).unflatten(0, (info.batch_size, -1)), 0


class _PooledConvolution(torch.autograd.Function):
    """The largest of each window of a convolution's outputs that were rectified, and the whole way back.

    The outputs are given. Of their gradients only those of the windows are ever written.
    """

    @staticmethod
    def forward(
        y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dot: str, weight_dot: str,
        size: Pair,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return largest(y, size, rectified=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        y, x, weight, _, ctx.stride, ctx.padding, ctx.dot, ctx.weight_dot, ctx.size = inputs
        ctx.outputs = (y.shape[3], y.shape[4])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, place = ctx.saved_tensors
        slopes = _Slopes(dy.contiguous(), ctx.outputs, place, ctx.size)
        return None, *_gradients(ctx, slopes, x, weight, ctx.needs_input_grad[1:4]), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], Pair]:
        """Models under ``vmap`` are more models of the same launch."""
        stacks = more_models(info.batch_size, inputs[:4], dims)
        y, place = (part.unflatten(0, (info.batch_size, -1)) for part in _apply_pooled(*stacks, *inputs[4:]))
        return (y, place), (0, 0)


def _gradients(
    ctx: Any, slopes: _Slopes, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those with respect to inputs, weights and biases, as far as they are needed."""
    dx = dw = db = None
    if needed[1] or needed[2]:
        size = (weight.shape[3], weight.shape[4])
        dw, db = _weight_gradients(x.contiguous(), slopes, size, ctx.stride, ctx.padding, ctx.weight_dot)
    if needed[0]:
        dx = _input_gradients(slopes, weight, x.shape[3:], ctx.stride, ctx.padding, ctx.dot)
    return dx, dw, db if needed[2] else None


_apply: Any = _Convolution.apply  # they have no types
_apply_pooled: Any = _PooledConvolution.apply


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


class Convolved(NamedTuple):
    """A convolution that was taken: its outputs and what it was given."""

    y: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: Pair
    padding: Pair
    dot: str
    weight_dot: str


def pooled(convolved: Convolved, size: Pair) -> Tensor:
    """The largest of each window of this size of a convolution's outputs, or zero where that is larger.

    The same as pooling what a ReLU makes of them; gradients go straight to the convolution's inputs, weights and biases.
    """
    y: Tensor = _apply_pooled(convolved.y.detach(), *convolved[1:], size)[0]
    return y

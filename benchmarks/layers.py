"""Layers that people use and no kernel was written for: whether a GPU takes their gradients, right, and how fast.

python benchmarks/layers.py [cpu | cuda] [time] [NAME ...]

Of each network: how far a run on the device and the same run in a grid end from the run on a processor, as a share of the
way; whether the run again has the same bits; and what was warned of. ``time`` adds microseconds a gradient of a plain loop,
one run, and a grid of 36 runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import dualdelay as dd
from gpu import per_gradient, rates, sweeping
from models import Untuned

WORKERS, BATCH, CLASSES, BYTES, LENGTH, WIDTH = 4, 16, 10, 50, 24, 32
SPEEDS = dd.FixedSpeeds([1.0, 1.3, 1.7, 4.0])


class Net(nn.Module):
    """Parts, and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits."""
        return self.function(self, inputs)


def recurrent(layer: nn.Module, size: int = WIDTH) -> Net:
    """The last state of a recurrent layer that reads bytes."""
    parts = {"read": nn.Embedding(BYTES, 16), "layer": layer, "out": nn.Linear(size, CLASSES)}
    return Net(lambda net, x: net.out(net.layer(net.read(x))[0][:, -1]), **parts)


def packed() -> Net:
    """An LSTM that reads as much of each text as its first byte says: lengths have to be known on the processor."""

    def forward(net: Any, x: Tensor) -> Tensor:
        texts = pack_padded_sequence(net.read(x), 1 + x[:, 0].cpu() % LENGTH, batch_first=True, enforce_sorted=False)
        logits: Tensor = net.out(net.layer(texts)[1][0][-1])
        return logits

    layer = nn.LSTM(16, WIDTH, batch_first=True)
    return Net(forward, read=nn.Embedding(BYTES, 16), layer=layer, out=nn.Linear(WIDTH, CLASSES))


def by_cells() -> Net:
    """A recurrent layer as a loop of one's own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), WIDTH, device=x.device)
        for step in net.read(x).unbind(1):
            state = net.cell(step, state)
        logits: Tensor = net.out(state)
        return logits

    return Net(forward, read=nn.Embedding(BYTES, 16), cell=nn.GRUCell(16, WIDTH), out=nn.Linear(WIDTH, CLASSES))


def attending(function: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> Net:
    """The mean over places of a layer that attends."""
    read, out = nn.Embedding(BYTES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return Net(lambda net, x: net.out(function(net, x).mean(1)), read=read, layer=layer, out=out)


def images(*layers: nn.Module, size: int) -> nn.Sequential:
    """Layers of images, and classes of what they make."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, CLASSES))


def flat(function: Callable[[Any, Tensor], Tensor], **parts: Any) -> Net:
    """A function of images as rows of 3,072 numbers."""
    return Net(lambda net, x: function(net, x.flatten(1)), **parts)


def unet() -> Net:
    """Down, up again by a transposed convolution and by interpolation, and what was on the way joined."""

    def forward(net: Any, x: Tensor) -> Tensor:
        wide = net.first(x).relu()
        deep = net.down(wide).relu()
        larger = functional.interpolate(deep[:, :8], scale_factor=2, mode="bilinear", align_corners=False)
        logits: Tensor = net.out(torch.cat([wide, net.up(deep) + larger], 1)).mean((-1, -2))
        return logits

    parts = {"first": nn.Conv2d(3, 8, 3, padding=1), "down": nn.Conv2d(8, 16, 3, 2, 1)}
    return Net(forward, **parts, up=nn.ConvTranspose2d(16, 8, 2, 2), out=nn.Conv2d(16, CLASSES, 1))


def tied() -> Net:
    """An embedding that is the output's matrix as well."""
    net = Net(lambda net, x: net.out(net.read(x).mean(1).tanh()), read=nn.Embedding(BYTES, 16), out=nn.Linear(16, BYTES))
    net.out.weight = net.read.weight
    return net


def low_rank() -> Net:
    """A matrix that is frozen, and a change of it of low rank."""
    base = nn.Linear(3072, 64).requires_grad_(False)
    a, b = nn.Parameter(torch.randn(3072, 4) / 50), nn.Parameter(torch.zeros(4, 64))
    return flat(lambda net, x: net.out(functional.gelu(net.base(x) + x @ net.a @ net.b)), base=base, a=a, b=b, out=last())


def last(size: int = 64) -> nn.Linear:
    """The last layer of a network."""
    return nn.Linear(size, CLASSES)


def mixture() -> Net:
    """The two best of four experts, by weights."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = net.gate(x)
        weights, chosen = scores.softmax(-1).topk(2)
        return torch.einsum("bd,edk,be->bk", x, net.experts, torch.zeros_like(scores).scatter(1, chosen, weights))

    return flat(forward, gate=nn.Linear(3072, 4), experts=nn.Parameter(torch.randn(4, 3072, CLASSES) / 100))


def normalised_by_hand(net: Any, x: Tensor) -> Tensor:
    """Means that are numbers in the code, and so travel to the device at every call."""
    middle, spread = torch.tensor([0.1, 0.2, 0.3], device=x.device), torch.tensor([0.9, 0.8, 0.7]).to(x.device)
    logits: Tensor = net.out(((x - middle[:, None, None]) / spread[:, None, None]).flatten(1))
    return logits


def masked_by_size(net: Any, x: Tensor) -> Tensor:
    """Boolean indexing, which makes as many numbers as there happen to be."""
    clipped = x.clone()
    clipped[x > 3] = 3.0
    logits: Tensor = net.out(clipped) + x[x > 2].mean()
    return logits


def before(length: int, device: Any) -> Tensor:
    """A mask for the places before."""
    return nn.Transformer.generate_square_subsequent_mask(length, device=device)


IMAGES, TEXTS = (3, 32, 32), (LENGTH,)
SHORT = {"batch_first": True, "dropout": 0.0}
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: recurrent(nn.LSTM(16, WIDTH, batch_first=True)), TEXTS),
    "lstm both ways": (lambda: recurrent(nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)), TEXTS),
    "gru": (lambda: recurrent(nn.GRU(16, WIDTH, batch_first=True)), TEXTS),
    "rnn": (lambda: recurrent(nn.RNN(16, WIDTH, batch_first=True)), TEXTS),
    "lstm of packed texts": (packed, TEXTS),
    "gru by cells": (by_cells, TEXTS),
    "depthwise": (
        lambda: images(
            *(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.Hardswish()),
            *(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.GroupNorm(4, 16), nn.ReLU6()),
            *(nn.Conv2d(16, 32, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
            size=32,
        ),
        IMAGES,
    ),
    "unet": (unet, IMAGES),
    "one dimension": (
        lambda: images(
            *(nn.Flatten(2), nn.Conv1d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(16, 16, 3, padding=2, dilation=2), nn.ELU(), nn.AdaptiveMaxPool1d(1)),
            size=16,
        ),
        IMAGES,
    ),
    "three dimensions": (
        lambda: images(
            *(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool3d((3, 4, 4))),
            size=256,
        ),
        IMAGES,
    ),
    "instance norm": (
        lambda: images(
            *(nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"), nn.InstanceNorm2d(8, affine=True)),
            *(nn.LeakyReLU(), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(4)),
            size=128,
        ),
        IMAGES,
    ),
    "in place": (lambda: images(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.AvgPool2d(30), size=8), IMAGES),
    "tied": (tied, TEXTS),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(BYTES, 64, mode="mean"), last()), TEXTS),
    "low rank": (low_rank, IMAGES),
    "gated": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.RMSNorm(128), nn.GLU(), nn.Softplus(), last()),
        IMAGES,
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(3072, 64)), nn.Tanh(), last()),
        IMAGES,
    ),
    "bilinear": (
        lambda: flat(lambda n, x: n.b(n.p(n.a(x)), n.a(x)), a=last(3072), p=nn.PReLU(), b=nn.Bilinear(10, 10, 10)),
        IMAGES,
    ),
    "fourier": (
        lambda: Net(
            lambda net, x: net.out(torch.fft.irfft(torch.fft.rfft(x) * net.w, n=32).flatten(1)),
            w=nn.Parameter(torch.randn(3, 32, 17) / 10),
            out=last(3072),
        ),
        IMAGES,
    ),
    "einsum": (
        lambda: Net(
            lambda net, x: net.out(torch.einsum("bchw,cwk->bhk", x, net.w).flatten(1)),
            w=nn.Parameter(torch.randn(3, 32, 8) / 10),
            out=last(256),
        ),
        IMAGES,
    ),
    "experts": (mixture, IMAGES),
    "attention": (
        lambda: attending(
            lambda n, x: n.layer(n.read(x), n.read(x), n.read(x))[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        ),
        TEXTS,
    ),
    "encoder": (
        lambda: attending(
            lambda n, x: n.layer(n.read(x), src_key_padding_mask=x == 0), nn.TransformerEncoderLayer(WIDTH, 2, 64, **SHORT)
        ),
        TEXTS,
    ),
    "decoder": (
        lambda: attending(
            lambda n, x: n.layer(n.read(x), n.read(x), tgt_mask=before(LENGTH, x.device), tgt_is_causal=True),
            nn.TransformerDecoderLayer(WIDTH, 2, 64, **SHORT),
        ),
        TEXTS,
    ),
    "positions": (
        lambda: attending(
            lambda n, x: n.read(x) + n.layer(torch.arange(LENGTH, device=x.device)), nn.Embedding(LENGTH, WIDTH)
        ),
        TEXTS,
    ),
    "numbers in the code": (lambda: Net(normalised_by_hand, out=last(3072)), IMAGES),
    "a branch on a value": (
        lambda: flat(lambda n, x: n.a(x) if float(x.sum()) > 0 else n.b(x), a=last(3072), b=last(3072)),
        IMAGES,
    ),
    "boolean indexing": (lambda: flat(masked_by_size, out=last(3072)), IMAGES),
    "checkpointing": (
        lambda: flat(
            lambda n, x: n.b(checkpoint(lambda y: n.a(y).relu(), x, use_reentrant=False)), a=nn.Linear(3072, 64), b=last()
        ),
        IMAGES,
    ),
}  # fmt: skip


def untuned(name: str) -> Untuned:
    """A network as other benchmarks take it, and data for it."""
    make, inputs = NETS[name]
    return Untuned(make, cross_entropy, BATCH, inputs)


def samples(one: Untuned) -> tuple[Tensor, Tensor]:
    """Random inputs and classes."""
    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (2000,), generator=draw)
    if one.inputs == TEXTS:
        return torch.randint(BYTES, (2000, LENGTH), generator=draw), classes
    return torch.randn(2000, *one.inputs, generator=draw), classes


def compared(name: str, device: str) -> str:
    """How far runs on a device end from one on the processor."""
    one = untuned(name)
    problems = [one.problem(samples(one), WORKERS, seed, dd.Network) for seed in range(2)]
    common: dict[str, Any] = {"speeds": SPEEDS, "updates": 30, "seed": 0, "evaluation": dd.Evaluation(every=15)}
    there = {"compute": dd.Compute(device=device, batch=True)}
    exact = dd.simulate(dd.DuDe(lr=0.02), problems[0], **common)
    alone, again = (dd.simulate(dd.DuDe(lr=0.02), problems[0], **common, **there) for _ in range(2))
    grid = {"algorithm": [dd.DuDe(lr=0.02), dd.DuDe(lr=0.03)], "problem": problems}
    beside = dd.sweep(grid, **common, **there).runs[0]
    assert beside is not None
    way = (exact.x - problems[0].start(0)).norm()
    off = [float((run.x.cpu() - exact.x).norm() / way) for run in (alone, beside)]
    objective = abs(alone.metrics.objective[-1] / exact.metrics.objective[-1] - 1)
    same = "the same" if torch.equal(alone.x, again.x) else "OTHER BITS"
    return f"{off[0]:8.1e} {off[1]:8.1e} {objective:9.1e}  {same}"


def timed(name: str, device: str) -> str:
    """Microseconds a gradient of a plain loop, one run and a grid."""
    one = untuned(name)
    inputs, targets = (part.to(device) for part in samples(one))
    module = one.model().to(device)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def plain(count: int) -> int:
        for _ in range(count):
            rows = torch.randint(len(inputs), (BATCH,), device=device)
            torch.autograd.grad(one.loss(module(inputs[rows]), targets[rows]), parameters, allow_unused=True)
        return count

    loop, _ = per_gradient(plain, 50, 200)
    problems = [one.problem(samples(one), WORKERS, seed) for seed in range(3)]
    single, _ = per_gradient(sweeping(problems[:1], rates(1), WORKERS), 100, 400)
    grid, _ = per_gradient(sweeping(problems, rates(12), WORKERS), 25, 100)
    return f"{loop * 1e6:7.0f} {single * 1e6:7.0f} {loop / single:5.1f} {grid * 1e6:7.1f} {loop / grid:5.1f}"


def main(words: list[str]) -> None:
    """Print a table, a line for each network."""
    device = "cuda" if "cuda" in words else "cpu"
    names = [name for name in NETS if name in words] or list(NETS)
    print(f"{'':20s}    alone   a grid objective  again {'  plain one run times 36 runs times' if 'time' in words else ''}")
    for name in names:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            try:
                line = compared(name, device) + (f"  {timed(name, device)}" if "time" in words else "")
            except Exception as error:
                line = f"FAILED {type(error).__name__}: {str(error)[:300]}"
        print(f"{name:20s} {line}", flush=True)
        for text in sorted({" ".join(str(warning.message).split()) for warning in given}):
            print(f"{'':20s}   {text[:200]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What several benchmarks train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.problems.cifar10 import resnet, wide
from dualdelay.problems.transformer import Transformer, loss


class Unevaluated(dd.Network):
    """A network whose evaluation costs nothing."""

    def evaluate(self, x: Tensor) -> dict[str, float]:
        """No number at all."""
        return {"objective": 0.0}


def groupnorm() -> nn.Module:
    """Two convolutions with GroupNorm and a linear layer on images of 28 x 28, 20,586 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip


class Patches(nn.Module):
    """A vision transformer of torch's own layers: 64 patches of an image, four blocks of width 128, 809,098 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Conv2d(3, 128, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(64, 128))
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, norm=nn.LayerNorm(128), enable_nested_tensor=False)
        self.output = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of ten classes."""
        patches = self.taken(images).flatten(-2).transpose(-1, -2)
        logits: Tensor = self.output(self.blocks(patches + self.places).mean(-2))
        return logits


@dataclass(frozen=True)
class Untuned:
    """A network other than LeNet, which kernels were first written for, and random data of the shape that it takes.

    Block sizes of the convolutions have since been chosen by trials on layers of three of these.
    """

    model: Callable[[], nn.Module]
    loss: Any
    batch: int
    inputs: tuple[int, ...]
    classes: int = 10

    def data(self, samples: int = 20_000) -> tuple[Tensor, Tensor]:
        """Images and classes, or texts and their next bytes."""
        draw = torch.Generator().manual_seed(0)
        if self.classes == 256:
            texts = torch.randint(256, (samples, self.inputs[0] + 1), generator=draw, dtype=torch.uint8)
            return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
        return torch.randn(samples, *self.inputs, generator=draw), torch.randint(self.classes, (samples,), generator=draw)

    def problem(self, data: Sequence[Tensor], workers: int = 10, seed: int = 0, kind: Any = Unevaluated) -> Any:
        """The data in equal parts, another for each seed."""
        order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
        whole = torch.utils.data.TensorDataset(*data)
        shards = [torch.utils.data.Subset(whole, order[k::workers].tolist()) for k in range(workers)]
        return kind(self.model, self.loss, shards, self.batch, seed=seed, full_gradient=False)


UNTUNED = {
    "wide": Untuned(wide, cross_entropy, 64, (3, 32, 32)),
    "groupnorm": Untuned(groupnorm, cross_entropy, 64, (1, 28, 28)),
    "resnet": Untuned(resnet, cross_entropy, 64, (3, 32, 32)),
    "vision": Untuned(Patches, cross_entropy, 32, (3, 32, 32)),
    "transformer": Untuned(lambda: Transformer(128, 128, 4, 4), loss, 16, (128,), 256),
}

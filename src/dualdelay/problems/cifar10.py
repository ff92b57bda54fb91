"""CIFAR-10 split over workers that see different classes, with the paper's two-convolution network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.data import TensorDataset

from .images import ImageProblem, Images

# The official binary files, each of 10,000 rows of one label and 3,072 pixels, by their md5 sums.
FILES = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_ROW = 3073
LARGEST = 10_000 * _ROW  # bytes of a file
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, by channel


def lenet() -> nn.Module:
    """Two convolutions and three linear layers, 62,006 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def wide() -> nn.Module:
    """Two convolutions of 32 and 64 channels and two linear layers, 878,538 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def small() -> nn.Module:
    """Images of 8 x 8 and two linear layers, 13,002 weights: fifty times faster, for a first look."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))


class _Block(nn.Module):
    """Two convolutions with GroupNorm, added to what goes in, or to a 1 x 1 convolution of it where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(8, outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(8, outside),
        )  # fmt: skip
        same = inside == outside and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.path(images) + self.beside(images))


def resnet() -> nn.Module:
    """A residual network of eight layers with GroupNorm, 77,850 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
        _Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS = {"lenet": lenet, "wide": wide, "small": small, "resnet": resnet}


class Cifar10(ImageProblem):
    """CIFAR-10 split over workers that see different classes, with a two-convolution network.

    The data come from ``dualdelay data cifar10``, which needs to be run once.

    workers: how many.
    alpha: concentration of the Dirichlet split; the smaller, the more heterogeneous the workers.
    seed: names the split and the minibatches; None: the run's own seed does.
    root: the folder with the official binary files; None: cifar10 in $DUALDELAY_DATA or the user's cache folder.
    model: "lenet", of 62,006 weights, "wide", of 878,538, "small", of 13,002 on images of 8 x 8, or "resnet", a residual
        network with GroupNorm of 77,850.
    samples: train with the first so many images alone and test with a fifth as many; None: all.
    split: "dirichlet" (the paper's rule), "iid", "label", "label_k[k=2]" (so many classes for each worker),
        "quantity[alpha=0.5]" or "quantity[power=1]" (unequal sizes), or a list of sample numbers for each worker.
    empty: what to do when the split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least samples per worker when resampling.
    batch_size: samples per gradient.
    weights: whether workers count "equal" in F or by their "samples".
    full_gradient: whether evaluation computes the norm of the full gradient.
    """

    name, title, files, largest, count, for_each_tested = "cifar10", "CIFAR-10", FILES, LARGEST, 50_000, 5
    models = MODELS

    @classmethod
    def read(cls, root: Path) -> Images:
        rows = [np.fromfile(root / name, dtype=np.uint8).reshape(-1, _ROW) for name in cls.files]
        return _normalised(np.concatenate(rows[:-1])), _normalised(rows[-1])  # the last file is to test with


def _normalised(rows: npt.NDArray[np.uint8]) -> TensorDataset:
    """Images by channel, and classes."""
    pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return TensorDataset(pixels.div_(255).sub_(mean).div_(std), torch.from_numpy(rows[:, 0].astype(np.int64)))

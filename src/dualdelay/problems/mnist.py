"""MNIST and Fashion-MNIST: 70,000 images of 28 x 28 in ten classes each, split over workers that see different ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from .images import ImageProblem, Images

# The files by their sha256 sums: images and classes to train with, then to test with, as the authors of MNIST lay them out.
MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
# The same of Fashion-MNIST, each part in the order that ``cli.datasets`` puts it in, whatever the order of its source.
FASHION_MNIST_FILES = {
    "train-images-idx3-ubyte": "0acbddfe52b3167a2b8c140f15f76ae82956ff946902bda0c2c69d9babd5f5a3",
    "train-labels-idx1-ubyte": "2409df1a5611d0c0dc2282badc9d4af05066c1539e391e521739ddeba417aadf",
    "t10k-images-idx3-ubyte": "53b065434804ba0adfce9df59ae93854d8dcf81ca7f4533b5115637a7ad0a4a1",
    "t10k-labels-idx1-ubyte": "8797e7ce32208666b5e56db92f0a4e5bd8b5fad5774d861539ab645d43b2236f",
}
LARGEST = 60_000 * 784 + 16  # bytes of a file
_HEADS = (16, 8)  # bytes before the images, and before the classes


def lenet() -> nn.Module:
    """Two convolutions and three linear layers, 44,426 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def small() -> nn.Module:
    """Images of 7 x 7 and two linear layers, 3,850 weights: for a first look."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 10))


def linear() -> nn.Module:
    """One linear layer, 7,850 weights: a convex objective."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


MODELS = {"lenet": lenet, "small": small, "linear": linear}


class Mnist(ImageProblem):
    """MNIST's handwritten digits split over workers that see different ones, with a two-convolution network.

    The data come from ``dualdelay data mnist``, which needs to be run once.

    workers: how many.
    alpha: concentration of the Dirichlet split; the smaller, the more heterogeneous the workers.
    seed: names the split and the minibatches; None: the run's own seed does.
    root: the folder with the four files; None: the one that the command puts them into.
    model: "lenet", of 44,426 weights, "small", of 3,850 on images of 7 x 7, or "linear", of 7,850.
    samples: train with the first so many images alone and test with a sixth as many; None: all.
    split: "dirichlet" (the paper's rule), "iid", "label", "label_k[k=2]" (so many classes for each worker),
        "quantity[alpha=0.5]" or "quantity[power=1]" (unequal sizes), or a list of sample numbers for each worker.
    empty: what to do when the split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least samples per worker when resampling, or with unequal sizes.
    batch_size: samples per gradient.
    weights: whether workers count "equal" in F or by their "samples".
    full_gradient: whether evaluation computes the norm of the full gradient.
    """

    name, title, files, largest, count, for_each_tested = "mnist", "MNIST", MNIST_FILES, LARGEST, 60_000, 6
    models = MODELS
    mean, std = 0.1307, 0.3081  # of the training images' pixels

    @classmethod
    def read(cls, root: Path) -> Images:
        images, classes, tested, their_classes = cls.files
        return cls._tensors(root, images, classes), cls._tensors(root, tested, their_classes)

    @classmethod
    def _tensors(cls, root: Path, images: str, classes: str) -> TensorDataset:
        pixels, labels = (
            np.fromfile(root / name, dtype=np.uint8)[head:] for name, head in zip((images, classes), _HEADS, strict=True)
        )
        inputs = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)).float()
        return TensorDataset(inputs.div_(255).sub_(cls.mean).div_(cls.std), torch.from_numpy(labels.astype(np.int64)))


class FashionMnist(Mnist):
    """Fashion-MNIST's clothes split over workers that see different ones, with the networks and settings of ``Mnist``.

    The data come from ``dualdelay data fashion_mnist``, which needs to be run once.
    """

    name, title, files, mean, std = "fashion_mnist", "Fashion-MNIST", FASHION_MNIST_FILES, 0.2860, 0.3530

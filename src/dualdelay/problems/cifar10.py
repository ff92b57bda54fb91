"""CIFAR-10 split over workers that see different classes, with the paper's two-convolution network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from ..core.errors import BadInput, plain_number, require_one_of, require_path, require_whole
from .network import Network, Weighting
from .splits import Empty, Split, split_samples

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
_IMAGES = 50_000  # to train with
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


_MODELS = {"lenet": lenet, "wide": wide, "small": small}


def cache_folder() -> Path:
    """Where data are kept: $DUALDELAY_DATA, or the user's cache folder."""
    if folder := os.environ.get("DUALDELAY_DATA"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualdelay"


def damage(data: bytes, md5: str) -> str | None:
    """What is wrong with a file's content, in a few words; None if its md5 sum is right."""
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return None if actual == md5 else f"is damaged (md5 {actual}, expected {md5})"


def fault(path: Path, md5: str) -> str | None:
    """What is wrong with a file, in a few words; None if its md5 sum is right."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            return f"is damaged ({size:,} bytes, expected {LARGEST:,})"
        return damage(path.read_bytes(), md5)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        return f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"


def read(root: Path, files: Mapping[str, str]) -> tuple[TensorDataset, TensorDataset]:
    """The images and classes to train with, and those of the last file to test with, normalised by channel."""
    if faults := [f"{name} {what}" for name, md5 in files.items() if (what := fault(root / name, md5))]:
        folder = "" if root == (cache_folder() / "cifar10").resolve() else f" --folder {root}"
        raise BadInput(f"CIFAR-10 in {root}: {'; '.join(faults)}. Get whole files with: dualdelay data cifar10{folder}")
    rows = [np.fromfile(root / name, dtype=np.uint8).reshape(-1, _ROW) for name in files]
    return _normalised(np.concatenate(rows[:-1])), _normalised(rows[-1])


def _normalised(rows: Any) -> TensorDataset:
    pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return TensorDataset(pixels.div_(255).sub_(mean).div_(std), torch.from_numpy(rows[:, 0].astype(np.int64)))


@lru_cache(maxsize=2)
def _all_images(root: Path) -> tuple[TensorDataset, TensorDataset]:
    """The data once for all problems of a process, so that splits of them share their memory."""
    return read(root, FILES)


@lru_cache(maxsize=2)
def _first_images(root: Path, samples: int) -> tuple[TensorDataset, TensorDataset]:
    train, test = (
        TensorDataset(*(tensor[:count].clone() for tensor in data.tensors))
        for data, count in zip(_all_images(root), (samples, max(1, samples // 5)), strict=True)
    )
    return train, test


class Cifar10(Network):
    """CIFAR-10 split over workers that see different classes, with a two-convolution network.

    The data come from ``dualdelay data cifar10``, which needs to be run once.

    workers: how many.
    alpha: concentration of the Dirichlet split; the smaller, the more heterogeneous the workers.
    seed: names the split and the minibatches; None: the run's own seed does.
    root: the folder with the official binary files; None: cifar10 in $DUALDELAY_DATA or the user's cache folder.
    model: "lenet", of 62,006 weights, "wide", of 878,538, or "small", of 13,002 on images of 8 x 8.
    samples: train with the first so many images alone and test with a fifth as many; None: all.
    split: "dirichlet" (the paper's rule), "iid", "label", or a list of sample numbers for each worker.
    empty: what to do when the split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least samples per worker when resampling.
    batch_size: samples per gradient.
    weights: whether workers count "equal" in F or by their "samples".
    full_gradient: whether evaluation computes the norm of the full gradient.
    """

    def __init__(
        self,
        workers: int = 10,
        alpha: float = 0.1,
        seed: int | None = None,
        root: str | Path | None = None,
        model: str = "lenet",
        samples: int | None = None,
        split: Split | Sequence[Sequence[int]] = "dirichlet",
        empty: Empty = "resample",
        minimum: int = 10,
        batch_size: int = 64,
        weights: Weighting = "equal",
        full_gradient: bool = False,
    ) -> None:
        workers, alpha, seed, samples, minimum, batch_size = map(
            plain_number, (workers, alpha, seed, samples, minimum, batch_size)
        )
        if root is not None:
            require_path("root", root)
        folder = (cache_folder() / "cifar10" if root is None else Path(root).expanduser()).resolve()
        self.settings: dict[str, Any] = {
            "workers": workers, "alpha": alpha, "seed": seed, "model": model, "samples": samples,
            "root": None if root is None else str(folder), "split": split, "empty": empty, "minimum": minimum,
            "batch_size": batch_size, "weights": weights, "full_gradient": full_gradient,
        }  # fmt: skip
        require_whole("workers", workers, 1, _IMAGES if isinstance(split, str) else None)
        require_one_of("model", model, tuple(_MODELS))
        if samples is None:
            train, test = _all_images(folder)
        else:
            require_whole("samples", samples, workers, _IMAGES)
            train, test = _first_images(folder, samples)
        rows = split_samples(split, train.tensors[1].numpy(), workers, alpha, seed or 0, empty, minimum)
        super().__init__(
            _MODELS[model],
            cross_entropy,
            [Subset(train, part.tolist()) for part in rows],
            batch_size,
            test=test.tensors,
            seed=seed,
            weights=weights,
            full_gradient=full_gradient,
        )

    def reseeded(self, seed: int) -> Cifar10:
        return Cifar10(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return "" if self.settings["split"] in ("dirichlet", "iid") else "its split is given, or by label"

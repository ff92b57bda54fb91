"""Problems of images that are fetched once and split over workers that see different classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from ..core.errors import plain_number, require_one_of, require_whole
from .files import data_folder, require_whole_files
from .network import Network, Weighting
from .splits import Empty, Split, split_samples, unseeded

Images = tuple[TensorDataset, TensorDataset]  # to train with and to test with, each images and classes


class ImageProblem(Network):
    """Images of a data set split over workers that see different classes, with one of several networks."""

    name: ClassVar[str]
    """Of the data set: what ``dualdelay data`` calls it."""
    title: ClassVar[str]
    files: ClassVar[Mapping[str, str]]
    """Its files by their sums."""
    largest: ClassVar[int]
    """Bytes of the largest of them."""
    count: ClassVar[int]
    """Images to train with."""
    for_each_tested: ClassVar[int]
    """Images to train with for each to test with."""
    models: ClassVar[Mapping[str, Callable[[], nn.Module]]]

    @classmethod
    @abstractmethod
    def read(cls, root: Path) -> Images:
        """All images, from files that are whole."""

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
        folder = data_folder(self.name, root)
        self.settings: dict[str, Any] = {
            "workers": workers, "alpha": alpha, "seed": seed, "model": model, "samples": samples,
            "root": None if root is None else str(folder), "split": split, "empty": empty, "minimum": minimum,
            "batch_size": batch_size, "weights": weights, "full_gradient": full_gradient,
        }  # fmt: skip
        require_whole("workers", workers, 1, self.count if isinstance(split, str) else None)
        require_one_of("model", model, tuple(self.models))
        if samples is None:
            train, test = all_images(type(self), folder)
        else:
            require_whole("samples", samples, workers, self.count)
            train, test = first_images(type(self), folder, samples)
        dealing = {"alpha": alpha, "empty": empty, "minimum": minimum}
        rows = split_samples(train.tensors[1].numpy(), workers, split, seed or 0, **dealing)
        super().__init__(
            self.models[model],
            cross_entropy,
            [Subset(train, part.tolist()) for part in rows],
            batch_size,
            test=test.tensors,
            seed=seed,
            weights=weights,
            full_gradient=full_gradient,
        )

    def reseeded(self, seed: int) -> Self:
        return type(self)(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return unseeded(self.settings["split"])


@lru_cache(maxsize=2)
def all_images(kind: type[ImageProblem], root: Path) -> Images:
    """The data once for all problems of a process, so that splits of them share their memory."""
    require_whole_files(kind.name, kind.title, root, kind.files, kind.largest)
    return kind.read(root)


@lru_cache(maxsize=2)
def first_images(kind: type[ImageProblem], root: Path, samples: int) -> Images:
    """The first so many to train with, and as many to test with as belong to them."""
    train, test = (
        TensorDataset(*(tensor[:count].clone() for tensor in data.tensors))
        for data, count in zip(all_images(kind, root), (samples, max(1, samples // kind.for_each_tested)), strict=True)
    )
    return train, test

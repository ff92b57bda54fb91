"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8, in its package, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_room, require_whole, require_workers
from .network import Network, Weighting
from .splits import Empty, Split, split_samples, unseeded


@cache
def _table() -> npt.NDArray[np.float64]:
    """A row for each image: its pixels, and which digit it is. To import scikit-learn takes longer than all the rest."""
    try:
        package = find_spec("sklearn")
    except ImportError:
        package = None
    if package is None or package.origin is None:
        raise BadInput("the digits come with scikit-learn, which is not installed: pip install scikit-learn.")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # in case that it has moved

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


class Digits(Network):
    """Handwritten digits split over workers that see different classes, with a small two-layer network.

    workers: how many.
    alpha: concentration of the Dirichlet split; the smaller, the more heterogeneous the workers.
    seed: names the split and the minibatches; None: the run's own seed does.
    split: "dirichlet" (the paper's rule), "iid", "label", "label_k[k=2]" (so many classes for each worker),
        "quantity[alpha=0.5]" or "quantity[power=1]" (unequal sizes), or a list of sample numbers for each worker.
    empty: what to do when the split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least samples per worker when resampling.
    batch_size: samples per gradient.
    hidden: width of the hidden layer.
    weights: whether workers count "equal" in F or by their "samples".
    """

    def __init__(
        self,
        workers: int = 10,
        alpha: float = 0.1,
        seed: int | None = None,
        split: Split | Sequence[Sequence[int]] = "dirichlet",
        empty: Empty = "resample",
        minimum: int = 10,
        batch_size: int = 64,
        hidden: int = 64,
        weights: Weighting = "equal",
    ) -> None:
        workers, alpha, seed, minimum, batch_size, hidden = map(
            plain_number, (workers, alpha, seed, minimum, batch_size, hidden)
        )
        self.settings: dict[str, Any] = {
            "workers": workers, "alpha": alpha, "seed": seed, "split": split, "empty": empty,
            "minimum": minimum, "batch_size": batch_size, "hidden": hidden, "weights": weights,
        }  # fmt: skip
        require_workers("workers", workers)
        require_whole("hidden", hidden, 1)
        require_room(f"a network with hidden={hidden}", 4 * 4 * 75 * hidden, "use a smaller hidden")
        table = torch.from_numpy(_table())
        inputs, targets = table[:, :-1].float() / 16.0, table[:, -1].long()
        order = torch.from_numpy(Draws(0, "test").permutation(len(inputs)))  # the same test images whatever the seed
        test, train = order[:360], order[360:]
        dealing = {"alpha": alpha, "empty": empty, "minimum": minimum}
        rows = split_samples(targets[train].numpy(), workers, split, seed or 0, **dealing)
        super().__init__(
            lambda: nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
            cross_entropy,
            [(inputs[train[part]], targets[train[part]]) for part in map(torch.from_numpy, rows)],
            batch_size,
            test=(inputs[test], targets[test]),
            seed=seed,
            weights=weights,
        )

    def reseeded(self, seed: int) -> Digits:
        return Digits(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return unseeded(self.settings["split"])

"""Manual pages in ten languages, one for each worker: predict the next character of a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..core.errors import plain_number, require_room, require_whole
from .files import data_folder
from .network import Network, Weighting
from .splits import Empty, Split, split_samples, unseeded
from .texts import BLOCK, MANPAGES, pieces, read_texts

LANGUAGES = ("cs", "da", "de", "es", "fr", "it", "nl", "pl", "pt_BR", "ru")
SIZE = 300_000  # bytes of UTF-8 of each language, at most: the first ones of its text


@lru_cache(maxsize=2)
def _windows(root: Path, context: int, samples: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Any]:
    """Pieces of text and the byte after each, to train and to test with, and the language of those to train with.

    From each language ``samples`` pieces are taken, and a tenth as many for testing.
    """
    train, test, languages = list[Any](), list[Any](), list[Any]()
    for number, (language, text) in enumerate(read_texts(MANPAGES, root, LANGUAGES).items()):
        beginning = text[:SIZE].decode(errors="ignore").encode()  # no half of a character
        for parts, part in zip(
            (train, test), pieces(language, beginning, context, samples, max(1, samples // 10)), strict=True
        ):
            parts.append(part)
        languages.append(np.full(samples, number))
    pairs = []
    for parts in (train, test):
        windows = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        pairs.append((windows[:, :-1].contiguous(), windows[:, -1].contiguous()))
    return pairs[0], pairs[1], np.concatenate(languages)


class Manpages(Network):
    """Manual pages in ten languages, one for each worker: predict a text's next character from those before it.

    Characters are bytes of UTF-8. The data come from ``dualdelay data manpages``, which needs to be run once.

    workers: how many; 10: each has a language of its own.
    alpha: concentration of a Dirichlet split by language.
    seed: names the split and the minibatches; None: the run's own seed does.
    root: the folder with the texts; None: the one that the command puts them into.
    context: bytes that the next one is predicted from.
    samples: pieces of text of each language; a tenth as many are for testing.
    hidden: width of the hidden layer.
    split: "group" (whole languages), or by language "dirichlet", "label_k[k=2]", or "iid", "quantity[alpha=0.5]", or a
        list of sample numbers for each worker.
    empty: what to do when a Dirichlet split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least samples per worker when resampling, or with unequal sizes.
    batch_size: samples per gradient.
    weights: whether workers count "equal" in F or by their "samples".
    """

    def __init__(
        self,
        workers: int = 10,
        alpha: float = 0.1,
        seed: int | None = None,
        root: str | Path | None = None,
        context: int = 8,
        samples: int = 5000,
        hidden: int = 128,
        split: Split | Sequence[Sequence[int]] = "group",
        empty: Empty = "resample",
        minimum: int = 10,
        batch_size: int = 64,
        weights: Weighting = "equal",
    ) -> None:
        workers, alpha, seed, context, samples, hidden, minimum, batch_size = map(
            plain_number, (workers, alpha, seed, context, samples, hidden, minimum, batch_size)
        )
        folder = data_folder("manpages", root)
        self.settings: dict[str, Any] = {
            "workers": workers, "alpha": alpha, "seed": seed, "root": None if root is None else str(folder),
            "context": context, "samples": samples, "hidden": hidden, "split": split, "empty": empty, "minimum": minimum,
            "batch_size": batch_size, "weights": weights,
        }  # fmt: skip
        require_whole("workers", workers, 1)
        require_whole("context", context, 1, BLOCK - 1)
        require_whole("samples", samples, 1)
        require_whole("hidden", hidden, 1)
        require_room(f"a network with hidden={hidden}", 16 * (16 * context + 256) * hidden, "use a smaller hidden")
        (inputs, targets), test, languages = _windows(folder, context, samples)
        dealing = {"alpha": alpha, "empty": empty, "minimum": minimum}
        rows = split_samples(languages, workers, split, seed or 0, groups=languages, **dealing)
        super().__init__(
            lambda: nn.Sequential(
                nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * context, hidden), nn.ReLU(), nn.Linear(hidden, 256)
            ),
            cross_entropy,
            [(inputs[part], targets[part]) for part in map(torch.from_numpy, rows)],
            batch_size,
            test=test,
            seed=seed,
            weights=weights,
            full_gradient=False,
        )
        self._languages = [languages[part] for part in rows]

    def classes(self, worker: int) -> dict[str, int]:
        """How many samples of each language a worker has."""
        numbers, counts = np.unique(self._languages[worker], return_counts=True)
        return {LANGUAGES[number]: int(count) for number, count in zip(numbers, counts, strict=True)}

    def reseeded(self, seed: int) -> Manpages:
        return Manpages(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return unseeded(self.settings["split"])

"""Texts in twelve languages, one for each worker: a transformer predicts the next byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..core import Samples
from ..core.errors import BadInput, plain_number, require_one_of, require_room, require_whole
from .files import data_folder
from .network import MeanLoss, Network
from .splits import Empty, Split, split_samples, unseeded
from .texts import BLOCK, CORPORA, pieces, read_texts
from .transformer import Transformer, loss

Texts = Literal["manpages", "office_help"]


@lru_cache(maxsize=2)
def _windows(corpus: str, root: Path, context: int, samples: int, held_out: int) -> tuple[Tensor, list[Tensor]]:
    """Pieces of text to train with, those of a language together, and held-out ones of each language: bytes."""
    texts = read_texts(CORPORA[corpus], root, CORPORA[corpus].languages)
    parts = [pieces(name, text, context, samples, held_out, "held_out") for name, text in texts.items()]
    return torch.from_numpy(np.concatenate([train for train, _ in parts])), [torch.from_numpy(test) for _, test in parts]


class Languages(Network):
    """Texts in twelve languages, one for each worker: a transformer predicts the next byte at every place of a window.

    The network has decoder blocks that normalise their input, learned positions, GELU layers four times as wide, an
    embedding and an output with weights of their own and no dropout: 875,264 weights by default. The loss is the mean
    cross-entropy over all places, in nats. Every tenth block of a thousand bytes is held out; ``run.workers`` has the
    ``bits_per_byte`` of each worker there, ``run.metrics`` their mean and the ``worst_bits_per_byte``.

    The data come from ``dualdelay data manpages`` or ``dualdelay data office_help``, which needs to be run once.

    workers: how many; None: as many as there are languages, one for each.
    corpus: "manpages", Debian's manual pages, or "office_help", the help of LibreOffice.
    context: bytes of a window, each predicted from those before it.
    samples: windows of each language, evenly spaced; if there are too many for its text they overlap.
    width: numbers for each byte in the network.
    layers: blocks of the network.
    heads: of attention, in each block.
    batch_size: windows per gradient.
    seed: names the split and the minibatches; None: the run's own seed does.
    root: the folder with the texts; None: the one that the command puts them into.
    split: "group" (whole languages), or by language "dirichlet", "label_k[k=2]", or "iid", "quantity[alpha=0.5]", or a
        list of sample numbers for each worker.
    alpha: concentration of a Dirichlet split by language.
    empty: what to do when a Dirichlet split leaves a worker with too little: "resample", "drop" or "error".
    minimum: the least windows per worker when resampling, or with unequal sizes.
    held_out: held-out windows of each language; a worker with several languages has of each as large a share of them as
        the language has in its own windows.
    evaluated: windows of each worker that its training loss is measured on, the same at every evaluation, also the last;
        in ``run.metrics`` these and the held-out ones are all of its share.
    """

    joint_metric_names = ("worst_bits_per_byte",)

    def __init__(
        self,
        workers: int | None = None,
        corpus: Texts = "manpages",
        context: int = 128,
        samples: int = 16_000,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        batch_size: int = 16,
        seed: int | None = None,
        root: str | Path | None = None,
        split: Split | Sequence[Sequence[int]] = "group",
        alpha: float = 0.1,
        empty: Empty = "resample",
        minimum: int = 10,
        held_out: int = 64,
        evaluated: int = 64,
    ) -> None:
        workers, context, samples, width, layers, heads, batch_size, seed, alpha, minimum, held_out, evaluated = map(
            plain_number,
            (workers, context, samples, width, layers, heads, batch_size, seed, alpha, minimum, held_out, evaluated),
        )
        require_one_of("corpus", corpus, tuple(CORPORA))
        names, folder = CORPORA[corpus].languages, data_folder(corpus, root)
        self.settings: dict[str, Any] = {
            "workers": workers, "corpus": corpus, "context": context, "samples": samples, "width": width, "layers": layers,
            "heads": heads, "batch_size": batch_size, "seed": seed, "root": None if root is None else str(folder),
            "split": split, "alpha": alpha, "empty": empty, "minimum": minimum, "held_out": held_out,
            "evaluated": evaluated,
        }  # fmt: skip
        workers = len(names) if workers is None else workers
        require_whole("workers", workers, 1)
        require_whole("context", context, 1, BLOCK - 1)
        for name in ("samples", "width", "layers", "heads", "held_out", "evaluated"):
            require_whole(name, self.settings[name], 1)
        if width % heads:
            raise BadInput(f"width is {width} and heads {heads}; expected a width that is a multiple of heads.")
        network = 4 * (12 * layers * width**2 + (512 + context) * width)
        require_room(f"a network with width={width} and layers={layers}", network, "use a smaller width or fewer layers")
        windows, tested = _windows(corpus, folder, context, samples, held_out)
        numbers = np.repeat(np.arange(len(names)), samples)
        dealing = {"alpha": alpha, "empty": empty, "minimum": minimum}
        rows = split_samples(numbers, workers, split, seed or 0, groups=numbers, **dealing)
        self._languages = [numbers[part] for part in rows]
        super().__init__(
            lambda: Transformer(context, width, layers, heads),
            loss,
            [_pair(windows[part]) for part in map(torch.from_numpy, rows)],
            batch_size,
            held_out=[_pair(_share(tested, part)) for part in self._languages],
            seed=seed,
            full_gradient=False,
        )
        self.metric_names = (*self.metric_names, "bits_per_byte")

    def classes(self, worker: int) -> dict[str, int]:
        """How many windows of each language a worker has."""
        numbers, counts = np.unique(self._languages[worker], return_counts=True)
        names = CORPORA[self.settings["corpus"]].languages
        return {names[number]: int(count) for number, count in zip(numbers, counts, strict=True)}

    def _measured(self, worker: int, samples: Samples, merged: MeanLoss | None = None) -> dict[str, Any]:
        return super()._measured(worker, self.settings["evaluated"])

    def _measured_metrics(self, worker: int, samples: int | None) -> dict[str, Any]:
        part = super()._measured_metrics(worker, None)  # held-out windows are few, and all of them are looked at
        part["metrics"]["bits_per_byte"] = part["metrics"]["held_out_loss"] / math.log(2)
        return part

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        bits = [part["metrics"]["bits_per_byte"] for part in parts.values()]
        worst = math.nan if any(map(math.isnan, bits)) else max(bits, default=math.nan)
        return {**super().combine(x, parts), "worst_bits_per_byte": worst, "share": 1.0}

    def few_samples(self) -> int | None:
        return None  # an evaluation looks at few anyway

    def costs(self) -> tuple[float, float]:
        gradient, _ = super().costs() or (0.0, 0.0)
        windows = self.workers * (self.settings["evaluated"] + self.settings["held_out"])
        return gradient, gradient * windows / (3.0 * self.settings["batch_size"])

    def reseeded(self, seed: int) -> Languages:
        return Languages(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return unseeded(self.settings["split"])


def _pair(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of some windows."""
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _share(tested: Sequence[Tensor], languages: Any) -> Tensor:
    """A worker's held-out windows: of each of its languages as large a share as it has in its own, evenly spaced."""
    parts = []
    for number, count in zip(*np.unique(languages, return_counts=True), strict=True):
        windows = tested[number]
        wanted = max(1, round(len(windows) * count / len(languages)))
        parts.append(windows[torch.arange(wanted) * len(windows) // wanted])
    return torch.cat(parts)

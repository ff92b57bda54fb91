"""How the samples of a data set are dealt to workers; each split is a list of index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from ..core.draws import Draws, Integers
from ..core.errors import BadInput, require_one_of, require_positive, require_several, require_whole, require_workers, shown

Split = Literal["dirichlet", "iid", "label"]
Empty = Literal["resample", "drop", "error"]

_TRIES = 1000


def dirichlet(
    labels: Any, workers: int, alpha: float, seed: int = 0, *, empty: Empty = "resample", minimum: int = 10
) -> list[Integers]:
    """The paper's rule: for each class draw p ~ Dir(alpha), then deal each of its samples to worker i with chance p_i.

    The rule can leave a worker with no sample. ``empty`` says what then happens: "resample" the whole split until every
    worker has ``minimum``, "drop" the workers without any, or raise an "error".
    """
    require_workers("workers", workers)
    require_positive("alpha", alpha)
    require_one_of("empty", empty, get_args(Empty))
    require_whole("minimum", minimum, 0)
    labels = np.asarray(labels)
    if workers > len(labels):
        raise BadInput(f"{len(labels)} samples cannot be split over {workers} workers; expected one for each. Use fewer.")
    smallest = []
    for attempt in range(_TRIES if empty == "resample" else 1):
        split = deal(labels, workers, alpha, seed, attempt)
        smallest.append(min(map(len, split)))
        if empty == "drop":
            return [rows for rows in split if len(rows)]
        if smallest[-1] >= (minimum if empty == "resample" else 1):
            return split
    if empty == "error":
        lacking = [worker for worker, rows in enumerate(split) if not len(rows)]
        raise BadInput(
            f"workers {lacking} got no sample with alpha {alpha}, {workers} workers and seed {seed}; use a larger alpha, "
            "fewer workers, another seed, or empty='resample' or 'drop'."
        )
    raise BadInput(
        f"in {_TRIES} splits of {len(labels)} samples with alpha {alpha} and {workers} workers the smallest worker had "
        f"{max(smallest)} samples at best; expected {minimum}. Use a larger alpha, fewer workers or a smaller minimum."
    )


def deal(labels: Any, workers: int, alpha: float, seed: int, attempt: int = 0) -> list[Integers]:
    """One draw of the paper's rule, whatever comes of it."""
    rng = Draws(seed, "split").generator(attempt)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        try:
            owner[members] = rng.choice(workers, size=len(members), p=rng.dirichlet(np.full(workers, alpha)))
        except ValueError:  # the chances are no numbers any more
            raise BadInput(f"alpha is {alpha}, too far from 1 to draw with; expected about 0.001 to 1000.") from None
    rows = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(rows, np.cumsum(np.bincount(owner, minlength=workers))[:-1])


def iid(labels: Any, workers: int, seed: int = 0) -> list[Integers]:
    """All samples shuffled and cut into equal parts."""
    require_whole("workers", workers, 1, len(labels))
    return np.array_split(Draws(seed, "split").permutation(len(labels)), workers)


def by_label(labels: Any, workers: int) -> list[Integers]:
    """All samples sorted by class and cut into equal parts, so that a worker sees few classes."""
    require_whole("workers", workers, 1, len(labels))
    return np.array_split(np.argsort(np.asarray(labels), kind="stable"), workers)


def split_samples(
    split: Split | Sequence[Sequence[int]], labels: Any, workers: int, alpha: float, seed: int, empty: Empty, minimum: int
) -> list[Integers]:
    """The split that a data set was asked for: by name, or the user's own lists of sample numbers."""
    if isinstance(split, str):
        require_one_of("split", split, get_args(Split))
        if split == "dirichlet":
            return dirichlet(labels, workers, alpha, seed, empty=empty, minimum=minimum)
        return iid(labels, workers, seed) if split == "iid" else by_label(labels, workers)
    require_several("split", split, "lists of sample numbers")
    try:
        rows = [np.asarray(part).astype(np.int64, casting="same_kind" if len(part) else "unsafe") for part in split]
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"split is {shown(split)}; expected a list of sample numbers for each worker.") from None
    if len(rows) != workers:
        raise BadInput(f"split has {len(rows)} lists; expected {workers}, one for each worker.")
    for worker, part in enumerate(rows):
        if part.size and (part.min() < 0 or part.max() >= len(labels)):
            raise BadInput(f"split[{worker}] names samples outside 0..{len(labels) - 1}.")
    return rows

"""How the samples of a data set are dealt to workers; each split is a list of index arrays.

A split is written as a text, ``dirichlet[alpha=0.1]`` or ``label_k[k=2]``: the name of a rule below and its settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from ..core.draws import Draws, Integers
from ..core.errors import (
    BadInput,
    nearest,
    plain_number,
    require_one_of,
    require_positive,
    require_several,
    require_whole,
    require_workers,
    shown,
)
from ..core.texts import parse_call, require_parameters
from .data import refuse_no_columns

Split = str  # such as "dirichlet", "iid", "label", "label_k[k=2]", "quantity[alpha=0.5]"
Empty = Literal["resample", "drop", "error"]

_TRIES = 1000


# --- the rules ---


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
    return _of_owners(owner, workers)


def _of_owners(owner: Integers, workers: int) -> list[Integers]:
    """Each worker's samples, rising, from the owner of each."""
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


def label_k(labels: Any, workers: int, k: int = 2, seed: int = 0) -> list[Integers]:
    """Every worker has samples of exactly k classes; the samples of a class are dealt evenly to those who have it.

    Each worker in turn takes the k classes that the fewest have, chosen at random among equals, so that all classes are
    had by as many workers, or by one more.
    """
    require_workers("workers", workers)
    classes, of_class, sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    require_whole("k", k, 1, len(classes))
    if workers * k < len(classes):
        raise BadInput(
            f"{workers} workers with {k} of {len(classes)} classes each would leave classes to nobody; use a larger k or "
            f"more workers, at least {-(-len(classes) // k)} with this k."
        )
    rng, holders = Draws(seed, "split").generator(0), np.zeros(len(classes), dtype=np.int64)
    has: list[list[int]] = [[] for _ in classes]
    for worker in range(workers):
        order = rng.permutation(len(classes))
        for label in order[np.argsort(holders[order], kind="stable")][:k].tolist():
            holders[label] += 1
            has[label].append(worker)
    if (short := np.flatnonzero(sizes < holders)).size:
        label = int(short[0])
        raise BadInput(
            f"class {classes[label]} has {sizes[label]} samples for {holders[label]} workers; expected one for each. Use a "
            "smaller k or fewer workers."
        )
    owner = np.empty(len(of_class), dtype=np.int64)
    for label, owners in enumerate(has):
        members = rng.permutation(np.flatnonzero(of_class == label))
        for worker, part in zip(owners, np.array_split(members, len(owners)), strict=True):
            owner[part] = worker
    return _of_owners(owner, workers)


def quantity(
    labels: Any, workers: int, alpha: float = 0.5, power: float | None = None, seed: int = 0, *, minimum: int = 1
) -> list[Integers]:
    """Samples are dealt at random, but unequally many: every worker has ``minimum``, and a share of the rest.

    The shares are drawn from a Dirichlet distribution with concentration ``alpha``, the smaller the more unequal; or, if
    ``power`` is given, they are those of a power law, 1, 1/2**power, 1/3**power ..., for the workers in a random order.
    """
    require_workers("workers", workers)
    require_whole("minimum", minimum, 1)
    require_positive(*("alpha", alpha) if power is None else ("power", power))
    count = len(labels)
    if count < workers * minimum:
        raise BadInput(f"{count} samples are too few for {workers} workers with {minimum} at least; use fewer or less.")
    rng = Draws(seed, "split").generator(0)
    if power is None:
        shares = rng.dirichlet(np.full(workers, alpha))
    else:
        shares = rng.permutation(np.arange(1.0, workers + 1) ** -power)
    ends = np.cumsum(shares) / np.sum(shares) * (count - workers * minimum)
    if not np.isfinite(ends).all():
        raise BadInput(f"alpha is {alpha}, too far from 1 to draw with; expected about 0.001 to 1000.")
    cuts = np.rint(ends).astype(np.int64) + minimum * np.arange(1, workers + 1)
    return [np.sort(part) for part in np.split(rng.permutation(count).astype(np.int64), cuts[:-1])]


def by_group(groups: Any, workers: int | None = None) -> list[Integers]:
    """Each value of a column (a site, a user, a hospital) is a worker, in the order in which they first appear.

    With fewer workers than values, whole groups are dealt, each to the worker with the fewest samples so far, the largest
    group first.
    """
    numbers: dict[Any, int] = {}  # of the groups, by their names
    try:
        of_group = np.array([numbers.setdefault(name, len(numbers)) for name in _entries(groups)], dtype=np.int64)
    except TypeError as error:  # a list, say
        raise BadInput(f"groups has an entry that cannot name a group ({error}); expected texts or numbers.") from None
    workers = len(numbers) if workers is None else workers
    require_workers("workers", workers)
    if workers > len(numbers):
        raise BadInput(f"there are {len(numbers)} groups for {workers} workers; expected one for each at least. Use fewer.")
    if workers == len(numbers):
        return _of_owners(of_group, workers)
    sizes = np.bincount(of_group)
    owner, load = np.empty(len(sizes), dtype=np.int64), np.zeros(workers, dtype=np.int64)
    for group in np.argsort(-sizes, kind="stable"):
        owner[group] = np.argmin(load)
        load[owner[group]] += sizes[group]
    return _of_owners(owner[of_group], workers)


SPLITS: dict[str, Callable[..., list[Integers]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "label": by_label,
    "label_k": label_k,
    "quantity": quantity,
    "group": by_group,
}
_BY_CLASS = ("dirichlet", "label", "label_k")  # rules that look at labels


# --- by a text ---


def split_samples(
    labels: Any,
    workers: int | None = None,
    split: Split | Sequence[Sequence[int]] = "dirichlet[alpha=0.1]",
    seed: int = 0,
    *,
    groups: Any = None,
    **defaults: Any,
) -> list[Integers]:
    """Each worker's samples, as positions in the data; every sample is one worker's, and no worker is without any.

    labels: the class of each sample; for splits that look at no class anything as long as the data.
    workers: how many; None for "group": as many as there are groups.
    split: "dirichlet[alpha=0.1]", "iid", "label", "label_k[k=2]", "quantity[alpha=0.5]", "quantity[power=1]" or "group"; or
        your own lists of sample numbers, one for each worker.
    seed: names the split.
    groups: for "group", the site, user or hospital of each sample; workers are in the order in which they first appear.
    defaults: settings that a text leaves out, such as alpha=0.1, minimum=10; those that a rule does not have are ignored.
    """
    count, workers, seed = _count("labels", labels), plain_number(workers), plain_number(seed)
    if not isinstance(split, str):
        return _own(split, count, workers)
    name, values = parse_call(split)
    if name not in SPLITS:
        raise BadInput(f"split is {shown(split)}; {nearest(name, SPLITS)}")
    settings = _settings(SPLITS[name])
    require_parameters(name, settings, {**{key: defaults[key] for key in settings if key in defaults}, **values})
    values = {key: value for key, value in defaults.items() if key in settings} | values
    if name == "group":
        if groups is None:
            raise BadInput("a split by group needs groups=, the site or user of each sample; these data have none.")
        if _count("groups", groups) != count:
            raise BadInput(f"groups has {len(groups)} entries for {count} samples; expected one for each.")
        _require_known("groups", groups)
        return by_group(groups, workers)
    if workers is None:
        raise BadInput(f"a split by {name} needs workers, how many there are; only a split by group finds it out.")
    if "seed" in inspect.signature(SPLITS[name]).parameters:
        values["seed"] = seed
    if name in _BY_CLASS:
        _require_known("labels", labels)
    return SPLITS[name](_array(labels), workers, **values)


def _settings(rule: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a text can say of a rule."""
    given = ("labels", "groups", "workers", "seed")
    return {name: p for name, p in inspect.signature(rule).parameters.items() if name not in given}


def _entries(column: Any) -> list[Any]:
    """The entries of a list, an array, a tensor or a frame's column."""
    return list(column.tolist() if hasattr(column, "tolist") else column)


def _require_known(name: str, column: Any) -> None:
    """Refuse a column of which entries are missing; which group or class those are would be anybody's guess."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuUS":  # which have no way to say so
        return
    missing = [place for place, entry in enumerate(_entries(column)) if _is_missing(entry)]
    if missing:
        raise BadInput(
            f"{name} has no value for {len(missing)} of {len(column)} samples, the first of them number {missing[0]}; "
            "expected one for each. Leave these samples out of the data, or give them one of their own, such as 'unknown'."
        )


def _is_missing(entry: Any) -> bool:
    """Whether it stands for an empty cell: None, what is no number and so not equal to itself, or pandas' NA."""
    try:
        return entry is None or bool(entry != entry)
    except TypeError:  # NA, which does not say whether it is equal to anything
        return True


def _array(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _count(name: str, values: Any) -> int:
    """How many samples a column of one entry for each has."""
    require_several(name, values, "one entry for each sample")
    if not hasattr(values, "__len__") or getattr(values, "ndim", 1) != 1:
        raise BadInput(
            f"{name} is {shown(values)}; expected a list or an array of one dimension, an entry for each sample."
        )
    if not len(values):
        raise BadInput(f"{name} is empty; expected an entry for each sample.")
    return len(values)


def _own(split: Any, count: int, workers: int | None) -> list[Integers]:
    """The user's own lists of sample numbers."""
    require_several("split", split, "lists of sample numbers")
    try:
        rows = [np.asarray(part).astype(np.int64, casting="same_kind" if len(part) else "unsafe") for part in split]
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"split is {shown(split)}; expected a list of sample numbers for each worker.") from None
    if workers is not None and len(rows) != workers:
        raise BadInput(f"split has {len(rows)} lists; expected {workers}, one for each worker.")
    for worker, part in enumerate(rows):
        if part.size and (part.min() < 0 or part.max() >= count):
            raise BadInput(f"split[{worker}] names samples outside 0..{count - 1}.")
    return rows


def unseeded(split: Split | Sequence[Sequence[int]]) -> str:
    """Why a seed does not change a split, for ``Problem.unseeded``; empty: it does."""
    seeded = isinstance(split, str) and "seed" in inspect.signature(SPLITS[parse_call(split)[0]]).parameters
    return "" if seeded else "its split is given, or by label or group"


# --- the user's own data ---


def shards(
    data: Any,
    workers: int | None = None,
    split: Split | Sequence[Sequence[int]] = "dirichlet[alpha=0.1]",
    *,
    labels: Any = None,
    groups: Any = None,
    seed: int = 0,
) -> Dealt:
    """Your data dealt to workers, for ``dd.Network(model, loss, shards)``.

    data: tensors or arrays with a row for each sample, alone or in tuples and dicts, also in one another, such as (inputs,
        targets) or ({"color": color, "size": size}, targets); or a map-style dataset.
    workers, split, seed: as in ``dd.problems.split_samples``.
    labels: the class of each sample; by default the last of a tuple, if it has one whole number or text for each sample.
    groups: for split="group", the site, user or hospital of each sample. Workers are in the order in which these first
        appear, and the result's ``groups`` says which each of them has.

    Example:
        >>> shards = dd.problems.shards((images, classes), workers=10, split="dirichlet[alpha=0.1]")
        >>> problem = dd.Network(model, cross_entropy, shards)
    """
    refuse_no_columns("data", data)
    columns = _leaves(data)
    if not columns or not all(hasattr(column, "__len__") and _length(column) for column in columns):
        raise BadInput(f"data is {shown(data)}; expected tensors or arrays with a row for each sample, or a dataset.")
    count = _length(columns[0])
    if any(_length(column) != count for column in columns):
        lengths = ", ".join(str(_length(column)) for column in columns)
        raise BadInput(f"data has columns of {lengths} rows; expected as many in each.")
    if labels is None:
        labels = _labels(data, count, split)
    elif len(labels) != count:
        raise BadInput(f"labels has {len(labels)} entries for {count} samples; expected one for each.")
    parts = split_samples(labels, workers, split, seed, groups=groups)
    dealt = Dealt(_rows_of(data, torch.from_numpy(rows)) for rows in parts)
    if isinstance(split, str) and parse_call(split)[0] == "group":
        names = _entries(groups)
        dealt.groups = [list(dict.fromkeys(names[row] for row in rows.tolist())) for rows in parts]
    return dealt


class Dealt(list[Any]):
    """Each worker's data, with the names of the groups that it has, where whole groups were dealt."""

    groups: list[list[Any]] | None = None


def _leaves(data: Any) -> list[Any]:
    """Every tensor, array or dataset in a user's data."""
    if isinstance(data, (Mapping, tuple)):
        return [leaf for part in (data.values() if isinstance(data, Mapping) else data) for leaf in _leaves(part)]
    return [data]


def _length(column: Any) -> int:
    return 0 if getattr(column, "ndim", 1) == 0 else len(column)


def _labels(data: Any, count: int, split: Split | Sequence[Sequence[int]]) -> Any:
    """The classes in a user's data, where they are easily found, or anything where a split does not look at them."""
    name = parse_call(split)[0] if isinstance(split, str) else ""
    if name not in _BY_CLASS:
        return range(count)
    last = _array(data[-1]) if isinstance(data, tuple) and len(data) > 1 and _is_array(data[-1]) else None
    if last is None or last.ndim != 1 or last.dtype.kind not in "biuUS":
        raise BadInput(
            f"a split by {name} looks at classes, and the data are no tuple whose last part has one whole number for each "
            "sample; give labels=, the class of each sample."
        )
    return last


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _rows_of(data: Any, rows: Tensor) -> Any:
    """Some rows of a user's data, in the same structure; of a dataset a view."""
    if isinstance(data, tuple):
        return tuple(_rows_of(column, rows) for column in data)
    if isinstance(data, Mapping):
        return {name: _rows_of(column, rows) for name, column in data.items()}
    if isinstance(data, Tensor):
        return data[rows.to(data.device)]
    return data[rows.numpy()] if isinstance(data, np.ndarray) else Subset(data, rows.tolist())

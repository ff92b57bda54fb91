"""What every problem with data shares: shards, the names of minibatches, and the means of losses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_room, require_several, require_whole

_AHEAD = 32  # minibatches of a worker that are named together: one by one their names cost as much as a small gradient
_MOST_AHEAD = 1024  # workers for which that is kept


_copies: Any = WeakTensorKeyDictionary()  # by tensor and then by device, so that splits of the same data share one copy


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device; the same one each time, for as long as the original lives."""
    if tensor.device == torch.device(device):
        return tensor
    copies: dict[str, Tensor] = _copies.setdefault(tensor, {})
    if device not in copies:
        copies[device] = tensor.to(device)
    return copies[device]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure of tuples, lists, dicts and other mappings with every tensor in it replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        parts = {key: mapped(function, part) for key, part in value.items()}
        return parts if type(value) is dict else cast("Any", type(value))(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, part) for part in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a structure, in order."""
    found: list[Tensor] = []
    mapped(found.append, value)
    return found


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch of any structure where the model is; what is no tensor but can be moved is moved as well."""
    if isinstance(batch, Tensor) or hasattr(batch, "to"):
        return batch.to(device)
    return mapped(lambda tensor: tensor.to(device), batch)


def _as_tensors(value: Any) -> Any:
    """Numpy arrays in a structure as tensors, which share their memory."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _as_tensors(part) for key, part in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_as_tensors(part) for part in value)
    return value


def _is_columns(value: Any) -> bool:
    """Whether a structure holds nothing but tensors, so that its rows are the samples."""
    if isinstance(value, Mapping):
        return len(value) > 0 and all(_is_columns(part) for part in value.values())
    if isinstance(value, tuple):
        return len(value) > 0 and all(_is_columns(part) for part in value)
    return isinstance(value, Tensor)


Collate = Callable[[list[Any]], Any]

_CPU = torch.device("cpu")


class Shard:
    """One worker's own data, whose samples and batches may have any structure.

    Either tensors with a row for each sample, as one tensor or in tuples and dicts such as ``(inputs, targets)``; or a
    dataset, a list or anything else with ``__len__`` and ``__getitem__``, whose samples ``collate`` makes a batch of, by
    default torch's ``default_collate``. A ``Subset`` of a ``TensorDataset`` stays what it is: numbers of rows in tensors
    that other workers share.
    """

    rows: Tensor | None = None  # this worker's rows of the columns, which have others' too; None: all

    def __init__(self, data: Any, name: str, collate: Collate | None = None) -> None:
        self.name, self._collate = name, collate
        self.columns: Any = None  # the tensors, in their structure; None: a dataset
        self._dataset: Any = None
        if isinstance(data, Subset) and isinstance(data.dataset, TensorDataset):
            self.rows = torch.as_tensor(data.indices, dtype=torch.int64)
            data = data.dataset.tensors
        if isinstance(data, list) and len(data) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
            data = tuple(data)
        try:
            data = _as_tensors(data)
        except TypeError as error:  # texts, for instance
            raise BadInput(f"{name} holds an array that torch cannot take ({error}); expected numbers.") from None
        if _is_columns(data):
            self.columns = data
            lengths = [len(column) if column.ndim else -1 for column in tensors_in(data)]
            if len(set(lengths)) > 1:
                raise BadInput(
                    f"{name} has {_counts(lengths)}; expected as many rows in every tensor, one for each sample."
                )
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (tuple, Mapping, str)):
            self._dataset = data
        else:
            raise BadInput(
                f"{name} is a {type(data).__name__}; expected tensors with a row for each sample, such as a pair (inputs, "
                "targets) or a dict of them, or a dataset with __len__ and __getitem__."
            )
        self.size = len(self.rows) if self.rows is not None else lengths[0] if self.columns is not None else len(data)
        if self.size <= 0:
            raise BadInput(f"{name} is empty; give every worker at least one sample, or leave that worker out.")
        self._look()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "pair": None}
        if self.rows is not None:  # the rows of others stay with them
            return state | {"columns": mapped(lambda column: column[self.rows], self.columns), "rows": None}
        if self.columns is not None:  # a pickled view would bring along all the data that it is a view of
            state["columns"] = mapped(_of_its_own, self.columns)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def _look(self) -> None:
        """Keep at hand what every batch asks for."""
        columns = self.columns
        simple = type(columns) is tuple and len(columns) == 2 and all(isinstance(part, Tensor) for part in columns)
        # the tensors of inputs and targets, if that is what the data are and batches are rows of them
        self.pair: tuple[Tensor, Tensor] | None = columns if simple and self._collate is None else None
        self._device = None if columns is None else tensors_in(columns)[0].device

    @property
    def kind(self) -> Hashable:
        """What samples of one minibatch must have in common: types and shapes; None unless the data are a pair."""
        return None if self.pair is None else tuple((part.dtype, part.shape[1:]) for part in self.pair)

    @property
    def runs_user_code(self) -> bool:
        """Whether there is code of the user's own between the data and a minibatch."""
        return self.columns is None or self._collate is not None

    def _like(self, **changes: Any) -> Shard:
        other = object.__new__(Shard)  # copy.copy would copy the rows, as for a pickle
        other.__dict__.update(self.__dict__)
        other.__dict__.update(changes)
        other._look()
        return other

    def on(self, device: str) -> Shard:
        """The same data on a device; a dataset stays where it is."""
        if self.columns is None:
            return self
        rows = None if self.rows is None else self.rows.to(device)
        return self._like(columns=mapped(lambda column: moved(column, device), self.columns), rows=rows)

    def some(self, rows: Tensor) -> Shard:
        """These samples alone."""
        if self.columns is None:
            return self._like(_dataset=Subset(self._dataset, rows.tolist()), size=len(rows))
        rows = rows.to(self._device)
        return self._like(rows=rows if self.rows is None else self.rows[rows], size=len(rows))

    def batch(self, rows: Tensor) -> Any:
        """These samples as one batch."""
        if self.columns is None:
            many = getattr(self._dataset, "__getitems__", None)  # datasets that can read many samples at once have it
            return self._collated(list(many(rows.tolist())) if many else [self._dataset[row] for row in rows.tolist()])
        if self._device != _CPU:
            rows = rows.to(self._device)
        return self._picked(rows if self.rows is None else self.rows[rows])

    def _picked(self, rows: Tensor) -> Any:
        if self._collate is not None:
            return self._collated([mapped(partial(torch.select, dim=0, index=row), self.columns) for row in rows.tolist()])
        if self.pair is not None:
            return self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)
        return mapped(lambda column: column.index_select(0, rows), self.columns)

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is not None:
            return self._collate(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise BadInput(
                f"the samples of {self.name} cannot be put into one batch ({str(error).splitlines()[0]}); give the network "
                "collate_fn=, a function that makes a batch of a list of samples, for instance one that pads them."
            ) from error

    def touch(self) -> None:
        """Run the user's own code once, if any is between the data and a minibatch."""
        if self.runs_user_code:
            self.batch(torch.tensor([0]))

    def pieces(self, size: int | None = None) -> Iterator[tuple[int, Any]]:
        """All samples in order, in batches of at most ``size``, each with the number of samples in it.

        By default 1,024, or on a GPU 16,384, where a batch costs about the same whatever its size.
        """
        size = size or (1024 if self._device in (None, _CPU) else 16_384)
        for start in range(0, self.size, size):
            end = min(start + size, self.size)
            if self.runs_user_code:
                yield end - start, self.batch(torch.arange(start, end))
            elif self.rows is None:
                yield end - start, mapped(partial(torch.narrow, dim=0, start=start, length=end - start), self.columns)
            else:
                yield end - start, self._picked(self.rows[start:end])

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a dataset its length and three samples."""
        into.update(str(self.size).encode())
        few = torch.tensor([0, self.size // 2, self.size - 1])
        _hash(self.batch(few if self.runs_user_code else torch.arange(self.size)), into)


def _counts(lengths: Sequence[int]) -> str:
    return f"{lengths[0]} inputs and {lengths[1]} targets" if len(lengths) == 2 else f"tensors of {list(lengths)} rows"


def _of_its_own(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.detach().clone()


def _hash(value: Any, into: Any) -> None:
    """Add a batch of any structure to a hash."""
    if isinstance(value, Tensor):
        into.update(f"{value.dtype}{tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            into.update(repr(key).encode())
            _hash(part, into)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _hash(part, into)
    elif isinstance(value, np.ndarray):
        into.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        into.update(repr(value).encode())
    else:  # its address would make it another each time
        into.update(type(value).__qualname__.encode())


class Minibatches:
    """Which samples make up each job."""

    def __init__(self, workers: int, batch_size: int | Sequence[int], seed: int, replacement: bool) -> None:
        batch_size = plain_number(batch_size)
        if not isinstance(batch_size, int):
            require_several("batch_size", batch_size, "numbers, one for each worker, or one number for all")
        self.sizes = [batch_size] * workers if isinstance(batch_size, int) else list(map(plain_number, batch_size))
        if len(self.sizes) != workers:
            raise BadInput(f"batch_size has {len(self.sizes)} numbers; expected one, or {workers}, one for each worker.")
        for worker, batch in enumerate(self.sizes):
            require_whole(f"batch_size of worker {worker}", batch, 1)
        largest = max(self.sizes)
        require_room(f"a minibatch of {largest} samples", 3.0 * 8 * _AHEAD * largest, "use a smaller batch_size")
        self._replacement, self._draws = replacement, Draws(seed, "minibatch")
        self._ahead: dict[int, tuple[int, tuple[Tensor, ...]]] = {}  # by worker: a block of draws, hashed in one call

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}}

    @property
    def size(self) -> int | None:
        """The one size that all minibatches have, if they do."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    @property
    def base(self) -> int | None:
        """What names the minibatches, for ``draws.integers_at``; None if they are drawn without replacement."""
        return self._draws.base if self._replacement else None

    def require_enough(self, worker: int, size: int, name: str) -> None:
        """Refuse data from which the worker's batch cannot be drawn."""
        batch = self.sizes[worker]
        if batch > size and not self._replacement:
            raise BadInput(
                f"{name} has {size} samples, fewer than its batch of {batch}, and replacement=False; "
                "take a smaller batch or draw with replacement."
            )

    def extended(self, workers: int) -> Minibatches:
        """Minibatches for more workers, the new ones' as large as the last one's."""
        sizes = [*self.sizes, *self.sizes[-1:] * (workers - len(self.sizes))]
        return Minibatches(workers, sizes, self._draws.seed, self._replacement)

    def named(self, seed: int) -> Minibatches:
        """Minibatches of the same sizes that another seed names."""
        return Minibatches(len(self.sizes), self.sizes, seed, self._replacement)

    def epoch(self, worker: int, size: int) -> int:
        """How many minibatches have as many samples as the worker."""
        return -(-size // self.sizes[worker])

    def rows(self, worker: int, draw: int, size: int) -> Tensor:
        """The samples of a job, as positions in the worker's own ``size`` samples; not to be written to."""
        batch = self.sizes[worker]
        if not self._replacement:
            return torch.from_numpy(self._draws.permutation(size, worker, draw)[:batch])
        block, row = divmod(draw, _AHEAD)
        known = self._ahead.get(worker)
        if known is None or known[0] != block:
            if known is None and len(self._ahead) == _MOST_AHEAD:
                return torch.from_numpy(self._draws.integers(size, batch, worker, draw))
            places = ((worker, later) for later in range(block * _AHEAD, (block + 1) * _AHEAD))
            known = (block, torch.from_numpy(self._draws.tables(size, batch, places)).unbind(0))
            self._ahead[worker] = known
        return known[1][row]


def objectives(losses: Sequence[float], sizes: Sequence[int], scales: Sequence[float]) -> dict[str, float]:
    """The two means of the workers' losses, nan of none: F = (1/n) sum_i scale_i F_i, and that over all samples pooled."""
    objective = sum(scale * loss for scale, loss in zip(scales, losses, strict=True)) / (len(losses) or math.nan)
    pooled = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / (sum(sizes) or math.nan)
    return {"objective": objective, "pooled_loss": pooled}


def digest(*parts: Any) -> Any:
    """A hash of plain values, to be fed with data."""
    return hashlib.sha256(repr(parts).encode())

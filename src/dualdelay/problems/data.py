"""What every problem with data shares: shards, the names of minibatches, and the means of losses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.weak import WeakTensorKeyDictionary

from ..draws import Draws
from ..errors import BadInput, require_whole

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


class Shard:
    """One worker's own data: a pair of tensors (inputs, targets) or a map-style dataset of such pairs.

    A ``Subset`` of a ``TensorDataset`` stays what it is: numbers of rows in tensors that other workers share.
    """

    rows: Tensor | None = None  # this worker's rows of the pair, which has others' too; None: all

    def __init__(self, data: Any, name: str) -> None:
        if isinstance(data, Subset) and isinstance(data.dataset, TensorDataset) and len(data.dataset.tensors) == 2:
            self.rows = torch.as_tensor(data.indices, dtype=torch.int64)
            data = data.dataset.tensors
        pair = tuple(data) if isinstance(data, (tuple, list)) and len(data) == 2 else ()
        pair = tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in pair)
        if pair and all(isinstance(part, Tensor) for part in pair):
            if len(pair[0]) != len(pair[1]):
                raise BadInput(f"{name} has {len(pair[0])} inputs and {len(pair[1])} targets; expected as many.")
            self.pair: tuple[Tensor, Tensor] | None = pair
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (tuple, list, Tensor)):
            self.pair, self._dataset = None, data
        else:
            raise BadInput(
                f"{name} is a {type(data).__name__}; expected a pair of tensors (inputs, targets) or a dataset with "
                "__len__ and __getitem__ that gives such pairs."
            )
        self.size = len(self.rows) if self.rows is not None else len(pair[0]) if pair else len(data)
        if self.size == 0:
            raise BadInput(f"{name} is empty; give every worker at least one sample, or leave that worker out.")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.pair is not None:  # a pickled view would bring along all the data that it is a view of
            whole = [part.untyped_storage().nbytes() == part.nbytes for part in self.pair]
            state["pair"] = tuple(p if w else p.detach().clone() for p, w in zip(self.pair, whole, strict=True))
            if self.rows is not None:  # and the rows of others stay with them
                state |= {"pair": tuple(part[self.rows] for part in self.pair), "rows": None}
        return state

    @property
    def kind(self) -> Hashable:
        """What samples of one minibatch must have in common: types and shapes; None for a dataset."""
        return None if self.pair is None else tuple((part.dtype, part.shape[1:]) for part in self.pair)

    def on(self, device: str) -> Shard:
        """The same data on a device; a dataset stays where it is."""
        if self.pair is None:
            return self
        other = object.__new__(Shard)  # copy.copy would copy the rows, as for a pickle
        other.__dict__.update(self.__dict__)
        other.pair = (moved(self.pair[0], device), moved(self.pair[1], device))
        other.rows = None if self.rows is None else self.rows.to(device)
        return other

    def some(self, rows: Tensor) -> Shard:
        """These samples alone."""
        other = object.__new__(Shard)
        other.__dict__.update(self.__dict__)
        if self.pair is None:
            other._dataset = Subset(self._dataset, rows.tolist())
        else:
            rows = rows.to(self.pair[0].device)
            other.rows = rows if self.rows is None else self.rows[rows]
        other.size = len(rows)
        return other

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """These samples as tensors."""
        if self.pair is not None:
            if not self.pair[0].is_cpu:
                rows = rows.to(self.pair[0].device)
            if self.rows is not None:
                rows = self.rows[rows]
            return self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)
        inputs, targets = default_collate([self._dataset[row] for row in rows.tolist()])
        return inputs, targets

    def touch(self) -> None:
        """Run the user's own code once, if any is between the data and a minibatch."""
        if self.pair is None:
            self.batch(torch.tensor([0]))

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, in pieces; on a GPU a piece costs about the same whatever its size."""
        size = 16_384 if self.pair is not None and not self.pair[0].is_cpu else 1024
        for start in range(0, self.size, size):
            end = min(start + size, self.size)
            if self.pair is None:
                yield self.batch(torch.arange(start, end))
            elif self.rows is None:
                yield self.pair[0][start:end], self.pair[1][start:end]
            else:
                rows = self.rows[start:end]
                yield self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a dataset its length and three samples."""
        into.update(str(self.size).encode())
        rows = torch.tensor([0, self.size // 2, self.size - 1])
        for tensor in self.batch(rows if self.pair is None else torch.arange(self.size)):
            into.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            into.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class Minibatches:
    """Which samples make up each job."""

    def __init__(self, workers: int, batch_size: int | Sequence[int], seed: int, replacement: bool) -> None:
        self._batches = [batch_size] * workers if isinstance(batch_size, int) else list(batch_size)
        if len(self._batches) != workers:
            raise BadInput(f"batch_size has {len(self._batches)} numbers; expected one, or {workers}, one for each worker.")
        for worker, batch in enumerate(self._batches):
            require_whole(f"batch_size of worker {worker}", batch, 1)
        self._replacement, self._draws = replacement, Draws(seed, "minibatch")
        self._ahead: dict[int, tuple[int, tuple[Tensor, ...]]] = {}  # by worker: a block of draws, hashed in one call

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}}

    @property
    def size(self) -> int | None:
        """The one size that all minibatches have, if they do."""
        return self._batches[0] if len(set(self._batches)) == 1 else None

    @property
    def base(self) -> int | None:
        """What names the minibatches, for ``draws.integers_at``; None if they are drawn without replacement."""
        return self._draws.base if self._replacement else None

    def require_enough(self, worker: int, size: int, name: str) -> None:
        """Refuse data from which the worker's batch cannot be drawn."""
        batch = self._batches[worker]
        if batch > size and not self._replacement:
            raise BadInput(
                f"{name} has {size} samples, fewer than its batch of {batch}, and replacement=False; "
                "take a smaller batch or draw with replacement."
            )

    def named(self, seed: int) -> Minibatches:
        """Minibatches of the same sizes that another seed names."""
        return Minibatches(len(self._batches), self._batches, seed, self._replacement)

    def epoch(self, worker: int, size: int) -> int:
        """How many minibatches have as many samples as the worker."""
        return -(-size // self._batches[worker])

    def rows(self, worker: int, draw: int, size: int) -> Tensor:
        """The samples of a job, as positions in the worker's own ``size`` samples; not to be written to."""
        batch = self._batches[worker]
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

"""Where a network's data come from: they are given, or a function builds them when they are first needed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_several, require_workers, shown
from .data import Collate, Shard
from .generators import seeded


def name_of(function: Any) -> str:
    """What a function is called where it was defined."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def _is_function(given: Any) -> bool:
    return callable(given) and not hasattr(given, "__getitem__")


def _call(function: Callable[..., Any], *place: int) -> Any:
    """What the function gives, with torch's global generator seeded by the place alone: the same in every process."""
    with seeded(Draws(0, "data").key(*place)):
        return function(*place)


class Shards:
    """Each worker's own data; those that a function built are kept in this process and out of every pickle."""

    def __init__(self, given: Any, workers: int | None, collate: Collate | None = None, name: str = "shards") -> None:
        self.function = given if _is_function(given) else None
        workers = plain_number(workers)
        self.device: str | None = None  # where they are put; None: they stay where they are
        self.kept: dict[int, Shard] = {}
        self._collate, self._name = collate, name
        self._several: tuple[Any, list[tuple[list[int], Tensor, Tensor]]] | None = None
        if self.function is not None:
            if workers is None:
                raise BadInput("shards is a function; say with workers= for how many workers it builds data.")
            require_workers("workers", workers)
            self.workers = workers
            return
        if not hasattr(given, "__len__"):
            require_several(name, given, "each worker's data")
            given = list(given)
        self.workers = len(given)
        if self.workers == 0:
            raise BadInput(f"{name} is empty; expected the data of at least one worker.")
        if workers not in (None, self.workers):
            hint = "; leave workers= out" if name == "shards" else ""
            raise BadInput(f"workers is {shown(workers)}, but {name} holds the data of {self.workers}{hint}.")
        self.kept = {
            worker: Shard(data, f"{name}[{worker}]", collate)
            for worker, data in enumerate(given)
            if data is not None or name == "shards"
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": {} if self.function is not None else self.kept, "_several": None}

    def on(self, device: str) -> Shards:
        """The same data on a device."""
        other = copy.copy(self)
        other.device, other.kept = device, {worker: shard.on(device) for worker, shard in self.kept.items()}
        return other

    def extended(self, workers: int) -> Shards:
        """The same function for more workers; what was built is kept for both."""
        other = copy.copy(self)
        other.workers = workers
        return other

    def build(self, worker: int) -> Shard:
        """Call the function for a worker."""
        built = self._built(worker)
        if built is None:
            raise BadInput(f"{self._name}({worker}) gave None; expected that worker's data.")
        return built

    def get(self, worker: int) -> Shard | None:
        """A worker's data, built at their first use; None if it has none."""
        if self.function is not None and worker not in self.kept:
            built = self._built(worker)
            if built is not None:
                self.kept[worker] = built
        return self.kept.get(worker)

    def _built(self, worker: int) -> Shard | None:
        if self.function is None or not 0 <= worker < self.workers:
            raise BadInput(f"worker is {worker}; expected one of 0..{self.workers - 1}.")
        data = _call(self.function, worker)
        if data is None:
            return None
        built = Shard(data, f"{'shard' if self._name == 'shards' else self._name}({worker})", self._collate)
        return built if self.device is None else built.on(self.device)

    def merged(self, shards: Sequence[Shard], most: int) -> list[tuple[list[int], Tensor, Tensor]]:
        """Workers whose pairs of tensors fit into one batch of at most so many samples, with that batch."""
        key = tuple(map(id, shards))
        if self._several is None or self._several[0] != key:
            groups: list[list[int]] = [[]]
            for worker, shard in enumerate(shards):
                if shard.pair is None or shard.size > most:
                    groups.append([])
                    continue
                first = shards[groups[-1][0]] if groups[-1] else shard
                if first.kind != shard.kind or sum(shards[k].size for k in groups[-1]) + shard.size > most:
                    groups.append([])
                groups[-1].append(worker)
            made: list[tuple[list[int], Tensor, Tensor]] = []
            for workers in groups:
                if len(workers) > 1:
                    parts = [shards[k].batch(torch.arange(shards[k].size)) for k in workers]
                    inputs, targets = (torch.cat([part[side] for part in parts]) for side in (0, 1))
                    made.append((workers, inputs, targets))
            self._several = (key, made)
        return self._several[1]

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self.function is not None:
            into.update(f"{self.workers} {self._name} of {name_of(self.function)}".encode())
            return
        for shard in self.kept.values():
            shard.digest(into)


class TestData:
    """The data on which accuracy is measured, if there are any; those that a function built stay out of every pickle."""

    def __init__(self, given: Any) -> None:
        self.device: str | None = None
        self._function = given if _is_function(given) else None
        self._shard = None if given is None or self._function is not None else Shard(given, "test")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shard": None if self._function is not None else self._shard}

    @property
    def absent(self) -> bool:
        """Whether there are no such data."""
        return self._shard is None and self._function is None

    @property
    def runs_user_code(self) -> bool:
        """Whether there is code of the user's own between the data and a batch."""
        return self._function is not None or (self._shard is not None and self._shard.runs_user_code)

    @property
    def size(self) -> int:
        """The number of samples, as far as it is known."""
        return 0 if self._shard is None else self._shard.size

    def on(self, device: str) -> TestData:
        """The same data on a device."""
        other = copy.copy(self)
        other.device, other._shard = device, None if self._shard is None else self._shard.on(device)
        return other

    def accuracy(self, model: Callable[[Any], Any], share: float = 1.0) -> float:
        """The share of samples whose largest output is their class; nan if there are none or targets are no classes.

        Where less than all of the workers' data were looked at, a like share of these is, 256 at least, always the same.
        """
        if self._shard is None and self._function is not None:
            built = Shard(_call(self._function), "test()")
            self._shard = built if self.device is None else built.on(self.device)
        if self._shard is None:
            return math.nan
        shard, few = self._shard, max(256, round(share * self._shard.size)) if share < 1 else self._shard.size
        if few < shard.size:
            shard = shard.some(torch.from_numpy(Draws(0, "evaluation").permutation(shard.size, -1)[:few]).sort().values)
        right = []
        for _, batch in shard.pieces():
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                return math.nan
            inputs, targets = batch
            with torch.no_grad():
                outputs = model(inputs)
            classes = isinstance(targets, Tensor) and not targets.is_floating_point()
            if not classes or not isinstance(outputs, Tensor) or outputs.ndim != targets.ndim + 1:
                return math.nan
            right.append((outputs.argmax(1) == targets).sum())
        return int(torch.stack(right).sum()) / shard.size

    def require_pairs(self) -> None:
        """Refuse data that are given and of which no accuracy can be measured."""
        if self._shard is not None:
            batch = self._shard.batch(torch.tensor([0]))
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise BadInput(
                    f"test gives a batch that is a {type(batch).__name__}; expected pairs (inputs, classes). Measure what "
                    "you want to know of other data by functions: metrics={'accuracy': lambda model, batch: ...}."
                )

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self._function is not None:
            into.update(f"test data of {name_of(self._function)}".encode())
        elif self._shard is not None:
            self._shard.digest(into)

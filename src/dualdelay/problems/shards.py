"""Where a network's data come from: they are given, or a function builds them when they are first needed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..draws import Draws
from ..errors import BadInput, require_whole
from .data import Shard
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

    def __init__(self, given: Any, workers: int | None) -> None:
        self.function = given if _is_function(given) else None
        self.device: str | None = None  # where they are put; None: they stay where they are
        self.kept: dict[int, Shard] = {}
        if self.function is not None:
            if workers is None:
                raise BadInput("shards is a function; say with workers= for how many workers it builds data.")
            require_whole("workers", workers, 1)
            self.workers = workers
            return
        self.workers = len(given)
        if self.workers == 0:
            raise BadInput("shards is empty; expected the data of at least one worker.")
        if workers not in (None, self.workers):
            raise BadInput(f"workers is {workers!r}, but shards holds the data of {self.workers}; leave workers= out.")
        self.kept = {worker: Shard(data, f"shards[{worker}]") for worker, data in enumerate(given)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": {} if self.function is not None else self.kept}

    def on(self, device: str) -> Shards:
        """The same data on a device."""
        other = copy.copy(self)
        other.device, other.kept = device, {worker: shard.on(device) for worker, shard in self.kept.items()}
        return other

    def build(self, worker: int) -> Shard:
        """Call the function for a worker."""
        if self.function is None or not 0 <= worker < self.workers:
            raise BadInput(f"worker is {worker}; expected one of 0..{self.workers - 1}.")
        built = Shard(_call(self.function, worker), f"shard({worker})")
        return built if self.device is None else built.on(self.device)

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self.function is not None:
            into.update(f"{self.workers} shards of {name_of(self.function)}".encode())
            return
        for shard in self.kept.values():
            shard.digest(into)


class Exam:
    """The data on which accuracy is measured, if there are any; those that a function built stay out of every pickle."""

    def __init__(self, given: Any) -> None:
        self.device: str | None = None
        self._function = given if _is_function(given) else None
        self._shard = None if given is None or self._function is not None else Shard(given, "test")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shard": None if self._function is not None else self._shard}

    def on(self, device: str) -> Exam:
        """The same data on a device."""
        other = copy.copy(self)
        other.device, other._shard = device, None if self._shard is None else self._shard.on(device)
        return other

    def accuracy(self, model: Callable[[Tensor], Tensor]) -> float:
        """The share of samples whose largest output is their class; nan if there are none or targets are no classes."""
        if self._shard is None and self._function is not None:
            built = Shard(_call(self._function), "test()")
            self._shard = built if self.device is None else built.on(self.device)
        if self._shard is None:
            return math.nan
        right = []
        for inputs, targets in self._shard.pieces():
            with torch.no_grad():
                outputs = model(inputs)
            if targets.is_floating_point() or outputs.ndim != targets.ndim + 1:
                return math.nan
            right.append((outputs.argmax(1) == targets).sum())
        return int(torch.stack(right).sum()) / self._shard.size

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self._function is not None:
            into.update(f"test data of {name_of(self._function)}".encode())
        elif self._shard is not None:
            self._shard.digest(into)

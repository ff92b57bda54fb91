"""A sharded server on virtual time, all of it in this process: to try a method, and to test what shards promise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import Arrival, Memory, Order
from ..core.errors import BadInput
from ..core.state import is_finite
from ..core.work import Sent
from ..engine.events import Event, EventKind
from ..engine.half import checked_model
from ..engine.shard import MessageName, ShardPlan, cut_message, joined_model, named
from ..engine.sharded import MessageFleet
from ..engine.slices import STAND_IN
from .local_fleet import LocalFleet


class LocalShards:
    """The shards of a run, as its head reaches them."""

    def __init__(self, plan: ShardPlan, x: Tensor) -> None:
        self.plan = plan
        self.all = [plan.shard(k, x[start:stop].clone()) for k, (start, stop) in enumerate(plan.slices.places)]

    def tell(self, name: str, *args: Any) -> None:
        """Every shard does it now."""
        for shard in self.all:
            getattr(shard, name)(*copy.deepcopy(args))

    def flush(self) -> None:
        """Nothing waits."""

    def ask(self, name: str, *args: Any) -> list[Any]:
        """What each shard answers."""
        return [getattr(shard, name)(*args) for shard in self.all]

    def weights(self) -> Tensor:
        """The current weights, whole."""
        return torch.cat(self.ask("weights"))

    def save(self, folder: Path | None, moment: int) -> Any:
        """What each shard needs to continue later."""
        return copy.deepcopy([shard.save() for shard in self.all])

    def load(self, saved: Mapping[str, Any]) -> None:
        """Every shard continues from a checkpoint of as many."""
        if len(saved["shards"]) != len(self.all):
            raise BadInput(f"{len(saved['shards'])} shards were saved; expected {len(self.all)}.")
        for shard, part in zip(self.all, saved["shards"], strict=True):
            shard.load(copy.deepcopy(part))

    def recovered(self, worker: int, others: Mapping[int, Memory], few: Memory) -> Memory:
        """What a worker goes on with, put together."""
        parts, sizes = self.ask("recover", worker, others), [stop - start for start, stop in self.plan.slices.places]
        whole = dict(few)
        for name in few:
            vectors = [part[name] for part in parts]
            if all(isinstance(v, Tensor) and v.shape[-1:] == (size,) for v, size in zip(vectors, sizes, strict=True)):
                whole[name] = torch.cat(vectors)
        return whole

    def model(self, worker: int | None) -> Sent:
        """The current model, or what one worker is sent, put together."""
        states = [shard.state for shard in self.all]
        parts = [s.weights if worker is None else checked_model(self.plan.algorithm, s, worker) for s in states]
        return joined_model(parts, self.plan.model_vectors())


class LocalMessageFleet(LocalFleet, MessageFleet):
    """Simulated workers that send their messages to shards."""

    def __init__(self, *args: Any, shards: LocalShards, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shards, self._vectors = shards, shards.plan.message_vectors()
        self._names: dict[int, MessageName] = {}
        self._faults: dict[int, str] = {}

    def message_name(self, worker: int) -> MessageName:
        return self._names[worker]

    def message_fault(self, worker: int) -> str:
        return self._faults[worker]

    def write_kept(self, folder: Path | None, moment: int) -> None:
        """It is saved with everything else."""

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor, own: Callable[[int], Sent] | None = None) -> None:
        whole = self._shards.model(None)
        assert isinstance(whole, Tensor)
        super().carry_out(orders, version, whole, None if own is None else self._shards.model)

    def arrival(self, event: Event) -> Arrival:
        a = super().arrival(event)
        if event.kind is not EventKind.ARRIVAL:
            return a
        message: Any = a.parts or a.value
        self._faults[a.worker] = "" if all(map(is_finite, named(message).values())) else "values that are not finite"
        self._names[a.worker] = name = (0, a.job.draw)
        for shard, place in zip(self._shards.all, self._shards.plan.slices.places, strict=True):
            shard.push(a.worker, name, cut_message(message, self._vectors, *place))
        if not a.parts:
            return a._replace(value=a.value[:STAND_IN])
        parts = {key: part[..., :STAND_IN] if self._vectors[key] else part for key, part in a.parts.items()}
        return a._replace(value=next(iter(parts.values())), parts=parts)

"""Real workers that exchange models and messages with the shards of a server; its head hears that it has happened."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import Arrival, Order, Problem
from ..core.compression import size_of
from ..core.draws import Draws
from ..core.work import Sent
from ..engine.events import Event
from ..engine.fleet import Model
from ..engine.half import Half, checked_model
from ..engine.shard import MessageName, ShardPlan, named
from ..engine.sharded import MessageFleet, Shards
from .coordinator import Coordinator
from .settings import WorkerFleet
from .transport import Transport


class LendingShards(Shards, Protocol):
    """Shards that workers pull models from, by key."""

    places: list[tuple[str, int]]
    """The node and the process of each."""

    def release(self, key: int) -> None:
        """Nobody needs a model any more."""

    def model(self, key: int) -> Sent:
        """A model that is lent, whole."""


class LentModel:
    """A model that the shards have lent; it travels as its key, and is released when nobody here refers to it."""

    def __init__(self, key: int, release: Callable[[int], None]) -> None:
        self.key = key
        weakref.finalize(self, release, key)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.key,)


class ShardedCoordinator(Coordinator, MessageFleet):
    """The coordinator of a sharded server's workers."""

    def __init__(
        self,
        fleet: WorkerFleet,
        problem: Problem,
        half: Half,
        transport: Transport,
        plan: ShardPlan,
        shards: LendingShards,
    ) -> None:
        super().__init__(fleet, problem, half, transport)
        self.plan, self.shards = plan, shards
        fleet.control.shards.update(enumerate(shards.places))
        self._keys = 0  # of models lent so far
        self._lent: weakref.WeakValueDictionary[int, LentModel] = weakref.WeakValueDictionary()
        self._receiver: int | None = None  # the worker that the next model is made for
        self._model_bytes = _model_bytes(plan)

    def message_name(self, worker: int) -> MessageName:
        reply = self.records[worker].reply
        assert reply is not None
        return reply.request.incarnation, reply.request.sequence

    def message_fault(self, worker: int) -> str:
        reply = self.records[worker].reply
        assert reply is not None
        return "it was not sent to the shards" if reply.pushed is None else reply.pushed.fault

    def arrival(self, event: Event) -> Arrival:
        a, reply = super().arrival(event), self.records[event.worker].reply
        return a if reply is None or reply.pushed is None else a._replace(bytes=reply.pushed.size)

    def carry_out(self, orders: Iterable[Order], version: int, x: Tensor, own: Callable[[int], Sent] | None = None) -> None:
        def made_for(worker: int) -> Sent:
            assert own is not None
            self._receiver = worker
            return own(worker)

        super().carry_out(orders, version, x, None if own is None else made_for)

    def _lend(self, version: int, x: Any, serial: int = 0, packed: Any = None) -> Model:
        """Have the shards lend their current model; one that was lent before and saved has a key already."""
        if not serial and self._current.version == version:
            return self._current
        if isinstance(x, int):
            key, self._keys = x, max(self._keys, x + 1)
        else:
            key, self._keys = self._keys, self._keys + 1
            self.shards.tell("keep", key, self._receiver if serial else None)
        lent = self._lent.get(key)
        if lent is None:
            lent = self._lent[key] = LentModel(key, self.shards.release)
        model = Model(version, lent, serial, size=self._model_bytes)
        if not serial:
            self._current = model
        return model

    def _weights(self, model: Model) -> Sent:
        return self.shards.model(model.x.key)

    def _saved(self, model: Model) -> int:
        key: int = model.x.key
        return key

    def _receive(self, timeout: float) -> None:
        self.shards.flush()  # before anybody is waited for
        super()._receive(timeout)


def _model_bytes(plan: ShardPlan) -> int:
    """The bytes of what a worker is sent."""
    state = plan.algorithm.init(torch.zeros(1, dtype=plan.dtype), plan.workers, Draws(plan.seed, "server"))
    sent, vectors = named(checked_model(plan.algorithm, state, 0)), plan.model_vectors()
    return sum(size_of(part) * (plan.slices.length if vectors[name] else 1) for name, part in sent.items())

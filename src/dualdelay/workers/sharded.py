"""Real workers that exchange models and messages with the shards of a server; its head hears that it has happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import Arrival, Memory, Order, Problem
from ..core.compression import size_of
from ..core.draws import Draws
from ..core.work import Sent
from ..engine.events import Event, EventKind
from ..engine.fleet import Model
from ..engine.half import METHOD, Half, Kept, checked_model
from ..engine.shard import MessageName, ShardPlan, named
from ..engine.sharded import MessageFleet, Shards
from ..engine.slices import Elsewhere, elsewhere
from .coordinator import Coordinator
from .messages import size_of_kept
from .settings import WorkerFleet
from .transport import Transport


class Lent(Protocol):
    """What shards lend: a model, or the vectors of what a worker keeps."""

    key: int


class LendingShards(Shards, Protocol):
    """Shards that workers pull models from, by key."""

    places: list[tuple[str, int]]
    """The node and the process of each."""

    def lent(self, key: int | None = None) -> Lent:
        """What is to be lent, under a new key, or was lent before and saved."""

    def model(self, key: int) -> Sent:
        """A model that is lent, whole."""

    def borrowed(self, memory: Elsewhere) -> Memory:
        """What a worker keeps that is about to leave, lent by the shards from now on."""

    def written_again(self, path: Path, moment: int) -> Path:
        """A file that a worker has written for one checkpoint, for another one as well."""


class KeepingTransport(Transport, Protocol):
    """A transport to workers who say with stand-ins what they keep, and write it themselves."""

    def write_kept(self, accepted: Mapping[int, int], folder: Path, moment: int) -> dict[int, str]:
        """Have workers write what they keep for a checkpoint; returns the names of the files, of those that could."""


class ShardedCoordinator(Coordinator, MessageFleet):
    """The coordinator of a sharded server's workers. What these keep stays with them, or is lent by the shards."""

    _transport: KeepingTransport

    def __init__(
        self,
        fleet: WorkerFleet,
        problem: Problem,
        half: Half,
        transport: KeepingTransport,
        plan: ShardPlan,
        shards: LendingShards,
    ) -> None:
        super().__init__(fleet, problem, half, transport)
        self.plan, self.shards = plan, shards
        fleet.control.shards.update(enumerate(shards.places))
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
        lent = self.shards.lent(x if isinstance(x, int) else None)
        if not isinstance(x, int):
            self.shards.tell("keep", lent.key, self._receiver if serial else None)
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

    # --- what workers keep ---

    def _prepared(self, event: Event) -> bool:
        if not super()._prepared(event):
            return False
        kept = self._known.get(event.worker) if event.kind is EventKind.LEFT else None
        if kept is not None and isinstance(memory := kept.get(METHOD), Elsewhere):  # its process is about to be stopped
            self._known[event.worker] = {**kept, METHOD: self.shards.borrowed(memory)}
        return True

    def write_kept(self, folder: Path | None, moment: int) -> None:
        assert folder is not None, "a sharded server is saved to a folder alone"
        held, folder = self.held(), folder.resolve()
        asked = {worker: self.records[worker].accepted for worker in self._keeping() if worker in held}
        names = self._transport.write_kept(asked, folder, moment)
        for worker in asked:
            self._known.pop(worker, None)
            if worker in names:
                self._known[worker] = _moved(held[worker], folder / "checkpoints" / names[worker])
            else:  # it counts as lost unless it is heard of again
                self._silent[worker] = (self.records[worker].incarnation, self.records[worker].jobs_done)
        for record in self.records:  # a file of an earlier checkpoint goes with that one
            if record.held is not None and isinstance(path := _place_of(record.held), Path):
                record.held = _moved(record.held, self.shards.written_again(path, moment))

    def save(self) -> dict[str, Any]:
        saved = super().save()
        return {**saved, "held": [(worker, _saved_kept(kept)) for worker, kept in saved["held"]]}

    def load(self, saved: Mapping[str, Any]) -> None:
        super().load({**saved, "held": [(worker, self._loaded_kept(kept)) for worker, kept in saved["held"]]})

    def _loaded_kept(self, kept: Any) -> Kept:
        if "few" not in kept:
            whole: Kept = kept  # as a server in one process has saved it
            return whole
        return elsewhere(kept["few"], kept["file"] if "file" in kept else self.shards.lent(kept["lent"]), kept["size"])


def _moved(kept: Kept, place: Path) -> Kept:
    """The same elsewhere."""
    return elsewhere(kept, place, size_of_kept(kept))


def _place_of(kept: Kept) -> Any:
    """Where that is what a worker keeps, all of it in one place; None if it is here."""
    return next((part.place for part in kept.values() if isinstance(part, Elsewhere)), None)


def _saved_kept(kept: Kept) -> Any:
    """What a worker keeps as a checkpoint names it: a file of its own, or a key of the shards."""
    place = _place_of(kept)
    if place is None:
        return kept
    where = {"file": place.name} if isinstance(place, Path) else {"lent": place.key}
    return {**where, "few": {kind: dict(part) for kind, part in kept.items()}, "size": size_of_kept(kept)}


def _model_bytes(plan: ShardPlan) -> int:
    """The bytes of what a worker is sent."""
    state = plan.algorithm.init(torch.zeros(1, dtype=plan.dtype), plan.workers, Draws(plan.seed, "server"))
    sent, vectors = named(checked_model(plan.algorithm, state, 0)), plan.model_vectors()
    return sum(size_of(part) * (plan.slices.length if vectors[name] else 1) for name, part in sent.items())

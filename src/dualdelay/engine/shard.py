"""One slice of a server: the steps of a method on some of the weights.

A method that is separable by coordinate decides by workers, versions and times, never by values. So its steps can be made
slice by slice, by several processes: a head decides with stand-ins for the vectors (``sharded.py``) and says what happened,
and every shard does the same to its slice of the weights, the sum, the table and the optimiser's state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Job, Memory
from ..core.aggregate import AggregateState, TableFormat
from ..core.draws import Draws
from ..core.jobs import NO_PARTS
from ..core.state import BLOCK, State, Stepper, checksum, pattern_of
from ..core.work import Sent
from .blocks import Blocks, can_be_cut
from .half import METHOD, checked_model
from .slices import Elsewhere, Lazily, Slices, cut, cut_part, joined, stand_ins, vectors_of

_TURN = 2  # blocks of a step after which somebody else may have a turn

Call = Sequence[Any]
"""The name of a shard's method, and its arguments."""
MessageName = tuple[int, int]
"""The incarnation and the sequence number of a worker's message: later ones are larger."""


@dataclass(frozen=True)
class ShardPlan:
    """What all shards of a run have in common."""

    algorithm: Algorithm[Any]
    workers: int
    seed: int
    optimizer: Stepper | None
    table_format: TableFormat
    slices: Slices
    dtype: torch.dtype

    def shard(self, number: int, x: Tensor, store: Store | None = None) -> Shard:
        """A shard as it begins, with its slice of the weights."""
        return Shard(self, self.slices.places[number], x, store or Store())

    def vectors(self, of: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, bool]:
        """Which of named shapes are vectors of the model's length: those that differ with it."""
        return {name: of[name][-1:] != other[name][-1:] for name in of}

    def message_vectors(self) -> dict[str, bool]:
        """Of the tensors in a message, which are cut; the others are small and go to every shard."""
        one, two = (self.algorithm.shapes(torch.zeros(size, dtype=self.dtype)) for size in (1, 2))
        return self.vectors(one, two)

    def model_vectors(self) -> dict[str, bool]:
        """The same of what a worker is sent; a single tensor has no name."""
        one, two = (self._model_shapes(torch.zeros(size, dtype=self.dtype)) for size in (1, 2))
        return self.vectors(one, two)

    def _model_shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        state = self.algorithm.init(x, self.workers, Draws(self.seed, "server"))
        return {name: tuple(part.shape) for name, part in named(checked_model(self.algorithm, state, 0)).items()}


def named(value: Any) -> Mapping[str, Any]:
    """The tensors of a message or a model by name; a single one has none."""
    return value if isinstance(value, Mapping) else {"": value}


class Room(Protocol):
    """Where weights are put part by part."""

    def part(self, start: int, stop: int) -> Tensor:
        """The memory of some of them."""

    def place(self) -> Any:
        """All are there: as of what is put at once, the place."""


class Store:
    """Where a shard keeps the models that it lends to workers: here, as they are."""

    def copies(self, x: Tensor) -> bool:
        """Whether weights are copied when they are put, so that the shard may go on writing into them."""
        return False

    def put(self, sent: Sent) -> Any:
        """Keep a model; returns its place."""
        return sent

    def room(self, x: Tensor) -> Room | None:
        """Where weights like these can be put part by part; None: they are put at once."""
        return None

    def get(self, place: Any) -> Sent:
        """A model that was put."""
        sent: Sent = place
        return sent

    def memory(self, place: Any, start: int, stop: int) -> Memory:
        """Of what a worker keeps elsewhere, the numbers from ``start`` to ``stop`` of its vectors."""
        raise AssertionError("here nothing is elsewhere")


class _NewRoom:
    """Where the weights that a step makes block by block are put; the place is made when the first block needs it."""

    def __init__(self, store: Store, like: Tensor) -> None:
        self._store, self._like = store, like
        self._used = 0  # weights whose memory was handed out

    @cached_property
    def room(self) -> Room | None:
        """That place, if there is one."""
        return self._store.room(self._like)

    def blank(self, start: int, stop: int) -> Tensor:
        """Memory for new weights of a block: there, unless it has made some there that it has read since."""
        if self.room is None or self._used > start:
            return torch.empty_like(self._like[start:stop])
        self._used = stop
        return self.room.part(start, stop)

    def put(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """A block's new weights, there if there is such a place."""
        if self.room is None:
            return weights
        there = self.room.part(start, stop)
        if there.data_ptr() == weights.data_ptr():
            return there
        if self._used > start:  # others were made there first, which the method may have read: they stay as they are
            self.room = None
            return weights
        return there.copy_(weights)


class Shard:
    """One slice of a server under way."""

    def __init__(self, plan: ShardPlan, place: tuple[int, int], x: Tensor, store: Store) -> None:
        self._plan, self._place, self._store = plan, place, store
        self._state: State = plan.algorithm.init(x, plan.workers, Draws(plan.seed, "server"))
        self._state.optimizer = copy.deepcopy(plan.optimizer)
        if isinstance(self._state, AggregateState):
            self._state.table_format = plan.table_format
        self._blocks: Blocks | None = None  # the same in blocks, which are newer than it, from one step to another
        self._room: tuple[int, Room] | None = None  # a version, and where its weights are if workers can read them there
        self._bits = pattern_of(plan.slices.length, x.dtype)
        self._messages: dict[int, dict[MessageName, dict[str, Any]]] = {}  # by worker: what has come and is not absorbed
        self._models: dict[int, Any] = {}  # what was lent to workers, by key
        self._newest = -1  # the key of the model that was lent last
        self._lends_weights = True  # whether that was the weights, and not what the method makes of them for a worker
        self._checksums: list[int] = []  # after each arrival since the head asked last
        self._checksum = (-1, 0)  # a version and that of its weights

    @property
    def state(self) -> State:
        """What the server knows of this slice; it may be changed."""
        if self._blocks is not None:
            self._state, self._blocks = self._blocks.renewed(), None
        return self._state

    # --- what the head tells, in the order in which it happens ---

    def first(self) -> None:
        """The run begins."""
        self._plan.algorithm.first(self.state)

    def step(self, facts: Sequence[Any], is_named: bool, message: Sequence[int]) -> None:
        """A worker's message is absorbed, of which the head knows these facts, and whether its tensors have names."""
        for _ in self.step_in_turns(facts, is_named, message):
            pass

    def step_in_turns(self, facts: Sequence[Any], is_named: bool, message: Sequence[int]) -> Iterator[None]:
        """The same with moments in between in which messages may come and models be asked for."""
        (worker, draw, version), time, seconds, loss, size, steps, down = facts
        waiting, name = self._messages[worker], (message[0], message[1])
        parts = waiting[name]
        for other in [key for key in waiting if key <= name]:
            del waiting[other]
        value, named_parts = next(iter(parts.values())), parts if is_named else NO_PARTS
        a = Arrival(Job(worker, draw, version), value, time, seconds, loss, size, steps, down, named_parts)
        if self.goes_by_blocks(parts.values()):
            yield from self._step_by_blocks(a)
            return
        if self.state.optimizer is not None and not a.parts:
            self.state.optimizer.observe(self.state.weights, a.value)
        self._plan.algorithm.step(self.state, a)
        if self._checksum[0] != self.state.version:
            self._checksum = (self.state.version, int(checksum(self.state.weights, self._bits)))
        self._checksums.append(self._checksum[1])

    def goes_by_blocks(self, message: Iterable[Any]) -> bool:
        """Whether a step is made block by block: of a long slice, whose weights are changed in place."""
        state = self._state
        long = len(state.weights) > BLOCK and state.optimizer is None and self._store.copies(state.weights)
        if not long or not all(isinstance(part, Tensor) for part in message):
            return False
        return self._blocks is not None or all(can_be_cut(getattr(state, f.name)) for f in fields(state))

    def _step_by_blocks(self, a: Arrival) -> Iterator[None]:
        if self._blocks is None:
            self._blocks = Blocks(self._state, BLOCK)
        sums, before, room = 0, self._blocks.version, _NewRoom(self._store, self._state.weights)
        for number, (place, state) in enumerate(self._blocks, start=1):
            own = self._blocks.cut(a.parts or {"": a.value}, *place)
            parts = own if a.parts else NO_PARTS
            if self._lends_weights:  # then somebody is about to be sent what comes out
                state._blank = partial(room.blank, *place)
            self._plan.algorithm.step(state, a._replace(value=next(iter(own.values())), parts=parts))
            state._blank = None
            if state.version != self._checksum[0]:
                sums += int(checksum(state.weights, self._bits))
            if state.version != before and self._lends_weights:
                state.weights = room.put(state.weights, *place)
                state.lent = state.lent or room.room is not None  # workers read them there: the next step makes new ones
            if number % _TURN == 0:
                yield
        if self._blocks.version != before and self._lends_weights and room.room is not None:
            self._room, self._state.weights = (self._blocks.version, room.room), self._blocks.weights  # the old ones go
        if self._blocks.version != self._checksum[0]:
            self._checksum = (self._blocks.version, total_checksums([[sums]])[0])
        self._checksums.append(self._checksum[1])

    def wake(self, time: float) -> None:
        """A time has come that the method asked for."""
        self._plan.algorithm.on_wake(self.state, time)

    def leave(self, worker: int, held: Memory | None = None) -> None:
        """A worker is absent from now on."""
        kept = () if held is None else (self.sliced(held),)
        self._plan.algorithm.leave(self.state, worker, *kept)

    def join(self, worker: int) -> None:
        """A worker is present from now on."""
        self._plan.algorithm.join(self.state, worker)

    def keep(self, key: int, worker: int | None) -> None:
        """Lend the current model, or what the method makes of it for one worker, until it is dropped."""
        self._lends_weights = worker is None
        if worker is not None:
            sent = checked_model(self._plan.algorithm, self.state, worker)
        elif self._blocks is not None and self._room is not None and self._room[0] == self._blocks.version:
            self._models[key], self._newest = self._room[1].place(), key
            return
        elif self._blocks is not None:
            sent = self._blocks.weights
        else:
            sent = self.state.weights if self._store.copies(self.state.weights) else self.state.x
        self._models[key], self._newest = self._store.put(sent), key

    def drop(self, keys: Sequence[int]) -> None:
        """Models that nobody needs any more."""
        for key in keys:
            self._models.pop(key, None)

    # --- what workers do ---

    def push(self, worker: int, name: MessageName, parts: Mapping[str, Any]) -> None:
        """A worker's message has come: its slices, by name."""
        self._messages.setdefault(worker, {})[name] = dict(parts)

    def is_known(self, key: int) -> bool:
        """Whether a model was lent before now, and perhaps dropped."""
        return key <= self._newest

    def lent(self, key: int) -> Any:
        """The place of a model that is lent; None if it was dropped: nobody needs what is made of it."""
        return self._models.get(key)

    # --- what the head asks ---

    def weights(self) -> Tensor:
        """The current weights."""
        return self.state.weights

    def checksums(self) -> list[int]:
        """Of the weights after each arrival since this was asked last."""
        told, self._checksums = self._checksums, []
        return told

    def deviation(self, held: Mapping[int, Memory]) -> tuple[float, list[float]]:
        """What the audit of the sum needs of this slice."""
        assert isinstance(self.state, AggregateState)
        return self.state.deviation(Lazily(held, self.sliced))

    def recover(self, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """What a worker kept, as far as it lies in this slice."""
        return self._plan.algorithm.recover(self.state, worker, Lazily(others, self.sliced))

    def lend_memory(self, key: int, memory: Memory) -> None:
        """Lend the vectors of what a worker is to keep, or is about to take along, until that is dropped."""
        start, stop = self._place
        self._models[key], self._newest = self._store.put(vectors_of(memory, stop - start)), key

    def lent_memory(self, key: int) -> Memory:
        """What is lent so."""
        vectors = self._store.get(self._models[key])
        assert isinstance(vectors, Mapping)
        return vectors

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""
        state = {f.name: getattr(self.state, f.name) for f in fields(self.state) if f.name != "optimizer"}
        optimizer = self.state.optimizer
        return {
            "state": {name: value for name, value in state.items() if not isinstance(value, Draws)},
            "optimizer": None if optimizer is None else optimizer.save(),
            "models": {key: self._store.get(place) for key, place in self._models.items()},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what was saved; what had come and was not absorbed comes again."""
        for name, value in saved["state"].items():
            setattr(self.state, name, value)
        if self.state.optimizer is not None:
            self.state.optimizer.load(saved["optimizer"])
        self._models = {key: self._store.put(model) for key, model in saved["models"].items()}
        self._newest = max(self._models, default=-1)
        self._messages, self._checksums, self._checksum, self._room = {}, [], (-1, 0), None

    def sliced(self, memory: Memory) -> dict[str, Any]:
        """The part of what a worker keeps that belongs to this slice."""
        if isinstance(memory, Elsewhere):
            place = memory.place
            lent = self.lent_memory(place) if isinstance(place, int) else self._store.memory(place, *self._place)
            return {**memory, **lent}
        vectors = vectors_of(memory, self._plan.slices.length)
        return {**memory, **{name: cut_part(vector, *self._place) for name, vector in vectors.items()}}


Piece = tuple[int, int, Mapping[str, Any]]
"""What a shard has saved, with its first weight and the one after its last."""


def put_together(pieces: Iterable[Piece], like: Mapping[str, Any], start: int, stop: int) -> Any:
    """What a shard of these weights would have saved, from what others saved that were cut otherwise.

    ``pieces`` come in the order of their weights, and ``like`` is the same with stand-ins.
    """
    parts = [
        cut(saved, like, max(start, first) - first, min(stop, end) - first)
        for first, end, saved in pieces
        if first < stop and start < end
    ]
    return joined(parts, like)


def divided(content: Mapping[str, Any], length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a whole server has saved, as its head would have, and as the only one of its shards would have."""
    fleet, models = dict(content["fleet"]), dict[int, Any]()

    def key_of(model: Any) -> int:
        models[len(models)] = model
        return len(models) - 1

    fleet["weights"] = [(version, serial, size, key_of(x)) for version, serial, size, x in fleet["weights"]]
    fleet["evaluations"] = [(t, version, key_of(x), *rest) for t, version, x, *rest in fleet.get("evaluations", [])]
    shard = {"state": content["state"], "optimizer": content["optimizer"], "models": models}
    few = {name: stand_ins(content[name], length) for name in ("state", "optimizer")}
    return {**content, **few, "fleet": fleet}, shard


def united(content: Mapping[str, Any], shard: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``divided``."""
    fleet, models = dict(content["fleet"]), shard["models"]
    fleet["weights"] = [(version, serial, size, models[key]) for version, serial, size, key in fleet["weights"]]
    fleet["evaluations"] = [(t, version, models[key], *rest) for t, version, key, *rest in fleet.get("evaluations", [])]
    fleet["held"] = [
        (w, {METHOD: {**kept["few"][METHOD], **models[kept["lent"]]}} if "lent" in kept else kept)
        for w, kept in fleet["held"]
    ]
    return {**content, "state": shard["state"], "optimizer": shard["optimizer"], "fleet": fleet}


def shard_like(content: Mapping[str, Any], models: Mapping[int, Any], length: int) -> dict[str, Any]:
    """What a shard saves, with stand-ins, from what its head has saved and some shard's models."""
    return {"state": content["state"], "optimizer": content["optimizer"], "models": stand_ins(models, length)}


def joined_model(parts: Sequence[Any], vectors: Mapping[str, bool]) -> Sent:
    """What a worker is sent, from the slices that shards have of it."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return {name: torch.cat([part[name] for part in parts]) if vectors[name] else parts[0][name] for name in vectors}


def cut_message(message: Any, vectors: Mapping[str, bool], start: int, stop: int) -> dict[str, Any]:
    """The part of a worker's message that goes to the shard of these weights, by name."""
    alone = not isinstance(message, Mapping)
    return {name: cut_part(part, start, stop) if alone or vectors[name] else part for name, part in named(message).items()}


def total_checksums(told: Sequence[Sequence[int]]) -> list[int]:
    """The checksums of whole weights from those of their slices: sums modulo 2**64, as int64."""
    return [(sum(each) + 2**63) % 2**64 - 2**63 for each in zip(*told, strict=True)]

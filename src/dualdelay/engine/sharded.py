"""The head of a sharded server: a fold that decides with stand-ins for vectors and tells the shards what happened."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core import Arrival, Memory, Orders, Problem
from ..core.aggregate import AggregateState, audit
from ..core.errors import RunFailed
from ..core.state import State
from .fleet import Fleet
from .loop import Loop
from .shard import MessageName, ShardPlan, total_checksums
from .slices import STAND_IN, stand_ins
from .table import Column
from .trace import Trace


class ShardLost(RunFailed):
    """A shard's process is gone, and with it all that has happened to its slice since the last checkpoint."""


class Shards(Protocol):
    """All shards of a run, as its head reaches them."""

    def tell(self, name: str, *args: Any) -> None:
        """Have every shard do something, after all that it was told before."""

    def flush(self) -> None:
        """What was told is on its way from now on."""

    def ask(self, name: str, *args: Any) -> list[Any]:
        """What each shard answers, after all that it was told before."""

    def weights(self) -> Tensor:
        """The current weights, whole, after all that was told before."""

    def save(self, folder: Path | None, moment: int) -> Any:
        """Have every shard write what it needs to continue later; what is returned names it."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Have every shard continue from a checkpoint, however the server was cut that wrote it."""

    def recovered(self, worker: int, others: Mapping[int, Memory], few: Memory) -> Memory:
        """What the method has a worker go on with that has lost what it kept; ``few`` is the same with stand-ins."""


class MessageFleet(Fleet, ABC):
    """A fleet whose workers' messages go to the shards; the head hears of them alone."""

    @abstractmethod
    def message_name(self, worker: int) -> MessageName:
        """By which name the shards have the message that is due."""

    @abstractmethod
    def message_fault(self, worker: int) -> str:
        """What is wrong with it, in words; empty if nothing is."""

    @abstractmethod
    def write_kept(self, folder: Path | None, moment: int) -> None:
        """Have the workers write what they keep to a folder, for a checkpoint that is saved next."""


class ShardedLoop(Loop):
    """A run whose server is cut into shards. Its own state has stand-ins for vectors, and is right in everything else."""

    def __init__(self, plan: ShardPlan, problem: Problem, fleet: MessageFleet, shards: Shards, **options: Any) -> None:
        x = torch.zeros(STAND_IN, dtype=plan.dtype)
        super().__init__(plan.algorithm, problem, fleet, x, seed=plan.seed, **options)
        self._plan, self._messages, self.shards = plan, fleet, shards
        self._summed = 0  # arrivals whose fingerprints are in the trace

    @property
    def x(self) -> Tensor:
        return self.shards.weights()

    def advance(self) -> Arrival | None:
        absorbed = super().advance()
        self.shards.flush()
        return absorbed

    def begin(self) -> None:
        super().begin()
        self.shards.flush()

    # Everything that the method decides is told to the shards, which do the same.

    def _first(self) -> Orders:
        orders = super()._first()
        self.shards.tell("first")
        return orders

    def _absorb(self, a: Arrival) -> Orders:
        orders = super()._absorb(a)
        facts = [list(a.job), a.time, a.seconds, a.loss, a.bytes, a.steps, a.down]  # plain values travel quickest
        self.shards.tell("step", facts, bool(a.parts), list(self._messages.message_name(a.worker)))
        return orders

    def _wake(self, time: float) -> Orders:
        orders = super()._wake(time)
        self.shards.tell("wake", time)
        return orders

    def _leave(self, worker: int, held: Memory | None) -> Orders:
        orders = super()._leave(worker, None if held is None else stand_ins(held, self._plan.slices.length))
        self.shards.tell("leave", worker, held)
        return orders

    def _join(self, worker: int) -> Orders:
        orders = super()._join(worker)
        self.shards.tell("join", worker)
        return orders

    def _recovered(self, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        length = self._plan.slices.length
        few = super()._recovered(worker, {other: stand_ins(memory, length) for other, memory in others.items()})
        return None if few is None else self.shards.recovered(worker, others, few)

    def _fault(self, a: Arrival) -> str:
        return self._messages.message_fault(a.worker)

    # The trace's fingerprints are added up from those of the shards when somebody asks for rows.

    def _fingerprint(self) -> int:
        return 0

    def _sum_fingerprints(self) -> None:
        told = total_checksums(self.shards.ask("checksums"))
        self.recorder.fill_fingerprints(self._summed, told)
        self._summed += len(told)

    def rows_of(self, k: int, start: int) -> dict[str, Column]:
        self._sum_fingerprints()
        return super().rows_of(k, start)

    def trace_of(self, k: int) -> Trace:
        self._sum_fingerprints()
        return super().trace_of(k)

    def save_of(self, k: int, folder: Path | None = None) -> dict[str, Any]:
        self._messages.write_kept(folder, self.moment)
        return {**self.save(), "shards": self.shards.save(folder, self.moment)}

    def load(self, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        self.shards.load(saved)
        super().load(saved, rows)
        self._summed = len(self.recorder)
        self.shards.flush()

    def state_of(self, k: int) -> tuple[State, float | None]:
        """What the server knew, with the weights; the other vectors stay where they are, and are left out."""
        state, found = copy.copy(self.state), None
        if isinstance(state, AggregateState):
            found = audit(self.shards.ask("deviation", self.memories()))
            state.table = None
        for f in fields(state):
            value = getattr(state, f.name)
            if isinstance(value, Tensor) and value.ndim and value.shape[-1] == STAND_IN:
                setattr(state, f.name, value[..., :0])
        state.weights = self.x
        return state, found

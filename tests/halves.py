"""Methods for tests, whose workers have something of their own: they are polled, remember, or take several steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core import IndependentWorkers, Memory, Message, Orders, RunningJob, State
from dualdelay.core.draws import Draws
from dualdelay.core.settings import positive, whole


@dataclass(kw_only=True)
class Logged(State):
    """What arrived: worker, draw and steps."""

    log: list[list[int]] = field(default_factory=list)
    contacts: int = 0

    def note(self, a: dd.Arrival) -> None:
        self.log.append([a.worker, a.job.draw, a.steps])


@dataclass(frozen=True)
class Contacts(IndependentWorkers[Logged]):
    """Workers hold their models until they are polled, by turns; now and then twice at once, cancelled, or not held."""

    remembers: ClassVar[str] = "its model and how often it was asked; begun anew"

    steps: int = whole(4)
    period: float = positive(0.03)
    wild: bool = True

    def init(self, x: Tensor, n: int, rng: Draws) -> Logged:
        return Logged(x, n)

    def first(self, s: Logged) -> Orders:
        return [*(dd.send(worker, hold=True) for worker in s.present), dd.wake(self.period)]

    def on_wake(self, s: Logged, time: float) -> Orders:
        present, orders = list(s.present), [dd.wake(time + self.period)]
        s.contacts += 1
        if not present:
            return orders
        worker = present[s.contacts % len(present)]
        orders += [dd.poll(worker), dd.send(worker, hold=True)]
        kind = s.contacts % 7 if self.wild else 0
        if kind == 1:
            orders += [dd.poll(worker), dd.send(worker, hold=True)]
        elif kind == 2:
            orders += [dd.cancel(worker), dd.send(worker, hold=True)]
        elif kind == 3:  # a job that ends by itself, and one that is cut short; the held one waits behind them
            orders += [dd.cancel(worker), dd.send(worker), dd.send(worker, steps=3), dd.poll(worker)]
            orders += [dd.send(worker, hold=True)]
        elif kind == 4:
            orders += [dd.poll(worker), dd.again(worker), dd.send(worker, hold=True)]
        return orders

    def step(self, s: Logged, a: dd.Arrival) -> Orders:
        s.note(a)
        s.descend(s.x - a.value, 1.0, over=s.n + 1)
        return []

    def join(self, s: Logged, worker: int) -> Orders:
        s.join(worker)
        return [dd.send(worker, hold=True)]

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory]:
        mine, asked = (model, 0.0) if memory is None else (memory["y"], memory["asked"])
        y = (model + mine) / 2
        for _ in job:
            y = y - self.lr * job.gradient(y)
        return y, {"y": y, "asked": asked + 1}


@dataclass(kw_only=True)
class Controlled(Logged):
    """The sum of the workers' controls, and its mean, which they are sent."""

    total: Tensor
    control: Tensor


@dataclass(frozen=True)
class Controls(IndependentWorkers[Controlled]):
    """Two tensors each way, and one at the worker: total = sum of the controls that workers keep, whatever happens."""

    asks_others: ClassVar[bool] = True
    remembers: ClassVar[str] = "its control; a lost one is what is missing in the sum"
    away: ClassVar[str] = "its control leaves with it"

    steps: int = whole(3)

    def init(self, x: Tensor, n: int, rng: Draws) -> Controlled:
        return Controlled(x, n, total=torch.zeros_like(x), control=torch.zeros_like(x))

    def shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        return {"delta": tuple(x.shape), "control": tuple(x.shape)}

    def model(self, s: Controlled, worker: int) -> Mapping[str, Tensor]:
        return {"x": s.x, "c": s.control}

    def step(self, s: Controlled, a: dd.Arrival) -> Orders:
        s.note(a)
        s.total = s.total + a.parts["control"]
        s.control = s.total / s.workers
        s.descend(a.parts["delta"], 1.0, over=s.n + 1)
        return [dd.send(a.worker, steps=1 + s.version % self.steps)]

    def leave(self, s: Controlled, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        if held is not None:
            s.total = s.total - held["control"]
        return []

    def work(self, memory: Memory | None, model: Any, job: RunningJob) -> tuple[Message, Memory]:
        x, before = model["x"], torch.zeros_like(model["x"]) if memory is None else memory["control"]
        y, mean = x, torch.zeros_like(x)
        for _ in job:
            gradient = job.gradient(y)
            mean = mean + gradient
            y = y - self.lr * (gradient - before + model["c"])
        change = mean / max(job.steps, 1) - before
        return {"delta": x - y, "control": change}, {"control": before + change}

    def recover(self, s: Controlled, worker: int, others: Mapping[int, Memory]) -> Memory:
        rest = s.total
        for other in sorted(others):
            rest = rest - others[other]["control"]
        return {"control": rest}


@dataclass(frozen=True)
class Local(IndependentWorkers[Logged]):
    """So many local steps as the version says, from the model that was sent; workers keep nothing."""

    steps: int = whole(4)
    wild: bool = True

    def init(self, x: Tensor, n: int, rng: Draws) -> Logged:
        return Logged(x, n)

    def step(self, s: Logged, a: dd.Arrival) -> Orders:
        s.note(a)
        s.descend(a.value, 1.0, over=s.n + 1)
        orders = [dd.send(a.worker, steps=1 + (s.version + a.worker) % self.steps)]
        if not self.wild:  # now and then another one's job is cut short
            return [*orders, dd.poll((a.worker + 1) % s.n)] if s.version % 3 == 0 else orders
        if s.version % 5 == 0:  # one more behind it, and the first of both is cut short
            orders += [dd.again(a.worker), dd.poll(a.worker)]
        if s.version % 11 == 0:
            orders += [dd.cancel(a.worker), dd.send(a.worker)]
        return orders

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, None]:
        y = model
        for _ in job:
            y = y - self.lr * job.gradient(y)
        return model - y, None

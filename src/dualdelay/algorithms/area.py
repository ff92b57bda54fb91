"""AREA: Iakovidou and Kim, "Asynchronous Federated Stochastic Optimization for Heterogeneous Objectives Under Arbitrary
Delays", 2024 (arXiv 2405.10123); the rule is that of the first author's code.

There the local step is also scaled by a worker's share of the data; here that is the problem's: ``weights="samples"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core import Arrival, IndependentWorkers, Memory, Message, Orders, RunningJob, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.settings import whole


@dataclass(kw_only=True)
class AREAState(BufferState):
    begun: dict[int, Tensor]  # of workers that have not reported yet: the model that they begin with


@dataclass(frozen=True)
class AREA(IndependentWorkers[AREAState]):
    """The server's model is the mean of the workers' last models: each sends how its new model differs from its last.

    So every worker counts the same whatever the speeds. The server has no step size: ``lr`` is that of the local steps.
    """

    name, title = "area", "AREA"
    colour, line, marker = "#117733", "4 1 1 1", "H"
    keeps, needs = "one sum", "-"
    away = "its model leaves the mean until it is back"
    remembers = "its last model; a lost one is what the mean has beyond the others'"
    asks_others = True
    own_step = "it takes the mean of models, without a step"

    steps: int = whole(1)
    """Local steps in a job (the paper's K)."""
    buffer: int = whole(1)
    """Arrivals per update; what they add up to is divided by the number of workers all the same."""

    def init(self, x: Tensor, n: int, rng: Draws) -> AREAState:
        return AREAState(x, n, begun=dict.fromkeys(range(n), x))

    def step(self, s: AREAState, a: Arrival) -> Orders:
        s.begun.pop(a.worker, None)
        s.add(a.value)  # B <- B + r_i
        if s.count >= self.buffer:
            s.descend(s.total, -1.0, over=s.n)  # x <- x + B / n, so that x is the mean of all m_i
            s.clear()
        return [send(a.worker)]

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory]:
        y = model
        for _ in job:
            y = y - (self.lr * job.gradient(y)).to(y.dtype)
        last: Any = model if memory is None else memory["y"]
        return y - last, {"y": y}  # r_i = y_i - m_i, m_i <- y_i

    def recover(self, s: AREAState, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """n x + B is the sum of the workers' models for any buffer; where several are lost, they get equal parts of it."""
        if worker in s.begun:
            return None
        rest, lost = s.n * s.x.double() + s.total, s.n
        for other in s.present:
            own: Any = s.begun[other] if other in s.begun else others[other]["y"] if other in others else None
            if other != worker and own is not None:
                rest, lost = rest - own, lost - 1
        return {"y": (rest / lost).to(s.weights.dtype)}

    def leave(self, s: AREAState, worker: int, held: Memory | None = None) -> Orders:
        own: Any = s.begun.pop(worker, s.x) if held is None else held["y"]
        s.total += s.x - own  # n x + B = sum of m_i holds for those that stay
        return super().leave(s, worker)

    def join(self, s: AREAState, worker: int) -> Orders:
        s.begun[worker] = s.x  # and it holds with one more m_i = x
        return super().join(s, worker)

"""DeFedAvg: Wang, Li, Jin and Zhang, "Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous
Clients", 2024 (arXiv 2402.11198), its variant for heterogeneous data; derived: of the paper's text only the abstract
was available.

What is derived: an update is made of s differences of local models, in the order of their arrival and with weights 1/s;
then s different workers are drawn uniformly, busy or not, and the new model waits in their queues. With K = 1 and s = 1
that is Uniform ASGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core import Arrival, Memory, Message, Orders, RunningJob, send
from ..core.buffers import BufferState
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.local_steps import sum_of_gradients
from ..core.settings import whole
from .uniform import QueueState, UniformASGD


@dataclass(kw_only=True)
class DeFedAvgState(BufferState, QueueState):
    pass


@dataclass(frozen=True)
class DeFedAvg(UniformASGD):
    """An update is the mean of the local steps of the next s arrivals; then s workers are drawn, whose queues get the
    model.

    Each worker gets the same share of the jobs, whatever its speed, and works on the oldest model in its queue.
    """

    name, title = "defedavg", "DeFedAvg"
    colour, line, marker = "#CC3311", "3 1 1 1 1 1", "d"
    keeps = "one sum and models that wait"

    steps: int = whole(5)
    """Local steps of a job (the paper's K)."""
    sampled: int = whole(2)
    """Arrivals per update, and workers drawn after it (the paper's s)."""

    def init(self, x: Tensor, n: int, rng: Draws) -> DeFedAvgState:
        require_whole(f"sampled (with {n} workers)", self.sampled, 1, n)
        return DeFedAvgState(x, n, rng=rng, queued=[1] * n, in_flight=n)

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        return sum_of_gradients(model, job, self.lr), memory

    def step(self, s: QueueState, a: Arrival) -> Orders:
        assert isinstance(s, DeFedAvgState)
        s.add(a.value)
        s.queued[a.worker] -= 1
        s.in_flight -= 1
        if s.count < min(self.sampled, s.n):
            return []
        s.descend(s.total, self.lr, over=s.count)
        s.clear()
        return self.refill(s, a.worker, 0)

    def refill(self, s: QueueState, worker: int, ended: int = 1) -> Orders:
        s.queued[worker] -= ended
        s.in_flight -= ended
        drawn: list[int] = []
        while s.in_flight < s.n:
            s.drawn += 1
            others = [other for other in s.present if other not in drawn] or list(s.present)
            drawn.append(others[s.rng.integer(len(others), s.drawn)])
            s.queued[drawn[-1]] += 1
            s.in_flight += 1
        return [send(chosen) for chosen in sorted(drawn)]

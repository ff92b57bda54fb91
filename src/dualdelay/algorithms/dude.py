"""DuDe-ASGD: Wang, Sun, Wai and Zhang, "Dual-Delayed Asynchronous SGD for Arbitrarily Heterogeneous Data", 2024.

The same update is IA2SGD (the paper's later name) and ACE (Chang et al., 2025). Letters are Algorithm 1's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Message, Orders, RunningJob, send
from ..core.aggregate import AggregateState
from ..core.compression import Compress, difference, require_compress
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.settings import whole


@dataclass(kw_only=True)
class DuDeState(AggregateState):
    missing: set[int]  # workers whose first gradient the first update waits for
    waiting: list[int] = field(default_factory=list)  # workers that have reported since the last update, and idle


@dataclass(frozen=True)
class DuDe(Algorithm[DuDeState]):
    """Every arrival replaces its worker's gradient in the average of all workers' latest gradients."""

    name, title, colour, line, marker = "dude", "DuDe", "#0072B2", "-", "o"
    keeps, wastes = "a gradient of each worker (or each worker its own)", "with c > 1 the time of workers that wait"
    away, ahead, asks_others = "its gradient leaves the average until it reports again", True, True
    remembers = "with memory='workers' its last gradient; a lost one is the sum without those of the others"

    wait_for: int = whole(1)
    """Workers per update (the paper's c): 1 is fully asynchronous, n is synchronous SGD."""
    memory: Literal["server", "workers"] = "server"
    """Where the last gradients live: a table at the server, or each at its worker, which sends differences."""
    start: Literal["wait", "busy", "zeros"] = "wait"
    """First update: wait for all workers (the paper), keep them busy meanwhile, or begin with zero gradients."""
    compress: Compress = None
    """How differences are made small: "int8", a byte for each number, or the share of the largest numbers, such as 0.01."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_compress(self.compress, self.memory)

    def init(self, x: Tensor, n: int, rng: Draws) -> DuDeState:
        require_whole(f"wait_for (with {n} workers)", self.wait_for, 1, n)
        missing = set(range(0 if self.start == "zeros" else n))
        return DuDeState(x, n, missing=missing, keeps_table=self.memory == "server")

    def step(self, s: DuDeState, a: Arrival) -> Orders:
        s.replace(a.worker, a.value)  # n g~ <- n g~ + (G_j - G~_j),  G~_j <- G_j
        if s.missing and self.start == "busy":
            s.missing.discard(a.worker)
            return [send(a.worker)]
        s.missing.discard(a.worker)
        s.waiting.append(a.worker)
        return self._update(s)

    def _update(self, s: DuDeState) -> Orders:
        if s.missing or len(s.waiting) < min(self.wait_for, s.counted):
            return []
        s.descend(s.total, self.lr, over=s.counted)  # w <- w - eta g~
        ready, s.waiting = s.waiting, []
        return [send(worker) for worker in ready]

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        gradient = job.gradient(model)
        return difference(gradient, memory, self.compress) if self.memory == "workers" else (gradient, None)

    def leave(self, s: DuDeState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker, held)  # the sum loses its gradient
        s.missing, s.waiting = s.missing - {worker}, [other for other in s.waiting if other != worker]
        return self._update(s) if s.waiting else []

    def join(self, s: DuDeState, worker: int) -> Orders:
        s.join(worker)
        return [send(worker)]

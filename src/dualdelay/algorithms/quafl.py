"""QuAFL: Zakerinia, Talaei, Nadiradze and Alistarh, "Communication-Efficient Federated Learning with Data and Client
Heterogeneity", 2022 (arXiv 2206.10032); the rule is that of the authors' code.

They quantise with a lattice coder. Here that is the run's: ``dd.Server(uplink="int8", downlink="int8")``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..core import Algorithm, Arrival, Memory, Message, Orders, RunningJob, State, poll, send, wake
from ..core.draws import Draws
from ..core.errors import require_whole
from ..core.settings import positive, whole


@dataclass(kw_only=True)
class PolledState(State):
    rng: Draws
    contacts: int = 0  # so far
    asked: set[int] = field(default_factory=set)  # workers whose answers are still to come
    answers: dict[int, Tensor] = field(default_factory=dict)  # the models that have come


@dataclass(frozen=True)
class QuAFL(Algorithm[PolledState]):
    """At every contact some workers, drawn uniformly, report their own models as far as they have come: nobody waits.

    The server's model becomes the mean of itself and those, and each worker goes on from the mean of the server's model
    before that and, with s times its weight, its own.
    """

    name, title = "quafl", "QuAFL"
    colour, line, marker = "#999933", "3 1", "v"
    keeps, needs, wastes = "nothing", "a time between contacts", "what a worker has begun when it is polled"
    remembers = "its model; a worker that has lost it begins at the server's"

    steps: int = whole(5)
    """The most local steps that a worker takes between two contacts (the paper's K)."""
    sampled: int = whole(2)
    """How many workers are contacted at a time (the paper's s)."""
    period: float = positive(1.0)
    """Seconds between two contacts."""

    @property
    def most_steps(self) -> int:
        return self.steps

    def init(self, x: Tensor, n: int, rng: Draws) -> PolledState:
        require_whole(f"sampled (with {n} workers)", self.sampled, 1, n)
        return PolledState(x, n, rng=rng)

    def first(self, s: PolledState) -> Orders:
        return [*(send(worker, hold=True) for worker in s.present), wake(self.period)]

    def on_wake(self, s: PolledState, time: float) -> Orders:
        orders = [wake(time + self.period)]
        if s.asked:  # their answers are still on their way
            return orders
        order = s.rng.permutation(s.n, s.contacts).tolist()
        s.contacts += 1
        s.asked = set(order[: self.sampled])
        for worker in sorted(s.asked):  # the next job is at the model from before the update
            orders += [poll(worker), send(worker, hold=True)]
        return orders

    def step(self, s: PolledState, a: Arrival) -> Orders:
        s.asked.discard(a.worker)
        s.answers[a.worker] = a.value
        if not s.asked:
            share = len(s.answers) + 1  # X <- (X + sum of Y_i) / (s + 1)
            s.descend(share * s.x - s.x - sum(s.answers.values()), 1.0, over=share)
            s.answers = {}
        return []

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory]:
        """From the mean of the server's model and, with s times its weight, the worker's own."""
        y = model if memory is None else (model + self.sampled * memory["y"]) / (self.sampled + 1)
        for _ in job:
            y = y - self.lr * (self.sampled + 1) / self.sampled * job.gradient(y)
        return y, {"y": y}

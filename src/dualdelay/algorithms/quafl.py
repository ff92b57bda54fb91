"""QuAFL: Zakerinia, Talaei, Nadiradze and Alistarh, "Communication-Efficient Federated Learning with Data and Client
Heterogeneity", 2022 (arXiv 2206.10032); the rule is that of the authors' code.

They quantise with a lattice coder. Here that is the run's: ``dd.Server(uplink="int8", downlink="int8")``. In their
simulator a step that ends at the very moment of a contact does not count; here it does.
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
    contacts: int = 0  # so far, of some worker
    asked: set[int] = field(default_factory=set)  # workers whose answers are still to come
    answers: dict[int, Tensor] = field(default_factory=dict)  # the models that have come
    time: float = 0.0  # of the last contact
    ticking: bool = True  # whether the next one is ordered


@dataclass(frozen=True)
class QuAFL(Algorithm[PolledState]):
    """At every contact some workers, drawn uniformly, report their own models as far as they have come: nobody waits.

    The server's model becomes the mean of itself and those, and each worker goes on from the mean of the server's model
    before that and, with s times its weight, its own. If fewer than s workers are present, all of them report.
    """

    name, title = "quafl", "QuAFL"
    colour, line, marker = "#6B6B00", "3 1", "v"
    keeps, needs, wastes = "nothing", "a time between contacts", "what a worker has begun when it is polled"
    remembers = "its model; a worker that has lost it goes on from the server's"
    away = "it is not drawn, and begins anew at the server's model"
    waits = False
    own_step = "its update is a mean of models"

    steps: int = whole(5)
    """The most local steps that a worker takes between two contacts (the paper's K)."""
    sampled: int = whole(2)
    """How many workers are contacted at a time (the paper's s)."""
    period: float = positive(1.0)
    """Seconds between two contacts."""

    def init(self, x: Tensor, n: int, rng: Draws) -> PolledState:
        require_whole(f"sampled (with {n} workers)", self.sampled, 1, n)
        return PolledState(x, n, rng=rng)

    def first(self, s: PolledState) -> Orders:
        return [*(send(worker, hold=True) for worker in s.present), wake(self.period)]

    def on_wake(self, s: PolledState, time: float) -> Orders:
        s.time, s.ticking = time, s.n > 0
        if s.asked or not s.ticking:  # answers are still on their way, or nobody is there
            return [wake(time + self.period)] if s.ticking else []
        order, present = s.rng.permutation(s.n, s.contacts), s.present
        s.contacts += 1
        s.asked = {present[k] for k in order[: self.sampled].tolist()}
        return [*(order for worker in sorted(s.asked) for order in self.contact(worker)), wake(time + self.period)]

    def contact(self, worker: int) -> Orders:
        """Ask for its model; the next job is at the server's from before the update."""
        return [poll(worker), send(worker, hold=True)]

    def step(self, s: PolledState, a: Arrival) -> Orders:
        s.asked.discard(a.worker)
        s.answers[a.worker] = a.value
        return self.update(s)

    def update(self, s: PolledState) -> Orders:
        """X <- (X + sum of Y_i) / (s + 1), once all answers are there."""
        if s.answers and not s.asked:
            s.descend(len(s.answers) * s.x - sum(s.answers.values()), 1.0, over=len(s.answers) + 1)
            s.answers = {}
        return []

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        s = self.sampled
        y = model if memory is None else (model + s * memory["y"]) / (s + 1)  # X_i <- (X + s Y_i) / (s + 1)
        for _ in job:
            y = y - self.lr * (s + 1) / s * job.gradient(y)  # perhaps none: then it reports where it began
        return y, {"y": y}

    def leave(self, s: PolledState, worker: int, held: Memory | None = None) -> Orders:
        s.leave(worker)
        s.asked.discard(worker)
        s.answers.pop(worker, None)
        return self.update(s)

    def join(self, s: PolledState, worker: int) -> Orders:
        s.join(worker)
        ticking, s.ticking = s.ticking, True
        return [send(worker, hold=True), *([] if ticking else [wake(s.time + self.period)])]

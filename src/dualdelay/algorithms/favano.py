"""FAVANO: Leconte, Nguyen and Moulines, "FAVANO: Federated Averaging with Asynchronous Nodes", 2023 (arXiv 2305.16099, at
first called FAVAS); derived: of the paper's text only abstract and introduction were available.

A worker that began at start_i and has done E_i steps, K at most, counts with start_i + (Y_i - start_i) / alpha_i. Its
expected contribution is then the same number of steps whatever its speed: with alpha_i = P(E_i > 0) E_i a report with
steps in it counts as the mean of its steps, over how often there is one; with alpha_i = E[min(E_i, K)] the expected sum
of steps is divided by their expected number. P and E are the worker's own means over its reports so far, this one
included, unless they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core import Memory, Message, Orders, RunningJob, poll, send
from ..core.draws import Draws
from ..core.errors import BadInput, is_finite, shown
from .quafl import PolledState, QuAFL


@dataclass(frozen=True)
class FAVANO(QuAFL):
    """QuAFL in which a worker's way since its last contact is divided by its steps, so that fast workers count no more.

    The server's model becomes the mean of itself and the models so corrected, and the workers drawn begin anew at it;
    one that has done nothing counts with the model at which it began.
    """

    name, title = "favano", "FAVANO"
    colour, line, marker = "#A6761D", "1 1", "^"
    remembers = "how many reports, reports with steps and steps it has made; a worker that has lost that counts anew"

    divide_by: Literal["realised", "expected"] = "realised"
    """What alpha_i follows: the steps of this report and how often there is one, or the mean number of steps."""
    expected: Sequence[float] | None = None
    """The mean number of steps of each worker's reports, for "expected"; None: its mean so far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expected is None:
            return
        given = self.expected
        if self.divide_by != "expected":
            raise BadInput(f"expected is given and divide_by is {self.divide_by!r}; expected divide_by='expected'.")
        if not isinstance(given, (list, tuple)) or not given or not all(is_finite(e) and e > 0 for e in given):
            raise BadInput(f"expected is {shown(given)}; expected a list with a number above zero for each worker.")

    def init(self, x: Tensor, n: int, rng: Draws) -> PolledState:
        if self.expected is not None and len(self.expected) != n:
            raise BadInput(f"expected has {len(self.expected)} entries; expected {n}, one for each worker.")
        return super().init(x, n, rng)

    def contact(self, worker: int) -> Orders:
        return [poll(worker)]

    def update(self, s: PolledState) -> Orders:
        drawn = [] if s.asked else sorted(s.answers)
        super().update(s)
        return [send(worker, hold=True) for worker in drawn]  # at the new model

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        y = model
        for _ in job:
            y = y - self.lr * job.gradient(y)
        before = memory or {"reports": 0, "worked": 0, "steps": 0}
        counts = {"reports": 1, "worked": int(job.steps > 0), "steps": job.steps}
        counts = {name: count + int(before[name]) for name, count in counts.items()}
        return model + (y - model) / (self._alpha(job, counts) or 1.0), counts

    def _alpha(self, job: RunningJob, counts: dict[str, int]) -> float:
        if self.divide_by == "realised":
            return counts["worked"] / counts["reports"] * job.steps  # P(E_i > 0) min(E_i, K)
        return counts["steps"] / counts["reports"] if self.expected is None else self.expected[job.worker]

"""A run that ended, and when a run should end early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .core import Algorithm, Problem
from .delays import Delays, delays
from .errors import BadInput, require_whole
from .memory import AggregateState
from .state import State
from .trace import Table, Trace


@dataclass(frozen=True)
class EarlyStop:
    """Stop when a metric is good enough, or has not improved for a while; judged at each evaluation."""

    metric: str = "objective"
    """The column of the run's metrics to look at."""
    target: float | None = None
    """Good enough; None: never."""
    patience: int | None = None
    """Evaluations in a row without a new best value that are too many; None: any number is fine."""
    larger_is_better: bool | None = None
    """Which way is good; None: larger for accuracy, smaller for everything else."""

    def __post_init__(self) -> None:
        if self.target is None and self.patience is None:
            raise BadInput("EarlyStop has neither target nor patience; give at least one.")
        if self.patience is not None:
            require_whole("patience", self.patience, 1)

    def __call__(self, metrics: Table) -> bool:
        """Whether the run should end, from all evaluations so far."""
        if self.metric not in metrics:
            raise BadInput(f"there is no metric {self.metric!r} to stop by; there are {', '.join(metrics)}.")
        grows = self.metric == "accuracy" if self.larger_is_better is None else self.larger_is_better
        sign = -1.0 if grows else 1.0
        values = sign * metrics[self.metric]
        if math.isnan(values[0]):
            raise BadInput(
                f"{self.metric} is nan at the start, so there is nothing to stop by; choose another metric (or give "
                "the network test= data)."
            )
        if self.target is not None and values[-1] <= sign * self.target:
            return True
        return self.patience is not None and len(values) - 1 - int(np.nanargmin(values)) >= self.patience


@dataclass(frozen=True, repr=False)
class Run:
    """A run that ended."""

    algorithm: Algorithm[Any]
    problem: Problem
    state: State
    trace: Trace
    metrics: Table
    time: float
    """Where the clock stood."""
    ended: str
    """Why it ended: updates, time or stop; replay if it was recomputed."""
    error: float | None
    """The audit: relative error of the server's sum against the workers' gradients; None for methods without one."""
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    """What went on that a person should know, such as a damaged checkpoint that was passed over."""

    @property
    def x(self) -> Tensor:
        """The final flat weights."""
        return self.state.x

    @property
    def version(self) -> int:
        """Server updates made."""
        return self.state.version

    @property
    def rejected(self) -> int:
        """Values that were not absorbed because they were not finite or had the wrong shape."""
        return sum(event["kind"] == "rejected" for event in self.trace.events)

    @property
    def delays(self) -> Delays:
        """The paper's model delays in this run."""
        return delays(self.trace, remembers=isinstance(self.state, AggregateState))

    def state_dict(self) -> dict[str, Tensor]:
        """The final weights by name, for ``module.load_state_dict``."""
        return self.problem.state_dict(self.x)

    def summary(self) -> dict[str, Any]:
        """The run in a few plain numbers."""
        last: dict[str, Any] = next(reversed(list(self.metrics.rows())), {})
        counts = {"updates": self.version, "arrivals": len(self.trace), "rejected": self.rejected}
        return {"ended": self.ended, **last, "time": self.time, **counts, **asdict(self.delays), "audit": self.error}

    def __repr__(self) -> str:
        return f"Run({self.version} updates, {len(self.trace)} arrivals, time {self.time:g}, ended by {self.ended})"


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as strict JSON can hold them: what is not finite becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

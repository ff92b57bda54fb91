"""A run that ended, and when a run should end early."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import Algorithm, Problem
from ..core.aggregate import AggregateState
from ..core.errors import BadInput, require_whole
from ..core.state import State
from ..core.tracebacks import cause_of
from .delays import Delays, delays
from .evaluation import Best
from .metrics import metric_and_way
from .table import Table
from .trace import Trace


@dataclass(frozen=True)
class EarlyStop:
    """Stop when a metric is good enough, or has not improved for a while; judged at each evaluation."""

    metric: str = "objective"
    """The column of the run's metrics to look at; of one of your own say which way is good: "max f1" or "min f1"."""
    target: float | None = None
    """Good enough; None: never."""
    patience: int | None = None
    """Evaluations in a row without a new best value that are too many; None: any number is fine."""
    larger_is_better: bool | None = None
    """Which way is good, if the metric's name does not say it; by default larger for accuracy, smaller for losses."""

    def __post_init__(self) -> None:
        if self.target is None and self.patience is None:
            raise BadInput("EarlyStop has neither target nor patience; give at least one.")
        if self.patience is not None:
            require_whole("patience", self.patience, 1)
        if self.metric.startswith(("max ", "min ")):
            metric, way = metric_and_way("metric", self.metric)
            if self.larger_is_better not in (None, way == "max"):
                raise BadInput(f"metric is {self.metric!r}, and larger_is_better {self.larger_is_better}; leave one out.")
            object.__setattr__(self, "metric", metric)
            object.__setattr__(self, "larger_is_better", way == "max")
        elif self.larger_is_better is None:
            metric_and_way("the metric of EarlyStop", self.metric)

    def __call__(self, metrics: Table) -> bool:
        """Whether the run should end, from all evaluations so far."""
        if self.metric not in metrics:
            raise BadInput(f"there is no metric {self.metric!r} to stop by; there are {', '.join(metrics)}.")
        sign = -1.0 if self.keeps.startswith("max ") else 1.0
        values = sign * metrics[self.metric]
        if math.isnan(values[0]):
            raise BadInput(
                f"{self.metric} is nan at the start, so there is nothing to stop by; choose another metric (or give "
                "the network test= data)."
            )
        if self.target is not None and values[-1] <= sign * self.target:
            return True
        if self.patience is None:
            return False
        if "answered" in metrics:  # where others answer than before, F is another one
            values = values[metrics.answered == metrics.answered[-1]]
        known = ~np.isnan(values)
        return bool(known.any()) and len(values) - 1 - int(np.nanargmin(values)) >= self.patience

    @property
    def keeps(self) -> str:
        """The best model that a run with this should keep, as ``Evaluation.best_by`` writes it."""
        if self.larger_is_better is None:
            return " ".join(reversed(metric_and_way("metric", self.metric)))
        return f"{'max' if self.larger_is_better else 'min'} {self.metric}"


@dataclass(frozen=True, repr=False)
class Run:
    """A run that ended."""

    algorithm: Algorithm[Any] | None
    """The method; None if the run was loaded from its folder alone and the method is the user's own."""
    problem: Problem | None
    """What was trained; None if the run was loaded from its folder alone."""
    state: State
    """What the server knew at the end."""
    trace: Trace
    metrics: Table
    time: float
    """Where the clock stood."""
    ended: str
    """Why it ended: updates, time or stop; replay if it was recomputed; interrupted or failed if it can be resumed."""
    audit: float | None
    """Relative error of the server's sum against the workers' gradients; None for methods without one."""
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    """What went on that a person should know: workers that were lost and why, a damaged checkpoint that was passed over."""
    workers: Table = field(default_factory=lambda: Table({}))
    """What each worker found at each evaluation: time, version, worker, loss, samples, and the workers' own metrics."""
    best: Best | None = None
    """The best model, if one was asked for or the run stopped early: its metric, value, version and weights x."""
    weights: Tensor | None = None
    """The weights that the run returns, where those are not the last."""
    same_bits: bool | None = None
    """Of a replay, whether every bit agreed with the record."""
    names: Names | None = None
    """Where in the flat weights each entry of a state dict is, if there is no problem to ask."""

    @property
    def x(self) -> Tensor:
        """The flat weights that the run returns: the last, or if it was stopped early the best."""
        return self.state.x if self.weights is None else self.weights

    @property
    def ending(self) -> str:
        """How it ended, in words, such as "ended by updates" or "interrupted"."""
        return self.ended if self.ended in ("interrupted", "failed") else f"ended by {self.ended}"

    @property
    def version(self) -> int:
        """Server updates made."""
        return self.state.version

    @property
    def gradients(self) -> int:
        """Gradients that the jobs which arrived have taken; one for each local step of a method, not for those inside of a
        ``LocalSteps`` problem, whose jobs count as one.
        """
        return int(self.trace.steps.sum())

    @property
    def bytes_up(self) -> int:
        """Bytes that the workers have sent in messages that were absorbed."""
        return int(self.trace.bytes.sum())

    @property
    def bytes_down(self) -> int:
        """Bytes that the workers were sent for the jobs which arrived."""
        return int(self.trace.down.sum())

    @property
    def rejected(self) -> int:
        """Values that were not absorbed because they were not finite or had the wrong shape."""
        return self.faults.get("rejected", 0)

    @property
    def faults(self) -> dict[str, int]:
        """How often what went wrong, by kind: rejected, failed, crashed, left, frozen, late."""
        counts = Counter(event["kind"] for event in self.trace.events if _is_fault(event))
        return {kind: counts[kind] for kind in FAULTS if counts[kind]}

    @property
    def delays(self) -> Delays:
        """The paper's model delays in this run."""
        return delays(self.trace, remembers=isinstance(self.state, AggregateState))

    def state_dict(self, *, best: bool = False) -> dict[str, Tensor]:
        """The weights by name, for ``module.load_state_dict``; those that the run returns, or the best."""
        x = self.x if not best else None if self.best is None else self.best.x
        if x is None:
            raise BadInput("the run kept no best model; give it dd.Evaluation(best_by='objective'), or another metric.")
        if self.problem is not None:
            return self.problem.state_dict(x)
        assert self.names is not None
        return self.names.state_dict(x)

    def summary(self) -> dict[str, Any]:
        """The run in a few plain numbers."""
        last: dict[str, Any] = next(reversed(list(self.metrics.rows())), {})
        counts = {"updates": self.version, "arrivals": len(self.trace), "rejected": self.rejected, "faults": self.faults}
        counts |= {"gradients": self.gradients, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        about_best = () if self.best is None else ("metric", "value", "version")
        best = {f"best_{name}": getattr(self.best, name) for name in about_best}
        numbers = {**counts, **asdict(self.delays), "audit": self.audit}
        returned = {"returned_version": self.returned} if self.returned != self.version else {}
        return {"ended": self.ended, **last, "time": self.time, **numbers, **best, **returned}

    def plot(self, path: str | Path | None = None, **options: Any) -> Any:
        """The figure of the run's metrics, written into a file if one is named; the options are ``figures.drawn``'s."""
        from ..analysis.figures import plotted
        from ..runs.names import label
        from ..runs.sweep import one_table
        from ..storage.folder import Folder

        name = "run" if self.algorithm is None else label(self.algorithm)
        real = self.folder is not None and Folder(self.folder).record().real
        return plotted(one_table(name, self), path, **{"clock": "seconds" if real else "simulated time", **options})

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the run as one HTML page that needs no network: curves, who computed what, delays, faults, settings."""
        from ..analysis.report import write_report

        return write_report([self], path)

    def __repr__(self) -> str:
        counts = f"{self.version} updates, {len(self.trace)} arrivals, time {self.time:g}, {self.ending}"
        wrong = ", ".join(f"{count} {kind}" for kind, count in self.faults.items())
        returned = f"; it returns its best, of version {self.returned}" if self.returned != self.version else ""
        return f"Run({counts}{f'; {wrong}' if wrong else ''}{returned})"

    def _repr_html_(self) -> str:
        from ..analysis.html import run_html

        return run_html(self)

    @property
    def returned(self) -> int:
        """The version of the weights ``x``: the last, or after early stopping the best."""
        return self.version if self.weights is None or self.best is None else self.best.version


@dataclass(frozen=True)
class Names:
    """Where in the flat weights each entry of a state dict is, and the entries that do not move."""

    layout: Sequence[tuple[str, int, Sequence[int]]]
    fixed: Mapping[str, Tensor]

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """The weights by name."""
        moving = {
            name: x[first : first + math.prod(shape)].reshape(tuple(shape)).clone() for name, first, shape in self.layout
        }
        return {**moving, **{name: tensor.clone() for name, tensor in self.fixed.items()}}

    def flat(self, state_dict: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The flat weights of a state dict, of the size and type of others: the inverse."""
        x = torch.empty_like(like)
        for name, first, shape in self.layout:
            x[first : first + math.prod(shape)] = state_dict[name].reshape(-1)
        return x


FAULTS = {
    "crashed": "its process was lost",
    "failed": "its gradient raised",
    "rejected": "its gradient was rejected",
    "left": "it left",
    "frozen": "it was frozen",
    "late": "its job was late",
}
PLANNED = ("", "it was asked to", "not there at the start")  # why a worker leaves if nothing is wrong


def _is_fault(event: Mapping[str, Any]) -> bool:
    return event["kind"] in FAULTS and not (event["kind"] == "left" and event.get("text", "") in PLANNED)


def troubles(trace: Trace) -> list[str]:
    """A sentence for each worker and each kind of thing that went wrong with it, with the first cause."""
    faults: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for event in filter(_is_fault, trace.events):
        faults.setdefault((event["worker"], event["kind"]), []).append(event)
    sentences = []
    for (worker, kind), alike in sorted(faults.items()):
        first, count = alike[0], len(alike)
        times = f"at time {first['time']:.4g}" if count == 1 else f"{count} times, first at time {first['time']:.4g}"
        cause = first.get("text") or ""
        what = f"worker {worker}: {FAULTS[kind]}" if worker >= 0 else "the server: a shard of it was lost"
        sentences.append(f"{what} {times}{f': {cause_of(cause)}' if cause else ''}")
    heard = set(trace["worker"].tolist())
    silent = [worker for worker, kind in sorted(faults) if kind == "left" and worker not in heard]
    return sentences + [f"worker {worker}: the model has learnt nothing from its data" for worker in silent]


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as strict JSON can hold them: what is not finite becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

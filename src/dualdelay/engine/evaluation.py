"""What is measured of a model on the way, and when."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import Problem
from ..core.errors import BadInput, DualDelayError, shortened, shown
from .metrics import NAMES, metric_and_way
from .table import Table

log = logging.getLogger("dualdelay")

Metric = Callable[[Any], float]
Row = dict[str, float]
Parts = Mapping[int, Mapping[str, Any]]

WORKER_NAMES = ("time", "version", "worker", "loss", "samples")

MOST_EVALUATIONS = 1_000_000  # of a run: each is kept
_SUMMARY = (
    *("ended", "updates", "arrivals", "gradients", "rejected", "faults", "audit", "bytes_up", "bytes_down"),
    *("tau_max", "tau_avg", "arrival_max", "arrival_avg", "best_metric", "best_value", "best_version", "returned_version"),
)  # what else a run's result has beside its last evaluation

_MOST, _LEAST = 50, 10  # evaluations by default
_SHARE = 0.1  # of a run's work that they may take by default
_QUICK = 0.05  # seconds that an evaluation may take whatever its share
_LONGEST = 200  # characters of a metric's name
_FEWEST_SAMPLES = 32  # of a worker in an evaluation on some


@dataclass(frozen=True)
class Schedule:
    """When the model is evaluated, off the clock: after every so many updates, and at every so many seconds.

    On all data, or on ``samples`` of each worker, always the same; the end of a run is evaluated on all.
    """

    updates: int | None = None
    seconds: float | None = None
    samples: int | None = None
    limit: float | None = None  # the share of a real worker's time that evaluations may take


def default_schedule(problem: Problem, updates: int | None, time: float | None, jobs: float) -> Schedule:
    """The default schedule of a simulation: at most fifty evaluations, in at most a tenth of its work.

    The work of ``jobs`` gradients and of an evaluation is told from their sizes; nothing is timed. If not even ten
    evaluations fit into a tenth, and one would be noticed, they are on a sample.
    """
    count, samples, costs = _MOST, None, problem.costs()
    if costs is not None and jobs > 0:
        one, whole = costs
        count = max(_LEAST, min(_MOST, int(_SHARE * jobs * one / whole)))
        if _SHARE * jobs * one < _LEAST * whole and whole > _QUICK:
            share = _SHARE * jobs * one / (_LEAST * whole)
            sizes = [problem.samples(worker) or 1 for worker in range(problem.workers)]
            samples = max(_FEWEST_SAMPLES, int(share * sum(sizes) / len(sizes)))
            samples = None if samples >= max(sizes) else samples
    if time:
        return Schedule(seconds=time / count, samples=samples)
    return Schedule(updates=max(1, (updates or 0) // count), samples=samples)


def require_metrics(metrics: Mapping[str, Metric] | None, problem: Problem) -> None:
    """Refuse functions or names that cannot be those of metrics, or are the problem's; and such names of its own."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise BadInput(f"metrics is {shown(metrics)}; expected functions by name: metrics={{'name': lambda model: ...}}.")
    names = [*problem.metric_names, *problem.joint_metric_names, *(metrics or {})]
    for name in names:
        _require_name(name)
    for name, metric in (metrics or {}).items():
        if not callable(metric):
            raise BadInput(f"metrics has {shown(metric)} for {name!r}; expected a function: lambda model: ...")
    taken = sorted({name for name in names if name in (*NAMES, *_SUMMARY) or names.count(name) > 1})
    if taken:
        raise BadInput(f"metrics has {taken}, which are columns already; choose other names.")


def _require_name(name: object) -> None:
    """Refuse a metric's name that no column of a file can have."""
    if not isinstance(name, str):
        raise BadInput(f"metrics has {shown(name)} for a name; expected a text.")
    if not (0 < len(name) <= _LONGEST and name.isprintable() and name.strip() == name):
        raise BadInput(
            f"metrics has {shown(name)} for a name; expected 1 to {_LONGEST} characters that can be printed, with no blank "
            "before or after them."
        )


Assessed = tuple[Mapping[str, float], Parts]  # what a problem says about a model, and what each worker found for it


class WorkersEvaluation(NamedTuple):
    """What the workers have found out about a model."""

    time: float
    version: int
    x: Tensor
    parts: Parts
    complete: bool  # whether all workers that are present have answered
    errors: Mapping[int, str]  # by worker: why it could not evaluate


class Evaluations:
    """The evaluations of a run so far: by the problem itself and by functions of the user's own.

    A function that raises is refused at the first model of a simulation, where nothing is lost. Later, and on real workers,
    it is reported and not called again: no run is lost to a metric.
    """

    def __init__(
        self,
        problem: Problem,
        metrics: Mapping[str, Metric] | None = None,
        keep_best: str | None = None,
        *,
        forgiving: bool = False,
        tolerant: bool = False,
    ) -> None:
        """``forgiving``: functions may raise from the start; ``tolerant``: one worker's loss may be no number there."""
        self._problem, self._metrics = problem, dict(metrics or {})
        self._forgiving, self._tolerant = forgiving, tolerant
        require_metrics(metrics, problem)
        self.names = (*NAMES, *problem.metric_names, *problem.joint_metric_names, *self._metrics)
        self.rows: list[Row] = []
        self.workers = WorkerRows((*problem.metric_names, *(["accuracy"] if problem.accuracy_at_workers else [])))
        self.best = None if keep_best is None else Best.by(keep_best, self.names)
        self.failures: dict[str, str] = {}  # by what has failed: how

    @property
    def table(self) -> Table:
        """The rows as a table."""
        return Table.of(self.rows, self.rows[0] if self.rows else self.names)

    def of(
        self, time: float, version: int, x: Tensor, samples: int | None = None, assessed: Assessed | None = None
    ) -> Row | None:
        """A row about a model, which is not added yet; None if that failed where failing is forgiven.

        ``assessed`` is what the problem says of it, if that is known.
        """
        if self.knows(version, samples):
            return {**self.rows[-1], "time": time}
        return self._attempted(lambda: self._row(time, version, x, *(assessed or self._problem.assess(x, samples))))

    def knows(self, version: int, samples: int | None = None) -> bool:
        """Whether this model was the last to be evaluated, and on no less."""
        last = self.rows[-1] if self.rows else None
        return last is not None and last["version"] == version and (samples is not None or last["share"] == 1.0)

    def add(self, row: Row | None) -> None:
        """Add a row in its place: a crash may have delayed an older one."""
        if row is not None:
            self.rows.append(row)
            self.rows.sort(key=lambda row: row["time"])

    def combined(self, evaluation: WorkersEvaluation) -> Row | None:
        """A row from what the workers have found; None if there is nothing to be had from it."""
        time, version, x, parts, complete, errors = evaluation
        for worker, text in errors.items():
            self._fail(f"evaluation at worker {worker}", text)
        if not parts:
            return None
        return self._attempted(
            lambda: self._row(time, version, x, self._problem.combine(x, parts), parts, complete=complete)
        )

    def _attempted(self, make: Callable[[], Row]) -> Row | None:
        try:
            return make()
        except Exception as error:  # whatever a user's problem raises
            if not self._forgiving or isinstance(error, DualDelayError):
                raise
            self._fail("evaluation", f"{type(error).__name__}: {error}")
            return None

    def _row(
        self, time: float, version: int, x: Tensor, numbers: Mapping[str, float], parts: Parts, *, complete: bool = True
    ) -> Row:
        answered = {"answered": float(len(parts) or self._problem.workers), "share": 1.0}
        try:
            numbers = _numbers(numbers)
        except BadInput as error:
            if self._forgiving:
                raise TypeError(str(error)) from None
            raise
        row = {**dict.fromkeys(self.names, math.nan), **answered, "time": time, "version": version, **numbers}
        if not math.isfinite(row["objective"]):
            self._not_finite(version, row["objective"], parts)
        for worker, part in parts.items():
            for name, text in part.get("errors", {}).items():
                self._fail(f"metric {name!r} at worker {worker}", f"{text}; it was switched off there")
        model = self._problem.model(x) if self._metrics else None
        for name, metric in self._metrics.items():
            row[name] = self._called(name, metric, model, version)
        self.workers.add(time, version, parts)
        if self.best is not None:
            self.best.consider(row, x, complete=complete)
        return row

    def _not_finite(self, version: int, objective: float, parts: Parts) -> None:
        """Name the workers whose loss makes the objective no number; at the start that is refused."""
        bad = [worker for worker, part in sorted(parts.items()) if not math.isfinite(part["loss"])]
        who = f"worker {bad[0]}" if len(bad) == 1 else f"workers {', '.join(map(str, bad[:9]))}"
        others_fine = 0 < len(bad) < len(parts)
        if version == 0 and not (self._tolerant and others_fine):
            where = f"the data of {who}, whose loss alone is not finite" if others_fine else "the data"
            raise BadInput(
                f"the objective at the start is {objective}; expected a finite number. Look at {where}, the loss and the "
                "initial weights."
            )
        if others_fine:
            self._fail(
                "objective", f"{objective} first seen at version {version}: the loss of {who} over its data is not finite"
            )

    def _called(self, name: str, metric: Metric, model: Any, version: int) -> float:
        if f"metric {name!r}" in self.failures:
            return math.nan
        try:
            with torch.no_grad():
                value = metric(model)
            return _number(name, value)
        except Exception as error:  # whatever a user's function raises
            if version == 0 and not self._forgiving:
                if isinstance(error, BadInput):
                    raise
                raise BadInput(
                    f"metric {name!r} raised {type(error).__name__} at the first model: {error}. It is called with the "
                    "model alone; a function of the model and a batch belongs to the problem: dd.Network(..., metrics=...)."
                ) from error
            self._fail(f"metric {name!r}", f"{type(error).__name__}: {error}; it was switched off at version {version}")
            return math.nan

    def _fail(self, what: str, how: str) -> None:
        """Report that something did not work, once."""
        if what not in self.failures:
            self.failures[what] = how
            log.warning("%s: %s", what, how)

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""
        best = None if self.best is None else dict(vars(self.best))
        names = list(self.rows[0]) if self.rows else list(self.names)
        rows = [[row.get(name, math.nan) for name in names] for row in self.rows]
        kept = {"metrics": _saved(names, rows), "workers": _saved(self.workers.names, self.workers.rows)}
        return {**kept, "best": best, "failures": self.failures}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        self.rows, self.failures = metric_rows(saved["metrics"]), saved["failures"]
        self.workers = WorkerRows.loaded(saved["workers"])
        if saved["best"] is not None:
            self.best = Best(**saved["best"])


def _saved(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Rows as one tensor: a checkpoint with a thousand of them is written as fast as one with ten."""
    return {"names": list(names), "rows": torch.tensor(rows, dtype=torch.float64)}


def metric_rows(saved: Mapping[str, Any]) -> list[Row]:
    """The rows of the metrics that were saved."""
    rows = (dict(zip(saved["names"], values, strict=True)) for values in saved["rows"].tolist())
    return [row | {"version": int(row["version"])} for row in rows]


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    """What a problem says about a model, if it is numbers by name."""
    if not isinstance(metrics, Mapping):
        raise BadInput(f"the problem's 'evaluate' gave {shown(metrics)}; expected numbers by name: {{'objective': 1.0}}.")
    for name in metrics:
        if not isinstance(name, str):
            raise BadInput(f"the problem's 'evaluate' has {shown(name)} for a name; expected a text.")
    return {name: value if isinstance(value, int) else _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError("a text is none")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadInput(f"metric {name!r} gave {shown(value)}; expected one number ({shortened(str(error))}).") from None


class WorkerRows:
    """What each worker found at each evaluation: a table that is still being written."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.names = (*WORKER_NAMES, *columns)
        self.rows: list[tuple[float, ...]] = []

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> WorkerRows:
        """The rows that were saved."""
        rows = cls(saved["names"][len(WORKER_NAMES) :])
        rows.rows = [tuple(row) for row in saved["rows"].tolist()]
        return rows

    def add(self, time: float, version: int, parts: Parts) -> None:
        """Write down an evaluation."""
        for worker, part in sorted(parts.items()):
            values = part.get("metrics", {})
            metrics = (values.get(name, math.nan) for name in self.names[len(WORKER_NAMES) :])
            self.rows.append((time, version, worker, part["loss"], part["samples"], *metrics))

    def table(self) -> Table:
        """All of it, in order of time."""
        rows = np.array(sorted(self.rows, key=lambda row: row[0]), dtype=np.float64).reshape(-1, len(self.names))
        columns = dict(zip(self.names, rows.T, strict=True))
        return Table(columns | {name: columns[name].astype(np.int64) for name in ("version", "worker", "samples")})


@dataclass
class Best:
    """The best model so far, by one metric."""

    metric: str
    larger: bool
    value: float = math.nan
    version: int = -1
    x: Tensor | None = field(default=None, repr=False)
    answered: float = -1.0
    share: float = -1.0

    @classmethod
    def by(cls, text: str, names: Sequence[str]) -> Best:
        """Keep the best by the metric of that name, in front of which "max" or "min" may say which way is good."""
        metric = text.removeprefix("max ").removeprefix("min ")
        if metric not in names:
            raise BadInput(f"there is no metric {metric!r} to keep the best or to stop by; there are {', '.join(names)}.")
        return cls(metric, metric_and_way("best_by", text)[1] == "max")

    def consider(self, row: Row, x: Tensor, *, complete: bool = True) -> None:
        """Take a model if it is better; one that not all present workers have evaluated (not ``complete``) is passed over.

        Where other workers answer than before, F is another one and the best of it is sought anew; evaluations on different
        samples are not compared.
        """
        value = row[self.metric]
        if math.isnan(value) or not complete:
            return
        if self.x is not None:
            better = value > self.value if self.larger else value < self.value
            if row["share"] != self.share or (row["answered"] == self.answered and not better):
                return
        self.value, self.version, self.x = value, int(row["version"]), x.detach().clone()
        self.answered, self.share = row["answered"], row["share"]

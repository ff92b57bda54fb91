"""The fold: arrivals in, orders out, with everything written down on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .clocks import Clock, Due
from .core import Algorithm, Arrival, Orders, Problem
from .draws import Draws
from .errors import BadInput, DualDelayError, RunFailed
from .fleets import LocalFleet
from .state import State, checksum, is_finite
from .trace import Recorder, Table

Metric = Callable[[Any], float]

NAMES = ("time", "version", "objective", "pooled_loss", "accuracy", "gradient_norm")
_IN_A_ROW = 10  # rejected values from one worker before the run gives up


@dataclass(frozen=True)
class Schedule:
    """When the model is evaluated, off the clock: after every so many updates, and at every so many simulated seconds."""

    updates: int | None = None
    seconds: float | None = None


class Loop:
    """A run under way: an algorithm's state, the fleet that serves it, and the record of both."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        problem: Problem,
        clock: Clock,
        x: Tensor,
        *,
        seed: int = 0,
        schedule: Schedule | None = None,
        metrics: Mapping[str, Metric] | None = None,
        bad: str = "retry",
    ) -> None:
        self.algorithm, self.problem, self.clock = algorithm, problem, clock
        self.state: State = algorithm.init(x, problem.workers, Draws(seed, "server"))
        self.fleet = LocalFleet(problem, clock, algorithm.message)
        self.recorder = Recorder()
        self.rows: list[dict[str, float]] = []
        self.now = 0.0  # the time of what happened last
        self._schedule, self._metrics, self._bad = schedule, dict(metrics or {}), bad
        taken = sorted(set(self._metrics) & set(NAMES))
        if taken:
            raise BadInput(f"metrics has {taken}, which are columns already; choose other names.")
        self._ticks = 0  # evaluations by simulated time so far
        self._streaks: dict[int, int] = {}  # rejected values in a row, by worker
        self._checksum = (-1, 0)  # of the newest version seen

    @property
    def table(self) -> Table:
        """The evaluations so far."""
        return Table.of(self.rows, self.rows[0] if self.rows else (*NAMES, *self._metrics))

    @property
    def moment(self) -> int:
        """How much has happened: it grows with every arrival, other event and scheduled evaluation."""
        return len(self.recorder) + len(self.recorder.events) + self._ticks

    def begin(self) -> None:
        """Evaluate the start and give out the first jobs."""
        if self._schedule is not None:
            self.rows.append(self.evaluate(0.0))
            if not math.isfinite(self.rows[0]["objective"]):
                raise BadInput(
                    f"the objective at the start is {self.rows[0]['objective']}; expected a finite number. Look at the "
                    "data, the loss and the initial weights."
                )
        self.fleet.carry_out(self.algorithm.first(self.state), self.state.version, self.state.x)

    def evaluate(self, time: float) -> dict[str, float]:
        """A row of metrics about the current model."""
        if self.rows and self.rows[-1]["version"] == self.state.version:
            return {**self.rows[-1], "time": time}
        x = self.state.x
        row = {**dict.fromkeys(NAMES, math.nan), "time": time, "version": self.state.version, **self.problem.evaluate(x)}
        if self._metrics:
            model = self.problem.model(x)
            with torch.no_grad():
                row |= {name: self._number(name, metric(model)) for name, metric in self._metrics.items()}
        return row

    @staticmethod
    def _number(name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"metric {name!r} gave {value!r}; expected one number ({error}).") from None

    def evaluate_before(self, time: float) -> bool:
        """Evaluate at the scheduled moments that lie before ``time``: nothing more can arrive by then. Was there any?"""
        seconds, before = self._schedule.seconds if self._schedule else None, self._ticks
        while seconds is not None and (self._ticks + 1) * seconds < time:
            self._ticks += 1
            self.rows.append(self.evaluate(self._ticks * seconds))
        return self._ticks > before

    def advance(self) -> Arrival | None:
        """Go to what happens next; returns the arrival if one was absorbed."""
        due, s = self.clock.peek(), self.state
        assert due is not None, "nothing is due"
        a = self._compute(due) if due.kind not in ("left", "joined") else None
        self.clock.pop()
        before, arrival, self.now = s.version, None, due.time
        if a is None:
            orders = self._change(due)
        elif a.job is None:
            orders = self._step(a)
            self.recorder.event("wake", a.time, s.version)
        elif a.value.shape != s.weights.shape or a.value.dtype != s.weights.dtype or not is_finite(a.value):
            orders = self._reject(a)
        else:
            orders, arrival = self._step(a), a
            self.fleet.accept(a)
            self._streaks.pop(a.worker, None)
            self.recorder.arrival(a, s.version, self._fingerprint())
        if orders:
            self.fleet.carry_out(orders, s.version, s.x)
        every = self._schedule.updates if self._schedule else None
        if every is not None and s.version != before and s.version % every == 0:
            self.rows.append(self.evaluate(due.time))
        return arrival

    def _step(self, a: Arrival) -> Orders:
        s, before, weights, mark = self.state, self.state.version, self.state.weights, self.state.weights._version
        orders = self.algorithm.step(s, a)
        if s.version == before and weights._version != mark:
            raise BadInput(f"{type(self.algorithm).__name__}.step wrote into state.x; move it with state.descend(...).")
        if not isinstance(orders, list):
            raise BadInput(f"{type(self.algorithm).__name__}.step returned {orders!r}; expected a list of orders.")
        return orders

    def _compute(self, due: Due) -> Arrival:
        try:
            return self.fleet.arrival(due)
        except DualDelayError:
            raise
        except Exception as error:
            raise RunFailed(f"worker {due.worker} could not compute its job number {due.draw}: {error}") from error

    def _change(self, due: Due) -> Orders:
        s, before = self.state, self.state.version
        if due.kind == "left":
            held = self.fleet.depart(due.worker)
            kept = () if held is None else (held,)
            orders = self.algorithm.leave(s, due.worker, *kept)
        else:
            orders = self.algorithm.join(s, due.worker)
        self.recorder.event(due.kind, due.time, s.version, due.worker, version=before)
        return orders

    def _reject(self, a: Arrival) -> Orders:
        """Count a value that is no gradient; its worker does the job again and is late, nothing else."""
        assert a.job is not None
        self.recorder.event("rejected", a.time, self.state.version, *a.job)
        self.fleet.retry(a)
        streak = self._streaks[a.worker] = self._streaks.get(a.worker, 0) + 1
        if self._bad == "stop" or streak >= _IN_A_ROW:
            shape, expected = tuple(a.value.shape), tuple(self.state.weights.shape)
            what = "values that are not finite" if shape == expected else f"shape {shape}, expected {expected}"
            raise RunFailed(
                f"worker {a.worker} sent a gradient with {what} (job number {a.job.draw} at version {a.job.version}"
                f"{f', the {streak}th in a row' if streak > 1 else ''}). Nothing of it was used. Lower lr, or look at that "
                "worker's data."
            )
        return []

    def _fingerprint(self) -> int:
        """The checksum of the current weights, which every gradient used so far has gone into."""
        if self._checksum[0] != self.state.version:
            self._checksum = (self.state.version, checksum(self.state.weights))
        return self._checksum[1]

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values and tensors."""
        state = {f.name: getattr(self.state, f.name) for f in fields(self.state)}
        return {
            "arrivals": len(self.recorder),
            "moment": self.moment,
            "now": self.now,
            "state": {name: value for name, value in state.items() if not isinstance(value, Draws)},
            "fleet": self.fleet.save(),
            "events": self.recorder.events,
            "metrics": self.rows,
            "ticks": self._ticks,
            "streaks": list(self._streaks.items()),
        }

    def load(self, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        """Go on from what was saved, with the trace's rows up to there."""
        for name, value in saved["state"].items():
            setattr(self.state, name, value)
        self.fleet.load(saved["fleet"])
        self.recorder.extend(rows)
        self.recorder.events = saved["events"]
        self.rows, self._ticks, self.now = saved["metrics"], saved["ticks"], saved["now"]
        self._streaks = dict(saved["streaks"])

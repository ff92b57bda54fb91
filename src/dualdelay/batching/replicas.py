"""Runs that share a schedule and advance together: one fold whose weights have a row for each run."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import Algorithm, Arrival, Problem
from ..core.aggregate import AggregateState, TableFormat
from ..core.compression import Packed
from ..core.draws import Draws
from ..core.state import State, Stepper
from ..engine.evaluation import Assessed, Evaluations, Metric, Row, Schedule
from ..engine.loop import Loop
from ..engine.table import Column
from ..engine.trace import Recorder, Trace
from ..simulation.local_fleet import LocalFleet


def column(
    algorithms: Sequence[Algorithm[Any]], device: torch.device, dtype: torch.dtype = torch.float64
) -> Algorithm[Any]:
    """One algorithm for runs that differ in the step size alone, which becomes a column (r, 1).

    At the server it is float64, as sums are; at the workers it has the type of the weights, lest these become another.
    """
    rates = [algorithm.lr for algorithm in algorithms]
    joint = copy.copy(algorithms[0])
    if len(set(rates)) > 1:
        object.__setattr__(joint, "lr", torch.tensor(rates, dtype=dtype, device=device)[:, None])
    return joint


def sliced(value: Any, k: int, copied: bool = True) -> Any:
    """The part of run k in plain values whose tensors have a row for each run; nothing of it changes with the others.

    Unless it is ``copied``, its tensors are views, for a look.
    """
    if isinstance(value, Tensor):
        if value.ndim < 2:
            return value[k].item()
        return value[k].clone() if copied else value[k]
    if isinstance(value, Packed):
        return Packed(value.length, sliced(value.parts, k, copied))
    if isinstance(value, (list, tuple)):
        return type(value)(sliced(item, k, copied) for item in value)
    if isinstance(value, dict):
        return {key: sliced(item, k, copied) for key, item in value.items()}
    return copy.copy(value)


class Apart(Exception):
    """Runs that were saved at the same moment are not at the same place of one schedule."""


def stacked(values: Sequence[Any]) -> Any:
    """The inverse of ``sliced``, from the parts of all runs, which must agree in everything that is no tensor."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(list(values))
    if isinstance(first, Packed):
        return Packed(first.length, stacked([value.parts for value in values]))
    if any(value != first if not isinstance(first, (list, tuple, dict)) else len(value) != len(first) for value in values):
        raise Apart(f"{values}")
    if isinstance(first, (list, tuple)):
        return type(first)(stacked(items) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: stacked([value[key] for value in values]) for key in first}
    return first


def _known(values: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """What all runs had computed and was not due yet, with a loss and a norm for each run.

    These two may be equal in all runs or not a number; the rest is stacked.
    """
    known = []
    for jobs in zip(*values, strict=True):
        worker, draw, value, keep = stacked([[*job[:3], job[5]] for job in jobs])
        signs = (torch.tensor(part, dtype=torch.float64) for part in zip(*(job[3:5] for job in jobs), strict=True))
        known.append([worker, draw, value, *signs, keep])
    return known


class Steppers(Stepper, Protocol):
    """What moves the weights of several runs instead of plain SGD; ``runs.optimizer.Optimizers`` is one."""

    def save_of(self, k: int) -> dict[str, Any]:
        """What run k needs to continue by itself."""

    def of(self, k: int) -> Stepper:
        """What would move the weights of run k by itself, as it is now."""


class Records(Recorder):
    """The trace of several runs that differ in losses and fingerprints alone; these stay on the device until asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[tuple[Tensor, Tensor]] = []
        self._losses: list[Column] = []
        self._fingerprints: list[Column] = []

    def arrival(self, a: Arrival, after: int, fingerprint: Any) -> None:
        loss: Any = a.loss
        self._new.append((loss, fingerprint))
        super().arrival(a._replace(loss=math.nan), after, 0)

    def fetch(self) -> None:
        """Bring losses and fingerprints from the device."""
        if self._new:
            self._losses.append(torch.stack([loss for loss, _ in self._new]).double().cpu().numpy())
            self._fingerprints.append(torch.stack([bits for _, bits in self._new]).cpu().numpy())
            self._new = []

    def of(self, k: int, start: int = 0) -> dict[str, Column]:
        """The rows of run k from ``start`` on."""
        self.fetch()
        rows = self.rows(start)
        if self._losses:
            if len(self._losses) > 1:
                self._losses, self._fingerprints = [np.concatenate(self._losses)], [np.concatenate(self._fingerprints)]
            rows |= {"loss": self._losses[0][start:, k].copy(), "fingerprint": self._fingerprints[0][start:, k].copy()}
        return rows

    def adopt(self, rows: Sequence[Mapping[str, Column]]) -> None:
        """Take over the rows that all runs have written earlier."""
        self.extend(rows[0])
        self._losses = [np.stack([part["loss"] for part in rows], axis=1)]
        self._fingerprints = [np.stack([part["fingerprint"] for part in rows], axis=1)]


class Replicas(Loop):
    """Several runs under way whose jobs arrive at the same times.

    The loop does not wait for the device: whether gradients were finite is checked now and then, and a run in which one was
    not has to be done again by itself, since its worker would have tried again and been late.
    """

    recorder: Records

    def __init__(
        self,
        algorithms: Sequence[Algorithm[Any]],
        problems: Sequence[Problem],
        fleet: LocalFleet,
        x: Tensor,
        *,
        seed: int,
        schedule: Schedule | None = None,
        metrics: Mapping[str, Metric] | None = None,
        keep_best: str | None = None,
        optimizer: Steppers | None = None,
        table_format: TableFormat = "full",
    ) -> None:
        joint = column(algorithms, x.device)
        options: Any = {"seed": seed, "schedule": schedule, "optimizer": optimizer, "table_format": table_format}
        super().__init__(joint, problems[0], fleet, x, **options)
        self._fleet, self._optimizer, self._problems = fleet, optimizer, problems
        self._assessed: tuple[tuple[int, int | None], dict[int, Assessed]] = ((-1, None), {})  # of a version, by run
        self.evaluations = [Evaluations(problem, metrics, keep_best) for problem in problems]
        self.recorder = Records()
        self._seen: dict[int, State] = {}  # by run: the state that is shown to whoever watches
        self.going = set(range(len(problems)))  # runs that are still looked at

    def evaluate(self, time: float) -> None:
        self.drop_diverged()
        self._assess(self._schedule.samples)
        for k in sorted(self.going):
            self.evaluations[k].add(self.evaluation_of(k, time, self._schedule.samples))
        self._evaluated_version = self.state.version

    def assess_ahead(self) -> None:
        self._assess(None)

    def _assess(self, samples: int | None) -> None:
        """Have the models of all runs that are going and not known assessed, those of one problem at once."""
        version = self.state.version
        wanted = [k for k in sorted(self.going) if not self.evaluations[k].knows(version, samples)]
        self._assessed = ((version, samples), {})
        for problem in {id(self._problems[k]): self._problems[k] for k in wanted}.values():
            rows = [k for k in wanted if self._problems[k] is problem]
            if len(rows) > 1:
                self._assessed[1].update(zip(rows, problem.assess_all(self.state.x[rows], samples), strict=True))

    def evaluation_of(self, k: int, time: float, samples: int | None = None) -> Row | None:
        version, (of, assessed) = self.state.version, self._assessed
        known = assessed.get(k) if of == (version, samples) else None
        return self.evaluations[k].of(time, version, self.state.x[k], samples, known)

    def drop_diverged(self) -> None:
        self.recorder.fetch()
        if self._fleet.norms:
            finite = torch.isfinite(torch.stack(self._fleet.norms)).all(0).tolist()
            self._fleet.norms.clear()
            self.going = {k for k in self.going if finite[k]}

    def rows_of(self, k: int, start: int) -> dict[str, Column]:
        return self.recorder.of(k, start)

    def trace_of(self, k: int) -> Trace:
        return Trace(self.recorder.of(k), list(self.recorder.events))

    def seen_of(self, k: int, arrival: Arrival) -> tuple[State, Arrival]:
        state = self._seen.setdefault(k, copy.copy(self.state))
        for f in fields(state):
            value = getattr(self.state, f.name)
            if f.name == "optimizer":
                state.optimizer = None if self._optimizer is None else self._optimizer.of(k)
            elif not isinstance(value, Draws):
                setattr(state, f.name, sliced(value, k, copied=False))
        parts: Any = {name: part[k] for name, part in arrival.parts.items()}
        loss = float(arrival.loss[k]) if isinstance(arrival.loss, Tensor) else arrival.loss
        return state, arrival._replace(value=arrival.value[k], loss=loss, parts=parts if parts else arrival.parts)

    def state_of(self, k: int) -> tuple[State, float | None]:
        """What run k's server knows, on the processor and without a table, and the audit of its sum if it has one."""
        state, audit = copy.copy(self.state), None
        for f in fields(state):
            value = getattr(state, f.name)
            if f.name != "optimizer" and not isinstance(value, Draws):
                setattr(state, f.name, sliced(value, k))
        if isinstance(state, AggregateState):
            audit = state.audit(sliced(self.memories(), k))
            state.table, state.total = None, state.total.cpu()
        state.weights = state.weights.cpu()
        state.optimizer = None if self._optimizer is None else self._optimizer.of(k)
        return state, audit

    def save_of(self, k: int, folder: Path | None = None) -> dict[str, Any]:
        saved = super().save()
        own: dict[str, Any] = sliced({name: saved[name] for name in ("state", "fleet")}, k)
        own["optimizer"] = None if self._optimizer is None else self._optimizer.save_of(k)
        return {**saved, **own, "evaluation": self.evaluations[k].save()}

    def load_all(self, saved: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Column]]) -> None:
        """Continue from what the runs saved at the same moment."""
        known = _known([part["fleet"]["gradients"] for part in saved])
        nothing_yet = self.evaluation.save()
        apart: dict[str, Any] = {"evaluation": {}, "optimizer": None}
        plain = [{**part, **apart, "fleet": {**part["fleet"], "gradients": []}} for part in saved]
        steppers = {"runs": [part["optimizer"] for part in saved]}
        joint = {**stacked(plain), "evaluation": nothing_yet, "optimizer": steppers}
        nothing = {name: column[:0] for name, column in rows[0].items()}
        self.load({**joint, "fleet": {**joint["fleet"], "gradients": known}}, nothing)
        self.recorder.adopt(rows)
        for evaluation, part in zip(self.evaluations, saved, strict=True):
            evaluation.load(part["evaluation"])

"""What is measured of a model on the way, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .core import Problem
from .errors import BadInput

Metric = Callable[[Any], float]

NAMES = ("time", "version", "objective", "pooled_loss", "accuracy", "gradient_norm")


@dataclass(frozen=True)
class Schedule:
    """When the model is evaluated, off the clock: after every so many updates, and at every so many seconds."""

    updates: int | None = None
    seconds: float | None = None


class Evaluation:
    """How a problem's models are evaluated: by the problem itself and by functions of the user's own."""

    def __init__(self, problem: Problem, metrics: Mapping[str, Metric] | None) -> None:
        self._problem, self._metrics = problem, dict(metrics or {})
        taken = sorted(set(self._metrics) & set(NAMES))
        if taken:
            raise BadInput(f"metrics has {taken}, which are columns already; choose other names.")
        self.names = (*NAMES, *self._metrics)

    def row(self, time: float, version: int, x: Tensor, numbers: Mapping[str, float]) -> dict[str, float]:
        """A row of metrics, given the problem's own numbers."""
        row = {**dict.fromkeys(NAMES, math.nan), "time": time, "version": version, **numbers}
        if version == 0 and not math.isfinite(row["objective"]):
            raise BadInput(
                f"the objective at the start is {row['objective']}; expected a finite number. Look at the data, the loss "
                "and the initial weights."
            )
        if self._metrics:
            model = self._problem.model(x)
            with torch.no_grad():
                row |= {name: _number(name, metric(model)) for name, metric in self._metrics.items()}
        return row


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"metric {name!r} gave {value!r}; expected one number ({error}).") from None

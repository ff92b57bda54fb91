"""How long messages travel, by their size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import BadInput


@dataclass(frozen=True)
class Link:
    """How long a message travels: ``latency + bytes / bandwidth``. The default takes no time, as in the paper."""

    latency: float = 0.0
    """Seconds for a message of no length."""
    bandwidth: float | None = None
    """Bytes per second; None: no limit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise BadInput(f"latency is {self.latency}; expected finite seconds, zero or more.")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise BadInput(f"bandwidth is {self.bandwidth}; expected bytes per second, above zero.")

    def seconds(self, size: int) -> float:
        """The travel time of ``size`` bytes."""
        return self.latency if self.bandwidth is None else self.latency + size / self.bandwidth

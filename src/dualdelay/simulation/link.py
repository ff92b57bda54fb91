"""How long messages travel, by their size."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import BadInput, shown
from ..core.settings import check_settings, zero_or_more


@dataclass(frozen=True)
class Link:
    """How long a message travels: ``latency + bytes / bandwidth``. The default takes no time, as in the paper."""

    latency: float = zero_or_more(0.0, "finite seconds")
    """Seconds for a message of no length."""
    bandwidth: float | None = None
    """Bytes per second; None: no limit."""

    def __post_init__(self) -> None:
        check_settings(self)
        number = isinstance(self.bandwidth, (int, float)) and not isinstance(self.bandwidth, bool)
        if self.bandwidth is not None and not (number and self.bandwidth > 0):
            raise BadInput(f"bandwidth is {shown(self.bandwidth)}; expected bytes per second, above zero.")

    def seconds(self, size: int) -> float:
        """The travel time of ``size`` bytes."""
        return self.latency if self.bandwidth is None else self.latency + size / self.bandwidth

"""Virtual time: speeds, availability, links, clocks, and workers simulated in this process; public as ``dd.speeds``."""

from typing import Any

from .availability import Absence, AwaySpeeds, Change, announced, dropouts, join, leave, on_off
from .link import Link, SharedLink
from .speeds import (
    BurstySpeeds,
    ChangingSpeeds,
    DriftingSpeeds,
    ExponentialSpeeds,
    FixedSpeeds,
    LognormalSpeeds,
    ParetoSpeeds,
    RecordedSpeeds,
    SpeedModel,
    TruncatedNormalSpeeds,
)

SPEEDS: dict[str, Any] = {
    "fixed": FixedSpeeds,
    "truncated_normal": TruncatedNormalSpeeds,
    "exponential": ExponentialSpeeds,
    "lognormal": LognormalSpeeds,
    "pareto": ParetoSpeeds,
    "changing": ChangingSpeeds,
    "recorded": RecordedSpeeds,
    "drifting": DriftingSpeeds,
    "bursty": BurstySpeeds,
    "away": AwaySpeeds,
}

__all__ = [
    "SPEEDS",
    "Absence",
    "AwaySpeeds",
    "BurstySpeeds",
    "Change",
    "ChangingSpeeds",
    "DriftingSpeeds",
    "ExponentialSpeeds",
    "FixedSpeeds",
    "Link",
    "LognormalSpeeds",
    "ParetoSpeeds",
    "RecordedSpeeds",
    "SharedLink",
    "SpeedModel",
    "TruncatedNormalSpeeds",
    "announced",
    "dropouts",
    "join",
    "leave",
    "on_off",
]

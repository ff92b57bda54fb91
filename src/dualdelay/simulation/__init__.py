"""Virtual time: speeds, availability, links, clocks, and workers simulated in this process; public as ``dd.speeds``."""

from .availability import SPEEDS, Absence, AwaySpeeds, announced, dropouts, on_off
from .clocks import join, leave
from .link import Link
from .paces import BurstySpeeds, DriftingSpeeds
from .speeds import (
    ChangingSpeeds,
    ExponentialSpeeds,
    FixedSpeeds,
    LognormalSpeeds,
    ParetoSpeeds,
    RecordedSpeeds,
    SpeedModel,
    TruncatedNormalSpeeds,
)

__all__ = [
    "SPEEDS",
    "Absence",
    "AwaySpeeds",
    "BurstySpeeds",
    "ChangingSpeeds",
    "DriftingSpeeds",
    "ExponentialSpeeds",
    "FixedSpeeds",
    "Link",
    "LognormalSpeeds",
    "ParetoSpeeds",
    "RecordedSpeeds",
    "SpeedModel",
    "TruncatedNormalSpeeds",
    "announced",
    "dropouts",
    "join",
    "leave",
    "on_off",
]

"""Names of runs, and what a seed names."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace

from .speeds import ChangingSpeeds, SpeedModel


def slug(text: str) -> str:
    """A label as part of a folder's name, without what means something to a shell."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", text).strip("-")


def stem(label: str, seed: int, *places: str) -> str:
    """The name of a run's folder among those of others."""
    return "-".join([slug(label), *places, f"seed{seed}"])


def reseeded(speeds: SpeedModel, seed: int) -> SpeedModel:
    """The speed model with another seed, or with a speed model in it that has, if there is one."""
    if is_dataclass(speeds) and any(field.name == "seed" for field in fields(speeds)):
        return replace(speeds, seed=seed)
    if isinstance(speeds, ChangingSpeeds):
        return replace(speeds, speeds=reseeded(speeds.speeds, seed))
    return speeds

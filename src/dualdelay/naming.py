"""Names of runs, and what a seed names."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .speeds import SpeedModel


def slug(text: str) -> str:
    """A label as part of a folder's name, without what means something to a shell."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", text).strip("-")


def stem(label: str, seed: int, *places: str) -> str:
    """The name of a run's folder among those of others."""
    return "-".join([slug(label), *places, f"seed{seed}"])


def reseeded(speeds: SpeedModel, seed: int) -> SpeedModel:
    """The speed model with another seed, and so the speed models in it, as far as they have one."""
    if not is_dataclass(speeds):
        return speeds
    values = {field.name: getattr(speeds, field.name) for field in fields(speeds) if field.init}
    changed: dict[str, Any] = {
        name: reseeded(value, seed) for name, value in values.items() if isinstance(value, SpeedModel)
    }
    if "seed" in values:
        changed["seed"] = seed
    return replace(speeds, **changed) if changed else speeds

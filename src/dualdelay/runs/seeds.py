"""What a seed names.

A run's seed names every random choice in it: split, minibatches, noise, speeds, initial weights and the server's own draws.
A problem or a speed model that was given a seed of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..core import Problem
from ..core.errors import BadInput, require_kind
from ..simulation.speeds import FixedSpeeds, SpeedModel
from .settings import SpeedsOf

ProblemOf = Problem | Callable[[int], Problem]


def seeded_problem(problem: ProblemOf, seed: int) -> Problem:
    """The problem of a run with this seed: what a function gives for it, or the same problem with other draws."""
    if not isinstance(problem, Problem) and callable(problem):
        problem = problem(seed)
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    assert isinstance(problem, Problem)
    if problem.own_seed or problem.seed == seed:
        return problem
    try:
        return problem.reseeded(seed)
    except BadInput:  # it is the same for every seed
        return problem


def seeded_speeds(speeds: SpeedsOf | None, seed: int) -> SpeedModel:
    """The speeds of a run with this seed, and so the speed models in them."""
    if not isinstance(speeds, SpeedModel) and callable(speeds):
        speeds = speeds(seed)
    require_kind("speeds", speeds, SpeedModel, "dd.FixedSpeeds([1.0, 2.0])")
    assert isinstance(speeds, SpeedModel)
    if not is_dataclass(speeds):
        return speeds
    values = {field.name: getattr(speeds, field.name) for field in fields(speeds) if field.init}
    changed: dict[str, Any] = {
        name: seeded_speeds(value, seed) for name, value in values.items() if isinstance(value, SpeedModel)
    }
    if "seed" in values and values["seed"] is None and seed != 0:  # none is zero already
        changed["seed"] = seed
    return replace(speeds, **changed) if any(changed[name] is not values[name] for name in changed) else speeds


def unvaried(problem: ProblemOf, speeds: SpeedsOf | None, seeds: Sequence[int]) -> list[str]:
    """What a person may think varies with the seed and does not, in words; a function says itself what varies."""
    if len(seeds) < 2:
        return []
    reasons = []
    if isinstance(problem, Problem):
        why = f"it was given seed={problem.seed} of its own" if problem.own_seed else problem.unseeded
        reasons += [f"the problem ({why})"] if why else []
    if isinstance(speeds, SpeedModel) and (why := _unvaried_speeds(speeds)):
        reasons.append(f"the speeds ({why})")
    return reasons


def _unvaried_speeds(speeds: SpeedModel) -> str:
    if isinstance(speeds, FixedSpeeds):
        return ""  # nobody thinks otherwise
    values: list[Any] = (
        [getattr(speeds, field.name) for field in fields(speeds) if field.init] if is_dataclass(speeds) else []
    )
    inner = [value for value in values if isinstance(value, SpeedModel)]
    if hasattr(speeds, "seed"):
        own: int | None = speeds.seed
        return "" if own is None else f"{type(speeds).__name__} was given seed={own} of its own"
    return _unvaried_speeds(inner[0]) if inner else f"{type(speeds).__name__} has no seed"

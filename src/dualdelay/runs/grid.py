"""The points of a grid of runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..core import Algorithm, Problem
from ..core.errors import BadInput, nearest, plain_number, shown
from ..simulation.speeds import SpeedModel
from .names import label
from .naming import ProblemOf, SpeedsOf, seeded_problem, seeded_speeds, stem

_MOST = 1_000_000  # runs of a grid
_AXES = ("algorithm", "problem", "speeds", "seed")


@dataclass(frozen=True)
class Point:
    """A point of the grid: its coordinates as texts and numbers, and what they stand for."""

    names: dict[str, Any]
    algorithm: Algorithm[Any]
    problem: Problem
    speeds: SpeedModel
    seed: int
    path: Path | None


def points(
    grid: Mapping[str, Sequence[Any]], problem: ProblemOf | None, speeds: SpeedsOf | None, folder: Path | None, seed: int
) -> Iterator[Point]:
    """Every point of the grid, its names chosen so that no two are alike."""
    axes: dict[str, list[Any]] = {"problem": [problem], "speeds": [speeds]}
    for name, values in grid.items():
        if getattr(values, "ndim", 0) == 1 and hasattr(values, "tolist"):  # numbers of numpy's or torch's
            values = values.tolist()
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise BadInput(f"the grid's {name!r} is {shown(values)}; expected a list of at least one value.")
        axes[name] = [plain_number(value) for value in values]
    if (count := math.prod(map(len, axes.values()))) > _MOST:
        raise BadInput(f"the grid has {count:,} runs; expected {_MOST:,} at most. Take fewer values.")
    if "algorithm" not in axes:
        raise BadInput("the grid has no 'algorithm'; give at least one, such as {'algorithm': [dd.DuDe(lr=0.05)]}.")
    for name in ("problem", "speeds"):
        if name not in grid and axes[name] == [None]:
            raise BadInput(f"no {name} is given; pass it after the grid, or several of them in it.")
    for value in axes.get("seed", []):
        if not isinstance(value, int):
            raise BadInput(f"the grid's 'seed' has {shown(value)}; expected whole numbers.")
    settings = [name for name in axes if name not in _AXES]
    numbers = axes.get("seed", [seed])
    problems = {(i, k): seeded_problem(given, k) for i, given in enumerate(axes["problem"]) for k in numbers}
    paces = {(j, k): seeded_speeds(given, k) for j, given in enumerate(axes["speeds"]) for k in numbers}
    texts = {
        "problem": _told_apart([problems[i, numbers[0]] for i in range(len(axes["problem"]))]),
        "speeds": _told_apart([paces[j, numbers[0]] for j in range(len(axes["speeds"]))]),
    }
    seen: set[str] = set()
    for chosen in itertools.product(*(range(len(values)) for values in axes.values())):
        at = {name: (k, values[k]) for (name, values), k in zip(axes.items(), chosen, strict=True)}
        number = at["seed"][1] if "seed" in at else seed
        method = _with_settings(at["algorithm"][1], {name: at[name][1] for name in settings})
        (i, _), (j, _) = at["problem"], at["speeds"]
        names = {"algorithm": label(method), "seed": number, **{name: at[name][1] for name in settings}}
        names |= {name: texts[name][at[name][0]] for name in texts if len(texts[name]) > 1}
        place = stem(label(method), number, *(f"{name}{at[name][0]}" for name in texts if len(texts[name]) > 1))
        if place in seen:
            raise BadInput(f"the grid has {names} twice; expected every run only once.")
        seen.add(place)
        path = None if folder is None else folder / place
        yield Point(names, method, problems[i, number], paces[j, number], number, path)


def _with_settings(algorithm: Any, settings: Mapping[str, Any]) -> Algorithm[Any]:
    if not isinstance(algorithm, Algorithm):
        raise BadInput(f"the grid's algorithm has {shown(algorithm)}; expected an algorithm such as dd.DuDe(lr=0.05).")
    known = [f.name for f in fields(algorithm)]
    for name in settings:
        if name not in known:
            kind = type(algorithm).__name__
            raise BadInput(f"the grid has {name!r}, which {kind} does not; {nearest(name, [*known, *_AXES])}")
    return replace(algorithm, **settings)


def _told_apart(things: Sequence[Any]) -> list[str]:
    """A text for each thing, with a number where the names alone are the same."""
    texts = [label(thing) for thing in things]
    return [text if texts.count(text) == 1 else f"{text} ({k})" for k, text in enumerate(texts)]

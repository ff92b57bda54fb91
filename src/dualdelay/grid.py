"""The points of a grid of runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .config import label
from .core import Algorithm, Problem
from .errors import BadInput, nearest, require_kind
from .naming import reseeded, stem
from .speeds import SpeedModel

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
    grid: Mapping[str, Sequence[Any]], problem: Problem | None, speeds: SpeedModel | None, folder: Path | None, seed: int
) -> Iterator[Point]:
    """Every point of the grid, its names chosen so that no two are alike."""
    axes: dict[str, list[Any]] = {"problem": [problem], "speeds": [speeds]}
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise BadInput(f"the grid's {name!r} is {values!r}; expected a list of at least one value.")
        axes[name] = list(values)
    if "algorithm" not in axes:
        raise BadInput("the grid has no 'algorithm'; give at least one, such as {'algorithm': [dd.DuDe(lr=0.05)]}.")
    for name, kind, example in (("problem", Problem, "dd.Digits()"), ("speeds", SpeedModel, "dd.FixedSpeeds([1.0, 2.0])")):
        if name not in grid and axes[name] == [None]:
            raise BadInput(f"no {name} is given; pass it after the grid, or several of them in it.")
        for value in axes[name]:
            require_kind(name, value, kind, example)
    for value in axes.get("seed", []):
        if not isinstance(value, int):
            raise BadInput(f"the grid's 'seed' has {value!r}; expected whole numbers.")
    settings = [name for name in axes if name not in _AXES]
    texts = {name: _told_apart(axes[name]) for name in ("problem", "speeds")}
    reseed = "seed" in grid
    made: dict[tuple[int, int], Problem] = {}
    paces: dict[tuple[int, int], SpeedModel] = {}
    seen: set[str] = set()
    for chosen in itertools.product(*(range(len(values)) for values in axes.values())):
        at = {name: (k, values[k]) for (name, values), k in zip(axes.items(), chosen, strict=True)}
        number = at["seed"][1] if reseed else seed
        method = _with_settings(at["algorithm"][1], {name: at[name][1] for name in settings})
        (i, mine), (j, pace) = at["problem"], at["speeds"]
        if reseed:
            mine = made[i, number] = made.get((i, number)) or mine.reseeded(number)
            pace = paces[j, number] = paces.get((j, number)) or reseeded(pace, number)
        names = {"algorithm": label(method), "seed": number, **{name: at[name][1] for name in settings}}
        names |= {name: texts[name][at[name][0]] for name in texts if len(texts[name]) > 1}
        place = stem(label(method), number, *(f"{name}{at[name][0]}" for name in texts if len(texts[name]) > 1))
        if place in seen:
            raise BadInput(f"the grid has {names} twice; expected every run only once.")
        seen.add(place)
        yield Point(names, method, mine, pace, number, None if folder is None else folder / place)


def _with_settings(algorithm: Any, settings: Mapping[str, Any]) -> Algorithm[Any]:
    if not isinstance(algorithm, Algorithm):
        raise BadInput(f"the grid's algorithm has {algorithm!r}; expected an algorithm such as dd.DuDe(lr=0.05).")
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

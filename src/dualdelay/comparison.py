"""Several methods on the same problem, speeds, initial weights and minibatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import label
from .core import Algorithm, Problem
from .errors import BadInput
from .files import save_table
from .grid import Point
from .naming import reseeded, stem
from .speeds import SpeedModel
from .sweep import Sweep, computed


def compare(
    algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]],
    problem: Problem,
    speeds: SpeedModel,
    *,
    seeds: Sequence[int] | None = None,
    folder: str | Path | None = None,
    device: str | None = None,
    cores: int | None = None,
    precision: str = "float32",
    **options: Any,
) -> Sweep:
    """Simulate every algorithm with every seed and give one tidy table: a row for each evaluation of each run.

    A seed names split, minibatches, noise, speeds and initial weights alike; without ``seeds`` problem and speeds are
    taken as they are. The other options are those of ``simulate`` and ``sweep``. With a ``folder`` each run has one of its
    own in it, and what is there already is not computed again. A run that fails stands in the table's ``failed``.
    """
    if seeds is not None and (len(seeds) == 0 or len(set(seeds)) != len(seeds)):
        raise BadInput(f"seeds is {list(seeds)}; expected at least one whole number, each only once.")
    points = []
    for seed in [options.pop("seed", 0)] if seeds is None else seeds:
        mine, pace = (problem, speeds) if seeds is None else (problem.reseeded(seed), reseeded(speeds, seed))
        for name, method in named(algorithms).items():
            place = None if folder is None else Path(folder) / stem(name, seed)
            points.append(Point({"algorithm": name, "seed": seed}, method, mine, pace, seed, place))
    table = computed(points, device=device, cores=cores, precision=precision, **options)
    if folder is not None:
        save_table(Path(folder) / "comparison.parquet", table.columns)
    return table


def named(algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]]) -> dict[str, Algorithm[Any]]:
    """The algorithms of a comparison by their labels."""
    names = dict(algorithms) if isinstance(algorithms, Mapping) else {label(method): method for method in algorithms}
    if not names or len(names) != len(algorithms):
        given = [label(method) for method in (algorithms.values() if isinstance(algorithms, Mapping) else algorithms)]
        raise BadInput(f"the algorithms are {given}; expected at least one, each only once, such as 'dude[lr=0.05]'.")
    return names

"""Several methods on the same problem, speeds, initial weights and minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .config import label
from .core import Algorithm, Problem
from .errors import BadInput
from .files import save_table
from .naming import reseeded, slug
from .result import Run
from .run import simulate
from .speeds import SpeedModel
from .trace import Table


def compare(
    algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]],
    problem: Problem,
    speeds: SpeedModel,
    *,
    seeds: Sequence[int] | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> Table:
    """Simulate every algorithm with every seed and give one tidy table: a row for each evaluation of each run.

    A seed names split, minibatches, noise, speeds and initial weights alike; without ``seeds`` problem and speeds are
    taken as they are. ``options`` are those of ``simulate``. With a ``folder`` each run has one of its own in it, and
    what is there already is not computed again.
    """
    table = tidy(list(runs(algorithms, problem, speeds, seeds=seeds, folder=folder, **options)))
    if folder is not None:
        save_table(Path(folder) / "comparison.parquet", table.columns)
    return table


Ended = tuple[str, int, Run]  # label, seed and run


def tidy(ended: Sequence[Ended]) -> Table:
    """One table of all evaluations of all runs, each row with its algorithm and seed."""
    sizes = [len(run.metrics) for _, _, run in ended]
    names = {"algorithm": np.repeat([name for name, _, _ in ended], sizes)}
    seeds = {"seed": np.repeat([seed for _, seed, _ in ended], sizes)}
    columns = {name: np.concatenate([run.metrics[name] for _, _, run in ended]) for name in ended[0][2].metrics}
    return Table({**names, **seeds, **columns})


def named(algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]]) -> dict[str, Algorithm[Any]]:
    """The algorithms of a comparison by their labels."""
    names = dict(algorithms) if isinstance(algorithms, Mapping) else {label(method): method for method in algorithms}
    if not names or len(names) != len(algorithms):
        given = [label(method) for method in (algorithms.values() if isinstance(algorithms, Mapping) else algorithms)]
        raise BadInput(f"the algorithms are {given}; expected at least one, each only once, such as 'dude[lr=0.05]'.")
    return names


def runs(
    algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]],
    problem: Problem,
    speeds: SpeedModel,
    *,
    seeds: Sequence[int] | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> Iterator[Ended]:
    """The runs of a comparison, one after the other: label, seed and run."""
    if seeds is not None and (len(seeds) == 0 or len(set(seeds)) != len(seeds)):
        raise BadInput(f"seeds is {list(seeds)}; expected at least one whole number, each only once.")
    for seed in [options.pop("seed", 0)] if seeds is None else seeds:
        mine, pace = (problem, speeds) if seeds is None else (problem.reseeded(seed), reseeded(speeds, seed))
        for name, method in named(algorithms).items():
            place = None if folder is None else Path(folder) / f"{slug(name)}-seed{seed}"
            yield name, seed, simulate(method, mine, pace, seed=seed, folder=place, go_on=True, **options)

"""Several methods on the same problem, speeds, initial weights and minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import Algorithm
from ..core.errors import BadInput, plain_number, require_path, shown
from ..storage.files import save_table
from .grid import Point
from .names import label
from .naming import ProblemOf, SpeedsOf, seeded_problem, seeded_speeds, stem, unvaried
from .sweep import Sweep, computed, warned


def compare(
    algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]],
    problem: ProblemOf,
    speeds: SpeedsOf,
    *,
    seeds: Sequence[int] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    device: str | None = None,
    cores: int | None = None,
    precision: str = "float32",
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Simulate every algorithm with every seed and give one tidy table: a row for each evaluation of each run.

    A seed names split, minibatches, noise, speeds, initial weights and the server's draws alike, as in ``simulate``. A
    problem or speeds that were given a seed of their own, or cannot follow one, stay the same for all ``seeds``, and a
    warning and the table's ``notes`` say so; ``problem`` and ``speeds`` may be functions of the seed instead. The other
    options are those of ``simulate`` and ``sweep``. With a ``folder`` each run has one of its own in it, and what is there
    already is not computed again. A run that fails stands in the table's ``failed``.
    """
    seed = plain_number(seed)
    if seeds is not None and (isinstance(seeds, str) or not isinstance(seeds, Iterable) or seed != 0):
        raise BadInput(
            f"seeds is {shown(seeds)} and seed {shown(seed)}; expected several seeds, seeds=[0, 1, 2], or one, seed=1."
        )
    numbers = [seed] if seeds is None else [plain_number(one) for one in seeds]
    whole = all(isinstance(number, int) for number in numbers)
    if not whole or len(numbers) == 0 or len(set(numbers)) != len(numbers):
        raise BadInput(f"seeds is {shown(numbers)}; expected at least one whole number, each only once.")
    if folder is not None:
        require_path("folder", folder)
    notes, points = warned(unvaried(problem, speeds, numbers)), []
    for number in numbers:
        mine, pace = seeded_problem(problem, number), seeded_speeds(speeds, number)
        for name, method in named(algorithms).items():
            place = None if folder is None else Path(folder) / stem(name, number)
            points.append(Point({"algorithm": name, "seed": number}, method, mine, pace, number, place))
    table = computed(points, device=device, cores=cores, precision=precision, progress=progress, notes=notes, **options)
    if folder is not None:
        save_table(Path(folder) / "comparison.parquet", table.columns)
    return table


def named(algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]]) -> dict[str, Algorithm[Any]]:
    """The algorithms of a comparison by their labels."""
    given: Any = algorithms.values() if isinstance(algorithms, Mapping) else algorithms
    methods: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(method, Algorithm) for method in methods):
        raise BadInput(
            f"the algorithms are {shown(algorithms)}; expected a list of them: [dd.DuDe(lr=0.05), dd.SyncSGD(lr=0.5)]."
        )
    names = dict(algorithms) if isinstance(algorithms, Mapping) else {label(method): method for method in methods}
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise BadInput(f"the algorithms have {shown(name)} for a name; expected a text that can be printed.")
    if not names or len(names) != len(methods):
        labels = [label(method) for method in methods]
        raise BadInput(
            f"the algorithms are {shown(labels)}; expected at least one, each only once, such as 'dude[lr=0.05]'."
        )
    return names

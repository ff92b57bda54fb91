"""A grid of runs, or methods compared: what can be computed together is, and each run has its own result and folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..core import Algorithm, Problem
from ..core.devices import batches
from ..core.draws import Draws
from ..core.errors import BadInput, RunFailed, nearest, plain_number, require_kind, shown
from ..engine.evaluation import require_metrics
from ..engine.metrics import NAMES
from ..engine.result import Run
from ..engine.table import Column, Table
from ..simulation.speeds import SpeedModel
from ..storage.files import save_table
from ..storage.folder import Folder
from ..workers.ray_tasks import Cluster
from .names import describe, label, settings, stem
from .seeds import ProblemOf, seeded_problem, seeded_speeds, unvaried
from .settings import (
    DEFAULT_COMPUTE,
    DEFAULT_EVALUATION,
    DEFAULT_SERVER,
    NO_LINK,
    Compute,
    Evaluation,
    Reporting,
    Saving,
    Server,
    SimulatedFleet,
    SpeedsOf,
    Watch,
)
from .spec import Options, for_this_thread
from .spread import Ends, Keep, Spread, compute_here, one_display, processes_for
from .together import Point, side_by_side

_log = logging.getLogger("dualdelay")
_MOST = 1_000_000  # runs of a grid
_AXES = ("algorithm", "problem", "speeds", "seed")

FleetOf = SpeedsOf | SimulatedFleet
Display = Callable[[Point], AbstractContextManager[Reporting]]


class Named(Protocol):
    """A run of a table by its names and method, computed here or loaded."""

    @property
    def names(self) -> dict[str, Any]: ...
    @property
    def algorithm(self) -> Algorithm[Any] | None: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class NamedRun:
    """A run of a table that is no point of a grid here, by its names and its method."""

    names: dict[str, Any]
    algorithm: Algorithm[Any] | None  # None for a user's own that was loaded
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method


class Sweep(Table):
    """One tidy table of all runs: a row for each evaluation, with the run's place in the grid; ``runs`` holds the runs.

    Its columns are algorithm (a label such as "dude[lr=0.05]"), seed, method ("dude"), lr and every other setting in which
    runs of one method differ (nan or "" for one that does not have it), problem and speeds where there are several, then
    those of ``run.metrics``. ``points`` names the runs in the same order. ``failed`` says why a run did not come to its
    end, by its place in ``runs``; those are None and have no rows, but ``best`` and ``paired`` count them as infinitely
    bad. ``notes`` say what stays the same although the seed varies.
    """

    def __init__(
        self, points: Sequence[Named], runs: Sequence[Run | None], failed: Mapping[int, str], notes: Sequence[str] = ()
    ) -> None:
        self.runs, self.failed, self.notes = list(runs), dict(failed), tuple(notes)
        self.points = [point.names for point in points]
        places = _places(points)
        ended = [(place, run) for place, run in zip(places, runs, strict=True) if run is not None]
        if not ended:
            k, why = next(iter(failed.items()))
            first = f"{label_of(self.points[k])} with seed {self.points[k]['seed']}"
            raise RunFailed(f"no run came to its end. Of the first, {first}: {why}")
        absent = [place for place, run in zip(places, runs, strict=True) if run is None]
        super().__init__(_tidy(ended), list(places[0]), absent)

    @property
    def ended(self) -> list[tuple[str, int, Run]]:
        """The runs that came to their end, each with a label and its seed."""
        pairs = [(names, run) for names, run in zip(self.points, self.runs, strict=True) if run is not None]
        return [(label_of(names), names["seed"], run) for names, run in pairs]

    def settings(self) -> dict[str, dict[str, list[Run | None]]]:
        """The runs of each method, None for those that failed, by the problem and speeds that they share."""
        groups: dict[str, dict[str, list[Run | None]]] = {}
        for names, run in zip(self.points, self.runs, strict=True):
            setting = ", ".join(str(names[name]) for name in ("problem", "speeds") if name in names)
            groups.setdefault(setting, {}).setdefault(str(names["algorithm"]), []).append(run)
        return groups


def one_table(name: str, run: Run) -> Table:
    """The table of one run's figure."""
    known = {} if run.algorithm is None else settings(run.algorithm)
    return Sweep([NamedRun({"algorithm": name, "seed": 0}, run.algorithm, known)], [run], {})


def _tidy(ended: Sequence[tuple[Mapping[str, Any], Run]]) -> dict[str, Column]:
    """The columns of one table of all evaluations of all runs, each row with its run's names."""
    sizes = [len(run.metrics) for _, run in ended]
    names = {name: np.repeat([names[name] for names, _ in ended], sizes) for name in ended[0][0]}
    return names | {name: np.concatenate([run.metrics[name] for _, run in ended]) for name in ended[0][1].metrics}


def _places(points: Sequence[Named]) -> list[dict[str, Any]]:
    """The names of each point with its method, its step and each setting in which runs of one method differ."""
    taken = (*_AXES, "method", *NAMES)
    known = [{k: _plain(v) for k, v in point.settings.items() if k not in taken} for point in points]
    methods = [_method(point) for point in points]
    values: dict[tuple[str, str], set[str]] = {}  # by method and setting
    for method, own in zip(methods, known, strict=True):
        for name, value in own.items():
            values.setdefault((method, name), set()).add(json.dumps(value))
    several = {name for (_, name), found in values.items() if len(found) > 1} | {"lr"}
    names = [name for name in dict.fromkeys(itertools.chain(*known)) if name in several]
    places = []
    for point, method, own in zip(points, methods, known, strict=True):
        place = {name: value for name, value in point.names.items() if name in ("algorithm", "seed")}
        place |= {"method": method} if "algorithm" in place else {}
        places.append({**place, **{name: own.get(name) for name in names}, **point.names})
    for name in names:  # a column has values of one kind
        column = [_plain(place[name]) for place in places]
        numbers = all(isinstance(value, (int, float)) for value in column if value is not None)
        if not numbers or None in column:
            for place, value in zip(places, column, strict=True):
                missing = math.nan if numbers else ""
                text = value if isinstance(value, str) else json.dumps(value)
                place[name] = missing if value is None else float(value) if numbers else text
    return places


def _method(point: Named) -> str:
    """The name of a point's method: that of its class, or a text of the user's own."""
    text = str(point.names.get("algorithm", ""))
    return text.partition("[")[0] if point.algorithm is None or text == label(point.algorithm) else text


def _plain(value: Any) -> Any:
    """A setting as a number, a text or None."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return label(value)


def label_of(names: Mapping[str, Any]) -> str:
    """A run's names in one text, but for the seed."""
    return ", ".join(str(names[name]) for name in ("algorithm", "problem", "speeds") if name in names)


def sweep(
    grid: Mapping[str, Sequence[Any]],
    problem: ProblemOf | None = None,
    speeds: FleetOf | None = None,
    *,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    watch: Sequence[Watch] | Reporting = (),
    folder: str | Path | Saving | None = None,
    checkpoint_every: int | None = None,
    evaluation: Evaluation = DEFAULT_EVALUATION,
    compute: Compute = DEFAULT_COMPUTE,
    server: Server = DEFAULT_SERVER,
    on: Cluster | None = None,
) -> Sweep:
    """Simulate every point of a grid and give one tidy table.

    Arguments:
        grid: maps "algorithm", "problem", "speeds", "seed", or a setting of the algorithms such as "lr", to the values it
            takes; all combinations are run.
        problem, speeds: those of all runs, where the grid has none; they may be functions of the seed.
        folder: each run has a folder of its own in it, and what is there already is not computed again.
        on: a ``dd.Cluster`` whose machines compute the runs; None: this machine.

    The others are those of ``simulate``. A seed names every random choice of a run; what cannot follow it stays the same,
    and a warning and the table's ``notes`` say so. A run that fails is left out of the table and stands in its ``failed``.

    On the processor runs go side by side in as many processes as there are cores, once the sweep has taken a second and
    will take more than three; ``dd.Compute(cores=1)`` keeps them in this one, and so do ``watch`` and loggers, which are
    called here. Each computes what it computes alone, so no bit depends on how many processes or machines there are. On a
    GPU, or with ``dd.Compute(batch=True)``, runs that share a schedule advance together and the gradients of all are taken
    in as few calls as possible, unless there are loggers; their results are those of single runs to rounding, in exactly
    the same order of arrivals. Functions that watch are called for each run with a state of its own, always the same
    object.

    Example:
        >>> table = dd.sweep({"algorithm": [dd.DuDe(lr=0.05)], "lr": [0.01, 0.05], "seed": [0, 1]},
        ...                  dd.Digits(workers=10), dd.TruncatedNormalSpeeds(10, std=5.0), updates=1000)
    """
    saving = Saving.of(folder, checkpoint_every)
    if not isinstance(grid, Mapping):
        raise BadInput(
            f"the grid is {shown(grid)}; expected lists by name: {{'algorithm': [dd.DuDe(lr=0.05)], 'seed': [0, 1]}}."
        )
    points, notes = grid_points(grid, problem, speeds, saving.path, plain_number(seed))
    options = Options(updates, time, saving, evaluation, compute, server)
    return _with_warnings(run_points(points, options, watch=Reporting.of(watch), notes=notes, on=on))


def _with_warnings(table: Sweep) -> Sweep:
    """The same, after a warning for each run that did not come to its end."""
    for k, why in table.failed.items():
        names = table.points[k]
        _log.warning("%s with seed %s did not come to its end: %s", label_of(names), names["seed"], why)
    return table


def compare(
    algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]],
    problem: ProblemOf,
    speeds: FleetOf,
    *,
    seeds: Sequence[int] = (0,),
    updates: int | None = None,
    time: float | None = None,
    watch: Sequence[Watch] | Reporting = (),
    folder: str | Path | Saving | None = None,
    checkpoint_every: int | None = None,
    evaluation: Evaluation = DEFAULT_EVALUATION,
    compute: Compute = DEFAULT_COMPUTE,
    server: Server = DEFAULT_SERVER,
    on: Cluster | None = None,
) -> Sweep:
    """Simulate every algorithm with every seed and give one tidy table: a sweep over methods and seeds.

    Arguments:
        algorithms: the methods, or methods by the names that the table calls them.
        seeds: a run of each method for each, such as range(3); a seed names split, minibatches, noise, speeds, initial
            weights and the server's draws alike.

    The others are those of ``sweep``.

    Example:
        >>> table = dd.compare([dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], dd.Digits(workers=10),
        ...                    dd.TruncatedNormalSpeeds(10, std=5.0), seeds=[0, 1, 2], time=500)
    """
    saving, methods = Saving.of(folder, checkpoint_every), named(algorithms)
    alone = plain_number(seeds)
    if isinstance(alone, int):
        several, one = f"seeds=range({shown(alone)})", f"seeds=[{shown(alone)}]"
        raise BadInput(
            f"seeds is {shown(alone)}, which may mean so many seeds or this one; expected a list: {several} or {one}."
        )
    if isinstance(alone, str) or not isinstance(alone, Iterable):
        raise BadInput(f"seeds is {shown(alone)}; expected a list of seeds: seeds=[0, 1, 2].")
    numbers = [plain_number(one) for one in seeds]
    if not all(isinstance(one, int) for one in numbers) or not numbers or len(set(numbers)) != len(numbers):
        raise BadInput(f"seeds is {shown(numbers)}; expected at least one whole number, each only once.")
    grid = {"seed": numbers, "algorithm": list(methods.values())}
    points, notes = grid_points(grid, problem, speeds, saving.path, 0, list(methods))
    options = Options(updates, time, saving, evaluation, compute, server)
    table = _with_warnings(run_points(points, options, watch=Reporting.of(watch), notes=notes, on=on))
    if saving.path is not None:
        save_table(saving.path / "comparison.parquet", table)
    return table


def grid(kind: type[Algorithm[Any]], **settings: Any) -> list[Algorithm[Any]]:
    """A method with every combination of settings, each one value or a list of them: a grid of its own for each method.

    Example:
        >>> methods = [*dd.grid(dd.DuDe, lr=[0.01, 0.05], wait_for=[1, 3]), *dd.grid(dd.FedBuff, lr=0.05, buffer=[3, 5])]
        >>> table = dd.compare(methods, dd.Digits(workers=10), dd.TruncatedNormalSpeeds(10, std=5.0), time=100)
    """
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise BadInput(f"the grid is of {shown(kind)}; expected a method's class, such as dd.DuDe.")
    known = [field.name for field in fields(kind) if field.init]
    for name in settings:
        if name not in known:
            raise BadInput(f"the grid has {name!r}, which {kind.__name__} does not; {nearest(name, known)}")
    lists = {name: _values(name, value) for name, value in settings.items()}
    return [kind(**dict(zip(lists, chosen, strict=True))) for chosen in itertools.product(*lists.values())]


def _values(name: str, value: Any) -> list[Any]:
    """The values of a setting: those of a list, or the one that was given."""
    if getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist"):  # numbers of numpy's or torch's
        value = value.tolist()
    values = [plain_number(one) for one in value] if isinstance(value, (list, tuple, range)) else [plain_number(value)]
    if not values:
        raise BadInput(f"the grid's {name!r} is {shown(value)}; expected a value, or a list of at least one.")
    return values


def named(algorithms: Sequence[Algorithm[Any]] | Mapping[str, Algorithm[Any]]) -> dict[str, Algorithm[Any]]:
    """The algorithms of a comparison by their labels."""
    several: Any = algorithms.values() if isinstance(algorithms, Mapping) else algorithms
    methods: list[Any] = list(several) if isinstance(several, Iterable) else [None]
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


def grid_points(
    grid: Mapping[str, Sequence[Any]],
    problem: ProblemOf | None,
    speeds: FleetOf | None,
    folder: Path | None,
    seed: int,
    labels: Sequence[str] | None = None,
) -> tuple[list[Point], list[str]]:
    """Every point of the grid, and what does not vary with the seed; ``labels`` are the names of the algorithms."""
    axes = _axes(grid, problem, speeds)
    seeds = axes.get("seed", [seed])
    constant: list[str] = []
    for one, other in itertools.product(axes["problem"], axes["speeds"]):
        constant += [what for what in unvaried(one, SimulatedFleet.of(other).speeds, seeds) if what not in constant]
    return list(_points(axes, seeds, folder, labels)), warn_of_constant(constant)


def warn_of_constant(constant: Sequence[str]) -> list[str]:
    """Warn of what does not vary with the seed; returns the warning as a note."""
    notes = [f"the same for all seeds: {' and '.join(constant)}; the spread is that of the rest alone"] if constant else []
    for note in notes:
        own = "leave its own seed out, or " if "of its own" in note else ""
        how = f"{own}pass a function: problem=lambda seed: ..., speeds=lambda seed: ..."
        warnings.warn(f"{note}. To vary it, {how}", stacklevel=4)
    return notes


def _axes(grid: Mapping[str, Sequence[Any]], problem: ProblemOf | None, speeds: FleetOf | None) -> dict[str, list[Any]]:
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
    return axes


def _points(
    axes: Mapping[str, list[Any]], seeds: Sequence[int], folder: Path | None, labels: Sequence[str] | None
) -> Iterator[Point]:
    """Every point of the grid, its names chosen so that no two are alike."""
    settings = [name for name in axes if name not in _AXES]
    problems = {(i, seed): seeded_problem(given, seed) for i, given in enumerate(axes["problem"]) for seed in seeds}
    fleets = {(j, seed): _seeded_fleet(given, seed) for j, given in enumerate(axes["speeds"]) for seed in seeds}
    texts = {
        "problem": _told_apart([problems[i, seeds[0]] for i in range(len(axes["problem"]))]),
        "speeds": _told_apart([fleets[j, seeds[0]].speeds for j in range(len(axes["speeds"]))]),
    }
    require_place(folder)
    seen: set[tuple[Any, ...]] = set()
    paths: set[Path | None] = set()
    for chosen in itertools.product(*(range(len(values)) for values in axes.values())):
        at = dict(zip(axes, chosen, strict=True))
        seed = axes["seed"][at["seed"]] if "seed" in axes else seeds[0]
        own = {name: axes[name][at[name]] for name in settings}
        method = _with_settings(axes["algorithm"][at["algorithm"]], own)
        name = label(method) if labels is None else labels[at["algorithm"]]
        several = {axis: text[at[axis]] for axis, text in texts.items() if len(text) > 1}
        names = {"algorithm": name, "seed": seed, **own, **several}
        key = (name, seed, *(at[axis] for axis in several))
        if key in seen:
            raise BadInput(f"the grid has {names} twice; expected every run only once.")
        seen.add(key)
        problem, fleet = problems[at["problem"], seed], fleets[at["speeds"], seed]
        given: dict[str, Problem | SimulatedFleet] = {"problem": problem, "speeds": fleet}
        places = [] if folder is None else [place_of(axes[axis][at[axis]], given[axis]) for axis in several]
        path = path_of(folder, name, seed, places, problem, fleet)
        if path in paths:
            raise BadInput(f"the grid has the run {path} twice, for a problem or speeds that are the same; give each once.")
        paths |= {path} - {None}
        yield Point(names, method, problem, fleet, seed, path)


def place_of(given: Any, thing: Problem | SimulatedFleet) -> str:
    """What tells a problem or speeds from the others in folders' names, whatever else is in the grid, and in which order.

    That is its label, as it was given and so without the run's seed; a digest of its own for what a label does not tell.
    """
    shown_as: Any
    if isinstance(thing, Problem):
        shown_as = given if isinstance(given, Problem) else thing
        own = "" if given is shown_as and "name" in describe(given) else thing.fingerprint()
    else:
        speeds = getattr(given, "speeds", given)
        shown_as = speeds if isinstance(speeds, SpeedModel) else thing.speeds
        own = "" if "name" in describe(shown_as) else repr(describe(shown_as))
        if thing.link != NO_LINK or thing.changes:
            own += repr(
                (describe(thing.link), [(change.kind.value, change.worker, change.time) for change in thing.changes])
            )
    return f"{label(shown_as)} {hashlib.sha256(own.encode()).hexdigest()[:16]}" if own else label(shown_as)


_BY_POSITION = re.compile(r"-(problem|speeds)\d+-(speeds\d+-)?seed\d+")


def path_of(
    folder: Path | None, name: str, seed: int, places: Sequence[str], problem: Problem, fleet: SimulatedFleet
) -> Path | None:
    """The folder of a run among those of others; ``places`` tell its problem and its speeds from several.

    A run that was computed when there was but one problem or one kind of speeds has a shorter name, and is the same run.
    """
    if folder is None:
        return None
    path = folder / stem(name, seed, *places)
    fewer = [some for count in range(len(places)) for some in itertools.combinations(places, count)]
    alone = [folder / stem(name, seed, *some) for some in fewer]
    there = [] if path.exists() else [other for other in alone if other.exists() and _is_of(other, problem, fleet)]
    return there[0] if there else path


def _is_of(path: Path, problem: Problem, fleet: SimulatedFleet) -> bool:
    """Whether a folder holds a run of this problem and these speeds."""
    try:
        record = Folder(path).record()
    except BadInput:  # whatever it is, it is not such a run
        return False
    changes = [[change.kind.value, change.worker, change.time] for change in fleet.changes]
    same = record.speeds == describe(fleet.speeds) and record.link == describe(fleet.link) and record.changes == changes
    return same and record.problem == describe(problem) and record.fingerprint == problem.fingerprint()


def require_place(folder: Path | None) -> None:
    """Refuse a folder that is a run's own, or whose runs are named by places in a list, as they once were."""
    if folder is None or not folder.is_dir():
        return
    if (folder / "config.json").exists():
        raise BadInput(
            f"{folder} is the folder of a single run, and runs that are compared have folders of their own in a common "
            "one; choose another."
        )
    if old := [path.name for path in folder.iterdir() if _BY_POSITION.search(path.name)]:
        raise BadInput(
            f"{folder} holds runs of an earlier version, such as {old[0]}, which are named by the place of their problem "
            "or speeds in a list: a longer list would take one for another. Choose another folder; they can be loaded."
        )


def _seeded_fleet(given: FleetOf, seed: int) -> SimulatedFleet:
    fleet = SimulatedFleet.of(given)
    return replace(fleet, speeds=seeded_speeds(fleet.speeds, seed))


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


def run_points(
    points: Sequence[Point],
    options: Options,
    *,
    watch: Reporting | None = None,
    display: Display | None = None,
    notes: Sequence[str] = (),
    on: Cluster | None = None,
    here: bool = False,
    keep: Keep | None = None,
) -> Sweep:
    """The runs of these points; ``display`` shows a run that is computed by itself, one after the other.

    They are computed in this process and others, in this one alone if it is to be ``here``, or ``on`` a cluster. ``keep``
    is given each run that has ended, or None and why there is none.
    """
    reporting = watch or Reporting(progress=False)
    if on is not None:
        require_kind("on", on, Cluster, "dd.Cluster('10.0.0.5:6379')")
    _require_sound(points, options)
    most = 0.0

    def tell(share: float, text: str) -> None:
        nonlocal most
        most = max(most, share)  # a run that must be done again is no step back
        if reporting.report is not None:
            reporting.report(most, text)

    tell(0.0, "")
    ends = Ends(points, keep)
    by_itself = reporting.watch or reporting.log or here
    if on is not None and by_itself:
        raise BadInput(
            "watch and log are functions of this process, and the runs are to be computed on a cluster; leave them out, or "
            "compute here. What a run did is in its trace."
        )
    device = options.compute.device or "cpu"
    if on is None and batches(device, options.compute.batch) and not (reporting.log or here):
        with ExitStack() as stack:  # problems that a run of another thread computes in have twins here
            problems = {id(point.problem): point.problem for point in points}
            own = {key: stack.enter_context(for_this_thread(problem)) for key, problem in problems.items()}
            at_once = [replace(point, problem=own[id(point.problem)]) for point in points]
            ends.add_all(side_by_side(at_once, options, reporting.watch, tell))
    left = [k for k in range(len(points)) if k not in ends]
    processes = 1 if by_itself else processes_for(points, options.compute, len(left))
    if on is not None or processes > 1:
        with one_display(reporting, tell) as show:
            Spread(points, options, ends, left, show).run(on, processes)
    else:
        for k in left:
            tell(ends.share, "")
            with nullcontext(reporting) if display is None else display(points[k]) as shown_to:
                compute_here(points[k], options, shown_to, ends, k)
    tell(1.0, "")
    return Sweep(points, [ends.runs.get(k) for k in range(len(points))], dict(sorted(ends.failed.items())), notes)


def _require_sound(points: Sequence[Point], options: Options) -> None:
    """Refuse what cannot run before anything is computed."""
    for point in points:
        point.algorithm.init(torch.empty(1), point.problem.workers, Draws(point.seed, "server"))
    metrics, stop = options.evaluation.metrics, options.evaluation.early_stop
    for point in points[:1]:
        require_metrics(metrics, point.problem)
        own_metrics = (*point.problem.metric_names, *point.problem.joint_metric_names)
        taken = sorted({*(metrics or ()), *own_metrics} & {*_places(points)[0]})
        if taken:
            raise BadInput(f"metrics has {taken}, which name the runs of the table; choose other names.")
    if stop is not None:
        stop(Table({name: np.zeros(1) for name in (*NAMES, *(metrics or ()))}))

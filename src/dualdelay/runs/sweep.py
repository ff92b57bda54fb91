"""A grid of runs: what can be computed together is, and each run has its own result and folder."""

from __future__ import annotations

import inspect
import itertools
import time as clock
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core import Problem
from ..core.devices import batches, require_device, using_precision, using_threads
from ..core.draws import Draws
from ..core.errors import BadInput, NotSaved, RunFailed, nearest, plain_number, require_kind, require_path, shown
from ..engine.evaluation import NAMES, require_metrics
from ..engine.result import EarlyStop, Run
from ..engine.trace import Column, Table
from ..simulation.gradients import Round
from .grid import Point
from .grid import points as grid_points
from .groups import Group, Replica, advance_all
from .naming import ProblemOf, SpeedsOf, unvaried
from .plan import Plan
from .portions import grouped, portions
from .run import simulate
from .setup import borrowed

Report = Callable[[float, str], None]
_ALONE = ("watch", "log", "optimizer", "schedule")  # what a run must be by itself for


Ended = tuple[str, int, Run]  # label, seed and run
Shown = Callable[[Point], AbstractContextManager[Mapping[str, Any]]]


def one_table(label: str, run: Run) -> Table:
    """The table of one run's figure."""
    return Table(tidy([({"algorithm": label, "seed": 0}, run)]))


def tidy(ended: Sequence[tuple[Mapping[str, Any], Run]]) -> dict[str, Column]:
    """The columns of one table of all evaluations of all runs, each row with its run's names."""
    sizes = [len(run.metrics) for _, run in ended]
    names = {name: np.repeat([names[name] for names, _ in ended], sizes) for name in ended[0][0]}
    return names | {name: np.concatenate([run.metrics[name] for _, run in ended]) for name in ended[0][1].metrics}


class Sweep(Table):
    """One tidy table of all runs: a row for each evaluation, with the run's place in the grid; ``runs`` holds the runs.

    ``points`` names them in the same order. ``failed`` says why a run did not come to its end, by its place in ``runs``;
    those are None and have no rows. ``notes`` say what stays the same although the seed varies.
    """

    def __init__(
        self, points: Sequence[Point], runs: Sequence[Run | None], failed: Mapping[int, str], notes: Sequence[str] = ()
    ) -> None:
        self.runs, self.failed, self.notes = list(runs), dict(failed), tuple(notes)
        self.points = [point.names for point in points]
        ended = [(point.names, run) for point, run in zip(points, runs, strict=True) if run is not None]
        if not ended:
            raise RunFailed(f"no run came to its end; the first says: {next(iter(failed.values()))}")
        super().__init__(tidy(ended))

    @property
    def ended(self) -> list[Ended]:
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


def label_of(names: Mapping[str, Any]) -> str:
    """A run's names in one text, but for the seed."""
    return ", ".join(str(names[name]) for name in ("algorithm", "problem", "speeds") if name in names)


def sweep(
    grid: Mapping[str, Sequence[Any]],
    problem: ProblemOf | None = None,
    speeds: SpeedsOf | None = None,
    *,
    folder: str | Path | None = None,
    device: str | None = None,
    cores: int | None = None,
    precision: str = "float32",
    batch: bool | None = None,
    memory: float | None = None,
    report: Report | None = None,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Simulate every point of a grid and give one tidy table.

    ``grid`` maps "algorithm", "problem", "speeds", "seed", or a setting of the algorithms such as "lr", to the values it
    takes; all combinations are run. A seed names every random choice of a run, as in ``simulate``; what cannot follow it
    stays the same, and a warning and the table's ``notes`` say so. Problems and speeds may be functions of the seed. On a
    GPU, or with ``batch``, runs that share a schedule advance together and
    the gradients of all are taken in as few calls as possible; their results are those of single runs to rounding, in
    exactly the same order of arrivals. Elsewhere they are computed one after the other. With a ``folder`` each run has one
    of its own in it, and what is there already is not computed again. What needs more than ``memory`` bytes, by default
    half of what is free, runs in parts. ``report`` is told the share that is done and what is going on, or nothing while a
    run is computed by itself; ``options`` are those of ``simulate``. A run that fails is left out of the table and stands
    in its ``failed``.
    """
    seed = plain_number(options.pop("seed", 0))
    if folder is not None:
        require_path("folder", folder)
    if not isinstance(grid, Mapping):
        raise BadInput(
            f"the grid is {shown(grid)}; expected lists by name: {{'algorithm': [dd.DuDe(lr=0.05)], 'seed': [0, 1]}}."
        )
    points = list(grid_points(grid, problem, speeds, None if folder is None else Path(folder), seed))
    notes: list[str] = []
    for one in grid.get("problem", [problem]):
        for other in grid.get("speeds", [speeds]):
            notes += [note for note in unvaried(one, other, grid.get("seed", [seed])) if note not in notes]
    where: dict[str, Any] = {"device": device, "cores": cores, "precision": precision, "batch": batch, "memory": memory}
    return computed(points, report=report, progress=progress, notes=warned(notes), **where, **options)


def warned(unvaried: Sequence[str]) -> list[str]:
    """Warn of what does not vary with the seed; returns the warning as a note."""
    notes = [f"the same for all seeds: {' and '.join(unvaried)}; the spread is that of the rest alone"] if unvaried else []
    for note in notes:
        own = "leave its own seed out, or " if "of its own" in note else ""
        how = f"{own}pass a function: problem=lambda seed: ..., speeds=lambda seed: ..."
        warnings.warn(f"{note}. To vary it, {how}", stacklevel=3)
    return notes


def computed(
    points: Sequence[Point],
    *,
    cores: int | None = None,
    memory: float | None = None,
    report: Report | None = None,
    shown: Shown | None = None,
    progress: bool = False,
    notes: Sequence[str] = (),
    **options: Any,
) -> Sweep:
    """The runs of these points; ``shown`` gives more options for a run that is computed by itself."""
    known = set(inspect.signature(simulate).parameters) - {"algorithm", "problem", "speeds", "seed", "folder", "go_on"}
    for name in options:
        if name not in known:
            raise BadInput(f"the runs have no option {name!r}; {nearest(name, known)}")
    device, batch = options.get("device"), options.get("batch")
    require_device(device or "cpu", options.get("precision", "float32"))
    _require_sound(points, options)
    total, most = len(points), 0.0

    def tell(share: float, text: str) -> None:
        nonlocal most
        most = max(most, share)  # a run that must be done again is no step back
        if report is not None:
            report(most, text)

    tell(0.0, "")
    runs: dict[int, Run] = {}
    if batches(device or "cpu", batch) and not any(options.get(name) for name in _ALONE):
        with ExitStack() as stack:  # problems that a run of another thread computes in have twins here
            mine = {id(one): stack.enter_context(borrowed(one)) for one in dict.fromkeys(point.problem for point in points)}
            runs = _side_by_side(
                [replace(point, problem=mine[id(point.problem)]) for point in points], options, memory, tell
            )
    failed: dict[int, str] = {}
    for k, point in enumerate(points):
        if k not in runs:
            tell((len(runs) + len(failed)) / total, "")
            what = {**options, "seed": point.seed, "folder": point.path, "go_on": True, "cores": cores}
            try:
                with nullcontext({"progress": progress}) if shown is None else shown(point) as more:
                    runs[k] = simulate(point.algorithm, point.problem, point.speeds, **what, **more)
            except RunFailed as error:
                failed[k] = str(error)
            except BadInput as error:  # of the first run it is the user's; later it is that run's own, and others are done
                if not runs:
                    raise
                failed[k] = str(error)
    tell(1.0, "")
    return Sweep(points, [runs.get(k) for k in range(total)], failed, notes)


def _require_sound(points: Sequence[Point], options: Mapping[str, Any]) -> None:
    """Refuse what cannot run before anything is computed."""
    for point in points:
        point.algorithm.init(torch.empty(1), point.problem.workers, Draws(point.seed, "server"))
    metrics = options.get("metrics")
    for point in points[:1]:
        require_metrics(metrics, point.problem)
        taken = sorted({*(metrics or ()), *point.problem.columns} & {*point.names})
        if taken:
            raise BadInput(f"metrics has {taken}, which name the runs of the table; choose other names.")
    stop = options.get("stop")
    if stop is not None:
        require_kind("stop", stop, EarlyStop, "dd.EarlyStop(patience=5)")
        stop(Table({name: np.zeros(1) for name in (*NAMES, *(options.get("metrics") or ()))}))


def _side_by_side(
    points: Sequence[Point], options: Mapping[str, Any], memory: float | None, tell: Report
) -> dict[int, Run]:
    """The runs that could be computed together."""
    placed: dict[tuple[int, bool], Problem] = {}
    replicas: dict[int, Replica] = {}
    runs: dict[int, Run] = {}
    chosen = {name: value for name, value in options.items() if name not in _ALONE}
    for k, point in enumerate(points):
        kind = (id(point.problem), point.algorithm.exact)
        problem = placed.get(kind, point.problem)  # on its device once, however many runs it has
        plan = Plan(point.algorithm, problem, point.speeds, seed=point.seed, **chosen)
        placed[kind] = plan.problem
        replicas[k] = Replica(plan, point.path)
    fingerprints: dict[int, str] = {}  # by problem, since they take long for much data
    for replica in replicas.values():
        problem = replica.plan.problem
        if replica.path is not None and id(problem) not in fingerprints:
            fingerprints[id(problem)] = problem.fingerprint()
        replica.prepare(fingerprints.get(id(problem), ""), len(replicas))
    groups = grouped({k: replica for k, replica in replicas.items() if not replica.ended})  # those are only to be read
    parts = portions(groups, replicas, memory)
    for part in parts:

        def report(share: float, part: Sequence[Sequence[int]] = part) -> None:
            count = sum(len(group) for group in part)
            text = f"{count} runs side by side" + (f", in {len(parts)} parts" if len(parts) > 1 else "")
            tell((len(runs) + share * count) / len(points), text)

        _compute([[replicas[k] for k in group] for group in part], report)
        for k in itertools.chain(*part):
            run = replicas.pop(k).run
            if run is not None:
                runs[k] = run
    return runs


def _compute(groups: Sequence[Sequence[Replica]], tell: Callable[[float], None]) -> None:
    """Bring groups to their ends side by side."""
    config = groups[0][0].plan.config
    problems: dict[Hashable, list[Problem]] = {}
    for replica in itertools.chain(*groups):
        kin = problems.setdefault(_kind(replica), [])
        if all(replica.plan.problem is not other for other in kin):
            kin.append(replica.plan.problem)
    told = clock.monotonic()

    def report(share: float) -> None:
        nonlocal told
        if clock.monotonic() - told > 0.2:
            told = clock.monotonic()
            tell(share)

    with using_precision(config["device"], config["precision"]), using_threads(config["threads"]):
        try:
            turns = {kind: Round(some[0].together(some)) for kind, some in problems.items()}
            made = []
            for group in groups:
                kin = problems[_kind(group[0])]
                which = [next(i for i, p in enumerate(kin) if p is replica.plan.problem) for replica in group]
                made.append(Group(group, turns[_kind(group[0])], which))
            advance_all(made, list(turns.values()), report)
        except (BadInput, NotSaved):
            raise
        except Exception as error:  # whoever is to blame says so when the runs are computed one by one
            warnings.warn(f"the runs could not be computed side by side ({error}): now one after the other.", stacklevel=5)


def _kind(replica: Replica) -> Hashable:
    """Equal for runs whose gradients can be taken in one call."""
    return replica.plan.problem.kin, len(replica.plan.x), replica.plan.x.dtype

"""A grid of runs: what can be computed together is, and each run has its own result and folder."""

from __future__ import annotations

import itertools
import json
import time as clock
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import describe
from .core import Problem
from .devices import free_memory, using_precision
from .draws import Draws
from .errors import BadInput, RunFailed
from .fleet import using_threads
from .gradients import Round
from .grid import Point
from .grid import points as grid_points
from .groups import Group, Replica, advance_all
from .plan import Plan
from .result import Run
from .run import simulate
from .sharing import can_share
from .speeds import SpeedModel
from .trace import Table

Report = Callable[[float, str], None]
_ALONE = ("watch", "log", "optimizer", "schedule")  # what a run must be by itself for
_SPARE = 0.5  # the share of free memory that states may take; the rest is for gradients
_AT_ONCE = 256  # replicas in a group


class Sweep(Table):
    """One tidy table of all runs: a row for each evaluation, with the run's place in the grid; ``runs`` holds the runs.

    ``failed`` says why a run could not be brought to its end, by its place in ``runs``; those have no rows.
    """

    def __init__(self, points: Sequence[Point], runs: Sequence[Run | None], failed: Mapping[int, str]) -> None:
        self.runs, self.failed = list(runs), dict(failed)
        self.points = [point.names for point in points]
        ended = [(point.names, run) for point, run in zip(points, runs, strict=True) if run is not None]
        if not ended:
            raise RunFailed(f"no run came to its end; the first says: {next(iter(failed.values()))}")
        sizes = [len(run.metrics) for _, run in ended]
        names = {name: np.repeat([names[name] for names, _ in ended], sizes) for name in ended[0][0]}
        columns = {name: np.concatenate([run.metrics[name] for _, run in ended]) for name in ended[0][1].metrics}
        super().__init__({**names, **columns})


def sweep(
    grid: Mapping[str, Sequence[Any]],
    problem: Problem | None = None,
    speeds: SpeedModel | None = None,
    *,
    folder: str | Path | None = None,
    device: str | None = None,
    cores: int | None = None,
    precision: str = "float32",
    batch: bool | None = None,
    memory: float | None = None,
    report: Report | None = None,
    **options: Any,
) -> Sweep:
    """Simulate every point of a grid and give one tidy table.

    ``grid`` maps "algorithm", "problem", "speeds", "seed", or a setting of the algorithms such as "lr", to the values it
    takes; all combinations are run. A seed names split, minibatches, noise, speeds and initial weights alike; without one
    problem and speeds are taken as they are. On a GPU, or with ``batch``, runs that share a schedule advance together and
    the gradients of all are taken in as few calls as possible; their results are those of single runs to rounding, in
    exactly the same order of arrivals. Elsewhere they are computed one after the other. With a ``folder`` each run has one
    of its own in it, and what is there already is not computed again. What needs more than ``memory`` bytes, by default
    half of what is free, runs in parts. ``report`` is told the share that is done and what is going on; ``options`` are
    those of ``simulate``. A run that fails is left out of the table and named in ``failed``.
    """
    points = list(grid_points(grid, problem, speeds, None if folder is None else Path(folder), options.pop("seed", 0)))
    options |= {"device": device, "precision": precision, "batch": batch}
    tell = report or (lambda share, text: None)
    on = torch.device(device).type == "cuda" if batch is None and device is not None else bool(batch)
    together = on and not any(options.get(name) for name in _ALONE)
    runs: dict[int, Run] = {}
    if together:
        runs = _side_by_side(points, options, memory, tell)
    failed: dict[int, str] = {}
    for k, point in enumerate(points):
        if k not in runs:
            tell(k / len(points), f"run {k + 1} of {len(points)}")
            try:
                runs[k] = simulate(
                    *(point.algorithm, point.problem, point.speeds),
                    **{**options, "seed": point.seed, "folder": point.path, "go_on": True, "cores": cores},
                )
            except RunFailed as error:
                failed[k] = str(error)
    tell(1.0, "done")
    return Sweep(points, [runs.get(k) for k in range(len(points))], failed)


def _side_by_side(
    points: Sequence[Point], options: Mapping[str, Any], memory: float | None, tell: Report
) -> dict[int, Run]:
    """The runs that could be computed together."""
    placed: dict[int, Problem] = {}
    replicas: dict[int, Replica] = {}
    runs: dict[int, Run] = {}
    chosen = {name: value for name, value in options.items() if name not in _ALONE}
    for k, point in enumerate(points):
        if point.path is not None and (point.path / "result.json").exists():
            continue  # it has ended: reading it is all there is to do
        try:
            plan = Plan(
                point.algorithm, placed.get(id(point.problem), point.problem), point.speeds, seed=point.seed, **chosen
            )
        except TypeError as error:
            raise BadInput(f"the sweep cannot be told that: {error}.") from None
        placed[id(point.problem)] = plan.problem
        replicas[k] = Replica(plan, point.path)
    groups = _grouped(replicas)
    for number, part in enumerate(parts := _parts(groups, replicas, memory)):
        _compute([[replicas[k] for k in group] for group in part], number, len(parts), tell)
        for k in itertools.chain(*part):
            run = replicas.pop(k).run
            if run is not None:
                runs[k] = run
    return runs


def _grouped(replicas: Mapping[int, Replica]) -> list[list[int]]:
    """The runs by what decides their schedule; those that cannot share one are left out."""
    groups: dict[str, list[int]] = {}
    trials: dict[str, bool] = {}
    for k, replica in replicas.items():
        plan = replica.plan
        kind = json.dumps({**describe(plan.algorithm), "lr": None, "n": plan.problem.workers}, default=repr)
        if kind not in trials:
            trials[kind] = can_share(plan.algorithm, plan.problem.workers)
        if trials[kind]:
            shape = (str(plan.x.dtype), len(plan.x), [plan.problem.batches(w) for w in range(plan.problem.workers)])
            schedule = [kind, describe(plan.speeds), plan.seed, shape, repr(plan.problem.kin)]
            groups.setdefault(json.dumps(schedule, default=repr), []).append(k)
    return [group[i : i + _AT_ONCE] for group in groups.values() for i in range(0, len(group), _AT_ONCE)]


def bytes_of(plan: Plan) -> int:
    """The memory that a run's state, models in flight and known gradients take."""
    n, x = plan.problem.workers, plan.x
    state = plan.algorithm.init(torch.empty_like(x, device="meta"), n, Draws(plan.seed, "server"))
    half = 0.5 if plan.table == "half" else 0.0 if plan.table == "host" else 1.0
    total = 2.0 * n * x.nbytes
    for f in fields(state):
        value = getattr(state, f.name)
        total += value.nbytes if isinstance(value, torch.Tensor) else 0
        total += half * sum(row.nbytes for row in value if isinstance(row, torch.Tensor)) if isinstance(value, list) else 0
    return int(total)


def _parts(groups: Sequence[Sequence[int]], replicas: Mapping[int, Replica], memory: float | None) -> list[list[list[int]]]:
    """The groups in portions that fit into memory one after the other; a group that does not is divided."""
    if not groups:
        return []
    room = _SPARE * free_memory(replicas[groups[0][0]].plan.x.device) if memory is None else memory
    parts: list[list[list[int]]] = [[]]
    used, total = 0, 0
    for group in groups:
        for k in group:
            size = bytes_of(replicas[k].plan)
            total += size
            if used + size > room and parts[-1]:
                parts.append([])
                used = 0
            same = parts[-1] and parts[-1][-1][0] in group
            if same:
                parts[-1][-1].append(k)
            else:
                parts[-1].append([k])
            used += size
    if len(parts) > 1:
        warnings.warn(
            f"the {len(replicas)} runs need about {total / 1e9:.3g} GB and {room / 1e9:.3g} GB are theirs to take: they "
            f"run in {len(parts)} parts, one after the other.",
            stacklevel=4,
        )
    return parts


def _compute(groups: Sequence[Sequence[Replica]], number: int, count: int, tell: Report) -> None:
    """Bring groups to their ends side by side."""
    config = groups[0][0].plan.config
    problems: dict[Any, list[Problem]] = {}
    for replica in itertools.chain(*groups):
        kin = problems.setdefault(replica.plan.problem.kin, [])
        if all(replica.plan.problem is not other for other in kin):
            kin.append(replica.plan.problem)
    with using_precision(config["device"], config["precision"]), using_threads(config["threads"]):
        turns = {kin: Round(some[0].together(some)) for kin, some in problems.items()}
        made = []
        for group in groups:
            kind = group[0].plan.problem.kin
            which = [next(i for i, p in enumerate(problems[kind]) if p is replica.plan.problem) for replica in group]
            made.append(Group(group, turns[kind], which))
        told = clock.monotonic()

        def report(share: float) -> None:
            nonlocal told
            if clock.monotonic() - told > 0.2:
                told = clock.monotonic()
                runs = sum(len(group) for group in groups)
                tell(
                    (number + share) / count,
                    f"{runs} runs side by side" + (f", part {number + 1} of {count}" if count > 1 else ""),
                )

        advance_all(made, list(turns.values()), report)

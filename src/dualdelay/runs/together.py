"""The points of a grid, and runs that are computed together: those that share a schedule advance as rows of one fold."""

from __future__ import annotations

import itertools
import time as clock
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..batching.replicas import Apart, Replicas, column
from ..core import Algorithm, Problem
from ..core.devices import using_precision, using_threads
from ..core.errors import BadInput, NotSaved
from ..engine.half import Half
from ..engine.result import Run
from ..simulation.gradients import Batcher, GradientsInBatches
from ..simulation.local_fleet import LocalFleet
from ..storage.files import Damaged
from ..storage.folder import Folder, is_empty
from .grouping import fitting, grouped
from .names import settings
from .optimizer import Optimizer, Optimizers
from .record import record_of, require_same
from .runner import Member, Runner, WatchFailed, require_possible, run_together
from .settings import Reporting, SimulatedFleet, Watch
from .spec import Options, RunSpec

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Point:
    """A point of the grid: its coordinates as texts and numbers, and what they stand for."""

    names: dict[str, Any]
    algorithm: Algorithm[Any]
    problem: Problem
    fleet: SimulatedFleet
    seed: int
    path: Path | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the method."""
        return settings(self.algorithm)


def of_point(options: Options, point: Point) -> Options:
    """The options of one run of a sweep, which has a folder of its own and may be there already."""
    return replace(options, saving=replace(options.saving, folder=point.path, go_on=True))


def side_by_side(points: Sequence[Point], options: Options, watch: Sequence[Watch], tell: Report) -> dict[int, Run]:
    """The runs that could be computed together."""
    placed: dict[tuple[int, bool], Problem] = {}  # on its device once, however many runs it has
    members: dict[int, Member] = {}
    for k, point in enumerate(points):
        kind = (id(point.problem), point.algorithm.exact)
        problem = placed.get(kind, point.problem)
        try:
            spec = of_point(options, point).spec(point.algorithm, problem, point.fleet, point.seed)
        except BadInput:
            if k == 0 or not (options.server.optimizer or options.server.schedule):
                raise
            continue  # a method that takes no optimiser is refused by itself, and others are done
        placed[kind] = spec.problem
        members[k] = Member(spec)
    fingerprints: dict[int, str] = {}  # by problem, since they take long for much data
    for member in members.values():
        path, problem = member.spec.saving.path, member.spec.problem
        if path is not None:
            if id(problem) not in fingerprints:
                fingerprints[id(problem)] = problem.fingerprint()
            member.record = record_of(member.spec, fingerprints[id(problem)], len(points))
            if path.exists() and not is_empty(path):
                member.folder = Folder(path)
                require_same(member.record, member.folder)
    specs = {k: member.spec for k, member in members.items() if not _has_ended(member)}  # those are only to be read
    parts = fitting(grouped(specs), specs, options.compute.memory_limit)
    runs: dict[int, Run] = {}
    for part in parts:

        def report(share: float, part: Sequence[Sequence[int]] = part) -> None:
            count = sum(len(group) for group in part)
            text = f"{count} runs side by side" + (f", in {len(parts)} parts" if len(parts) > 1 else "")
            tell((len(runs) + share * count) / len(points), text)

        _compute([[members[k] for k in group] for group in part], watch, report, options.saving.path)
        for k in itertools.chain(*part):
            if (run := members.pop(k).run) is not None:
                runs[k] = run
    return runs


def _has_ended(member: Member) -> bool:
    """Whether the run has come to its end before."""
    try:
        return member.folder is not None and member.folder.result() is not None
    except Damaged:  # it is written again
        return False


def _compute(
    groups: Sequence[Sequence[Member]], watch: Sequence[Watch], tell: Callable[[float], None], folder: Path | None
) -> None:
    """Bring groups to their ends side by side."""
    spec = groups[0][0].spec
    problems: dict[Hashable, list[Problem]] = {}
    for member in itertools.chain(*groups):
        same_kind = problems.setdefault(_kind(member.spec), [])
        if all(member.spec.problem is not other for other in same_kind):
            same_kind.append(member.spec.problem)
    last = clock.monotonic()

    def report(share: float) -> None:
        nonlocal last
        if clock.monotonic() - last > 0.2:
            last = clock.monotonic()
            tell(share)

    with using_precision(spec.compute.device or "cpu", spec.compute.precision), using_threads(spec.threads):
        try:
            batchers = {kind: Batcher(alike[0].batched(alike)) for kind, alike in problems.items()}
            runners = []
            for group in groups:
                kind = _kind(group[0].spec)
                which = [next(i for i, p in enumerate(problems[kind]) if p is member.spec.problem) for member in group]
                runners.append(_group(group, batchers[kind], which, watch))
            run_together(runners, _begin, list(batchers.values()), report, folder)
        except (BadInput, NotSaved):
            raise
        except WatchFailed as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        except Exception as error:  # whoever is to blame says so when the runs are computed one by one
            warnings.warn(f"the runs could not be computed side by side ({error}): now one after the other.", stacklevel=5)


def _kind(spec: RunSpec) -> Hashable:
    """Equal for runs whose gradients can be taken in one call."""
    return spec.problem.batch_key, len(spec.x), spec.x.dtype


def _group(members: Sequence[Member], batcher: Batcher, which: Sequence[int], watch: Sequence[Watch]) -> Runner:
    """Runs that share a schedule."""
    spec, algorithms = members[0].spec, [member.spec.algorithm for member in members]
    assert isinstance(spec.fleet, SimulatedFleet)
    spec.require_rules()
    half = Half(column(algorithms, spec.x.device, spec.x.dtype), spec.server.uplink)
    gradients = GradientsInBatches(batcher, which, None if half.computes_ahead(spec.problem) else half)
    fleet = LocalFleet(spec.problem, spec.fleet.clock(), half, gradients=gradients, downlink=spec.server.downlink)
    loop = Replicas(
        algorithms,
        [member.spec.problem for member in members],
        fleet,
        torch.stack([member.spec.x for member in members]),
        seed=spec.seed,
        schedule=spec.schedule,
        metrics=spec.evaluation.metrics,
        keep_best=spec.evaluation.keeps,
        optimizer=Optimizers(optimizers) if (optimizers := _optimizers(members)) else None,
        table_format=spec.server.gradient_table,
    )
    return Runner(loop, members, Reporting(watch=watch, progress=False))


def _optimizers(members: Sequence[Member]) -> list[Optimizer]:
    """Those of the runs, if they have any."""
    return [member.spec.optimizer for member in members if member.spec.optimizer is not None]


def _begin(runner: Runner) -> None:
    """Begin, or go on from the newest checkpoint that all runs have; those that parted since go on by themselves."""
    loop, members = runner.loop, runner.members
    assert isinstance(loop, Replicas)
    for member in members:
        if member.folder is not None:
            member.folder.hold()
    saved = _saved_together(members)
    try:
        if saved is None:
            loop.begin()
        else:
            loop.load_all(*saved)
            loop.evaluate_overdue()
            runner.resumed()
    except Apart:
        loop.going.clear()
        return
    require_possible(loop, members)
    for k, member in enumerate(members):
        path, record = member.spec.saving.path, member.record
        if member.folder is None and path is not None and record is not None:
            member.folder = Folder.create(path, record, member.spec.x, member.spec.problem.fixed())
        if member.folder is not None:
            member.folder.rewind(*((None,) if saved is None else (saved[0][k], saved[1][k])))


def _saved_together(members: Sequence[Member]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] | None:
    """What all runs saved at the newest moment for which it is whole, and their traces up to there."""
    folders = [member.folder for member in members if member.folder is not None]
    if len(folders) < len(members):
        return None
    for moment in sorted(set.intersection(*(folder.moments() for folder in folders)), reverse=True):
        try:
            loaded = [folder.load(moment) for folder in folders]
        except BadInput:  # damaged: an older one may be whole
            continue
        whole = [part for part in loaded if part is not None and part[0]["moment"] == moment]
        if len(whole) == len(folders):
            return [content for content, _, _ in whole], [rows for _, rows, _ in whole]
    return None

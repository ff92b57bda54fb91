"""What begins a run: ``simulate`` on a virtual clock, ``train`` on real workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ..core import Algorithm, Problem
from ..core.devices import using_threads
from ..core.errors import require_kind
from ..engine.result import Run
from ..problems.wrapped import in_parts
from ..storage.folder import Folder, is_empty
from ..workers.ray_fleet import RayFleet
from ..workers.settings import WorkerFleet
from .fleets import make_loop, open_fleet, require_watchable
from .record import record_of, require_same
from .resume import go_on, through_losses
from .runner import Member, Runner, require_possible, starting_workers
from .settings import (
    DEFAULT_COMPUTE,
    DEFAULT_EVALUATION,
    DEFAULT_SERVER,
    Compute,
    Evaluation,
    Reporting,
    Saving,
    Server,
    SimulatedFleet,
    SpeedsOf,
    Watch,
)
from .showing import showing
from .spec import Options, for_this_thread


def simulate(
    algorithm: Algorithm[Any],
    problem: Problem,
    speeds: SpeedsOf | SimulatedFleet,
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
) -> Run:
    """Run an algorithm on a virtual clock until ``updates`` or ``time``, whichever comes first.

    Arguments:
        algorithm: the method, such as ``dd.DuDe(lr=0.05)``.
        problem: what is trained, with each worker's data.
        speeds: how long workers compute, a speed model; or a ``dd.SimulatedFleet``, which also says how long messages
            travel and which workers leave and join.
        updates, time: where the run ends: server updates, simulated seconds. Arrivals at exactly ``time`` count.
        seed: names every random choice: split, minibatches, speeds, initial weights and the server's own draws; a problem
            or speeds that were given a seed of their own keep it.
        watch: functions that are called with the state and the arrival after every arrival; or a ``dd.Reporting``, which
            also has loggers and turns progress off.
        folder: where the run is kept, so that it can be killed, resumed and replayed; or a ``dd.Saving``.
        checkpoint_every: updates between two checkpoints, by default a twentieth of the run.
        evaluation: when the model is evaluated, on what, by which metrics of your own, and when to stop early.
        compute: device, cores, threads, precision.
        server: initial weights, optimiser and schedule, and what is done about gradients that are not finite.

    Returns the run: ``run.x`` (final flat weights), ``run.version`` (updates made), ``run.metrics``, ``run.trace``.

    Example:
        >>> run = dd.simulate(dd.DuDe(lr=0.05), dd.Digits(workers=10, alpha=0.1),
        ...                   dd.TruncatedNormalSpeeds(10, std=5.0), updates=2000)
        >>> run.metrics.objective[-1]
    """
    options = Options(updates, time, Saving.of(folder, checkpoint_every), evaluation, compute, server)
    return run_one(options, algorithm, problem, SimulatedFleet.of(speeds), seed, Reporting.of(watch))


def train(
    algorithm: Algorithm[Any],
    problem: Problem,
    fleet: WorkerFleet | None = None,
    *,
    updates: int | None = None,
    time: float | None = None,
    seed: int = 0,
    watch: Sequence[Watch] | Reporting = (),
    folder: str | Path | Saving | None = None,
    checkpoint_every: int | None = None,
    evaluation: Evaluation = DEFAULT_EVALUATION,
    server: Server = DEFAULT_SERVER,
) -> Run:
    """Run an algorithm on real workers, one process each, until ``updates`` or ``time`` in seconds, whichever comes first.

    Arguments:
        fleet: where the workers run, by default on this machine, and what happens when they fail.

    The others mean what they do in ``simulate``. Workers evaluate their part of F between two jobs while the others go on:
    a gradient goes before an evaluation, and by default evaluations take at most a tenth of any worker's time, on a few of
    its samples, always the same, as often as that allows, fifty times at most. The last evaluation is of all data. With a
    ``folder`` the run can be resumed after a crash of the server, and replayed in one process to the same bits; what the
    workers print is kept there.

    Example:
        >>> run = dd.train(dd.DuDe(lr=0.05), dd.Digits(workers=4), dd.RayFleet(cpus=0.5), time=60, folder="runs/mine")
    """
    fleet = RayFleet() if fleet is None else fleet
    require_kind("fleet", fleet, WorkerFleet, "dd.RayFleet()")
    options = Options(updates, time, Saving.of(folder, checkpoint_every), evaluation, DEFAULT_COMPUTE, server)
    return run_one(options, algorithm, problem, fleet, seed, Reporting.of(watch))


def run_one(
    options: Options,
    algorithm: Algorithm[Any],
    problem: Problem,
    fleet: SimulatedFleet | WorkerFleet,
    seed: int,
    reporting: Reporting,
) -> Run:
    """Begin a run and bring it to its end, or continue it where its folder says so."""
    threads = fleet.server_threads if isinstance(fleet, WorkerFleet) else options.compute.threads
    with using_threads(threads), for_this_thread(problem) as own:
        spec = options.spec(algorithm, own, fleet, seed)
        require_watchable(spec, reporting)
        path = spec.saving.path
        if path is not None and spec.saving.go_on and path.exists() and not is_empty(path):
            folder = Folder(path)
            require_same(record_of(spec), folder)
            with folder:
                going_on = partial(go_on, folder, spec, folder.record(), reporting)
                return through_losses(Member(spec, folder), reporting, going_on)
        spec.require_rules()
        if isinstance(spec.fleet, WorkerFleet):
            spec.fleet.require_fit(spec.problem.workers)  # before anybody is told that workers start
            in_parts(spec.problem, spec.fleet.ranks)  # which refuses what several ranks cannot compute
        if path is not None:
            Folder.require_new(path)  # before anything is computed for it
            Folder.require_possible(path)
        member = Member(spec)
        with ExitStack() as folder_lock:
            return through_losses(member, reporting, partial(_begin, member, reporting, folder_lock))


def _begin(member: Member, reporting: Reporting, folder_lock: ExitStack) -> Run:
    """Begin a run and bring it to its end; its folder is created once its workers are there."""
    spec = member.spec
    path = spec.saving.path
    with (
        showing(reporting, spec.algorithm, spec.updates, spec.time, spec.fleet) as shown_to,
        open_fleet(spec, None if path is None else path / "output") as workers,
    ):
        loop = make_loop(spec, workers)
        with starting_workers("nothing had begun") if spec.real else nullcontext():
            loop.begin()
        if not spec.real:
            require_possible(loop, [member])
        runner = Runner(loop, [member], shown_to)
        if path is not None:
            created = Folder.create(path, record_of(spec), spec.x, spec.problem.fixed())
            member.folder = folder_lock.enter_context(created)
        return runner.run()

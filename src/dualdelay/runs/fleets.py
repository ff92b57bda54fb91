"""From a specification to workers and the fold that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..batching.separable import why_inseparable
from ..core import Algorithm, Problem
from ..core.devices import using_precision
from ..core.errors import BadInput
from ..engine.fleet import Fleet
from ..engine.half import Half, is_own
from ..engine.loop import Loop
from ..engine.shard import ShardPlan
from ..engine.sharded import ShardedLoop
from ..engine.slices import Slices
from ..problems.wrapped import in_parts
from ..simulation.clocks import RecordedClock
from ..simulation.cores import GradientsOnCores, cores_worth
from ..simulation.gradients import Batcher, Gradients, GradientsInBatches, GradientsInTurns
from ..simulation.local_fleet import LocalFleet
from ..storage import parts
from ..workers.coordinator import Coordinator
from ..workers.ray_fleet import RayFleet, RayTransport
from ..workers.settings import WorkerFleet
from ..workers.sharded import ShardedCoordinator
from ..workers.transport import Transport
from .names import describe
from .optimizer import Optimizer
from .settings import Compute, Reporting, Server
from .spec import RecordedFleet, RunSpec

_SHORT = 1e-3  # seconds: a gradient that takes longer does not feel what the server does between two


@contextmanager
def open_fleet(spec: RunSpec, output: Path | None = None) -> Iterator[Fleet]:
    """The workers of a run, let go at the end; what real ones print goes to a folder."""
    problem, half, downlink = spec.problem, Half(spec.algorithm, spec.server.uplink), spec.server.downlink
    fleet: Fleet
    if is_own(spec.algorithm):
        half.require_pure(spec.x, problem.workers)
    with using_precision(spec.compute.device or "cpu", spec.compute.precision):
        if isinstance(spec.fleet, WorkerFleet):
            spec.fleet.require_fit(problem.workers)
            problem = in_parts(problem, spec.fleet.ranks)
            plan = shard_plan(spec)
            transport = _connected(spec, problem, half, output)
            if plan is None:
                fleet = Coordinator(spec.fleet, problem, half, transport, downlink)
            else:
                assert isinstance(transport, RayTransport)
                try:
                    shards = transport.open_shards(plan, spec.x, parts.PartFiles())
                except BaseException:
                    transport.close(ended=False)
                    raise
                fleet = ShardedCoordinator(spec.fleet, problem, half, transport, plan, shards)
        elif isinstance(spec.fleet, RecordedFleet):
            gradients = _gradients(spec.compute, problem, half, 1) if spec.compute.batch else None
            clock, problem = RecordedClock(spec.fleet.trace), in_parts(problem, spec.fleet.ranks)
            fleet = LocalFleet(problem, clock, half, spec.fleet.threads, gradients, downlink)
        else:
            gradients = _gradients(spec.compute, problem, half, spec.threads)
            fleet = LocalFleet(problem, spec.fleet.clock(), half, gradients=gradients, downlink=downlink)
        ended = False
        try:
            yield fleet
            ended = True
        finally:
            fleet.close(ended)


def shard_plan(spec: RunSpec) -> ShardPlan | None:
    """How a run's server is cut into shards, if it is; refuses what cannot be cut."""
    if not isinstance(spec.fleet, RayFleet) or spec.fleet.shards is None:
        return None
    slices = Slices(spec.x.numel(), spec.fleet.shards)
    require_separable(spec.algorithm, spec.problem.workers, spec.server, spec.optimizer, slices.count)
    return ShardPlan(
        spec.algorithm, spec.problem.workers, spec.seed, spec.optimizer, spec.server.gradient_table, slices, spec.x.dtype
    )


def require_separable(
    algorithm: Algorithm[Any], workers: int, server: Server, optimizer: Optimizer | None, shards: int
) -> None:
    """Refuse a server that cannot be cut into shards."""
    if server.downlink is not None:
        raise BadInput("shards and downlink are given; expected one of them: slices of models travel as they are.")
    if optimizer is not None and optimizer.own:
        raise BadInput(
            "shards are given, and the optimizer or schedule is a function, which may look at the model's tensors; "
            "expected texts, such as 'AdamW[weight_decay=0.1]'."
        )
    for stepper in (None, optimizer) if optimizer is not None else (None,):
        if why := why_inseparable(algorithm, workers, stepper):
            named = "" if stepper is None else f" with {stepper.describe()['optimizer']}"
            what = f"the server of {type(algorithm).__name__}{named}"
            raise BadInput(f"{what} cannot be cut into {shards} shards: {why}. Leave shards out.")


def require_watchable(spec: RunSpec, reporting: Reporting) -> None:
    """Refuse functions that are shown the server's state where no process has all of it."""
    package = __name__.partition(".")[0]
    own = [f for f in reporting.watch if getattr(f, "__module__", "").partition(".")[0] != package]  # ours do not look
    if own and isinstance(spec.fleet, RayFleet) and spec.fleet.shards is not None:
        raise BadInput(
            "watch is given, whose functions are shown the server's state, and with shards no process has that; expected "
            "loggers, which hear the run's vital signs: watch=dd.Reporting(log=[...])."
        )


def _connected(spec: RunSpec, problem: Problem, half: Half, output: Path | None) -> Transport:
    assert isinstance(spec.fleet, WorkerFleet)
    return spec.fleet.connect(problem, half, output, {"algorithm": describe(spec.algorithm), "seed": spec.seed})


def _gradients(compute: Compute, problem: Problem, half: Half, threads: int) -> Gradients:
    """How the jobs of a simulated fleet are computed: many at once, on several cores, or one at a time."""
    whole = None if half.computes_ahead(problem) else half
    if compute.batch:
        return GradientsInBatches(Batcher(problem.batched([problem])), [0], whole)
    count = cores_worth(problem, compute.cores)
    if count > 1:
        return GradientsOnCores(problem, count, threads, whole)
    costs = problem.costs() if problem.parallel else None
    return (Gradients if costs is None or costs[0] > _SHORT else GradientsInTurns)(problem, whole)


def make_loop(spec: RunSpec, fleet: Fleet) -> Loop:
    """A run that is about to begin, to go on or to be replayed."""
    options: dict[str, Any] = {
        "schedule": spec.schedule,
        "metrics": spec.evaluation.metrics,
        "on_nonfinite": None if isinstance(spec.fleet, RecordedFleet) else spec.server.on_nonfinite,
        "optimizer": spec.optimizer,
        "table_format": spec.server.gradient_table,
        "keep_best": spec.evaluation.keeps,
    }
    if isinstance(fleet, ShardedCoordinator):
        return ShardedLoop(fleet.plan, spec.problem, fleet, fleet.shards, **options)
    return Loop(spec.algorithm, spec.problem, fleet, spec.x, seed=spec.seed, **options)

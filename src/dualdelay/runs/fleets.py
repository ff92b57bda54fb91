"""From a specification to workers and the fold that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core import Problem
from ..core.devices import using_precision
from ..engine.fleet import Fleet
from ..engine.half import Half, is_own
from ..engine.loop import Loop
from ..simulation.clocks import RecordedClock
from ..simulation.cores import GradientsOnCores, cores_worth
from ..simulation.gradients import Batcher, Gradients, GradientsInBatches
from ..simulation.local_fleet import LocalFleet
from ..workers.coordinator import Coordinator
from ..workers.settings import WorkerFleet
from ..workers.transport import Transport
from .names import describe
from .settings import Compute
from .spec import RecordedFleet, RunSpec


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
            fleet = Coordinator(spec.fleet, problem, half, _connected(spec, half, output), downlink)
        elif isinstance(spec.fleet, RecordedFleet):
            gradients = _gradients(spec.compute, problem, half, 1) if spec.compute.batch else None
            clock = RecordedClock(spec.fleet.trace)
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


def _connected(spec: RunSpec, half: Half, output: Path | None) -> Transport:
    assert isinstance(spec.fleet, WorkerFleet)
    return spec.fleet.connect(spec.problem, half, output, {"algorithm": describe(spec.algorithm), "seed": spec.seed})


def _gradients(compute: Compute, problem: Problem, half: Half, threads: int) -> Gradients:
    """How the jobs of a simulated fleet are computed: many at once, on several cores, or one at a time."""
    whole = None if half.computes_ahead(problem) else half
    if compute.batch:
        return GradientsInBatches(Batcher(problem.batched([problem])), [0], whole)
    count = cores_worth(problem, compute.cores)
    return Gradients(problem, whole) if count == 1 else GradientsOnCores(problem, count, threads, whole)


def make_loop(spec: RunSpec, fleet: Fleet) -> Loop:
    """A run that is about to begin, to go on or to be replayed."""
    return Loop(
        spec.algorithm,
        spec.problem,
        fleet,
        spec.x,
        seed=spec.seed,
        schedule=spec.schedule,
        metrics=spec.evaluation.metrics,
        on_nonfinite=None if isinstance(spec.fleet, RecordedFleet) else spec.server.on_nonfinite,
        optimizer=spec.optimizer,
        table_format=spec.compute.gradient_table,
        keep_best=spec.evaluation.keeps,
    )

"""dualdelay size: what a run on real workers will take, before anything is rented."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ..analysis.printing import print_size
from ..core.errors import BadInput, require_path, require_positive
from ..core.texts import literal
from ..runs.names import parse
from ..runs.progress import SweepProgress
from ..runs.settings import Server
from ..theory.cost import Cost, Plan
from ..theory.machine import Machine, keep_machine, known_machine, measure_machine, read_machine, values_of
from ..theory.sizing import Size
from ..theory.sizing import size as size_of_run
from . import shared
from .flags import Size as Flags


def size(flags: Flags) -> None:
    """Predict what a run takes, or measure the machine, or both."""
    if (flags.weights is None) != (flags.workers is None) or (flags.weights is None and not flags.measure):
        raise BadInput("expected --weights and --workers, such as --weights 7e9 --workers 64; or --measure alone.")
    shared.import_all(flags.imports)
    plan = None if flags.weights is None or flags.workers is None else _plan(flags, flags.weights, flags.workers)
    method = parse("algorithm", flags.method, lr=0.1)
    small = [None if text is None else literal(text) for text in (flags.uplink, flags.downlink)]
    server = Server(optimizer=flags.optimizer, uplink=small[0], downlink=small[1], gradient_table=flags.table)
    console, kept = shared.make_console(flags.json), None
    machine = _machine(flags)
    if flags.measure:
        kept = str(keep_machine(machine))
        console.print(f"measured and kept: {kept}")
    if flags.cores is not None:
        require_positive("cores", flags.cores)
        machine = replace(machine, cores=flags.cores)
    values: dict[str, Any] = {"machine": values_of(machine), "kept": kept}
    if plan is not None:
        result = size_of_run(method, plan, server, machine)
        print_size(result, console)
        values |= _values(result, flags.method)
    shared.finish(flags.json, "size", **values)


def _plan(flags: Flags, weights: float, workers: int) -> Plan:
    return Plan(
        weights,
        workers,
        flags.shards,
        flags.gradient_seconds,
        0.0 if flags.gpu else 1.0,
        flags.machines,
        flags.bandwidth,
        flags.latency,
        flags.memory_per_process,
    )


def _machine(flags: Flags) -> Machine:
    """The constants to predict from."""
    if flags.measure and flags.machine is not None:
        raise BadInput(f"--measure measures this machine, and --machine {flags.machine} is another; give one of both.")
    if flags.measure:
        with SweepProgress("measure") as report:
            return measure_machine(report)
    if flags.machine is not None:
        require_path("machine", flags.machine)
        return read_machine(flags.machine)
    return known_machine()


def _values(result: Size, method: str) -> dict[str, Any]:
    """The prediction for the line of JSON."""
    changes = [
        {"change": change.what, "shell": change.shell, "gains": list(change.gains), **_cost(change.cost)}
        for change in result.changes
    ]
    plan, footprint = asdict(result.cost.plan), asdict(result.footprint)
    return {
        "method": method,
        "plan": plan,
        **_cost(result.cost),
        "footprint": footprint,
        "changes": changes,
        "why_no_shards": result.why_no_shards,
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "updates_per_second": cost.updates_per_second,
        "gradients_per_second": cost.gradients_per_second,
        "bottleneck": cost.bottleneck,
        "seconds_per_update": dict(cost.limits),
        "turn": dict(cost.turn),
        "too_large": list(cost.too_large),
        "processes": [{**asdict(process), "peak": process.peak} for process in cost.processes],
    }

"""``size``: what a run will take, and what would take less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ..core import Algorithm
from ..core.aggregate import TableFormat
from ..core.errors import BadInput
from ..runs.fleets import require_separable
from ..runs.optimizer import make_optimizer
from ..runs.settings import DEFAULT_SERVER, Server
from .cost import Cost, Plan, cost
from .footprint import Footprint, footprint
from .machine import ConstantGradient, Machine, known_machine

_SHARDS = (2, 4, 8, 16, 32, 64)
_WORTH = 1.2  # times the gradients per second, or less memory at the server: what makes a change worth telling


@dataclass(frozen=True)
class Change:
    """Something that could be done otherwise, and what the run would take then."""

    what: str
    """As it is written in Python, such as wait_for=8."""
    cost: Cost


@dataclass(frozen=True)
class Size:
    """What a run will take: the prediction, what it rests on, and what could be done otherwise."""

    cost: Cost
    footprint: Footprint
    machine: Machine
    changes: tuple[Change, ...]
    """Those that give at least a fifth more gradients per second, need a fifth less memory at the server, or fit."""


def size(
    algorithm: Algorithm[Any],
    plan: Plan,
    server: Server = DEFAULT_SERVER,
    table: TableFormat = "full",
    machine: Machine | None = None,
) -> Size:
    """Predict memory, traffic and updates per second of a run on real workers, without starting one.

    Arguments:
        algorithm: the method, such as ``dd.DuDe(lr=0.05, wait_for=8)``; its step size does not matter.
        plan: how large the run is, and the machines and lines that it has: ``dd.theory.Plan(weights=7e9, workers=64)``.
        server: optimiser, uplink and downlink.
        table: how a method that remembers gradients keeps them, as in ``dd.Compute``.
        machine: what a machine can do; by default what was measured here (``dualdelay size --measure``), or what the
            package brings.

    Example:
        >>> dd.theory.size(dd.DuDe(lr=0.05), dd.theory.Plan(weights=7e9, workers=64, shards=8)).cost.updates_per_second
    """
    machine = machine or known_machine()
    if plan.shards:
        _require_separable(algorithm, plan.workers, server, plan.shards)
    method = footprint(algorithm, plan.workers, server, table)
    now = cost(plan, method, machine)
    changes = tuple(change for change in _changes(algorithm, plan, server, table, machine, method) if _helps(change, now))
    return Size(now, method, machine, changes)


def _require_separable(algorithm: Algorithm[Any], workers: int, server: Server, shards: int) -> None:
    """Refuse shards as a run would."""
    optimizer = make_optimizer(server.optimizer, server.schedule, None, algorithm, ConstantGradient(workers, 1))
    require_separable(algorithm, workers, server, optimizer, shards)


def _helps(change: Change, now: Cost) -> bool:
    """Whether a change is worth telling."""
    if change.cost.too_large and not now.too_large:
        return False
    quicker = change.cost.gradients_per_second >= _WORTH * now.gradients_per_second
    smaller = change.cost.server.peak <= now.server.peak / _WORTH
    return quicker or smaller or len(change.cost.too_large) < len(now.too_large)


def _is_better(more: Cost, fewer: Cost) -> bool:
    """Whether twice as many shards are worth it: they are quicker, or what is too large gets smaller."""
    quicker = more.updates_per_second >= _WORTH * fewer.updates_per_second
    return quicker or (fewer.server.kind in fewer.too_large and more.server.peak <= fewer.server.peak / _WORTH)


def _changes(
    algorithm: Any, plan: Plan, server: Server, table: TableFormat, machine: Machine, method: Footprint
) -> Iterator[Change]:
    """What could be done otherwise, each by itself."""
    best: Change | None = None
    try:
        _require_separable(algorithm, plan.workers, server, _SHARDS[0])
        several = [shards for shards in _SHARDS if plan.shards < shards <= plan.weights]
    except BadInput:
        several = []
    for shards in several:
        more = Change(f"shards={shards}", cost(replace(plan, shards=shards), method, machine))
        if best is not None and not _is_better(more.cost, best.cost):
            break
        best = more
    if best is not None:
        yield best

    def other(what: str, algorithm: Algorithm[Any], server: Server, table: TableFormat) -> Change:
        return Change(what, cost(plan, footprint(algorithm, plan.workers, server, table), machine))

    settings = {field.name for field in fields(algorithm)}
    if "wait_for" in settings and (c := min(plan.workers, 8 * algorithm.wait_for)) > algorithm.wait_for:
        yield other(f"wait_for={c}", replace(algorithm, wait_for=c), server, table)
    if "memory" in settings and algorithm.memory == "server":
        yield other('memory="workers"', replace(algorithm, memory="workers"), server, table)
    if method.server.get("table", 0.0) and table == "full":
        yield other('table "half"', algorithm, server, "half")
    if "compress" in settings and algorithm.compress is None:
        small = replace(algorithm, memory="workers", compress="int8")
        yield other('memory="workers", compress="int8"', small, server, table)
    elif server.uplink is None and method.up == 4:
        yield other('uplink="int8"', algorithm, replace(server, uplink="int8"), table)

"""``size``: what a run will take, and what would take less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from ..core import Algorithm
from ..core.errors import BadInput
from ..engine.slices import GRAIN
from ..runs.fleets import require_separable
from ..runs.names import label
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
    """As it is written in Python, such as shards=4."""
    shell: str
    """As it is written on the shell, such as --shards 4."""
    cost: Cost
    gains: tuple[str, ...]
    """What it is worth telling for: it is faster, the server is smaller, or more kinds of processes fit."""


@dataclass(frozen=True)
class Size:
    """What a run will take: the prediction, what it rests on, and what could be done otherwise. ``print`` shows it all."""

    method: str
    cost: Cost
    footprint: Footprint
    machine: Machine
    changes: tuple[Change, ...]
    """Those that give at least a fifth more gradients per second, need a fifth less memory at the server, or fit."""
    why_no_shards: str = ""
    """Why the server cannot be cut into shards, if that is so."""

    def __str__(self) -> str:
        from ..analysis.printing import size_as_text

        return size_as_text(self)


def size(
    algorithm: Algorithm[Any],
    plan: Plan,
    server: Server = DEFAULT_SERVER,
    machine: Machine | None = None,
) -> Size:
    """Predict memory, traffic and updates per second of a run on real workers, without starting one.

    Arguments:
        algorithm: the method, such as ``dd.DuDe(lr=0.05, wait_for=8)``; its step size does not matter.
        plan: how large the run is, and the machines and lines that it has: ``dd.theory.Plan(weights=7e9, workers=64)``.
        server: optimiser, uplink and downlink, and how a method that remembers gradients keeps them.
        machine: what a machine can do; by default what was measured here (``dualdelay size --measure``), or what the
            package brings.

    Example:
        >>> dd.theory.size(dd.DuDe(lr=0.05), dd.theory.Plan(weights=7e9, workers=64, shards=8)).cost.updates_per_second
    """
    machine = machine or known_machine()
    if plan.shards:
        _require_separable(algorithm, plan.workers, server, plan.shards)
    method = footprint(algorithm, plan.workers, server)
    now = cost(plan, method, machine)
    why = ""
    try:
        _require_separable(algorithm, plan.workers, server, _SHARDS[0])
    except BadInput as error:
        why = str(error).removesuffix(" Leave shards out.")
    most = 0 if why else plan.weights // GRAIN
    others = chain(_more_shards(plan, method, machine, most), _changes(algorithm, plan, server, machine, method))
    told = (replace(change, gains=_gains(change.cost, now)) for change in others)
    return Size(label(algorithm), now, method, machine, tuple(change for change in told if change.gains), why)


def _require_separable(algorithm: Algorithm[Any], workers: int, server: Server, shards: int) -> None:
    """Refuse shards as a run would."""
    optimizer = make_optimizer(server.optimizer, server.schedule, None, algorithm, ConstantGradient(workers, 1))
    require_separable(algorithm, workers, server, optimizer, shards)


def _gains(then: Cost, now: Cost) -> tuple[str, ...]:
    """What a change is worth telling for, if it is for anything."""
    if then.too_large and not now.too_large:
        return ()
    quicker = then.gradients_per_second >= _WORTH * now.gradients_per_second
    smaller = then.server.peak <= now.server.peak / _WORTH
    gone = [kind for kind in now.too_large if kind not in then.too_large]
    fits = f"{' and '.join(gone)} fits" if then.too_large else "fits"
    told = (("faster", quicker), ("smaller", smaller), (fits, len(then.too_large) < len(now.too_large)))
    return tuple(name for name, given in told if given)


def _is_better(more: Cost, fewer: Cost) -> bool:
    """Whether twice as many shards are worth it: they are quicker, or what is too large gets smaller."""
    quicker = more.updates_per_second >= _WORTH * fewer.updates_per_second
    return quicker or (fewer.server.kind in fewer.too_large and more.server.peak <= fewer.server.peak / _WORTH)


def _more_shards(plan: Plan, method: Footprint, machine: Machine, most: float) -> list[Change]:
    """As many shards as are worth it, if any are, and no more than so many."""
    best: list[Change] = []
    for shards in _SHARDS:
        if plan.shards < shards <= most:
            then = cost(replace(plan, shards=shards), method, machine)
            if best and not _is_better(then, best[0].cost):
                break
            best = [Change(f"shards={shards}", f"--shards {shards}", then, ())]
    return best


def _changes(algorithm: Any, plan: Plan, server: Server, machine: Machine, method: Footprint) -> Iterator[Change]:
    """What else could be done otherwise, each by itself."""

    def other(server: Server = server, **settings: Any) -> Cost:
        changed = replace(algorithm, **settings) if settings else algorithm
        return cost(plan, footprint(changed, plan.workers, server), machine)

    def set_to(**settings: Any) -> Change:
        python = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        shell = ",".join(f"{name}={value}" for name, value in settings.items())
        return Change(python, f"{shell} in --method", other(**settings), ())

    names = {field.name for field in fields(algorithm)}
    waits_for = getattr(algorithm, "wait_for", None)  # None: for everyone
    if waits_for is not None and (c := min(plan.workers, 8 * waits_for)) > waits_for:
        yield set_to(wait_for=c)
    if "memory" in names and algorithm.memory == "server":
        yield set_to(memory="workers")
    if method.server.get("table", 0.0) and server.gradient_table == "full":
        yield Change('gradient_table="half"', "--table half", other(replace(server, gradient_table="half")), ())
    if "compress" in names and algorithm.compress is None:
        yield set_to(memory="workers", compress="int8")
    elif server.uplink is None and method.up == 4:
        yield Change('uplink="int8"', "--uplink int8", other(replace(server, uplink="int8")), ())

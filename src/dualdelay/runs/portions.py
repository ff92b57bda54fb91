"""Which runs can advance together, and how many fit into memory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from ..batching.shared_schedule import can_share
from ..core.devices import free_memory
from ..core.draws import Draws
from ..core.errors import plain_number, require_positive
from .groups import Replica
from .names import describe
from .plan import Plan

_SPARE = 0.5  # the share of free memory that states may take; the rest is for gradients
_AT_ONCE = 256  # replicas in a group
_TRIALS: dict[Hashable, bool] = {}  # what was found out of methods whose settings are plain, for the sweeps to come


def grouped(replicas: Mapping[int, Replica]) -> list[list[int]]:
    """The runs by what decides their schedule; those that cannot share one are left out."""
    groups: dict[Hashable, list[int]] = {}
    trials: dict[Hashable, bool] = {}
    for k, replica in replicas.items():
        plan = replica.plan
        method = plan.algorithm
        settings = tuple((f.name, _key(getattr(method, f.name))) for f in fields(method) if f.name != "lr")
        kind = (type(method), settings, plan.problem.workers)
        known = _TRIALS if all(_is_plain(getattr(method, f.name)) for f in fields(method)) else trials
        if kind not in known:
            known[kind] = can_share(method, plan.problem.workers)
        if known[kind]:
            pace = describe(plan.speeds)
            speeds = json.dumps(pace) if "name" in pace else id(plan.speeds)
            costs = tuple(plan.problem.batches(worker) for worker in range(plan.problem.workers))
            schedule = (kind, speeds, plan.seed, plan.x.dtype, len(plan.x), costs, plan.problem.kin)
            groups.setdefault(schedule, []).append(k)
    return [group[i : i + _AT_ONCE] for group in groups.values() for i in range(0, len(group), _AT_ONCE)]


def _key(value: Any) -> Hashable:
    """Equal for equal numbers and texts; anything else is like itself alone, as long as it lives."""
    return value if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


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


def portions(
    groups: Sequence[Sequence[int]], replicas: Mapping[int, Replica], memory: float | None
) -> list[list[list[int]]]:
    """The groups in portions that fit into memory one after the other; a group that does not is divided."""
    if not groups:
        return []
    if memory is not None:
        require_positive("memory", memory := plain_number(memory))
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

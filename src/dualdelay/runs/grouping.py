"""Which runs can advance together, and how many of them fit into memory."""

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
from .names import describe
from .settings import SimulatedFleet
from .spec import RunSpec

_SPARE = 0.5  # the share of free memory that states may take; the rest is for gradients
_AT_ONCE = 256  # replicas in a group
_SHARING: set[Hashable] = set()  # methods with plain settings that were found to share a schedule, for the sweeps to come


def grouped(specs: Mapping[int, RunSpec]) -> list[list[int]]:
    """The runs by what decides their schedule; those that cannot share one are left out."""
    groups: dict[Hashable, list[int]] = {}
    trials: dict[Hashable, bool] = {}
    for k, spec in specs.items():
        method, workers = spec.algorithm, spec.problem.workers
        settings = tuple((f.name, _key(getattr(method, f.name))) for f in fields(method) if f.name != "lr")
        kind = (type(method), settings, workers)
        if kind not in _SHARING and kind not in trials:
            trials[kind] = can_share(method, workers)
            if trials[kind] and all(_is_plain(getattr(method, f.name)) for f in fields(method)):
                _SHARING.add(kind)
        if kind in _SHARING or trials[kind]:
            assert isinstance(spec.fleet, SimulatedFleet)
            described = describe(spec.speeds)
            speeds = json.dumps(described) if "name" in described else id(spec.speeds)
            costs = tuple(spec.problem.batches(worker) for worker in range(workers))
            schedule = (kind, speeds, spec.seed, spec.x.dtype, len(spec.x), costs, spec.problem.batch_key)
            groups.setdefault(schedule, []).append(k)
    return [group[i : i + _AT_ONCE] for group in groups.values() for i in range(0, len(group), _AT_ONCE)]


def _key(value: Any) -> Hashable:
    """Equal for equal numbers and texts; anything else is like itself alone, as long as it lives."""
    return value if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _bytes(spec: RunSpec) -> int:
    """The memory that a run's state, its optimiser's moments, models in flight and known gradients take."""
    n, x = spec.problem.workers, spec.x
    state = spec.algorithm.init(torch.empty_like(x, device="meta"), n, Draws(spec.seed, "server"))
    half = {"full": 1.0, "half": 0.5, "host": 0.0}[spec.server.gradient_table]
    moments = 0 if spec.optimizer is None else 2
    total = (2.0 * n + moments) * x.nbytes
    for f in fields(state):
        value = getattr(state, f.name)
        total += value.nbytes if isinstance(value, torch.Tensor) else 0
        total += half * sum(row.nbytes for row in value if isinstance(row, torch.Tensor)) if isinstance(value, list) else 0
    return int(total)


def fitting(groups: Sequence[Sequence[int]], specs: Mapping[int, RunSpec], limit: float | None) -> list[list[list[int]]]:
    """The groups in parts that fit into memory one after the other; a group that does not is divided."""
    if not groups:
        return []
    room = _SPARE * free_memory(specs[groups[0][0]].x.device) if limit is None else limit
    parts: list[list[list[int]]] = [[]]
    used, total = 0, 0
    for group in groups:
        for k in group:
            size = _bytes(specs[k])
            total += size
            if used + size > room and parts[-1]:
                parts.append([])
                used = 0
            if parts[-1] and parts[-1][-1][0] in group:
                parts[-1][-1].append(k)
            else:
                parts[-1].append([k])
            used += size
    if len(parts) > 1:
        warnings.warn(
            f"the {len(specs)} runs need about {total / 1e9:.3g} GB and {room / 1e9:.3g} GB are theirs to take: they "
            f"run in {len(parts)} parts, one after the other.",
            stacklevel=4,
        )
    return parts

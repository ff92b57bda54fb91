"""Whether a method's server can be cut into shards, found out by trial."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Algorithm, Orders, Problem
from ..core.draws import Draws
from ..core.errors import BadInput
from ..core.state import ShapedState, Stepper
from ..engine.half import Half
from ..engine.loop import Loop
from ..engine.shard import ShardPlan
from ..engine.sharded import ShardedLoop
from ..engine.slices import GRAIN, Slices
from ..simulation.clocks import VirtualClock
from ..simulation.local_fleet import LocalFleet
from ..simulation.local_shards import LocalMessageFleet, LocalShards
from ..simulation.speeds import FixedSpeeds

_LENGTH, _SHARDS = 5 * GRAIN + 7, 2  # weights and shards of a trial
_FEW = 16  # workers that a trial has, unless the method needs more


class _Noise(Problem):
    """Gradients that are random numbers of very different sizes, from worker to worker and from weight to weight."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self, seed: int) -> Tensor:
        return torch.from_numpy(Draws(seed, "weights").normals(_LENGTH)).float()

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        draws = Draws(0, "noise")
        size = 10.0 ** (6.0 * draws.uniform(worker, draw) - 3.0 + torch.arange(_LENGTH) / _LENGTH)
        return (torch.from_numpy(draws.normals(_LENGTH, worker, draw)) * size).float() + 0.1 * x, float(draw)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {}

    def fingerprint(self) -> str:
        return "noise"


class _LooksAtValues(Exception):
    """A method's decision depends on what the numbers are."""


class _NoLooks(TorchDispatchMode):
    """Refuses to take a number out of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _LooksAtValues
        return func(*args, **(kwargs or {}))


class _Watched(Loop):
    """A whole server whose method must not look at values."""

    def _undoable(self, rule: str, decide: Callable[..., Orders], *given: Any) -> Orders:
        with _NoLooks():
            return super()._undoable(rule, decide, *given)


def why_inseparable(algorithm: Algorithm[Any], n: int, optimizer: Stepper | None = None) -> str:
    """Why the server of this method cannot be cut into shards, as a sentence's end; empty if it can.

    By trial: the same arrivals are absorbed by a whole server and by two shards, and every bit must agree. A method may not
    look at values to decide, nor make one weight's step depend on the others'.
    """
    try:
        algorithm.init(torch.zeros(1), _FEW, Draws(0, "server"))
        n = min(n, _FEW)
    except BadInput:  # it waits for more workers than that
        pass
    problem = _Noise(n)
    x, slices = problem.start(0), Slices(_LENGTH, _SHARDS)
    if isinstance(algorithm.init(x, n, Draws(0, "server")), ShapedState):
        return "it looks at the weights tensor by tensor, and a shard has only a slice of each"
    clock = VirtualClock(FixedSpeeds([1.0 + 0.37 * k % 2.9 for k in range(n)]))
    try:
        kind = _Watched if optimizer is None else Loop  # a torch optimiser counts its steps in tensors
        fleet = LocalFleet(problem, copy.deepcopy(clock), Half(algorithm))
        whole = kind(algorithm, problem, fleet, x.clone(), optimizer=copy.deepcopy(optimizer))
        plan = ShardPlan(algorithm, n, 0, copy.deepcopy(optimizer), "full", slices, x.dtype)
        shards = LocalShards(plan, x)
        messages = LocalMessageFleet(problem, clock, Half(algorithm), shards=shards)
        cut = ShardedLoop(plan, problem, messages, shards, optimizer=copy.deepcopy(optimizer))
        for loop in (whole, cut):
            loop.begin()
            for _ in range(40 + 2 * n):
                loop.advance()
    except _LooksAtValues:
        return "it decides by the values of gradients, and a shard has only a slice of them"
    except Exception as error:  # a user's own method may fail in any way on what it does not expect
        return f"it failed in a trial with two shards ({type(error).__name__}: {error})"
    rows, others = whole.rows_of(0, 0), cut.rows_of(0, 0)
    if any(rows[name].tolist() != others[name].tolist() for name in ("worker", "draw", "version", "after", "fingerprint")):
        return "a step of one weight depends on the others, and a shard has only a slice of them"
    return ""

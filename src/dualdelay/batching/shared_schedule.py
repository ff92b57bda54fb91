"""Whether runs of a method can advance together, found out by trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core import Algorithm, Orders, Problem
from ..core.draws import Draws
from ..core.errors import BadInput
from ..engine.half import Half
from ..engine.loop import Loop
from ..simulation.clocks import VirtualClock
from ..simulation.gradients import Batcher, GradientsInBatches
from ..simulation.local_fleet import LocalFleet
from ..simulation.speeds import FixedSpeeds
from .replicas import Replicas, column

_FEW = 16  # workers that a trial has, unless the method needs more
_RUNS, _LENGTH = 3, 5  # its runs and weights: numbers by which shapes can be told apart


class _Noise(Problem):
    """Gradients that are random numbers of very different sizes, to try an algorithm with."""

    def __init__(self, workers: int, seed: int) -> None:
        self.workers, self.seed = workers, seed

    def start(self, seed: int) -> Tensor:
        return torch.from_numpy(Draws(seed, "weights").normals(_LENGTH))

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        draws = Draws(self.seed, "noise")
        size = 10.0 ** (6.0 * draws.uniform(worker, draw) - 3.0)
        return torch.from_numpy(draws.normals(_LENGTH, worker, draw)) * size + 0.1 * x, float(draw)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {}

    def fingerprint(self) -> str:
        return "noise"


class _Mixed(Exception):
    """A method mixed what belongs to several runs."""


class _RowsApart(TorchDispatchMode):
    """Refuses every operation that makes one number of several runs' numbers, or takes a number off the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and look at the shapes."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _Mixed
        result = func(*args, **(kwargs or {}))
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        if any(part.ndim > 1 and part.shape[0] == _RUNS for part in given):
            for part in tree_leaves(result):
                if isinstance(part, Tensor) and (part.ndim == 0 or part.shape[0] != _RUNS):
                    raise _Mixed
        return result


class _Trial(Replicas):
    """Replicas whose steps are looked at."""

    def _undoable(self, rule: str, decide: Callable[..., Orders], *given: Any) -> Orders:
        with _RowsApart():
            return super()._undoable(rule, decide, *given)


def can_share(algorithm: Algorithm[Any], n: int) -> bool:
    """Whether runs of this algorithm that differ in step size can advance together: by trial, against runs by themselves.

    A method whose decisions depend on the gradients' values cannot, and neither can one that mixes the rows of replicas.
    """
    try:
        algorithm.init(torch.zeros(1), _FEW, Draws(0, "server"))
        n = min(n, _FEW)
    except BadInput:  # it waits for more workers than that
        pass
    problems = [_Noise(n, seed) for seed in range(_RUNS)]
    speeds = FixedSpeeds([1.0 + 0.37 * k % 2.9 for k in range(n)])
    methods = [replace(algorithm, lr=algorithm.lr * 0.5**k) for k in range(_RUNS)]
    starts = [problem.start(problem.seed) for problem in problems]

    def fleet(which: Sequence[int], method: Algorithm[Any]) -> LocalFleet:
        half = Half(method)
        whole = None if half.computes_ahead(problems[0]) else half
        gradients = GradientsInBatches(Batcher(problems[0].batched(problems)), which, whole)
        return LocalFleet(problems[0], VirtualClock(speeds), half, gradients=gradients)

    try:
        joint_fleet = fleet(range(_RUNS), column(methods, starts[0].device))
        joint = _Trial(methods, problems, joint_fleet, torch.stack(starts), seed=0)
        singles = [Loop(m, problems[k], fleet([k], m), starts[k]) for k, m in enumerate(methods)]
        for loop in (joint, *singles):
            loop.begin()
            for _ in range(40 + 2 * n):
                loop.advance()
        for k, single in enumerate(singles):
            if joint.recorder.rows()["worker"].tolist() != single.recorder.rows()["worker"].tolist():
                return False
            together, alone = joint.save_of(k)["state"], single.save()["state"]
            del together["lent"], alone["lent"]  # whether somebody has read the weights, and no matter of the method
            if together.keys() != alone.keys() or not all(_alike(together[name], alone[name]) for name in together):
                return False
    except Exception:  # a user's own method may fail in any way on what it does not expect
        return False
    return True


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return bool(a == b)

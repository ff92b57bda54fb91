"""Whether runs of a method can advance together, found out by trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .clocks import VirtualClock
from .core import Algorithm, Problem
from .draws import Draws
from .errors import BadInput, DualDelayError
from .gradients import Batch, Round
from .local_fleet import LocalFleet
from .loop import Loop
from .replicas import Replicas
from .speeds import FixedSpeeds

_FEW = 16  # workers that a trial has, unless the method needs more


class _Noise(Problem):
    """Gradients that are random numbers, to try an algorithm with."""

    seed = 0

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def start(self, seed: int) -> Tensor:
        return torch.from_numpy(Draws(seed, "weights").normals(5))

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        noise = torch.from_numpy(Draws(self.seed, "noise").normals(5, worker, draw))
        return (noise + 0.1 * x).reshape(x.shape), float(draw)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {}

    def fingerprint(self) -> str:
        return "noise"


def can_share(algorithm: Algorithm[Any], n: int) -> bool:
    """Whether runs of this algorithm that differ in step size can advance together: by trial, against runs by themselves.

    A method whose decisions depend on the gradients' values cannot, and neither can one that mixes the rows of replicas.
    """
    try:
        algorithm.init(torch.zeros(1), _FEW, Draws(0, "server"))
        n = min(n, _FEW)
    except BadInput:  # it waits for more workers than that
        pass
    problem = _Noise(n)
    speeds = FixedSpeeds([1.0 + 0.37 * k % 2.9 for k in range(n)])
    methods = [replace(algorithm, lr=algorithm.lr * factor) for factor in (1.0, 0.5, 0.25)]
    starts = [problem.start(k) for k in range(3)]

    def fleet(which: Sequence[int]) -> LocalFleet:
        gradients = Batch(Round(problem.together([problem] * 3)), which)
        return LocalFleet(problem, VirtualClock(speeds), algorithm.message, gradients=gradients)

    try:
        joint = Replicas(methods, [problem] * 3, fleet([0, 1, 2]), torch.stack(starts), seed=0)
        singles = [Loop(m, problem, fleet([0]), x) for m, x in zip(methods, starts, strict=True)]
        for loop in (joint, *singles):
            loop.begin()
            for _ in range(60 + 2 * n):
                loop.advance()
        for k, single in enumerate(singles):
            if joint.recorder.rows()["worker"].tolist() != single.recorder.rows()["worker"].tolist():
                return False
            mine, alone = joint.save_of(k)["state"], single.save()["state"]
            if mine.keys() != alone.keys() or not all(_alike(mine[name], alone[name]) for name in mine):
                return False
    except (DualDelayError, RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return False
    return True


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)

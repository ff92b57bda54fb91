"""Quadratics, on which everything about a method can be worked out by hand."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core import Problem, Samples
from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_zero_or_more, shown


def _tensor(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values, dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{name} cannot be read as numbers of one shape ({reason}).") from None
    if not bool(torch.isfinite(tensor).all()):
        raise BadInput(f"{name} holds a number that is not finite.")
    return tensor


class Quadratic(Problem):
    """F_i(x) = 1/2 (x - center_i)' A_i (x - center_i), in float64, with Gaussian noise added to each gradient.

    centers: the minimiser of each worker's function, n rows of d numbers.
    curvatures: A_i for each worker, a number or a d x d matrix; 1 if not given.
    noise: standard deviation of the noise, per coordinate.
    start: where a run starts; zero if not given.
    seed: names the noise; None: the run's own seed does.
    """

    def __init__(
        self, centers: Any, curvatures: Any = None, noise: float = 0.0, start: Any = None, seed: int | None = None
    ) -> None:
        noise, seed, curvatures = map(plain_number, (noise, seed, curvatures))
        self._b = _tensor("centers", centers)  # (n, d)
        if self._b.ndim != 2 or self._b.numel() == 0:
            raise BadInput(f"centers has shape {tuple(self._b.shape)}; expected one row of numbers for each worker.")
        n, d = self._b.shape
        if curvatures is not None and (isinstance(curvatures, (str, bytes)) or not isinstance(curvatures, Iterable)):
            raise BadInput(f"curvatures is {shown(curvatures)}; expected {n} entries, one for each row of centers.")
        curvatures = [1.0] * n if curvatures is None else list(curvatures)
        self.scalar = all(isinstance(a, (int, float)) or getattr(a, "ndim", 1) == 0 for a in curvatures)
        if not self.scalar:  # a number among matrices is that many times the identity
            tensors = [_tensor(f"curvatures[{i}]", a) for i, a in enumerate(curvatures)]
            curvatures = [a if a.ndim else a * torch.eye(d, dtype=torch.float64) for a in tensors]
            shapes = sorted({tuple(a.shape) for a in curvatures})
            if shapes != [(d, d)] or not all(torch.equal(a, a.T) for a in curvatures):
                raise BadInput(f"curvatures have shapes {shapes}; expected numbers or symmetric {d} x {d} matrices.")
        if len(curvatures) != n:
            raise BadInput(f"curvatures has {len(curvatures)} entries; expected {n}, one for each row of centers.")
        self._a = _tensor("curvatures", curvatures) if self.scalar else torch.stack(curvatures)  # (n) or (n, d, d)
        require_zero_or_more("noise", noise, "a finite standard deviation")
        self._x = torch.zeros(d, dtype=torch.float64) if start is None else _tensor("start", start)
        if self._x.shape != (d,):
            raise BadInput(f"start has shape {tuple(self._x.shape)}; expected {d} numbers.")
        self.workers, self.noise, self.seed, self.own_seed = n, noise, seed or 0, seed is not None
        self._draws = Draws(self.seed, "noise")

    @cached_property
    def _parts(self) -> list[tuple[Tensor, Any]]:
        """Each worker's center and curvature, as views."""
        return list(zip(self._b.unbind(0), self._a.tolist() if self.scalar else self._a.unbind(0), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Without views, each of which would be pickled with all that it is a view of."""
        return {name: value for name, value in self.__dict__.items() if name != "_parts"}

    @property
    def settings(self) -> dict[str, Any]:
        """What builds this problem again."""
        lists = {"centers": self._b.tolist(), "curvatures": self._a.tolist(), "start": self._x.tolist()}
        return {**lists, "noise": self.noise, "seed": self.seed if self.own_seed else None}

    def start(self, seed: int) -> Tensor:
        return self._x.clone()

    def _exact(self, x: Tensor, worker: int) -> tuple[Tensor, float]:
        center, curvature = self._parts[worker]
        away = x - center
        gradient = away * curvature if self.scalar else curvature @ away
        return gradient, 0.5 * float(away @ gradient)

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        gradient, loss = self._exact(x, worker)
        return {"loss": loss, "samples": 1, "gradient": gradient}

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = self._exact(x, worker)
        if self.noise:
            gradient += torch.from_numpy(self._draws.normals(len(x), worker, draw)) * self.noise
        return gradient, loss

    def _gradients(self, x: Tensor) -> tuple[Tensor, Tensor]:
        away = x - self._b
        return away, away * self._a[:, None] if self.scalar else torch.einsum("nij,nj->ni", self._a, away)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        away, gradients = self._gradients(x)
        objective = 0.5 * float((away * gradients).sum(1).mean())
        norm = float(gradients.mean(0).norm())
        return {"objective": objective, "pooled_loss": objective, "accuracy": math.nan, "gradient_norm": norm}

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        away, gradients = self._gradients(x)
        losses = (0.5 * (away * gradients).sum(1)).tolist()
        return self.evaluate(x), {worker: {"loss": loss, "samples": 1} for worker, loss in enumerate(losses)}

    def optimum(self) -> Tensor:
        """The minimiser of F: (sum A_i)^-1 sum A_i center_i."""
        _, at_zero = self._gradients(torch.zeros_like(self._x))
        total = self._a.sum(0)
        return -at_zero.sum(0) / total if self.scalar else torch.linalg.solve(total, -at_zero.sum(0))

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps({**self.settings, "seed": self.seed}).encode()).hexdigest()

    def reseeded(self, seed: int) -> Quadratic:
        return Quadratic(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return "" if self.noise else "it has no noise, so nothing in it is drawn"

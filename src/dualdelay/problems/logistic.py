"""L2-regularised logistic regression, convex and with known constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..core import Problem, Samples
from ..core.draws import Draws
from ..core.errors import (
    BadInput,
    is_finite,
    plain_number,
    require_positive,
    require_room,
    require_several,
    require_whole,
    require_workers,
    shown,
)
from .data import Shard, digest, objectives
from .minibatches import Minibatches, portion


def _float64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _checked(shards: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The user's own data, if they are numbers and labels for each worker."""
    require_several("shards", shards, "pairs (features, labels), one for each worker")
    pairs = []
    for worker, pair in enumerate(shards):
        try:
            features, labels = pair
            shapes = [tuple(_float64(part).shape) for part in (features, labels)]
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadInput(f"shards[{worker}] is no pair (features, labels) of numbers ({reason}).") from None
        if list(map(len, shapes)) != [2, 1]:
            what = f"shards[{worker}] has features and labels of shapes {shapes[0]} and {shapes[1]}"
            raise BadInput(f"{what}; expected a row of features and a label for each sample.")
        pairs.append((features, labels))
    return pairs


class Logistic(Problem):
    """F_i(x) = mean of log(1 + exp(-y a'x)) over worker i's samples (a, y = -1 or 1), plus reg/2 ||x||^2, in float64.

    Without ``shards`` the samples are drawn: y = 1 for half of them, and worker i's features are normal around its own
    random point, so that workers are the more heterogeneous the larger ``heterogeneity`` is.

    workers, features, samples: how many workers, numbers per sample and samples per worker.
    heterogeneity: distance of the workers' data from one another.
    reg: strength of the regularisation.
    batch_size: samples per gradient, drawn with replacement.
    seed: names the data and the minibatches; None: the run's own seed does.
    shards: the user's own data, a pair (features, labels) for each worker.
    """

    def __init__(
        self,
        workers: int = 10,
        features: int = 5,
        samples: int = 100,
        heterogeneity: float = 1.0,
        reg: float = 0.01,
        batch_size: int | Sequence[int] = 8,
        seed: int | None = None,
        shards: Sequence[tuple[Any, Any]] | None = None,
    ) -> None:
        workers, features, samples = map(plain_number, (workers, features, samples))
        heterogeneity, reg, seed, batch_size = map(plain_number, (heterogeneity, reg, seed, batch_size))
        require_positive("reg", reg)
        if shards is not None:
            shards = _checked(shards)
        lists = None if shards is None else [[torch.as_tensor(part).tolist() for part in pair] for pair in shards]
        self.settings: dict[str, Any] = {
            "workers": workers, "features": features, "samples": samples, "heterogeneity": heterogeneity,
            "reg": reg, "batch_size": batch_size, "seed": seed, "shards": lists,
        }  # fmt: skip
        self.own_seed, seed = seed is not None, seed or 0
        if shards is None:
            shards = self._drawn(workers, features, samples, heterogeneity, seed)
        if len(shards) == 0:
            raise BadInput("shards is empty; expected the data of at least one worker.")
        self._pairs = pairs = [(_float64(points), _float64(labels)) for points, labels in shards]
        self._shards = [Shard(pair, f"shards[{worker}]") for worker, pair in enumerate(pairs)]
        expected = tuple(pairs[0][0].shape[1:])
        for worker, (points, labels) in enumerate(pairs):
            if (shape := tuple(points.shape[1:])) != expected:
                raise BadInput(f"shards[{worker}] has features of shape {shape}; expected {expected}, as in shards[0].")
            if not bool((labels.abs() == 1).all()):
                raise BadInput(f"shards[{worker}] has labels {sorted(set(labels.tolist()))[:5]}; expected -1 and 1 only.")
        self._minibatches = Minibatches(len(pairs), batch_size, seed, replacement=True)
        self.workers, self.seed, self.reg = len(pairs), seed, float(reg)
        self._sizes = [shard.size for shard in self._shards]
        shares = [_float64(1.0 / (size * len(pairs))).expand(size) for size in self._sizes]  # in the mean over workers
        self._all = [torch.cat(parts) for parts in zip(*pairs, strict=True)] + [torch.cat(shares)]

    @staticmethod
    def _drawn(workers: int, features: int, samples: int, heterogeneity: float, seed: int) -> list[tuple[Tensor, Tensor]]:
        require_workers("workers", workers)
        for name, value in (("features", features), ("samples", samples)):
            require_whole(name, value, 1)
        if not is_finite(heterogeneity):
            raise BadInput(f"heterogeneity is {shown(heterogeneity)}; expected a finite number.")
        size = f"{workers} workers with {samples} samples of {features} features"
        require_room(size, 4.0 * 8 * workers * samples * features, "use less of them")
        draws, shards = Draws(seed, "logistic"), []
        direction = torch.from_numpy(draws.normals(features, 0))
        for worker in range(1, workers + 1):
            labels = torch.where(torch.arange(samples) % 2 == 0, 1.0, -1.0).double()
            cloud = torch.from_numpy(draws.normals(samples * features, worker, 0)).view(samples, features)
            place = torch.from_numpy(draws.normals(features, worker, 1)) * heterogeneity
            shards.append((cloud + place + labels[:, None] * direction, labels))
        return shards

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self._pairs[0][0].shape[1], dtype=torch.float64)

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, as positions in the worker's own data."""
        return self._minibatches.rows(worker, draw, self._shards[worker].size).clone()

    def _on(self, x: Tensor, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        margins = labels * (features @ x)
        loss = softplus(-margins).mean() + self.reg / 2 * (x @ x)
        return loss, features.T @ (-labels * torch.sigmoid(-margins)) / len(labels) + self.reg * x

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        loss, gradient = self._on(x, *self._shards[worker].batch(self.indices(worker, draw)))
        return gradient, float(loss)

    def gradient_part(self, x: Tensor, worker: int, draw: int, part: int, parts: int) -> tuple[Tensor, float]:
        rows = self.indices(worker, draw)
        mine = rows[portion(len(rows), part, parts)]
        if not len(mine):
            return torch.zeros_like(x), 0.0
        loss, gradient = self._on(x, *self._shards[worker].batch(mine))
        share = len(mine) / len(rows)
        return gradient * share, float(loss) * share

    def epoch(self, worker: int) -> int:
        return self._minibatches.epoch(worker, self._shards[worker].size)

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        loss, gradient = self._on(x, *self._pairs[worker])
        return {"loss": float(loss), "samples": self._shards[worker].size, "gradient": gradient}

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        features, labels, shares = self._all
        margins = labels * (features @ x)
        fits = torch.split(softplus(-margins), self._sizes)
        losses = (torch.stack([fit.mean() for fit in fits]) + self.reg / 2 * (x @ x)).tolist()
        gradient = features.T @ (-labels * torch.sigmoid(-margins) * shares) + self.reg * x
        accuracy = int((margins > 0).sum()) / len(labels)  # on the training data: there is no other
        numbers = {**objectives(losses, self._sizes, [1.0] * self.workers), "accuracy": accuracy}
        parts = {worker: {"loss": losses[worker], "samples": size} for worker, size in enumerate(self._sizes)}
        return {**numbers, "gradient_norm": float(gradient.norm())}, parts

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.assess(x)[0]

    def smoothness(self) -> list[float]:
        """A bound on each L_i: lambda_max(A'A) / (4 m) + reg."""
        return [float(torch.linalg.matrix_norm(a, 2)) ** 2 / (4 * len(a)) + self.reg for a, _ in self._pairs]

    def optimum(self) -> Tensor:
        """The minimiser of F, by Newton's method to a gradient of 1e-12."""
        x = self.start(0)
        for _ in range(100):
            gradient = torch.stack([self._on(x, *pair)[1] for pair in self._pairs]).mean(0)
            if float(gradient.norm()) < 1e-12:
                break
            hessian = self.reg * torch.eye(len(x), dtype=torch.float64)
            for features, _ in self._pairs:
                p = torch.sigmoid(features @ x)
                hessian += features.T @ (features * (p * (1 - p))[:, None]) / (len(features) * self.workers)
            x = x - torch.linalg.solve(hessian, gradient)
        return x

    def fingerprint(self) -> str:
        hashed = digest("logistic", self.reg, self.settings["batch_size"], self.seed)
        for shard in self._shards:
            shard.digest(hashed)
        return str(hashed.hexdigest())

    def reseeded(self, seed: int) -> Logistic:
        return Logistic(**{**self.settings, "seed": seed})

    @property
    def unseeded(self) -> str:
        return "its data are given, so a seed names its minibatches alone" if self.settings["shards"] is not None else ""

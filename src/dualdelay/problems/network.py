"""Any torch module as a problem: flat weights, each worker's own data, one named minibatch per job."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core import Problem
from ..devices import lower
from ..draws import Draws
from ..errors import BadInput, require_one_of
from ..together import OneAtATime, Together
from .batchnorm import refuse_batchnorm
from .data import Minibatches, Shard, digest, objectives
from .flat_module import FlatModule, bits, flat_weights
from .generators import seeded
from .purity import refuse_impure
from .shards import Exam, Shards, name_of

Loss = Callable[[Any, Any], Tensor]


class Network(Problem):
    """A module and a loss, with each worker's own data.

    model: a module, whose weights are where runs start, or a function that makes one, called under the run's seed.
    loss: a function of outputs and targets that gives the mean over a minibatch.
    shards: each worker's data, a pair of tensors (inputs, targets) or a map-style dataset; or a function of the worker's
        number that builds them, called at first use, in the process that computes for that worker, and under a seed.
    batch_size: samples per gradient, one number or one for each worker.
    workers: how many; needed if ``shards`` is a function.
    test: data on which accuracy is measured, or a function without arguments that builds them, called at first use.
    seed: names the minibatches.
    replacement: whether a minibatch is drawn with replacement, as in the paper.
    weights: whether workers count equally in F, as in the paper, or by their number of "samples".
    stochastic: seed torch's generator by the job's name around each gradient, for dropout or random augmentation.
    full_gradient: whether evaluation computes the norm of the full gradient, at the price of a backward pass over all data.

    Parameters with ``requires_grad=False`` stay as they are and are no part of the flat weights.
    """

    measures = True

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        shards: Sequence[Any] | Callable[[int], Any],
        batch_size: int | Sequence[int] = 64,
        *,
        workers: int | None = None,
        test: Any = None,
        seed: int = 0,
        replacement: bool = True,
        weights: str = "equal",
        stochastic: bool = False,
        full_gradient: bool = True,
    ) -> None:
        require_one_of("weights", weights, ("equal", "samples"))
        self._shards, self._exam = Shards(shards, workers), Exam(test)
        if self._shards.function is not None and weights == "samples":
            raise BadInput(
                "weights='samples' needs every worker's number of samples before the first gradient, and shards is a "
                "function that builds them later. Give the data themselves, or weights='equal'."
            )
        self.workers, self.seed = self._shards.workers, seed
        self._options = (batch_size, replacement, weights)
        self.minibatches = Minibatches(self.workers, batch_size, seed, replacement)
        sizes = [shard.size for shard in self._shards.kept.values()]
        for worker, size in enumerate(sizes):
            self.minibatches.require_enough(worker, size, f"worker {worker}")
        self.scales = [1.0] * self.workers  # each F_i's factor in F = (1/n) sum_i scale_i F_i
        if weights == "samples":
            self.scales = [self.workers * size / sum(sizes) for size in sizes]
        self.loss, self._stochastic, self.full_gradient = loss, stochastic, full_gradient
        self._draws = Draws(seed, "stochastic")
        self._make = None if isinstance(model, nn.Module) else model
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else self._made(0)
        refuse_batchnorm(module)
        self.net, self.precision = FlatModule(module), "float32"
        self._given = self.net.weights.clone()
        if self._shards.kept:
            self._probe(0, self._shards.kept.values())

    def shards(self) -> list[Shard]:
        """Every worker's data."""
        return [self._shard(worker) for worker in range(self.workers)]

    def _shard(self, worker: int) -> Shard:
        return self._shards.kept.get(worker) or self._first(worker)

    def _first(self, worker: int) -> Shard:
        """Have a worker's data built and keep them, if gradients on them are pure."""
        shard = self._shards.build(worker)
        self.minibatches.require_enough(worker, shard.size, f"shard({worker})")
        self._shards.kept[worker] = shard
        try:
            self._probe(worker, [shard])
        except BaseException:
            del self._shards.kept[worker]  # so that the next use is refused as well
            raise
        return shard

    def _probe(self, worker: int, shards: Iterable[Shard]) -> None:
        refuse_impure(self.net.module, lambda: self.gradient(self._given, worker, 0)[0], shards, self._stochastic)

    def _made(self, seed: int) -> nn.Module:
        assert self._make is not None
        with seeded(Draws(seed, "weights").key()):
            module = self._make()
        if not isinstance(module, nn.Module):
            raise BadInput(f"model() gave a {type(module).__name__}; expected a torch.nn.Module.")
        return module

    def start(self, seed: int) -> Tensor:
        return self._given.clone() if self._make is None else flat_weights(self._made(seed)).to(self._given.device)

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, as positions in the worker's own data."""
        return self.minibatches.rows(worker, draw, self._shard(worker).size).clone()

    def epoch(self, worker: int) -> int:
        return self.minibatches.epoch(worker, self._shard(worker).size)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        rows = self.indices(worker, draw)
        self.net.weights.copy_(x)
        with seeded(self._draws.key(worker, draw)) if self._stochastic else nullcontext():
            inputs, targets = self._shard(worker).batch(rows)
            with lower(self.precision, x.device):
                loss = self.loss(self.net.module(inputs), targets)
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; expected one number, the mean over the minibatch.")
        return self._scaled(self.net.gradient(loss).to(x.device), worker), loss.item()

    def _scaled(self, gradient: Tensor, worker: int) -> Tensor:
        scale = self.scales[worker]
        return gradient if scale == 1.0 else gradient * scale

    def _over_all(self, worker: int, shard: Shard) -> tuple[Tensor, Tensor | None]:
        """A worker's loss over all its samples, and its gradient if wanted, in float64 and still on the device."""
        loss = torch.zeros((), dtype=torch.float64, device=self._given.device)
        total = torch.zeros_like(self._given, dtype=torch.float64) if self.full_gradient else None
        for inputs, targets in shard.pieces():
            share = len(inputs) / shard.size
            with torch.set_grad_enabled(total is not None):
                part = self.loss(self.net.module(inputs), targets)
            if total is not None:
                total += share * self._scaled(self.net.gradient(part).to(total.device), worker)
            loss += share * part.detach().double().reshape(())
        return loss, total

    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        """A worker's loss over all its samples, their number, and that loss's gradient if wanted, in float64."""
        shard = self._shard(worker)  # before the weights are in place: at its first use it is tried with others
        with self.net.evaluating(x):
            loss, gradient = self._over_all(worker, shard)
        return {"loss": loss.item(), "samples": shard.size, "gradient": gradient}

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        """The metrics, with F over the workers that answered; accuracy is measured here."""
        with self.net.evaluating(x):
            accuracy = self._exam.accuracy(self.net.module)
        workers = sorted(parts)  # whoever answered first
        scales = [self.scales[worker] for worker in workers]
        factor = len(workers) / sum(scales) if 0 < len(workers) < self.workers else 1.0  # those of all have mean 1
        losses, sizes = ([parts[worker][name] for worker in workers] for name in ("loss", "samples"))
        gradients = [parts[worker]["gradient"] for worker in workers if parts[worker]["gradient"] is not None]
        norm = factor * float(torch.stack(gradients).mean(0).norm()) if gradients else math.nan
        means = objectives(losses, sizes, [factor * scale for scale in scales])
        return {**means, "accuracy": accuracy, "gradient_norm": norm}

    def evaluate(self, x: Tensor) -> dict[str, float]:
        shards = self.shards()
        with self.net.evaluating(x):
            found = []
            for worker, shard in enumerate(shards):  # random augmentation is that of ``measure``
                with nullcontext() if self.parallel else seeded(0):
                    found.append(self._over_all(worker, shard))
        losses = torch.stack([loss for loss, _ in found]).tolist()  # fetched at once
        parts = enumerate(zip(losses, found, shards, strict=True))
        return self.combine(x, {k: {"loss": loss, "samples": s.size, "gradient": g} for k, (loss, (_, g), s) in parts})

    def model(self, x: Tensor) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        return self.net.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.net.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.net.flat(state_dict)

    def fingerprint(self) -> str:
        hashed = digest(
            repr(self.net.module), name_of(self.loss), self._options, self.seed, self._stochastic, self.full_gradient
        )
        with seeded(0):  # augmented samples are drawn anew each time
            self._shards.digest(hashed)
            self._exam.digest(hashed)
        for tensor in self.net.fixed():
            hashed.update(bits(tensor))
        return str(hashed.hexdigest())

    def reseeded(self, seed: int) -> Network:
        """The same data and model with other minibatches."""
        other = copy.copy(self)  # one module and one store of data for both
        other.seed, other._draws = seed, Draws(seed, "stochastic")
        other.minibatches = self.minibatches.named(seed)
        return other

    @property
    def parallel(self) -> bool:
        return not self._stochastic and all(shard.pair is not None for shard in self.shards())

    def twin(self) -> Network:
        other = copy.copy(self)
        other.net = self.net.on(self._given.device)
        other.minibatches = self.minibatches.named(self.seed)  # what one thread has ahead is not another's
        return other

    def on(self, device: str, precision: str = "float32") -> Network:
        if (torch.device(device), precision) == (self._given.device, self.precision):
            return self
        other = copy.copy(self)
        other.net, other._given, other.precision = self.net.on(device), self._given.to(device), precision
        other._shards, other._exam = self._shards.on(device), self._exam.on(device)
        return other

    @property
    def kin(self) -> Hashable:
        kinds = {shard.kind for shard in self.shards()}
        if not self.parallel or self.minibatches.size is None or len(kinds) > 1:
            return OneAtATime
        place = (str(self._given.device), self.precision)
        return self.net.signature(), self.loss, self.minibatches.size, place, kinds.pop()

    def together(self, problems: Sequence[Problem]) -> Together:
        if self.kin is OneAtATime:
            return OneAtATime(problems)
        from .stacked import Stacked  # it needs this module

        return Stacked([problem for problem in problems if isinstance(problem, Network)])

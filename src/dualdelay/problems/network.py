"""Any torch module as a problem: flat weights, each worker's own data, one named minibatch per job."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from ..core import Problem
from ..draws import Draws
from ..errors import BadInput
from .batchnorm import refuse_batchnorm
from .data import Minibatches, Shard, digest
from .generators import seeded, watched_generators

Loss = Callable[[Any, Any], Tensor]
_flatten: Any = _flatten_dense_tensors  # it has no types


class Network(Problem):
    """A module and a loss, with each worker's own data.

    model: a module, whose weights are where runs start, or a function that makes one, called under the run's seed.
    loss: a function of outputs and targets that gives the mean over a minibatch.
    shards: each worker's data, a pair of tensors (inputs, targets) or a map-style dataset.
    batch_size: samples per gradient, one number or one for each worker.
    test: data on which accuracy is measured.
    seed: names the minibatches.
    replacement: whether a minibatch is drawn with replacement, as in the paper.
    weights: whether workers count equally in F, as in the paper, or by their number of "samples".
    stochastic: seed torch's generator by the job's name around each gradient, for dropout or random augmentation.
    full_gradient: whether evaluation computes the norm of the full gradient, at the price of a backward pass over all data.

    Parameters with ``requires_grad=False`` stay as they are and are no part of the flat weights.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        shards: Sequence[Any],
        batch_size: int | Sequence[int] = 64,
        *,
        test: Any = None,
        seed: int = 0,
        replacement: bool = True,
        weights: str = "equal",
        stochastic: bool = False,
        full_gradient: bool = True,
    ) -> None:
        if len(shards) == 0:
            raise BadInput("shards is empty; expected the data of at least one worker.")
        self._shards = [Shard(shard, f"shards[{worker}]") for worker, shard in enumerate(shards)]
        self._test = None if test is None else Shard(test, "test")
        self.workers, self.seed = len(shards), seed
        self._options = (batch_size, replacement, weights)
        self._minibatches = Minibatches([s.size for s in self._shards], batch_size, seed, replacement, weights)
        self._loss, self._stochastic, self._full_gradient = loss, stochastic, full_gradient
        self._draws = Draws(seed, "stochastic")
        self._make = None if isinstance(model, nn.Module) else model
        self._module = copy.deepcopy(model) if isinstance(model, nn.Module) else self._made(0)
        refuse_batchnorm(self._module)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        kinds = sorted({str(p.dtype) for p in self._parameters})
        if len(kinds) != 1:
            raise BadInput(f"the model's trainable parameters have types {kinds}; expected at least one, all of one type.")
        self._flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._given = self._flat.clone()
        offset = 0
        for parameter in self._parameters:  # each becomes a view, so that loading weights is a single copy
            size = parameter.numel()
            parameter.data = self._flat[offset : offset + size].view_as(parameter)
            offset += size
        self._module.train()
        self._probe()

    def _made(self, seed: int) -> nn.Module:
        assert self._make is not None
        with seeded(Draws(seed, "weights").key()):
            module = self._make()
        if not isinstance(module, nn.Module):
            raise BadInput(f"model() gave a {type(module).__name__}; expected a torch.nn.Module.")
        return module

    def _probe(self) -> None:
        """Take gradients and refuse a model, loss or data that keeps or draws something a job's name does not fix."""
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        with watched_generators() as drew:
            first, _ = self.gradient(self._given, 0, 0)
            with seeded(0) if self._stochastic else nullcontext():
                for shard in self._shards:
                    shard.touch()
        if "torch" in drew:
            culprits = [name for name, m in self._module.named_modules() if "Dropout" in type(m).__name__]
            raise BadInput(
                "the model, its loss or its data drew from torch's global generator "
                f"({f'dropout: {culprits}' if culprits else 'no dropout layer was found'}); then a job's gradient depends "
                "on who computed before it. Pass stochastic=True to draw by the job's name."
            )
        if drew:
            raise BadInput(
                f"the model, its loss or its data drew from the global generator of {drew[0]}; then a job's gradient "
                "depends on who computed before it. Draw with torch instead and pass stochastic=True."
            )
        changed = [name for name, b in self._module.named_buffers() if not torch.equal(b, buffers[name])]
        if changed:
            raise BadInput(
                f"computing a gradient changed the model's buffers {changed}: state that a worker would keep to itself. "
                "Use layers without running statistics, for instance track_running_stats=False."
            )
        if not torch.equal(first.nan_to_num(), self.gradient(self._given, 0, 0)[0].nan_to_num()):
            raise BadInput(
                "the same job gave two different gradients: the model, its loss or its data draw or keep something of "
                "their own. Draw with torch's global generator and pass stochastic=True, and keep nothing between calls."
            )

    def start(self, seed: int) -> Tensor:
        if self._make is None:
            return self._given.clone()
        return torch.cat([p.detach().reshape(-1) for p in self._made(seed).parameters() if p.requires_grad])

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, as positions in the worker's own data."""
        return self._minibatches.rows(worker, draw).clone()

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self._stochastic:
            with seeded(self._draws.key(worker, draw)):
                return self._backward(x, worker, self.indices(worker, draw))
        return self._backward(x, worker, self.indices(worker, draw))

    def _backward(self, x: Tensor, worker: int, rows: Tensor) -> tuple[Tensor, float]:
        self._flat.copy_(x)
        inputs, targets = self._shards[worker].batch(rows)
        loss = self._loss(self._module(inputs), targets)
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; expected one number, the mean over the minibatch.")
        parts: Sequence[Tensor | None] = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(parts, self._parameters, strict=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        gradient: Tensor = _flatten(filled)  # one call, where a cat of reshapes is one for each parameter
        scale = self._minibatches.scales[worker]
        return gradient if scale == 1.0 else gradient * scale, loss.item()

    def _mean(self, worker: int, x: Tensor) -> tuple[float, Tensor | None]:
        """A worker's loss over all its data, and that loss's gradient if wanted."""
        shard, loss, total = self._shards[worker], 0.0, torch.zeros_like(x, dtype=torch.float64)
        for rows in shard.chunks():
            share = len(rows) / shard.size
            if self._full_gradient:
                gradient, part = self._backward(x, worker, rows)
                total += share * gradient
            else:
                inputs, targets = shard.batch(rows)
                with torch.no_grad():
                    part = self._loss(self._module(inputs), targets).item()
            loss += share * part
        return loss, total if self._full_gradient else None

    def evaluate(self, x: Tensor) -> dict[str, float]:
        self._flat.copy_(x)
        self._module.eval()
        try:
            with seeded(0):
                means = [self._mean(worker, x) for worker in range(self.workers)]
                accuracy = self._accuracy()
        finally:
            self._module.train()
        gradients = [gradient for _, gradient in means if gradient is not None]
        norm = float(torch.stack(gradients).mean(0).norm()) if gradients else math.nan
        losses = self._minibatches.objectives([loss for loss, _ in means])
        return {**losses, "accuracy": accuracy, "gradient_norm": norm}

    def _accuracy(self) -> float:
        """The share of test samples whose largest output is their class; nan if targets are no classes."""
        right = 0
        for rows in self._test.chunks() if self._test is not None else ():
            assert self._test is not None
            inputs, targets = self._test.batch(rows)
            with torch.no_grad():
                outputs = self._module(inputs)
            if targets.is_floating_point() or outputs.ndim != targets.ndim + 1:
                return math.nan
            right += int((outputs.argmax(1) == targets).sum())
        return right / self._test.size if self._test is not None else math.nan

    def model(self, x: Tensor) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        self._flat.copy_(x)
        return copy.deepcopy(self._module).eval()

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        self._flat.copy_(x)
        return {name: tensor.detach().clone().contiguous() for name, tensor in self._module.state_dict().items()}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        module = copy.deepcopy(self._module)
        try:
            module.load_state_dict(state_dict)
        except RuntimeError as error:
            raise BadInput(f"the given weights are not this model's: {error}") from None
        return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])

    def fingerprint(self) -> str:
        loss = getattr(self._loss, "__qualname__", type(self._loss).__name__)
        hashed = digest(repr(self._module), loss, self._options, self.seed, self._stochastic, self._full_gradient)
        with seeded(0):  # augmented samples are drawn anew each time
            for shard in (*self._shards, *([self._test] if self._test else [])):
                shard.digest(hashed)
        fixed = [p for p in self._module.parameters() if not p.requires_grad]
        for tensor in (*fixed, *self._module.buffers()):
            hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return str(hashed.hexdigest())

    def reseeded(self, seed: int) -> Network:
        """The same data and model with other minibatches."""
        other = copy.copy(self)
        other.seed, other._draws = seed, Draws(seed, "stochastic")
        other._minibatches = Minibatches(self._minibatches.sizes, self._options[0], seed, *self._options[1:])
        return other

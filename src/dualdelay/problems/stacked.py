"""The gradients of many networks in one call: stacked weights, each with its own minibatch, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..core.devices import lower
from ..core.draws import integers_at
from .data import Minibatches, Shard
from .flat_module import FlatModule, own_kernels

_MOST = 512  # gradients in one call: with more, nothing is gained on an H200
_SPARE = 0.4  # the share of a GPU's free memory that one call may take


class Stackable(Protocol):
    """What is needed of a network to take its gradients with those of others."""

    workers: int
    net: FlatModule
    minibatches: Minibatches
    precision: str
    loss: Any

    @property
    def scales(self) -> list[float]:
        """What each worker's loss is multiplied by."""

    def shards(self) -> list[Shard]:
        """Each worker's data."""

    def indices(self, worker: int, draw: int) -> Tensor:
        """Which of its samples a worker's minibatch has."""


def _size(count: int) -> int:
    """The size of graph that a call of ``count`` gradients uses: at most an eighth larger, so that few are captured."""
    step = max(1, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


class Store:
    """All samples of several problems in one place, and the names of their minibatches."""

    def __init__(self, problems: Sequence[Stackable]) -> None:
        self._problems = problems
        pairs: list[tuple[Tensor, Tensor]] = []
        first: dict[tuple[int, int], int] = {}  # by the identities of inputs and targets: where their rows begin
        orders: list[Tensor] = []
        workers = max(problem.workers for problem in problems)
        self._begin, self._sizes = (np.zeros((len(problems), workers), dtype=np.int64) for _ in range(2))
        self._scales = np.ones((len(problems), workers))
        total = 0
        for k, problem in enumerate(problems):
            for worker, shard in enumerate(problem.shards()):
                assert shard.pair is not None
                inputs, targets = shard.pair
                pair = id(inputs), id(targets)
                if pair not in first:
                    first[pair] = sum(len(part) for part, _ in pairs)
                    pairs.append((inputs, targets))
                rows = torch.arange(shard.size, device=inputs.device) if shard.rows is None else shard.rows
                orders.append(rows + first[pair])
                self._begin[k, worker], self._sizes[k, worker] = total, shard.size
                total += shard.size
            self._scales[k, : problem.workers] = problem.scales
        self.inputs, self.targets = (
            torch.cat([pair[side] for pair in pairs]) if len(pairs) > 1 else pairs[0][side] for side in (0, 1)
        )
        self.order = torch.cat(orders)
        self.weighted = bool((self._scales != 1.0).any())
        bases = [problem.minibatches.base for problem in problems]
        self.hashed = None not in bases
        self._bases = np.array([base or 0 for base in bases], dtype=np.int64)

    def names(self, which: Sequence[int], workers: Sequence[int], draws: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
        """What ``samples`` needs to know of some jobs, and their scales, filled up to ``size`` with the last job."""
        problem, worker, draw = (
            np.array([*part, *part[-1:] * (size - len(part))]) for part in map(list, (which, workers, draws))
        )
        begin, bound = self._begin[problem, worker], self._sizes[problem, worker]
        scales = torch.from_numpy(self._scales[problem, worker])
        if self.hashed:
            return torch.from_numpy(np.stack([begin, bound, self._bases[problem], worker, draw])), scales
        rows = [self._problems[k].indices(w, d) for k, w, d in zip(which, workers, draws, strict=True)]
        table = torch.stack([*rows, *rows[-1:] * (size - len(rows))]).T  # (batch, size)
        return torch.cat([torch.from_numpy(begin)[None], table]), scales

    def samples(self, names: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The minibatches (size, batch, ...) of named jobs."""
        begin = names[0, :, None]
        if self.hashed:
            _, bound, base, worker, draw = names
            rows = integers_at(base, bound, batch, worker, draw)
        else:
            rows = names[1:].T
        picked = self.order[begin + rows]
        flat = picked.reshape(-1)
        inputs, targets = self.inputs.index_select(0, flat), self.targets.index_select(0, flat)
        return inputs.view(*picked.shape, *inputs.shape[1:]), targets.view(*picked.shape, *targets.shape[1:])


class Stacked:
    """Takes gradients of networks that differ in their data and weights alone."""

    def __init__(self, problems: Sequence[Stackable]) -> None:
        self._net, self._precision = problems[0].net, problems[0].precision
        self._loss: Any = problems[0].loss
        self._batch = problems[0].minibatches.size
        self._store = Store(problems)
        self._x = self._net.weights
        self._device = self._x.device
        self._ours = self._device.type == "cuda"
        self._graphs: dict[int, tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]] = {}
        self._memory: Any = None  # what graphs compute in; they share it, since they run one after the other
        self.most = min(_MOST, self._fits()) if self._device.type == "cuda" else 1 << 62

    def _compute(self, x: Tensor, names: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (m, d) and losses (m)."""
        assert self._batch is not None
        inputs, targets = self._store.samples(names, self._batch)
        parts = {name: part.detach().requires_grad_() for name, part in self._net.named(x).items()}
        with own_kernels(self._precision, self._ours, stacked=True), lower(self._precision, self._device):
            losses = vmap(self._one)(parts, inputs, targets)
        summed = (losses * scales.to(losses.dtype)).sum() if self._store.weighted else losses.sum()
        gradients = torch.autograd.grad(summed, list(parts.values()), allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parts.values(), strict=True)]
        return torch.cat([gradient.reshape(len(x), -1) for gradient in filled], 1), losses.detach()

    def _one(self, parts: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(self._net.module, parts, (inputs,))
        loss: Tensor = self._loss(outputs, targets)
        return loss.reshape(())

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        pieces = [piece if piece.ndim == 2 else piece[None] for piece in x]
        if self._device.type != "cuda":
            return self._compute(torch.cat(pieces), *self._store.names(which, workers, draws, len(draws)))
        graph, into, names, scales, (gradients, losses) = self._graph(_size(len(draws)))
        torch.cat(pieces, out=into[: len(draws)])
        named, weights = self._store.names(which, workers, draws, len(into))
        names.copy_(named.pin_memory(), non_blocking=True)
        if self._store.weighted:
            scales.copy_(weights.pin_memory(), non_blocking=True)
        graph.replay()
        return gradients[: len(draws)], losses[: len(draws)]

    def _inputs(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Static tensors for so many gradients, filled with the first job of the first worker."""
        names, scales = self._store.names([0] * size, [0] * size, [0] * size, size)
        return self._x.expand(size, -1).contiguous(), names.to(self._device), scales.to(self._device)

    def _graph(self, size: int) -> tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        if size not in self._graphs:
            static = self._inputs(size)
            cuda: Any = torch.cuda
            side = cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):  # libraries set themselves up outside of a graph
                for _ in range(2):
                    self._compute(*static)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                out = self._compute(*static)
            self._memory = self._memory or graph.pool()
            self._graphs[size] = (graph, *static, out)
        return self._graphs[size]

    def _fits(self, trial: int = 4) -> int:
        """How many gradients at once the free memory allows, by a trial of a few."""
        static = self._inputs(trial)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._compute(*static)
        each = max(1, (torch.cuda.max_memory_allocated(self._device) - before) // trial)
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(1, int(_SPARE * free) // each)

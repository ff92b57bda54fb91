"""The gradients of many networks in one call: stacked weights, each with its own minibatch, on a GPU as a CUDA graph."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..core.batched_gradients import OneAtATime
from ..core.devices import lower
from ..core.draws import integers_at
from ..kernels.attention import Attention
from ..kernels.recurrent import Recurrent
from .flat_module import own_kernels

_MOST = 512  # gradients in one call: with more, nothing is gained on an H200
_TRIAL = 4  # gradients in a call that finds out what a GPU can do
_ALONE = 3  # gradients on a GPU that are taken one after the other if no graph can be made of a call
_FEW = 2048  # samples that several models are evaluated on at once on a processor, theirs counted together
_WAITS = "called a synchronizing CUDA operation"  # what torch says of such
_trying = threading.Lock()  # the mode that shows who waits is one for all threads
_SPARE = 0.2  # the share of a GPU's memory that one call may take, whatever is free of it: the bits depend on it


class _Samples:
    """The samples of several networks as rows of common tensors, from which the minibatches of many jobs are picked."""

    def __init__(self, problems: Sequence[Any]) -> None:
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
        self._inputs, self._targets = (
            torch.cat([pair[side] for pair in pairs]) if len(pairs) > 1 else pairs[0][side] for side in (0, 1)
        )
        self._order = torch.cat(orders)
        self.weighted = bool((self._scales != 1.0).any())
        bases = [problem.minibatches.base for problem in problems]
        self._hashed = None not in bases  # then minibatches are drawn where the samples are
        self._bases = np.array([base or 0 for base in bases], dtype=np.int64)

    def locate(
        self, which: Sequence[int], workers: Sequence[int], draws: Sequence[int], size: int
    ) -> tuple[Tensor, Tensor]:
        """What ``minibatches`` needs to know of jobs, and their scales, filled up to ``size`` with the last job."""
        problem, worker, draw = (
            np.array([*part, *part[-1:] * (size - len(part))]) for part in map(list, (which, workers, draws))
        )
        begin, bound = self._begin[problem, worker], self._sizes[problem, worker]
        scales = torch.from_numpy(self._scales[problem, worker])
        if self._hashed:
            return torch.from_numpy(np.stack([begin, bound, self._bases[problem], worker, draw])), scales
        rows = [self._problems[k].indices(w, d) for k, w, d in zip(which, workers, draws, strict=True)]
        table = torch.stack([*rows, *rows[-1:] * (size - len(rows))]).T  # (batch, size)
        return torch.cat([torch.from_numpy(begin)[None], table]), scales

    def minibatches(self, located: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The minibatches (size, batch, ...) of jobs."""
        picked = self._drawn(located, batch) if self._hashed else self._order[located[0, :, None] + located[1:].T]
        inputs, targets = (part.index_select(0, picked.reshape(-1)) for part in (self._inputs, self._targets))
        return inputs.view(*picked.shape, *inputs.shape[1:]), targets.view(*picked.shape, *targets.shape[1:])

    def _drawn(self, located: Tensor, batch: int) -> Tensor:
        """The rows (size, batch) of jobs whose samples are drawn with replacement."""
        if located.is_cuda:
            try:
                from ..kernels.sampling import drawn
            except ImportError:  # it needs Triton
                pass
            else:
                return drawn(located, self._order, batch)
        begin, bound, base, worker, draw = located
        return self._order[begin[:, None] + integers_at(base, bound, batch, worker, draw)]


class Stacked:
    """Takes gradients of networks that differ in their data and weights alone."""

    def __init__(self, problems: Sequence[Any]) -> None:
        first = problems[0]
        self._net = first.net.on(first.net.weights.device)  # what fails in a trial may leave batched weights in an LSTM
        self._loss, self._precision = first.loss, first.precision
        self._batch = first.minibatches.size
        self._samples = _Samples(problems)
        self._device = self._net.weights.device
        self._on_gpu = self._device.type == "cuda"
        self._graphs: dict[int, tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]] = {}
        self._pooled_next: set[int] = set()  # what the kernels learn of the network in a trial
        self._memory: Any = None  # what graphs compute in; they share it, since they run one after the other
        if self._on_gpu:
            static = self._static(_TRIAL)
            self.most = min(_MOST, self._most_in_memory(static))
            self._captures = _never_waits(lambda: self._compute(*static))
            self._warn_unless_same(*(self._compute(*static)[0] for _ in range(2)))
        else:
            self.most, self._captures = 1 << 62, False
            self._compute(*self._static(1))  # a trial, for models whose gradients cannot be taken so
        self._alone, self._one_by_one = _ALONE if self._on_gpu and not self._captures else 0, OneAtATime(problems)

    def __call__(
        self, x: Sequence[Tensor], which: Sequence[int], workers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if len(draws) <= self._alone:
            return self._one_by_one(x, which, workers, draws)
        pieces = [piece if piece.ndim == 2 else piece[None] for piece in x]
        if not self._captures:
            located, scales = self._samples.locate(which, workers, draws, len(draws))
            return self._compute(torch.cat(pieces), located.to(self._device), scales.to(self._device))
        graph, models, located, scales, (gradients, losses) = self._graph(_graph_size(len(draws)))
        torch.cat(pieces, out=models[: len(draws)])
        new_located, new_scales = self._samples.locate(which, workers, draws, len(models))
        located.copy_(new_located.pin_memory(), non_blocking=True)
        if self._samples.weighted:
            scales.copy_(new_scales.pin_memory(), non_blocking=True)
        graph.replay()
        return gradients[: len(draws)], losses[: len(draws)]

    def _compute(self, x: Tensor, located: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (m, d) and losses (m)."""
        inputs, targets = self._samples.minibatches(located, self._batch)
        parts = {name: part.detach().requires_grad_() for name, part in self._net.named(x).items()}
        with own_kernels(self._precision, self._on_gpu) as kernels, lower(self._precision, self._device):
            if kernels is not None:
                kernels.pooled_next = self._pooled_next
            with Attention(), Recurrent():
                losses = vmap(self._loss_of_one)(parts, inputs, targets)
        total = (losses * scales.to(losses.dtype)).sum() if self._samples.weighted else losses.sum()
        gradients = torch.autograd.grad(total, list(parts.values()), materialize_grads=True)
        return torch.cat([gradient.reshape(len(x), -1) for gradient in gradients], 1), losses.detach()

    def _loss_of_one(self, parts: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._loss(functional_call(self._net.module, parts, (inputs,)), targets)
        return loss.reshape(())

    def _static(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors for the input of so many gradients, filled with the first job of the first worker."""
        located, scales = self._samples.locate([0] * size, [0] * size, [0] * size, size)
        return self._net.weights.expand(size, -1).contiguous(), located.to(self._device), scales.to(self._device)

    def _graph(self, size: int) -> tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        if size not in self._graphs:
            static = self._static(size)
            cuda: Any = torch.cuda
            side = cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):  # libraries set themselves up outside of a graph
                self._compute(*static)
            torch.cuda.current_stream(self._device).wait_stream(side)
            torch.cuda.empty_cache()  # what that took is of no use to graphs, which have memory of their own
            graph: Any = torch.cuda.CUDAGraph()
            with _nothing_let_go(), torch.cuda.graph(graph, pool=self._memory):
                out = self._compute(*static)
            self._memory = self._memory or graph.pool()
            self._graphs[size] = (graph, *static, out)
        return self._graphs[size]

    def _warn_unless_same(self, first: Tensor, second: Tensor) -> None:
        """Warn of gradients that are not the same twice."""
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            warnings.warn(
                f"this model's gradients are not the same twice on {self._device}: in some operations, such as "
                "interpolation on its way back, torch adds up in another order each time. The same run may end with other "
                "bits; torch.use_deterministic_algorithms(True) may help.",
                stacklevel=4,
            )

    def _most_in_memory(self, static: tuple[Tensor, Tensor, Tensor]) -> int:
        """How many gradients at once the memory allows, by a trial of a few."""
        gc.collect()  # graphs of earlier sweeps hold memory until they are found to be garbage
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self._compute(*static)
        needed = max(1, (torch.cuda.max_memory_allocated(self._device) - before) // _TRIAL)
        _, total = torch.cuda.mem_get_info(self._device)
        return max(1, int(_SPARE * total) // needed)


class StackedModule:
    """A module with the weights (r, d) of several runs at once, in the mode that it has."""

    def __init__(self, net: Any, x: Tensor) -> None:
        self._net, self._x = net, x
        self._parts = {name: part.detach() for name, part in net.named(x).items()}

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs (r, n, ...) of every run's module for the same n samples."""
        outputs: Tensor = vmap(self._of_one, in_dims=(0, None))(self._parts, inputs)
        return outputs

    def _of_one(self, parts: dict[str, Tensor], inputs: Tensor) -> Any:
        return functional_call(self._net.module, parts, (inputs,))

    def mean_losses(
        self, loss: Any, shards: Sequence[Any], scales: Sequence[float], gradient: bool
    ) -> tuple[list[list[float]], Tensor | None]:
        """Each run's mean losses over the samples of each worker, and the gradients (r, d) of their scaled sums."""
        runs, device = len(self._x), self._x.device
        losses = torch.zeros(len(shards), runs, dtype=torch.float64, device=device)
        total = torch.zeros_like(self._x, dtype=torch.float64) if gradient else None
        if gradient:
            self._parts = {name: part.requires_grad_() for name, part in self._parts.items()}
        for workers, counts, inputs, targets in _batches(shards, runs):
            shares = torch.tensor([n / shards[w].size for w, n in zip(workers, counts, strict=True)], dtype=torch.float64)
            factors = torch.tensor([scales[w] for w in workers], dtype=torch.float64)
            with torch.set_grad_enabled(gradient):
                pairs = zip(torch.split(self(inputs), counts, 1), torch.split(targets, counts), strict=True)
                several = [vmap(loss, in_dims=(0, None))(*pair).reshape(runs) for pair in pairs]
                found = torch.stack(several)  # (workers, r)
            shares = shares.to(device)[:, None]
            losses.index_add_(0, torch.tensor(workers, device=device), shares * found.detach())
            if total is not None:
                weighted = (found * (shares * factors.to(device)[:, None]).to(found.dtype)).sum()
                parts = torch.autograd.grad(weighted, list(self._parts.values()), materialize_grads=True)
                total += torch.cat([part.reshape(runs, -1) for part in parts], 1)
        return losses.T.tolist(), total


def _batches(shards: Sequence[Any], runs: int) -> Iterator[tuple[list[int], list[int], Tensor, Tensor]]:
    """All workers' samples in order in batches for so many models: whose they are, how many of each, and the pairs."""
    workers: list[int] = []
    parts: list[tuple[int, Tensor, Tensor]] = []
    most = max(1, (16_384 if shards[0].pair[0].is_cuda else _FEW) // runs)
    for worker, shard in enumerate(shards):
        for count, (inputs, targets) in shard.pieces(most):
            if parts and sum(n for n, _, _ in parts) + count > most:
                yield workers, *_joined(parts)
                workers, parts = [], []
            workers.append(worker)
            parts.append((count, inputs, targets))
    yield workers, *_joined(parts)


def _joined(parts: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[list[int], Tensor, Tensor]:
    counts, inputs, targets = zip(*parts, strict=True)
    return list(counts), torch.cat(inputs), torch.cat(targets)


def _never_waits(work: Callable[[], Any]) -> bool:
    """Whether work on a GPU never waits for it, as a graph must not: a model may copy a number of its own there."""
    with _trying:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # this mode, it says, does not see all that waits
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if _WAITS not in str(error):
                raise
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return True


@contextmanager
def _nothing_let_go() -> Iterator[None]:
    """While this lasts no garbage is collected: an old graph that is let go would spoil the capture of a new one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _graph_size(count: int) -> int:
    """The size of graph that a call of ``count`` gradients uses: at most an eighth larger, so that few are captured."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step

"""What is found out about a user's model, loss and data by trying them: purity, means, mixed samples, operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import BadInput
from .data import Shard
from .generators import seeded, watched_generators

# layers whose output for one sample does not depend on the others in the batch, in evaluation mode
_SAMPLEWISE = {
    nn.Sequential, nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.Flatten,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.GroupNorm, nn.LayerNorm, nn.Dropout, nn.Dropout2d, nn.ZeroPad2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
}  # fmt: skip
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # which argument's last dimension is summed over


def refuse_impure(module: nn.Module, gradient: Callable[[], Tensor], shards: Iterable[Shard], stochastic: bool) -> None:
    """Take gradients and refuse a model, loss or data that keeps or draws something a job's name does not fix."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with watched_generators() as drew:
        first = gradient()
        with seeded(0) if stochastic else nullcontext():
            for shard in shards:
                shard.touch()
    if drew:
        dropout = [name for name, part in module.named_modules() if "Dropout" in type(part).__name__]
        raise BadInput(
            f"the model, its loss or its data drew from the global generator of {' and '.join(drew)} "
            f"({f'dropout: {dropout}' if dropout else 'no dropout layer was found'}); then a job's gradient depends on "
            "what was computed before it. Pass batch_size=dd.Batches(..., stochastic=True) to draw by the job's name."
        )
    changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, buffers[name])]
    if changed:
        raise BadInput(
            f"computing a gradient changed the model's buffers {changed}: state that a worker would keep to itself. "
            "Use layers without running statistics, for instance track_running_stats=False."
        )
    first, second = first.nan_to_num(), gradient().nan_to_num()
    slack = 0.0 if first.is_cpu else 0.01 * float(first.abs().max())  # cuDNN may sum in another order each time
    if float((first - second).abs().max()) > slack:
        raise BadInput(
            "the same job gave two different gradients: the model, its loss or its data draw from a generator of their own "
            "or keep something between calls. Draw from the global generators of torch, numpy or Python and pass "
            "batch_size=dd.Batches(..., stochastic=True), and keep nothing between calls."
        )


def refuse_sums(loss: Callable[[int], float]) -> None:
    """Refuse a loss that is a sum over the minibatch: it is twice as large when every sample is there twice, and so on."""
    once, twice, thrice = (loss(times) for times in (1, 2, 3))
    if once and abs(twice / once - 2.0) < 1e-3 and abs(thrice / once - 3.0) < 1e-3:
        raise BadInput(
            f"the loss is a sum over the minibatch, not a mean: {once:g}, and {twice:g} with every sample twice. The step "
            "size would grow with batch_size; take the mean, such as reduction='mean'."
        )


def is_samplewise(module: nn.Module) -> bool:
    """Whether a module consists of layers that are known not to mix samples; a user's own layers are not known."""
    parts = list(module.modules())
    plain = all(type(part) in _SAMPLEWISE and not part._forward_hooks and not part._forward_pre_hooks for part in parts)
    return plain and all(part.start_dim >= 1 for part in parts if isinstance(part, nn.Flatten))


class _Counter(TorchDispatchMode):
    """Adds up the operations of matrix products and convolutions.

    Torch has a counter of its own, which would import Triton.
    """

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would otherwise import its compiler, which takes seconds, to keep it from compiling the next method."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in _PRODUCTS:
            self.total += 2 * result.numel() * args[_PRODUCTS[name]].shape[-1]
        elif name == "convolution":
            self.total += 2 * result.numel() * args[1][0].numel()
        return result


def count_operations(function: Callable[[], Tensor]) -> int:
    """The floating-point operations that a function does in matrix products and convolutions."""
    with torch.no_grad(), _Counter() as counter:
        function()
    return int(counter.total)

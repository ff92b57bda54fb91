"""A job's gradient is a function of its name: what would make it depend on who computed before is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..core.errors import BadInput
from .data import Shard
from .generators import seeded, watched_generators


def refuse_impure(module: nn.Module, gradient: Callable[[], Tensor], shards: Iterable[Shard], stochastic: bool) -> None:
    """Take gradients and refuse a model, loss or data that keeps or draws something a job's name does not fix."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with watched_generators() as drew:
        first = gradient()
        with seeded(0) if stochastic else nullcontext():
            for shard in shards:
                shard.touch()
    if drew:
        culprits = [name for name, m in module.named_modules() if "Dropout" in type(m).__name__]
        raise BadInput(
            f"the model, its loss or its data drew from the global generator of {' and '.join(drew)} "
            f"({f'dropout: {culprits}' if culprits else 'no dropout layer was found'}); then a job's gradient depends on "
            "who computed before it. Pass stochastic=True to draw by the job's name."
        )
    changed = [name for name, b in module.named_buffers() if not torch.equal(b, buffers[name])]
    if changed:
        raise BadInput(
            f"computing a gradient changed the model's buffers {changed}: state that a worker would keep to itself. "
            "Use layers without running statistics, for instance track_running_stats=False."
        )
    first, second = first.nan_to_num(), gradient().nan_to_num()
    slack = 0.0 if first.is_cpu else 0.01 * float(first.abs().max())  # cuDNN may sum in another order each time
    if float((first - second).abs().max()) > slack:
        raise BadInput(
            "the same job gave two different gradients: the model, its loss or its data draw or keep something of their "
            "own. Draw with the global generators of torch, numpy or Python and pass stochastic=True, and keep nothing "
            "between calls."
        )


def refuse_sums(loss: Callable[[int], float]) -> None:
    """Refuse a loss that is a sum over the minibatch: it doubles when every sample is there twice, and so on."""
    once, twice, thrice = (loss(times) for times in (1, 2, 3))
    if once and abs(twice / once - 2.0) < 1e-3 and abs(thrice / once - 3.0) < 1e-3:
        raise BadInput(
            f"the loss is a sum over the minibatch, not a mean: {once:g}, and {twice:g} with every sample twice. The step "
            "size would grow with batch_size; take the mean, such as reduction='mean'."
        )

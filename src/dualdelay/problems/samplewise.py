"""What can be told of a module without running it for long: whether it mixes samples, and how much it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# layers whose output for one sample does not depend on the others in the batch, in evaluation mode
_APART = {
    nn.Sequential, nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.Flatten,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.GroupNorm, nn.LayerNorm, nn.Dropout, nn.Dropout2d, nn.ZeroPad2d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
}  # fmt: skip


def takes_samples_one_by_one(module: nn.Module) -> bool:
    """Whether a module is made of nothing but layers that are known not to mix samples; a user's own are not known."""
    parts = list(module.modules())
    plain = all(type(part) in _APART and not part._forward_hooks and not part._forward_pre_hooks for part in parts)
    return plain and all(part.start_dim >= 1 for part in parts if isinstance(part, nn.Flatten))


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # which argument's last dimension is summed over


class _Counter(TorchDispatchMode):
    """Adds up the operations of matrix products and convolutions.

    Torch has a counter of its own, which would import Triton.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it and count."""
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in _PRODUCTS:
            self.total += 2 * result.numel() * args[_PRODUCTS[name]].shape[-1]
        elif name == "convolution":
            self.total += 2 * result.numel() * args[1][0].numel()
        return result


def flops_of(function: Callable[[], Tensor]) -> int:
    """The operations that a function does in matrix products and convolutions."""
    with torch.no_grad(), _Counter() as counter:
        function()
    return int(counter.total)

"""Convolutions and pooling inside ``vmap`` by kernels of our own, where torch would make something slow of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from .convolution import conv2d
from .pooling import max_pool2d

_WIDE = 32  # output channels from which the chip's matrix units pay, where a lower precision lets them be used
_DOTS = {"float32": "fma", "tf32": "tf32", "bfloat16": "ieee"}


def _stacked(part: Tensor | None, dim: int | None, count: int) -> Any:
    """What one network has as what all have."""
    if part is None:
        return None
    return part.movedim(dim, 0) if dim is not None else part.expand(count, *part.shape)


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """One network's convolution."""
    return conv2d(x[None], weight[None], None if bias is None else bias[None], *rest)[0]


class _Convolution(torch.autograd.Function):
    """One network's convolution, which under ``vmap`` becomes that of all networks."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dot: str) -> Tensor:
        return _alone(x, weight, bias, stride, padding, dot)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: under vmap the gradient is that of the kernel."""

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, int]:
        """All networks at once."""
        parts = zip((x, weight, bias), dims[:3], strict=True)
        x, weight, bias = (_stacked(part, dim, info.batch_size) for part, dim in parts)
        return conv2d(x, weight, bias, *rest), 0


class _Pooling(torch.autograd.Function):
    """One network's pooling, which under ``vmap`` becomes that of all networks."""

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int]) -> Tensor:
        return max_pool2d(x, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: under vmap the gradient is that of the kernel."""

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, int]:
        """All networks at once."""
        return max_pool2d(_stacked(x, dims[0], info.batch_size), size), 0


_convolve: Any = _Convolution.apply  # they have no types
_pool: Any = _Pooling.apply


class Kernels(TorchFunctionMode):
    """While this lasts, plain two-dimensional convolutions and poolings go to our kernels."""

    def __init__(self, precision: str, stacked: bool) -> None:
        """Those of one network, or those that ``vmap`` makes of many."""
        super().__init__()
        self._precision = precision
        self._convolve: Any = _convolve if stacked else _alone
        self._pool: Any = _pool if stacked else max_pool2d

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over what the kernels can do."""
        kwargs = kwargs or {}
        taken = None
        if func is functional.conv2d and not kwargs and len(args) == 7:
            taken = self._convolved(*args)
        elif func is functional.max_pool2d and args:
            taken = self._pooled(*args, **kwargs)
        return func(*args, **kwargs) if taken is None else taken

    def _convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor | None:
        if (
            x.ndim != 4
            or isinstance(padding, str)
            or _pair(dilation) != (1, 1)
            or groups != 1
            or weight.dtype != torch.float32
        ):
            return None
        dot = _DOTS[self._precision] if len(weight) >= _WIDE else "fma"
        parts: Any = (x, weight, bias)
        if self._precision == "bfloat16":
            parts = (None if part is None else part.bfloat16() for part in parts)
        result: Tensor = self._convolve(*parts, _pair(stride), _pair(padding), dot)
        return result

    def _pooled(
        self, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, **rest: Any
    ) -> Any:
        size = _pair(kernel_size)
        plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not any(rest.values()) and x.ndim == 4
        if plain and (x.shape[-2] < size[0] or x.shape[-1] < size[1]):
            return None  # torch says what is wrong
        if not plain or (stride is not None and _pair(stride) != size) or size[0] * size[1] > 255:
            return None
        return self._pool(x, size)

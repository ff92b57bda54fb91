"""Convolutions inside ``vmap`` by one launch of our own kernel, where torch would make a slow grouped convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .convolution import conv2d

_WIDE = 32  # output channels from which the chip's matrix units pay, where a lower precision lets them be used
_DOTS = {"float32": "fma", "tf32": "tf32", "bfloat16": "ieee"}


class _Convolution(torch.autograd.Function):
    """One network's convolution, which under ``vmap`` becomes that of all networks."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dot: str) -> Tensor:
        return functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: under vmap the gradient is that of the kernel."""

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dot: str
    ) -> tuple[Tensor, int]:
        """All networks at once."""
        stacked: Any = (
            None if part is None else part.movedim(dim, 0) if dim is not None else part.expand(info.batch_size, *part.shape)
            for part, dim in zip((x, weight, bias), dims[:3], strict=True)
        )
        x, weight, bias = stacked
        return conv2d(x, weight, bias, stride, padding, dot), 0


class Convolving(TorchFunctionMode):
    """While this lasts, plain two-dimensional convolutions in float32 and bfloat16 go to our kernel."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over a convolution that the kernel can do."""
        if func is not functional.conv2d or kwargs or len(args) != 7:
            return func(*args, **(kwargs or {}))
        x, weight, bias, stride, padding, dilation, groups = args
        if isinstance(padding, str) or tuple(dilation) != (1, 1) or groups != 1 or weight.dtype != torch.float32:
            return func(*args)
        if self._precision == "bfloat16":
            x, weight, bias = (None if part is None else part.bfloat16() for part in (x, weight, bias))
        dot = _DOTS[self._precision] if len(weight) >= _WIDE else "fma"
        convolve: Any = _Convolution.apply
        return convolve(x, weight, bias, tuple(stride), tuple(padding), dot)

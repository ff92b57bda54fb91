"""Sends plain convolutions, poolings and normalisations to the package's own kernels.

Under ``vmap`` torch would make slow ones of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from .convolution import conv2d
from .normalization import LARGEST, group_norm, layer_norm
from .pooling import max_pool2d

# What a layer has from which the chip's matrix units pay: output channels; channels on both sides, for gradients by weights
# alone; and terms in a sum, for arranging the images anew to pay. Chosen by trials on the layers of benchmarks/models.py.
_WIDE, _NARROW = 32, 16
_TERMS = 64
_DOTS = {"float32": "tf32x3", "tf32": "tf32", "bfloat16": "tf32"}  # a product of short floats is exact in TF32


class Kernels(TorchFunctionMode):
    """While this lasts, plain convolutions and poolings of images, and normalisations, go to the package's own kernels."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self._precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if func is functional.conv2d and not kwargs and len(args) == 7:
            result = self._convolved(*args)
        elif func is functional.max_pool2d and args:
            result = self._pooled(*args, **kwargs)
        elif func is functional.group_norm and len(args) == 2:
            result = self._by_groups(*args, **kwargs)
        elif func is functional.layer_norm and len(args) == 2:
            result = self._by_rows(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor | None:
        plain = x.ndim == 4 and not isinstance(padding, str) and _pair(dilation) == (1, 1) and groups == 1
        if not plain or weight.dtype != torch.float32:
            return None
        long = math.prod(weight.shape[1:]) >= _TERMS
        dot = _DOTS[self._precision] if long and len(weight) >= _WIDE else "fma"
        weight_dot = _DOTS[self._precision] if long and min(weight.shape[:2]) >= _NARROW else dot
        if self._precision == "bfloat16":
            x, weight, bias = x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
        stack = x[None], weight[None], None if bias is None else bias[None]  # of one model
        return conv2d(*stack, _pair(stride), _pair(padding), dot, weight_dot).squeeze(0)

    def _pooled(
        self, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, **rest: Any
    ) -> Tensor | None:
        size = _pair(kernel_size)
        plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not any(rest.values())
        apart = (stride is None or _pair(stride) == size) and size[0] * size[1] <= 255
        fits = x.ndim == 4 and x.shape[-2] >= size[0] and x.shape[-1] >= size[1]  # otherwise torch says what is wrong
        return max_pool2d(x, size) if plain and apart and fits else None

    def _by_groups(self, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
        if weight is None or bias is None or x.ndim < 2 or x.shape[1] % groups or x.numel() == 0:
            return None
        together = math.prod(x.shape[1:]) // groups
        if not self._are_short(together, x, weight, bias):
            return None
        return group_norm(x.float()[None], groups, weight[None], bias[None], eps).squeeze(0)

    def _by_rows(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor | None:
        if weight is None or bias is None or len(shape) != 1 or x.shape[-1:] != tuple(shape) or x.numel() == 0:
            return None
        if not self._are_short(shape[0], x, weight, bias):
            return None
        return layer_norm(x.float()[None], weight[None], bias[None], eps).squeeze(0)

    def _are_short(self, together: int, x: Tensor, *parts: Tensor) -> bool:
        """Whether a program can hold what is normalised together, and types are those that torch would compute in."""
        kinds = (torch.float32, torch.bfloat16) if self._precision == "bfloat16" else (torch.float32,)
        return together <= LARGEST and x.dtype in kinds and all(part.dtype == torch.float32 for part in parts)

"""Sends plain convolutions, poolings and normalisations to the package's own kernels.

Under ``vmap`` torch would make slow ones of them. A ReLU whose result only the next pooling takes is left to that; so code
that reads tensors behind torch's functions, such as an extension in C++ between the two, would find it unwritten.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from .convolution import Convolved, conv2d, pooled
from .linear import linear
from .normalization import LARGEST, group_norm, layer_norm
from .pooling import max_pool2d

# What a layer has from which the chip's matrix units pay: output channels; channels on both sides, for gradients by weights
# alone; and terms in a sum, for arranging the images anew to pay. Chosen by trials on the layers of benchmarks/models.py.
_WIDE, _NARROW = 32, 16
_TERMS = 64
_WINDOW = 16  # pixels of a window up to which the way back to a convolution is one kernel, a step for each of them
_DOTS = {"float32": "tf32x3", "tf32": "tf32", "bfloat16": "tf32"}  # a product of short floats is exact in TF32
_RELU = (functional.relu, torch.relu, Tensor.relu)


class _Made(NamedTuple):
    """What a call made that the next one may take further in one go: rectified images, of a convolution perhaps."""

    result: Tensor
    rectified: Tensor | None  # what a ReLU was given, if it made this
    convolved: Convolved | None
    number: int = -1  # of the ReLU
    put_off: bool = False  # whether the result is not written yet

    def write(self) -> None:
        """Write a result that was put off."""
        assert self.rectified is not None
        self.result.copy_(functional.relu(self.rectified))


class Kernels(TorchFunctionMode):
    """While this lasts, plain convolutions and poolings of images, and normalisations, go to the package's own kernels."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self._precision = precision
        self._made: _Made | None = None  # by the last call of all
        self._relus = 0  # that were taken
        # Of a ReLU whose result the last call pooled: that, what it was given, its number, and whether it was put off.
        self._left: tuple[weakref.ref[Tensor], Tensor, int, bool] | None = None
        # The numbers of a network's ReLUs that only a pooling takes further, which is the very next call: found out in one
        # pass, and in later ones, if they are given this set, not written at all.
        self.pooled_next: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        before, self._made = self._made, None
        self._learn()
        if func is functional.max_pool2d and args:
            result = self._pooled(before, *args, **kwargs)
        if before is not None and before.put_off and (result is None or args[0] is not before.result):
            before.write()
        if func is functional.conv2d and not kwargs and len(args) == 7:
            result = self._convolved(*args)
        elif func in _RELU and len(args) == 1:
            result = self._rectified(before, func, args[0], kwargs)
        elif func is functional.linear:
            result = self._multiplied(*args, **kwargs)
        elif func is functional.group_norm and len(args) == 2:
            result = self._by_groups(*args, **kwargs)
        elif func is functional.layer_norm and len(args) == 2:
            result = self._by_rows(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _learn(self) -> None:
        """Once a ReLU's result was pooled: whether anything else may ask for it, and if so, write it."""
        if self._left is None:
            return
        (result, rectified, number, put_off), self._left = self._left, None
        kept = result()
        if kept is None:
            self.pooled_next.add(number)
        else:
            self.pooled_next.discard(number)
            if put_off:
                kept.copy_(functional.relu(rectified))

    def _rectified(self, before: _Made | None, func: Any, x: Tensor, kwargs: Any) -> Tensor:
        put_off = self._relus in self.pooled_next and not kwargs.get("inplace", False)
        result: Tensor = torch.empty_like(x) if put_off else func(x, **kwargs)
        of = before.convolved if before is not None and before.result is x else None
        self._made = _Made(result, x, of, self._relus, put_off)
        self._relus += 1
        return result

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
        given = (*stack, _pair(stride), _pair(padding), dot, weight_dot)
        convolved = Convolved(conv2d(*given), *given)
        y = convolved.y.squeeze(0)
        if dot != "fma":
            self._made = _Made(y, None, convolved)
        return y

    def _pooled(
        self,
        before: _Made | None,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        **rest: Any,
    ) -> Tensor | None:
        size = _pair(kernel_size)
        plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not any(rest.values())
        apart = (stride is None or _pair(stride) == size) and size[0] * size[1] <= 255
        fits = x.ndim == 4 and x.shape[-2] >= size[0] and x.shape[-1] >= size[1]  # otherwise torch says what is wrong
        if not (plain and apart and fits):
            return None
        if before is None or before.rectified is None or before.result is not x:
            return max_pool2d(x, size)
        self._left = weakref.ref(x), before.rectified, before.number, before.put_off
        if before.convolved is None or size[0] * size[1] > _WINDOW:
            return max_pool2d(before.rectified, size, rectified=True)
        return pooled(before.convolved, size).squeeze(0)

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        stacked = is_batchedtensor(weight) and weight.ndim == 2 and x.ndim > 1
        if not stacked or self._precision == "bfloat16" or {x.dtype, weight.dtype} != {torch.float32}:
            return None
        y = linear(x.reshape(-1, x.shape[-1])[None], weight[None], None if bias is None else bias[None])
        return y.reshape(*x.shape[:-1], -1)

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

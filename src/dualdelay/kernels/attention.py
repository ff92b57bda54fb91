"""Attention of many models in one call.

Under ``vmap`` torch's fused kernels fail on a GPU (2.11: "LSE is not correctly aligned"), and on a processor they are
called for one model after the other.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .stacking import more_models

_GPU = (torch.float32, torch.float16, torch.bfloat16)
_PROCESSOR = (torch.float32, torch.float64)
_LINE = 16  # bytes of which rows have to be multiples on a GPU

# Torch's own asks first whether somebody overrides it, which calls us, with our mode off for all that it calls. This copy
# does not ask, so that the attention within it comes to us.
_multi_head: Any = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)


class Attention(TorchFunctionMode):
    """While this lasts, attention is computed for all of ``vmap``'s models at once; no flag of torch's is changed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return _multi_head(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return func(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention``: fused where torch has a fused form that needs no mask, by its parts elsewhere."""
    plain = attn_mask is None and dropout_p == 0 and query.ndim == key.ndim == value.ndim == 4
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if plain and alike and query.shape[:2] == key.shape[:2] == value.shape[:2] and _is_fusable(query):
        y: Tensor = _apply(*map(_with_whole_rows, (query, key, value)), is_causal, scale)[0]
        return y
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # what is below adds its mask
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    by_parts: Any = torch._scaled_dot_product_attention_math
    y, _ = by_parts(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return y


def _is_fusable(query: Tensor) -> bool:
    if query.is_cuda:
        return query.dtype in _GPU and query.shape[-1] * query.element_size() % _LINE == 0
    return query.is_cpu and query.dtype in _PROCESSOR


def _with_whole_rows(part: Tensor) -> Tensor:
    """The same with the numbers of a row side by side, as torch's kernels take for granted."""
    return part if part.stride(-1) == 1 else part.contiguous()


class _Fused(torch.autograd.Function):
    """Queries, keys and values (n, heads, places, size), and the way back; always in the same order of additions."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
        if query.is_cpu:
            y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=scale
            )
            return y, sums
        parts = (part.transpose(1, 2) for part in (query, key, value))
        given = (None, None, None, None, None, 0.0, int(causal), True)
        y, sums, *_ = torch.ops.aten._efficient_attention_forward(*parts, *given, scale=scale)
        return y.transpose(1, 2), sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *parts, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*parts, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, y, sums = ctx.saved_tensors
        dy = _with_whole_rows(dy)
        if query.is_cpu:
            slopes = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, query, key, value, y, sums, 0.0, ctx.causal, scale=ctx.scale
            )
            return (*slopes, None, None)
        dy, query, key, value, y = (part.transpose(1, 2) for part in (dy, query, key, value, y))
        none = torch.empty((), dtype=torch.int64, device=query.device)  # where dropout would begin to draw
        given = (None, y, None, None, query.shape[1], key.shape[1], sums, 0.0, none, none, int(ctx.causal), False)
        slopes = torch.ops.aten._efficient_attention_backward(
            dy, query, key, value, *given, scale=ctx.scale, num_splits_key=1
        )  # more splits are added up as they come
        return (*(slope.transpose(1, 2) for slope in slopes[:3]), None, None)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Models under ``vmap`` are more samples."""
        parts = [_with_whole_rows(part) for part in more_models(info.batch_size, inputs[:3], dims) if part is not None]
        y, sums = _apply(*parts, *inputs[3:])
        return (y.unflatten(0, (info.batch_size, -1)), sums.unflatten(0, (info.batch_size, -1))), (0, 0)


_apply: Any = _Fused.apply  # it has no types

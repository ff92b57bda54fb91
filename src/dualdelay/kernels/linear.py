"""Linear layers of many models: torch's own way back under ``vmap`` leaves the weights' gradients transposed in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .stacking import more_models


class _Linear(torch.autograd.Function):
    """x (G, B, inputs) by weights (G, outputs, inputs), and the way back."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(dy, weight) if of_x else None,
            torch.bmm(dy.mT, x) if of_weight else None,
            dy.sum(1) if of_bias else None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Models under ``vmap`` are more models of the same product."""
        return _apply(*more_models(info.batch_size, inputs, dims)).unflatten(0, (info.batch_size, -1)), 0


_apply: Any = _Linear.apply  # it has no types


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x (G, B, inputs) with weight (G, outputs, inputs) and add bias (G, outputs), a model at a time."""
    y: Tensor = _apply(x, weight, bias)
    return y

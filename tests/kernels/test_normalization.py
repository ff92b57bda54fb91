"""Normalisation of many models by the package's own kernels against torch's, one model at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from dualdelay.core.devices import lower
from dualdelay.kernels.dispatch import Kernels
from dualdelay.kernels.normalization import LARGEST, group_norm, layer_norm
from helpers import rounding

pytestmark = pytest.mark.numeric

Stack = tuple[list[Tensor], Tensor]

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "groups of images": (lambda: nn.GroupNorm(2, 6), (3, 6, 5, 4)),
    "one group": (lambda: nn.GroupNorm(1, 3, eps=0.1), (2, 3, 7)),
    "a group for each channel": (lambda: nn.GroupNorm(5, 5), (2, 5, 3, 3)),
    "groups without places": (lambda: nn.GroupNorm(2, 10), (4, 10)),
    "rows": (lambda: nn.LayerNorm(10), (4, 9, 10)),
    "more rows than a chunk": (lambda: nn.LayerNorm(100, eps=0.01), (150, 100)),
    "one row": (lambda: nn.LayerNorm(3), (3,)),
}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(module: nn.Module, shape: tuple[int, ...], count: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """Scales and shifts of several networks, and inputs for each of them that are far from zero."""
    names = dict(module.named_parameters())
    parts = {name: randn(count, *p.shape, seed=len(name)).requires_grad_() for name, p in names.items()}
    return parts, (2.0 + randn(count, *shape)).requires_grad_()


def together(module: nn.Module, parts: dict[str, Tensor], x: Tensor, precision: str = "float32") -> Tensor:
    with Kernels(precision), lower(precision, torch.device("cpu")):
        y: Tensor = vmap(lambda weights, inputs: functional_call(module, weights, (inputs,)))(parts, x)
    return y


def results(y: Tensor, parts: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    slopes = randn(*y.shape, seed=4).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *parts.values()], slopes)]


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    make, shape = LAYERS[name]
    module = make()
    parts, x = stacked(module, shape)
    y = together(module, parts, x)
    double, exact = (
        {k: p.detach().double().requires_grad_() for k, p in parts.items()},
        x.detach().double().requires_grad_(),
    )
    alone = [functional_call(module, {k: p[i] for k, p in double.items()}, (exact[i],)) for i in range(len(x))]
    close = rounding(20 + x[0].numel(), torch.float32)  # no sum has more terms than a model has inputs
    for ours, theirs in zip(results(y, parts, x), results(torch.stack(alone), double, exact), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float32
        assert (ours.double() - theirs).norm() <= close * theirs.norm()


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_does_not_depend_on_the_others(name: str) -> None:
    make, shape = LAYERS[name]
    module = make()
    parts, x = stacked(module, shape)
    some = {k: p[1:2].detach().requires_grad_() for k, p in parts.items()}
    one = x[1:2].detach().requires_grad_()
    y, alone = together(module, parts, x), together(module, some, one)
    assert torch.equal(alone, y[1:2])
    (both,), (single,) = (torch.autograd.grad(out.sum(), [inputs]) for out, inputs in ((y, x), (alone, one)))
    assert torch.equal(single, both[1:2])


def test_inputs_may_have_any_layout_in_memory() -> None:
    weight, bias = randn(2, 6), randn(2, 6, seed=2)
    x = randn(2, 4, 5, 6)
    assert torch.equal(layer_norm(x, weight, bias, 1e-5), layer_norm(x.mT.contiguous().mT, weight, bias, 1e-5))
    images = randn(2, 3, 4, 5, 6).permute(0, 1, 4, 2, 3)
    assert torch.equal(group_norm(images, 3, weight, bias, 1e-5), group_norm(images.contiguous(), 3, weight, bias, 1e-5))


LEFT: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "no scales": (lambda x: functional.group_norm(x, 2), (2, 4, 3)),
    "no shifts": (lambda x: functional.layer_norm(x, (3,), torch.ones(3)), (2, 4, 3)),
    "several axes": (lambda x: functional.layer_norm(x, (4, 3), torch.ones(4, 3), torch.zeros(4, 3)), (2, 4, 3)),
    "too many": (nn.LayerNorm(LARGEST + 1), (1, LARGEST + 1)),
    "nothing": (nn.GroupNorm(2, 4), (0, 4, 3)),
    "double": (nn.GroupNorm(2, 4).double(), (2, 4, 3)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_cannot_do_is_left_to_torch(name: str) -> None:
    function, shape = LEFT[name]
    x = randn(*shape).double() if name == "double" else randn(*shape)
    with Kernels("float32"):
        y = function(x)
    assert torch.equal(y, function(x))
    assert y.grad_fn is None or "Norm" in type(y.grad_fn).__name__


def test_a_group_that_does_not_divide_the_channels_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="divisible"), Kernels("float32"):
        functional.group_norm(randn(2, 5, 3), 2, torch.ones(5), torch.zeros(5))


def test_short_floats_are_normalised_in_float32() -> None:
    module = nn.LayerNorm(6)
    parts, x = stacked(module, (4, 6))
    y = together(module, parts, x.bfloat16(), "bfloat16")
    with lower("bfloat16", torch.device("cpu")):
        exact = torch.stack(
            [functional.layer_norm(x[k].bfloat16().float(), (6,), *(p[k] for p in parts.values())) for k in range(3)]
        )
    assert y.dtype == torch.float32
    assert (y - exact).norm() <= rounding(30, torch.float32) * exact.norm()

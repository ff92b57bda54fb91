"""Many convolutions in one launch against torch's own, one model at a time, with the kernels run by their interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

os.environ["TRITON_INTERPRET"] = "1"

from dualdelay.problems import convolution

# models, batch, channels, height, width, outputs, kernel, stride, padding
SHAPES = {
    "plain": (1, 3, 2, 7, 6, 6, (5, 5), (1, 1), (0, 0)),
    "padded": (2, 2, 2, 7, 6, 20, (3, 3), (1, 1), (2, 2)),
    "oblong": (3, 5, 2, 11, 7, 3, (3, 2), (1, 1), (1, 0)),
    "strided": (1, 3, 2, 8, 9, 17, (3, 3), (2, 2), (1, 1)),
    "uneven": (2, 2, 3, 8, 7, 9, (2, 3), (2, 3), (0, 2)),
    "pointwise": (1, 2, 34, 5, 5, 5, (1, 1), (2, 1), (1, 1)),
    "several chunks": (1, 42, 1, 10, 11, 2, (1, 2), (1, 1), (0, 0)),
}


def tensors(shape: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g, b, c, h, w, o, kernel, _, _ = shape
    make = torch.Generator().manual_seed(1)
    sizes = (g, b, c, h, w), (g, o, c, *kernel), (g, o)
    x, weight, bias = (torch.randn(size, generator=make).to(dtype).requires_grad_() for size in sizes)
    return x, weight, bias


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b).norm() <= tolerance * b.norm())


@pytest.mark.parametrize("dot", ["fma", "ieee"])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_torchs(name: str, dot: str) -> None:
    shape = SHAPES[name]
    inputs = tensors(shape)
    y = convolution.conv2d(*inputs, *shape[-2:], dot)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.stack([conv2d(*model, *shape[-2:]) for model in zip(*exact, strict=True)])
    assert near(y, expected, 1e-6)
    slopes = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(expected, exact, slopes.double())
    for ours, theirs in zip(torch.autograd.grad(y, inputs, slopes), wanted, strict=True):
        assert near(ours, theirs, 1e-6)


@pytest.mark.parametrize("dot", ["fma", "tf32"])
def test_a_model_does_not_depend_on_the_others(dot: str) -> None:
    shape = SHAPES["oblong"]
    inputs = tensors(shape)
    y = convolution.conv2d(*inputs, *shape[-2:], dot)
    gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    alone = [t[1:2].detach().requires_grad_() for t in inputs]
    one = convolution.conv2d(*alone, *shape[-2:], dot)
    assert torch.equal(one, y[1:2])
    for ours, all_models in zip(torch.autograd.grad(one, alone, torch.ones_like(one)), gradients, strict=True):
        assert torch.equal(ours, all_models[1:2])


def test_short_floats_are_summed_in_float32() -> None:  # "fma" alone: the interpreter has no matrix products of them
    shape = SHAPES["oblong"]
    inputs = tensors(shape, torch.bfloat16)
    y = convolution.conv2d(*inputs, *shape[-2:], "fma")
    exact = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.stack([conv2d(*model, *shape[-2:]) for model in zip(*exact, strict=True)])
    assert y.dtype == torch.bfloat16
    assert near(y, expected, 4e-3)
    slopes = torch.ones_like(y)
    wanted = torch.autograd.grad(expected, exact, slopes.double())
    for ours, theirs in zip(torch.autograd.grad(y, inputs, slopes), wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert near(ours, theirs, 4e-3)


def test_weights_may_be_parts_of_one_flat_tensor() -> None:
    shape = SHAPES["oblong"]
    x, weight, bias = tensors(shape)
    flat = torch.cat([bias.flatten(1), weight.flatten(1)], 1).detach().requires_grad_()
    parts = flat[:, bias.shape[1] :].view(weight.shape), flat[:, : bias.shape[1]]
    y, same = (convolution.conv2d(x.detach(), *w, *shape[-2:], "fma") for w in (parts, (weight, bias)))
    assert torch.equal(y, same)
    (found,) = torch.autograd.grad(y.sum(), flat)
    assert torch.equal(found, torch.cat([t.flatten(1) for t in torch.autograd.grad(same.sum(), (bias, weight))], 1))


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["plain"]
    x, weight, bias = tensors(shape)
    y = convolution.conv2d(x.detach(), weight, None, *shape[-2:], "fma")
    assert torch.allclose(
        y + bias[:, None, :, None, None], convolution.conv2d(x, weight, bias, *shape[-2:], "fma"), atol=1e-6
    )
    monkeypatch.setattr(convolution, "_correlated", None)  # the gradient of x would call it
    y.sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert y.grad_fn is not None


def test_an_unknown_dot_is_refused() -> None:
    with pytest.raises(ValueError, match="dot must be one of fma, ieee, tf32x3, tf32, not 'half'"):
        convolution.conv2d(*tensors(SHAPES["plain"]), (1, 1), (0, 0), "half")

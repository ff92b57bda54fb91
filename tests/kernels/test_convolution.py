"""Many convolutions in one launch against torch's own, one model at a time, with the kernels run by their interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from dualdelay.kernels import convolution
from helpers import rounding

pytestmark = pytest.mark.numeric

# models, batch, channels, height, width, outputs, kernel, stride, padding
SHAPES = {
    "plain": (1, 3, 2, 7, 6, 6, (5, 5), (1, 1), (0, 0)),
    "padded": (1, 2, 2, 7, 6, 20, (3, 3), (1, 1), (2, 2)),
    "oblong": (3, 2, 2, 8, 7, 3, (3, 2), (1, 1), (1, 0)),
    "strided": (1, 3, 2, 8, 9, 17, (3, 3), (2, 2), (1, 1)),
    "uneven": (2, 2, 3, 8, 7, 9, (2, 3), (2, 3), (0, 2)),
    "pointwise": (1, 2, 34, 5, 5, 5, (1, 1), (2, 1), (1, 1)),
    "gaps": (2, 2, 2, 9, 8, 3, (2, 1), (3, 3), (0, 0)),
    "many outputs": (1, 1, 2, 4, 3, 70, (2, 2), (1, 1), (0, 0)),
    "several chunks": (1, 42, 1, 10, 11, 2, (1, 2), (1, 1), (0, 0)),
    "chunks of lines": (1, 20, 1, 12, 11, 2, (1, 2), (1, 1), (0, 0)),
}


def tensors(shape: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g, b, c, h, w, o, kernel, _, _ = shape
    make = torch.Generator().manual_seed(1)
    sizes = (g, b, c, h, w), (g, o, c, *kernel), (g, o)
    x, weight, bias = (torch.randn(size, generator=make).to(dtype).requires_grad_() for size in sizes)
    return x, weight, bias


def near(a: Tensor, exact: Tensor, terms: int) -> bool:
    """Whether float32 sums of so many terms and a bias are those of float64, whose own rounding does not show.

    Rounded to short floats at the end they are off by half a last digit more.
    """
    close = (rounding(terms + 1, torch.float32) + (rounding(1, a.dtype) if a.dtype == torch.bfloat16 else 0.0)) / 2
    return a.shape == exact.shape and bool((a.double() - exact).norm() <= close * exact.norm())


def terms(y: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """How many numbers are added up in an output, and in a slope of an input, of a weight and of a bias."""
    _, outputs, channels, height, width = weight.shape
    places = y[0, :, 0].numel()
    return channels * height * width, outputs * height * width, places, places


CHUNKS = {("several chunks", "tf32x3"), ("chunks of lines", "fma")}  # each way has its own, and they are slow
# each shape in one way, in turns, and in the other where there is more time
EXACT = [
    pytest.param(shape, dot, torch.float32, marks=[pytest.mark.slow] * (place % 2 == turn or shape == "chunks of lines"))
    for (place, shape), (turn, dot) in product(enumerate(SHAPES), enumerate(("fma", "tf32x3")))
    if (shape, dot) not in CHUNKS
]

SHORT = pytest.param("oblong", "tf32", torch.bfloat16, marks=pytest.mark.slow)


# the interpreter multiplies matrices in float32 also where a GPU would in TF32
@pytest.mark.parametrize(("name", "dot", "dtype"), [*EXACT, ("oblong", "fma", torch.bfloat16), SHORT], ids=str)
def test_values_and_gradients_are_torchs(name: str, dot: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    inputs = tensors(shape, dtype)
    y = convolution.conv2d(*inputs, *shape[-2:], dot)
    exact = [part.detach().double().requires_grad_() for part in inputs]
    expected = torch.stack([conv2d(*model, *shape[-2:]) for model in zip(*exact, strict=True)])
    slopes = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = [y, *torch.autograd.grad(y, inputs, slopes)]
    references = [expected, *torch.autograd.grad(expected, exact, slopes.double())]
    for result, reference, count in zip(results, references, terms(y, inputs[1]), strict=True):
        assert result.dtype == dtype
        assert near(result, reference, count)


@pytest.mark.parametrize("dot", ["fma", pytest.param("tf32x3", marks=pytest.mark.slow)])
def test_a_model_does_not_depend_on_the_others(dot: str) -> None:
    shape = SHAPES["oblong"]
    inputs = tensors(shape)
    y = convolution.conv2d(*inputs, *shape[-2:], dot)
    gradients = torch.autograd.grad(y, inputs, torch.ones_like(y))
    alone = [part[1:2].detach().requires_grad_() for part in inputs]
    y_alone = convolution.conv2d(*alone, *shape[-2:], dot)
    assert torch.equal(y_alone, y[1:2])
    for gradient, together in zip(torch.autograd.grad(y_alone, alone, torch.ones_like(y_alone)), gradients, strict=True):
        assert torch.equal(gradient, together[1:2])


def test_weights_may_be_parts_of_one_flat_tensor() -> None:
    shape = SHAPES["oblong"]
    x, weight, bias = tensors(shape)
    flat = torch.cat([bias.flatten(1), weight.flatten(1)], 1).detach().requires_grad_()
    parts = flat[:, bias.shape[1] :].view(weight.shape), flat[:, : bias.shape[1]]
    y, same = (convolution.conv2d(x.detach(), *w, *shape[-2:], "fma") for w in (parts, (weight, bias)))
    assert torch.equal(y, same)
    (gradient,) = torch.autograd.grad(y.sum(), flat)
    assert torch.equal(gradient, torch.cat([t.flatten(1) for t in torch.autograd.grad(same.sum(), (bias, weight))], 1))


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["plain"]
    x, weight, bias = tensors(shape)
    y = convolution.conv2d(x.detach(), weight, None, *shape[-2:], "fma")
    with_bias = convolution.conv2d(x, weight, bias, *shape[-2:], "fma").double()
    assert near(y + bias[:, None, :, None, None], with_bias, 2 * terms(y, weight)[0])  # of which neither is exact
    monkeypatch.setattr(convolution, "_correlated", None)  # the gradient of x would call it
    y.sum().backward()
    assert x.grad is None and weight.grad is not None


def test_gradients_by_weights_may_be_taken_in_another_way() -> None:
    shape = SHAPES["padded"]
    x, weight, bias = tensors(shape)
    both = [convolution.conv2d(x, weight, bias, *shape[-2:], "fma", way) for way in ("fma", "tf32x3")]
    assert torch.equal(*both)
    (dx, dw), (same, other) = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in both)
    assert torch.equal(dx, same) and near(dw, other.double(), 2 * terms(both[0], weight)[2])


@pytest.mark.parametrize("ways", [("half",), ("fma", "half")], ids=["all", "by weights"])
def test_an_unknown_dot_is_refused(ways: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="dot must be one of fma, tf32x3, tf32, not 'half'"):
        convolution.conv2d(*tensors(SHAPES["plain"]), (1, 1), (0, 0), *ways)

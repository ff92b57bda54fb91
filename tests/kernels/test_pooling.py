"""Pooling by the package's own kernel, and convolutions and pooling sent to the kernels, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

import dualdelay as dd
from dualdelay.core.devices import lower
from dualdelay.kernels.dispatch import Kernels
from dualdelay.kernels.pooling import max_pool2d
from helpers import operations, rounding

pytestmark = pytest.mark.numeric

OURS = {"_PoolingBackward", "_ConvolutionBackward"}
KERNELS = OURS | {"_PooledConvolutionBackward", "_LinearBackward"}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def require_torchs(x: Tensor, size: tuple[int, int]) -> None:
    """The values, and the gradients for random slopes, are torch's to the last bit, also after a ReLU, NaN included."""
    for rectified in (False, True):
        leaf = x.detach().clone().requires_grad_()
        ours = max_pool2d(leaf, size, rectified)
        flat = leaf.flatten(0, -3)
        theirs = functional.max_pool2d(flat.relu() if rectified else flat, size).reshape(ours.shape)
        slopes = randn(*ours.shape, seed=2).to(ours.dtype)
        gradients = [torch.autograd.grad(y, leaf, slopes)[0] for y in (ours, theirs)]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [(2, 2), (1, 1), (2, 3), (4, 1), (7, 5)])
@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 3, 7, 5), (2, 3, 2, 9, 11)])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    require_torchs(randn(*shape), size)


def test_more_windows_than_one_program_takes() -> None:
    require_torchs(randn(5, 4, 23, 31), (2, 2))


def test_of_equal_values_the_first_wins() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 1] = x[0, 0, 1, 0] = 1.0  # the second of its window and the third
    x[0, 0, 2:, 2:] = -math.inf
    require_torchs(x, (2, 2))
    require_torchs(randn(3, 2, 8, 9).round(), (2, 3))
    y = max_pool2d(x.requires_grad_(), (2, 2))
    y.sum().backward()
    assert x.grad.nonzero()[:, 2:].tolist() == [[0, 1], [0, 2], [2, 0], [2, 2]]


def test_a_window_with_nan_is_nan_wherever_it_stands() -> None:
    for place in range(6):
        x = randn(2, 1, 6, 6)
        x[:, :, place // 3 :: 2, place % 3 :: 3] = math.nan
        require_torchs(x, (2, 3))
        assert max_pool2d(x, (2, 3)).isnan().all()
    require_torchs(torch.full((1, 1, 4, 4), math.nan), (2, 2))
    x = randn(1, 1, 4, 4)
    x[0, 0, 0, :2] = math.nan
    x[0, 0, 2, 2] = math.inf
    require_torchs(x, (2, 2))


def test_the_last_place_of_the_largest_window() -> None:
    x = randn(1, 1, 16, 36)
    x[:, :, 14, 16::17] = 9.0
    require_torchs(x, (15, 17))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_keep_theirs(dtype: torch.dtype) -> None:
    x = randn(2, 3, 7, 5).to(dtype)
    require_torchs(x.abs() if dtype == torch.bfloat16 else x, (2, 2))  # whose bits the interpreter compares, sign last


def test_inputs_and_slopes_may_have_any_layout_in_memory() -> None:
    require_torchs(randn(5, 7, 3, 2).permute(3, 2, 1, 0), (2, 2))
    require_torchs(randn(2, 1, 6, 6).expand(2, 3, 6, 6), (3, 2))
    leaf = randn(1, 2, 4, 6).requires_grad_()
    max_pool2d(leaf, (2, 2)).transpose(2, 3).sum().backward()  # its slope is one number, seen everywhere
    assert leaf.grad.sum() == 12 and set(leaf.grad.unique().tolist()) == {0.0, 1.0}


def kernels_of(y: Tensor) -> set[str]:
    """The package's kernels that computed something y depends on."""
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {node.name() for node in seen} & KERNELS


class Pooled(nn.Module):
    """A convolution whose outputs are pooled by a function, given in several ways."""

    def __init__(self, pool: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 3, 3, **options), pool

    def forward(self, inputs: Tensor) -> Tensor:
        return self.pool(self.conv(inputs))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 2))
    module[0].weight.requires_grad_(False)
    return module


TAKEN: dict[str, tuple[set[str], Callable[[], nn.Module]]] = {
    "padded and strided": (
        OURS,
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)), nn.Conv2d(3, 4, (2, 3))
        ),
    ),
    "oblong": (
        OURS,
        lambda: nn.Sequential(nn.Conv2d(2, 5, (3, 2), (1, 2), (0, 2), bias=False), nn.MaxPool2d(2), nn.Tanh()),
    ),
    "many outputs": ({"_ConvolutionBackward"}, lambda: nn.Sequential(nn.Conv2d(2, 33, 6, stride=3), nn.Tanh())),
    "many channels": (
        {"_ConvolutionBackward"},
        lambda: nn.Sequential(nn.Conv2d(2, 16, 5), nn.Conv2d(16, 17, 2), nn.Tanh()),
    ),
    "padding by other values": (
        {"_ConvolutionBackward"},
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Tanh()),
    ),
    "rectified": (
        {"_ConvolutionBackward", "_PooledConvolutionBackward"},
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 1), nn.Conv2d(3, 33, 5, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d((4, 3)), nn.Tanh()
        ),
    ),
    "rectified in place": (
        {"_PooledConvolutionBackward"},
        lambda: nn.Sequential(nn.Conv2d(2, 33, 6), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Tanh()),
    ),
    "large windows of rectified images": (
        OURS,
        lambda: nn.Sequential(nn.Conv2d(2, 33, 6, padding=3), nn.ReLU(), nn.MaxPool2d(5), nn.Tanh()),
    ),
    "linear": (
        {"_LinearBackward"},
        lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 5, bias=False), nn.Flatten(), nn.Linear(80, 2)),
    ),
    "frozen": ({"_ConvolutionBackward"}, frozen),
    "stride given": (OURS, lambda: Pooled(lambda x: functional.max_pool2d(x, 2, stride=(2, 2)))),
    "pooling alone": (
        {"_PoolingBackward"},
        lambda: Pooled(lambda x: functional.max_pool2d(x, [2, 3]), groups=1, dilation=2),
    ),
}
LEFT: dict[str, Callable[[], nn.Module]] = {
    "dilation": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, dilation=2), nn.Tanh()),
    "groups": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh()),
    "padding by name": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Tanh()),
    "overlapping windows": lambda: Pooled(nn.MaxPool2d(3, stride=1), groups=1, dilation=2),
    "windows apart": lambda: Pooled(nn.MaxPool2d(2, stride=3), groups=1, dilation=2),
    "ceil": lambda: Pooled(nn.MaxPool2d(2, ceil_mode=True), dilation=2),
    "padded pooling": lambda: Pooled(nn.MaxPool2d(2, padding=1), dilation=2),
    "dilated pooling": lambda: Pooled(nn.MaxPool2d(2, dilation=2), dilation=2),
    "where it stands": lambda: Pooled(lambda x: functional.max_pool2d(x, 2, return_indices=True)[0], dilation=2),
    "double": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()).double(),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 3, 3), nn.MaxPool1d(2)),
    "means": lambda: Pooled(nn.AvgPool2d(2), dilation=2),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def stacked(module: nn.Module, count: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """Weights of several networks, and a minibatch for each."""
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    scales = torch.linspace(0.5, 1.5, count, dtype=next(iter(weights.values())).dtype)
    stacks = {name: torch.stack([p * scale for scale in scales]).requires_grad_() for name, p in weights.items()}
    return stacks, randn(count, 2, 2, 8, 9).to(scales.dtype)


def steps(images: Tensor, weights: list[Tensor]) -> int:
    """How many operations follow one another: no sum has more terms than a layer has weights or a minibatch has places."""
    return images[:, 0].numel() + sum(weight.numel() for weight in weights)


def require_close(ours: list[Tensor], theirs: list[Tensor], close: float) -> None:
    for result, reference in zip(ours, theirs, strict=True):
        assert (result.shape, result.dtype) == (reference.shape, reference.dtype)
        assert (result.double() - reference.double()).norm() <= close * reference.double().norm()


def require_gradients(module: nn.Module, precision: str = "float32") -> set[str]:
    """Outputs and gradients under ``vmap`` are those of torch one network at a time; the kernels that computed them."""
    parts, inputs = stacked(module)
    close = rounding(steps(inputs[0], [part[0] for part in parts.values()]), inputs.dtype)
    if precision == "bfloat16":  # sums are as exact: what is rounded are inputs and outputs of two layers, there and back
        close = rounding(8, torch.bfloat16)
    with Kernels(precision), lower(precision, torch.device("cpu")):
        y = vmap(lambda weights, x: functional_call(module, weights, (x,)))(parts, inputs)
    with lower(precision, torch.device("cpu")):
        alone = [
            functional_call(module, {name: part[k] for name, part in parts.items()}, (x,)) for k, x in enumerate(inputs)
        ]
    slopes = randn(*y.shape, seed=2).to(y.dtype)
    ours, theirs = ([out, *torch.autograd.grad(out, list(parts.values()), slopes)] for out in (y, torch.stack(alone)))
    require_close(ours, theirs, close)
    return kernels_of(y)


LONG = ("many channels", "rectified", "large windows of rectified images")  # what they add is in shorter ones, too


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in TAKEN])
def test_stacked_networks_have_torchs_gradients_by_our_kernels(name: str) -> None:
    kernels, make = TAKEN[name]
    assert require_gradients(seeded(make)) == kernels


@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernels_cannot_do_is_left_to_torch(name: str) -> None:
    assert require_gradients(seeded(LEFT[name])) == set()


class Branched(nn.Module):
    """Pools what a ReLU makes; that may be changed before, or asked for afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.changed, self.kept = nn.Conv2d(2, 3, 3), False, False

    def forward(self, inputs: Tensor) -> Tensor:
        x = functional.relu(self.conv(inputs))
        if self.changed:
            x = x * 2
        if self.kept:
            return functional.max_pool2d(x, 2).sum((2, 3)) + x.sum((2, 3))
        x = functional.max_pool2d(x, 2)
        return x.sum((2, 3))


def test_a_relu_is_not_written_if_a_pooling_alone_takes_it_and_written_if_that_was_wrong() -> None:
    module, learned = seeded(Branched), set()
    parts, inputs = stacked(module)

    def results(kernels: Kernels) -> list[Tensor]:
        with kernels:
            y = vmap(lambda weights, x: functional_call(module, weights, (x,)))(parts, inputs)
        return [y, *torch.autograd.grad(y.square().sum(), list(parts.values()))]

    def learning() -> Kernels:
        kernels = Kernels("float32")
        kernels.pooled_next = learned
        return kernels

    for changed, kept in ((False, False), (True, False), (False, True), (False, False)):
        module.changed, module.kept = changed, kept
        expected = results(Kernels("float32"))
        for _ in range(2):
            for ours, theirs in zip(results(learning()), expected, strict=True):
                assert torch.equal(ours, theirs)
        assert learned == (set() if kept else {0})


def test_windows_too_large_to_be_counted_are_left_to_torch() -> None:
    x = randn(1, 1, 17, 18).requires_grad_()
    with Kernels("float32"):
        y = functional.max_pool2d(x, 16)
    assert kernels_of(y) == set()
    assert torch.equal(y, functional.max_pool2d(x, 16))


def test_an_image_alone_is_left_to_torch() -> None:
    module, image = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))), randn(2, 8, 7)
    with Kernels("float32"):
        y = module(image)
    assert kernels_of(y) == set()
    assert torch.equal(y, module(image))


def test_an_image_smaller_than_a_window_is_refused_as_by_torch() -> None:
    x = randn(1, 1, 1, 5)
    with pytest.raises(RuntimeError, match="too small"):
        functional.max_pool2d(x, 2)
    with Kernels("float32"), pytest.raises(RuntimeError, match="too small"):
        functional.max_pool2d(x, 2)


def test_short_products_are_near_torchs_short_products() -> None:
    assert require_gradients(seeded(TAKEN["padded and strided"][1]), "bfloat16") == OURS


@pytest.mark.parametrize("name", ["padded and strided", "oblong", "pooling alone"])
def test_one_network_has_torchs_gradients(name: str) -> None:
    kernels, make = TAKEN[name]
    module, inputs = seeded(make), randn(2, 2, 8, 9)
    weights = [p for p in module.parameters() if p.requires_grad]
    with Kernels("float32"):
        y = module(inputs)
    expected = module(inputs)
    slopes = randn(*y.shape, seed=2)
    ours, theirs = ([out, *torch.autograd.grad(out, weights, slopes)] for out in (y, expected))
    require_close(ours, theirs, rounding(steps(inputs, weights), torch.float32))
    assert kernels_of(y) == kernels
    assert kernels_of(expected) == set()  # the mode has ended


def test_weights_may_be_stacked_while_inputs_are_shared_and_the_other_way_round() -> None:
    x, weight = randn(2, 2, 6, 5), randn(3, 4, 2, 3, 3, seed=2)
    with Kernels("float32"):
        y = vmap(lambda w: functional.conv2d(x, w, None, 1, 1, 1, 1))(weight)
        z = vmap(lambda a: functional.conv2d(a, weight[0], None, 1, 1, 1, 1), in_dims=1)(torch.stack([x, 2 * x], 1))
    stacked_weights = torch.stack([functional.conv2d(x, w, padding=1) for w in weight])
    stacked_inputs = torch.stack([functional.conv2d(a, weight[0], padding=1) for a in (x, 2 * x)])
    require_close([y, z], [stacked_weights, stacked_inputs], rounding(2 * 3 * 3, torch.float32))


def test_a_problem_of_images_has_the_same_gradients_and_metrics() -> None:
    """The whole way of a batched run on a GPU, but for the GPU."""

    def images(seed: int) -> list[tuple[Tensor, Tensor]]:
        return [(randn(9, 1, 6, 6, seed=10 * seed + k), torch.arange(9) % 3) for k in range(2)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))

    problems = [dd.Network(model, functional.cross_entropy, images(k), 2, seed=k) for k in (0, 1)]
    together, x = problems[0].batched(problems), problems[0].start(0)
    jobs = [0, 1, 1], [1, 0, 1], [3, 1, 4]
    models = [x, torch.stack([x * 1.1, x * 0.9])]
    with Kernels("float32"):
        gradients, losses = together(models, *jobs)
    rows, close = [x, *models[1]], rounding(operations(problems[0], samples=2 * 6 * 6), torch.float32)
    for row, gradient, loss, k, worker, draw in zip(rows, gradients, losses.tolist(), *jobs, strict=True):
        expected, expected_loss = problems[k].gradient(row, worker, draw)
        require_close([gradient], [expected], close)
        assert math.isclose(loss, expected_loss, rel_tol=close)
    plain = problems[0].evaluate(x)
    with Kernels("float32"):
        ours = problems[0].evaluate(x)
    close = rounding(operations(problems[0], samples=9 * 6 * 6), torch.float32)
    assert ours == pytest.approx(plain, rel=close, abs=0, nan_ok=True)

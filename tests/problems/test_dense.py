"""Dense networks' gradients by layers: autograd's bits, and autograd wherever a network is anything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.problems.dense import DenseGradient

WORKERS = 3
Pairs = list[tuple[Tensor, Tensor]]


def data(inputs: int = 6, rows: int = 40) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, inputs, generator=generator), torch.randint(4, (rows,), generator=generator))
        for _ in range(WORKERS)
    ]


def network(model: Callable[[], nn.Module], loss: Any = cross_entropy) -> dd.Network:
    return dd.Network(model, loss, data(), 8)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5, bias=False), nn.ReLU(), nn.Linear(5, 4))


def by_autograd(problem: dd.Network, x: Tensor, worker: int, draw: int, pairs: Pairs) -> tuple[Tensor, float]:
    """What torch's own backward makes of a fresh copy of the module."""
    module = copy.deepcopy(problem.net.module)
    torch.nn.utils.vector_to_parameters(x, [p for p in module.parameters() if p.requires_grad])
    inputs, targets = pairs[worker]
    rows = problem.indices(worker, draw)
    loss = problem.loss(module(inputs[rows]), targets[rows])
    loss.backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters() if p.requires_grad]
    return torch.cat([part.reshape(-1) for part in parts]), loss.item()


def taken_by_layers(problem: dd.Network, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the next gradient comes without autograd."""
    called = []
    gradient = problem.net.gradient
    monkeypatch.setattr(problem.net, "gradient", lambda loss: called.append(loss) or gradient(loss))
    problem.gradient(problem.start(0), 0, 1)
    monkeypatch.undo()
    return not called


@pytest.mark.numeric
@pytest.mark.parametrize("batch", [1, 2, 7, 8, 33, 64])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (deep, 6),
        (lambda: nn.Linear(6, 4), 6),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 4, bias=False)), 6),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 4)), 1),
        (lambda: nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.Linear(130, 10)), 64),
        (lambda: deep().double(), 6),
    ],
    ids=["deep", "linear", "no bias", "narrow", "wide", "float64"],
)
def test_the_bits_are_autograds(
    model: Callable[[], nn.Module], inputs: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = next(model().parameters()).dtype
    pairs = [(pixels.to(dtype), classes) for pixels, classes in data(inputs)]
    problem = dd.Network(model, cross_entropy, pairs, batch)
    assert taken_by_layers(problem, monkeypatch)
    x = problem.start(1)
    for draw in range(5):
        for worker in range(WORKERS):
            gradient, loss = problem.gradient(x, worker, draw)
            expected, mean = by_autograd(problem, x, worker, draw, pairs)
            assert gradient.numpy().tobytes() == expected.numpy().tobytes()
            assert loss == mean
            x = x - 0.3 * gradient


def hooked() -> nn.Module:
    module = deep()
    module[0].register_forward_hook(lambda layer, given, made: made * 2)
    return module


def frozen() -> nn.Module:
    module = deep()
    module[0].weight.requires_grad_(False)
    return module


def tied() -> nn.Module:
    first = nn.Linear(6, 6)
    return nn.Sequential(first, nn.ReLU(), first, nn.ReLU(), nn.Linear(6, 4))


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (hooked, cross_entropy),
        (frozen, cross_entropy),
        (tied, cross_entropy),
        (lambda: nn.Sequential(Twice(6, 4)), cross_entropy),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.Sigmoid()), cross_entropy),
        (deep, nn.CrossEntropyLoss(label_smoothing=0.1)),
        (deep, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))),
        (deep, lambda outputs, targets: 2 * cross_entropy(outputs, targets)),
    ],
    ids=["hook", "frozen", "tied", "own layer", "other layer", "smoothed", "weighted", "own loss"],
)
def test_anything_else_goes_by_autograd(model: Callable[[], nn.Module], loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(model, loss=loss)
    assert not taken_by_layers(problem, monkeypatch)
    gradient, mean = problem.gradient(problem.start(0), 1, 2)
    expected, of_torch = by_autograd(problem, problem.start(0), 1, 2, data())
    assert torch.equal(gradient, expected)
    assert mean == of_torch


def test_a_hook_that_comes_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(deep)
    x = problem.start(0)
    before, _ = problem.gradient(x, 0, 0)
    hook = problem.net.module[0].register_forward_hook(lambda layer, given, made: made * 2)
    assert not taken_by_layers(problem, monkeypatch)
    assert not torch.equal(problem.gradient(x, 0, 0)[0], before)
    hook.remove()
    assert torch.equal(problem.gradient(x, 0, 0)[0], before)


def test_lower_precision_of_the_user_s_own_is_autograd_s(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(deep)
    with torch.autocast("cpu", torch.bfloat16):
        assert not taken_by_layers(problem, monkeypatch)
    assert taken_by_layers(problem, monkeypatch)


def test_a_forward_of_a_layer_s_own_that_comes_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(deep)
    layer = problem.net.module[0]
    assert taken_by_layers(problem, monkeypatch)
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)
    assert not taken_by_layers(problem, monkeypatch)
    del layer.forward
    assert taken_by_layers(problem, monkeypatch)


def test_a_hook_of_a_weight_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(deep)
    x = problem.start(0)
    before, _ = problem.gradient(x, 0, 0)
    hook = problem.net.module[0].weight.register_hook(lambda slope: 2 * slope)
    assert not taken_by_layers(problem, monkeypatch)
    assert torch.equal(problem.gradient(x, 0, 0)[0][:54], 2 * before[:54])
    hook.remove()
    assert taken_by_layers(problem, monkeypatch)


def test_a_loss_that_somebody_has_changed_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda part, given, made: 2 * made)
    other = nn.CrossEntropyLoss()
    other.forward = lambda outputs, targets: 2 * cross_entropy(outputs, targets)
    expected = 2 * network(deep).gradient(network(deep).start(0), 0, 0)[1]
    for changed in (loss, other):
        problem = network(deep, loss=changed)
        assert not taken_by_layers(problem, monkeypatch)
        assert problem.gradient(problem.start(0), 0, 0)[1] == expected


def test_anomalies_are_looked_for_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(deep)
    assert taken_by_layers(problem, monkeypatch)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert not taken_by_layers(problem, monkeypatch)


def test_inputs_that_are_not_dense_go_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*rows, strict=True)
        return torch.stack(inputs).to_sparse(), torch.stack(targets)

    samples = [list(zip(*pair, strict=True)) for pair in data()]
    problem = dd.Network(deep, cross_entropy, samples, dd.Batches(8, collate_fn=sparse))
    assert not taken_by_layers(problem, monkeypatch)
    dense = dd.Network(deep, cross_entropy, samples, 8)
    x = dense.start(0)
    assert torch.allclose(problem.gradient(x, 0, 0)[0], dense.gradient(x, 0, 0)[0], atol=1e-6)


def test_a_loss_object_counts_as_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken_by_layers(network(deep, loss=nn.CrossEntropyLoss()), monkeypatch)


def test_a_way_that_gives_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    by_layers = DenseGradient._by_layers

    def off(self: DenseGradient, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        gradient, loss = by_layers(self, inputs, targets)
        gradient[3] = torch.nextafter(gradient[3], gradient[3] + 1)
        return gradient, loss

    with monkeypatch.context() as patched:
        patched.setattr(DenseGradient, "_by_layers", off)
        problem = network(deep)
    assert not taken_by_layers(problem, monkeypatch)


def test_a_copy_computes_with_weights_of_its_own() -> None:
    problem = network(deep)
    x, y = problem.start(0), problem.start(1)
    expected, _ = problem.gradient(y, 0, 0)
    other = copy.deepcopy(problem)
    problem.gradient(x, 0, 0)
    for _ in range(2):  # by autograd, and by layers
        assert torch.equal(other.gradient(y, 0, 0)[0], expected)


def test_a_class_that_there_is_not_is_said_as_autograd_says_it() -> None:
    pairs = data()
    problem = dd.Network(deep, cross_entropy, pairs, 8)
    pairs[2][1][:] = 4
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        problem.gradient(problem.start(0), 2, 0)


def test_a_batch_that_is_no_row_for_each_class_goes_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 6, generator=generator), torch.rand(20, 4, generator=generator)) for _ in range(WORKERS)]
    problem = dd.Network(lambda: nn.Linear(6, 4), cross_entropy, pairs, 8)  # each class with a probability
    assert not taken_by_layers(problem, monkeypatch)


def test_weights_that_are_not_numbers_have_a_loss_that_is_none() -> None:
    problem = network(deep)
    gradient, loss = problem.gradient(torch.full_like(problem.start(0), torch.nan), 0, 0)
    assert loss != loss
    assert bool(gradient.isnan().any())

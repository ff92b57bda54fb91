"""Attention of many models in one call against torch's, one model at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

import dualdelay as dd
from dualdelay.kernels import attention as module
from dualdelay.kernels.attention import Attention
from helpers import rounding

pytestmark = pytest.mark.numeric

SHAPE = (3, 2, 4, 7, 8)  # models, samples, heads, places, size
BEFORE = torch.ones(7, 7, dtype=torch.bool).tril()

CALLS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether torch has a fused form of it
    "all places": (True, {}),
    "places before": (True, {"is_causal": True}),
    "another scale": (True, {"scale": 0.3}),
    "a mask of what is seen": (False, {"attn_mask": BEFORE}),
    "a mask that is added": (False, {"attn_mask": torch.where(BEFORE, 0.0, -torch.inf)}),
}


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [randn(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]


def results(call: Callable[..., Tensor], parts: list[Tensor]) -> list[Tensor]:
    y = call(*parts)
    return [y, *torch.autograd.grad(y, parts, randn(*y.shape, seed=9).to(y.dtype))]


def of_all(settings: dict[str, Any]) -> Callable[..., Tensor]:
    """Attention of several models at once."""

    def call(*parts: Tensor) -> Tensor:
        with Attention():
            y: Tensor = vmap(lambda *one: functional.scaled_dot_product_attention(*one, **settings))(*parts)
        return y

    return call


def of_each(settings: dict[str, Any]) -> Callable[..., Tensor]:
    """The same of one model after the other."""

    def call(*parts: Tensor) -> Tensor:
        given = {
            k: v.to(parts[0].dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in settings.items()
        }
        pieces = zip(*parts, strict=True)
        return torch.stack([functional.scaled_dot_product_attention(*one, **given) for one in pieces])

    return call


def require_alike(ours: list[Tensor], parts: list[Tensor], settings: dict[str, Any]) -> None:
    double = results(of_each(settings), [part.detach().double().requires_grad_() for part in parts])
    for one, exact in zip(ours, double, strict=True):
        assert one.shape == exact.shape and one.dtype == parts[0].dtype
        assert (one.double() - exact).norm() <= rounding(300, torch.float32) * exact.norm()


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, settings = CALLS[name]
    calls: list[int] = []
    apply = module._apply
    monkeypatch.setattr(module, "_apply", lambda *given: calls.append(1) or apply(*given))
    parts = parts_of(SHAPE, SHAPE, SHAPE)
    require_alike(results(of_all(settings), parts), parts, settings)
    assert bool(calls) is fused


def test_other_keys_than_queries_and_fewer_heads_of_keys() -> None:
    parts = parts_of(SHAPE, (3, 2, 4, 5, 8), (3, 2, 4, 5, 8))
    require_alike(results(of_all({}), parts), parts, {})
    parts = parts_of(SHAPE, (3, 2, 2, 7, 8), (3, 2, 2, 7, 8))
    settings = {"enable_gqa": True, "is_causal": True}
    require_alike(results(of_all(settings), parts), parts, settings)


def test_rows_of_values_may_be_of_another_length_and_samples_may_be_one() -> None:
    parts = parts_of(SHAPE, SHAPE, (3, 2, 4, 7, 6))
    require_alike(results(of_all({}), parts), parts, {})
    parts = parts_of(*[(3, 4, 7, 8)] * 3)
    require_alike(results(of_all({}), parts), parts, {})


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}], ids=["all places", "places before"])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 1, 3, 2), (0, 3, 1, 2)], ids=str)
def test_numbers_of_a_row_may_lie_apart_as_those_of_an_image_do(order: tuple[int, ...], settings: dict[str, Any]) -> None:
    back = [order.index(axis) for axis in range(4)]
    parts = parts_of(*[(SHAPE[0], *(SHAPE[1 + axis] for axis in back))] * 3)

    def seen(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of_permuted(*given: Tensor) -> Tensor:
            y = call(*(part.permute(0, *(1 + axis for axis in order)) for part in given))
            return y.permute(0, *(1 + axis for axis in back))  # so what comes back lies apart as well

        return of_permuted

    ours = results(seen(of_all(settings)), parts)
    double = results(seen(of_each(settings)), [part.detach().double().requires_grad_() for part in parts])
    for one, exact in zip(ours, double, strict=True):
        assert (one.double() - exact).norm() <= rounding(300, torch.float32) * exact.norm()
    with Attention():  # of one model, without vmap
        one = functional.scaled_dot_product_attention(*(p[0].permute(order) for p in parts), **settings)
    alone = functional.scaled_dot_product_attention(*(p[0].permute(order) for p in parts), **settings)
    assert (one - alone).norm() <= rounding(300, torch.float32) * alone.norm()


def test_masks_may_be_of_each_model_or_hide_all_and_numbers_may_be_double() -> None:
    parts, masks = parts_of(SHAPE, SHAPE, SHAPE), torch.stack([BEFORE, BEFORE.T, BEFORE.flip(0)])
    with Attention():
        ours = vmap(functional.scaled_dot_product_attention)(*parts, masks)
    each = [functional.scaled_dot_product_attention(*(part[k] for part in parts), masks[k]) for k in range(3)]
    assert (ours - torch.stack(each)).norm() <= rounding(300, torch.float32) * ours.norm()
    hidden = BEFORE.clone()
    hidden[3] = False
    ours, theirs = of_all({"attn_mask": hidden})(*parts), of_each({"attn_mask": hidden})(*parts)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert (ours.nan_to_num() - theirs.nan_to_num()).norm() <= rounding(300, torch.float32) * theirs.nan_to_num().norm()
    doubles = [part.detach().double().requires_grad_() for part in parts]
    for one, other in zip(results(of_all({}), doubles), results(of_each({}), doubles), strict=True):
        assert one.dtype == torch.float64 and (one - other).norm() <= rounding(300, torch.float64) * other.norm()


@pytest.mark.parametrize("needed", [True, False], ids=["weights", "no weights"])
def test_padding_and_attention_weights_are_torchs(needed: bool) -> None:
    net, hidden = nn.MultiheadAttention(8, 2, batch_first=True), torch.tensor([[False] * 4 + [True], [False] * 5])
    names = dict(net.named_parameters())
    parts = {name: randn(3, *p.shape, seed=len(name)).requires_grad_() for name, p in names.items()}
    x = randn(3, 2, 5, 8)

    def of_one(weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        y, seen = functional_call(net, weights, (x, x, x), {"key_padding_mask": hidden, "need_weights": needed})
        return (y, seen) if needed else (y,)

    with Attention():
        ours = vmap(of_one)(parts, x)
    each = [of_one({name: part[k] for name, part in parts.items()}, x[k]) for k in range(3)]
    for one, *others in zip(ours, *each, strict=True):
        assert (one - torch.stack(others)).norm() <= rounding(300, torch.float32) * one.norm()


@pytest.mark.parametrize("name", CALLS)
def test_a_model_does_not_depend_on_the_others(name: str) -> None:
    _, settings = CALLS[name]
    parts = parts_of(SHAPE, SHAPE, SHAPE)
    slopes = [part[1:2] for part in results_with(of_all(settings), parts)]
    alone = results_with(of_all(settings), [part[1:2].detach().requires_grad_() for part in parts])
    assert all(one.equal(other) for one, other in zip(slopes, alone, strict=True))


def results_with(call: Callable[..., Tensor], parts: list[Tensor]) -> list[Tensor]:
    """The same slopes for every model."""
    y = call(*parts)
    return [y, *torch.autograd.grad(y, parts, randn(*y.shape[1:], seed=9).expand_as(y))]


class Encoder(nn.Module):
    """Torch's own layers, which call attention from within."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks, self.output = nn.TransformerEncoder(block, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.blocks(x).mean(-2))
        return y


@pytest.mark.parametrize("mask", [False, True])
def test_torchs_own_layers_are_computed_for_all_models_at_once(mask: bool) -> None:
    net = Encoder()
    given = {"mask": nn.Transformer.generate_square_subsequent_mask(5)} if mask else {}

    def logits(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(net.blocks, weights, (x,), given)
        return y

    names = dict(net.blocks.named_parameters())
    parts = {name: randn(3, *p.shape, seed=len(name)).requires_grad_() for name, p in names.items()}
    x = randn(3, 4, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it computes one model after the other
        with Attention():
            y = vmap(logits)(parts, x)
        ours = torch.autograd.grad(y, list(parts.values()), randn(*y.shape))
    each = torch.stack([logits({name: part[k] for name, part in parts.items()}, x[k]) for k in range(3)])
    theirs = torch.autograd.grad(each, list(parts.values()), randn(*y.shape))
    for one, other in zip([y, *ours], [each, *theirs], strict=True):
        assert (one - other).norm() <= rounding(3000, torch.float32) * other.norm()


def test_a_network_of_torchs_layers_is_the_same_in_groups_and_alone() -> None:
    torch.manual_seed(0)
    net, speeds = Encoder(), dd.FixedSpeeds([1.0, 1.3, 2.0])
    shards = [(randn(20, 5, 8, seed=k), torch.arange(20) % 3) for k in range(3)]
    problem = dd.Network(lambda: net, functional.cross_entropy, shards, 6)
    grid = {"algorithm": [dd.DuDe(lr=0.1)], "lr": [0.05, 0.1]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = dd.sweep(grid, problem, speeds, updates=12, compute=dd.Compute(batch=True))
    alone = dd.sweep(grid, problem, speeds, updates=12, compute=dd.Compute(batch=False))
    for one, other in zip(together.runs, alone.runs, strict=True):
        assert one is not None and other is not None
        assert (one.x - other.x).norm() <= 1e-5 * other.x.norm()
        assert one.metrics.objective[-1] == pytest.approx(other.metrics.objective[-1], rel=1e-5)


def test_without_vmap_and_afterwards_torch_is_as_it_was() -> None:
    parts = parts_of(*[(2, 4, 7, 8)] * 3)
    before = functional.scaled_dot_product_attention(*parts, is_causal=True)
    with Attention():
        inside = functional.scaled_dot_product_attention(*parts, is_causal=True)
    assert before.equal(inside) and before.equal(functional.scaled_dot_product_attention(*parts, is_causal=True))

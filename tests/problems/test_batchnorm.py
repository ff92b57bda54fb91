"""GroupNorm in place of BatchNorm, whose statistics no version of the model owns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from own import mlp, shards, three

BATCHNORM = nn.modules.batchnorm._BatchNorm
SHARED = nn.BatchNorm1d(8)
MODELS = {
    "one": mlp(nn.BatchNorm1d(8), nn.ReLU()),
    "nested": mlp(nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Sequential(nn.BatchNorm1d(8)))),
    "shared": mlp(SHARED, nn.Tanh(), SHARED),
    "2d": nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 6, 2), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(12, 3)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_with_batchnorm_is_refused_and_trains_without(model: nn.Module) -> None:
    with pytest.raises(dd.BadInput, match="BatchNorm"):
        dd.Network(model, cross_entropy, shards(), 4)
    converted = dd.problems.without_batchnorm(model)
    assert not any(isinstance(part, BATCHNORM) for part in converted.modules())
    assert any(isinstance(part, BATCHNORM) for part in model.modules())  # the given model stays as it was
    names = [[name for name, _ in net.named_modules()] for net in (model, converted)]
    assert names[0] == names[1]  # a layer in two places stays one
    run = dd.simulate(dd.SyncSGD(0.3), dd.Network(converted, cross_entropy, shards(), 16), three, updates=60)
    assert run.metrics.objective[-1] < run.metrics.objective[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_converted_model_still_depends_on_its_inputs(name: str) -> None:
    outputs = dd.problems.without_batchnorm(MODELS[name])(shards()[0][0])
    assert float(outputs.detach().std(0).max()) > 0.01


def test_scale_and_shift_are_taken_over_and_channels_are_divided_into_groups() -> None:
    norm = nn.BatchNorm2d(12)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(1))
    new = dd.problems.without_batchnorm(norm, groups=8)
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels) == (4, 12)  # gcd(8, 12) groups
    assert torch.equal(new.weight, norm.weight) and torch.equal(new.bias, norm.bias)

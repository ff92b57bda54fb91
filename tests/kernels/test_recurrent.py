"""Recurrent layers of many models in one call against torch's, one model at a time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pack_padded_sequence

from dualdelay.kernels.recurrent import Recurrent
from helpers import rounding

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm with projections": (nn.LSTM, {"proj_size": 3}),
    "lstm without biases": (nn.LSTM, {"bias": False, "num_layers": 2}),
    "lstm with projections and without biases": (nn.LSTM, {"bias": False, "proj_size": 3, "batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "rnn": (nn.RNN, {"num_layers": 2}),
    "rnn with relu": (nn.RNN, {"nonlinearity": "relu"}),
}
MODELS, PLACES = 3, 6

pytestmark = pytest.mark.numeric


def results(layer: nn.Module, weights: list[dict[str, Tensor]], inputs: Tensor) -> list[list[Tensor]]:
    """Of each model the outputs, the last states and the gradients of their sum of squares."""
    made = []
    for own, x in zip(weights, inputs, strict=True):
        y, states = functional_call(layer, own, (x,))
        tensors = [y, *(states if isinstance(states, tuple) else (states,))]
        slopes = torch.autograd.grad(sum(part.square().sum() for part in tensors), list(own.values()))
        made.append([*tensors, *slopes])
    return made


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    kind, options = LAYERS[name]
    draw = torch.Generator().manual_seed(1)
    layer = kind(5, 7, **options)
    inputs = torch.randn(MODELS, 4, PLACES, 5, generator=draw)
    shapes = {key: part.shape for key, part in layer.named_parameters()}
    stacked = {key: (0.4 * torch.randn(MODELS, *shape, generator=draw)).requires_grad_() for key, shape in shapes.items()}
    with Recurrent():
        y, states = vmap(lambda own, x: functional_call(layer, own, (x,)))(stacked, inputs)
    tensors = [y, *(states if isinstance(states, tuple) else (states,))]
    slopes = torch.autograd.grad(sum(part.square().sum() for part in tensors), list(stacked.values()))
    doubled = [{key: part[k].detach().double().requires_grad_() for key, part in stacked.items()} for k in range(MODELS)]
    exact = results(kind(5, 7, **options).double(), doubled, inputs.double())
    for k in range(MODELS):
        for found, expected in zip([*tensors, *slopes], exact[k], strict=True):
            assert found[k].shape == expected.shape
            assert found.dtype == torch.float32
            assert (found[k].double() - expected).norm() <= rounding(40 * PLACES, torch.float32) * expected.norm()


def test_layers_that_drop_something_out_stay_torchs_own() -> None:
    layer, x = nn.GRU(5, 7, 2, dropout=0.5), torch.randn(PLACES, 2, 5, generator=torch.Generator().manual_seed(2))
    outputs = []
    for mode in (Recurrent(), nullcontext()):
        torch.manual_seed(3)
        with mode:
            outputs.append(layer(x)[0])
    assert outputs[0].equal(outputs[1]) and not outputs[0].equal(layer.eval()(x)[0])


def test_packed_sequences_are_torchs_own() -> None:
    layer = nn.GRU(5, 7)
    packed = pack_padded_sequence(
        torch.randn(PLACES, 2, 5, generator=torch.Generator().manual_seed(2)), torch.tensor([6, 4])
    )
    with Recurrent():
        y, _ = layer(packed)
    expected, _ = layer(packed)
    assert y.data.equal(expected.data)

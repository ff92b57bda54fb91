"""Recurrent layers of many models in one call: ``vmap`` has no rule for torch's own, but for what they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, decompositions
from torch.overrides import TorchFunctionMode

_parts: Any = decompositions  # some have no types


def _lstm(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: bool, layers: int, *rest: Any) -> Any:
    """An LSTM step by step; torch's own decomposition has a call of its own on a processor, for one model."""
    _, _, both_ways, batch_first = rest
    named = _parts.gather_params(weights, biases, states[0].shape[2] != states[1].shape[2])
    pairs = list(zip(*states, strict=True))
    y, ended = _parts._rnn_helper(
        x, pairs, named, biases, layers, 0.0, False, both_ways, batch_first, _parts.one_layer_lstm
    )
    return y, *(torch.stack(state) for state in zip(*ended, strict=True))


_LAYERS: dict[Any, Any] = {
    torch.lstm: _lstm,
    torch.gru: decomposition_table[torch.ops.aten.gru.input],
    torch.rnn_tanh: decomposition_table[torch.ops.aten.rnn_tanh.input],
    torch.rnn_relu: decomposition_table[torch.ops.aten.rnn_relu.input],
}
_BIASES, _DROPOUT, _TRAINS, _ARGUMENTS = 3, 5, 6, 9  # where among so many a layer is told of these


class Recurrent(TorchFunctionMode):
    """While this lasts, recurrent layers are computed step by step, each for all of ``vmap``'s models at once.

    Those of packed sequences, which are called in another way, and those that drop something out stay torch's own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = None if kwargs or len(args) != _ARGUMENTS else _LAYERS.get(func)
        if layer is not None and isinstance(args[_BIASES], bool) and not (args[_DROPOUT] and args[_TRAINS]):
            return layer(*args)
        return func(*args, **(kwargs or {}))

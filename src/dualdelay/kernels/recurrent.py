"""Recurrent layers of many models in one call: ``vmap`` has no rule for torch's own, but for what they consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode

_LAYERS: dict[Any, Any] = {
    torch.lstm: torch.ops.aten.lstm.input,
    torch.gru: torch.ops.aten.gru.input,
    torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
    torch.rnn_relu: torch.ops.aten.rnn_relu.input,
}
_BIASES = 3  # where a layer is told whether it has biases; one of packed sequences is told something else there


class Recurrent(TorchFunctionMode):
    """While this lasts, recurrent layers are computed step by step, each for all of ``vmap``'s models at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = _LAYERS.get(func)
        if layer is not None and isinstance(args[_BIASES], bool):
            return decomposition_table[layer](*args)
        return func(*args, **(kwargs or {}))

"""A decoder-only transformer that predicts the next byte at every place of a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_STD = 0.02  # of the initial weights, as in GPT-2


class Transformer(nn.Module):
    """Logits (n, t, 256) of the byte after each of n texts' first 1 ... t bytes, from those bytes (n, t).

    Blocks normalise what they take (pre-norm), positions are learned, nothing is dropped out, and the embedding and the
    output have weights of their own. Weights start as GPT-2's do: normal with standard deviation 0.02, divided by
    sqrt(2 layers) where a block adds to its input; biases start at zero.
    """

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(context, width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = _STD / math.sqrt(2 * layers) if name.endswith("added.weight") else _STD
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, texts: Tensor) -> Tensor:
        x = self.embedding(texts.long()) + self.positions.weight[: texts.shape[-1]]
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all places of all texts, in nats; targets are bytes."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten().long())


class _Block(nn.Module):
    def __init__(self, context: int, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), _Attention(context, width, heads))
        self.layer = nn.Sequential()
        self.layer.add_module("norm", nn.LayerNorm(width))
        self.layer.add_module("hidden", nn.Linear(width, 4 * width))
        self.layer.add_module("gelu", nn.GELU())
        self.layer.add_module("added", nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.layer(x)
        return y


class _Attention(nn.Module):
    """Every place looks at itself and at those before it."""

    later: Tensor

    def __init__(self, context: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.taken, self.added = nn.Linear(width, 3 * width), nn.Linear(width, width)
        later = torch.full((context, context), -math.inf).triu(1)  # is added, so that nothing is to be done on the way back
        self.register_buffer("later", later, persistent=False)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // self.heads
        split = self.taken(x).unflatten(-1, (3, self.heads, size)).transpose(-2, -4)  # (n, heads, 3, t, size)
        query, key, value = split.unbind(-3)
        scores = (query / math.sqrt(size)) @ key.transpose(-1, -2)  # there are fewer queries than scores
        later = self.later[: x.shape[-2], : x.shape[-2]]
        seen = (scores + later.to(scores.dtype)).softmax(-1) @ value
        y: Tensor = self.added(seen.transpose(-2, -3).flatten(-2))
        return y

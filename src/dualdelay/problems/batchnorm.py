"""BatchNorm keeps running statistics that are no weights, so every worker would have its own; GroupNorm keeps none."""

from __future__ import annotations

import copy
import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import BadInput


def refuse_batchnorm(module: nn.Module) -> None:
    """Raise an error that says how to convert a model whose BatchNorm layers change their statistics as they train.

    Those that are frozen (in evaluation mode) or keep no statistics are functions of their weights and inputs alone.
    """
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    names = [name or type(part).__name__ for name, part in layers if part.training and part.running_mean is not None]
    if names:
        raise BadInput(
            f"the model has BatchNorm layers ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''}): their running "
            "statistics are no weights, and each worker would have its own. Convert them: "
            "dd.problems.without_batchnorm(model); or freeze them: model.train(), then layer.eval() for each; or let them "
            "keep none: track_running_stats=False."
        )


def without_batchnorm(module: nn.Module, groups: int = 32) -> nn.Module:
    """A copy of a model in which GroupNorm stands for BatchNorm: at most ``groups`` groups, a divisor of the channels.

    For BatchNorm1d, whose channels may be single numbers, all channels are one group.
    Scale and shift are taken over; the statistics are not, so a trained model needs to be trained on.
    """
    parents = nn.Sequential(copy.deepcopy(module))  # so that a model that is nothing but a BatchNorm has one
    replaced: dict[_BatchNorm, nn.GroupNorm] = {}  # a layer that stands in two places stays one
    for parent in list(parents.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                replaced[child] = replaced.get(child) or _group_norm(child, groups)
                setattr(parent, name, replaced[child])
    return parents[0]


def _group_norm(norm: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    count = 1 if isinstance(norm, nn.BatchNorm1d) else math.gcd(groups, channels)  # a group of one number would be constant
    group_norm = nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        group_norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return group_norm

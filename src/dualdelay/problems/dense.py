"""Gradients of dense networks on a processor, layer by layer: a small network's autograd is mostly bookkeeping."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as _globally

_aten: Any = torch.ops.aten
_flatten: Any = _flatten_dense_tensors  # it has no types
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A module's own, and not its class's, if somebody has put them there:
_REPLACED = frozenset({"forward", "_compiled_call_impl"})
_MOST = 64  # forms of batches that are remembered

Place = tuple[slice, torch.Size]


class DenseGradient:
    """The mean cross-entropy's gradient through Linear, ReLU and Tanh layers, by the calls that autograd would make.

    A batch of a form that was never seen goes by autograd; those of that form go by layers from then on if both gave the
    same bits.
    """

    def __init__(self, layers: list[nn.Module], weights: Tensor, places: list[Place], parts: list[nn.Module]) -> None:
        self._forms: dict[Hashable, bool] = {}  # of batches: whether both ways gave the same
        self._layers: list[tuple[type, Tensor | None, Tensor | None]] = []  # its kind, its weight, and its bias
        views = iter([weights[place].view(shape) for place, shape in places])
        for layer in layers:
            weight = next(views) if isinstance(layer, nn.Linear) else None
            bias = next(views) if isinstance(layer, nn.Linear) and layer.bias is not None else None
            self._layers.append((type(layer), weight, bias))
        self._first = next(number for number, (kind, *_) in enumerate(self._layers) if kind is nn.Linear)
        self._one = torch.ones((), dtype=weights.dtype)
        self._hooks = [getattr(part, name) for part in parts for name in _HOOKS]
        self._hooks += [getattr(_globally, name) for name in _GLOBAL_HOOKS if hasattr(_globally, name)]
        self._own, self._parameters = [vars(part) for part in parts], [p for layer in layers for p in layer.parameters()]

    def gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float] | None:
        """The gradient for the weights as they are, and the loss; None: autograd has to take it."""
        if not (self._is_plain() and self._forms.get(_form(inputs, targets))):
            return None
        try:
            return self._by_layers(inputs, targets)
        except (RuntimeError, IndexError):  # autograd says it as everywhere else
            return None

    def compare(self, inputs: Tensor, targets: Tensor, gradient: Tensor, loss: float) -> None:
        """This is what autograd made of a batch: remember whether layers give the same bits."""
        form = _form(inputs, targets)
        if form is None or form in self._forms or len(self._forms) == _MOST or not self._is_plain():
            return
        self._forms[form] = False
        if inputs.ndim == 2 and targets.ndim == 1 and not inputs.requires_grad:
            try:
                ours, mean = self._by_layers(inputs, targets)
            except (RuntimeError, IndexError):
                return
            self._forms[form] = mean == loss and torch.equal(_bits(ours), _bits(gradient))

    def _is_plain(self) -> bool:
        """Whether nobody has a say in what a layer does, nor asks autograd for more than gradients."""
        if (
            any(self._hooks)
            or not all(map(_REPLACED.isdisjoint, self._own))
            or any(p._backward_hooks for p in self._parameters)
        ):
            return False
        return torch.is_grad_enabled() and not (torch.is_autocast_enabled("cpu") or torch.is_anomaly_enabled())

    def _by_layers(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        h, before, ends = inputs, list[Tensor](), list[Tensor]()
        for kind, weight, bias in self._layers:
            before.append(h)
            if weight is None:
                h = torch.relu(h) if kind is nn.ReLU else torch.tanh(h)
            else:
                h = torch.mm(h, weight.t()) if bias is None else torch.addmm(bias, h, weight.t())
            ends.append(h)
        logs = torch.log_softmax(h, 1)
        loss, total = _aten.nll_loss_forward(logs, targets, None, 1, -100)
        g = _aten.nll_loss_backward(self._one, logs, targets, None, 1, -100, total)
        g = _aten._log_softmax_backward_data(g, logs, 1, logs.dtype)
        parts = list[Tensor]()  # the last layer's first, each in its own memory: a product's bits depend on where it lies
        for number in range(len(self._layers) - 1, self._first - 1, -1):
            kind, weight, bias = self._layers[number]
            if weight is None:
                h = ends[number]
                g = _aten.threshold_backward(g, h, 0) if kind is nn.ReLU else _aten.tanh_backward(g, h)
                continue
            if bias is not None:
                parts.append(g.sum(0))
            parts.append(torch.mm(g.t(), before[number]))
            if number > self._first:
                g = torch.mm(g, weight)
        parts.reverse()
        return _flatten(parts), loss.item()


def dense_gradient(module: nn.Module, weights: Tensor, places: list[Place]) -> DenseGradient | None:
    """The gradient by layers of a module whose trainable weights lie one after the other; None if it has other layers."""
    layers = list(module) if type(module) is nn.Sequential else [module]
    kinds = {type(layer) for layer in layers}
    if not kinds <= {nn.Linear, nn.ReLU, nn.Tanh} or nn.Linear not in kinds or not weights.is_cpu:
        return None
    parameters = [p for layer in layers for p in layer.parameters()]
    trained = {id(p) for p in parameters if p.requires_grad and type(p) is nn.Parameter}
    if not len(parameters) == len(trained) == len(places):  # some are frozen, or in two layers
        return None
    return DenseGradient(layers, weights, places, [module, *layers])


def is_cross_entropy(loss: Any) -> bool:
    """Whether a loss is torch's mean cross-entropy with nothing special about it."""
    if type(loss) is nn.CrossEntropyLoss:
        usual = (loss.reduction, loss.ignore_index, loss.label_smoothing) == ("mean", -100, 0.0)
        return usual and loss.weight is None and _is_untouched(loss)
    return loss is cross_entropy


def _is_untouched(part: nn.Module) -> bool:
    """Whether a module does what its class does: it has no hooks, no forward of its own, and is not compiled."""
    return not any(getattr(part, name) for name in _HOOKS) and _REPLACED.isdisjoint(vars(part))


def _form(inputs: Tensor, targets: Tensor) -> Hashable:
    """What a product's bits may depend on beside the numbers; None: nothing that layers could take."""
    if inputs.layout is not torch.strided or targets.layout is not torch.strided:
        return None
    return inputs.shape, inputs.stride(), inputs.dtype, inputs.requires_grad, targets.shape, targets.dtype


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

"""A torch module whose trainable weights are one flat tensor."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from ..core.errors import BadInput
from .dense import dense_gradient

_flatten: Any = _flatten_dense_tensors  # it has no types
# What torch.autograd.grad calls once it has looked at its arguments, which takes a fifth of the time of a small network's
# gradient: (outputs, their gradients, whether the graph is kept, whether one is made, inputs, whether some may be unused).
_autograd: Any = torch.autograd.Variable  # it has no types
_run_backward = _autograd._execution_engine.run_backward
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)  # torch's own, of which it is known what they do in training mode
_DEEPEST = 8  # levels of what a module keeps in which tensors are looked for
_MOVES = "flatten_parameters"  # by which a recurrent layer on a GPU puts its weights elsewhere, out of the flat tensor


class FlatModule:
    """A module in training mode; parameters with ``requires_grad=False`` are no part of the weights.

    If the module is in training mode already, parts of it that are not, such as frozen normalisation, stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module if module.training else module.train()
        self._trained = {name for name, part in self.module.named_modules() if part.training}  # by name: parts in that mode
        self._dropout = {name: part.dropout for name, part in self.module.named_modules() if type(part) in _RECURRENT}
        self._bind()

    def _bind(self) -> None:
        """Make each trainable parameter a view into one flat tensor, so that loading weights is a single copy."""
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._parameters = tuple(named.values())
        self._plain = all(type(p) is nn.Parameter for p in self._parameters)
        self._one = torch.ones(())
        kinds = sorted({str(p.dtype) for p in self._parameters})
        if len(kinds) != 1:
            raise BadInput(f"the model's trainable parameters have types {kinds}; expected at least one, all of one type.")
        self.weights = flat_weights(self.module)
        self._places: dict[str, tuple[slice, torch.Size]] = {}  # by name: where in the weights it is, and its shape
        start = 0
        for name, parameter in named.items():
            place = slice(start, start + parameter.numel())
            parameter.data = self.weights[place].view_as(parameter)
            self._places[name], start = (place, parameter.shape), place.stop
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                vars(part)[_MOVES] = _stay
                if self.weights.is_cuda:  # of which torch then warns at every forward pass
                    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        self.description = repr(self.module)
        """The module in words, in its usual mode."""
        self.dense = dense_gradient(self.module, self.weights, list(self._places.values()))

    def __getstate__(self) -> dict[str, Any]:
        """The module goes as a copy: a pickled view would bring the whole flat tensor, and be a view no more."""
        return {"module": self._copied(), "_trained": self._trained, "_dropout": self._dropout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def _copied(self) -> nn.Module:
        """A copy of the module in its usual mode: another thread may be evaluating with it."""
        module = copied(self.module)
        for name, part in module.named_modules():
            part.training = name in self._trained
            if name in self._dropout:
                vars(part)["dropout"] = self._dropout[name]
        return module

    def on(self, device: torch.device | str) -> FlatModule:
        """A copy with weights of its own on a device."""
        return FlatModule(self._copied().to(device))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat weights (d) or (r, d) as views by the parameters' names, for ``torch.func.functional_call``."""
        return {name: flat[..., place].view(*flat.shape[:-1], *shape) for name, (place, shape) in self._places.items()}

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Where in the flat weights each trainable entry of the state dict is: name, first number and shape.

        Tied parameters have several names and one place.
        """
        starts = {id(p): place.start for p, (place, _) in zip(self._parameters, self._places.values(), strict=True)}
        named = self.module.named_parameters(remove_duplicate=False)
        return [(name, starts[id(p)], tuple(p.shape)) for name, p in named if id(p) in starts]

    def fixed(self) -> list[Tensor]:
        """What training does not move: frozen parameters and buffers."""
        return [p.detach() for p in self.module.parameters() if not p.requires_grad] + list(self.module.buffers())

    def signature(self) -> Hashable:
        """Equal for modules that compute the same function of their weights, as far as can be told."""
        parts = []
        for name, part in self.module.named_modules():
            settings = sorted((key, repr(value)) for key, value in vars(part).items() if not key.startswith("_"))
            parts.append((name, type(part), tuple(settings)))
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters())
        return tuple(parts), shapes, tuple(map(bits, self.fixed()))

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a loss with respect to the weights, zero for those it does not depend on."""
        if self._plain and type(loss) is Tensor and loss.is_cpu:
            if self._one.shape != loss.shape or self._one.dtype != loss.dtype:
                self._one = torch.ones_like(loss)
            parts = _run_backward((loss,), (self._one,), False, False, self._parameters, True, accumulate_grad=False)
        else:
            parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        if any(part is None for part in parts):
            parts = tuple(torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, parts, strict=True))
        gradient: Tensor = _flatten(parts)  # one call for all
        return gradient

    @contextmanager
    def evaluating(self, x: Tensor) -> Iterator[None]:
        """The module has these weights and is in evaluation mode."""
        self.weights.copy_(x)
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        recurrent = [(part, part.dropout) for part in training if isinstance(part, nn.RNNBase) and type(part) in _RECURRENT]
        for layer, _ in recurrent:  # in evaluation mode cuDNN takes no gradient; without dropout both modes are the same
            layer.training, layer.dropout = True, 0.0
        try:
            with own_kernels("float32", self.weights.is_cuda):
                yield
        finally:
            for layer, dropout in recurrent:
                layer.dropout = dropout
            for part in training:
                part.training = True

    def model(self, x: Tensor) -> nn.Module:
        """A copy with these weights, in evaluation mode."""
        self.weights.copy_(x)
        module = self._copied().eval()
        for part in module.modules():
            vars(part).pop(_MOVES, None)
        return module

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """The weights under the module's names, on the processor."""
        self.weights.copy_(x)
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.module.state_dict().items()}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """The inverse of ``state_dict``."""
        module = self._copied()
        try:
            module.load_state_dict(state_dict)
        except RuntimeError as error:
            raise BadInput(f"the given weights are not this model's: {error}") from None
        return flat_weights(module)


def refuse_hooks_of_weights(module: nn.Module) -> None:
    """Raise an error if somebody changes gradients where they arrive, for a copy of a parameter has none of its hooks."""
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise BadInput(
            f"the model's parameters have hooks ({', '.join(hooked[:5])}{', ...' if len(hooked) > 5 else ''}), which their "
            "copies in threads and processes would not have: gradients would differ. Leave them out: freeze by "
            "requires_grad_(False), mask a weight in the module's forward, clip by dd.problems.Clipped."
        )


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module: threads, processes and devices each have their own, and nobody's is changed by another's run.

    Of what lies in it from its last pass, as old weight normalisation leaves it there, the copy has the numbers alone.
    """
    passed = [tensor for part in module.modules() for tensor in _tensors(list(vars(part).values())) if not tensor.is_leaf]
    try:
        return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in passed})
    except Exception as error:  # whatever copying a user's objects raises
        raise BadInput(
            f"the model cannot be copied ({type(error).__name__}: {error}), which every thread, process and device needs. "
            "Keep out of it what cannot be, such as locks, open files and, in own objects, tensors of its last pass."
        ) from error


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value, or in the lists, tuples and dicts that it is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth < _DEEPEST:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth + 1)


def _stay() -> None:
    """Leave the weights where they are."""


def bits(tensor: Tensor) -> bytes:
    """A tensor's values, bit for bit."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def own_kernels(precision: str, wanted: bool) -> AbstractContextManager[Any]:
    """While this lasts, the package's own kernels do the convolutions and pooling, if wanted and if there is Triton."""
    if not wanted:
        return nullcontext()
    try:
        from ..kernels.dispatch import Kernels
    except ImportError:  # it needs Triton, which comes with torch on most machines that have a GPU
        return nullcontext()
    return Kernels(precision)


def flat_weights(module: nn.Module) -> Tensor:
    """A copy of a module's trainable weights as one flat tensor."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])

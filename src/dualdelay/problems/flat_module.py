"""A torch module whose trainable weights are one flat tensor."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from ..core.errors import BadInput

_flatten: Any = _flatten_dense_tensors  # it has no types


class FlatModule:
    """A module in training mode; parameters with ``requires_grad=False`` are no part of the weights.

    If the module is in training mode already, parts of it that are not, such as frozen normalisation, stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module if module.training else module.train()
        self._bind()

    def _bind(self) -> None:
        """Make each trainable parameter a view into one flat tensor, so that loading weights is a single copy."""
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        kinds = sorted({str(p.dtype) for p in self._parameters})
        if len(kinds) != 1:
            raise BadInput(f"the model's trainable parameters have types {kinds}; expected at least one, all of one type.")
        self.weights = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        offset = 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.data = self.weights[offset : offset + size].view_as(parameter)
            offset += size

    def __getstate__(self) -> dict[str, Any]:
        """The module goes as a copy: a pickled view would bring the whole flat tensor, and be a view no more."""
        return {"module": copy.deepcopy(self.module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def on(self, device: torch.device | str) -> FlatModule:
        """A copy of its own on a device."""
        return FlatModule(copy.deepcopy(self.module).to(device))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat weights (d) or (r, d) as views by the parameters' names, for ``torch.func.functional_call``."""
        parts, offset = {}, 0
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                part = flat[..., offset : offset + parameter.numel()]
                parts[name] = part.view(*flat.shape[:-1], *parameter.shape)
                offset += parameter.numel()
        return parts

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Where in the flat weights each trainable entry of the state dict is: name, first number and shape.

        Tied parameters have several names and one place.
        """
        places, offset = {}, 0
        for parameter in self._parameters:
            places[id(parameter)] = offset
            offset += parameter.numel()
        named = self.module.named_parameters(remove_duplicate=False)
        return [(name, places[id(p)], tuple(p.shape)) for name, p in named if id(p) in places]

    def fixed(self) -> list[Tensor]:
        """What does not move: frozen parameters and buffers."""
        return [p.detach() for p in self.module.parameters() if not p.requires_grad] + list(self.module.buffers())

    def signature(self) -> Hashable:
        """Equal for modules that compute the same function of their weights, as far as can be told."""
        parts = []
        for name, part in self.module.named_modules():
            own = sorted((key, repr(value)) for key, value in vars(part).items() if not key.startswith("_"))
            parts.append((name, type(part), tuple(own)))
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters())
        return tuple(parts), shapes, tuple(bits(tensor) for tensor in self.fixed())

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a loss by the weights, zero for those it does not depend on."""
        parts: Sequence[Tensor | None] = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(parts, self._parameters, strict=True)
        flat: Tensor = _flatten([torch.zeros_like(p) if g is None else g for g, p in pairs])  # one call for all parameters
        return flat

    @contextmanager
    def evaluating(self, x: Tensor) -> Iterator[None]:
        """The module has these weights and is in evaluation mode."""
        self.weights.copy_(x)
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        try:
            with own_kernels("float32", self.weights.is_cuda, stacked=False):
                yield
        finally:
            for part in training:
                part.training = True

    def model(self, x: Tensor) -> nn.Module:
        """A copy with these weights, in evaluation mode."""
        self.weights.copy_(x)
        return copy.deepcopy(self.module).eval()

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """The weights under the module's names, on the processor."""
        self.weights.copy_(x)
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.module.state_dict().items()}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """The inverse of ``state_dict``."""
        module = copy.deepcopy(self.module)
        try:
            module.load_state_dict(state_dict)
        except RuntimeError as error:
            raise BadInput(f"the given weights are not this model's: {error}") from None
        return flat_weights(module)


def bits(tensor: Tensor) -> bytes:
    """A tensor's values, bit for bit."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def own_kernels(precision: str, wanted: bool, *, stacked: bool) -> AbstractContextManager[Any]:
    """While this lasts, convolutions and pooling of one network or of stacked ones are done by kernels of our own."""
    if not wanted:
        return nullcontext()
    try:
        from ..kernels.inside_vmap import Kernels
    except ImportError:  # it needs Triton, which comes with torch on most machines that have a GPU
        return nullcontext()
    return Kernels(precision, stacked)


def flat_weights(module: nn.Module) -> Tensor:
    """A module's trainable weights as one flat tensor of its own."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])

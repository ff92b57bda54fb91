"""Optimisers and schedules of torch by their names and settings: ``SGD[momentum=0.9]``, ``StepLR[step_size=100]``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .errors import BadInput, nearest
from .texts import parse_call, require_parameters

_OWN = "pass a function of your own, schedule=lambda optimizer: ..., which makes it"
_REFUSED = {
    "LBFGS": "it computes the loss many times in one step; use another, such as Adam",
    "Muon": "it moves matrices alone; use another, such as Adam, or make one by a function if all parameters are matrices",
    "SparseAdam": "it takes sparse gradients only; use Adam",
    "ReduceLROnPlateau": "it follows a metric, and the server has none; use another, such as CosineAnnealingLR",
    "LambdaLR": f"a text cannot hold its function; {_OWN}",
    "MultiplicativeLR": f"a text cannot hold its function; {_OWN}",
    "SequentialLR": f"a text cannot hold its schedules; {_OWN}",
    "ChainedScheduler": f"a text cannot hold its schedules; {_OWN}",
}


def _classes(module: Any, base: type) -> dict[str, type]:
    classes = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base))
    return {kind.__name__: kind for kind in classes if kind is not base and not kind.__name__.startswith("_")}


_OPTIMIZERS, _SCHEDULES = _classes(torch.optim, torch.optim.Optimizer), _classes(torch.optim.lr_scheduler, LRScheduler)
_KINDS = {"optimizer": _OPTIMIZERS, "schedule": _SCHEDULES}


def torch_class(what: str, text: str) -> tuple[Any, dict[str, Any], str]:
    """The class that a text names, with its settings and the text in full; ``what`` is an optimizer or a schedule."""
    written, values = parse_call(text)
    names = {name.lower(): name for name in _KINDS[what]}
    if written.lower() not in names:
        usable = (name for name in _KINDS[what] if name not in _REFUSED)
        raise BadInput(f"there is no {what} {written!r} in torch; {nearest(written, usable)}")
    name = names[written.lower()]
    if name in _REFUSED:
        raise BadInput(f"{what} {name} cannot be used: {_REFUSED[name]}.")
    kind = _KINDS[what][name]
    _check(name, kind, values)
    inside = ",".join(f"{key}={value!r}" for key, value in sorted(values.items()))
    return kind, values, f"{name}[{inside}]" if inside else name


def _check(name: str, kind: type, values: Mapping[str, Any]) -> None:
    """Refuse settings that are unknown, lacking or of another type than the default: torch lets many of those pass."""
    if "lr" in values:
        raise BadInput(f"{name} is given lr={values['lr']!r}; the algorithm's lr is the step size, so leave it out here.")
    known = {
        key: p
        for key, p in inspect.signature(kind).parameters.items()
        if key not in ("params", "optimizer", "lr", "last_epoch")
    }
    require_parameters(name, known, values)
    for key, value in values.items():
        default = known[key].default
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if isinstance(default, bool):
            good, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, (int, float)):
            good, expected = number, "a finite number"
        elif isinstance(default, tuple):
            good, expected = isinstance(value, (tuple, list)) and len(value) == len(default), f"something like {default}"
        else:
            text = isinstance(default, str)
            good, expected = isinstance(value, str) == text, "a text" if text else "no text"
        if not good:
            raise BadInput(f"{name} is given {key}={value!r}; expected {expected}.")

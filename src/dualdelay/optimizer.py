"""The server's step by an optimiser of ``torch.optim`` and a schedule of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import copy
import math
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .config import call, parameters
from .errors import BadInput, nearest

Maker = str | Callable[[Any], Any] | None
Description = str | dict[str, str] | None

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (bool, int, float, str, Tensor, set, types.NoneType)
_OWN = "pass a function of your own, schedule=lambda optimizer: ..., which makes it"
_REFUSED = {
    "LBFGS": "it computes the loss many times in one step; use another, such as Adam",
    "Muon": "it moves matrices, and the weights here are one flat vector; use another, such as Adam",
    "SparseAdam": "it takes sparse gradients only; use Adam",
    "ReduceLROnPlateau": "it follows a metric, and the server has none; use another, such as CosineAnnealingLR",
    "LambdaLR": f"a text cannot hold its function; {_OWN}",
    "MultiplicativeLR": f"a text cannot hold its function; {_OWN}",
    "SequentialLR": f"a text cannot hold its schedules; {_OWN}",
    "ChainedScheduler": f"a text cannot hold its schedules; {_OWN}",
}


def _classes(module: Any, base: type) -> dict[str, type]:
    found = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base))
    return {kind.__name__: kind for kind in found if kind is not base and not kind.__name__.startswith("_")}


_OPTIMIZERS, _SCHEDULES = _classes(torch.optim, torch.optim.Optimizer), _classes(torch.optim.lr_scheduler, LRScheduler)
_KINDS = {"optimizer": _OPTIMIZERS, "schedule": _SCHEDULES}
_EXAMPLES = {
    "optimizer": ("'SGD[momentum=0.9]'", "lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9)"),
    "schedule": ("'StepLR[step_size=100]'", "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"),
}


def _read(what: str, given: object) -> tuple[Callable[[Any], Any], Description]:
    """What makes the thing, and its description."""
    if given is None:
        return lambda first: None, None
    if isinstance(given, str):
        return _named(what, given)
    if callable(given) and not isinstance(given, type):  # a class would step with its default lr as a factor, unasked
        return given, {"function": str(getattr(given, "__qualname__", type(given).__qualname__))}
    text, function = _EXAMPLES[what]
    raise BadInput(f"{what} is {given!r}; expected a text such as {text} or a function: {function}.")


def _named(what: str, text: str) -> tuple[Callable[[Any], Any], str]:
    written, values = call(text)
    names = {name.lower(): name for name in _KINDS[what]}
    if written.lower() not in names:
        usable = (name for name in _KINDS[what] if name not in _REFUSED)
        raise BadInput(f"there is no {what} {written!r} in torch; {nearest(written, usable)}")
    name = names[written.lower()]
    if name in _REFUSED:
        raise BadInput(f"{what} {name} cannot be used: {_REFUSED[name]}.")
    kind = _KINDS[what][name]
    _check(name, kind, values)
    fixed = {"lr": 1.0} if what == "optimizer" else {}
    inside = ",".join(f"{key}={value!r}" for key, value in sorted(values.items()))
    return lambda first: kind(first, **fixed, **values), f"{name}[{inside}]" if inside else name


def _check(name: str, kind: type, values: Mapping[str, Any]) -> None:
    """Refuse settings that are unknown, lacking or of another type than the default: torch lets many of those pass."""
    if "lr" in values:
        raise BadInput(f"{name} is given lr={values['lr']!r}; the algorithm's lr is the step size, so leave it out here.")
    known = {key: p for key, p in parameters(kind).items() if key not in ("params", "optimizer", "lr", "last_epoch")}
    for key, value in values.items():
        if key not in known:
            raise BadInput(f"{name} has no parameter {key!r}; {nearest(key, known)}")
        default = known[key].default
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if isinstance(default, bool):
            good, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, (int, float)):
            good, expected = number, "a finite number"
        elif isinstance(default, tuple):
            good, expected = isinstance(value, (tuple, list)) and len(value) == len(default), f"something like {default}"
        else:
            good, expected = (
                isinstance(value, str) == isinstance(default, str),
                "a text" if isinstance(default, str) else "no text",
            )
        if not good:
            raise BadInput(f"{name} is given {key}={value!r}; expected {expected}.")
    lacking = [key for key, p in known.items() if p.default is p.empty and key not in values]
    if lacking:
        raise BadInput(f"{name} needs {', '.join(lacking)}: write {name}[{','.join(f'{key}=...' for key in lacking)}].")


def make_optimizer(optimizer: Maker = None, schedule: Maker = None, updates: int | None = None) -> Optimizer | None:
    """The optimizer of a new run; None if neither is given, for plain SGD needs no optimizer."""
    return None if optimizer is None and schedule is None else Optimizer(optimizer, schedule, updates)


def optimizer_of(
    recorded: Mapping[str, Description] | None, optimizer: Maker = None, schedule: Maker = None, updates: int | None = None
) -> Optimizer | None:
    """The optimizer of a recorded run from its description; functions must be given again, texts may be."""
    makers: dict[str, Maker] = {"optimizer": optimizer, "schedule": schedule}
    for what, given in makers.items():
        was = recorded[what] if recorded is not None else None
        now = was if given is None else _read(what, given)[1]
        if now != was:
            raise BadInput(f"the recorded {what} is {was!r}, but {now!r} was given; pass the same.")
        if given is None and isinstance(was, dict):
            raise BadInput(
                f"the recorded {what} is the function {was['function']}, which cannot be built from its name. Pass it "
                f"again, in Python: dd.resume(folder, {what}=...)."
            )
        makers[what] = was if isinstance(was, str) else given
    return make_optimizer(**makers, updates=updates)


def _plain(value: Any, drop: tuple[type, ...] = ()) -> Any:
    """The same in plain values and tensors, less what is dropped from dicts."""
    if isinstance(value, dict):
        return {key: _plain(item, drop) for key, item in value.items() if not isinstance(item, drop)}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, drop) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, _PLAIN):
        raise TypeError(f"its state holds a {type(value).__name__}, expected numbers, texts, tensors, lists and sets alone")
    return value


class Optimizer:
    """A torch optimiser and schedule that move the server's weights, for ``State.optimizer``.

    Each is None, a text with the name of torch's class and its settings, or a function: ``optimizer(params)`` makes a torch
    optimiser, ``schedule(optimizer)`` a scheduler. A function is called twice: for a trial on a few numbers now, and with
    the weights at the first update. ``updates`` is how many the run is to make, to tell whether a schedule ends before.

    The algorithm's lr is the step size, and the schedule, which steps once per update, gives a factor on it: what a
    schedule is told as a step size (eta_min, max_lr, ...) is a fraction of the algorithm's lr, and so is the lr of an
    optimiser that a function makes: give it lr=1. With a schedule alone the optimiser is torch's SGD. OneCycleLR and
    CyclicLR change the momentum too, SGD's from none at all, unless they are given cycle_momentum=false.
    """

    def __init__(self, optimizer: Maker = None, schedule: Maker = None, updates: int | None = None) -> None:
        self._make, described = _read("optimizer", "SGD" if optimizer is None else optimizer)
        self._make_schedule, scheduled = _read("schedule", schedule)
        self._described = {"optimizer": described, "schedule": scheduled}
        self._bind(torch.full((3,), 0.5))
        for _ in range(2):
            moved = self._attempt("optimizer", "make a step", lambda: self._move(self._x.data, torch.ones(3), 1e-3))
            if not torch.isfinite(moved).all():
                raise BadInput(f"optimizer {described} steps to {moved}; look at its settings.")
            self._advance()
        self.save()
        total = getattr(self._schedule, "total_steps", None)
        if updates is not None and isinstance(total, int) and updates > total:
            raise BadInput(
                f"schedule {scheduled} ends after {total} steps, but the run is to make {updates} updates, a step each; "
                f"give it total_steps={updates}."
            )
        self._bound, self._saved = False, dict[str, Any]()

    def _bind(self, x: Tensor) -> None:
        """Make the torch optimiser and schedule for these weights."""
        self._x, self._bound = torch.nn.Parameter(x), True
        self._torch = self._attempt("optimizer", "be made", lambda: self._make([self._x]))
        if not isinstance(self._torch, torch.optim.Optimizer):
            raise BadInput(f"optimizer made {self._torch!r}; expected a torch optimiser: {_EXAMPLES['optimizer'][1]}.")
        groups = [group["params"] for group in self._torch.param_groups]
        if len(groups) != 1 or len(groups[0]) != 1 or groups[0][0] is not self._x:
            raise BadInput(
                f"optimizer made a {type(self._torch).__name__} of other parameters; expected one of those that it is "
                f"called with, in one group: {_EXAMPLES['optimizer'][1]}."
            )
        self._schedule: LRScheduler | None = self._attempt("schedule", "be made", lambda: self._make_schedule(self._torch))
        good = isinstance(self._schedule, LRScheduler) and self._schedule.optimizer is self._torch
        if not good and self._described["schedule"] is not None:
            raise BadInput(
                f"schedule made {self._schedule!r}; expected a torch.optim.lr_scheduler.LRScheduler of the optimizer that "
                f"it is called with: {_EXAMPLES['schedule'][1]}."
            )

    def _attempt(self, what: str, verb: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # whatever torch or a user's function raises
            name, why = self._described[what], str(error) or type(error).__name__
            raise BadInput(f"{what} {name} cannot {verb}: {why}. Change its settings, or use another.") from error

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
        """Move the weights in place by the optimiser's step for this gradient, with lr times the schedule's factor."""
        if not self._bound:
            self._bind(weights)
            if self._saved:
                self._restore(self._saved["optimizer"], self._saved["schedule"])
                self._saved = {}
        moved = self._move(weights, gradient, lr)
        self._advance()
        return moved

    def _move(self, weights: Tensor, gradient: Tensor, lr: float) -> Tensor:
        group = self._torch.param_groups[0]
        factor = group["lr"]
        group["lr"], self._x.data, self._x.grad = lr * factor, weights, gradient
        self._torch.step()
        group["lr"], self._x.grad = factor, None
        return self._x.data  # the same memory, unless a user's optimiser has put other weights there

    def _advance(self) -> None:
        if self._schedule is not None:
            self._attempt("schedule", "make a step", self._schedule.step)

    def save(self) -> dict[str, Any]:
        """The state of optimiser and schedule as plain values and tensors; a schedule's functions are no part of it."""
        if not self._bound:
            return self._saved
        made, settings = self._schedule, (*_FUNCTIONS, Counter)  # MultiStepLR counts its milestones
        optimizer = self._attempt("optimizer", "be saved", lambda: _plain(self._torch.state_dict()))
        schedule = self._attempt("schedule", "be saved", lambda: made and _plain(made.state_dict(), settings))
        return {"optimizer": optimizer, "schedule": schedule}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved; torch is told at the next step, when the weights are there."""
        self._saved, self._bound = copy.deepcopy(dict(saved)), False  # torch would move the given tensors themselves

    def _restore(self, optimizer: dict[str, Any], schedule: dict[str, Any]) -> None:
        self._torch.load_state_dict(optimizer)
        state = self._torch.state.get(self._x, {})
        for name, value in optimizer["state"].get(0, {}).items():
            if isinstance(value, Tensor):  # torch has given it the weights' type, which NAdam's and ASGD's scalars have not
                state[name] = value.to(state[name].device)
        if self._schedule is not None:
            self._schedule.load_state_dict(schedule)

    def describe(self) -> dict[str, Description]:
        """What it was made from, for a run's configuration: texts, or the names of functions."""
        return dict(self._described)

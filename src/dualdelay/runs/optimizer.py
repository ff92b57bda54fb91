"""The server's step by an optimiser of ``torch.optim`` and a schedule of ``torch.optim.lr_scheduler``.

One rule: the method's lr is the learning rate. An optimiser that a text names gets it; one that a function makes must have
been given the same.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..batching.replicas import Apart
from ..core import Algorithm, Problem
from ..core.errors import BadInput
from ..core.torch_optimizers import torch_class
from . import adam

Maker = str | Callable[..., Any] | None
Layout = Sequence[tuple[str, int, Sequence[int]]]
Description = str | dict[str, str] | None

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (bool, int, float, str, Tensor, set, types.NoneType)
_ADAPTED: dict[type, type] = {torch.optim.Adam: adam.Adam, torch.optim.AdamW: adam.AdamW}
_EXAMPLES = {
    "optimizer": ("'SGD[momentum=0.9]'", "lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9)"),
    "schedule": ("'StepLR[step_size=100]'", "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"),
}


class Parameters(list[torch.nn.Parameter]):
    """What a function that makes an optimiser is called with: the model's parameters, in their shapes."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__(parameter for _, parameter in named)
        self._named = list(named)

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Each with its name, as ``module.named_parameters()`` gives them: to make groups of them."""
        return list(self._named)


def _read(what: str, given: object, lr: float) -> tuple[Callable[[Any], Any], Description]:
    """What makes the thing, and its description."""
    if given is None:
        return lambda first: None, None
    if isinstance(given, str):
        return _named(what, given, lr)
    if callable(given) and not isinstance(given, type):  # a class would step with its default lr, unasked
        described = {"function": str(getattr(given, "__qualname__", type(given).__qualname__))}
        return (lambda first: given(first, lr) if _takes_two(given) else given(first)), described
    text, function = _EXAMPLES[what]
    raise BadInput(f"{what} is {given!r}; expected a text such as {text} or a function: {function}.")


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function must be given two arguments."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in
        return False
    needed = [p for p in known if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2


def _named(what: str, text: str, lr: float) -> tuple[Callable[[Any], Any], str]:
    kind, values, described = torch_class(what, text)
    fixed = {"lr": lr} if what == "optimizer" else {}
    if what == "optimizer" and kind in _ADAPTED:
        if unknown := sorted(set(values) - set(adam.SETTINGS)):
            raise BadInput(
                f"optimizer {described} has {', '.join(unknown)}; expected some of {', '.join(adam.SETTINGS)}. For torch's "
                f"own pass a function: lambda params, lr: torch.optim.{kind.__name__}(params, lr=lr, {unknown[0]}=...)."
            )
        kind = _ADAPTED[kind]
    return lambda first: kind(first, **fixed, **values), described


def make_optimizer(
    optimizer: Maker,
    schedule: Maker,
    updates: int | None,
    algorithm: Algorithm[Any],
    problem: Problem,
) -> Optimizer | None:
    """The optimizer of a new run; None if neither is given, for plain SGD needs no optimizer."""
    if optimizer is None and schedule is None:
        return None
    if algorithm.own_step:
        raise BadInput(
            f"{type(algorithm).__name__} takes no optimizer and no schedule: {algorithm.own_step}. Leave them out, or use "
            "a method whose lr is the learning rate, such as dd.DuDe(lr=0.003)."
        )
    if algorithm.own_lr and algorithm.lr == type(algorithm).lr:
        raise BadInput(
            f"the lr of {type(algorithm).__name__} is {algorithm.lr:g}, {algorithm.own_lr}, and no learning rate for an "
            f"optimizer; give one: dd.{type(algorithm).__name__}(lr=0.001), on the shell '{algorithm.name}[lr=0.001]'."
        )
    return Optimizer(optimizer, schedule, updates, lr=algorithm.lr, layout=problem.layout())


def optimizer_of(
    recorded: Mapping[str, Description] | None,
    optimizer: Maker,
    schedule: Maker,
    updates: int | None,
    algorithm: Algorithm[Any],
    problem: Problem,
    verb: str,
) -> Optimizer | None:
    """The optimizer of a recorded run from its description; functions must be given again to ``dd.VERB``, texts may be."""
    makers: dict[str, Maker] = {"optimizer": optimizer, "schedule": schedule}
    for what, given in makers.items():
        was = recorded[what] if recorded is not None else None
        now = was if given is None else _read(what, given, algorithm.lr)[1]
        if now != was:
            raise BadInput(f"the recorded {what} is {was!r}, but {now!r} was given; pass the same.")
        if given is None and isinstance(was, dict):
            raise BadInput(
                f"the recorded {what} is the function {was['function']}, which cannot be built from its name. Pass it "
                f"again, in Python: dd.{verb}(folder, {what}=...)."
            )
        makers[what] = was if isinstance(was, str) else given
    return make_optimizer(makers["optimizer"], makers["schedule"], updates, algorithm, problem)


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

    Each is None, a text with the name of torch's class and its settings, or a function: ``optimizer(params)`` or
    ``optimizer(params, lr)`` makes a torch optimiser of the model's parameters, in groups if you like, and
    ``schedule(optimizer)`` a scheduler. A function is called twice: for a trial on a few numbers now, and with the weights
    at the first update. ``updates`` is how many the run is to make, to tell whether a schedule ends before.

    ``lr``, the algorithm's, is the learning rate: the optimiser's own must be the same, and what a schedule is told as a
    learning rate (eta_min, max_lr) is one, as everywhere in torch. Groups may have rates of their own. Where the algorithm
    takes some steps longer or shorter, all rates are so many times longer or shorter. With a schedule alone the optimiser
    is torch's SGD. OneCycleLR and CyclicLR change the momentum too, SGD's from none at all, unless they are given
    cycle_momentum=false.
    """

    def __init__(
        self,
        optimizer: Maker = None,
        schedule: Maker = None,
        updates: int | None = None,
        *,
        lr: float,
        layout: Layout | None = None,
    ) -> None:
        self.lr = self._lr = lr
        self._make, described = _read("optimizer", "SGD" if optimizer is None else optimizer, lr)
        self._make_schedule, scheduled = _read("schedule", schedule, lr)
        self._described = {"optimizer": described, "schedule": scheduled}
        shaped = layout is not None and not isinstance(described, str)  # a text's is elementwise: one vector is quicker
        self._layout = _unique(layout) if shaped and layout is not None else None
        self._bind(*_trial(self._layout))
        ones = torch.ones_like(self._flat)
        for _ in range(2):
            moved = self._attempt("optimizer", "make a step", lambda: self._move(self._flat, ones.clone(), lr))
            if not torch.isfinite(moved).all():
                raise BadInput(f"optimizer {described} steps to {moved[:3]}; look at its settings.")
            self._advance()
        self.save()
        total = getattr(self._schedule, "total_steps", None)
        if updates is not None and isinstance(total, int) and updates > total:
            raise BadInput(
                f"schedule {scheduled} ends after {total} steps, but the run is to make {updates} updates, a step each; "
                f"give it total_steps={updates}."
            )
        self._bound, self._saved = False, dict[str, Any]()

    def _bind(self, x: Tensor, layout: Layout | None) -> None:
        """Make the torch optimiser and schedule for these weights."""
        self._flat, self._bound = x, True
        self._places = [("x", 0, tuple(x.shape))] if layout is None else [(n, first, tuple(s)) for n, first, s in layout]
        parts = [(name, torch.nn.Parameter(_part(x, first, shape))) for name, first, shape in self._places]
        self._parts = Parameters(parts)
        self._torch = self._attempt("optimizer", "be made", lambda: self._make(self._parts))
        if not isinstance(self._torch, torch.optim.Optimizer):
            raise BadInput(f"optimizer made {self._torch!r}; expected a torch optimiser: {_EXAMPLES['optimizer'][1]}.")
        self._adapts = isinstance(self._torch, adam.Adam)
        self._require_all_parameters()
        self._require_lr()
        self._schedule: LRScheduler | None = self._attempt("schedule", "be made", lambda: self._make_schedule(self._torch))
        good = isinstance(self._schedule, LRScheduler) and self._schedule.optimizer is self._torch
        if not good and self._described["schedule"] is not None:
            raise BadInput(
                f"schedule made {self._schedule!r}; expected a torch.optim.lr_scheduler.LRScheduler of the optimizer that "
                f"it is called with: {_EXAMPLES['schedule'][1]}."
            )

    def _require_all_parameters(self) -> None:
        given = [id(parameter) for group in self._torch.param_groups for parameter in group["params"]]
        ours = {id(parameter): name for name, parameter in self._parts.named()}
        if set(given) - set(ours) or len(given) != len(set(given)):
            raise BadInput(
                f"optimizer made a {type(self._torch).__name__} of other parameters; expected those that it is called "
                f"with, each in one group: {_EXAMPLES['optimizer'][1]}."
            )
        lacking = [name for key, name in ours.items() if key not in given]
        if lacking:
            raise BadInput(
                f"optimizer made a {type(self._torch).__name__} without {', '.join(lacking[:5])}: weights that it would "
                "never move. Put them into a group, or freeze them in the model: parameter.requires_grad_(False)."
            )

    def _require_lr(self) -> None:
        """Refuse a learning rate that is not the method's."""
        own = self._torch.defaults.get("lr")
        if own is None or any("lr" not in group for group in self._torch.param_groups):
            raise BadInput(f"optimizer made a {type(self._torch).__name__} without a learning rate; expected one with lr=.")
        if not math.isclose(float(own), self._lr, rel_tol=1e-9):
            raise BadInput(
                f"the method's lr is {self._lr:g}, and the optimizer's own is {float(own):g} (torch's default where none "
                "was given). The method's lr is the learning rate: give the optimizer the same, beside those of its "
                "groups, or let it be handed over: optimizer=lambda params, lr: "
                f"torch.optim.{type(self._torch).__name__}(params, lr=lr)."
            )

    def _attempt(self, what: str, verb: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # whatever torch or a user's function raises
            name, why = self._described[what], str(error) or type(error).__name__
            raise BadInput(f"{what} {name} cannot {verb}: {why}. Change its settings, or use another.") from error

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """Move the weights in place by the optimiser's step for this gradient; ``lr`` is the rate that it has at first.

        Of weights with a row for each run it may be a column, if ``steps_by_rows``.
        """
        self._require_bound(weights)
        moved = self._move(weights, gradient, lr)
        self._advance()
        return moved

    @property
    def steps_by_rows(self) -> bool:
        """Whether weights with a row for each run move as each run's would by itself, each with a rate of its own."""
        plain = isinstance(self._torch, adam.Adam) or type(self._torch) is torch.optim.SGD
        return plain and not self.own and self._schedule is None

    def observe(self, weights: Tensor, message: Tensor) -> None:
        """A worker's message has arrived, a gradient nearly always; Adam's second moment is that of these."""
        if self._adapts and message.shape == weights.shape:
            self._require_bound(weights)
            self._torch.observe([_part(message, first, shape) for _, first, shape in self._places])

    def _require_bound(self, weights: Tensor) -> None:
        if not self._bound:
            self._bind(weights, self._layout)
            if self._saved:
                self._attempt("optimizer", "go on from what was saved", self._restore)
                self._saved = {}

    def _move(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        groups = self._torch.param_groups
        rates = [group["lr"] for group in groups]
        if isinstance(lr, Tensor):
            groups[0]["lr"] = lr
        elif (times := lr / self._lr) != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * times
        for part, (_, first, shape) in zip(self._parts, self._places, strict=True):
            part.data, part.grad = _part(weights, first, shape), _part(gradient, first, shape)
        if isinstance(lr, Tensor) and isinstance(self._torch, torch.optim.SGD):
            _step_by_rows(self._torch)
        else:
            self._torch.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for part, (_, first, shape) in zip(self._parts, self._places, strict=True):
            place = _part(weights, first, shape)
            if part.data.data_ptr() != place.data_ptr():  # a user's optimiser has put other weights there
                place.copy_(part.data)
            part.grad = None
        return weights

    def _advance(self) -> None:
        if self._schedule is not None:
            self._attempt("schedule", "make a step", self._schedule.step)

    def save(self) -> dict[str, Any]:
        """The state of optimiser and schedule as plain values and tensors; a schedule's functions are no part of it."""
        if not self._bound:
            return self._saved
        scheduler, settings = self._schedule, (*_FUNCTIONS, Counter)  # MultiStepLR counts its milestones
        optimizer = self._attempt("optimizer", "be saved", lambda: _plain(self._torch.state_dict()))
        schedule = self._attempt("schedule", "be saved", lambda: scheduler and _plain(scheduler.state_dict(), settings))
        return {"optimizer": optimizer, "schedule": schedule}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was saved; torch is told at the next step, when the weights are there."""
        self._saved, self._bound = copy.deepcopy(dict(saved)), False  # torch would move the given tensors themselves

    def _restore(self) -> None:
        optimizer, schedule = self._saved["optimizer"], self._saved["schedule"]
        for group, saved in zip(self._torch.param_groups, optimizer["param_groups"], strict=True):
            if group.keys() != saved.keys():
                raise ValueError(f"that has the settings {', '.join(saved)}, and this one {', '.join(group)}")
        self._torch.load_state_dict(optimizer)
        parameters = [parameter for group in self._torch.param_groups for parameter in group["params"]]
        for number, saved in optimizer["state"].items():
            state = self._torch.state[parameters[number]]
            for name, value in saved.items():
                if isinstance(value, Tensor):  # torch has given it the weights' type, which some scalars have not
                    state[name] = value.to(state[name].device)
        if self._schedule is not None:
            self._schedule.load_state_dict(schedule)

    @property
    def own(self) -> bool:
        """Whether a user's function has made some of it, which may fail where torch's does not."""
        return any(isinstance(description, Mapping) for description in self._described.values())

    def describe(self) -> dict[str, Description]:
        """What it was made from, for a run's configuration: texts, or the names of functions."""
        return dict(self._described)


@torch.no_grad()
def _step_by_rows(sgd: torch.optim.SGD) -> None:
    """The step of torch's SGD with a column of rates, which torch does not take."""
    for group in sgd.param_groups:
        for parameter in group["params"]:
            direction, momentum = -parameter.grad if group["maximize"] else parameter.grad, group["momentum"]
            if group["weight_decay"]:
                direction = direction.add(parameter, alpha=group["weight_decay"])
            if momentum:
                state = sgd.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = direction.clone()
                else:
                    state["momentum_buffer"].mul_(momentum).add_(direction, alpha=1 - group["dampening"])
                kept = state["momentum_buffer"]
                direction = direction.add(kept, alpha=momentum) if group["nesterov"] else kept
            parameter.addcmul_(direction, -group["lr"].to(parameter.dtype))


class Optimizers:
    """The optimisers of runs that advance together, for a ``State.optimizer`` whose weights have a row for each run.

    Adam and torch's SGD step all rows at once, each with a rate of its own; any other optimiser, a user's own, and one with
    a schedule steps the rows one after the other, each run's its own.
    """

    def __init__(self, runs: Sequence[Optimizer]) -> None:
        self._runs = runs
        self._joint = copy.copy(runs[0]) if runs[0].steps_by_rows else None
        self._rates: tuple[object, list[float]] = (None, [run.lr for run in runs])  # a column, and its numbers

    @property
    def own(self) -> bool:
        """Whether a user's function has made some of it, which may fail where torch's does not."""
        return self._runs[0].own

    def observe(self, weights: Tensor, message: Tensor) -> None:
        """A worker's messages to all runs have arrived."""
        if self._joint is not None:
            self._joint.observe(weights, message)
        elif message.shape == weights.shape:
            for run, x, part in zip(self._runs, weights, message, strict=True):
                run.observe(x, part)

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> Tensor:
        """Move all rows in place; ``lr`` is the rate that they have at first, or a column of them."""
        if self._joint is not None:
            return self._joint.step(weights, gradient, lr)
        if lr is not self._rates[0]:  # a method that changes its step makes new ones, which are fetched from the device
            rates = lr.flatten().tolist() if isinstance(lr, Tensor) else [lr] * len(self._runs)
            self._rates = (lr, rates)
        for run, x, part, rate in zip(self._runs, weights, gradient, self._rates[1], strict=True):
            run.step(x, part, rate)
        return weights

    def save(self) -> dict[str, Any]:
        """What each run's saves."""
        return {"runs": [self.save_of(k) for k in range(len(self._runs))]}

    def save_of(self, k: int) -> dict[str, Any]:
        """What run k's optimiser would save, were the run by itself."""
        if self._joint is None:
            return self._runs[k].save()
        saved: dict[str, Any] = _of_row(self._joint.save(), k)
        for group in saved["optimizer"]["param_groups"] if saved else ():
            group["lr"] = self._runs[k].lr
        return saved

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what each run's has saved."""
        if self._joint is None:
            for run, part in zip(self._runs, saved["runs"], strict=True):
                run.load(part)
        else:
            self._joint.load(_in_rows(saved["runs"]))

    def of(self, k: int) -> Optimizer:
        """Run k's optimiser, as it is now."""
        own = copy.copy(self._runs[k])
        own.load(self.save_of(k))
        return own


def _of_row(saved: Any, k: int) -> Any:
    """What belongs to run k, of plain values whose tensors have a row for each run or belong to all of them."""
    if isinstance(saved, Tensor):
        return saved[k].clone() if saved.ndim == 2 else saved.clone()
    if isinstance(saved, (list, tuple)):
        return type(saved)(_of_row(part, k) for part in saved)
    return {name: _of_row(part, k) for name, part in saved.items()} if isinstance(saved, dict) else saved


def _in_rows(saved: Sequence[Any]) -> Any:
    """The inverse, from what all runs saved at the same moment; they differ in tensors and rates alone."""
    first = saved[0]
    if isinstance(first, Tensor):
        if first.ndim == 1:
            return torch.stack(list(saved))
        if any(not torch.equal(first, other) for other in saved):
            raise Apart("the runs' optimisers have made different numbers of steps")
        return first
    if isinstance(first, (list, tuple)):
        return type(first)(_in_rows(parts) for parts in zip(*saved, strict=True))
    return {name: _in_rows([part[name] for part in saved]) for name in first} if isinstance(first, dict) else first


def _part(flat: Tensor, first: int, shape: Sequence[int]) -> Tensor:
    if tuple(shape) == flat.shape:
        return flat
    return flat[first : first + math.prod(shape)].view(tuple(shape))


def _unique(layout: Layout) -> Layout:
    """Each place once: tied parameters have several names."""
    return list({first: (name, first, shape) for name, first, shape in reversed(layout)}.values())[::-1]


def _trial(layout: Layout | None) -> tuple[Tensor, Layout | None]:
    """A few weights to try an optimiser on, with the names and as many dimensions as the model's."""
    if layout is None:
        return torch.full((3,), 0.5), None
    small, total = [], 0
    for name, _, shape in layout:
        few = tuple(min(size, 2) for size in shape)
        small.append((name, total, few))
        total += math.prod(few)
    return torch.full((total,), 0.5), small

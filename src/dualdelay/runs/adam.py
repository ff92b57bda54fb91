"""Adam and AdamW for a server whose gradients arrive one by one and late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BadInput

SETTINGS = ("betas", "eps", "weight_decay", "amsgrad")


class Adam(torch.optim.Optimizer):
    """Adam whose second moment is that of the gradients as they arrive, not of the direction that the method makes of them.

    A method's direction may be a mean over many gradients and change little from update to update, as DuDe's: its square is
    far smaller than a gradient's, and its sign stays for many updates, so that steps over its root are too long by the root
    of how many it is a mean of. Over the root of the arriving gradients' squares a step has the size that it has in Adam
    with one worker, whatever n, the delays and the method's memory are. Where workers keep their gradients and send
    differences, it is the second moment of these: about twice the noise, without the mean. Where nothing is told to
    ``observe``, such as in a trial, the direction's own square is taken, which is torch's Adam. Parameters of runs that
    advance together have a row for each run, and a group's lr may be a column.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled: bool = False,
    ) -> None:
        for name, value in (("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise BadInput(f"{name} is {value}; expected a number of zero or more, and below 1")
        for name, value in (("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise BadInput(f"{name} is {value}; expected a number of zero or more")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)
        self._decoupled, self._told = decoupled, False

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """A gradient has arrived, one tensor for each parameter."""
        self._told = True
        parameters = [(p, group["betas"][1]) for group in self.param_groups for p in group["params"]]
        for (parameter, beta), gradient in zip(parameters, gradients, strict=True):
            self._see(parameter, gradient, beta)

    def _see(self, parameter: Tensor, gradient: Tensor, beta: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["seen"] = torch.tensor(0.0), torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["seen"] += 1
        state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1 - beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the parameters by the directions in their ``grad``."""
        for group in self.param_groups:
            (beta, square_beta), decay, lr = group["betas"], group["weight_decay"], group["lr"]
            for parameter in group["params"]:
                direction = parameter.grad
                if decay and self._decoupled:
                    parameter.mul_(_like(parameter, 1 - lr * decay))
                elif decay:
                    direction = direction.add(parameter, alpha=decay)
                if not self._told:
                    self._see(parameter, direction, square_beta)
                state = self.state[parameter]
                state["step"] += 1
                state["exp_avg"].lerp_(direction, 1 - beta)
                updates, arrivals = float(state["step"]), float(state["seen"])
                square = state["exp_avg_sq"]
                if group["amsgrad"]:
                    square = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", square), square)
                root = (square / (1 - square_beta**arrivals)).sqrt_().add_(group["eps"])
                size = _like(parameter, -lr / (1 - beta**updates))
                if isinstance(size, Tensor):
                    parameter.addcmul_(state["exp_avg"] / root, size)
                else:
                    parameter.addcdiv_(state["exp_avg"], root, value=size)


def _like(parameter: Tensor, number: float | Tensor) -> float | Tensor:
    """A number, or a column of them for several runs, in the parameter's type."""
    return number.to(parameter.dtype) if isinstance(number, Tensor) else number


class AdamW(Adam):
    """Adam with torch's AdamW's weight decay: beside the step, not in the gradient."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.01, **settings: Any) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, decoupled=True, **settings)

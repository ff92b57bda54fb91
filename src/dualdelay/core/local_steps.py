"""Local steps: a worker moves the model by several gradients, with an inner optimiser of torch, before it reports."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .algorithm import Algorithm, S
from .errors import BadInput, require_positive
from .settings import positive, whole
from .torch_optimizers import torch_class
from .work import Memory, Message, RunningJob

_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # torch has a kernel of one pass for these


class InnerOptimizer:
    """An optimiser of torch for local steps, from a text such as ``AdamW[weight_decay=0.1]``.

    It must treat every number by itself: jobs that are computed together are rows of one tensor.
    """

    def __init__(self, text: str, lr: float) -> None:
        require_positive("the local steps' lr", lr)
        self._kind, self._settings, self.text = torch_class("optimizer", text)
        if self._kind.__name__ in _NOT_ELEMENTWISE:
            raise BadInput(f"{self._kind.__name__} cannot take local steps: it needs the weights as matrices. Use AdamW.")
        self.lr = float(lr)
        self.is_plain = self.text == "SGD"
        self.step_of_torch: Any = getattr(self._kind.step, "__wrapped__", self._kind.step)  # its hooks take as long again
        self._own = threading.local()  # torch's object, which is slow to make: one for each thread
        if not self.is_plain:
            self._try()

    def __reduce__(self) -> tuple[type[InnerOptimizer], tuple[str, float]]:
        return InnerOptimizer, (self.text, self.lr)

    def _try(self) -> None:
        try:
            steps = self.begin(torch.zeros(2), None)
            steps.step(torch.ones(2))
        except Exception as error:  # whatever torch raises about its settings
            raise BadInput(f"{self.text} cannot take a local step: {error}. Change its settings.") from error

    def begin(self, x: Tensor, memory: Mapping[str, Any] | None) -> LocalSteps:
        """Begin at x, with the state that an earlier job has left or anew."""
        return LocalSteps(self, x, memory)

    def torch_optimizer(self) -> torch.optim.Optimizer:
        """This thread's object of torch, of one parameter."""
        if not hasattr(self._own, "optimizer"):
            fuses = self._kind.__name__ in _FUSED and not {"fused", "foreach"} & set(self._settings)
            fused = {"fused": True} if fuses else {}
            parameter = torch.nn.Parameter(torch.zeros(1))
            self._own.optimizer = self._kind([parameter], lr=self.lr, **self._settings, **fused)
            self._own.fused = bool(fused)
        optimizer: torch.optim.Optimizer = self._own.optimizer
        return optimizer


class LocalSteps:
    """Steps from x to y; no tensor that was given is written into."""

    def __init__(self, inner: InnerOptimizer, x: Tensor, memory: Mapping[str, Any] | None) -> None:
        self._inner, self._x, self._total = inner, x, torch.zeros_like(x) if inner.is_plain else None
        self.y = x
        if inner.is_plain:
            return
        self._torch = inner.torch_optimizer()
        group = self._torch.param_groups[0]
        if "fused" in group and getattr(inner._own, "fused", False):
            group["fused"] = x.is_cpu  # on a GPU its step count would be there, too
        self._parameter = group["params"][0]
        self._parameter.data = x.clone()
        self._parameter.grad = None
        self._torch.state.clear()
        if memory:
            state = {name: v.clone() if isinstance(v, Tensor) else torch.tensor(float(v)) for name, v in memory.items()}
            self._torch.state[self._parameter] = state
        self.y = self._parameter.data

    def step(self, gradient: Tensor) -> None:
        """y moves by one step of the inner optimiser."""
        if self._total is not None:
            self.y = self.y - self._inner.lr * gradient
            self._total += gradient
        else:
            self._parameter.grad = gradient
            self._inner.step_of_torch(self._torch)

    def pseudo_gradient(self) -> Tensor:
        """(x - y) / lr: of plain SGD the sum of the gradients, and of one step the gradient to the bit."""
        return self._total if self._total is not None else (self._x - self.y) / self._inner.lr

    def moved(self) -> Tensor:
        """x - y."""
        return self._inner.lr * self._total if self._total is not None else self._x - self.y

    def memory(self) -> dict[str, Any]:
        """The optimiser's state, named tensors and numbers; of plain SGD there is none."""
        if self._total is not None:
            return {}
        state = self._torch.state[self._parameter]
        return {
            name: value.clone() if value.ndim else float(value)
            for name, value in state.items()
            if isinstance(value, Tensor)
        }


def sum_of_gradients(model: Tensor, job: RunningJob, lr: float) -> Tensor:
    """What plain SGD from the model meets in a job's steps: g = (x - y) / lr."""
    y, g = model, torch.zeros_like(model)
    for _ in job:
        gradient = job.gradient(y)
        y, g = y - lr * gradient, g + gradient
    return g


@dataclass(frozen=True)
class LocalTraining(Algorithm[S]):
    """A method whose workers take ``steps`` local steps from the model and send how far they have moved, x - y."""

    remembers: ClassVar[str] = "its inner optimiser's state, if that is kept; a lost one begins anew"

    steps: int = whole(1)
    """Local steps of a job (H in DiLoCo's papers)."""
    inner_lr: float = positive(0.1)
    """The step size of the local steps."""
    inner: str = "SGD"
    """Their optimiser, a name from torch.optim with its settings: "SGD[momentum=0.9]", "AdamW[weight_decay=0.1]"."""
    inner_state: Literal["reset", "keep"] = "reset"
    """Whether the optimiser's state begins anew in each job, or is kept at the worker from job to job."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer.begin(torch.zeros(1), None)  # it is made now, so that what cannot be is refused

    @cached_property
    def _optimizer(self) -> InnerOptimizer:
        return InnerOptimizer(self.inner, self.inner_lr)

    def work(self, memory: Memory | None, model: Tensor, job: RunningJob) -> tuple[Message, Memory | None]:
        local = self._optimizer.begin(model, memory)
        for _ in job:
            local.step(job.gradient(local.y))
        return local.moved(), (local.memory() or None) if self.inner_state == "keep" else None

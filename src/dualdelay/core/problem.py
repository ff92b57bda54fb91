"""What a problem is: worker i's part of the objective, its gradients and its evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .batched_gradients import BatchedGradients, OneAtATime
from .errors import BadInput, shown

Samples = int | tuple[int, int] | None
"""Which of a worker's samples: so many, the same each time; those from one place to another; or all."""


class Problem(ABC):
    """What is to be minimised: F(x) = (1/n) sum_i F_i(x), worker i knowing F_i alone. Pure: no call changes a later one."""

    workers: int
    seed: int
    own_seed: bool = False
    """Whether it was given a seed of its own; otherwise it follows the run's."""
    measures: bool = False
    """Whether each worker can measure its own part of F, so that no process needs all the data."""
    metric_names: tuple[str, ...] = ()
    """The metrics of its own that ``combine`` gives beside the usual ones."""
    joint_metric_names: tuple[str, ...] = ()
    """Those that it gives of all workers together, such as the worst of them; no worker has a number for these."""
    groups: list[list[Any]] | None = None
    """What each worker's data have in the column that they were split by; None if they were split otherwise."""
    accuracy_at_workers: bool = False
    """Whether accuracy is one of them: measured by each worker, not on data that the server has."""
    collective: bool = False
    """Whether ``gradient`` uses ``torch.distributed`` itself: where a worker has several ranks each of them calls it, and
    what the first one gives is sent. Without a process group it has to compute the same alone."""

    @abstractmethod
    def start(self, seed: int) -> Tensor:
        """The initial flat weights of a run with this seed."""

    @abstractmethod
    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        """The stochastic gradient of F_worker at x on minibatch ``draw``, a new tensor, and that minibatch's loss."""

    def gradient_part(self, x: Tensor, worker: int, draw: int, part: int, parts: int) -> tuple[Tensor, float]:
        """One of several parts of ``gradient``, with its share of the loss: those of all parts add up to the whole.

        A worker of several ranks computes one in each of them. Not every problem has this.
        """
        raise BadInput(
            f"{type(self).__name__} does not say how its gradients are split; expected ranks=1, a network, or a problem "
            "with 'gradient_part', or with 'collective = True' if its gradient uses torch.distributed itself."
        )

    @property
    def splits(self) -> bool:
        """Whether it has ``gradient_part``."""
        return type(self).gradient_part is not Problem.gradient_part

    @property
    def stateful(self) -> bool:
        """Whether gradients depend on what the worker keeps, such as an inner optimiser's state."""
        return False

    def stateful_gradient(
        self, memory: Mapping[str, Any] | None, x: Tensor, worker: int, draw: int
    ) -> tuple[Tensor, float, dict[str, Any] | None]:
        """The gradient and its loss as ``gradient`` gives them, and what the worker keeps for its next one."""
        return *self.gradient(x, worker, draw), None

    @abstractmethod
    def evaluate(self, x: Tensor) -> dict[str, float]:
        """Numbers about x: objective, pooled_loss, accuracy and gradient_norm; nan where there is none."""

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        """What one worker finds about x on its own data, all or some of them; for ``combine``.

        loss; samples, how many it is the mean of; gradient (exact, or None); and if it has them ``metrics`` by name.
        """
        raise BadInput(f"{type(self).__name__} is evaluated as a whole, not worker by worker; call 'evaluate'.")

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        """The numbers of ``evaluate``, and what each worker found for them, as far as that is known.

        With ``samples`` only so many of each worker's are looked at, the same each time, if the problem can do that.
        """
        return self.evaluate(x), {}

    def assess_all(
        self, x: Tensor, samples: Samples = None
    ) -> list[tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]]:
        """What ``assess`` gives for each row of x (r, d), the models of runs that advance together, to rounding."""
        return [self.assess(row, samples) for row in x]

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        """The numbers of ``evaluate`` from what some of the workers measured, with the mean over those as F."""
        raise BadInput(f"{type(self).__name__} is evaluated as a whole, not worker by worker; call 'evaluate'.")

    def samples(self, worker: int) -> int | None:
        """How many samples a worker has; None if that is not known, or there are none."""
        return None

    def classes(self, worker: int) -> Mapping[str, int] | None:
        """How many samples of each class a worker has; None if that is not known, or there are no classes."""
        return None

    @property
    def needs_sample_counts(self) -> bool:
        """Whether workers count by samples that only they can count; then ``set_mean_samples`` has to be called."""
        return False

    def set_mean_samples(self, unit: float) -> None:
        """So many samples make a worker that counts as one."""
        raise AssertionError("these workers do not count by samples")

    def extended(self, workers: int) -> Problem:
        """The same with more workers, for some that may join."""
        raise BadInput(
            f"{type(self).__name__} has data for {self.workers} workers and cannot make any for more; give a network a "
            "function of the worker's number (shards=), or leave room= out."
        )

    def few_samples(self) -> int | None:
        """How many samples a worker can evaluate in about the time of one gradient; None if it has none."""
        return None

    def costs(self) -> tuple[float, float] | None:
        """About how many seconds a gradient and a whole evaluation take, from their sizes alone; None: next to nothing.

        Nothing is timed, so that what is decided by this is the same at every moment and on every machine.
        """
        return None

    def batches(self, worker: int) -> int:
        """What one job costs, in minibatches."""
        return 1

    def epoch(self, worker: int) -> int:
        """How many minibatches make up all of a worker's data."""
        return 1

    def model(self, x: Tensor) -> Any:
        """What a user's metric function is called with: here x, for a network the module with these weights."""
        return x

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """The weights under the names that they are saved and loaded by."""
        return {"x": x}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """The flat weights of a state dict: the inverse of ``state_dict``."""
        if set(state_dict) != {"x"}:
            raise BadInput(f"the weights are named {sorted(state_dict)}; expected one tensor named 'x'.")
        return state_dict["x"]

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Where in the flat weights each entry of ``state_dict`` is, but for the fixed ones: name, first number, shape."""
        return [("x", 0, tuple(self.start(self.seed).shape))]

    def fixed(self) -> dict[str, Tensor]:
        """The entries of ``state_dict`` that no training moves."""
        return {}

    @property
    def parallel(self) -> bool:
        """Whether the problem and its twins can take gradients in several threads at once."""
        return False

    def twin(self) -> Problem:
        """The same problem on the same data, for another thread."""
        return self

    @property
    def workplace(self) -> object:
        """What it computes in, which two threads must not use at once; None if there is no such thing."""
        return None

    def on(self, device: str, precision: str = "float32") -> Problem:
        """The same problem with its data and its arithmetic on a device, "cpu" or "cuda", in some precision."""
        if device != "cpu" or precision != "float32":
            raise BadInput(
                f"{type(self).__name__} is computed on the processor in its own precision, not on {device!r} in "
                f"{precision!r}; leave device and precision out, or use a network."
            )
        return self

    @property
    def batch_key(self) -> Hashable:
        """Equal for problems whose gradients can be taken in one call."""
        return OneAtATime

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        """What takes gradients of these problems, all of this one's batch_key, many at once."""
        return OneAtATime(problems)

    @abstractmethod
    def fingerprint(self) -> str:
        """A short digest of data and settings, to tell whether a problem is the one that was recorded."""

    def data_fingerprint(self, worker: int) -> str:
        """A short digest of one worker's own data, which are built if need be; empty if it has none of its own."""
        return ""

    def reseeded(self, seed: int) -> Problem:
        """The same kind of problem with another seed: for data problems another split and other minibatches."""
        raise BadInput(f"{type(self).__name__} cannot take another seed; compare it with one seed or give it 'reseeded'.")

    def plot_split(self, path: str | Path | None = None) -> Any:
        """A picture of who has how many samples, of which classes: a figure, also written if ``path`` is given."""
        from ..analysis.portraits import split_portrait

        return split_portrait(self, path)

    def __repr__(self) -> str:
        settings: Mapping[str, Any] = getattr(self, "settings", {}) or {"workers": self.workers}
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in settings.items())})"

    def _repr_html_(self) -> str:
        from ..analysis.html import problem_html

        return problem_html(self)

    @property
    def unseeded(self) -> str:
        """What about it stays the same whatever the seed, although a person may think otherwise; empty: nothing."""
        return "it has no 'reseeded'" if type(self).reseeded is Problem.reseeded else ""

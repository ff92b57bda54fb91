"""Evaluations that real workers make between their jobs: who was asked, who has answered what, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import Samples
from ..engine.fleet import Model


@dataclass
class PendingEvaluation:
    """An evaluation of one model under way."""

    time: float
    model: Model
    samples: int | None  # of each worker; None: all
    limit: float | None  # the share of a worker's time that it may take; None: it waits for one job only
    piece: int | None  # samples in one request, where all are evaluated; None: all in one request
    asked: dict[int, int]  # the workers, and how many jobs each had done then
    parts: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)  # what each has answered so far
    waiting: set[int] = field(init=False)  # the workers that have not answered all
    errors: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = set(self.asked)

    def next_samples(self, worker: int) -> Samples:
        """Which samples a worker is to look at next."""
        if self.piece is None:
            return self.samples
        done = self.samples_done(worker)
        return done, min(done + self.piece, _size(self.parts[worker][0]) if done else self.piece)

    def samples_done(self, worker: int) -> int:
        """How many samples a worker has looked at."""
        return sum(part["samples"] for part in self.parts.get(worker, ()))

    def results(self) -> dict[int, dict[str, Any]]:
        """What each worker has found on all that it looked at."""
        return {worker: _combined(parts) for worker, parts in self.parts.items()}

    @property
    def complete(self) -> bool:
        """Whether every worker that was asked has answered."""
        return set(self.parts) == set(self.asked) and not self.errors

    @property
    def progress(self) -> float:
        """How much of it is done."""
        begun = [worker for worker in self.waiting if worker in self.parts]
        under_way = sum(self.samples_done(worker) / _size(self.parts[worker][0]) for worker in begun)
        return (len(self.asked) - len(self.waiting) + under_way) / len(self.asked)


def _size(part: Mapping[str, Any]) -> int:
    """How many samples a worker has, as far as it says so."""
    size: int = part.get("size", part["samples"])
    return size


def _combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was found in several pieces as if it had been found in one."""
    if len(parts) == 1:
        return dict(parts[0])
    samples = sum(part["samples"] for part in parts)
    mean = {"loss": sum(part["loss"] * part["samples"] for part in parts) / samples, "gradient": None}
    if all(part["gradient"] is not None for part in parts):
        mean["gradient"] = sum(part["gradient"] * (part["samples"] / samples) for part in parts)
    return {**parts[-1], **mean, "samples": samples}


class PendingEvaluations:
    """The evaluations under way, by number; each ends when every worker that is still at work has answered."""

    def __init__(self, ended: Callable[[PendingEvaluation], None]) -> None:
        self.open: dict[int, PendingEvaluation] = {}
        self._ended = ended
        self._count = 0

    def add(self, evaluation: PendingEvaluation) -> None:
        """Begin an evaluation."""
        self._count += 1
        if evaluation.waiting:
            self.open[self._count] = evaluation

    def wanted(self, worker: int) -> tuple[int, PendingEvaluation] | None:
        """The oldest evaluation that a worker has not answered."""
        return next(((number, one) for number, one in self.open.items() if worker in one.waiting), None)

    def take(self, number: int, worker: int, part: Mapping[str, Any] | str) -> None:
        """Take a worker's answer, or why it has none; one that was given up or comes twice is dropped."""
        evaluation = self.open.get(number)
        if evaluation is None or worker not in evaluation.waiting:
            return
        if isinstance(part, str):
            evaluation.errors[worker] = part
            evaluation.parts.pop(worker, None)
        else:
            evaluation.parts.setdefault(worker, []).append(part)
            if evaluation.piece is not None and evaluation.samples_done(worker) < _size(part):
                return
        self.drop(worker, number)

    def begin_again(self, worker: int) -> None:
        """A worker has to begin its evaluations anew."""
        for evaluation in self.open.values():
            if worker in evaluation.waiting:
                evaluation.parts.pop(worker, None)

    def drop(self, worker: int, *numbers: int) -> None:
        """Nothing more will come from a worker, for these evaluations or for all."""
        for number in self.open.keys() & set(numbers or self.open):
            evaluation = self.open[number]
            evaluation.waiting.discard(worker)
            if not evaluation.waiting:
                del self.open[number]
                if evaluation.parts or evaluation.errors:
                    self._ended(evaluation)

"""What several test files need: the models of a run by version, a run one event at a time, and small strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dualdelay as dd
from dualdelay.clocks import VirtualClock
from dualdelay.local_fleet import LocalFleet
from dualdelay.loop import Loop
from tables import ALGORITHMS

# How far two float32 results of the same network may lie apart, relative to them: each is a sum of fewer than a thousand
# terms in an order of its own, of which rounding moves each by half a last digit (2**-24), and such errors add up like a
# random walk, at most to sqrt(1000) of them. A wrong sample or weight moves it by a thousandth of itself or more.
ROUNDED = 32 * 2.0**-24

few = settings(deadline=None, max_examples=15, derandomize=True)
times = st.lists(st.floats(0.1, 5.0), min_size=1, max_size=7)

AGGREGATING = [
    name
    for name, algorithm in ALGORITHMS.items()
    if isinstance(algorithm.init(torch.zeros(1), 3, dd.Draws(0, "")), dd.AggregateState)
]


def by_seed(given: Any) -> Any:
    """A problem or a speed model with a seed of its own as a function of the seed, which then varies."""
    if isinstance(given, dd.Problem):
        return given.reseeded
    return lambda seed: _with_seed(given, seed)


def _with_seed(speeds: Any, seed: int) -> Any:
    values = {field.name: getattr(speeds, field.name) for field in fields(speeds) if field.init}
    changed = {name: _with_seed(value, seed) for name, value in values.items() if isinstance(value, dd.SpeedModel)}
    return replace(speeds, **changed, **({"seed": seed} if "seed" in values else {}))


def unlike(n: int, d: int = 1, **options: Any) -> dd.Quadratic:
    """Workers that disagree about small integers."""
    return dd.Quadratic([[float((7 * i + 3 * k) % 11 - 4) for k in range(d)] for i in range(n)], **options)


def archive(algorithm: dd.Algorithm[Any], problem: dd.Problem, speeds: dd.SpeedModel, **options: Any) -> Any:
    """A run, and a copy of the model of each version."""
    models = [problem.start(0)]

    def keep(s: dd.State, a: dd.Arrival) -> None:
        if s.version == len(models):
            models.append(s.x.clone())

    run = dd.simulate(algorithm, problem, speeds, watch=[keep], **{"evaluate_every": 10**6, **options})
    if len(models) == run.version:  # the last update was made by a wake
        models.append(run.x)
    assert len(models) == run.version + 1
    return run, models


def stepping(algorithm: dd.Algorithm[Any], problem: dd.Problem, speeds: dd.SpeedModel, events: int) -> Iterator[Loop]:
    """A run seen from inside after each of its first events, to look at the jobs in flight."""
    loop = Loop(algorithm, problem, LocalFleet(problem, VirtualClock(speeds), algorithm.message), problem.start(0))
    loop.begin()
    for _ in range(events):
        loop.advance()
        yield loop


class Counts(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two sequences of models agree bit for bit."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """The largest difference between two sequences of models."""
    return float((torch.stack(list(a)) - torch.stack(list(b))).abs().max())

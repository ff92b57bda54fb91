"""What several test files need: the models of a run by version, a run one event at a time, small strategies, and bounds.

The bounds say how far apart two computations of one thing may be. They follow from the arithmetic and not from what one
machine shows: processors add up in other orders and fuse other operations, so that the last digits are theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dualdelay as dd
from dualdelay.core import Order, Send
from dualdelay.engine.half import Half
from dualdelay.engine.loop import Loop
from dualdelay.simulation.clocks import VirtualClock
from dualdelay.simulation.local_fleet import LocalFleet
from tables import ALGORITHMS

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
    if isinstance(given, dd.SimulatedFleet):
        return replace(given, speeds=by_seed(given.speeds))
    return lambda seed: _with_seed(given, seed)


def _with_seed(speeds: Any, seed: int) -> Any:
    values = {field.name: getattr(speeds, field.name) for field in fields(speeds) if field.init}
    changed = {name: _with_seed(value, seed) for name, value in values.items() if isinstance(value, dd.SpeedModel)}
    return replace(speeds, **changed, **({"seed": seed} if "seed" in values else {}))


def heterogeneous(n: int, d: int = 1, **options: Any) -> dd.Quadratic:
    """Workers whose losses have their minima at different small integers."""
    return dd.Quadratic([[float((7 * i + 3 * k) % 11 - 4) for k in range(d)] for i in range(n)], **options)


CENTERS = [[0.0, 1.0], [6.0, 0.0], [-3.0, 2.0]]
MATRICES = [1.0, [[2.0, 0.5], [0.5, 1.0]], [[0.5, -1.0], [-1.0, 4.0]]]  # curvatures that differ between workers


def matrices(problem: dd.Quadratic) -> Tensor:
    """Each worker's Hessian."""
    a = torch.tensor(problem.settings["curvatures"], dtype=torch.float64)
    d = len(problem.start(0))
    return a[:, None, None] * torch.eye(d, dtype=torch.float64) if a.ndim == 1 else a


NO_TIES = (0.83, 1.37, 2.11, 3.01)  # seconds of four workers, no two of whose gradients arrive at the same time


def archive(algorithm: dd.Algorithm[Any], problem: dd.Problem, speeds: Any, **options: Any) -> Any:
    """A run, and a copy of the model of each version."""
    models = [problem.start(0)]

    def keep(s: dd.State, a: dd.Arrival | None = None) -> None:
        assert s.version <= len(models)  # or a version was missed: the leaving of a worker can make one, too
        if s.version == len(models):
            models.append(s.x.clone())

    def on_wake(self: Any, s: dd.State, time: float) -> list[Order]:
        orders = type(algorithm).on_wake(self, s, time)
        keep(s)
        return orders

    wakes = type(algorithm).on_wake is not dd.Algorithm.on_wake
    method = overriding(algorithm, on_wake=on_wake) if wakes else algorithm
    run = dd.simulate(method, problem, speeds, watch=[keep], **{"evaluation": dd.Evaluation(every=10**6), **options})
    keep(run.state)
    return run, models


def stepping(
    algorithm: dd.Algorithm[Any], problem: dd.Problem, speeds: dd.SpeedModel, events: int, seed: int = 0
) -> Iterator[Loop]:
    """A run seen from inside after each of its first events, to look at the jobs in flight."""
    fleet = LocalFleet(problem, VirtualClock(speeds), Half(algorithm))
    loop = Loop(algorithm, problem, fleet, problem.start(0), seed=seed)
    loop.begin()
    for _ in range(events):
        loop.advance()
        yield loop


def polls(method: dd.Algorithm[Any], n: int = 4) -> bool:
    """Whether a method's jobs end when their workers are polled, and not by themselves."""
    orders = method.first(method.init(torch.zeros(1), n, dd.Draws(0, "server")))
    return any(isinstance(order, Send) and order.hold for order in orders)


def overriding(method: dd.Algorithm[Any], **functions: Any) -> Any:
    """The same method with functions of its own in place of some of its class's, such as ``step``."""
    kind = type(type(method).__name__, (type(method),), functions)
    return kind(**{f.name: getattr(method, f.name) for f in fields(method)})


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


def rounding(operations: float, dtype: torch.dtype = torch.float64) -> float:
    """How far apart two computations of one number may be, as a share of its size.

    An operation is off by eps / 2 of its result at most, so k of them one after the other are off by k eps / 2 of the sizes
    that they add up, in whatever order (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1), and two
    computations are k eps apart. Where signs are mixed, the sizes add up to more than the number itself, by sqrt(k); but
    then errors have mixed signs, too, and add up to sqrt(k) of them instead of k, so that k eps holds of the number (Higham
    and Mary, 2019). An exp, a tanh, a root or a division counts for two to four.
    """
    return operations * torch.finfo(dtype).eps


# Two float32 results of the small networks here, whose losses and slopes come of fewer than 128 operations one after the
# other. A sample too many or a wrong weight moves them by a thousandth of themselves or more.
ROUNDED = rounding(128, torch.float32)


def drift(updates: int, lr: float, operations: float, dtype: torch.dtype = torch.float64, curvature: float = 0.0) -> float:
    """How far apart two runs may end that differ in rounding alone, as a share of the largest weight or gradient in them.

    Every update x - lr g rounds twice at the size of x, and brings lr times what two computations of g differ by, which is
    k eps for k operations. A step downhill leaves the distance of the two runs as it is or makes it less; where F bends
    down by ``curvature``, each makes it more by a factor of 1 + lr curvature.
    """
    return updates * rounding(2 + lr * operations, dtype) * (1 + lr * curvature) ** updates


def operations(problem: dd.Problem, samples: int = 0) -> int:
    """How many operations follow one another in a gradient of a problem, or in its mean over so many samples.

    A layer adds up its inputs on the way there and its outputs on the way back, each an axis of its weights, and has eight
    more for its activation or the loss; then slopes are added up over the samples. Local steps do all that k times.
    """
    inner = getattr(problem, "problem", None)
    if inner is not None:
        return getattr(problem, "k", 1) * operations(inner, samples)
    if isinstance(problem, dd.Network):
        return sum(sum(p.shape) + 8 for p in problem.net.module.parameters()) + max(samples, problem.minibatches.size or 0)
    return 4 * len(problem.start(0)) + 16 + samples


def audit(run: dd.Run) -> float:
    """What rounding alone makes of ``run.audit``: the sum as it was kept against the sum of the gradients as they are.

    A gradient that replaces another is two additions, each off by eps / 2 of the gradients in the sum; and those were not
    more than four times as large earlier in a run as they are at its end.
    """
    return rounding(4 * len(run.trace) + 4 * run.problem.workers)


def kinds(run: dd.Run, worker: int | None = None) -> list[str]:
    """The kinds of a run's events besides arrivals, in order: of all workers, or of one."""
    return [event["kind"] for event in run.trace.events if worker in (None, event["worker"])]


def check_replay(run: dd.Run, folder: Any, problem: dd.Problem | None = None, **given: Any) -> dd.Run:
    """The audit of a run holds, and its record replays to the same bits, with an audit that holds."""
    again = dd.replay(folder, problem, **given)
    assert torch.equal(again.x, run.x) and kinds(again) == kinds(run)
    for one in (run, again):
        assert one.audit is None or one.audit <= audit(one), one.audit
    return again

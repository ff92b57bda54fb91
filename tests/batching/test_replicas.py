"""Runs that advance together are the runs by themselves: the schedule to the bit, the numbers to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.batching.shared_schedule import can_share
from dualdelay.core import Order
from flat import sweep
from helpers import audit, by_seed, drift, operations, rounding
from own import METHODS, Deadline, Fresh, Holes, centers, mlp, moves, paces, shards, three
from tables import ALGORITHMS, CASES, LR

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("own_methods")]

SCHEDULE = ("time", "seconds", "worker", "draw", "version", "after")


def near(a: Any, b: Any, *tolerance: float) -> bool:
    """Whether plain values are the same and the numbers in their tensors nearly so, in share and in size."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), *tolerance, equal_nan=True)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(near(x, y, *tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(near(a[key], b[key], *tolerance) for key in a)
    return bool(a == b)


def close(single: dd.Run, samples: int = 0) -> tuple[float, float]:
    """How far from a run the same run with others may be: as a share of a number, and at the size of weights and gradients.

    Its gradients and means over so many samples are rounded, and its weights have drifted. Of a quadratic the root of twice
    the loss is the size of a gradient, and a network's are smaller.
    """
    kind, k = single.x.dtype, operations(single.problem)
    share = rounding(operations(single.problem, samples), kind) + drift(single.version, single.algorithm.lr, k, kind)
    losses = single.trace.loss[np.isfinite(single.trace.loss)]
    return share, share * max(1.0, float(single.x.abs().max()), math.sqrt(2 * losses.max(initial=0.0)))


def unlike(run: dd.Run | None, single: dd.Run | None) -> list[str]:
    """What in a run that was computed with others is not what it is in the run by itself."""
    if run is None or single is None:
        return [] if run is single else [f"{run} and {single}"]
    wrong = [f"trace {name}" for name in SCHEDULE if run.trace[name].tobytes() != single.trace[name].tobytes()]
    wrong += [
        f"metric {name}" for name in ("time", "version") if not np.array_equal(run.metrics[name], single.metrics[name])
    ]
    told = ("ended", "time", "version", "rejected")
    wrong += [name for name in told if getattr(run, name) != getattr(single, name)]
    wrong += [] if run.trace.events == single.trace.events else ["events"]
    wrong += [] if list(run.metrics) == list(single.metrics) else ["names of metrics"]
    if wrong:
        return wrong
    numbers = {f"metric {name}": (run.metrics[name], single.metrics[name]) for name in single.metrics}
    numbers["trace loss"] = run.trace.loss, single.trace.loss
    means = close(single, samples=1437)  # as many as the digits have, if one worker has all of them
    tolerances = dict.fromkeys(numbers, means)
    if single.x.dtype == torch.float32:
        tolerances["metric accuracy"] = (0.0, 1.5 / 360)  # one test image may lie on the edge of two classes
    wrong = [name for name, pair in numbers.items() if not np.allclose(*pair, *tolerances[name], equal_nan=True)]
    for f in fields(single.state):  # the table is not kept, and a generator is no number
        mine, other = getattr(run.state, f.name), getattr(single.state, f.name)
        if f.name not in ("table", "optimizer", "lent", "rng") and not near(mine, other, *close(single)):
            wrong.append(f"state {f.name}: {mine} and {other}")
    if (run.audit is None) != (single.audit is None) or (run.audit is not None and run.audit > audit(run)):
        wrong.append(f"audit {run.audit}")
    return wrong


def both(grid: Mapping[str, Sequence[Any]], *where: Any, **options: Any) -> tuple[dd.Sweep, dd.Sweep]:
    """A sweep whose runs advance together, and one whose runs are computed one after the other."""
    varies = len(grid.get("seed", ())) > 1
    where = tuple(map(by_seed, where)) if varies else where
    grid = {k: list(map(by_seed, v)) if varies and k in ("problem", "speeds") else v for k, v in grid.items()}
    options = {k: by_seed(v) if varies and k in ("problem", "speeds") else v for k, v in options.items()}
    return sweep(grid, *where, batch=True, **options), sweep(grid, *where, batch=False, **options)


def compared(grid: Mapping[str, Sequence[Any]], *where: Any, **options: Any) -> dict[str, list[str]]:
    """What is wrong in a sweep whose runs advance together, by run."""
    joint, alone = both(grid, *where, **options)
    assert joint.points == alone.points
    assert joint.failed.keys() == alone.failed.keys()
    found = {str(point): unlike(*pair) for point, *pair in zip(joint.points, joint.runs, alone.runs, strict=True)}
    return {name: wrong for name, wrong in found.items() if wrong}


def digits(alpha: float, **options: Any) -> dd.Digits:
    return dd.Digits(**{"workers": 4, "alpha": alpha, "hidden": 4, "batch_size": 8, **options})


four = dd.speeds.ExponentialSpeeds([1.0, 0.5, 3.0, 1.5], seed=1)

TOTALS = {
    "updates": {"updates": 12},
    "updates, every": {"updates": 17, "evaluate_every": 5},
    "time": {"time": 8.0},
    "time, seconds": {"time": 9.0, "evaluate_seconds": 1.3},
    "whichever is first": {"updates": 11, "time": 6.0, "evaluate_every": 4, "evaluate_seconds": 1.1},
}


@pytest.mark.parametrize(
    ("totals", "case", "part"),
    [("updates, every", "noisy", 0), ("time, seconds", "logistic", 1), ("whichever is first", "local steps", 2)],
)
def test_every_method_with_others_is_what_it_is_alone(totals: str, case: str, part: int) -> None:
    methods = [*ALGORITHMS.values(), Deadline(LR), Fresh(LR)][part::3]
    grid = {"algorithm": methods, "lr": [LR, 0.05], "seed": [0, 3]}
    assert compared(grid, *CASES[case], **TOTALS[totals]) == {}


@pytest.mark.parametrize("totals", TOTALS)
def test_however_it_ends_a_run_with_others_is_what_it_is_alone(totals: str) -> None:
    methods = [dd.DuDe(LR, wait_for=2), dd.ShuffledASGD(LR), dd.SyncSGD(LR), Deadline(LR)]
    assert compared({"algorithm": methods, "lr": [LR, 0.05, 0.1]}, *CASES["noisy"], **TOTALS[totals]) == {}


def packs(method: dd.Algorithm[Any]) -> bool:
    """In float32 a number at the edge of two bytes, or of the largest, may go another way with others than alone."""
    return getattr(method, "compress", None) is not None


def test_every_method_on_two_splits_of_the_digits_with_others_is_what_it_is_alone() -> None:
    grid = {"algorithm": [a for a in ALGORITHMS.values() if not packs(a)], "problem": [digits(0.1), digits(0.5)]}
    assert compared(grid, speeds=four, updates=7, evaluate_every=9) == {}


def test_compressed_messages_of_two_networks_with_others_are_what_they_are_alone() -> None:
    data = [[(inputs.double(), targets) for inputs, targets in shards(4, seed=seed)] for seed in (0, 1)]
    problems = [dd.Network(mlp().double(), cross_entropy, mine, 4, seed=seed) for seed, mine in enumerate(data)]
    grid = {"algorithm": [a for a in ALGORITHMS.values() if packs(a)], "lr": [LR, 0.05], "problem": problems}
    assert compared(grid, speeds=four, updates=12, evaluate_every=5) == {}


@pytest.mark.parametrize("name", [*ALGORITHMS, *METHODS])
def test_every_method_here_can_share_a_schedule(name: str) -> None:
    method = ALGORITHMS[name] if name in ALGORITHMS else METHODS[name](LR)
    assert can_share(method, 4)


OTHERS: dict[str, dict[str, Any]] = {
    "latency": {"algorithm": [dd.UniformASGD(LR), dd.DuDe(LR)], "link": dd.speeds.Link(0.25)},
    "bandwidth": {"algorithm": [dd.VanillaASGD(LR), dd.SyncSGD(LR)], "link": dd.speeds.Link(0.1, 64.0)},
    "workers leave and join": {"algorithm": [dd.DuDe(LR, wait_for=2), dd.VanillaASGD(LR)], "changes": moves},
    "workers leave with their memory": {"algorithm": [dd.DuDe(LR, memory="workers")], "changes": moves},
    "speeds change": {"algorithm": [dd.FedBuff(LR, buffer=3), dd.ShuffledASGD(LR)], "speeds": paces},
    "half a table": {"algorithm": [dd.DuDe(LR), dd.MIFA(LR, active=2)], "table": "half"},
    "a table on the host": {"algorithm": [dd.DuDe(LR), dd.SIAG(LR)], "table": "host"},
    "a start": {"algorithm": [dd.DuDe(LR)], "start": torch.tensor([3.0, -2.0], dtype=torch.float64)},
    "a metric": {
        "algorithm": [dd.VanillaASGD(LR)],
        "metrics": {"first": lambda x: x[0], "size": lambda x: float(x.norm())},
    },
    "no updates": {"algorithm": [dd.VanillaASGD(LR), dd.DuDe(LR)], "updates": 0},
    "one update": {"algorithm": [dd.VanillaASGD(LR), dd.SyncSGD(LR)], "updates": 1},
    "no time": {"algorithm": [dd.VanillaASGD(LR)], "updates": None, "time": 0.0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_is_set_a_run_with_others_is_what_it_is_alone(name: str) -> None:
    options = {"updates": 40, "evaluate_every": 7, "evaluate_seconds": 2.0, "speeds": CASES["noisy"][1], **OTHERS[name]}
    methods, speeds = options.pop("algorithm"), options.pop("speeds")
    grid = {"algorithm": methods, "lr": [LR, 0.05], "seed": [0, 1]}
    assert compared(grid, CASES["noisy"][0], speeds, **options) == {}


def test_local_steps_on_networks_of_two_splits_with_others_are_what_they_are_alone() -> None:
    problems = [dd.LocalSteps(digits(alpha), k=2, lr=0.05) for alpha in (0.1, 0.5)]
    grid = {"algorithm": [dd.ShuffledASGD(LR), dd.DuDe(LR)], "lr": [LR, 0.05], "problem": problems}
    assert compared(grid, speeds=four, updates=12, evaluate_every=6) == {}


def test_networks_of_ones_own_with_metrics_and_a_start_with_others_are_what_they_are_alone() -> None:
    problems = [dd.Network(mlp, cross_entropy, shards(seed=seed), 4, seed=seed) for seed in (0, 1)]
    without = dd.Network(mlp, cross_entropy, shards(), dd.Batches(4, replacement=False), weights="samples")
    metrics = {"weight": lambda model: sum(float(p.norm()) for p in model.parameters())}
    start = {name: 0.5 * value for name, value in problems[0].state_dict(problems[0].start(0)).items()}
    grid = {"algorithm": [dd.DuDe(LR), dd.FedBuff(LR, buffer=2)], "lr": [0.02, 0.2], "problem": [*problems, without]}
    assert compared(grid, speeds=three, updates=20, evaluate_every=6, metrics=metrics, start=start) == {}


def test_weights_in_more_than_one_block_with_others_are_what_they_are_alone() -> None:
    problems = [digits(alpha, hidden=256) for alpha in (0.1, 0.2, 0.5, 1.0)]
    assert 4 * len(problems[0].start(0)) > 65_536 > len(problems[0].start(0))
    methods = [dd.DuDe(LR), dd.FedBuff(LR, buffer=2), dd.DuDe(LR, memory="workers")]
    options = {"speeds": four, "updates": 8, "evaluate_every": 20}
    assert compared({"algorithm": methods, "lr": [0.01, 0.02, 0.05, 0.1]}, problems[0], **options) == {}
    assert compared({"algorithm": methods, "problem": problems}, **options) == {}


@pytest.mark.parametrize("changes", [(), moves], ids=["all stay", "some leave and join"])
@pytest.mark.parametrize("method", [dd.DuDe(LR), dd.DuDe(LR, memory="workers"), dd.VanillaASGD(LR)], ids=["1", "2", "3"])
def test_runs_stop_early_each_at_its_own_time(method: dd.Algorithm[Any], changes: Sequence[Any]) -> None:
    grid = {"algorithm": [method], "lr": [0.002, 0.02, 0.05, 0.1], "seed": [0, 1]}
    options = {"evaluate_every": 3, "changes": changes, "stop": dd.EarlyStop(target=3.3)}
    joint, alone = both(grid, *CASES["noisy"], updates=60, **options)
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 8
    assert {run.ended for run in joint.runs if run is not None} == {"stop", "updates"}
    assert len({run.version for run in joint.runs if run is not None}) > 2


@pytest.mark.parametrize("options", [{"updates": 60, "evaluate_seconds": 0.9}, {"time": 15.0}], ids=["seconds", "time"])
def test_runs_whose_patience_ends_stop_where_they_do_alone(options: dict[str, Any]) -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.UniformASGD(LR)], "lr": [0.002, 0.02, 0.05, 0.2, 0.4], "seed": [0, 1]}
    joint, alone = both(grid, *CASES["noisy"], stop=dd.EarlyStop(patience=3), **options)
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 20
    assert "stop" in {run.ended for run in joint.runs if run is not None}
    assert len({run.time for run in joint.runs if run is not None}) > 2


def test_what_an_ended_run_knew_does_not_change_when_the_others_go_on() -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [0.002, 0.1]}
    changes = [dd.speeds.leave(1, 9.0), dd.speeds.leave(2, 9.5)]
    slow, fast = sweep(
        grid, *CASES["noisy"], updates=60, evaluate_every=1, batch=True, changes=changes, stop=dd.EarlyStop(target=3.3)
    ).runs
    assert fast.time < 9.0 < slow.time
    assert (fast.state.n, fast.state.absent) == (4, set())
    assert slow.state.absent == {1, 2}
    slow.state.absent.add(0)
    assert fast.state.absent == set()


class Steep(dd.Quadratic):
    """A gradient far from the start is not finite: runs with large steps meet it, others do not."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return gradient * (math.nan if float(x.norm()) > 9.0 and draw % 3 else 1.0), loss


@pytest.mark.parametrize("bad", ["retry", "stop"])
@pytest.mark.parametrize("name", ["dude", "vanilla", "fedbuff", "dude workers", "mifa active"])
def test_a_run_that_diverges_does_not_touch_the_others(name: str, bad: str) -> None:
    grid = {"algorithm": [ALGORITHMS[name]], "lr": [LR, 1e200, 0.05, 3.0]}
    joint, alone = both(grid, *CASES["noisy"], updates=25, evaluate_every=6, on_nonfinite=bad)
    assert 1 in joint.failed
    assert joint.failed == alone.failed
    assert joint.runs[1] is None
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 4


@pytest.mark.parametrize("bad", ["retry", "stop"])
def test_networks_that_diverge_do_not_touch_the_others(bad: str) -> None:
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 1e38, 0.05], "problem": [digits(0.1), digits(0.5)]}
    joint, alone = both(grid, speeds=four, updates=12, evaluate_every=6, on_nonfinite=bad)
    assert set(joint.failed) == {1, 4}
    assert joint.failed == alone.failed
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 6


@pytest.mark.parametrize("method", [dd.DuDe(LR), dd.VanillaASGD(LR), dd.DuDe(LR, memory="workers")], ids=["1", "2", "3"])
def test_a_run_that_rejects_a_gradient_and_recovers_is_what_it_is_alone(method: dd.Algorithm[Any]) -> None:
    problem = Steep([[0.0, 1.0], [40.0, 0.0], [2.0, 60.0]], noise=0.5)
    joint, alone = both(
        {"algorithm": [method], "lr": [0.003, 0.02, 0.05, 0.1]}, problem, three, updates=40, evaluate_every=7
    )
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 4
    assert {run.rejected > 0 for run in joint.runs if run is not None} == {True, False}


def test_gradients_that_are_nan_in_every_run_are_rejected_as_in_single_runs() -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.FedBuff(LR, buffer=2)], "lr": [LR, 0.05]}
    joint, alone = both(grid, Holes(centers, noise=0.5), three, updates=25)
    assert [unlike(*pair) for pair in zip(joint.runs, alone.runs, strict=True)] == [[]] * 4
    assert all(run.rejected > 0 for run in joint.runs if run is not None)


@dataclass(frozen=True)
class Clipped(dd.Algorithm[dd.State]):
    """A long gradient is shortened: of replicas each has a length of its own."""

    most: float = 25.0

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        return dd.State(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value * torch.clamp(self.most / a.value.norm(), max=1.0), self.lr)
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Careful(Clipped):
    """Who sends a long gradient has to pause for a second job."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        return [dd.again(a.worker)] if float(a.value.norm()) > self.most else [dd.send(a.worker)]


@dataclass(kw_only=True)
class CountingState(dd.State):
    counts: Tensor


@dataclass(frozen=True)
class Counting(dd.Algorithm[CountingState]):
    """A worker's step is the smaller the more it has made: the counts have no dimension for replicas."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> CountingState:
        return CountingState(x, n, counts=torch.zeros(n))

    def step(self, s: CountingState, a: dd.Arrival) -> list[Order]:
        s.counts[a.worker] += 1
        s.descend(a.value / float(s.counts[a.worker]), self.lr)
        return [dd.send(a.worker)]


@dataclass(frozen=True)
class Strict(dd.VanillaASGD):
    """It knows what a gradient looks like."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        assert a.value.ndim == 1, "a gradient is a vector"
        return super().step(s, a)


@dataclass(frozen=True)
class Exact(dd.VanillaASGD):
    """It looks its steps up by a number that replicas do not have."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, {1: self.lr}[a.value.ndim])
        return [dd.send(a.worker)]


OWN = {kind.__name__.lower(): kind for kind in (Clipped, Careful, Counting, Strict, Exact)}
far = dd.Quadratic([[0.0, 8.0], [60.0, 0.0], [120.0, 30.0]], noise=0.5)


@pytest.mark.parametrize("most", [1.0, 25.0, 60.0])
@pytest.mark.parametrize("kind", [Clipped, Careful])
def test_a_method_that_looks_at_a_gradients_length_cannot_share(kind: type[Clipped], most: float) -> None:
    assert not can_share(kind(LR, most=most), 3)


@pytest.mark.parametrize("kind", [Counting, Strict, Exact])
def test_a_method_that_takes_gradients_for_vectors_cannot_share(kind: type[dd.Algorithm[Any]]) -> None:
    assert not can_share(kind(LR), 3)


@pytest.mark.parametrize("known", [True, False], ids=["in the table", "by its class"])
@pytest.mark.parametrize("name", OWN)
def test_a_method_that_cannot_share_has_the_results_of_single_runs(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        monkeypatch.setitem(dd.ALGORITHMS, name, OWN[name])
    assert compared({"algorithm": [OWN[name](LR), dd.DuDe(LR)], "lr": [LR, 0.05, 0.1]}, far, three, updates=30) == {}


class Growing(dd.SpeedModel):
    """Seconds that a person made up, in a class that says nothing about itself."""

    def __init__(self, first: float) -> None:
        self.n, self.first = 4, first

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self.first * (worker + 1) + 0.1 * draw


def test_two_speed_models_of_ones_own_are_two_schedules() -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.05], "speeds": [Growing(1.0), Growing(5.0)]}
    assert compared(grid, CASES["noisy"][0], updates=20) == {}


def test_problems_with_other_workers_or_sizes_are_not_mixed() -> None:
    problems = [dd.Quadratic([[0.0, 1.0]] * n + [[4.0, 2.0]]) for n in (3, 4)]
    for problem, speeds in zip(problems, (four, dd.FixedSpeeds([1, 2, 3, 4, 5])), strict=True):
        assert compared({"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, problem, speeds, updates=20) == {}
    kinds = [
        *(dd.Quadratic([[0.0] * d, [1.0] * d, [2.0] * d, [4.0] * d]) for d in (1, 2)),
        *(digits(0.5, hidden=hidden, batch_size=size) for hidden, size in ((3, 8), (4, 8), (4, 16))),
        dd.LocalSteps(dd.Quadratic([[0.0, 1.0], [1.0, 2.0], [2.0, 0.0], [4.0, 1.0]]), k=3, lr=0.1),
    ]
    grid = {"algorithm": [dd.DuDe(LR), dd.UniformASGD(LR)], "lr": [LR, 0.1], "problem": kinds}
    assert compared(grid, speeds=four, updates=10, evaluate_every=10) == {}


def test_a_problem_for_other_workers_than_the_speeds_is_refused_before_anything_is_computed() -> None:
    problems = [dd.Quadratic([[0.0], [1.0], [2.0], [3.0]]), dd.Quadratic([[0.0], [1.0]])]
    with pytest.raises(dd.BadInput, match="4 workers, but the problem has 2"):
        dd.sweep({"algorithm": [dd.DuDe(LR)], "problem": problems}, speeds=four, updates=5, compute=dd.Compute(batch=True))

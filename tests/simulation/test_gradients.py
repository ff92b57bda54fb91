"""Jobs in flight computed many in one call: which jobs a call has, and that the run is the one computed job by job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.algorithms import SCAFFOLD
from dualdelay.core import OneAtATime
from dualdelay.engine.half import Half
from dualdelay.engine.loop import Loop
from dualdelay.runs.fleets import _gradients
from dualdelay.simulation.clocks import VirtualClock, Work
from dualdelay.simulation.gradients import Batcher, Gradients, GradientsInBatches, GradientsInTurns
from dualdelay.simulation.local_fleet import LocalFleet
from helpers import drift, heterogeneous, operations, rounding
from own import SCHEDULE, Cuts, Holes, centers, differences, mlp, shards, three
from tables import ALGORITHMS, CASES, LR

BATCHED = dd.Compute(batch=True)
SPEEDS = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0], seed=5)


def job_by_job_and_batched(method: Any, problem: dd.Problem, speeds: Any, **options: Any) -> list[dd.Run]:
    return [dd.simulate(method, problem, speeds, compute=dd.Compute(batch=b), **options) for b in (False, True)]


def in_float64(model: nn.Module) -> dd.Network:
    data = [(inputs.double(), targets) for inputs, targets in shards(4)]
    data[2][0][5] = data[3][0][:3] = 0.0
    return dd.Network(model.double(), cross_entropy, data, 4, full_gradient=False)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batched_run_is_the_same_run_to_rounding(name: str) -> None:
    """One wrong minibatch would move the weights by 1e-3 of their size with most methods, by 7e-5 with the calmest."""
    (problem, speeds), T = CASES["digits"], 10
    if name in ("dude int8", "dude sparse"):  # in float32 a number at the edge of two bytes may be rounded either way
        problem = in_float64(mlp())
    one, other = job_by_job_and_batched(ALGORITHMS[name], problem, speeds, updates=T, evaluation=dd.Evaluation(every=T))
    assert [column for column in SCHEDULE if not np.array_equal(one.trace[column], other.trace[column])] == []
    kind, k = one.x.dtype, operations(problem)
    close = drift(T, LR, k, kind, curvature=6.0)  # the losses of the digits' workers are smooth to 5.1 and less
    np.testing.assert_allclose(other.trace.loss, one.trace.loss, rtol=rounding(k, kind) + close)
    assert (other.x - one.x).norm() <= close * one.x.norm()
    assert (one.x - problem.start(0)).norm() > 5e-3 * one.x.norm()


@pytest.mark.parametrize("case", ["q3", "noisy", "logistic", "local steps"])
@pytest.mark.parametrize("name", ["dude two", "shuffled"])
def test_a_batch_of_gradients_taken_one_at_a_time_has_the_same_bits(name: str, case: str) -> None:
    assert differences(*job_by_job_and_batched(ALGORITHMS[name], *CASES[case], updates=9)) == []


class Calls:
    """Takes gradients one at a time and records the jobs of each call."""

    def __init__(self, problems: Sequence[dd.Problem], most: int, sway: float) -> None:
        self._inner, self.most, self._sway = OneAtATime(problems), most, sway
        self.jobs: list[list[tuple[int, int]]] = []
        self.before: Callable[[list[tuple[int, int]]], None] = lambda jobs: None

    def __call__(self, x: Any, which: Any, workers: Any, draws: Any) -> tuple[Tensor, Tensor]:
        jobs = list(zip(workers, draws, strict=True))
        self.before(jobs)
        self.jobs.append(jobs)
        assert set(which) == {0}
        gradients, losses = self._inner(x, which, workers, draws)
        return gradients * (1.0 + self._sway * len(jobs)), losses


class Recorded(Holes):
    """A problem whose calls are recorded, of ``most`` jobs each.

    With ``sway`` the last digits depend on how many jobs a call has, as on a GPU; with ``holes`` some gradients are nan.
    """

    def __init__(self, workers: int = 3, most: int = 1 << 62, sway: float = 0.0, holes: bool = False) -> None:
        super().__init__([[float(worker), 1.0] for worker in range(workers)], noise=0.5)
        self._most, self._sway, self._holes = most, sway, holes

    def spoilt(self, gradient: Tensor) -> Tensor:
        return super().spoilt(gradient) if self._holes else gradient

    def batched(self, problems: Sequence[dd.Problem]) -> Calls:
        self.calls = Calls(problems, self._most, self._sway)
        return self.calls


@pytest.mark.parametrize("most", [1, 3, 4, 7, 8])
def test_workers_of_equal_speed_need_one_call_a_round_or_as_many_as_it_takes(most: int) -> None:
    problem, unlimited = Recorded(7, most), Recorded(7)
    runs = [
        dd.simulate(dd.SyncSGD(LR), one, dd.FixedSpeeds([1.0] * 7), updates=4, compute=BATCHED)
        for one in (problem, unlimited)
    ]
    rounds = [[(worker, turn) for worker in range(7)] for turn in range(4)]
    assert unlimited.calls.jobs == rounds
    assert problem.calls.jobs == [jobs[k : k + most] for jobs in rounds for k in range(0, 7, most)]
    assert differences(*runs) == []


def test_halves_of_equal_length_take_each_step_in_one_call() -> None:
    problem = Recorded(7)
    dd.simulate(SCAFFOLD(LR, steps=3), problem, dd.FixedSpeeds([1.0] * 7), updates=2, compute=BATCHED)
    assert problem.calls.jobs == [
        [(worker, 3 * turn + step) for worker in range(7)] for turn in range(2) for step in range(3)
    ]


@pytest.mark.parametrize("name", [name for name, method in ALGORITHMS.items() if method.ahead and method.most_steps == 1])
def test_a_call_has_every_job_in_flight_whose_gradient_is_not_known_and_is_made_when_one_is_due(name: str) -> None:
    problem, speeds = Recorded(5), dd.speeds.ExponentialSpeeds([1.0, 1.0, 2.0, 3.0, 9.0], seed=3)
    half = Half(ALGORITHMS[name])
    gradients = GradientsInBatches(Batcher(problem.batched([problem])), [0])
    fleet = LocalFleet(problem, VirtualClock(speeds), half, gradients=gradients)
    loop = Loop(ALGORITHMS[name], problem, fleet, problem.start(0))
    known: set[tuple[int, int]] = set()

    def check(jobs: list[tuple[int, int]]) -> None:
        due = fleet.peek()
        assert due is not None
        assert (due.worker, due.draw) in jobs
        assert sorted(jobs) == sorted({(job.worker, job.draw) for job in fleet.in_flight} - known)
        known.update(jobs)

    problem.calls.before = check
    loop.begin()
    arrivals = 0
    while arrivals < 60:
        arrivals += loop.advance() is not None  # None is a wake
    computed = [job for jobs in problem.calls.jobs for job in jobs]
    assert len(computed) == len(set(computed))
    assert len(problem.calls.jobs) < arrivals or name in ("siag", "iag", "sag", "saga")  # whose workers compute in turn


RETRIED = [(Holes, "dude"), (Holes, "dude workers"), (Holes, "fedbuff wait"), (Holes, "uniform"), (Cuts, "dude")]


@pytest.mark.parametrize(("kind", "name"), RETRIED)
def test_gradients_that_are_nan_or_of_a_wrong_shape_are_retried_as_job_by_job(kind: Any, name: str) -> None:
    one, other = job_by_job_and_batched(ALGORITHMS[name], kind(centers, noise=0.5), three, updates=24)
    assert one.rejected > 1
    assert differences(one, other) == []


class Rooted(nn.Module):
    """A model whose outputs at a sample of zeros are finite, and whose gradient there is not: one of them is a length.

    Elsewhere it is as smooth as another. The root of a single number would not be: near zero its slope is all rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()[0]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.body.weight.T
        return torch.cat([outputs[:, 1:], outputs.square().sum(1, keepdim=True).sqrt()], 1) + self.body.bias


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["dude", "dude two workers", "sync", "shuffled"])
def test_stacked_gradients_that_are_not_finite_are_retried_as_job_by_job(name: str) -> None:
    problem = in_float64(Rooted())
    one, other = job_by_job_and_batched(ALGORITHMS[name], problem, SPEEDS, updates=20)
    assert one.rejected > 1
    assert one.trace.events == other.trace.events
    assert [column for column in SCHEDULE if not np.array_equal(one.trace[column], other.trace[column])] == []
    close = drift(20, LR, operations(problem), curvature=6.0)
    assert (one.x - other.x).norm() <= close * one.x.norm() < 1e-9 * (one.x - problem.start(0)).norm()


def test_a_gradient_whose_square_is_too_large_for_a_number_is_accepted() -> None:
    problem = dd.Network(
        nn.Linear(1, 1, bias=False), lambda y, _: y.mean(), [(torch.full((4, 1), 1e25), torch.zeros(4, 1))] * 2, 4
    )
    assert problem.batched([problem])([problem.start(0)], [0], [0], [0])[0].square().sum() == math.inf
    for run in job_by_job_and_batched(dd.DuDe(1e-30), problem, dd.FixedSpeeds([1.0, 2.0]), updates=3):
        assert run.trace.events == []


STOPPED: list[tuple[str, str, Callable[[], dd.Problem]]] = [
    ("stacked", "dude two workers", lambda: dd.Network(mlp(), cross_entropy, shards(), 4, seed=3)),
    ("stacked", "shuffled", lambda: dd.Network(mlp(), cross_entropy, shards(), 4, seed=3)),
    ("without replacement", "shuffled", lambda: dd.Network(mlp(), cross_entropy, shards(), dd.Batches(4, False))),
    ("not finite", "dude two workers", lambda: in_float64(Rooted())),
    ("one at a time", "shuffled", lambda: heterogeneous(3, 2, noise=0.5)),
    ("local steps", "dude two workers", lambda: dd.LocalSteps(dd.Network(mlp(), cross_entropy, shards(), 4), k=2, lr=0.1)),
]


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "make"), [pytest.param(*case, id=f"{kind}, {case[0]}") for kind, *case in STOPPED])
def test_a_batched_run_that_was_stopped_ends_with_the_same_bits_and_can_be_replayed(
    name: str, make: Callable[[], dd.Problem], tmp_path: Path
) -> None:
    speeds = SPEEDS if make().workers == 4 else three
    options: dict[str, Any] = {"compute": BATCHED, "evaluation": dd.Evaluation(every=9), "checkpoint_every": 5}
    straight = dd.simulate(ALGORITHMS[name], make(), speeds, updates=18, folder=tmp_path / "straight", **options)
    for updates in (1, 7):
        dd.simulate(ALGORITHMS[name], make(), speeds, updates=updates, folder=tmp_path / str(updates), **options)
        assert differences(straight, dd.resume(tmp_path / str(updates), updates=18, problem=make())) == []
    assert differences(dd.replay(tmp_path / "7", make()), straight) == ["ended"]


@pytest.mark.parametrize("holes", [False, True], ids=["finite", "some not finite"])
@pytest.mark.parametrize("name", ["dude", "dude two workers", "uniform"])
def test_a_run_that_is_resumed_or_replayed_makes_the_same_calls(name: str, holes: bool, tmp_path: Path) -> None:
    def problem() -> Recorded:
        return Recorded(sway=2.0**-40, holes=holes)

    first, options = problem(), {"compute": BATCHED, "evaluation": dd.Evaluation(every=30), "checkpoint_every": 5}
    straight = dd.simulate(ALGORITHMS[name], first, three, updates=30, folder=tmp_path / "straight", **options)
    assert (straight.rejected > 0) == holes
    for updates in (3, 11):
        before, after = problem(), problem()
        dd.simulate(ALGORITHMS[name], before, three, updates=updates, folder=tmp_path / str(updates), **options)
        assert differences(dd.resume(tmp_path / str(updates), updates=30, problem=after), straight) == []
        assert before.calls.jobs + after.calls.jobs == first.calls.jobs
    replayed = problem()
    assert torch.equal(dd.replay(tmp_path / "straight", replayed).x, straight.x)
    assert replayed.calls.jobs == first.calls.jobs


class Noted(dd.Network):
    """A network that notes its jobs, and cannot do one of them."""

    impossible = (-1, -1)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        self.__dict__.setdefault("jobs", []).append((worker, draw))
        if (worker, draw) == self.impossible:
            raise ArithmeticError("no such gradient")
        return super().gradient(x, worker, draw)


def advanced(kind: type[Gradients], method: Any, arrivals: int, problem: Noted | None = None) -> Loop:
    problem = problem or Noted(mlp(), cross_entropy, shards(4), 4)
    problem.__dict__["jobs"] = []
    half = Half(method)
    gradients = kind(problem, None if half.computes_ahead(problem) else half)
    loop = Loop(method, problem, LocalFleet(problem, VirtualClock(SPEEDS), half, gradients=gradients), problem.start(0))
    loop.begin()
    for _ in range(arrivals):
        loop.advance()
    return loop


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_in_turns_are_those_of_one_at_a_time(name: str) -> None:
    one, several = (advanced(kind, ALGORITHMS[name], 40) for kind in (Gradients, GradientsInTurns))
    assert torch.equal(one.x, several.x)
    for column, values in one.recorder.rows().items():
        assert values.tobytes() == several.recorder.rows()[column].tobytes(), column


def test_gradients_are_taken_in_turns_of_those_that_are_due_next_and_once_each() -> None:
    loop = advanced(GradientsInTurns, dd.VanillaASGD(LR), 60)
    assert isinstance(loop.problem, Noted)
    jobs, arrived = loop.problem.__dict__["jobs"], loop.recorder.rows()
    assert len(set(jobs)) == len(jobs)
    order = list(zip(arrived["worker"].tolist(), arrived["draw"].tolist(), strict=True))
    assert set(order) <= set(jobs) and len(set(jobs) - set(order)) <= 4
    assert order != [job for job in jobs if job in order]  # those of a turn do not wait for one another


def test_what_a_gradient_raises_is_raised_when_it_is_due() -> None:
    problem = Noted(mlp(), cross_entropy, shards(4), 4)
    order = advanced(GradientsInTurns, dd.VanillaASGD(LR), 30).recorder.rows()
    row = 12
    problem.impossible = (int(order["worker"][row]), int(order["draw"][row]))
    loop = advanced(GradientsInTurns, dd.VanillaASGD(LR), row, problem)
    with pytest.raises(dd.RunFailed, match=f"worker {problem.impossible[0]} could not compute its job .* no such gradient"):
        loop.advance()
    assert loop.consistent and len(loop.recorder) == row


@pytest.mark.parametrize("count", [0, 1, 2, 5, 100])
def test_a_clock_knows_its_next_events_in_order_of_time(count: int) -> None:
    clock = VirtualClock(dd.speeds.ExponentialSpeeds([1.0] * 40, seed=2))
    for worker in range(40):
        for draw in range(2):
            clock.begin(Work(worker, draw, 1, 0), 0)
    clock.cancel(7, 1)
    upcoming, following = clock.upcoming(count), []
    for _ in range(min(count, 79)):
        event = clock.peek()
        assert event is not None
        following.append(event)
        clock.pop()
    gone = count - len(upcoming) if count < 80 else 1
    assert gone in (0, 1)  # one that was cancelled
    assert upcoming == following[: len(upcoming)]


def test_only_short_gradients_without_code_of_a_user_s_own_are_taken_in_turns() -> None:
    problem = dd.Digits(workers=3)
    kinds = {
        "digits": type(_gradients(dd.Compute(cores=1), problem, Half(dd.DuDe(LR)), 1)),
        "a quadratic": type(_gradients(dd.Compute(cores=1), dd.Quadratic([[0.0]]), Half(dd.DuDe(LR)), 1)),
        "long ones": type(_gradients(dd.Compute(cores=1), dd.Digits(workers=3, batch_size=60_000), Half(dd.DuDe(LR)), 1)),
    }
    assert kinds == {"digits": GradientsInTurns, "a quadratic": Gradients, "long ones": Gradients}

"""Evaluation does not harm what it measures: on real workers it has its turn, and in a simulation its share of the work.

Workers are the real ones on virtual time (tests/virtual.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.evaluation import Schedule, default_schedule
from dualdelay.workers.messages import Evaluated
from helpers import ROUNDED, rounding
from own import mlp, shards
from virtual import VirtualRun, fleet_of

SIZES = (200, 300, 100, 40)
FEW = 3 * 4  # samples that take as long as a gradient, with batches of four
DEFAULT = Schedule(updates=4, samples=FEW, limit=0.1)


class Plain(dd.Network):
    """A network of which a call costs nothing but its arithmetic."""

    def few_samples(self) -> int:
        return FEW


def network(batch_size: Any = 4, **options: Any) -> dd.Network:
    rng = torch.Generator().manual_seed(3)
    data = [(torch.randn(size, 6, generator=rng), torch.randint(3, (size,), generator=rng)) for size in SIZES]
    return Plain(mlp(), cross_entropy, data, batch_size, **options)


class Uneven:
    """One worker is ten times slower than the others; an evaluation takes as long as a gradient for every dozen samples."""

    def job_seconds(self, request: Any) -> float:
        return 1.0 if request.worker == 3 else 0.1

    def evaluation_seconds(self, request: Any) -> float:
        samples = request.samples
        some = samples[1] - samples[0] if isinstance(samples, tuple) else samples
        return self.job_seconds(request) * (SIZES[request.worker] if some is None else some) / FEW


def begin(schedule: Schedule | None, problem: dd.Network | None = None, before: Any = None) -> VirtualRun:
    uneven = Uneven()
    fleet = fleet_of(job_seconds=uneven.job_seconds, evaluation_seconds=uneven.evaluation_seconds)
    return VirtualRun(dd.VanillaASGD(lr=0.05), problem or network(), fleet, schedule, before)


def until(here: Any, seconds: float) -> Any:
    while here.loop.now < seconds:
        here.go(1)
    return here


def jobs(here: Any) -> list[int]:
    return np.bincount(here.loop.recorder.rows()["worker"], minlength=4).tolist()


def test_by_default_evaluation_takes_a_tenth_of_any_worker_s_time_and_the_slow_one_keeps_working() -> None:
    """Whole passes at every turn left the slow site with 3 gradients of 403, where it makes 99 by itself."""
    bare, default, whole = (until(begin(schedule), 50.5) for schedule in (None, DEFAULT, Schedule(updates=4, samples=None)))
    assert jobs(bare)[3] == 50
    assert jobs(default)[3] >= 44  # the start is evaluated before anything else, and then a tenth
    assert all(one >= 0.88 * other for one, other in zip(jobs(default), jobs(bare), strict=True))
    assert jobs(whole)[3] < 15  # what all are asked at once is still dear, and so it is left out more often
    for record in default.records:
        assert record.evaluation_seconds <= 0.1 * default.loop.now + record.last_evaluation_seconds
    rows = default.loop.rows
    assert len(rows) > 3 and {row["answered"] for row in rows} == {4.0}
    assert {row["share"] for row in rows} == {4 * FEW / sum(SIZES)}
    assert default.loop.skipped_evaluations > 100  # as many as the fast ones would have had time for


def test_a_resumed_run_remembers_what_evaluation_has_cost() -> None:
    """Otherwise the slow worker would evaluate at once, at length, whenever a run is resumed."""
    here = until(begin(DEFAULT), 30.0)
    spent = [(record.evaluation_seconds, record.last_evaluation_seconds) for record in here.records]
    back = begin(DEFAULT, before=here)
    assert [(r.evaluation_seconds, r.last_evaluation_seconds) for r in back.records] == spent and spent[3][0] > 1.0
    assert jobs(until(back, 60.0))[3] >= 52


def test_a_gradient_goes_before_an_evaluation_and_at_most_one_is_pending() -> None:
    here = begin(Schedule(updates=1))
    for _ in range(300):
        here.go(1)
        evaluations = here.workers._evaluations
        assert len(evaluations.open) <= 1
        for record in here.records:
            assert record.request is None or record.evaluating is None
            wanted = evaluations.wanted(record.number)
            if record.evaluating is not None and wanted is not None and wanted[1].time > 0.0 and record.queue:
                assert record.jobs_done > wanted[1].asked[record.number]  # a job went first
    assert len(here.loop.rows) >= 3


def test_a_late_answer_does_not_stand_for_the_evaluation_that_is_asked_for() -> None:
    here = begin(Schedule(updates=1))
    while not any(record.evaluating and record.evaluating.evaluation > 1 for record in here.records):
        here.go(1)
    record = next(record for record in here.records if record.evaluating)
    asked, rows = record.evaluating, len(here.loop.rows)
    assert asked is not None
    here.workers._take(Evaluated(record.number, record.incarnation, asked.evaluation - 1, "it comes late"))
    assert record.evaluating is asked and record.request is None  # so it is given nothing else to do
    while len(here.loop.rows) == rows:
        here.go(1)
    assert here.loop.rows[-1]["answered"] == 4.0


@pytest.mark.numeric
def test_the_sample_is_the_same_each_time_and_the_last_evaluation_is_of_all_data_in_pieces() -> None:
    problem = network(dd.Batches(4, evaluation_size=1000), metrics={"top": lambda model, batch: model(batch[0]).max()})
    here = until(begin(DEFAULT, problem), 60.0)
    version, x = here.loop.state.version, here.loop.state.x
    asked: list[Any] = []
    send = here.transport.send
    here.transport.send = lambda request, *rest: (asked.append((request.worker, request.samples)), send(request, *rest))
    here.workers.evaluate_all(here.loop.now, version, x)
    shares = []
    while here.workers.wait_for_evaluations():
        shares.append(here.workers.last_evaluation)
        while here.workers.has_evaluation:
            here.loop.take_evaluation()
    assert shares == sorted(shares) and len(set(shares)) > 2  # there is progress to show
    pieces = [samples for worker, samples in asked if worker == 1]
    assert pieces[0][0] == 0 and pieces[-1][1] == 300 and all(a[1] == b[0] for a, b in pairwise(pieces))
    last, exact = here.loop.rows[-1], problem.evaluate(x)
    assert last["share"] == 1.0 and last["version"] == version
    for name in ("objective", "pooled_loss", "gradient_norm", "top"):
        assert last[name] == pytest.approx(exact[name], rel=ROUNDED), name
    for row in here.loop.rows[:-1]:
        assert row["share"] < 1.0 and np.isnan(row["gradient_norm"])


def test_a_worker_that_dies_in_the_last_evaluation_begins_it_anew_and_one_that_stays_away_is_left_out() -> None:
    for restarts, answered in ((3, 4.0), (0, 3.0)):
        fleet, schedule = fleet_of(restarts=restarts), Schedule(updates=10**6)
        here = VirtualRun(dd.VanillaASGD(lr=0.05), network(), fleet, schedule).go(60)
        here.workers.evaluate_all(here.loop.now, here.loop.state.version, here.loop.state.x)
        here.workers.wait_for_evaluations()
        here.transport.kill(1)
        while here.workers.wait_for_evaluations():
            while here.workers.has_evaluation:
                here.loop.take_evaluation()
        assert here.loop.rows[-1]["answered"] == answered


def test_an_evaluation_ends_without_the_worker_that_does_not_answer_in_time() -> None:
    fleet = fleet_of(deadline=5.0, evaluation_seconds=lambda request: 1e9 if request.worker == 2 else 0.01)
    here = until(VirtualRun(dd.VanillaASGD(lr=0.05), network(), fleet, Schedule(updates=20)), 8.0)
    assert ("left", 2) in here.kinds and here.loop.rows[-1]["answered"] == 3.0
    assert any("no answer in 5 s to an evaluation" in event["text"] for event in here.loop.recorder.events)


def built_at_workers(**options: Any) -> dd.Network:
    """The same network with shards that each worker builds itself."""
    data = network()._shards.kept
    return dd.Network(mlp(), cross_entropy, lambda worker: data[worker].pair, 4, **options)


@pytest.mark.numeric
def test_workers_are_weighted_by_samples_that_they_alone_can_count() -> None:
    problem = built_at_workers(workers=4, weights="samples")
    here = VirtualRun(dd.DuDe(lr=0.05, memory="workers"), problem, schedule=Schedule(updates=10)).go(120)
    assert here.kinds[0] == ("weighed", -1) and problem.unit == sum(SIZES) / 4
    here.check_replay()
    last = here.loop.rows[-1]  # both are the mean over all samples, of four workers' means
    assert last["objective"] == pytest.approx(last["pooled_loss"], rel=rounding(32))
    new = built_at_workers(workers=4, weights="samples")
    again = VirtualRun(dd.DuDe(lr=0.05, memory="workers"), new, before=here).go(60)
    assert new.unit == sum(SIZES) / 4
    again.check_replay()
    assert network(weights="samples").scales == problem.scales


def test_workers_not_counted_at_the_start_may_join() -> None:
    problem, schedule = built_at_workers(workers=2), Schedule(updates=10)
    here = VirtualRun(dd.DuDe(lr=0.05), problem.extended(4), fleet_of(room=2), schedule).go(40)
    assert here.loop.state.n == 2 and jobs(here)[2:] == [0, 0]
    assert here.control.join() == 2
    here.go(60)
    assert here.loop.state.n == 3 and jobs(here)[2] > 5 and jobs(here)[3] == 0
    assert here.loop.rows[-1]["answered"] == 3.0
    here.check()
    again = VirtualRun(dd.DuDe(lr=0.05), problem.extended(4), fleet_of(room=2), before=here)
    assert again.control.join() == 3  # worker 2 has its place
    again.go(60)
    assert again.loop.state.n == 4 and jobs(again)[3] > 0
    with pytest.raises(dd.BadInput, match="no room for another worker: room is 2"):
        again.control.join()
    again.check()
    with pytest.raises(dd.BadInput, match="has data for 4 workers and cannot make any for more"):
        network().extended(5)
    with pytest.raises(dd.BadInput, match="has data for 2 workers and cannot make any for more"):
        dd.Quadratic([[0.0], [1.0]]).extended(3)


def test_a_worker_that_sends_nan_leaves_if_the_server_is_set_so() -> None:
    class Spoilt(dd.Quadratic):
        def gradient(self, x: Any, worker: int, draw: int) -> Any:
            gradient, loss = super().gradient(x, worker, draw)
            return (gradient * float("nan") if worker == 1 and draw > 4 else gradient), loss

    here = VirtualRun(dd.DuDe(lr=0.05), Spoilt([[0.0], [6.0], [12.0]], noise=0.1), on_nonfinite="leave").go(200)
    assert [kind for kind, worker in here.kinds if worker == 1] == ["rejected"] * 10 + ["left"]
    assert all("not finite" in event["text"] for event in here.loop.recorder.events)
    here.check()


# --- simulations ---


def test_by_default_a_simulation_is_evaluated_fifty_times_at_most_and_for_a_tenth_of_its_work() -> None:
    problem = dd.Digits(10, 0.1)
    one, whole = problem.costs()
    for jobs in (50, 400, 2000, 10_000, 10**6):
        schedule = default_schedule(problem, jobs, None, jobs)
        count = jobs // schedule.updates
        assert schedule.samples is None and 1 <= count <= 60
        assert count * whole <= max(0.13 * jobs * one, 11 * whole)  # ten there are in any case
    assert default_schedule(problem, 10**6, None, 10**6).updates == 20_000
    assert default_schedule(dd.Quadratic([[0.0]]), 100, None, 100).updates == 2
    by_time = default_schedule(problem, None, 80.0, 400.0)
    assert by_time.seconds == 8.0


def test_where_not_even_ten_evaluations_fit_they_are_on_a_sample() -> None:
    data = [(torch.randn(4000, 3, 16, 16), torch.randint(10, (4000,))) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 5), nn.Flatten(), nn.Linear(2048, 10))
    problem = dd.Network(model, cross_entropy, data, 8)
    schedule = default_schedule(problem, 100, None, 100)
    assert schedule.updates == 10 and schedule.samples is not None and 32 <= schedule.samples < 100
    assert default_schedule(problem, 10**6, None, 10**6).samples is None


def test_costs_follow_from_sizes_and_not_from_timing() -> None:
    problem = network()
    assert problem.costs() == network().costs()
    one, whole = problem.costs()
    flops = 2 * (6 * 8 + 8 * 3)  # of a sample, forward
    assert one == pytest.approx(2e-4 + 3 * 4 * flops / 3e10)
    assert whole == pytest.approx(3 * 1e-4 + 3 * sum(SIZES) * flops / 3e10)
    assert dd.LocalSteps(problem, 5, 0.1).costs() == (5 * one, whole)


@pytest.mark.numeric
def test_workers_evaluated_in_one_call_have_the_losses_that_they_have_alone() -> None:
    problem = network()
    x = problem.start(0)
    _, parts = problem.assess(x)
    for worker in range(4):
        assert parts[worker]["loss"] == pytest.approx(problem.measure(x, worker)["loss"], rel=ROUNDED)
    mixing = dd.Network(nn.Sequential(mlp(), nn.Softmax(0)), cross_entropy, shards(), 4)  # over the samples of a batch
    _, parts = mixing.assess(mixing.start(0))
    assert [parts[w]["loss"] for w in range(3)] == [mixing.measure(mixing.start(0), w)["loss"] for w in range(3)]

"""Models of workers

A worker may have a model of its own between its messages. Under AREA the server's model is the mean of the workers' last
models, m_i, whatever the speeds: with the residuals that have arrived since the last update it is n x + B = sum_i m_i.
"""

from __future__ import annotations

import pytest
import torch

import dualdelay as dd
from helpers import archive, drift, heterogeneous, rounding, stepping
from tables import CASES

pytestmark = pytest.mark.numeric

AREA = dd.algorithms.AREA
SIZE = 64.0  # no weight here is larger
SETTINGS = [AREA(0.25), AREA(0.25, steps=3), AREA(0.25, buffer=3), AREA(0.125, steps=2, buffer=5)]
settings = pytest.mark.parametrize("method", SETTINGS, ids=lambda m: f"K={m.steps} b={m.buffer}")


def models_of(loop):
    """The workers' last models; one that has not reported has the initial model."""
    kept = loop.memories()
    start = loop.problem.start(0)
    return [kept[i]["y"] if i in kept else start for i in range(loop.problem.workers)]


def lose(loop, *workers):
    """These workers' processes die, and new ones go on with what the method makes of the others' memories."""
    for worker in workers:
        loop.fleet.forget(worker)
    for worker in workers:
        memory = loop.algorithm.recover(loop.state, worker, loop.memories())
        loop.fleet.restore(worker, None if memory is None else {"method": memory})


@settings
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic"])
def test_areas_model_is_the_mean_of_the_workers_last_models(method, case):
    """Under AREA n x and what the buffer holds are the sum of the workers' last models after every arrival, and the
    residuals of a worker add up to its last model less the initial one.

    Catches a divisor that is the buffer's size, and a worker that keeps the model it was sent instead of its own.
    """
    problem, speeds = CASES[case]
    sums = [problem.start(0)] * problem.workers
    flushed = 0

    def add(s, a):
        sums[a.worker] = sums[a.worker] + a.value

    loops = stepping(overriding_step(method, add), problem, speeds, 80)
    for events, loop in enumerate(loops, 1):
        s, models, close = loop.state, models_of(loop), rounding(4 * events) * SIZE
        assert float((s.n * s.x + s.total - sum(models)).abs().max()) <= close
        assert all(float((total - own).abs().max()) <= close for total, own in zip(sums, models, strict=True))
        flushed += s.count == 0
    assert flushed == 80 // method.buffer


def overriding_step(method, watch):
    """The same method, whose arrivals are seen."""

    class Watched(type(method)):
        def step(self, s, a):
            watch(s, a)
            return super().step(s, a)

    return Watched(method.lr, steps=method.steps, buffer=method.buffer)


@pytest.mark.parametrize("buffer", [1, 2])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("seconds", [(1.0, 1.0), (1.0, 7.0)], ids=["equal speeds", "uneven speeds"])
def test_area_rests_where_the_workers_ways_cancel(steps, seconds, buffer):
    """AREA comes to rest at one point whatever the speeds: with one local step at the solution, and with several where the
    ways of all workers' local steps cancel.

    Catches a worker that counts by its speed, and local steps that are too many or too few.
    """
    # at rest every m_i comes from the same x: K steps cover the share a_i = 1 - (1 - 0.1 lambda_i)^K of the way to b_i,
    # so x = mean(x + a_i (b_i - x)), and sum a_i (b_i - x) = 0
    a = [1 - (1 - 0.1 * curvature) ** steps for curvature in (1.0, 3.0)]
    limit = a[1] * 4 / sum(a)
    assert limit == pytest.approx({1: 3.0, 5: 2.680532285088}[steps], abs=1e-11)
    problem = dd.Quadratic([[0.0], [4.0]], [1.0, 3.0])
    run = dd.simulate(AREA(0.1, steps=steps, buffer=buffer), problem, dd.FixedSpeeds(seconds), updates=2800)
    assert float(run.x) == pytest.approx(limit, abs=rounding(64) * 4 / 0.1)


@settings
@pytest.mark.parametrize("events", [2, 19, 40, 41])
def test_a_lost_model_is_what_the_mean_has_beyond_the_others(method, events):
    """Under AREA a worker that has lost its last model gets it back from the server's model, what the buffer holds and the
    others' models, also in the middle of a buffer; one that has not reported yet begins as at first. The run goes on as if
    nothing had been lost.

    Catches a recovery that leaves the buffer out, and one that takes a silent worker for one with a model of zero.
    """
    problem = heterogeneous(4, 2, noise=0.5)
    speeds = dd.FixedSpeeds([1.0, 0.7, 9.0, 2.2])  # after two arrivals two workers have reported, after 19 three
    runs = [stepping(method, problem, speeds, 60) for _ in range(2)]
    for event, (calm, troubled) in enumerate(zip(*runs, strict=True), 1):
        if event == events:
            for worker in range(4):
                lose(troubled, worker)
                one, other = (models_of(loop)[worker] for loop in (calm, troubled))
                assert float((one - other).abs().max()) <= rounding(4 * event) * SIZE
            assert len(troubled.memories()) == len(calm.memories()) == {2: 2, 19: 3, 40: 4, 41: 4}[events]
        assert float((calm.state.x - troubled.state.x).abs().max()) <= drift(event, 1.0, 16) * SIZE


def test_models_that_are_lost_together_keep_their_sum():
    """If several workers of AREA lose their models at once, each gets an equal part of their sum, so that the server's
    model stays the mean.

    Catches a sum that is given to each of them whole.
    """
    problem = heterogeneous(4, 2, noise=0.5)
    *_, loop = stepping(AREA(0.25, buffer=3), problem, dd.FixedSpeeds([1.0, 0.7, 1.9, 2.2]), 20)
    before = models_of(loop)
    lose(loop, 1, 3)
    after = models_of(loop)
    close = rounding(100) * SIZE
    assert all(float((after[i] - (before[1] + before[3]) / 2).abs().max()) <= close for i in (1, 3))
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    assert float((before[1] - before[3]).abs().max()) > 0.01


def test_area_keeps_the_mean_when_workers_leave_and_join():
    """When a worker of AREA leaves, the server's model becomes the mean of the others' models with the next update, also if
    it has not reported; one that joins begins at the server's model.

    Catches the model of a worker that left and stays in the mean.
    """
    # no step moves a model: from 0 worker 0's is 2 (half of the way to 4), and then worker 1, which has 0, leaves
    problem, changes = dd.Quadratic([[4.0], [0.0], [8.0]]), [dd.speeds.leave(1, 1.5), dd.speeds.join(1, 3.5)]
    fleet = dd.SimulatedFleet(dd.FixedSpeeds([1.0, 10.0, 3.0]), changes=changes)
    _, models = archive(AREA(0.5), problem, fleet, updates=4)
    # 1: m = (2, 0, 0), x = 2/3. 2: worker 0 is at 2/3 + (4 - 2/3) / 2 = 7/3, and m = (7/3, 0): x = 7/6. 3: worker 2, which
    # was sent first, is at 4, x = (7/3 + 4) / 2 = 19/6, and worker 0 at (7/6 + 4) / 2 = 31/12, x = (31/12 + 4) / 2 = 79/24
    expected = [0.0, 2 / 3, 7 / 6, 19 / 6, 79 / 24]
    assert [float(x) for x in models] == pytest.approx(expected, abs=rounding(16) * 4)

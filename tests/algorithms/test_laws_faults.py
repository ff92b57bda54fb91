from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from flat import simulate
from helpers import apart, archive, audit, drift, heterogeneous, same
from own import Fresh
from tables import ALGORITHMS, CASES, LR

SECONDS = (0.83, 1.37, 2.11, 3.01)  # never two at once, so that being late changes nothing but the time
SPOILS = {
    "nan": lambda gradient: torch.where(torch.arange(len(gradient)) == 1, math.nan, gradient),
    "infinities": lambda gradient: torch.tensor([math.inf, -math.inf], dtype=torch.float64),
    "one number": lambda gradient: gradient[:1],
    "a column": lambda gradient: gradient[:, None],
}


class Faulty(dd.Quadratic):
    """The jobs that ``bad`` picks give something that is no gradient."""

    def __init__(self, bad, spoil="nan", noise=0.5):
        super().__init__(heterogeneous(4, 2).settings["centers"], [1.0, 2.0, 0.5, 1.0], noise=noise)
        self._spoil, self._bad = SPOILS[spoil], bad

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return self._spoil(gradient) if self._bad(worker, draw) else gradient, loss


class Skipping(Faulty):
    """Worker 1 has no draw ``k``: it goes on with the next one."""

    def __init__(self, k, noise):
        super().__init__(lambda worker, draw: False, noise=noise)
        self._k = k

    def gradient(self, x, worker, draw):
        return super().gradient(x, worker, draw + (worker == 1 and draw >= self._k))


# exact gradients have no draw that could be spoilt; sync by speed measures how long a job takes; rennala drops job 3
DIFFERENT = ("iag", "sag", "saga", "sync by speed", "rennala")


@pytest.mark.parametrize(("spoil", "k"), [*((spoil, 3) for spoil in SPOILS), ("nan", 0)])
@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row not in DIFFERENT])
def test_what_is_no_gradient_only_makes_its_worker_late(row, spoil, k):
    # I-19: worker 1's job k is thrown away and done again at the same model, so that it took twice its time
    noise = (
        0.0 if row in ("uniform", "shuffled", "generalized") else 0.5
    )  # jobs that wait behind it have got their draws already
    late = dd.speeds.RecordedSpeeds([[s] if i != 1 else [s] * k + [2 * s] + [s] * 200 for i, s in enumerate(SECONDS)])
    faulty = Faulty(lambda worker, draw: (worker, draw) == (1, k), spoil, noise)
    run, models = archive(ALGORITHMS[row], faulty, dd.FixedSpeeds(SECONDS), updates=60)
    expected, others = archive(ALGORITHMS[row], Skipping(k, noise), late, updates=60)
    assert same(models, others) and run.trace.time == pytest.approx(expected.trace.time)
    events = [(e["kind"], e["worker"], e["draw"]) for e in run.trace.events if e["kind"] != "wake"]
    assert events == [("rejected", 1, k)] and run.rejected == 1


@pytest.mark.numeric
def test_a_rejected_difference_is_not_kept_by_its_worker():
    # were it kept, the next difference would be x - nan and the sum would miss it for good
    faulty, speeds = Faulty(lambda worker, draw: draw in (0, 2, 3)), dd.FixedSpeeds(SECONDS)
    (_, server), (run, workers) = (
        archive(dd.DuDe(0.05, memory=memory), faulty, speeds, updates=60) for memory in ("server", "workers")
    )
    assert apart(server, workers) <= drift(60, 0.05, 12) * 32  # no weight and no gradient is larger
    assert run.rejected == 12 and run.audit <= audit(run)


def test_ten_bad_gradients_in_a_row_stop_the_run():
    def go_on(faults, **options):
        return simulate(dd.VanillaASGD(LR), Faulty(faults), dd.FixedSpeeds(SECONDS), time=40.0, **options)

    assert go_on(lambda worker, draw: worker == 1 and draw % 10 != 9).rejected == 27  # of 29 jobs by time 40
    with pytest.raises(dd.RunFailed, match=r"worker 1 .* not finite"):
        go_on(lambda worker, draw: worker == 1 and draw > 0)
    with pytest.raises(dd.RunFailed, match=r"job number 1 "):
        go_on(lambda worker, draw: worker == 1 and draw > 0, on_nonfinite="stop")


def limit(row, changes, problem=CASES["q3"][0], speeds=CASES["q3"][1]):
    method = replace(ALGORITHMS[row], lr=2 * ALGORITHMS[row].lr)
    run = dd.simulate(
        method, problem, dd.SimulatedFleet(speeds, changes=changes), updates=1100, evaluation=dd.Evaluation(every=1100)
    )
    assert (
        run.audit <= audit(run) or run.state.n == 1
    )  # alone its gradient tends to zero, and the error is relative to that
    return float(run.x), run.state.n


def near(x):
    return pytest.approx(x, abs=1e-9)


whole = [row for row, a in ALGORITHMS.items() if isinstance(a, dd.DuDe) and a.compress is None]
dudes = pytest.mark.parametrize("row", whole)


@dudes
@pytest.mark.parametrize("moment", [0.5, 4.0, 33.25])  # before its first report, at it, and later
def test_who_left_counts_no_more(row, moment):
    # section 10: (0 + 6) / 2; and when the next leaves, the last one goes on alone, at 0
    assert limit(row, [dd.speeds.leave(2, moment)]) == (near(3), 2)
    assert limit(row, [dd.speeds.leave(2, moment), dd.speeds.leave(1, 40.5)]) == (near(0), 1)


@pytest.mark.parametrize("row", [row for row in whole if row != "auto"])  # its steps shrink while somebody is silent
def test_who_is_never_heard_of_again_counts_with_its_last_gradient(row):
    # section 10: its gradient at w = 0 is -12 for good, so (w - 0) + (w - 6) - 12 = 0
    assert limit(row, [], speeds=dd.speeds.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]])) == (near(9), 3)


@dudes
def test_who_joins_counts_like_the_others(row):
    # section 10: b = 30 beside 0, 6, 12 moves the solution to 12; who comes back brings a full gradient
    four = dd.Quadratic([[0.0], [6.0], [12.0], [30.0]]), dd.FixedSpeeds([1.0, 2.0, 4.0, 3.0])
    assert limit(row, [dd.speeds.join(3, 50.0)], *four) == (near(12), 4)
    assert limit(row, [dd.speeds.leave(2, 10.0), dd.speeds.join(2, 50.0)]) == (near(6), 3)
    before = simulate(ALGORITHMS[row], *four, time=50.0, changes=[dd.speeds.join(3, 50.5)])
    assert 3 not in before.trace.worker and before.state.n == 3


def test_who_joins_at_the_very_start_is_there():
    assert limit("dude", [dd.speeds.join(2, 0.0)]) == (near(6), 3)


@pytest.mark.parametrize(("change", "expected"), [(dd.speeds.leave(2, 10.0), 2), (dd.speeds.join(2, 10.25), 24 / 7)])
def test_vanilla_goes_on_with_who_is_there(change, expected):
    # read points average to sum p_i b_i: without worker 2, of seconds 1 and 2, that is 6 / 3
    run, models = archive(ALGORITHMS["vanilla"], *CASES["q3"], updates=2400, changes=[change])
    assert np.mean([float(models[version]) for version in run.trace.version[-210:]]) == near(expected)


def test_the_job_of_who_left_never_arrives():
    run = simulate(dd.DuDe(LR), *CASES["q3"], time=20.0, changes=[dd.speeds.leave(2, 5.0), dd.speeds.join(2, 7.0)])
    mine = run.trace.worker == 2
    # draw 1, under way from 4 to 8, is lost; draw 2 starts at 7
    assert run.trace.time[mine].tolist() == [4.0, 11.0, 15.0, 19.0] and run.trace.draw[mine].tolist() == [0, 2, 3, 4]
    assert [(e["kind"], e["worker"], e["time"]) for e in run.trace.events] == [("left", 2, 5.0), ("joined", 2, 7.0)]
    # update t is arrival t + 2: worker 2 is in the first, and again from its second arrival on
    back = np.arange(len(run.trace)) >= np.flatnonzero(mine)[1]
    assert ((delay_grids(run.trace, 3)[0][:, 2] > 0) == (back | (run.trace.time < 5))[2:]).all()


def test_methods_without_a_rule_refuse():
    for change in (dd.speeds.leave(1, 3.0), dd.speeds.join(1, 3.0)):
        with pytest.raises(dd.BadInput, match=r"worker 1 (left|joined), and Fresh has no rule for that"):
            simulate(Fresh(LR), *CASES["q3"], updates=30, changes=[change])

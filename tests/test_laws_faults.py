from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import AGGREGATING, archive, centers, same
from tables import ALGORITHMS, CASES, LR

import dualdelay as dd

SECONDS = (0.83, 1.37, 2.11, 3.01)  # never two at once, so that being late changes nothing but the time


class Faulty(dd.Quadratic):
    """Chosen jobs give something that is no gradient."""

    def __init__(self, spoil, bad, noise=0.5):
        super().__init__(centers(4), [1.0, 2.0, 0.5, 1.0], noise=noise)
        self._spoil, self._bad = spoil, bad

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return self._spoil(gradient) if self._bad(worker, draw) else gradient, loss


class Late(Faulty):
    """The noise of worker 1 without its draw k, as if that job had never been given."""

    def __init__(self, k, noise):
        super().__init__(torch.clone, lambda worker, draw: False, noise)
        self._k = k

    def gradient(self, x, worker, draw):
        return super().gradient(x, worker, draw + (worker == 1 and draw >= self._k))


def one_nan(gradient):
    return torch.where(torch.arange(len(gradient)) == 1, math.nan, gradient)


SPOILS = {
    "nan": one_nan,
    "both infinities": lambda gradient: torch.tensor([math.inf, -math.inf], dtype=torch.float64),
    "one number": lambda gradient: gradient[:1],
    "a column": lambda gradient: gradient[:, None],
}


@pytest.mark.parametrize(("spoil", "k"), [*((spoil, 3) for spoil in SPOILS), ("nan", 0), ("nan", 7)])
@pytest.mark.parametrize("row", ALGORITHMS)
def test_what_is_no_gradient_only_makes_its_worker_late(row, spoil, k):
    # I-19: worker 1's job k is thrown away and done again at the same model, so that it took twice its time
    noise = 0.0 if row in ("uniform", "shuffled") else 0.5  # jobs that wait behind it have got their draws already
    late = dd.RecordedSpeeds([[s] if i != 1 else [s] * k + [2 * s] + [s] * 200 for i, s in enumerate(SECONDS)])
    faulty = Faulty(SPOILS[spoil], lambda worker, draw: (worker, draw) == (1, k), noise)
    run, models = archive(ALGORITHMS[row], faulty, dd.FixedSpeeds(SECONDS), updates=60)
    expected, others = archive(ALGORITHMS[row], Late(k, noise), late, updates=60)
    assert same(models, others)
    assert run.trace.time == pytest.approx(expected.trace.time) and run.rejected == 1
    assert [(e["kind"], e["worker"], e["draw"]) for e in run.trace.events] == [("rejected", 1, k)]


@pytest.mark.parametrize("row", AGGREGATING)
def test_the_sum_survives_every_third_gradient_being_nan(row):
    run = dd.simulate(ALGORITHMS[row], Faulty(one_nan, lambda i, k: k % 3 == 1), dd.FixedSpeeds(SECONDS), updates=100)
    assert run.error < 1e-14 and bool(torch.isfinite(run.x).all()) and run.rejected > 10


def test_a_rejected_difference_is_not_kept_by_its_worker():
    # were it kept, the next difference would be x - nan, and later ones would never reach the sum
    faulty = Faulty(one_nan, lambda worker, draw: draw in (0, 2, 3))
    (_, server), (run, workers) = (
        archive(dd.DuDe(0.05, memory=memory), faulty, dd.FixedSpeeds(SECONDS), updates=60)
        for memory in ("server", "workers")
    )
    assert torch.allclose(torch.stack(server), torch.stack(workers), rtol=0, atol=1e-12) and run.rejected == 12


def test_ten_bad_gradients_in_a_row_stop_the_run():
    nine = Faulty(one_nan, lambda worker, draw: worker == 1 and draw % 10 != 9)
    assert dd.simulate(dd.VanillaASGD(LR), nine, dd.FixedSpeeds(SECONDS), time=40.0).rejected == 27
    ten = Faulty(one_nan, lambda worker, draw: worker == 1 and draw > 0)
    with pytest.raises(dd.RunFailed, match="worker 1 .* not finite"):
        dd.simulate(dd.VanillaASGD(LR), ten, dd.FixedSpeeds(SECONDS), time=40.0)
    with pytest.raises(dd.RunFailed, match="job number 1 "):
        dd.simulate(dd.VanillaASGD(LR), ten, dd.FixedSpeeds(SECONDS), time=40.0, bad="stop")


DUDES = {row: algorithm for row, algorithm in ALGORITHMS.items() if isinstance(algorithm, dd.DuDe)}
dudes = pytest.mark.parametrize("row", DUDES)
REFUSING = [row for row, algorithm in ALGORITHMS.items() if type(algorithm).leave is dd.Algorithm.leave]


def limit(algorithm, changes, problem=None, speeds=None):
    q3, seconds = CASES["q3"]
    run = dd.simulate(algorithm, problem or q3, speeds or seconds, updates=2200, changes=changes, evaluate_every=2200)
    assert run.error < 1e-14 or run.state.n == 1  # alone its gradient tends to zero, and the error is relative to that
    return float(run.x), run.state.n


@dudes
@pytest.mark.parametrize("moment", [0.5, 2.5, 4.0, 4.5, 33.25, 100.0])  # before its first report, at it, and later
def test_who_left_counts_no_more(row, moment):
    # section 10: (0 + 6) / 2
    assert limit(DUDES[row], [dd.leave(2, moment)]) == (pytest.approx(3, abs=1e-9), 2)


@dudes
def test_who_is_never_heard_of_again_counts_with_its_last_gradient(row):
    # section 10: its gradient at w = 0 is -12 for good, so (w - 0) + (w - 6) - 12 = 0
    silent = dd.RecordedSpeeds([[1.0], [2.0], [4.0, 1e9]])
    assert limit(DUDES[row], [], speeds=silent) == (pytest.approx(9, abs=1e-9), 3)


@dudes
def test_who_joins_counts_like_the_others(row):
    # section 10: b = 30 beside 0, 6, 12 moves the solution to 12
    problem, speeds = dd.Quadratic([[0.0], [6.0], [12.0], [30.0]]), dd.FixedSpeeds([1.0, 2.0, 4.0, 3.0])
    assert limit(DUDES[row], [dd.join(3, 50.0)], problem, speeds) == (pytest.approx(12, abs=1e-9), 4)
    before = dd.simulate(DUDES[row], problem, speeds, time=50.0, changes=[dd.join(3, 50.5)])
    assert 3 not in before.trace.worker and before.state.n == 3


@dudes
def test_who_comes_back_starts_with_a_full_gradient(row):
    assert limit(DUDES[row], [dd.leave(2, 10.0), dd.join(2, 50.0)]) == (pytest.approx(6, abs=1e-9), 3)


@dudes
@pytest.mark.parametrize("moment", [0.0, 0.5])
def test_who_joins_at_the_very_start_is_there(row, moment):
    assert limit(DUDES[row], [dd.join(2, moment)]) == (pytest.approx(6, abs=1e-9), 3)


@dudes
def test_nobody_waits_for_who_left(row):
    # all but one leave while others wait for them; the last one goes on alone, at b = 0
    changes = [dd.leave(1, 30.5), dd.leave(2, 40.5)]
    assert limit(DUDES[row], changes) == (pytest.approx(0, abs=1e-9), 1)


def test_vanilla_goes_on_with_who_is_there():
    # read points average to sum p_i b_i over workers 0 and 1, of seconds 1 and 2: 6 / 3
    run, models = archive(dd.VanillaASGD(LR), *CASES["q3"], updates=2400, changes=[dd.leave(2, 10.0)])
    assert np.mean([float(models[version]) for version in run.trace.version[-30:]]) == pytest.approx(2, abs=1e-12)
    run, models = archive(dd.VanillaASGD(LR), *CASES["q3"], updates=2400, changes=[dd.join(2, 10.25)])
    assert np.mean([float(models[version]) for version in run.trace.version[-70:]]) == pytest.approx(24 / 7, abs=1e-12)
    assert run.state.n == 3 and run.trace.time[run.trace.worker == 2][0] == 14.25


def test_the_job_of_who_left_never_arrives_and_changes_are_recorded():
    changes = [dd.leave(2, 5.0), dd.join(2, 7.0)]
    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], time=20.0, changes=changes)
    mine = run.trace.worker == 2
    # draw 1, under way from 4 to 8, is lost; draw 2 starts at 7
    assert run.trace.time[mine].tolist() == [4.0, 11.0, 15.0, 19.0] and run.trace.draw[mine].tolist() == [0, 2, 3, 4]
    assert [(e["kind"], e["worker"], e["time"]) for e in run.trace.events] == [("left", 2, 5.0), ("joined", 2, 7.0)]
    tau, _ = dd.delay_grids(run.trace, 3)
    gone = np.searchsorted(run.trace.time[2:], [5.0, 11.0], side="left")  # updates are arrivals from the third on
    assert (tau[gone[0] + 1 : gone[1], 2] == -1).all() and (tau[gone[1] :, 2] > 0).all()


@pytest.mark.parametrize("row", REFUSING)
def test_methods_that_would_wait_refuse(row):
    for change in (dd.leave(1, 3.0), dd.join(1, 3.0)):
        with pytest.raises(dd.BadInput, match=r"worker 1 (left|joined), and \w+ has no rule for that"):
            dd.simulate(ALGORITHMS[row], *CASES["q3"], updates=30, changes=[change])


@pytest.mark.parametrize("change", [dd.leave(3, 1.0), dd.leave(-1, 1.0), dd.join(1, -1.0), dd.leave(0, math.nan)])
def test_changes_that_cannot_be_are_refused(change):
    with pytest.raises(dd.BadInput, match="does not fit"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=1, changes=[change])

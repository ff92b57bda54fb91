"""When a run stops before its end."""

from __future__ import annotations

import numpy as np
import pytest

import dualdelay as dd
from tables import CASES, LR


def stopping(every: int, *stop: str, **options: float) -> dd.Evaluation:
    return dd.Evaluation(every=every, early_stop=dd.EarlyStop(*stop, **options))


def test_a_run_stops_at_the_first_evaluation_that_reaches_the_target() -> None:
    run = dd.simulate(dd.SyncSGD(0.1), *CASES["q3"], updates=500, evaluation=stopping(3, target=15.0))
    assert run.ended == "stop"
    assert (run.metrics.objective <= 15.0).tolist() == [False] * (len(run.metrics) - 1) + [True]
    assert run.version == run.metrics.version[-1] == 3 * (len(run.metrics) - 1)


def test_a_target_of_accuracy_is_reached_from_below() -> None:
    run = dd.simulate(dd.SyncSGD(0.5), *CASES["digits"], updates=200, evaluation=stopping(5, "accuracy", target=0.3))
    assert run.ended == "stop"
    assert run.metrics.accuracy[-1] >= 0.3 > run.metrics.accuracy[:-1].max()


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_run_stops_when_so_many_evaluations_brought_no_new_best(patience: int) -> None:
    run = dd.simulate(dd.DuDe(0.2), *CASES["noisy"], updates=3000, evaluation=stopping(2, patience=patience))
    assert run.ended == "stop"
    values = run.metrics.objective
    ages = [k - int(np.argmin(values[: k + 1])) for k in range(len(values))]
    assert [age >= patience for age in ages] == [False] * (len(values) - 1) + [True]


def test_a_run_whose_initial_model_is_good_enough_makes_no_update() -> None:
    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=50, evaluation=stopping(10, target=1e9))
    assert (run.ended, run.version) == ("stop", 0)


def test_a_metric_of_a_user_s_own_may_be_better_the_larger_it_is() -> None:
    stop = dd.EarlyStop("near", target=-4.0, larger_is_better=True)
    evaluation = dd.Evaluation(every=1, early_stop=stop, metrics={"near": lambda x: -abs(float(x) - 6)})
    run = dd.simulate(dd.SyncSGD(0.1), *CASES["q3"], updates=99, evaluation=evaluation)
    assert run.metrics.near[-2] < -4.0 <= run.metrics.near[-1]

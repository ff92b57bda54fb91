"""When a run stops before its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_a_metric_of_one_s_own_says_which_way_is_good() -> None:
    assert dd.EarlyStop("max f1", patience=3) == dd.EarlyStop("f1", patience=3, larger_is_better=True)
    ways = {
        "accuracy": "max accuracy",
        "objective": "min objective",
        "held_out_loss": "min held_out_loss",
        "min f1": "min f1",
    }
    assert {name: dd.EarlyStop(name, target=1.0).keeps for name in ways} == ways
    with pytest.raises(dd.BadInput, match="say which way is good: 'max f1' or 'min f1'"):
        dd.EarlyStop("f1", patience=3)
    with pytest.raises(dd.BadInput, match="larger_is_better False; leave one out"):
        dd.EarlyStop("max f1", patience=3, larger_is_better=False)
    with pytest.raises(dd.BadInput, match="best_by is 'max f1', and early_stop follows 'min f1'; give both one way"):
        dd.Evaluation(best_by="max f1", early_stop=dd.EarlyStop("min f1", patience=3))


def test_a_metric_that_dies_is_noted_where_the_best_model_or_the_end_hangs_on_it() -> None:
    values = iter([3.0, 2.0, *[float("nan")] * 9])
    evaluation = dd.Evaluation(every=2, metrics={"m": lambda model: next(values)}, best_by="min m")
    run = dd.simulate(dd.DuDe(0.1), dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2]), updates=8, evaluation=evaluation)
    assert run.best is not None and (run.best.value, run.best.version) == (2.0, 2)
    assert [note for note in run.notes if note.startswith("m had no value at the end")] != []


def test_the_best_model_of_a_loaded_run_is_that_of_the_run(tmp_path: Path) -> None:
    evaluation = dd.Evaluation(every=2, best_by="objective")
    problem, speeds = dd.Quadratic([[0.0], [6.0]]), dd.FixedSpeeds([1, 2])
    run = dd.simulate(dd.DuDe(0.1), problem, speeds, updates=8, evaluation=evaluation, folder=tmp_path / "run")
    loaded = dd.load(tmp_path / "run").best
    assert run.best is not None and loaded is not None
    assert replace(loaded, x=None) == replace(run.best, x=None) and torch.equal(loaded.x, run.best.x)

"""The model is evaluated off the clock, when it was asked for, and a run ends when it was asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import dualdelay as dd
from flat import simulate
from helpers import operations, rounding
from own import SCENARIOS, Scenario, mlp, shards, three
from tables import ALGORITHMS, CASES, LR

pytestmark = pytest.mark.usefixtures("own_methods")


def models(
    run_options: dict[str, Any], algorithm: dd.Algorithm[Any], case: str
) -> tuple[dd.Run, list[tuple[float, int, Any]]]:
    """A run, and the model after each arrival with its time and version."""
    problem, speeds = CASES[case]
    seen = [(0.0, 0, problem.start(0))]
    watch = (lambda s, a: seen.append((a.time, s.version, s.x)),)
    return simulate(algorithm, problem, speeds, watch=watch, **run_options), seen


@pytest.mark.parametrize("case", ["q3", "noisy", "local steps"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedfix"])  # wakes make its versions, unseen here
def test_every_row_stands_where_it_was_asked_for_and_shows_the_model_of_that_moment(name: str, case: str) -> None:
    run, seen = models({"time": 14.0, "evaluate_every": 3, "evaluate_seconds": 2.0}, ALGORITHMS[name], case)
    by_time = [(2.0 * k, max(v for t, v, _ in seen if t <= 2.0 * k)) for k in range(8)]
    made = {v: t for t, v, _ in reversed(seen)}
    by_update = [(made[v], v) for v in made if v % 3 == 0 and v > 0]
    rows = list(zip(run.metrics.time.tolist(), run.metrics.version.tolist(), strict=True))
    assert sorted(rows) == rows
    assert set(rows) == set(by_time) | set(by_update)
    last = {v: x for _, v, x in seen}
    for row in run.metrics.rows():
        assert row["objective"] == run.problem.evaluate(last[row["version"]])["objective"]


def test_an_arrival_at_exactly_that_moment_counts() -> None:
    run = dd.simulate(dd.VanillaASGD(LR), *CASES["q3"], time=4.0, evaluation=dd.Evaluation(seconds=2.0))
    # by second 2 worker 0 came twice and worker 1 once; by second 4 another two, one, and worker 2
    assert run.metrics.version.tolist() == [0, 3, 7]
    assert run.time == 4.0
    assert run.version == 7


@pytest.mark.parametrize(
    "options", [{"evaluate_every": 1}, {"evaluate_seconds": 0.3}, {"evaluate_every": 2, "evaluate_seconds": 1.0}]
)
@pytest.mark.parametrize("case", ["noisy", "digits"])
def test_evaluation_changes_nothing(case: str, options: dict[str, Any]) -> None:
    for algorithm in (dd.DuDe(LR), dd.MIFA(LR, active=2)):
        runs = [simulate(algorithm, *CASES[case], updates=9, **o) for o in ({"evaluate_every": 1000}, options)]
        assert len(runs[1].metrics) > len(runs[0].metrics) == 2
        assert torch.equal(runs[0].x, runs[1].x)
        assert all(runs[0].trace[name].tobytes() == runs[1].trace[name].tobytes() for name in runs[0].trace)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(total=st.floats(0.01, 300, allow_nan=False))
def test_by_default_a_run_is_evaluated_fifty_times(total: float) -> None:
    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], time=total)
    assert len(run.metrics) == 51
    assert run.metrics.time[[0, -1]].tolist() == [0.0, total]


@pytest.mark.parametrize("updates, rows", [(0, 1), (1, 2), (49, 50), (100, 51), (101, 52)])
def test_by_default_updates_are_evaluated_evenly_and_the_end_always(updates: int, rows: int) -> None:
    run = dd.simulate(dd.VanillaASGD(LR), *CASES["q3"], updates=updates)
    assert len(run.metrics) == rows
    assert run.metrics.version[-1] == updates == run.version


def test_updates_made_between_arrivals_are_evaluated_too() -> None:
    run = SCENARIOS["wakes"].run(evaluate_seconds=None, evaluate_every=4)
    assert run.metrics.version.tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert run.metrics.time.tolist() == run.metrics.version.tolist()  # an update a second
    assert run.time == 24.0


@pytest.mark.numeric
def test_own_metrics_are_columns_and_see_the_model(tmp_path: Path) -> None:
    problem = dd.Network(mlp(), cross_entropy, shards(), 4)
    inputs = shards()[0][0]
    seen: list[Any] = []
    metrics = {"size": lambda model: (seen.append(model), model(inputs).norm())[1], "one": lambda model: 1}
    options = {"metrics": metrics, "evaluate_every": 5, "checkpoint_every": 4}
    run = simulate(dd.DuDe(LR), problem, three, updates=10, folder=tmp_path / "run", **options)
    assert list(run.metrics)[-2:] == ["size", "one"]
    assert run.metrics.one.tolist() == [1.0, 1.0, 1.0]
    model = mlp()
    model.load_state_dict(run.state_dict())
    close = rounding(operations(problem, samples=inputs.numel()), torch.float32)
    assert run.metrics["size"][-1] == pytest.approx(model(inputs).norm().item(), rel=close, abs=0)
    assert not any(model.training for model in seen)
    longer = dd.resume(tmp_path / "run", updates=20, problem=problem, metrics=metrics)
    straight = simulate(dd.DuDe(LR), problem, three, updates=20, **options)
    assert longer.metrics["size"].tobytes() == straight.metrics["size"].tobytes()


def test_a_run_stops_at_the_first_evaluation_that_reaches_the_target() -> None:
    run = dd.simulate(
        dd.SyncSGD(0.1), *CASES["q3"], updates=500, evaluation=dd.Evaluation(every=3, early_stop=dd.EarlyStop(target=15.0))
    )
    assert run.ended == "stop"
    assert (run.metrics.objective <= 15.0).tolist() == [False] * (len(run.metrics) - 1) + [True]
    assert run.version == run.metrics.version[-1] == 3 * (len(run.metrics) - 1)


def test_accuracy_is_to_grow() -> None:
    problem, speeds = CASES["digits"]
    run = dd.simulate(
        dd.SyncSGD(0.5),
        problem,
        speeds,
        updates=200,
        evaluation=dd.Evaluation(every=5, early_stop=dd.EarlyStop("accuracy", target=0.3)),
    )
    assert run.ended == "stop"
    assert run.metrics.accuracy[-1] >= 0.3 > run.metrics.accuracy[:-1].max()


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_run_stops_when_it_has_not_improved_for_a_while(patience: int) -> None:
    stop = dd.EarlyStop(patience=patience)
    run = dd.simulate(dd.DuDe(0.2), *CASES["noisy"], updates=3000, evaluation=dd.Evaluation(every=2, early_stop=stop))
    assert run.ended == "stop"
    values = run.metrics.objective
    ages = [k - int(np.argmin(values[: k + 1])) for k in range(len(values))]
    assert [age >= patience for age in ages] == [False] * (len(values) - 1) + [True]


def test_the_start_may_be_good_enough() -> None:
    run = dd.simulate(
        dd.DuDe(LR), *CASES["q3"], updates=50, evaluation=dd.Evaluation(every=10, early_stop=dd.EarlyStop(target=1e9))
    )
    assert (run.ended, run.version) == ("stop", 0)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_checkpoints_stay(keep: int, tmp_path: Path) -> None:
    for place, kept in (("some", keep), ("all", 99)):
        Scenario(dd.VanillaASGD(LR)).run(folder=tmp_path / place, keep=kept, checkpoint_every=5)
    some, everything = (
        sorted(path.name for path in (tmp_path / place / "checkpoints").iterdir()) for place in ("some", "all")
    )
    assert len(everything) == 5  # after 5, 10, 15, 20 and, at the end, 24 updates
    assert some == everything[-keep:]

"""The model is evaluated off the clock, at the updates and times that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import dualdelay as dd
from helpers import operations, rounding
from own import Deadline, mlp, shards, three
from tables import ALGORITHMS, CASES, LR


@pytest.mark.parametrize("case", ["q3", "noisy", "local steps"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedfix"])  # wakes make its versions, unseen here
def test_every_row_is_at_a_scheduled_update_or_time_and_shows_the_model_of_that_moment(name: str, case: str) -> None:
    problem, speeds = CASES[case]
    seen = [(0.0, 0, problem.start(0))]  # time, version and model after each arrival
    watch = [lambda s, a: seen.append((a.time, s.version, s.x))]
    evaluation = dd.Evaluation(every=3, seconds=2.0)
    run = dd.simulate(ALGORITHMS[name], problem, speeds, time=14.0, watch=watch, evaluation=evaluation)
    by_time = [(2.0 * k, max(v for t, v, _ in seen if t <= 2.0 * k)) for k in range(8)]
    made = {v: t for t, v, _ in reversed(seen)}
    by_update = [(made[v], v) for v in made if v % 3 == 0 and v > 0]
    rows = list(zip(run.metrics.time.tolist(), run.metrics.version.tolist(), strict=True))
    assert sorted(rows) == rows
    assert set(rows) == {*by_time, *by_update}
    models = {v: x for _, v, x in seen}
    for row in run.metrics.rows():
        assert row["objective"] == problem.evaluate(models[row["version"]])["objective"]


def test_an_arrival_at_exactly_that_moment_counts() -> None:
    run = dd.simulate(dd.VanillaASGD(LR), *CASES["q3"], time=4.0, evaluation=dd.Evaluation(seconds=2.0))
    # by second 2 worker 0 arrived twice and worker 1 once; by second 4 another two, one, and worker 2
    assert run.metrics.version.tolist() == [0, 3, 7]
    assert (run.time, run.version) == (4.0, 7)


@pytest.mark.parametrize("options", [{"every": 1}, {"seconds": 0.3}, {"every": 2, "seconds": 1.0}])
@pytest.mark.parametrize("case", ["noisy", "digits"])
@pytest.mark.parametrize("name", ["dude", "mifa active"])
def test_evaluation_changes_nothing(name: str, case: str, options: dict[str, Any]) -> None:
    rarely, often = (
        dd.simulate(ALGORITHMS[name], *CASES[case], updates=9, evaluation=dd.Evaluation(**values))
        for values in ({"every": 1000}, options)
    )
    assert len(often.metrics) > len(rarely.metrics) == 2
    assert torch.equal(rarely.x, often.x)
    assert all(rarely.trace[name].tobytes() == often.trace[name].tobytes() for name in rarely.trace)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(total=st.floats(0.01, 300, allow_nan=False))
def test_by_default_a_time_is_evaluated_fifty_times_and_at_the_start(total: float) -> None:
    run = dd.simulate(dd.DuDe(LR), CASES["q3"][0], dd.FixedSpeeds([40.0, 80.0, 160.0]), time=total)
    assert len(run.metrics) == 51
    assert run.metrics.time[[0, -1]].tolist() == [0.0, total]


@pytest.mark.parametrize("updates, rows", [(0, 1), (1, 2), (49, 50), (100, 51), (101, 52)])
def test_by_default_updates_are_evaluated_evenly_and_the_end_always(updates: int, rows: int) -> None:
    run = dd.simulate(dd.VanillaASGD(LR), *CASES["q3"], updates=updates)
    assert len(run.metrics) == rows
    assert run.metrics.version[-1] == updates == run.version


def test_updates_made_between_arrivals_are_evaluated_too() -> None:
    speeds = dd.FixedSpeeds([4.5, 9.5, 9.5, 9.5])
    run = dd.simulate(Deadline(LR), CASES["noisy"][0], speeds, updates=24, evaluation=dd.Evaluation(every=4))
    assert run.metrics.version.tolist() == [0, 4, 8, 12, 16, 20, 24]
    assert run.metrics.time.tolist() == run.metrics.version.tolist()  # an update a second
    assert run.time == 24.0


@pytest.mark.numeric
def test_a_user_s_metrics_are_columns_and_see_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    problem, inputs = dd.Network(mlp(), cross_entropy, shards(), 4), shards()[0][0]
    seen: list[Any] = []

    def size(model: Any) -> Any:
        seen.append(model.training)
        return model(inputs).norm()

    metrics = {"size": size, "one": lambda model: 1}
    options: dict[str, Any] = {"checkpoint_every": 4, "evaluation": dd.Evaluation(every=5, metrics=metrics)}
    run = dd.simulate(dd.DuDe(LR), problem, three, updates=10, folder=tmp_path / "run", **options)
    assert list(run.metrics)[-2:] == ["size", "one"]
    assert run.metrics.one.tolist() == [1.0, 1.0, 1.0]
    model = mlp()
    model.load_state_dict(run.state_dict())
    close = rounding(operations(problem, samples=inputs.numel()), torch.float32)
    assert run.metrics["size"][-1] == pytest.approx(model(inputs).norm().item(), rel=close, abs=0)
    assert seen == [False] * 3
    longer = dd.resume(tmp_path / "run", updates=20, problem=problem, metrics=metrics)
    straight = dd.simulate(dd.DuDe(LR), problem, three, updates=20, **options)
    assert longer.metrics["size"].tobytes() == straight.metrics["size"].tobytes()


def test_a_problem_may_evaluate_to_columns_of_its_own_and_lack_the_usual_ones() -> None:
    class Bare(dd.Quadratic):
        def evaluate(self, x: torch.Tensor) -> dict[str, float]:
            return {"objective": float(x @ x), "own": 7.0}

    run = dd.simulate(dd.DuDe(LR), Bare([[0.0], [1.0], [2.0]]), CASES["q3"][1], updates=3)
    assert run.metrics.own.tolist() == [7.0] * len(run.metrics)
    assert all(value != value for value in run.metrics.accuracy)  # nan

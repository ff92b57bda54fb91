"""Runs that advance side by side are the runs by themselves: the schedule to the bit, the numbers to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.state import BLOCK
from own import Deadline, Fresh, Holes, Steep, centers, computed_both_ways, digits, four, mlp, moves, paces, shards, three
from tables import ALGORITHMS, CASES, LR

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("own_methods")]

TOTALS: dict[str, dict[str, Any]] = {
    "updates": {"updates": 12},
    "updates, every": {"updates": 17, "evaluation": dd.Evaluation(every=5)},
    "time": {"time": 8.0},
    "time, seconds": {"time": 9.0, "evaluation": dd.Evaluation(seconds=1.3)},
    "whichever is first": {"updates": 11, "time": 6.0, "evaluation": dd.Evaluation(every=4, seconds=1.1)},
}


@pytest.mark.parametrize(
    ("totals", "case", "part"),
    [("updates, every", "noisy", 0), ("time, seconds", "logistic", 1), ("whichever is first", "local steps", 2)],
)
def test_every_method_is_the_same_side_by_side(totals: str, case: str, part: int) -> None:
    methods = [*ALGORITHMS.values(), Deadline(LR), Fresh(LR)][part::3]
    grid = {"algorithm": methods, "lr": [LR, 0.05], "seed": [0, 3]}
    computed_both_ways(grid, *CASES[case], **TOTALS[totals])


@pytest.mark.parametrize("totals", TOTALS)
def test_however_it_ends_a_run_is_the_same_side_by_side(totals: str) -> None:
    methods = [dd.DuDe(LR, wait_for=2), dd.ShuffledASGD(LR), dd.SyncSGD(LR), Deadline(LR)]
    computed_both_ways({"algorithm": methods, "lr": [LR, 0.05, 0.1]}, *CASES["noisy"], **TOTALS[totals])


def compresses(method: dd.Algorithm[Any]) -> bool:
    """In float32 a number between two bytes may be rounded one way alone and the other in a batch."""
    return getattr(method, "compress", None) is not None


@pytest.mark.slow
def test_every_method_on_two_splits_of_the_digits_is_the_same_side_by_side() -> None:
    grid = {"algorithm": [a for a in ALGORITHMS.values() if not compresses(a)], "problem": [digits(0.1), digits(0.5)]}
    computed_both_ways(grid, speeds=four, updates=7, evaluation=dd.Evaluation(every=9))


def test_compressed_messages_of_two_networks_are_the_same_side_by_side() -> None:
    data = [[(inputs.double(), targets) for inputs, targets in shards(4, seed=seed)] for seed in (0, 1)]
    problems = [dd.Network(mlp().double(), cross_entropy, parts, 4, seed=seed) for seed, parts in enumerate(data)]
    grid = {"algorithm": [a for a in ALGORITHMS.values() if compresses(a)], "lr": [LR, 0.05], "problem": problems}
    computed_both_ways(grid, speeds=four, updates=12, evaluation=dd.Evaluation(every=5))


OFTEN = dd.Evaluation(every=7, seconds=2.0)
OPTIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "latency": (
        [dd.UniformASGD(LR), dd.DuDe(LR)],
        {"speeds": dd.SimulatedFleet(four, link=dd.speeds.Link(0.25))},
    ),
    "bandwidth": (
        [dd.VanillaASGD(LR), dd.SyncSGD(LR)],
        {"speeds": dd.SimulatedFleet(four, link=dd.speeds.Link(0.1, 64.0))},
    ),
    "workers leave and join": (
        [dd.DuDe(LR, wait_for=2), dd.VanillaASGD(LR), dd.DuDe(LR, memory="workers")],
        {"speeds": dd.SimulatedFleet(four, changes=moves)},
    ),
    "speeds change": ([dd.FedBuff(LR, buffer=3), dd.ShuffledASGD(LR)], {"speeds": paces}),
    "half a table": ([dd.DuDe(LR), dd.MIFA(LR, active=2)], {"server": dd.Server(gradient_table="half")}),
    "a table on the host": ([dd.DuDe(LR), dd.SIAG(LR)], {"server": dd.Server(gradient_table="host")}),
    "initial weights": (
        [dd.DuDe(LR)],
        {"server": dd.Server(initial_weights=torch.tensor([3.0, -2.0], dtype=torch.float64))},
    ),
    "metrics": (
        [dd.VanillaASGD(LR)],
        {"evaluation": dd.Evaluation(every=7, metrics={"first": lambda x: x[0], "size": lambda x: float(x.norm())})},
    ),
    "no updates": ([dd.VanillaASGD(LR), dd.DuDe(LR)], {"updates": 0}),
    "one update": ([dd.VanillaASGD(LR), dd.SyncSGD(LR)], {"updates": 1}),
    "no time": ([dd.VanillaASGD(LR)], {"updates": None, "time": 0.0}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option_a_run_is_the_same_side_by_side(name: str) -> None:
    methods, options = OPTIONS[name]
    options = {"updates": 40, "evaluation": OFTEN, "speeds": four, **options}
    grid = {"algorithm": methods, "lr": [LR, 0.05], "seed": [0, 1]}
    computed_both_ways(grid, CASES["noisy"][0], options.pop("speeds"), **options)


def test_local_steps_on_networks_of_two_splits_are_the_same_side_by_side() -> None:
    problems = [dd.LocalSteps(digits(alpha), k=2, lr=0.05) for alpha in (0.1, 0.5)]
    grid = {"algorithm": [dd.ShuffledASGD(LR), dd.DuDe(LR)], "lr": [LR, 0.05], "problem": problems}
    computed_both_ways(grid, speeds=four, updates=12, evaluation=dd.Evaluation(every=6))


def test_a_user_s_networks_with_metrics_and_initial_weights_are_the_same_side_by_side() -> None:
    problems = [dd.Network(mlp, cross_entropy, shards(seed=seed), 4, seed=seed) for seed in (0, 1)]
    problems += [dd.Network(mlp, cross_entropy, shards(), dd.Batches(4, replacement=False), weights="samples")]
    grid = {"algorithm": [dd.DuDe(LR), dd.FedBuff(LR, buffer=2)], "lr": [0.02, 0.2], "problem": problems}
    metrics = {"weight": lambda model: sum(float(p.norm()) for p in model.parameters())}
    halved = {name: 0.5 * value for name, value in problems[0].state_dict(problems[0].start(0)).items()}
    options = {"evaluation": dd.Evaluation(every=6, metrics=metrics), "server": dd.Server(initial_weights=halved)}
    computed_both_ways(grid, speeds=three, updates=20, **options)


def test_rows_that_are_longer_than_a_block_together_are_the_same_side_by_side() -> None:
    problems = [digits(alpha, hidden=1024) for alpha in (0.1, 0.2, 0.5, 1.0)]
    assert 4 * len(problems[0].start(0)) > BLOCK > len(problems[0].start(0))
    methods = [dd.DuDe(LR), dd.FedBuff(LR, buffer=2), dd.DuDe(LR, memory="workers")]
    options: dict[str, Any] = {"speeds": four, "updates": 8, "evaluation": dd.Evaluation(every=20)}
    computed_both_ways({"algorithm": methods, "lr": [0.01, 0.02, 0.05, 0.1]}, problems[0], **options)
    computed_both_ways({"algorithm": methods, "problem": problems}, **options)


@pytest.mark.parametrize("changes", [(), moves], ids=["all stay", "some leave and join"])
@pytest.mark.parametrize("name", ["dude", "dude workers", "vanilla"])
def test_runs_stop_early_each_at_its_own_update(name: str, changes: Any) -> None:
    grid = {"algorithm": [ALGORITHMS[name]], "lr": [0.002, 0.02, 0.05, 0.1], "seed": [0, 1]}
    stop = dd.Evaluation(every=3, early_stop=dd.EarlyStop(target=3.3))
    fleet = dd.SimulatedFleet(four, changes=changes)
    runs = computed_both_ways(grid, CASES["noisy"][0], fleet, updates=60, evaluation=stop).runs
    assert {run.ended for run in runs} == {"stop", "updates"}
    assert len({run.version for run in runs}) > 2


@pytest.mark.parametrize("options", [{"updates": 60, "seconds": 0.9}, {"time": 15.0}], ids=["seconds", "time"])
def test_runs_whose_patience_ends_stop_where_they_do_alone(options: dict[str, Any]) -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.UniformASGD(LR)], "lr": [0.002, 0.02, 0.05, 0.2, 0.4], "seed": [0, 1]}
    stop = dd.Evaluation(seconds=options.get("seconds"), early_stop=dd.EarlyStop(patience=3))
    totals = {name: value for name, value in options.items() if name != "seconds"}
    runs = computed_both_ways(grid, *CASES["noisy"], evaluation=stop, **totals).runs
    assert "stop" in {run.ended for run in runs}
    assert len({run.time for run in runs}) > 2


def test_the_state_of_a_run_that_ended_does_not_change_when_the_others_go_on() -> None:
    changes = [dd.speeds.leave(1, 9.0), dd.speeds.leave(2, 9.5)]
    slow, fast = dd.sweep(
        {"algorithm": [dd.DuDe(LR)], "lr": [0.002, 0.1]},
        CASES["noisy"][0],
        dd.SimulatedFleet(four, changes=changes),
        updates=60,
        evaluation=dd.Evaluation(every=1, early_stop=dd.EarlyStop(target=3.3)),
        compute=dd.Compute(batch=True),
    ).runs
    assert fast.time < 9.0 < slow.time
    assert (fast.state.n, fast.state.absent) == (4, set())
    assert slow.state.absent == {1, 2}
    slow.state.absent.add(0)
    assert fast.state.absent == set()


@pytest.mark.parametrize("on_nonfinite", ["retry", "stop"])
@pytest.mark.parametrize("name", ["dude", "vanilla", "fedbuff", "dude workers", "mifa active"])
def test_a_run_that_diverges_does_not_change_the_others(name: str, on_nonfinite: Any) -> None:
    grid = {"algorithm": [ALGORITHMS[name]], "lr": [LR, 1e200, 0.05, 3.0]}
    options = {"evaluation": dd.Evaluation(every=6), "server": dd.Server(on_nonfinite=on_nonfinite)}
    together = computed_both_ways(grid, *CASES["noisy"], updates=25, **options)
    assert 1 in together.failed
    assert together.runs[1] is None


@pytest.mark.parametrize("on_nonfinite", ["retry", "stop"])
def test_networks_that_diverge_do_not_change_the_others(on_nonfinite: Any) -> None:
    grid = {"algorithm": [dd.VanillaASGD(LR)], "lr": [LR, 1e38, 0.05], "problem": [digits(0.1), digits(0.5)]}
    options = {"evaluation": dd.Evaluation(every=6), "server": dd.Server(on_nonfinite=on_nonfinite)}
    assert set(computed_both_ways(grid, speeds=four, updates=12, **options).failed) == {1, 4}


@pytest.mark.parametrize("name", ["dude", "vanilla", "dude workers"])
def test_a_run_that_rejects_a_gradient_and_recovers_is_the_same_side_by_side(name: str) -> None:
    grid = {"algorithm": [ALGORITHMS[name]], "lr": [0.003, 0.02, 0.05, 0.1]}
    problem = Steep([[0.0, 1.0], [40.0, 0.0], [2.0, 60.0]], noise=0.5)
    runs = computed_both_ways(grid, problem, three, updates=40, evaluation=dd.Evaluation(every=7)).runs
    assert {run.rejected > 0 for run in runs} == {True, False}


def test_gradients_that_are_nan_in_every_run_are_rejected_side_by_side_as_alone() -> None:
    grid = {"algorithm": [dd.DuDe(LR), dd.FedBuff(LR, buffer=2)], "lr": [LR, 0.05]}
    runs = computed_both_ways(grid, Holes(centers, noise=0.5), three, updates=25).runs
    assert all(run.rejected > 0 for run in runs)


class Growing(dd.SpeedModel):
    """A user's own seconds, in a class that gives no description of itself."""

    def __init__(self, first: float) -> None:
        self.n, self.first = 4, first

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return self.first * (worker + 1) + 0.1 * draw


def test_two_speed_models_of_a_user_s_own_class_are_two_schedules() -> None:
    grid = {"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.05], "speeds": [Growing(1.0), Growing(5.0)]}
    computed_both_ways(grid, CASES["noisy"][0], updates=20)


def test_problems_with_other_numbers_of_workers_or_weights_are_not_mixed() -> None:
    for n, speeds in ((4, four), (5, dd.FixedSpeeds([1, 2, 3, 4, 5]))):
        problem = dd.Quadratic([[0.0, 1.0]] * (n - 1) + [[4.0, 2.0]])
        computed_both_ways({"algorithm": [dd.DuDe(LR)], "lr": [LR, 0.1]}, problem, speeds, updates=20)
    kinds = [
        *(dd.Quadratic([[0.0] * d, [1.0] * d, [2.0] * d, [4.0] * d]) for d in (1, 2)),
        *(digits(0.5, hidden=hidden, batch_size=size) for hidden, size in ((3, 8), (4, 8), (4, 16))),
        dd.LocalSteps(dd.Quadratic([[0.0, 1.0], [1.0, 2.0], [2.0, 0.0], [4.0, 1.0]]), k=3, lr=0.1),
    ]
    grid = {"algorithm": [dd.DuDe(LR), dd.UniformASGD(LR)], "lr": [LR, 0.1], "problem": kinds}
    computed_both_ways(grid, speeds=four, updates=10, evaluation=dd.Evaluation(every=10))


def test_a_problem_with_another_number_of_workers_than_the_speeds_is_refused() -> None:
    problems = [dd.Quadratic([[0.0], [1.0], [2.0], [3.0]]), dd.Quadratic([[0.0], [1.0]])]
    with pytest.raises(dd.BadInput, match="4 workers, but the problem has 2"):
        dd.sweep({"algorithm": [dd.DuDe(LR)], "problem": problems}, speeds=four, updates=5, compute=dd.Compute(batch=True))

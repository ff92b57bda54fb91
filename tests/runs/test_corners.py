"""Corners that a review and a newcomer found."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.engine.delays import delay_grids, used_in
from dualdelay.storage.files import decode, encode
from flat import simulate
from helpers import audit, rounding
from own import Scenario
from tables import CASES, LR

Q3 = CASES["q3"]


class Single(dd.Quadratic):
    """Weights in float32, gradients in float64, as numpy code would give them."""

    def start(self, seed):
        return super().start(seed).float()

    def gradient(self, x, worker, draw):
        return super().gradient(x.double(), worker, draw)

    def evaluate(self, x):
        return super().evaluate(x.double())


@pytest.mark.numeric
@pytest.mark.parametrize("method", [dd.DuDe(0.05), dd.DuDe(0.05, memory="workers"), dd.MIFA(0.05), dd.SIAG(0.05)])
def test_gradients_of_another_type_than_the_weights_are_converted(method):
    run = dd.simulate(method, Single([[0.0], [6.0], [12.0]]), Q3[1], updates=1000)
    # a step that is less than a last digit of the weights is none
    assert float(run.x) == pytest.approx(6.0, abs=rounding(4, torch.float32) * 6 / method.lr)
    assert run.x.dtype == torch.float32


class Spike(dd.Quadratic):
    """One gradient that is huge, and finite."""

    def gradient(self, x, worker, draw):
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient + 1e20 if (worker, draw) == (0, 5) else gradient), loss


@pytest.mark.numeric
def test_a_huge_gradient_leaves_no_trace_in_the_sum():
    # added to 1e20 and taken away again, the others' gradients are gone from a float64 sum; the table knows them
    run = dd.simulate(dd.DuDe(1e-3), Spike([[0.0], [6.0], [12.0]]), Q3[1], updates=1500)
    assert run.audit <= audit(run)


def test_who_comes_back_before_the_next_update_is_in_it():
    run = simulate(dd.DuDe(LR, wait_for=3), *Q3, time=20.0, changes=[dd.speeds.leave(0, 4.25), dd.speeds.join(0, 4.5)])
    tau, _ = delay_grids(run.trace, 3)
    assert (tau[:2] > 0).all()  # worker 0 is away for a moment between two updates, and in both
    first = simulate(dd.DuDe(LR), *Q3, time=20.0, changes=[dd.speeds.join(0, 0.5)])
    assert delay_grids(first.trace, 3)[0][0].tolist() == [1, 1, 1]


def test_gradients_that_were_never_used_are_not_counted():
    # in the busy warm-up worker 0 reports forty times before worker 2 does, and its last gradient alone is used
    run = dd.simulate(dd.DuDe(LR, start="busy"), Q3[0], dd.FixedSpeeds([1.0, 2.0, 40.0]), updates=1)
    assert len(run.trace) > 40
    assert run.delays.arrival_avg == 1.0
    sync = dd.simulate(dd.SyncSGD(LR), *Q3, updates=4)
    assert set(used_in(sync.trace) - sync.trace.version) == {1}


def test_a_run_that_is_being_lengthened_is_not_finished(tmp_path):
    Scenario(dd.DuDe(LR)).run(folder=tmp_path / "run", updates=10)
    with pytest.raises(ZeroDivisionError):
        dd.resume(tmp_path / "run", updates=20, watch=(lambda s, a: 1 // (15 - s.version),))
    assert dd.resume(tmp_path / "run").version == 20
    again = dd.replay(tmp_path / "run")
    assert (again.version, again.ended) == (20, "replay")
    assert again.metrics.objective[-1] == dd.resume(tmp_path / "run").metrics.objective[-1]


def test_a_run_with_a_time_limit_is_saved_about_twenty_times(tmp_path):
    dd.simulate(dd.SyncSGD(LR), *Q3, time=400.0, folder=dd.Saving(tmp_path / "run", keep=99))
    assert 18 <= len(list((tmp_path / "run" / "checkpoints").iterdir())) <= 22


class Fails(dd.Quadratic):
    broken = True

    def gradient(self, x, worker, draw):
        if self.broken and (worker, draw) == (1, 7):
            raise ZeroDivisionError("no")
        return super().gradient(x, worker, draw)


def test_a_run_whose_problem_fails_is_saved_where_it_stands(tmp_path):
    problem = Fails([[0.0], [6.0], [12.0]])
    with pytest.raises(dd.RunFailed, match="worker 1 could not compute its job number 7"):
        dd.simulate(dd.DuDe(LR), problem, Q3[1], updates=40, folder=tmp_path / "run", checkpoint_every=1000)
    problem.broken = False
    seen = []
    resumed = dd.resume(tmp_path / "run", problem=problem, watch=(lambda s, a: seen.append(a.job),))
    straight = dd.simulate(dd.DuDe(LR), problem, Q3[1], updates=40)
    assert torch.equal(resumed.x, straight.x)
    assert seen[0] == (1, 7, resumed.trace.version[len(resumed.trace) - len(seen)])


@dataclass(frozen=True)
class InPlace(dd.Algorithm[dd.State]):
    def init(self, x, n, rng):
        return dd.State(x, n)

    def step(self, s, a):
        s.x.sub_(self.lr * a.value)
        return [dd.send(a.worker)]


class Silent(InPlace):
    def step(self, s, a):
        s.descend(a.value, self.lr)


class Nobody(InPlace):
    def step(self, s, a):
        return [dd.send(99)]


@pytest.mark.parametrize(
    ("method", "said"), [(InPlace(LR), "state.descend"), (Silent(LR), "returned None"), (Nobody(LR), "0..2")]
)
def test_mistakes_in_a_method_are_named(method, said):
    with pytest.raises(dd.BadInput, match=said):
        dd.simulate(method, *Q3, updates=5)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("dude", *Q3), {}, "algorithm is 'dude'"),
        ((dd.DuDe(LR), Q3[0], [1.0, 2.0]), {}, "speeds is"),
        ((dd.DuDe(LR), None, Q3[1]), {}, "problem is None"),
        ((dd.DuDe(LR), *Q3), {"seed": 1.5}, "seed is 1.5"),
        ((dd.DuDe(LR), *Q3), {"threads": 0}, "threads is 0"),
        ((dd.DuDe(LR), *Q3), {"metrics": {"objective": float}}, "objective"),
        ((dd.DuDe(LR), *Q3), {"metrics": {"all": lambda x: torch.ones(2)}}, "metric 'all'"),
    ],
)
def test_what_is_no_such_thing_is_refused_at_the_door(arguments, options, said):
    with pytest.raises(dd.BadInput, match=said):
        simulate(*arguments, updates=3, **options)


def test_a_metric_that_should_grow_can_say_so():
    stop = dd.EarlyStop("near", target=-4.0, larger_is_better=True)
    run = dd.simulate(
        dd.SyncSGD(0.1),
        *Q3,
        updates=99,
        evaluation=dd.Evaluation(every=1, early_stop=stop, metrics={"near": lambda x: -abs(float(x) - 6)}),
    )
    assert run.metrics.near[-2] < -4.0 <= run.metrics.near[-1]


def test_a_problem_may_have_columns_of_its_own_and_lack_ours():
    class Bare(dd.Quadratic):
        def evaluate(self, x):
            return {"objective": float(x @ x), "mine": 7.0}

    run = dd.simulate(dd.DuDe(LR), Bare([[0.0], [1.0], [2.0]]), Q3[1], updates=3)
    assert run.metrics.mine.tolist()[-1] == 7.0
    assert np.isnan(run.metrics.accuracy).all()


def test_seeds_on_the_shell_reach_what_is_inside(tmp_path, capsys):
    problem = "local_steps[k=2,lr=0.1,problem=quadratic[centers=[[0.0],[6.0],[12.0]],noise=1.0]]"
    main(["compare", "dude[lr=0.05]", "--problem", problem, "--speeds", "fixed[times=[1,2,4]]", "--updates", "9",
          "--seeds", "0", "1", "--folder", str(tmp_path / "c"), "--json"])  # fmt: skip
    one, other = json.loads(capsys.readouterr().out)["runs"]
    assert one["objective"] != other["objective"]
    changing = dd.speeds.ChangingSpeeds(dd.TruncatedNormalSpeeds(3), [1.0], [[1, 1, 1], [2, 2, 2]])
    noisy = dd.Quadratic([[0.0], [6.0], [12.0]], noise=1.0)
    table = dd.compare([dd.VanillaASGD(LR)], noisy, changing, seeds=(0, 1), time=6.0, folder=tmp_path / "d")
    assert table.version[table.seed == 0].tolist() != table.version[table.seed == 1].tolist()
    assert (tmp_path / "d" / "comparison.parquet").exists()


def test_the_version_is_shown(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"dualdelay {dd.__version__}\n"


def test_a_total_that_was_passed_already_is_said(tmp_path):
    Scenario(dd.DuDe(LR)).run(folder=tmp_path / "run", updates=20)
    run = dd.resume(tmp_path / "run", updates=5)
    assert "20 updates already" in run.notes[0]
    assert run.version == 20


def test_the_minibatches_of_very_many_workers_have_the_same_names():
    shards = [(torch.ones(9, 1), torch.ones(9, 1))] * 1100
    problem = dd.Network(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, shards, 3, full_gradient=False)
    draws = dd.Draws(0, "minibatch")
    for worker in (*range(1100), 3, 1099):
        assert problem.indices(worker, 40).tolist() == draws.integers(9, 3, worker, 40).tolist()
    problem.indices(0, 0).zero_()
    assert problem.indices(0, 0).tolist() == draws.integers(9, 3, 0, 0).tolist()


def test_a_state_may_hold_tuples_and_dicts_of_them():
    content = {"a": {(1, 2): (3, [4.5]), "b": {1, 2}}, "c": [None, True, torch.ones(2)]}
    back = decode(encode(content))
    assert back["a"] == content["a"]
    assert torch.equal(back["c"][2], torch.ones(2))

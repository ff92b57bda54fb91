"""``dd.train`` on workers whose seconds are virtual (tests/virtual.py): recorded, evaluated there, resumed, replayed.

What only processes can show is in test_ray.py.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.half import Half
from dualdelay.engine.loop import Loop
from dualdelay.engine.trace import Trace
from dualdelay.simulation.clocks import RecordedClock
from dualdelay.simulation.local_fleet import LocalFleet
from helpers import check_replay, drift, kinds, operations
from real import small_net
from tables import ALGORITHMS
from transports import VirtualFleet
from virtual import TRIO, fleet_of

PAIR = TRIO[:2]


def uneven(**settings):
    """Workers whose jobs take random seconds, by a seed."""
    chance = random.Random(5)
    return fleet_of(job_seconds=lambda request: chance.uniform(0.01, 0.05) * (1 + request.worker), **settings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recorded_run_replays_to_the_same_bits(name, tmp_path):
    problem = dd.Quadratic(TRIO, noise=0.3)
    run = dd.train(
        ALGORITHMS[name], problem, uneven(), updates=30, folder=tmp_path / "run", watch=dd.Reporting(progress=False)
    )
    assert run.version == 30 and run.ended == "updates"
    packed = {"dude int8": 2 + 8, "dude sparse": 8 + 4}  # two bytes and their step; the larger of two numbers and its place
    tensors = len(ALGORITHMS[name].shapes(run.x))
    assert set(run.trace.bytes.tolist()) == {packed.get(name, 16 * tensors)}
    assert (run.trace.time[1:] >= run.trace.time[:-1]).all()
    check_replay(run, tmp_path / "run", problem)


def test_a_run_that_time_ended_before_a_wake_goes_on_with_it(tmp_path):
    problem, folder = dd.Quadratic(PAIR, noise=0.3), tmp_path / "run"
    dd.train(dd.algorithms.FedFix(lr=0.1, period=0.1), problem, uneven(), time=0.95, folder=folder)
    run = dd.resume(folder, time=1.45, fleet=uneven())
    wakes = [event["time"] for event in run.trace.events if event["kind"] == "wake"]
    assert wakes == pytest.approx([0.1 * k for k in range(1, 15)], abs=0.01) and run.version >= 13
    check_replay(run, folder, problem)


@pytest.mark.numeric
def test_the_memory_at_the_server_and_at_the_workers_give_the_same_iterates():
    """And the run stops early by what its workers find."""
    problem = dd.Digits(workers=2)
    evaluation = dd.Evaluation(every=10, early_stop=dd.EarlyStop(target=2.0))
    run = dd.train(dd.DuDe(lr=0.1), problem, uneven(), updates=10**6, evaluation=evaluation)
    assert run.ended == "stop" and run.metrics.objective.min() <= 2.0
    order = Trace(dict(run.trace.columns), [])
    for memory in ("server", "workers"):
        algorithm = dd.DuDe(lr=0.1, memory=memory)
        loop = Loop(algorithm, problem, LocalFleet(problem, RecordedClock(order), Half(algorithm)), problem.start(0))
        loop.begin()
        while loop.fleet.peek() is not None:
            loop.advance()
        close = drift(run.version, 0.1, operations(problem), torch.float32)
        assert (loop.state.x - run.state.x).norm() <= close * run.state.x.norm()


def test_time_ends_a_run_and_metrics_of_the_user_are_measured_and_the_initial_weights_are_left_alone():
    start, evaluation = torch.ones(2, dtype=torch.float64), dd.Evaluation(seconds=1.0, metrics={"first": lambda x: x[0]})
    server = dd.Server(initial_weights=start)
    run = dd.train(
        dd.DuDe(lr=0.1), dd.Quadratic(PAIR, noise=0.3), fleet_of(), time=3.0, evaluation=evaluation, server=server
    )
    assert run.ended == "time" and run.time == 3.0 and 2.9 < run.trace.time[-1] <= 3.0
    assert run.metrics.time.tolist() == [0.0, 1.0, 2.0, 3.0] and kinds(run) == []
    assert (run.metrics["first"][0], run.metrics["first"][-1]) == (1.0, float(run.x[0]))
    assert start.tolist() == [1.0, 1.0] and not torch.equal(run.x, start)


def test_momentum_and_a_schedule_at_the_server_survive_a_stop_and_replay(tmp_path):
    problem = dd.Quadratic(PAIR, noise=0.3)
    server = dd.Server(optimizer="SGD[momentum=0.9]", schedule="StepLR[step_size=30,gamma=0.5]")
    dd.train(dd.DuDe(lr=0.02), problem, uneven(), updates=40, folder=tmp_path / "run", server=server)
    run = dd.resume(tmp_path / "run", updates=80, fleet=uneven())
    assert run.version == 80
    check_replay(run, tmp_path / "run", problem)


@pytest.mark.parametrize("table", ["half", "host"])
def test_how_gradients_are_kept_is_recorded_and_survives_a_stop_and_replay(table, tmp_path):
    """And a folder is not gone on with if they are to be kept otherwise."""
    problem, saving = dd.Digits(workers=2), dd.Saving(tmp_path / "run", go_on=True)
    dd.train(dd.DuDe(lr=0.1), problem, uneven(), updates=10, folder=saving, server=dd.Server(gradient_table=table))
    run = dd.resume(tmp_path / "run", updates=20, fleet=uneven())
    assert run.version == 20 and run.state.table_format == table
    assert {row.dtype for row in run.state.table} == {torch.bfloat16 if table == "half" else torch.float32}
    check_replay(run, tmp_path / "run", problem)
    with pytest.raises(dd.BadInput, match=f"another configuration .*table: {table} there, full now"):
        dd.train(dd.DuDe(lr=0.1), problem, uneven(), updates=20, folder=saving)


def test_the_threads_of_a_record_are_not_changed_at_a_resume(tmp_path):
    dd.train(dd.DuDe(lr=0.1), dd.Quadratic(PAIR), VirtualFleet(threads=2), updates=6, folder=tmp_path / "run")
    with pytest.raises(dd.BadInput, match="was started with real workers with threads=2"):
        dd.resume(tmp_path / "run", updates=12, fleet=VirtualFleet(threads=1))


# --- sites ---


class Site:
    """A shard function: site i has 20 (i + 1) samples; that of site 1 is missing while ``file`` is."""

    def __init__(self, file):
        self.file = file

    def __call__(self, worker):
        if worker == 1 and not self.file.exists():
            raise FileNotFoundError("no such file: site-1.csv")
        inputs = torch.randn(20 * (worker + 1), 4, generator=torch.Generator().manual_seed(worker)) + 10 * worker
        return inputs, (inputs.sum(1) > 40 * worker).long()


def sites(file):
    return dd.Network(small_net, cross_entropy, Site(file), workers=3, batch_size=4)


def test_a_site_without_its_file_and_functions_that_raise_are_named_in_the_result(tmp_path):
    steps = []

    def logger(version, values):
        steps.append(version)
        raise OSError("the disk of the board is full")

    def metric(model):
        raise ValueError("no such label")

    problem, watch = sites(tmp_path / "file"), dd.Reporting(log=[logger])
    evaluation = dd.Evaluation(every=20, metrics={"own": metric})
    fleet, folder = fleet_of(retries=1), tmp_path / "run"
    run = dd.train(dd.DuDe(lr=0.05), problem, fleet, updates=60, watch=watch, evaluation=evaluation, folder=folder)
    notes = "\n".join(run.notes)
    assert "worker 1" in notes and "FileNotFoundError: no such file: site-1.csv" in notes
    assert "the disk of the board is full" in notes and len(steps) == 1
    assert "no such label" in notes and "failed" in repr(run)
    assert run.faults == run.summary()["faults"] == {"failed": 2, "left": 1} and run.state.n == 2
    kept = json.loads((folder / "result.json").read_text())
    assert kept["notes"] == list(run.notes) and kept["faults"] == run.faults
    assert run.metrics.answered[-1] == 2.0 and set(run.workers.worker.tolist()) == {0, 2}


def test_a_site_that_was_mended_is_there_when_the_run_is_resumed(tmp_path):
    file, folder = Path(tmp_path / "file"), tmp_path / "run"
    run = dd.train(dd.DuDe(lr=0.05), sites(file), fleet_of(retries=0), updates=40, folder=folder)
    assert set(run.trace.worker.tolist()) == {0, 2} and run.faults == {"failed": 1, "left": 1}
    file.touch()
    again = dd.resume(folder, problem=sites(file), updates=60, fleet=fleet_of(retries=0))
    assert 1 in again.trace.worker[40:46].tolist() and again.state.n == 3  # it is started with the others
    check_replay(again, folder, sites(file))


def test_if_no_worker_can_compute_a_first_gradient_one_message_says_why():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    problem = dd.Network(
        model, cross_entropy, lambda worker: (torch.ones(9, 4), torch.ones(9).long()), workers=2, batch_size=4
    )
    with pytest.raises(dd.RunFailed, match=r"nobody could compute a first gradient; worker \d says: .*stochastic=True"):
        dd.train(dd.DuDe(lr=0.05), problem, fleet_of(), updates=40)

"""Real workers: the same algorithms, evaluated by the workers, recorded and replayed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dualdelay as dd
from dualdelay.engine.trace import Trace
from flat import train
from helpers import ROUNDED, drift
from real import Marked, Real, check, kinds, small_net

pytestmark = pytest.mark.usefixtures("ray_here")

TRIO = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
PAIR = TRIO[:2]


@pytest.mark.parametrize(
    ("algorithm", "centers"),
    [
        (dd.SyncSGD(lr=0.3), PAIR),
        (dd.DuDe(lr=0.1, memory="workers", wait_for=2, compress="int8"), TRIO),
        (dd.algorithms.MaleniaSGD(lr=0.1, gradients=6), PAIR),  # jobs done again, and cancelled
    ],
    ids=["sync", "dude", "malenia"],
)
def test_a_recorded_run_replays_to_the_same_bits(algorithm, centers, tmp_path):
    """Every other method does so by the virtual clock, and with real workers in the tests of what they do."""
    problem = Real(centers)
    run = dd.train(algorithm, problem, dd.RayFleet(), updates=60, folder=tmp_path / "run")
    assert run.version == 60 and run.ended == "updates"
    assert set(run.trace.worker.tolist()) == set(range(len(centers)))
    packed = getattr(algorithm, "compress", None) == "int8"
    assert set(run.trace.bytes.tolist()) == {2 + 8 if packed else 16}  # of two float64 a byte each, and the step
    assert (np.diff(run.trace.time) >= 0).all() and (run.trace.seconds > 0).all()
    check(run, tmp_path / "run", problem)


def test_a_run_that_time_ended_before_a_wake_goes_on_with_it(tmp_path):
    problem, folder = Real(PAIR), tmp_path / "run"
    dd.train(dd.algorithms.FedFix(lr=0.1, period=0.1), problem, dd.RayFleet(), time=0.95, folder=folder)
    run = dd.resume(folder, time=1.45, problem=problem)
    wakes = [event["time"] for event in run.trace.events if event["kind"] == "wake"]
    assert len([time for time in wakes if time > 0.95]) >= 3 and run.version >= 8
    check(run, folder, problem)


def test_the_memory_at_the_server_and_at_the_workers_give_the_same_iterates():
    """And the run stops early by what its workers find."""
    problem, stop = dd.Digits(workers=2), dd.EarlyStop(target=2.0)
    run = dd.train(
        dd.DuDe(lr=0.1), problem, dd.RayFleet(), updates=10**6, evaluation=dd.Evaluation(every=10, early_stop=stop)
    )
    assert run.ended == "stop" and run.metrics.objective.min() <= 2.0
    order = Trace(dict(run.trace.columns), [])
    for memory in ("server", "workers"):
        from dualdelay.engine.loop import Loop
        from dualdelay.simulation.clocks import RecordedClock
        from dualdelay.simulation.local_fleet import LocalFleet

        algorithm = dd.DuDe(lr=0.1, memory=memory)
        loop = Loop(algorithm, problem, LocalFleet(problem, RecordedClock(order), algorithm.message), problem.start(0))
        loop.begin()
        while loop.fleet.peek() is not None:
            loop.advance()
        close = drift(run.version, 0.1, 8, torch.float32)  # one that was lost would move them further at each update
        assert (loop.state.x - run.state.x).norm() <= close * run.state.x.norm()


def test_data_are_built_in_the_worker_alone_and_evaluated_there(tmp_path):
    shard, loss = Marked(str(tmp_path)), nn.functional.cross_entropy
    problem = dd.Network(small_net, loss, shard, workers=2, batch_size=16)
    fleet = dd.RayFleet()
    run = dd.train(dd.DuDe(lr=0.1), problem, fleet, updates=60, evaluation=dd.Evaluation(every=20), folder=tmp_path / "run")
    built = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert built == sorted(f"shard-{worker}-{pid}" for worker, (_, pid) in fleet.control.places.items())
    assert {0, 60} <= set(run.metrics.version.tolist()) <= {0, 20, 40, 60}  # one that is still under way lets the next pass
    assert run.metrics.share.tolist() == [1.0] * len(run.metrics) and run.metrics.answered.tolist() == [2.0] * len(
        run.metrics
    )
    assert run.metrics.objective[-1] < run.metrics.objective[0]
    exact = dd.Network(small_net, loss, [shard(worker) for worker in range(2)], batch_size=16).evaluate(run.x)
    assert run.metrics.objective[-1] == pytest.approx(exact["objective"], rel=ROUNDED)
    assert run.metrics.gradient_norm[-1] == pytest.approx(exact["gradient_norm"], rel=ROUNDED)
    assert run.workers.worker.tolist()[-2:] == [0, 1] and run.workers.loss[-2:].mean() == run.metrics.objective[-1]
    check(run, tmp_path / "run", problem)


def test_threads_are_set_in_the_workers_and_recorded(tmp_path):
    class Threads(Real):
        def gradient(self, x, worker, draw):
            return torch.full_like(x, 1.0), float(torch.get_num_threads())

    run = dd.train(
        dd.VanillaASGD(lr=0.1), Threads(PAIR), dd.RayFleet(threads=2, cpus=0.5), updates=6, folder=tmp_path / "r"
    )
    assert set(run.trace.loss.tolist()) == {2.0}
    check(run, tmp_path / "r", Threads(PAIR))
    with pytest.raises(dd.BadInput, match="was started with real workers with threads=2"):
        dd.resume(tmp_path / "r", updates=12, problem=Threads(PAIR), fleet=dd.RayFleet(threads=1))


def test_real_time_ends_a_run_and_metrics_of_ones_own_are_measured(tmp_path):
    """And what the model was at the start is left alone."""
    problem, start = Real(PAIR, pause=0.02), torch.tensor([1.0, 1.0], dtype=torch.float64)
    before, given = copy.deepcopy(start), {"start": start, "metrics": {"first": lambda x: x[0]}}
    run = train(dd.DuDe(lr=0.1), problem, dd.RayFleet(), time=3.0, evaluate_seconds=1.0, **given)
    assert run.ended == "time" and run.time == 3.0
    assert run.version > 5 and run.trace.time[-1] <= 3.0
    assert run.metrics.time.tolist()[:3] == [0.0, 1.0, 2.0]
    assert run.metrics["first"][-1] == pytest.approx(float(run.x[0])) and run.metrics["first"][0] == 1.0
    assert torch.equal(start, before) and not torch.equal(run.x, start)
    assert kinds(run) == []


def test_momentum_and_a_schedule_at_the_server_survive_a_stop_and_replay(tmp_path):
    problem = Real(PAIR)
    given = {"optimizer": "SGD[momentum=0.9]", "schedule": "StepLR[step_size=30,gamma=0.5]"}
    train(dd.DuDe(lr=0.02), problem, dd.RayFleet(), updates=40, folder=tmp_path / "run", **given)
    run = dd.resume(tmp_path / "run", updates=80, problem=problem)
    assert run.version == 80
    check(run, tmp_path / "run", problem)


def test_a_problem_that_cannot_be_sent_says_so():
    class Locked(Real):
        def __reduce__(self):
            raise TypeError("it holds a lock.")

    with pytest.raises(dd.BadInput, match=r"(?s)the problem cannot be sent to its workers: .*it holds a lock"):
        dd.train(dd.DuDe(lr=0.1), Locked(PAIR), updates=1)

"""Gradients computed ahead of time on several cores: the bits, the errors and the ends of a run on one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import dualdelay as dd
from dualdelay.simulation.cores import cores_worth
from own import Fresh, Jittered, Killed, Scenario, differences, kill_at, mlp, shards
from tables import ALGORITHMS, CASES, LR

pytestmark = pytest.mark.usefixtures("own_methods")

SPEEDS = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0], seed=5)


def net(batch_size: Any = 4) -> dd.Network:
    return dd.Network(mlp(), cross_entropy, shards(4), batch_size)


def on(cores: int, algorithm: Any, problem: dd.Problem, speeds: Any = SPEEDS, **options: Any) -> dd.Run:
    return dd.simulate(algorithm, problem, speeds, compute=dd.Compute(cores=cores), **options)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_number_of_cores_changes_no_bit(name: str) -> None:
    runs = {k: on(k, ALGORITHMS[name], net(), updates=9, evaluation=dd.Evaluation(every=6)) for k in (1, 3)}
    assert {k: differences(run, runs[1]) for k, run in runs.items()} == {k: [] for k in runs}


@pytest.mark.numeric
def test_local_steps_of_a_network_may_be_taken_on_several_cores() -> None:
    before, during = threading.active_count(), []
    watch = [lambda s, a: during.append(threading.active_count())]
    problem = dd.LocalSteps(net(), k=3, lr=0.1)
    alone = on(1, dd.DuDe(LR), problem, updates=12)
    assert differences(on(3, dd.DuDe(LR), problem, updates=12, watch=watch), alone) == []
    assert set(during) == {before + 2}


def test_jobs_that_are_cancelled_change_no_bit() -> None:
    alone = on(1, Fresh(LR), net(), updates=40)
    # every draw up to a worker's last was sent, so some that did not arrive were cancelled
    assert any(len(draws) < draws.max() + 1 for draws in (alone.trace.draw[alone.trace.worker == k] for k in range(4)))
    for cores in (2, 5):
        assert differences(on(cores, Fresh(LR), net(), updates=40), alone) == []


def test_workers_that_leave_and_join_change_no_bit() -> None:
    changes = (dd.speeds.leave(1, 4.0), dd.speeds.leave(0, 6.0), dd.speeds.join(1, 7.0))
    fleet = dd.SimulatedFleet(SPEEDS, changes=changes)
    alone = on(1, dd.DuDe(LR), net(), fleet, updates=40)
    assert [event["kind"] for event in alone.trace.events] == ["left", "left", "joined"]
    assert differences(on(3, dd.DuDe(LR), net(), fleet, updates=40), alone) == []


class Gaps(dd.Network):
    """Some gradients are not finite, two of a worker in a row."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient * torch.nan if worker and draw % 7 in (2, 3) else gradient), loss


@pytest.mark.parametrize("name", ["dude workers", "shuffled"])
def test_gradients_that_are_not_finite_are_retried_the_same(name: str) -> None:
    problem = Gaps(mlp(), cross_entropy, shards(4), 4)
    alone = on(1, ALGORITHMS[name], problem, updates=30)
    assert sum(event["kind"] == "rejected" for event in alone.trace.events) > 2
    assert differences(on(3, ALGORITHMS[name], problem, updates=30), alone) == []


class Breaks(dd.Network):
    """One job cannot be computed. This thread's first job waits for that one, so another thread has it."""

    bad: tuple[int, int] | None = None
    failed: threading.Event

    def arm(self, *bad: int) -> Breaks:
        self.bad, self.failed = bad, threading.Event()
        return self

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.bad == (worker, draw):
            self.failed.set()
            raise ValueError(f"no data in {threading.current_thread().name}")
        if self.bad is not None and threading.current_thread() is threading.main_thread():
            assert self.failed.wait(20)
        return super().gradient(x, worker, draw)


def test_an_error_in_another_thread_is_that_of_its_job_and_comes_when_it_is_due() -> None:
    before, seen = threading.enumerate(), []
    problem = Breaks(mlp(), cross_entropy, shards(4), 4).arm(3, 0)
    speeds = dd.FixedSpeeds([1.0, 1.5, 2.0, 3.2])
    with pytest.raises(dd.RunFailed, match=r"worker 3 could not compute its job number 0: no data in Thread-") as caught:
        on(2, dd.VanillaASGD(LR), problem, speeds, updates=50, watch=[lambda s, a: seen.append(a.worker)])
    assert isinstance(caught.value.__cause__, ValueError)
    assert seen == [0, 1, 2, 0, 1, 0]  # all that arrived before second 3.2
    assert threading.enumerate() == before


def test_an_error_in_a_job_that_is_cancelled_is_not_raised() -> None:
    """Worker 3's first job is cancelled after four updates; only the other thread was ever given it."""
    problem = Breaks(mlp(), cross_entropy, shards(4), 4).arm(3, 0)
    speeds = dd.FixedSpeeds([1.0, 1.0, 1.0, 50.0])
    run = on(2, Fresh(LR), problem, speeds, updates=12)
    assert problem.failed.is_set()
    assert differences(run, on(1, Fresh(LR), net(), speeds, updates=12)) == []


def raising(error: BaseException, at: int) -> Callable[[dd.State, dd.Arrival], None]:
    left = iter(range(at, -1, -1))

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if next(left) == 0:
            raise error

    return watch


@pytest.mark.parametrize("cores", [2, 5])
def test_a_run_leaves_no_threads_however_it_ends(cores: int, tmp_path: Path) -> None:
    before = threading.enumerate()
    during: list[int] = []
    on(cores, dd.DuDe(LR), net(), updates=5, watch=[lambda s, a: during.append(threading.active_count())])
    assert set(during) == {len(before) + cores - 1}
    assert threading.enumerate() == before
    for error in (KeyboardInterrupt(), ValueError("enough"), Killed()):
        with pytest.raises(type(error)):
            on(cores, dd.DuDe(LR), net(), updates=50, watch=[raising(error, 7)])
        assert threading.enumerate() == before
    with pytest.raises(dd.BadInput, match="no rule"):
        on(cores, Fresh(LR), net(), dd.SimulatedFleet(SPEEDS, changes=[dd.speeds.leave(1, 1.0)]), updates=5)
    assert threading.enumerate() == before
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        on(cores, dd.DuDe(LR), net(), updates=20, folder=folder, watch=[kill_at(9)])
    dd.resume(folder, problem=net(), cores=cores)
    dd.replay(folder, net())
    assert threading.enumerate() == before


class Plain(Dataset):
    """A map-style dataset that records which threads read it."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair, self.readers = pair, set()

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.readers.add(threading.current_thread())
        return self.pair[0][row], self.pair[1][row]


ALONE: dict[str, Callable[[], dd.Problem]] = {
    "chance": lambda: net(dd.Batches(4, stochastic=True)),
    "augmented data": lambda: dd.Network(
        mlp(), cross_entropy, list(map(Jittered, shards(4))), dd.Batches(4, stochastic=True)
    ),
    "dataset": lambda: dd.Network(mlp(), cross_entropy, [TensorDataset(*pair) for pair in shards(4)], 4),
    "quadratic": lambda: CASES["noisy"][0],
    "local steps": lambda: dd.LocalSteps(CASES["noisy"][0], k=2, lr=0.1),
    "local steps with chance": lambda: dd.LocalSteps(net(dd.Batches(4, stochastic=True)), k=2, lr=0.1),
}


@pytest.mark.parametrize("name", ALONE)
def test_problems_that_must_be_alone_use_one_core(name: str) -> None:
    before, during = threading.active_count(), []
    problem = ALONE[name]()
    alone = on(1, dd.DuDe(LR), problem, updates=6)
    watch = [lambda s, a: during.append(threading.active_count())]
    assert differences(on(4, dd.DuDe(LR), problem, updates=6, watch=watch), alone) == []
    assert set(during) == {before}


@pytest.mark.parametrize(
    ("seconds", "expected"), [([9, 1e-3], 1), ([9, 5e-3, 5e-3, 1e-3], 1), ([9, 5e-3, 5e-3, 5e-3], 4)], ids=str
)
def test_gradients_that_are_short_once_use_one_core(
    seconds: list[float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may take longer, and any on a busy machine."""
    now, durations = [0.0], iter(seconds)

    class Slow(dd.Quadratic):
        parallel = True

        def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
            now[0] += next(durations)
            return super().gradient(x, worker, draw)

    monkeypatch.setattr("dualdelay.simulation.cores.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    problem = Slow([[1.0], [2.0]])
    assert cores_worth(problem, None) == expected
    assert next(durations, None) is None


def test_datasets_that_a_function_builds_are_read_by_one_thread(tmp_path: Path) -> None:
    """As they would be if they were given; a run that is resumed builds them when they are first used."""
    built: list[Plain] = []

    def build(worker: int) -> Plain:
        built.append(Plain(shards(4)[worker]))
        return built[-1]

    def problem() -> dd.Network:
        return dd.Network(mlp(), cross_entropy, build, 4, workers=4)

    folder = tmp_path / "run"
    on(4, dd.DuDe(LR), problem(), updates=4, folder=folder)
    dd.resume(folder, updates=20, problem=problem(), cores=4)
    assert set().union(*(data.readers for data in built)) == {threading.main_thread()}


def test_tensors_that_a_function_builds_are_built_once_for_all_threads(tmp_path: Path) -> None:
    """The function draws from torch's global generator, which is seeded for it, and takes its time."""
    built: list[int] = []

    def build(worker: int) -> tuple[Tensor, Tensor]:
        built.append(worker)
        inputs = torch.randn(20, 6)
        time.sleep(0.02)
        return inputs + torch.randn(20, 6), torch.randint(3, (20,))

    def problem() -> dd.Network:
        return dd.Network(mlp(), cross_entropy, build, 4, workers=4)

    folder, evaluation = tmp_path / "run", dd.Evaluation(every=50)
    straight = on(1, dd.DuDe(LR), problem(), updates=12, evaluation=evaluation)
    on(1, dd.DuDe(LR), problem(), updates=2, evaluation=evaluation, folder=folder)
    built.clear()
    resumed = dd.resume(folder, updates=12, problem=problem(), cores=4)
    assert sorted(built) == [0, 1, 2, 3]
    assert torch.equal(resumed.x, straight.x)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["dude two", "shuffled"])
def test_a_run_may_go_on_with_another_number_of_cores(name: str, tmp_path: Path) -> None:
    scenario = Scenario(ALGORITHMS[name], net(), SPEEDS, updates=20, checkpoint_every=3)
    straight = scenario.run(tmp_path / "straight", compute=dd.Compute(cores=1))
    for first, second in ((1, 3), (3, 2)):
        folder = tmp_path / f"{first} {second}"
        scenario.killed(folder, 13, compute=dd.Compute(cores=first))
        assert differences(dd.resume(folder, problem=net(), cores=second), straight) == []
        assert torch.equal(dd.replay(folder, net()).x, straight.x)


def test_twins_share_data_and_no_weights() -> None:
    problem = net()
    twin = problem.twin()
    assert twin.net.weights.data_ptr() != problem.net.weights.data_ptr()
    assert twin.net.module is not problem.net.module
    assert twin.shards()[0].pair[0] is problem.shards()[0].pair[0]
    assert twin.fingerprint() == problem.fingerprint()
    x = problem.start(0)
    problem.gradient(x, 0, 0)
    twin.gradient(x + 1.0, 0, 0)
    assert torch.equal(problem.net.weights, x)


@pytest.mark.numeric
def test_two_threads_with_twins_compute_what_one_thread_does() -> None:
    problem = net()
    models = [problem.start(0) + k for k in (0.0, 0.5)]
    jobs = [(worker, draw) for draw in range(40) for worker in range(4)]
    expected = [[problem.gradient(x, *job) for job in jobs] for x in models]
    computed: list[list[tuple[Tensor, float]]] = [[], []]
    gate = threading.Barrier(2)

    def work(which: int, twin: dd.Network) -> None:
        torch.set_num_threads(1)
        gate.wait()
        for job in jobs:
            computed[which].append(twin.gradient(models[which], *job))

    threads = [threading.Thread(target=work, args=(k, problem.twin())) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for beside, alone in zip(computed, expected, strict=True):
        for (gradient, loss), (expected_gradient, expected_loss) in zip(beside, alone, strict=True):
            assert torch.equal(gradient, expected_gradient) and loss == expected_loss

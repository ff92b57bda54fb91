"""Bits depend on what was asked, never on the moment: not on cores, folders, loggers, or what other threads do."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.devices import in_new_thread, use_threads, using_precision, using_threads
from dualdelay.problems.data import Shard
from dualdelay.problems.flat_module import FlatModule
from own import differences, mlp, shards

# In a new process torch has as many threads as there are cores, and has computed in no thread yet.
FRESH = """
import sys, torch
import dualdelay as dd
torch.set_num_threads(2)
speeds, compute = dd.TruncatedNormalSpeeds(10, std=5.0), dd.Compute(cores=2)
dd.simulate(dd.DuDe(lr=0.05, wait_for=2), dd.Digits(10, 0.1), speeds, updates=60, compute=compute, folder=sys.argv[1])
assert torch.get_num_threads() == 2
"""


def test_cores_and_a_folder_change_no_bit_in_a_new_process(tmp_path: Path) -> None:
    """A helping thread's first gradient must not take the number of threads that the process has."""
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path / "run")], check=True, timeout=300)
    speeds, compute = dd.TruncatedNormalSpeeds(10, std=5.0), dd.Compute(cores=1)
    alone = dd.simulate(dd.DuDe(lr=0.05, wait_for=2), dd.Digits(10, 0.1), speeds, updates=60, compute=compute)
    assert torch.equal(dd.load(tmp_path / "run").x, alone.x)


def test_threads_are_set_for_one_thread_alone() -> None:
    usual = in_new_thread(torch.get_num_threads)
    with using_threads(3):
        assert torch.get_num_threads() == 3
        assert in_new_thread(torch.get_num_threads) == usual
    assert torch.get_num_threads() == 1  # of the tests

    def set_to_5() -> int:
        use_threads(5)
        torch.ones(300, 300) @ torch.ones(300, 300)  # at its first computation torch would take the process's number
        return torch.get_num_threads()

    assert in_new_thread(set_to_5) == 5
    assert in_new_thread(torch.get_num_threads) == usual


def test_a_function_that_changes_torchs_threads_changes_no_bit() -> None:
    problem, speeds = dd.Network(nn.Linear(600, 3), cross_entropy, wide(), 64), dd.FixedSpeeds([1.0, 2.0])
    straight = dd.simulate(dd.DuDe(0.1), problem, speeds, updates=12)
    watch = [lambda s, a: torch.set_num_threads(3)]
    assert differences(dd.simulate(dd.DuDe(0.1), problem, speeds, updates=12, watch=watch), straight) == []
    assert torch.get_num_threads() == 1


def wide() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(4)
    return [(torch.randn(200, 600, generator=rng), torch.randint(3, (200,), generator=rng)) for _ in range(2)]


def dropout() -> dd.Network:
    return dd.Network(mlp(nn.Dropout(0.3)), cross_entropy, shards(), dd.Batches(8, stochastic=True))


def drifting() -> dd.SpeedModel:
    return dd.speeds.DriftingSpeeds(
        dd.speeds.BurstySpeeds(dd.TruncatedNormalSpeeds(3, std=2.0), usual=3.0, burst=1.0), every=0.3
    )


SHARED: dict[str, Callable[[], tuple[dd.Problem, dd.SpeedModel]]] = {
    "a network": lambda: (dd.Network(mlp(), cross_entropy, shards(), 8), drifting()),
    "local steps on it": lambda: (dd.LocalSteps(dd.Network(mlp(), cross_entropy, shards(), 8), 2, 0.1), drifting()),
    "dropout": lambda: (dropout(), drifting()),
}


@pytest.mark.parametrize("name", SHARED)
def test_runs_in_several_threads_change_no_bit_of_one_another_and_leave_the_generators(name: str) -> None:
    problem, speeds = SHARED[name]()
    methods = [dd.DuDe(0.05), dd.VanillaASGD(0.05), dd.UniformASGD(0.05)]
    alone = [dd.simulate(method, problem, speeds, updates=60, seed=3) for method in methods]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    problem, speeds = SHARED[name]()
    beside: dict[int, dd.Run] = {}
    gate = threading.Barrier(len(methods))

    def work(k: int) -> None:
        gate.wait()
        beside[k] = dd.simulate(methods[k], problem, speeds, updates=60, seed=3, compute=dd.Compute(cores=1 + k % 2))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [differences(beside[k], alone[k]) for k in range(len(methods))] == [[]] * len(methods)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_simulation_that_draws_nothing_leaves_the_main_thread_s_generator_alone() -> None:
    """The main thread draws meanwhile, and draws what it would have drawn."""
    torch.manual_seed(5)
    expected = [torch.rand(3) for _ in range(200)]
    torch.manual_seed(5)
    problem, speeds = dd.Network(mlp(), cross_entropy, shards(), 8), dd.FixedSpeeds([1.0, 2.0, 3.0])
    thread = threading.Thread(
        target=lambda: dd.simulate(dd.DuDe(0.05), problem, speeds, updates=80, evaluation=dd.Evaluation(every=1))
    )
    thread.start()
    drawn = [torch.rand(3) for _ in range(200)]
    thread.join()
    assert all(map(torch.equal, drawn, expected))


def test_runs_in_several_threads_must_agree_on_a_gpu_s_precision_and_leave_it() -> None:
    switches = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with using_precision("cuda", "float32"):
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)
        with using_precision("cuda", "float32"):
            pass
        assert not torch.backends.cudnn.allow_tf32  # the other run goes on
        with (
            pytest.raises(dd.BadInput, match="'tf32', but a run in another thread of this process computes in 'float32'"),
            using_precision("cuda", "tf32"),
        ):
            pass
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == switches


def test_a_batch_of_several_workers_is_not_seen_before_it_is_whole() -> None:
    """Another thread may ask for it while it is put together."""
    problem = dd.Network(mlp(), cross_entropy, shards(), 8)
    parts, meanwhile = problem.shards(), list[int]()

    class Asking(Shard):
        def batch(self, rows: Tensor) -> object:
            if not meanwhile:
                meanwhile.append(0)
                meanwhile.append(len(problem._shards.merged(parts, 2048)))
            return super().batch(rows)

    parts[0].__class__ = Asking
    assert len(problem._shards.merged(parts, 2048)) == 1 and meanwhile == [0, 1]


def test_a_twin_made_while_another_thread_evaluates_is_in_training_mode() -> None:
    net = FlatModule(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    with net.evaluating(net.weights):
        net.module.training = True  # as where an evaluation ends
        twins = [net.on("cpu"), pickle.loads(pickle.dumps(net))]
    assert all(part.training for twin in twins for part in twin.module.modules())

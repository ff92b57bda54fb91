"""pfl: synchronous federated averaging on its simulated backend, a cohort of all ten clients, one local step.

python benchmarks/peers/pfl_sync.py
torchrun --nproc_per_node 2 benchmarks/peers/pfl_sync.py    # the cohort shared by two processes, one thread each
"""

from __future__ import annotations

import importlib.metadata
import time

import torch
from common import BATCH, CLIENTS, LR, LeNet, compare, options, shards
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy


class Module(LeNet):
    """The model with the two methods that pfl asks for."""

    def loss(self, inputs, targets):
        return cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets):
        return {"loss": Weighted(self.loss(inputs, targets).item() * len(inputs), len(inputs))}


class Clock(TrainingProcessCallback):
    """Notes when each round ends: pfl evaluates in the first round, which is therefore not timed."""

    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        return False, Metrics()


def timed(updates: int, threads: int) -> float:
    torch.set_num_threads(threads)
    users = {client: Dataset(raw_data=list(pair), user_id=client) for client, pair in enumerate(DATA)}
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    module, clock, rounds = Module(), Clock(), updates // CLIENTS
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=CLIENTS,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=None, local_learning_rate=LR, local_batch_size=BATCH, local_num_steps=1),
        NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[clock],
    )
    assert len(clock.times) == rounds + 1
    return clock.times[-1] - clock.times[0]


def main() -> None:
    version, kind = importlib.metadata.version("pfl"), "synchronous, no clock"
    for threads in (1, 2):
        name = f"pfl, {'one thread' if threads == 1 else 'two threads'}"
        compare(name, version, kind, lambda updates, t=threads: timed(updates, t), GIVEN)


def main_of_two() -> None:
    """The first process says how many updates come next, zero at the end; the second follows."""
    count = torch.zeros((), dtype=torch.int64)

    def run(updates: int) -> float:
        torch.distributed.broadcast(count.fill_(updates), 0)
        return timed(updates, threads=1) if updates else 0.0

    if torch.distributed.get_rank() == 0:
        version = importlib.metadata.version("pfl")
        compare("pfl, two processes", version, "synchronous, no clock", run, GIVEN)
        run(0)
        return
    while True:
        torch.distributed.broadcast(count, 0)
        if not count:
            return
        timed(int(count), threads=1)


if __name__ == "__main__":
    GIVEN, DATA = options(), shards()
    main_of_two() if torch.distributed.is_initialized() else main()

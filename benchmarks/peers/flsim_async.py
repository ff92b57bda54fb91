"""FLSim: its asynchronous trainer, in virtual time, with about ten clients in flight.

python benchmarks/peers/flsim_async.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import os
import time

import torch
from common import CLIENTS, LR, LeNet, compare, minibatch, options, shards
from torch.nn.functional import cross_entropy

# FLSim 0.1.0 gives dataclasses as defaults of dataclass fields, which Python 3.11 refuses for classes without a hash:
# "mutable default <class 'flsim...'> for field ... is not allowed". With a hash they are accepted, as in Python 3.10.
dataclass = dataclasses.dataclass


def with_hash(cls=None, /, **options):
    if cls is None:
        return lambda later: with_hash(later, **options)
    return dataclass(cls, **options, **({"unsafe_hash": True} if cls.__module__.startswith("flsim") else {}))


dataclasses.dataclass = with_hash
from flsim.clients.base_client import ClientConfig
from flsim.data.data_provider import FLDataProviderFromList, FLUserDataFromList
from flsim.interfaces.batch_metrics import IFLBatchMetrics
from flsim.interfaces.model import IFLModel
from flsim.optimizers.async_aggregators import FedAvgWithLRAsyncAggregatorConfig
from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig
from flsim.trainers.async_trainer import AsyncTrainer, AsyncTrainerConfig
from flsim.utils.async_trainer.training_event_generator import (
    AsyncTrainingEventGeneratorConfig,
    PoissonAsyncTrainingStartTimeDistrConfig,
)
from flsim.utils.timing.training_duration_distribution import (
    PerUserHalfNormalDurationDistributionConfig,
)
from omegaconf import OmegaConf

dataclasses.dataclass = dataclass


class Model(IFLModel):
    """What FLSim asks of a model, over the LeNet."""

    def __init__(self):
        self.module = LeNet()

    def fl_forward(self, batch):
        return Loss(cross_entropy(self.module(batch[0]), batch[1]), len(batch[0]))

    def fl_get_module(self):
        return self.module

    def fl_create_training_batch(self, batch):
        return batch

    def fl_cuda(self):
        self.module.cuda()

    def get_eval_metrics(self, batch):
        return self.fl_forward(batch)

    def get_num_examples(self, batch):
        return len(batch[0])


class Loss(IFLBatchMetrics):
    """The loss of a minibatch and its size; nothing else is asked for without a metrics reporter."""

    loss = num_examples = predictions = targets = model_inputs = None

    def __init__(self, loss, size):
        self.loss, self.num_examples = loss, size


class Client(FLUserDataFromList):
    """FLSim trains on all of a client's batches: one fresh minibatch is therefore all it is given."""

    def __init__(self, pair):
        super().__init__([minibatch(*pair)], Model())
        self.pair = pair

    def train_data(self):
        yield minibatch(*self.pair)


def timed(updates: int, threads: int) -> float:
    torch.set_num_threads(threads)
    config = AsyncTrainerConfig(
        epochs=updates / CLIENTS,  # an epoch is as many updates as there are clients
        aggregator=FedAvgWithLRAsyncAggregatorConfig(lr=1.0),
        training_event_generator=AsyncTrainingEventGeneratorConfig(
            training_start_time_distribution=PoissonAsyncTrainingStartTimeDistrConfig(training_rate=12.5),
            duration_distribution_generator=PerUserHalfNormalDurationDistributionConfig(
                training_duration_sd=1.0, training_duration_min=0.001
            ),
        ),
        client=ClientConfig(epochs=1, optimizer=LocalOptimizerSGDConfig(lr=LR)),
        do_eval=False,
        report_train_metrics=False,
        always_keep_trained_model=True,
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(io.StringIO()):
        trainer = AsyncTrainer(model=Model(), **OmegaConf.structured(config))
        begin = time.perf_counter()
        trainer.train(DATA, None, CLIENTS)
        seconds = time.perf_counter() - begin
    assert trainer.aggregator.global_seqnum == updates, trainer.aggregator.global_seqnum
    return seconds


if __name__ == "__main__":
    GIVEN, DATA = options(), FLDataProviderFromList([], [], [], Model())
    DATA._train_users = {client: Client(pair) for client, pair in enumerate(shards())}
    version = importlib.metadata.version("flsim")
    for threads in (1, 2):
        name = f"FLSim, {'one thread' if threads == 1 else 'two threads'}"
        compare(name, version, "asynchronous, virtual time", lambda updates, t=threads: timed(updates, t), GIVEN)

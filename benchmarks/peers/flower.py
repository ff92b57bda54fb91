"""Flower: its simulation engine on Ray, federated averaging of all ten clients each round, one local step.

python benchmarks/peers/flower.py
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import time
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the Ray actors

import torch
from common import CLIENTS, LR, LeNet, compare, minibatch, options, plain, shards
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

client_app, server_app = ClientApp(), ServerApp()
CORES = 2


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = LeNet()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = minibatch(*shards()[context.node_config["partition-id"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(inputs)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    def timed(updates: int) -> float:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        begin = time.perf_counter()
        result = strategy.start(grid, ArrayRecord(LeNet().state_dict()), num_rounds=updates // CLIENTS)
        seconds = time.perf_counter() - begin
        assert len(result.train_metrics_clientapp) == updates // CLIENTS
        return seconds

    version, kind = importlib.metadata.version("flwr"), "synchronous, real time"
    compare("Flower, Ray on two cores", version, kind, timed, GIVEN)
    grid.pull_interval = 0.001  # seconds between two looks for replies: 0.1 by default
    compare("Flower, the same, asking for replies more often", version, kind, timed, GIVEN)


if __name__ == "__main__":
    GIVEN = options()
    print(f"plain loop before Ray starts: {plain(shards(), GIVEN.seconds / 2):.1f} per second", file=sys.stderr)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    settings = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": CORES, "include_dashboard": False}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=settings)

"""APPFL: its virtual-time simulation of FedAsync, with the memory option off and on.

python benchmarks/peers/appfl_vsim.py
"""

from __future__ import annotations

import importlib.metadata
import logging
import tempfile
import time
from pathlib import Path

import torch
from common import BATCH, CLIENTS, LR, compare, options

# APPFL and its dependency piq import torchvision, whose compiled part from PyPI does not load beside torch for processors
# alone: "operator torchvision::nms does not exist". Declared here, the import works; nothing of torchvision is called.
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from appfl.agent import ClientAgent, ServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile
from omegaconf import OmegaConf


def simulation(optimize_memory: bool, folder: str) -> AsyncSimDriver:
    memory = {"optimize_memory": optimize_memory}
    parts, model = (str(Path(__file__).with_name(name)) for name in ("appfl_parts.py", "common.py"))
    server = {
        "client_configs": {
            "train_configs": {
                "trainer": "VanillaTrainer",
                "mode": "step",
                "num_local_steps": 1,
                "optim": "SGD",
                "optim_args": {"lr": LR},
                "loss_fn": "CrossEntropyLoss",
                "metric_path": parts,
                "metric_name": "accuracy",
                "train_batch_size": BATCH,
                "do_validation": False,
                "logging_output_dirname": folder,
                **memory,
            },
            "model_configs": {"model_path": model, "model_name": "LeNet"},
        },
        "server_configs": {
            "num_clients": CLIENTS,
            "num_global_epochs": 0,
            "scheduler": "AsyncScheduler",
            "scheduler_kwargs": {"num_clients": CLIENTS, **memory},
            "aggregator": "FedAsyncAggregator",
            "aggregator_kwargs": {"num_clients": CLIENTS, "alpha": 0.9, "staleness_fn": "constant", **memory},
            "logging_output_dirname": folder,
            **memory,
        },
    }
    agent = ServerAgent(OmegaConf.create(server))
    clients = []
    for client in range(CLIENTS):
        config = {
            "client_id": f"client{client}",
            "train_configs": {"logging_output_dirname": folder},
            "data_configs": {
                "dataset_path": parts,
                "dataset_name": "client_data",
                "dataset_kwargs": {"client": client},
            },
            **memory,
        }
        clients.append(ClientAgent(OmegaConf.create(config)))
        clients[-1].load_config(agent.get_client_configs())
    factors = torch.randn(CLIENTS, generator=torch.Generator().manual_seed(0)).abs() + 0.1
    profiles = {client.get_id(): ClientProfile(float(factor)) for client, factor in zip(clients, factors, strict=True)}
    quiet = logging.getLogger("quiet")
    return AsyncSimDriver(agent, clients, profiles, CLIENTS, quiet, base_step_time=1.0)


def timed(driver: AsyncSimDriver, updates: int, threads: int) -> float:
    torch.set_num_threads(threads)
    driver.server.server_agent_config.server_configs.num_global_epochs += updates
    done, begin = len(driver.history), time.perf_counter()
    driver.run()
    seconds = time.perf_counter() - begin
    assert len(driver.history) == done + updates
    return seconds


if __name__ == "__main__":
    GIVEN = options()
    logging.disable(logging.INFO)  # a line per event costs time that has nothing to do with the simulation
    version, kind = importlib.metadata.version("appfl"), "asynchronous, virtual time"
    with tempfile.TemporaryDirectory() as folder:
        for memory, threads in ((False, 1), (False, 2), (True, 1)):
            driver = simulation(memory, folder)
            name = f"APPFL, {'one thread' if threads == 1 else 'two threads'}, optimize_memory {'on' if memory else 'off'}"
            compare(name, version, kind, lambda updates, d=driver, t=threads: timed(d, updates, t), GIVEN)

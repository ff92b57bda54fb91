"""Updates per second of real workers, over those of the asynchronous parameter server of Ray's documentation.

    python benchmarks/ray_updates.py                       # all cases, about fifteen minutes on two cores
    python benchmarks/ray_updates.py --cases 1M --workers 2 --rounds 5
    python benchmarks/ray_updates.py --cases 10M --workers 2 --profile

The idiom: an actor that holds the weights, with ``apply_gradients`` and ``get_weights``, actors with ``compute_gradients``,
and a driver that waits for the next gradient. It is written here as there: weights are a state dict of CPU tensors,
gradients a list of numpy arrays, the step is torch.optim's SGD. Nothing is checked, written down or saved. Both sides do
the same work with one thread in each process: a LeNet on random images of CIFAR's shape, batch 64, or a constant gradient
of a million or ten million float32 numbers, where only the server and the transport count. Each round runs the idiom,
vanilla and DuDe in turn; the ratio of each round is taken before the median. Only the updates between a first and a last
one are timed, so neither the start of processes nor the evaluations at both ends count.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.workers.ray_fleet import staying_here
from dualdelay.workers.security import own_token

BATCH, IMAGES = 64, 2000
WEIGHTS = {"1M": 1_000_000, "10M": 10_000_000}
UPDATES = {"lenet": (60, 360), "1M": (60, 560), "10M": (20, 120)}  # the first and the last that are timed
TARGETS = {"lenet": (1.0, 1.0), "1M": (2.0, 1.6), "10M": (3.0, 2.0)}  # of vanilla and of DuDe
LR = 1e-6


@contextmanager
def ray_here(cpus: int) -> Iterator[None]:
    """A Ray of our own on this machine alone, which runs in between then share."""
    own_token()
    with staying_here(True):
        ray.init("local", _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=cpus, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def lenet() -> nn.Module:
    """A network of 62,006 weights."""
    convolutions = (nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    )


def images(worker: int) -> tuple[Tensor, Tensor]:
    """Random data of CIFAR's shape."""
    generator = torch.Generator().manual_seed(worker)
    return torch.rand(IMAGES, 3, 32, 32, generator=generator), torch.randint(10, (IMAGES,), generator=generator)


@dataclass
class Constant(dd.Problem):
    """A gradient that costs nothing."""

    workers: int
    weights: int
    seed: int = 0
    given: Tensor | None = None

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.weights)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.given is None:
            self.given = torch.full((self.weights,), 0.5)
        return self.given, 0.0

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": 0.0, "pooled_loss": math.nan, "accuracy": math.nan, "gradient_norm": math.nan}

    def fingerprint(self) -> str:
        return f"constant {self.weights}"


class Vector(nn.Module):
    """The weights of a constant gradient, as a module."""

    def __init__(self, weights: int) -> None:
        """So many zeros."""
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(weights))


def module(case: str) -> nn.Module:
    torch.set_num_threads(1)
    return lenet() if case == "lenet" else Vector(WEIGHTS[case])


def read_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


class ParameterServer:
    """The idiom's server."""

    def __init__(self, case: str) -> None:
        """A model and its optimizer."""
        self.model = module(case)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def apply_gradients(self, *gradients: list[np.ndarray]) -> dict[str, Tensor]:
        summed = [np.stack(parts).sum(axis=0) for parts in zip(*gradients, strict=True)]
        self.optimizer.zero_grad()
        for gradient, parameter in zip(summed, self.model.parameters(), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        self.optimizer.step()
        return read_weights(self.model)

    def get_weights(self) -> dict[str, Tensor]:
        return read_weights(self.model)


class DataWorker:
    """The idiom's worker."""

    def __init__(self, case: str, worker: int) -> None:
        """A model, and data of its own."""
        self.model = module(case)
        self.constant = None if case == "lenet" else [np.full(WEIGHTS[case], 0.5, np.float32)]
        self.data = images(worker) if case == "lenet" else None
        self.generator = torch.Generator().manual_seed(worker)

    def compute_gradients(self, weights: dict[str, Tensor]) -> list[np.ndarray]:
        self.model.load_state_dict(weights)
        if self.data is None:
            return self.constant
        rows = torch.randint(IMAGES, (BATCH,), generator=self.generator)
        self.model.zero_grad()
        cross_entropy(self.model(self.data[0][rows]), self.data[1][rows]).backward()
        return [parameter.grad.data.cpu().numpy() for parameter in self.model.parameters()]


def idiom(case: str, count: int) -> float:
    """Updates per second of the documentation's asynchronous parameter server."""
    first, last = UPDATES[case]
    server = ray.remote(ParameterServer).options(num_cpus=1).remote(case)
    workers = [ray.remote(DataWorker).options(num_cpus=1).remote(case, worker) for worker in range(count)]
    current = server.get_weights.remote()
    gradients = {worker.compute_gradients.remote(current): worker for worker in workers}
    begin = 0.0
    for update in range(1, last + 1):
        ready = ray.wait(list(gradients))[0][0]
        worker = gradients.pop(ready)
        current = server.apply_gradients.remote(ready)
        gradients[worker.compute_gradients.remote(current)] = worker
        if update == first:
            begin = time.perf_counter()
    spent = time.perf_counter() - begin
    for actor in (server, *workers):
        ray.kill(actor)
    return (last - first) / spent


def ours(method: Callable[..., Any], case: str, count: int, profile: bool = False) -> float:
    """Updates per second of this package."""
    first, last = UPDATES[case]
    if case == "lenet":
        problem: dd.Problem = dd.Network(lenet, cross_entropy, images, BATCH, workers=count, full_gradient=False)
    else:
        problem = Constant(count, WEIGHTS[case])
    moments, profiler = {}, cProfile.Profile()

    def watch(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version in (first, last):
            moments.setdefault(state.version, time.perf_counter())
            if profile:
                (profiler.enable if state.version == first else profiler.disable)()

    dd.train(method(lr=LR), problem, dd.RayFleet(), updates=last + 1, evaluation=dd.Evaluation(every=10**9), watch=[watch])
    if profile:
        print(f"\n{method.__name__}, {case}, {count} workers: {last - first} updates on the server")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)
    return (last - first) / (moments[last] - moments[first])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(UPDATES), choices=list(UPDATES))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="only say where the server's time goes")
    options = parser.parse_args()
    methods = (dd.VanillaASGD, dd.DuDe)
    lines = []
    with ray_here(max(options.workers) + 1):
        for case in options.cases:
            for count in options.workers:
                if options.profile:
                    for method in methods:
                        ours(method, case, count, profile=True)
                    continue
                turns = []
                for _ in range(options.rounds):
                    turns.append((idiom(case, count), *(ours(method, case, count) for method in methods)))
                    print(f"{case}, {count} workers: " + ", ".join(f"{rate:.1f}" for rate in turns[-1]), flush=True)
                middle = statistics.median(turn[0] for turn in turns)
                for column, (method, target) in enumerate(zip(methods, TARGETS[case], strict=True), 1):
                    rate = statistics.median(turn[column] for turn in turns)
                    ratios = [turn[column] / turn[0] for turn in turns]
                    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
                    name, ratio = method.__name__, statistics.median(ratios)
                    lines.append(
                        f"{case:6} {count:7d}  {name:12} {middle:8.1f} {rate:8.1f}  {ratio:5.2f} {target:7.1f}  {each}"
                    )
    if lines:
        print("\ncase   workers  method          idiom     ours  ratio  target  of each round (updates per second)")
        print("\n".join(lines))


if __name__ == "__main__":
    main()

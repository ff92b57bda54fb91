"""A sharded server against one in a single process: updates per second, memory of each process, the head's own time.

    python benchmarks/shards.py speed                 # 10 M weights, 4 workers, no shards, 1 and 2: about five minutes
    python benchmarks/shards.py speed --by-ray        # the same without shared memory, as between machines
    python benchmarks/shards.py memory                # the same on two raylets: memory of every process of the server
    python benchmarks/shards.py head                  # the head's time per arrival for 2 to 64 workers, 1 to 8 shards
    python benchmarks/shards.py large --weights 1e9   # 1 G weights through an object store of 2 GB, vanilla, one worker

Gradients are constant, so that only the server and the transport count. Updates are timed between a first and a last one.
Memory is what a process has grown by since its first slice or model was there: a Python with torch and Ray takes about
300 MB by itself. The head's time is that of its thread, per arrival.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.theory.machine import ConstantGradient
from dualdelay.workers.ray_fleet import staying_here
from dualdelay.workers.security import own_token

NEVER = dd.Evaluation(every=10**9)


class Weightless(ConstantGradient):
    """The same by a vector that takes no memory, where there is none to spare."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return torch.full((1,), 0.5).expand(self.weights), 0.0


def rss(pid: int | str = "self") -> int:
    """The bytes that a process has in memory, shared ones included."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


class Peaks:
    """The most that processes have grown by while this lasts."""

    def __init__(self, control: dd.FleetControl) -> None:
        """Of this process, and of the shards once they are there."""
        self.control, self.first, self.most = control, {"head": rss()}, dict[str, int]()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self.over.wait(0.05):
            pids: Mapping[str, Any] = {"head": "self", **{f"shard {k}": pid for k, (_, pid) in self.control.shards.items()}}
            for name, pid in pids.items():
                try:
                    now = rss(pid)
                except (OSError, KeyError):
                    continue
                self.first.setdefault(name, now)
                self.most[name] = max(self.most.get(name, 0), now - self.first[name])

    def __enter__(self) -> Peaks:
        """Begin to look."""
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more."""
        self.over.set()
        self.thread.join()


def rate(run: dd.Run, first: int) -> float:
    """Updates per second after the first ones."""
    after, times = run.trace.after, run.trace.time
    start = int((after >= first).argmax())
    return float((after[-1] - after[start]) / (times[-1] - times[start]))


def train(method: dd.Algorithm[Any], problem: dd.Problem, fleet: dd.RayFleet, updates: int, **options: Any) -> dd.Run:
    log = options.pop("log", ())
    reporting = dd.Reporting(log=log, progress=False)
    return dd.train(method, problem, fleet, updates=updates, evaluation=NEVER, watch=reporting, **options)


def speed(weights: int, workers: int, rounds: int, updates: int, shared: bool) -> None:
    how = "in shared memory" if shared else "by Ray alone"
    print(f"updates per second, DuDe, {weights:,} weights, {workers} workers, {os.cpu_count()} cores, vectors {how}")
    rates: dict[int, list[float]] = {0: [], 1: [], 2: []}
    problem = ConstantGradient(workers, weights)
    for number in range(rounds):
        for shards in rates:
            fleet = dd.RayFleet(cpus=0.25, shards=shards or None, shared_memory=shared)
            rates[shards].append(rate(train(dd.DuDe(lr=1e-6), problem, fleet, updates), updates // 5))
        print(f"round {number}: " + ", ".join(f"{k or 'no'} shards {v[-1]:.1f}" for k, v in rates.items()), flush=True)
    for shards in (1, 2):
        ratios = [many / one for many, one in zip(rates[shards], rates[0], strict=True)]
        print(f"{shards} shards over none: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


@contextmanager
def raylets(count: int, cpus: int, store: int | None = None) -> Iterator[str]:
    """A cluster of several raylets on this machine, at 127.0.0.1 alone."""
    import ray
    from ray.cluster_utils import Cluster

    own_token()
    with staying_here(True):
        cluster = Cluster()
        for _ in range(count):
            cluster.add_node(num_cpus=cpus, node_ip_address="127.0.0.1", object_store_memory=store)
        ray.init(cluster.address, log_to_driver=True, configure_logging=False)
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def memory(weights: int, workers: int, shards: int, updates: int) -> None:
    problem = ConstantGradient(workers, weights)
    control = dd.FleetControl()
    with Peaks(control) as whole:
        train(dd.DuDe(lr=1e-6), problem, dd.RayFleet(cpus=0.25, control=control), updates)
    allowed = whole.most["head"] / shards + 100e6
    print(f"memory, DuDe, {weights:,} weights, {workers} workers: one server {whole.most['head'] / 1e6:.0f} MB")
    with raylets(shards, workers + shards) as address:
        control = dd.FleetControl()
        with Peaks(control) as cut:
            fleet = dd.RayFleet(address=address, cpus=0.25, shards=shards, control=control)
            train(dd.DuDe(lr=1e-6), problem, fleet, updates)
        nodes = {node for node, _ in control.shards.values()}
    for name, most in sorted(cut.most.items()):
        print(f"  {name}: {most / 1e6:.0f} MB, allowed {allowed / 1e6:.0f}")
    print(f"  shards on {len(nodes)} raylets")


def head(most_workers: int, most_shards: int, updates: int) -> None:
    print("microseconds of the head's thread per arrival, DuDe, 100,000 weights")
    for workers, shards in [(4, 1), (4, 2), (4, most_shards), (2, 2), (16, 2), (most_workers, 2)]:
        seen: list[tuple[int, float]] = []

        def look(version: int, values: Mapping[str, float], seen: list[tuple[int, float]] = seen) -> None:
            seen.append((version, time.thread_time()))

        problem = ConstantGradient(workers, 100_000)
        fleet = dd.RayFleet(cpus=0.01, shards=shards, faults=dd.FaultPolicy(patience=600))
        train(dd.DuDe(lr=1e-6), problem, fleet, updates, log=[look])
        if len(seen) < 4:
            raise SystemExit(f"{updates} updates were over before two readings between the ends; give more --updates.")
        (first, begin), (last, end) = seen[1], seen[-2]
        print(f"  {workers:3d} workers, {shards} shards: {1e6 * (end - begin) / (last - first):.0f}", flush=True)


def large(weights: int, store: int, updates: int) -> None:
    begin = time.perf_counter()
    fleet = dd.RayFleet(cpus=0.5, shards=1, store=store, shared_memory=False)
    run = train(dd.VanillaASGD(lr=1e-6), Weightless(1, weights), fleet, updates)
    expected = torch.zeros(1)
    for _ in range(run.version):
        expected = torch.add(expected, torch.full((1,), 0.5), alpha=-1e-6)
    right = bool((run.x == expected).all())
    took = time.perf_counter() - begin
    print(
        f"{weights:,} weights ({4 * weights / 1e9:.1f} GB) through a store of {store / 1e9:.1f} GB: {run.version} updates"
    )
    print(f"in {took:.0f} s, {run.time / max(1, run.version):.1f} s each; every weight is as it must be: {right}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory", "head", "large"))
    parser.add_argument("--weights", type=float, default=math.nan)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--store", type=float, default=2e9)
    parser.add_argument("--by-ray", action="store_true", help="speed: without shared memory")
    given = parser.parse_args()
    weights = int(10e6 if math.isnan(given.weights) else given.weights)
    if given.what == "speed":
        speed(weights, given.workers, given.rounds, given.updates or 200, not given.by_ray)
    elif given.what == "memory":
        memory(weights, given.workers, given.shards, given.updates or 40)
    elif given.what == "head":
        head(64, 8, given.updates or 10_000)
    else:
        large(weights if given.weights == given.weights else 10**9, int(given.store), given.updates or 2)


if __name__ == "__main__":
    main()

"""A sweep in one process, in two, and on a cluster of two raylets on this machine: ``sweeps.py [ROUNDS [UPDATES]]``.

Start-up is what passes until another process evaluates its first model: Python, torch, the data, and for a cluster Ray. The
last ratio is that of processor time, in one process over that of the busiest of several, start-up included: what the first
would be on a machine where nothing else runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import dualdelay as dd

METHODS = [dd.DuDe(0.05), dd.VanillaASGD(0.05)]
GRID = {"algorithm": METHODS, "lr": [0.01, 0.02, 0.05, 0.1], "seed": list(range(10))}
NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 200 << 20}
HOME = os.getpid()


def pid(model: object) -> float:
    """Who evaluates."""
    return float(os.getpid())


def moment(model: object) -> float:
    """When."""
    return time.time()


def work(model: object) -> float:
    """The processor time that the process has taken until then."""
    return time.process_time()


def swept(updates: int, compute: dd.Compute, on: dd.Cluster | None = None) -> tuple[float, float, float, list[bytes]]:
    """Seconds of a sweep, those until another process computes, the busiest process's own, and the bits of its runs."""
    evaluation = dd.Evaluation(every=updates // 4, metrics={"pid": pid, "moment": moment, "work": work})
    before = {float(HOME): time.process_time()}
    problem, speeds, begin = dd.Digits(workers=10), dd.TruncatedNormalSpeeds(10, std=1.0), time.time()
    table = dd.sweep(GRID, problem, speeds, updates=updates, compute=compute, evaluation=evaluation, on=on)
    seconds, others = time.time() - begin, table["moment"][table["pid"] != HOME]
    assert not table.failed
    busiest = max(table["work"][table["pid"] == one].max() - before.get(one, 0.0) for one in set(table["pid"]))
    return seconds, min(others, default=begin) - begin, busiest, [run.x.numpy().tobytes() for run in table.runs if run]


@contextmanager
def two_raylets() -> Iterator[dd.Cluster]:
    """A head without processors, where this process is, and two machines with one each."""
    from ray.cluster_utils import Cluster

    from dualdelay.workers.ray_fleet import staying_here

    with staying_here(True):
        cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        for _ in range(2):
            cluster.add_node(**NODE, num_cpus=1)
    try:
        yield dd.Cluster(cluster.address)
    finally:
        cluster.shutdown()


def main(rounds: int = 1, updates: int = 6000) -> None:
    """Print a row for each way and round; ratios are to one process in the same round."""
    torch.set_num_threads(1)
    print(f"80 runs of {updates} updates on digits, ten workers; {len(os.sched_getaffinity(0))} cores")
    print(f"{'':28s} {'seconds':>8s} {'start-up':>9s} {'times as fast':>14s} {'by processor time':>18s}  same bits")
    with two_raylets() as cluster:
        for _ in range(rounds):
            one, _, alone, bits = swept(updates, dd.Compute(cores=1))
            print(f"{'one process':28s} {one:8.1f} {0:9.1f} {1:14.2f} {1:18.2f}")
            for name, compute, on in (
                ("two processes (goal 1.9)", dd.Compute(cores=2), None),
                ("cluster of two raylets", dd.Compute(), cluster),
            ):
                seconds, start, busiest, others = swept(updates, compute, on)
                ratios = f"{one / seconds:14.2f} {alone / busiest:18.2f}"
                print(f"{name:28s} {seconds:8.1f} {start:9.1f} {ratios}  {others == bits}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Where the bottleneck is for 10 to 100,000 workers and a million to seventy billion weights: runs on virtual time.

    python experiments/scale/compute.py            # two minutes on one core; writes experiments/scale/results.json

A vector of a hundred numbers stands for the weights, with messages as large as those of the weights (``SharedLink.scale``).
Every server and shard has a line of 10 Gbit/s, and is busy with each gradient for as long as the cost model says of a
machine with the package's constants; workers compute for a hundredth of a second and 0.25 ns for each weight. What a method
holds and sends is counted, its passes over the weights are timed once, here, and stand in the results.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.theory import Footprint, Plan
from dualdelay.theory.cost import cost
from dualdelay.theory.footprint import footprint
from dualdelay.theory.machine import SHIPPED

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

WEIGHTS = (1e6, 1e8, 7e9, 7e10)
ARRIVALS = {10: 1_500, 1_000: 5_000, 100_000: 10_000}  # for each number of workers; the second half is counted
SEVERAL = {10: 4, 1_000: 32, 100_000: 1_000}  # workers that an update waits for, and a buffer's size
SHARDS = (1, 8, 64)
LENGTH = 100  # of the vector that stands for the weights
BANDWIDTH, LATENCY, SPREAD = 1.25e9, 5e-4, 0.3
PASSES = ("absorb", "update", "by_blocks", "send", "job")  # what is timed of a method; all else is counted


def gradient_seconds(weights: float) -> float:
    """What a worker needs for one gradient."""
    return 0.01 + 2.5e-10 * weights


@dataclass
class Flat(dd.Problem):
    """A cheap gradient that differs from worker to worker."""

    workers: int
    seed: int = 0

    def start(self, seed: int) -> Tensor:
        return torch.zeros(LENGTH)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return x - (worker % 7), 0.0

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": float(x.norm()), "pooled_loss": 0.0, "accuracy": 0.0, "gradient_norm": 0.0}

    def fingerprint(self) -> str:
        return "flat"


def methods(workers: int) -> dict[str, tuple[dd.Algorithm[Any], dd.Server]]:
    """The methods that are compared; all begin at once, so that a short run shows their steady rate."""
    c, lr = SEVERAL[workers], 1e-3
    small = dd.DuDe(lr, start="zeros", memory="workers", compress="int8")
    return {
        "DuDe": (dd.DuDe(lr, start="zeros"), dd.Server()),
        "DuDe, larger c": (dd.DuDe(lr, wait_for=c, start="zeros"), dd.Server()),
        "DuDe, int8 up": (small, dd.Server()),
        "DuDe, int8 both ways": (small, dd.Server(downlink="int8")),
        "vanilla": (dd.VanillaASGD(lr), dd.Server()),
        "FedBuff": (dd.FedBuff(lr, buffer=c), dd.Server()),
    }


def timed_passes(method: dd.Algorithm[Any], server: dd.Server) -> Footprint:
    """A method with few workers, its passes timed at a million weights."""
    few = replace(method, wait_for=4) if getattr(method, "wait_for", 1) > 4 else method
    few = replace(few, buffer=4) if getattr(few, "buffer", 1) > 4 else few
    return footprint(few, 8, server)


def one(
    method: dd.Algorithm[Any], server: dd.Server, passes: Footprint, workers: int, weights: float, shards: int
) -> dict[str, Any]:
    """One point: what the cost model predicts, and what a run on virtual time gives."""
    counted = footprint(method, workers, server, timed=1000)
    counted = replace(counted, **{part: getattr(passes, part) for part in PASSES})
    plan = Plan(weights, workers, 0 if shards == 1 else shards, gradient_seconds(weights), 0.0, None, BANDWIDTH, LATENCY)
    predicted = cost(plan, counted, SHIPPED)
    service = max(process.seconds for process in predicted.processes if process.kind != "worker") / predicted.arrivals
    link = dd.speeds.SharedLink(LATENCY, BANDWIDTH, BANDWIDTH, shards, service * shards, weights / LENGTH)
    job = predicted.job_seconds
    speeds = dd.TruncatedNormalSpeeds(workers, mean=job, std=SPREAD * job, seed=0)
    updates, begin = max(4, round(ARRIVALS[workers] / predicted.arrivals)), time.perf_counter()
    run = dd.simulate(
        method,
        Flat(workers),
        dd.SimulatedFleet(speeds, link=link),
        updates=updates,
        evaluation=dd.Evaluation(every=10**9),
        watch=dd.Reporting(progress=False),
        server=server,
    )
    times, after = run.trace.time, run.trace.after
    half = len(times) // 2
    rate = float(after[-1] - after[half]) / float(times[-1] - times[half])
    return {
        "workers": workers,
        "weights": weights,
        "shards": shards,
        "simulated": rate,
        "predicted": predicted.updates_per_second,
        "gradients": rate * counted.arrivals,
        "arrivals": counted.arrivals,
        "bottleneck": predicted.bottleneck,
        "limits": dict(predicted.limits),
        "server_bytes": predicted.server.peak,
        "worker_bytes": predicted.processes[-1].peak,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def main() -> None:
    points, timings = [], {}
    for workers in ARRIVALS:
        for name, (method, server) in methods(workers).items():
            passes = timings.get(name) or timings.setdefault(name, timed_passes(method, server))
            for weights in WEIGHTS if workers < 100_000 else (1e6, 7e9):
                for shards in SHARDS if name == "DuDe" else (1,):
                    point = {"method": name, **one(method, server, passes, workers, weights, shards)}
                    points.append(point)
                    ratio = point["predicted"] / point["simulated"]
                    print(
                        f"{workers:7d} {weights:8.0e} {shards:3d} {name:20} {point['simulated']:10.4g} {ratio:5.2f} "
                        f"{point['bottleneck']:22} {point['seconds']:6.1f} s",
                        flush=True,
                    )
    RESULTS.write_text(
        json.dumps({"passes": {k: asdict(v) for k, v in timings.items()}, "points": points}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

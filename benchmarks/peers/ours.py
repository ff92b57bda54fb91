"""dualdelay, and plain loops on one thread, on two threads, and in two processes at once.

python benchmarks/peers/ours.py
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import BATCH, CLIENTS, LR, LeNet, compare, options, plain, report, shards
from torch.nn.functional import cross_entropy

import dualdelay as dd

SKIP = 20  # arrivals before the clock starts: the first evaluation and the warm-up are not timed


def timed(updates: int, **settings: int) -> float:
    """Seconds from the first update after the warm-up to the last; evaluation comes before and after."""
    times: list[float] = []
    dd.simulate(
        dd.DuDe(lr=LR),
        dd.Network(LeNet, cross_entropy, DATA, BATCH, full_gradient=False),
        dd.TruncatedNormalSpeeds(CLIENTS, std=1.0, seed=0),
        updates=updates + SKIP,
        evaluation=dd.Evaluation(every=10**9),
        watch=(lambda state, arrival: times.append(time.perf_counter()),),
        compute=dd.Compute(**settings),
    )
    return times[-1] - times[-1 - updates]


def two_processes(seconds: float) -> float:
    command = [sys.executable, str(Path(__file__).with_name("common.py")), "--seconds", str(seconds)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(process.communicate()[0]) for process in both)


def plain_rows() -> None:
    rows: dict[str, list[float]] = {"one thread": [], "two threads": [], "two processes": []}
    for _ in range(GIVEN.rounds):
        rows["one thread"].append(plain(DATA, GIVEN.seconds / 2))
        rows["two threads"].append(plain(DATA, GIVEN.seconds / 2, threads=2))
        rows["two processes"].append(two_processes(GIVEN.seconds / 2))
    for name, rates in rows.items():
        ratios = [rate / one for rate, one in zip(rates, rows["one thread"], strict=True)]
        report(f"plain loop, {name}", torch.__version__, "no simulation", rates, ratios, rows["one thread"])


if __name__ == "__main__":
    GIVEN, DATA = options(), shards()
    plain_rows()
    kind = "asynchronous, virtual time"
    if "cores" in inspect.signature(dd.simulate).parameters:
        for cores in (1, 2):
            compare(
                f"dualdelay, cores={cores}", dd.__version__, kind, lambda updates, c=cores: timed(updates, cores=c), GIVEN
            )
    else:
        compare("dualdelay", dd.__version__, kind, timed, GIVEN)

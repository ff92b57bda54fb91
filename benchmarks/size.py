"""What ``dualdelay size`` predicts, over what real runs of DuDe then take: memory of the server and updates per second.

    python benchmarks/size.py                             # three sizes, about three minutes for each round
    python benchmarks/size.py --weights 1e6 --workers 2 --rounds 1
    python benchmarks/size.py --shards 2                  # the server in slices

Each round measures the machine's constants anew and then makes a run of each size, with a gradient that costs nothing, so
that only the server, the copies and the messages count; every run has a process of its own. Memory is the peak of the
resident set of the server, or of its largest shard. On a machine that others use, a run has less than all cores: how many
they took of it is read from the kernel's books, and the prediction is for what was left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import dualdelay as dd
from dualdelay.theory.cost import Plan, cost
from dualdelay.theory.footprint import footprint
from dualdelay.theory.machine import (
    Machine,
    machine_seconds,
    measure_machine,
    peak_memory,
    read_machine,
    timed,
    values_of,
)

SECONDS = 10.0  # of a run
OURS = 0.1  # of a core that others may take before it counts as busy


def wait_until_quiet(seconds: float) -> None:
    """Wait until others leave the machine alone, or until the seconds are over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = machine_seconds()
        time.sleep(1.0)
        if machine_seconds() - before < OURS:
            return


class Peak(threading.Thread):
    """The most memory that any shard of a server has had, looked up until they are gone."""

    def __init__(self, control: dd.FleetControl) -> None:
        super().__init__(daemon=True)
        self.control, self.bytes, self.over = control, 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for _, pid in list(self.control.shards.values()):
                self.bytes = max(self.bytes, peak_memory(pid))


def run(weights: int, workers: int, shards: int) -> dict[str, float]:
    """One run of DuDe, in this process; with shards the server is one of them, by the mean of their seconds."""
    fleet = dd.RayFleet(shards=shards or None)
    peak = Peak(fleet.control)
    peak.start()
    spent = timed(weights, SECONDS, workers, fleet)
    peak.over.set()
    peak.join()
    most = peak.bytes if shards else peak_memory()
    server = spent.shards / shards if shards else spent.server
    return {"wall": spent.wall, "server": server, "others": spent.others / spent.wall, "peak": most}


def apart(*words: object) -> dict[str, object]:
    """What a process of its own prints last."""
    done = subprocess.run(
        [sys.executable, __file__, "--apart", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    values: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", type=float, default=[3e5, 1e6, 1e7])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=0, help="0: the server is one process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet moment before each run")
    parser.add_argument("--machine", type=Path, help="constants that were measured before, instead of anew in each round")
    parser.add_argument("--apart", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart is not None:
        result = run(*map(int, options.apart)) if options.apart else values_of(measure_machine())
        print(json.dumps(result))
        return
    ratios: dict[tuple[int, str], list[float]] = {}
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"size-{os.getpid()}.json"
    print("weights     cores left   updates/s (predicted)        ms of server  (predicted)   MB of server (predicted)")
    for _ in range(options.rounds):
        if options.machine is None:
            wait_until_quiet(options.patience)
            scratch.write_text(json.dumps(apart()))
        machine: Machine = read_machine(options.machine or scratch)
        for weights in map(int, options.weights):
            wait_until_quiet(options.patience)
            method = footprint(dd.DuDe(lr=1e-6), options.workers, dd.Server())
            measured = apart(weights, options.workers, options.shards)
            left = max(0.1, machine.cores - float(measured["others"]))
            plan = Plan(weights, options.workers, options.shards, machines=1)
            predicted = cost(plan, method, replace(machine, cores=left))
            rows = {
                "updates/s": (predicted.updates_per_second, 1 / float(measured["wall"])),
                "ms": (1e3 * predicted.server.seconds, 1e3 * float(measured["server"])),
                "MB": (predicted.server.peak / 1e6, float(measured["peak"]) / 1e6),
            }
            texts = []
            for name, (ours, theirs) in rows.items():
                ratios.setdefault((weights, name), []).append(ours / theirs)
                texts.append(f"{theirs:8.1f} ({ours:8.1f}) {ours / theirs:5.2f}")
            print(f"{weights:10,d}  {left:10.2f}   " + "   ".join(texts), f"  {predicted.bottleneck}", flush=True)
    scratch.unlink(missing_ok=True)
    print("\npredicted over measured, median of the rounds")
    for (weights, name), values in ratios.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"{weights:10,d}  {name:9}  {statistics.median(values):.2f}   {each}")


if __name__ == "__main__":
    main()

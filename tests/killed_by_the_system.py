"""Runs and a sweep in processes that the system kills at random moments: ``killed_by_the_system.py FOLDER SEED``.

One process imports torch and forks the others. Each is killed up to five times and its work begun again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import dualdelay as dd
from tables import ALGORITHMS, CASES, LR

for name in ("pyarrow.parquet", "safetensors.torch"):
    import_module(name)  # before the forks, so that a child writes at once

METHODS = ["dude two workers", "shuffled", "mifa active"]
GRID = {"algorithm": [dd.DuDe(LR), dd.DuDe(LR, wait_for=2, memory="workers"), dd.UniformASGD(LR)], "lr": [LR, 0.05]}


def run(name: str, place: Path) -> dd.Run:
    saving = dd.Saving(place / name, every=1, go_on=True)
    return dd.simulate(ALGORITHMS[name], *CASES["noisy"], updates=25, folder=saving, evaluation=dd.Evaluation(every=10))


def sweep(place: Path) -> dd.Sweep:
    options: dict[str, Any] = {"evaluation": dd.Evaluation(every=4), "compute": dd.Compute(batch=True)}
    return dd.sweep(GRID, *CASES["noisy"], updates=20, folder=place / "sweep", checkpoint_every=2, **options)


WORK: dict[str, Callable[[Path], Any]] = {**{name: partial(run, name) for name in METHODS}, "sweep": sweep}


def kills(work: Callable[[], Any], rng: random.Random) -> int:
    """How often the work was killed before it came to its end: almost at once, then after up to 0.2 s, 0.4 s and so on."""
    for count in range(6):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # without the slow end of an interpreter
        if count < 5:
            time.sleep(rng.uniform(0, 0.1 * 2**count) if count else 0.02)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code > 0:
            sys.exit(code)  # it was not killed: it failed
        if code == 0:
            return count
    raise AssertionError("killed by something else")


if __name__ == "__main__":
    signal.alarm(300)
    for name, work in WORK.items():
        print(kills(partial(work, Path(sys.argv[1])), random.Random(f"{sys.argv[2]} {name}")), flush=True)

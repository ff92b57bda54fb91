"""What a checkpoint costs, and what of that is the price of surviving a loss of power.

    python benchmarks/saving.py

A run's state is saved many times: as it is, without syncing folders, and without any sync. The disk decides most of it.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

import dualdelay as dd

SIZES, TURNS = (1_000, 100_000, 2_000_000), 20


def _files_alone(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        sync(descriptor)


WAYS: dict[str, Callable[[int], None]] = {
    "as it is": os.fsync,
    "no folders": _files_alone,
    "no sync": lambda descriptor: None,
}


@contextmanager
def syncing(way: Callable[[int], None]) -> Iterator[None]:
    """While this lasts files are synced in this way."""
    usual, os.fsync = os.fsync, way
    try:
        yield
    finally:
        os.fsync = usual


def seconds(size: int, way: Callable[[int], None], saved: bool) -> float:
    """How long a run takes with a model of so many weights and a checkpoint after every update, or with none."""
    shards = [(torch.randn(4, size // 10), torch.zeros(4, dtype=torch.int64)) for _ in range(2)]
    problem = dd.Network(torch.nn.Linear(size // 10, 10, bias=False), torch.nn.functional.cross_entropy, shards, 4)
    with tempfile.TemporaryDirectory() as place, syncing(way):
        folder = {"folder": Path(place) / "run", "checkpoint_every": 1} if saved else {}
        begin = time.perf_counter()
        dd.simulate(
            dd.DuDe(lr=0.1),
            problem,
            dd.FixedSpeeds([1.0, 1.0]),
            updates=TURNS,
            evaluation=dd.Evaluation(every=TURNS),
            **folder,
        )
        return time.perf_counter() - begin


def main() -> None:
    print(f"{'weights':>10}" + "".join(f"{name:>14}" for name in WAYS) + "   ms for a checkpoint")
    for size in SIZES:
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(3):
            bare = seconds(size, os.fsync, saved=False)
            for name, way in WAYS.items():
                found[name].append(1e3 * (seconds(size, way, saved=True) - bare) / TURNS)
        print(f"{size:>10,}" + "".join(f"{median(values):>14.2f}" for values in found.values()))


if __name__ == "__main__":
    main()

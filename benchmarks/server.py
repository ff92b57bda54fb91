"""DuDe's update at 10 million weights over one copy of 360 MB, the bytes that the update has to touch.

    python benchmarks/server.py

The update: finite check of a float32 gradient, its exchange with the table's row in the float64 sum, and the step of
float32 weights in place. Each turn times a copy and an update for every n; the ratio of each turn is taken before the
median, since the machine's pace drifts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import dualdelay as dd
from dualdelay.core.draws import Draws
from dualdelay.core.state import is_finite

WEIGHTS = 10_000_000


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def server(n: int) -> Callable[[], object]:
    method = dd.DuDe(lr=0.01, start="zeros")
    state = method.init(torch.zeros(WEIGHTS), n, Draws(0, "server"))
    gradients = [torch.randn(WEIGHTS) for _ in range(2)]
    draw = 0

    def update() -> None:
        nonlocal draw
        value, worker = gradients[draw % 2], draw % n
        assert is_finite(value)
        method.step(state, dd.Arrival(dd.Job(worker, draw, state.version), value, 0.0, 1.0, 0.0))
        draw += 1

    for _ in range(2 * n):  # touch every page of the table, and leave the lent first weights behind
        update()
    return update


def main() -> None:
    source, target = torch.ones(90_000_000), torch.zeros(90_000_000)
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        updates = {n: server(n) for n in (2, 8, 32)}
        turns = []
        for _ in range(9):
            copy = timed(lambda: target.copy_(source))
            turns.append((copy, {n: timed(update) for n, update in updates.items()}))
        print(f"threads {threads}: copy of 360 MB {statistics.median(copy for copy, _ in turns) * 1e3:.1f} ms")
        for n in updates:
            share = statistics.median(times[n] / copy for copy, times in turns)
            spent = statistics.median(times[n] for _, times in turns) * 1e3
            print(f"  n = {n:3d}: update {spent:6.1f} ms, ratio {share:.2f}, at most 1.0")


if __name__ == "__main__":
    main()

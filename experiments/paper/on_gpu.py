"""Compute the paper's experiments on one GPU, the cells in several processes side by side: each keeps a core busy.

python experiments/paper/on_gpu.py FOLDER PROCESSES SECONDS figure1 figure2 saturation

After SECONDS no further cell is begun. Run it again to go on; then report.py draws and tells. It needs torch and numpy
alone.
With several processes start NVIDIA's MPS first (nvidia-cuda-mps-control -d), and count on 14 GB of GPU memory for each.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from grids import GRIDS

from dualdelay.paper.cells import compute, load
from dualdelay.paper.experiment import Cell


def pending(name: str, folder: Path) -> list[Cell]:
    """The cells of which something is missing."""
    cells = [cell for experiment in GRIDS[name] for cell in experiment.cells()]
    cells.sort(key=lambda cell: cell.seed)  # the first seeds first, in case that time is up before the last
    return [cell for cell in cells if len(load(cell, folder / name / "cells")["runs"]) < len(list(cell.wanted()))]


def one(name: str, cell: str, folder: Path) -> None:
    """Compute one cell."""
    begin = told = time.perf_counter()

    def report(share: float, text: str) -> None:
        nonlocal told
        if time.perf_counter() - told > 10:
            told = time.perf_counter()
            print(f"{name} {cell}: {share:.3f} after {told - begin:.0f} s, {text}", flush=True)

    for experiment in GRIDS[name]:
        for candidate in experiment.cells():
            if candidate.name == cell:
                compute(candidate.alone, folder / name / "cells", device="cuda", report=report)
    print(f"{name} {cell}: {time.perf_counter() - begin:.0f} s", flush=True)


def main(folder: Path, processes: int, seconds: float, names: list[str]) -> None:
    """Keep so many processes busy until nothing is left or time is up."""
    begin, running = time.perf_counter(), []
    queue = [(name, cell.name) for name in names for cell in pending(name, folder)]
    print(f"{len(queue)} cells", flush=True)
    while queue or running:
        running = [process for process in running if process.poll() is None]
        if time.perf_counter() - begin > seconds:
            queue = []
        while queue and len(running) < processes:
            arguments = [sys.executable, "-W", "ignore", __file__, "cell", *queue.pop(0), str(folder)]
            running.append(subprocess.Popen(arguments))
        time.sleep(0.2)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "cell":
        one(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])

"""Every method on CIFAR-10 with heterogeneous data, each over its own steps: the hardest panel of the paper's first figure.

python experiments/methods/cifar10.py PROCESSES     computes on a GPU, a cell in each process
python experiments/methods/cifar10.py               writes the table of what is there into docs/results/methods.md

A cell is a draw of speeds, one std and one seed, as in experiments/paper. It needs torch and numpy alone. With several
processes start NVIDIA's MPS first (nvidia-cuda-mps-control -d), and count on 14 GB of GPU memory for each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dualdelay as dd
from dualdelay.core.environment import environment
from dualdelay.paper.experiment import Cell, Experiment
from dualdelay.runs.spec import Options
from dualdelay.runs.sweep import run_points
from dualdelay.runs.together import Point

CELLS = Path(__file__).parent / "cifar10"
EXPERIMENT = Experiment(10, (0.1,), (5.0, 1.0), (0, 1, 2), evaluations=10)
STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
LARGE = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # for methods that make few updates, or small ones
BUFFER = 3  # a third of the workers, as for the paper's figures


def methods(cell: Cell) -> dict[str, tuple[Any, tuple[float, ...]]]:
    """Each method's maker and the steps it is tried with."""
    period = statistics.median(cell.times)
    return {
        "dude": (dd.DuDe, STEPS),
        "dude c=3": (lambda lr: dd.DuDe(lr, wait_for=3), STEPS),
        "vanilla": (dd.VanillaASGD, STEPS),
        "fedbuff": (lambda lr: dd.FedBuff(lr, buffer=BUFFER), STEPS),
        "uniform": (dd.UniformASGD, STEPS),
        "shuffled": (dd.ShuffledASGD, STEPS),
        "sync": (dd.SyncSGD, LARGE),
        "mifa": (lambda lr: dd.MIFA(lr, active=5), LARGE),
        "siag": (dd.SIAG, LARGE),
        "rescaled": (dd.algorithms.RescaledASGD, STEPS),
        "malenia": (dd.algorithms.MaleniaSGD, LARGE),
        "malenia 2n": (lambda lr: dd.algorithms.MaleniaSGD(lr, gradients=20), LARGE),
        "ringleader": (dd.algorithms.RingleaderASGD, STEPS),
        "ca2fl": (lambda lr: dd.algorithms.CA2FL(lr, buffer=BUFFER), STEPS),
        "aced": (dd.algorithms.ACED, STEPS),
        "sync_by_speed": (dd.algorithms.SyncBySpeed, LARGE),
        "rennala": (dd.algorithms.RennalaSGD, LARGE),
        "ringmaster": (dd.algorithms.RingmasterASGD, STEPS),
        "delay_adaptive": (dd.algorithms.DelayAdaptiveASGD, STEPS),
        "generalized": (lambda lr: dd.algorithms.GeneralizedASGD(lr, by_rate(cell)), STEPS),
        "fedasync": (dd.algorithms.FedAsync, LARGE),
        "fedfix": (lambda lr: dd.algorithms.FedFix(lr, period=period), LARGE),
        "iag": (dd.algorithms.IAG, LARGE),
        "sag": (dd.algorithms.SAG, LARGE),
        "saga": (dd.algorithms.SAGA, LARGE),
        "fadas": (lambda lr: dd.algorithms.FADAS(lr, buffer=BUFFER), (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)),
    }


def by_rate(cell: Cell) -> list[float]:
    """Chances between equal ones and those of speed: the mean of 1/n and the worker's share of all gradients."""
    return [0.5 / len(cell.times) + 0.5 / (time * cell.rate) for time in cell.times]


def compute(cell: Cell, folder: Path) -> None:
    """Compute one cell and write its file."""
    begin, told = time.perf_counter(), 0.0

    def report(share: float, text: str) -> None:
        nonlocal told
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            print(f"{cell.name}: {share:.3f} after {told - begin:.0f} s", flush=True)

    problem, points = cell.problem(0.1), []
    for name, (maker, steps) in methods(cell).items():
        points += [
            Point({"name": name, "seed": cell.seed}, maker(lr), problem, dd.SimulatedFleet(cell.speeds), cell.seed, None)
            for lr in steps
        ]
    pause = cell.horizon / EXPERIMENT.evaluations
    evaluation = dd.Evaluation(seconds=pause)
    options = Options(None, cell.horizon, dd.Saving(), evaluation, dd.Compute("cuda"), dd.Server())
    made = run_points(points, options, watch=dd.Reporting(progress=False, report=report))
    runs = []
    for k, (point, run) in enumerate(zip(points, made.runs, strict=True)):
        record: dict[str, Any] = {"method": point.names["name"], "lr": point.algorithm.lr}
        if run is None:
            runs.append({**record, "failed": made.failed[k]})
            continue
        curve = [float(f"{value:.7g}") for value in run.metrics.objective]
        ends = {"objective": curve[-1], "accuracy": float(run.metrics.accuracy[-1])}
        counts = {"updates": run.version, "arrivals": len(run.trace), "tau_max": run.delays.tau_max}
        runs.append({**record, **ends, **counts, "curve": curve})
    about = {
        "std": cell.std,
        "seed": cell.seed,
        "horizon": cell.horizon,
        "speeds": cell.times,
        "device": "cuda",
        **environment(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{cell.name}.part"
    part.write_text(json.dumps({"about": about, "runs": runs}, indent=0).replace(",\n", ", ").replace("}, {", "},\n{"))
    part.replace(folder / f"{cell.name}.json")
    print(f"{cell.name}: {time.perf_counter() - begin:.0f} s", flush=True)


def main(folder: Path, processes: int) -> None:
    """Compute the cells that are not there, so many at a time."""
    queue = [cell.name for cell in EXPERIMENT.cells() if not (folder / f"{cell.name}.json").exists()]
    running: list[subprocess.Popen[bytes]] = []
    while queue or running:
        running = [process for process in running if process.poll() is None]
        while queue and len(running) < processes:
            running.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, "cell", queue.pop(0)]))
        time.sleep(0.2)


def table(folder: Path) -> str:
    """The best step of each method by the mean of F at the end, over the seeds that are there."""
    held = [json.loads(path.read_text()) for path in sorted(folder.glob("std*.json"))]
    rows: dict[str, list[str]] = {}
    stds = sorted({book["about"]["std"] for book in held})
    for std in stds:
        books = [book["runs"] for book in held if book["about"]["std"] == std]
        for name in dict.fromkeys(run["method"] for run in books[0]):
            ends: dict[float, list[dict[str, Any]]] = {}
            for run in (run for runs in books for run in runs if run["method"] == name and "failed" not in run):
                ends.setdefault(run["lr"], []).append(run)
            tried = {run["lr"] for runs in books for run in runs if run["method"] == name}
            whole = {lr: runs for lr, runs in ends.items() if len(runs) == len(books)}
            lr = min(whole, key=lambda lr: statistics.fmean(run["objective"] for run in whole[lr]))
            edge = " (edge)" if lr in (min(tried), max(tried)) else ""
            loss, accuracy = (statistics.fmean(run[what] for run in whole[lr]) for what in ("objective", "accuracy"))
            rows.setdefault(name, []).extend([f"{loss:.3f}", f"{accuracy:.3f}", f"{lr:g}{edge}"])
    lines = ["| method | " + " | ".join(f"F, std {std:g} | accuracy | step" for std in stds) + " |"]
    lines += ["| --- " * (1 + 3 * len(stds)) + "|"]
    from settings import LABELS

    labels = {**LABELS, "malenia 2n": LABELS["malenia S=20"]}
    ordered = sorted(rows.items(), key=lambda item: float(item[1][-3]))
    return "\n".join([*lines, *(f"| {labels[name]} | {' | '.join(cells)} |" for name, cells in ordered)]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        from page import fill

        fill(cifar10=table(CELLS))
        print(table(CELLS))
    elif sys.argv[1] == "cell":
        compute(next(cell for cell in EXPERIMENT.cells() if cell.name == sys.argv[2]), CELLS)
    else:
        main(CELLS, int(sys.argv[1]))

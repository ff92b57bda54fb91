"""Compute the runs of settings.py on one GPU or on a processor, the places in several processes side by side.

python experiments/tuning/compute.py PROCESSES STAGE ... writes a file for each stage, place and set of methods under
runs/tuning, where what is there is not computed again, and gathers them in experiments/tuning/results. With no argument it
only gathers. float32 without TF32. It needs torch and numpy alone, and without a GPU g++ (lenet.py).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lenet import FastCifar10
from settings import STAGES

import dualdelay as dd
from dualdelay.core.environment import environment
from dualdelay.runs.spec import Options
from dualdelay.runs.sweep import run_points
from dualdelay.runs.together import Point

PARTS = Path("runs/tuning")
RESULTS = Path(__file__).parent / "results"
EVALUATIONS = 25
HALVES = {"control": 1, "extreme": 1, "explored": 1}  # stages on the more heterogeneous data alone
APART = {  # what takes so long that some methods have a process of their own
    ("extreme", 30): ("dude", "mean", "corrected 3", "vanilla"),
    ("tuned", 30): ("dude", "vanilla+fedbuff", "dude c=2+dude c=3", "dude c=5+dude c=10+sync"),
}


def compute(stage: str, name: str, only: str = "") -> None:
    """Compute one stage's runs at one place, of one method or all, and write them down, whole or not at all."""
    places, wanted = STAGES[stage]
    place = next(place for place in places if place.name == name)
    begin, told, cell = time.perf_counter(), 0.0, place.cell

    def report(share: float, text: str) -> None:
        nonlocal told
        if time.perf_counter() - told > 20:
            told = time.perf_counter()
            print(f"{stage} {name} {only}: {share:.3f} after {told - begin:.0f} s", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    problems, points = {alpha: cell.problem(alpha) for alpha in place.alphas[: HALVES.get(stage)]}, []
    if device == "cpu":
        torch.set_num_threads(1)
        problems = {alpha: FastCifar10(**problem.settings) for alpha, problem in problems.items()}
    for method, maker, steps in wanted(place):
        for alpha, lr in itertools.product(problems, steps):
            if only and method not in only.split("+"):
                continue
            names = {"name": method, "alpha": alpha, "seed": place.seed}
            points.append(Point(names, maker(lr), problems[alpha], dd.SimulatedFleet(cell.speeds), place.seed, None))
    pause = cell.horizon / EVALUATIONS
    compute, evaluation = dd.Compute(device, cores=1), dd.Evaluation(seconds=pause)
    options = Options(None, cell.horizon, dd.Saving(), evaluation, compute, dd.Server())
    made = run_points(points, options, watch=dd.Reporting(progress=False, report=report))
    runs = []
    for k, (point, run) in enumerate(zip(points, made.runs, strict=True)):
        record: dict[str, Any] = {"alpha": point.names["alpha"], "method": point.names["name"], "lr": point.algorithm.lr}
        if run is None:
            runs.append({**record, "failed": made.failed[k]})
            continue
        curve = [float(f"{value:.5g}") for value in run.metrics.objective]
        ends = {"objective": curve[-1], "accuracy": float(run.metrics.accuracy[-1])}
        delays = run.delays
        counts = {"updates": run.version, "arrivals": len(run.trace), "tau_max": delays.tau_max}
        runs.append({**record, **ends, **counts, "tau_avg": round(delays.tau_avg, 2), "curve": curve})
    about = {"workers": place.workers, "std": place.std, "seed": place.seed, "horizon": cell.horizon}
    about |= {"speeds": cell.times, "device": device, **environment()}
    lines = ",\n".join(json.dumps(run) for run in runs)
    PARTS.mkdir(parents=True, exist_ok=True)
    part = PARTS / f"{_file(stage, name, only)}.part"
    part.write_text(f'{{"about": {json.dumps(about)},\n"runs": [\n{lines}\n]}}\n')
    part.replace(part.with_suffix(".json"))
    print(f"{stage} {name} {only}: {len(runs)} runs in {time.perf_counter() - begin:.0f} s", flush=True)


def _file(stage: str, name: str, only: str) -> str:
    return "-".join([stage, name, only.replace(" ", "").replace("=", "")]).removesuffix("-")


def main(processes: int, stages: list[str]) -> None:
    """Compute the places that are not there, so many at a time."""
    queue = []
    for stage in stages:
        for place in STAGES[stage][0]:
            apart = APART.get((stage, place.workers), ("",))
            queue += [(stage, place.name, only) for only in apart]
    queue = [item for item in queue if not (PARTS / f"{_file(*item)}.json").exists()]
    running: list[subprocess.Popen[bytes]] = []
    while queue or running:
        running = [process for process in running if process.poll() is None]
        while queue and len(running) < processes:
            running.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, "one", *queue.pop(0)]))
        time.sleep(0.2)


def gather() -> None:
    """Put what there is of each stage into one file, a line for each run."""
    RESULTS.mkdir(exist_ok=True)
    for stage, (places, _) in STAGES.items():
        cells = []
        for place in places:
            parts = [json.loads(path.read_text()) for path in sorted(PARTS.glob(f"{stage}-{place.name}*.json"))]
            if parts:
                lines = ",\n".join(json.dumps(run) for part in parts for run in part["runs"])
                cells.append(f'{{"about": {json.dumps(parts[0]["about"])},\n"runs": [\n{lines}\n]}}')
        if cells:
            (RESULTS / f"{stage}.json").write_text("[" + ",\n".join(cells) + "]\n")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        gather()
    elif sys.argv[1] == "one":
        compute(*sys.argv[2:])
    else:
        main(int(sys.argv[1]), sys.argv[2:])
        gather()

"""Run the protocol of README.md: tune on some seeds, judge on others; every curve is kept.

python experiments/held_out/compute.py FOLDER PROCESSES SECONDS DEVICE wide resnet ...

A line of FOLDER/SETTING.jsonl is a run. After SECONDS nothing more is begun, and what is under way then is given up; run it
again to go on. It needs torch and numpy alone. On a GPU start NVIDIA's MPS first (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

EVALUATIONS, LAST, MOST_EXTENSIONS = 20, 4, 4


def run(name: str, method: str, seed: int, steps: list[float], device: str) -> list[dict[str, Any]]:
    """Runs of one method that differ in their steps alone."""
    import torch
    from settings import SETTINGS

    import dualdelay as dd

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    setting, begin = SETTINGS[name], time.perf_counter()
    kind, problem = setting.methods[method], setting.problem()
    if kind.local:
        problem = dd.LocalSteps(problem, k=16, lr=0.001, optimizer="AdamW", state="keep")
    length = setting.length(seed)
    try:
        table = dd.compare(
            {repr(lr): kind.make(lr) for lr in steps}, problem, setting.speeds(), seeds=[seed], time=length,
            evaluation=dd.Evaluation(seconds=length / EVALUATIONS, samples=200),
            compute=dd.Compute(device=device, precision=setting.precision), server=dd.Server(optimizer=kind.optimizer),
        )  # fmt: skip
        rows = list(table.rows())
    except dd.RunFailed as error:  # none came to its end; where some do, the others have no rows
        if "not finite" not in str(error):
            raise
        rows = []
    columns = ("time", "version", "objective", "accuracy", "bits_per_byte", "worst_bits_per_byte")
    curves: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        curve = curves.setdefault(row["algorithm"], {column: [] for column in columns if column in row})
        for column, values in curve.items():
            values.append(round(row[column], 6))
    each = (time.perf_counter() - begin) / len(steps)
    return [
        {"setting": name, "method": method, "seed": seed, "lr": lr, "length": length, "seconds": round(each, 1),
         "curve": curves.get(repr(lr))}
        for lr in steps
    ]  # fmt: skip


def outcome(one: dict[str, Any], column: str) -> float:
    """The mean of a run's last evaluations; infinite if it failed."""
    values = (one["curve"] or {}).get(column, [])
    mean = sum(values[-LAST:]) / LAST if len(values) > EVALUATIONS else math.nan
    return mean if math.isfinite(mean) else math.inf


class Study:
    """A method on a setting: what is known, and what is to be run next."""

    def __init__(self, name: str, method: str, done: list[dict[str, Any]]) -> None:
        from settings import SETTINGS

        self.name, self.method, self.setting = name, method, SETTINGS[name]
        self.known = {(one["seed"], one["lr"]): outcome(one, self.setting.outcome) for one in done}
        self.asked: set[tuple[int, float]] = set()

    def chosen(self) -> float | None:
        """The step with the best mean over the tuning seeds, if it is known and inside the grid."""
        steps = list(self.setting.methods[self.method].steps)
        if len(steps) == 1:
            return steps[0]
        for _ in range(MOST_EXTENSIONS):
            means = [self._mean(lr) for lr in steps]
            if None in means:
                break
            best = min(range(len(steps)), key=lambda k: means[k])
            if 0 < best < len(steps) - 1:
                return steps[best]
            steps = [steps[0] / 2, *steps] if best == 0 else [*steps, steps[-1] * 2]
        self.wanted = steps
        return None

    def _mean(self, lr: float) -> float | None:
        values = [self.known.get((seed, lr)) for seed in self.setting.tuning]
        return None if None in values else sum(values) / len(values)

    def next(self) -> list[tuple[int, list[float]]]:
        """Seeds and steps that are to be run and were not asked for yet."""
        lr = self.chosen()
        pairs = {seed: [lr] for seed in self.setting.judging} if lr else dict.fromkeys(self.setting.tuning, self.wanted)
        found = []
        for seed, steps in pairs.items():
            new = [one for one in steps if (seed, one) not in self.known and (seed, one) not in self.asked]
            self.asked |= {(seed, one) for one in new}
            found += [(seed, new)] if new else []
        return found


def main(folder: Path, processes: int, seconds: float, device: str, names: list[str]) -> None:
    """Keep so many processes busy until nothing is left or time is up."""
    from settings import SETTINGS

    begin = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    studies, pending = [], dict[Future[Any], Study]()
    for name in names:
        path = folder / f"{name}.jsonl"
        done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        methods = SETTINGS[name].methods
        studies += [Study(name, method, [one for one in done if one["method"] == method]) for method in methods]
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def submit(study: Study) -> None:
        for seed, steps in study.next():
            pending[pool.submit(run, study.name, study.method, seed, steps, device)] = study

    for study in studies:
        submit(study)
    while pending and (left := seconds - (time.perf_counter() - begin)) > 0:
        for future in wait(pending, left, FIRST_COMPLETED).done:
            study = pending.pop(future)
            try:
                runs = future.result()
            except Exception as error:
                print(study.name, study.method, repr(error)[:300], flush=True)
                continue
            with (folder / f"{study.name}.jsonl").open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in runs)
            for one in runs:
                value = study.known[one["seed"], one["lr"]] = outcome(one, study.setting.outcome)
                text = f"{study.name:12}{study.method:18}seed {one['seed']} lr {one['lr']:<9.4g} {value:.4f}"
                print(f"{time.perf_counter() - begin:5.0f} s  {text}  {one['seconds']:.1f} s", flush=True)
            submit(study)
    print(f"{time.perf_counter() - begin:.0f} s, {len(pending)} tasks left", flush=True)
    os._exit(0)  # whatever is under way is given up


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:])

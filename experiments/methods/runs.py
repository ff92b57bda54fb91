"""The runs of the comparison, computed in a process for each core and kept: one file for each setting, written whole."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time as clock
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from settings import EVALUATIONS, FIXED, SEEDS, SETTINGS, STEPS, WITH_LOCAL_STEPS, Setting, entries

import dualdelay as dd
from dualdelay.core.environment import environment
from dualdelay.paper.tables import GROUP, Outcome, table_of
from dualdelay.runs.names import describe
from dualdelay.runs.spec import Options
from dualdelay.runs.sweep import run_points
from dualdelay.runs.together import Point
from dualdelay.storage.files import make_folder, write

TOGETHER = 48  # runs that a process computes side by side, and what is lost when it is killed
PROCESSES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Key:
    """One run of a setting."""

    entry: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Its name in the file."""
        return f"{self.entry}, lr 2^{math.log2(self.lr):g}, seed {self.seed}"


def load(setting: Setting, folder: Path) -> dict[str, Any]:
    """What is kept of a setting."""
    about = {"problem": setting.problem, "settings": setting.made(0).settings | {"seed": None}, "std": setting.std}
    about |= {"evaluations": EVALUATIONS} | ({"k": setting.k} if setting.k > 1 else {})
    fresh: dict[str, Any] = {"about": about, "seeds": {}, "computed": [], "runs": {}}
    path = folder / f"{setting.name}.json"
    book: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else fresh
    if book["about"] != json.loads(json.dumps(about)):
        raise SystemExit(f"{path} holds runs with other settings; delete it and they are computed anew.")
    for seed in SEEDS:
        times = {"speeds": setting.times(seed), "horizon": setting.horizon(seed), "least": setting.least(seed)}
        held = book["seeds"].setdefault(str(seed), times)
        if not math.isclose(held["horizon"], times["horizon"]):
            raise SystemExit(f"{path} holds runs over a time of {held['horizon']:g}; delete it and they are computed anew.")
    return book


def save(setting: Setting, book: dict[str, Any], folder: Path) -> None:
    """Keep it, with one line for each run."""
    make_folder(folder)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}" for name, run in book["runs"].items())
    rest = ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in book.items() if name != "runs")
    write(folder / f"{setting.name}.json", f'{{{rest},\n"runs": {{\n{lines}\n}}}}\n'.encode())


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _record(run: dd.Run, setting: Setting, seed: int) -> dict[str, Any]:
    """What is kept of a run; objective and accuracy at evenly spaced times, between two updates the earlier model's."""
    grid = np.linspace(0, setting.horizon(seed), EVALUATIONS + 1)
    rows = np.searchsorted(run.metrics.time, grid * (1 + 1e-9), side="right") - 1
    last = float(run.metrics.gradient_norm[-1])
    counts = {"updates": run.version, "arrivals": len(run.trace), "tau_max": run.delays.tau_max}
    excess = run.metrics.objective[rows] - setting.least(seed)
    curves = {"objective": excess, "accuracy": run.metrics.accuracy[rows]}
    kept = {name: [_number(float(value)) for value in curve] for name, curve in curves.items()}
    return {"settings": describe(run.algorithm), **counts, "gradient_norm": _number(last), **kept}


def some(job: tuple[Setting, Sequence[Key]]) -> tuple[Setting, dict[str, Any]]:
    """Compute a few runs of a setting; one that diverges or fails says so."""
    setting, keys = job
    records: dict[str, Any] = {}
    for seed in SEEDS:  # the horizon is that of the seed
        mine = [key for key in keys if key.seed == seed]
        points = []
        for key in mine:
            algorithm, problem = setting.run(key.entry, key.lr, seed)
            fleet = dd.SimulatedFleet(setting.speeds(seed))
            points.append(Point({"algorithm": key.name}, algorithm, problem, fleet, seed, None))
        if not points:
            continue
        time = setting.horizon(seed)
        try:
            compute, server = dd.Compute(batch=True, cores=1), dd.Server(on_nonfinite="stop")
            evaluation = dd.Evaluation(seconds=time / EVALUATIONS)
            made = run_points(points, Options(None, time, dd.Saving(), evaluation, compute, server))
        except dd.RunFailed as error:
            records |= {key.name: {"failed": str(error)} for key in mine}
            continue
        for k, (key, run) in enumerate(zip(mine, made.runs, strict=True)):
            records[key.name] = {"failed": made.failed[k]} if run is None else _record(run, setting, seed)
    return setting, records


def outcomes(setting: Setting, book: dict[str, Any]) -> Iterator[Outcome]:
    """The runs of a file; their objective is what F is above the least."""
    for name, record in book["runs"].items():
        entry, lr, seed = name.rsplit(", ", 2)
        place = (setting.panel, int(seed.removeprefix("seed ")), entry, 2.0 ** float(lr[5:]))
        if "failed" in record:
            yield Outcome(*place, 0, 0, {}, record["failed"])
            continue
        curves = {key: np.array(record[key], dtype=np.float64) for key in ("objective", "accuracy")}
        yield Outcome(*place, record["updates"], record["tau_max"], curves)


def wanted(entry: str, found: Sequence[Outcome]) -> list[float]:
    """The steps to try next for one method: all of the first grid, further while the best is on an edge, then beside it."""
    if entry in FIXED:
        return [] if found else [FIXED[entry]]
    counts = Counter(run.lr for run in found)
    if partial := [lr for lr in dict.fromkeys((*STEPS, *counts)) if counts[lr] < len(SEEDS)]:
        return partial
    (best,) = table_of(found).best(GROUP, "lr").rows()
    if best["edge"]:
        return [best["lr"] * 4 if best["edge"] == "highest" else best["lr"] / 4]
    return [lr for lr in (best["lr"] / 2, best["lr"] * 2) if lr not in counts]


def missing(settings: Sequence[Setting], books: dict[Setting, dict[str, Any]]) -> Iterator[tuple[Setting, list[Key]]]:
    """What is to be computed next, in portions."""
    for setting in settings:
        held = list(outcomes(setting, books[setting]))
        keys = []
        for entry in entries(setting.k):
            mine = [run for run in held if run.method == entry and run.seed in SEEDS]
            keys += [Key(entry, lr, seed) for lr in wanted(entry, mine) for seed in SEEDS]
        keys = [key for key in keys if key.name not in books[setting]["runs"]]
        keys.sort(key=lambda key: (key.seed, setting.run(key.entry, 1.0, 0)[0].exact, setting.k > 1 and key.lr))
        for k in range(0, len(keys), TOGETHER):
            yield setting, keys[k : k + TOGETHER]


def compute(settings: Sequence[Setting], folder: Path) -> dict[Setting, dict[str, Any]]:
    """Compute and keep all that is missing, and give all that is kept; killed, it goes on where it was."""
    books = {setting: load(setting, folder) for setting in settings}
    begin = clock.perf_counter()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        while jobs := list(missing(settings, books)):
            total, done = sum(len(keys) for _, keys in jobs), 0
            for setting, records in pool.imap_unordered(some, jobs):
                book = books[setting]
                book["runs"] |= records
                book["computed"] += [environment()] if environment() not in book["computed"] else []
                save(setting, book, folder)
                done += len(records)
                print(f"{clock.perf_counter() - begin:.0f} s: {done} of {total} runs, {setting.name}", flush=True)
    return books


if __name__ == "__main__":
    compute((*SETTINGS, *WITH_LOCAL_STEPS), Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results")

"""DuDe with small messages: the loss against what the workers send, and against time over a free and over a slow link.

python experiments/methods/traffic.py

computes what is missing, in about two minutes, and writes a figure and a table; killed, it goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from page import fill
from rich.progress import Progress
from settings import EVALUATIONS, SEEDS, Setting

import dualdelay as dd
from dualdelay.analysis.figures import Curve, Panel, draw_panels
from dualdelay.core.environment import environment
from dualdelay.paper.tables import markdown
from dualdelay.runs.spec import Options
from dualdelay.runs.sweep import run_points
from dualdelay.runs.together import Point
from dualdelay.storage.files import make_folder, write

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
KEPT = HERE / "results" / "traffic.json"
WAYS: dict[str, tuple[Any, str]] = {  # how messages are made small, and a variant's look
    "whole": (None, "dude"),
    "int8": ("int8", "dude 8"),
    "largest 10%": (0.1, "dude 10"),
    "largest 1%": (0.01, "dude 1"),
}
LINKS = ("free", "slow")
STEPS = tuple(2.0**k for k in range(-8, -2))
SETTING = Setting("digits", 5.0)
SHARES = np.linspace(0, 1, EVALUATIONS + 1)
Job = tuple[str, str, int, tuple[float, ...]]


def link(kind: str, seed: int) -> dd.speeds.Link:
    """Over a slow link a whole gradient travels as long as the median worker computes, and so does the model."""
    size = 4 * len(SETTING.made(seed).start(seed))
    return dd.speeds.Link(bandwidth=size / median(SETTING.times(seed))) if kind == "slow" else dd.speeds.Link()


def some(job: Job) -> dict[str, Any]:
    """One way, link and seed at several steps, side by side."""
    way, kind, seed, steps = job
    problem, speeds, time = SETTING.made(seed), SETTING.speeds(seed), SETTING.horizon(seed)
    methods = [dd.DuDe(lr=lr, memory="workers", compress=WAYS[way][0]) for lr in steps]
    points = [
        Point({"algorithm": str(m)}, m, problem, dd.SimulatedFleet(speeds, link(kind, seed)), seed, None) for m in methods
    ]
    pause = time / EVALUATIONS
    compute, server = dd.Compute(batch=True, cores=1), dd.Server(on_nonfinite="stop")
    made = run_points(points, Options(None, time, dd.Saving(), dd.Evaluation(seconds=pause), compute, server))
    records: dict[str, Any] = {}
    for k, (lr, run) in enumerate(zip(steps, made.runs, strict=True)):
        name = f"{way}, {kind}, lr 2^{np.log2(lr):g}, seed {seed}"
        if run is None:
            records[name] = {"failed": made.failed[k]}
            continue
        rows = np.searchsorted(run.metrics.time, SHARES * time * (1 + 1e-9), side="right") - 1
        sent = np.concatenate([[0], np.cumsum(run.trace.bytes)])
        arrived = np.searchsorted(run.trace.time, SHARES * time, side="right")
        objective = [float(f"{value:.5g}") if np.isfinite(value) else None for value in run.metrics.objective[rows]]
        counts = {"arrivals": len(run.trace), "updates": run.version, "tau_max": run.delays.tau_max}
        records[name] = {**counts, "objective": objective, "bytes": sent[arrived].tolist()}
    return records


def ends(book: dict[str, Any], way: str, kind: str) -> dict[float, float]:
    """The mean of F at the end by step; what diverged or failed is infinite."""
    found: dict[float, list[float]] = {}
    for name, record in book["runs"].items():
        mine, where, lr, _ = name.split(", ")
        if (mine, where) == (way, kind):
            last = record.get("objective", [None])[-1]
            found.setdefault(2.0 ** float(lr[5:]), []).append(np.inf if last is None else last)
    return {lr: float(np.mean(values)) for lr, values in found.items()}


def missing(book: dict[str, Any]) -> list[Job]:
    """The first steps, then further ones while the best is on an edge."""
    jobs: list[Job] = []
    for way in WAYS:
        for kind in LINKS:
            mean = ends(book, way, kind)
            best = min(mean, key=lambda lr: mean[lr]) if mean else 0.0
            steps = STEPS if not mean else tuple(2 * lr if lr == max(mean) else lr / 2 for lr in [best])
            if mean and best not in (min(mean), max(mean)):
                steps = tuple(mean)  # nothing new; what a kill has left out
            for seed in SEEDS:
                left = tuple(lr for lr in steps if f"{way}, {kind}, lr 2^{np.log2(lr):g}, seed {seed}" not in book["runs"])
                jobs += [(way, kind, seed, left)] if left else []
    return jobs


def compute() -> dict[str, Any]:
    """Compute and keep what is missing."""
    make_folder(KEPT.parent)
    fresh = {"about": {"arrivals": SETTING.arrivals}, "computed": environment(), "runs": {}}
    book: dict[str, Any] = json.loads(KEPT.read_bytes()) if KEPT.exists() else fresh
    with multiprocessing.get_context("spawn").Pool(2) as pool, Progress() as progress:
        while jobs := missing(book):
            task = progress.add_task("runs", total=len(jobs))
            for records in pool.imap_unordered(some, jobs):
                book["runs"] |= records
                lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in book["runs"].items())
                rest = ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in book.items() if name != "runs")
                write(KEPT, f'{{{rest},\n"runs": {{\n{lines}\n}}}}\n'.encode())
                progress.update(task, advance=1)
    return book


def resting(way: str, d: int) -> float:
    """How far from the solution the three workers of the laws end, in the worst of d coordinates, each of its own size."""
    size = [(k + 1) / d for k in range(d)]
    problem = dd.Quadratic([[b * part for part in size] for b in (0.0, 6.0, 12.0)])
    method = dd.DuDe(lr=2.0**-7, memory="workers", compress=WAYS[way][0])
    run = dd.simulate(
        method, problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=30_000, evaluation=dd.Evaluation(every=30_000)
    )
    return max(abs(x - 6 * part) for x, part in zip(run.x.tolist(), size, strict=True))


def main() -> None:
    book = compute()
    heads = [
        "messages",
        "bytes per message",
        "F, free link",
        "MB sent",
        "MB to F = 0.5",
        "F, slow link",
        "arrivals, slow link",
    ]
    rows = [[*heads, "x - 6, one coordinate", "of 100 coordinates"]]
    curves: list[list[Curve]] = [[], [], []]
    for way, (_, look) in WAYS.items():
        cells = []
        for kind in LINKS:
            mean = ends(book, way, kind)
            lr = min(mean, key=lambda lr: mean[lr])
            runs = [book["runs"][f"{way}, {kind}, lr 2^{np.log2(lr):g}, seed {seed}"] for seed in SEEDS]
            loss, sent = (np.mean([run[name] for run in runs], axis=0) for name in ("objective", "bytes"))
            edge = ", edge" if lr in (min(mean), max(mean)) else ""
            cells.append(f"{loss[-1]:.3f} (2<sup>{np.log2(lr):g}</sup>{edge})")
            if kind == "free":
                below = np.flatnonzero(loss <= 0.5)
                cells += [f"{sent[-1] / 1e6:.2f}", f"{sent[below[0]] / 1e6:.2f}" if len(below) else "never"]
                curves[0].append(Curve(look, way, sent[sent > 0] / 1e6, loss[sent > 0]))
            curves[1 + (kind == "slow")].append(Curve(look, way, SHARES, loss))
            size = runs[0]["bytes"][-1] / runs[0]["arrivals"]
        arrivals = f"{np.mean([run['arrivals'] for run in runs]):,.0f}"
        rests = [f"{resting(way, d):.0e}" for d in (1, 100)]
        rows.append([way, f"{size:,.0f}", *cells, arrivals, *rests])
    write(HERE / "results" / "traffic.md", markdown(rows).encode())
    across = ("sent by all workers, MB", "simulated time, as a share of all", "simulated time, as a share of all")
    titles = ("by bytes (free link)", "by time, free link", "by time, slow link")
    scales = ("xy", "y", "y")
    parts = zip(titles, across, curves, scales, strict=True)
    panels = [Panel(title, x, "F", some, log=log) for title, x, some, log in parts]
    caption = "DuDe with memory at the workers on digits, alpha = 0.1, speeds TN(1, 5); "
    caption += f"the mean of {len(SEEDS)} seeds, each at its best step; by bytes from the first evaluation on"
    draw_panels([panels], HERE / "results" / "bytes", caption)
    write(DOCS / "pictures" / "bytes.png", (HERE / "results" / "bytes.png").read_bytes())
    (HERE / "results" / "bytes.png").unlink()
    fill(traffic=markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()

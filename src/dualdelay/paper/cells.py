"""The runs of an experiment, computed and kept: one file for each draw of speeds, written whole after every step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..core import Problem
from ..core.environment import environment
from ..core.errors import BadInput, RunFailed
from ..engine.result import Run
from ..runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from ..runs.sweep import Options, Point, run_points
from ..storage.files import make_folder, write
from .experiment import Cell, Experiment, classes, draws

Report = Callable[[float, str], None]
CURVES = ("time", "version", "objective", "pooled_loss", "accuracy")
_DIGITS = 7  # of a number in a file: what float32 has


def compute(
    experiment: Experiment,
    folder: Path,
    *,
    device: str | None = None,
    precision: str = "float32",
    cores: int | None = None,
    report: Report | None = None,
) -> None:
    """Compute every run that the folder does not hold yet.

    On a GPU the runs of a cell are computed side by side and kept when all have ended, elsewhere one after the other: a
    computation that is killed loses no more than that.
    """
    cells = list(experiment.cells())
    books = {cell: load(cell, folder) for cell in cells}  # says so before anything is computed if one is not ours
    wanted = {cell: [key for key in cell.wanted() if _name(*key) not in books[cell]["runs"]] for cell in cells}
    total = sum(len(list(cell.wanted())) for cell in cells)
    done = total - sum(map(len, wanted.values()))
    together = device is not None and device.startswith("cuda")
    for cell in cells:
        problems = {alpha: cell.problem(alpha) for alpha in dict.fromkeys(alpha for alpha, _, _ in wanted[cell])}
        book = books.pop(cell)
        for alpha, problem in problems.items():
            split = {"draws": draws(problem, alpha, cell.seed), "samples": classes(problem)}
            book["splits"].setdefault(f"{alpha:.15g}", split)
        keys = wanted[cell]
        for some in [keys] if together and keys else [[key] for key in keys]:
            place = f"std {cell.std:g}, seed {cell.seed}" + ("" if together else f", {_name(*some[0])}")
            tell = partial(_tell, report, done, len(some), total, place)
            points = [_point(cell, *key, problems[key[0]]) for key in some]
            book["runs"] |= _runs(cell, points, tell, Compute(device, cores, precision))
            means = {
                "device": device or "cpu",
                "precision": precision,
                **{name: environment()[name] for name in ("torch", "numpy", "python")},
            }
            book["computed"] += [means] if means not in book["computed"] else []
            make_folder(folder)
            write(_path(cell, folder), _text(book).encode())
            done += len(some)


def _tell(report: Report | None, done: int, count: int, total: int, place: str, share: float, text: str) -> None:
    """Say how far all runs are, from how far the next ``count`` are."""
    if report is not None:
        report((done + share * count) / total, f"{done:,} of {total:,} runs; {place}")


def _runs(cell: Cell, points: list[Point], tell: Report, compute: Compute) -> dict[str, Any]:
    """The records of these runs by name."""
    names = [point.names["name"] for point in points]
    try:
        pause = cell.horizon / cell.experiment.evaluations
        options = Options(None, cell.horizon, Saving(), Evaluation(seconds=pause), compute, Server())
        made = run_points(points, options, watch=Reporting(progress=False, report=tell))
    except RunFailed as error:  # none of them came to its end
        return {name: {"failed": str(error).removeprefix("no run came to its end; the first says: ")} for name in names}
    failed = {names[k]: {"failed": why} for k, why in made.failed.items()}
    return {name: _record(run) for name, run in zip(names, made.runs, strict=True) if run is not None} | failed


def _name(alpha: float, method: str, lr: float) -> str:
    return f"alpha {alpha:.15g}, {method}, lr {lr:.15g}"


def _point(cell: Cell, alpha: float, method: str, lr: float, problem: Problem) -> Point:
    algorithm = cell.experiment.makers[method](lr=lr)
    names = {"name": _name(alpha, method, lr), "seed": cell.seed}
    return Point(names, algorithm, problem, SimulatedFleet(cell.speeds), cell.seed, None)


def _number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _record(run: Run) -> dict[str, Any]:
    """What is kept of a run."""
    delays = run.delays
    counts = {"updates": run.version, "arrivals": len(run.trace), "rejected": run.rejected}
    curves = {name: [_number(float(value)) for value in run.metrics[name]] for name in CURVES}
    return {**counts, "tau_max": delays.tau_max, "tau_avg": _number(delays.tau_avg), **curves}


def _text(book: Mapping[str, Any]) -> str:
    """The file's text, with one line for each run."""
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}" for name, run in book["runs"].items())
    rest = ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in book.items() if name != "runs")
    return f'{{{rest},\n"runs": {{\n{runs}\n}}}}\n'


def _path(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json"


def load(cell: Cell, folder: Path) -> dict[str, Any]:
    """What the folder holds of a cell; the beginning of its file if it holds nothing."""
    e, path = cell.experiment, _path(cell, folder)
    about = {"problem": e.problem, "workers": e.workers, "std": cell.std, "seed": cell.seed, "updates": e.updates}
    about |= {"evaluations": e.evaluations}
    fresh = {"about": about, "horizon": cell.horizon, "speeds": cell.times, "splits": {}, "computed": [], "runs": {}}
    try:
        book: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return fresh
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error}); delete it and its runs are computed anew.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); choose another --folder.") from None
    if not _ours(book, fresh):
        raise BadInput(f"{path} is no file of the paper's runs; choose another --folder.")
    for name, value in about.items():
        held = book["about"].get(name)
        if held != value:
            raise BadInput(f"{path} holds runs with {name} {held}, but {value} is wanted; choose another --folder.")
    return book


def _ours(book: Any, fresh: Mapping[str, Any]) -> bool:
    """Whether a file has all that one of ours has."""
    if not isinstance(book, dict) or set(book) != set(fresh):
        return False
    if any(type(book[name]) is not type(part) for name, part in fresh.items()):
        return False
    runs = book["runs"].values()
    return all(isinstance(run, dict) and ("failed" in run or run.keys() >= {*CURVES, "updates", "tau_max"}) for run in runs)


def records(experiment: Experiment, folder: Path) -> Iterator[tuple[Cell, float, str, float, Mapping[str, Any]]]:
    """Every run of the experiment that the folder holds: its cell, alpha, method, step and record."""
    for cell in experiment.cells():
        held = load(cell, folder)["runs"]
        for key in cell.wanted():
            if _name(*key) in held:
                yield cell, *key, held[_name(*key)]

"""The runs of an experiment, computed and kept: one file for each cell, rewritten whenever more of its runs are done."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..core import Problem
from ..core.environment import environment
from ..core.errors import BadInput, RunFailed
from ..engine.result import Run
from ..runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from ..runs.spec import Options
from ..runs.sweep import run_points
from ..runs.together import Point, Report
from ..storage.files import make_folder, write
from ..workers.ray_tasks import Cluster
from .experiment import Cell, Experiment, Key, classes, draws

CURVES = ("time", "version", "objective", "pooled_loss", "accuracy")
_DIGITS = 7  # of a number in a file: what float32 has


def compute(
    experiment: Experiment,
    folder: Path,
    *,
    device: str | None = None,
    precision: str = "float32",
    cores: int | None = None,
    report: Report = lambda share, text: None,
    on: Cluster | None = None,
) -> None:
    """Compute every run that the folder does not hold yet, on this machine or on a cluster, cell after cell.

    On a GPU the runs of a cell are computed together and kept when all have ended; elsewhere each is kept when it has
    ended, and a computation that is killed loses no more than what is under way.
    """
    contents = {cell: load(cell, folder) for cell in experiment.cells()}  # refuses other files before it computes anything
    missing = {cell: [key for key in cell.wanted() if key.name not in contents[cell]["runs"]] for cell in contents}
    total = sum(len(list(cell.wanted())) for cell in contents)
    done = total - sum(map(len, missing.values()))
    versions = {name: environment()[name] for name in ("torch", "numpy", "python")}
    means = {"device": device or "cpu", "precision": precision, **versions}
    for cell, keys in missing.items():
        if not keys:
            continue
        content = contents[cell]
        problems = {alpha: cell.problem(alpha) for alpha in dict.fromkeys(key.alpha for key in keys)}
        for alpha, problem in problems.items():
            split = {"draws": draws(problem, alpha, cell.seed), "samples": classes(problem)}
            content["splits"].setdefault(f"{alpha:.15g}", split)
        if means not in content["computed"]:
            content["computed"].append(means)
        tell = partial(_report_cell, report, done, len(keys), total, cell, content, len(content["runs"]))
        run_batch(cell, keys, problems, tell, Compute(device, cores, precision), partial(_keep, folder, cell, content), on)
        done += len(keys)


def _report_cell(
    report: Report,
    done: int,
    count: int,
    total: int,
    cell: Cell,
    content: Mapping[str, Any],
    held: int,
    share: float,
    _: str,
) -> None:
    """Report how far all runs are, from how far the ``count`` of a cell are that were not held."""
    now = done + len(content["runs"]) - held
    report((done + share * count) / total, f"{now:,} of {total:,} runs; std {cell.std:g}, seed {cell.seed}")


def _keep(folder: Path, cell: Cell, content: dict[str, Any], key: Key, record: Mapping[str, Any]) -> None:
    """Write one more run into the file of its cell, where they stand in their order, whichever ended first."""
    runs, order = {**content["runs"], key.name: record}, [wanted.name for wanted in cell.wanted()]
    names = [*(name for name in runs if name not in order), *(name for name in order if name in runs)]
    content["runs"] = {name: runs[name] for name in names}
    make_folder(folder)
    write(_path(cell, folder), _text(content).encode())


def run_batch(
    cell: Cell,
    keys: Sequence[Key],
    problems: Mapping[float, Problem],
    report: Report,
    compute: Compute,
    keep: Callable[[Key, dict[str, Any]], None],
    on: Cluster | None = None,
) -> None:
    """Compute these runs of a cell; ``keep`` is given the record of each when it has ended."""
    fleet, points = SimulatedFleet(cell.speeds), []
    for key in keys:
        names, algorithm = {"name": key.name, "seed": cell.seed}, cell.experiment.makers[key.method](lr=key.lr)
        points.append(Point(names, algorithm, problems[key.alpha], fleet, cell.seed, None))
    evaluation = Evaluation(seconds=cell.horizon / cell.experiment.evaluations)
    options = Options(None, cell.horizon, Saving(), evaluation, compute, Server())
    with suppress(RunFailed):  # not one of them came to its end, and why is kept
        run_points(
            points,
            options,
            watch=Reporting(progress=False, report=report),
            on=on,
            keep=lambda k, run, why: keep(keys[k], {"failed": why} if run is None else _record(run)),
        )


def _record(run: Run) -> dict[str, Any]:
    """What is kept of a run."""
    delays = run.delays
    counts = {"updates": run.version, "arrivals": len(run.trace), "rejected": run.rejected}
    curves = {name: [_number(value) for value in run.metrics[name].tolist()] for name in CURVES}
    return {**counts, "tau_max": delays.tau_max, "tau_avg": _number(delays.tau_avg), **curves}


def _number(value: float) -> float | None:
    """A number as it stands in a file; None if it is not finite."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _text(content: Mapping[str, Any]) -> str:
    """The text of a cell's file, with one line for each run."""
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(run, allow_nan=False)}" for name, run in content["runs"].items())
    rest = ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in content.items() if name != "runs")
    return f'{{{rest},\n"runs": {{\n{runs}\n}}}}\n'


def _path(cell: Cell, folder: Path) -> Path:
    return folder / f"{cell.name}.json"


def load(cell: Cell, folder: Path) -> dict[str, Any]:
    """The content of a cell's file; of one that is not there, the content without runs."""
    e, path = cell.experiment, _path(cell, folder)
    about = {"problem": e.problem, "workers": e.workers, "std": cell.std, "seed": cell.seed}
    about |= {"updates": e.updates, "evaluations": e.evaluations}
    empty = {"about": about, "horizon": cell.horizon, "speeds": cell.times, "splits": {}, "computed": [], "runs": {}}
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return empty
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error}); delete it and its runs are computed anew.") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); choose another --folder.") from None
    if not _has_form_of(empty, content):
        raise BadInput(f"{path} is no file of the paper's runs; choose another --folder.")
    for name, value in about.items():
        held = content["about"].get(name)
        if held != value:
            raise BadInput(f"{path} holds runs with {name} {held}, but {value} is wanted; choose another --folder.")
    return content


def _has_form_of(empty: Mapping[str, Any], content: object) -> bool:
    """Whether a file's content has the parts of an empty one, of the same types, and complete records."""

    def types(parts: Mapping[str, Any]) -> dict[str, type]:
        return {name: type(part) for name, part in parts.items()}

    if not isinstance(content, dict) or types(content) != types(empty):
        return False
    complete = {*CURVES, "updates", "tau_max"}
    return all(isinstance(run, dict) and ("failed" in run or run.keys() >= complete) for run in content["runs"].values())


def records(experiment: Experiment, folder: Path) -> Iterator[tuple[Cell, float, str, float, Mapping[str, Any]]]:
    """Every run of the experiment that the folder holds: its cell, alpha, method, step and record."""
    for cell in experiment.cells():
        runs = load(cell, folder)["runs"]
        for key in cell.wanted():
            if key.name in runs:
                yield cell, *key, runs[key.name]

"""dualdelay paper: the paper's experiments with one command."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console

from ..analysis.reports import print_rows
from ..core.errors import BadInput
from ..paper import pictures, tables
from ..paper.cells import compute
from ..paper.experiment import FIGURES, TITLES, Experiment
from ..runs.progress import Sharing
from ..storage.files import make_folder, save_table, write
from .options import MaybeInt, MaybePath, MaybeText
from .shell import finish, make_console

Wholes = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...")]
Numbers = Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="FLOAT ...")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="STR ...")]
_QUICK = {
    "problem": "cifar10[minimum=1,model=small,samples=10000]",
    "seeds": (0,),
    "steps": (0.02, 0.05),
    "updates": 2000,
    "evaluations": 8,
}
_READING = (
    "Every run ends at the simulated time in which a fully asynchronous method makes {updates:,} updates; times are in "
    "thousands of such updates. Of the steps the one with the lowest mean training loss at the end is shown; it is on the "
    "edge where it is the smallest or largest that was tried."
)


def _help(text: str, default: str = "") -> Any:
    """A flag's help; what happens without it where that depends on the figure."""
    return tyro.conf.arg(help=text, help_behavior_hint=f"(default: {default})" if default else None)


_FIGURE = tyro.conf.arg(
    metavar="FIGURE",
    help="figure1 (10 workers), figure2 (30 workers), or saturation (10 workers, alpha 0.1, five times as long).",
)
_SEEDS = _help("One run of everything for each.", "0 1 2")
_STEPS = _help("Step sizes to choose from for each method and panel.", "0.001 0.005 0.01; saturation 0.01 0.02 0.05")
_WAIT_FOR = _help("DuDe once for each of these numbers of workers to wait for.", "1; saturation 1 2 3 5")
_ALPHAS = _help("How unlike the data are; the smaller the more.", "0.1 0.5; figure2 0.05 0.1; saturation 0.1")
_METHODS = _help(f"Only these of {', '.join(TITLES)}.", "all")
_UPDATES = _help(
    "All runs end at the simulated time in which a fully asynchronous method makes so many updates.",
    "20000; saturation 100000",
)
_PROBLEM = _help("Other data or another network, such as digits or 'cifar10[minimum=1,model=wide]'.", "cifar10[minimum=1]")
_JSON = _help("Print one line of JSON at the end, and the rest to standard error.")


def paper(
    figure: Annotated[tyro.conf.Positional[Literal["figure1", "figure2", "saturation"]], _FIGURE],
    quick: Annotated[
        bool, _help("A first look in about two minutes: a small network, part of the data, one seed.")
    ] = False,
    seeds: Annotated[Wholes, _SEEDS] = None,
    steps: Annotated[Numbers, _STEPS] = None,
    wait_for: Annotated[Wholes, _WAIT_FOR] = None,
    alphas: Annotated[Numbers, _ALPHAS] = None,
    stds: Annotated[Numbers, _help("How unlike the speeds are.", "1 5; saturation 1")] = None,
    methods: Annotated[Texts, _METHODS] = None,
    updates: Annotated[MaybeInt, _UPDATES] = None,
    evaluations: Annotated[MaybeInt, _help("Points on each curve.", "25")] = None,
    problem: Annotated[MaybeText, _PROBLEM] = None,
    loss: Annotated[float, _help("The table says when each method is at this training loss.")] = 1.5,
    accuracy: Annotated[float, _help("The table says when each method is at this test accuracy.")] = 0.4,
    folder: Annotated[MaybePath, _help("Where all is kept.", "runs/paper-FIGURE")] = None,
    device: Annotated[MaybeText, _help("cuda computes runs side by side.", "cpu")] = None,
    precision: Annotated[str, _help("On a GPU: float32, tf32 or bfloat16.")] = "float32",
    cores: Annotated[MaybeInt, _help("Processor cores to use.", "all")] = None,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Run the paper's experiment on CIFAR-10 and draw its figure; what is computed already is not computed again.

    Every method of the paper's Table 1 with every step size, at equal simulated time. Killed or interrupted, the same
    command goes on where it was. The data come from: dualdelay data cifar10

    A first look: dualdelay paper figure1 --quick

    The whole on a GPU, with more seeds and steps: dualdelay paper figure1 --device cuda --seeds 0 1 2 3 4 --steps 0.001
    0.005 0.01 0.02 0.05 --wait-for 1 2 3 5
    """
    given: dict[str, Any] = {
        "seeds": seeds,
        "steps": steps,
        "wait_for": wait_for,
        "stds": stds,
        "alphas": alphas,
        "methods": methods,
    }
    given |= {"updates": updates, "evaluations": evaluations, "problem": problem}
    start = _QUICK if quick else {}
    experiment = replace(
        FIGURES[figure], **{**start, **{name: value for name, value in given.items() if value is not None}}
    )
    folder = folder or Path("runs") / f"paper-{figure}{'-quick' if quick else ''}"
    try:
        with Sharing("paper") as report:
            compute(experiment, folder / "cells", device=device, precision=precision, cores=cores, report=report)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the runs that ended are kept in {folder}; go on with the same command") from None
    found = tables.outcomes(experiment, folder / "cells")
    written = write_all(experiment, found, folder, figure, loss, accuracy, make_console(json))
    finish(json, "paper", folder=str(folder), files=[str(path) for path in written])


def write_all(
    experiment: Experiment,
    found: Sequence[tables.Outcome],
    folder: Path,
    name: str,
    loss: float,
    accuracy: float,
    console: Console,
) -> Sequence[Path]:
    """Write the figure, the tables and the raw curves of these runs into a folder, and print the main table."""
    make_folder(folder)
    choices = tables.choose(found)
    rows = tables.summary(choices, loss, accuracy)
    console.print(f"{name}: at the end, mean ± standard deviation over seeds; times in 1,000 asynchronous updates")
    for panel in dict.fromkeys(row[0] for row in rows[1:]):
        print_rows(panel, [row[1:] for row in rows if row is rows[0] or row[0] == panel], console)
    parts = {
        "At the end, each method at its best step": rows,
        f"{choices[0].method} against the others, seed by seed (above zero it is ahead)": tables.paired(choices),
        "Training loss F at the end, by step": tables.steps(found),
    }
    text = "".join(f"## {part}\n\n{tables.markdown(lines)}\n" for part, lines in parts.items())
    files = [folder / f"{name}.md", folder / "curves.parquet", folder / "setting.json"]
    setting = _setting(experiment, found)
    write(files[0], f"# {name}\n\n{setting}. {_READING.format(updates=experiment.updates)}\n\n{text}".encode())
    save_table(files[1], tables.curves(found), {"experiment": jsonlib.loads(_json(experiment))})
    write(files[2], _json(experiment).encode())
    try:
        size, best = (experiment.updates, experiment.evaluations), "each method at the step with the lowest loss at the end"
        caption = f"{setting}; {best}; mean and standard deviation over seeds"
        files += pictures.draw_figure(choices, *size, folder / name, caption)
        if len(experiment.steps) > 1:
            files += pictures.draw_steps(found, folder / "steps", f"{setting}; mean over seeds")
    except BadInput as error:  # no matplotlib: the numbers are there all the same
        console.print(f"no figure: {error}")
    failed = sum(not math.isfinite(run.final("objective")) for run in found)
    if failed:
        console.print(f"{failed} of {len(found)} runs failed or diverged; they count as an infinite loss.")
    console.print(sentence(choices))
    for path in files:
        console.print(f"wrote {path}")
    return files


def sentence(choices: Sequence[tables.Choice]) -> str:
    """Who has the lowest loss in each panel."""
    said = []
    for panel in dict.fromkeys(choice.panel for choice in choices):
        mean = {c.method: float(np.mean(c.values("objective"))) for c in choices if c.panel == panel}
        first, *others = sorted(mean, key=lambda method: mean[method])
        then = f" (then {others[0]} {mean[others[0]]:.3f})" if others else ""
        said.append(f"{tables.heading(panel)}: {first} {mean[first]:.3f}{then}")
    return "Lowest training loss: " + "; ".join(said) + "."


def _setting(experiment: Experiment, found: Sequence[tables.Outcome]) -> str:
    """What was run, in a line for a caption."""
    seeds = {std: sorted({run.seed for run in found if run.panel[1] == std}) for std in experiment.stds}
    texts = {std: ", ".join(map(str, some)) for std, some in seeds.items()}
    same = len(set(texts.values())) == 1
    shown = [*texts.values()][:1] if same else [f"{some} (std {std:g})" for std, some in texts.items()]
    steps = ", ".join(f"{step:g}" for step in experiment.steps)
    return f"{experiment.workers} workers, {experiment.problem}; seeds {' and '.join(shown)}; steps {steps}"


def _json(experiment: Experiment) -> str:
    return jsonlib.dumps(vars(experiment), indent=1) + "\n"

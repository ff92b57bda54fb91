"""dualdelay paper: the paper's experiments with one command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..paper.cells import compute
from ..paper.experiment import FIGURES
from ..paper.report import write_all
from ..paper.tables import outcomes
from ..runs.progress import SweepProgress
from .shared import Json, MaybeInt, MaybePath, MaybeText, finish, make_console

Ints = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Floats = Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="FLOAT ...", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="STR ...", help_behavior_hint="")]

_QUICK = {
    "problem": "cifar10[minimum=1,model=small,samples=10000]",
    "seeds": (0,),
    "steps": (0.02, 0.05),
    "updates": 2000,
    "evaluations": 8,
}


@dataclass(frozen=True)
class Changes:
    """What differs from the paper's experiment."""

    seeds: Ints = None
    """One run of everything for each; by default 0 1 2."""
    steps: Floats = None
    """Step sizes to choose from for each method and panel; by default 0.001 0.005 0.01, saturation 0.01 0.02 0.05."""
    wait_for: Ints = None
    """DuDe once for each of these numbers of workers to wait for; by default 1, saturation 1 2 3 5."""
    alphas: Floats = None
    """Alphas of the Dirichlet split, small for heterogeneous data; by default 0.1 0.5, figure2 0.05 0.1, saturation 0.1."""
    stds: Floats = None
    """How much speeds differ: workers' times are drawn from TN(1, std); by default 1 5, saturation 1."""
    methods: Texts = None
    """Only these of dude, vanilla, uniform, shuffled, fedbuff, mifa, sync."""
    updates: MaybeInt = None
    """Runs end when a fully asynchronous method would have made so many updates; by default 20000, saturation 100000."""
    evaluations: MaybeInt = None
    """Points on each curve; by default 25."""
    problem: MaybeText = None
    """Other data or another network, such as digits or 'cifar10[model=wide]'; by default cifar10[minimum=1]."""


def paper(
    figure: Annotated[tyro.conf.Positional[Literal["figure1", "figure2", "saturation"]], tyro.conf.arg(metavar="FIGURE")],
    changes: tyro.conf.OmitArgPrefixes[Changes],
    quick: bool = False,
    loss: float = 1.5,
    accuracy: float = 0.4,
    folder: MaybePath = None,
    device: MaybeText = None,
    precision: str = "float32",
    cores: MaybeInt = None,
    json: Json = False,
) -> None:
    """Run the paper's experiment on CIFAR-10 and draw its figure; what is computed already is not computed again.

    Every method of the paper's Table 1 with every step size, at equal simulated time. After a kill or an interruption the
    same command continues where it was. The data come from: dualdelay data cifar10

    A first look: dualdelay paper figure1 --quick

    All of it on a GPU, with more seeds and steps: dualdelay paper figure1 --device cuda --seeds 0 1 2 3 4 --steps 0.001
    0.005 0.01 0.02 0.05 --wait-for 1 2 3 5

    Arguments:
        figure: figure1 (10 workers), figure2 (30 workers), or saturation (10 workers, alpha 0.1, five times as long).
        quick: A first look in about two minutes: a small network, part of the data, one seed.
        loss: The table says when each method reaches this training loss.
        accuracy: The table says when each method reaches this test accuracy.
        folder: Where everything is kept; by default runs/paper-FIGURE.
        device: cuda computes runs side by side; by default cpu.
        precision: On a GPU: float32, tf32 or bfloat16.
        cores: Processor cores to use; by default all.
    """
    settings: dict[str, Any] = {**_QUICK} if quick else {}
    settings |= {name: value for name, value in vars(changes).items() if value is not None}
    experiment = replace(FIGURES[figure], **settings)
    folder = folder or Path("runs") / f"paper-{figure}{'-quick' if quick else ''}"
    try:
        with SweepProgress("paper") as report:
            compute(experiment, folder / "cells", device=device, precision=precision, cores=cores, report=report)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the runs that ended are kept in {folder}; go on with the same command") from None
    runs = outcomes(experiment, folder / "cells")
    files = write_all(experiment, runs, folder, figure, loss, accuracy, make_console(json))
    finish(json, "paper", folder=str(folder), files=[str(path) for path in files])

"""dualdelay paper: the paper's experiments with one command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..paper.cells import compute
from ..paper.experiment import FIGURES
from ..paper.report import write_all
from ..paper.tables import outcomes
from ..runs.progress import SweepProgress
from .commands import cluster_of
from .flags import Paper
from .shared import finish, make_console

_QUICK = {
    "problem": "cifar10[minimum=1,model=small,samples=10000]",
    "seeds": (0,),
    "steps": (0.02, 0.05),
    "updates": 2000,
    "evaluations": 8,
}


def paper(flags: Paper) -> None:
    """Run the paper's experiment and draw its figure."""
    figure, quick = flags.figure, flags.quick
    settings: dict[str, Any] = {**_QUICK} if quick else {}
    settings |= {name: value for name, value in vars(flags.changes).items() if value is not None}
    experiment = replace(FIGURES[figure], **settings)
    folder = flags.folder or Path("runs") / f"paper-{figure}{'-quick' if quick else ''}"
    try:
        with SweepProgress("paper") as report:
            compute(
                experiment,
                folder / "cells",
                device=flags.device,
                precision=flags.precision,
                cores=flags.cores,
                report=report,
                on=cluster_of(flags),
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the runs that ended are kept in {folder}; go on with the same command") from None
    runs = outcomes(experiment, folder / "cells")
    files = write_all(experiment, runs, folder, figure, flags.loss, flags.accuracy, make_console(flags.json))
    finish(flags.json, "paper", folder=str(folder), files=[str(path) for path in files])

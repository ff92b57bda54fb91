"""Draw and tell everything in this folder from the runs that are kept in it; nothing is computed.

python experiments/paper/report.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grids import GRIDS
from rich.console import Console

from dualdelay.analysis.figures import draw_panels
from dualdelay.paper import pictures, tables
from dualdelay.paper.experiment import FIGURES, Cell
from dualdelay.paper.report import write_all

HERE = Path(__file__).parent
SINGLY = ("dude", "dude c=3", "vanilla", "fedbuff", "sync")


def outcomes(name: str) -> list[tables.Outcome]:
    """All runs of a grid."""
    return [run for experiment in GRIDS[name] for run in tables.outcomes(experiment, HERE / name / "cells")]


def about(seed: int) -> str:
    """How much of the work the fastest worker does."""
    times = Cell(FIGURES["figure1"], 5.0, seed).times
    return f"fastest worker {100 / min(times) / sum(1 / time for time in times):.0f}%"


def singly(found: Sequence[tables.Outcome], name: str) -> None:
    """Draw the most heterogeneous data at the most uneven speeds with every seed by itself."""
    choices = [choice for choice in tables.choose(found) if choice.panel == (0.1, 5.0) and choice.method in SINGLY]
    caption = "10 workers, alpha = 0.1, std = 5; each method at its best step over all seeds; shares of all gradients"
    draw_panels(pictures.seed_panels(choices, about), HERE / name, caption)


def main() -> None:
    """Write all files."""
    console = Console(width=150, highlight=False, markup=False, soft_wrap=True)
    for name in ("figure1", "figure2"):
        paper = FIGURES[name]
        found = tables.outcomes(paper, HERE / name / "cells")
        write_all(paper, found, HERE / name, name, 1.5, 0.4, console)
        every, found = GRIDS[name], outcomes(name)
        seeds = max((experiment.seeds for experiment in every), key=len)
        wide = replace(paper, steps=every[0].steps, wait_for=every[0].wait_for, seeds=seeds)
        write_all(wide, found, HERE / name / "wide", name, 1.5, 0.4, console)
    singly(outcomes("figure1"), "seeds")
    write_all(FIGURES["saturation"], outcomes("saturation"), HERE / "saturation", "saturation", 0.5, 0.55, console)
    best = tables.choose(outcomes("extreme"))
    caption = "10 workers, seed 6, in which one worker makes 78% of all gradients; each method at its best step tried"
    draw_panels(pictures.figure_panels(best, 20_000, 10), HERE / "extreme" / "extreme", caption)
    for name in ("extreme", "edge"):
        text = f"# {name}\n\nTraining loss F at the end, by step\n\n{tables.markdown(tables.steps(outcomes(name)))}"
        (HERE / name / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()

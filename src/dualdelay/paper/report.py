"""Everything that is written about an experiment's runs: figures, tables, raw curves and one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..analysis.figures import draw_panels
from ..analysis.printing import print_rows
from ..core.errors import BadInput
from ..storage.files import make_folder, save_table, write
from . import pictures, tables
from .experiment import Experiment

_READING = (
    "Every run ends at the simulated time in which a fully asynchronous method makes {updates:,} updates; times are in "
    "thousands of such updates. Of the steps the one with the lowest mean training loss at the end is shown; it is on the "
    "edge where it is the smallest or largest that was tried."
)


def write_all(
    experiment: Experiment,
    runs: Sequence[tables.Outcome],
    folder: Path,
    name: str,
    loss: float,
    accuracy: float,
    console: Console,
) -> list[Path]:
    """Write the figures, the tables and the raw curves of these runs into a folder, and print the main table."""
    make_folder(folder)
    choices = tables.choose(runs)
    rows = tables.summary(choices, loss, accuracy)
    console.print(f"{name}: at the end, mean ± standard deviation over seeds; times in 1,000 asynchronous updates")
    for panel in dict.fromkeys(row[0] for row in rows[1:]):
        print_rows(panel, [row[1:] for row in rows if row is rows[0] or row[0] == panel], console)
    parts = {
        "At the end, each method at its best step": rows,
        f"{choices[0].method} against the others, seed by seed (above zero it is ahead)": tables.paired(choices),
        "Training loss F at the end, by step": tables.steps(runs),
    }
    text = "".join(f"## {part}\n\n{tables.markdown(lines)}\n" for part, lines in parts.items())
    setting, values = _setting(experiment, runs), json.dumps(vars(experiment), indent=1) + "\n"
    files = [folder / f"{name}.md", folder / "curves.parquet", folder / "setting.json"]
    write(files[0], f"# {name}\n\n{setting}. {_READING.format(updates=experiment.updates)}\n\n{text}".encode())
    save_table(files[1], tables.curves(runs), {"experiment": json.loads(values)})
    write(files[2], values.encode())
    caption = f"{setting}; each method at the step with the lowest loss at the end; mean and standard deviation over seeds"
    try:
        panels = pictures.figure_panels(choices, experiment.updates, experiment.evaluations)
        files += draw_panels(panels, folder / name, caption)
        if len(experiment.steps) > 1:
            files += draw_panels([pictures.step_panels(runs)], folder / "steps", f"{setting}; mean over seeds")
    except BadInput as error:  # there is no matplotlib
        console.print(f"no figure: {error}")
    failed = int(tables.table_of(runs).ends().failed.sum())
    if failed:
        console.print(f"{failed} of {len(runs)} runs failed or diverged; they count as an infinite loss.")
    console.print(_ranking(choices))
    for path in files:
        console.print(f"wrote {path}")
    return files


def _ranking(choices: Sequence[tables.Choice]) -> str:
    """Which method has the lowest loss on each panel, and which is second."""
    parts, ends = [], tables.means(tables.table_of_choices(choices))
    for panel in dict.fromkeys(choice.panel for choice in choices):
        mean = {c.method: ends[str(panel), c.method]["mean"] for c in choices if c.panel == panel}
        best, *others = sorted(mean, key=lambda method: mean[method])
        then = f" (then {others[0]} {mean[others[0]]:.3f})" if others else ""
        parts.append(f"{tables.heading(panel)}: {best} {mean[best]:.3f}{then}")
    return f"Lowest training loss: {'; '.join(parts)}."


def _setting(experiment: Experiment, runs: Sequence[tables.Outcome]) -> str:
    """What was run, in a line for a caption."""
    seeds = {}
    for std in experiment.stds:
        seeds[std] = ", ".join(map(str, sorted({run.seed for run in runs if run.panel[1] == std})))
    different = len(set(seeds.values())) > 1
    texts = [f"{text} (std {std:g})" for std, text in seeds.items()] if different else [seeds[experiment.stds[0]]]
    steps = ", ".join(f"{step:g}" for step in experiment.steps)
    return f"{experiment.workers} workers, {experiment.problem}; seeds {' and '.join(texts)}; steps {steps}"

"""All methods on heterogeneous data: the loss over simulated time, each method at its own best step.

python experiments/methods/compare.py [--quick]

computes what is missing (also by itself: python experiments/methods/runs.py, which needs torch and numpy alone), and writes
a figure and tables; killed, it goes on where it was. With --quick it is a trial over a twentieth of the time, which is kept
elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from page import fill
from settings import EVALUATIONS, FAMILIES, LABELS, SEEDS, SETTINGS, STDS, WITH_LOCAL_STEPS, Setting, entries

from dualdelay.analysis.figures import Curve, Panel, draw_panels
from dualdelay.paper.tables import GROUP, Choice, Outcome, by_step, choose, markdown, means, table_of, table_of_choices
from dualdelay.storage.files import write
from runs import compute, outcomes

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
Panel3 = tuple[str, float, int]
Best = dict[Panel3, dict[str, Choice]]
HEIGHT = {"logistic": "F - F*", "digits": "F"}


def best_of(found: Sequence[Outcome]) -> Best:
    """The chosen step of each method, by setting and method."""
    best: Best = {}
    choices = choose(found)
    mean = at_the_end(choices)
    for choice in sorted(choices, key=lambda choice: mean[choice.panel, choice.method]):
        best.setdefault(choice.panel, {})[choice.method] = choice
    return {panel: best[panel] for panel in dict.fromkeys(choice.panel for choice in choices)}


def at_the_end(choices: Sequence[Choice], metric: str = "objective") -> dict[tuple[Panel3, str], float]:
    """The mean over seeds at the end, by setting and method."""
    found = means(table_of_choices(choices), metric)
    return {(choice.panel, choice.method): found[str(choice.panel), choice.method]["mean"] for choice in choices}


def _power(lr: float) -> str:
    power = np.log2(lr)
    return f"2<sup>{power:g}</sup>" if power == round(power) else f"{lr:g}"


def summary(best: Best, tried: dict[tuple[Panel3, str], int]) -> str:
    """Where each method ends in each setting, its rank there, and its step; one that is not tried there has no entry."""
    rows = [["method", *(Setting(*panel).title for panel in best), "mean rank", "steps tried"]]
    mean = at_the_end([choice for some in best.values() for choice in some.values()])
    ranks = {s: {e: 1 + sum(mean[s, o] < mean[s, e] for o in some) for e in some} for s, some in best.items()}
    names = {entry: [s for s in best if entry in best[s]] for some in best.values() for entry in some}
    place = {entry: float(np.mean([ranks[s][entry] for s in panels])) for entry, panels in names.items()}
    for entry in sorted(names, key=lambda entry: place[entry]):
        cells = []
        for setting, some in best.items():
            if entry not in some:
                cells.append("-")
                continue
            choice, rank = some[entry], ranks[setting][entry]
            value = mean[setting, entry]
            text = f"{value:.2g}" if value < 0.1 else f"{value:.3f}"
            edge = ", edge" if choice.edge else ""
            cells.append(
                f"{'**' if rank == 1 else ''}{text}{'**' if rank == 1 else ''} ({rank}; {_power(choice.lr)}{edge})"
            )
        steps = [tried[setting, entry] for setting in names[entry]]
        rows.append([LABELS[entry], *cells, f"{place[entry]:.1f}", f"{min(steps)} to {max(steps)}"])
    return markdown(rows)


def details(best: Best) -> str:
    """What else is known of the runs at the chosen steps."""
    rows = [
        ["setting", "method", "step", "at the end, by seed", "F less DuDe's, by seed", "accuracy", "updates", "tau_max"]
    ]
    accuracy = at_the_end([choice for some in best.values() for choice in some.values()], "accuracy")
    for panel, some in best.items():
        mine = some["dude"].values("objective")
        for entry, choice in some.items():
            values = choice.values("objective")
            each = " ".join(f"{value:.3g}" for value in values)
            apart = " ".join(f"{value:+.2g}" for value in values - mine)
            cells = [Setting(*panel).title, LABELS[entry], _power(choice.lr), each, apart]
            cells += [f"{accuracy[panel, entry]:.3f}", f"{np.mean([run.updates for run in choice.runs]):,.0f}"]
            rows.append([*cells, " ".join(str(run.tau_max) for run in choice.runs)])
    return markdown(rows)


def steps(found: Sequence[Outcome]) -> str:
    """The mean over seeds at the end for every step tried."""
    powers = sorted({run.lr for run in found})
    rows = [["setting", "method", *map(_power, powers)]]
    ends = means(table_of(found), by=(*GROUP, "lr"))
    for panel, entry in by_step(found):
        tried = [ends.get((str(panel), entry, lr)) for lr in powers]
        cells = ["" if end is None else f"{end['mean']:.3g}" for end in tried]
        rows.append([Setting(*panel).title, LABELS[entry], *cells])
    return markdown(rows)


def biased() -> str:
    """Where vanilla ASGD tends to, worked out from the data and the speeds without a run."""
    rows = [["setting", *(f"seed {seed}" for seed in SEEDS), "mean"]]
    for setting in SETTINGS:
        if setting.problem == "logistic":
            values = [setting.biased(seed) for seed in SEEDS]
            cells = [f"{value:.4f}" for value in (*values, np.mean(values))]
            rows.append([f"{setting.problem}, std = {setting.std:g}", *cells])
    return markdown(rows)


def figure(best: Best, path: Path) -> None:
    """A row for each problem and a column for each family, at the most uneven speeds."""
    rows = []
    share = np.linspace(0, 1, EVALUATIONS + 1)
    for problem, height in HEIGHT.items():
        some = best[problem, STDS[0], 1]
        panels = []
        for family, members in FAMILIES.items():
            curves = []
            for entry in members:
                runs = [run for run in some[entry].runs if run.failed is None]
                values = np.mean([run.curves["objective"] for run in runs], axis=0)
                curves.append(Curve(entry, LABELS[entry], share, values))
            panels.append(Panel(f"{problem}: {family}", "simulated time, as a share of all", height, curves, log="y"))
        rows.append(panels)
    caption = (
        f"10 workers with heterogeneous data and speeds TN(1, {STDS[0]:g}); the mean of {len(SEEDS)} seeds, each method at "
        "its own best step; DuDe is drawn in every panel. Where methods differ a lot the mean is mostly that of the seed "
        "with the fastest worker"
    )
    draw_panels(rows, path, caption)


def main(quick: bool) -> None:
    """Compute what is missing, then write everything."""
    settings = (*SETTINGS, *WITH_LOCAL_STEPS)
    if quick:
        settings = tuple(replace(setting, arrivals=200) for setting in settings)
    folder = Path("runs/methods-quick") if quick else HERE / "results"
    books = compute(settings, folder)
    found = [run for setting in settings for run in outcomes(setting, books[setting]) if run.seed in SEEDS]
    found = [run for run in found if run.method in entries(run.panel[2])]
    every = best_of(found)
    tried = {key: len(ends) for key, ends in by_step(found).items()}
    best = {setting.panel: every[setting.panel] for setting in SETTINGS}
    local = {panel: some for panel, some in sorted(every.items()) if panel[1] == STDS[0]}
    parts = {
        "table": summary(best, tried),
        "local": summary(local, tried),
        "details": details(every),
        "steps": steps(found),
    }
    parts["biased"] = biased()
    for name, text in parts.items():
        write(folder / f"{name}.md", text.encode())
    figure(best, folder / "methods")
    if not quick:
        write(DOCS / "pictures" / "methods.png", (folder / "methods.png").read_bytes())
        (folder / "methods.png").unlink()
        fill(**{name: parts[name] for name in ("table", "local", "biased")})
    print(parts["table"], parts["local"], sep="\n")


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])

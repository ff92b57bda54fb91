"""The losses of docs/results/tuning.md on the way: python experiments/tuning/curves.py draws docs/pictures/auto.png."""

from __future__ import annotations

import numpy as np
from report import DEFAULT, DOCS, SEEDS, best, with_paper

from dualdelay.analysis.figures import Curve, Panel, draw_panels

NAMES = {"dude": "best DuDe by hand", "fedbuff": "FedBuff", "vanilla": "vanilla ASGD", "sync": "synchronous SGD"}


def main() -> None:
    """One panel for each split and spread of speeds."""
    rows: list[list[Panel]] = [[], []]
    for place, panel in sorted(with_paper().items()):
        seeds, curves = SEEDS[place[0]], []
        keys = {name: best(panel, name, seeds)[0] for name in NAMES} | {"auto": ("auto", DEFAULT)}
        for name, key in keys.items():
            runs = np.array([panel[key][seed].curve for seed in seeds])
            share = np.linspace(0.0, 1.0, runs.shape[1])
            band = (runs.min(0), runs.max(0)) if name == "auto" else ()
            curves.append(Curve(name, NAMES.get(name, "AutoDuDe"), share, runs.mean(0), *band))
        title = f"{place[0]} workers, alpha {place[1]:g}, std {place[2]:g}"
        rows[place[0] == 30].append(Panel(title, "share of the time", "training loss F", curves, log="y", plain=True))
    caption = "Means of five seeds, and AutoDuDe's range; the others with the step (and DuDe the c) of the lowest loss "
    draw_panels(rows, DOCS / "pictures" / "auto", caption + "at the end.", kinds=("png",))


if __name__ == "__main__":
    main()

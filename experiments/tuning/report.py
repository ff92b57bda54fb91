"""The tables and the figure of docs/results/tuning.md, from the committed runs: python experiments/tuning/report.py."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dualdelay.analysis.figures import Curve, Panel, draw_panels
from dualdelay.storage.files import write

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
SEEDS = {10: (0, 1, 2, 3, 4), 30: (0, 1, 2, 3, 5)}  # of thirty workers seed 4 is among the extreme ones
DEFAULT = 0.6  # the lr of the first rule, and of its first version, "waiting"
LATE = 5  # of 25 evaluations
RULES = {"auto": "first rule", "waiting": "first rule, last gradients"}  # what the files call auto and waiting


class End(NamedTuple):
    """What a run came to."""

    loss: float
    accuracy: float
    tau_max: float
    tau_avg: float
    curve: Sequence[float] = (math.inf,)  # the losses on the way

    @property
    def late(self) -> float:
        """The mean of the last fifth of them: a single one is partly chance."""
        return fmean(self.curve[-LATE:])


Panels = dict[tuple[int, float, float], dict[tuple[str, float], dict[int, End]]]  # (n, alpha, std), (method, step), seed


def stage(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every run of a stage, with what its place was."""
    for cell in json.loads((HERE / "results" / f"{name}.json").read_text()):
        yield from ((cell["about"], run) for run in cell["runs"])


def gathered(*stages: str) -> Panels:
    """The ends of runs by panel, method and step, and seed; a run that failed has an infinite loss."""
    panels: Panels = defaultdict(lambda: defaultdict(dict))
    for name in stages:
        for about, run in stage(name):
            names = ("objective", "accuracy", "tau_max", "tau_avg", "curve")
            end = (math.inf, 0.1, 0, 0) if "failed" in run else (run[name] for name in names)
            key = (about["workers"], run["alpha"], about["std"])
            panels[key][run["method"], run["lr"]][about["seed"]] = End(*end)
    return panels


def paper(figure: str) -> Panels:
    """The same of the committed runs of a figure of the paper."""
    panels: Panels = defaultdict(lambda: defaultdict(dict))
    for path in sorted((HERE.parent / "paper" / figure).rglob("std*.json")):
        book = json.loads(path.read_text())
        about = book["about"]
        for name, run in book["runs"].items():
            alpha, method, lr = (part.strip() for part in name.split(","))
            ends = (run["objective"][-1], run["accuracy"][-1], run["tau_max"], run["tau_avg"], run["objective"])
            key = (about["workers"], float(alpha.split()[1]), about["std"])
            panels[key][method, float(lr.split()[1])][about["seed"]] = End(*ends)
    return panels


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of them headings, as a table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]]) + "\n"


def mean(ends: dict[int, End], seeds: Sequence[int], what: str = "loss") -> float:
    """The mean over these seeds of the loss, or of another number."""
    return fmean(getattr(ends[seed], what) for seed in seeds)


def best(
    panel: dict[tuple[str, float], dict[int, End]], name: str, seeds: Sequence[int], what: str = "loss"
) -> tuple[tuple[str, float], float]:
    """Of a method, with every wait_for, the lowest loss (the highest accuracy) of those that all seeds have."""
    mine = {key: ends for key, ends in panel.items() if key[0].split()[0] == name and ends.keys() >= set(seeds)}
    key = min(mine, key=lambda key: _sign(what) * mean(mine[key], seeds, what))
    return key, mean(mine[key], seeds, what)


def _sign(what: str) -> int:
    """Whether less of it is better (1) or more (-1)."""
    return -1 if what == "accuracy" else 1


def setting(panel: dict[tuple[str, float], dict[int, End]], key: tuple[str, float], seeds: Sequence[int]) -> str:
    """A step, whether it is at the edge of those tried with the same wait_for, and that one."""
    tried = [lr for (name, lr), ends in panel.items() if name == key[0] and ends.keys() >= set(seeds)]
    edges = {max(tried): " max", min(tried): " min"} if len(tried) > 1 else {key[1]: " only"}
    c = f", c = {key[0].split('=')[1]}" if "=" in key[0] else ""
    return f"{key[1]:g}{edges.get(key[1], '')}{c}"


def with_paper() -> Panels:
    """Runs by hand and those of the first rule; those of ten workers with the paper's steps are in experiments/paper."""
    panels = gathered("auto", "waiting", "tuned")
    for key, runs in paper("figure1").items():
        for name, ends in runs.items():
            panels[key][name] |= {seed: end for seed, end in ends.items() if seed in SEEDS[10]}
    return panels


def compared(what: str) -> str:
    """The first rule as it comes against all others at their best, by the loss at the end, the late one or the accuracy."""
    names = ("dude", "vanilla", "fedbuff", "sync")
    heads = ["first rule", "best DuDe", "vanilla", "FedBuff", "synchronous", "against DuDe", "against the best rival"]
    rows = [["n, alpha, std", *heads]]
    for (n, alpha, std), panel in sorted(with_paper().items()):
        seeds = SEEDS[n]
        auto = panel["auto", DEFAULT]
        found = {name: best(panel, name, seeds, what) for name in names}
        values = [mean(auto, seeds, what), *(value for _, value in found.values())]
        least = min(values, key=lambda value: _sign(what) * value)
        shown = [f"**{value:.3f}**" if value == least else f"{value:.3f}" for value in values]
        cells = [f"{n}, {alpha:g}, {std:g}", shown[0]]
        settings = (setting(panel, key, seeds) for key, _ in found.values())
        cells += [f"{number} ({where})" for number, where in zip(shown[1:], settings, strict=True)]
        cells += [difference(auto, panel[found[name][0]], seeds, what) for name in ("dude", rival(found, what))]
        rows.append(cells)
    return markdown(rows)


def rival(found: dict[str, tuple[tuple[str, float], float]], what: str) -> str:
    """The best of vanilla ASGD, FedBuff and synchronous SGD."""
    return min(("vanilla", "fedbuff", "sync"), key=lambda name: _sign(what) * found[name][1])


def version() -> str:
    """The first version, with last gradients, against the best of all settings by hand: the loss at the end."""
    heads = ["last gradients", "against the best DuDe", "against the best rival", "best DuDe against that rival"]
    rows = [["n, alpha, std", *heads]]
    for (n, alpha, std), panel in sorted(with_paper().items()):
        seeds = SEEDS[n]
        found = {name: best(panel, name, seeds) for name in ("dude", "vanilla", "fedbuff", "sync")}
        mine, dude, other = (panel[key] for key in (("waiting", DEFAULT), found["dude"][0], found[rival(found, "loss")][0]))
        pairs = ((mine, dude), (mine, other), (dude, other))
        cells = [difference(*pair, seeds, "loss") for pair in pairs]
        rows.append([f"{n}, {alpha:g}, {std:g}", f"{mean(mine, seeds):.3f}", *cells])
    return markdown(rows)


def difference(one: dict[int, End], other: dict[int, End], seeds: Sequence[int], what: str) -> str:
    """How much larger it is, in per cent, and the paired difference with its standard error; of accuracies in points."""
    gaps = [getattr(one[seed], what) - getattr(other[seed], what) for seed in seeds]
    gap, error = fmean(gaps), standard_error(gaps)
    level = ", level" if abs(gap) < error else ""
    if what == "accuracy":
        return f"{100 * gap:+.1f} ± {100 * error:.1f}{level}"
    share = mean(one, seeds, what) / mean(other, seeds, what) - 1
    return f"{share:+.1%} ({gap:+.3f} ± {error:.3f}){level}"


def standard_error(values: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(values) / math.sqrt(len(values))


def means() -> str:
    """What running means are worth: the first rule beside the same with last gradients, by the late loss."""
    panels, keys = gathered("auto", "waiting"), [("auto", DEFAULT), *(("waiting", lr) for lr in (0.45, 0.6, 0.8))]
    heads = ["running means, 0.6", *(f"last gradients, {lr:g}" for _, lr in keys[1:]), "difference at 0.6"]
    rows = [["n, alpha, std", *heads]]
    columns, gaps = [], defaultdict[tuple[int, int], list[float]](list)  # of each draw of workers, in all its panels
    for (n, alpha, std), panel in sorted(panels.items()):
        columns.append([mean(panel[key], SEEDS[n], "late") for key in keys])
        ends = [panel[name, DEFAULT] for name in ("auto", "waiting")]
        for seed in SEEDS[n]:
            gaps[n, seed].append(ends[0][seed].late - ends[1][seed].late)
        gap = difference(ends[0], ends[1], SEEDS[n], "late")
        rows.append([f"{n}, {alpha:g}, {std:g}", *(f"{loss:.3f}" for loss in columns[-1]), gap])
    total = [fmean(column) for column in zip(*columns, strict=True)]
    of_draws = [fmean(some) for some in gaps.values()]
    share = f"{total[0] / total[2] - 1:+.1%} ({fmean(of_draws):+.3f} ± {standard_error(of_draws):.3f})"
    return markdown([*rows, ["mean of all", *(f"{loss:.3f}" for loss in total), share]])


def explored() -> str:
    """The ways of choosing a step, on the seeds that all of them have."""
    panels = gathered("explored")
    names = {
        (n, std): sorted(set.intersection(*(set(ends) for ends in panel.values()))) for (n, _, std), panel in panels.items()
    }
    rows = [
        [
            "rule",
            "number",
            *(f"n = {n}, std {std:g}, seeds {' '.join(map(str, seeds))}" for (n, std), seeds in sorted(names.items())),
        ]
    ]
    ordered = dict.fromkeys((_rule(method), lr) for panel in panels.values() for method, lr in panel)
    for rule, lr in sorted(ordered):
        cells = []
        for n, alpha, std in sorted(panels):
            found = [ends for (method, step), ends in panels[n, alpha, std].items() if (_rule(method), step) == (rule, lr)]
            cells.append(f"{mean(found[0], names[n, std]):.3f}" if found else "")
        rows.append([rule, f"{lr:g}", *cells])
    return markdown(rows)


def _rule(method: str) -> str:
    """A variant's name, whose number of workers waited for is a third of all."""
    return re.sub(r"(c|buffer)=\d+", r"\1 = n/3", method)


def extreme() -> str:
    """One very fast worker."""
    panels = gathered("extreme", "waiting", "auto")
    rows = [["place", "method", "step or number", "F", "accuracy"]]
    for (n, alpha, std), seed, fast in (((30, 0.05, 1.0), 4, 365), ((10, 0.1, 5.0), 6, 70)):
        for (method, lr), ends in sorted(panels[n, alpha, std].items()):
            if seed in ends:
                place = f"n = {n}, alpha {alpha:g}, std {std:g}, seed {seed}: {fast} times"
                end = ends[seed]
                rows.append([place, RULES.get(method, method), f"{lr:g}", f"{end.loss:.3f}", f"{end.accuracy:.3f}"])
    return markdown(rows)


def steps() -> tuple[str, Panel, Panel]:
    """The best fixed step of DuDe times both delays, and the loss against these products."""
    rows = [["n, alpha, std, c", "best step", "times tau_avg", "times tau_max"]]
    panels = {**paper("figure1"), **paper("figure2")}
    more = gathered("tuned")  # of ten workers larger steps
    curves: dict[str, list[Curve]] = {"tau_avg": [], "tau_max": []}
    for (n, alpha, std), panel in sorted(panels.items()):
        for method in ("dude", "dude c=2", "dude c=3", "dude c=5"):
            ends = {lr: runs for (name, lr), runs in panel.items() if name == method}
            if n == 10:
                ends |= {lr: runs for (name, lr), runs in more[n, alpha, std].items() if name == method}
            seeds = sorted(set.intersection(*(set(runs) for runs in ends.values())))
            losses = {lr: mean(runs, seeds) for lr, runs in sorted(ends.items())}
            lr = min(losses, key=lambda lr: losses[lr])
            at = {k: fmean(getattr(ends[lr][seed], k) for seed in seeds) for k in curves}
            c = method.partition("=")[2] or "1"
            edge = " (largest tried)" if lr == max(losses) else ""
            rows.append([f"{n}, {alpha:g}, {std:g}, {c}", f"{lr:g}{edge}", *(f"{lr * at[k]:.2f}" for k in curves)])
            for k in curves:
                xs, least = [lr * at[k] for lr in losses], min(losses.values())
                number = 1 if n == 10 else 2
                curves[k].append(Curve(f"workers {number}", f"{n} workers", xs, [loss / least for loss in losses.values()]))
    made = [Panel(f"step x {k}", f"step x {k}", "F / F at the best step", curves[k], log="x") for k in curves]
    return markdown(rows), made[0], made[1]


def fill(table: str) -> None:
    """Fill the page; the table of steps is that of ``steps``."""
    small = (HERE / "results" / "small.md").read_text().replace("| AutoDuDe |", "| first rule |")
    text = (DOCS / "results" / "tuning.md").read_text()
    tables = {
        "steps": table,
        "compared": compared("loss"),
        "late": compared("late"),
        "accuracy": compared("accuracy"),
        "means": means(),
        "version": version(),
        "explored": explored(),
        "extreme": extreme(),
        "small": small,
    }
    for name, part in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{part}\n{end}{rest.split(end)[1]}"
    write(DOCS / "results" / "tuning.md", text.encode())


def main() -> None:
    """Fill the page and draw its figure."""
    table, *panels = steps()
    figures = draw_panels(
        [panels],
        DOCS / "pictures" / "tuning",
        "One line for each split, spread of speeds and wait_for: fixed steps of DuDe.",
    )
    figures[1].replace(HERE / "results" / "tuning.pdf")
    fill(table)


if __name__ == "__main__":
    main()

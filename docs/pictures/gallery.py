"""The pictures of docs/results/gallery.md, from committed results: python docs/pictures/gallery.py [NAME ...]."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dualdelay.algorithms import ALGORITHMS
from dualdelay.analysis.figures import look, pyplot, save_figure

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "experiments" / "methods" / "results"
GPU = HERE.parents[1] / "benchmarks" / "gpu.txt"
RUN = re.compile(r"^(.+), lr (\S+), seed (\d+)$")
GREY = "#707070"


def ends(setting: str) -> dict[str, dict[float, list[float]]]:
    """By method and step, the height at the end for each of the seeds that are reported, infinite where a run failed."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    book = json.loads((RESULTS / f"{setting}.json").read_text())
    for name, run in book["runs"].items():
        ((method, step, seed),) = RUN.findall(name)
        if seed in book["seeds"]:
            base, _, power = step.partition("^")
            height = run["objective"][-1] if run.get("failed") is None and len(run["objective"]) == 26 else np.inf
            found[method][float(base) ** float(power or 1)].append(np.inf if height is None else height)
    return found


def best(setting: str) -> dict[str, float]:
    """By method, the lowest mean over seeds at the end, as the page of methods has it."""
    return {method: min(np.mean(values) for values in steps.values()) for method, steps in ends(setting).items()}


def limits() -> Any:
    """Where each method ends on three workers that want 0, 6 and 12 and need 1, 2 and 4 seconds."""
    lines = [line.split("|") for line in (RESULTS / "limits.md").read_text().splitlines()[2:]]
    measured = {line[1].strip(): float(line[4].split()[0]) for line in lines}
    names = sorted(measured, key=lambda name: (-round(measured[name], 1), name))
    figure, axis = pyplot().subplots(figsize=(6.4, 6.6), layout="constrained")
    for row, name in enumerate(names):
        right = abs(measured[name] - 6) < 0.1
        axis.plot([measured[name], 6], [row, row], color="#D55E00", linewidth=1.2, alpha=0.5)
        axis.plot(measured[name], row, "o" if right else "s", color="#0072B2" if right else "#D55E00", markersize=5)
    axis.axvline(6, color=GREY, linewidth=1, zorder=0)
    axis.set(yticks=range(len(names)), xlim=(1.4, 6.6), ylim=(len(names), -1), xlabel="x at the end")
    axis.set_yticklabels(names, fontsize=7)
    axis.text(5.93, len(names) - 0.2, "least point of F", ha="right", fontsize=8, color=GREY)
    axis.set_title("Workers want 0, 6, 12 and need 1, 2, 4 seconds", fontsize=10)
    return figure


def conflict() -> Any:
    """Where no model suits all workers against where one does, for every method at its own best step."""
    across, up = best("logistic-std5"), best("digits-std5")
    named = {"dude": (-3, 8), "vanilla": (-8, -7), "sync": (7, 5), "adsaga": (7, -9), "auto": (7, -9), "fedbuff": (-8, 3)}
    named |= {"delayed_nesterov": (-8, -9), "shuffled": (7, 3), "rennala": (-8, 5), "ormo": (-8, 4)}
    figure, axis = pyplot().subplots(figsize=(6.4, 4.4), layout="constrained")
    for method in across.keys() & up.keys() & ALGORITHMS.keys():
        style = look(method)
        known = method in named
        size = 8 if known else 4
        axis.plot(across[method], up[method], marker=style["marker"], color=style["color"] if known else "#b0b0b0", ms=size)
        if known:
            place, side = named[method], "left" if named[method][0] > -5 else "right"
            title = ALGORITHMS[method].title
            axis.annotate(title, (across[method], up[method]), place, textcoords="offset points", fontsize=8.5, ha=side)
    tends_to = float((RESULTS / "biased.md").read_text().splitlines()[2].split("|")[-2])
    axis.axvline(tends_to, color="#D55E00", linestyle=":", zorder=0)
    axis.text(tends_to * 0.93, 1.0, "where vanilla tends to", fontsize=8, color="#8a3c00", ha="right", va="top")
    axis.set(xscale="log", yscale="log", xlim=(2.5e-4, 0.1), ylim=(0.0037, 1.2))
    axis.set_xlabel("workers in conflict: F - F* (logistic regression)", fontsize=9)
    axis.set_ylabel("one model fits all: F (digits)", fontsize=9)
    return figure


def steps() -> Any:
    """The height at the end against the step: the mean of three seeds, and from the lowest to the highest."""
    figure, axes = pyplot().subplots(1, 2, figsize=(7.2, 3.3), layout="constrained")
    for axis, setting, label in zip(
        axes, ("logistic-std5", "digits-std5"), ("F - F*, workers in conflict", "F, one model fits all"), strict=True
    ):
        found = ends(setting)
        for method in ("dude", "vanilla", "sync", "auto"):
            values = {step: heights for step, heights in sorted(found[method].items()) if np.isfinite(heights).all()}
            style = look(method)
            x, y = list(values), np.array(list(values.values()))
            axis.plot(x, y.mean(1), markersize=4, label=ALGORITHMS[method].title, **style)
            axis.fill_between(x, y.min(1), y.max(1), color=style["color"], alpha=0.12, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel="step (of AutoDuDe: its number)", title=label)
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
    axes[0].set_ylim(1e-4, 3)
    axes[1].set_ylim(5e-3, 5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def local_steps() -> Any:
    """Where methods end with jobs of 1, 5 and 20 gradients, all with as many gradients in all."""
    shown = ("dude", "auto", "vanilla", "sync", "ca2fl", "scaffold")
    figure, axes = pyplot().subplots(1, 2, figsize=(7.2, 3.3), layout="constrained")
    for axis, problem, label in zip(
        axes, ("logistic", "digits"), ("F - F*, workers in conflict", "F, one model fits all"), strict=True
    ):
        found = [best(f"{problem}-std5{suffix}") for suffix in ("", "-k5", "-k20")]
        for method in shown:
            axis.plot(
                [1, 2, 3], [each[method] for each in found], label=ALGORITHMS[method].title, markersize=5, **look(method)
            )
        axis.set(yscale="log", xticks=[1, 2, 3], xticklabels=["1", "5", "20"], xlabel="gradients in a job", title=label)
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return figure


def speed() -> Any:
    """Microseconds for a gradient of LeNet on one GPU, by how many runs are computed side by side."""
    first = GPU.read_text().split("\n\n")[0]
    plain = float(re.findall(r"plain loop (\d+) us", first)[-1])
    found = dict(re.findall(r"^(\d+) runs that share a schedule +([\d.]+) us", first, re.M))
    found |= dict(re.findall(r"^(\d+) runs \(.*\), float32 +([\d.]+) us", first, re.M))  # of 36 runs, a longer reading
    shared = [(int(runs), float(us)) for runs, us in found.items()]
    names = ["plain PyTorch loop", *(f"{runs} run{'s' * (runs > 1)} at once" for runs, _ in shared)]
    values = [plain, *(us for _, us in shared)]
    figure, axis = pyplot().subplots(figsize=(6.4, 2.6), layout="constrained")
    axis.scatter(values, names, color=[GREY, *["#0072B2"] * len(shared)], s=50)
    for value, name in zip(values, names, strict=True):
        axis.annotate(f"{value:,.0f}", (value, name), (9, -3), textcoords="offset points", fontsize=9)
    axis.grid(axis="x", alpha=0.25)
    axis.set(
        xscale="log",
        xlim=(8, 5000),
        ylim=(-0.6, len(names) - 0.4),
        xlabel="microseconds for a gradient of one run (LeNet, batches of 64, H200)",
    )
    axis.xaxis.label.set_fontsize(9)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {each.__name__: each for each in (limits, conflict, steps, local_steps, speed)}


def draw(names: list[str], folder: Path) -> Iterator[Path]:
    """Write the pictures of these names."""
    for name in names or PICTURES:
        yield save_figure(PICTURES[name](), folder / f"gallery_{name}.png", "png")


if __name__ == "__main__":
    for written in draw(sys.argv[1:], HERE):
        print(written)

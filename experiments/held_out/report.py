"""Tables and pictures of the held-out runs: python experiments/held_out/report.py writes results.md and two PNGs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from compute import Study, outcome
from settings import SETTINGS, Setting

HERE = Path(__file__).parent
DUDE = ("dude", "dude c", "dude adamw", "dude c adamw")
STYLE = {
    "auto": ("#332288", "-"), "auto adamw": ("#332288", "--"), "dude": ("#0072B2", "-"), "dude c": ("#0072B2", "--"),
    "dude c adamw": ("#0072B2", "--"), "vanilla": ("#D55E00", "-"), "vanilla adamw": ("#D55E00", "-"),
    "fedbuff": ("#009E73", "-"), "fedbuff adamw": ("#009E73", "-"), "ca2fl": ("#33A9D0", "-"),
    "ca2fl adamw": ("#33A9D0", "-"),
    "fadas": ("#E7298A", ":"), "look-ahead": ("#7F7F7F", "-."),
}  # fmt: skip


class Judged:
    """What the judging seeds say of every method on a setting."""

    def __init__(self, name: str, setting: Setting) -> None:
        lines = (HERE / "results" / f"{name}.jsonl").read_text().splitlines()
        runs, self.name, self.setting = [json.loads(line) for line in lines], name, setting
        self.start = float(np.mean([one["curve"]["objective"][0] for one in runs if one["curve"]]))
        self.lr: dict[str, float] = {}
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for method in setting.methods:
            own = [one for one in runs if one["method"] == method]
            lr = Study(name, method, own).chosen()
            by_seed = {one["seed"]: one for one in own if one["lr"] == lr}
            if lr is not None and all(seed in by_seed for seed in setting.judging):
                self.lr[method], self.runs[method] = lr, [by_seed[seed] for seed in setting.judging]

    def values(self, method: str, column: str | None = None) -> np.ndarray[Any, Any]:
        """The outcome in each judging seed."""
        return np.array([outcome(one, column or self.setting.outcome) for one in self.runs[method]])

    def best(self, methods: tuple[str, ...] | None = None) -> str:
        """The method with the best mean, AutoDuDe itself not counted."""
        rivals = [name for name in self.runs if not name.startswith("auto") and (methods is None or name in methods)]
        return min(rivals, key=lambda name: self.values(name).mean())

    def ratio(self, other: str) -> str:
        """AutoDuDe's mean over another's, with the standard error over seeds of the paired ratio."""
        pairs = self.values("auto") / self.values(other)
        ratio = self.values("auto").mean() / self.values(other).mean()
        return f"{ratio:.2f} ± {pairs.std(ddof=1) / math.sqrt(len(pairs)):.2f}"

    def time_to(self, method: str, dude: str) -> list[float]:
        """The share of the run's length after which a method first is where DuDe ends; nan: never."""
        found = []
        for one, target in zip(self.runs[method], self.values(dude), strict=True):
            curve = zip(one["curve"]["time"], one["curve"][self.setting.outcome], strict=True)
            found.append(next((time / one["length"] for time, value in curve if value <= target), math.nan))
        return found


def shown(values: Any, digits: int = 3) -> str:
    """Numbers in a row."""
    return ", ".join("never" if math.isnan(value) else f"{value:.{digits}f}" for value in values)


def tables(judged: list[Judged]) -> str:
    """All tables as Markdown."""
    text = [
        "# AutoDuDe on held-out settings",
        "",
        "The protocol is in [README.md](README.md). Each number is the mean of a run's last four evaluations.",
    ]
    text += [
        "",
        "## In short",
        "",
        "| setting | AutoDuDe, by seed | best tuned DuDe | AutoDuDe over it | best tuned of all | AutoDuDe over it "
        "| failures |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios = []
    for one in judged:
        dude, best = one.best(DUDE), one.best()
        auto, rival = one.values("auto"), one.values(best)
        ratios.append(auto.mean() / rival.mean())
        start = one.start if one.setting.outcome == "objective" else 8.0
        failures = int(((auto > start) | (auto > 2 * rival)).sum())
        text.append(
            f"| {one.name} | {shown(auto)} | {dude} {one.values(dude).mean():.3f} | {one.ratio(dude)} | "
            f"{best} {rival.mean():.3f} | {one.ratio(best)} | {failures} of {len(auto)} |"
        )
    text += ["", f"Mean over settings of the ratio to the best tuned of all: {np.mean(ratios):.2f}."]
    for one in judged:
        dude = one.best(DUDE)
        other = "worst_bits_per_byte" if one.setting.outcome != "objective" else "accuracy"
        names = {"objective": "F", "bits_per_byte": "held-out bits per byte, mean over languages"}
        text += [
            "",
            f"## {one.name}",
            "",
            f"| method | step | {names[one.setting.outcome]}, by seed | mean | {other.replace('_', ' ')} "
            f"| time to the end of {dude} |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for method in sorted(one.runs, key=lambda name: one.values(name).mean()):
            values = one.values(method)
            text.append(
                f"| {method} | {one.lr[method]:.4g} | {shown(values)} | {values.mean():.3f} "
                f"| {shown(one.values(method, other))} | {shown(one.time_to(method, dude), 2)} |"
            )
        missing = [name for name in one.setting.methods if name not in one.runs]
        if missing:
            text += ["", f"No best step inside the grid was found for {', '.join(missing)}."]
    return "\n".join(text) + "\n"


def draw_settings(judged: list[Judged], path: Path) -> None:
    """The loss of every method over that of the best tuned DuDe, a panel's row for each setting."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    labels = {}
    for row, one in enumerate(reversed(judged)):
        base = one.values(one.best(DUDE))
        for method in ("auto", "dude", "dude c", "vanilla", "fedbuff", "ca2fl"):
            own = method if method in one.runs else f"{method} adamw"
            if own in one.runs:
                ratio = one.values(own) / base
                offset = {"auto": 0.22}.get(method, -0.12)
                filled = STYLE[method][1] == "-"
                mark = "^" if method == "auto" else "o"
                points = axes.scatter(
                    ratio, [row + offset] * len(ratio), s=40 if method == "auto" else 26, marker=mark,
                    edgecolors=STYLE[method][0], facecolors=STYLE[method][0] if filled else "none",
                )  # fmt: skip
                labels.setdefault(
                    {"dude c": "dude, c = n/4", "auto": "AutoDuDe, default"}.get(method, f"{method}, tuned"), points
                )
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [0.3, 0.5, 0.7, 1.0, 1.5, 2.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(judged)), [one.name for one in reversed(judged)])
    axes.set_xlabel("outcome over that of the best tuned DuDe in the same seed (lower is better)")
    figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def draw_language(one: Judged, path: Path) -> None:
    """Held-out bits per byte against time, the mean over languages and the worst language, mean of the judging seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained", sharex=True)
    columns = {"bits_per_byte": "mean over languages", "worst_bits_per_byte": "worst language"}
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for method in (
            "auto",
            "auto adamw",
            "dude c adamw",
            "vanilla adamw",
            "fedbuff adamw",
            "ca2fl adamw",
            "fadas",
            "look-ahead",
        ):
            if method in one.runs:
                curves = np.array([run["curve"][column][:21] for run in one.runs[method]]).mean(0)
                colour, line = STYLE[method]
                label = {"auto": "AutoDuDe, default", "look-ahead": "look-ahead, 16 local steps"}.get(method, method)
                axes.plot(np.linspace(0, 100, len(curves)), curves, line, color=colour, label=label, linewidth=1.5)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("time, % of the run")
    panels[0].set_ylabel("held-out bits per byte")
    panels[1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    all_judged = [Judged(name, setting) for name, setting in SETTINGS.items()]
    (HERE / "results.md").write_text(tables(all_judged))
    draw_settings(all_judged, HERE / "held_out.png")
    draw_language(all_judged[-1], HERE / "language.png")

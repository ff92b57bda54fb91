"""The theorem's bound and a smaller one against runs on noisy quadratics, where all constants are known.

python experiments/theory/bound.py

Four minutes on one core. It writes the figure docs/pictures/bound.png and all numbers to experiments/theory/bound.md. The
smaller bound is proved in docs/explanation/proof.md from the same hypotheses.

Every worker's curvature is a number, so that coordinates have nothing to do with one another: a run with eight times ten
coordinates is eight runs with ten, which share who arrives when and have each their own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import dualdelay as dd
from dualdelay import theory
from dualdelay.analysis.figures import Curve, Panel, draw_panels
from dualdelay.paper.tables import markdown
from dualdelay.storage.files import write

HERE = Path(__file__).parent
FIGURE = HERE.parents[1] / "docs" / "pictures" / "bound"

REPLICAS, SIZE, WORKERS = 8, 10, 10
EVEN = (1.0,) * WORKERS
UNEVEN = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0)
UNEQUAL = tuple(np.linspace(0.5, 1.0, WORKERS).tolist())
YLABEL = "squared norm of the gradient of F"


@dataclass(frozen=True)
class Setting:
    """Quadratics of ten coordinates with L = Delta = 1, and how they are run."""

    title: str
    variance: float  # sigma^2
    seconds: Sequence[float]  # of each worker
    curvatures: Sequence[float]  # of each worker, the largest 1
    updates: Sequence[int]  # lengths of runs, ascending
    rule: str = "theorem"  # whose step: the theorem's own, the "largest" that it covers, or that of the "shorter" proof

    @cached_property
    def delay(self) -> int:
        return theory.delays(dd.FixedSpeeds(self.seconds)).tau_max

    @cached_property
    def constants(self) -> tuple[float, float, float, int, int]:
        """L, Delta, sigma^2, tau_max and n; those of one replica, as measured."""
        found = theory.constants(self.problem(1))
        largest = max(each.value for each in found.smoothnesses)
        return largest, found.gap.value, found.variance.value, self.delay, WORKERS

    def problem(self, replicas: int) -> dd.Quadratic:
        centers = 30.0 * np.random.default_rng(0).normal(size=(WORKERS, SIZE))  # very heterogeneous workers
        a = np.array(self.curvatures)
        start = a @ centers / a.sum() + np.sqrt(2.0 / a.mean() / SIZE)  # F is 1 above its least value there
        tiled, noise = np.tile(centers, replicas), float(np.sqrt(self.variance / SIZE))
        return dd.Quadratic(tiled.tolist(), list(self.curvatures), noise, np.tile(start, replicas).tolist())

    def step(self, updates: int) -> float:
        if self.rule == "largest":
            return theory.largest_step(1.0, self.delay)
        return (
            shorter_step(*self.constants, updates) if self.rule == "shorter" else theory.step_size(*self.constants, updates)
        )

    def bound(self, updates: int) -> float:
        """The theorem's; nan for a step above those that it covers."""
        if self.rule == "shorter":
            return float("nan")
        return theory.bound(*self.constants, updates, self.step(updates) if self.rule == "largest" else None)

    def shorter(self, updates: int) -> float:
        """What the shorter proof gives for the same step."""
        return shorter_bound(*self.constants, updates, self.step(updates))


def shorter_step(smoothness: float, gap: float, variance: float, delay: int, workers: int, updates: int) -> float:
    """The step that makes ``shorter_bound`` smallest, at most 1 / (2 L tau_max)."""
    best = float(np.sqrt(workers * gap / (2.0 * smoothness * variance * delay * updates)))
    return min(best, 1.0 / (2.0 * smoothness * delay))


def shorter_bound(
    smoothness: float, gap: float, variance: float, delay: int, workers: int, updates: int, lr: float
) -> float:
    """2 Delta / (T eta) + 4 L tau_max eta sigma^2 / n, for a step of at most 1 / (2 L tau_max)."""
    assert lr <= 1.0 / (2.0 * smoothness * delay) * (1.0 + 1e-12)
    return 2.0 * gap / (updates * lr) + 4.0 * smoothness * delay * lr * variance / workers


def gradients(at: Setting, lr: float, updates: int) -> Any:
    """||grad F||^2 at the models 0..T of every replica, (T + 1, replicas)."""
    problem, curvature = at.problem(REPLICAS), float(np.mean(at.curvatures))
    best = problem.optimum()

    def square(x: Any) -> Any:
        return (curvature * (x - best)).square().view(REPLICAS, SIZE).sum(1).numpy()

    rows = [square(problem.start(0))]

    def keep(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version == len(rows):
            rows.append(square(state.x))

    run = dd.simulate(
        dd.DuDe(lr=lr),
        problem,
        dd.FixedSpeeds(at.seconds),
        updates=updates,
        watch=[keep],
        evaluation=dd.Evaluation(every=updates),
    )
    assert len(rows) == updates + 1 and run.delays.tau_max <= at.delay
    return np.stack(rows)


def measure(at: Setting) -> tuple[Any, Any]:
    """The mean over models 0..T-1 and the value at model T, for every length T and replica."""
    means, ends = [], []
    made: dict[float, Any] = {}  # by step: of runs with one step the shorter are the beginnings of the longest
    for updates in reversed(at.updates):
        lr = at.step(updates)
        if lr not in made:
            made[lr] = gradients(at, lr, updates)
        means.append(made[lr][:updates].mean(0))
        ends.append(made[lr][updates])
    return np.stack(means[::-1]), np.stack(ends[::-1])


def settings() -> list[Setting]:
    little = theory.horizon(1.0, 1.0, 1.0, 2 * WORKERS - 1, WORKERS)
    lengths = [*(round(10 ** (k / 4)) for k in range(8, 21)), round(little)]
    quiet = Setting("sigma² = 1, theorem's step", 1.0, EVEN, (1.0,) * WORKERS, lengths)
    noisy = Setting("sigma² = 1000, theorem's step", 1000.0, UNEVEN, UNEQUAL, [1])
    least = theory.horizon(*noisy.constants)
    longer = [int(np.ceil(least * 10 ** (k / 4))) for k in range(10)]
    return [
        quiet,
        replace(quiet, title="sigma² = 1, shorter proof's step", updates=lengths[:11], rule="shorter"),
        replace(noisy, updates=longer),
        replace(noisy, title="sigma² = 1000, largest step", updates=longer, rule="largest"),
    ]


def main() -> None:
    chosen, panels = settings(), []
    head = ["setting", "updates T", "step", "bound", "shorter proof", "mean over the run", "at its end"]
    lines = [[*head, "bound / mean", "shorter / mean", "bound / end"]]
    for at in track(chosen, "settings"):
        means, ends = measure(at)
        bounds, shorter = (np.array([of(updates) for updates in at.updates]) for of in (at.bound, at.shorter))
        curves = [
            Curve("bound 0", "bound on the mean", at.updates, bounds),
            Curve("shorter 3", "bound of the shorter proof", at.updates, shorter),
            Curve("mean 2", "mean over the run", at.updates, means.mean(1), means.min(1), means.max(1)),
            Curve("end 1", "at its end", at.updates, ends.mean(1), ends.min(1), ends.max(1)),
        ]
        panels.append(Panel(at.title, "updates T", YLABEL, curves[at.rule == "shorter" :], log="xy"))
        for k, updates in enumerate(at.updates):
            mean, end = means[k].mean(), ends[k].mean()
            cells = [f"{updates:,}", f"{at.step(updates):.2e}", f"{bounds[k]:.3g}", f"{shorter[k]:.3g}"]
            cells += [f"{now.mean():.3g} ({now.min():.2g} to {now.max():.2g})" for now in (means[k], ends[k])]
            cells += [f"{bounds[k] / mean:.0f}", f"{shorter[k] / mean:.2g}", f"{bounds[k] / end:.0f}"]
            lines.append([at.title, *("" if cell == "nan" else cell for cell in cells)])
    left, right = chosen[0].delay, chosen[-1].delay
    caption = (
        "Ten workers, L = Delta = 1; lines are means of eight replicas, bands their range. Above: equally fast, tau_max = "
        f"{left}; left until the theorem's horizon, the last point. Below: uneven speeds and curvatures, tau_max = "
        f"{right}, from the horizon on."
    )
    draw_panels([panels[:2], panels[2:]], FIGURE, caption, ("png",))
    text = (
        "# The bound and runs\n\nMade by `experiments/theory/bound.py`: ten workers, with centres far apart, ten "
        'coordinates,\nL = Delta = 1. In brackets the range over eight replicas. "shorter proof" is 2 Delta / (T eta) + '
        "4 L tau_max eta sigma² / n\nat the same step; the theorem does not cover the steps of the second setting.\n\n"
    )
    for at in chosen:
        text += f"- {at.title}: tau_max = {at.delay}, theorem's horizon {theory.horizon(*at.constants):,.0f} updates.\n"
    write(HERE / "bound.md", f"{text}\n{markdown(lines)}".encode())
    print(markdown(lines))


if __name__ == "__main__":
    main()

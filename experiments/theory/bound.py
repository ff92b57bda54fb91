"""The theorem's bound against runs on noisy quadratics, where all of its constants are known.

python experiments/theory/bound.py

Three minutes on one core. It writes the figure docs/pictures/bound.png and all numbers to experiments/theory/bound.md.

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
    capped: bool  # whether to take the largest step that is covered, else the theorem's own

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
        return theory.largest_step(1.0, self.delay) if self.capped else theory.step_size(*self.constants, updates)

    def bound(self, updates: int) -> float:
        return theory.bound(*self.constants, updates, self.step(updates) if self.capped else None)


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
    noisy = Setting("sigma² = 1000, theorem's step", 1000.0, UNEVEN, UNEQUAL, [1], False)
    least = theory.horizon(*noisy.constants)
    longer = [int(np.ceil(least * 10 ** (k / 4))) for k in range(10)]
    return [
        Setting("sigma² = 1, theorem's step", 1.0, EVEN, (1.0,) * WORKERS, lengths, False),
        replace(noisy, updates=longer),
        replace(noisy, title="sigma² = 1000, largest step", updates=longer, capped=True),
    ]


def main() -> None:
    chosen, panels = settings(), []
    lines = [["setting", "updates T", "step", "bound", "mean over the run", "at its end", "bound / mean", "bound / end"]]
    for at in track(chosen, "settings"):
        means, ends = measure(at)
        bounds = np.array([at.bound(updates) for updates in at.updates])
        curves = [
            Curve("bound 0", "bound on the mean", at.updates, bounds),
            Curve("mean 2", "mean over the run", at.updates, means.mean(1), means.min(1), means.max(1)),
            Curve("end 1", "at its end", at.updates, ends.mean(1), ends.min(1), ends.max(1)),
        ]
        panels.append(Panel(at.title, "updates T", YLABEL, curves, log="xy"))
        for k, updates in enumerate(at.updates):
            limit, mean, end = bounds[k], means[k].mean(), ends[k].mean()
            cells = [f"{updates:,}", f"{at.step(updates):.2e}", f"{limit:.3g}"]
            cells += [f"{now.mean():.3g} ({now.min():.2g} to {now.max():.2g})" for now in (means[k], ends[k])]
            lines.append([at.title, *cells, f"{limit / mean:.0f}", f"{limit / end:.0f}"])
    left, right = chosen[0].delay, chosen[-1].delay
    caption = (
        "Ten workers, L = Delta = 1; lines are means of eight replicas, bands their range. Left: equally fast, tau_max = "
        f"{left}, until the theorem's horizon, the last point. Middle and right: uneven speeds and curvatures, tau_max = "
        f"{right}, from the horizon on."
    )
    draw_panels([panels], FIGURE, caption, ("png",))
    head = (
        "# The bound and runs\n\nMade by `experiments/theory/bound.py`: ten workers, with centres far apart, ten "
        "coordinates,\nL = Delta = 1. In brackets the range over eight replicas.\n\n"
    )
    for at in chosen:
        head += f"- {at.title}: tau_max = {at.delay}, horizon {theory.horizon(*at.constants):,.0f} updates.\n"
    write(HERE / "bound.md", f"{head}\n{markdown(lines)}".encode())
    print(markdown(lines))


if __name__ == "__main__":
    main()

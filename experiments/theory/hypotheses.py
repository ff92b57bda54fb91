"""What becomes of the theorem without each of its two silent hypotheses, and its bounds against exact expectations.

python experiments/theory/hypotheses.py

Five minutes on one core. It writes all numbers to experiments/theory/hypotheses.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dualdelay as dd
from dualdelay import theory
from dualdelay.core.draws import Draws
from dualdelay.paper.tables import markdown
from dualdelay.storage.files import write

HERE = Path(__file__).parent


class SampledSpeeds(dd.SpeedModel):
    """A job takes five times as long if a sample of the worker had positive noise; ``shift`` says which.

    0: its own, -1: that of the job before, which waits in the table until this one arrives; None: another sample, that no
    gradient is computed with.
    """

    def __init__(self, workers: int, shift: int | None) -> None:
        self.n, self.shift = workers, shift
        self.draws = Draws(0, "noise" if shift is not None else "another")

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        sample, seconds = draw + (self.shift or 0), 1.0 + 0.013 * worker  # no two workers arrive together
        return seconds * 5.0 if sample >= 0 and self.draws.normals(1, worker, sample)[0] > 0 else seconds


def dependent_delays(updates: int, gap: float = 0.01, workers: int = 10) -> list[list[str]]:
    """F_i = x^2 / 2 at ten workers, noise with sigma = 1: the mean of x^2, and where x stays."""
    problem = dd.Quadratic([[0.0]] * workers, noise=1.0, start=[(2.0 * gap) ** 0.5], seed=0)
    lines = [
        [
            "a job's time depends on",
            "tau_max",
            "step",
            "theorem's bound",
            "mean squared gradient",
            "gradient, mean of last half",
        ]
    ]
    for name, shift in {"another sample": None, "its own sample": 0, "the sample before": -1}.items():
        speeds = SampledSpeeds(workers, shift)
        constants = (1.0, gap, 1.0, theory.delays(speeds, updates=updates).tau_max, workers)
        lr = theory.step_size(*constants, updates)
        values = values_of(problem, speeds, dd.DuDe(lr=lr), updates)[:, 0]
        cells = [f"{constants[3]}", f"{lr:.2e}", f"{theory.bound(*constants, updates):.3g}"]
        cells += [f"{(values[:updates] ** 2).mean():.3g}", f"{values[updates // 2 :].mean():.3f}"]
        lines.append([name, *cells])
    return lines


def values_of(problem: dd.Quadratic, speeds: dd.SpeedModel, method: dd.Algorithm, updates: int) -> Any:
    """The models 0..T of a run."""
    rows = [problem.start(0).numpy()]

    def keep(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version == len(rows):
            rows.append(state.x.numpy().copy())

    dd.simulate(method, problem, speeds, updates=updates, watch=[keep], evaluation=dd.Evaluation(every=updates))
    return np.stack(rows)


class SameSamples(dd.Quadratic):
    """Every worker's k-th job meets the noise of worker 0's."""

    def gradient(self, x: Any, worker: int, draw: int) -> Any:
        return super().gradient(x, 0, draw)


def shared_samples(updates: int = 500, size: int = 100, lr: float = 0.05) -> list[list[str]]:
    """E||grad F||^2 where runs stay, for F_i = ||x||^2 / 2 and sigma^2 = 1, all workers in every update."""
    lines = [["workers", "independent", "the same samples", "sigma² / n times eta / (2 - eta)"]]
    for workers in (1, 10, 100):
        cells = []
        for kind in (dd.Quadratic, SameSamples):
            problem = kind([[0.0] * size] * workers, noise=size**-0.5, seed=0)
            method = dd.DuDe(lr=lr, wait_for=workers)
            models = values_of(problem, dd.FixedSpeeds([1.0] * workers), method, updates)
            cells.append(f"{(models[updates // 10 :] ** 2).sum(1).mean():.2e}")
        lines.append([f"{workers}", *cells, f"{lr / (2.0 - lr) / workers:.2e}"])
    return lines


def shared_exactly(workers: int = 4000, gap: float = 1 / 4000) -> list[list[str]]:
    """The same with the theorem's step at its horizon, by formula: independent samples, and one sample for all."""
    constants = (1.0, gap, 1.0, 1, workers)
    updates = round(theory.horizon(*constants))
    lr, limit = theory.step_size(*constants, updates), theory.bound(*constants, updates)
    left = (1.0 - lr) ** (2.0 * np.arange(updates))
    lines = [["samples", "T", "step", "theorem's bound", "mean squared gradient"]]
    for name, variance in {"independent": 1.0 / workers, "the same": 1.0}.items():
        mean = (left * 2.0 * gap + (1.0 - left) * variance * lr / (2.0 - lr)).mean()
        lines.append([name, f"{updates:,}", f"{lr:.4g}", f"{limit:.3g}", f"{mean:.3g}"])
    return lines


def schedule(rng: np.random.Generator, workers: int, updates: int) -> tuple[Any, Any, int]:
    """A random order of arrivals: for each update the model and the sample of each gradient in the table; tau_max."""
    chance = rng.dirichlet(np.full(workers, rng.choice([0.5, 2.0, 50.0]))) * 0.9 + 0.1 / workers
    models, samples = np.zeros((updates, workers), int), np.zeros((updates, workers), int)
    samples[0], under_way = np.arange(workers), np.ones(workers, int)
    for t in range(2, updates + 1):
        models[t - 1], samples[t - 1] = models[t - 2], samples[t - 2]
        comes = rng.choice(workers, p=chance) if rng.random() < 0.8 else models[t - 1].argmin()
        models[t - 1, comes], samples[t - 1, comes], under_way[comes] = under_way[comes], workers + t - 2, t
    return models, samples, int((np.arange(1, updates + 1) - models.min(1)).max())


def expectation(a: Any, centers: Any, start: float, sigma: float, lr: float, models: Any, samples: Any) -> float:
    """The mean of E||grad F||^2 over a run, exactly: a model is a number and a multiple of each sample's noise."""
    updates, workers = models.shape
    x = np.zeros((updates + 1, updates + workers))  # the number, then multiples of updates + workers - 1 samples
    x[0, 0] = start
    for t in range(updates):
        gradient = a @ x[models[t]]
        gradient[0] -= a @ centers
        gradient[1 + samples[t]] += sigma
        x[t + 1] = x[t] - lr * gradient / workers
    gradients = a.mean() * x[:-1]
    gradients[:, 0] -= (a * centers).mean()
    return float((gradients**2).sum(1).mean())


def exact_ratios(problems: int = 4000) -> list[list[str]]:
    """The largest E / bound over random quadratics of one coordinate, orders of arrivals, steps, and lengths."""
    rng, found = np.random.default_rng(0), []
    while len(found) < problems:
        workers, updates = int(rng.integers(1, 7)), int(rng.integers(1, 121))
        a = 1.0 + rng.choice([0.0, 0.3, 1.0, 3.0]) * rng.normal(size=workers)  # some bend downwards, but F does not
        if a.mean() < 1e-3:
            continue
        centers = rng.choice([0.0, 10.0]) * rng.normal(size=workers)
        best, away, sigma = (a @ centers) / a.sum(), rng.choice([0.001, 0.1, 1.0, 10.0]), rng.choice([0.0, 0.1, 1.0, 10.0])
        models, samples, tau = schedule(rng, workers, updates)
        smooth, gap, part = float(np.sqrt((a**2).mean())), 0.5 * a.mean() * away**2, rng.choice([1.0, 0.5, 0.1, 0.03])
        ratios = []
        for shorter in (False, True):
            lr = part / ((2.0 if shorter else 64.0) * smooth * tau)
            if shorter:
                limit = 2.0 * gap / (updates * lr) + 4.0 * smooth * tau * lr * sigma**2 / workers
            else:
                limit = theory.bound(smooth, gap, sigma**2, tau, workers, updates, lr)
            ratios.append(expectation(a, centers, best + away, sigma, lr, models, samples) / limit)
        found.append((workers, *ratios))
    table = np.array(found)
    lines = [["workers", "problems", "bound / mean: theorem, least", "median", "shorter proof, least", "median"]]
    for name, rows in {"1": table[table[:, 0] == 1], "2 to 6": table[table[:, 0] > 1]}.items():
        cells = [f"{of(1.0 / rows[:, k]):.3g}" for k in (1, 2) for of in (np.min, np.median)]
        lines.append([name, f"{len(rows):,}", *cells])
    return lines


def main() -> None:
    parts: Sequence[tuple[str, Any]] = (
        (
            "Delays that depend on samples: ten workers with F_i = x² / 2, sigma = 1, Delta = 0.01, T = 100,000, the\n"
            "theorem's step. A job takes five times as long if the noise of the sample that is named was positive.",
            dependent_delays(100_000),
        ),
        (
            "The same samples at all workers: F_i = ||x||² / 2 with 100 coordinates, sigma² = 1, step 0.05, every update\n"
            "waits for all. The mean of ||grad F||² over the updates 50 to 500.",
            shared_samples(),
        ),
        (
            "The same by formula, with one coordinate, the theorem's step at its horizon, 4,000 workers,\n"
            "Delta = 1 / 4,000 and tau_max = 1.",
            shared_exactly(),
        ),
        (
            "Both bounds against exact expectations: random quadratics of one coordinate (curvatures of either sign,\n"
            "centres apart or not), orders of arrivals, steps up to the largest that each bound covers, 1 to 120 updates.",
            exact_ratios(),
        ),
    )
    text = "# The theorem's hypotheses\n\nMade by `experiments/theory/hypotheses.py`.\n"
    for what, lines in parts:
        text += f"\n{what}\n\n{markdown(lines)}"
    write(HERE / "hypotheses.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()

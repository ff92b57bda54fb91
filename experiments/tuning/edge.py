"""Which delay bounds DuDe's step: its stability edge on quadratics without noise, times the mean and the largest delay.

python experiments/tuning/edge.py         three minutes of one core; prints experiments/tuning/edge.md and writes it

Who reports when does not depend on the step, so one simulated run gives the versions u_i(t) in use, and with curvatures L_i
x_t = x_{t-1} - step_t / n sum_i L_i x_{u_i(t)} is computed for many steps at once. With L = mean L_i = 1 the weights are
1 / n each in case (a), and in case (b) they are 1 for the slowest worker and 0 for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from first import FirstRule

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from dualdelay.theory.staleness import tau_avg

Array = npt.NDArray[Any]

SEEDS, JOBS = range(10), 40  # fleets of each kind; jobs of the slowest worker in a run
LONG, SIDES = 120, (0.9, 1.1)  # AutoDuDe goes to and fro between two wait_for, so its runs are longer
KAPPA = 0.6
EQUAL, WORST = np.geomspace(1.0, 400.0, 240), np.geomspace(0.5, 5.0, 100)  # steps to try, times tau_avg and tau_max
FASTEST, STARTS = np.geomspace(0.15, 1.5, 116), 4  # from some starts, lest x is near zero just when it is looked at


@dataclass(frozen=True)
class Found:
    """What came of one fleet and one wait_for."""

    n: int
    std: float
    c: int
    seed: int
    tau_avg: float
    tau_max: int
    slowest: float  # the mean delay of the slowest worker's gradients
    equal: float  # the edge with equal curvatures
    guess: float  # the same, from the shares of delays alone
    fastest: float  # the step that contracts fastest
    double: float  # the same, from the shares of delays alone
    worst: float  # the edge with the curvature in the slowest worker


@dataclass(frozen=True)
class Auto:
    """What came of AutoDuDe (its first rule) on one fleet: by how much its lr can be multiplied."""

    n: int
    std: float
    seed: int
    c: float
    delay: float  # the mean, in the second half
    largest: int
    equal: float
    worst: float
    again: bool  # whether it is stable again a tenth above the edge with equal curvatures


def replay(tau: Array, weights: Array, steps: Array, scale: Array, past: int = 0) -> Array:
    """The models of each version (rows) for each step (columns), from 1 or from a random past of so many updates."""
    x = np.ones((len(tau) + 1, len(steps)))
    if past:
        x[: past + 1] = np.random.default_rng(0).standard_normal((past + 1, len(steps)))
    versions = np.arange(1, len(tau) + 1)[:, None] - tau
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(past, len(tau)):
            row = versions[t]
            x[t + 1] = x[t] - (weights @ x[row]) * (scale[t] * steps)
    return x


def with_means(tau: Array, curvatures: Array, steps: Array, scale: Array) -> Array:
    """The same of AutoDuDe, with a running mean of each worker's gradients."""
    x, means = np.ones((len(tau) + 1, len(steps))), np.zeros((tau.shape[1], len(steps)))
    versions = np.arange(1, len(tau) + 1)[:, None] - tau
    with np.errstate(over="ignore", invalid="ignore"):
        for t, row in enumerate(versions):
            new = row != versions[t - 1] if t else np.full(len(row), True)  # who has reported
            gradients = curvatures[new, None] * x[row[new]]
            shares = 1 - np.exp(-tau[t, new] / FirstRule.delay) if t else np.ones(len(row))
            means[new] += shares[:, None] * (gradients - means[new])
            x[t + 1] = x[t] - (means.mean(0) + (gradients - means[new]).mean(0)) * (scale[t] * steps)
    return x


def growth(x: Array, starts: int = 1) -> Array:
    """By how much the logarithm of each step's models grows in an update, over the second half of the run."""
    last, width = len(x), max(len(x) // 8, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        half, full = (np.log(_largest(x[end - width : end], starts)) for end in (last - last // 2, last))
        rates = (full - half) / (last // 2)
    return np.where(np.isneginf(full), -np.inf, np.where(np.isnan(rates), np.inf, rates))


def _largest(x: Array, starts: int) -> Array:
    largest: Array = np.abs(x).max(0).reshape(starts, -1).max(0)
    return largest


def crossing(steps: Array, rates: Array) -> float:
    """The least step with which a run grows."""
    k = int(np.argmax(rates > 0))
    assert k > 0 and rates[k] > 0 >= rates[k - 1], "the edge is not among the steps"
    share = -rates[k - 1] / (rates[k] - rates[k - 1]) if np.isfinite(rates[k - 1]) else 1.0
    return float(steps[k - 1] * (steps[k] / steps[k - 1]) ** share)


def by_shares(tau: Array) -> float:
    """The edge if in every update a share p_k of the curvature had delay k: z = exp(iw) solves 1 - 1/z + a E z^-k = 0."""
    shares = np.bincount(tau.ravel()) / tau.size
    size = 1 << max(16, int(np.ceil(np.log2(64 * len(shares)))))
    w = 2 * np.pi * np.arange(size // 2 + 1) / size
    turned = np.fft.rfft(shares, size) * np.exp(0.5j * w)  # E exp(-iw (k - 1/2)): 2 sin(w/2) = -i a times this, negated
    real, imag = turned.real, -turned.imag
    k = np.flatnonzero(real[1:-2] * real[2:-1] < 0) + 1
    part = real[k] / (real[k] - real[k + 1])
    at, sine = w[k] + part * (w[k + 1] - w[k]), imag[k] + part * (imag[k + 1] - imag[k])
    ways = [2 * np.sin(a / 2) / s for a, s in zip([*at, np.pi], [*sine, imag[-1]], strict=True) if s > 1e-9]
    return float(min(ways))


def double_root(tau: Array) -> float:
    """The step where, with the same shares, the slowest mode z = exp(-s) begins to oscillate: exp(s) - 1 = a E exp(s k)."""
    shares, s = np.bincount(tau.ravel()) / tau.size, np.geomspace(0.02, 20.0, 1000) / tau.mean()
    return float(max((np.exp(one) - 1) / (shares @ np.exp(one * np.arange(len(shares)))) for one in s))


def simulate(method: Any, speeds: Any, jobs: int, curvatures: Any = None, d: int = 1, **options: Any) -> dd.Run:
    problem = dd.Quadratic([[0.0] * d] * speeds.n, curvatures, start=[1.0] * d)
    until = (jobs + 1) * max(speeds.times)
    return dd.simulate(
        method, problem, speeds, time=until, evaluation=dd.Evaluation(every=10**9), compute=dd.Compute(cores=1), **options
    )


def fixed(n: int, std: float, c: int, seed: int) -> Found:
    speeds = dd.TruncatedNormalSpeeds(n, std=std, seed=seed)
    slow, lr = int(np.argmax(speeds.__dict__["times"])), 0.3 / tau_avg(speeds.__dict__["times"])
    run = simulate(dd.DuDe(lr, c), speeds, JOBS)
    tau, _ = delay_grids(run.trace, n)
    always, mean, largest = np.ones(len(tau)), run.delays.tau_avg, run.delays.tau_max
    steps = np.append(EQUAL / mean, lr)
    x = replay(tau, np.full(n, 1 / n), steps, always)
    assert abs(x[-1, -1] - float(run.x)) < 1e-12, "the recursion is not what DuDe does"
    slowly = growth(replay(tau, np.full(n, 1 / n), np.tile(FASTEST / mean, STARTS), always, largest), STARTS)
    worst = replay(tau[:, [slow]], np.ones(1), WORST / largest, always)
    later = tau[len(tau) // 4 :]
    return Found(
        n=n,
        std=std,
        c=c,
        seed=seed,
        tau_avg=mean,
        tau_max=largest,
        slowest=float(later[:, slow].mean()),
        equal=crossing(steps[:-1], growth(x[:, :-1])),
        guess=by_shares(later),
        fastest=float(FASTEST[np.argmin(slowly)] / mean),
        double=double_root(later),
        worst=crossing(WORST / largest, growth(worst)),
    )


def auto(n: int, std: float, seed: int) -> Auto:
    speeds = dd.TruncatedNormalSpeeds(n, std=std, seed=seed)
    slow = int(np.argmax(speeds.__dict__["times"]))
    run = simulate(FirstRule(KAPPA), speeds, LONG)
    tau, _ = delay_grids(run.trace, n)
    scale = KAPPA / np.maximum(tau.mean(1), FirstRule.delay)
    margins = np.geomspace(0.1, 400.0, 400)
    x = with_means(tau, np.ones(n), np.append(margins, 1.0), scale)
    assert abs(x[-1, -1] - float(run.x)) < 1e-12, "the recursion is not what AutoDuDe does"
    equal = crossing(margins, growth(x[:, :-1]))
    worst = crossing(margins, growth(with_means(tau, n * (np.arange(n) == slow), margins, scale)))
    half = len(tau) // 2
    later = run.trace.after >= half
    return Auto(
        n=n,
        std=std,
        seed=seed,
        c=float(later.sum() / (len(tau) - half + 1)),
        delay=float(tau[half:].mean()),
        largest=int(tau[half:].max()),
        equal=equal,
        worst=worst,
        again=confirm(speeds, slow, equal, worst),
    )


def confirm(speeds: Any, slow: int, equal: float, worst: float) -> bool:
    """Simulate AutoDuDe itself on both sides of both edges, one in each coordinate; lr counts only times the curvature."""
    sides = np.array(SIDES)
    diagonal = [np.concatenate([equal * sides, speeds.n * worst * sides * (i == slow)]) for i in range(speeds.n)]
    models = [np.ones(4)]

    def keep(s: dd.State, a: dd.Arrival) -> None:
        if s.version == len(models):
            models.append(s.x.numpy().copy())

    simulate(FirstRule(KAPPA), speeds, LONG, [torch.diag(torch.tensor(row)) for row in diagonal], 4, watch=[keep])
    grows = (growth(np.array(models)) > 0).tolist()
    assert [grows[0], *grows[2:]] == [False, False, True], f"AutoDuDe disagrees about its edge: {grows}"
    return not grows[1]


def three(values: list[float]) -> str:
    return f"{min(values):.2f}, {np.median(values):.2f}, {max(values):.2f}"


def spread(values: list[float]) -> str:
    return (
        f"{min(values):.2f} to {max(values):.2f} | {max(values) / min(values):.2f} | {np.std(values) / np.mean(values):.0%}"
    )


def grouped(rows: list[Any], key: Callable[[Any], Any]) -> Iterator[tuple[Any, list[Any]]]:
    return ((name, list(some)) for name, some in groupby(rows, key))


def table(head: str, rows: Iterator[str]) -> Iterator[str]:
    yield head
    yield "|" + " --- |" * (head.count("|") - 1)
    yield from rows
    yield ""


def conclusions(found: list[Found], products: dict[str, list[float]]) -> Iterator[str]:
    edges = min(products["(a) edge x tau_avg"]), max(products["(a) edge x tau_avg"])
    over = [KAPPA / f.tau_avg / f.worst for f in found]
    least = min(*(f.worst * f.slowest for f in found), edges[0])
    yield (
        f"- **The edge is not what makes the best step x tau_avg constant**: with equal curvatures it is {edges[0]:.2f} to "
        f"{edges[1]:.0f} / tau_avg. The mean delay only bounds it from below. With the same shares of delays in every "
        "update exp(iw) is a root at the edge if E cos w(k - 1/2) = 0 and 2 sin(w/2) = edge x E sin w(k - 1/2); since sin "
        "y <= (2/pi) (y + cos y) for y >= 0, edge x (tau_avg - 1/2) >= pi/2 sin(w/2) / (w/2), which is pi/2 for long "
        "delays and at least 1 for any. Of long delays with one mean those all alike are the worst."
    )
    yield (
        "- **The step that contracts fastest is more nearly constant.** With the same shares in every update it is where "
        "the slowest mode begins to oscillate, the largest a with a root exp(s) - 1 = a E exp(s k), s > 0; by Jensen's "
        "inequality a x tau_avg <= 1/e = 0.37 for long delays, and it is little less when they differ."
    )
    yield (
        "- **With all curvature in one worker its own delay counts.** A gradient is read at one of its reports and used "
        "from the next to the one after, m updates each: y_{k+1} = y_k - a m y_{k-1}, with the edge a = 1 / m, that is 1.5 "
        f"/ its mean delay or 2 / tau_max. So with c = 1 the step {KAPPA} / tau_avg is 0.4 s_max / mean(s) of the edge and "
        "diverges if the slowest takes more than 2.5 times the mean time. Here it does in "
        f"{sum(ratio > 1 for ratio in over)} of {len(over)}, and is {max(over):.2f} of the edge at most. In (a) and (b) "
        f"alike all was stable while step x L x the mean delay weighted by curvature was below {least:.2f}."
    )
    yield ""


def report(found: list[Found], autos: list[Auto]) -> Iterator[str]:
    kinds = [(f"{n} | {std:g} | {c}", some) for (n, std, c), some in grouped(found, lambda f: (f.n, f.std, f.c))]
    waiting = [f for f in found if f.c < f.n]
    yield "# The largest stable step of DuDe on quadratics"
    yield ""
    yield (
        f"Printed by [edge.py](edge.py). F_i = L_i / 2 (x - b_i)^2 without noise, L = mean L_i = 1; {len(SEEDS)} fleets of "
        f"TruncatedNormalSpeeds for each row, {JOBS} jobs of the slowest worker. Three numbers are the least, the median "
        "and the largest over fleets. The edge is the least step with which a run grows; above it some are stable again."
    )
    yield ""
    yield "## (a) Equal curvatures"
    yield ""
    yield (
        "`fastest`: the step that contracts fastest, times tau_avg; in runs of this length some 5% too large, at most 20%. "
        "`shares`: the number over the one that follows from the shares of delays alone, as if they were the same in every "
        "update; with few or very heterogeneous workers they are not, and the edge feels it."
    )
    yield ""
    yield from table(
        "| n | std | c | tau_max / tau_avg | edge x tau_avg | edge x tau_max | shares | fastest | shares |",
        (
            f"| {kind} | {three([f.tau_max / f.tau_avg for f in some])} | {three([f.equal * f.tau_avg for f in some])} | "
            f"{three([f.equal * f.tau_max for f in some])} | {three([f.equal / f.guess for f in some])} | "
            f"{three([f.fastest * f.tau_avg for f in some])} | {three([f.fastest / f.double for f in some])} |"
            for kind, some in kinds
        ),
    )
    yield "## (b) All curvature in the slowest worker"
    yield ""
    yield f"`{KAPPA} / tau_avg`: that step over the edge (above 1 it diverges), and the number of fleets where it diverges."
    yield ""
    yield from table(
        f"| n | std | c | edge x tau_avg | edge x tau_max | edge x its mean delay | {KAPPA} / tau_avg | diverge |",
        (
            f"| {kind} | {three([f.worst * f.tau_avg for f in some])} | {three([f.worst * f.tau_max for f in some])} | "
            f"{three([f.worst * f.slowest for f in some])} | {three([KAPPA / f.tau_avg / f.worst for f in some])} | "
            f"{sum(KAPPA / f.tau_avg > f.worst for f in some)} of {len(some)} |"
            for kind, some in kinds
        ),
    )
    yield "## Which product is more nearly constant"
    yield ""
    yield f"Over all fleets with c < n ({len(waiting)}); with c = n every delay is 1, and the edge is 2 in both cases."
    yield ""
    products = {
        "(a) edge x tau_avg": [f.equal * f.tau_avg for f in waiting],
        "(a) edge x tau_max": [f.equal * f.tau_max for f in waiting],
        "(a) fastest x tau_avg": [f.fastest * f.tau_avg for f in waiting],
        "(a) fastest x tau_max": [f.fastest * f.tau_max for f in waiting],
        "(a) fastest x tau_avg, n = 10 and 30": [f.fastest * f.tau_avg for f in waiting if f.n > 5],
        "(a) fastest x tau_max, n = 10 and 30": [f.fastest * f.tau_max for f in waiting if f.n > 5],
        "(b) edge x tau_avg": [f.worst * f.tau_avg for f in waiting],
        "(b) edge x tau_max": [f.worst * f.tau_max for f in waiting],
        "(b) edge x the slowest worker's mean delay": [f.worst * f.slowest for f in waiting],
    }
    yield from table(
        "| product | range | largest / least | standard deviation / mean |",
        (f"| {name} | {spread(values)} |" for name, values in products.items()),
    )
    yield from conclusions(waiting, products)
    yield f"## AutoDuDe (lr = {KAPPA})"
    yield ""
    yield (
        f"By how much its lr could be multiplied before it diverges; {LONG} jobs of the slowest worker, the second half of "
        f"which counts. Runs of AutoDuDe itself at {SIDES[0]} and {SIDES[1]} of each edge confirm it on every fleet, but "
        f"{sum(a.again for a in autos)} of {len(autos)} are stable again at {SIDES[1]} in (a)."
    )
    yield ""
    yield from table(
        "| n | std | workers per update | mean delay | tau_max | (a) equal | (b) all in the slowest | diverge in (b) |",
        (
            f"| {n} | {std:g} | {three([a.c for a in some])} | {three([a.delay for a in some])} | "
            f"{three([a.largest for a in some])} | {three([a.equal for a in some])} | {three([a.worst for a in some])} | "
            f"{sum(a.worst < 1 for a in some)} of {len(some)} |"
            for (n, std), some in grouped(autos, lambda a: (a.n, a.std))
        ),
    )


def main() -> None:
    torch.set_num_threads(1)
    begin, found, autos = time.perf_counter(), list[Found](), list[Auto]()
    for n in (5, 10, 30):
        for std in (1.0, 5.0):
            for c in sorted({1, 2, 3, 5, n}):
                found += [fixed(n, std, c, seed) for seed in SEEDS]
                print(f"{time.perf_counter() - begin:4.0f} s   n={n} std={std:g} c={c}", flush=True)
            autos += [auto(n, std, seed) for seed in SEEDS]
            print(f"{time.perf_counter() - begin:4.0f} s   n={n} std={std:g} auto", flush=True)
    text = "\n".join(report(found, autos))
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

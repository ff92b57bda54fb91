"""Does time fall as one over the number of workers? The paper's "linear speed-up", with the same data split over 4 to 64.

python experiments/paper/speedup.py          # computes what speedup.json lacks: ten minutes on one core
python experiments/paper/speedup.py digits   # only one of SETTINGS below
python experiments/paper/speedup.py report   # writes speedup.md and speedup.png from speedup.json

The protocol, written before the runs. Targets, lengths and where the search for a step begins are from a few runs with
seed 100, which is used for nothing else.

Settings. n = 4, 8, 16, 32, 64 workers, and the same F whatever n is.
- quadratics: 1,000 coordinates, curvature 1, start at distance 1 from the minimiser in every coordinate, workers' own
  minimisers spread by 3 around it (very heterogeneous). Every gradient has normal noise of deviation 2 in every
  coordinate ("much noise") or 0.5 ("little noise"). Every constant of the theorem is exact: L = 1, Delta = 500,
  sigma^2 = 4,000 or 250. Target: ||grad F||^2 at a hundredth of its start.
- digits: the 1,437 training images sorted by class and cut into n equal parts, minibatches of 8, the package's small
  network. Parts are equal because with the Dirichlet split F, in which each worker counts the same, would be another one
  for every n. Target: F = 0.5.
- speeds: "equal", 1 second a gradient for all; "uneven", fixed and at the n quantiles of a lognormal of median 1 and
  sigma 0.5, dealt to workers by the seed (slowest to fastest 3.2 for n = 4, 11 for n = 64). A draw of its own for every n,
  as from the paper's TN(1, 1), would compare draws: a single fast worker can make most gradients.

Methods. DuDe with c = 1, vanilla ASGD, synchronous SGD. For each setting, n and method the step is searched on powers of
two with seeds 0 and 1 until the best has a worse one on both sides, and judged with seeds 2 and 3 alone. Two seeds are few.
Methods of a seed share centres or initial weights, noise or minibatches, and speeds.

Outcomes. The first is the time to the target: when it is crossed (log-linearly between two evaluations, about a hundred in
a run) by an evaluation that the next two confirm; and the updates and gradients until then. If a judging seed does not
get there, "not reached". The second is what is left at a fixed time, 20 seconds for quadratics and 25 for digits (with
equal speeds), with a step searched for that. Runs end at a number of gradients that is set below.

Changed after the first runs, all for the quadratics. Their ||grad F||^2 falls not to zero but to a level set by the step;
where that was close to the target, the time to it was chance: 100 and 273 seconds in two judging seeds, or 87 and 18. So
coordinates became 1,000 where they had been 200, and steps are searched for the time to two thirds of the target, and
judged by the time to the target itself; these runs were made anew, with the same seeds. And a target crossed by the first
evaluation counts from that one: one number, synchronous SGD with little noise and n = 64, was 0.83 seconds of a round that
takes 1. Before any run of theirs, digits at uneven speeds were made shorter and lost their fixed time, to save time.

What would be linear speed-up, in three units, from n = 4 to 64:
- time: the time to the target falls 16-fold. With equal speeds this is the same as:
- gradients: all workers together need as many gradients with 64 workers as with 4;
- updates: the updates to the target fall 16-fold. The paper's words are about this one: 1 / sqrt(n T) for T updates.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

import dualdelay as dd
from dualdelay.analysis.figures import Curve, Panel, draw_panels
from dualdelay.paper.tables import markdown
from dualdelay.storage.files import write

HERE = Path(__file__).parent
BOOK = HERE / "speedup.json"
WORKERS = (4, 8, 16, 32, 64)
TUNING, JUDGING = (0, 1), (2, 3)
METHODS: dict[str, Callable[..., dd.Algorithm[Any]]] = {"dude": dd.DuDe, "vanilla": dd.VanillaASGD, "sync": dd.SyncSGD}
TITLES = {"dude": "DuDe", "vanilla": "vanilla", "sync": "synchronous"}
SIZE = 1000  # coordinates of the quadratics
LOWER = 2 / 3  # of the target, which steps are searched for on quadratics
CONFIRMED = 3  # evaluations in a row below the target
MOST_STEPS = 14  # of one search


def times(n: int, uneven: bool) -> list[float]:
    """Seconds per gradient, rising."""
    return [math.exp(0.5 * NormalDist().inv_cdf((i + 0.5) / n)) if uneven else 1.0 for i in range(n)]


def dealt(n: int, uneven: bool, seed: int) -> dd.FixedSpeeds:
    return dd.FixedSpeeds(np.random.default_rng([n, seed]).permutation(times(n, uneven)).tolist())


def quadratic(n: int, noise: float, seed: int) -> dd.Quadratic:
    centers = 3.0 * np.random.default_rng([n, seed]).normal(size=(n, SIZE))
    return dd.Quadratic((centers - centers.mean(0)).tolist(), None, noise, [1.0] * SIZE, seed)


def digits(n: int, seed: int) -> dd.Digits:
    return dd.Digits(workers=n, split="label", batch_size=8, seed=seed)


def squared(metrics: Any) -> Any:
    """||grad F||^2 over its start, at every evaluation."""
    return metrics.gradient_norm**2 / SIZE


def loss(metrics: Any) -> Any:
    return metrics.objective


@dataclass(frozen=True)
class Setting:
    """A problem at speeds, what is measured of it, and how long it is run."""

    title: str
    problem: Callable[[int, int], Any]  # of n and the seed
    uneven: bool
    value: Callable[[Any], Any]  # of a run's metrics
    target: float
    gradients: Callable[[int], int]  # in a run, by n
    fixed: float | None  # the time of the second outcome
    guess: Callable[[str, int], float]  # the exponent of two at which the search for a step begins, by method and n


def noisy(n: int, seed: int) -> dd.Quadratic:
    return quadratic(n, 2.0, seed)


def quiet(n: int, seed: int) -> dd.Quadratic:
    return quadratic(n, 0.5, seed)


def _around(base: float, method: str, n: int) -> float:
    """A step for all n, for synchronous SGD times n: it is the mean of so many gradients."""
    return base + (math.log2(n) if method == "sync" else 0.0)


def _delayed(base: float, method: str, n: int) -> float:
    """A step that falls with the delay, as 1 / n; synchronous SGD has none."""
    return -0.5 if method == "sync" else base - math.log2(n / 4)


SETTINGS = {
    "noisy": Setting(
        "quadratics, much noise, equal", noisy, False, squared, 0.01, lambda n: 2500, 20.0, partial(_around, -8.5)
    ),
    "noisy-uneven": Setting(
        "quadratics, much noise, uneven", noisy, True, squared, 0.01, lambda n: 4000, 20.0, partial(_around, -8.5)
    ),
    "quiet": Setting(
        "quadratics, little noise, equal", quiet, False, squared, 0.01, lambda n: 1000, None, partial(_around, -5.0)
    ),
    "digits": Setting(
        "digits, equal", digits, False, loss, 0.5, lambda n: max(1600, 100 * n), 25.0, partial(_delayed, -3.0)
    ),
    "digits-uneven": Setting(
        "digits, uneven", digits, True, loss, 0.5, lambda n: max(1600, 150 * n), None, partial(_delayed, -4.0)
    ),
}


# --- the runs ---


def _until(at: Setting, n: int, method: str) -> float:
    """The time in which a method makes the setting's number of gradients."""
    seconds = times(n, at.uneven)
    rate = n / max(seconds) if method == "sync" else sum(1 / each for each in seconds)
    return at.gradients(n) / rate


def measured(at: Setting, n: int, method: str, target: float, run: dd.Run) -> dict[str, float]:
    """What is kept of a run; the target that was not reached is infinitely far."""
    values, clock, version = at.value(run.metrics), run.metrics.time, run.metrics.version
    result = {"end": float(values[-1]), "time": math.inf, "updates": math.inf, "gradients": math.inf}
    result["tau_max"] = run.delays.tau_max
    below = values <= target
    for k in range(1, len(values) - CONFIRMED + 1):
        if below[k : k + CONFIRMED].all():
            share = math.log(values[k - 1] / target) / math.log(values[k - 1] / values[k])
            share = min(max(share, 0.0), 1.0) if k > 1 else 1.0  # nothing was there before the first update
            updates = float(version[k - 1] + share * (version[k] - version[k - 1]))
            arrived = {"dude": updates + n - 1, "vanilla": updates, "sync": updates * n}
            result |= {"time": float(clock[k - 1] + share * (clock[k] - clock[k - 1]))}
            result |= {"updates": updates, "gradients": arrived[method]}
            break
    return result


def runs(
    at: Setting, n: int, method: str, until: float, steps: Sequence[float], seeds: Sequence[int], target: float
) -> dict[float, list[dict[str, float]]]:
    """What is kept of the runs with these steps and seeds, by step; of one that failed, nothing is left to hope for."""
    share = until / _until(at, n, method)
    every = math.ceil(share * at.gradients(n) / (100 * n)) if method == "sync" else math.ceil(share * at.gradients(n) / 100)
    if method != "sync" and not at.uneven:
        every = max(every, n)  # that many come at once
    methods = [METHODS[method](lr=2.0**step) for step in steps]
    lost = dict.fromkeys(("end", "time", "updates", "gradients", "tau_max"), math.inf)
    try:
        table = dd.compare(
            methods,
            partial(at.problem, n),
            partial(dealt, n, at.uneven),
            seeds=list(seeds),
            time=until,
            evaluation=dd.Evaluation(every=every),
            compute=dd.Compute(batch=True),
        )
        found = table.runs
    except dd.RunFailed:
        found = [None] * (len(methods) * len(seeds))
    kept = [lost if run is None else measured(at, n, method, target, run) for run in found]  # seed by seed, then by step
    kept = [one if math.isfinite(one["end"]) else lost for one in kept]
    return {step: kept[k :: len(steps)] for k, step in enumerate(steps)}


def score(what: str, kept: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """The lower the better: time to the target, and where nobody gets there, what is left at the end."""
    mean = fmean(one["end"] for one in kept)
    return (fmean(one["time"] for one in kept), mean) if what == "target" else (mean, mean)


def searched(at: Setting, n: int, method: str, what: str) -> dict[str, Any]:
    """The best step on the tuning seeds, with a worse one on either side, and its runs on the judging seeds."""
    until = _until(at, n, method) if what == "target" else at.fixed or 0.0
    aim = at.target * (LOWER if at.value is squared else 1.0)
    middle = round(at.guess(method, n))
    tried = runs(at, n, method, until, [middle - 1, middle, middle + 1], TUNING, aim)
    while True:
        best = min(tried, key=lambda step: score(what, tried[step]))
        inside = min(tried) < best < max(tried)
        if inside or len(tried) >= MOST_STEPS:
            break
        tried |= runs(at, n, method, until, [min(tried) - 1 if best == min(tried) else max(tried) + 1], TUNING, aim)
    judged = runs(at, n, method, until, [best], JUDGING, at.target)[best]
    tuned = {str(step): score(what, tried[step])[0] for step in sorted(tried)}
    return {"exponent": best, "inside": inside, "tuned": tuned, "judged": judged}


def compute(names: Sequence[str]) -> None:
    """Compute the cases of these settings that the book lacks, and keep each at once."""
    warnings.filterwarnings("ignore", message="the same for all seeds")
    book = json.loads(BOOK.read_text()) if BOOK.exists() else {}
    for name, at in SETTINGS.items():
        if name not in names:
            continue
        for what in ("target", "fixed") if at.fixed else ("target",):
            for n in WORKERS:
                for method in METHODS:
                    key = f"{name}, {what}, {n}, {method}"
                    if key not in book:
                        book[key] = searched(at, n, method, what)
                        write(BOOK, (json.dumps(book, indent=1).replace("Infinity", "null") + "\n").encode())
                        print(
                            key, book[key]["exponent"], *(f"{one['time']:.4g}" for one in book[key]["judged"]), flush=True
                        )


# --- what they show ---


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Book:
    """The kept cases."""

    def __init__(self) -> None:
        self.cases = json.loads(BOOK.read_text())

    def judged(self, name: str, what: str, n: int, method: str, column: str) -> list[float]:
        found = [one[column] for one in self.cases[f"{name}, {what}, {n}, {method}"]["judged"]]
        return [math.inf if value is None else float(value) for value in found]

    def mean(self, name: str, what: str, n: int, method: str, column: str) -> float:
        return fmean(self.judged(name, what, n, method, column))

    def step(self, name: str, what: str, n: int, method: str) -> str:
        case = self.cases[f"{name}, {what}, {n}, {method}"]
        return f"2^{case['exponent']:g}" + ("" if case["inside"] else " (edge)")

    def speedups(self, name: str, method: str, column: str = "time") -> list[float]:
        """How many times less than with the fewest workers, mean by mean; nan where the target was not reached."""
        means = [self.mean(name, "target", n, method, column) for n in WORKERS]
        ok = math.isfinite(means[0])
        return [means[0] / mean if ok and math.isfinite(mean) else math.nan for mean in means]


def _range(values: Iterable[float]) -> str:
    found = list(values)
    if not all(map(math.isfinite, found)):
        return "not reached" if not any(map(math.isfinite, found)) else "not in every seed"
    low, high = map(_number, (min(found), max(found)))
    return low if low == high else f"{_number(fmean(found))} ({low} to {high})"


def tables(book: Book) -> str:
    """All numbers in Markdown."""
    parts = [
        "# Linear speed-up\n\nMade by `experiments/paper/speedup.py`, which has the protocol. Means of the two judging"
    ]
    parts[0] += " seeds, in brackets their values.\nA speed-up is the mean at n = 4 over the mean at n.\n"
    for name, at in SETTINGS.items():
        what = "F" if at.value is loss else "||grad F||^2 over its start"
        parts.append(f"\n## {at.title} speeds\n\nTo {what} = {at.target:g}\n\n")
        heads = ["n", "method", "step", "tau_max", "gradients", "updates", "time", "speed-up in time", "in updates"]
        rows = [[*heads, "ideal", "time of the other / DuDe's, by seed"]]
        for method in METHODS:
            ups, fewer = (book.speedups(name, method, column) for column in ("time", "updates"))
            for k, n in enumerate(WORKERS):
                mine, dude = (book.judged(name, "target", n, each, "time") for each in (method, "dude"))
                pairs = [_number(a / b) for a, b in zip(mine, dude, strict=True) if math.isfinite(a) and math.isfinite(b)]
                counts = [_range(book.judged(name, "target", n, method, c)) for c in ("gradients", "updates", "time")]
                gains = ["" if math.isnan(x) else f"{x:.2f}" for x in (ups[k], fewer[k])]
                delay = _number(book.mean(name, "target", n, method, "tau_max"))
                cells = [f"{n}", TITLES[method], book.step(name, "target", n, method), delay, *counts, *gains, f"{n // 4}"]
                rows.append([*cells, "" if method == "dude" else ", ".join(pairs)])
        parts.append(markdown(rows))
        if at.fixed:
            parts.append(f"\n{what} after {at.fixed:g} seconds, each with a step searched for that\n\n")
            rows = [["n", *(f"{TITLES[method]}, step" for method in METHODS)]]
            for n in WORKERS:
                ends = [book.judged(name, "fixed", n, method, "end") for method in METHODS]
                steps = [book.step(name, "fixed", n, method) for method in METHODS]
                rows.append([f"{n}", *(f"{_range(end)}, {step}" for end, step in zip(ends, steps, strict=True))])
            parts.append(markdown(rows))
    return "".join(parts)


def _panel(book: Book, name: str, column: str) -> Panel:
    ideal = Curve("ideal 9", "ideal: in proportion to n", WORKERS, [n / 4 for n in WORKERS])
    curves = [Curve(method, TITLES[method], WORKERS, book.speedups(name, method, column)) for method in METHODS]
    ylabel = "times sooner than with 4" if column == "time" else "times fewer updates than with 4"
    shown = [curve for curve in curves if not all(map(math.isnan, curve.y))]
    title = SETTINGS[name].title + (": updates" if column == "updates" else "")
    return Panel(title, "workers n", ylabel, [*shown, ideal], steps=True, log="y", plain=True)


def report() -> None:
    book = Book()
    write(HERE / "speedup.md", tables(book).encode())
    rows = [
        [_panel(book, name, "time") for name in ("noisy", "noisy-uneven", "quiet")],
        [*(_panel(book, name, "time") for name in ("digits", "digits-uneven")), _panel(book, "noisy", "updates")],
    ]
    caption = (
        "Each method at its best step for every n. How many times sooner than by 4 workers a target is reached; below "
    )
    caption += "right, in how many times fewer updates. In the second panel vanilla does not reach it."
    draw_panels(rows, HERE / "speedup", caption, ("png",))


if __name__ == "__main__":
    if sys.argv[1:] != ["report"]:
        compute(sys.argv[1:] or list(SETTINGS))
    report()

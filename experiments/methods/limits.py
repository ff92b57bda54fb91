"""Where each method comes to rest, or circles: measured on two exact quadratics, against the closed form.

python experiments/methods/limits.py

With F_i(x) = a_i (x - b_i)^2 / 2 a method that counts worker i with weight p_i ends where sum_i p_i a_i (x - b_i) = 0. The
weights are worked out here from the times alone; measured is the mean of the models over the second half of a run, at two
steps, one half of the other, and carried on to a step of zero.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from page import fill
from rich.progress import track
from settings import LABELS

import dualdelay as dd
from dualdelay.paper.tables import markdown
from dualdelay.storage.files import write

HERE = Path(__file__).parent


class Instance(NamedTuple):
    """Workers with their times, curvatures and centres; after ``period`` seconds all begin anew together."""

    seconds: tuple[float, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    period: float


INSTANCES = {
    "three workers": Instance((1.0, 2.0, 4.0), (1.0, 1.0, 1.0), (0.0, 6.0, 12.0), 4.0),
    "five workers": Instance((1.0, 1.5, 2.0, 3.0, 6.0), (1.0, 3.0, 0.5, 2.0, 1.0), (0.0, 6.0, 12.0, -4.0, 9.0), 6.0),
}
Weights = list[float]


def busy(seconds: tuple[float, ...]) -> Iterator[int]:
    """Who arrives, if everybody is always busy; at one time, who was sent a job first."""
    due = [(time, k, k) for k, time in enumerate(seconds)]
    heapq.heapify(due)
    sent = len(due)
    while True:
        time, _, worker = heapq.heappop(due)
        yield worker
        heapq.heappush(due, (time + seconds[worker], sent, worker))
        sent += 1


def cycle(at: Instance) -> int:
    """Arrivals in a period."""
    return round(sum(at.period / time for time in at.seconds))


def equal(at: Instance) -> Weights:
    return [1.0] * len(at.seconds)


def by_speed(at: Instance) -> Weights:
    return [1 / time for time in at.seconds]


def delay_adaptive(at: Instance) -> Weights:
    """Arrivals over a period, each with n / max(n, delay)."""
    n, last, weights = len(at.seconds), [0] * len(at.seconds), [0.0] * len(at.seconds)
    for k, worker in enumerate(islice(busy(at.seconds), 2 * cycle(at)), 1):
        if k > cycle(at):
            weights[worker] += n / max(n, k - last[worker])
        last[worker] = k
    return weights


def ringmaster(at: Instance) -> Weights:
    """Arrivals that are less than n updates old, over many periods."""
    n, version, has = len(at.seconds), 0, [0] * len(at.seconds)
    counts = [0.0] * n
    for k, worker in enumerate(islice(busy(at.seconds), 400 * cycle(at))):
        taken = version - has[worker] < n
        version += taken
        has[worker] = version
        counts[worker] += taken and k >= 200 * cycle(at)
    return counts


def rennala(at: Instance) -> Weights:
    """The first n arrivals after everybody has begun together."""
    counts = Counter(islice(busy(at.seconds), len(at.seconds)))
    return [float(counts[worker]) for worker in range(len(at.seconds))]


class Row(NamedTuple):
    """A method, the weights that it should have, and how to run it."""

    make: Callable[[float, Instance], dd.Algorithm[Any]]
    weights: Callable[[Instance], Weights] = equal
    random: bool = False  # whether it circles by chance, so that only a long mean is exact


def _generalized(lr: float, at: Instance) -> dd.Algorithm[Any]:
    rate = sum(by_speed(at))
    return dd.algorithms.GeneralizedASGD(lr=lr, probabilities=tuple(p / rate for p in by_speed(at)))


# where the limit is no matter of weights alone: models that are mixed, or steps that are not in proportion to gradients
OTHERWISE = ("quafl", "favano", "asofed", "adpsgd", "heloco", "ringmaster_lmo")


def _outer(name: str, share: float) -> Row:
    """Its momentum makes an outer step of 0.7 several times as long."""
    kind: Any = dd.ALGORITHMS[name]
    return Row(lambda lr, at: kind(lr=0.7, inner_lr=lr * share), by_speed)


ROWS: dict[str, Row] = {name: Row(lambda lr, at, kind=kind: kind(lr=lr)) for name, kind in dd.ALGORITHMS.items()} | {
    "scaffold": Row(lambda lr, at: dd.algorithms.SCAFFOLD(lr=lr, steps=1)),
    "defedavg": Row(lambda lr, at: dd.algorithms.DeFedAvg(lr=lr, steps=1), random=True),
    "area": Row(lambda lr, at: dd.algorithms.AREA(lr=4 * lr)),
    "ormo": Row(lambda lr, at: dd.algorithms.OrMo(lr=lr / 8), by_speed),
    "dc_asgd": Row(lambda lr, at: dd.algorithms.DCASGD(lr=lr), by_speed),
    **{name: _outer(name, share) for name, share in (("diloco", 0.25), ("delayed_nesterov", 0.5), ("mla", 1.0))},
    "auto": Row(lambda lr, at: dd.AutoDuDe(lr=8 * lr)),
    "vanilla": Row(lambda lr, at: dd.VanillaASGD(lr=lr), by_speed),
    "uniform": Row(lambda lr, at: dd.UniformASGD(lr=lr), random=True),
    "shuffled": Row(lambda lr, at: dd.ShuffledASGD(lr=lr), random=True),
    "generalized": Row(_generalized, random=True),
    "mifa": Row(lambda lr, at: dd.MIFA(lr=lr, active=2)),
    "fedbuff": Row(lambda lr, at: dd.FedBuff(lr=lr, buffer=2), by_speed),
    "ca2fl": Row(lambda lr, at: dd.algorithms.CA2FL(lr=lr, buffer=2)),
    "fadas": Row(
        lambda lr, at: dd.algorithms.FADAS(lr=8 * lr, buffer=2), by_speed
    ),  # its steps are divided by a gradient's size
    "delay_adaptive": Row(lambda lr, at: dd.algorithms.DelayAdaptiveASGD(lr=lr), delay_adaptive),
    "ringmaster": Row(lambda lr, at: dd.algorithms.RingmasterASGD(lr=lr), ringmaster),
    "rennala": Row(lambda lr, at: dd.algorithms.RennalaSGD(lr=lr), rennala),
    # an arrival of i leaves (1 - alpha) x + alpha sum_j v_j as it was, v_j being the workers' models, but for its own push:
    # so every arrival counts the same, as under vanilla ASGD, but moves n models at once, hence the larger step
    "fedasync": Row(lambda lr, at: dd.algorithms.FedAsync(lr=4 * lr), by_speed),
}


def limit(weights: Weights, at: Instance) -> float:
    """Where sum_i p_i a_i (x - b_i) = 0."""
    pull = np.array(weights) * at.a
    return float(pull @ at.b / pull.sum())


def mean_model(row: Row, at: Instance, lr: float, updates: int) -> float:
    """The mean of the models of the second half of a run."""
    problem = dd.Quadratic([[b] for b in at.b], list(at.a))
    models: list[float] = []

    def keep(state: dd.State, arrival: dd.Arrival) -> None:
        if state.version > updates // 2:
            models.append(float(state.x))

    made = row.make(lr, at)
    dd.simulate(
        made, problem, dd.FixedSpeeds(at.seconds), updates=updates, watch=[keep], evaluation=dd.Evaluation(every=updates)
    )
    return float(np.mean(models))


def measured(row: Row, at: Instance) -> float:
    if row.random:
        return mean_model(row, at, 2.0**-8, 20_000)
    coarse, fine = (mean_model(row, at, lr, 1_500) for lr in (2.0**-5, 2.0**-6))
    return 2 * fine - coarse


def main() -> None:
    lines = [["method", *(f"{name}: {what}" for name in INSTANCES for what in ("weights", "limit", "measured"))]]
    for name in track([name for name in dd.ALGORITHMS if name not in OTHERWISE], "methods"):
        row, cells = ROWS[name], [LABELS[name]]
        for at in INSTANCES.values():
            weights = row.weights(at)
            shares = " ".join(f"{weight / sum(weights):.3f}".lstrip("0") for weight in weights)
            shares = "equal" if row.weights is equal else shares
            cells += [
                shares,
                f"{limit(weights, at):.3f}",
                f"{measured(row, at):.3f}" + (" (by chance)" if row.random else ""),
            ]
        lines.append(cells)
    text = markdown(lines)
    write(HERE / "results" / "limits.md", text.encode())
    fill(limits=text)
    print(text)


if __name__ == "__main__":
    main()

"""The methods a second time, from their papers' pseudo-code: one weight, plain floats, and nothing of the package.

Each function has the name of a method, takes a fresh ``World`` and makes so many updates; letters are those of the papers.
``World`` has the workers, their clock and the models; a method decides to whom a model is sent and how it moves. Where a
method draws workers, the draws are given: ``drawn[version]`` are the workers that were sent that version.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


def noise(worker: int, draw: int) -> float:
    """The error of a worker's gradient number ``draw``; no two in a row are equal."""
    return ((5 * worker + 3 * draw) % 7 - 3) / 4


class World:
    """Workers with F_i(x) = a_i (x - b_i)^2 / 2; arrivals are ordered by time, then by order of sending.

    Job k of worker i takes ``seconds[i][k]``, from the front again when they run out.
    """

    def __init__(
        self, seconds: Sequence[Sequence[float]], a: Sequence[float], b: Sequence[float], exact: bool = False
    ) -> None:
        self.seconds, self.a, self.b, self.n, self.exact = seconds, a, b, len(seconds), exact
        self.now = 0.0
        self.models = [0.0]  # by version
        self.arrivals: list[tuple[float, int, int]] = []  # time, worker, version
        self.has = [0] * self.n  # the version that each worker was sent last, and when
        self.since = [0.0] * self.n
        self._due: list[tuple[float, int, int, int, int]] = []  # time, order of sending, worker (-1: a wake), draw, version
        self._draws = [0] * self.n
        self._free = [0.0] * self.n
        self._sent = 0

    @property
    def version(self) -> int:
        return len(self.models) - 1

    @property
    def x(self) -> float:
        return self.models[-1]

    def _push(self, time: float, worker: int, draw: int, version: int) -> None:
        heapq.heappush(self._due, (time, self._sent, worker, draw, version))
        self._sent += 1

    def send(self, *workers: int) -> None:
        """The current model goes to these workers."""
        for i in workers:
            self.has[i], self.since[i] = self.version, self.now
            self.again(i)

    def again(self, i: int) -> None:
        """Worker i computes one more gradient at the model that it has."""
        k = self._draws[i]
        self._free[i] = max(self.now, self._free[i]) + self.seconds[i][k % len(self.seconds[i])]
        self._push(self._free[i], i, k, self.has[i])
        self._draws[i] += 1

    def drop(self, *workers: int) -> None:
        """These workers drop their jobs."""
        self._due = [due for due in self._due if due[2] not in workers]
        heapq.heapify(self._due)
        for i in workers:
            self._free[i] = self.now

    def wake(self, time: float) -> None:
        """At that time ``next`` returns worker -1."""
        self._push(time, -1, 0, 0)

    def next(self) -> tuple[int, int, float]:
        """The next arrival: its worker, the version its gradient was taken at, and the gradient."""
        self.now, _, i, draw, u = heapq.heappop(self._due)
        if i < 0:
            return i, u, 0.0
        self.arrivals.append((self.now, i, u))
        return i, u, self.a[i] * (self.models[u] - self.b[i]) + (0.0 if self.exact else noise(i, draw))

    def move(self, step: float) -> None:
        """x <- x - step."""
        self.models.append(self.x - step)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def dude(w: World, updates: int, lr: float, wait_for: int = 1, start: str = "wait") -> None:
    G: dict[int, float] = dict.fromkeys(range(w.n), 0.0) if start == "zeros" else {}
    waiting: list[int] = []
    w.send(*range(w.n))
    while w.version < updates:
        j, _, g = w.next()
        first = len(G) < w.n
        G[j] = g
        if first and start == "busy":
            w.send(j)  # the first update is made by the arrival after the one that completes the table
            continue
        waiting.append(j)
        if len(G) == w.n and len(waiting) >= wait_for:
            w.move(lr / w.n * sum(G.values()))
            w.send(*waiting)
            waiting = []


def sync(w: World, updates: int, lr: float, wait_for: int | None = None) -> None:
    while w.version < updates:
        w.send(*range(w.n))
        w.move(lr * mean([w.next()[2] for _ in range(wait_for or w.n)]))
        w.drop(*range(w.n))  # K-sync: those that are late


def vanilla(w: World, updates: int, lr: float) -> None:
    w.send(*range(w.n))
    while w.version < updates:
        i, _, g = w.next()
        w.move(lr * g)
        w.send(i)


def fedbuff(
    w: World, updates: int, lr: float, buffer: int = 10, wait: bool = False, staleness: float | None = None
) -> None:
    inside: list[float] = []
    waiting: list[int] = []
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        inside.append(g if staleness is None else g / (1 + w.version - u) ** staleness)
        waiting.append(i)
        if len(inside) == buffer:
            w.move(lr * mean(inside))  # over the number of arrivals, not the sum of their weights
            inside = []
        if not inside or not wait:
            w.send(*waiting)
            waiting = []


def mifa(w: World, updates: int, lr: float, drawn: Mapping[int, Sequence[int]]) -> None:
    G = [0.0] * w.n
    active: Sequence[int] = range(w.n)  # in the first round
    while w.version < updates:
        w.send(*active)
        for _ in active:
            i, _, G[i] = w.next()
        w.move(lr * mean(G))
        active = drawn[w.version]


def rescaled(w: World, updates: int, lr: float) -> None:
    taken: dict[int, list[float]] = {}
    w.send(*range(w.n))
    while w.version < updates:
        i, _, g = w.next()
        taken.setdefault(i, []).append(w.now - w.since[i])
        t = {j: mean(times) for j, times in taken.items()}
        w.move(lr * mean([t[i] / t_j for t_j in t.values()]) * g)
        w.send(i)


def delay_adaptive(w: World, updates: int, lr: float, delay: str = "tau") -> None:
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        tau = w.version + 1 - u
        w.move(lr * w.n / max(w.n, tau if delay == "tau" else tau - 1) * g)
        w.send(i)


def ringmaster(w: World, updates: int, lr: float, threshold: float | None = None, stop: bool = False) -> None:
    R = w.n if threshold is None else threshold
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        if w.version - u < R:
            w.move(lr * g)
        w.send(i)
        for j in range(w.n) if stop else ():
            if w.version - w.has[j] >= R:
                w.drop(j)
                w.send(j)


def fedasync(
    w: World,
    updates: int,
    lr: float,
    alpha: float = 0.6,
    mixing: str = "constant",
    a: float | None = None,
    b: float = 4,
) -> None:
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        age = w.version + 1 - u
        if mixing == "polynomial":
            s = (age + 1) ** -(0.5 if a is None else a)
        elif mixing == "hinge":
            s = 1.0 if age <= b else 1 / ((10 if a is None else a) * (age - b) + 1)
        else:
            s = 1.0
        w.models.append((1 - alpha * s) * w.x + alpha * s * (w.models[u] - lr * g))
        w.send(i)


def generalized(
    w: World, updates: int, lr: float, drawn: Mapping[int, Sequence[int]], probabilities: Sequence[float] | None = None
) -> None:
    p = probabilities or [1 / w.n] * w.n
    w.send(*range(w.n))
    while w.version < updates:
        i, _, g = w.next()
        w.move(lr / (w.n * p[i]) * g)
        w.send(*drawn[w.version])


uniform = shuffled = generalized  # with equal probabilities; how workers are drawn is the run's


def rennala(w: World, updates: int, lr: float, gradients: int | None = None) -> None:
    S = gradients or w.n
    w.send(*range(w.n))
    batch: list[float] = []
    while w.version < updates:
        i, _, g = w.next()
        batch.append(g)
        if len(batch) < S:
            w.again(i)
            continue
        w.move(lr / S * sum(batch))
        batch = []
        w.drop(*range(w.n))
        w.send(*range(w.n))


def malenia(w: World, updates: int, lr: float, gradients: int | None = None) -> None:
    S = gradients or w.n
    w.send(*range(w.n))
    batch: list[list[float]] = [[] for _ in range(w.n)]
    while w.version < updates:
        i, _, g = w.next()
        batch[i].append(g)
        if not all(batch) or w.n / sum(Fraction(1, len(own)) for own in batch) < Fraction(S, w.n):
            w.again(i)
            continue
        w.move(lr * mean([mean(own) for own in batch]))
        batch = [[] for _ in range(w.n)]
        w.drop(*range(w.n))
        w.send(*range(w.n))


def ringleader(w: World, updates: int, lr: float) -> None:
    main: list[list[float]] = [[] for _ in range(w.n)]
    later: list[list[float]] = [[] for _ in range(w.n)]
    U = set(range(w.n))
    w.send(*range(w.n))
    while w.version < updates:
        j, _, g = w.next()
        (main if j in U else later)[j].append(g)
        if j not in U or not all(main):  # it has its new model of this round, or the round still collects
            w.again(j)
            continue
        w.move(lr * mean([mean(own) for own in main]))
        w.send(j)
        U.remove(j)
        if not U:
            main, later, U = later, [[] for _ in range(w.n)], set(range(w.n))


def ca2fl(w: World, updates: int, lr: float, buffer: int = 10) -> None:
    h, h_mean, differences = [0.0] * w.n, 0.0, []
    w.send(*range(w.n))
    while w.version < updates:
        i, _, g = w.next()
        differences.append(g - h[i])
        h[i] = g
        if len(differences) == buffer:
            w.move(lr * (h_mean + mean(differences)))
            h_mean, differences = mean(h), []
        w.send(i)


def aced(w: World, updates: int, lr: float, max_delay: float | None = None) -> None:
    most = 10 * w.n if max_delay is None else max_delay
    cache: dict[int, tuple[int, float]] = {}
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        cache[i] = u, g
        if len(cache) < w.n:
            continue
        fresh = [g for u, g in cache.values() if w.version + 1 - u <= most]
        first = w.version == 0
        if fresh:
            w.move(lr * mean(fresh))
        w.send(*(range(w.n) if first else [i]))


def sync_by_speed(w: World, updates: int, lr: float, least: int = 1) -> None:
    shares = [1] * w.n
    taken: list[list[float]] = [[] for _ in range(w.n)]
    while w.version < updates:
        w.send(*range(w.n))
        batch: list[list[float]] = [[] for _ in range(w.n)]
        begun = [w.now] * w.n
        for _ in range(sum(shares)):
            i, _, g = w.next()
            batch[i].append(g)
            taken[i].append(w.now - begun[i])
            begun[i] = w.now
            if len(batch[i]) < shares[i]:
                w.again(i)
        w.move(lr * mean([mean(own) for own in batch]))
        s = [mean(times) for times in taken]
        shares = [max(1, math.floor(least * max(s) / s_i + 1e-6)) for s_i in s]  # times are differences, and rounded


def fedfix(w: World, updates: int, lr: float, period: float = 1.0) -> None:
    tick, received = 0, [0] * w.n
    ready: dict[int, float] = {}
    w.send(*range(w.n))
    w.wake(period)
    while w.version < updates:
        i, _, g = w.next()
        if i >= 0:
            ready[i] = g
            continue
        tick += 1
        if ready:
            w.move(lr / w.n * sum((tick - received[i]) * g for i, g in ready.items()))
        for i in ready:
            received[i] = tick
            w.send(i)
        ready = {}
        w.wake((tick + 1) * period)


def iag(w: World, updates: int, lr: float) -> None:
    y = [0.0] * w.n
    w.send(*range(w.n))
    for _ in range(w.n - 1):
        i, _, y[i] = w.next()
    while w.version < updates:
        i, _, g = w.next()
        y[i] = g
        w.move(lr / w.n * sum(y))
        w.send((w.version - 1) % w.n)


siag = iag  # with a minibatch in place of the exact gradient


def sag(w: World, updates: int, lr: float, drawn: Mapping[int, Sequence[int]]) -> None:
    y: dict[int, float] = {}
    while w.version < updates:
        w.send(*drawn[w.version])
        i, _, g = w.next()
        y[i] = g
        w.move(lr / len(y) * sum(y.values()))


def saga(w: World, updates: int, lr: float, drawn: Mapping[int, Sequence[int]]) -> None:
    y = [0.0] * w.n
    w.send(*range(w.n))
    for _ in range(w.n):
        i, _, g = w.next()
        y[i] = g
    w.move(lr * mean(y))
    while w.version < updates:
        w.send(*drawn[w.version])
        j, _, g = w.next()
        w.move(lr * (g - y[j] + mean(y)))
        y[j] = g


def fadas(
    w: World,
    updates: int,
    lr: float,
    buffer: int = 10,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    late: int | None = None,
) -> None:
    m = v = v_max = 0.0
    inside: list[tuple[int, float]] = []
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        inside.append((u, g))
        if len(inside) == buffer:
            D, delay = mean([g for _, g in inside]), max(w.version + 1 - u for u, _ in inside)
            m, v = betas[0] * m + (1 - betas[0]) * D, betas[1] * v + (1 - betas[1]) * D**2
            v_max = max(v_max, v)
            step = lr if late is None or delay <= late else min(lr, 1 / delay)
            w.move(step * m / (math.sqrt(v_max) + eps))
            inside = []
        w.send(i)

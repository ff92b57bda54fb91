"""The methods a second time, from their papers' pseudo-code: one weight, plain floats, and nothing of the package.

Each function has the name of a method, takes a fresh ``World`` and makes so many updates; letters are those of the papers.
``World`` has the workers, their clock and the models; a method decides to whom a model is sent and how it moves. Where a
method draws workers, the draws are given: ``drawn[version]`` are the workers that were sent that version.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
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
        self.steps = 1  # local steps of a job: it takes so many times as long

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
        self._free[i] = max(self.now, self._free[i]) + self.seconds[i][k % len(self.seconds[i])] * self.steps
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
        i, u, draw = self.done()
        return i, u, self.gradient(self.models[u], i, draw) if i >= 0 else 0.0

    def done(self) -> tuple[int, int, int]:
        """The next job that is done: its worker, the version it was given and its number."""
        self.now, _, i, draw, u = heapq.heappop(self._due)
        if i >= 0:
            self.arrivals.append((self.now, i, u))
        return i, u, draw

    def gradient(self, y: float, i: int, draw: int) -> float:
        """Worker i's gradient number ``draw`` at any point."""
        return self.a[i] * (y - self.b[i]) + (0.0 if self.exact else noise(i, draw))

    def local(self, y: float, i: int, draw: int, lr: float, steps: int) -> float:
        """Where a job of ``steps`` local steps comes to."""
        for k in range(steps):
            y -= lr * self.gradient(y, i, draw * steps + k)
        return y

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
    steps: int = 1,
    proximal: float = 0.0,
) -> None:
    w.steps = steps
    w.send(*range(w.n))
    while w.version < updates:
        i, u, draw = w.done()
        y = w.models[u]
        for k in range(steps):
            y -= lr * (w.gradient(y, i, draw * steps + k) + proximal * (y - w.models[u]))
        age = w.version + 1 - u
        if mixing == "polynomial":
            s = (age + 1) ** -(0.5 if a is None else a)
        elif mixing == "hinge":
            s = 1.0 if age <= b else 1 / ((10 if a is None else a) * (age - b) + 1)
        else:
            s = 1.0
        w.models.append((1 - alpha * s) * w.x + alpha * s * y)
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


def rennala(w: World, updates: int, lr: float, gradients: int | None = None, cancel: bool = True) -> None:
    S = gradients or w.n
    w.send(*range(w.n))
    batch: list[float] = []
    while w.version < updates:
        i, u, g = w.next()
        if u != w.version:  # it ends unheard
            w.send(i)
            continue
        batch.append(g)
        if len(batch) < S:
            w.again(i)
            continue
        w.move(lr / S * sum(batch))
        batch = []
        if cancel:
            w.drop(*range(w.n))
        w.send(*(range(w.n) if cancel else [i]))


def malenia(w: World, updates: int, lr: float, gradients: int | None = None, cancel: bool = True) -> None:
    S = gradients or w.n
    w.send(*range(w.n))
    batch: list[list[float]] = [[] for _ in range(w.n)]
    while w.version < updates:
        i, u, g = w.next()
        if u != w.version:
            w.send(i)
            continue
        batch[i].append(g)
        if not all(batch) or w.n / sum(Fraction(1, len(own)) for own in batch) < Fraction(S, w.n):
            w.again(i)
            continue
        w.move(lr * mean([mean(own) for own in batch]))
        batch = [[] for _ in range(w.n)]
        if cancel:
            w.drop(*range(w.n))
        w.send(*(range(w.n) if cancel else [i]))


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
    rule: str = "divide",
    correct_means: bool = False,
) -> None:
    m = v = v_max = 0.0
    inside: list[tuple[int, float]] = []
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        inside.append((u, g))
        if len(inside) == buffer:
            D, delay = mean([g for _, g in inside]), max(w.version - u for u, _ in inside)
            m, v = betas[0] * m + (1 - betas[0]) * D, betas[1] * v + (1 - betas[1]) * D**2
            v_max = max(v_max, v)
            step, t = lr, w.version + 1
            if late is not None and delay > late:
                step = lr * 1 / delay if rule == "divide" else min(lr, 1 / delay)
            first, second = (1 - beta**t if correct_means else 1 for beta in betas)
            w.move(step * (m / first) / (math.sqrt(v_max) / math.sqrt(second) + eps))
            inside = []
        w.send(i)


def area(w: World, updates: int, lr: float, steps: int = 1, buffer: int = 1) -> None:
    m, inside = [0.0] * w.n, []
    w.steps = steps
    w.send(*range(w.n))
    while w.version < updates:
        i, u, draw = w.done()
        y = w.local(w.models[u], i, draw, lr, steps)
        inside.append(y - m[i])
        m[i] = y
        if len(inside) == buffer:
            w.models.append(w.x + sum(inside) / w.n)
            inside = []
        w.send(i)


def dc_asgd(
    w: World,
    updates: int,
    lr: float,
    strength: float | None = None,
    adaptive: bool = False,
    decay: float = 0.95,
    eps: float = 1e-7,
    own_means: bool = False,
) -> None:
    lam = strength if strength is not None else 2.0 if adaptive else 0.04
    bak, MS = [0.0] * w.n, [0.0] * w.n
    w.send(*range(w.n))
    while w.version < updates:
        i, _, g = w.next()
        k = i if own_means else 0
        MS[k] = decay * MS[k] + (1 - decay) * g**2
        w.move(lr * (g + lam / (math.sqrt(MS[k] + eps) if adaptive else 1) * g**2 * (w.x - bak[i])))
        bak[i] = w.x
        w.send(i)


def ormo(w: World, updates: int, lr: float, momentum: float = 0.9) -> None:
    beta, K, m = momentum, w.n, 0.0  # the momentum has eta in it, as in the paper
    w.send(*range(w.n))
    while w.version < updates:
        i, u, g = w.next()
        t, x = w.version, w.x
        if t >= 1 and (t - 1) % K == 0:
            x, m = x - beta * m, beta * m
        j = math.ceil(t / K) - math.ceil(u / K)
        m += beta**j * lr * g
        w.models.append(x - (1 - beta ** (j + 1)) / (1 - beta) * lr * g)
        w.send(i)


def ringmaster_lmo(
    w: World,
    updates: int,
    lr: float,
    threshold: float | None = None,
    stop: bool = False,
    alpha: float = 0.05,
    lmo: str = "spectral",
    rest: str = "momentum",
    agnostic: bool = False,
) -> None:
    k, m = 0, 0.0
    w.send(*range(w.n))
    while k < updates:
        i, u, g = w.next()
        a_k = alpha if not agnostic else 1.0 if k == 0 else 1 / math.sqrt(k)
        R_k = math.floor(1 / a_k + 1e-9) if agnostic else w.n if threshold is None else threshold
        if k - u < R_k:
            m = a_k * g + (1 - a_k) * m
            step = lr / (k + 1) ** 0.75 if agnostic else lr
            if lmo == "euclidean":
                w.move(step * m / (abs(m) + 1e-10))
            else:  # one weight is no matrix
                w.move(step * (m if (lmo, rest) == ("spectral", "momentum") else math.copysign(1.0, m)))
            k += 1
        w.send(i)
        for j in range(w.n) if stop else ():
            if k - w.has[j] >= R_k:
                w.drop(j)
                w.send(j)


def outer(
    w: World,
    updates: int,
    rule: Callable[[int, int, float], tuple[float, float | None]],
    steps: int,
    inner_lr: float,
    dynamic: bool = False,
    inner: str = "SGD",
    inner_state: str = "reset",
) -> None:
    """Local steps at the workers; ``rule(t, u, x - y)`` gives the next model and where the worker begins, if elsewhere."""
    heavy = 0.5 if inner == "SGD[momentum=0.5]" else 0.0
    taken, begins, velocity, speeds = [steps] * w.n, [0.0] * w.n, [0.0] * w.n, [0.0] * w.n
    w.steps = steps
    w.send(*range(w.n))
    while w.version < updates:
        i, u, draw = w.done()
        y, v = begins[i], velocity[i] if inner_state == "keep" else 0.0
        for k in range(taken[i]):
            v = heavy * v + w.gradient(y, i, draw * steps + k)
            y -= inner_lr * v
        velocity[i] = v
        x, begin = rule(w.version, u, begins[i] - y)
        w.models.append(x)
        begins[i] = x if begin is None else begin
        speeds[i] = taken[i] / (w.now - w.since[i])
        if dynamic:  # H_w = max(1, floor(H v_w / v_max)); times are differences, and rounded
            taken[i] = max(1, math.floor(steps * speeds[i] / max(speeds) + 1e-6))
        w.steps = taken[i]
        w.send(i)


def diloco(
    w: World,
    updates: int,
    lr: float,
    steps: int,
    inner_lr: float,
    inner: str,
    inner_state: str,
    momentum: float,
    weight: float | None,
    staleness: float | None,
    dynamic: bool,
) -> None:
    m = 0.0

    def rule(t: int, u: int, delta: float) -> tuple[float, None]:
        nonlocal m
        g = delta / math.sqrt(w.n) if weight is None else delta * weight
        g *= 1.0 if staleness is None else (1 + t - u) ** -staleness
        m = momentum * m + g
        return w.x - lr * (g + momentum * m), None

    outer(w, updates, rule, steps, inner_lr, dynamic, inner, inner_state)


def delayed_nesterov(
    w: World,
    updates: int,
    lr: float,
    steps: int,
    inner_lr: float,
    momentum: float,
    weight: float | None,
    every: int | None,
    spread: float,
    dynamic: bool,
) -> None:
    N, c, beta, m = every or w.n, spread, momentum, 0.0
    S: list[float] = []

    def rule(t: int, u: int, delta: float) -> tuple[float, None]:
        nonlocal m
        g = delta / math.sqrt(w.n) if weight is None else delta * weight
        S.append(g)
        if (t + 1) % N == 0:
            m = beta * m + sum(S) / N
            S.clear()
            return w.x - lr * ((1 - c * N + c) * beta * m + g / N), None
        return w.x - lr * (c * beta * m + g / N), None

    outer(w, updates, rule, steps, inner_lr, dynamic)


def mla(
    w: World, updates: int, lr: float, steps: int, inner_lr: float, momentum: float, weight: float | None, dynamic: bool
) -> None:
    m = d = plain = 0.0  # as it is before it is rewritten: x~ moves, and workers begin d ahead of it

    def rule(t: int, u: int, delta: float) -> tuple[float, None]:
        nonlocal m, plain, d
        g = delta / math.sqrt(w.n) if weight is None else delta * weight
        plain = plain + d - lr * g  # x~ <- x~ + d - eta delta
        m = momentum * m + (1 - momentum) * g
        d = -lr * momentum * m
        return plain + d, None

    outer(w, updates, rule, steps, inner_lr, dynamic)


def heloco(
    w: World,
    updates: int,
    lr: float,
    steps: int,
    inner_lr: float,
    momentum: float,
    weight: float | None,
    aligned: float,
    shrink: float,
    most_shrunk: float,
    caution: float,
    ahead_at_workers: bool,
) -> None:
    mu, m, rho = momentum, 0.0, 1 / math.sqrt(w.n) if weight is None else weight

    def rule(t: int, u: int, delta: float) -> tuple[float, float | None]:
        nonlocal m
        if delta * m < 0 and aligned > -1:  # of one weight the cosine is 1 or -1: nothing is ever turned
            delta -= delta * min(shrink * abs(delta) / (abs(delta) + caution * abs(m) + 1e-8), most_shrunk)
        G = rho * delta
        m = mu * m + (1 - mu) * G
        x = w.x - lr * (G + mu * m)
        return x, x - lr * mu * m if ahead_at_workers else None

    outer(w, updates, rule, steps, inner_lr)

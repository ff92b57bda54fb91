"""Methods whose workers take several steps or keep something, a second time from their pseudo-code: plain floats only.

As in ``pseudo_code``: one weight, workers with F_i(x) = a_i (x - b_i)^2 / 2, letters of the papers, and which workers were
drawn is given. Nothing of the package is imported. A job of K steps uses the errors of numbers K draw, K draw + 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pseudo_code import World, mean, noise

Seconds = Sequence[Sequence[float]]


class Local(World):
    """A world whose jobs take K gradients each."""

    def __init__(
        self,
        seconds: Seconds,
        a: Sequence[float],
        b: Sequence[float],
        steps: int = 1,
        noisy: bool = True,
        exact: bool = False,
    ) -> None:
        super().__init__([[steps * s for s in own] for own in seconds], a, b, exact)
        self.K, self.noisy = steps, noisy
        self.first: list[list[int]] = [[] for _ in seconds]  # the numbers of each worker's jobs in flight, oldest first

    def again(self, i: int) -> None:
        self.first[i].append(self._draws[i])
        super().again(i)

    def slope(self, i: int, draw: int, k: int, y: float) -> float:
        """Of step k in a worker's job number ``draw``, at y."""
        return self.a[i] * (y - self.b[i]) + (noise(i, draw * self.K + k) if self.noisy else 0.0)

    def ended(self) -> tuple[int, int, int]:
        """The next arrival: its worker, the version it was sent, and the job's number; the worker is -1 at a wake."""
        i, u, _ = self.next()
        return i, u, self.first[i].pop(0) if i >= 0 else 0

    def sgd(self, i: int, draw: int, y: float, lr: float, c: float = 0.0) -> float:
        """K steps along G(y) + c."""
        for k in range(self.K):
            y -= lr * (self.slope(i, draw, k, y) + c)
        return y


# Polled workers -------------------------------------------------------------------------------------------------------


def _steps(seconds: Seconds, i: int, draw: int, most: int, time: float) -> int:
    """How many steps of its job a worker has done in this time."""
    own = seconds[i]
    return sum((k + 1) * own[draw % len(own)] <= time for k in range(most))


def quafl(w: Local, lr: float, drawn: Sequence[Sequence[int]], seconds: Seconds, period: float, s: int) -> list[int]:
    """``drawn``: who is contacted, contact by contact. Returns the numbers of steps."""
    Xi, since, draw, done = [0.0] * w.n, [0.0] * w.n, [0] * w.n, []
    for t, S in enumerate(drawn, 1):
        X, Y = w.x, {}
        for i in S:
            y = Xi[i]
            for k in range(steps := _steps(seconds, i, draw[i], w.K, t * period - since[i])):
                y -= lr * (s + 1) / s * w.slope(i, draw[i], k, y)
            done.append(steps)
            Y[i] = y
        for i in S:
            Xi[i] = (X + s * Y[i]) / (s + 1)
            since[i] = t * period
            draw[i] += 1
        w.models.append((X + sum(Y.values())) / (s + 1))
    return done


def favano(
    w: Local,
    lr: float,
    drawn: Sequence[Sequence[int]],
    seconds: Seconds,
    period: float,
    s: int,
    divide_by: str = "realised",
    expected: Sequence[float] | None = None,
) -> list[int]:
    start, since, draw, done = [0.0] * w.n, [0.0] * w.n, [0] * w.n, []
    history: list[list[int]] = [[] for _ in range(w.n)]
    for t, S in enumerate(drawn, 1):
        unbiased = {}
        for i in S:
            E, y = _steps(seconds, i, draw[i], w.K, t * period - since[i]), start[i]
            for k in range(E):
                y -= lr * w.slope(i, draw[i], k, y)
            history[i].append(E)
            done.append(E)
            if divide_by == "realised":
                alpha = mean([float(e > 0) for e in history[i]]) * E
            else:
                alpha = mean(history[i]) if expected is None else expected[i]
            unbiased[i] = start[i] + (y - start[i]) / alpha if E else start[i]
        w.models.append((w.x + sum(unbiased.values())) / (s + 1))
        for i in S:
            start[i], since[i] = w.x, t * period
            draw[i] += 1
    return done


# Rounds ---------------------------------------------------------------------------------------------------------------


def scaffold(w: Local, updates: int, lr: float, drawn: Mapping[int, Sequence[int]], global_lr: float = 1.0) -> None:
    c, ci = 0.0, [0.0] * w.n
    while w.version < updates:
        S = drawn[w.version]
        x, dy, dc = w.x, {}, {}
        w.send(*S)
        for _ in S:
            i, _, k = w.ended()
            y = w.sgd(i, k, x, lr, c - ci[i])
            new = ci[i] - c + (x - y) / (w.K * lr)
            dy[i], dc[i] = y - x, new - ci[i]
        for i in S:
            ci[i] += dc[i]
        w.models.append(x + global_lr * mean(list(dy.values())))
        c += sum(dc.values()) / w.n


def mimic(w: Local, updates: int, lr: float, drawn: Mapping[int, Sequence[int]]) -> None:
    c = [0.0] * w.n
    while w.version < updates:
        A, g = drawn[w.version], {}
        w.send(*A)
        for _ in A:
            i, _, k = w.ended()
            g[i] = w.x - w.sgd(i, k, w.x, lr)
        v = mean([g[i] + c[i] for i in A])
        w.move(v)
        for i in A:
            c[i] = v - g[i]


# Arrivals -------------------------------------------------------------------------------------------------------------


def defedavg(w: Local, updates: int, lr: float, drawn: Mapping[int, Sequence[int]], sampled: int = 2) -> None:
    w.send(*range(w.n))
    while w.version < updates:
        differences = []
        for _ in range(sampled):
            i, u, k = w.ended()
            differences.append(w.models[u] - w.sgd(i, k, w.models[u], lr))
        w.move(mean(differences))
        w.send(*drawn[w.version])


def asofed(
    w: Local,
    updates: int,
    lr: float,
    beta: float = 0.5,
    proximal: float = 0.01,
    compare_with: str = "last",
    dynamic: bool = True,
) -> None:
    v, h, last = [0.0] * w.n, [0.0] * w.n, [0.0] * w.n
    received: list[list[int]] = [[] for _ in range(w.n)]  # the versions that each worker was sent
    w.send(*range(w.n))
    while w.version < updates:
        i, u, k = w.ended()
        received[i].append(u)
        delays = [later - earlier for earlier, later in zip(received[i], received[i][1:], strict=False)]
        r = max(1.0, math.log(mean(delays))) if dynamic and delays else 1.0
        y = x = w.models[u]
        for q in range(w.K):
            gradient = w.slope(i, k, q, y) + proximal * (y - x)
            zeta = gradient - v[i] + h[i]
            y -= r * lr * zeta
            h[i] = beta * h[i] + (1 - beta) * v[i]
            v[i] = gradient
        w.move(((last[i] if compare_with == "last" else x) - y) / w.n)
        last[i] = y
        w.send(i)


def adsaga(w: Local, updates: int, lr: float) -> None:
    table = [0.0] * w.n
    w.send(*range(w.n))
    while w.version < updates:
        i, u, k = w.ended()
        g = w.slope(i, k, 0, w.models[u])
        w.move(lr * (g - table[i] + mean(table)))
        table[i] = g
        w.send(i)


def adpsgd(w: Local, updates: int, lr: float, partners: Sequence[int]) -> list[list[float]]:
    """``partners``: whom each arriving worker averages with. Returns the workers' models after every step."""
    x = [0.0] * w.n
    read = list(x)  # at the beginning of the gradient
    history = []
    w.send(*range(w.n))
    for j in partners[:updates]:
        i, _, k = w.ended()
        g = w.slope(i, k, 0, read[i])
        x[i] = x[j] = (x[i] + x[j]) / 2
        x[i] -= lr * g
        read[i] = x[i]
        w.models.append(mean(x))
        history.append(list(x))
        w.send(i)
    return history

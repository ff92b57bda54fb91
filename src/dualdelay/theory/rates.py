"""The rates of the paper's Table 1 and the times of later papers, with every constant in front taken as 1.

They say how a method scales, not how fast it is: with factors of 1 the rates of two methods are not comparable in size,
only in what they depend on. Each is proved under its own assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.errors import BadInput, is_finite, require_positive, require_whole, shown


def rates(
    *,
    workers: int,
    updates: int,
    variance: float,
    heterogeneity: Sequence[float],
    delay: float,
    mean_delay: float,
    mean_delays: Sequence[float] | None = None,
    local_steps: int = 1,
    buffer: int = 1,
    smoothness: float = 1.0,
    gap: float = 1.0,
    largest_noise: float = math.nan,
    hessian: float = math.nan,
    largest_gradient: float = math.nan,
) -> dict[str, float]:
    """E||grad F||^2 after T updates for the seven methods of Table 1, by their names in ``dd.ALGORITHMS``.

    With s = sigma^2, z_i = zeta_i^2, z their mean and a = tau_avg:
        sync      sqrt(s / (n T)) + 1 / T
        mifa      sqrt((1 + a) / (n K T)) s + (n K sqrt(s z) tau_max + s tau_max delta rho) / T
        fedbuff   (s + K z) / sqrt(m K T) + (K a tau_max z + tau_max s) / T
        vanilla   sqrt(s / T) + n / T + max z_i
        uniform   sqrt((s + z) / T) + (a mean(a_i z_i))^(1/3) / T^(2/3)
        shuffled  sqrt(s / T) + ((sqrt(n z))^(2/3) + (n G)^(2/3)) / T^(2/3) + n / T
        dude      sqrt(s tau_max / (n T)) + sqrt(n tau_max / s) / T^(3/2)
    The table is in units in which L = Delta = 1; with ``smoothness`` and ``gap`` the constants are brought to these units
    and the rates back from them. As printed they promise too much where there is no noise: mifa (s = 0), and on homogeneous
    data also fedbuff and uniform, would be done after one update, because a term of order 1 / T is left out; and dude's is
    infinite, for the theorem's step size is (see ``bound``, which caps it).

    workers, updates: n and T.
    variance: sigma^2, of each worker's minibatch gradients.
    heterogeneity: zeta_i^2, the largest ||grad F_i - grad F||^2 anywhere, for each worker (sync and dude need none).
    delay, mean_delay: tau_max and tau_avg, the model delays of the gradients in use (``run.delays``).
    mean_delays: tau_avg^i, each worker's own mean delay; if not given, all are ``mean_delay``.
    local_steps: K of mifa and fedbuff.
    buffer: m of fedbuff, arrivals per update; that all workers fill it equally often is assumed.
    smoothness, gap: L and F(x0) - F*.
    largest_noise, hessian: delta and rho of mifa, the largest norm of a gradient's noise and the Lipschitz constant of the
        Hessians; without them its rate is nan.
    largest_gradient: G of shuffled, the largest ||grad F_i||; without it its rate is nan.
    """
    for name, count in (("workers", workers), ("updates", updates), ("local_steps", local_steps), ("buffer", buffer)):
        require_whole(name, count, 1)
    for name, number in (("smoothness", smoothness), ("gap", gap)):
        require_positive(name, number)
    for name, number, low in (("variance", variance, 0.0), ("delay", delay, 1.0), ("mean_delay", mean_delay, 1.0)):
        _require_number(name, number, low)
    own_delays = _per_worker("mean_delays", [mean_delay] * workers if mean_delays is None else mean_delays, workers, 1.0)
    unit = smoothness * gap  # of a squared gradient
    zetas = [value / unit for value in _per_worker("heterogeneity", heterogeneity, workers, 0.0)]
    n, t, k, s, z = workers, updates, local_steps, variance / unit, sum(zetas) / workers
    delta, rho = largest_noise / math.sqrt(unit), hessian * math.sqrt(gap) / smoothness**1.5
    delayed = sum(a_i * z_i for a_i, z_i in zip(own_delays, zetas, strict=True)) / n
    mifa = n * k * math.sqrt(s * z) * delay + s * delay * delta * rho
    shuffled = math.sqrt(n * z) ** (2 / 3) + (n * largest_gradient / math.sqrt(unit)) ** (2 / 3)
    table = {
        "sync": math.sqrt(s / (n * t)) + 1 / t,
        "mifa": math.sqrt((1 + mean_delay) / (n * k * t)) * s + mifa / t,
        "fedbuff": (s + k * z) / math.sqrt(buffer * k * t) + (k * mean_delay * delay * z + delay * s) / t,
        "vanilla": math.sqrt(s / t) + n / t + max(zetas),
        "uniform": math.sqrt((s + z) / t) + (mean_delay * delayed) ** (1 / 3) / t ** (2 / 3),
        "shuffled": math.sqrt(s / t) + shuffled / t ** (2 / 3) + n / t,
        "dude": math.sqrt(s * delay / (n * t)) + (math.sqrt(n * delay / s) / t**1.5 if s else math.inf),
    }
    return {name: rate * unit for name, rate in table.items()}


def times(*, smoothness: float, gap: float, variance: float, target: float, seconds: Sequence[float]) -> dict[str, float]:
    """Seconds until E||grad F||^2 <= target, with fixed computing times, by the methods' names.

    With e = target, s_i = seconds and mean, max over workers:
        malenia, ringleader  L Delta / e (max s_i + mean s_i sigma^2 / (n e)), the least possible on heterogeneous data
        sync, dude           L Delta / e (max s_i + max s_i sigma^2 / (n e))
        rennala, ringmaster  min over m of (the m fastest's mean of 1 / s_i)^-1 L Delta / e (1 + sigma^2 / (m e)), the least
                             possible on homogeneous data, which these methods rely on
    So theory promises dude no advantage over sync on the clock: its tau_max is about 2 max s_i sum 1 / s_i, and it makes
    sum 1 / s_i updates a second. What is seen in practice is better than that.
    """
    for name, number in (("smoothness", smoothness), ("gap", gap), ("target", target)):
        require_positive(name, number)
    _require_number("variance", variance, 0.0)
    ordered = sorted(_per_worker("seconds", seconds, len(seconds), 0.0))
    if not ordered or ordered[0] <= 0:
        raise BadInput(f"seconds is {list(seconds)!r}; expected a time above zero for each worker.")
    n, work, noise = len(ordered), smoothness * gap / target, variance / target
    heterogeneous = work * (ordered[-1] + sum(ordered) / n * noise / n)
    slowest = work * (ordered[-1] + ordered[-1] * noise / n)
    homogeneous = min(m / sum(1 / s for s in ordered[:m]) * work * (1 + noise / m) for m in range(1, n + 1))
    table = {"malenia": heterogeneous, "ringleader": heterogeneous, "sync": slowest, "dude": slowest}
    return {**table, "rennala": homogeneous, "ringmaster": homogeneous}


def _require_number(name: str, value: float, low: float) -> None:
    if not is_finite(value) or value < low:
        raise BadInput(f"{name} is {shown(value)}; expected a finite number, {low:g} or more.")


def _per_worker(name: str, values: Sequence[float], workers: int, low: float) -> list[float]:
    if len(values) != workers:
        raise BadInput(f"{name} has {len(values)} entries; expected {workers}, one for each worker.")
    for worker, value in enumerate(values):
        _require_number(f"{name}[{worker}]", value, low)
    return list(values)

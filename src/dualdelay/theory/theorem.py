"""The theorem of the DuDe-ASGD paper as formulas: its step size, from which update on it holds, and its bound.

Its assumptions: F >= F*; the gradient of every F_i is Lipschitz; a minibatch's gradient is unbiased, with variance at most
sigma^2 at every worker and every model met; samples are independent across workers and times; no gradient in use is ever
older than tau_max; delays are independent of the samples. The data may be heterogeneous to any degree. L is the largest
L_i, or the root of the mean of their squares: the paper asks for L of F alone, which is not enough, and leaves both
independences unsaid. With them its proof holds, and the constants here are the printed ones. A shorter proof has smaller
ones (docs/explanation/proof.md): 2 Delta / (T lr) + 4 L tau_max lr sigma^2 / n for any lr up to 1 / (2 L tau_max).

For DuDe with ``wait_for`` workers per update pass the largest model delay of such a run, ``run.delays.tau_max``: that
waiting for c workers divides it by c, as the paper says, is only approximately so (equal speeds give 2n/c - 1).
"""

from __future__ import annotations

import math

from ..core.errors import BadInput, is_finite, require_positive, require_whole, require_zero_or_more, shown


def step_size(smoothness: float, gap: float, variance: float, delay: float, workers: int, updates: int) -> float:
    """The theorem's step size: min( 1/2 sqrt(n Delta / (L sigma^2 tau_max T)), 1 / (64 L tau_max) ).

    The first is what makes the bound smallest after T updates, the second the largest step it is proved for: that is the
    smaller one as long as T is below ``horizon``, so always without noise. Both are far below what works in practice: see
    ``largest_step``.

    smoothness, gap, variance: L, F(x0) - F* and sigma^2.
    delay: tau_max, the largest model delay of a gradient in use, at least 1.
    workers, updates: n and T.
    """
    cap = _checked(smoothness, gap, variance, delay, workers)
    require_whole("updates", updates, 1)
    return min(0.5 * math.sqrt(workers * gap / (smoothness * variance * delay * updates)), cap) if variance else cap


def largest_step(smoothness: float, delay: float) -> float:
    """The largest step size that the theorem covers: 1 / (64 L tau_max).

    The factor 64 is the proof's. With equally fast workers DuDe is stable on a quadratic up to about 2.2 / (L tau_max), a
    hundred and forty times that (from the roots of its recurrence).
    """
    require_positive("smoothness", smoothness)
    if not is_finite(delay) or delay < 1:
        raise BadInput(f"delay is {shown(delay)}; expected the largest model delay, 1 or more (run.delays.tau_max).")
    return 1.0 / (64.0 * smoothness * delay)


def horizon(smoothness: float, gap: float, variance: float, delay: float, workers: int) -> float:
    """The updates from which on the theorem holds as it is printed: 1024 L Delta n tau_max / sigma^2.

    Before, its step size would be above ``largest_step``. Without noise that is so at every T, and the horizon is infinite:
    then the largest step is the one to take, however long the run. It is long: with L = Delta = sigma^2 = 1, ten workers
    and tau_max = 19 it is 194,560 updates.
    """
    _checked(smoothness, gap, variance, delay, workers)
    return 1024.0 * smoothness * gap * workers * delay / variance if variance else math.inf


def bound(
    smoothness: float,
    gap: float,
    variance: float,
    delay: float,
    workers: int,
    updates: int,
    lr: float | None = None,
) -> float:
    """What the mean of E||grad F||^2 over the models 0..T-1 of a DuDe run is at most.

    With the theorem's step size (``lr`` None) from ``horizon`` on, its two terms:
        128 sqrt(L Delta sigma^2 tau_max / (n T)) + 128 (L Delta)^(3/2) sqrt(n tau_max) / (sigma T^(3/2)).
    With any ``lr`` up to ``largest_step``, and with that one before the horizon, what its proof shows on the way:
        32 Delta / (T lr) + 128 L tau_max lr sigma^2 / n + 128 L^3 tau_max^2 lr^3 sigma^2 / n.
    The second term of the theorem is eight times what the proof gives, and so the bound is a little larger at the horizon
    than just before.

    It is a bound and no forecast. At the horizon it is about 4 sigma^2 / n: with the numbers under ``horizon`` 0.40, where
    the mean over such a run is about 0.007 and what is left at its end 0.0004, sixty and a thousand times less. Use it to
    see what matters (sigma^2 tau_max / n), not how much. All constants are the paper's; smaller ones can be proved
    (docs/explanation/proof.md).
    """
    cap = _checked(smoothness, gap, variance, delay, workers)
    require_whole("updates", updates, 1)
    if lr is None:
        if updates >= horizon(smoothness, gap, variance, delay, workers):
            first = math.sqrt(smoothness * gap * variance * delay / (workers * updates))
            second = math.sqrt((smoothness * gap / updates) ** 3 * workers * delay / variance)
            return 128.0 * (first + second)
        lr = cap
    require_positive("lr", lr)
    if lr > cap * (1.0 + 1e-12):  # a caller that computed the cap in another way may have rounded up
        raise BadInput(
            f"lr is {lr!r}, above {cap!r}, the largest step size that the theorem covers (1 / (64 L tau_max)); take a "
            "smaller one, or leave lr out for the theorem's own."
        )
    noise = 128.0 * smoothness * delay * lr * (1.0 + delay * (smoothness * lr) ** 2) * variance / workers
    return 32.0 * gap / (updates * lr) + noise


def _checked(smoothness: float, gap: float, variance: float, delay: float, workers: int) -> float:
    """The largest step size, if the constants can be constants."""
    require_positive("gap", gap)
    require_zero_or_more("variance", variance)
    require_whole("workers", workers, 1)
    return largest_step(smoothness, delay)

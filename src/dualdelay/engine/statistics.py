"""Differences between two groups of runs, seed by seed: their spread, an interval and tests. scipy does the mathematics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

_RESAMPLES = 9999  # of signs, where ranks are tied: all there are for up to 13 seeds; scipy has no exact test for more


def mean_and_std(values: Values) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample; nan for one value or where one is not finite."""
    if not len(values):
        return math.nan, math.nan
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(values))
    several = len(values) > 1 and bool(np.isfinite(values).all())
    return mean, float(np.std(values, ddof=1)) if several else math.nan


def margin(count: int, level: float = 0.95) -> float:
    """Half of Student's interval of a mean of so many values, in their standard deviations; nan for one."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, count - 1)) / math.sqrt(count) if count > 1 else math.nan


def interval(values: Values, level: float) -> tuple[float, float]:
    """Student's interval of a mean, which holds for values that are spread normally; nan where there is no deviation."""
    mean, std = mean_and_std(values)
    half = math.nan if math.isnan(std) else margin(len(values), level) * std
    return mean - half, mean + half


def t_test(differences: Values) -> float:
    """Student's two-sided p-value of a mean of zero; nan for one value, what is not finite, or no spread at all."""
    from scipy import stats

    mean, std = mean_and_std(differences)
    if math.isnan(std) or std == 0:  # seeds that all say the same are no sample of anything
        return math.nan
    return float(2 * stats.t.sf(abs(mean) / (std / math.sqrt(len(differences))), len(differences) - 1))


def rank_test(differences: Values) -> float:
    """The two-sided p-value of Wilcoxon's signed ranks, exact for up to 13 seeds, and up to 50 with no two ranks alike.

    Differences of zero are left out, and an infinite one is the largest.
    """
    from scipy import stats

    nonzero = differences[np.nan_to_num(differences, nan=0.0) != 0]
    if not len(nonzero):
        return 1.0 if len(differences) else math.nan
    signed = np.sign(nonzero) * stats.rankdata(np.abs(nonzero))
    if len(np.unique(np.abs(signed))) == len(signed) or 2 ** len(signed) > _RESAMPLES:
        return float(stats.wilcoxon(signed).pvalue)

    def total(ranks: Values, axis: int) -> Values:
        return np.asarray(ranks.sum(axis))

    done = stats.permutation_test((signed,), total, permutation_type="samples", vectorized=True, n_resamples=_RESAMPLES)
    return float(done.pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's rule; what is nan was no test and is not counted."""
    tested = sorted((value, k) for k, value in enumerate(p) if not math.isnan(value))
    corrected, least = [math.nan] * len(p), 0.0
    for place, (value, k) in enumerate(tested):
        least = max(least, min(1.0, (len(tested) - place) * value))
        corrected[k] = least
    return corrected

"""How far F is above its least value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..problems import Network, Quadratic
from .curvature import hessians
from .survey import UNKNOWN, Estimate, Survey


def gap(survey: Survey, x: Tensor, means: Sequence[Tensor | None]) -> Estimate:
    """F(x) - F*, given the workers' mean gradients; None where there is none."""
    problem = survey.problem
    known = [mean for mean in means if mean is not None]
    matrices = hessians(survey, x) if isinstance(problem, Quadratic) and len(known) == len(means) else None
    if matrices is not None:
        return _quadratic_gap(survey, matrices.mean(0), torch.stack(known).mean(0))
    value = survey.attempt("the gap", lambda: survey.objective(x))
    if value is None:
        return UNKNOWN
    optimum = getattr(problem, "optimum", None)
    if callable(optimum):
        best = survey.attempt("the gap", lambda: survey.objective(optimum()))
        return UNKNOWN if best is None else Estimate(max(0.0, value - best), 0.0, "exact, from the problem's optimum")
    if isinstance(problem, Network) and value >= 0:
        return Estimate(value, math.nan, "upper bound: F* is at least 0")
    survey.notes.append(
        f"the gap could not be measured: F is {value:g} and nothing is known of F*; give the problem a method 'optimum' "
        "that returns the minimiser, or take F less a lower bound of yours."
    )
    return UNKNOWN


def _quadratic_gap(survey: Survey, hessian: Tensor, gradient: Tensor) -> Estimate:
    """1/2 g' H^-1 g: from the gradient, so that nothing cancels."""
    values, vectors = torch.linalg.eigh(hessian)
    along = vectors.T @ gradient if len(values) == len(gradient) else gradient  # a multiple of the identity is 1 x 1
    flat = values.expand_as(along) <= 1e-14 * float(values.abs().max())
    if bool((values < -1e-14 * values.abs().max()).any()) or bool((along[flat].abs() > 1e-12 * (1 + along.norm())).any()):
        survey.notes.append("the gap is infinite: F has no lower bound, for the mean of the curvatures is not positive.")
        return Estimate(math.inf, 0.0, "exact")
    steep = values.expand_as(along)[~flat]
    return Estimate(float((along[~flat].square() / steep).sum()) / 2, 0.0, "exact")

"""The constants that theory speaks of, measured on a problem: smoothness, variance, heterogeneity and the gap to F*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Problem
from ..core.devices import using_threads
from ..core.errors import BadInput, plain_number, require_kind, require_threads, require_whole
from ..problems import Quadratic
from .curvature import smoothness
from .gaps import gap
from .survey import UNKNOWN, Estimate, Survey

_MOST = 1_000_000  # minibatches of which a variance is taken


@dataclass(frozen=True)
class Constants:
    """What the theorem and the rates take, as found at one model x; theory means the largest over all models met."""

    smoothness: Estimate
    """L of F: the Lipschitz constant of its gradient, of all x where that is known, else at x."""
    curvature: Estimate
    """The largest absolute eigenvalue of F's Hessian at x."""
    smoothnesses: tuple[Estimate, ...]
    """Each worker's own L_i. The theorem's proof uses L of each F_i, so the largest of these is the safe L."""
    variance: Estimate
    """sigma^2 of one minibatch gradient, the largest over workers."""
    variances: tuple[Estimate, ...]
    """Each worker's own."""
    heterogeneity: tuple[Estimate, ...]
    """zeta_i^2 = ||grad F_i - grad F||^2 at x, for each worker."""
    gap: Estimate
    """F(x) - F*."""
    gradient: Estimate
    """||grad F|| at x."""
    cost: int
    """Minibatch gradients spent."""
    notes: tuple[str, ...]
    """What could not be measured, or not as meant, and why."""


def constants(
    problem: Problem,
    x: Tensor | None = None,
    *,
    draws: int = 100,
    seed: int = 0,
    iterations: int = 30,
    samples: int | None = None,
    threads: int | None = 1,
) -> Constants:
    """Measure a problem's constants at x, by default where a run with this seed starts.

    Quadratics and logistic regression are worked out, but for the minibatches of the latter. Elsewhere the curvature comes
    from at most ``iterations`` products with the Hessian of F and of each F_i: for a large network that is most of the
    cost, and a kink, as of a ReLU, shows only in the error. They go over all data, or over ``samples`` of each worker; the
    error then has in it how steep the same direction is on as many others. Variances come from ``draws`` minibatches that
    no run meets. Problems without exact local gradients (no ``measure``) are measured by minibatches alone, and their
    smoothness by a few of them. Of problems with local steps the single gradients are measured. What cannot be measured
    is nan, and ``notes`` say why. Torch uses ``threads`` threads, None: its own number, as in ``dd.simulate``.
    """
    draws, seed, iterations, samples = map(plain_number, (draws, seed, iterations, samples))
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    require_whole("draws", draws, 4)
    require_whole("seed", seed, 0)
    require_whole("draws", draws, 4, _MOST)
    require_whole("iterations", iterations, 1)
    if samples is not None:
        require_whole("samples", samples, 1)
    require_threads("threads", threads := torch.get_num_threads() if threads is None else threads)
    survey = Survey(problem, draws, 2**30 + seed * draws)  # far beyond the minibatches of any run
    with using_threads(threads):
        return _measured(survey, problem, x, iterations, seed, samples)


def _measured(
    survey: Survey, problem: Problem, x: Tensor | None, iterations: int, seed: int, samples: int | None
) -> Constants:
    start = survey.attempt("everything" if x is None else "whether x has the right shape", lambda: problem.start(seed))
    if x is None and start is None:
        return _nothing(problem.workers, survey)
    x = start if x is None else _weights(x, start)
    assert x is not None
    curved = smoothness(survey, x, iterations, seed, samples)
    means: list[Tensor | None] = []
    variances: list[Estimate] = []
    for worker in range(problem.workers):
        mean, variance = _worker(survey, x, worker)
        means.append(mean)
        variances.append(variance)
    gradient, heterogeneity = _unlike(survey, means, variances)
    largest = max(variances, key=lambda each: math.inf if math.isnan(each.value) else each.value)
    measured = (*curved, largest, tuple(variances), heterogeneity, gap(survey, x, means), gradient)
    return Constants(*measured, survey.cost, tuple(dict.fromkeys(survey.notes)))


def _weights(x: Tensor, start: Tensor | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise BadInput(f"x is {x!r}; expected a flat tensor of weights, such as run.x.")
    if start is None:
        return x.detach()
    if x.shape != start.shape:
        raise BadInput(f"x has shape {tuple(x.shape)}; expected {tuple(start.shape)}, the flat weights of this problem.")
    return x.detach().to(start)


def _nothing(workers: int, survey: Survey) -> Constants:
    each = (UNKNOWN,) * workers
    return Constants(UNKNOWN, UNKNOWN, each, UNKNOWN, each, each, UNKNOWN, UNKNOWN, survey.cost, tuple(survey.notes))


def _worker(survey: Survey, x: Tensor, worker: int) -> tuple[Tensor | None, Estimate]:
    """A worker's mean gradient and the variance of its minibatches' gradients."""
    problem, count = survey.problem, survey.draws
    exact = survey.attempt(f"the gradient of worker {worker}", lambda: survey.gradient(x, worker)) if survey.exact else None
    if survey.noiseless:
        return exact, Estimate(0.0, 0.0, "exact")
    if isinstance(problem, Quadratic) and type(problem).gradient is Quadratic.gradient:
        return exact, Estimate(len(x) * problem.noise**2, 0.0, "exact")
    if survey.exact and exact is None:
        return None, UNKNOWN

    def sampled() -> tuple[Tensor, list[float], list[float]]:
        total = before = torch.zeros_like(x, dtype=torch.float64)
        squares, products = [], []
        for draw in range(count):
            away = survey.sample(x, worker, draw) - (0.0 if exact is None else exact)
            total = total + away
            if exact is not None:
                squares.append(float(away @ away))
            elif draw % 2:  # half the squared distance of two is the variance in the mean, whatever their mean is
                squares.append(float((away - before).square().sum()) / 2)
            if draw % 2:
                products.append(float(away @ before))
            before = away
        return total / count, squares, products

    found = survey.attempt(f"the variance of worker {worker}", sampled)
    if found is None:
        return exact, UNKNOWN
    mean, squares, products = found
    values = torch.tensor(squares, dtype=torch.float64)
    variance = float(values.mean())
    estimate = Estimate(variance, float(values.std()) / math.sqrt(len(values)), f"{count} minibatches")
    if exact is None:
        return mean, estimate
    # the squared mean of deviations is variance / count, give or take sqrt(2 tr(covariance^2)) / count, if there is no bias
    spread = math.sqrt(2.0 * sum(product**2 for product in products) / len(products))
    if float(mean @ mean) > (variance + 15.0 * spread) / count + 1e-10 * float(exact @ exact):  # float32 rounds, too
        survey.notes.append(
            f"the minibatch gradients of worker {worker} are not centred on its exact gradient (dropout, augmentation?): "
            "its variance has their bias in it, and the theorem does not cover them."
        )
    return exact, estimate


def _unlike(
    survey: Survey, means: Sequence[Tensor | None], variances: Sequence[Estimate]
) -> tuple[Estimate, tuple[Estimate, ...]]:
    """||grad F||, and ||grad F_i - grad F||^2 for each worker."""
    n, count = len(means), survey.draws
    known = [mean for mean in means if mean is not None]
    if len(known) < n:
        return UNKNOWN, (UNKNOWN,) * n
    stacked = torch.stack(known)
    mean = stacked.mean(0)
    squares = (stacked - mean).square().sum(1).tolist()
    if survey.exact:
        return Estimate(float(mean.norm()), 0.0, "exact"), tuple(Estimate(square, 0.0, "exact") for square in squares)
    how = f"{count} minibatches, less their noise"
    noise = sum(each.value for each in variances) / (n * n * count)  # what it adds to ||mean||^2, in the mean
    gradient = Estimate(math.sqrt(max(0.0, float(mean.square().sum()) - noise)), math.sqrt(noise), how)
    unlike = []
    for square, each in zip(squares, variances, strict=True):
        added = each.value * (1 - 2 / n) / count + noise
        rest = max(0.0, square - added)
        unlike.append(Estimate(rest, math.sqrt(4 * rest * added + 2 * added**2), how))  # at most: as if all lay along it
    return gradient, tuple(unlike)

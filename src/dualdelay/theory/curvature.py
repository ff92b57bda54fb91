"""How curved F and each F_i are: worked out where a problem allows it, elsewhere by Lanczos on products with the Hessian.

A product is taken by differentiating a network twice, or from two exact gradients a small way apart. Where there are
kinks, as of ReLUs, only the second sees them; so a network's error is at least how far the two are apart along the
steepest direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.draws import Draws
from ..problems import Logistic, Network, Quadratic
from ..problems.generators import seeded
from .survey import FEW, UNKNOWN, Estimate, Survey

Product = Callable[[Tensor], Tensor]

_CLOSE = 1e-2  # residual, relative to the eigenvalue, at which Lanczos stops; the eigenvalue is better by far


def hessians(survey: Survey, x: Tensor) -> Tensor | None:
    """Each worker's Hessian at x, (n, d, d), if it can be written down; (n, 1, 1) for multiples of the identity."""
    problem = survey.problem
    if isinstance(problem, Quadratic) and type(problem).measure is Quadratic.measure:
        curvatures = torch.tensor(problem.settings["curvatures"], dtype=torch.float64)
        return curvatures.view(-1, 1, 1) if problem.scalar else curvatures
    if isinstance(problem, Logistic) and type(problem).measure is Logistic.measure:
        parts = []
        for features, _ in problem._pairs:
            p = torch.sigmoid(features @ x)
            parts.append(features.T @ (features * (p * (1 - p))[:, None]) / len(features))
        return torch.stack(parts) + problem.reg * torch.eye(len(x), dtype=torch.float64)
    return None


def norm(hessian: Tensor) -> float:
    """The largest absolute eigenvalue."""
    return float(torch.linalg.eigvalsh(hessian).abs().max())


def smoothness(
    survey: Survey, x: Tensor, iterations: int, seed: int, samples: int | None = None
) -> tuple[Estimate, Estimate, tuple[Estimate, ...]]:
    """L of F, the curvature of F at x, and each worker's own L; of a network on so many samples of each worker."""
    known = survey.attempt("the curvature at x", lambda: _worked_out(survey, x))
    if known is not None:
        return known
    n, draws = survey.problem.workers, Draws(seed, "theory")
    few, others = survey, None
    if samples is not None and isinstance(survey.problem, Network):
        few, others = survey.of_samples(samples, draws)

    def measured(what: str, workers: Sequence[int]) -> Estimate:
        def either() -> Estimate:
            twice = _twice(few, x, workers, iterations, draws)
            found, top = twice or _differenced(few, x, workers, iterations, draws)
            if others is None:
                return found
            again = abs(float(differences(_mean(others, workers), x, _length(x))(top) @ top))
            return replace(found, error=max(found.error, abs(again - found.value)), how=f"{found.how}, {samples} samples")

        return survey.attempt(what, either) or UNKNOWN

    whole = measured("the smoothness of F", range(n))
    each = [measured(f"the smoothness of worker {worker}", [worker]) for worker in range(n)] if n > 1 else [whole]
    if others is not None:
        survey.cost += few.cost + others.cost
        survey.notes += [*few.notes, f"the curvature is that of {samples} samples of each worker, or all if it has fewer."]
    survey.notes.append("smoothness is the curvature at x, and may be larger elsewhere.")
    return whole, whole, tuple(each)


def _worked_out(survey: Survey, x: Tensor) -> tuple[Estimate, Estimate, tuple[Estimate, ...]] | None:
    here, most, how = hessians(survey, x), hessians(survey, torch.zeros_like(x)), "exact"
    if here is None or most is None:
        return None
    if isinstance(survey.problem, Logistic):  # p (1 - p) is 1/4 at most, and it is that for every sample at zero
        how = "exact, the largest over all x"
    each = tuple(Estimate(norm(part), 0.0, how) for part in most)
    return Estimate(norm(most.mean(0)), 0.0, how), Estimate(norm(here.mean(0)), 0.0, "exact"), each


Found = tuple[Estimate, Tensor]  # and the direction in which it is so steep


def _twice(survey: Survey, x: Tensor, workers: Sequence[int], iterations: int, draws: Draws) -> Found | None:
    problem = survey.problem
    if not isinstance(problem, Network) or type(problem).measure is not Network.measure:
        return None
    twice = twice_differentiated(problem, x, workers)

    def product(v: Tensor) -> Tensor:
        survey.cost += 2 * sum(problem.epoch(worker) for worker in workers)
        return twice(v)

    try:
        value, error, count, top = lanczos(product, x, iterations, draws)
    except (RuntimeError, ArithmeticError):  # some layers can be differentiated only once
        return None
    seen = abs(float(differences(_mean(survey, workers), x, _length(x))(top) @ top))
    if abs(seen - value) > max(seen, value) / 3:  # and some of them do not say so
        return None
    return _estimate(survey, value, max(error, abs(seen - value)), f"Lanczos, {count} Hessian products"), top


def _differenced(survey: Survey, x: Tensor, workers: Sequence[int], iterations: int, draws: Draws) -> Found:
    gradient, length = _mean(survey, workers), _length(x)
    value, error, count, top = lanczos(differences(gradient, x, length), x, iterations, draws)
    wider = abs(float(differences(gradient, x, 2 * length)(top) @ top))
    of = "" if survey.exact else f" of {min(FEW, survey.draws)} minibatches"
    return _estimate(survey, value, max(error, abs(wider - value)), f"Lanczos, {count} differences{of}"), top


def _estimate(survey: Survey, value: float, error: float, how: str) -> Estimate:
    if math.isfinite(error):
        return Estimate(value, error, how)
    survey.notes.append("smoothness has not settled and is only a lower bound; let constants(...) take more iterations.")
    return Estimate(value, math.nan, f"lower bound: {how}")


def _mean(survey: Survey, workers: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([survey.gradient(x, worker) for worker in workers]).mean(0)


def _length(x: Tensor) -> float:
    """How far from x a gradient is taken: the cube root balances what rounding and what the next derivative do."""
    return float(torch.finfo(x.dtype).eps ** (1 / 3) * max(1.0, float(x.norm())))


def differences(gradient: Callable[[Tensor], Tensor], x: Tensor, length: float) -> Product:
    """Products with the Hessian at x from gradients on both sides of it."""

    def product(v: Tensor) -> Tensor:
        step = (length * v).to(x.dtype)
        return (gradient(x + step) - gradient(x - step)) / (2.0 * length)

    return product


def twice_differentiated(problem: Network, x: Tensor, workers: Sequence[int]) -> Product:
    """Products with the Hessian at x of these workers' mean, over all their samples."""
    module = problem.model(x)  # a copy: kernels of our own, which cannot be differentiated twice, have no part in it
    parameters = [p for p in module.parameters() if p.requires_grad]

    def product(v: Tensor) -> Tensor:
        parts = torch.split_with_sizes(v, [p.numel() for p in parameters])
        pieces = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        total = torch.zeros_like(v)
        for worker in workers:
            shard = problem.shards()[worker]
            with seeded(0):  # random augmentation is that of ``measure``
                for count, batch in shard.pieces():
                    loss = problem.loss_on(module, batch)
                    first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                    along = torch.stack([(g * part.to(g.dtype)).sum() for g, part in zip(first, pieces, strict=True)]).sum()
                    if not along.requires_grad:
                        continue  # a loss that is linear in the weights
                    second = torch.autograd.grad(along, parameters, materialize_grads=True)
                    flat = torch.cat([part.reshape(-1) for part in second]).double()
                    total += flat * (problem.scales[worker] * count / shard.size / len(workers))
        return total

    return product


def lanczos(product: Product, x: Tensor, most: int, draws: Draws) -> tuple[float, float, int, Tensor]:
    """The largest absolute eigenvalue of a symmetric matrix, a bound on its error, the products taken, its eigenvector.

    The bound is the residual: some eigenvalue is that near. That it is the largest is almost sure from a random start once
    the residual is small; until then the value is a lower bound, and its error infinite.
    """
    size = x.numel()
    v = torch.from_numpy(draws.normals(size)).to(x.device)
    basis: list[Tensor] = [v / v.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once leaves what rounding has left
            for u in basis:
                w = w - (w @ u) * u
        left = float(w.norm())
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.tensor(beside, dtype=torch.float64)
            small = small + torch.diag(off, 1) + torch.diag(off, -1)
        if not bool(torch.isfinite(small).all()):
            raise ArithmeticError("a product with the Hessian is not finite; measure at other weights")
        values, vectors = torch.linalg.eigh(small)
        top = int(values.abs().argmax())
        value, error = abs(float(values[top])), left * abs(float(vectors[-1, top]))
        count = len(diagonal)
        if count >= min(most, size) or error <= _CLOSE * value:
            ritz = torch.stack([float(c) * u for c, u in zip(vectors[:, top], basis, strict=True)]).sum(0)
            settled = count >= size or error <= _CLOSE * value
            return value, error if settled else math.inf, count, ritz
        beside.append(left)
        basis.append(w / left)

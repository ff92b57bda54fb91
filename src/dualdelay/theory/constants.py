"""The constants that theory speaks of, measured on a problem: smoothness, variance, heterogeneity and the gap to F*."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core import Arrival, Problem
from ..core.devices import using_threads
from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_kind, require_threads, require_whole
from ..core.state import State, is_finite
from ..engine.table import Table
from ..problems import FullGradients, LocalSteps, Logistic, Network, Quadratic
from ..problems.generators import seeded
from ..problems.wrapped import Wrapped

T = TypeVar("T")
Product = Callable[[Tensor], Tensor]  # of a Hessian with a vector

FEW = 10  # minibatches whose mean stands for a worker's gradient where many means are needed
_MOST_DRAWS = 1_000_000  # minibatches of which a variance is taken
_CLOSE = 1e-2  # residual, relative to the eigenvalue, at which Lanczos stops; the eigenvalue is much closer than that


@dataclass(frozen=True)
class Estimate:
    """A number and how well it is known."""

    value: float
    """The number; nan if it could not be measured."""
    error: float
    """Its standard error, or how far a bound may be off; 0.0 if it is exact, nan if that is not known."""
    how: str
    """Where it comes from, in a few words."""


UNKNOWN = Estimate(math.nan, math.nan, "could not be measured")


@dataclass(frozen=True)
class Constants:
    """What the theorem and the rates take, measured at one model x; theory means the largest over all models met."""

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

    Quadratics and logistic regression are worked out, except for the minibatches of the latter. Elsewhere the curvature
    comes from at most ``iterations`` products with the Hessian of F and of each F_i: for a large network that is most of
    the cost, and a kink, as of a ReLU, shows only in the error. They go over all data, or over ``samples`` of each worker;
    then the error includes how steep the same direction is on as many other samples. Variances come from ``draws``
    minibatches that no run uses. Problems without exact local gradients (no ``measure``) are measured by minibatches alone,
    and their smoothness by a few of them. Of problems with local steps the single gradients are measured. What cannot be
    measured is nan, and ``notes`` say why. Torch uses ``threads`` threads, None: its own number, as in ``dd.simulate``.
    """
    draws, seed, iterations, samples = map(plain_number, (draws, seed, iterations, samples))
    require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
    require_whole("seed", seed, 0)
    require_whole("draws", draws, 4, _MOST_DRAWS)
    require_whole("iterations", iterations, 1)
    if samples is not None:
        require_whole("samples", samples, 1)
    require_threads("threads", threads := torch.get_num_threads() if threads is None else threads)
    if not isinstance(x, Tensor | None):
        raise BadInput(f"x is {x!r}; expected a flat tensor of weights, such as run.x.")
    n, oracle = problem.workers, Oracle(problem, draws, 2**30 + seed * draws)  # far beyond the minibatches of any run
    with using_threads(threads):
        start = oracle.attempt("everything" if x is None else "whether x has the right shape", problem.start, seed)
        if x is not None and start is not None and x.shape != start.shape:
            expected = f"{tuple(start.shape)}, the flat weights of this problem"
            raise BadInput(f"x has shape {tuple(x.shape)}; expected {expected}.")
        x = start if x is None else x.detach() if start is None else x.detach().to(start)
        if x is None:
            unknown = (UNKNOWN,) * n
            measured = (UNKNOWN, UNKNOWN, unknown, UNKNOWN, unknown, unknown, UNKNOWN, UNKNOWN)
            return Constants(*measured, oracle.cost, tuple(oracle.notes))
        smoothness = _smoothness(oracle, x, iterations, seed, samples)
        means, variances = zip(*(_mean_and_variance(oracle, x, worker) for worker in range(n)), strict=True)
        known = [mean for mean in means if mean is not None]
        gradients = torch.stack(known) if len(known) == n else None
        gradient, heterogeneity = _gradient_and_heterogeneity(oracle, gradients, variances)
        variance = max(variances, key=lambda estimate: math.inf if math.isnan(estimate.value) else estimate.value)
        gap = _gap(oracle, x, gradients)
    notes = tuple(dict.fromkeys(oracle.notes))
    return Constants(*smoothness, variance, variances, heterogeneity, gap, gradient, oracle.cost, notes)


class Moment(NamedTuple):
    """The constants at one model of a run."""

    version: int
    time: float
    constants: Constants


class Along:
    """A ``watch`` function that measures the problem's constants at every ``every``-th model of a run.

    For any run, fresh or recorded: ``dd.simulate(..., watch=[along])`` or ``dd.replay(folder, watch=[along])``. It measures
    off the clock and changes nothing. The model before the first update is seen only if that update takes more than one
    arrival; ``constants(problem, seed=...)`` measures there. Updates between two arrivals are seen at the second.

    problem: what is measured, usually the run's own problem.
    every: updates from one measurement to the next.
    draws, seed, iterations, samples, threads: as in ``constants``.
    """

    def __init__(
        self,
        problem: Problem,
        every: int,
        *,
        draws: int = 100,
        seed: int = 0,
        iterations: int = 30,
        samples: int | None = None,
        threads: int | None = 1,
    ) -> None:
        require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
        require_whole("every", every, 1)
        self._every, self._due = every, 0
        self._constants: Callable[[Tensor], Constants] = lambda x: constants(
            problem, x, draws=draws, seed=seed, iterations=iterations, samples=samples, threads=threads
        )
        self.moments: list[Moment] = []

    def __call__(self, state: State, arrival: Arrival) -> None:
        """Measure after an arrival, if a measurement is due."""
        if state.version >= self._due:
            self._due = (state.version // self._every + 1) * self._every
            self.moments.append(Moment(state.version, arrival.time, self._constants(state.x)))

    @property
    def table(self) -> Table:
        """The values as columns; ``heterogeneity`` is the workers' mean, and ``worst_smoothness`` the largest L_i."""
        rows = []
        for version, time, measured in self.moments:
            row = {name: value.value for name, value in vars(measured).items() if isinstance(value, Estimate)}
            row |= {"version": version, "time": time, "cost": measured.cost}
            row["worst_smoothness"] = max(estimate.value for estimate in measured.smoothnesses)
            row["heterogeneity"] = sum(estimate.value for estimate in measured.heterogeneity) / len(measured.heterogeneity)
            rows.append(row)
        names = ("smoothness", "worst_smoothness", "curvature", "variance", "heterogeneity", "gap", "gradient", "cost")
        return Table.of(rows, ("version", "time", *names))


# ------------------------------------------------------------------------------------------------ gradients and objective


class Oracle:
    """Gradients and objective of a problem without its wrappers; counts their cost and notes what could not be measured."""

    def __init__(self, problem: Problem, draws: int, first: int) -> None:
        """``draws`` minibatches are drawn, numbered from ``first`` on."""
        self.notes: list[str] = []
        self.cost = 0  # in minibatch gradients
        self.noiseless = False  # whether jobs are exact gradients
        self.draws, self._first = draws, first
        while isinstance(problem, (FullGradients, LocalSteps)):
            if isinstance(problem, FullGradients):
                self.noiseless = True
            elif not self.noiseless:
                self.notes.append(
                    f"a job is the sum of {problem.k} gradients along as many local steps, which the theorem does not "
                    "cover: the constants are those of the single gradients."
                )
            problem = problem.problem
        self.problem = innermost = problem
        while isinstance(innermost, Wrapped):
            innermost = innermost.problem
        self.exact = type(innermost).measure is not Problem.measure  # whether there are exact local gradients
        self._with_gradient = self._without_gradient = problem
        if isinstance(problem, Network):
            self._with_gradient, self._without_gradient = copy.copy(problem), copy.copy(problem)
            self._with_gradient.full_gradient, self._without_gradient.full_gradient = True, False

    def of_samples(self, part: slice, draws: Draws) -> Oracle:
        """The same of a network on a part of each worker's samples, which are shuffled."""
        assert isinstance(self.problem, Network)
        smaller, shards = copy.copy(self.problem), self.problem.shards()
        orders = [torch.from_numpy(draws.permutation(shard.size, worker)) for worker, shard in enumerate(shards)]
        smaller._shards = copy.copy(smaller._shards)
        smaller._shards.kept = {worker: shards[worker].some(order[part]) for worker, order in enumerate(orders)}
        return Oracle(smaller, self.draws, self._first)

    def attempt(self, what: str, function: Callable[..., T], *args: Any) -> T | None:
        """What the function returns; if it raises, None and a note."""
        try:
            return function(*args)
        except Exception as error:  # whatever a user's problem raises
            message = str(error).rstrip(".") or "no message"
            self.notes.append(f"{what} could not be measured: {type(error).__name__}: {message}.")
            return None

    def sample(self, x: Tensor, worker: int, draw: int) -> Tensor:
        """One minibatch's gradient, in float64."""
        self.cost += self.problem.batches(worker)
        gradient, _ = self.problem.gradient(x, worker, self._first + draw)
        return _checked(gradient, x, f"the gradient of worker {worker} on minibatch {self._first + draw}")

    def gradient(self, x: Tensor, worker: int) -> Tensor:
        """A worker's exact gradient, or if there is none the mean of a few minibatches', in float64."""
        if not self.exact:
            return torch.stack([self.sample(x, worker, draw) for draw in range(min(FEW, self.draws))]).mean(0)
        self.cost += self.problem.epoch(worker)
        return _checked(self._with_gradient.measure(x, worker)["gradient"], x, f"the exact gradient of worker {worker}")

    def objective(self, x: Tensor) -> float:
        """F at x."""
        self.cost += sum(self.problem.epoch(worker) for worker in range(self.problem.workers))
        value = float(self._without_gradient.evaluate(x)["objective"])
        if not math.isfinite(value):
            raise BadInput(f"F is {value} there; look at the data, the loss and the model's weights")
        return value


def _checked(gradient: Tensor | None, x: Tensor, what: str) -> Tensor:
    if gradient is None:
        raise BadInput(f"{what} is None; let 'measure' give a tensor")
    if gradient.shape != x.shape:
        raise BadInput(f"{what} has shape {tuple(gradient.shape)}; expected {tuple(x.shape)}, as the weights")
    gradient = gradient.detach().to(torch.float64)
    if not is_finite(gradient):
        raise BadInput(f"{what} is not finite; look at its data, or measure at smaller weights")
    return gradient


# ------------------------------------------------------------------------------------------------------------- smoothness

Smoothness = tuple[Estimate, Estimate, tuple[Estimate, ...]]  # L of F, the curvature of F at x, and each worker's L_i


def _smoothness(oracle: Oracle, x: Tensor, iterations: int, seed: int, samples: int | None) -> Smoothness:
    """The smoothness, exact where Hessians can be written down; of a network on so many samples of each worker."""
    exact = oracle.attempt("the curvature at x", _exact_smoothness, oracle.problem, x)
    if exact is not None:
        return exact
    n, draws = oracle.problem.workers, Draws(seed, "theory")
    few, others = oracle, None
    if samples is not None and isinstance(oracle.problem, Network):
        few, others = (oracle.of_samples(part, draws) for part in (slice(samples), slice(-samples, None)))

    def estimate(workers: Sequence[int]) -> Estimate:
        largest, direction = _largest_curvature(few, x, workers, iterations, draws)
        if others is None:
            return largest
        error = abs(_curvature_along(direction, others, x, workers) - largest.value)
        return replace(largest, error=max(largest.error, error), how=f"{largest.how}, {samples} samples")

    mean = oracle.attempt("the smoothness of F", estimate, range(n)) or UNKNOWN
    own = [oracle.attempt(f"the smoothness of worker {i}", estimate, [i]) or UNKNOWN for i in range(n)] if n > 1 else [mean]
    if others is not None:
        oracle.cost += few.cost + others.cost
        oracle.notes += [*few.notes, f"the curvature is that of {samples} samples of each worker, or all if it has fewer."]
    oracle.notes.append("smoothness is the curvature at x, and may be larger elsewhere.")
    return mean, mean, tuple(own)


def _exact_smoothness(problem: Problem, x: Tensor) -> Smoothness | None:
    here, largest = _hessians(problem, x), _hessians(problem, torch.zeros_like(x))
    if here is None or largest is None:
        return None
    # in logistic regression p (1 - p) is 1/4 at most, and it is that for every sample at zero
    how = "exact, the largest over all x" if isinstance(problem, Logistic) else "exact"
    own = tuple(Estimate(_spectral_norm(hessian), 0.0, how) for hessian in largest)
    curvature = Estimate(_spectral_norm(here.mean(0)), 0.0, "exact")
    return Estimate(_spectral_norm(largest.mean(0)), 0.0, how), curvature, own


def _largest_curvature(
    oracle: Oracle, x: Tensor, workers: Sequence[int], iterations: int, draws: Draws
) -> tuple[Estimate, Tensor]:
    """The largest absolute curvature of these workers' mean at x, and its direction.

    Second derivatives do not see kinks, as of ReLUs, which differences of gradients see. So the error is at least how far
    the value is from such a difference along that direction; if the value is itself one, from a difference twice as long.
    """
    pair, product = None, _second_derivatives(oracle, x, workers)
    if product is not None:
        with suppress(RuntimeError, ArithmeticError):  # some layers can be differentiated only once
            pair = _lanczos(product, x, iterations, draws)
    check = 0.0 if pair is None else _curvature_along(pair.vector, oracle, x, workers)
    if pair is None or abs(check - pair.value) > max(check, pair.value) / 3:  # some layers' second derivatives are wrong
        pair = _lanczos(_differences(oracle, x, workers), x, iterations, draws)
        check = _curvature_along(pair.vector, oracle, x, workers, factor=2)
        how = f"{pair.products} differences{'' if oracle.exact else f' of {min(FEW, oracle.draws)} minibatches'}"
    else:
        how = f"{pair.products} Hessian products"
    error = max(pair.error, abs(check - pair.value))
    if math.isfinite(error):
        return Estimate(pair.value, error, f"Lanczos, {how}"), pair.vector
    oracle.notes.append("smoothness has not settled and is only a lower bound; let constants(...) take more iterations.")
    return Estimate(pair.value, math.nan, f"lower bound: Lanczos, {how}"), pair.vector


def _curvature_along(direction: Tensor, oracle: Oracle, x: Tensor, workers: Sequence[int], factor: int = 1) -> float:
    """The absolute curvature of these workers' mean along a direction, from a difference ``factor`` times as long."""
    return abs(float(_differences(oracle, x, workers, factor)(direction) @ direction))


def _hessians(problem: Problem, x: Tensor) -> Tensor | None:
    """Each worker's Hessian at x, (n, d, d), if it can be written down; (n, 1, 1) for multiples of the identity."""
    if isinstance(problem, Quadratic) and type(problem).measure is Quadratic.measure:
        return problem._a.view(-1, 1, 1) if problem.scalar else problem._a
    if isinstance(problem, Logistic) and type(problem).measure is Logistic.measure:
        parts = []
        for features, _ in problem._pairs:
            p = torch.sigmoid(features @ x)
            parts.append(features.T @ (features * (p * (1 - p))[:, None]) / len(features))
        return torch.stack(parts) + problem.reg * torch.eye(len(x), dtype=torch.float64)
    return None


def _spectral_norm(hessian: Tensor) -> float:
    """The largest absolute eigenvalue."""
    return float(torch.linalg.eigvalsh(hessian).abs().max())


def _differences(oracle: Oracle, x: Tensor, workers: Sequence[int], factor: int = 1) -> Product:
    """Products with the Hessian at x of these workers' mean, from gradients ``factor`` times as far from x as is best."""
    # the cube root balances rounding against the next derivative
    length = factor * float(torch.finfo(x.dtype).eps ** (1 / 3) * max(1.0, float(x.norm())))

    def gradient(y: Tensor) -> Tensor:
        return torch.stack([oracle.gradient(y, worker) for worker in workers]).mean(0)

    def product(v: Tensor) -> Tensor:
        step = (length * v).to(x.dtype)
        return (gradient(x + step) - gradient(x - step)) / (2.0 * length)

    return product


def _second_derivatives(oracle: Oracle, x: Tensor, workers: Sequence[int]) -> Product | None:
    """Products with the Hessian at x of these workers' mean over all their samples, if the problem is a network."""
    problem = oracle.problem
    if not isinstance(problem, Network) or type(problem).measure is not Network.measure:
        return None
    module = problem.model(x)  # a copy with torch's own kernels, since the package's cannot be differentiated twice
    parameters = [p for p in module.parameters() if p.requires_grad]

    def product(v: Tensor) -> Tensor:
        oracle.cost += 2 * sum(problem.epoch(worker) for worker in workers)
        parts = torch.split_with_sizes(v, [p.numel() for p in parameters])
        directions = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        total = torch.zeros_like(v)
        for worker in workers:
            shard = problem.shards()[worker]
            with seeded(0):  # random augmentation is that of ``measure``
                for count, batch in shard.pieces():
                    loss = problem.loss_on(module, batch)
                    first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
                    slopes = [(g * direction.to(g.dtype)).sum() for g, direction in zip(first, directions, strict=True)]
                    slope = torch.stack(slopes).sum()
                    if not slope.requires_grad:
                        continue  # a loss that is linear in the weights
                    second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                    flat = torch.cat([part.reshape(-1) for part in second]).double()
                    total += flat * (problem.scales[worker] * count / shard.size / len(workers))
        return total

    return product


class _Eigenpair(NamedTuple):
    """The largest absolute eigenvalue that Lanczos' method has found."""

    value: float
    error: float  # at most; infinite if the value is only a lower bound
    products: int  # taken
    vector: Tensor


def _lanczos(product: Product, x: Tensor, most: int, draws: Draws) -> _Eigenpair:
    """The largest absolute eigenvalue of a symmetric matrix of the size of x, from at most so many products.

    Its error is the residual: an eigenvalue is that near. That it is the largest is almost sure from a random start once
    the residual is small; until then the value is a lower bound, and its error infinite.
    """
    size = x.numel()
    v = torch.from_numpy(draws.normals(size)).to(x.device)
    basis: list[Tensor] = [v / v.norm()]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # the second time removes what rounding has left
            for u in basis:
                w = w - (w @ u) * u
        length = float(w.norm())
        off = torch.tensor(off_diagonal, dtype=torch.float64)
        projected = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
        if not bool(torch.isfinite(projected).all()):
            raise ArithmeticError("a product with the Hessian is not finite; measure at other weights")
        values, vectors = torch.linalg.eigh(projected)
        top = int(values.abs().argmax())
        value, error = abs(float(values[top])), length * abs(float(vectors[-1, top]))
        count = len(diagonal)
        settled = count >= size or error <= _CLOSE * value
        if settled or count >= most:
            vector = torch.stack([float(c) * u for c, u in zip(vectors[:, top], basis, strict=True)]).sum(0)
            return _Eigenpair(value, error if settled else math.inf, count, vector)
        off_diagonal.append(length)
        basis.append(w / length)


# --------------------------------------------------------------------------------------- variance, heterogeneity and gap


def _mean_and_variance(oracle: Oracle, x: Tensor, worker: int) -> tuple[Tensor | None, Estimate]:
    """A worker's mean gradient, if it can be measured, and the variance of its minibatches' gradients."""
    problem, exact = oracle.problem, None
    if oracle.exact:
        exact = oracle.attempt(f"the gradient of worker {worker}", oracle.gradient, x, worker)
    if oracle.noiseless:
        return exact, Estimate(0.0, 0.0, "exact")
    if isinstance(problem, Quadratic) and type(problem).gradient is Quadratic.gradient:
        return exact, Estimate(len(x) * problem.noise**2, 0.0, "exact")
    if oracle.exact and exact is None:
        return None, UNKNOWN

    sampled = oracle.attempt(f"the variance of worker {worker}", _sampled_mean_and_variance, oracle, x, worker, exact)
    return sampled or (exact, UNKNOWN)


def _sampled_mean_and_variance(oracle: Oracle, x: Tensor, worker: int, exact: Tensor | None) -> tuple[Tensor, Estimate]:
    """The exact gradient, or if there is none the mean of the minibatches', and the variance around it."""
    total = previous = torch.zeros_like(x, dtype=torch.float64)
    squares, products, count = [], [], oracle.draws
    for draw in range(count):
        deviation = oracle.sample(x, worker, draw) - (0.0 if exact is None else exact)
        total = total + deviation
        if exact is not None:
            squares.append(float(deviation @ deviation))
        elif draw % 2:  # half the squared distance of two is the variance in expectation, whatever their mean is
            squares.append(float((deviation - previous).square().sum()) / 2)
        if draw % 2:
            products.append(float(deviation @ previous))
        previous = deviation
    mean, values = total / count, torch.tensor(squares, dtype=torch.float64)
    variance = float(values.mean())
    estimate = Estimate(variance, float(values.std()) / math.sqrt(len(values)), f"{count} minibatches")
    if exact is None:
        return mean, estimate
    # the squared mean of deviations is variance / count, give or take sqrt(2 tr(covariance^2)) / count, if there is no bias
    spread = math.sqrt(2.0 * sum(product**2 for product in products) / len(products))
    if float(mean @ mean) > (variance + 15.0 * spread) / count + 1e-10 * float(exact @ exact):  # float32 rounds, too
        oracle.notes.append(
            f"the minibatch gradients of worker {worker} are not centred on its exact gradient (dropout, augmentation?): "
            "its variance has their bias in it, and the theorem does not cover them."
        )
    return exact, estimate


def _gradient_and_heterogeneity(
    oracle: Oracle, gradients: Tensor | None, variances: Sequence[Estimate]
) -> tuple[Estimate, tuple[Estimate, ...]]:
    """||grad F||, and ||grad F_i - grad F||^2 for each worker, given the workers' mean gradients as rows."""
    n, count = len(variances), oracle.draws
    if gradients is None:
        return UNKNOWN, (UNKNOWN,) * n
    mean = gradients.mean(0)
    squares = (gradients - mean).square().sum(1).tolist()
    if oracle.exact:
        return Estimate(float(mean.norm()), 0.0, "exact"), tuple(Estimate(square, 0.0, "exact") for square in squares)
    how = f"{count} minibatches, less their noise"
    noise = sum(variance.value for variance in variances) / (n * n * count)  # what it adds to ||mean||^2 in expectation
    gradient = Estimate(math.sqrt(max(0.0, float(mean.square().sum()) - noise)), math.sqrt(noise), how)
    heterogeneity = []
    for square, variance in zip(squares, variances, strict=True):
        added = variance.value * (1 - 2 / n) / count + noise
        value = max(0.0, square - added)
        error = math.sqrt(4 * value * added + 2 * added**2)  # at most: as if all noise lay along the difference
        heterogeneity.append(Estimate(value, error, how))
    return gradient, tuple(heterogeneity)


def _gap(oracle: Oracle, x: Tensor, gradients: Tensor | None) -> Estimate:
    """F(x) - F*, given the workers' mean gradients as rows."""
    problem = oracle.problem
    matrices = _hessians(problem, x) if isinstance(problem, Quadratic) else None
    if matrices is not None and gradients is not None:
        return _quadratic_gap(oracle, matrices.mean(0), gradients.mean(0))
    value = oracle.attempt("the gap", oracle.objective, x)
    if value is None:
        return UNKNOWN
    optimum = getattr(problem, "optimum", None)
    if callable(optimum):
        least = oracle.attempt("the gap", lambda: oracle.objective(optimum()))
        return UNKNOWN if least is None else Estimate(max(0.0, value - least), 0.0, "exact, from the problem's optimum")
    if isinstance(problem, Network) and value >= 0:
        return Estimate(value, math.nan, "upper bound: F* is at least 0")
    oracle.notes.append(
        f"the gap could not be measured: F is {value:g} and nothing is known of F*; give the problem a method 'optimum' "
        "that returns the minimiser, or take F less a lower bound of yours."
    )
    return UNKNOWN


def _quadratic_gap(oracle: Oracle, hessian: Tensor, gradient: Tensor) -> Estimate:
    """1/2 g' H^-1 g: from the gradient, so that nothing cancels."""
    values, vectors = torch.linalg.eigh(hessian)
    along = vectors.T @ gradient if len(values) == len(gradient) else gradient  # a multiple of the identity is 1 x 1
    values = values.expand_as(along)
    flat = values <= 1e-14 * float(values.abs().max())
    if bool((values < -1e-14 * values.abs().max()).any()) or bool((along[flat].abs() > 1e-12 * (1 + along.norm())).any()):
        oracle.notes.append("the gap is infinite: F has no lower bound, for the mean of the curvatures is not positive.")
        return Estimate(math.inf, 0.0, "exact")
    return Estimate(float((along[~flat].square() / values[~flat]).sum()) / 2, 0.0, "exact")

"""Measured constants against what is known of the problems, at one model and along a run."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import dualdelay as dd
from dualdelay.theory import Along, Estimate, constants
from helpers import CENTERS, MATRICES, heterogeneous, matrices, operations, rounding
from own import Holes, bits, mlp, shards

QUADRATICS = {
    "one number": dd.Quadratic([[0.0], [6.0], [12.0]], noise=0.5),
    "numbers": dd.Quadratic(CENTERS, [1.0, 3.0, 0.5], noise=0.25, start=[1.0, -1.0]),
    "matrices": dd.Quadratic(CENTERS, MATRICES, noise=0.1, start=[4.0, 4.0]),
    "one worker": dd.Quadratic([[3.0, 1.0]], [[[2.0, 1.0], [1.0, 2.0]]], noise=1.0),
}


def near(estimate: Estimate, truth: float, errors: float = 4.0) -> bool:
    return abs(estimate.value - truth) <= errors * estimate.error


def values(estimates: tuple[Estimate, ...]) -> list[float]:
    return [estimate.value for estimate in estimates]


def mentions(found: Any, *texts: str) -> bool:
    """Whether one of the notes has all these texts in it."""
    return any(all(text in note for text in texts) for note in found.notes)


def hessian_of(function: Any, x: Tensor) -> Tensor:
    """By autograd, in the type of x."""
    return torch.autograd.functional.hessian(function, x)


def largest(hessian: Tensor) -> float:
    """The largest absolute eigenvalue."""
    return float(torch.linalg.eigvalsh(hessian).abs().max())


# ------------------------------------------------------------------------------------------------ exact constants


@pytest.mark.numeric
@pytest.mark.parametrize("name", QUADRATICS)
def test_everything_about_a_quadratic_is_exact(name):
    problem = QUADRATICS[name]
    x, found, hessians = problem.start(0), constants(problem), matrices(problem)
    local = torch.stack([problem.measure(x, i)["gradient"] for i in range(problem.workers)])
    close, at = rounding(operations(problem)), problem.evaluate(x)
    assert found.smoothness.value == pytest.approx(largest(hessians.mean(0)), rel=close, abs=0)
    assert found.curvature.value == found.smoothness.value
    assert values(found.smoothnesses) == pytest.approx([largest(h) for h in hessians], rel=close, abs=0)
    assert found.variance.value == pytest.approx(len(x) * problem.noise**2, rel=close, abs=0)
    gap = at["objective"] - problem.evaluate(problem.optimum())["objective"]
    assert found.gap.value == pytest.approx(gap, rel=0, abs=close * at["objective"])
    assert found.gradient.value == pytest.approx(at["gradient_norm"], rel=close, abs=0)
    distances = (local - local.mean(0)).square().sum(1).tolist()
    assert values(found.heterogeneity) == pytest.approx(distances, rel=0, abs=close * float(local.square().sum()))
    single = (found.smoothness, found.curvature, found.variance, found.gap, found.gradient)
    assert {each.error for each in single + found.smoothnesses + found.variances + found.heterogeneity} == {0.0}
    assert found.notes == () and found.cost == problem.workers


def test_heterogeneity_is_the_same_everywhere_for_equal_curvatures_and_grows_for_others():
    equal, other = dd.Quadratic([[0.0], [6.0]], [2.0, 2.0]), dd.Quadratic([[0.0], [6.0]], [1.0, 3.0])
    for at in (10.0, 100.0, 1000.0):
        x = torch.tensor([at], dtype=torch.float64)
        assert constants(equal, x).heterogeneity[0].value == pytest.approx(36.0)  # ||A (b_0 - mean b)||^2 = (2 * 3)^2
        # g_0 - mean g = (x - 3 (x - 6)) / 2
        assert constants(other, x).heterogeneity[0].value == pytest.approx((9.0 - at) ** 2)


@pytest.mark.numeric
def test_the_gap_of_a_quadratic_loses_nothing_near_the_optimum():
    problem = dd.Quadratic(CENTERS, MATRICES, start=[0.0, 0.0])
    away = torch.tensor([1e-7, -1e-7], dtype=torch.float64)
    truth = float(0.5 * away @ matrices(problem).mean(0) @ away)
    x = problem.optimum() + away  # whose last digits are those of the optimum
    assert constants(problem, x).gap.value == pytest.approx(truth, rel=rounding(8) * float(x.abs().max()) / 1e-7, abs=0)


def test_a_quadratic_without_a_lower_bound_or_with_a_flat_direction():
    saddle = constants(dd.Quadratic([[1.0, 1.0]], [[[1.0, 0.0], [0.0, -3.0]]]))
    assert saddle.gap.value == math.inf and saddle.smoothness.value == 3.0 and "no lower bound" in saddle.notes[0]
    flat = dd.Quadratic([[1.0, 1.0]], [[[2.0, 0.0], [0.0, 0.0]]])
    assert constants(flat).gap.value == pytest.approx(1.0)  # 1/2 * 2 * 1^2, and nothing along the other
    cancelled = dd.Quadratic([[0.0], [6.0]], [1.0, -1.0])  # F is linear
    assert constants(cancelled).gap.value == math.inf and constants(cancelled).smoothness.value == 0.0


def logistic(**options: Any) -> dd.problems.Logistic:
    return dd.problems.Logistic(
        **{"workers": 3, "features": 4, "samples": 30, "heterogeneity": 2.0, "batch_size": 5, "seed": 1, **options}
    )


def per_sample(problem: dd.problems.Logistic, x: Tensor, worker: int) -> Tensor:
    features, labels = problem._pairs[worker]
    return features * (-labels * torch.sigmoid(-labels * (features @ x)))[:, None] + problem.reg * x


def objective_of(problem: dd.problems.Logistic) -> Any:
    return lambda y: sum(problem._on(y, *pair)[0] for pair in problem._pairs) / 3


@pytest.mark.numeric
def test_logistic_regression_by_brute_force_over_all_samples():
    problem = logistic()
    x = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=torch.float64)
    found = constants(problem, x, draws=400)
    samples = [per_sample(problem, x, worker) for worker in range(3)]
    means = torch.stack([gradients.mean(0) for gradients in samples])
    variances = [float((g - g.mean(0)).square().sum(1).mean()) / 5 for g in samples]  # minibatches of 5, with replacement
    assert all(near(*pair) for pair in zip(found.variances, variances, strict=True))
    assert all(0 < estimate.error < 0.15 * estimate.value for estimate in found.variances)
    assert found.variance.value == max(values(found.variances))
    close = rounding(operations(problem, samples=30))
    assert found.gradient.value == pytest.approx(float(means.mean(0).norm()), rel=close, abs=0)
    distances = (means - means.mean(0)).square().sum(1).tolist()
    assert values(found.heterogeneity) == pytest.approx(distances, rel=2 * close, abs=0)  # of squares
    assert found.cost == 3 * 400 + 3 * 6 + 2 * 3 * 6  # minibatches, exact gradients, F twice


@pytest.mark.numeric
def test_the_gap_of_logistic_regression_is_that_of_another_minimiser():
    problem, x = logistic(), torch.ones(4, dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.float64)
    for _ in range(20):  # Newton's steps, which converge from zero
        gradient = torch.stack([problem.measure(y, i)["gradient"] for i in range(3)]).mean(0)
        y = y - torch.linalg.solve(hessian_of(objective_of(problem), y), gradient)
    gap = constants(problem, x, draws=4).gap
    assert gap.value == pytest.approx(problem.evaluate(x)["objective"] - problem.evaluate(y)["objective"], abs=1e-9)
    assert gap.error == 0.0


@pytest.mark.numeric
def test_the_smoothness_of_logistic_regression_is_its_largest_curvature():
    problem = logistic()
    generator, close = torch.Generator().manual_seed(0), rounding(operations(problem, samples=30))
    most = constants(problem, draws=4).smoothness.value
    pooled = torch.stack([a.T @ a / (4 * len(a)) for a, _ in problem._pairs]).mean(0)
    assert most == pytest.approx(largest(pooled) + problem.reg, rel=close, abs=0)
    for scale in (0.0, 1e-3, 0.1, 1.0, 10.0):
        x = scale * torch.randn(4, generator=generator, dtype=torch.float64)
        found = constants(problem, x, draws=4)
        curvature = largest(hessian_of(objective_of(problem), x))
        assert found.curvature.value == pytest.approx(curvature, rel=1e-8)  # softplus has a cut
        assert found.curvature.value <= found.smoothness.value * (1 + close) and found.smoothness.value == most
        assert values(found.smoothnesses) == pytest.approx(problem.smoothness(), rel=2 * close, abs=0)  # a square
    assert constants(problem, torch.zeros(4), draws=4).curvature.value == pytest.approx(most)  # it is reached at zero


# ------------------------------------------------------------------------------------------------ networks


class Plain(dd.Network):
    """A network with a ``measure`` of its own, so that its gradients are differenced and not differentiated."""

    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return super().measure(x, worker)


def dense(problem: dd.Network, x: Tensor, workers: list[int]) -> Tensor:
    """The Hessian by hand, in float64."""
    module = problem.model(x).double()
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    def objective(y: Tensor) -> Tensor:
        pieces = y.split([p.numel() for p in module.parameters()])
        parts = {name: piece.view_as(p) for (name, p), piece in zip(module.named_parameters(), pieces, strict=True)}
        total = torch.zeros((), dtype=torch.float64)
        for worker in workers:
            inputs, targets = problem.shards()[worker].pair
            outputs = torch.func.functional_call(module, parts, inputs.double())
            total = total + problem.scales[worker] * problem.loss(outputs, targets) / len(workers)
        return total

    return hessian_of(objective, flat)


@pytest.mark.numeric
@pytest.mark.parametrize(("weights", "kind"), [("equal", dd.Network), ("samples", dd.Network), ("samples", Plain)])
def test_the_smoothness_of_a_network_against_its_dense_hessian(weights, kind):
    problem = kind(mlp(), cross_entropy, shards(3), 4, weights=weights)
    for scale in (1.0, 3.0):
        x = scale * problem.start(0)
        found = constants(problem, x, draws=4, iterations=60)
        for estimate, workers in zip([found.smoothness, *found.smoothnesses], [[0, 1, 2], [0], [1], [2]], strict=True):
            truth = largest(dense(problem, x, workers))
            assert estimate.value == pytest.approx(truth, rel=2e-3)
            assert near(estimate, truth, 1.0) and estimate.error < 0.02 * truth
        assert ("differences" in found.smoothness.how) == (kind is Plain)
        assert found.curvature == found.smoothness and mentions(found, "may be larger elsewhere")


@pytest.mark.numeric
def test_the_smoothness_from_a_part_of_the_samples_is_near_and_says_so():
    problem = dd.Digits(workers=3, alpha=0.5)
    whole, enough, part = (constants(problem, draws=4, samples=count) for count in (None, 10_000, 100))
    smoothnesses = [(found.smoothness, *found.smoothnesses) for found in (whole, enough, part)]
    # a product with the Hessian is a gradient's gradient; other samples are off by a tenth and more
    close = rounding(2 * operations(problem, samples=1437), torch.float32)
    for exact, same, estimate in zip(*smoothnesses, strict=True):
        assert [same.value, same.error] == pytest.approx([exact.value, exact.error], rel=0, abs=close * exact.value)
        assert near(estimate, exact.value, 3.0) and 0 < estimate.error < exact.value / 2
        assert "100 samples" in estimate.how and "samples" not in exact.how
    assert part.cost < whole.cost / 2 and mentions(part, "of 100 samples of each worker")
    assert (part.heterogeneity, part.variances, part.gap) == (whole.heterogeneity, whole.variances, whole.gap)
    kinds = shards(3), [TensorDataset(*pair) for pair in shards(3)]
    pairs, datasets = (constants(dd.Network(mlp(), cross_entropy, data, 4), draws=4, samples=5) for data in kinds)
    assert pairs.smoothness == datasets.smoothness


@pytest.mark.numeric
def test_too_few_products_give_a_lower_bound_that_says_so():
    problem = dd.Network(mlp(), cross_entropy, shards(3), 4)
    truth = largest(dense(problem, problem.start(0), [0, 1, 2]))
    one, three, sixty = (constants(problem, draws=4, iterations=count) for count in (1, 3, 60))
    assert one.smoothness.value <= three.smoothness.value <= sixty.smoothness.value == pytest.approx(truth, rel=2e-3)
    for early in (one, three):
        assert math.isnan(early.smoothness.error) and early.smoothness.how.startswith("lower bound")
        assert mentions(early, "more iterations")
    assert sixty.smoothness.error < 0.02 * truth and not mentions(sixty, "more iterations")
    starts = {constants(problem, problem.start(0), draws=4, iterations=60, seed=seed).smoothness.value for seed in range(4)}
    assert len(starts) == 4 and max(starts) - min(starts) < 2e-3 * truth


@pytest.mark.numeric
def test_a_networks_gradients_gap_and_variance():
    problem = dd.Network(mlp(), cross_entropy, shards(3), 4, full_gradient=False)  # a choice for evaluation only
    x, found = problem.start(0), constants(problem, draws=300, iterations=1)
    samples = []  # each worker's gradients on its single samples
    for inputs, targets in (shard.pair for shard in problem.shards()):
        singles = dd.Network(mlp(), cross_entropy, [*zip(inputs.split(1), targets.split(1), strict=True)], 1)
        samples.append(torch.stack([singles.measure(x, k)["gradient"] for k in range(len(inputs))]))
    means = torch.stack([gradients.mean(0) for gradients in samples])
    close, size = rounding(operations(problem, samples=28), torch.float32), float(means.norm(dim=1).max())
    for worker, gradients in enumerate(samples):
        assert near(found.variances[worker], float((gradients - means[worker]).square().sum(1).mean()) / 4)
        truth = float((means[worker] - means.mean(0)).norm())
        assert math.sqrt(found.heterogeneity[worker].value) == pytest.approx(truth, rel=0, abs=2 * close * size)
    assert found.gradient.value == pytest.approx(float(means.mean(0).norm()), rel=0, abs=close * size)
    assert found.gap.value == pytest.approx(problem.evaluate(x)["objective"], rel=close, abs=0)
    assert math.isnan(found.gap.error) and "F* is at least 0" in found.gap.how
    assert not problem.full_gradient
    # minibatches, exact gradients and F; and for F as for each F_i a product, which counts twice, and a difference
    assert found.cost == 3 * 300 + (1 + 1 + 2 * 4) * sum(problem.epoch(worker) for worker in range(3))


def test_a_loss_below_zero_has_no_known_gap():
    problem = dd.Network(mlp(), lambda out, target: cross_entropy(out, target) - 100.0, shards(2), 4)
    found = constants(problem, draws=4, iterations=1)
    assert math.isnan(found.gap.value) and mentions(found, "lower bound")


class Once(torch.autograd.Function):
    """x^2 with a derivative that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


@pytest.mark.numeric
def test_layers_that_can_be_differentiated_only_once_are_differenced():
    data = [(torch.randn(9, 3, generator=torch.Generator().manual_seed(i)), torch.ones(9, 1)) for i in range(2)]

    def network(square: Any) -> dd.Network:
        torch.manual_seed(3)
        return dd.Network(nn.Linear(3, 1), lambda out, target: mse_loss(square(out), target), data, 4)

    once, twice = (constants(network(square), draws=4).smoothness for square in (Once.apply, torch.square))
    assert "differences" in once.how and "Hessian products" in twice.how
    assert once.value == pytest.approx(twice.value, rel=1e-2) and near(once, twice.value, 1.5)


@pytest.mark.numeric
def test_a_network_that_is_linear_in_its_weights_is_not_curved():
    problem = dd.Network(
        nn.Linear(2, 1, bias=False), lambda out, target: (out - target).mean(), [(torch.ones(4, 2), torch.ones(4, 1))]
    )
    found = constants(problem, draws=4).smoothness
    assert found.value < 1e-4 and near(found, 0.0)


@pytest.mark.numeric
def test_a_note_says_that_dropout_is_not_centred_and_minibatches_have_none():
    wet = dd.Network(mlp(nn.Tanh(), nn.Dropout(0.5)), cross_entropy, shards(2), dd.Batches(4, stochastic=True))
    assert mentions(constants(wet, 3 * wet.start(0), draws=500, iterations=1), "not centred")
    dry = dd.Network(mlp(), cross_entropy, shards(2), dd.Batches(4, replacement=False))
    assert not mentions(constants(dry, draws=300, iterations=1), "not centred")
    batches = dd.Batches([20, 24], replacement=False)  # every minibatch is all data
    whole = dd.Network(mlp(), cross_entropy, shards(2), batches)
    found = constants(whole, draws=10, iterations=1)
    size = max(float(whole.measure(whole.start(0), worker)["gradient"].norm()) for worker in range(2))
    assert math.sqrt(found.variance.value) <= rounding(operations(whole, samples=24), torch.float32) * size
    assert not mentions(found, "not centred")


# -------------------------------------------------------------------------------- wrapped, own and broken problems


@pytest.mark.parametrize("problem", [QUADRATICS["matrices"], logistic(), dd.Network(mlp(), cross_entropy, shards(3), 4)])
def test_full_gradients_have_no_variance_and_a_note_says_that_local_steps_are_not_covered(problem):
    plain, full = constants(problem, draws=10), constants(dd.problems.FullGradients(problem), draws=10)
    assert full.variances == (Estimate(0.0, 0.0, "exact"),) * 3 and full.variance == full.variances[0]
    for name in ("smoothness", "gap", "gradient", "heterogeneity"):
        assert getattr(full, name) == getattr(plain, name)
    steps = constants(dd.LocalSteps(problem, 3, 0.1), draws=10)
    assert "3 gradients" in steps.notes[0] and steps.variances == plain.variances and steps.gap == plain.gap
    both = constants(dd.LocalSteps(dd.problems.FullGradients(problem), 3, 0.1), draws=10)
    assert both.variance.value == 0.0 and "3 gradients" in both.notes[0]
    assert constants(dd.problems.FullGradients(dd.LocalSteps(problem, 3, 0.1)), draws=10).notes == full.notes


class WithOptimum(dd.Quadratic):
    """A quadratic that gives gradients, F and its minimiser, and nothing exact of a worker."""

    measure = dd.Problem.measure

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return super().gradient(x, worker, draw)


class Own(WithOptimum):
    """The same without its minimiser."""

    optimum = None


NOISY: dict[str, Any] = {"centers": CENTERS, "curvatures": MATRICES, "noise": 3.0, "start": [1.0, 1.0]}


def test_a_problem_without_exact_gradients_is_measured_by_minibatches():
    truth, found = constants(dd.Quadratic(**NOISY)), constants(Own(**NOISY), draws=60)
    assert found.smoothness.value == pytest.approx(truth.smoothness.value, rel=1e-6)  # added noise does not curve
    assert "differences of 10 minibatches" in found.smoothness.how and "60 minibatches" in found.variance.how
    assert math.isnan(found.gap.value) and mentions(found, "'optimum'")
    assert constants(WithOptimum(**NOISY), draws=10).gap.value == pytest.approx(truth.gap.value)
    # 60 minibatches of each worker for its variance, and 10 on either side of x for each product and for its error
    products = [int(re.search(r"(\d+) differences", each.how)[1]) + 1 for each in (found.smoothness, *found.smoothnesses)]
    assert found.cost == 3 * 60 + 2 * 10 * (3 * products[0] + sum(products[1:])) + 3  # and F, a minibatch of each


def test_the_noise_of_minibatches_is_taken_off_the_heterogeneity():
    problem = Own(**NOISY)
    x, found = problem.start(0), constants(problem, draws=60)
    drawn = [torch.stack([problem.gradient(x, worker, 2**30 + k)[0] for k in range(60)]).mean(0) for worker in range(3)]
    squares = (torch.stack(drawn) - torch.stack(drawn).mean(0)).square().sum(1)
    # with s_i = sigma_i^2 / 60, ||g_i - mean g||^2 is s_i (1 - 2/3) + (s_1 + s_2 + s_3) / 9 more than zeta_i^2
    noise = torch.tensor(values(found.variances)) / 60
    assert values(found.heterogeneity) == pytest.approx((squares - noise / 3 - noise.sum() / 9).tolist(), rel=1e-6)


def test_estimates_are_within_their_errors_as_often_as_they_should_be():
    truth = constants(dd.Quadratic(**NOISY))
    runs = [constants(Own(**NOISY), draws=40, seed=seed, iterations=1) for seed in range(40)]
    for name in ("gradient", "variance"):
        estimates = [getattr(found, name) for found in runs]
        off = [abs(estimate.value - getattr(truth, name).value) / estimate.error for estimate in estimates]
        assert max(off) < 5.0 and sum(distance < 2.0 for distance in off) >= 30
    for worker in range(3):
        zetas, exact = [found.heterogeneity[worker] for found in runs], truth.heterogeneity[worker].value
        mean = sum(zeta.value for zeta in zetas) / 40  # unbiased, since the noise's own share is taken off
        assert abs(mean - exact) < 4 * max(zeta.error for zeta in zetas) / math.sqrt(40)
        assert all(near(zeta, exact) for zeta in zetas)
        variance = sum(found.variances[worker].value for found in runs) / 40
        # 2 * 3^2; of 40 * 20 squared distances in two dimensions the mean is off by 1 / sqrt(800) = 3.5% of itself
        assert variance == pytest.approx(18.0, rel=0.14)


@pytest.mark.numeric
def test_the_same_call_gives_the_same_constants_and_changes_nothing():
    problem = dd.Network(mlp(), cross_entropy, shards(3), 4)
    generator = torch.get_rng_state()
    first = constants(problem, draws=10)
    assert constants(problem, problem.start(0), draws=10) == first
    gap, close = first.gap.value, rounding(operations(problem, samples=28), torch.float32)
    assert constants(problem, problem.start(0), draws=10, threads=None).gap.value == pytest.approx(gap, rel=close, abs=0)
    assert constants(problem, problem.start(0).double(), draws=10) == first  # brought to the problem's own type
    assert constants(problem, problem.start(0), draws=10, seed=1).variance != first.variance
    assert torch.equal(generator, torch.get_rng_state())


class Broken(WithOptimum):
    """A problem that fails at one place, of worker 1 if that is its gradient."""

    def __init__(self, where: str) -> None:
        super().__init__(CENTERS, noise=1.0)
        self.where = where

    def start(self, seed: int) -> Tensor:
        if self.where == "start":
            raise RuntimeError("no weights today")
        return super().start(seed)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        if worker == 1 and self.where == "gradient":
            raise OSError("its disk is gone")
        wrong = {"infinite": gradient / 0.0, "shape": gradient[:1]} if worker == 1 else {}
        return wrong.get(self.where, gradient), loss

    def evaluate(self, x: Tensor) -> dict[str, float]:
        if self.where == "evaluate":
            raise KeyError("objective")
        return {"objective": math.nan} if self.where == "loss" else super().evaluate(x)


@pytest.mark.parametrize(
    ("where", "reason"),
    [("gradient", "its disk is gone"), ("infinite", "not finite"), ("shape", "(1,); expected (2,)")],
)
def test_a_worker_that_cannot_be_measured_is_named_and_the_others_are_measured(where, reason):
    found = constants(Broken(where), draws=4)
    assert math.isnan(found.variances[1].value) and found.variances[0].value > 0 and found.variances[2].value > 0
    assert math.isnan(found.variance.value)  # the largest of all cannot be known
    assert math.isnan(found.gradient.value) and all(map(math.isnan, values(found.heterogeneity)))
    assert math.isnan(found.smoothness.value) and math.isnan(found.smoothnesses[1].value)
    assert found.smoothnesses[0].value == pytest.approx(1.0) and found.gap.value > 0
    assert mentions(found, "worker 1", reason)


@pytest.mark.parametrize(("where", "reason"), [("evaluate", "objective"), ("loss", "F is nan")])
def test_a_problem_whose_loss_cannot_be_measured_has_no_gap(where, reason):
    found = constants(Broken(where), draws=4)
    assert math.isnan(found.gap.value) and mentions(found, "the gap", reason)
    assert found.variance.value > 0 and found.gradient.value > 0


def test_a_problem_without_a_start_is_measured_only_at_given_weights():
    found = constants(Broken("start"), draws=4)
    assert math.isnan(found.smoothness.value) and len(found.variances) == 3 and mentions(found, "no weights today")
    given = constants(Broken("start"), torch.zeros(2, dtype=torch.float64), draws=4)
    assert given.smoothness.value == pytest.approx(1.0) and given.gap.value > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize(
    "problem", [dd.Quadratic(CENTERS, MATRICES), logistic(), dd.Network(mlp(), cross_entropy, shards(2), 4)]
)
def test_weights_that_have_diverged_are_measured_as_far_as_possible(problem, value):
    found = constants(problem, torch.full_like(problem.start(0), value, dtype=torch.float64), draws=4)
    unknown = not math.isfinite(value) or isinstance(problem, dd.Network)  # 1e200 is infinite in its float32
    assert math.isnan(found.gradient.value) == unknown and bool(found.notes) >= unknown


def test_gradients_that_are_sometimes_not_finite_spoil_the_variance_alone():
    found = constants(Holes(CENTERS, noise=0.5), draws=20)
    assert math.isnan(found.variance.value) and found.gradient.value > 0 and found.gap.value > 0
    assert found.variances[0].value > 0 and mentions(found, "worker 2", "not finite")


class NoGradient(dd.Quadratic):
    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return {**super().measure(x, worker), "gradient": None}


def test_a_measure_without_a_gradient_is_noted():
    found = constants(NoGradient(CENTERS), draws=4)
    assert math.isnan(found.gradient.value) and mentions(found, "is None")


def test_bad_input_is_refused():
    problem = QUADRATICS["numbers"]
    for wrong, message in [
        (lambda: constants("digits"), "problem is 'digits'"),
        (lambda: constants(problem, [0.0, 0.0]), "x is"),
        (lambda: constants(problem, torch.zeros(3)), r"shape \(3,\); expected \(2,\)"),
        (lambda: constants(problem, draws=3), "draws is 3"),
        (lambda: constants(problem, seed=-1), "seed is -1"),
        (lambda: constants(problem, iterations=0), "iterations is 0"),
        (lambda: constants(problem, samples=0), "samples is 0"),
        (lambda: constants(problem, threads=0), "threads is 0"),
        (lambda: Along("digits", 10), "problem is 'digits'"),
        (lambda: Along(problem, 0), "every is 0"),
    ]:
        with pytest.raises(dd.BadInput, match=message):
            wrong()


# ------------------------------------------------------------------------------------------------ along a run


@pytest.mark.numeric
def test_along_a_run_and_along_its_replay(tmp_path):
    problem = logistic()
    speeds, folder = dd.FixedSpeeds([1.0, 2.0, 4.0]), tmp_path / "run"
    watcher = Along(problem, 10, draws=4)
    run = dd.simulate(dd.DuDe(lr=0.1), problem, speeds, updates=35, folder=folder, watch=[watcher])
    bare = dd.simulate(dd.DuDe(lr=0.1), problem, speeds, updates=35, folder=tmp_path / "bare")
    assert bits(run) == bits(bare)
    assert [moment.version for moment in watcher.moments] == [0, 10, 20, 30]
    again = Along(problem, 10, draws=4)
    dd.replay(folder, watch=[again])
    assert again.moments == watcher.moments
    assert watcher.moments[0].constants == constants(problem, draws=4)
    table = watcher.table
    assert table.version.tolist() == [0, 10, 20, 30] and (table.time[1:] > table.time[:-1]).all()
    assert table.gap[-1] < table.gap[0] and (table.smoothness == table.smoothness[0]).all()
    close = rounding(operations(problem, samples=30))
    assert (table.curvature <= table.smoothness * (1 + close)).all() and (table.worst_smoothness >= table.smoothness).all()


def test_along_a_method_that_updates_at_every_arrival_or_between_them():
    problem = heterogeneous(3)
    every = Along(problem, 1)
    dd.simulate(dd.VanillaASGD(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=5, watch=[every])
    assert [moment.version for moment in every.moments] == [1, 2, 3, 4, 5]
    between = Along(problem, 2)
    dd.simulate(
        dd.algorithms.FedFix(lr=0.1, period=0.3), problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=20, watch=[between]
    )
    versions = [moment.version for moment in between.moments]
    assert versions == sorted(set(versions)) and len(versions) > 1

"""The constants of problems against what is known of them, the paper's theorem against runs, and the rates of Table 1."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import dualdelay as dd
from dualdelay import theory
from dualdelay.theory import Along, Constants, Estimate, bound, constants, horizon, largest_step, rates, step_size, times
from helpers import archive, few, operations, rounding, unlike
from own import Holes, bits, mlp, shards

MATRICES = [1.0, [[2.0, 0.5], [0.5, 1.0]], [[0.5, -1.0], [-1.0, 4.0]]]  # unlike curvatures
CENTERS = [[0.0, 1.0], [6.0, 0.0], [-3.0, 2.0]]

QUADRATICS = {
    "one number": dd.Quadratic([[0.0], [6.0], [12.0]], noise=0.5),
    "numbers": dd.Quadratic(CENTERS, [1.0, 3.0, 0.5], noise=0.25, start=[1.0, -1.0]),
    "matrices": dd.Quadratic(CENTERS, MATRICES, noise=0.1, start=[4.0, 4.0]),
    "one worker": dd.Quadratic([[3.0, 1.0]], [[[2.0, 1.0], [1.0, 2.0]]], noise=1.0),
}


def near(estimate: Estimate, truth: float, errors: float = 4.0) -> bool:
    return abs(estimate.value - truth) <= errors * estimate.error


def hessian_of(function: Any, x: Tensor) -> Tensor:
    """By autograd, in the type of x."""
    return torch.autograd.functional.hessian(function, x)


def matrices(problem: dd.Quadratic) -> Tensor:
    a = torch.tensor(problem.settings["curvatures"], dtype=torch.float64)
    d = len(problem.start(0))
    return a[:, None, None] * torch.eye(d, dtype=torch.float64) if a.ndim == 1 else a


# ------------------------------------------------------------------------------------------------ exact constants


@pytest.mark.numeric
@pytest.mark.parametrize("name", QUADRATICS)
def test_everything_about_a_quadratic_is_exact(name):
    problem = QUADRATICS[name]
    x, found = problem.start(0), constants(problem)
    local = torch.stack([problem.measure(x, i)["gradient"] for i in range(problem.workers)])
    hessian = matrices(problem)
    best = problem.evaluate(problem.optimum())["objective"]
    close = rounding(operations(problem))
    assert found.smoothness.value == pytest.approx(float(torch.linalg.eigvalsh(hessian.mean(0))[-1]), rel=close, abs=0)
    assert found.curvature.value == found.smoothness.value
    assert [each.value for each in found.smoothnesses] == pytest.approx(
        [float(torch.linalg.eigvalsh(h)[-1]) for h in hessian]
    )
    assert found.variance.value == pytest.approx(len(x) * problem.noise**2)
    objective = problem.evaluate(x)["objective"]
    assert found.gap.value == pytest.approx(objective - best, rel=0, abs=close * objective)
    assert found.gradient.value == pytest.approx(problem.evaluate(x)["gradient_norm"], rel=close, abs=0)
    truth = (local - local.mean(0)).square().sum(1).tolist()
    assert [each.value for each in found.heterogeneity] == pytest.approx(truth)
    one = [found.smoothness, found.curvature, found.variance, found.gap, found.gradient]
    assert all(each.error == 0.0 for each in [*one, *found.smoothnesses, *found.variances, *found.heterogeneity])
    assert found.notes == () and found.cost == problem.workers


def test_like_curvatures_are_as_distanceseverywhere_and_unlike_ones_are_not():
    same, other = dd.Quadratic([[0.0], [6.0]], [2.0, 2.0]), dd.Quadratic([[0.0], [6.0]], [1.0, 3.0])
    at = [torch.tensor([value], dtype=torch.float64) for value in (10.0, 100.0, 1000.0)]
    assert [constants(same, x).heterogeneity[0].value for x in at] == pytest.approx([36.0] * 3)  # ||A (b_i - mean b)||^2
    grows = [constants(other, x).heterogeneity[0].value for x in at]
    assert grows == sorted(grows) and grows[-1] > 1e5


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


@pytest.mark.numeric
def test_logistic_regression_by_brute_force_over_all_samples():
    problem = logistic()
    x = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=torch.float64)
    found = constants(problem, x, draws=400)
    each = [per_sample(problem, x, worker) for worker in range(3)]
    means = torch.stack([gradients.mean(0) for gradients in each])
    variances = [float((g - g.mean(0)).square().sum(1).mean()) / 5 for g in each]  # drawn with replacement
    assert all(near(*pair) for pair in zip(found.variances, variances, strict=True))
    assert all(0 < estimate.error < 0.15 * estimate.value for estimate in found.variances)
    assert found.variance == max(found.variances, key=lambda estimate: estimate.value)
    close = rounding(operations(problem, samples=30))
    assert found.gradient.value == pytest.approx(float(means.mean(0).norm()), rel=close, abs=0)
    distances = (means - means.mean(0)).square().sum(1).tolist()
    assert [estimate.value for estimate in found.heterogeneity] == pytest.approx(
        distances, rel=2 * close, abs=0
    )  # of squares
    assert found.cost == 3 * 400 + 3 * 6 + 2 * 3 * 6  # minibatches, exact gradients, F twice


@pytest.mark.numeric
def test_the_gap_of_logistic_regression_is_that_of_another_minimiser():
    problem, x = logistic(), torch.ones(4, dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.float64)
    for _ in range(4000):
        y = y - 0.2 * torch.stack([problem.measure(y, i)["gradient"] for i in range(3)]).mean(0)
    gap = constants(problem, x, draws=4).gap
    assert gap.value == pytest.approx(problem.evaluate(x)["objective"] - problem.evaluate(y)["objective"], abs=1e-9)
    assert gap.error == 0.0


@pytest.mark.numeric
def test_the_smoothness_of_logistic_regression_is_its_largest_curvature():
    problem = logistic()
    generator, close = torch.Generator().manual_seed(0), rounding(operations(problem, samples=30))
    most = constants(problem, draws=4).smoothness.value
    pooled = torch.stack([a.T @ a / (4 * len(a)) for a, _ in problem._pairs]).mean(0)
    assert most == pytest.approx(float(torch.linalg.eigvalsh(pooled)[-1]) + problem.reg, rel=close, abs=0)
    for scale in (0.0, 1e-3, 0.1, 1.0, 10.0):
        x = scale * torch.randn(4, generator=generator, dtype=torch.float64)
        found = constants(problem, x, draws=4)
        objective = hessian_of(lambda y: sum(problem._on(y, *pair)[0] for pair in problem._pairs) / 3, x)
        assert found.curvature.value == pytest.approx(
            float(torch.linalg.eigvalsh(objective)[-1]), rel=1e-8
        )  # softplus has a cut
        assert found.curvature.value <= found.smoothness.value * (1 + close) and found.smoothness.value == most
        assert [each.value for each in found.smoothnesses] == pytest.approx(
            problem.smoothness(), rel=2 * close, abs=0
        )  # a square
    assert constants(problem, torch.zeros(4), draws=4).curvature.value == pytest.approx(most)  # it is reached at zero


# ------------------------------------------------------------------------------------------------ networks


class Plain(dd.Network):
    """A network that says its gradients itself, so that they are differenced and not differentiated."""

    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return super().measure(x, worker)


def dense(problem: dd.Network, x: Tensor, workers: list[int]) -> Tensor:
    """The Hessian by hand, in float64."""
    module = problem.model(x).double()
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    def objective(y: Tensor) -> Tensor:
        parts, offset = {}, 0
        for name, p in module.named_parameters():
            parts[name] = y[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
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
            truth = float(torch.linalg.eigvalsh(dense(problem, x, workers)).abs().max())
            assert estimate.value == pytest.approx(truth, rel=2e-3)
            assert near(estimate, truth, 1.0) and estimate.error < 0.02 * truth
        assert ("differences" in found.smoothness.how) == (kind is Plain)
        assert found.curvature == found.smoothness and "may be larger elsewhere" in found.notes[0]


@pytest.mark.numeric
def test_the_smoothness_from_some_samples_is_near_and_says_so():
    problem = dd.Digits(workers=3, alpha=0.5)
    whole, all_of_them, some = (constants(problem, draws=4, samples=count) for count in (None, 10_000, 100))
    pairs = [(each.smoothness, *each.smoothnesses) for each in (whole, all_of_them, some)]
    # a product with the Hessian is a gradient's gradient; other samples are off by a tenth and more
    close = rounding(2 * operations(problem, samples=1437), torch.float32)
    for exact, same, estimate in zip(*pairs, strict=True):
        assert [same.value, same.error] == pytest.approx([exact.value, exact.error], rel=0, abs=close * exact.value)
        assert near(estimate, exact.value, 3.0) and 0 < estimate.error < exact.value / 2
        assert "100 samples" in estimate.how and "samples" not in exact.how
    assert some.cost < whole.cost / 2 and "of 100 samples of each worker" in "".join(some.notes)
    assert (some.heterogeneity, some.variances, some.gap) == (whole.heterogeneity, whole.variances, whole.gap)
    given = shards(3), [TensorDataset(*pair) for pair in shards(3)]
    pairs, datasets = (constants(dd.Network(mlp(), cross_entropy, data, 4), draws=4, samples=5) for data in given)
    assert pairs.smoothness == datasets.smoothness
    with pytest.raises(dd.BadInput, match=r"samples is 0"):
        constants(problem, samples=0)


@pytest.mark.numeric
def test_too_few_products_give_a_lower_bound_that_says_so():
    problem = dd.Network(mlp(), cross_entropy, shards(3), 4)
    truth = float(torch.linalg.eigvalsh(dense(problem, problem.start(0), [0, 1, 2])).abs().max())
    found = [constants(problem, draws=4, iterations=count) for count in (1, 3, 60)]
    values = [each.smoothness.value for each in found]
    assert values == sorted(values) and values[-1] == pytest.approx(truth, rel=2e-3)
    for early in found[:2]:
        assert math.isnan(early.smoothness.error) and early.smoothness.how.startswith("lower bound")
        assert any("more iterations" in note for note in early.notes)
    assert found[2].smoothness.error < 0.02 * truth and not any("more iterations" in note for note in found[2].notes)
    starts = {constants(problem, problem.start(0), draws=4, iterations=60, seed=seed).smoothness.value for seed in range(4)}
    assert len(starts) == 4 and max(starts) - min(starts) < 2e-3 * truth


@pytest.mark.numeric
def test_a_networks_gradients_gap_and_variance():
    problem = dd.Network(mlp(), cross_entropy, shards(3), 4, full_gradient=False)  # a choice for evaluation only
    x, found = problem.start(0), constants(problem, draws=300, iterations=1)
    each = []
    for inputs, targets in (shard.pair for shard in problem.shards()):
        rows = [dd.Network(mlp(), cross_entropy, [(inputs[k : k + 1], targets[k : k + 1])], 1) for k in range(len(inputs))]
        each.append(torch.stack([one.measure(x, 0)["gradient"] for one in rows]))
    means = torch.stack([gradients.mean(0) for gradients in each])
    close, size = rounding(operations(problem, samples=28), torch.float32), float(means.norm(dim=1).max())
    for worker, gradients in enumerate(each):
        assert near(found.variances[worker], float((gradients - means[worker]).square().sum(1).mean()) / 4)
        truth = float((means[worker] - means.mean(0)).norm())
        assert math.sqrt(found.heterogeneity[worker].value) == pytest.approx(truth, rel=0, abs=2 * close * size)
    assert found.gradient.value == pytest.approx(float(means.mean(0).norm()), rel=0, abs=close * size)
    assert found.gap.value == pytest.approx(problem.evaluate(x)["objective"], rel=close, abs=0)
    assert math.isnan(found.gap.error) and "F* is at least 0" in found.gap.how
    assert not problem.full_gradient


def test_a_loss_below_zero_has_no_known_gap():
    problem = dd.Network(mlp(), lambda out, target: cross_entropy(out, target) - 100.0, shards(2), 4)
    found = constants(problem, draws=4, iterations=1)
    assert math.isnan(found.gap.value) and any("lower bound" in note for note in found.notes)


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

    def made(square: Any) -> dd.Network:
        torch.manual_seed(3)
        return dd.Network(nn.Linear(3, 1), lambda out, target: mse_loss(square(out), target), data, 4)

    once, twice = (constants(made(square), draws=4).smoothness for square in (Once.apply, torch.square))
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
def test_dropout_is_said_not_to_be_centred_and_minibatches_are():
    wet = dd.Network(mlp(nn.Tanh(), nn.Dropout(0.5)), cross_entropy, shards(2), dd.Batches(4, stochastic=True))
    assert any("not centred" in note for note in constants(wet, 3 * wet.start(0), draws=500, iterations=1).notes)
    dry = dd.Network(mlp(), cross_entropy, shards(2), dd.Batches(4, replacement=False))
    assert not any("not centred" in note for note in constants(dry, draws=300, iterations=1).notes)
    whole = dd.Network(
        mlp(), cross_entropy, shards(2), dd.Batches([20, 24], replacement=False)
    )  # every minibatch is all data
    found = constants(whole, draws=10, iterations=1)
    size = max(float(whole.measure(whole.start(0), worker)["gradient"].norm()) for worker in range(2))
    assert math.sqrt(found.variance.value) <= rounding(operations(whole, samples=24), torch.float32) * size
    assert not any("not centred" in note for note in found.notes)


# -------------------------------------------------------------------------------- wrapped, own and broken problems


@pytest.mark.parametrize("problem", [QUADRATICS["matrices"], logistic(), dd.Network(mlp(), cross_entropy, shards(3), 4)])
def test_full_gradients_have_no_variance_and_local_steps_are_said_not_to_be_covered(problem):
    plain, full = constants(problem, draws=10), constants(dd.problems.FullGradients(problem), draws=10)
    assert [each.value for each in full.variances] == [0.0] * 3 and full.variance == Estimate(0.0, 0.0, "exact")
    assert (full.smoothness, full.gap, full.gradient, full.heterogeneity) == (
        plain.smoothness,
        plain.gap,
        plain.gradient,
        plain.heterogeneity,
    )
    steps = constants(dd.LocalSteps(problem, 3, 0.1), draws=10)
    assert "3 gradients" in steps.notes[0] and steps.variances == plain.variances and steps.gap == plain.gap
    both = constants(dd.LocalSteps(dd.problems.FullGradients(problem), 3, 0.1), draws=10)
    assert both.variance.value == 0.0 and "3 gradients" in both.notes[0]
    assert constants(dd.problems.FullGradients(dd.LocalSteps(problem, 3, 0.1)), draws=10).notes == full.notes


class Own(dd.Problem):
    """Somebody's own problem: a quadratic that tells gradients and F, and nothing exact of a worker."""

    def __init__(self, inner: dd.Quadratic) -> None:
        self.inner, self.workers, self.seed = inner, inner.workers, inner.seed

    def start(self, seed: int) -> Tensor:
        return self.inner.start(seed)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return self.inner.gradient(x, worker, draw)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.inner.evaluate(x)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


class WithOptimum(Own):
    def optimum(self) -> Tensor:
        return self.inner.optimum()


def test_a_problem_without_exact_gradients_is_measured_by_minibatches():
    inner = dd.Quadratic(CENTERS, MATRICES, noise=3.0, start=[1.0, 1.0])
    truth, found = constants(inner), constants(Own(inner), draws=60)
    assert found.smoothness.value == pytest.approx(truth.smoothness.value, rel=1e-6)  # added noise does not curve
    assert "differences of 10 minibatches" in found.smoothness.how and "60 minibatches" in found.variance.how
    assert math.isnan(found.gap.value) and any("'optimum'" in note for note in found.notes)
    assert constants(WithOptimum(inner), draws=10).gap.value == pytest.approx(truth.gap.value)
    assert found.cost > 3 * 60


def test_estimates_are_within_their_errors_as_often_as_they_should_be():
    inner = dd.Quadratic(CENTERS, MATRICES, noise=3.0, start=[1.0, 1.0])
    truth = constants(inner)
    runs = [constants(Own(inner), draws=40, seed=seed, iterations=1) for seed in range(60)]
    for name in ("gradient", "variance"):
        off = [abs(getattr(found, name).value - getattr(truth, name).value) / getattr(found, name).error for found in runs]
        assert max(off) < 5.0 and sum(each < 2.0 for each in off) >= 45
    for worker in range(3):
        z = [found.heterogeneity[worker] for found in runs]
        mean, exact = sum(each.value for each in z) / 60, truth.heterogeneity[worker].value
        assert abs(mean - exact) < 4 * max(each.error for each in z) / math.sqrt(60)  # the noise's own share is taken off
        assert all(near(each, exact) for each in z)
        variance = sum(found.variances[worker].value for found in runs) / 60
        assert variance == pytest.approx(18.0, rel=0.08)


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


class Broken(Own):
    """It fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(dd.Quadratic(CENTERS, noise=1.0))
        self.where = where

    def start(self, seed: int) -> Tensor:
        if self.where == "start":
            raise RuntimeError("no weights today")
        return super().start(seed)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        if self.where == "gradient" and worker == 1:
            raise OSError("its disk is gone")
        if self.where == "infinite" and worker == 1:
            gradient = gradient / 0.0
        return gradient[:1] if self.where == "shape" and worker == 1 else gradient, loss

    def evaluate(self, x: Tensor) -> dict[str, float]:
        if self.where == "evaluate":
            raise KeyError("objective")
        return {"objective": math.nan} if self.where == "loss" else super().evaluate(x)

    def optimum(self) -> Tensor:
        return self.inner.optimum()


SAID = {"gradient": "its disk is gone", "infinite": "not finite", "shape": "(1,); expected (2,)"}


@pytest.mark.parametrize("where", SAID)
def test_one_worker_that_cannot_be_measured_is_named_and_the_others_are_measured(where):
    found = constants(Broken(where), draws=4)
    assert math.isnan(found.variances[1].value) and found.variances[0].value > 0 and found.variances[2].value > 0
    assert math.isnan(found.variance.value)  # the largest of all cannot be known
    assert math.isnan(found.gradient.value) and all(math.isnan(each.value) for each in found.heterogeneity)
    assert math.isnan(found.smoothness.value) and math.isnan(found.smoothnesses[1].value)
    assert found.smoothnesses[0].value == pytest.approx(1.0) and found.gap.value > 0
    assert any("worker 1" in note and SAID[where] in note for note in found.notes)


@pytest.mark.parametrize(("where", "said"), [("evaluate", "objective"), ("loss", "F is nan")])
def test_a_problem_whose_loss_cannot_be_had_has_no_gap(where, said):
    found = constants(Broken(where), draws=4)
    assert math.isnan(found.gap.value) and any("the gap" in note and said in note for note in found.notes)
    assert found.variance.value > 0 and found.gradient.value > 0


def test_a_problem_without_a_start_is_measured_only_at_given_weights():
    found = constants(Broken("start"), draws=4)
    assert math.isnan(found.smoothness.value) and len(found.variances) == 3 and "no weights today" in found.notes[0]
    there = constants(Broken("start"), torch.zeros(2, dtype=torch.float64), draws=4)
    assert there.smoothness.value == pytest.approx(1.0) and there.gap.value > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize(
    "problem", [dd.Quadratic(CENTERS, MATRICES), logistic(), dd.Network(mlp(), cross_entropy, shards(2), 4)]
)
def test_weights_that_have_run_away_are_measured_as_far_as_they_can_be(problem, value):
    found = constants(problem, torch.full_like(problem.start(0), value, dtype=torch.float64), draws=4)
    assert isinstance(found, Constants)
    if not math.isfinite(value) or isinstance(problem, dd.Network):
        assert math.isnan(found.gradient.value) and found.notes


def test_gradients_that_are_sometimes_not_finite_spoil_the_variance_alone():
    found = constants(Holes(CENTERS, noise=0.5), draws=20)
    assert math.isnan(found.variance.value) and found.gradient.value > 0 and found.gap.value > 0
    assert found.variances[0].value > 0 and any("worker 2" in note and "not finite" in note for note in found.notes)


class NoGradient(dd.Quadratic):
    def measure(self, x: Tensor, worker: int) -> dict[str, Any]:
        return {**super().measure(x, worker), "gradient": None}


def test_a_measure_without_a_gradient_is_said():
    found = constants(NoGradient(CENTERS), draws=4)
    assert math.isnan(found.gradient.value) and any("is None" in note for note in found.notes)


def test_bad_input_is_refused():
    problem = QUADRATICS["numbers"]
    for wrong, said in [
        (lambda: constants("digits"), "problem is 'digits'"),
        (lambda: constants(problem, [0.0, 0.0]), "x is"),
        (lambda: constants(problem, torch.zeros(3)), r"shape \(3,\); expected \(2,\)"),
        (lambda: constants(problem, draws=3), "draws is 3"),
        (lambda: constants(problem, seed=-1), "seed is -1"),
        (lambda: constants(problem, iterations=0), "iterations is 0"),
        (lambda: constants(problem, threads=0), "threads is 0"),
        (lambda: Along("digits", 10), "problem is 'digits'"),
        (lambda: Along(problem, 0), "every is 0"),
    ]:
        with pytest.raises(dd.BadInput, match=said):
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
    problem = unlike(3)
    every = Along(problem, 1)
    dd.simulate(dd.VanillaASGD(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=5, watch=[every])
    assert [moment.version for moment in every.moments] == [1, 2, 3, 4, 5]
    between = Along(problem, 2)
    dd.simulate(
        dd.algorithms.FedFix(lr=0.1, period=0.3), problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=20, watch=[between]
    )
    versions = [moment.version for moment in between.moments]
    assert versions == sorted(set(versions)) and len(versions) > 1


# ------------------------------------------------------------------------------------------------ the theorem

ONE = {"smoothness": 1.0, "gap": 1.0, "variance": 1.0, "delay": 19, "workers": 10}


def test_the_reference_numbers():
    assert horizon(**ONE) == 194_560
    assert step_size(**ONE, updates=200_000) == pytest.approx(8.1111e-4, rel=1e-4)
    assert largest_step(1.0, 19) == pytest.approx(8.2237e-4, rel=1e-4)
    assert bound(**ONE, updates=200_000) == pytest.approx(0.394522 + 1.97e-5, rel=2e-6)
    assert bound(**ONE, updates=194_560) == pytest.approx(
        4 / 10 + 1 / (256 * 10 * 19), rel=rounding(32), abs=0
    )  # 4 s/n + s/(256 n tau)


constant = st.floats(1e-3, 1e3)


@few
@given(constant, constant, constant, st.integers(1, 50), st.integers(1, 30), st.integers(1, 10**6))
def test_how_step_horizon_and_bound_hang_together(smooth, gap, variance, delay, workers, updates):
    given_ = (smooth, gap, variance, delay, workers)
    cap, length, step = largest_step(smooth, delay), horizon(*given_), step_size(*given_, updates)
    assert 0 < step <= cap
    assert (step == cap) == (updates <= length) or step == pytest.approx(cap)
    assert bound(*given_, updates) >= bound(*given_, updates, lr=step) * (1 - rounding(32))
    for factor in (0.5, 0.9):  # no step that is covered gives a smaller bound, but for the last term
        last = 128 * smooth**3 * delay**2 * step**3 * variance / workers
        assert bound(*given_, updates, lr=factor * step) >= bound(*given_, updates, lr=step) * (1 - rounding(32)) - last
    for unit in (4.0, 0.25):  # gradients in another unit: sigma^2 and L Delta grow alike, and so does the bound
        other = (smooth * unit, gap * unit, variance * unit**2, delay, workers)
        assert horizon(*other) == pytest.approx(length)
        if not 0.999 < updates / length < 1.001:
            assert bound(*other, updates) == pytest.approx(bound(*given_, updates) * unit**2)


def test_what_makes_the_bound_larger():
    base = {**ONE, "updates": 400_000}
    for name, factors in {"smoothness": (0.5, 2), "gap": (0.5, 2), "variance": (1, 2), "delay": (0.5, 2)}.items():
        low, high = (bound(**{**base, name: base[name] * factor}) for factor in factors)
        assert low < high, name
    assert bound(**{**base, "workers": 5}) > bound(**base) > bound(**{**base, "workers": 20})
    for horizon_side in (1000, 400_000):
        assert bound(**{**base, "updates": horizon_side}) > bound(**{**base, "updates": 2 * horizon_side})
        steps = [step_size(**{**base, "updates": horizon_side * k}) for k in (1, 4)]
        assert steps[0] >= steps[1]
    assert step_size(**{**base, "updates": 1_600_000}) == pytest.approx(step_size(**base) / 2)


def test_without_noise_the_largest_step_is_the_one_at_every_horizon():
    quiet = {**ONE, "variance": 0.0}
    assert horizon(**quiet) == math.inf
    for updates in (1, 10**9):
        assert step_size(**quiet, updates=updates) == largest_step(1.0, 19)
        assert bound(**quiet, updates=updates) == pytest.approx(32 * 64 * 19 / updates)  # 2048 L Delta tau / T
        near_it = {**ONE, "variance": 1e-12}
        assert bound(**near_it, updates=updates) == pytest.approx(bound(**quiet, updates=updates), rel=1e-3)
        assert step_size(**near_it, updates=updates) == largest_step(1.0, 19)


BOUNDED: list[Any] = [
    (dd.Quadratic([[1.0], [0.0], [-1.0]], noise=10.0, start=[1.0]), 1),
    (dd.Quadratic([[1.0], [0.0], [-1.0]], noise=10.0, start=[1.0]), 2),
    (dd.Quadratic(CENTERS, MATRICES, noise=40.0, start=[3.0, 3.0]), 1),
    (dd.Quadratic(CENTERS, MATRICES, noise=40.0, start=[3.0, 3.0]), 2),
    (dd.Quadratic(CENTERS, MATRICES, noise=0.0, start=[3.0, 3.0]), 1),
]


@pytest.mark.parametrize(("problem", "wait_for"), BOUNDED)
def test_the_bound_holds(problem, wait_for):
    speeds, updates = dd.FixedSpeeds([1.0, 2.0, 4.0]), 300
    found = constants(problem)
    tau = dd.simulate(dd.DuDe(lr=1e-3, wait_for=wait_for), problem, speeds, updates=updates).delays.tau_max
    assert tau == {1: 13, 2: 5}[wait_for]
    worst = max(each.value for each in found.smoothnesses)  # what the proof uses
    given_ = (worst, found.gap.value, found.variance.value, tau, 3)
    assert problem.noise == 0 or horizon(*given_) <= updates
    hessian, best = matrices(problem).mean(0), problem.optimum()
    for lr, limit in [
        (step_size(*given_, updates), bound(*given_, updates)),
        (largest_step(worst, tau), bound(*given_, updates, lr=largest_step(worst, tau))),
    ]:
        means = []
        for seed in range(3):
            run, models = archive(dd.DuDe(lr=lr, wait_for=wait_for), problem.reseeded(seed), speeds, updates=updates)
            assert run.delays.tau_max == tau
            gradients = (torch.stack(models[:-1]) - best) @ hessian
            means.append(float(gradients.square().sum(1).mean()))
        assert 0 < max(means) <= limit
        assert limit < 1e4 * min(means)  # loose, and not empty


def test_the_theorem_refuses_what_it_does_not_cover():
    for wrong, said in [
        (lambda: bound(**ONE, updates=100, lr=1e-3), "largest step size that the theorem covers"),
        (lambda: bound(**ONE, updates=100, lr=0.0), "lr is 0.0"),
        (lambda: bound(**ONE, updates=0), "updates is 0"),
        (lambda: step_size(**ONE, updates=0), "updates is 0"),
        (lambda: horizon(**{**ONE, "gap": math.inf}), "gap is inf"),
        (lambda: horizon(**{**ONE, "gap": math.nan}), "gap is nan"),
        (lambda: horizon(**{**ONE, "variance": -1.0}), "variance is -1.0"),
        (lambda: horizon(**{**ONE, "variance": math.nan}), "variance is nan"),
        (lambda: horizon(**{**ONE, "workers": 0}), "workers is 0"),
        (lambda: largest_step(1.0, 0.5), "delay is 0.5"),
        (lambda: largest_step(0.0, 1), "smoothness is 0.0"),
    ]:
        with pytest.raises(dd.BadInput, match=said):
            wrong()
    assert bound(**ONE, updates=100, lr=largest_step(1.0, 19)) > 0


# ------------------------------------------------------------------------------------------------ rates

TABLE: dict[str, Any] = {"workers": 4, "updates": 10_000, "variance": 9.0, "heterogeneity": [1.0, 4.0, 0.0, 3.0]}
TABLE |= {"delay": 25, "mean_delay": 7, "mean_delays": [1, 2, 3, 4], "local_steps": 5, "buffer": 2}
TABLE |= {"largest_noise": 6.0, "hessian": 2.0, "largest_gradient": 10.0}


def test_the_rates_are_those_of_table_1_by_hand():
    found = rates(**TABLE)  # sigma = 3, zeta^2 = 2, T = 10^4
    assert found == pytest.approx(
        {
            "sync": 3 / 200 + 1e-4,
            "mifa": math.sqrt(8 / 200_000) * 9 + (20 * 3 * 25 * math.sqrt(2) + 9 * 25 * 6 * 2) / 1e4,
            "fedbuff": (9 + 5 * 2) / math.sqrt(100_000) + (5 * 7 * 25 * 2 + 25 * 9) / 1e4,
            "vanilla": 3 / 100 + 4 / 1e4 + 4,
            "uniform": math.sqrt(11) / 100 + (7 * (1 + 8 + 0 + 12) / 4) ** (1 / 3) / 1e4 ** (2 / 3),
            "shuffled": 3 / 100 + (8 ** (1 / 3) + 40 ** (2 / 3)) / 1e4 ** (2 / 3) + 4 / 1e4,
            "dude": math.sqrt(9 * 25 / 4e4) + 10 / (3 * 1e6),
        }
    )
    assert set(found) <= set(dd.ALGORITHMS)


def test_dudes_rate_is_its_bound_but_for_the_factor():
    for smooth, gap in itertools.product((0.5, 3.0), (1.0, 20.0)):
        rate = rates(**{**TABLE, "updates": 10**7}, smoothness=smooth, gap=gap)["dude"]
        assert 128 * rate == pytest.approx(bound(smooth, gap, 9.0, 25, 4, 10**7))


def test_rates_in_other_units():
    base = rates(**TABLE)
    for force, length in ((4.0, 1.0), (1.0, 4.0), (2.0, 0.5)):  # of a gradient and of x
        other = {**TABLE, "variance": 9 * force**2, "heterogeneity": [z * force**2 for z in TABLE["heterogeneity"]]}
        other |= {"largest_noise": 6 * force, "hessian": 2 * force / length**2, "largest_gradient": 10 * force}
        other |= {"smoothness": force / length, "gap": force * length}
        assert rates(**other) == pytest.approx({name: rate * force**2 for name, rate in base.items()})


def test_rates_without_noise_or_unlikeness_or_what_they_need():
    quiet = rates(**{**TABLE, "variance": 0.0})
    assert quiet["dude"] == math.inf and quiet["sync"] == 1e-4 and quiet["mifa"] == 0.0
    like = rates(**{**TABLE, "variance": 0.0, "heterogeneity": [0.0] * 4})
    assert like["vanilla"] == 4e-4 and like["fedbuff"] == like["uniform"] == 0.0
    bare = rates(workers=2, updates=100, variance=1.0, heterogeneity=[1.0, 1.0], delay=3, mean_delay=2)
    assert [name for name, rate in bare.items() if math.isnan(rate)] == ["mifa", "shuffled"]
    long = rates(**{**TABLE, "updates": 10**12})
    assert long["vanilla"] == pytest.approx(4.0, rel=1e-5)  # it does not go away
    assert all(rate < 1e-2 for name, rate in long.items() if name != "vanilla")


def test_the_times_by_hand_and_their_order():
    given_ = {"smoothness": 2.0, "gap": 3.0, "variance": 8.0, "target": 0.5}
    found = times(**given_, seconds=[4.0, 1.0, 1.0])
    assert found["malenia"] == found["ringleader"] == pytest.approx(12 * (4 + 2 * 16 / 3))
    assert found["sync"] == found["dude"] == pytest.approx(12 * (4 + 4 * 16 / 3))
    like = [12 * (1 + 16), 12 * (1 + 8), 3 / 2.25 * 12 * (1 + 16 / 3)]
    assert found["rennala"] == found["ringmaster"] == pytest.approx(min(like))
    assert found["rennala"] < found["malenia"] < found["sync"]
    even = times(**given_, seconds=[2.0] * 5)
    assert len({round(value, 9) for value in even.values()}) == 1  # equal speeds: nothing to gain
    quiet = times(**{**given_, "variance": 0.0}, seconds=[4.0, 1.0, 1.0])
    assert quiet["malenia"] == quiet["sync"] == 48 and quiet["rennala"] == 12
    assert set(found) <= set(dd.ALGORITHMS)


def test_rates_and_times_refuse_what_cannot_be():
    given_ = {"smoothness": 1.0, "gap": 1.0, "variance": 1.0, "target": 1.0}
    for wrong, said in [
        (lambda: rates(**{**TABLE, "heterogeneity": [1.0]}), "heterogeneity has 1 entries; expected 4"),
        (lambda: rates(**{**TABLE, "heterogeneity": [1.0, 1.0, -1.0, 1.0]}), r"heterogeneity\[2\] is -1.0"),
        (lambda: rates(**{**TABLE, "mean_delays": [1, 1, 0, 1]}), r"mean_delays\[2\] is 0"),
        (lambda: rates(**{**TABLE, "delay": 0}), "delay is 0"),
        (lambda: rates(**{**TABLE, "variance": math.nan}), "variance is nan"),
        (lambda: rates(**{**TABLE, "buffer": 0}), "buffer is 0"),
        (lambda: rates(**TABLE, gap=0.0), "gap is 0.0"),
        (lambda: times(**given_, seconds=[]), "seconds is"),
        (lambda: times(**given_, seconds=[1.0, 0.0]), "seconds is"),
        (lambda: times(**{**given_, "target": 0.0}, seconds=[1.0]), "target is 0.0"),
    ]:
        with pytest.raises(dd.BadInput, match=said):
            wrong()


def test_what_is_public_has_a_docstring():
    for name in (
        "Along",
        "Constants",
        "Estimate",
        "Moment",
        "bound",
        "constants",
        "horizon",
        "largest_step",
        "rates",
        "step_size",
    ):
        assert (getattr(theory, name).__doc__ or "").strip()

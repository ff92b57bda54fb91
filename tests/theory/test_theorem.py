"""The formulas of the paper: its theorem by hand and against runs, the rates of Table 1 and the times of later papers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay import theory
from dualdelay.theory import bound, constants, horizon, largest_step, rates, step_size, times
from helpers import CENTERS, MATRICES, archive, few, matrices, rounding
from own import NO_NUMBERS, refused

ONE = {"smoothness": 1.0, "gap": 1.0, "variance": 1.0, "delay": 19, "workers": 10}


def test_the_reference_numbers():
    assert horizon(**ONE) == 194_560
    assert step_size(**ONE, updates=200_000) == pytest.approx(8.1111e-4, rel=1e-4)
    assert largest_step(1.0, 19) == pytest.approx(8.2237e-4, rel=1e-4)
    assert bound(**ONE, updates=200_000) == pytest.approx(0.394522 + 1.97e-5, rel=2e-6)
    at_horizon = 4 / 10 + 1 / (256 * 10 * 19)  # 4 s / n + s / (256 n tau)
    assert bound(**ONE, updates=194_560) == pytest.approx(at_horizon, rel=rounding(32), abs=0)


constant = st.floats(1e-3, 1e3)


@few
@given(constant, constant, constant, st.integers(1, 50), st.integers(1, 30), st.integers(1, 10**6))
def test_how_step_horizon_and_bound_hang_together(smooth, gap, variance, delay, workers, updates):
    setting = (smooth, gap, variance, delay, workers)
    cap, length, step = largest_step(smooth, delay), horizon(*setting), step_size(*setting, updates)
    assert 0 < step <= cap
    assert (step == cap) == (updates <= length) or step == pytest.approx(cap)
    assert bound(*setting, updates) >= bound(*setting, updates, lr=step) * (1 - rounding(32))
    for factor in (0.5, 0.9):  # no step that is covered gives a smaller bound, but for the last term
        last = 128 * smooth**3 * delay**2 * step**3 * variance / workers
        assert bound(*setting, updates, lr=factor * step) >= bound(*setting, updates, lr=step) * (1 - rounding(32)) - last
    for unit in (4.0, 0.25):  # gradients in another unit: sigma^2 and L Delta grow alike, and so does the bound
        other = (smooth * unit, gap * unit, variance * unit**2, delay, workers)
        assert horizon(*other) == pytest.approx(length)
        if not 0.999 < updates / length < 1.001:
            assert bound(*other, updates) == pytest.approx(bound(*setting, updates) * unit**2)


def test_what_makes_the_bound_larger():
    base = {**ONE, "updates": 400_000}
    for name, factors in {"smoothness": (0.5, 2), "gap": (0.5, 2), "variance": (1, 2), "delay": (0.5, 2)}.items():
        low, high = (bound(**{**base, name: base[name] * factor}) for factor in factors)
        assert low < high, name
    assert bound(**{**base, "workers": 5}) > bound(**base) > bound(**{**base, "workers": 20})
    for updates in (1000, 400_000):  # before and beyond the horizon
        assert bound(**{**base, "updates": updates}) > bound(**{**base, "updates": 2 * updates})
    assert step_size(**{**base, "updates": 1000}) == step_size(**{**base, "updates": 4000}) == largest_step(1.0, 19)
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


LINE = dd.Quadratic([[1.0], [0.0], [-1.0]], noise=10.0, start=[1.0])
PLANE = dd.Quadratic(CENTERS, MATRICES, noise=40.0, start=[3.0, 3.0])
QUIET = dd.Quadratic(CENTERS, MATRICES, start=[3.0, 3.0])


@pytest.mark.parametrize(("problem", "wait_for"), [(LINE, 1), (LINE, 2), (PLANE, 1), (PLANE, 2), (QUIET, 1)])
def test_the_bound_holds(problem, wait_for):
    speeds, updates, tau = dd.FixedSpeeds([1.0, 2.0, 4.0]), 300, {1: 13, 2: 5}[wait_for]
    found, hessian, best = constants(problem), matrices(problem).mean(0), problem.optimum()
    worst = max(estimate.value for estimate in found.smoothnesses)  # what the proof uses
    setting = (worst, found.gap.value, found.variance.value, tau, 3)
    assert problem.noise == 0 or horizon(*setting) <= updates
    largest = largest_step(worst, tau)
    steps = {step_size(*setting, updates): bound(*setting, updates), largest: bound(*setting, updates, lr=largest)}
    for lr, limit in steps.items():
        means = []
        for seed in range(2):
            run, models = archive(dd.DuDe(lr=lr, wait_for=wait_for), problem.reseeded(seed), speeds, updates=updates)
            assert run.delays.tau_max == tau
            gradients = (torch.stack(models[:-1]) - best) @ hessian
            means.append(float(gradients.square().sum(1).mean()))
        assert 0 < max(means) <= limit < 1e4 * min(means)  # loose, and not empty


@pytest.mark.parametrize(("problem", "wait_for"), [(LINE, 1), (LINE, 2), (PLANE, 1), (PLANE, 2), (QUIET, 1)])
def test_the_bound_of_the_shorter_proof_holds_too(problem, wait_for):
    speeds, updates, tau = dd.FixedSpeeds([1.0, 2.0, 4.0]), 300, {1: 13, 2: 5}[wait_for]
    found, hessian, best = constants(problem), matrices(problem).mean(0), problem.optimum()
    smooth = math.sqrt(sum(estimate.value**2 for estimate in found.smoothnesses) / 3)  # the root of their mean square
    gap, variance, largest = found.gap.value, found.variance.value, 1 / (2 * smooth * tau)
    steps = [largest, largest / 5, min(math.sqrt(3 * gap / (2 * smooth * max(variance, 1e-9) * tau * updates)), largest)]
    for lr in steps:
        limit = 2 * gap / (updates * lr) + 4 * smooth * tau * lr * variance / 3
        runs = [archive(dd.DuDe(lr=lr, wait_for=wait_for), problem.reseeded(k), speeds, updates=updates) for k in range(2)]
        gradients = [(torch.stack(models[:-1]) - best) @ hessian for _, models in runs]
        means = [float(each.square().sum(1).mean()) for each in gradients]
        assert 0 < max(means) <= limit < 1e3 * min(means)


class SampledSpeeds(dd.SpeedModel):
    """A job takes five times as long if the noise of the worker's sample ``draw + shift`` is positive."""

    def __init__(self, problem: dd.Quadratic, shift: int) -> None:
        self.n, self.problem, self.shift = problem.workers, problem, shift

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        at = torch.zeros(1, dtype=torch.float64)  # where the exact gradient is zero
        noise = float(self.problem.gradient(at, worker, draw + self.shift)[0]) if draw + self.shift >= 0 else 0.0
        return (1 + 0.013 * worker) * (5.0 if noise > 0 else 1.0)


@pytest.mark.parametrize(("shift", "stays"), [(0, 0.0), (-1, -0.40), (10**6, 0.0)])
def test_delays_that_depend_on_the_sample_in_the_table_shift_where_a_run_stays(shift, stays):
    problem = dd.Quadratic([[0.0]] * 4, noise=1.0, seed=0)
    _, models = archive(dd.DuDe(lr=0.005), problem, SampledSpeeds(problem, shift), updates=4000)
    assert float(torch.stack(models[1000:]).mean()) == pytest.approx(stays, abs=0.1)


class SameSamples(dd.Quadratic):
    """Every worker's k-th job meets the noise of worker 0's."""

    def gradient(self, x: Any, worker: int, draw: int) -> Any:
        return super().gradient(x, 0, draw)


def test_with_the_same_samples_at_all_workers_more_of_them_lower_no_variance():
    sizes = {}
    for kind, workers in itertools.product((dd.Quadratic, SameSamples), (1, 10)):
        problem = kind([[0.0] * 100] * workers, noise=0.1, seed=0)
        method, speeds = dd.DuDe(lr=0.05, wait_for=workers), dd.FixedSpeeds([1.0] * workers)
        models = archive(method, problem, speeds, updates=300)[1]
        sizes[kind, workers] = float(torch.stack(models[50:]).square().sum(1).mean())
    assert sizes[SameSamples, 10] == pytest.approx(sizes[dd.Quadratic, 1])
    assert sizes[dd.Quadratic, 10] == pytest.approx(sizes[dd.Quadratic, 1] / 10, rel=0.2)


def test_the_theorem_refuses_what_it_does_not_cover():
    for wrong, message in [
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
        with pytest.raises(dd.BadInput, match=message):
            wrong()
    assert bound(**ONE, updates=100, lr=largest_step(1.0, 19)) > 0


# ---------------------------------------------------------------------------------------------------- rates and times

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


def test_rates_without_noise_or_heterogeneity_or_constants_they_need():
    quiet = rates(**{**TABLE, "variance": 0.0})
    assert quiet["dude"] == math.inf and quiet["sync"] == 1e-4 and quiet["mifa"] == 0.0
    homogeneous = rates(**{**TABLE, "variance": 0.0, "heterogeneity": [0.0] * 4})
    assert homogeneous["vanilla"] == 4e-4 and homogeneous["fedbuff"] == homogeneous["uniform"] == 0.0
    bare = rates(workers=2, updates=100, variance=1.0, heterogeneity=[1.0, 1.0], delay=3, mean_delay=2)
    assert [name for name, rate in bare.items() if math.isnan(rate)] == ["mifa", "shuffled"]
    long = rates(**{**TABLE, "updates": 10**12})
    assert long["vanilla"] == pytest.approx(4.0, rel=1e-5)  # it does not go away
    assert all(rate < 1e-2 for name, rate in long.items() if name != "vanilla")


def test_the_times_by_hand_and_their_order():
    setting = {"smoothness": 2.0, "gap": 3.0, "variance": 8.0, "target": 0.5}
    found = times(**setting, seconds=[4.0, 1.0, 1.0])
    assert found["malenia"] == found["ringleader"] == pytest.approx(12 * (4 + 2 * 16 / 3))
    assert found["sync"] == found["dude"] == pytest.approx(12 * (4 + 4 * 16 / 3))
    fastest = [12 * (1 + 16), 12 * (1 + 8), 3 / 2.25 * 12 * (1 + 16 / 3)]  # of one, two and three workers
    assert found["rennala"] == found["ringmaster"] == pytest.approx(min(fastest))
    assert found["rennala"] < found["malenia"] < found["sync"]
    even = times(**setting, seconds=[2.0] * 5)
    assert len({round(value, 9) for value in even.values()}) == 1  # equal speeds: nothing to gain
    quiet = times(**{**setting, "variance": 0.0}, seconds=[4.0, 1.0, 1.0])
    assert quiet["malenia"] == quiet["sync"] == 48 and quiet["rennala"] == 12
    assert set(found) <= set(dd.ALGORITHMS)


def test_rates_and_times_refuse_what_cannot_be():
    setting = {"smoothness": 1.0, "gap": 1.0, "variance": 1.0, "target": 1.0}
    for wrong, message in [
        (lambda: rates(**{**TABLE, "heterogeneity": [1.0]}), "heterogeneity has 1 entries; expected 4"),
        (lambda: rates(**{**TABLE, "heterogeneity": [1.0, 1.0, -1.0, 1.0]}), r"heterogeneity\[2\] is -1.0"),
        (lambda: rates(**{**TABLE, "mean_delays": [1, 1, 0, 1]}), r"mean_delays\[2\] is 0"),
        (lambda: rates(**{**TABLE, "delay": 0}), "delay is 0"),
        (lambda: rates(**{**TABLE, "variance": math.nan}), "variance is nan"),
        (lambda: rates(**{**TABLE, "buffer": 0}), "buffer is 0"),
        (lambda: rates(**TABLE, gap=0.0), "gap is 0.0"),
        (lambda: times(**setting, seconds=[]), "seconds is"),
        (lambda: times(**setting, seconds=[1.0, 0.0]), "seconds is"),
        (lambda: times(**{**setting, "target": 0.0}, seconds=[1.0]), "target is 0.0"),
    ]:
        with pytest.raises(dd.BadInput, match=message):
            wrong()


def test_every_public_name_has_a_docstring():
    names = [name for name in vars(theory) if not name.startswith("_")]
    assert len(names) > 15 and all((getattr(theory, name).__doc__ or "").strip() for name in names)


def test_what_is_no_number_is_refused():
    for value in NO_NUMBERS:
        refused(lambda value=value: largest_step(1.0, value), "delay", "expected")
        refused(lambda value=value: constants(dd.Quadratic([[0.0], [6.0]]), draws=value), "draws", "expected")
    refused(lambda: constants(dd.Quadratic([[0.0], [6.0]]), draws=10**12), "draws", "1000000")

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core.draws import mix
from dualdelay.problems.splits import dirichlet
from helpers import few

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
whole = st.integers(-(2**63), 2**63 - 1)


def signed(value):
    return (value & MASK) - ((value & MASK) >> 63 << 64)


def splitmix(z):
    """Steele, Lea and Flood's mixing function in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@few
@given(st.lists(whole, min_size=1, max_size=50))
def test_numpy_torch_and_plain_integers_agree(values):
    # the published generator's first word from seed 0 is 0xE220A8397B1DCDAF
    values, expected = [*values, signed(GAMMA)], [*(signed(splitmix(v & MASK)) for v in values), signed(0xE220A8397B1DCDAF)]
    assert mix(np.array(values)).tolist() == mix(torch.tensor(values)).tolist() == expected


@few
@given(whole, st.text(max_size=8), st.lists(st.integers(0, 2**40), max_size=3), st.integers(1, 20))
def test_a_draw_is_a_function_of_its_name(seed, purpose, place, count):
    draws = dd.Draws(seed, purpose)
    key = draws.key(*place)
    words = [signed(splitmix((key + k * GAMMA) & MASK)) for k in range(1, count + 1)]
    assert draws.bits(count, *place).tolist() == words
    draws.normals(3, *place)
    draws.permutation(5)
    assert draws.bits(count + 7, *place)[:count].tolist() == words  # neither what was drawn before nor how many matters
    assert draws.uniform(*place) == draws.uniforms(count, *place)[0]
    assert draws.integer(10, *place) == draws.integers(10, count, *place)[0]


def test_names_that_differ_give_unlike_draws():
    places = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2, 3), (3, 2)]
    keys = {dd.Draws(seed, purpose).key(*p) for seed in (0, 1, -1) for purpose in ("a", "b") for p in places}
    assert len(keys) == 3 * 2 * len(places)
    # neighbours are uncorrelated: the mean of 2000 products of standard normals has standard deviation 0.022
    rows = [[dd.Draws(0, "noise").normals(1, worker, draw)[0] for draw in range(2000)] for worker in range(3)]
    rows.append(np.roll(rows[0], 1))
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.09


def test_moments_of_uniforms_and_normals():
    draws, count = dd.Draws(3, "test"), 200_000
    firsts = np.array([draws.uniform(worker, draw) for worker in range(50) for draw in range(400)])  # one for each name
    for u, error in ((draws.uniforms(count, 1), 0.003), (firsts, 0.01)):
        assert 0 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
        assert u.mean() == pytest.approx(1 / 2, abs=error) and u.var() == pytest.approx(1 / 12, abs=error / 3)
    z = draws.normals(count, 2)
    moments = [(z**k).mean() for k in (1, 2, 3, 4)]
    assert np.abs(np.array(moments) - [0, 1, 0, 3]).max() < 0.1 and abs(moments[0]) < 0.01


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 64])
def test_integers_and_permutations_cover_their_range_evenly(bound):
    draws = dd.Draws(0, "test")
    firsts = [draws.permutation(bound, k)[0] for k in range(3200)]
    assert sorted(draws.permutation(bound).tolist()) == list(range(bound))
    for values in (draws.integers(bound, 64_000, bound), firsts):
        counts, expected = np.bincount(values), len(values) / bound
        assert len(counts) == bound and np.abs(counts - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize(("std", "mean", "sd"), [(1.0, 1.28760, 0.79353), (5.0, 4.37537, 3.19868)])
def test_truncated_normal_speeds(std, mean, sd):
    # I-25: with a = -1/std and h = phi(a) / (1 - Phi(a)), mean 1 + std h and variance std^2 (1 + a h - h^2)
    a, n = -1 / std, 60_000
    h = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi) / (1 - (1 + math.erf(a / math.sqrt(2))) / 2)
    assert (1 + std * h, std * math.sqrt(1 + a * h - h**2)) == pytest.approx((mean, sd), abs=1e-5)
    speeds, three = (dd.TruncatedNormalSpeeds(count, std=std, seed=1) for count in (n, 3))
    s = np.array([speeds.seconds(worker, 0) for worker in range(n)])
    assert (
        s.min() > 0
        and s.mean() == pytest.approx(mean, abs=4 * sd / math.sqrt(n))
        and s.std() == pytest.approx(sd, rel=0.015)
    )
    # once per worker and named by it: neither the draw nor the number of others matters
    assert [three.seconds(i, 5, 9.0) for i in range(3)] == s[:3].tolist()


@pytest.mark.parametrize("kind", [dd.speeds.ExponentialSpeeds, dd.speeds.LognormalSpeeds, dd.speeds.ParetoSpeeds])
def test_random_speeds_have_the_given_means(kind):
    speeds = kind([2.0, 6.0], **({"shape": 4.0} if kind is dd.speeds.ParetoSpeeds else {}))
    for worker, mean in enumerate([2.0, 6.0]):
        s = np.array([speeds.seconds(worker, draw) for draw in range(20_000)])
        assert s.min() > 0 and s.mean() == pytest.approx(mean, rel=0.04) and len(set(s[:100])) == 100


CHANCES = [(30, 0.05, 0.6536), (10, 0.1, 0.3993), (30, 0.1, 0.4670), (10, 0.5, 0.0292)]


@pytest.mark.parametrize(("workers", "alpha", "chance"), CHANCES)
def test_dirichlet_split_is_multinomial(workers, alpha, chance):
    # I-24: a worker's share of a class is Beta(alpha, (n-1) alpha), its count of N samples Beta-binomial, so
    # P(none) = B(alpha, (n-1) alpha + N) / B(alpha, (n-1) alpha)
    N, classes, rest, g = 5000, 120, (workers - 1) * alpha, math.lgamma
    assert math.exp(g(rest + N) - g(alpha + rest + N) - g(rest) + g(alpha + rest)) == pytest.approx(chance, abs=5e-5)
    split = dirichlet(np.repeat(np.arange(classes), N), workers, alpha, seed=5, empty="error")
    assert (np.sort(np.concatenate(split)) == np.arange(classes * N)).all()
    counts = np.array([np.bincount(rows // N, minlength=classes) for rows in split])
    error = math.sqrt(chance * (1 - chance) / counts.size)
    assert (counts == 0).mean() == pytest.approx(chance, abs=4 * error)


def test_a_worker_without_samples_is_never_kept_silently():
    labels = np.repeat(np.arange(10), 20)  # so few and so unlike that some of 30 workers get nothing
    kept = dirichlet(labels, 30, 0.05, empty="drop")
    assert len(kept) < 30 and min(map(len, kept)) > 0 and sum(map(len, kept)) == 200
    for empty in ("error", "resample"):
        with pytest.raises(dd.BadInput, match=r"got no sample|at best"):
            dirichlet(labels, 30, 0.05, empty=empty)
    assert min(map(len, dirichlet(labels, 4, 1.0, empty="resample", minimum=10))) >= 10

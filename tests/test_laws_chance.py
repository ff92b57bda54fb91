from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dualdelay.draws import mix
from dualdelay.problems.splits import by_label, dirichlet, iid
from helpers import few
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
whole = st.integers(-(2**63), 2**63 - 1)


def signed(value):
    return (value & MASK) - ((value & MASK) >> 63 << 64)


def splitmix(z):
    """Steele, Lea and Flood's mixing function in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_hash_is_splitmix64():
    # the published generator's first words from seeds 0 and 1234567
    known = {0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], 1234567: [6457827717110365317]}
    for seed, words in known.items():
        states = np.array([signed(seed + k * GAMMA) for k in range(1, len(words) + 1)])
        assert [int(word) & MASK for word in mix(states)] == words


@few
@given(st.lists(whole, min_size=1, max_size=50))
def test_numpy_torch_and_plain_integers_agree(values):
    expected = [signed(splitmix(value & MASK)) for value in values]
    assert mix(np.array(values)).tolist() == expected
    assert mix(torch.tensor(values)).tolist() == expected


@few
@given(whole, st.text(max_size=8), st.lists(st.integers(0, 2**40), max_size=3), st.integers(1, 20))
def test_a_draw_is_a_function_of_its_name(seed, purpose, place, count):
    draws, key = dd.Draws(seed, purpose), dd.Draws(seed, purpose).key(*place)
    words = [splitmix((key + k * GAMMA) & MASK) for k in range(1, count + 1)]
    assert [int(word) & MASK for word in draws.bits(count, *place)] == words
    # nothing drawn before, more or fewer, changes a draw
    for other in ((1, 2), (), tuple(place)):
        draws.normals(3, *other)
        draws.permutation(5, *other)
    assert draws.bits(count + 7, *place)[:count].tolist() == draws.bits(count, *place).tolist()
    assert draws.uniform(*place) == draws.uniforms(count, *place)[0]
    assert draws.integer(10, *place) == draws.integers(10, count, *place)[0]
    assert (draws.generator(*place).random(3) == draws.generator(*place).random(3)).all()


def test_names_that_differ_give_unlike_draws():
    places = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2, 3), (3, 2)]
    keys = {dd.Draws(seed, purpose).key(*p) for seed in (0, 1, -1) for purpose in ("a", "b") for p in places}
    assert len(keys) == 3 * 2 * len(places)
    # neighbours are uncorrelated: of 2000 products of standard normals the mean is 1/sqrt(2000) = 0.022 off zero
    draws = dd.Draws(0, "noise")
    rows = [np.array([draws.normals(1, *place)[0] for place in places]) for places in NEIGHBOURS]
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.09


NEIGHBOURS = ([(0, k) for k in range(2000)], [(1, k) for k in range(2000)], [(0, k + 1) for k in range(2000)][::-1])


def test_moments_of_uniforms_and_normals():
    draws, count = dd.Draws(3, "test"), 200_000
    u, z = draws.uniforms(count, 1), draws.normals(count, 2)
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    assert u.mean() == pytest.approx(1 / 2, abs=0.003) and u.var() == pytest.approx(1 / 12, abs=0.001)
    assert z.mean() == pytest.approx(0, abs=0.01) and z.var() == pytest.approx(1, abs=0.015)
    assert (z**3).mean() == pytest.approx(0, abs=0.04) and (z**4).mean() == pytest.approx(3, abs=0.1)
    # each name's first draw, too: that is what speeds and server draws use
    firsts = np.array([draws.uniform(worker, draw) for worker in range(50) for draw in range(400)])
    assert firsts.mean() == pytest.approx(1 / 2, abs=0.01) and firsts.var() == pytest.approx(1 / 12, abs=0.003)


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 64])
def test_integers_cover_their_range_evenly(bound):
    counts = np.bincount(dd.Draws(0, "test").integers(bound, 64_000, bound), minlength=bound)
    expected = 64_000 / bound
    assert len(counts) == bound and np.abs(counts - expected).max() < 5 * math.sqrt(expected)


def test_permutations_are_permutations_and_all_of_them_come():
    draws = dd.Draws(0, "test")
    seen = [tuple(draws.permutation(3, k).tolist()) for k in range(600)]
    assert all(sorted(order) == [0, 1, 2] for order in seen)
    assert all(60 < seen.count(order) < 140 for order in set(seen)) and len(set(seen)) == 6


@pytest.mark.parametrize(("std", "mean", "sd"), [(1.0, 1.28760, 0.79353), (5.0, 4.37537, 3.19868)])
def test_truncated_normal_speeds(std, mean, sd):
    # I-25: with a = -1/std and h = phi(a) / (1 - Phi(a)), mean 1 + std h and variance std^2 (1 + a h - h^2)
    a = -1 / std
    h = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi) / (1 - (1 + math.erf(a / math.sqrt(2))) / 2)
    assert 1 + std * h == pytest.approx(mean, abs=1e-5)
    assert std * math.sqrt(1 + a * h - h**2) == pytest.approx(sd, abs=1e-5)
    n = 60_000
    speeds = dd.TruncatedNormalSpeeds(n, std=std, seed=1)
    s = np.array([speeds.seconds(worker, 0) for worker in range(n)])
    assert s.min() > 0
    assert s.mean() == pytest.approx(mean, abs=4 * sd / math.sqrt(n)) and s.std() == pytest.approx(sd, rel=0.015)
    # once per worker, named by the worker: neither the draw nor the number of others matters
    three = dd.TruncatedNormalSpeeds(3, std=std, seed=1)
    assert [three.seconds(i, 5, 9.0) for i in range(3)] == s[:3].tolist()
    assert three.seconds(0, 0) != dd.TruncatedNormalSpeeds(3, std=std, seed=2).seconds(0, 0)


@pytest.mark.parametrize(
    "speeds",
    [dd.ExponentialSpeeds([2.0, 6.0]), dd.LognormalSpeeds([2.0, 6.0], sigma=0.5), dd.ParetoSpeeds([2.0, 6.0], shape=4.0)],
    ids=dd.label,
)
def test_random_speeds_have_the_given_means(speeds):
    for worker, mean in enumerate([2.0, 6.0]):
        s = np.array([speeds.seconds(worker, draw) for draw in range(20_000)])
        assert s.min() > 0 and s.mean() == pytest.approx(mean, rel=0.03) and len(set(s[:100])) == 100


@pytest.mark.parametrize(
    ("workers", "alpha", "chance"), [(30, 0.05, 0.6536), (10, 0.1, 0.3993), (30, 0.1, 0.4670), (10, 0.5, 0.0292)]
)
def test_dirichlet_split_is_multinomial(workers, alpha, chance):
    # I-24: a worker's share of a class is Beta(alpha, (n-1) alpha), its count of N samples Beta-binomial, so
    # P(none) = B(alpha, (n-1) alpha + N) / B(alpha, (n-1) alpha)
    N, classes = 5000, 120
    rest, g = (workers - 1) * alpha, math.lgamma
    assert math.exp(g(rest + N) - g(alpha + rest + N) - g(rest) + g(alpha + rest)) == pytest.approx(chance, abs=5e-5)
    split = dirichlet(np.repeat(np.arange(classes), N), workers, alpha, seed=5, empty="error")
    counts = np.array([np.bincount(rows // N, minlength=classes) for rows in split])
    assert (counts.sum(0) == N).all() and (np.sort(np.concatenate(split)) == np.arange(classes * N)).all()
    pairs = workers * classes
    assert (counts == 0).mean() == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / pairs))
    # Var of the share: (1/n)(1 - 1/n) / (n alpha + 1)
    share = (1 - 1 / workers) / workers / (workers * alpha + 1)
    assert (counts / N).var() == pytest.approx(share, rel=0.2)


def test_a_worker_without_samples_is_never_kept_silently():
    labels = np.repeat(np.arange(10), 20)  # so few and so unlike that some of 30 workers get nothing
    kept = dirichlet(labels, 30, 0.05, empty="drop")
    assert len(kept) < 30 and min(map(len, kept)) > 0 and sum(map(len, kept)) == 200
    with pytest.raises(dd.BadInput, match="got no sample"):
        dirichlet(labels, 30, 0.05, empty="error")
    with pytest.raises(dd.BadInput, match="at best"):
        dirichlet(labels, 30, 0.05, empty="resample", minimum=10)
    assert min(map(len, dirichlet(labels, 4, 1.0, empty="resample", minimum=10))) >= 10


def test_plain_splits_deal_every_sample_once():
    labels = np.arange(103) % 5
    for split in (iid(labels, 4), by_label(labels, 4)):
        assert sorted(np.concatenate(split)) == list(range(103)) and {len(rows) for rows in split} == {25, 26}
    assert [len(set(labels[rows])) for rows in iid(labels, 4)] == [5, 5, 5, 5]
    assert max(len(set(labels[rows])) for rows in by_label(labels, 4)) == 2


def test_a_minibatch_is_the_same_whoever_asks_when():
    one, two = (dd.Logistic(workers=3, samples=50, batch_size=4, seed=7) for _ in range(2))
    names = [(worker, draw) for worker in range(3) for draw in (0, 1, 31, 32, 33, 100)]
    forward = {name: one.indices(*name).tolist() for name in names}
    assert forward == {name: two.indices(*name).tolist() for name in reversed(names)}
    assert len({tuple(rows) for rows in forward.values()}) == len(names)
    expected = dd.Draws(7, "minibatch").integers(50, 4, 2, 33).tolist()
    assert forward[2, 33] == expected
    pooled = [row for draw in range(1000) for row in one.indices(0, draw).tolist()]
    assert set(pooled) == set(range(50)) and np.bincount(pooled).std() < 2 * math.sqrt(80)

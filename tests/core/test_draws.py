"""Random numbers named by seed, purpose and place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core.draws import integers_at, mix
from helpers import few

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
words = st.integers(-(2**63), 2**63 - 1)
places = st.lists(st.integers(0, 2**40), max_size=3)


def signed(value):
    return (value & MASK) - ((value & MASK) >> 63 << 64)


def splitmix(z):
    """Steele, Lea and Flood's mixing function in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@few
@given(st.lists(words, min_size=1, max_size=50))
def test_numpy_torch_and_plain_integers_agree(values):
    # the published generator's first word from seed 0 is 0xE220A8397B1DCDAF
    values, expected = [*values, signed(GAMMA)], [*(signed(splitmix(v & MASK)) for v in values), signed(0xE220A8397B1DCDAF)]
    assert mix(np.array(values)).tolist() == mix(torch.tensor(values)).tolist() == expected


@few
@given(words, st.text(max_size=8), places, st.integers(1, 20))
def test_a_draw_is_a_function_of_its_name(seed, purpose, place, count):
    draws = dd.Draws(seed, purpose)
    key = draws.key(*place)
    expected = [signed(splitmix((key + k * GAMMA) & MASK)) for k in range(1, count + 1)]
    assert draws.bits(count, *place).tolist() == expected
    draws.normals(3, *place)
    draws.permutation(5)
    assert draws.bits(count + 7, *place)[:count].tolist() == expected, "neither earlier draws nor their number matter"
    assert draws.uniform(*place) == draws.uniforms(count, *place)[0]
    assert draws.integer(10, *place) == draws.integers(10, count, *place)[0]
    assert draws.tables(10, count, [place, (1,)])[0].tolist() == draws.integers(10, count, *place).tolist()


@few
@given(
    st.lists(st.tuples(words, st.integers(1, 2**31), st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1),
    st.integers(1, 40),
)
def test_integers_at_many_places_are_those_of_each_place(at, count):
    seeds, bounds, *coordinates = zip(*at, strict=True)
    draws = [dd.Draws(seed, "minibatch") for seed in seeds]
    bases = torch.tensor([one.base for one in draws])
    found = integers_at(bases, torch.tensor(bounds), count, *map(torch.tensor, coordinates))
    expected = [d.integers(bound, count, *place) for d, bound, *place in zip(draws, bounds, *coordinates, strict=True)]
    assert np.array_equal(found.numpy(), np.stack(expected))


def test_different_names_give_independent_draws():
    several = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2, 3), (3, 2)]
    keys = {dd.Draws(seed, purpose).key(*p) for seed in (0, 1, -1) for purpose in ("a", "b") for p in several}
    assert len(keys) == 3 * 2 * len(several)
    # neighbours are uncorrelated: the mean of 2000 products of standard normals has standard deviation 0.022
    rows = [[dd.Draws(0, "noise").normals(1, worker, draw)[0] for draw in range(2000)] for worker in range(3)]
    rows.append(np.roll(rows[0], 1))
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 0.09


def test_uniforms_and_normals_have_their_moments():
    draws, count = dd.Draws(3, "test"), 200_000
    firsts = np.array([draws.uniform(worker, draw) for worker in range(50) for draw in range(400)])  # one for each name
    for u in (draws.uniforms(count, 1), firsts):
        assert 0 < u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
        assert u.mean() == pytest.approx(1 / 2, abs=5 * math.sqrt(1 / 12 / len(u)))
        assert u.var() == pytest.approx(1 / 12, abs=5 * math.sqrt((1 / 80 - 1 / 144) / len(u)))
    z = draws.normals(count, 2)
    # E z^k is 0, 1, 0, 3 for k = 1..4, and z^k has the variance E z^2k - (E z^k)^2 = 1, 2, 15, 96
    for k, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        assert (z**k).mean() == pytest.approx(mean, abs=5 * math.sqrt(variance / count))


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 64])
def test_integers_and_permutations_cover_their_range_evenly(bound):
    draws = dd.Draws(0, "test")
    firsts = [draws.permutation(bound, k)[0] for k in range(3200)]
    assert sorted(draws.permutation(bound).tolist()) == list(range(bound))
    for values in (draws.integers(bound, 64_000, bound), firsts):
        counts, expected = np.bincount(values), len(values) / bound
        assert len(counts) == bound and np.abs(counts - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize("seed", [0.5, "0", None, 2**63, -(2**63) - 1])
def test_a_seed_that_is_no_whole_number_of_64_bits_is_refused(seed):
    with pytest.raises(dd.BadInput, match=r"seed is .*; expected a whole number"):
        dd.Draws(seed, "test")

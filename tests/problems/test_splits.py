"""How samples are dealt to workers: by the paper's Dirichlet rule, at random, by label, or as the user says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.problems.splits import deal, dirichlet

LABELS = np.repeat(np.arange(5), 40)


@given(alpha=st.floats(0.05, 50), workers=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.parametrize("empty", ["resample", "drop", "error"])
def test_the_dirichlet_split_deals_every_sample_once(empty: str, alpha: float, workers: int, seed: int) -> None:
    try:
        parts, again = (dirichlet(LABELS, workers, alpha, seed, empty=empty, minimum=3) for _ in range(2))
    except dd.BadInput as error:
        assert {"error": "no sample", "resample": "at best"}[empty] in str(error)
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert min(map(len, parts)) >= (3 if empty == "resample" else 1)
    assert len(parts) == workers or (empty == "drop" and len(parts) < workers)
    assert all(map(np.array_equal, parts, again))


@pytest.mark.parametrize(("workers", "alpha"), [(30, 0.05), (10, 0.1), (30, 0.1), (10, 0.5)])
def test_a_worker_gets_no_sample_of_a_class_as_often_as_the_multinomial_rule_says(workers: int, alpha: float) -> None:
    # a worker's share of a class is Beta(alpha, (n-1) alpha), its count of N samples Beta-binomial, so
    # P(none) = B(alpha, (n-1) alpha + N) / B(alpha, (n-1) alpha): 65%, 40%, 47% and 3%
    N, classes, rest, g = 5000, 120, (workers - 1) * alpha, math.lgamma
    chance = math.exp(g(rest + N) - g(alpha + rest + N) - g(rest) + g(alpha + rest))
    split = dirichlet(np.repeat(np.arange(classes), N), workers, alpha, seed=5, empty="error")
    assert (np.sort(np.concatenate(split)) == np.arange(classes * N)).all()
    counts = np.array([np.bincount(rows // N, minlength=classes) for rows in split])
    assert (counts == 0).mean() == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / counts.size))


def test_a_worker_without_samples_is_dropped_or_refused_and_never_kept() -> None:
    labels = np.repeat(np.arange(10), 20)  # so few, and alpha so small, that some of 30 workers get nothing
    kept = dirichlet(labels, 30, 0.05, empty="drop")
    assert len(kept) < 30 and min(map(len, kept)) > 0 and sum(map(len, kept)) == 200
    for empty, words in (("error", "got no sample"), ("resample", "at best")):
        with pytest.raises(dd.BadInput, match=words):
            dirichlet(labels, 30, 0.05, empty=empty)
    assert min(map(len, dirichlet(labels, 4, 1.0, empty="resample", minimum=10))) >= 10


@pytest.mark.parametrize(("workers", "alpha"), [(10, 0.5), (30, 0.05)])
def test_on_cifar_10_s_classes_the_sizes_of_workers_have_the_rule_s_mean_and_variance(workers: int, alpha: float) -> None:
    # a worker's count of a class of N is Beta-binomial(N, alpha, (n-1) alpha): mean N/n and, as the ten classes are dealt
    # independently, variance of the size 10 N (1/n) (1 - 1/n) (n alpha + N) / (n alpha + 1)
    N, splits = 5000, 120
    labels = np.repeat(np.arange(10), N)
    sizes = np.array([[len(part) for part in deal(labels, workers, alpha, seed)] for seed in range(splits)])
    assert (sizes.sum(1) == 10 * N).all()
    errors = sizes.std(0, ddof=1) / np.sqrt(splits)
    assert (np.abs(sizes.mean(0) - 10 * N / workers) < 4.5 * errors).all()  # each worker's, over independent splits
    total = workers * alpha
    variance = 10 * N * (1 / workers) * (1 - 1 / workers) * (total + N) / (total + 1)
    squares = ((sizes - 10 * N / workers) ** 2).mean(1)
    assert squares.mean() == pytest.approx(variance, abs=4 * squares.std(ddof=1) / np.sqrt(splits))


def test_a_class_is_dealt_in_the_same_parts_whatever_the_order_of_the_samples() -> None:
    shuffled = LABELS[np.random.default_rng(0).permutation(len(LABELS))]
    for seed in range(5):
        counts, others = (
            [np.bincount(labels[part], minlength=5).tolist() for part in deal(labels, 6, 0.3, seed)]
            for labels in (LABELS, shuffled)
        )
        assert counts == others
    first, second, again = (deal(LABELS, 6, 0.3, 0, attempt=attempt) for attempt in (0, 1, 0))
    assert str(first) == str(again) != str(second)


@pytest.mark.parametrize("split", ["iid", "label", "own"])
def test_a_split_deals_digits_to_workers(split: str) -> None:
    own = [list(range(100)), [5, 5, 7], [1436]]
    problem = dd.Digits(workers=3, split=own if split == "own" else split, hidden=4, batch_size=2)
    pairs = [shard.pair for shard in problem.shards()]
    assert [len(targets) for _, targets in pairs] == ([100, 3, 1] if split == "own" else [479, 479, 479])
    if split == "own":
        assert torch.equal(pairs[1][0], pairs[0][0][[5, 5, 7]])
    elif split == "label":
        labels = torch.cat([targets for _, targets in pairs])
        assert torch.equal(labels, labels.sort().values)
    else:
        assert all(set(targets.tolist()) == set(range(10)) for _, targets in pairs)
    assert problem.fingerprint() != dd.Digits(workers=3, split="dirichlet", alpha=1.0, hidden=4, batch_size=2).fingerprint()


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_every_class_is_dealt_by_numpy_s_own_draws(workers: int) -> None:
    """For each class one draw of shares, then one of an owner for each sample: a recorded seed keeps its split."""
    labels, rng, owner = np.arange(300) % 7, dd.Draws(3, "split").generator(2), np.empty(300, dtype=np.int64)
    for label in range(7):
        members = np.flatnonzero(labels == label)
        owner[members] = rng.choice(workers, size=len(members), p=rng.dirichlet(np.full(workers, 0.5)))
    parts = deal(labels, workers, 0.5, 3, 2)
    assert [part.tolist() for part in parts] == [np.flatnonzero(owner == worker).tolist() for worker in range(workers)]
    assert all(part.dtype == np.int64 for part in parts)

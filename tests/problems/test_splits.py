"""How samples are dealt to workers: by the paper's Dirichlet rule, at random, by label, or as the user says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.problems.splits import deal, dirichlet, quantity, shards, split_samples, unseeded
from dualdelay.runs.names import describe, label, parse, rebuild

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
    for digit in range(7):
        members = np.flatnonzero(labels == digit)
        owner[members] = rng.choice(workers, size=len(members), p=rng.dirichlet(np.full(workers, 0.5)))
    parts = deal(labels, workers, 0.5, 3, 2)
    assert [part.tolist() for part in parts] == [np.flatnonzero(owner == worker).tolist() for worker in range(workers)]
    assert all(part.dtype == np.int64 for part in parts)


# the rules beside the paper's

TEXTS = ["dirichlet[alpha=0.5]", "iid", "label", "label_k[k=2]", "quantity[alpha=0.3]", "quantity[power=1.5]", "group"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("workers", [5, 8])
def test_every_sample_is_one_worker_s_and_no_worker_is_without_any(text: str, workers: int) -> None:
    labels = np.random.default_rng(0).integers(0, 5, 600)
    groups = np.arange(600) % 8
    parts = split_samples(labels, workers, text, 3, groups=groups)
    assert len(parts) == workers and min(map(len, parts)) > 0
    assert np.sort(np.concatenate(parts)).tolist() == list(range(600))
    assert all(part.dtype == np.int64 for part in parts)
    seeded = text not in ("label", "group")
    again, other = (split_samples(labels, workers, text, seed, groups=groups) for seed in (3, 4))
    assert str(again) == str(parts) and (str(other) != str(parts)) == seeded == (unseeded(text) == "")


@pytest.mark.parametrize(("workers", "k"), [(5, 2), (7, 3), (10, 1), (4, 10), (23, 2)])
def test_with_label_k_every_worker_has_k_classes_and_every_class_as_many_workers(workers: int, k: int) -> None:
    labels = np.repeat(np.arange(10), 50)
    classes = [set(labels[part].tolist()) for part in split_samples(labels, workers, f"label_k[k={k}]", 1)]
    assert [len(own) for own in classes] == [k] * workers
    holders = [sum(label in own for own in classes) for label in range(10)]
    assert max(holders) - min(holders) <= 1
    sizes = [len(part) for part in split_samples(labels, workers, f"label_k[k={k}]", 1)]
    assert max(sizes) <= k * -(-50 // min(holders)) and min(sizes) >= k * (50 // max(holders))


def test_a_power_law_of_sizes() -> None:
    sizes = sorted((len(part) for part in quantity(range(10_000), 10, power=1.0, seed=2)), reverse=True)
    harmonic = sum(1 / rank for rank in range(1, 11))
    assert sizes == pytest.approx([1 + 9990 / rank / harmonic for rank in range(1, 11)], abs=1)
    orders = {str(np.argsort([len(part) for part in quantity(range(100), 4, power=1.0, seed=seed)])) for seed in range(8)}
    assert len(orders) > 1, "which worker has most is drawn"


def test_sizes_are_the_more_unequal_the_smaller_alpha_and_never_below_the_least() -> None:
    spreads = []
    for alpha in (0.1, 1.0, 1000.0):
        sizes = [len(part) for seed in range(20) for part in quantity(range(2000), 10, alpha=alpha, seed=seed, minimum=7)]
        assert min(sizes) >= 7
        spreads.append(np.std(sizes))
    assert spreads[0] > 2 * spreads[1] > 10 * spreads[2]


def test_quantity_deals_classes_as_they_are() -> None:
    labels = np.arange(20_000) % 4
    for part in quantity(labels, 5, power=0.5, seed=0):
        shares = np.bincount(labels[part], minlength=4) / len(part)
        assert np.abs(shares - 0.25).max() < 4.5 * np.sqrt(0.25 * 0.75 / len(part))


def test_a_large_alpha_is_nearly_iid() -> None:
    labels = np.repeat(np.arange(5), 2000)
    counts = np.array(
        [np.bincount(labels[part], minlength=5) for part in split_samples(labels, 4, "dirichlet[alpha=1000]")]
    )
    assert np.abs(counts / 2000 - 0.25).max() < 0.06  # five of the deviations of the shares and the draws together


def test_groups_are_workers_or_are_dealt_whole() -> None:
    groups = np.array(["b", "a", "c", "a", "b", "a", "d"])
    assert [part.tolist() for part in split_samples(groups, None, "group", groups=groups)] == [[0, 4], [1, 3, 5], [2], [6]]
    parts = split_samples(groups, 2, "group", groups=groups)
    assert [sorted(set(groups[part].tolist())) for part in parts] == [["a", "d"], ["b", "c"]]


GROUPS = ["south", "north", "south", "east", "north", "south"]


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, pl.Series, lambda names: pd.Series(names, dtype="category")])
def test_groups_are_workers_in_the_order_in_which_they_appear_and_are_named(kind: Any) -> None:
    parts = shards((torch.arange(6.0).view(6, 1), torch.arange(6)), split="group", groups=kind(GROUPS))
    assert [part[1].tolist() for part in parts] == [[0, 2, 5], [1, 4], [3]]
    assert parts.groups == [["south"], ["north"], ["east"]]
    problem = dd.Network(torch.nn.Linear(1, 6), torch.nn.functional.cross_entropy, parts, 2)
    assert problem.groups == problem.reseeded(3).groups == parts.groups
    two = shards((torch.arange(6.0).view(6, 1), torch.arange(6)), 2, "group", groups=kind(GROUPS))
    assert two.groups == [["south"], ["north", "east"]] and [len(part[1]) for part in two] == [3, 3]
    assert shards(torch.ones(6, 1), 2, "iid", groups=kind(GROUPS)).groups is None


@pytest.mark.parametrize(
    "groups",
    [
        ["b", None, "a", None],
        ["b", math.nan, "a", math.nan],
        [1.0, math.nan, 2.0, math.nan],
        np.array([1.0, math.nan, 2.0, math.nan]),
        np.array(["b", math.nan, "a", None], dtype=object),
        np.array(["2024-05-01", "NaT", "2024-05-02", "NaT"], dtype="datetime64[D]"),
        torch.tensor([1.0, math.nan, 2.0, math.nan]),
        pd.Series(["b", None, "a", None]),
        pd.Series([1, None, 2, None], dtype="Int64"),
        pd.Series(["b", pd.NA, "a", pd.NA], dtype="string"),
        pl.Series(["b", None, "a", None]),
    ],
    ids=lambda groups: f"{type(groups).__module__} {getattr(groups, 'dtype', groups)}",
)
def test_a_column_in_which_entries_are_missing_is_refused_with_how_many_and_where(groups: Any) -> None:
    words = "has no value for 2 of 4 samples, the first of them number 1; expected one for each. Leave these samples out"
    with pytest.raises(dd.BadInput, match=f"groups {words}"):
        split_samples(range(4), None, "group", groups=groups)
    for split in ("dirichlet[alpha=1]", "label", "label_k[k=1]"):
        with pytest.raises(dd.BadInput, match=f"labels {words}"):
            split_samples(groups, 2, split)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 1] * 5, 2, "lable_k"), "split is 'lable_k'; did you mean 'label_k'"),
        (([0, 1] * 5, 2, "label_k[c=2]"), "label_k has no parameter 'c'"),
        (([0, 1] * 5, 2, "label_k[k=3]"), "k is 3; expected a whole number, 1..2"),
        ((list(range(10)), 2, "label_k[k=2]"), "would leave classes to nobody.*at least 5"),
        (([0, 0, 0, 1], 3, "label_k[k=2]"), "class 1 has 1 samples for 3 workers"),
        (([0, 1] * 5, 2, "quantity[power=0]"), "power is 0; expected a finite number above zero"),
        (([0, 1] * 5, 2, "quantity[minimum=6]"), "10 samples are too few for 2 workers with 6"),
        (([0, 1] * 5, 2, "group"), "needs groups="),
        (([0, 1] * 5, None, "iid"), "needs workers"),
        (([], 2, "iid"), "labels is empty"),
        (([[0, 1]], 2, [[0], [1]]), r"names samples outside 0\.\.0"),
        ((np.zeros((3, 2)), 2, "iid"), "one dimension"),
        ((5, 2, "iid"), "labels is 5; expected a list"),
    ],
)
def test_a_split_that_cannot_be_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        split_samples(*arguments)


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(dd.BadInput, match="groups has 3 entries for 4 samples"):
        split_samples(range(4), None, "group", groups=[0, 1, 2])
    with pytest.raises(dd.BadInput, match=r"groups has an entry that cannot name a group .* expected texts or numbers"):
        split_samples(range(2), None, "group", groups=[["a"], ["b"]])
    with pytest.raises(dd.BadInput, match="2 groups for 3 workers"):
        split_samples(range(4), 3, "group", groups=[0, 1, 0, 1])


@pytest.mark.parametrize("split", ["label_k[k=2]", "quantity[power=1]", "dirichlet[alpha=2]"])
def test_a_split_by_its_text_in_a_problem_s_text(split: str) -> None:
    problem = parse("problem", f"digits[workers=6,split={split},hidden=4]")
    assert label(problem) == f"digits[workers=6,split={split},hidden=4]"
    assert rebuild("problem", describe(problem)).fingerprint() == problem.fingerprint() == problem.reseeded(0).fingerprint()
    assert problem.reseeded(1).fingerprint() != problem.fingerprint() and problem.unseeded == ""
    assert sum(problem.samples(worker) for worker in range(6)) == 1437
    if split == "dirichlet[alpha=2]":
        assert problem.fingerprint() == dd.Digits(workers=6, alpha=2, hidden=4).fingerprint()


# the user's own data


def test_own_data_of_any_structure_are_dealt() -> None:
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
    for data in ((x, y), (x.numpy(), y.numpy()), {"x": x, "y": y}, x, TensorDataset(x, y)):
        parts = shards(data, 3, "label", labels=y)
        assert len(parts) == 3 and all(type(part) is type(data) or isinstance(part, Subset) for part in parts)
        for number, part in enumerate(parts):
            rows = part[0] if isinstance(part, tuple) else part["x"] if isinstance(part, dict) else part
            rows = torch.stack([row[0] for row in rows]) if isinstance(part, Subset) else torch.as_tensor(rows)
            assert torch.equal(rows, x[y == number])


def test_data_in_one_another_are_dealt_by_their_rows() -> None:
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
    data = ({"color": x, "numbers": (x.numpy(), y)}, y)
    for number, (inputs, targets) in enumerate(parts := shards(data, 3, "label")):
        rows = y == number
        assert torch.equal(inputs["color"], x[rows]) and torch.equal(inputs["numbers"][1], y[rows])
        assert (inputs["numbers"][0] == x[rows].numpy()).all() and torch.equal(targets, y[rows])

    def step(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(model(inputs["color"] + inputs["numbers"][0]), targets)

    assert dd.Network(torch.nn.Linear(2, 3), shards=parts, batch_size=2, step=step).samples(0) == 4
    with pytest.raises(dd.BadInput, match="columns of 12, 12, 11, 12 rows"):
        shards(({"color": x, "numbers": (x, y[:11])}, y), 3, "label")


def test_own_data_become_a_problem_in_one_call() -> None:
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    sites = np.repeat(["south", "west", "north"], 20)
    for split, groups in (("dirichlet[alpha=1,minimum=1]", None), ("group", sites)):
        parts = shards((x, y), None if groups is not None else 3, split, groups=groups)
        problem = dd.Network(torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy, parts, 4)
        run = dd.simulate(dd.DuDe(0.1), problem, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=5)
        assert run.version == 5 and sum(problem.samples(worker) for worker in range(3)) == 60


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (torch.ones(4, 2), {"workers": 2}, "give labels="),
        ((torch.ones(4, 2), torch.rand(4)), {"workers": 2}, "give labels="),
        ((torch.ones(4, 2), torch.ones(3)), {"workers": 2}, "columns of 4, 3 rows"),
        ((torch.ones(4, 2), torch.ones(4)), {"workers": 2, "labels": [0, 1]}, "labels has 2 entries for 4 samples"),
        (torch.tensor(1.0), {"workers": 2}, "expected tensors or arrays"),
        (5, {"workers": 2}, "expected tensors or arrays"),
    ],
)
def test_own_data_that_cannot_be_dealt_are_refused(data: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(dd.BadInput, match=words):
        shards(data, **options)

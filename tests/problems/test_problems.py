"""Exact problems are what their formulas are, a fingerprint tells problems apart, and comparisons are paired."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.engine.evaluation import NAMES
from dualdelay.runs.names import label
from helpers import operations, rounding
from own import mlp, shards, three
from tables import LR


@pytest.mark.numeric
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), worker=st.integers(0, 3), draw=st.integers(0, 99))
def test_logistic_gradients_are_autograd_s_and_within_the_smoothness_bound(seed: int, worker: int, draw: int) -> None:
    problem = dd.problems.Logistic(workers=4, features=3, samples=12, batch_size=5, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, dtype=torch.float64, generator=rng) for _ in range(2))
    a, b = (part[problem.indices(worker, draw)] for part in problem._pairs[worker])
    x.requires_grad_()
    expected_loss = torch.log1p(torch.exp(-b * (a @ x))).mean() + 0.005 * x.dot(x)
    (expected,) = torch.autograd.grad(expected_loss, x)
    x.requires_grad_(False)
    (gradient, loss), close = problem.gradient(x, worker, draw), rounding(operations(problem, samples=12))
    assert (gradient - expected).norm() <= close * (a.norm(dim=1).mean() + x.norm())
    assert loss == pytest.approx(expected_loss.item(), rel=close, abs=0)
    at_x, at_y = (problem.measure(point, worker)["gradient"] for point in (x, y))
    assert (at_x - at_y).norm() <= problem.smoothness()[worker] * (x - y).norm() * (1 + close)


@pytest.mark.numeric
def test_at_an_optimum_the_gradient_is_zero() -> None:
    matrices = dd.Quadratic([[1.0, 0.0], [0.0, 2.0]], [[[2.0, 1.0], [1.0, 3.0]], 0.5])
    assert matrices.evaluate(matrices.optimum())["gradient_norm"] <= rounding(16) * 8  # the size of what cancels
    # (A_1 + A_2) x = A_1 c_1 + A_2 c_2 is [[2.5, 1], [1, 3.5]] x = [2, 2]
    assert matrices.optimum().tolist() == pytest.approx([5 / 7.75, 3 / 7.75])
    assert dd.Quadratic([[0.0], [6.0], [12.0]], [1.0, 2.0, 3.0]).optimum().tolist() == pytest.approx([8.0])  # 48 / 6
    for seed in range(5):
        problem = dd.problems.Logistic(seed=seed, heterogeneity=3.0)
        assert problem.evaluate(problem.optimum())["gradient_norm"] < 1e-12  # its documented accuracy


def network(**changes: Any) -> dd.Network:
    usual = {"model": mlp(), "loss": cross_entropy, "shards": shards(), "batch_size": 4, "test": shards()[0]}
    return dd.Network(**{**usual, **changes})


def touched(worker: int) -> list[Any]:
    data = shards()
    data[worker][0][3, 3] += 1
    return data


FINGERPRINTS: dict[str, Callable[[], dd.Problem]] = {
    "network": network,
    "one input": lambda: network(shards=touched(1)),
    "one target": lambda: network(shards=[*shards()[:2], (shards()[2][0], (shards()[2][1] + 1) % 3)]),
    "test data": lambda: network(test=touched(0)[0]),
    "held-out data": lambda: network(held_out=shards()),
    "batch size": lambda: network(batch_size=5),
    "seed": lambda: network(seed=1),
    "replacement": lambda: network(batch_size=dd.Batches(4, replacement=False)),
    "weights": lambda: network(weights="samples"),
    "stochastic": lambda: network(batch_size=dd.Batches(4, stochastic=True)),
    "full gradient": lambda: network(full_gradient=False),
    "local steps": lambda: dd.LocalSteps(network(), 2, 0.1),
    "local lr": lambda: dd.LocalSteps(network(), 2, 0.2),
    "clipped": lambda: dd.problems.Clipped(network(), 2.0),
    "clipping norm": lambda: dd.problems.Clipped(network(), 3.0),
    "exact": lambda: dd.problems.FullGradients(network()),
    "quadratic": lambda: dd.Quadratic([[0.0], [1.0]]),
    "quadratic centers": lambda: dd.Quadratic([[0.0], [2.0]]),
    "logistic": lambda: dd.problems.Logistic(workers=2),
    "logistic seed": lambda: dd.problems.Logistic(workers=2, seed=1),
    "digits": lambda: dd.Digits(workers=2, alpha=1.0),
    "digits alpha": lambda: dd.Digits(workers=2, alpha=2.0),
}


def test_fingerprints_change_with_data_and_settings_and_with_nothing_else() -> None:
    first, again = ({name: make().fingerprint() for name, make in FINGERPRINTS.items()} for _ in range(2))
    assert first == again
    names_of: dict[str, list[str]] = {}
    for name, fingerprint in first.items():
        names_of.setdefault(fingerprint, []).append(name)
    assert [names for names in names_of.values() if len(names) > 1] == []
    problem = network()
    dd.simulate(dd.DuDe(LR), problem, three, updates=5)
    assert problem.fingerprint() == first["network"]  # computing leaves no mark


def test_a_comparison_is_paired(tmp_path: Path) -> None:
    methods = [dd.DuDe(LR), dd.VanillaASGD(LR), dd.SyncSGD(LR), dd.MIFA(LR, active=2)]
    problem, speeds = dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=4), dd.speeds.ExponentialSpeeds([1.0, 2.0, 3.0])
    options = {"seeds": (0, 5), "time": 12.0, "evaluation": dd.Evaluation(seconds=4.0), "folder": tmp_path}
    table = dd.compare(methods, problem, speeds, **options)
    assert list(table) == ["algorithm", "seed", "method", "lr", *NAMES]
    assert [(row["algorithm"], row["seed"], row["time"]) for row in table.rows()] == [
        (label(method), seed, time) for seed in (0, 5) for method in methods for time in (0.0, 4.0, 8.0, 12.0)
    ]
    seconds: dict[tuple[int, int, int], set[float]] = {}  # by seed, worker and draw
    losses: dict[tuple[int, int], set[float]] = {}  # by seed and worker, of the first job, which is at the initial weights
    starts: dict[int, set[bytes]] = {0: set(), 5: set()}
    for folder in tmp_path.glob("*-seed*"):
        seed = int(folder.name.rpartition("seed")[2])
        starts[seed].add((folder / "start.safetensors").read_bytes())
        for row in dd.load(folder).trace.rows():
            seconds.setdefault((seed, row["worker"], row["draw"]), set()).add(row["seconds"])
            if row["draw"] == 0 and row["version"] == 0:
                losses.setdefault((seed, row["worker"]), set()).add(row["loss"])
    assert all(len(values) == 1 for values in (*seconds.values(), *losses.values(), *starts.values()))
    assert set(losses) == {(seed, worker) for seed in (0, 5) for worker in range(3)}
    assert starts[0] != starts[5] and losses[0, 1] != losses[5, 1] and seconds[0, 1, 0] != seconds[5, 1, 0]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/*")}
    again = dd.compare(methods, problem, speeds, **options)
    assert all(again[name].tolist() == table[name].tolist() for name in table)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/*")}
    assert after == before  # nothing was computed again

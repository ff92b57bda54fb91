"""Problems are what they say: gradients, splits, minibatches named by their job, and fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.engine.evaluation import NAMES
from dualdelay.runs.names import label
from flat import compare
from helpers import operations, rounding
from own import Scaled, mlp, shards, three
from tables import ALGORITHMS, CASES, LR

LABELS = np.repeat(np.arange(5), 40)


def cnn() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


class Tied(nn.Module):
    """Two layers with one weight, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), mlp()
        self.second.weight = self.first.weight
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(inputs))))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain_gradient(model: nn.Module, pair: Any) -> Tensor:
    """What torch gives a person who writes three lines."""
    model.zero_grad()
    cross_entropy(model(pair[0]), pair[1]).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trainable(model)])


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "scalar and frozen": Scaled, "tied and unused": Tied}


@pytest.mark.numeric
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_network_s_gradient_is_plain_autograd_s_bit_for_bit(make: Callable[[], nn.Module]) -> None:
    model, data = make(), shards()
    problem = dd.Network(model, cross_entropy, data, 5)
    x = problem.start(0)
    assert torch.equal(x, torch.cat([p.detach().reshape(-1) for p in trainable(model)]))
    for worker, draw in [(0, 0), (2, 7), (1, 3), (2, 7)]:
        rows = problem.indices(worker, draw)
        assert torch.equal(
            problem.gradient(x, worker, draw)[0], plain_gradient(model, [part[rows] for part in data[worker]])
        )


@pytest.mark.numeric
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_final_model_loads_into_the_user_s_module(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    problem = dd.Network(model, cross_entropy, shards(), 5, test=shards()[0])
    run = dd.simulate(dd.DuDe(0.1), problem, three, updates=20, folder=tmp_path / "run")
    assert all(torch.equal(tensor, given[name]) for name, tensor in model.state_dict().items())  # the user's is untouched
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in trainable(model)]), run.x)
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, given[name])
        assert moved == (parameter.requires_grad and name != "spare"), name
    losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in shards()]
    close = rounding(operations(problem, samples=28), torch.float32)
    assert run.metrics.objective[-1] == pytest.approx(np.mean(losses), rel=close, abs=0)
    assert run.metrics.pooled_loss[-1] == pytest.approx(np.average(losses, weights=[20, 24, 28]), rel=close, abs=0)
    inputs, targets = shards()[0]
    assert run.metrics.accuracy[-1] == int((model(inputs).argmax(1) == targets).sum()) / 20
    rest = dd.simulate(
        dd.DuDe(0.1), problem, three, updates=0, server=dd.Server(initial_weights=tmp_path / "run" / "model.safetensors")
    )
    assert torch.equal(rest.x, run.x)


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_workers_full_gradients_average_to_that_of_the_objective(weights: str) -> None:
    data = shards()
    sizes = [len(inputs) for inputs, _ in data]
    # a permutation of all samples without replacement is the full batch
    problem = dd.Network(
        mlp().double(), cross_entropy, [(x.double(), y) for x, y in data], sizes, replacement=False, weights=weights
    )
    x = problem.start(0)
    mean = torch.stack([problem.gradient(x, worker, 0)[0] for worker in range(3)]).mean(0)
    model, found = mlp().double(), problem.evaluate(x)
    losses = [cross_entropy(model(inputs.double()), targets) for inputs, targets in data]
    pooled = cross_entropy(model(torch.cat([i for i, _ in data]).double()), torch.cat([t for _, t in data]))
    expected = pooled if weights == "samples" else sum(losses) / 3
    gradient = torch.cat([p.reshape(-1) for p in torch.autograd.grad(expected, trainable(model))])
    close = rounding(operations(problem, samples=sum(sizes)))
    assert (mean - gradient).norm() <= close * gradient.norm()
    assert found["objective"] == pytest.approx(expected.item(), rel=close, abs=0)
    assert found["pooled_loss"] == pytest.approx(pooled.item(), rel=close, abs=0)
    assert found["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=close, abs=0)


@pytest.mark.numeric
def test_a_dataset_and_a_pair_of_tensors_are_the_same_data() -> None:
    pairs = shards()
    datasets = [TensorDataset(*pairs[0]), Subset(TensorDataset(*pairs[1]), range(24)), TensorDataset(*pairs[2])]
    one, other = (dd.Network(mlp(), cross_entropy, data, 4, test=data[0]) for data in (pairs, datasets))
    runs = [dd.simulate(dd.DuDe(LR), problem, three, updates=10) for problem in (one, other)]
    assert torch.equal(runs[0].x, runs[1].x)
    close = rounding(operations(one, samples=sum(len(pair[0]) for pair in pairs)), torch.float32)
    for name in runs[0].metrics:  # pairs of several workers are evaluated in one call, in another order of summation
        assert runs[0].metrics[name].tolist() == pytest.approx(runs[1].metrics[name].tolist(), rel=close, abs=0)


@pytest.mark.parametrize("replacement", [True, False])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(jobs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_job_s_minibatch_is_a_function_of_its_name(jobs: list[tuple[int, int]], seed: int, replacement: bool) -> None:
    data = shards()
    problem = dd.Network(mlp(), cross_entropy, data, [3, 5, 20], seed=seed, replacement=replacement)
    other = dd.Network(mlp(), cross_entropy, data, [3, 5, 20], seed=seed, replacement=replacement)
    first = {job: problem.indices(*job) for job in jobs}
    for job in reversed(jobs):
        rows = other.indices(*job)
        assert torch.equal(rows, first[job])
        assert rows.shape == ([3, 5, 20][job[0]],)
        assert 0 <= rows.min() <= rows.max() < len(data[job[0]][0])
        assert replacement or len(set(rows.tolist())) == len(rows)


def test_the_same_job_meets_the_same_minibatch_under_every_method() -> None:
    class Watched(dd.Network):
        seen: dict[tuple[int, int], list[int]]

        def indices(self, worker: int, draw: int) -> Tensor:
            rows = super().indices(worker, draw)
            assert self.__dict__.setdefault("seen", {}).setdefault((worker, draw), rows.tolist()) == rows.tolist()
            return rows

    problem = Watched(mlp(), cross_entropy, shards(), 4)
    for name in ALGORITHMS:
        dd.simulate(ALGORITHMS[name], problem, three, updates=8)
    assert len(problem.seen) > 12


@pytest.mark.parametrize("given", ["tensor", "state dict", "path"])
def test_a_run_starts_from_the_weights_it_is_given(given: str, tmp_path: Path) -> None:
    problem = dd.Network(mlp, cross_entropy, shards(), 4)
    first = dd.simulate(dd.DuDe(LR), problem, three, updates=7, folder=tmp_path / "first")
    start = {"tensor": first.x, "state dict": first.state_dict(), "path": tmp_path / "first" / "model.safetensors"}[given]
    kept = first.x.clone()
    second = dd.simulate(
        dd.VanillaASGD(LR),
        problem,
        three,
        updates=7,
        server=dd.Server(initial_weights=start),
        evaluation=dd.Evaluation(every=1),
    )
    assert second.metrics.objective[0] == first.metrics.objective[-1]
    assert torch.equal(first.x, kept)
    assert not torch.equal(second.x, kept)


@given(alpha=st.floats(0.05, 50), workers=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.parametrize("empty", ["resample", "drop", "error"])
def test_the_dirichlet_split_deals_every_sample_once(empty: str, alpha: float, workers: int, seed: int) -> None:
    from dualdelay.problems.splits import dirichlet

    try:
        parts = dirichlet(LABELS, workers, alpha, seed, empty=empty, minimum=3)
    except dd.BadInput as error:
        assert (empty == "error" and "no sample" in str(error)) or (empty == "resample" and "at best" in str(error))
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert all(len(part) >= (3 if empty == "resample" else 1) for part in parts)
    assert len(parts) == workers or (empty == "drop" and len(parts) < workers)
    assert [p.tolist() for p in parts] == [
        p.tolist() for p in dirichlet(LABELS, workers, alpha, seed, empty=empty, minimum=3)
    ]


@pytest.mark.parametrize("split", ["iid", "label", "own"])
def test_a_split_deals_digits_to_workers(split: str) -> None:
    own = [list(range(100)), [5, 5, 7], [1436]]
    problem = dd.Digits(workers=3, split=own if split == "own" else split, hidden=4, batch_size=2)
    sizes = [1 + max(int(problem.indices(worker, draw).max()) for draw in range(3000)) for worker in range(3)]
    assert sizes == ([100, 3, 1] if split == "own" else [479, 479, 479])
    assert problem.fingerprint() != dd.Digits(workers=3, split="dirichlet", alpha=1.0, hidden=4, batch_size=2).fingerprint()


@pytest.mark.numeric
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), worker=st.integers(0, 3), draw=st.integers(0, 99))
def test_logistic_gradients_are_autograd_s_and_within_the_smoothness_bound(seed: int, worker: int, draw: int) -> None:
    problem = dd.problems.Logistic(workers=4, features=3, samples=12, batch_size=5, seed=seed)
    full = dd.problems.Logistic(workers=4, features=3, samples=12, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, dtype=torch.float64, generator=rng) for _ in range(2))
    a, b = (part[problem.indices(worker, draw)] for part in problem._pairs[worker])
    x.requires_grad_()
    loss = torch.log1p(torch.exp(-b * (a @ x))).mean() + 0.005 * x.dot(x)
    (gradient, found), close = problem.gradient(x.detach(), worker, draw), rounding(operations(problem, samples=12))
    assert (gradient - torch.autograd.grad(loss, x)[0]).norm() <= close * (a.norm(dim=1).mean() + x.norm())
    assert found == pytest.approx(loss.item(), rel=close, abs=0)
    gradients = [full._on(point.detach(), *full._pairs[worker])[1] for point in (x, y)]
    assert (gradients[0] - gradients[1]).norm() <= full.smoothness()[worker] * (x - y).norm() * (1 + close)


@pytest.mark.numeric
def test_at_an_optimum_the_gradient_is_zero() -> None:
    matrices = dd.Quadratic([[1.0, 0.0], [0.0, 2.0]], [[[2.0, 1.0], [1.0, 3.0]], 0.5])
    assert matrices.evaluate(matrices.optimum())["gradient_norm"] <= rounding(16) * 8  # the size of what cancels
    # (A_1 + A_2) x = A_1 c_1 + A_2 c_2 is [[2.5, 1], [1, 3.5]] x = [2, 2]
    assert matrices.optimum().tolist() == pytest.approx([5 / 7.75, 3 / 7.75])
    assert dd.Quadratic([[0.0], [6.0], [12.0]], [1.0, 2.0, 3.0]).optimum().tolist() == pytest.approx([8.0])
    for seed in range(5):
        problem = dd.problems.Logistic(seed=seed, heterogeneity=3.0)
        assert problem.evaluate(problem.optimum())["gradient_norm"] < 1e-12  # which it is said to reach


@pytest.mark.numeric
@pytest.mark.parametrize("case", ["q3", "noisy", "logistic", "digits"])
def test_one_local_step_is_the_plain_problem(case: str) -> None:
    problem, speeds = CASES[case]
    runs = [dd.simulate(dd.DuDe(LR), p, speeds, updates=12) for p in (problem, dd.LocalSteps(problem, 1, 0.3))]
    assert torch.equal(runs[0].x, runs[1].x)
    assert all(runs[0].trace[name].tolist() == runs[1].trace[name].tolist() for name in ("time", "worker", "draw", "loss"))


@pytest.mark.numeric
@pytest.mark.parametrize("k", [2, 5])
@pytest.mark.parametrize("case", ["noisy", "logistic", "digits"])
def test_local_steps_report_how_far_they_went_with_named_minibatches(case: str, k: int) -> None:
    inner = CASES[case][0]
    problem = dd.LocalSteps(inner, k, 0.25)
    x = problem.start(3)
    for worker, m in [(0, 0), (2, 3)]:
        y, losses = x.clone(), []
        for j in range(k):
            gradient, loss = inner.gradient(y, worker, m * k + j)
            y = y - 0.25 * gradient
            losses.append(loss)
        value, loss = problem.gradient(x, worker, m)
        # y is rounded at each step, to last digits of x that are four times as large in the difference over 1/4
        close = rounding(2 * k + 2, x.dtype) * (4 * x.abs().max() + value.abs().max())
        assert float((value - (x - y) / 0.25).abs().max()) <= close
        assert loss == pytest.approx(np.mean(losses), rel=rounding(2 * k), abs=0)
        assert problem.batches(worker) == k
        if case != "noisy":
            assert problem.indices(worker, m).tolist() == [inner.indices(worker, m * k + j).tolist() for j in range(k)]
    assert torch.equal(x, problem.start(3))


def network(**changes: Any) -> dd.Network:
    given = {"model": mlp(), "loss": cross_entropy, "shards": shards(), "batch_size": 4, "test": shards()[0], **changes}
    return dd.Network(**given)


def touched(place: int) -> list[Any]:
    data = shards()
    data[place][0][3, 3] += 1
    return data


FINGERPRINTS: dict[str, Callable[[], dd.Problem]] = {
    "network": network,
    "one input": lambda: network(shards=touched(1)),
    "one target": lambda: network(shards=[*shards()[:2], (shards()[2][0], (shards()[2][1] + 1) % 3)]),
    "test data": lambda: network(test=touched(0)[0]),
    "batch size": lambda: network(batch_size=5),
    "seed": lambda: network(seed=1),
    "replacement": lambda: network(replacement=False),
    "weights": lambda: network(weights="samples"),
    "stochastic": lambda: network(stochastic=True),
    "full gradient": lambda: network(full_gradient=False),
    "local steps": lambda: dd.LocalSteps(network(), 2, 0.1),
    "local lr": lambda: dd.LocalSteps(network(), 2, 0.2),
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
    same = {name: [other for other in first if first[other] == first[name] and other != name] for name in first}
    assert {name: others for name, others in same.items() if others} == {}
    problem = network()
    before = problem.fingerprint()
    dd.simulate(dd.DuDe(LR), problem, three, updates=5)
    assert problem.fingerprint() == before  # computing leaves no mark


def test_a_comparison_is_paired(tmp_path: Path) -> None:
    methods = [dd.DuDe(LR), dd.VanillaASGD(LR), dd.SyncSGD(LR), dd.MIFA(LR, active=2)]
    problem, speeds = dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=4), dd.speeds.ExponentialSpeeds([1.0, 2.0, 3.0])
    options = {"seeds": (0, 5), "time": 12.0, "evaluate_seconds": 4.0, "folder": tmp_path}
    table = compare(methods, problem, speeds, **options)
    assert list(table) == ["algorithm", "seed", *NAMES]
    assert [(row["algorithm"], row["seed"], row["time"]) for row in table.rows()] == [
        (label(method), seed, time) for seed in (0, 5) for method in methods for time in (0.0, 4.0, 8.0, 12.0)
    ]
    jobs: dict[tuple[int, int, int], set[Any]] = {}
    starts: dict[int, set[bytes]] = {0: set(), 5: set()}
    for folder in tmp_path.glob("*-seed*"):
        seed = int(folder.name.rpartition("seed")[2])
        starts[seed].add((folder / "start.safetensors").read_bytes())
        for row in dd.replay(folder).trace.rows():
            # the first job of each worker is at the initial weights, so an equal loss means an equal minibatch
            loss = row["loss"] if row["version"] == 0 else None
            jobs.setdefault((seed, row["worker"], row["draw"]), set()).add((row["seconds"], loss))
    assert [len(found) for found in starts.values()] == [1, 1]
    assert starts[0] != starts[5]
    assert all(len({seconds for seconds, _ in found}) == 1 for found in jobs.values())
    assert all(len(jobs[seed, worker, 0]) == 1 for seed in (0, 5) for worker in range(3))
    assert jobs[0, 1, 0] != jobs[5, 1, 0]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/*")}
    again = compare(methods, problem, speeds, **options)
    assert all(again[name].tolist() == table[name].tolist() for name in table)
    assert {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/*")
    } == before  # nothing was computed again

"""A network's gradients, minibatches and evaluation: numbers that a person gets from torch in three lines, or by hand."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
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
from helpers import ROUNDED, operations, rounding
from own import Jittered, Scaled, mlp, shards, three
from tables import ALGORITHMS, CASES, LR

PAIRS = shards()  # of 20, 24 and 28 samples
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 3.0])


def network(model: Any = mlp, data: Any = PAIRS, batch_size: Any = 4, **options: Any) -> dd.Network:
    return dd.Network(model, cross_entropy, data, batch_size, **options)


def losses_of(model: nn.Module) -> list[float]:
    """The workers' losses as torch gives them."""
    return [cross_entropy(model(inputs), targets).item() for inputs, targets in PAIRS]


# --- gradients and weights ---


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


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainable(model)])


def plain_gradient(model: nn.Module, pair: Any) -> Tensor:
    model.zero_grad()
    cross_entropy(model(pair[0]), pair[1]).backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trainable(model)])


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "scalar and frozen": Scaled, "tied and unused": Tied}


@pytest.mark.numeric
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_gradient_is_plain_autograd_s_bit_for_bit(make: Callable[[], nn.Module]) -> None:
    model = make()
    problem = network(model, batch_size=5)
    x = problem.start(0)
    assert torch.equal(x, flat_weights(model))
    for worker, draw in [(0, 0), (2, 7), (1, 3), (2, 7)]:
        rows = problem.indices(worker, draw)
        expected = plain_gradient(model, [part[rows] for part in PAIRS[worker]])
        assert torch.equal(problem.gradient(x, worker, draw)[0], expected)


@pytest.mark.numeric
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_final_model_loads_into_the_user_s_module(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    problem, file = network(model, batch_size=5, test=PAIRS[0]), tmp_path / "run" / "model.safetensors"
    run = dd.simulate(dd.DuDe(0.1), problem, three, updates=20, folder=tmp_path / "run")
    assert all(torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())  # the user's is untouched
    model.load_state_dict(load_file(file))
    assert torch.equal(flat_weights(model), run.x)
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, initial[name])
        assert moved == (parameter.requires_grad and name != "spare"), name
    losses, close = losses_of(model), rounding(operations(problem, samples=28), torch.float32)
    assert run.metrics.objective[-1] == pytest.approx(np.mean(losses), rel=close, abs=0)
    assert run.metrics.pooled_loss[-1] == pytest.approx(np.average(losses, weights=[20, 24, 28]), rel=close, abs=0)
    inputs, targets = PAIRS[0]
    assert run.metrics.accuracy[-1] == int((model(inputs).argmax(1) == targets).sum()) / 20
    again = dd.simulate(dd.DuDe(0.1), problem, three, updates=0, server=dd.Server(initial_weights=file))
    assert torch.equal(again.x, run.x)


@pytest.mark.parametrize("kind", ["tensor", "state dict", "path"])
def test_a_run_starts_from_the_weights_it_is_given(kind: str, tmp_path: Path) -> None:
    first = dd.simulate(dd.DuDe(LR), network(), three, updates=7, folder=tmp_path / "first")
    weights = {"tensor": first.x, "state dict": first.state_dict(), "path": tmp_path / "first" / "model.safetensors"}[kind]
    before = first.x.clone()
    second = dd.simulate(dd.VanillaASGD(LR), network(), three, updates=7, server=dd.Server(initial_weights=weights))
    assert second.metrics.objective[0] == first.metrics.objective[-1]
    assert torch.equal(first.x, before) and not torch.equal(second.x, before)


# --- minibatches ---


@pytest.mark.parametrize("replacement", [True, False])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(jobs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_job_s_minibatch_is_a_function_of_its_name(jobs: list[tuple[int, int]], seed: int, replacement: bool) -> None:
    sizes = [3, 5, 20]
    problem, other = (network(batch_size=dd.Batches(sizes, replacement), seed=seed) for _ in range(2))
    first = {job: problem.indices(*job) for job in jobs}
    for job in reversed(jobs):
        rows = other.indices(*job)
        assert torch.equal(rows, first[job])
        assert rows.shape == (sizes[job[0]],)
        assert 0 <= rows.min() <= rows.max() < len(PAIRS[job[0]][0])
        assert replacement or len(set(rows.tolist())) == len(rows)


def test_the_same_job_meets_the_same_minibatch_under_every_method() -> None:
    seen: dict[tuple[int, int], list[int]] = {}

    class Watched(dd.Network):
        def indices(self, worker: int, draw: int) -> Tensor:
            rows = super().indices(worker, draw)
            assert seen.setdefault((worker, draw), rows.tolist()) == rows.tolist()
            return rows

    problem = Watched(mlp(), cross_entropy, PAIRS, 4)
    for algorithm in ALGORITHMS.values():
        dd.simulate(algorithm, problem, three, updates=8)
    assert len(seen) > 12


def test_the_minibatches_of_very_many_workers_have_the_same_names() -> None:
    data = [(torch.ones(9, 1), torch.ones(9, 1))] * 1100
    problem = dd.Network(nn.Linear(1, 1), nn.functional.mse_loss, data, 3, full_gradient=False)
    draws = dd.Draws(0, "minibatch")
    for worker in (*range(1100), 3, 1099):
        assert problem.indices(worker, 40).tolist() == draws.integers(9, 3, worker, 40).tolist()
    problem.indices(0, 0).zero_()  # what is given out may be written to
    assert problem.indices(0, 0).tolist() == draws.integers(9, 3, 0, 0).tolist()


def test_dropout_is_a_function_of_the_job_s_name_where_stochastic_is_set() -> None:
    problem = network(mlp(nn.Dropout(0.5)), batch_size=dd.Batches(4, stochastic=True))
    x = problem.start(0)
    jobs = [(worker, draw) for worker in range(3) for draw in range(4)]
    first = {job: problem.gradient(x, *job)[0] for job in jobs}
    torch.manual_seed(123)
    assert all(torch.equal(problem.gradient(x, *job)[0], first[job]) for job in reversed(jobs))
    assert len({tuple((gradient == 0).tolist()) for gradient in first.values()}) > 1  # not always the same are dropped
    assert problem.evaluate(x) == problem.evaluate(x)


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_run_leaves_the_global_generators_as_they_were(stochastic: bool) -> None:
    before = generators()
    model = partial(mlp, nn.Dropout(0.5) if stochastic else nn.Tanh())
    dd.simulate(dd.DuDe(LR), network(model, batch_size=dd.Batches(4, stochastic=stochastic)), three, updates=9)
    assert generators() == before


class Augmented(Jittered):
    """Samples that numpy's and Python's generators change, too, as augmentation pipelines do."""

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        shift = float(np.random.rand()) + random.random() + float(torch.rand(()))
        return self.pair[0][row] + 0.1 * shift, self.pair[1][row]


def generators() -> Any:
    return np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()


def test_numpy_s_and_python_s_generators_are_seeded_by_the_job_s_name() -> None:
    data = [Augmented(pair) for pair in PAIRS]
    with pytest.raises(dd.BadInput, match=r"global generator of torch and numpy and random.* stochastic=True"):
        network(data=data)
    before = generators()
    problem = network(mlp(), data, dd.Batches(4, stochastic=True), metrics={"hits": hits})
    x = problem.start(0)
    first = problem.gradient(x, 1, 5)[0]
    problem.evaluate(x)
    assert generators() == before
    np.random.rand(7)
    random.random()
    assert torch.equal(problem.gradient(x, 1, 5)[0], first)
    assert not torch.equal(problem.gradient(x, 1, 6)[0], first)
    runs = [dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=10) for _ in range(2)]
    assert torch.equal(runs[0].x, runs[1].x)


def test_batchnorm_that_is_frozen_or_keeps_no_statistics_is_taken() -> None:
    frozen = mlp(nn.BatchNorm1d(8)).train()
    frozen[1].eval()
    for model in (frozen, mlp(nn.BatchNorm1d(8, track_running_stats=False))):
        problem = network(model, batch_size=8)
        run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=20)
        assert run.metrics.objective[-1] < run.metrics.objective[0]
        assert torch.equal(dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=20, compute=dd.Compute(cores=2)).x, run.x)
        assert problem.net.module[1].training is model[1].training
    for model in (mlp(nn.BatchNorm1d(8)), mlp(nn.BatchNorm1d(8)).eval()):  # training makes either learn its statistics
        with pytest.raises(dd.BadInput, match=r"BatchNorm layers \(1\).* layer.eval\(\) .* track_running_stats=False"):
            network(model, batch_size=8)


# --- how workers count ---


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_workers_full_gradients_average_to_that_of_the_objective(weights: Any) -> None:
    data = [(inputs.double(), targets) for inputs, targets in PAIRS]
    sizes = [20, 24, 28]
    # a permutation of all samples without replacement is the full batch
    problem = network(mlp().double(), data, dd.Batches(sizes, replacement=False), weights=weights)
    x = problem.start(0)
    mean = torch.stack([problem.gradient(x, worker, 0)[0] for worker in range(3)]).mean(0)
    model, metrics = mlp().double(), problem.evaluate(x)
    pooled = cross_entropy(model(torch.cat([inputs for inputs, _ in data])), torch.cat([targets for _, targets in data]))
    expected = pooled if weights == "samples" else sum(cross_entropy(model(x), y) for x, y in data) / 3
    gradient = torch.cat([p.reshape(-1) for p in torch.autograd.grad(expected, trainable(model))])
    close = rounding(operations(problem, samples=sum(sizes)))
    assert (mean - gradient).norm() <= close * gradient.norm()
    assert metrics["objective"] == pytest.approx(expected.item(), rel=close, abs=0)
    assert metrics["pooled_loss"] == pytest.approx(pooled.item(), rel=close, abs=0)
    assert metrics["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=close, abs=0)


@pytest.mark.numeric
def test_workers_count_by_samples_that_a_function_builds_and_by_weights_that_are_given() -> None:
    plain = network(mlp(), weights="samples")
    built = network(mlp(), lambda worker: PAIRS[worker], workers=3, weights="samples")
    weighted = network(mlp(), weights=[20, 24, 28])
    assert built.needs_sample_counts and not plain.needs_sample_counts
    assert plain.scales == pytest.approx([3 * size / 72 for size in (20, 24, 28)])
    assert built.scales == plain.scales and weighted.scales == pytest.approx(plain.scales)
    runs = [dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=15) for problem in (plain, built)]
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].metrics.objective.tolist() == pytest.approx(runs[0].metrics.pooled_loss.tolist(), rel=rounding(16))
    x = plain.start(0)
    assert weighted.evaluate(x)["objective"] == pytest.approx(plain.evaluate(x)["objective"], rel=ROUNDED)


# --- evaluation in parts ---


def elsewhere(problem: dd.Problem, x: Tensor, workers: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """What these workers measure, each in a process of its own."""
    return {worker: cloudpickle.loads(cloudpickle.dumps(problem)).measure(x, worker) for worker in workers}


def bits(metrics: dict[str, float]) -> bytes:
    return np.array(list(metrics.values())).tobytes()


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_evaluation_in_parts_is_evaluation(weights: Any) -> None:
    problem = dd.Digits(workers=4, weights=weights)
    x = problem.start(0)
    parts = elsewhere(problem, x, (2, 0, 3, 1))  # in the order of their answers
    metrics = problem.combine(x, parts)
    assert list(metrics) == ["objective", "pooled_loss", "accuracy", "gradient_norm", "answered", "share"]
    close = rounding(operations(problem, max(part["samples"] for part in parts.values())), torch.float32)
    assert metrics == pytest.approx(problem.evaluate(x), rel=close, abs=0)
    kinds = {"loss": float, "samples": int, "size": int, "gradient": Tensor}
    assert {name: type(value) for name, value in parts[0].items()} == kinds
    assert parts[0]["gradient"].dtype == torch.float64


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_parts_of_some_workers_are_the_problem_of_those_workers(weights: Any) -> None:
    problem, fewer = network(weights=weights), network(data=[PAIRS[0], PAIRS[2]], weights=weights)
    x = problem.start(5)
    combined = problem.combine(x, {worker: problem.measure(x, worker) for worker in (2, 0)})
    close = rounding(operations(problem, samples=28), torch.float32)
    assert combined == pytest.approx(fewer.evaluate(x), rel=close, abs=0, nan_ok=True)
    nothing = network(test=PAIRS[0]).combine(x, {})
    assert all(math.isnan(nothing[name]) for name in ("objective", "pooled_loss", "gradient_norm"))
    assert nothing["accuracy"] == network(test=PAIRS[0]).evaluate(x)["accuracy"]  # which the server measures itself


def test_without_a_full_gradient_a_part_has_none() -> None:
    problem = network(full_gradient=False)
    x = problem.start(0)
    part = problem.measure(x, 1)
    assert part == {**network().measure(x, 1), "gradient": None} and part["samples"] == 24
    assert math.isnan(problem.combine(x, {1: part})["gradient_norm"])


def test_augmented_data_are_measured_the_same_wherever_they_are() -> None:
    problem = network(data=list(map(Jittered, PAIRS)), batch_size=dd.Batches(4, stochastic=True))
    x, before = problem.start(5), torch.get_rng_state()
    assert bits(problem.combine(x, elsewhere(problem, x, (1, 2, 0)))) == bits(problem.evaluate(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("case", ["q3", "logistic", "local steps"])
def test_a_problem_without_parts_refuses_to_combine_them(case: str) -> None:
    problem = CASES[case][0]
    x = problem.start(0)
    assert not problem.measures
    with pytest.raises(dd.BadInput, match=r"as a whole.*evaluate"):
        problem.combine(x, {})
    with pytest.raises(dd.BadInput, match=r"as a whole.*evaluate"):
        dd.Problem.measure(problem, x, 0)  # what a user's own problem inherits


def test_accuracy_is_the_same_for_test_data_of_any_kind() -> None:
    rows = list(range(5, 20))
    inputs, targets = (part[rows] for part in PAIRS[0])
    dataset = TensorDataset(*PAIRS[0])
    kinds = [(inputs, targets), TensorDataset(inputs, targets), Subset(dataset, rows)]
    accuracies = {network(test=kind).evaluate(network().start(0))["accuracy"] for kind in (*kinds, lambda: kinds[1])}
    model = network().model(network().start(0))
    assert accuracies == {int((model(inputs).argmax(1) == targets).sum()) / 15}


class Touchy(nn.Module):
    """A layer that fails in evaluation mode when asked to, and records the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fail, self.modes = False, set[bool]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.add(self.training)
        if self.fail and not self.training:
            raise ArithmeticError("the user's code failed")
        return inputs


@pytest.mark.parametrize("data", [PAIRS, lambda worker: PAIRS[worker]], ids=["given", "function"])
def test_evaluation_is_in_evaluation_mode_and_leaves_training_mode_behind(data: Any) -> None:
    problem = network(mlp(Touchy()), data, workers=3, test=PAIRS[0])
    x, module = problem.start(0), problem.net.module
    touchy: Any = module[1]
    before = torch.get_rng_state()
    parts = {0: problem.measure(x, 0)}
    touchy.modes.clear()
    problem.measure(x, 0)
    problem.combine(x, parts)
    assert touchy.modes == {False}
    assert all(part.training for part in module.modules())
    touchy.fail = True
    for use in (lambda: problem.measure(x, 0), lambda: problem.combine(x, parts), lambda: problem.evaluate(x)):
        with pytest.raises(ArithmeticError):
            use()
        assert all(part.training for part in module.modules())
        assert torch.equal(torch.get_rng_state(), before)


class Read(nn.Module):
    """The last state of recurrent layers; the second drops some of the first's out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.modes = nn.LSTM(1, 6, batch_first=True, **options), set[bool]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.add(self.layer.training)
        state: Tensor = self.layer(inputs[..., None])[0][:, -1]
        return state


def test_a_recurrent_layer_is_evaluated_in_the_mode_in_which_a_gpu_takes_its_gradient_and_drops_nothing_out() -> None:
    for dropout in (0.0, 0.5):
        read = Read(num_layers=2, dropout=dropout)
        problem = network(nn.Sequential(read, mlp()), PAIRS, workers=3, batch_size=dd.Batches(4, stochastic=True))
        part: Any = problem.net.module[0]
        part.modes.clear()
        first = problem.evaluate(problem.start(0))
        assert part.modes == {True}
        assert problem.evaluate(problem.start(0)) == first
        assert part.layer.training and part.layer.dropout == dropout


class Own(nn.LSTM):
    """A user's own layer, which drops something out by itself."""

    def forward(self, x: Tensor, states: Any = None) -> Any:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), states)


def test_a_recurrent_layer_of_a_user_s_own_is_evaluated_in_evaluation_mode() -> None:
    read = Read()
    read.layer = Own(1, 6, batch_first=True)
    problem = network(nn.Sequential(read, mlp()), PAIRS, workers=3, batch_size=dd.Batches(4, stochastic=True))
    part: Any = problem.net.module[0]
    part.modes.clear()
    assert problem.evaluate(problem.start(0)) == problem.evaluate(problem.start(0))
    assert part.modes == {False} and part.layer.training


def test_a_copy_that_is_made_while_another_thread_evaluates_is_of_the_usual_mode() -> None:
    problem = network(
        nn.Sequential(Read(num_layers=2, dropout=0.5), mlp()), PAIRS, workers=3, batch_size=dd.Batches(4, stochastic=True)
    )
    before = problem.fingerprint()
    with problem.net.evaluating(problem.start(0)):
        layer: Any = cloudpickle.loads(cloudpickle.dumps(problem.net)).module[0].layer
        assert layer.training and layer.dropout == 0.5
        assert problem.fingerprint() == before


def test_weights_that_a_pass_leaves_in_a_module_are_no_hindrance_to_copies_of_it() -> None:
    given = normalised()
    problem, other = (network(given, PAIRS, workers=3) for _ in range(2))
    x = problem.start(0)
    expected, _ = problem.gradient(x, 0, 0)
    run = dd.simulate(dd.DuDe(0.05), other, SPEEDS, updates=3, evaluation=dd.Evaluation(every=3))
    assert not run.x.equal(x) and other.start(0).equal(x), "a run changes nobody's module but its own"
    assert torch.equal(problem.gradient(x, 0, 0)[0], expected)
    copy = cloudpickle.loads(cloudpickle.dumps(problem))
    problem.gradient(run.x, 0, 0)
    assert torch.equal(copy.gradient(x, 0, 0)[0], expected)
    model = problem.model(x)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), x)
    assert torch.equal(model(PAIRS[0][0]), problem.model(x)(PAIRS[0][0]))


def normalised() -> nn.Module:
    """A network whose first layer's weight is computed at each pass, and stays in it until the next."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(mlp()[0]), *mlp()[1:])


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.lock = threading.Lock()
    for way in (model, lambda: model):
        with pytest.raises(dd.BadInput, match=r"cannot be copied \(TypeError: cannot pickle '_thread.lock'.*open files"):
            network(way, PAIRS, workers=3)


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_which_copies_would_not_have_are_refused(way: str) -> None:
    def model() -> nn.Module:
        net = mlp()
        getattr(net[0].weight, way)(lambda slope: None)
        return net

    for of_hooks in (model, model()):
        with pytest.raises(dd.BadInput, match=r"parameters have hooks \(0.weight\).*requires_grad_\(False\)"):
            network(of_hooks, PAIRS, workers=3)


class Focal:
    """A loss of a user's own, which counts its calls."""

    def __init__(self, gamma: float, calls: int = 0) -> None:
        self.gamma, self.calls, self.near = gamma, calls, [torch.ones(2), np.ones(2), (None, {"a": print})]

    def __call__(self, outputs: Any, targets: Any) -> Any:
        self.calls += 1
        return self.gamma * cross_entropy(outputs, targets)


def test_a_loss_is_known_by_its_settings_as_they_were_given() -> None:
    losses: list[Any] = [
        cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.3),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0])),
        partial(cross_entropy, label_smoothing=0.1),
        partial(cross_entropy, label_smoothing=0.2),
        Focal(1.0),
        Focal(2.0),
    ]

    def problem(loss: Any) -> dd.Network:
        return dd.Network(lambda: mlp(), loss, PAIRS, 8)

    found = [problem(loss).fingerprint() for loss in losses]
    assert len(set(found)) == len(found)
    assert [problem(copy.deepcopy(loss)).fingerprint() for loss in losses[:-2]] == found[:-2]
    used = problem(Focal(2.0))
    used.gradient(used.start(0), 0, 0)
    assert used.loss.calls > 0 and used.fingerprint() == copy.deepcopy(used).fingerprint() == found[-1]
    assert problem(Focal(2.0)).fingerprint() == found[-1]


class Remembers(nn.Module):
    """Keeps what its last pass came to, as people do who look at activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.parts = mlp(), [], {"last": ()}

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.seen.append(y)
        self.parts["last"] = (y, [y * 2])
        return y


def test_a_model_that_keeps_tensors_of_its_last_pass_is_copied_with_their_numbers() -> None:
    model = Remembers()
    model(PAIRS[0][0])
    problem = network(model, PAIRS, workers=3)
    problem.gradient(problem.start(0), 0, 0)
    inside: Any = copy.deepcopy(problem.net).module
    kept: Any = problem.net.module
    assert torch.equal(inside.seen[-1], kept.seen[-1]) and inside.seen[-1].is_leaf
    assert torch.equal(inside.parts["last"][1][0], 2 * kept.seen[-1])


def test_a_full_gpu_ends_a_run_and_does_not_change_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(problems: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    problem = network(mlp(), PAIRS, workers=3)
    monkeypatch.setattr("dualdelay.problems.network.Stacked", full)
    with pytest.raises(dd.RunFailed, match=r"do not fit into what is free of cpu.*dd.Compute\(batch=False\)"):
        problem.batched([problem])


def test_a_recurrent_layer_leaves_its_weights_where_they_are_and_the_user_s_copy_may_move_them() -> None:
    problem = network(nn.Sequential(Read(), mlp()), PAIRS, workers=3)
    layer: Any = problem.net.module[0].layer
    assert "flatten_parameters" in vars(layer), "on a GPU torch's own would move them out of the flat tensor"
    layer.flatten_parameters()
    mine: Any = problem.model(problem.start(0))[0].layer
    assert "flatten_parameters" not in vars(mine)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), layer.parameters(), strict=True))


# --- metrics where the data are ---


def hits(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def largest(model: nn.Module, batch: Any) -> float:
    return float(model(batch[0]).detach().max())


@pytest.mark.numeric
def test_metrics_are_measured_on_each_worker_s_held_out_data_and_combined_as_the_losses_are() -> None:
    held_out = [(PAIRS[1][0][:10], PAIRS[1][1][:10]), None, PAIRS[0]]
    functions = {"accuracy": hits, "top": largest}
    problem = network(mlp(), held_out=held_out, metrics=functions, weights=[1.0, 1.0, 2.0])
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=6, evaluation=dd.Evaluation(every=3))
    model = mlp()
    model.load_state_dict(run.state_dict())
    model.eval()
    at_end = run.workers.version == 6
    assert run.workers.worker[at_end].tolist() == [0, 1, 2]
    functions["held_out_loss"] = lambda model, batch: cross_entropy(model(batch[0]), batch[1]).detach()
    for name, function in functions.items():
        first, last = (float(function(model, held_out[worker])) for worker in (0, 2))
        measured = run.workers[name][at_end].tolist()
        assert measured == pytest.approx([first, math.nan, last], rel=ROUNDED, nan_ok=True)
        # worker 1 has nothing to measure it on
        assert run.metrics[name][-1] == pytest.approx((1.0 * first + 2.0 * last) / 3.0, rel=ROUNDED)
    losses = losses_of(model)
    assert run.workers.loss[at_end].tolist() == pytest.approx(losses, rel=ROUNDED)
    assert run.metrics.objective[-1] == pytest.approx((losses[0] + losses[1] + 2 * losses[2]) / 4, rel=ROUNDED)
    assert run.workers.samples[at_end].tolist() == [20, 24, 28]


@pytest.mark.numeric
def test_a_metric_that_is_no_mean_needs_all_of_a_worker_s_data_in_one_batch() -> None:
    by_hand = [mlp()(inputs).max().item() for inputs, _ in PAIRS]
    for size in (None, 7):
        problem = network(mlp(), batch_size=dd.Batches(4, evaluation_size=size), metrics={"top": largest})
        tops = [problem.measure(problem.start(0), worker)["metrics"]["top"] for worker in range(3)]
        if size is None:
            assert tops == pytest.approx(by_hand, rel=ROUNDED)
        else:
            assert all(np.array(tops) < by_hand)  # a mean of the batches' largest


def test_a_worker_s_metric_that_raises_is_reported_and_switched_off() -> None:
    calls: list[int] = []

    def breaks(model: nn.Module, batch: Any) -> float:
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError("no positives")
        return 1.0

    problem = network(mlp(), metrics={"recall": breaks})
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3))
    assert run.version == 9
    assert len(calls) == 9  # one when it was made, five that succeed, and one of each worker that raises
    assert run.metrics.recall[0] == 1.0 and math.isnan(run.metrics.recall[-1])
    words = ("metric 'recall' at worker", "no positives", "switched off")
    assert any(all(word in note for word in words) for note in run.notes)


def test_a_metric_that_raises_at_one_worker_is_switched_off_there_alone() -> None:
    """As a share of positives does where there are none: that worker still trains, and the others are measured."""

    def share(model: nn.Module, batch: Any) -> float:
        return 1 / int((batch[0].mean() < 50).sum())

    data = [(inputs + 100 * (worker == 1), targets) for worker, (inputs, targets) in enumerate(PAIRS)]
    built = network(mlp(), lambda worker: data[worker], workers=3, metrics={"positives": share})
    run = dd.simulate(dd.DuDe(0.05), built, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3))
    assert set(run.trace.worker.tolist()) == {0, 1, 2}
    nan = np.isnan(run.workers.positives)
    assert set(run.workers.worker[nan].tolist()) == {1} and set(run.workers.worker[~nan].tolist()) == {0, 2}
    assert any("metric 'positives' at worker 1" in note and "ZeroDivisionError" in note for note in run.notes)
    with pytest.raises(dd.BadInput, match="metric 'positives' raised ZeroDivisionError on a batch of worker 0"):
        network(mlp(), data[1:], metrics={"positives": share})


# --- evaluation on some samples ---


@pytest.mark.numeric
def test_so_many_samples_are_always_the_same_and_all_of_them_are_all() -> None:
    problem = network(mlp())
    x, (inputs, targets) = problem.start(0), PAIRS[1]
    few, everything = problem.measure(x, 1, 10), problem.measure(x, 1)
    assert few["samples"] == 10 and few["size"] == 24 and few["gradient"] is None
    assert problem.measure(x, 1, 10) == few == network(mlp()).measure(x, 1, 10)
    chosen = torch.from_numpy(dd.Draws(0, "evaluation").permutation(24, 1)[:10]).sort().values
    assert few["loss"] == pytest.approx(cross_entropy(mlp()(inputs[chosen]), targets[chosen]).item(), rel=ROUNDED)
    assert problem.measure(x, 1, 24)["loss"] == everything["loss"]
    parts = [problem.measure(x, 1, part) for part in ((0, 10), (10, 20), (20, 30))]
    assert [part["samples"] for part in parts] == [10, 10, 4]
    assert sum(part["loss"] * part["samples"] for part in parts) / 24 == pytest.approx(everything["loss"], rel=ROUNDED)


@pytest.mark.numeric
def test_a_row_records_on_what_share_of_the_data_it_is_and_the_last_is_on_all() -> None:
    problem = network(mlp())
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3, samples=5))
    assert run.metrics.share.tolist() == pytest.approx([15 / 72] * 4 + [1.0])
    assert run.metrics.version.tolist() == [0, 3, 6, 9, 9]
    assert run.workers.samples.tolist() == [5] * 12 + [20, 24, 28]
    assert np.isnan(run.metrics.gradient_norm[:-1]).all() and run.metrics.gradient_norm[-1] > 0
    assert run.metrics.objective[-1] == pytest.approx(problem.evaluate(run.x)["objective"], rel=ROUNDED)


def test_a_function_that_gives_one_and_the_same_module_starts_every_run_alike_and_leaves_it_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    before = net.weight.detach().clone()
    shards = [(torch.ones(4, 2), torch.full((4, 1), float(k))) for k in range(2)]
    problem = dd.Network(lambda: net, nn.functional.mse_loss, shards, 4)
    runs = [dd.simulate(dd.VanillaASGD(lr=0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=5) for _ in range(2)]
    assert runs[0].x.equal(runs[1].x) and not runs[0].x.equal(problem.start(0))
    assert net.weight.equal(before) and problem.start(0)[:2].equal(before.flatten())

"""Data and batches of any structure, metrics where the data are, and how workers count: numbers worked out by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

import dualdelay as dd
from dualdelay.theory import constants
from helpers import ROUNDED
from own import mlp, shards

RNG = torch.Generator().manual_seed(8)
INPUTS = [torch.randn(size, 6, generator=RNG) for size in (30, 44, 25)]
TARGETS = [torch.randint(3, (len(inputs),), generator=RNG) for inputs in INPUTS]
SPEEDS = dd.FixedSpeeds([1.0, 2.0, 3.0])


class Taking(nn.Module):
    """The same small network for inputs that lie in a structure."""

    def __init__(self, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.body, self.pick = mlp(), pick

    def forward(self, inputs: Any) -> Tensor:
        return self.body(self.pick(inputs))


class Rows(Dataset):
    """Samples in a structure of their own, one at a time."""

    def __init__(self, worker: int, make: Callable[[Tensor, Tensor], Any]) -> None:
        self.worker, self.make = worker, make

    def __len__(self) -> int:
        return len(INPUTS[self.worker])

    def __getitem__(self, row: int) -> Any:
        return self.make(INPUTS[self.worker][row], TARGETS[self.worker][row])


def whole(make: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """Each worker's data as tensors in a structure."""
    return [make(inputs, targets) for inputs, targets in zip(INPUTS, TARGETS, strict=True)]


def first_half(batch: Any) -> Tensor:
    return torch.cat([batch["left"], batch["right"]], -1)


def halves(inputs: Tensor, targets: Tensor) -> Any:
    return {"left": inputs[..., :2], "right": inputs[..., 2:]}, targets


def named(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"inputs": inputs, "labels": targets}


class Hugging(nn.Module):
    """A model that takes a batch by name and gives its own loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs)
        return SimpleNamespace(loss=cross_entropy(logits, labels), logits=logits)


def stepping(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["labels"])


def text_targets(samples: list[Any]) -> Any:
    return torch.stack([inputs for inputs, _ in samples]), [str(int(target)) for _, target in samples]


def of_texts(outputs: Tensor, texts: list[str]) -> Tensor:
    return cross_entropy(outputs, torch.tensor([int(text) for text in texts]))


def ragged(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Samples of varying length, padded."""
    return nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True), torch.stack(
        [t for _, t in samples]
    )


STRUCTURES: dict[str, Callable[[], dd.Network]] = {
    "pair": lambda: dd.Network(mlp(), cross_entropy, whole(lambda x, y: (x, y)), 4),
    "one-tuple": lambda: dd.Network(Taking(lambda i: i[0]), cross_entropy, whole(lambda x, y: ((x,), y)), 4),
    "dict of two": lambda: dd.Network(Taking(first_half), cross_entropy, whole(halves), 4),
    "dataset of dicts": lambda: dd.Network(Taking(first_half), cross_entropy, [Rows(k, halves) for k in range(3)], 4),
    "list of samples": lambda: dd.Network(mlp(), cross_entropy, [list(Rows(k, lambda x, y: (x, y))) for k in range(3)], 4),
    "arrays": lambda: dd.Network(mlp(), cross_entropy, whole(lambda x, y: (x.numpy(), y.numpy())), 4),
    "step": lambda: dd.Network(mlp(), shards=whole(named), batch_size=4, step=stepping),
    "the model's own loss": lambda: dd.Network(Hugging(), shards=whole(named), batch_size=4),
    "collated texts": lambda: dd.Network(
        mlp(), of_texts, [Rows(k, lambda x, y: (x, y)) for k in range(3)], 4, collate_fn=text_targets
    ),
    "collated tensors": lambda: dd.Network(mlp(), of_texts, whole(lambda x, y: (x, y)), 4, collate_fn=text_targets),
    "a function": lambda: dd.Network(
        Taking(first_half), cross_entropy, lambda k: halves(INPUTS[k], TARGETS[k]), 4, workers=3
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_whatever_the_structure_objective_gradient_and_run_are_those_of_the_plain_pair(name: str) -> None:
    """The true loss was 1.156; it came out as 0.0029 for a one-tuple and as 0.0058 for a dict of two."""
    problem, plain = STRUCTURES[name](), STRUCTURES["pair"]()
    x = plain.start(0)
    by_hand = [cross_entropy(mlp()(inputs), targets).item() for inputs, targets in zip(INPUTS, TARGETS, strict=True)]
    found = problem.evaluate(x)
    assert found["objective"] == pytest.approx(sum(by_hand) / 3, rel=ROUNDED)
    assert found == pytest.approx(plain.evaluate(x), rel=ROUNDED, nan_ok=True)
    for worker in range(3):
        assert problem.measure(x, worker)["loss"] == pytest.approx(by_hand[worker], rel=ROUNDED)
        assert torch.equal(problem.gradient(x, worker, 7)[0], plain.gradient(x, worker, 7)[0])
    run, other = (dd.simulate(dd.DuDe(0.05), one, SPEEDS, updates=12) for one in (problem, plain))
    assert torch.equal(run.x, other.x)
    assert problem.fingerprint() == STRUCTURES[name]().fingerprint()


@pytest.mark.parametrize("name", ["one-tuple", "dict of two", "step"])
def test_curvature_is_that_of_the_plain_pair(name: str) -> None:
    made, plain = (constants(problem, draws=4, iterations=30) for problem in (STRUCTURES[name](), STRUCTURES["pair"]()))
    assert made.curvature.value == pytest.approx(plain.curvature.value, rel=1e-3)  # Lanczos stops at a hundredth of this


def test_samples_of_varying_length_are_padded_by_the_user_s_own_function() -> None:
    rows = [[(torch.ones(1 + row % 4, 2), torch.tensor(float(row))) for row in range(9)] for _ in range(2)]

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5]))

        def forward(self, padded: Tensor) -> Tensor:
            return self.scale * padded.sum((1, 2))

    problem = dd.Network(Sum(), mse_loss, rows, 3, collate_fn=ragged)
    by_hand = sum((0.5 * 2 * (1 + row % 4) - row) ** 2 for row in range(9)) / 9
    assert problem.evaluate(problem.start(0))["objective"] == pytest.approx(by_hand, rel=ROUNDED)
    with pytest.raises(dd.BadInput, match=r"samples of shards\[0\] cannot be put into one batch .* collate_fn="):
        dd.Network(Sum(), mse_loss, rows, 3)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "loss and step": (lambda: dd.Network(mlp(), cross_entropy, shards(), step=stepping), "both loss and step"),
    "no shards": (lambda: dd.Network(mlp(), cross_entropy), "there are no shards"),
    "pairs without a loss": (lambda: dd.Network(mlp(), shards=shards()), r"a batch is a tuple, .* model\(\*\*batch\).loss"),
    "a dict with a loss": (
        lambda: dd.Network(mlp(), cross_entropy, whole(named)),
        "a batch is a dict of 2, and a loss takes a",
    ),
    "no tensor": (lambda: dd.Network(mlp(), shards=shards(), step=lambda m, b: 3.0), "the loss is a float"),
    "no gradient": (lambda: dd.Network(mlp(), shards=shards(), step=lambda m, b: b[0].mean()), "the loss has no gradient"),
    "unequal": (lambda: dd.Network(mlp(), shards=[{"a": INPUTS[0], "b": TARGETS[1]}], step=stepping), "30 inputs and 44"),
    "three unequal": (lambda: dd.Network(mlp(), shards=[(*INPUTS,)], step=stepping), r"tensors of \[30, 44, 25\] rows"),
    "texts": (lambda: dd.Network(mlp(), cross_entropy, [(np.array(["a"]), np.array([0]))]), "cannot take .* numbers"),
    "sum": (
        lambda: dd.Network(mlp(), nn.CrossEntropyLoss(reduction="sum"), shards(), 4),
        "sum over the minibatch, not a mean",
    ),
    "metric's name": (lambda: dd.Network(mlp(), cross_entropy, shards(), metrics={"loss": hits}), "columns already"),
    "accuracy twice": (
        lambda: dd.Network(mlp(), cross_entropy, shards(), test=shards()[0], metrics={"accuracy": hits}),
        "'accuracy', which test= gives",
    ),
    "no metric": (
        lambda: dd.Network(mlp(), cross_entropy, shards(), metrics={"hits": 3}),
        "expected a name and a function",
    ),
    "many numbers": (
        lambda: dd.Network(mlp(), cross_entropy, shards(), metrics={"hits": lambda m, b: m(b[0])}),
        "one number",
    ),
    "held out of others": (
        lambda: dd.Network(mlp(), cross_entropy, shards(), held_out=shards(2)),
        "held_out holds the data of 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_when_it_is_made(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(dd.BadInput, match=message):
        make()


def test_a_loss_that_looks_like_a_sum_for_two_copies_but_is_none_is_taken() -> None:
    """The logarithm of the number of samples doubles from two to four, but is no sum."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return torch.log(torch.tensor(float(len(batch[0])))) + 0.0 * model(batch[0]).sum()

    assert dd.Network(mlp(), shards=shards(), batch_size=2, step=step).workers == 3


# --- metrics where the data are ---


def hits(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def largest(model: nn.Module, batch: Any) -> float:
    return float(model(batch[0]).detach().max())


def test_metrics_are_measured_on_each_worker_s_held_out_data_and_combined_as_the_losses_are() -> None:
    held = [(INPUTS[1][:10], TARGETS[1][:10]), None, (INPUTS[0], TARGETS[0])]
    options = {"held_out": held, "metrics": {"accuracy": hits, "top": largest}, "weights": [1.0, 1.0, 2.0]}
    problem = dd.Network(mlp(), cross_entropy, whole(lambda x, y: (x, y)), 4, **options)
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=6, evaluation=dd.Evaluation(every=3))
    model = mlp()
    model.load_state_dict(run.state_dict())
    model.eval()
    at_end = run.workers.version == 6
    assert run.workers.worker[at_end].tolist() == [0, 1, 2]
    by_hand = {
        name: [float(torch.as_tensor(f(model, held[k])).detach()) for k in (0, 2)]
        for name, f in (("accuracy", hits), ("top", largest))
    }
    by_hand["held_out_loss"] = [cross_entropy(model(held[k][0]), held[k][1]).item() for k in (0, 2)]
    for name, values in by_hand.items():
        mine = run.workers[name][at_end].tolist()
        assert [mine[0], mine[2]] == pytest.approx(values, rel=ROUNDED) and math.isnan(mine[1])
        combined = (1.0 * values[0] + 2.0 * values[1]) / 3.0  # worker 1 has nothing to measure it on
        assert run.metrics[name][-1] == pytest.approx(combined, rel=ROUNDED)
    losses = [cross_entropy(model(x), y).item() for x, y in zip(INPUTS, TARGETS, strict=True)]
    assert run.workers.loss[at_end].tolist() == pytest.approx(losses, rel=ROUNDED)
    assert run.metrics.objective[-1] == pytest.approx((losses[0] + losses[1] + 2 * losses[2]) / 4, rel=ROUNDED)
    assert run.workers.samples[at_end].tolist() == [30, 44, 25]


def test_without_held_out_data_metrics_are_of_the_worker_s_own_and_need_all_in_one_batch_if_they_are_no_means() -> None:
    made = [
        dd.Network(mlp(), cross_entropy, shards(), 4, metrics={"top": largest}, evaluation_batch=size) for size in (None, 7)
    ]
    x = made[0].start(0)
    tops = [[problem.measure(x, worker)["metrics"]["top"] for worker in range(3)] for problem in made]
    by_hand = [mlp()(inputs).max().item() for inputs, _ in shards()]
    assert tops[0] == pytest.approx(by_hand, rel=ROUNDED)
    assert all(one < other for one, other in zip(tops[1], by_hand, strict=True))  # a mean of the batches' largest


def test_a_worker_s_metric_that_raises_is_reported_and_switched_off() -> None:
    calls: list[int] = []

    def breaks(model: nn.Module, batch: Any) -> float:
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError("no positives")
        return 1.0

    problem = dd.Network(mlp(), cross_entropy, shards(), 4, metrics={"recall": breaks})
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3))
    assert run.version == 9 and len(calls) == 9  # once for each of the three workers after it broke
    assert run.metrics.recall[:2].tolist()[0] == 1.0 and math.isnan(run.metrics.recall[-1])
    assert any(
        "metric 'recall' at worker" in note and "no positives" in note and "switched off" in note for note in run.notes
    )


def test_a_metric_that_raises_at_one_worker_is_switched_off_there_alone() -> None:
    """As a share of positives does where there are none: that worker still trains, and the others are measured."""

    def share(model: nn.Module, batch: Any) -> float:
        return 1 / int((batch[0].mean() < 50).sum())

    data = [(inputs + 100 * (worker == 1), targets) for worker, (inputs, targets) in enumerate(shards())]
    built = dd.Network(mlp(), cross_entropy, lambda worker: data[worker], 4, workers=3, metrics={"positives": share})
    run = dd.simulate(dd.DuDe(0.05), built, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3))
    assert set(run.trace.worker.tolist()) == {0, 1, 2}
    nan = np.isnan(run.workers.positives)
    assert set(run.workers.worker[nan].tolist()) == {1} and set(run.workers.worker[~nan].tolist()) == {0, 2}
    assert any("metric 'positives' at worker 1" in note and "ZeroDivisionError" in note for note in run.notes)
    with pytest.raises(dd.BadInput, match="metric 'positives' raised ZeroDivisionError on a batch of worker 0"):
        dd.Network(mlp(), cross_entropy, data[1:], 4, metrics={"positives": share})


# --- evaluation on some samples ---


def test_so_many_samples_are_always_the_same_and_all_of_them_are_all() -> None:
    problem = STRUCTURES["pair"]()
    x = problem.start(0)
    few = problem.measure(x, 1, 10)
    assert few["samples"] == 10 and few["size"] == 44 and few["gradient"] is None
    assert problem.measure(x, 1, 10) == few == STRUCTURES["pair"]().measure(x, 1, 10)
    chosen = torch.from_numpy(dd.Draws(0, "evaluation").permutation(44, 1)[:10]).sort().values
    assert few["loss"] == pytest.approx(cross_entropy(mlp()(INPUTS[1][chosen]), TARGETS[1][chosen]).item(), rel=ROUNDED)
    assert problem.measure(x, 1, 44)["loss"] == problem.measure(x, 1)["loss"]
    parts = [problem.measure(x, 1, part) for part in ((0, 20), (20, 40), (40, 60))]
    assert [part["samples"] for part in parts] == [20, 20, 4]
    mean = sum(part["loss"] * part["samples"] for part in parts) / 44
    assert mean == pytest.approx(problem.measure(x, 1)["loss"], rel=ROUNDED)


def test_rows_say_on_how_much_they_are_and_the_last_is_on_all() -> None:
    problem = STRUCTURES["pair"]()
    run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=9, evaluation=dd.Evaluation(every=3, samples=5))
    assert run.metrics.share.tolist() == pytest.approx([15 / 99] * 4 + [1.0])
    assert run.metrics.version.tolist() == [0, 3, 6, 9, 9]
    assert run.workers.samples.tolist() == [5] * 12 + [30, 44, 25]
    assert np.isnan(run.metrics.gradient_norm[:-1]).all() and run.metrics.gradient_norm[-1] > 0
    assert run.metrics.objective[-1] == pytest.approx(problem.evaluate(run.x)["objective"], rel=ROUNDED)


# --- layers and generators ---


def test_batchnorm_that_is_frozen_or_keeps_no_statistics_is_taken() -> None:
    frozen = mlp(nn.BatchNorm1d(8))
    frozen.train()
    frozen[1].eval()
    plain = mlp(nn.BatchNorm1d(8, track_running_stats=False))
    for model in (frozen, plain):
        problem = dd.Network(model, cross_entropy, shards(), 8)
        run = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=20)
        assert run.metrics.objective[-1] < run.metrics.objective[0]
        assert torch.equal(dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=20, compute=dd.Compute(cores=2)).x, run.x)
        assert problem.net.module[1].training is model[1].training
    assert run.problem is problem
    for model in (mlp(nn.BatchNorm1d(8)), mlp(nn.BatchNorm1d(8)).eval()):  # training makes either learn its statistics
        with pytest.raises(dd.BadInput, match=r"BatchNorm layers \(1\).* layer.eval\(\) .* track_running_stats=False"):
            dd.Network(model, cross_entropy, shards(), 8)


class Augmented(Dataset):
    """Samples that numpy's and Python's generators change, as augmentation pipelines do."""

    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        shift = float(np.random.rand()) + random.random() + float(torch.rand(()))
        return self.pair[0][row] + 0.1 * shift, self.pair[1][row]


def test_numpy_s_and_python_s_generators_are_seeded_by_the_job_s_name() -> None:
    data = [Augmented(pair) for pair in shards()]
    with pytest.raises(dd.BadInput, match=r"global generator of torch and numpy and random.* stochastic=True"):
        dd.Network(mlp(), cross_entropy, data, 4)
    problem = dd.Network(mlp(), cross_entropy, data, 4, stochastic=True)
    x = problem.start(0)
    np.random.seed(1)
    random.seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    first = problem.gradient(x, 1, 5)[0]
    np.random.rand(7)
    random.random()
    assert torch.equal(problem.gradient(x, 1, 5)[0], first)
    assert not torch.equal(problem.gradient(x, 1, 6)[0], first)
    np.random.seed(1)
    random.seed(1)
    problem.evaluate(x)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    straight = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=10)
    assert torch.equal(dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=10).x, straight.x)


# --- how workers count ---


def test_workers_count_by_samples_that_a_function_builds_and_by_weights_that_are_given() -> None:
    pairs = whole(lambda x, y: (x, y))
    given = dd.Network(mlp(), cross_entropy, pairs, 4, weights="samples")
    built = dd.Network(mlp(), cross_entropy, lambda k: pairs[k], 4, workers=3, weights="samples")
    weighted = dd.Network(mlp(), cross_entropy, pairs, 4, weights=[30, 44, 25])
    assert built.needs_sample_counts and not given.needs_sample_counts
    assert given.scales == pytest.approx([3 * size / 99 for size in (30, 44, 25)])
    assert built.scales == given.scales and weighted.scales == pytest.approx(given.scales)
    runs = [dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=15) for problem in (given, built)]
    assert torch.equal(runs[0].x, runs[1].x)
    assert runs[0].metrics.objective.tolist() == pytest.approx(runs[0].metrics.pooled_loss.tolist(), rel=1e-14)
    x = given.start(0)
    assert weighted.evaluate(x)["objective"] == pytest.approx(given.evaluate(x)["objective"], rel=ROUNDED)

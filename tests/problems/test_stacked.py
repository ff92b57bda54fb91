"""Gradients of many networks in one call are the gradients one at a time, on samples that are not copied."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.core import OneAtATime
from dualdelay.problems.data import Shard
from dualdelay.problems.stacked import Stacked
from helpers import operations, rounding
from own import Jittered, Scaled, mlp, shards
from tables import CASES


class Shifted(nn.Module):
    """A model with a buffer that its outputs depend on."""

    def __init__(self, shift: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("shift", torch.full((3,), shift, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.body(inputs) + self.shift).square()


class Unused(nn.Module):
    """A model with parameters, the first and one in the middle, that its outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Parameter(torch.ones(4)), mlp()
        self.between, self.last = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) * self.last


class Tied(nn.Module):
    """A model that uses one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(classes=8)[2], mlp(classes=8)[2]
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(self.one(inputs.repeat(1, 2)[:, :8]).tanh())


class Power(nn.Module):
    """A model with a number that is neither a parameter nor a buffer, and does not stand in its repr."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.body, self.power = mlp(), power

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) ** self.power


class Pooled(nn.Module):
    """A model for samples of any number of places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).mean(1)


class Recurrent(nn.Module):
    """A model that reads its inputs one number after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.body = nn.GRU(1, 6, batch_first=True), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(self.layer(inputs[..., None])[0][:, -1])


class Branching(Recurrent):
    """A model that looks at a number, of which many models at once have none."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if float(inputs.sum()) > 0 else -inputs)


INPUTS, TARGETS = shards(1, samples=50, seed=11)[0]
DATA = TensorDataset(INPUTS, TARGETS)


def split(seed: int, workers: int = 3) -> list[Subset]:
    """Workers' parts of the data, of different sizes, in random order."""
    order = dd.Draws(seed, "split").permutation(len(DATA)).tolist()
    ends = [len(DATA) * (k * k + k) // (workers * workers + workers) for k in range(workers + 1)]
    return [Subset(DATA, order[a:b]) for a, b in pairwise(ends)]


def copied(part: Subset) -> tuple[Tensor, Tensor]:
    rows = list(part.indices)
    return INPUTS[rows], TARGETS[rows]


def net(data: Any, model: Any = None, loss: Any = cross_entropy, batch: Any = 4, **options: Any) -> dd.Network:
    return dd.Network(model or mlp(), loss, data, batch, **options)


def doubled(data: Sequence[Any]) -> list[Any]:
    return [(inputs.double(), targets) for inputs, targets in data]


IN_TURN, STOCHASTIC = dd.Batches(4, replacement=False), dd.Batches(4, stochastic=True)
BFLOAT16 = torch.bfloat16

STACKABLE: dict[str, Callable[[], list[Any]]] = {
    "one": lambda: [net(shards())],
    "splits of the same data": lambda: [net(split(seed), seed=seed) for seed in (0, 1, -2)],
    "pairs": lambda: [net(shards(seed=1)), net(shards(4, seed=2), seed=-7)],
    "splits and pairs": lambda: [net(split(0)), net(shards(5, seed=2), seed=1), net(split(4, 2)), net(shards())],
    "the same inputs with other targets": lambda: [net([(INPUTS, TARGETS)]), net([(INPUTS, (TARGETS + 1) % 3)])],
    "seeds": lambda: [net(shards()), net(shards()).reseeded(5)],
    "without replacement": lambda: [net(split(0), batch=IN_TURN), net(shards(), batch=IN_TURN, seed=3)],
    "with and without replacement": lambda: [net(split(0), batch=IN_TURN), net(split(1)), net(shards())],
    "weighted by samples": lambda: [net(split(0), weights="samples"), net(shards(), weights="equal"), net(split(0))],
    "frozen and without dimension": lambda: [net(split(0), Scaled()), net(shards(), Scaled())],
    "buffers": lambda: [net(split(0), Shifted()), net(split(1), Shifted())],
    "bfloat16 buffers": lambda: [net(split(seed), Shifted(dtype=BFLOAT16)) for seed in (0, 1)],
    "unused parameters": lambda: [net(split(0), Unused()), net(shards(), Unused())],
    "tied weights": lambda: [net(split(0), Tied()), net(split(1), Tied())],
    "layer norm": lambda: [net(data, mlp(nn.LayerNorm(8), nn.GELU())) for data in (split(0), shards())],
    "recurrent": lambda: [net(split(seed), Recurrent()) for seed in (0, 1)],
    "float64": lambda: [net(doubled(shards(seed=k)), mlp().double(), seed=k) for k in (0, 1)],
    "squared loss": lambda: [net([(x, x[:, :3]) for x, _ in shards(seed=k)], loss=mse_loss) for k in (0, 1)],
    "one sample": lambda: [net(split(0), batch=1), net([(INPUTS[:1], TARGETS[:1])], batch=1)],
    "local steps": lambda: [dd.LocalSteps(net(data, seed=3), k=3, lr=0.1) for data in (split(0), shards())],
    "built by a function": lambda: [net(lambda k: shards()[k], mlp, workers=3), net(split(0), mlp)],
}


def jobs_of(problems: Sequence[dd.Problem], count: int) -> tuple[list[int], list[int], list[int]]:
    rng = np.random.default_rng(1)
    which = rng.integers(len(problems), size=count).tolist()
    return which, [int(rng.integers(problems[k].workers)) for k in which], rng.integers(100, size=count).tolist()


def models_of(problem: dd.Problem, count: int) -> list[Tensor]:
    x = problem.start(0)
    rng = torch.Generator().manual_seed(2)
    return [x + 0.3 * torch.randn(len(x), generator=rng, dtype=x.dtype) for _ in range(count)]


def in_pieces(models: Sequence[Tensor]) -> list[Tensor]:
    """The first model alone, three together, one as a matrix, and the others alone."""
    return [models[0], torch.stack(models[1:4]), models[4][None], *models[5:]]


@pytest.mark.numeric
@pytest.mark.parametrize("name", STACKABLE)
def test_stacked_gradients_are_those_taken_alone(name: str) -> None:
    """To the last few digits: those of another minibatch, model or scale would be off by a hundredth and more."""
    problems = STACKABLE[name]()
    assert len({problem.batch_key for problem in problems}) == 1
    together = problems[0].batched(problems)
    assert isinstance(together, Stacked) or (name == "local steps" and not isinstance(together, OneAtATime))
    jobs, models = jobs_of(problems, 16), models_of(problems[0], 16)
    before = [problem.start(0).clone() for problem in problems]
    alone = [problems[k].gradient(x, w, d) for x, k, w, d in zip(models, *jobs, strict=True)]
    close, size = rounding(operations(problems[0]), models[0].dtype), max(gradient.norm() for gradient, _ in alone)
    for pieces in (models, in_pieces(models), [torch.stack(models)]):
        gradients, losses = together(pieces, *jobs)
        assert gradients.shape == (16, len(models[0]))
        assert gradients.dtype == models[0].dtype
        for found, value, (gradient, loss) in zip(gradients, losses.tolist(), alone, strict=True):
            assert (found - gradient).norm() <= close * size
            assert math.isclose(value, loss, rel_tol=close)
    assert all(torch.equal(problem.start(0), x) for problem, x in zip(problems, before, strict=True))


def test_a_model_that_cannot_be_stacked_is_said_to_be_and_is_left_as_it_was() -> None:
    problems = [net(split(seed), Branching()) for seed in (0, 1)]
    x, before = problems[0].start(0), problems[0].gradient(problems[0].start(0), 1, 2)
    with pytest.warns(UserWarning, match=r"cannot be taken in one call \(vmap: .*\): they are taken one after the other"):
        together = problems[0].batched(problems)
    assert isinstance(together, OneAtATime)
    gradients, losses = together([x, x], [0, 1], [1, 2], [2, 3])
    assert torch.equal(gradients[0], before[0])
    assert losses[0] == before[1]
    assert torch.equal(problems[0].gradient(x, 1, 2)[0], before[0])


def test_few_jobs_without_a_graph_are_taken_one_at_a_time() -> None:
    problems = [net(split(seed), seed=seed) for seed in (0, 1)]
    together = problems[0].batched(problems)
    assert isinstance(together, Stacked)
    assert together._alone == 0, "on a processor all are taken at once"
    together._alone = 2  # as on a GPU, with a model of which no graph can be made
    jobs, models = jobs_of(problems, 3), models_of(problems[0], 3)
    alone = [problems[k].gradient(x, w, d) for x, k, w, d in zip(models, *jobs, strict=True)]
    gradients, losses = together(models[:2], *(part[:2] for part in jobs))
    assert torch.equal(gradients, torch.stack([gradient for gradient, _ in alone[:2]]))
    assert losses.tolist() == [loss for _, loss in alone[:2]]
    close = rounding(operations(problems[0]), torch.float32)
    for found, (gradient, _) in zip(together(models, *jobs)[0], alone, strict=True):
        assert (found - gradient).norm() <= close * gradient.norm()


def test_gradients_that_are_not_the_same_twice_are_warned_of() -> None:
    problem = net(split(0))
    together = problem.batched([problem])
    assert isinstance(together, Stacked)
    gradients = torch.tensor([[1.0, math.nan]])
    together._warn_unless_same(gradients, gradients.clone())
    with pytest.warns(UserWarning, match="not the same twice on cpu"):
        together._warn_unless_same(gradients, gradients + 1e-6)


@pytest.mark.numeric
def test_workers_whose_samples_have_different_shapes_are_stacked() -> None:
    rng = torch.Generator().manual_seed(3)
    data = [(torch.randn(9, size, 6, generator=rng), torch.randint(3, (9,), generator=rng)) for size in (2, 5)]
    problem = net(data, Pooled())
    x = problem.start(0)
    gradients, _ = problem.batched([problem])([x, x], [0, 0], [0, 1], [0, 0])
    close = rounding(operations(problem) + 5, torch.float32)  # and up to five places in the mean
    for worker in range(2):
        expected, _ = problem.gradient(x, worker, 0)
        assert (gradients[worker] - expected).norm() <= close * expected.norm()


DIFFERENT: dict[str, Callable[[], Any]] = {
    "loss": lambda: net(shards(), loss=lambda outputs, targets: 2.0 * cross_entropy(outputs, targets)),
    "module": lambda: net(shards(), mlp(nn.ReLU())),
    "number in the module": lambda: net(shards(), Power(2)),
    "batch size": lambda: net(shards(), batch=5),
    "batch sizes": lambda: net(shards(), batch=[4, 4, 5]),
    "stochastic": lambda: net(shards(), batch=STOCHASTIC),
    "dataset": lambda: net([TensorDataset(*pair) for pair in shards()]),
    "precision": lambda: net(shards()).on("cpu", "bfloat16"),
    "type": lambda: net(doubled(shards()), mlp().double()),
    "buffers": lambda: net(shards(), Shifted()),
    "frozen": lambda: net(shards(), Scaled()),
    "local steps": lambda: dd.LocalSteps(net(shards()), k=1, lr=0.1),
    "number of local steps": lambda: dd.LocalSteps(net(shards()), k=3, lr=0.1),
    "size of local steps": lambda: dd.LocalSteps(net(shards()), k=3, lr=0.1),
}
PARTNERS: dict[str, Callable[[int], Any]] = {  # of those that differ from another than the plain network, by a seed of data
    "number in the module": lambda seed: net(shards(seed=seed), Power(3)),
    "buffers": lambda seed: net(shards(seed=seed), Shifted(0.25)),
    "number of local steps": lambda seed: dd.LocalSteps(net(shards(seed=seed)), k=2, lr=0.1),
    "size of local steps": lambda seed: dd.LocalSteps(net(shards(seed=seed)), k=3, lr=0.2),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_problems_that_cannot_be_stacked_have_different_batch_keys(name: str) -> None:
    partner = PARTNERS.get(name, lambda seed: net(shards(seed=seed)))
    assert DIFFERENT[name]().batch_key != partner(0).batch_key == partner(8).batch_key


ALONE: dict[str, Callable[[], dd.Problem]] = {
    "batch sizes": DIFFERENT["batch sizes"],
    "dropout": lambda: net(shards(), mlp(nn.Dropout(0.5)), batch=STOCHASTIC),
    "augmented data": lambda: net([Jittered(pair) for pair in shards()], batch=STOCHASTIC),
    "dataset": DIFFERENT["dataset"],
    "built datasets": lambda: net(lambda k: TensorDataset(*shards()[k]), workers=3),
    "local steps": lambda: dd.LocalSteps(CASES["noisy"][0], k=3, lr=0.1),
    "local steps on datasets": lambda: dd.LocalSteps(DIFFERENT["dataset"](), k=3, lr=0.1),
    "quadratic": lambda: CASES["noisy"][0],
    "logistic": lambda: CASES["logistic"][0],
}


@pytest.mark.parametrize("name", ALONE)
def test_gradients_that_cannot_be_stacked_are_taken_one_at_a_time(name: str) -> None:
    problems = [ALONE[name](), ALONE[name]().reseeded(3)]
    together = problems[0].batched(problems)
    assert isinstance(together, OneAtATime)
    jobs, models = jobs_of(problems, 12), models_of(problems[0], 12)
    alone = [problems[k].gradient(x, w, d) for x, k, w, d in zip(models, *jobs, strict=True)]
    for pieces in (models, in_pieces(models)):
        gradients, losses = together(pieces, *jobs)
        assert torch.equal(gradients, torch.stack([gradient for gradient, _ in alone]))
        assert losses.tolist() == [loss for _, loss in alone]


@pytest.mark.parametrize("kind", ["list", "tensor", "array", "range"])
def test_rows_of_shared_tensors_are_the_same_data_as_copies_of_them(kind: str) -> None:
    parts = [Subset(DATA, range(5)), Subset(DATA, range(5, 50, 2))] if kind == "range" else split(2)
    test = Subset(DATA, [1, 2, 5, 7])
    copies = net([copied(part) for part in parts], test=copied(test), weights="samples")
    turn: Any = {"list": list, "tensor": torch.tensor, "array": np.array, "range": lambda rows: rows}[kind]
    rows = net([Subset(DATA, turn(part.indices)) for part in parts], test=test, weights="samples")
    assert rows.fingerprint() == copies.fingerprint()
    for x in models_of(rows, 3):
        assert rows.evaluate(x) == copies.evaluate(x)
        for worker in range(rows.workers):
            assert torch.equal(rows.indices(worker, 40), copies.indices(worker, 40))
            (one, loss), (other, same_loss) = (p.gradient(x, worker, 40) for p in (rows, copies))
            assert torch.equal(one, other)
            assert loss == same_loss
    assert rows.shards()[0].pair[0] is INPUTS, "nothing was copied"


def test_a_worker_is_pickled_without_the_rows_of_others() -> None:
    big = TensorDataset(torch.randn(5000, 6), torch.randint(3, (5000,)))
    shard = Shard(Subset(big, [4999, 3, 3, 17]), "worker 0")
    sent = pickle.dumps(shard)
    assert len(sent) < 4000  # four rows have 128 bytes, all have 160,000
    assert big.tensors[0][4].numpy().tobytes() not in pickle.dumps(net([Subset(big, [4999, 3, 3, 17])]))
    back = pickle.loads(sent)
    for one, other in zip(shard.batch(torch.tensor([2, 0])), back.batch(torch.tensor([2, 0])), strict=True):
        assert torch.equal(one, other)
    assert [len(part) for part in back.pair] == [4, 4]
    assert shard.pair[0] is big.tensors[0], "the one that was pickled is as it was"

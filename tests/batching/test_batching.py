"""Many gradients in one call are the gradients one at a time, and a run that takes them so is the same run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.core import OneAtATime
from dualdelay.core.draws import integers_at
from dualdelay.engine.loop import Loop
from dualdelay.problems.data import Shard
from dualdelay.problems.stacked import Stacked
from dualdelay.simulation.clocks import VirtualClock
from dualdelay.simulation.gradients import Batcher, GradientsInBatches
from dualdelay.simulation.local_fleet import LocalFleet
from flat import simulate
from helpers import drift, few, operations, rounding, unlike
from own import Cuts, Holes, Jittered, Scaled, differences, mlp, shards
from tables import ALGORITHMS, CASES, LR

pytestmark = pytest.mark.numeric

ORDER = ("time", "seconds", "worker", "draw", "version", "after")
words = st.integers(-(2**63), 2**63 - 1)
places = st.lists(st.tuples(words, st.integers(1, 2**31), st.integers(0, 2**62), st.integers(0, 2**62)), min_size=1)


@few
@given(places, st.integers(1, 40))
def test_tensors_of_places_are_drawn_from_as_one_place_is(at: list[tuple[int, int, int, int]], count: int) -> None:
    seeds, bounds, *coordinates = zip(*at, strict=True)
    draws = [dd.Draws(seed, "minibatch") for seed in seeds]
    bases = torch.tensor([one.base for one in draws])
    found = integers_at(bases, torch.tensor(bounds), count, *map(torch.tensor, coordinates))
    expected = [d.integers(bound, count, *place) for d, bound, *place in zip(draws, bounds, *coordinates, strict=True)]
    assert np.array_equal(found.numpy(), np.stack(expected))


def test_the_worker_and_the_draw_name_a_minibatch_each() -> None:
    draws, bound = dd.Draws(-3, "minibatch"), torch.tensor([50, 50])
    found = integers_at(torch.tensor([draws.base] * 2), bound, 8, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert np.array_equal(found.numpy(), np.stack([draws.integers(50, 8, 1, 2), draws.integers(50, 8, 2, 1)]))
    assert not torch.equal(found[0], found[1])


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
    """A model with a number that is neither a parameter nor a buffer, nor said in its repr."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.body, self.power = mlp(), power

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) ** self.power


def whole(samples: int = 50, classes: int = 3) -> TensorDataset:
    rng = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(samples, 6, generator=rng), torch.randint(classes, (samples,), generator=rng))


DATA = whole()


def split(seed: int, workers: int = 3, data: TensorDataset = DATA) -> list[Subset]:
    """Workers' parts of the data, of unlike sizes, in random order."""
    order = dd.Draws(seed, "split").permutation(len(data)).tolist()
    ends = [len(data) * (k * k + k) // (workers * workers + workers) for k in range(workers + 1)]
    return [Subset(data, order[a:b]) for a, b in pairwise(ends)]


def copied(parts: Sequence[Subset]) -> list[tuple[Tensor, Tensor]]:
    return [tuple(tensor[part.indices] for tensor in part.dataset.tensors) for part in parts]


def net(data: Sequence[Any], model: Any = None, loss: Any = cross_entropy, batch: Any = 4, **options: Any) -> dd.Network:
    return dd.Network(model or mlp(), loss, data, batch, **options)


def doubled(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].double(), pair[1]


INPUTS, TARGETS = DATA.tensors

KIN: dict[str, Callable[[], list[Any]]] = {
    "one": lambda: [net(shards())],
    "splits of the same data": lambda: [net(split(seed), seed=seed) for seed in (0, 1, -2)],
    "pairs": lambda: [net(shards(seed=1)), net(shards(4, seed=2), seed=-7)],
    "splits and pairs": lambda: [net(split(0)), net(shards(5, seed=2), seed=1), net(split(4, 2)), net(shards())],
    "the same inputs with other targets": lambda: [net([(INPUTS, TARGETS)]), net([(INPUTS, (TARGETS + 1) % 3)])],
    "seeds": lambda: [net(shards()), net(shards()).reseeded(5)],
    "without replacement": lambda: [
        net(split(0), batch=dd.Batches(4, replacement=False)),
        net(shards(), batch=dd.Batches(4, replacement=False), seed=3),
    ],
    "with and without": lambda: [net(split(0), batch=dd.Batches(4, replacement=False)), net(split(1)), net(shards())],
    "by samples": lambda: [net(split(0), weights="samples"), net(shards(), weights="equal"), net(split(0))],
    "frozen and without dimension": lambda: [net(split(0), Scaled()), net(shards(), Scaled())],
    "buffers": lambda: [net(split(0), Shifted()), net(split(1), Shifted())],
    "short buffers": lambda: [net(split(0), Shifted(dtype=torch.bfloat16)), net(split(1), Shifted(dtype=torch.bfloat16))],
    "unused": lambda: [net(split(0), Unused()), net(shards(), Unused())],
    "tied": lambda: [net(split(0), Tied()), net(split(1), Tied())],
    "normed": lambda: [net(split(0), mlp(nn.LayerNorm(8), nn.GELU())), net(shards(), mlp(nn.LayerNorm(8), nn.GELU()))],
    "float64": lambda: [net([doubled(pair) for pair in shards(seed=k)], mlp().double(), seed=k) for k in (0, 1)],
    "squares": lambda: [net([(x, x[:, :3]) for x, _ in shards(seed=k)], loss=mse_loss) for k in (0, 1)],
    "one sample": lambda: [net(split(0), batch=1), net([(INPUTS[:1], TARGETS[:1])], batch=1)],
    "local steps": lambda: [dd.LocalSteps(net(data, seed=3), k=3, lr=0.1) for data in (split(0), shards())],
    "made by a function": lambda: [net(lambda k: shards()[k], mlp, workers=3), net(split(0), mlp)],
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


@pytest.mark.parametrize("name", KIN)
def test_gradients_taken_together_are_those_taken_alone(name: str) -> None:
    """To the last few digits: those of another minibatch, model or scale would be off by a hundredth and more."""
    problems = KIN[name]()
    assert len({problem.batch_key for problem in problems}) == 1
    together = problems[0].batched(problems)
    assert isinstance(together, Stacked) or name == "local steps"
    assert not isinstance(together, OneAtATime)
    jobs, models = jobs_of(problems, 16), models_of(problems[0], 16)
    alone = [problems[k].gradient(x, w, d) for x, k, w, d in zip(models, *jobs, strict=True)]
    close, size = rounding(operations(problems[0]), models[0].dtype), max(gradient.norm() for gradient, _ in alone)
    for pieces in (models, in_pieces(models), [torch.stack(models)]):
        gradients, losses = together(pieces, *jobs)
        assert gradients.shape == (16, len(models[0]))
        assert gradients.dtype == models[0].dtype
        for found, value, (gradient, loss) in zip(gradients, losses.tolist(), alone, strict=True):
            assert (found - gradient).norm() <= close * size
            assert math.isclose(value, loss, rel_tol=close)
    for k, problem in enumerate(problems):  # nothing was written to
        assert torch.equal(problem.start(0), KIN[name]()[k].start(0))


def test_workers_whose_samples_have_unlike_shapes_are_taken_together() -> None:
    rng = torch.Generator().manual_seed(3)
    data = [(torch.randn(9, size, 6, generator=rng), torch.randint(3, (9,), generator=rng)) for size in (2, 5)]

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs).mean(1)

    problem = net(data, Pooled())
    x = problem.start(0)
    gradients, _ = problem.batched([problem])([x, x], [0, 0], [0, 1], [0, 0])
    close = rounding(operations(problem) + 5, torch.float32)  # and up to five places in the mean
    for worker in range(2):
        expected, _ = problem.gradient(x, worker, 0)
        assert (gradients[worker] - expected).norm() <= close * expected.norm()


UNLIKE: dict[str, Callable[[], Any]] = {
    "loss": lambda: net(shards(), loss=lambda outputs, targets: 2.0 * cross_entropy(outputs, targets)),
    "module": lambda: net(shards(), mlp(nn.ReLU())),
    "numbers in the module": lambda: net(shards(), Power(2)),
    "batch size": lambda: net(shards(), batch=5),
    "batch sizes": lambda: net(shards(), batch=[4, 4, 5]),
    "chance": lambda: net(shards(), batch=dd.Batches(4, stochastic=True)),
    "dataset": lambda: net([TensorDataset(*pair) for pair in shards()]),
    "precision": lambda: net(shards()).on("cpu", "bfloat16"),
    "type": lambda: net([doubled(pair) for pair in shards()], mlp().double()),
    "buffers": lambda: net(shards(), Shifted()),
    "frozen": lambda: net(shards(), Scaled()),
    "local steps": lambda: dd.LocalSteps(net(shards()), k=1, lr=0.1),
    "number of local steps": lambda: dd.LocalSteps(net(shards()), k=3, lr=0.1),
    "size of local steps": lambda: dd.LocalSteps(net(shards()), k=3, lr=0.1),
}
PARTNER: dict[str, Callable[[], Any]] = {
    "number of local steps": lambda: dd.LocalSteps(net(shards()), k=2, lr=0.1),
    "size of local steps": lambda: dd.LocalSteps(net(shards()), k=3, lr=0.2),
    "numbers in the module": lambda: net(shards(), Power(3)),
    "buffers": lambda: net(shards(), Shifted(0.25)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_problems_that_cannot_be_taken_together_are_no_kin(name: str) -> None:
    one, other = PARTNER.get(name, lambda: net(shards()))(), UNLIKE[name]()
    assert one.batch_key != other.batch_key
    assert one.batch_key == PARTNER.get(name, lambda: net(shards(seed=8)))().batch_key


ALONE: dict[str, Callable[[], dd.Problem]] = {
    "batch sizes": UNLIKE["batch sizes"],
    "chance": lambda: net(shards(), mlp(nn.Dropout(0.5)), batch=dd.Batches(4, stochastic=True)),
    "augmented data": lambda: net([Jittered(pair) for pair in shards()], batch=dd.Batches(4, stochastic=True)),
    "dataset": UNLIKE["dataset"],
    "built datasets": lambda: net(lambda k: TensorDataset(*shards()[k]), workers=3),
    "local steps": lambda: dd.LocalSteps(CASES["noisy"][0], k=3, lr=0.1),
    "local steps on datasets": lambda: dd.LocalSteps(UNLIKE["dataset"](), k=3, lr=0.1),
    "quadratic": lambda: CASES["noisy"][0],
    "logistic": lambda: CASES["logistic"][0],
}


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_stacked_is_taken_one_at_a_time(name: str) -> None:
    problems = [ALONE[name](), ALONE[name]().reseeded(3)]
    together = problems[0].batched(problems)
    assert isinstance(together, OneAtATime)
    jobs, models = jobs_of(problems, 12), models_of(problems[0], 12)
    alone = [problems[k].gradient(x, w, d) for x, k, w, d in zip(models, *jobs, strict=True)]
    for pieces in (models, in_pieces(models)):
        gradients, losses = together(pieces, *jobs)
        assert torch.equal(gradients, torch.stack([gradient for gradient, _ in alone]))
        assert losses.tolist() == [loss for _, loss in alone]


def test_unlike_problems_can_be_taken_one_at_a_time() -> None:
    problems = [UNLIKE[name]() for name in ("loss", "batch size", "chance", "dataset")]
    x = problems[0].start(0)
    gradients, _ = OneAtATime(problems)([x.expand(4, -1)], [0, 1, 2, 3], [2, 1, 0, 2], [5, 6, 7, 8])
    for k, (worker, draw) in enumerate([(2, 5), (1, 6), (0, 7), (2, 8)]):
        assert torch.equal(gradients[k], problems[k].gradient(x, worker, draw)[0])


@pytest.mark.parametrize("kind", ["list", "tensor", "array", "range"])
def test_rows_of_shared_tensors_are_the_same_data_as_copies_of_them(kind: str) -> None:
    parts = split(2) if kind != "range" else [Subset(DATA, range(5)), Subset(DATA, range(5, 50, 2))]
    exam = Subset(DATA, [1, 2, 5, 7])
    pairs = copied(parts)
    turn = {"list": list, "tensor": torch.tensor, "array": np.array, "range": range}[kind]
    if kind != "range":
        parts = [Subset(DATA, turn(part.indices)) for part in parts]
    rows, copies = net(parts, test=exam, weights="samples"), net(pairs, test=copied([exam])[0], weights="samples")
    assert rows.fingerprint() == copies.fingerprint()
    for x in models_of(rows, 3):
        assert rows.evaluate(x) == copies.evaluate(x)
        for worker in range(rows.workers):
            assert torch.equal(rows.indices(worker, 40), copies.indices(worker, 40))
            (one, loss), (other, same_loss) = (p.gradient(x, worker, 40) for p in (rows, copies))
            assert torch.equal(one, other)
            assert loss == same_loss
    assert rows.shards()[0].pair[0] is DATA.tensors[0]  # nothing was copied


def test_a_worker_is_pickled_without_the_rows_of_others() -> None:
    big = TensorDataset(torch.randn(5000, 6), torch.randint(3, (5000,)))
    shard = Shard(Subset(big, [4999, 3, 3, 17]), "worker 0")
    sent = pickle.dumps(shard)
    assert len(sent) < 4000
    assert big.tensors[0][4].numpy().tobytes() not in pickle.dumps(net([Subset(big, [4999, 3, 3, 17])]))
    back = pickle.loads(sent)
    for ours, theirs in zip(shard.batch(torch.tensor([2, 0])), back.batch(torch.tensor([2, 0])), strict=True):
        assert torch.equal(ours, theirs)
    assert [len(part) for part in back.pair] == [4, 4]
    assert shard.pair[0] is big.tensors[0]  # the one that was pickled is what it was


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batched_run_is_the_same_run(name: str) -> None:
    """One wrong minibatch would move the weights by 1e-3 of their size with most methods, by 7e-5 with the calmest."""
    (problem, speeds), T = CASES["digits"], 10
    if name in ("dude int8", "dude sparse"):  # in float32 a number at the edge of two bytes, or of the largest, goes astray
        problem = net([doubled(pair) for pair in shards(4)], mlp().double())
    options = {"updates": T, "evaluate_every": T}
    alone, batched = (simulate(ALGORITHMS[name], problem, speeds, batch=batch, **options) for batch in (False, True))
    for column in ORDER:
        assert np.array_equal(alone.trace[column], batched.trace[column]), column
    kind, k = alone.x.dtype, operations(problem)
    close = drift(T, LR, k, kind, curvature=6.0)  # the losses of the digits' workers are smooth to 5.1 and less
    np.testing.assert_allclose(batched.trace.loss, alone.trace.loss, rtol=rounding(k, kind) + close)
    assert (batched.x - alone.x).norm() <= close * alone.x.norm()
    assert (alone.x - problem.start(0)).norm() > 5e-3 * alone.x.norm()


@pytest.mark.parametrize("case", ["q3", "noisy", "logistic", "local steps"])
@pytest.mark.parametrize("name", ["dude two", "shuffled"])
def test_gradients_taken_one_at_a_time_in_a_batch_have_the_same_bits(name: str, case: str) -> None:
    one, other = (
        dd.simulate(ALGORITHMS[name], *CASES[case], updates=9, compute=dd.Compute(batch=batch)) for batch in (False, True)
    )
    assert differences(one, other) == []


class Counting:
    """Takes gradients one at a time, and writes down what it was asked for."""

    sway = 0.0  # what each job in a call adds to all gradients of that call, as a share

    def __init__(self, problems: Sequence[dd.Problem], most: int) -> None:
        self._inner, self.most = OneAtATime(problems), most
        self.calls: list[list[tuple[int, int]]] = []
        self.before: Callable[[list[tuple[int, int]]], None] = lambda jobs: None

    def __call__(self, x: Any, which: Any, workers: Any, draws: Any) -> tuple[Tensor, Tensor]:
        jobs = list(zip(workers, draws, strict=True))
        self.before(jobs)
        self.calls.append(jobs)
        assert set(which) == {0}
        gradients, losses = self._inner(x, which, workers, draws)
        return gradients * (1.0 + self.sway * len(jobs)), losses


class Counted(dd.Quadratic):
    """A problem that lends its gradients by a counting object."""

    most = 1 << 62

    def batched(self, problems: Sequence[dd.Problem]) -> Counting:
        self.counting = Counting(problems, self.most)
        return self.counting


def counted(n: int, most: int = 1 << 62) -> Counted:
    problem = Counted([[float(i), 1.0] for i in range(n)], noise=0.5)
    problem.most = most
    return problem


def test_workers_of_equal_speed_need_one_call_a_round() -> None:
    problem = counted(6)
    dd.simulate(dd.SyncSGD(LR), problem, dd.FixedSpeeds([1.0] * 6), updates=9, compute=dd.Compute(batch=True))
    assert problem.counting.calls == [[(worker, turn) for worker in range(6)] for turn in range(9)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_call_holds_every_job_in_flight_whose_gradient_is_not_known(name: str) -> None:
    problem, speeds, algorithm = (
        counted(5),
        dd.speeds.ExponentialSpeeds([1.0, 1.0, 2.0, 3.0, 9.0], seed=3),
        ALGORITHMS[name],
    )
    counting = problem.batched([problem])
    fleet = LocalFleet(
        problem, VirtualClock(speeds), algorithm.message, gradients=GradientsInBatches(Batcher(counting), [0])
    )
    loop = Loop(algorithm, problem, fleet, problem.start(0))
    known: set[tuple[int, int]] = set()

    def look(jobs: list[tuple[int, int]]) -> None:
        due = fleet.peek()
        assert due is not None
        assert (due.worker, due.draw) in jobs  # nobody asks before it must
        assert sorted(jobs) == sorted({(job.worker, job.draw) for job in fleet.in_flight} - known)
        known.update(jobs)

    counting.before = look
    loop.begin()
    arrived = []
    while len(arrived) < 60:
        a = loop.advance()
        if a is None:  # a wake
            continue
        arrived.append((a.job.worker, a.job.draw))
    asked = [job for jobs in counting.calls for job in jobs]
    assert len(asked) == len(set(asked))
    assert set(arrived) <= set(asked)
    assert len(counting.calls) < len(arrived) or name in ("siag", "iag", "sag", "saga")  # whose workers compute in turn


@pytest.mark.parametrize("most", [1, 3, 4, 7, 8])
def test_no_call_holds_more_than_may_be_asked_for(most: int) -> None:
    problem, whole_one, speeds = counted(7, most), counted(7), dd.FixedSpeeds([1.0] * 7)
    few_each, all_at_once = (
        dd.simulate(dd.SyncSGD(LR), one, speeds, updates=4, compute=dd.Compute(batch=True)) for one in (problem, whole_one)
    )
    rounds = [[(worker, turn) for worker in range(7)] for turn in range(4)]
    assert problem.counting.calls == [jobs[a : a + most] for jobs in rounds for a in range(0, 7, most)]
    assert differences(few_each, all_at_once) == []


@pytest.mark.parametrize("name", ["dude", "dude workers", "fedbuff wait", "uniform"])
def test_gradients_that_are_not_finite_are_retried_as_without_batching(name: str) -> None:
    problem, speeds = (
        Holes([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5),
        dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5),
    )
    one, other = (
        dd.simulate(ALGORITHMS[name], problem, speeds, updates=24, compute=dd.Compute(batch=batch))
        for batch in (False, True)
    )
    assert sum(event["kind"] == "rejected" for event in one.trace.events) > 1
    assert differences(one, other) == []


def test_gradients_of_wrong_shape_are_retried_as_without_batching() -> None:
    problem, speeds = (
        Cuts([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5),
        dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5),
    )
    one, other = (
        dd.simulate(dd.DuDe(LR), problem, speeds, updates=24, compute=dd.Compute(batch=batch)) for batch in (False, True)
    )
    assert sum(event["kind"] == "rejected" for event in one.trace.events) > 1
    assert differences(one, other) == []


class Rooted(nn.Module):
    """A model whose outputs at a sample of zeros are finite, and whose gradient there is not: one of them is a length.

    Elsewhere it is as smooth as another. The root of a single number would not be: near zero its slope is all rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()[0]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.body.weight.T
        return torch.cat([outputs[:, 1:], outputs.square().sum(1, keepdim=True).sqrt()], 1) + self.body.bias


def spoilt() -> dd.Network:
    """A network in float64 some of whose minibatches have a gradient that is not finite."""
    data = [doubled(pair) for pair in shards(4)]
    data[2][0][5] = data[3][0][:3] = 0.0
    return net(data, Rooted().double(), full_gradient=False)


@pytest.mark.parametrize("name", ["dude", "dude two workers", "sync", "shuffled"])
def test_stacked_gradients_that_are_not_finite_are_retried_as_alone(name: str) -> None:
    speeds = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0], seed=5)
    one, other = (
        dd.simulate(ALGORITHMS[name], spoilt(), speeds, updates=20, compute=dd.Compute(batch=batch))
        for batch in (False, True)
    )
    assert sum(event["kind"] == "rejected" for event in one.trace.events) > 1
    assert one.trace.events == other.trace.events
    for column in ORDER:
        assert np.array_equal(one.trace[column], other.trace[column]), column
    close = drift(20, LR, operations(one.problem), curvature=6.0)
    assert (one.x - other.x).norm() <= close * one.x.norm() < 1e-9 * (one.x - one.problem.start(0)).norm()


def test_a_gradient_too_large_to_be_squared_is_no_reason_to_retry() -> None:
    problem = net([(torch.full((4, 1), 1e25), torch.zeros(4, 1))] * 2, nn.Linear(1, 1, bias=False), lambda y, _: y.mean())
    assert problem.batched([problem])([problem.start(0)], [0], [0], [0])[0].square().sum() == math.inf
    for batch in (False, True):
        run = dd.simulate(dd.DuDe(1e-30), problem, dd.FixedSpeeds([1.0, 2.0]), updates=3, compute=dd.Compute(batch=batch))
        assert run.trace.events == []


def test_an_error_in_a_batch_says_whose_job_it_was() -> None:
    class Broken(dd.Quadratic):
        def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
            if (worker, draw) == (2, 0):
                raise ValueError("no data")
            return super().gradient(x, worker, draw)

    problem = Broken([[0.0], [6.0], [12.0]])
    with pytest.raises(dd.RunFailed, match="worker 2 could not compute its job number 0: no data"):
        dd.simulate(dd.DuDe(LR), problem, dd.FixedSpeeds([1.0, 2.0, 4.0]), updates=3, compute=dd.Compute(batch=True))


STOPPED: dict[str, Callable[[], dd.Problem]] = {
    "stacked": lambda: net(split(0), seed=3),
    "without replacement": lambda: net(shards(), batch=dd.Batches(4, replacement=False)),
    "not finite": spoilt,
    "one at a time": lambda: unlike(3, 2, noise=0.5),
    "local steps": lambda: dd.LocalSteps(net(shards()), k=2, lr=0.1),
}


@pytest.mark.parametrize("kind", STOPPED)
@pytest.mark.parametrize("name", ["dude two workers", "shuffled"])
def test_a_batched_run_that_was_stopped_ends_with_the_same_bits_and_can_be_replayed(
    name: str, kind: str, tmp_path: Path
) -> None:
    problem, algorithm = STOPPED[kind](), ALGORITHMS[name]
    speeds = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0][: problem.workers], seed=5)
    options: dict[str, Any] = {"batch": True, "evaluate_every": 9, "checkpoint_every": 5}
    straight = simulate(algorithm, problem, speeds, updates=18, folder=tmp_path / "straight", **options)
    for updates in (1, 7):
        folder = tmp_path / str(updates)
        simulate(algorithm, problem, speeds, updates=updates, folder=folder, **options)
        resumed = dd.resume(folder, updates=18, problem=STOPPED[kind]())
        assert differences(straight, resumed) == []
    assert differences(dd.replay(tmp_path / "7", STOPPED[kind]()), straight) == ["ended"]


class Swayed(Holes):
    """Last digits depend on how many jobs a call holds, as on a GPU, so that the calls themselves must be the same."""

    def __init__(self, holes: bool) -> None:
        super().__init__([[0.0, 1.0], [6.0, 0.0], [2.0, 2.0]], noise=0.5)
        self._holes = holes

    def spoilt(self, gradient: Tensor) -> Tensor:
        return super().spoilt(gradient) if self._holes else gradient

    def batched(self, problems: Sequence[dd.Problem]) -> Counting:
        self.counting = Counting(problems, 1 << 62)
        self.counting.sway = 2.0**-40
        return self.counting


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ["dude", "dude two workers", "uniform"])
def test_a_run_that_goes_on_or_is_replayed_makes_the_same_calls(name: str, holes: bool, tmp_path: Path) -> None:
    speeds, algorithm = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5), ALGORITHMS[name]
    problem, options = Swayed(holes), {"batch": True, "evaluate_every": 30, "checkpoint_every": 5}
    straight = simulate(algorithm, problem, speeds, updates=30, folder=tmp_path / "straight", **options)
    calls = problem.counting.calls
    assert any(event["kind"] == "rejected" for event in straight.trace.events) == holes
    for updates in (3, 8, 14):
        first, then = Swayed(holes), Swayed(holes)
        simulate(algorithm, first, speeds, updates=updates, folder=tmp_path / str(updates), **options)
        assert differences(dd.resume(tmp_path / str(updates), updates=30, problem=then), straight) == []
        assert first.counting.calls + then.counting.calls == calls
    again = Swayed(holes)
    assert torch.equal(dd.replay(tmp_path / "straight", again).x, straight.x)
    assert again.counting.calls == calls


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, "device is 'tpu'; expected 'cpu' or 'cuda'"),
        ({"device": "meta"}, "device is 'meta'; expected 'cpu' or 'cuda'"),
        ({"precision": "float16"}, "precision is 'float16'"),
        ({"precision": "tf32"}, "'tf32' is a mode of GPUs; on the processor use"),
        ({"precision": "tf32", "device": "cpu"}, "'tf32' is a mode of GPUs; on the processor use"),
    ],
)
def test_devices_and_precisions_that_are_not_there_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dd.BadInput, match=said):
        simulate(dd.DuDe(LR), net(shards()), dd.FixedSpeeds([1.0] * 3), updates=1, **options)


@pytest.mark.parametrize("case", ["q3", "logistic", "local steps"])
def test_problems_with_arithmetic_of_their_own_are_refused_another(case: str) -> None:
    problem, speeds = CASES[case]
    said = f"{type(getattr(problem, 'problem', problem)).__name__} is computed on the processor in its own precision"
    for place in (("cuda", "float32"), ("cpu", "bfloat16")):
        with pytest.raises(dd.BadInput, match=said):
            problem.on(*place)
    with pytest.raises(dd.BadInput, match=said):
        dd.simulate(dd.DuDe(LR), problem, speeds, updates=1, compute=dd.Compute(precision="bfloat16"))
    assert problem.on("cpu").fingerprint() == problem.fingerprint()


@pytest.mark.parametrize("together", [False, True])
def test_short_products_change_a_gradient_a_little(together: bool) -> None:
    exact = net(split(0))
    short = exact.on("cpu", "bfloat16")
    # weights, inputs and outputs of two layers are rounded on the way there and back, and the outputs of what is between
    most, least = rounding(16, torch.bfloat16) / 2, rounding(operations(exact), torch.float32)
    for x in models_of(exact, 5):
        expected, _ = exact.gradient(x, 2, 7)
        found = short.batched([short])([x], [0], [2], [7])[0][0] if together else short.gradient(x, 2, 7)[0]
        assert found.dtype == torch.float32
        assert least * expected.norm() < (found - expected).norm() <= most * expected.norm()
    assert torch.equal(short.start(0), exact.start(0))


def test_a_run_with_short_products_says_so_and_is_replayed_with_them(tmp_path: Path) -> None:
    speeds = dd.FixedSpeeds([1.0, 2.0, 4.0])
    exact, short = (
        dd.simulate(
            dd.DuDe(0.1),
            net(split(0)),
            speeds,
            updates=9,
            compute=dd.Compute(precision=precision),
            folder=tmp_path / precision,
        )
        for precision in ("float32", "bfloat16")
    )
    assert 0 < (exact.x - short.x).norm() <= rounding(16, torch.bfloat16) / 2 * (exact.x - net(split(0)).start(0)).norm()
    assert torch.equal(dd.replay(tmp_path / "bfloat16", net(split(0))).x, short.x)

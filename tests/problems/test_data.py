"""Data of any structure, data that a function builds where they are needed, and problems that travel to other processes."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.theory import constants
from helpers import ROUNDED, Counts
from own import Jittered, Scaled, mlp, shards, three
from tables import LR

PAIRS = shards()  # of 20, 24 and 28 samples
STOCHASTIC = dd.Batches(4, stochastic=True)


def network(data: Any = None, model: Any = mlp, **settings: Any) -> dd.Network:
    return dd.Network(model, cross_entropy, PAIRS if data is None else data, **{"batch_size": 4, **settings})


def shard(worker: int) -> Any:
    return shards()[worker]


def point(problem: dd.Problem, seed: int = 1) -> Tensor:
    x = problem.start(0)
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


def same(a: dict[str, float], b: dict[str, float]) -> bool:
    """Whether two rows of metrics have the same bits."""
    return list(a) == list(b) and np.array(list(a.values())).tobytes() == np.array(list(b.values())).tobytes()


def there_and_back(problem: dd.Problem) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(problem))


# --- structures ---


class Taking(nn.Module):
    """The same small network for inputs that lie in a structure."""

    def __init__(self, pick: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.body, self.pick = mlp(), pick

    def forward(self, inputs: Any) -> Tensor:
        return self.body(self.pick(inputs))


class OwnLoss(nn.Module):
    """A model that takes a batch by name and gives its own loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.body(inputs)
        return SimpleNamespace(loss=cross_entropy(logits, labels), logits=logits)


def columns(make: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """Each worker's data as tensors in a structure."""
    return [make(inputs, targets) for inputs, targets in PAIRS]


def samples(make: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """Each worker's data as a list of samples in a structure."""
    return [[make(inputs, target) for inputs, target in zip(*pair, strict=True)] for pair in PAIRS]


def pair(inputs: Tensor, targets: Tensor) -> Any:
    return inputs, targets


def halves(inputs: Tensor, targets: Tensor) -> Any:
    return {"left": inputs[..., :2], "right": inputs[..., 2:]}, targets


def joined(inputs: Any) -> Tensor:
    return torch.cat([inputs["left"], inputs["right"]], -1)


def named(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"inputs": inputs, "labels": targets}


def named_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["inputs"]), batch["labels"])


def text_targets(samples: list[Any]) -> Any:
    return torch.stack([inputs for inputs, _ in samples]), [str(int(target)) for _, target in samples]


def loss_of_texts(outputs: Tensor, texts: list[str]) -> Tensor:
    return cross_entropy(outputs, torch.tensor([int(text) for text in texts]))


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True)
    return inputs, torch.stack([target for _, target in samples])


TEXTS = dd.Batches(4, collate_fn=text_targets)
STRUCTURES: dict[str, Callable[[], dd.Network]] = {
    "pair": lambda: dd.Network(mlp(), cross_entropy, PAIRS, 4),
    "one-tuple": lambda: dd.Network(Taking(lambda inputs: inputs[0]), cross_entropy, columns(lambda x, y: ((x,), y)), 4),
    "dict of two": lambda: dd.Network(Taking(joined), cross_entropy, columns(halves), 4),
    "lists of pairs": lambda: dd.Network(mlp(), cross_entropy, samples(pair), 4),
    "lists of dicts": lambda: dd.Network(Taking(joined), cross_entropy, samples(halves), 4),
    "datasets": lambda: dd.Network(
        mlp(), cross_entropy, [TensorDataset(*PAIRS[0]), Subset(TensorDataset(*PAIRS[1]), range(24)), PAIRS[2]], 4
    ),
    "arrays": lambda: dd.Network(mlp(), cross_entropy, columns(lambda x, y: (x.numpy(), y.numpy())), 4),
    "step": lambda: dd.Network(mlp(), shards=columns(named), batch_size=4, step=named_loss),
    "the model's own loss": lambda: dd.Network(OwnLoss(), shards=columns(named), batch_size=4),
    "collated texts": lambda: dd.Network(mlp(), loss_of_texts, samples(pair), TEXTS),
    "collated tensors": lambda: dd.Network(mlp(), loss_of_texts, PAIRS, TEXTS),
    "a function": lambda: dd.Network(Taking(joined), cross_entropy, lambda k: halves(*PAIRS[k]), 4, workers=3),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", STRUCTURES)
def test_whatever_the_structure_objective_gradient_and_run_are_those_of_the_plain_pair(name: str) -> None:
    problem, plain = STRUCTURES[name](), STRUCTURES["pair"]()
    x = plain.start(0)
    losses = [cross_entropy(mlp()(inputs), targets).item() for inputs, targets in PAIRS]
    metrics = problem.evaluate(x)
    assert metrics["objective"] == pytest.approx(sum(losses) / 3, rel=ROUNDED)
    # pairs of several workers are evaluated in one call, in another order of summation
    assert metrics == pytest.approx(plain.evaluate(x), rel=ROUNDED, nan_ok=True)
    for worker in range(3):
        assert problem.measure(x, worker)["loss"] == pytest.approx(losses[worker], rel=ROUNDED)
        assert torch.equal(problem.gradient(x, worker, 7)[0], plain.gradient(x, worker, 7)[0])
    run, expected = (dd.simulate(dd.DuDe(LR), p, three, updates=12) for p in (problem, plain))
    assert torch.equal(run.x, expected.x)
    assert problem.fingerprint() == STRUCTURES[name]().fingerprint()


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["one-tuple", "dict of two", "step"])
def test_curvature_is_that_of_the_plain_pair(name: str) -> None:
    measured, plain = (constants(STRUCTURES[key](), draws=4, iterations=30).curvature.value for key in (name, "pair"))
    assert measured == pytest.approx(plain, rel=1e-3)  # Lanczos stops at a hundredth of this


def test_samples_of_varying_length_are_padded_by_the_user_s_own_function() -> None:
    rows = [[(torch.ones(1 + row % 4, 2), torch.tensor(float(row))) for row in range(9)] for _ in range(2)]

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5]))

        def forward(self, padded: Tensor) -> Tensor:
            return self.scale * padded.sum((1, 2))

    problem = dd.Network(Sum(), mse_loss, rows, dd.Batches(3, collate_fn=padded))
    by_hand = sum((0.5 * 2 * (1 + row % 4) - row) ** 2 for row in range(9)) / 9
    assert problem.evaluate(problem.start(0))["objective"] == pytest.approx(by_hand, rel=ROUNDED)
    with pytest.raises(dd.BadInput, match=r"samples of shards\[0\] cannot be put into one batch .* collate_fn="):
        dd.Network(Sum(), mse_loss, rows, 3)


# --- data that a function builds ---

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "test data": {"test": PAIRS[1]},
    "batch for each": {"batch_size": [3, 5, 20]},
    "without replacement": {"batch_size": dd.Batches(4, replacement=False), "seed": 3},
    "dropout": {"model": lambda: mlp(nn.Dropout(0.3)), "batch_size": STOCHASTIC},
    "no full gradient": {"full_gradient": False},
    "module": {"model": Scaled()},
}


@pytest.mark.numeric
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_function_gives_the_same_problem_as_the_data(settings: dict[str, Any]) -> None:
    given, built, again = network(**settings), *(network(shard, workers=3, **settings) for _ in range(2))
    x = point(given)
    assert torch.equal(given.start(5), built.start(5))
    for worker, draw in [(2, 0), (0, 7), (2, 0), (1, 40)]:
        (expected, expected_loss), (gradient, loss) = (p.gradient(x, worker, draw) for p in (given, built))
        assert torch.equal(gradient, expected) and loss == expected_loss
        assert torch.equal(given.indices(worker, draw), built.indices(worker, draw))
    assert same(given.evaluate(x), built.evaluate(x))
    for worker, draw in [(1, 40), (2, 0)]:  # in another order
        assert torch.equal(again.gradient(x, worker, draw)[0], given.gradient(x, worker, draw)[0])


def recorded(make: Callable[..., Any] = shard) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """A function that builds data, and the places it was called for."""
    calls: list[tuple[int, ...]] = []

    def record(*place: int) -> Any:
        calls.append(place)
        return make(*place)

    return record, calls


def test_data_are_built_at_first_use_for_that_worker_alone_and_once() -> None:
    build, built = recorded()
    build_test, tested = recorded(lambda: PAIRS[0])
    problem = network(build, workers=3, test=build_test)
    x = problem.start(2)
    problem.model(x)
    assert torch.equal(problem.flat(problem.state_dict(x)), x)
    problem.fingerprint()
    reseeded, *_ = problem.reseeded(4), there_and_back(problem), copy.copy(problem), copy.deepcopy(problem)
    accuracy = problem.combine(x, {})["accuracy"]
    assert accuracy == problem.combine(x, {})["accuracy"] == network(test=PAIRS[0]).evaluate(x)["accuracy"]
    assert (built, tested) == ([], [()])  # a server does all of the above
    problem.gradient(x, 2, 0)
    problem.gradient(x, 2, 1)
    problem.measure(x, 2)
    problem.indices(1, 3)
    assert built == [(2,), (1,)]
    assert torch.equal(reseeded.indices(2, 3), network(seed=4).indices(2, 3))
    reseeded.combine(x, {})
    assert (built, tested) == ([(2,), (1,)], [()])  # the reseeded problem has the same data
    problem.evaluate(x)
    assert (built, tested) == ([(2,), (1,), (0,)], [()])


def test_a_shard_that_draws_is_the_same_in_every_process() -> None:
    def drawn(worker: int) -> Any:
        return torch.randn(20, 6), torch.randint(3, (20,))

    before = torch.get_rng_state()
    first, second = (network(drawn, mlp(nn.Dropout(0.3)), workers=2, batch_size=STOCHASTIC) for _ in range(2))
    x = point(first)
    second.gradient(x, 1, 0)
    torch.manual_seed(123)
    gradients = [first.gradient(x, 0, 0)[0], first.gradient(x, 0, 0)[0], second.gradient(x, 0, 0)[0]]
    assert torch.equal(gradients[0], gradients[1])  # the first use, which builds, has the same draws as the second
    assert torch.equal(gradients[0], gradients[2])
    torch.set_rng_state(before)
    first.gradient(x, 1, 0)
    assert torch.equal(torch.get_rng_state(), before)  # the user's own draws stay as they are


def other_shard(worker: int) -> Any:
    return shard(worker)


def empty(worker: int) -> Any:
    return torch.ones(0, 6), torch.ones(0, dtype=torch.long)


def test_the_fingerprint_of_a_function_is_its_name() -> None:
    problems = {
        "shard": network(shard, workers=3),
        "other name": network(other_shard, workers=3),
        "other count": network(shard, workers=2),
        "test": network(shard, workers=3, test=PAIRS[0]),
        "test function": network(shard, workers=3, test=empty),
        "test other function": network(shard, workers=3, test=shard),
        "data": network(),
        "callable object": network(np.vectorize(shard), workers=3),
    }
    prints = {name: problem.fingerprint() for name, problem in problems.items()}
    assert len(set(prints.values())) == len(prints)
    assert prints == {name: problem.fingerprint() for name, problem in problems.items()}
    problem = problems["shard"]
    problem.evaluate(problem.start(0))
    assert problem.fingerprint() == prints["shard"]  # computing leaves no mark


# --- problems that travel ---


def test_a_pickle_holds_no_data_that_a_function_can_build() -> None:
    def marked(worker: int) -> Any:
        return torch.full((500, 6), 1234.5678), torch.zeros(500, dtype=torch.long)

    marker = torch.tensor(1234.5678).numpy().tobytes() * 4
    problem = network(marked, workers=3, test=lambda: marked(0), batch_size=16)
    before = cloudpickle.dumps(problem)
    metrics = problem.evaluate(problem.start(0))
    after = cloudpickle.dumps(problem)
    assert marker not in after
    assert len(after) == len(before) < 20_000
    assert marker in cloudpickle.dumps(network([marked(0)]))  # data that were given travel
    assert same(cloudpickle.loads(after).evaluate(problem.start(0)), metrics)


def test_a_pickle_holds_nothing_twice() -> None:
    big = torch.randn(3000, 6, generator=torch.Generator().manual_seed(0))  # 72 kB
    problem = network([(part, torch.zeros(len(part), dtype=torch.long)) for part in big.chunk(30)])
    x = problem.start(0)
    for worker in range(30):
        problem.gradient(x, worker, 0)
    assert len(cloudpickle.dumps(problem)) < 72_000 + 24_000 + 60_000  # inputs, targets and 30 times what a shard costs
    deep = network(model=nn.Sequential(*(nn.Linear(6, 6) for _ in range(40)), nn.Linear(6, 3)))
    assert len(cloudpickle.dumps(deep)) < 100_000  # 82 parameters, each a view into the same 6.8 kB
    quadratic = dd.Quadratic(torch.randn(100, 100, generator=torch.Generator().manual_seed(0)))
    assert len(cloudpickle.dumps(quadratic)) < 100_000  # 80 kB of centers


TRAVELLERS: dict[str, Callable[[], dd.Problem]] = {
    "digits": lambda: dd.Digits(workers=3, alpha=1.0, hidden=4, weights="samples"),
    "module": lambda: network(model=mlp()),
    "factory": network,
    "frozen": lambda: network(model=Scaled()),
    "function": lambda: network(shard, workers=3, test=lambda: shard(0)),
    "dropout": lambda: network(model=lambda: mlp(nn.Dropout(0.3)), batch_size=STOCHASTIC),
    "local steps": lambda: dd.LocalSteps(network(), 3, 0.1),
    "logistic": lambda: dd.problems.Logistic(workers=3),
    "quadratic": lambda: dd.Quadratic([[0.0, 1.0], [2.0, 3.0], [4.0, 0.0]], [1.0, 2.0, 3.0], noise=0.5),
    "matrices": lambda: dd.Quadratic([[0.0, 1.0], [2.0, 3.0], [4.0, 0.0]], [np.diag([1.0, 2.0]), 2.0, 3.0]),
}


@pytest.mark.numeric
@pytest.mark.parametrize("way", [there_and_back, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("make", TRAVELLERS.values(), ids=TRAVELLERS)
def test_a_problem_is_the_same_in_another_process(make: Callable[[], dd.Problem], way: Callable[[Any], Any]) -> None:
    problem = make()
    problem.gradient(point(problem, 9), 1, 5)  # it has computed at other weights before it travels
    other = way(problem)
    for seed, worker, draw in [(1, 0, 0), (2, 2, 3), (3, 1, 33)]:
        x = point(problem, seed)
        expected, expected_loss = problem.gradient(x, worker, draw)
        other.gradient(point(problem, 9), 0, 0)  # neither moves the other's weights
        gradient, loss = other.gradient(x, worker, draw)
        assert torch.equal(gradient, expected) and loss == expected_loss
        assert torch.equal(problem.gradient(x, worker, draw)[0], expected)
        assert same(other.evaluate(x), problem.evaluate(x))
        assert all(torch.equal(tensor, problem.state_dict(x)[name]) for name, tensor in other.state_dict(x).items())
    assert torch.equal(other.start(3), problem.start(3))
    assert other.fingerprint() == problem.fingerprint()
    assert torch.equal(other.reseeded(8).gradient(x, 1, 2)[0], problem.reseeded(8).gradient(x, 1, 2)[0])


# --- refusals ---


def hits(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


TWO = [torch.ones(30, 6), torch.ones(44, 6)]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "loss and step": (lambda: network(step=named_loss), "both loss and step"),
    "no shards": (lambda: dd.Network(mlp(), cross_entropy), "there are no shards"),
    "no workers": (lambda: network([]), "shards is empty"),
    "pairs without a loss": (lambda: dd.Network(mlp(), shards=PAIRS), r"a batch is a tuple, .* model\(\*\*batch\).loss"),
    "a dict with a loss": (lambda: network(columns(named)), "a batch is a dict of 2, and a loss takes a"),
    "no tensor": (lambda: dd.Network(mlp(), shards=PAIRS, step=lambda m, b: 3.0), "the loss is a float"),
    "no gradient": (lambda: dd.Network(mlp(), shards=PAIRS, step=lambda m, b: b[0].mean()), "the loss has no gradient"),
    "unequal": (lambda: network([{"a": TWO[0], "b": TWO[1]}]), "30 inputs and 44"),
    "three unequal": (lambda: network([(*TWO, TWO[0][:25])]), r"tensors of \[30, 44, 25\] rows"),
    "texts": (lambda: network([(np.array(["a"]), np.array([0]))]), "cannot take .* numbers"),
    "sum": (lambda: dd.Network(mlp(), nn.CrossEntropyLoss(reduction="sum"), PAIRS), "sum over the minibatch, not a mean"),
    "metric's name": (lambda: network(metrics={"loss": hits}), "columns already"),
    "accuracy twice": (lambda: network(test=PAIRS[0], metrics={"accuracy": hits}), "'accuracy', which test= gives"),
    "a loss's class": (
        lambda: dd.Network(mlp(), nn.CrossEntropyLoss, PAIRS),
        r"loss is <class .*CrossEntropyLoss'>; .* such as CrossEntropyLoss\(\)",
    ),
    "a loss's name": (lambda: dd.Network(mlp(), "cross_entropy", PAIRS), "loss is 'cross_entropy'; expected a function"),
    "a step's class": (lambda: dd.Network(mlp(), shards=PAIRS, step=OwnLoss), "step is <class .* an instance"),
    "no metric": (lambda: network(metrics={"hits": 3}), "expected a name and a function"),
    "no metrics by name": (lambda: network(metrics=[hits]), "metrics is .*by name"),
    "many numbers": (lambda: network(metrics={"hits": lambda model, batch: model(batch[0])}), "one number"),
    "held out of others": (lambda: network(held_out=shards(2)), "held_out holds the data of 2"),
    "evaluation of nothing": (lambda: dd.Batches(4, evaluation_size=0), "evaluation_size is 0; expected .* 1 or more"),
    "function without workers": (lambda: network(shard), "shards is a function.* workers="),
    "a function for no workers": (lambda: network(shard, workers=0), "workers is 0.*1 or more"),
    "half a worker": (lambda: network(shard, workers=1.5), "workers is 1.5.*whole"),
    "other workers than shards": (lambda: network(workers=4), "workers is 4.*3"),
    "weights for others": (lambda: network(shard, workers=3, weights=[1.0, 2.0]), "weights has 2 numbers.*3"),
    "weight of nothing": (lambda: network(shard, workers=3, weights=[1.0, 0.0, 2.0]), r"weights\[1\] is 0.0.*above zero"),
    "batches for others": (lambda: network(shard, workers=3, batch_size=[1, 2]), "batch_size has 2.*3"),
    "batch of nothing": (lambda: network(shard, workers=3, batch_size=[1, 0, 1]), "batch_size of worker 1 is 0"),
    "batchnorm": (lambda: network(shard, mlp(nn.BatchNorm1d(8)), workers=3), "BatchNorm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_at_once(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(dd.BadInput, match=message):
        make()


def test_a_loss_that_looks_like_a_sum_for_two_copies_but_is_none_is_taken() -> None:
    """The logarithm of the number of samples doubles from two to four, but is no sum."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return torch.log(torch.tensor(float(len(batch[0])))) + 0.0 * model(batch[0]).sum()

    assert dd.Network(mlp(), shards=PAIRS, batch_size=2, step=step).workers == 3


LATER: dict[str, tuple[Callable[[int], Any], dict[str, Any], str]] = {
    "wrong kind": (lambda worker: 3, {}, r"shard\(2\) is a int; .*a row for each sample"),
    "no targets": (lambda worker: torch.ones(3, 6), {}, r"a batch is a Tensor.* pair \(inputs, targets\)"),
    "nothing returned": (lambda worker: None, {}, r"shards\(2\) gave None"),
    "empty": (empty, {}, r"shard\(2\) is empty"),
    "unequal lengths": (lambda worker: (torch.ones(3, 6), torch.ones(2)), {}, r"shard\(2\) has 3 inputs and 2 targets"),
    "too small": (
        shard,
        {"batch_size": dd.Batches([1, 1, 29], replacement=False)},
        r"shard\(2\) has 28 samples, .* 29, and replacement=False",
    ),
    "dropout": (shard, {"model": mlp(nn.Dropout(0.5))}, "dropout.*stochastic=True"),
    "augmentation": (lambda worker: Jittered(shard(worker)), {}, "torch.*stochastic=True"),
    "hidden state": (shard, {"model": mlp(Counts())}, "1.calls"),
}


@pytest.mark.parametrize("make, settings, message", LATER.values(), ids=LATER)
def test_a_worker_s_data_are_checked_at_its_first_use(
    make: Callable[[int], Any], settings: dict[str, Any], message: str
) -> None:
    record, calls = recorded(make)
    problem = network(record, workers=3, **settings)
    x = problem.start(0)
    uses = [lambda: problem.gradient(x, 2, 0), lambda: problem.measure(x, 2), lambda: problem.indices(2, 0)]
    for use in [*uses, *uses]:  # refused once is refused always
        with pytest.raises(dd.BadInput, match=message):
            use()
    assert set(calls) == {(2,)}
    assert problem.net.module.training


def test_only_the_worker_whose_data_draw_is_refused() -> None:
    problem = network(lambda worker: Jittered(shard(worker)) if worker == 1 else shard(worker), workers=3)
    x = problem.start(0)
    problem.gradient(x, 0, 0)
    with pytest.raises(dd.BadInput, match="stochastic=True"):
        problem.gradient(x, 1, 0)
    assert torch.equal(problem.gradient(x, 2, 0)[0], network().gradient(x, 2, 0)[0])


def test_a_user_s_error_passes_through_unchanged() -> None:
    error = OSError("no such disk")

    def fails(*place: int) -> Any:
        raise error

    problem = network(fails, workers=3, test=fails)
    x = problem.start(0)
    for use in (lambda: problem.gradient(x, 0, 0), lambda: problem.measure(x, 0), lambda: problem.combine(x, {})):
        with pytest.raises(OSError, match="no such disk") as caught:
            use()
        assert caught.value is error
    with pytest.raises(dd.BadInput, match=r"test\(\) is a NoneType"):
        network(test=lambda: None).evaluate(x)


@pytest.mark.parametrize("worker", [-1, 3])
@pytest.mark.parametrize("built", [False, True])
def test_a_worker_that_does_not_exist_is_refused(worker: int, built: bool) -> None:
    record, calls = recorded()
    problem = network(record, workers=3) if built else network(workers=3)
    for use in (lambda: problem.gradient(problem.start(0), worker, 0), lambda: problem.measure(problem.start(0), worker)):
        with pytest.raises(dd.BadInput, match=rf"worker is {worker}; expected one of 0\.\.2"):
            use()
    assert calls == []


class GivesLoss(nn.Module):
    """A model that gives its own loss in a dict or in a tuple."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body, self.kind = mlp(), kind

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        loss = cross_entropy(self.body(inputs), labels)
        return {"loss": loss} if self.kind is dict else (loss,)


def test_a_model_that_gives_its_own_loss_gives_it_by_name() -> None:
    data = columns(named)
    x = point(network())
    own, plain = dd.Network(GivesLoss(dict), shards=data, batch_size=4), network()
    assert torch.equal(own.gradient(x, 0, 0)[0], plain.gradient(x, 0, 0)[0])
    with pytest.raises(dd.BadInput, match=r"model\(\*\*batch\) gave a tuple without a loss.*Give the step"):
        dd.Network(GivesLoss(tuple), shards=data, batch_size=4)
    with pytest.raises(dd.BadInput, match=r"first gradient could not be computed: TypeError: .*'ids'"):
        dd.Network(GivesLoss(dict), shards=[{**one, "ids": one["labels"]} for one in data], batch_size=4)
    with pytest.raises(dd.BadInput, match=r"test gives a batch that is a dict; expected pairs"):
        dd.Network(GivesLoss(dict), shards=data, batch_size=4, test=data[0])


def test_an_error_in_a_user_s_function_names_the_worker():
    def shard(worker):
        if worker == 2:
            raise OSError("no such disk")
        return torch.ones(4, 2), torch.ones(4, 1) * worker

    problem = dd.Network(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, shard, 2, workers=3)
    with pytest.raises(OSError, match="no such disk") as error:
        dd.simulate(dd.DuDe(0.1), problem, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=5)
    last = traceback.format_exception(error.value)[-1].strip()
    assert last == "the data of worker 2 could not be built: shards(2) raised OSError: no such disk"


def test_data_of_another_type_than_the_weights_are_refused_with_what_to_do() -> None:
    model, loss = nn.Linear(2, 1), nn.functional.mse_loss

    def shard(worker: int) -> Any:
        return np.ones((4, 2)), np.ones((4, 1))  # float64, as numpy has it

    with pytest.raises(
        dd.BadInput, match=r"same dtype.*weights are torch\.float32: give inputs of that type, with \.float"
    ):
        dd.Network(model, loss, [shard(0)], 2)
    problem = dd.Network(model, loss, shard, 2, workers=2)
    with pytest.raises(RuntimeError, match="same dtype") as error:
        dd.simulate(dd.DuDe(0.1), problem, dd.FixedSpeeds([1.0, 2.0]), updates=5)
    last = traceback.format_exception(error.value)[-1]
    assert "worker 0's first gradient could not be computed" in last and ".float()" in last


FRAME, SERIES = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, 2.0]}), pd.Series([0, 1, 1])
NO_TENSORS: dict[str, tuple[Any, str]] = {
    "a frame and a column": ((FRAME, SERIES), r"\[0\] is a DataFrame; expected a tensor.*to_numpy\(\)\)\.float\(\)"),
    "a column": ((torch.ones(3, 2), SERIES), r"\[1\] is a Series; .*for classes torch\.tensor\(column\.to_numpy\(\)\)"),
    "a frame alone": (FRAME, "is a DataFrame; expected"),
    "a frame in a dict": ((({"x": FRAME},), SERIES), r"\[0\]\[0\]\['x'\] is a DataFrame"),
    "a frame of polars": ((pl.DataFrame(FRAME.to_dict("list")), torch.ones(3)), r"\[0\] is a DataFrame"),
    "a list": (([[1.0], [2.0]], torch.ones(2)), r"\[0\] is a list; expected a tensor or an array.*torch\.tensor"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_named_with_what_to_do(name: str) -> None:
    data, message = NO_TENSORS[name]
    for call in (
        lambda: dd.Network(nn.Linear(2, 2), cross_entropy, [data]),
        lambda: dd.problems.shards(data, 2),
        lambda: dd.problems.shards(data, 2, "iid"),
    ):
        with pytest.raises(dd.BadInput, match=message):
            call()

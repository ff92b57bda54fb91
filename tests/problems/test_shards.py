"""Data that a function builds where they are needed, problems that travel to other processes, and evaluation in parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from helpers import Counts, operations, rounding
from own import Jittered, Scaled, mlp, shards
from tables import CASES


def network(data: Any = None, model: Any = mlp, **settings: Any) -> dd.Network:
    return dd.Network(model, cross_entropy, shards() if data is None else data, **{"batch_size": 4, **settings})


def shard(worker: int) -> Any:
    return shards()[worker]


def recorded(make: Callable[[int], Any] = shard) -> tuple[Callable[[int], Any], list[int]]:
    """A shard function, and the workers it was called for."""
    calls: list[int] = []

    def record(worker: int) -> Any:
        calls.append(worker)
        return make(worker)

    return record, calls


def point(problem: dd.Problem, seed: int = 1) -> Tensor:
    x = problem.start(0)
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two rows of metrics have the same bits."""
    return list(one) == list(other) and np.array(list(one.values())).tobytes() == np.array(list(other.values())).tobytes()


def there_and_back(problem: dd.Problem) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(problem))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "test data": {"test": shards()[1]},
    "batch for each": {"batch_size": [3, 5, 20]},
    "without replacement": {"replacement": False, "seed": 3},
    "dropout": {"model": lambda: mlp(nn.Dropout(0.3)), "stochastic": True},
    "no full gradient": {"full_gradient": False},
    "module": {"model": Scaled()},
}


@pytest.mark.numeric
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_function_gives_the_same_problem_as_the_data(settings: dict[str, Any]) -> None:
    given, built = network(**settings), network(shard, workers=3, **settings)
    x = point(given)
    assert torch.equal(given.start(5), built.start(5))
    for worker, draw in [(2, 0), (0, 7), (2, 0), (1, 40)]:
        (expected, loss), (gradient, found) = (p.gradient(x, worker, draw) for p in (given, built))
        assert torch.equal(gradient, expected)
        assert found == loss
        assert torch.equal(given.indices(worker, draw), built.indices(worker, draw))
    assert same(given.evaluate(x), built.evaluate(x))
    again = network(shard, workers=3, **settings)
    for worker, draw in [(1, 40), (2, 0)]:  # in another order
        assert torch.equal(again.gradient(x, worker, draw)[0], given.gradient(x, worker, draw)[0])


def test_data_are_built_at_first_use_for_that_worker_alone_and_once() -> None:
    record, calls = recorded()
    tested: list[int] = []

    def test() -> Any:
        tested.append(1)
        return shards()[0]

    problem = network(record, workers=3, test=test)
    x = problem.start(2)
    problem.model(x)
    assert torch.equal(problem.flat(problem.state_dict(x)), x)
    problem.fingerprint()
    copies = [problem.reseeded(4), there_and_back(problem), copy.copy(problem), copy.deepcopy(problem)]
    accuracy = problem.combine(x, {})["accuracy"]
    assert accuracy == problem.combine(x, {})["accuracy"] == network(test=shards()[0]).evaluate(x)["accuracy"]
    assert (calls, tested) == ([], [1])  # a server does all of the above
    problem.gradient(x, 2, 0)
    problem.gradient(x, 2, 1)
    problem.measure(x, 2)
    problem.indices(1, 3)
    assert calls == [2, 1]
    assert torch.equal(copies[0].indices(2, 3), network(seed=4).indices(2, 3))
    copies[0].combine(x, {})
    assert (calls, tested) == ([2, 1], [1])  # the reseeded problem has the same data
    problem.evaluate(x)
    assert (calls, tested) == ([2, 1, 0], [1])


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
    "dropout": lambda: network(model=lambda: mlp(nn.Dropout(0.3)), stochastic=True),
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
        expected, loss = problem.gradient(x, worker, draw)
        other.gradient(point(problem, 9), 0, 0)  # neither moves the other's weights
        gradient, found = other.gradient(x, worker, draw)
        assert torch.equal(gradient, expected)
        assert found == loss
        assert torch.equal(problem.gradient(x, worker, draw)[0], expected)
        assert same(other.evaluate(x), problem.evaluate(x))
        assert all(torch.equal(tensor, problem.state_dict(x)[name]) for name, tensor in other.state_dict(x).items())
    assert torch.equal(other.start(3), problem.start(3))
    assert other.fingerprint() == problem.fingerprint()
    assert torch.equal(other.reseeded(8).gradient(x, 1, 2)[0], problem.reseeded(8).gradient(x, 1, 2)[0])


def nothing(worker: int) -> Any:
    return torch.ones(0, 6), torch.ones(0, dtype=torch.long)


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "function without workers": (lambda: network(shard), ("shards is a function", "workers=")),
    "no workers": (lambda: network(shard, workers=0), ("workers is 0", "1 or more")),
    "half a worker": (lambda: network(shard, workers=1.5), ("workers is 1.5", "whole")),
    "other workers than shards": (lambda: network(workers=4), ("workers is 4", "3")),
    "weights for others": (lambda: network(shard, workers=3, weights=[1.0, 2.0]), ("weights has 2 numbers", "3")),
    "weight of nothing": (lambda: network(shard, workers=3, weights=[1.0, 0.0, 2.0]), ("weights[1] is 0.0", "above zero")),
    "batches for others": (lambda: network(shard, workers=3, batch_size=[1, 2]), ("batch_size has 2", "3")),
    "batch of nothing": (lambda: network(shard, workers=3, batch_size=[1, 0, 1]), ("batch_size of worker 1", "0")),
    "batchnorm": (lambda: network(shard, workers=3, model=mlp(nn.BatchNorm1d(8))), ("BatchNorm",)),
}


@pytest.mark.parametrize("call, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_at_once(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(dd.BadInput) as caught:
        call()
    assert [word for word in words if word not in str(caught.value)] == []


LATER: dict[str, tuple[Callable[[int], Any], dict[str, Any], tuple[str, ...]]] = {
    "wrong kind": (lambda worker: 3, {}, ("shard(2) is a int", "a row for each sample")),
    "no targets": (lambda worker: torch.ones(3, 6), {}, ("a batch is a Tensor", "pair (inputs, targets)")),
    "nothing returned": (lambda worker: None, {}, ("shards(2) gave None",)),
    "empty": (nothing, {}, ("shard(2) is empty",)),
    "unequal lengths": (lambda worker: (torch.ones(3, 6), torch.ones(2)), {}, ("shard(2)", "3 inputs", "2 targets")),
    "too small": (
        shard,
        {"batch_size": [1, 1, 29], "replacement": False},
        ("shard(2) has 28 samples", "29", "replacement=False"),
    ),
    "dropout": (shard, {"model": mlp(nn.Dropout(0.5))}, ("dropout", "stochastic=True")),
    "augmentation": (lambda worker: Jittered(shard(worker)), {}, ("torch", "stochastic=True")),
    "hidden state": (shard, {"model": mlp(Counts())}, ("1.calls",)),
}


@pytest.mark.parametrize("make, settings, words", LATER.values(), ids=LATER)
def test_a_worker_s_data_are_checked_at_its_first_use(
    make: Callable[[int], Any], settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    record, calls = recorded(make)
    problem = network(record, workers=3, **settings)
    x = problem.start(0)
    uses = [lambda: problem.gradient(x, 2, 0), lambda: problem.measure(x, 2), lambda: problem.indices(2, 0)]
    for use in [*uses, *uses]:  # refused once is refused always
        with pytest.raises(dd.BadInput) as caught:
            use()
        assert [word for word in words if word not in str(caught.value)] == []
    assert set(calls) == {2}
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
    for use in (problem.gradient, problem.measure, problem.combine):
        with pytest.raises(OSError, match="no such disk") as caught:
            use(*{"gradient": (x, 0, 0), "measure": (x, 0), "combine": (x, {})}[use.__name__])
        assert caught.value is error
    with pytest.raises(dd.BadInput, match=r"test\(\) is a NoneType"):
        network(test=lambda: None).evaluate(x)


@pytest.mark.parametrize("worker", [-1, 3])
@pytest.mark.parametrize("built", [False, True])
def test_a_worker_that_is_not_there_is_refused(worker: int, built: bool) -> None:
    record, calls = recorded()
    problem = network(record, workers=3) if built else network(workers=3)
    for use in (lambda: problem.gradient(problem.start(0), worker, 0), lambda: problem.measure(problem.start(0), worker)):
        with pytest.raises(dd.BadInput, match=rf"worker is {worker}; expected one of 0\.\.2"):
            use()
    assert calls == []


def test_a_shard_that_draws_with_torch_is_the_same_in_every_process() -> None:
    def drawn(worker: int) -> Any:
        return torch.randn(20, 6), torch.randint(3, (20,))

    before = torch.get_rng_state()
    one, other = (network(drawn, workers=2, model=lambda: mlp(nn.Dropout(0.3)), stochastic=True) for _ in range(2))
    x = point(one)
    other.gradient(x, 1, 0)
    torch.manual_seed(123)
    gradients = [one.gradient(x, 0, 0)[0], one.gradient(x, 0, 0)[0], other.gradient(x, 0, 0)[0]]
    assert torch.equal(gradients[0], gradients[1])  # the first use, which builds, has the same draws as the second
    assert torch.equal(gradients[0], gradients[2])
    torch.set_rng_state(before)
    one.gradient(x, 1, 0)
    assert torch.equal(torch.get_rng_state(), before)  # the user's own draws stay as they are


def other_shard(worker: int) -> Any:
    return shards()[worker]


def test_the_fingerprint_of_a_function_is_its_name() -> None:
    built = {
        "shard": network(shard, workers=3),
        "other name": network(other_shard, workers=3),
        "other count": network(shard, workers=2),
        "test": network(shard, workers=3, test=shards()[0]),
        "test function": network(shard, workers=3, test=nothing),
        "test other function": network(shard, workers=3, test=shard),
        "data": network(),
        "callable object": network(np.vectorize(shard), workers=3),
    }
    prints = {name: problem.fingerprint() for name, problem in built.items()}
    assert len(set(prints.values())) == len(prints)
    assert prints == {name: problem.fingerprint() for name, problem in built.items()}
    problem = built["shard"]
    problem.evaluate(problem.start(0))
    assert problem.fingerprint() == prints["shard"]  # computing leaves no mark


# What evaluate gave before it was put together from parts, on one processor: the last digits are its own.
BEFORE = {
    "equal": (2.34262121, 2.32572245, 35 / 360, 0.365025660),
    "samples": (2.32572245, 2.32572245, 35 / 360, 0.289097128),
}


@pytest.mark.numeric
@pytest.mark.parametrize("weights", BEFORE)
def test_evaluation_in_parts_is_evaluation(weights: str) -> None:
    problem = dd.Digits(workers=4, weights=weights)
    x = problem.start(0)
    parts = {worker: there_and_back(problem).measure(x, worker) for worker in (2, 0, 3, 1)}  # whoever answers first
    metrics = problem.combine(x, parts)
    assert list(metrics) == ["objective", "pooled_loss", "accuracy", "gradient_norm", "answered", "share"]
    close = rounding(operations(problem, max(part["samples"] for part in parts.values())), torch.float32)
    assert metrics == pytest.approx(problem.evaluate(x), rel=close, abs=0)
    assert list(metrics.values())[:4] == pytest.approx(BEFORE[weights], rel=close, abs=0)
    kinds = {"loss": float, "samples": int, "size": int, "gradient": Tensor}
    assert {name: type(value) for name, value in parts[0].items()} == kinds
    assert parts[0]["gradient"].dtype == torch.float64


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_parts_of_some_workers_are_the_problem_of_those_workers(weights: str) -> None:
    problem, fewer = network(weights=weights), network([shards()[0], shards()[2]], weights=weights)
    x = point(problem)
    found = problem.combine(x, {worker: problem.measure(x, worker) for worker in (2, 0)})
    close = rounding(operations(problem, samples=28), torch.float32)
    assert found == pytest.approx(fewer.evaluate(x), rel=close, abs=0, nan_ok=True)
    none = network(test=shards()[0]).combine(x, {})
    assert math.isnan(none["objective"] + none["gradient_norm"])
    assert math.isnan(none["pooled_loss"])
    assert 0 <= none["accuracy"] <= 1


def test_without_a_full_gradient_a_part_has_none() -> None:
    problem = network(full_gradient=False)
    part = problem.measure(problem.start(0), 1)
    assert part["gradient"] is None
    assert part["samples"] == 24
    assert part["loss"] == network().measure(problem.start(0), 1)["loss"]
    assert math.isnan(problem.combine(problem.start(0), {1: part})["gradient_norm"])


def test_augmented_data_are_measured_the_same_wherever_they_are() -> None:
    problem = network([Jittered(pair) for pair in shards()], stochastic=True)
    x = point(problem)
    before = torch.get_rng_state()
    alone = {worker: there_and_back(problem).measure(x, worker) for worker in (1, 2, 0)}
    assert same(problem.combine(x, alone), problem.evaluate(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.numeric
def test_local_steps_measure_as_their_problem_does() -> None:
    inner = network(test=shards()[0])
    problem, x = dd.LocalSteps(inner, 2, 0.1), point(inner)
    assert problem.measures
    found = problem.combine(x, {w: problem.measure(x, w) for w in range(3)})
    close = rounding(operations(inner, samples=28), torch.float32)
    assert found == pytest.approx(inner.evaluate(x), rel=close, abs=0)
    assert not CASES["local steps"][0].measures


@pytest.mark.parametrize("case", ["q3", "logistic", "local steps"])
def test_a_problem_without_parts_says_so(case: str) -> None:
    problem = CASES[case][0]
    x = problem.start(0)
    assert not problem.measures
    with pytest.raises(dd.BadInput, match=r"as a whole.*evaluate"):
        problem.combine(x, {})
    with pytest.raises(dd.BadInput, match=r"as a whole.*evaluate"):
        dd.Problem.measure(problem, x, 0)  # what a problem of one's own has without further ado


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


@pytest.mark.parametrize("data", [None, shard], ids=["given", "function"])
def test_evaluation_is_in_evaluation_mode_and_leaves_training_mode_behind(data: Any) -> None:
    problem = network(data, mlp(Touchy()), workers=3, test=shards()[0])
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

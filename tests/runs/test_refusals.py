"""Calls that cannot work are refused before anything is computed or written, by one short message: nothing raw, nothing
endless, no memory filled. What one method, problem, speed model or file cannot be is tested in the room that has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.analysis.loggers import TensorBoard
from dualdelay.cli import downloads
from dualdelay.cli.datasets import CIFAR10
from dualdelay.core import Order
from dualdelay.core.errors import require_path
from own import NO_NUMBERS, mlp, refused, shards, three
from tables import CASES, LR

pytestmark = pytest.mark.usefixtures("in_time")

nan, inf = math.nan, math.inf
dude, (q3, q3_speeds) = dd.DuDe(LR), CASES["q3"]


def simulate(**options: Any) -> dd.Run:
    return dd.simulate(**{"algorithm": dude, "problem": q3, "speeds": q3_speeds, "updates": 9, **options})


def compare(algorithms: Any = (dude,), **options: Any) -> dd.Sweep:
    return dd.compare(algorithms, q3, q3_speeds, updates=3, **options)


def train(**options: Any) -> dd.Run:
    return dd.train(dude, q3, updates=3, **options)


# --- numbers ---

WHOLE: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {  # by a number, and others that it cannot be
    "threads": (lambda v: dd.Compute(threads=v), [0]),
    "cores": (lambda v: dd.Compute(cores=v), [0, -1, 1.5]),
    "keep": (lambda v: dd.Saving(keep=v), [0]),
    "checkpoint_every": (lambda v: simulate(checkpoint_every=v), [0]),
    "--evaluate-every": (lambda v: dd.Evaluation(every=v), [0]),
    "--evaluate-samples": (lambda v: dd.Evaluation(samples=v), [0]),
    "seed": (lambda v: simulate(seed=v), [1.5]),
    "updates": (lambda v: simulate(updates=v), [-1]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_that_cannot_be_is_refused(name: str) -> None:
    call, more = WHOLE[name]
    for value in (10**20, 10**5000, *more):  # more than 64 bits, and more than Python writes as a text
        refused(lambda value=value: call(value), name, "expected a whole number")


NUMBERS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "time": (lambda v: simulate(updates=None, time=v), [-1.0, nan, inf]),
    "--evaluate-seconds": (lambda v: dd.Evaluation(seconds=v), [0.0]),
    "memory_limit": (lambda v: dd.Compute(memory_limit=v), [0.0]),
    "target": (lambda v: dd.Evaluation(early_stop=dd.EarlyStop(target=v, patience=1)), [nan]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name: str) -> None:
    call, more = NUMBERS[name]
    for value in (*NO_NUMBERS, *more):
        if value is not None and not (name == "target" and isinstance(value, int)):  # a target may be any number
            refused(lambda value=value: call(value), name, "expected")


@pytest.mark.parametrize(
    "kind",
    [lambda v: np.int64(v) if isinstance(v, int) else np.float32(v), np.asarray, torch.tensor],
    ids=["numpy", "array of no dimension", "torch"],
)
def test_numbers_of_numpy_and_torch_are_taken_and_recorded_as_those_of_python(kind: Any, tmp_path: Path) -> None:
    def run(of: Callable[[Any], Any], name: str) -> list[bytes]:
        model = dd.speeds.LognormalSpeeds([of(1.0), of(2.0), of(4.0)], of(3), sigma=of(0.5))
        model = dd.speeds.DriftingSpeeds(model, every=of(2.0), keep=of(0.5))
        run = dd.simulate(
            dude,
            dd.problems.Logistic(of(3), of(2), of(20), of(0.5), of(0.25), of(4), of(7)),
            dd.SimulatedFleet(model, link=dd.speeds.Link(of(0.25), of(1000.0))),
            updates=of(20),
            time=of(50.0),
            seed=of(5),
            folder=dd.Saving(tmp_path / name, every=of(4), keep=of(2)),
            evaluation=dd.Evaluation(every=of(3), seconds=of(1.5), early_stop=dd.EarlyStop(target=of(-1.0))),
            compute=dd.Compute(threads=of(1), cores=of(1)),
        )
        return [(run.folder / file).read_bytes() for file in ("config.json", "result.json", "model.safetensors")]

    assert run(kind, "given") == run(lambda value: value, "plain")


# --- simulate ---


@dataclass(frozen=True)
class Unsavable(dd.Algorithm[Any]):
    """A method whose state cannot be saved."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
        @dataclass(kw_only=True)
        class UnsavableState(dd.State):
            seen: Any = field(default_factory=lambda: np.zeros(3))

        return UnsavableState(x, n)

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]


def network(**options: Any) -> dd.Network:
    return dd.Network(mlp(), cross_entropy, shards(), 4, **options)


def network_with_a_nan(worker: int) -> dd.Network:
    data = shards()
    data[worker][0][3, 1] = nan
    return dd.Network(mlp(), cross_entropy, data, 4)


def start(weights: Any) -> dict[str, Any]:
    return {"server": dd.Server(initial_weights=weights)}


def evaluation(**options: Any) -> dict[str, Any]:
    return {"evaluation": dd.Evaluation(**options)}


def size(model: Any) -> float:
    return 1.0


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {  # arguments of simulate, words of its message
    "a method's name": (lambda: {"algorithm": "dude"}, ("algorithm is 'dude'",)),
    "no problem": (lambda: {"problem": None}, ("problem is None",)),
    "no end": (lambda: {"updates": None}, ("updates", "time", "at least one")),
    "weights of wrong shape": (lambda: start(torch.zeros(2).double()), ("initial_weights", "(2,)", "(1,)")),
    "weights of wrong type": (lambda: start(torch.zeros(1)), ("initial_weights", "torch.float32", "torch.float64")),
    "weights of wrong names": (lambda: start({"y": torch.zeros(1).double()}), ("'y'", "'x'")),
    "weights of another model": (
        lambda: {"problem": network(), "speeds": three, **start(nn.Linear(2, 2).state_dict())},
        ("weights",),
    ),
    "weights that are no tensor": (lambda: start([0.0]), ("initial_weights", "list")),
    "weights from nowhere": (lambda: start("nowhere.safetensors"), ("nowhere.safetensors",)),
    "weights that are not finite": (lambda: start(torch.tensor([nan]).double()), ("start", "nan", "finite")),
    "a loss that is nan at the start": (
        lambda: {"problem": network_with_a_nan(2), "speeds": three},
        ("objective at the start is nan", "the data of worker 2, whose loss alone", "finite"),
    ),
    "no such metric to stop by": (
        lambda: evaluation(early_stop=dd.EarlyStop("loss", target=1.0)),
        ("'loss'", "objective", "accuracy"),
    ),
    "a metric to stop by that is never known": (
        lambda: evaluation(early_stop=dd.EarlyStop("accuracy", patience=1)),
        ("accuracy", "nan"),
    ),
    "nothing to stop by": (lambda: evaluation(early_stop=dd.EarlyStop()), ("target", "patience")),
    "what is no early stop": (lambda: evaluation(early_stop=print), ("expected a dd.EarlyStop",)),
    "no such metric to keep the best by": (
        lambda: evaluation(best_by="objektive"),
        ("no metric 'objektive' to keep the best",),
    ),
    "a best that is neither largest nor smallest": (
        lambda: evaluation(best_by="size", metrics={"size": size}),
        ("say which way is good: 'max size' or 'min size'",),
    ),
    "a state that cannot be saved": (lambda: {"algorithm": Unsavable(LR)}, ("ndarray", "cannot be saved")),
    "one function to watch": (lambda: {"watch": print}, ("expected a list of functions",)),
    "one logger": (lambda: {"watch": dd.Reporting(log=print)}, ("expected a list of functions",)),
    "a step larger than any weight": (
        lambda: {"algorithm": dd.DuDe(lr=1e39), "problem": network(), "speeds": three},
        ("lr is 1e+39; expected at most 3.4e+38", "torch.float32"),
    ),
    "checkpoints said twice": (lambda: {"folder": dd.Saving("run"), "checkpoint_every": 5}, ("dd.Saving(every=...)",)),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_run_that_cannot_work_is_refused_before_anything_is_written(what: str, inside: Path) -> None:
    options, words = CALLS[what]
    refused(lambda: simulate(**{"folder": inside / "run", **options()}), *words)
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize(
    "path", [5, "a\0b", "\ud800", "a" * 300, "/".join(["b" * 200] * 30)], ids=["5", "zero byte", "no UTF-8", "long", "deep"]
)
def test_a_name_that_no_file_can_have_is_refused(path: Any, tmp_path: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: require_path("folder", path),
        lambda: simulate(folder=path),
        lambda: train(folder=path),
        lambda: compare(folder=path),
        lambda: dd.sweep({"algorithm": [dude]}, q3, q3_speeds, folder=path, updates=3),
        lambda: TensorBoard(path),
        lambda: dd.Cifar10(root=path),
    ]
    if isinstance(path, str):
        calls += [lambda: simulate(**start(path)), lambda: downloads.fetch(CIFAR10, tmp_path, path)]
    for call in calls:
        refused(call, "Choose another name")


def test_an_empty_name_is_not_the_folder_in_which_one_is() -> None:
    for call in (lambda: simulate(folder=""), lambda: train(folder=""), lambda: compare(folder="")):
        refused(call, "folder is ''; expected a name with at least one character")


# --- metrics of a user's own ---


@pytest.mark.parametrize("name", [1, None, ("a",), "", " ", " a", "a\0b", "\ud800", "a\nb", "a" * 201])
def test_a_metric_s_name_that_no_column_can_have_is_refused(name: Any) -> None:
    given = evaluation(metrics={name: size})
    for call in (simulate, train, compare, lambda **options: compare(compute=dd.Compute(batch=True), **options)):
        refused(lambda call=call: call(**given), "metrics has", "for a name; expected")


@pytest.mark.parametrize("name", ["time", "objective", "share", "ended", "updates", "tau_max", "best_value"])
def test_a_metric_s_name_that_is_taken_is_refused(name: str) -> None:
    refused(lambda: simulate(**evaluation(metrics={name: size})), f"metrics has ['{name}']", "choose other names")
    if name not in ("time", "objective", "share"):
        problem = network(metrics={name: lambda model, batch: 1.0})
        refused(lambda: simulate(problem=problem, speeds=three), f"metrics has ['{name}']")


@pytest.mark.parametrize("name", ["algorithm", "seed"])
def test_a_metric_s_name_that_is_taken_in_comparisons_alone_is_refused_there(name: str) -> None:
    given = evaluation(metrics={name: size})
    assert simulate(**given).metrics[name].tolist()[-1] == 1.0
    refused(lambda: compare(**given), f"metrics has ['{name}']")


@pytest.mark.parametrize("value", ["1.5", None, 1j, b"1", torch.ones(2), np.ones(2), [1.0], 10**400, object()], ids=type)
def test_a_metric_that_gives_no_number_is_refused(value: Any) -> None:
    words = "metric 'own' gave", "expected one number"
    refused(lambda: simulate(**evaluation(metrics={"own": lambda model: value})), *words)
    refused(lambda: network(metrics={"own": lambda model, batch: value}), *words)


@pytest.mark.parametrize("metrics", [5, [len], "size", {"size": 5}, {"size": None}], ids=repr)
def test_metrics_that_are_no_functions_by_name_are_refused(metrics: Any) -> None:
    for call in (simulate, train):
        refused(lambda call=call: call(**evaluation(metrics=metrics)), "metrics", "expected")
    refused(lambda: network(metrics=metrics), "metrics", "expected")


@pytest.mark.parametrize(
    "numbers", [{1: 2.0}, {"objective": "1"}, {"objective": None}, 5, None, {"objective": torch.ones(2)}], ids=repr
)
def test_a_problem_that_evaluates_to_no_numbers_is_refused(numbers: Any) -> None:
    class Own(dd.Quadratic):
        def assess(self, x: Tensor, samples: Any = None) -> Any:
            return numbers, {}

    refused(lambda: simulate(problem=Own([[0.0], [6.0], [12.0]])), "expected")


# --- runs without an end ---


@dataclass(frozen=True)
class Instant(dd.FixedSpeeds):
    """Jobs that take no time."""

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
        return 0.0


@dataclass(frozen=True)
class Restless(dd.VanillaASGD):
    """A method that is woken at one and the same time again and again."""

    def first(self, s: dd.State) -> list[Order]:
        return [dd.wake(0.0)]

    def on_wake(self, s: dd.State, time: float) -> list[Order]:
        return [dd.wake(0.0)]


def until(time: float, **options: Any) -> dict[str, Any]:
    return {"updates": None, "time": time, **options}


EVERY_MOMENT = evaluation(seconds=1e-300)
AWAY = dd.speeds.AwaySpeeds(q3_speeds, [(0, 0.5, 1e12)])
ENDLESS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "evaluations until a time": (until(5.0, **EVERY_MOMENT), ("--evaluate-seconds) is 1e-300",)),
    "evaluations until an update": (EVERY_MOMENT, ("--evaluate-seconds) is 1e-300", "1,000,000")),
    "a million and more evaluations": (until(1e4, **evaluation(seconds=0.009)), ("1,000,000 evaluations at most",)),
    "a time that is hardly any": (until(5e-324), ("time is 5e-324", "1e-300")),
    "jobs that are too quick": (until(1.0, speeds=dd.FixedSpeeds([1e-300] * 3)), ("3e+300 jobs",)),
    "too long a time": (until(1e300), ("time is 1e+300", "jobs")),
    "jobs that take no time": (until(1.0, speeds=Instant([1.0] * 3)), ("worker 0 take no time",)),
    "drift after a long absence": ({"speeds": dd.speeds.DriftingSpeeds(AWAY, every=0.01), "time": 1e14}, ("times",)),
    "ticks of hardly any time": (
        {"algorithm": dd.algorithms.FedFix(LR, period=1e-320)},
        ("woken at time", "for the 10,000th time; expected a later time"),
    ),
    "wakes": ({"algorithm": Restless(LR)}, ("woken at time 0", "longer pause")),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_run_that_would_never_end_is_refused(what: str) -> None:
    options, words = ENDLESS[what]
    refused(lambda: simulate(**options), *words)


ENDING: dict[str, tuple[dict[str, Any], int]] = {  # and the updates that it makes
    "a long time, but few updates": ({"updates": 5, "time": 1e300}, 5),
    "many evaluations, but few updates": ({"updates": 5, "time": 1e9, **evaluation(seconds=1.0)}, 5),
    "hardly any time": (until(1e-300), 0),
    "a thousand evaluations": (
        until(10.0, **evaluation(seconds=1e-2)),
        11,
    ),  # one at 4, then six of worker 0, three, and one
    "jobs that take no time, but few updates": ({"speeds": Instant([1.0] * 3)}, 9),
    "some drift": ({"speeds": dd.speeds.DriftingSpeeds(q3_speeds, every=0.01)}, 9),
}


@pytest.mark.parametrize("what", ENDING)
def test_a_run_that_ends_is_not_refused(what: str) -> None:
    options, updates = ENDING[what]
    assert simulate(**options).version == updates


def test_evaluations_at_real_workers_are_at_least_a_millisecond_apart() -> None:
    refused(lambda: train(**EVERY_MOMENT), "--evaluate-seconds", "0.001 or more")


# --- comparisons ---

COMPARISONS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{
        f"algorithms {algorithms!r}": (lambda algorithms=algorithms: compare(algorithms), ("algorithms", "expected"))
        for algorithms in ({1: dude}, {"": dude}, {"\ud800": dude}, 5, [5], {})
    },
    "one algorithm": (lambda: compare(dude), ("expected a list of them: [dd.DuDe",)),
    "a method's name": (lambda: compare([dude, "dude"]), ("expected a list of them",)),
    **{
        f"a number of seeds {seeds!r}": (
            lambda seeds=seeds: compare(seeds=seeds),
            ("seeds is 3", "seeds=range(3) or seeds=[3]"),
        )
        for seeds in (3, np.int64(3), torch.tensor(3))
    },
    "half a seed": (lambda: compare(seeds=1.5), ("seeds is 1.5", "seeds=[0, 1, 2]")),
    **{
        f"seeds {seeds!r}": (lambda seeds=seeds: compare(seeds=seeds), ("seed", "expected"))
        for seeds in ("01", [0.5], ["a"], [None], [10**20], [])
    },
    "a function that makes no problem": (lambda: dd.compare([dude], lambda seed: 3, three, updates=3), ("problem",)),
}


@pytest.mark.parametrize("what", COMPARISONS)
def test_a_comparison_that_cannot_work_is_refused(what: str) -> None:
    refused(*[COMPARISONS[what][0], *COMPARISONS[what][1]])

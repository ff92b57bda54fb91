"""The worker's half on every engine, and what is refused about it: one clear error that names worker, method and field."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdelay as dd
from dualdelay.core import IndependentWorkers

SPEEDS = dd.FixedSpeeds([1.0, 2.5, 4.0])
PROBLEM = dd.Quadratic([[0.0, 1.0], [6.0, 2.0], [12.0, -3.0]], [1.0, 2.0, 0.5], noise=0.3, seed=1)


@dataclass(kw_only=True)
class Drifts(dd.State):
    drift: torch.Tensor = field(init=False)  # (d): the mean of what the workers have sent beside their gradients

    def __post_init__(self) -> None:
        self.drift = torch.zeros_like(self.weights)


@dataclass(frozen=True)
class TwoWays(IndependentWorkers[Drifts]):
    """Two named tensors each way, local steps, and a memory with a tensor and a number."""

    steps: int = 3

    def init(self, x, n, rng):
        return Drifts(x, n)

    def model(self, s, worker):
        return {"x": s.x, "drift": s.drift}

    def shapes(self, x):
        return {"moved": tuple(x.shape), "mean": tuple(x.shape)}

    def work(self, memory, model, job):
        memory = memory or {"mean": torch.zeros_like(model["x"]), "jobs": 0}
        y, total = model["x"], torch.zeros_like(model["x"])
        for _ in job:
            gradient = job.gradient(y)
            total = total + gradient
            y = y - self.lr * (gradient + 0.1 * (model["drift"] - memory["mean"]))
        mean = 0.5 * memory["mean"] + 0.5 * total / max(1, job.steps)
        return {"moved": model["x"] - y, "mean": mean - memory["mean"]}, {"mean": mean, "jobs": memory["jobs"] + 1}

    def step(self, s, a):
        s.drift = s.drift + a.parts["mean"] / s.n
        s.descend(a.parts["moved"], 0.5)
        return [dd.send(a.worker, steps=1 + (s.version + a.worker) % self.steps)]


@dataclass(frozen=True)
class Averaged(dd.VanillaASGD):
    """Vanilla ASGD whose workers average each gradient with the one before."""

    name = "averaged"

    def work(self, memory, model, job):
        gradient = job.gradient(model)
        last = gradient if memory is None else memory["last"]
        return 0.5 * (gradient + last), {"last": gradient}


METHODS: dict[str, dd.Algorithm[Any]] = {
    "two ways": TwoWays(0.05),
    "averaged": Averaged(0.05),
    "quafl": dd.algorithms.QuAFL(0.05, steps=3, sampled=2, period=1.7),
    "dude": dd.DuDe(0.05, memory="workers"),
}
SERVERS = {"whole": dd.Server(), "small": dd.Server(uplink=0.5, downlink="int8")}


def run(name: str, server: str = "whole", **options: Any) -> dd.Run:
    return dd.simulate(METHODS[name], PROBLEM, SPEEDS, **{"updates": 60, "server": SERVERS[server], **options})


def assert_same(a: dd.Run, b: dd.Run) -> None:
    assert torch.equal(a.x, b.x)
    for column in ("time", "worker", "draw", "version", "after", "fingerprint", "bytes", "steps", "down"):
        assert a.trace[column].tobytes() == b.trace[column].tobytes(), column


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", METHODS)
def test_a_half_has_the_same_bits_on_two_cores_after_a_stop_and_in_a_replay(name: str, server: str, tmp_path: Path) -> None:
    straight = run(name, server)
    assert_same(straight, run(name, server, compute=dd.Compute(cores=2)))
    own = {} if name in ("quafl", "dude") else {"algorithm": METHODS[name]}
    run(name, server, updates=23, folder=tmp_path / "a", checkpoint_every=7)
    resumed = dd.resume(tmp_path / "a", updates=60, **own)
    assert_same(straight, resumed)
    assert torch.equal(dd.replay(tmp_path / "a", **own).x, straight.x)


@pytest.mark.parametrize("name", METHODS)
def test_jobs_computed_together_are_those_computed_alone(name: str) -> None:
    alone, together = run(name), run(name, compute=dd.Compute(batch=True))
    for column in ("time", "worker", "draw", "version", "after", "bytes", "steps", "down"):
        assert alone.trace[column].tobytes() == together.trace[column].tobytes(), column
    assert torch.allclose(alone.x, together.x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_runs_side_by_side_are_those_by_themselves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from dualdelay.batching.shared_schedule import can_share

    methods = [METHODS[name], replace(METHODS[name], lr=0.02)]
    assert can_share(methods[0], 3), "they advance as rows of one tensor"
    table = dd.compare(methods, PROBLEM, SPEEDS, updates=60, compute=dd.Compute(batch=True))
    for method, (_, _, side) in zip(methods, table.ended, strict=True):
        alone = dd.simulate(method, PROBLEM, SPEEDS, updates=60)
        assert torch.allclose(side.x, alone.x, rtol=1e-10, atol=1e-10)
        assert side.bytes_down == alone.bytes_down and side.bytes_up == alone.bytes_up and side.gradients == alone.gradients


def test_a_job_takes_the_time_of_its_gradients_and_its_minibatches_are_named_in_a_row() -> None:
    asked: list[tuple[int, int]] = []

    class Watched(dd.Quadratic):
        def gradient(self, x, worker, draw):
            asked.append((worker, draw))
            return super().gradient(x, worker, draw)

    problem = Watched([[0.0, 1.0], [6.0, 2.0], [12.0, -3.0]])
    trace = dd.simulate(TwoWays(0.05), problem, SPEEDS, updates=20).trace
    assert (trace.seconds == trace.steps * [SPEEDS.times[worker] for worker in trace.worker]).all()
    assert set(trace.steps) == {1, 2, 3}
    expected = [
        (worker, 3 * draw + step)
        for worker, draw, steps in zip(trace.worker, trace.draw, trace.steps, strict=True)
        for step in range(steps)
    ]
    assert [job for job in asked if job in expected] == expected


def test_bytes_are_counted_as_they_travel() -> None:
    two, small = run("two ways"), run("two ways", "small")
    assert set(two.trace.bytes) == {2 * 2 * 8} and set(two.trace.down) == {2 * 2 * 8}
    assert two.bytes_up == 32 * len(two.trace) and two.summary()["bytes_down"] == 32 * len(two.trace)
    assert set(small.trace.bytes) == {2 * (4 + 8)}, "of two numbers one with its place"
    assert small.trace.down[0] == 32 and small.trace.down[-1] == 2 * (2 + 8), "after the first a byte for each, and a unit"
    quafl = run("quafl")
    assert set(quafl.trace.bytes) == {16} and set(quafl.trace.down) == {16}, "one model each way, never three"


def test_what_a_difference_of_the_model_leaves_out_the_next_ones_bring() -> None:
    problem = dd.Quadratic([[0.0, 100.0], [6.0, 100.0], [12.0, 100.0]])
    for way in ("int8", 0.5):
        server = dd.Server(downlink=way)
        limit = dd.simulate(dd.DuDe(0.05), problem, SPEEDS, updates=1500, server=server).x
        assert torch.allclose(limit, torch.tensor([6.0, 100.0], dtype=torch.float64), rtol=0, atol=1e-9), way


def test_what_a_message_leaves_out_is_added_to_the_next() -> None:
    sent = []
    dd.simulate(
        dd.VanillaASGD(1e-9),
        dd.Quadratic([[1.0, 3.0, -2.0]]),
        dd.FixedSpeeds([1.0]),
        updates=6,
        server=dd.Server(uplink=0.34),
        watch=[lambda s, a: sent.append(a.value)],
    )
    assert torch.stack([value != 0 for value in sent]).sum(1).tolist() == [1] * 6, "one number of three in each"
    total = torch.stack(sent).sum(0) + torch.tensor([6.0, 18.0, -12.0], dtype=torch.float64)  # the gradient is -centre
    assert total.abs().max() < 13, "and what waits is no more than a few of them"
    assert (torch.stack(sent)[:, 0] != 0).any(), "also of the smallest, in its turn"


@dataclass(frozen=True)
class Polls(dd.VanillaASGD):
    """A method that sends held jobs and polls at given times."""

    name = "polls"
    steps: int = 4

    def first(self, s):
        return [*(dd.send(worker, hold=True) for worker in s.present), dd.wake(2.0)]

    def on_wake(self, s, time):
        return [order for worker in s.present for order in (dd.poll(worker), dd.send(worker, hold=True))] + [
            dd.wake(time + 5.0)
        ]

    def step(self, s, a):
        s.descend(a.value, self.lr)
        return []

    def work(self, memory, model, job):
        total = torch.zeros_like(model)
        for _ in job:
            total = total + job.gradient(model - self.lr * total)
        return total, None


def test_a_polled_job_has_the_steps_that_there_was_time_for() -> None:
    trace = dd.simulate(Polls(0.1), PROBLEM, SPEEDS, updates=6).trace
    assert trace.time.tolist() == [2.0] * 3 + [7.0] * 3
    assert trace.steps.tolist() == [2, 0, 0, 4, 2, 1], "a step that ends at that moment counts; four are the most"
    assert trace.seconds.tolist() == [2.0, 2.0, 2.0, 4.0, 5.0, 5.0]
    late = dd.SimulatedFleet(SPEEDS, dd.speeds.Link(latency=0.5))
    trace = dd.simulate(Polls(0.1), PROBLEM, late, updates=6).trace
    assert trace.time.tolist() == [3.0] * 3 + [8.0] * 3, "the question travels, and the answer"
    assert trace.steps.tolist() == [2, 0, 0, 4, 2, 1], "and so does the model, so that all have as long as before"


def test_a_job_that_is_not_held_can_be_polled_too() -> None:
    @dataclass(frozen=True)
    class Impatient(Polls):
        def first(self, s):
            return [dd.send(0), dd.send(1), dd.wake(3.0)]

        def on_wake(self, s, time):
            return [dd.poll(0), dd.poll(1)]

        def step(self, s, a):
            s.descend(a.value, self.lr)
            return [dd.send(a.worker)]

    trace = dd.simulate(Impatient(0.1), PROBLEM, SPEEDS, updates=3).trace
    assert list(zip(trace.time, trace.worker, trace.steps, strict=True)) == [(3.0, 0, 3), (3.0, 1, 1), (7.0, 0, 4)]


def test_a_polled_message_that_is_no_good_is_done_again_without_another_poll() -> None:
    class Spoiled(dd.Quadratic):
        def gradient(self, x, worker, draw):
            gradient, loss = super().gradient(x, worker, draw)
            return gradient * float("nan") if (worker, draw) == (0, 0) else gradient, loss

    trace = dd.simulate(Polls(0.1), Spoiled([[0.0], [6.0], [12.0]]), SPEEDS, updates=6).trace
    assert [event["kind"] for event in trace.events][:2] == ["wake", "rejected"]
    again = next(row for row in trace.rows() if row["worker"] == 0)
    assert again["steps"] == 2 and again["time"] == 4.0, "as many steps as before"


# --- what is refused ---


def half(work: Any, **rules: Any) -> dd.Algorithm[Any]:
    """Vanilla ASGD with another half."""
    return dataclass(frozen=True)(type("Mine", (dd.VanillaASGD,), {"work": work, "__annotations__": {}, **rules}))(0.1)


SHAPES = {"shapes": lambda self, x: {"moved": (2,), "mean": (2,)}}
REFUSED: dict[str, tuple[dd.Algorithm[Any], list[str]]] = {
    "a tensor too few": (
        half(lambda self, memory, model, job: ({"moved": job.gradient(model)}, None), **SHAPES),
        ["worker 0", "Mine", "moved", "expected moved (2,), mean (2,)"],
    ),
    "a tensor too many": (
        half(lambda self, memory, model, job: ({k: job.gradient(model) for k in ("gradient",)} | {"more": model}, None)),
        ["worker 0", "more", "expected gradient (2,)"],
    ),
    "no names": (
        half(lambda self, memory, model, job: (job.gradient(model), None), **SHAPES),
        ["worker 0", "without a name", "expected moved (2,), mean (2,)"],
    ),
    "a wrong shape": (
        half(lambda self, memory, model, job: ({"moved": job.gradient(model), "mean": model[:1]}, None), **SHAPES),
        ["worker 0", "Mine", "(1,)", "'mean'", "expected (2,)"],
    ),
    "a wrong type": (
        half(lambda self, memory, model, job: (job.gradient(model).float(), None)),
        ["worker 0", "torch.float32", "expected torch.float64"],
    ),
    "a memory that cannot be saved": (
        half(lambda self, memory, model, job: (job.gradient(model), {"rng": torch.Generator()})),
        ["worker 0", "Mine.work", "'rng'", "Generator", "named tensors and numbers"],
    ),
    "a memory without names": (
        half(lambda self, memory, model, job: (job.gradient(model), model)),
        ["worker 0", "Mine.work", "Tensor", "named tensors and numbers"],
    ),
    "nothing kept": (
        half(lambda self, memory, model, job: job.gradient(model)),
        ["Mine.work", "a message and what it keeps"],
    ),
    "random numbers": (
        half(lambda self, memory, model, job: (job.gradient(model) + torch.rand(2), None)),
        ["Mine.work", "same arguments", "pure"],
    ),
    "a model written into": (
        half(lambda self, memory, model, job: (job.gradient(model.add_(1)), None)),
        ["Mine.work", "worker 0", "the model", "pure"],
    ),
    "a memory written into": (
        half(lambda self, memory, model, job: (job.gradient(model), {"y": memory["y"].add_(1) if memory else model + 0})),
        ["Mine.work", "worker 0", "'y'", "pure"],
    ),
    "no gradient": (half(lambda self, memory, model, job: (model, None)), ["Mine.work", "worker 0", "0 gradients", "1"]),
    "two gradients": (
        half(lambda self, memory, model, job: (job.gradient(model) + job.gradient(model), None)),
        ["worker 0", "another gradient after 1", "steps"],
    ),
    "no shapes": (half(dd.VanillaASGD.work, shapes=lambda self, x: {}), ["Mine.shapes", "{}", "name and shape"]),
    "a shape without an axis": (half(dd.VanillaASGD.work, shapes=lambda self, x: {"n": ()}), ["Mine.shapes", "one axis"]),
    "a model that is a number": (
        half(dd.VanillaASGD.work, model=lambda self, s, worker: {"x": s.x, "k": 3}),
        ["Mine.model", "int", "worker 0", "a tensor of one axis"],
    ),
    "jobs of no gradients": (half(dd.VanillaASGD.work, most_steps=property(lambda self: 0)), ["Mine.most_steps", "0"]),
    "held jobs that nobody polls": (
        half(dd.VanillaASGD.work, first=lambda self, s: [dd.send(1, hold=True)]),
        ["workers [1] hold jobs", "poll"],
    ),
    "no steps": (
        half(dd.VanillaASGD.work, step=lambda self, s, a: [dd.send(a.worker, steps=0)]),
        ["send(0, steps=0)", "from 1 to the method's most_steps, 1"],
    ),
    "too many steps": (
        half(dd.VanillaASGD.work, step=lambda self, s, a: [dd.send(a.worker, steps=2)]),
        ["send(0, steps=2)", "from 1 to the method's most_steps, 1"],
    ),
    "a poll of nobody": (
        half(dd.VanillaASGD.work, step=lambda self, s, a: [dd.poll(a.worker)]),
        ["poll(0)", "worker 0 has nothing to do", "send"],
    ),
    "a poll after a poll": (
        half(dd.VanillaASGD.work, step=lambda self, s, a: [dd.poll(1), dd.poll(1)]),
        ["poll(1)", "worker 1 has nothing to do"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_half_that_cannot_work_is_refused_by_name(case: str) -> None:
    method, words = REFUSED[case]
    with pytest.raises(dd.DualDelayError) as caught:
        dd.simulate(method, PROBLEM, SPEEDS, updates=20)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert len(text) < 600 and "Traceback" not in text


def test_a_run_whose_half_fails_later_is_saved_and_goes_on(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Fails(Averaged):
        bad: bool = True

        def work(self, memory, model, job):
            message, memory = super().work(memory, model, job)
            return message, memory | {"what": object()} if self.bad and job.draw == 5 else memory

    with pytest.raises(dd.BadInput, match="worker 0, a object"):
        dd.simulate(Fails(0.05), PROBLEM, SPEEDS, updates=40, folder=tmp_path / "a", checkpoint_every=1000)
    assert dd.load(tmp_path / "a").version > 0, "what was done is there"


def test_the_old_half_says_what_it_is_now() -> None:
    with pytest.raises(TypeError, match=r"message\(gradient, held\); expected work\(memory, model, job\)"):
        type("Old", (dd.VanillaASGD,), {"message": lambda self, gradient, held: (gradient, None)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, ["k", "0"]),
        ({"k": 2, "optimizer": "Muon"}, ["Muon", "matrices"]),
        ({"k": 2, "optimizer": "Adafactor"}, ["Adafactor", "matrices"]),
        ({"k": 2, "optimizer": "Adm"}, ["Adm", "Adam"]),
        ({"k": 2, "optimizer": "AdamW[betas=3]"}, ["AdamW", "betas"]),
        ({"k": 2, "optimizer": "AdamW[weight_decay=-1.0]"}, ["AdamW", "weight_decay"]),
        ({"k": 2, "state": "kept"}, ["state", "'kept'", "keep"]),
    ],
)
def test_local_steps_that_cannot_be_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(dd.BadInput) as caught:
        dd.LocalSteps(PROBLEM, **{"lr": 0.1, **options})
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)

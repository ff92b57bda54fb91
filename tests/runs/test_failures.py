"""Whatever fails during a run - a method's step, a problem, an evaluation, a function that watches - is named, and what was
done before it is saved, so that the run goes on as if nothing had happened.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core import Order
from dualdelay.storage import files
from own import centers, differences
from tables import CASES, LR

PROBLEM, SPEEDS = dd.Quadratic(centers, noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
END = {"updates": 60, "checkpoint_every": 1000}  # nothing is saved on the way

# --- mistakes in a user's own method ---


def own(**methods: Any) -> dd.Algorithm[Any]:
    """Vanilla ASGD with some methods of a user's own."""
    return type("Own", (dd.VanillaASGD,), methods)(LR)


def writes_into_x(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
    s.x.sub_(self.lr * a.value)
    return [dd.send(a.worker)]


def writes_into_weights(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
    s.weights -= self.lr * a.value
    s.version += 1
    return [dd.send(a.worker)]


def replaces_weights(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
    s.weights = s.weights - self.lr * a.value
    s.version += 1
    return [dd.send(a.worker)]


def replaces_weights_of_a_version(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
    s.weights = s.weights + 0.1
    return [dd.send(a.worker)]


def takes_a_version_back(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
    s.descend(a.value, self.lr)
    s.version -= 1
    return [dd.send(a.worker)]


def returns_nothing(self: Any, s: dd.State, a: dd.Arrival) -> None:
    s.descend(a.value, self.lr)


def keeps_a_field_of_its_own(self: Any, x: Tensor, n: int, rng: dd.Draws) -> dd.State:
    state = dd.State(x, n)
    vars(state)["mean"] = torch.zeros_like(x)
    return state


def writes_when_a_worker_leaves(self: Any, s: dd.State, worker: int, held: Tensor | None = None) -> list[Order]:
    s.weights.add_(1.0)
    return []


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "in place": ({"step": writes_into_x}, r"Own\.step wrote into state\.x; move it with state\.descend"),
    "weights in place": ({"step": writes_into_weights}, r"Own\.step wrote into state\.x; move it with state\.descend"),
    "replaced": ({"step": replaces_weights}, r"Own\.step replaced state\.weights without"),
    "replaced, same version": (
        {"step": replaces_weights_of_a_version},
        r"Own\.step replaced state\.weights without a new version",
    ),
    "version": ({"step": takes_a_version_back}, r"Own\.step set state\.version from 0 to 0; leave it alone"),
    "no orders": ({"step": returns_nothing}, "returned None"),
    "no field": (
        {"init": keeps_a_field_of_its_own},
        r"Own keeps mean in a State, which has no such field, so that it could not be saved",
    ),
    "leave": ({"leave": writes_when_a_worker_leaves}, r"Own\.leave wrote into state\.x"),
}


@pytest.mark.parametrize("optimizer", [None, "Adam"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_method_that_goes_around_descend_is_refused(mistake: str, optimizer: str | None) -> None:
    """It would change models in flight, an optimizer would be passed over, or a resumed run would forget."""
    methods, words = MISTAKES[mistake]
    fleet = dd.SimulatedFleet(SPEEDS, changes=[dd.speeds.leave(1, 3.5)])
    with pytest.raises(dd.BadInput, match=words):
        dd.simulate(own(**methods), PROBLEM, fleet, updates=50, server=dd.Server(optimizer=optimizer))


def test_two_updates_in_one_step_skip_no_evaluation_and_no_checkpoint(tmp_path: Path) -> None:
    def step(self: Any, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr)
        s.descend(a.value, self.lr)
        return [dd.send(a.worker)]

    saving, evaluation = dd.Saving(tmp_path / "run", every=5, keep=99), dd.Evaluation(every=5)
    run = dd.simulate(own(step=step), *CASES["q3"], updates=22, folder=saving, evaluation=evaluation)
    assert run.metrics.version.tolist() == [0, 6, 10, 16, 20, 22]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 5  # after 6, 10, 16, 20 and 22


# --- a step that fails ---


@dataclass(kw_only=True)
class Sums(dd.State):
    """A server that keeps a tensor, a list of tensors and a set."""

    total: Tensor
    each: list[Tensor]
    seen: set[int]


@dataclass(frozen=True)
class Summing(dd.Algorithm[Sums]):
    """A method of a user's own, whose step can fail after everything has been changed."""

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> Sums:
        return Sums(x, n, total=torch.zeros_like(x), each=[torch.zeros_like(x) for _ in range(n)], seen=set())

    def step(self, s: Sums, a: dd.Arrival) -> list[Order]:
        s.seen.add(s.version)
        s.total += a.value
        self.keep(s, a)
        s.descend(s.total, self.lr)
        return self.orders(s.version) or [dd.send(a.worker)]

    def keep(self, s: Sums, a: dd.Arrival) -> None:
        s.each[a.worker] = s.each[a.worker] + a.value

    def orders(self, version: int) -> Any:
        """Wrong orders, or an error."""


class Overwriting(Summing):
    """Writes into the tensors of its list, so that a step cannot be undone."""

    def keep(self, s: Sums, a: dd.Arrival) -> None:
        s.each[a.worker] += a.value


def raises() -> None:
    raise ZeroDivisionError("in the step")


FAILURES: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "unknown worker": lambda: [dd.send(9)],
    "no list": lambda: 3,
    "no order": lambda: [3],
    "never sent": lambda: [dd.cancel(0), dd.again(9)],
}
OPTIMIZERS: dict[str, Any] = {"none": None, "named": "Adam", "own": lambda params, lr: torch.optim.Adam(params, lr=lr)}
# the step itself fails in the first case, the check of its orders in all others, which the last three reach alike
FAILING = [*itertools.product(["raises", "unknown worker"], OPTIMIZERS), *((name, "none") for name in [*FAILURES][2:])]


def fail_at_33(patch: pytest.MonkeyPatch, failure: str) -> None:
    patch.setattr(Summing, "orders", lambda self, version: FAILURES[failure]() if version == 33 else None)


@pytest.mark.parametrize(("failure", "kind"), FAILING)
def test_a_step_that_fails_is_undone_and_everything_before_it_is_saved(
    failure: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = OPTIMIZERS[kind]
    options = {**END, "evaluation": dd.Evaluation(every=7), "server": dd.Server(optimizer=optimizer)}
    straight = dd.simulate(Summing(0.05), PROBLEM, SPEEDS, folder=tmp_path / "straight", **options)
    with monkeypatch.context() as patch, pytest.raises((ZeroDivisionError, dd.BadInput)) as caught:
        fail_at_33(patch, failure)
        dd.simulate(Summing(0.05), PROBLEM, SPEEDS, folder=tmp_path / "run", **options)
    assert "It is saved after 32 updates; go on with dd.resume" in str(caught.value.__notes__)
    saved = dd.load(tmp_path / "run")
    assert saved.version == len(saved.trace) == 32 and saved.ended == "failed" and "it could not go on" in saved.notes[-1]
    again = {"algorithm": Summing(0.05), "optimizer": optimizer if callable(optimizer) else None}
    assert differences(dd.resume(tmp_path / "run", **again), straight) == []
    assert dd.replay(tmp_path / "run", **again).same_bits


def test_a_step_that_cannot_be_undone_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as caught:
        fail_at_33(patch, "raises")
        dd.simulate(Overwriting(0.05), PROBLEM, SPEEDS, folder=tmp_path / "run", updates=60, checkpoint_every=10)
    assert "The last checkpoint stands, for this happened in the middle of an update" in str(caught.value.__notes__)
    saved = dd.load(tmp_path / "run")
    assert (saved.version, saved.ended) == (30, "failed")
    straight = dd.simulate(Overwriting(0.05), PROBLEM, SPEEDS, updates=60)
    assert dd.resume(tmp_path / "run", algorithm=Overwriting(0.05)).x.equal(straight.x)


# --- what else fails ---


class Unreadable(dd.Quadratic):
    """The data of one job cannot be read, at first."""

    broken = True

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        if self.broken and (worker, draw) == (1, 7):
            raise OSError("the disk is gone")
        return super().gradient(x, worker, draw)


def test_a_gradient_that_fails_is_named_and_computed_when_the_run_goes_on(tmp_path: Path) -> None:
    problem = Unreadable(centers, noise=0.3)
    with pytest.raises(dd.RunFailed, match="worker 1 could not compute its job number 7: the disk is gone"):
        dd.simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "run", **END)
    problem.broken = False
    jobs: list[Any] = []
    resumed = dd.resume(tmp_path / "run", problem=problem, watch=[lambda s, a: jobs.append(a.job)])
    assert differences(resumed, dd.simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "straight", **END)) == []
    assert jobs[0][:2] == (1, 7)  # the first thing that was missing


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def watch(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 12:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(dd.RunFailed, match="No space left") as caught:
        dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=60, checkpoint_every=10, watch=[watch], folder=tmp_path / "run")
    said = " ".join([str(caught.value), *caught.value.__notes__])
    assert said.count("No space left") == 1 and "The last checkpoint stands; go on with dualdelay resume" in said


def full_after(bytes_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which so many bytes more fit, each file for itself."""
    write, left = files.write, [bytes_left]

    def fits(path: Path, data: bytes, *advice: str) -> None:
        if len(data) > left[0]:
            with files.disk_errors(f"write {path}", *advice or ("Make room there.",)):
                raise OSError(28, "No space left on device")
        left[0] -= len(data)
        write(path, data, *advice)

    monkeypatch.setattr(files, "write", fits)


@pytest.mark.parametrize("checkpoints", [0, 1], ids=["before the first checkpoint", "after one"])
def test_a_full_disk_is_told_in_sentences_of_their_own_whichever_files_did_not_fit(
    checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the user's is the first that does not fit, and the checkpoint at the end another."""

    def watch(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 10 * checkpoints + 2:
            full_after(0, monkeypatch)
            files.write(tmp_path / "run" / "own.txt", b"some")

    with pytest.raises(dd.RunFailed, match="No space left") as caught:
        dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=60, checkpoint_every=10, watch=[watch], folder=tmp_path / "run")
    said = " ".join([str(caught.value), *caught.value.__notes__])
    assert said.count("could not") == 1 and "own.txt" in said and ".)" not in said
    stands = "The last checkpoint stands" if checkpoints else "No checkpoint had been written, so it will begin anew"
    assert f"{stands}; go on with dualdelay resume" in said
    monkeypatch.undo()
    assert dd.resume(tmp_path / "run").version == 60


def test_what_failed_before_a_full_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(state: dd.State, a: dd.Arrival) -> None:
        if state.version == 12:
            full_after(0, monkeypatch)
            raise dd.RunFailed("the watch is broken.")

    with pytest.raises(dd.RunFailed, match=r"^the watch is broken\.") as caught:
        dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, updates=60, checkpoint_every=10, watch=[watch], folder=tmp_path / "run")
    [note] = caught.value.__notes__
    assert note.startswith("It could not be saved: could not write ") and ".)" not in note
    assert "then resume. The last checkpoint stands; go on with dualdelay resume" in note


class Stumbles(dd.Quadratic):
    """A problem whose evaluation fails once."""

    left = -1

    def evaluate(self, x: Tensor) -> dict[str, float]:
        type(self).left -= 1
        if type(self).left == 0:
            raise OSError(28, "No space left on device")
        return super().evaluate(x)


SCHEDULES = {
    "by updates": dd.Evaluation(every=7),
    "by time": dd.Evaluation(seconds=3.0),
    "by both": dd.Evaluation(every=7, seconds=3.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", [2, 5, 9])
def test_an_evaluation_that_fails_is_made_when_the_run_goes_on(schedule: str, at: int, tmp_path: Path) -> None:
    problem, options = Stumbles(centers, noise=0.3), {**END, "evaluation": SCHEDULES[schedule]}
    straight = dd.simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "straight", **options)
    Stumbles.left = at
    with pytest.raises(OSError, match="No space") as caught:
        dd.simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "run", **options)
    assert "It is saved after" in str(caught.value.__notes__)
    assert (tmp_path / "run" / "failed.json").exists() and dd.load(tmp_path / "run").ended == "failed"
    assert differences(dd.resume(tmp_path / "run", problem=problem), straight) == []


@pytest.mark.parametrize("error", [ValueError("own"), SystemExit(3)], ids=["exception", "exit"])
def test_a_watch_function_that_fails_leaves_a_run_that_goes_on(error: BaseException, tmp_path: Path) -> None:
    def watch(s: dd.State, a: dd.Arrival) -> None:
        if s.version == 31:
            raise error

    with pytest.raises(type(error)) as caught:
        dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, folder=tmp_path / "run", watch=[watch], **END)
    assert "It is saved after 31 updates; go on with dualdelay resume" in str(caught.value.__notes__)
    saved = dd.load(tmp_path / "run")
    assert (saved.version, saved.ended) == (31, "failed")
    assert f"it could not go on: {type(error).__name__}" in saved.notes[-1]
    straight = dd.simulate(dd.DuDe(LR), PROBLEM, SPEEDS, folder=tmp_path / "straight", **END)
    assert differences(dd.resume(tmp_path / "run"), straight) == []


def test_a_metric_that_raises_is_refused_at_once_and_later_switched_off() -> None:
    calls: list[int] = []

    def later(model: Any) -> float:
        calls.append(1)
        if len(calls) < 3:
            return 1.0
        raise KeyError("f1")

    evaluation = dd.Evaluation(every=5, metrics={"f1": later})
    run = dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=20, evaluation=evaluation)
    assert run.version == 20 and len(calls) == 3
    assert [str(value) for value in run.metrics.f1] == ["1.0", "1.0", "nan", "nan", "nan"]
    assert any("metric 'f1': KeyError: 'f1'; it was switched off at version 10" in note for note in run.notes)
    with pytest.raises(dd.BadInput, match="metric 'f1' raised KeyError at the first model"):
        dd.simulate(dd.DuDe(LR), *CASES["q3"], updates=5, evaluation=evaluation)

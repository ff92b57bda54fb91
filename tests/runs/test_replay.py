"""A recorded run computed again in its recorded order gives the recorded bits, and whatever does not is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core import Order
from own import SCENARIOS, Scenario, bits, mlp, shards, three
from tables import CASES, LR

pytestmark = pytest.mark.usefixtures("own_methods")


def same_order_and_bits(run: dd.Run, folder: Path, problem: dd.Problem | None = None) -> None:
    again = dd.replay(folder, problem)
    recorded, replayed = bits(run), bits(again)
    compared = [key for key in recorded if key.startswith("trace ") or key in ("weights", "version", "events", "error")]
    assert [key for key in compared if recorded[key] != replayed[key]] == []


@pytest.mark.numeric
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_replay_of_every_run_gives_the_recorded_bits(name: str, tmp_path: Path) -> None:
    run = SCENARIOS[name].run(folder=tmp_path / "run")
    same_order_and_bits(run, tmp_path / "run", SCENARIOS[name].again)


@pytest.mark.parametrize("name", ["rejections", "wrong shapes", "wrong shapes, memory at workers"])
def test_every_spoilt_gradient_is_rejected_and_no_other(name: str) -> None:
    run = SCENARIOS[name].run()
    rejected = [event for event in run.trace.events if event["kind"] == "rejected"]
    assert rejected
    assert all(event["worker"] > 0 and event["draw"] % 7 in (2, 3) for event in rejected)
    assert not any((run.trace.worker > 0) & np.isin(run.trace.draw % 7, (2, 3)))
    assert run.rejected == len(rejected)


def edit(folder: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> None:
    """Write a trace again with something changed in it."""
    table = pq.read_table(folder / "trace.parquet")
    columns = {name: table[name].to_numpy().copy() for name in table.column_names}
    about = json.loads(table.schema.metadata[b"dualdelay"])
    change(columns, about["events"])
    table = pa.table(columns).replace_schema_metadata({"dualdelay": json.dumps(about)})
    pq.write_table(table, folder / "trace.parquet")


@pytest.mark.parametrize("row", [0, 11, 30])
@pytest.mark.parametrize("column", ["worker", "draw", "version", "after", "loss", "fingerprint"])
def test_a_changed_value_in_the_trace_is_found_and_its_version_named(column: str, row: int, tmp_path: Path) -> None:
    run = dd.simulate(dd.VanillaASGD(LR), *CASES["noisy"], updates=31, folder=tmp_path / "run")

    def change(columns: dict[str, Any], events: list[dict[str, Any]]) -> None:
        columns[column][row] = (columns[column][row] + 1) % 4 if column == "worker" else columns[column][row] + 1

    edit(tmp_path / "run", change)
    after = run.trace.after[row]
    named = rf"version {after}\b" if column != "after" else f"recorded after is {after + 1}, replayed it is {after}"
    with pytest.raises(dd.ReplayMismatch, match=named):
        dd.replay(tmp_path / "run")


@pytest.mark.parametrize("cut", [1, 5])
def test_a_trace_that_lacks_its_end_is_found(cut: int, tmp_path: Path) -> None:
    dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=20, folder=tmp_path / "run")
    edit(tmp_path / "run", lambda columns, _: columns.update({name: c[:-cut] for name, c in columns.items()}))
    with pytest.raises(dd.ReplayMismatch, match="version"):
        dd.replay(tmp_path / "run")


@pytest.mark.parametrize("name", ["leave and join", "wakes", "rejections"])
def test_a_record_without_its_events_is_found(name: str, tmp_path: Path) -> None:
    SCENARIOS[name].run(folder=tmp_path / "run")
    edit(tmp_path / "run", lambda _, events: events.clear())
    with pytest.raises(dd.ReplayMismatch):
        dd.replay(tmp_path / "run", SCENARIOS[name].again)


def other_sample(worker: int) -> list[Any]:
    data = shards()
    data[worker][0][0, 0] += 1.0
    return data


@pytest.mark.parametrize(
    "other",
    [
        lambda: dd.Network(mlp(), cross_entropy, other_sample(2), 4, seed=1),
        lambda: dd.Network(mlp(), cross_entropy, shards(), 4, seed=2),
        lambda: dd.Digits(workers=3, alpha=1.0),
    ],
    ids=["one sample", "seed", "problem"],
)
@pytest.mark.parametrize("call, failure", [(dd.replay, dd.ReplayMismatch), (dd.resume, dd.BadInput)])
def test_another_problem_than_the_recorded_one_is_refused(
    call: Callable[..., dd.Run], failure: type[Exception], other: Callable[[], dd.Problem], tmp_path: Path
) -> None:
    problem = dd.Network(mlp(), cross_entropy, shards(), 4, seed=1)
    dd.simulate(dd.DuDe(LR), problem, three, updates=6, folder=tmp_path / "run")
    with pytest.raises(failure, match="fingerprint"):
        call(tmp_path / "run", problem=other())
    call(tmp_path / "run", problem=dd.Network(mlp(), cross_entropy, shards(), 4, seed=1))


class Altered(dd.Quadratic):
    """Has the fingerprint of the recorded problem, and another gradient in worker 1's fourth job."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient + 1e-9 if (worker, draw) == (1, 3) else gradient), loss


def test_data_that_changed_behind_an_equal_fingerprint_are_found_at_the_first_version(tmp_path: Path) -> None:
    problem, speeds = CASES["q3"]
    run = dd.simulate(dd.DuDe(LR), problem, speeds, updates=30, folder=tmp_path / "run")
    row = int(np.flatnonzero((run.trace.worker == 1) & (run.trace.draw == 3))[0])
    with pytest.raises(dd.ReplayMismatch, match=rf"version {run.trace.after[row]} differs.*worker 1, job number 3"):
        dd.replay(tmp_path / "run", Altered(**problem.settings))


class Method(dd.VanillaASGD):
    """A user's method."""


class Changed(Method):
    """The same method after a change: version 17 comes from a step that is one part in 2**40 longer."""

    def step(self, s: dd.State, a: dd.Arrival) -> list[Order]:
        s.descend(a.value, self.lr * (1 + 2.0**-40) if s.version == 16 else self.lr)
        return [dd.send(a.worker)]


@pytest.mark.numeric
def test_changed_code_of_a_method_is_found_at_the_first_version(tmp_path: Path) -> None:
    dd.ALGORITHMS["method"] = Method
    try:
        run = dd.simulate(Method(LR), *CASES["q3"], updates=40, folder=tmp_path / "run")
        same_order_and_bits(run, tmp_path / "run")
        dd.ALGORITHMS["method"] = Changed
        with pytest.raises(dd.ReplayMismatch, match="version 17 differs"):
            dd.replay(tmp_path / "run")
    finally:
        del dd.ALGORITHMS["method"]


def flip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"x": torch.nextafter(weights["x"], weights["x"] + 1)}


@pytest.mark.parametrize(
    "change",
    [flip, lambda weights: {"y": weights["x"]}, lambda weights: {"x": weights["x"][:1]}, lambda weights: {}],
    ids=["another bit", "another name", "another shape", "nothing"],
)
def test_final_weights_that_are_not_the_replayed_ones_are_found(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    dd.simulate(dd.DuDe(LR), *CASES["noisy"], updates=9, folder=tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    save_file(change(load_file(model)), model)
    with pytest.raises(dd.ReplayMismatch, match="final weights"):
        dd.replay(tmp_path / "run")


def test_a_run_that_is_not_finished_cannot_be_replayed_yet(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Scenario(dd.DuDe(LR)).run(folder=tmp_path / "run", watch=(lambda state, arrival: 1 // (10 - state.version),))
    with pytest.raises(dd.BadInput, match="not finished"):
        dd.replay(tmp_path / "run")
    dd.resume(tmp_path / "run")
    assert dd.replay(tmp_path / "run").version == 24


def test_a_run_that_was_resumed_and_lengthened_can_be_replayed(tmp_path: Path) -> None:
    Scenario(dd.UniformASGD(LR)).run(folder=tmp_path / "run")
    run = dd.resume(tmp_path / "run", updates=50)
    same_order_and_bits(run, tmp_path / "run")


def test_replay_watches_every_arrival_and_leaves_the_threads_as_they_were(tmp_path: Path) -> None:
    run = Scenario(dd.DuDe(LR)).run(folder=tmp_path / "run")
    seen: list[tuple[Any, ...]] = []
    torch.set_num_threads(2)
    try:
        dd.replay(tmp_path / "run", watch=(lambda s, a: seen.append((*a.job, s.version, torch.get_num_threads())),))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    t = run.trace
    assert seen == [(*row, 1) for row in zip(*(c.tolist() for c in (t.worker, t.draw, t.version, t.after)), strict=True)]


def test_what_the_folder_cannot_build_is_asked_for(tmp_path: Path) -> None:
    dd.simulate(Method(LR), *CASES["q3"], updates=6, folder=tmp_path / "method")
    with pytest.raises(dd.BadInput, match=r"dd.replay\(folder, algorithm=...\)"):
        dd.replay(tmp_path / "method")
    dd.simulate(dd.DuDe(LR), dd.Network(mlp(), cross_entropy, shards(), 4), three, updates=6, folder=tmp_path / "own")
    with pytest.raises(dd.BadInput, match=r"dd.replay\(folder, problem=...\)"):
        dd.replay(tmp_path / "own")

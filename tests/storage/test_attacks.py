"""Nothing is lost, whatever ends a run, and nothing in a folder is trusted: files of other runs, settings, links."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.cli import main
from dualdelay.core import Order
from dualdelay.runs.resume import recorded_fleet
from dualdelay.storage.files import json_digest
from dualdelay.storage.folder import FORMAT
from dualdelay.workers.output import Output
from flat import simulate
from own import Killed, centers, content, differences, kill_at, seen
from tables import LR

PROBLEM, SPEEDS = dd.Quadratic(centers, noise=0.3), dd.FixedSpeeds([1.0, 2.0, 3.0])
CALLS: list[Any] = [dd.load, dd.replay, dd.resume]

# ------------------------------------------------------------------------------ whatever ends a run, what was done is saved


@dataclass(kw_only=True)
class Sums(dd.State):
    """A server that keeps a tensor, a list of tensors and a set."""

    total: Tensor
    each: list[Tensor]
    seen: set[int]


@dataclass(frozen=True)
class Own(dd.Algorithm[Sums]):
    """A method of a user's own, whose step can be made to fail when all has been changed."""

    careless = False  # writes into the tensors of its list, so that a step cannot be undone
    fails = staticmethod(lambda version: None)  # raises, or returns wrong orders

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> Sums:
        return Sums(x, n, total=torch.zeros_like(x), each=[torch.zeros_like(x) for _ in range(n)], seen=set())

    def step(self, s: Sums, a: dd.Arrival) -> list[Order]:
        s.seen.add(s.version)
        s.total += a.value
        if self.careless:
            s.each[a.worker] += a.value
        else:
            s.each[a.worker] = s.each[a.worker] + a.value
        s.descend(s.total, self.lr)
        return self.fails(s.version) or [dd.send(a.worker)]


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
CASES = [*itertools.product(["raises", "unknown worker"], OPTIMIZERS), *((name, "none") for name in [*FAILURES][2:])]


def at_33(what: str) -> Any:
    return staticmethod(lambda version: FAILURES[what]() if version == 33 else None)


@pytest.mark.parametrize("failure, kind", CASES)
def test_a_step_that_fails_is_undone_and_everything_before_it_is_saved(
    failure: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = OPTIMIZERS[kind]
    how = {"updates": 60, "checkpoint_every": 1000, "evaluate_every": 7, "optimizer": optimizer}
    straight = simulate(Own(0.05), PROBLEM, SPEEDS, folder=tmp_path / "straight", **how)
    with monkeypatch.context() as patch, pytest.raises((ZeroDivisionError, dd.BadInput)) as caught:
        patch.setattr(Own, "fails", at_33(failure))
        simulate(Own(0.05), PROBLEM, SPEEDS, folder=tmp_path / "run", **how)
    assert "It is saved after 32 updates; go on with dd.resume" in str(caught.value.__notes__)
    kept = dd.load(tmp_path / "run")
    assert kept.version == len(kept.trace) == 32 and kept.ended == "failed" and "it could not go on" in kept.notes[-1]
    again = {"algorithm": Own(0.05), "optimizer": optimizer if callable(optimizer) else None}
    assert differences(dd.resume(tmp_path / "run", **again), straight) == []
    assert dd.replay(tmp_path / "run", **again).same_bits


def test_a_step_that_cannot_be_undone_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Own):
        careless = True

    how: dict[str, Any] = {"updates": 60, "checkpoint_every": 10}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as caught:
        patch.setattr(Own, "fails", at_33("raises"))
        simulate(Careless(0.05), PROBLEM, SPEEDS, folder=tmp_path / "run", **how)
    assert "The last checkpoint stands, for this happened in the middle of an update" in str(caught.value.__notes__)
    kept = dd.load(tmp_path / "run")
    assert (kept.version, kept.ended) == (30, "failed")
    straight = simulate(Careless(0.05), PROBLEM, SPEEDS, **how)
    assert dd.resume(tmp_path / "run", algorithm=Careless(0.05)).x.equal(straight.x)


class Stumbles(dd.Quadratic):
    """A problem whose evaluation fails once."""

    left = -1

    def evaluate(self, x: Tensor) -> dict[str, float]:
        type(self).left -= 1
        if type(self).left == 0:
            raise OSError(28, "No space left on device")
        return super().evaluate(x)


SCHEDULES: dict[str, dict[str, Any]] = {
    "by updates": {"evaluate_every": 7},
    "by time": {"evaluate_seconds": 3.0},
    "by both": {"evaluate_every": 7, "evaluate_seconds": 3.0},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at", [2, 5, 9])
def test_an_evaluation_that_fails_is_made_when_the_run_goes_on(schedule: str, at: int, tmp_path: Path) -> None:
    how, problem = {"updates": 60, "checkpoint_every": 1000, **SCHEDULES[schedule]}, Stumbles(centers, noise=0.3)
    straight = simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "straight", **how)
    Stumbles.left = at
    with pytest.raises(OSError, match="No space") as caught:
        simulate(dd.DuDe(LR), problem, SPEEDS, folder=tmp_path / "run", **how)
    assert "It is saved after" in str(caught.value.__notes__)
    assert (tmp_path / "run" / "failed.json").exists() and dd.load(tmp_path / "run").ended == "failed"
    assert differences(dd.resume(tmp_path / "run", problem=problem), straight) == []


def test_a_watch_function_that_fails_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    how: dict[str, Any] = {"updates": 60, "checkpoint_every": 1000}
    with pytest.raises(ZeroDivisionError) as caught:
        watch = [lambda state, arrival: 1 // (31 - state.version)]
        simulate(dd.DuDe(LR), PROBLEM, SPEEDS, folder=tmp_path / "run", watch=watch, **how)
    assert "It is saved after 31 updates; go on with dualdelay resume" in str(caught.value.__notes__)
    straight = simulate(dd.DuDe(LR), PROBLEM, SPEEDS, folder=tmp_path / "straight", **how)
    assert differences(dd.resume(tmp_path / "run"), straight) == []


# ------------------------------------------------------------------------------------- files and settings of no such run


def crafted(folder: Path, **changes: Any) -> None:
    """Write a configuration with other values, or without those that are ``...``, and a digest that is right."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("digest")
    values = {key: value for key, value in {**values, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps({**values, "digest": json_digest(values)}))


@pytest.mark.parametrize("version", [1, FORMAT + 1, "new", ...])
def test_another_format_is_refused_by_name(version: Any, finished: Path) -> None:
    crafted(finished, format=version)
    shown = 1 if version is ... else version  # the first format had no number
    for call in CALLS:
        with pytest.raises(dd.BadInput, match=rf"has format {shown!r} and was written by .* reads format {FORMAT}"):
            call(finished)


@pytest.mark.parametrize("key", ["algorithm", "seed", "layout", "metrics", "environment", "speeds", "updates", "start"])
@pytest.mark.parametrize("value", [..., [[]], True], ids=["missing", "a list", "a truth value"])
def test_a_configuration_that_no_run_writes_is_refused_by_the_name_of_the_setting(
    key: str, value: Any, finished: Path
) -> None:
    crafted(finished, **{key: value})
    for call in CALLS:
        with pytest.raises(dd.BadInput, match=rf"config\.json has no valid {key}, so no run has written it"):
            call(finished)


def test_no_file_of_another_run_is_taken_for_this_one_s(tmp_path: Path) -> None:
    """The foreign files are undamaged, of a run that differs in its lr alone, finished or not."""
    how: dict[str, Any] = {"updates": 30, "checkpoint_every": 10, "keep_best": "objective"}
    for name, lr in (("own", 0.1), ("foreign", 0.05)):
        simulate(dd.DuDe(lr), PROBLEM, SPEEDS, folder=tmp_path / name, **how)
        with pytest.raises(Killed):
            simulate(dd.DuDe(lr), PROBLEM, SPEEDS, folder=tmp_path / f"{name} killed", watch=[kill_at(28)], **how)
    straight, outcomes = dd.load(tmp_path / "own").x, {"refused": 0, "right": 0}
    for state in ("", " killed"):
        own, foreign = tmp_path / f"own{state}", tmp_path / f"foreign{state}"
        good, before = content(own), seen(dd.load(own))
        for name in good.keys() - {"lock"}:
            place = own / name
            other = foreign / name if place.parent == own else max((foreign / place.parent.name).iterdir())
            place.unlink()
            shutil.copyfile(other, place.with_name(other.name))
            for call in CALLS:
                try:
                    run = call(own)
                except dd.DualDelayError:
                    outcomes["refused"] += 1
                    continue
                outcomes["right"] += 1
                assert call is not dd.load or run.notes or seen(run) == before
                assert call is dd.load or run.x.equal(straight)
            shutil.rmtree(own)
            for path, data in good.items():
                (own / path).parent.mkdir(parents=True, exist_ok=True)
                (own / path).write_bytes(data)
    assert outcomes["refused"] > 20 and outcomes["right"] > 20, outcomes


def test_an_argument_in_the_wrong_place_is_named(killed: Path, finished: Path) -> None:
    with pytest.raises(dd.BadInput, match=r"updates is .*Quadratic"):
        dd.resume(killed, PROBLEM)
    with pytest.raises(dd.BadInput, match=r"problem is .digits.; expected a dd\.Problem"):
        dd.replay(finished, "digits")


# ------------------------------------------------------------------------- a folder does not decide where a run reaches out


@pytest.fixture
def real(killed: Path) -> Callable[..., Path]:
    """Makes the folder one of a run of real workers, as far as resume looks at it before it starts anything."""

    def write(**fleet: Any) -> Path:
        described = {"name": "ray", "threads": 1, "server_threads": 1, **fleet}
        simulated = dict.fromkeys(("speeds", "link", "changes", "device", "precision", "batch"))
        crafted(killed, fleet=described, **simulated)
        return killed

    return write


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"address": "192.0.2.1:6379"},
        {"address": "127.0.0.1:6379"},
        {"address": "auto"},
        {"insecure": True},
        {"address": "192.0.2.1:6379", "insecure": True},
    ],
    ids=str,
)
def test_a_folder_does_not_decide_where_a_run_listens_or_which_cluster_it_joins(
    settings: dict[str, Any], real: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real(**settings)
    with pytest.raises(dd.BadInput, match=rf"says of its workers .*{'.*'.join(settings)}.* not for a folder to decide"):
        dd.resume(folder)
    with pytest.raises(SystemExit) as stop:
        main(["resume", str(folder)])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and all(f"--{name}" in printed for name in settings) and "--address local" in printed


def test_what_the_caller_confirms_is_used_and_the_rest_comes_from_the_folder(
    real: Callable[..., Path], originals: Path
) -> None:
    folder = real(address="192.0.2.1:6379", insecure=True, restarts=7)
    with pytest.raises(dd.BadInput, match="insecure=True"):
        recorded_fleet(folder, address="10.0.0.1:1")  # confirmed in part
    fleet = recorded_fleet(folder, address="10.0.0.1:1", insecure=False)
    assert fleet is not None
    assert (fleet.address, fleet.insecure, fleet.host, fleet.faults.restarts) == ("10.0.0.1:1", False, "127.0.0.1", 7)
    local = recorded_fleet(folder, address="local", insecure=False)
    assert local is not None and local.address is None
    with pytest.raises(dd.BadInput, match="is a simulation"):
        recorded_fleet(originals / "finished", address="local")


@pytest.mark.parametrize("name", ["checkpoints", "trace", "output", "moved"])
def test_a_folder_with_links_to_other_places_is_not_written_to(name: str, killed: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    if (killed / name).exists():
        (killed / name).rename(outside)
    else:
        outside.mkdir()
    (outside / "000000000099-000000000000.parquet").write_bytes(b"not of this run")
    (killed / name).symlink_to(outside)
    before = content(outside)
    with pytest.raises(dd.BadInput, match=f"{name} is a link to another place"):
        dd.resume(killed)
    assert content(outside) == before


def test_what_workers_print_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "worker-0-0.txt").symlink_to(tmp_path / "letter.txt")
    output = Output(tmp_path / "output")
    output.add(0, 0, ["printed"])
    output.close()
    assert (tmp_path / "letter.txt").read_text() == "dear"

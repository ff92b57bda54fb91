"""What only processes show of a sharded server: slices that travel, checkpoints of shards, and shards that die."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import dualdelay as dd
from dualdelay.engine.shard import ShardPlan
from dualdelay.engine.sharded import ShardLost
from dualdelay.engine.slices import Elsewhere, Slices
from dualdelay.storage import parts
from dualdelay.workers.messages import JobRequest, Pushed, Reply
from dualdelay.workers.ray_fleet import RayTransport, _Sliced
from dualdelay.workers.ray_shards import _IN_ANSWER, NOT_FINITE, AtWorker, NotThere, RayShards
from helpers import check_replay, kinds
from real import Fragile, Wide, kill

pytestmark = pytest.mark.usefixtures("ray_here")

SMALL = 1 << 16  # bytes of a piece: Wide travels in several


def files(folder: Path, ending: str) -> list[Path]:
    return sorted((folder / "checkpoints").glob(f"*.{ending}"))


@pytest.mark.slow
def test_slices_in_pieces_replay_to_the_same_bits_and_go_on_without_shards(tmp_path, caplog):
    """Gradients that are not finite or of another shape are rejected; a damaged part of a checkpoint is passed over."""
    problem, folder = Wide(spoilt=(1, 3), short=5), tmp_path / "run"
    method, server = dd.DuDe(lr=2.0**-6), dd.Server(optimizer="AdamW")
    fleet = dd.RayFleet(cpus=0.25, shards=2, piece=SMALL, shared_memory=False)
    with caplog.at_level(logging.WARNING):
        run = dd.train(method, problem, fleet, updates=20, folder=folder, checkpoint_every=10, server=server)
    assert run.version == 20 and set(kinds(run)) == {"rejected"} and len(fleet.control.shards) == 2
    assert "values that are not finite" in caplog.text and "shape (49999,), expected (50000,)" in caplog.text
    assert set(run.trace.bytes.tolist()) == {200_000} == set(run.trace.down.tolist())
    assert len(files(folder, "shard")) == 2 * len(files(folder, "safetensors"))
    check_replay(run, folder, problem)
    newest = files(folder, "shard")[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    assert not parts.is_whole(newest)
    run = dd.resume(folder, 30, problem=problem, fleet=dd.RayFleet(cpus=0.25))
    assert run.version == 30 and any("an older checkpoint was used" in note for note in run.notes)
    check_replay(run, folder, problem)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["server", "workers"])
def test_a_run_goes_on_with_any_number_of_shards(memory, tmp_path):
    """An optimiser's state is cut as well; of three shards without shared memory the first passes on to two."""
    problem, folder, server = Wide(), tmp_path / "run", dd.Server(optimizer="AdamW")
    method, fleet = dd.DuDe(lr=2.0**-6, memory=memory), dd.RayFleet(cpus=0.25)
    dd.train(method, problem, fleet, updates=10, folder=folder, server=server)
    for updates, shards, share in ((20, 3, False), (30, 2, True), (40, None, True), (50, 1, True)):
        fleet = dd.RayFleet(cpus=0.25, shards=shards, shared_memory=share, piece=SMALL)
        run = dd.resume(folder, updates, problem=problem, fleet=fleet)
        assert run.version == updates and run.audit < 1e-6 and run.notes == ()
    check_replay(run, folder, problem)


def test_a_shard_that_is_killed_comes_back_from_its_checkpoint_and_the_run_goes_on(tmp_path, caplog, monkeypatch):
    """So does a worker, whose job is done again; and one that is killed before anything had begun is started again."""
    problem, folder = Wide(seconds=0.02), tmp_path / "run"
    fleet = dd.RayFleet(cpus=0.25, shards=2)

    def strike() -> None:
        while not files(folder, "safetensors"):
            time.sleep(0.05)
        kill(fleet, 1)
        os.kill(fleet.control.shards[1][1], signal.SIGKILL)

    start, struck = RayTransport.start, list[int]()

    def strike_first(self, *which: int) -> None:
        if not struck:
            struck.append(fleet.control.shards[0][1])
            os.kill(struck[0], signal.SIGKILL)
        start(self, *which)

    monkeypatch.setattr(RayTransport, "start", strike_first)
    threading.Thread(target=strike, daemon=True).start()
    with caplog.at_level(logging.WARNING):
        run = dd.train(dd.DuDe(lr=2.0**-6), problem, fleet, updates=200, folder=folder, checkpoint_every=10)
    assert run.version == 200 and run.faults["crashed"] >= 1
    assert any(
        note.startswith("the server: a shard of it was lost") and "shard 1 of 2 has died" in note for note in run.notes
    )
    assert "Nothing had begun: all of them are started again" in caplog.text
    assert "goes back to its last checkpoint" in caplog.text
    check_replay(run, folder, problem)


def test_a_shard_that_dies_before_anything_was_saved_ends_a_run_without_a_folder():
    fleet = dd.RayFleet(cpus=0.25, shards=2)

    def strike() -> None:
        while not fleet.control.places:
            time.sleep(0.05)
        os.kill(fleet.control.shards[0][1], signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(dd.RunFailed, match=r"shard 0 of 2 has died .*Nothing was saved .* give the run a folder"):
        dd.train(dd.DuDe(lr=2.0**-6), Wide(workers=1), fleet, updates=10**6)


def test_a_method_that_sends_several_vectors_and_keeps_some_at_the_workers(tmp_path):
    problem, folder = Wide(weights=1000), tmp_path / "run"
    run = dd.train(dd.ALGORITHMS["scaffold"](lr=0.01), problem, dd.RayFleet(cpus=0.25, shards=2), updates=12, folder=folder)
    check_replay(run, folder, problem)


@pytest.mark.parametrize(
    ("weights", "piece"),
    [  # each first slice is at a limit, and the second above it
        pytest.param(2 * 2**20 + 40, 64 << 20, id="in the answer and in the store", marks=pytest.mark.slow),
        pytest.param(2 * 2**14 + 40, SMALL, id="in the answer and in pieces"),
    ],
)
def test_slices_of_one_model_may_travel_in_different_ways(weights, piece, tmp_path):
    problem, folder = Wide(weights=weights), tmp_path / "run"
    (_, first), (second, last) = Slices(weights, 2).places
    assert 4 * first <= min(_IN_ANSWER, piece) < 4 * (last - second)
    fleet = dd.RayFleet(cpus=0.25, shards=2, piece=piece, shared_memory=False)
    run = dd.train(dd.DuDe(lr=2.0**-6), problem, fleet, updates=8, folder=folder)
    check_replay(run, folder, problem)


@pytest.mark.parametrize(
    ("piece", "weights"),
    [
        pytest.param(64 << 20, 600_000, id="whole slices side by side"),
        pytest.param(SMALL, 100_000, id="pieces that are copied"),
        pytest.param(64 << 20, 100_000, id="whole slices that are copied", marks=pytest.mark.slow),
        pytest.param(SMALL, 600_000, id="pieces side by side", marks=pytest.mark.slow),
    ],
)
def test_a_worker_on_the_same_machine_shares_memory_with_the_shards_and_one_elsewhere_gets_the_same(piece, weights):
    import ray

    plan = ShardPlan(dd.DuDe(0.5), 2, 0, None, "full", Slices(weights, 2), torch.float32)
    shards = RayShards(ray, plan, torch.arange(float(weights)), 1, piece, parts.PartFiles(), share=False)
    near, far, gradients = shards.line(), shards.line(), torch.randn(2, weights)
    near.meet(0)
    shards.tell("first")
    assert len(near._near) == 2 and not far._near
    for worker, line in enumerate((near, far)):
        request = JobRequest(worker, 0, 0, 0, 0, -1)
        reply = line.push(worker, Reply(request, gradients[worker].numpy(), False, 0.0, 0.0))
        assert reply.pushed == Pushed(4 * weights) and len(reply.value) == 1
        shards.tell("step", [[worker, 0, 0], 0.0, 0.0, 0.0, 0, 1, 0], False, [0, 0])
    for worker, line in enumerate((near, far)):  # of which the shards hear nothing
        request, bad = JobRequest(worker, 0, 1, 1, 0, 0), gradients[worker].clone()
        bad[-1] = torch.nan
        assert line.push(worker, Reply(request, bad.numpy(), False, 0.0, 0.0)).pushed == Pushed(4 * weights, NOT_FINITE)
    lent = shards.lent()
    shards.tell("keep", lent.key, None)
    shards.flush()
    model = near.pull(lent.key).copy()
    assert bool(near._laid) == (weights > 500_000) and near.is_there  # slices of that length begin with a page
    assert (model == far.pull(lent.key)).all() and far.is_there
    assert (torch.from_numpy(model) == torch.arange(float(weights)) - 0.5 * gradients.sum(0) / 2).all()
    near.pull(lent.key)
    key, lent = lent.key, None
    for sequence in (2, 3):  # it is dropped, and written over
        reply = Reply(JobRequest(0, 0, sequence, sequence, 0, 0), gradients[0].numpy(), False, 0.0, 0.0)
        assert near.push(0, reply).pushed == Pushed(4 * weights)
        shards.tell("step", [[0, sequence, 0], 0.0, 0.0, 0.0, 0, 1, 0], False, [0, sequence])
        lent = shards.lent()
        shards.tell("keep", lent.key, None)
        shards.flush()
        far.pull(lent.key)
    assert near.is_there == (weights < 500_000)
    with pytest.raises(NotThere):
        near.pull(key)
    near.close()
    shards.close()


@pytest.mark.slow
def test_what_workers_keep_is_never_with_the_head(tmp_path):
    """One that is killed gets its own back, the sum without that of the other, slice by slice; one that leaves is taken
    out of the sum; at each checkpoint every worker writes its own file, from which it goes on with fewer shards."""
    problem, folder = Wide(workers=2, seconds=0.01), tmp_path / "run"
    fleet = dd.RayFleet(cpus=0.25, shards=2, piece=SMALL)

    def strike() -> None:
        while len(files(folder, "kept")) < 2:
            time.sleep(0.02)
        kill(fleet, 0)
        time.sleep(1.0)
        fleet.control.leave(1)
        time.sleep(0.5)
        fleet.control.join(1)

    threading.Thread(target=strike, daemon=True).start()
    method = dd.DuDe(lr=2.0**-6, memory="workers", compress="int8")
    run = dd.train(method, problem, fleet, updates=400, folder=folder, checkpoint_every=20)
    assert set(run.trace.bytes.tolist()) == {50_004} and {"restored", "left", "joined"} <= set(kinds(run))
    assert run.audit is not None and run.audit < 1e-6
    check_replay(run, folder, problem)
    kept, heads = files(folder, "kept"), files(folder, "safetensors")
    assert max(path.stat().st_size for path in heads) < 50_000 < 8 * 50_000 < min(path.stat().st_size for path in kept)
    run = dd.resume(folder, 420, problem=problem, fleet=dd.RayFleet(cpus=0.25, shards=1))
    assert run.version == 420 and run.audit < 1e-6
    check_replay(run, folder, problem)


def test_a_worker_that_dies_while_shards_read_what_it_keeps_sends_the_server_back_to_its_checkpoint():
    import ray

    plan = ShardPlan(dd.DuDe(0.1, memory="workers"), 2, 0, None, "full", Slices(128, 2), torch.float32)
    shards = RayShards(ray, plan, torch.zeros(128), 1, SMALL, parts.PartFiles())
    dead = ray.remote(num_cpus=0, concurrency_groups={"ask": 1})(_Sliced).remote(0, 0, None, None, 1)
    ray.kill(dead)
    few = {"gradient": torch.zeros(1, dtype=torch.float64)}
    with pytest.raises(ShardLost, match="a worker has died while the shards of the server read what it keeps"):
        shards.recovered(0, {1: Elsewhere(few, AtWorker(dead, 0))}, few)
    shards.close()


class Deadly:
    """What ends a process that it comes to."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_shard_that_cannot_start_is_said_to_have_died():
    import ray

    plan = ShardPlan(Deadly(), 2, 0, None, "full", Slices(1000, 2), torch.float32)
    with pytest.raises(ShardLost, match="a shard of the server has died"):
        RayShards(ray, plan, torch.zeros(1000), 1, 64 << 20, parts.PartFiles())


def test_who_waits_for_a_shard_that_was_to_pass_something_on_hears_of_its_death():
    import ray

    plan = ShardPlan(dd.DuDe(0.1), 2, 0, None, "full", Slices(128, 2), torch.float32)
    shards = RayShards(ray, plan, torch.zeros(128), 1, SMALL, parts.PartFiles(), share=False)
    os.kill(shards.places[0][1], signal.SIGKILL)
    shards.tell("first")  # the second shard hears of this by the first
    with pytest.raises(ShardLost, match="shard 0 of 2 has died"):
        shards.ask("checksums")
    shards.close()


def test_a_step_that_fails_in_a_shard_ends_the_run_with_its_words_and_is_not_saved(tmp_path):
    with pytest.raises(dd.RunFailed, match=r"shard 0 of the server failed: .*the weights are tired"):
        dd.train(
            Fragile(0.01),
            Wide(weights=1000),
            dd.RayFleet(cpus=0.25, shards=1),
            updates=10**6,
            folder=tmp_path / "run",
            checkpoint_every=40,
        )
    assert dd.load(tmp_path / "run").version == 80  # it failed after 101


def watching(state: object, arrival: object) -> None:
    """A user's function."""


@pytest.mark.parametrize(
    ("method", "given", "why"),
    [
        (dd.AutoDuDe(), {}, "the server of AutoDuDe cannot be cut into 2 shards: it looks at the weights tensor by tensor"),
        (dd.DuDe(0.1), {"watch": [watching]}, "watch is given, .* expected loggers"),
        (dd.DuDe(0.1), {"server": dd.Server(downlink="int8")}, "shards and downlink are given"),
        (dd.DuDe(0.1), {"server": dd.Server(optimizer="Adafactor")}, "with Adafactor cannot be cut into 2 shards"),
        (
            dd.DuDe(0.1),
            {"server": dd.Server(optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr))},
            "the optimizer or schedule is a function",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_starts(method, given, why):
    with pytest.raises(dd.BadInput, match=why):
        dd.train(method, Wide(weights=1000), dd.RayFleet(shards=2), updates=10, **given)

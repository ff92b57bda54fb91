"""Vectors in memory that processes share: they are there until the last reader is done, and never half of them."""

from __future__ import annotations

import asyncio
import gc
import mmap
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core import Problem
from dualdelay.core.state import BLOCK
from dualdelay.engine import shard
from dualdelay.engine.half import Half
from dualdelay.engine.shard import ShardPlan, Store
from dualdelay.engine.slices import Slices
from dualdelay.workers.messages import EvaluationRequest, JobRequest
from dualdelay.workers.ray_fleet import _Sliced, _Whole
from dualdelay.workers.ray_shards import NotThere, ShardActor, _Lending
from dualdelay.workers.shared_memory import Name, Overlay, Reader, Segments
from dualdelay.workers.worker import GONE
from tables import ALGORITHMS

LENGTH = 5000
ROWS = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)


def is_free(segments: Segments) -> list[bool]:
    return [segment.is_free for segment in segments._segments]


@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 3), (3, 4)])
def test_a_vector_is_read_in_place_and_whole_or_in_part(start, stop):
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)._replace(start=start, stop=stop)
    view = reader.view(name)
    assert (view == ROWS[..., start:stop]).all() and not view.flags.writeable
    assert (reader.copy(name) == ROWS[..., start:stop]).all()
    assert reader.view(name) is view  # as often as it is asked for


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # it is not written to
def test_it_stays_until_nobody_refers_to_it_not_even_to_a_slice_of_it():
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)
    tensor, row = torch.from_numpy(reader.view(name))[1, 2, 1:], reader.view(name)[1]
    gc.collect()
    assert is_free(segments) == [False]
    segments.put(-ROWS)  # so this goes to another place
    assert tensor.tolist() == [21, 22, 23] and row[0, 0] == 12
    del tensor
    assert is_free(segments) == [False, False]
    del row
    assert is_free(segments) == [True, False]
    assert segments.put(2 * ROWS).key == name.key
    assert reader.view(name) is None and reader.copy(name) is None


def test_it_stays_until_the_last_of_several_readers_is_done():
    segments, readers = Segments(readers=2), (Reader(), Reader())
    name = segments.put(ROWS)
    views = [reader.view(name._replace(reader=k, start=2 * k, stop=2 * k + 2)) for k, reader in enumerate(readers)]
    for _ in range(2):
        assert is_free(segments) == [False]
        views.pop()
    assert is_free(segments) == [True]


def test_one_that_was_let_go_of_may_be_asked_for_again_before_its_process_goes_on():
    segments, reader = Segments(readers=1), Reader()
    name = segments.put(ROWS)
    reader.view(name)
    assert is_free(segments) == [True]
    again = reader.view(name)
    assert is_free(segments) == [False] and (again == ROWS).all()


def test_a_late_reader_does_not_take_away_what_was_written_since():
    segments, first, late = Segments(readers=1), Reader(), Reader()
    old = segments.put(ROWS)
    first.view(old)
    new = segments.put(-ROWS)
    assert new.key == old.key and late.view(old) is None
    view = first.view(new)
    assert is_free(segments) == [False] and (view == -ROWS).all()


def test_what_is_lent_stays_while_it_is_referred_to_here():
    segments, reader = Segments(), Reader()
    lent = segments.lend(ROWS)
    name, array = lent.name, lent.array
    assert (array == ROWS).all() and not array.flags.writeable
    del lent
    assert is_free(segments) == [False]
    del array
    assert is_free(segments) == [True] and (reader.copy(name) == ROWS).all()
    segments.lend(-ROWS)
    assert reader.copy(name) is None


def test_one_that_is_written_part_by_part_cannot_be_read_before_it_is_whole():
    segments, reader = Segments(), Reader()
    lent = segments.blank(ROWS.dtype, ROWS.shape)
    lent.blank()[0] = ROWS[0]
    assert reader.copy(lent.name) is None and reader.view(lent.name) is None
    lent.blank()[1] = ROWS[1]
    lent.finish()
    assert (reader.copy(lent.name) == ROWS).all() and (lent.array == ROWS).all()


def test_a_copy_goes_to_memory_that_fits_or_to_new_memory():
    segments, reader = Segments(), Reader()
    lent = segments.lend(ROWS)
    out = np.empty_like(ROWS)
    assert reader.copy(lent.name, out) is out and (out == ROWS).all()
    for other in (np.empty(3, np.float32), np.empty(ROWS.shape)):
        assert (reader.copy(lent.name, other) == ROWS).all()


def test_who_looks_at_a_vector_that_is_put_is_shown_all_of_it_part_by_part():
    segments, parts, vector = Segments(readers=1), list[np.ndarray](), np.arange(BLOCK + 4.0)
    name = segments.put(vector.reshape(4, -1)[:, :3], parts.append)
    assert (np.concatenate(parts) == vector.reshape(4, -1)[:, :3].reshape(-1)).all()
    assert (Reader().view(name) == vector.reshape(4, -1)[:, :3]).all()
    parts.clear()
    assert (Reader().view(segments.put(vector, parts.append)) == vector).all()
    assert [len(part) for part in parts] == [BLOCK, 4]


def test_what_nobody_is_going_to_read_makes_room_for_the_next():
    segments, vectors = Segments(readers=2), [ROWS, -ROWS]
    names = [segments.put(vector) for vector in vectors]
    segments.take_back(names[0])
    assert is_free(segments) == [True, False]
    assert segments.put(ROWS).key == names[0].key


PAGE = mmap.PAGESIZE // 4  # numbers in a page


def test_slices_of_several_processes_lie_side_by_side_and_what_is_written_there_is_seen_by_nobody_else():
    lenders, reader, overlay = (Segments(), Segments()), Reader(), Overlay(np.dtype(np.float32), 3 * PAGE + 7)
    whole = np.arange(3 * PAGE + 7, dtype=np.float32)
    for turn in (1, 2):
        lent = [s.lend(turn * part) for s, part in zip(lenders, (whole[: 2 * PAGE], whole[2 * PAGE :]), strict=True)]
        assert reader.lay(lent[0].name, overlay, 0) and reader.lay(lent[1].name, overlay, 8 * PAGE)
        assert (overlay.array == turn * whole).all()
        overlay.array[::100] = -1.0
        assert (np.concatenate([each.array for each in lent]) == turn * whole).all()
        assert all(reader.has(each.name) for each in lent)
        names = [each.name for each in lent]
        del lent
    assert lenders[0].lend(whole[: 2 * PAGE]).name.key == names[0].key  # written to again
    assert not reader.has(names[0]) and not reader.lay(names[0], overlay, 0) and reader.has(names[1])


def test_pages_must_meet_where_vectors_lie_side_by_side():
    segments, reader, overlay = Segments(), Reader(), Overlay(np.dtype(np.float32), 2 * PAGE - 1)
    page, less = segments.lend(np.ones(PAGE, np.float32)), segments.lend(np.ones(PAGE - 1, np.float32))
    assert not reader.lay(page.name, overlay, 4)
    assert not reader.lay(less.name, overlay, 0)  # nothing could lie right behind it
    assert reader.lay(less.name, overlay, 4 * PAGE)
    for wrong in ({"fd": 10**6}, {"key": page.name.key + 1}):
        assert not reader.lay(page.name._replace(**wrong), overlay, 0)
    assert overlay.array[:PAGE].sum() == 0.0


class Interrupted(Problem):
    """A gradient in the middle of which something happens."""

    workers = 1
    meanwhile = staticmethod(lambda: None)

    def start(self, seed: int) -> torch.Tensor:
        return torch.zeros(PAGE)

    def gradient(self, x: torch.Tensor, worker: int, draw: int) -> tuple[torch.Tensor, float]:
        x += 1.0  # a model of its own
        self.meanwhile()
        return 2 * x, 0.0

    def measure(self, x: torch.Tensor, worker: int, samples=None):
        self.meanwhile()
        return {"loss": float(x.sum()), "samples": 1}

    def samples(self, worker: int) -> int:
        return 1

    def evaluate(self, x: torch.Tensor) -> dict[str, float]:
        return {"objective": 0.0}

    def fingerprint(self) -> str:
        return "interrupted"


def test_what_is_made_of_a_model_that_was_written_over_meanwhile_is_no_answer():
    """Only the model of a job that nobody waits for is written over, but that one at any time."""
    problem, server, reader = Interrupted(), Segments(), Reader()
    actor = _Whole(0, 0, problem, Half(dd.VanillaASGD(1.0)), 1)
    assert reader.reaches(server.probe()) and actor.share(reader) is not None

    def written_over() -> None:
        nonlocal lent
        lent = None
        others = [server.lend(np.full(PAGE, 9.0, np.float32)) for _ in range(2)]  # in whatever is free
        lent = others[0]

    lent = server.lend(np.full(PAGE, 3.0, np.float32))
    reply = actor.compute(JobRequest(0, 0, 1, 1, 0, -1), lent.name, None)
    assert (reply.value == 8.0).all() and (lent.array == 3.0).all()
    evaluation = EvaluationRequest(0, 0, 1, None)
    assert actor.evaluate(evaluation, lent.name).part["loss"] == 3.0 * PAGE
    problem.meanwhile = written_over
    for sequence in (2, 2):  # nor if it is asked for again
        assert actor.compute(JobRequest(0, 0, sequence, sequence, 0, -1), lent.name, None) is None
    lent = server.lend(np.full(PAGE, 3.0, np.float32))
    assert "not there any more" in actor.evaluate(evaluation._replace(evaluation=2), lent.name).part
    problem.meanwhile = lambda: None
    assert (actor.compute(JobRequest(0, 0, 3, 3, 0, -1), lent.name, None).value == 20.0).all()


class Line:
    """Shards whose models may be gone, or go while something is made of them."""

    is_there = True

    def pull(self, model, fresh=False):
        if model is None:
            raise NotThere
        return model

    def memory(self, held):
        return held


def test_an_evaluation_whose_model_is_gone_is_answered_so_that_its_worker_is_asked_again():
    """Otherwise the server would wait for it until the worker's time is over; and a thread of the worker for ever."""
    actor, request = _Sliced(0, 0, Interrupted(), Half(dd.VanillaASGD(1.0)), 1), EvaluationRequest(0, 0, 1, None)
    actor._line = Line()
    aside = threading.Thread(
        target=actor.aside, args=(request._replace(aside=True), np.ones(PAGE, np.float32)), daemon=True
    )
    aside.start()
    while actor._aside is None:
        time.sleep(0.001)
    assert actor.evaluate(request._replace(aside=True), None).part == GONE
    aside.join(60)
    assert not aside.is_alive()
    assert actor.evaluate(request._replace(evaluation=2), np.ones(PAGE, np.float32)).part["loss"] == PAGE
    actor._line.is_there = False
    assert actor.evaluate(request._replace(evaluation=3), np.ones(PAGE, np.float32)).part == GONE
    assert actor.compute(JobRequest(0, 0, 1, 1, 0, -1), np.ones(PAGE, np.float32), None) is None
    assert actor._reply is None


@pytest.mark.numeric
def test_weights_that_a_method_keeps_stay_as_they_were_where_a_shard_makes_them_in_shared_memory(monkeypatch):
    """AD-PSGD gives the model of a worker that joins the weights themselves, and sends each worker its own model."""
    monkeypatch.setattr(shard, "BLOCK", 64)
    method, length = ALGORITHMS["adpsgd"], 333

    def models(store: Store) -> list[torch.Tensor]:
        plan = ShardPlan(method, 3, 0, None, "full", Slices(length, 1), torch.float32)
        one, random = plan.shard(0, torch.zeros(length), store), torch.Generator().manual_seed(0)
        one.first()

        def step(sequence: int, own: bool) -> None:
            worker = sequence % 2
            one.push(worker, (0, sequence), {"": torch.randn(length, generator=random)})
            one.step([[worker, sequence, 0], float(sequence), 1.0, 0.0, 0, 1, 0], False, [0, sequence])
            one.keep(sequence, worker if own else None)  # the others have the shard make room for the next weights
            one.drop([sequence - 1])

        one.leave(2)
        for sequence in (1, 2):
            step(sequence, own=False)
        one.join(2)
        for sequence in range(3, 9):
            step(sequence, own=False)
        return [model.clone() for model in one.state.models]

    lending = _Lending(length, 64 << 20, None)
    lending.segments = Segments()
    assert all(torch.equal(*pair) for pair in zip(models(Store()), models(lending), strict=True))
    assert len(lending.segments._segments) > 2


def test_a_worker_that_counted_as_absent_while_it_started_is_read_when_it_joins():
    """The server may go on without one that takes long to start, and tell the shards so after it has met them."""
    plan = ShardPlan(dd.DuDe(0.1, start="zeros"), 2, 0, None, "full", Slices(LENGTH, 1), torch.float32)
    gradient = np.arange(LENGTH, dtype=np.float32)

    async def outcome():
        actor, own = ShardActor(plan, 0, 1, 1 << 26, None), Segments()
        await actor.take_weights(0, np.zeros(LENGTH, np.float32))
        actor._shard = plan.shard(0, actor._start, actor._lending)
        assert await actor.meet(1, own.probe()) is not None
        own = Segments(readers=1)
        await actor._tell_here(0, [["first", []], ["leave", [1, None]]])
        await actor._tell_here(1, [["join", [1]]])
        await actor._push_near(1, [0, 0], {"": list(own.put(gradient))})
        await actor._tell_here(2, [["step", [[[1, 0, 0], 1.0, 1.0, 0.0, 4 * LENGTH, 1, 0], False, [0, 0]]]])
        weights = await actor.weights(3, 0, LENGTH)
        actor._listening[1].close()
        return actor._failure, weights

    failure, weights = asyncio.run(outcome())
    assert not failure and np.array_equal(weights, -0.1 / 2 * gradient)


def test_an_overlay_that_cannot_be_laid_is_left_alone_and_never_used_again():
    overlay, length = Overlay(np.dtype(np.float32), PAGE), PAGE * 4
    segment = Segments().lend(np.ones(PAGE, np.float32))
    assert not overlay.lay(0, 10**6, PAGE * 4, length)  # there is no such file
    assert not Reader().lay(segment.name, overlay, 0)
    another = Overlay(np.dtype(np.float32), PAGE)
    assert Reader().lay(segment.name, another, 0) and another.array.sum() == PAGE


def test_nobody_is_reached_that_is_not_there():
    segments = Segments()
    name = segments.probe()
    assert Reader().reaches(name)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for wrong in ({"pid": int(gone.stdout)}, {"fd": 10**6}, {"key": name.key + 1}, {"size": 10**12}):
        other = name._replace(**wrong)
        assert not Reader().reaches(other) and Reader().view(other) is None and Reader().copy(other) is None


def test_who_holds_very_many_vectors_gets_no_more_of_them():
    segments = Segments()
    lent = [segments.lend(ROWS) for _ in range(300)]
    assert None not in lent[:256] and set(lent[256:]) == {None}
    lent.clear()
    assert segments.lend(ROWS) is not None


def test_without_descriptors_nothing_is_shared():
    segments, before = Segments(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as next_one:
        lowest = next_one.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        put, lent = segments.put(ROWS), segments.lend(ROWS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert put is None and lent is None and segments.put(ROWS) is not None


OTHER = """
import sys, numpy as np
from dualdelay.workers.shared_memory import Segments
segments = Segments(readers=1)
print(repr(tuple(segments.put(np.arange(50_000.0)))), flush=True)
sys.stdin.read()
"""


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:dualdelay")


def test_what_a_killed_process_has_written_stays_with_its_readers_and_nothing_is_left_behind():
    before = mapped()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = Name(*eval(other.stdout.readline()))
    reader = Reader()
    view = reader.view(name)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert view.sum() == 49_999 * 25_000 and not Reader().reaches(name)
    assert mapped() == before + 1
    del view, reader
    assert mapped() == before

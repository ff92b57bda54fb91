"""Lines of jobs between a server and workers on its machine: whole messages, nobody blocked, nobody else let in."""

from __future__ import annotations

import gc
import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.engine.half import Half
from dualdelay.workers.job_line import Door, ServersEnd
from dualdelay.workers.local_line import LineLost
from dualdelay.workers.messages import Evaluated, EvaluationRequest, JobRequest, Reply
from dualdelay.workers.ray_fleet import _Whole
from dualdelay.workers.shared_memory import Reader


@contextmanager
def line():
    door = Door()
    server = ServersEnd(door.address)
    worker = door.let_in()
    try:
        yield server, worker
    finally:
        server.close()
        worker.close()


def test_values_keep_every_digit_and_arrays_every_bit():
    values = [0.1 + 0.2, -math.inf, 2**62, True, None, "word", [1, [2.5]]]
    arrays = {
        "": np.array([1e-45, -0.0, math.pi], np.float32),
        "none": np.empty((0, 3)),
        "one": np.array(7),
        "rows": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
    }
    small = Packed(3, (np.array([1, -2, 3], np.int8), np.array([0.5], np.float32)))
    with line() as (server, worker):
        assert server.ask("job", values, arrays, small)
        kind, back, parts, packed = worker.hear()
        assert (kind, back) == ("job", values) and parts.keys() == arrays.keys()
        for name, array in arrays.items():
            assert parts[name].dtype == array.dtype and parts[name].tobytes() == array.tobytes()
            assert parts[name].shape == array.shape and parts[name].flags.writeable
        assert packed.unpack().tolist() == small.unpack().tolist()
        assert worker.answer("job", math.nan, arrays[""])
        [[_, loss, array]] = server.heard()
        assert math.isnan(loss) and array.tobytes() == arrays[""].tobytes() and server.heard() == []


@pytest.mark.parametrize(
    "wrong",
    [object(), np.zeros(10**6), "x" * 10**6, np.array([None]), {"a": torch.ones(1)}],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_not_plain_or_too_long_is_not_said_at_all(wrong):
    with line() as (server, worker):
        assert not server.ask("job", wrong) and not worker.answer("job", wrong)
        assert server.ask("job", 1) and worker.hear() == ["job", 1]
        assert worker.answer("job", 2) and server.heard() == [["job", 2]]


def test_a_server_is_not_held_up_by_a_worker_that_does_not_listen_and_nothing_is_lost():
    with line() as (server, worker):
        part, count = np.ones(20_000, np.float32), 200  # 16 MB in all: more than the system keeps for anybody
        for number in range(count):
            assert server.ask(number, part)
        assert server.is_full
        heard = [worker.hear()[0]]
        while server.is_full:
            server.go_on()
            heard.append(worker.hear()[0])
        heard += [worker.hear()[0] for _ in range(count - len(heard))]
        assert heard == list(range(count))


def test_nobody_is_there_or_not_any_more():
    with pytest.raises(LineLost, match="there is nobody at 'dualdelay-none'"):
        ServersEnd("\0dualdelay-none")
    for first in (0, 1):
        with line() as ends:
            gone, other = ends[first], ends[1 - first]
            gone.close()
            with pytest.raises(LineLost, match="the process at the other end is gone"):
                other.heard() if first else other.hear()
            with pytest.raises(LineLost, match="the process at the other end is gone"):
                other.ask("job") if first else other.answer("job")


OTHER = """
import time
from dualdelay.workers.job_line import Door
door = Door()
print(door.address[1:], flush=True)
end = door.let_in()
end.hear()
time.sleep(60)
"""


def test_a_worker_that_is_killed_at_work_is_missed_at_once():
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    server = ServersEnd("\0" + other.stdout.readline().strip())
    assert server.ask("job") and server.heard() == []
    other.kill()
    other.communicate()
    with pytest.raises(LineLost):
        server.heard()
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as another user")
def test_another_user_of_the_machine_is_neither_let_in_nor_asked():
    door = Door()
    os.seteuid(65534)
    try:
        with pytest.raises(LineLost, match="is another user"):
            ServersEnd(door.address)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one that does not ask who listens
        stranger.connect(door.address)
    finally:
        os.seteuid(0)
    server = ServersEnd(door.address)
    worker = door.let_in()
    with stranger, suppress(ConnectionResetError):
        assert stranger.recv(100) == b""
    assert server.ask("job") and worker.hear() == ["job"]
    server.close()
    worker.close()


# ------------------------------------------------------------------------------------------------- a worker's process


class Slow(dd.Quadratic):
    """Its gradients wait until the test lets them; an evaluation's part is what the test wants."""

    def __init__(self):
        super().__init__([[3.0, 4.0]])
        self.begun, self.go_on, self.draws, self.part = threading.Event(), threading.Event(), [], {"loss": 1.0}

    def gradient(self, x, worker, draw):
        self.draws.append(draw)
        self.begun.set()
        assert self.go_on.wait(20)
        return super().gradient(x, worker, draw)

    def measure(self, x, worker, *samples):
        return self.part


@contextmanager
def attended():
    """A worker that listens in a thread, the server's end, and what its call came to."""
    problem, returned = Slow(), []
    actor = _Whole(0, 0, problem, Half(dd.DuDe(lr=0.1)), 1)
    actor.share(Reader())
    actor._door = Door()
    server = ServersEnd(actor._door.address)
    thread = threading.Thread(target=lambda: returned.append(actor.attend()), daemon=True)
    thread.start()

    def result():
        thread.join(20)
        [notice] = returned
        return notice

    try:
        yield problem, server, result
    finally:
        server.close()
        problem.go_on.set()
        thread.join(20)
        actor._to_server.close()
        gc.collect()


def request(sequence):
    return JobRequest(0, 0, sequence, sequence, 0, -1)


def answers(server, count):
    until, heard = time.monotonic() + 20, []
    while len(heard) < count:
        assert time.monotonic() < until, "there is no answer"
        heard += server.heard()
        time.sleep(0.001)
    return heard


X = np.zeros(2)


def test_jobs_that_were_overtaken_while_a_worker_was_busy_are_not_done():
    with attended() as (problem, server, result):
        server.ask("job", request(0), X)
        assert problem.begun.wait(20)
        for sequence in (1, 2, 3):
            server.ask("job", request(sequence), X)
        problem.go_on.set()
        done = [JobRequest(*answer[0]).sequence for _, answer in answers(server, 2)]
        assert done == problem.draws == [0, 3]
        server.ask("pause")
        assert result() is None


def test_what_cannot_go_by_the_line_is_returned_and_so_is_a_pause():
    with attended() as (problem, server, result):
        problem.part = {"loss": 1.0, "words": np.array([{}])}
        server.ask("evaluation", EvaluationRequest(0, 0, 5, (1, 2)), X)
        notice = result()
        assert isinstance(notice, Evaluated) and notice.evaluation == 5 and notice.part["words"].dtype == object
    with attended() as (problem, server, result):
        problem.go_on.set()
        server.ask("job", request(0), X)
        server.ask("pause")
        [[kind, answer]] = answers(server, 1)
        assert kind == "job" and result() is None
        reply = Reply(*answer)
        assert reply.value.tolist() == [-3.0, -4.0] and reply.error == "" and reply.steps == 1


def test_a_worker_whose_server_is_gone_ends_its_call():
    with attended() as (_, server, result):
        server.close()
        assert result() is None

"""Lines of jobs between a server and workers on its machine: whole messages, nobody blocked, nobody else let in."""

from __future__ import annotations

import errno
import gc
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.engine.half import Half
from dualdelay.workers import ray_fleet
from dualdelay.workers.job_line import Door, ServersEnd
from dualdelay.workers.local_line import LineLost
from dualdelay.workers.messages import Evaluated, EvaluationRequest, JobRequest, Pushed, Reply
from dualdelay.workers.ray_fleet import _Whole
from dualdelay.workers.shared_memory import Name, Reader, Segments


@contextmanager
def line():
    door = Door(os.getpid())
    server = ServersEnd(door.address, os.getpid())
    worker = door.let_in()
    try:
        yield server, worker
    finally:
        server.close()
        worker.close()


def same(one, other):
    """Whether both are the same, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


ARRAYS = {
    "": np.array([1e-45, -0.0, math.pi], np.float32),
    "none": np.empty((0, 3)),
    "one": np.array(7),
    "rows": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
}
INT8 = Packed(3, (np.array([1, -2, 3], np.int8), np.array([0.5], np.float32)))
ROWS = Packed(3, (np.array([[1, -2, 3], [0, 0, 9]], np.int8), np.array([[0.5], [2.0]])))
LARGEST = Packed(4, (np.array([3, 0], np.int32), np.array([7, -7])))
NAME = Name(1, 2, 3, 2**62, 5, 4096, "<f4", (7,), reader=1)
REQUEST = JobRequest(0, 1, 2, 3, 4, -1, 0.1 + 0.2)
REPLY = Reply(REQUEST, {"": NAME, "few": np.array([1.0])}, True, math.nan, 1e-9, pushed=Pushed(12))


@pytest.mark.parametrize(
    "said",
    [
        [0.1 + 0.2, -math.inf, 2**62, True, 1, None, "word \ud800", [1, [2.5]], (1, (2,)), {"dict": {"tuple": []}}],
        ARRAYS,
        [INT8, ROWS, LARGEST],
        [REQUEST, [{"": INT8}, {"": LARGEST, "b": np.array([2, 3])}]],
        EvaluationRequest(0, 1, 2, (3, 5)),
        REPLY,
        Evaluated(0, 1, 2, {"loss": 0.25, "samples": 4, "gradient": np.ones(2)}),
    ],
    ids=["values", "arrays", "packed", "differences", "evaluation", "reply", "evaluated"],
)
def test_what_is_said_is_heard_with_every_digit_and_type(said):
    with line() as (server, worker):
        assert server.ask(said, said) and worker.answer(said)
        request, model = worker.hear()
        assert same(request, said) and same(model, said)
        [answer] = server.heard()
        assert same(answer, said) and server.heard() == []
        assert all(part.flags.writeable and part.flags.aligned for part in request.values()) if said is ARRAYS else True


DEEP = []
for _ in range(20):
    DEEP = [DEEP]
ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "wrong",
    [
        object(),
        np.zeros(10**6),
        "x" * 10**6,
        10**5000,
        np.array([None]),
        np.ma.masked_array([1.0, 2.0], [False, True]),
        {"a": torch.ones(1)},
        {0: 1.0},
        np.float32(1.5),
        np.float64(1.5),
        DEEP,
        ENDLESS,
        Packed(4, (np.array([3, 0]), np.array([7.0, -7.0]))),
        Packed(2, (np.array([3, 0], np.int32), np.array([7.0, -7.0]))),
        os.stat_result(range(10)),
    ],
    ids=[
        "object", "long array", "long text", "long number", "objects", "masked",
        "tensor", "keys", "float32", "float64", "deep",
        "endless", "packed with other places", "packed with places beyond", "other tuple",
    ],
)  # fmt: skip
def test_what_would_come_as_something_else_or_is_too_long_is_not_said_at_all(wrong):
    with line() as (server, worker):
        assert not server.ask(REQUEST, wrong) and server.refused == 1 and not worker.answer(wrong)
        assert server.ask(None) and server.refused == 1 and worker.hear() == [None, None]
        assert server.ask(REQUEST) and server.refused == 0 and worker.hear() == [REQUEST, None]
        assert worker.answer(REPLY) and same(server.heard(), [REPLY])


def test_whoever_says_what_cannot_be_read_is_lost():
    kinds = [kind.__name__ for kind in (JobRequest, Reply)]
    texts = [
        b"no JSON",
        b'[{"array": 1}, []]',
        b"[[], 5]",
        *(f'[{{"{kind}": []}}, []]'.encode() for kind in kinds),
    ]
    for text in texts:
        packet = struct.pack("<Q8x", len(text)) + text
        with line() as (server, worker):
            server._line.send(packet)
            with pytest.raises(LineLost, match="sent what cannot be read"):
                worker.hear()
            assert worker.answer(REPLY)
            worker._line.send(packet)
            assert worker.answer(REPLY)
            assert same(server.heard(), [REPLY])  # of what came before it nothing is lost
            for _ in range(2):
                with pytest.raises(LineLost, match="sent what cannot be read"):
                    server.heard()


def test_a_server_is_not_held_up_by_a_worker_that_does_not_listen_and_nothing_is_lost_but_jobs_that_are_overtaken():
    with line() as (server, worker):
        part, count = np.ones(20_000, np.float32), 200  # 16 MB in all: more than the system keeps for anybody
        for number in range(count):
            assert server.ask(EvaluationRequest(0, 0, number, None) if number % 2 else request(number), part)
        assert server.is_full
        heard = [worker.hear()[0]]
        while server.is_full:
            server.go_on()
            heard.append(worker.hear()[0])
        heard += worker.waiting and [worker.hear()[0] for _ in range(len(worker.waiting))]
        assert [one.evaluation for one in heard if isinstance(one, EvaluationRequest)] == list(range(1, count, 2))
        jobs = [one.sequence for one in heard if isinstance(one, JobRequest)]
        assert jobs == [*range(0, 2 * len(jobs) - 2, 2), count - 2] and len(jobs) < count // 2


def test_what_was_said_before_an_end_is_heard_before_that():
    with line() as (server, worker):
        assert worker.answer(REPLY) and server.ask(REQUEST)
        worker.close()
        assert same(server.heard(), [REPLY])
        with pytest.raises(LineLost):
            server.heard()


def no_more_descriptors(*_):
    raise OSError(errno.EMFILE, "too many open files")


def test_nobody_is_there_or_not_any_more():
    with pytest.raises(LineLost, match="there is nobody at 'dualdelay-none'"):
        ServersEnd("\0dualdelay-none", os.getpid())
    with pytest.MonkeyPatch.context() as patched, pytest.raises(LineLost, match=r"can be no more lines: .*too many"):
        patched.setattr(socket, "socket", no_more_descriptors)
        ServersEnd("\0dualdelay-none", os.getpid())
    for first in (0, 1):
        with line() as ends:
            gone, other = ends[first], ends[1 - first]
            gone.close()
            with pytest.raises(LineLost, match="the process at the other end is gone"):
                other.heard() if first else other.hear()
            with pytest.raises(LineLost, match="the process at the other end is gone"):
                other.ask(REQUEST) if first else other.answer(REPLY)


def test_a_line_that_is_closed_has_ended_also_if_a_child_of_that_process_has_it():
    with line() as (server, worker):
        copies = os.dup(server.fileno()), os.dup(worker._line.fileno())
        server.close()
        with pytest.raises(LineLost):
            worker.hear()
        for copy in copies:
            os.close(copy)


def test_a_door_before_which_many_stand_holds_nobody_up():
    door, others = Door(os.getpid()), []
    try:
        with suppress(BlockingIOError):
            while len(others) < 10_000:
                others.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                others[-1].setblocking(False)
                others[-1].connect(door.address)
        with pytest.raises(LineLost, match="there is nobody"):
            ServersEnd(door.address, os.getpid())
    finally:
        for other in (*others, door._socket):
            other.close()


def test_a_users_time_limit_for_sockets_is_not_ours():
    socket.setdefaulttimeout(0.01)
    try:
        with line() as (server, worker):
            begin = time.monotonic()
            threading.Timer(0.2, server.ask, (REQUEST,)).start()
            assert worker.hear() == [REQUEST, None] and time.monotonic() - begin > 0.15
            assert server.heard() == []
    finally:
        socket.setdefaulttimeout(None)


OTHER = """
import sys, time
from dualdelay.workers.job_line import Door
door = Door(int(sys.argv[1]))
print(door.address[1:], flush=True)
end = door.let_in()
end.hear()
time.sleep(60)
"""


def test_a_worker_that_is_killed_at_work_is_missed_at_once():
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(os.getpid())], stdout=subprocess.PIPE, text=True)
    address = "\0" + other.stdout.readline().strip()
    server = ServersEnd(address, other.pid)
    assert server.ask(REQUEST) and server.heard() == []
    other.kill()
    other.communicate()
    with pytest.raises(LineLost):
        server.heard()
    server.close()


def test_another_process_of_the_same_user_is_neither_let_in_nor_asked():
    door = Door(1)
    with pytest.raises(LineLost, match="is another process"):
        ServersEnd(door.address, 1)
    stranger = ServersEnd(door.address, os.getpid())
    door._socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        door.let_in()
    with pytest.raises(LineLost):
        stranger.heard()
    stranger.close()
    door._socket.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as another user")
def test_another_user_of_the_machine_is_neither_let_in_nor_asked():
    door = Door(os.getpid())
    os.seteuid(65534)
    try:
        with pytest.raises(LineLost, match="is another process"):
            ServersEnd(door.address, os.getpid())
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one that does not ask who listens
        stranger.connect(door.address)
    finally:
        os.seteuid(0)
    server = ServersEnd(door.address, os.getpid())
    worker = door.let_in()
    with stranger, suppress(ConnectionResetError):
        assert stranger.recv(100) == b""
    assert server.ask(REQUEST) and worker.hear() == [REQUEST, None]
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
    actor._door = Door(os.getpid())
    server = ServersEnd(actor._door.address, os.getpid())
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
        server.ask(request(0), X)
        assert problem.begun.wait(20)
        for sequence in (1, 3, 2):  # one of them is late
            server.ask(request(sequence), X)
        server.ask(EvaluationRequest(0, 0, 5, (1, 2)), X)
        problem.go_on.set()
        first, second, evaluated = answers(server, 3)
        assert [first.request.sequence, second.request.sequence] == problem.draws == [0, 3]
        assert evaluated.evaluation == 5 and evaluated.part["loss"] == 1.0
        server.ask(None)
        assert result() is None


def test_what_cannot_go_by_the_line_is_returned():
    with attended() as (problem, server, result):
        problem.part = {"loss": 1.0, "words": np.array([{}])}
        server.ask(EvaluationRequest(0, 0, 5, (1, 2)), X)
        notice = result()
        assert isinstance(notice, Evaluated) and notice.evaluation == 5 and notice.part["words"].dtype == object


def test_a_worker_stops_attending_when_it_is_told_to_and_when_its_server_is_gone():
    with attended() as (problem, server, result):
        problem.go_on.set()
        server.ask(request(0), X)
        server.ask(None)
        [reply] = answers(server, 1)
        assert result() is None
        assert reply.value.tolist() == [-3.0, -4.0] and reply.error == "" and reply.steps == 1
    with attended() as (_, server, result):
        server.close()
        assert result() is None


def test_an_answer_for_which_the_line_was_lost_goes_by_ray():
    with attended() as (problem, server, result):
        server.ask(request(0), X)
        assert problem.begun.wait(20)
        server.close()
        problem.go_on.set()
        assert result().value.tolist() == [-3.0, -4.0]


def test_a_worker_for_which_no_door_can_be_made_is_ready_all_the_same(monkeypatch):
    def refused(server):
        raise OSError("no sockets here")

    node = types.SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr("ray.get_runtime_context", lambda: node)
    actor, server = _Whole(0, 0, Slow(), Half(dd.DuDe(lr=0.1)), 1), Segments()
    assert actor.ready(False, server.probe()).door
    actor._door._socket.close()
    monkeypatch.setattr(ray_fleet, "Door", refused)
    ready = actor.ready(False, server.probe())
    assert ready.door == "" and ready.probe is not None

"""A worker of several processes, its ranks, that take each gradient together by ``torch.distributed``.

The first rank is the worker as the server knows it. At each gradient it tells the others the job and the model; each
computes its part, and the first adds the parts in the order of the ranks. So the sum has the bits that a replay gets in one
process, which the order of an all-reduce would not have. Nobody waits for a rank that is gone: whoever finds the others out
of reach says so after a moment, and whatever has started the processes ends all of them and starts the group anew.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import Problem
from ..core.devices import use_threads
from ..core.errors import BadInput, BadWork
from ..core.tracebacks import cause_of, told
from ..problems.wrapped import InParts, Part, Wrapped, add_parts, source_of, with_gradients

_LOOPBACK = "127.0.0.1"
_LONG = timedelta(days=20)  # a rank may have nothing to do for long; those that hang or die are ended from outside
_GRACE = 10.0  # seconds in which a rank whose group has fallen apart is ended, if another one is to blame
_ADDRESS_OF = 0x8915  # SIOCGIFADDR: the address of an interface
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # of weights and gradients, by their numbers


class Place(NamedTuple):
    """Where a rank is."""

    node: str
    address: str  # of its machine, for others
    environment: Mapping[str, str]  # what its bits depend on


class Meeting(NamedTuple):
    """Where the ranks of a group find one another."""

    host: str
    port: int


class Group:
    """One rank's end of its group."""

    def __init__(self, rank: int, ranks: int, own_gpu: bool = False) -> None:
        """``own_gpu`` says that each rank has a GPU to itself: then what they exchange stays there."""
        self.rank, self.ranks = rank, ranks
        uses_gpu = own_gpu and torch.cuda.is_available() and dist.is_nccl_available()
        self.device = torch.device("cuda" if uses_gpu else "cpu")
        self.backend = "cpu:gloo,cuda:nccl" if uses_gpu else "gloo"
        self._opened, self._over = threading.Event(), threading.Event()
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._reason = ""  # why the group is of no more use
        self._refusal = ""  # why the problem's gradients cannot be taken in parts

    # --- coming together ---

    def open(self, places: Sequence[Place]) -> Meeting:
        """The first rank lets the others find it: on this machine alone if all of them are here."""
        host = _LOOPBACK if len({place.node for place in places}) == 1 else places[0].address
        listening = socket.create_server((host, 0), backlog=self.ranks)  # torch itself would listen on every interface
        self._meeting = Meeting(host, listening.getsockname()[1])
        self._store = _store(self._meeting, is_master=True, master_listen_fd=listening.detach())
        self._opened.set()
        return self._meeting

    def join(self, meeting: Meeting | None, address: str) -> None:
        """Become one of the group; returns when all ranks are there. The first needs no meeting: it has opened it."""
        if meeting is None:
            self._opened.wait()
            assert self._meeting is not None
            meeting = self._meeting
        else:
            self._store = _store(meeting, is_master=False)
        interface = interface_of(_LOOPBACK if meeting.host == _LOOPBACK else address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface:
                os.environ.setdefault(name, interface)
        dist.init_process_group(self.backend, store=self._store, rank=self.rank, world_size=self.ranks, timeout=_LONG)

    def prepare(self, problem: Problem, worker: int) -> None:
        """Have a worker's data built in all ranks at once, if gradients use the group: the first are taken on the way."""
        if source_of(problem).collective:
            with self._in_step():
                problem.samples(worker)

    # --- the first rank ---

    def led(self, problem: Problem) -> Problem:
        """The problem as the first rank computes it: its gradients are taken by all."""
        return with_gradients(problem, lambda source: _Led(source, self))

    def gradient(self, problem: Problem, x: Tensor, worker: int, draw: int, unit: float) -> Part:
        """Take a gradient with the others."""
        if self._reason:
            self._wait_for_end()
        y = x.to(self.device).contiguous()
        with self._in_reach():
            header = [worker, draw, unit, _TYPES.index(y.dtype), y.numel()]
            dist.broadcast(torch.tensor(header, dtype=torch.float64), 0)
            dist.broadcast(y, 0)
        if not isinstance(problem, InParts):
            with self._in_step():
                gradient, loss = problem.gradient(y, worker, draw)
            return gradient.to(x.device), loss
        parts = [self._own_part(problem, y, worker, draw)]
        with self._in_reach():
            parts += [self._receive(rank) for rank in range(1, self.ranks)]
        if self._refusal:  # of the first rank, and the others say the same
            raise BadWork(self._refusal)
        for rank, part in enumerate(parts):
            if isinstance(part, str):
                raise RuntimeError(f"rank {rank} of worker {worker} has failed:\n{part}")
        gradient, loss = add_parts(part for part in parts if not isinstance(part, str))
        return gradient.to(x.device), loss

    def _own_part(self, problem: InParts, y: Tensor, worker: int, draw: int) -> Part | str:
        """This rank's part of a gradient, or the traceback of what it raised: the others wait for one of both."""
        try:
            return problem.problem.gradient_part(y, worker, draw, self.rank, self.ranks)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, BadInput) and _can_take_whole(problem, y, worker, draw):
                self._refusal = str(error)
            return told(error)

    def _receive(self, rank: int) -> Part | str:
        """What a rank has computed, or the traceback that it ended with."""
        head = torch.empty(4, dtype=torch.float64)
        dist.recv(head, rank)
        failed, loss, kind, count = head.tolist()
        if failed:
            text = torch.empty(int(count), dtype=torch.uint8)
            dist.recv(text, rank)
            return text.numpy().tobytes().decode(errors="replace")
        part = torch.empty(int(count), dtype=_TYPES[int(kind)], device=self.device)
        dist.recv(part, rank)
        return part, loss

    def stay(self) -> NoReturn:
        """Never return, and raise when the group is of no more use."""
        self._over.wait()
        raise RuntimeError(self._reason)

    # --- the others ---

    def serve(self, problem: Problem, threads: int) -> NoReturn:
        """Take part in the gradients of the first rank, until this process is ended."""
        source = source_of(problem)
        while True:
            use_threads(threads)
            with self._in_reach():
                header = torch.empty(5, dtype=torch.float64)
                dist.broadcast(header, 0)
                worker, draw, unit, kind, count = header.tolist()
                y = torch.empty(int(count), dtype=_TYPES[int(kind)], device=self.device)
                dist.broadcast(y, 0)
            job = (int(worker), int(draw))
            if unit:
                source.set_mean_samples(unit)
            if not isinstance(source, InParts):
                with self._in_step():
                    source.gradient(y, *job)
                continue
            part = self._own_part(source, y, *job)
            with self._in_reach():
                self._send(part)

    def _send(self, part: Part | str) -> None:
        if isinstance(part, str):
            text = torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8)
            dist.send(torch.tensor([1.0, 0.0, 0.0, len(text)], dtype=torch.float64), 0)
            dist.send(text, 0)
        else:
            gradient, loss = part[0].to(self.device).contiguous(), float(part[1])
            head = [0.0, loss, _TYPES.index(gradient.dtype), gradient.numel()]
            dist.send(torch.tensor(head, dtype=torch.float64), 0)
            dist.send(gradient, 0)

    # --- what goes wrong ---

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """While a problem uses the group itself; when it has raised, nobody knows where the others are."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            time.sleep(_GRACE)  # another rank may have died of it, and then all are ended
            last = cause_of(told(error))
            self._give_up(f"its gradient raised, so that it is out of step with the other ranks: {last}")
            raise

    @contextmanager
    def _in_reach(self) -> Iterator[None]:
        """While the ranks exchange something; if one of them is gone, wait to be ended, too."""
        try:
            yield
        except RuntimeError as error:
            traceback.print_exc(file=sys.stderr)
            time.sleep(_GRACE)
            self._give_up(f"the other ranks are out of reach: {str(error).strip().splitlines()[0]}")
            if self.rank:
                raise RuntimeError(self._reason) from error
            self._wait_for_end()

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._over.set()

    def _wait_for_end(self) -> NoReturn:
        while True:
            time.sleep(3600)


class _Led(Wrapped):
    """A problem whose gradients all ranks of a worker take together; everything else the first does alone."""

    kind = "led"

    def __init__(self, problem: Problem, group: Group) -> None:
        super().__init__(problem)
        self._group, self._unit, self.collective = group, 0.0, problem.collective

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return self._group.gradient(self.problem, x, worker, draw, self._unit)

    def set_mean_samples(self, unit: float) -> None:
        self._unit = unit
        self.problem.set_mean_samples(unit)


def _can_take_whole(problem: InParts, y: Tensor, worker: int, draw: int) -> bool:
    """Whether a gradient whose parts were refused can be taken at once: then it is the parts that no second try helps."""
    try:
        problem.problem.gradient(y, worker, draw)
    except Exception:  # of the user's, who is told what the part has raised
        return False
    return True


def _store(meeting: Meeting, **options: Any) -> Any:
    """What ranks find one another by."""
    made: Any = dist
    return made.TCPStore(*meeting, wait_for_workers=False, timeout=_LONG, **options)


def interface_of(address: str) -> str:
    """The name of the network interface that has an address; empty if none is found."""
    names = [name for _, name in socket.if_nameindex()]
    if address == _LOOPBACK:
        return next((name for name in ("lo", "lo0") if name in names), "")
    import fcntl  # which not every system has

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with suppress(OSError):
                answer = fcntl.ioctl(asked, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def joint_environment(places: Sequence[Place]) -> dict[str, str]:
    """What the bits of a group depend on: where its ranks differ, all that they have."""
    joint = {}
    for key in places[0].environment:
        values = dict.fromkeys(place.environment.get(key, "") for place in places)
        joint[key] = " and ".join(values)
    return joint

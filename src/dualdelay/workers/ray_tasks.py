"""Calls as Ray tasks on the machines of a cluster: those of a machine that is lost are made again on another."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import BadInput, RunFailed, is_finite, require_zero_or_more, shortened, shown
from .ray_fleet import join, leave, why_never_placed
from .security import split

_log = logging.getLogger("dualdelay")

_MOST_PROCESSORS = 1e6
_LOOK = 0.5  # seconds between two looks at what has come
_TELL = 1.0  # seconds between two news of a call
_SOON = 3.0  # seconds after which it is said why nothing begins
_LEAVE = 60.0  # seconds in which tasks that are told to stop have saved what they do
_TRIES, _MACHINES = 3, 20  # times that a call is made whose process dies, and whose machine is lost


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster for the runs of a sweep or a comparison, each a task; what a run needs is claimed for it.

    A run's folder has to be one that all machines share, by the same path, such as one on a network file system.
    """

    address: str | None = None
    """A running cluster to join, such as "10.0.0.5:6379" or "auto"; None starts Ray on this machine."""
    cpus: float = 1.0
    """Processors that a run claims."""
    gpus: float = 0.0
    """GPUs that a run claims; 0.25 lets four share one. Above zero, runs are computed on a GPU unless ``dd.Compute`` says
    otherwise, and those that share a schedule are one task."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray's custom resources that a run claims, such as {"large": 1}, to keep runs to some of the machines."""
    host: str = "127.0.0.1"
    """The address that a Ray started here binds to; the default is reachable from this machine alone."""
    insecure: bool = False
    """Join a cluster on another machine although neither token authentication nor TLS is on: anyone who reaches its
    port can run code there."""
    patience: float = 60.0
    """Seconds for which the sweep waits for a machine that has what a run claims, while none is under way; for one that has
    it, but is busy, it waits as long as that takes."""

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 <= value <= _MOST_PROCESSORS:
                raise BadInput(f"{name} is {shown(value)}; expected zero or more processors for each run, 1e6 at most.")
        for name, text in (("address", self.address), ("host", self.host)):
            if not isinstance(text, str) and not (text is None and name == "address"):
                raise BadInput(f"{name} is {shown(text)}; expected a text, such as '127.0.0.1'.")
        if self.address not in (None, "auto") and split(self.address or "")[1] is None:
            raise BadInput(
                f"address is {shown(self.address)}; expected host and port, such as '10.0.0.5:6379', or 'auto' for the "
                "cluster on this machine; None (on the shell: local) starts Ray here."
            )
        good = isinstance(self.resources, Mapping) and all(
            isinstance(name, str) and is_finite(value) and value >= 0 for name, value in self.resources.items()
        )
        if not good:
            raise BadInput(
                f"resources is {shown(self.resources)}; expected how much of what by name, such as {{'large': 1.0}}."
            )
        if not self.claims:
            raise BadInput("a run claims nothing of the cluster, so that all would begin at once; give cpus or gpus.")
        require_zero_or_more("patience", self.patience, "finite seconds")

    @property
    def claims(self) -> dict[str, float]:
        """What a run asks of the machine that it is computed on."""
        claims: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: value for name, value in claims.items() if value}


Call = Callable[[int, Callable[[float], None]], bytes]
Shared = Callable[[int, float | None], None]  # how much of a call is done; None: it is not under way any more


def _make(call: Call, number: int, board: Any) -> bytes:
    """A call as a task; the board hears that it has begun, and how much of it is done."""
    last = time.monotonic()
    board.tell.remote(number, 0.0)

    def share(part: float) -> None:
        nonlocal last
        if time.monotonic() - last > _TELL:
            last = time.monotonic()
            board.tell.remote(number, part)

    return call(number, share)


class _Board:
    """An actor beside the driver that is told by tasks how far they are, and reads it out."""

    def __init__(self) -> None:
        self._news: dict[int, float] = {}

    def tell(self, number: int, part: float) -> None:
        """A task has come so far."""
        self._news[number] = part

    def read(self) -> dict[int, float]:
        """What was told since this was asked last."""
        news, self._news = self._news, {}
        return news


class RayTasks:
    """Calls of one function with numbers, made in a cluster; use it as a context around ``run``."""

    def __init__(self, cluster: Cluster, call: Call) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ours = (cluster.address, cluster.host, cluster.insecure)
        self._ray, self._ours = join("runs on a cluster", *ours, cores)
        self._cluster, ray = cluster, self._ray
        try:
            self._call = ray.put(call)
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=True
            )
            self._board = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        except BaseException:  # such as Ctrl-C
            leave(ray, self._ours)
            raise
        claims = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "resources": dict(cluster.resources)}
        self._task = ray.remote(_make).options(max_retries=0, scheduling_strategy="SPREAD", **claims)
        self._calls: dict[Any, int] = {}
        self._under_way: set[int] = set()
        self._tries: dict[int, list[int]] = {}  # by number: processes that died in it, and machines that were lost
        self._began = self._moved = time.monotonic()
        self._told = False

    def __enter__(self) -> RayTasks:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            with suppress(Exception):  # a Ray that has broken down has no board
                self._ray.kill(self._board)
            leave(self._ray, self._ours)

    def run(
        self,
        numbers: Sequence[int],
        settle: Callable[[int, bytes | Exception], None],
        share: Shared,
        check: Callable[[], None],
    ) -> None:
        """Make all calls; ``settle`` takes what each gives, or why it gives nothing, and ``check`` is called meanwhile."""
        for number in numbers:
            self._submit(number)
        while self._calls:
            check()
            done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_LOOK)
            for call in done:
                number = self._calls.pop(call)
                self._under_way.discard(number)
                self._moved = time.monotonic()
                try:
                    value: bytes | Exception = self._ray.get(call)
                except self._ray.exceptions.RayError as error:
                    why = self._lost(number, error, share)
                    if why is None:
                        continue
                    value = why
                settle(number, value)
            self._read_board(share)
            self._require_room()

    def _submit(self, number: int) -> None:
        self._calls[self._task.remote(self._call, number, self._board)] = number

    def _read_board(self, share: Shared) -> None:
        try:
            news = self._ray.get(self._board.read.remote(), timeout=_LOOK)
        except self._ray.exceptions.RayError:  # it is not up yet, or has too much to do
            return
        waiting = set(self._calls.values())
        for number, part in news.items():
            if number in waiting:
                self._under_way.add(number)
                share(number, part)

    def _lost(self, number: int, error: Exception, share: Shared) -> Exception | None:
        """What a call that gave nothing has come to; None if it is made again."""
        errors = self._ray.exceptions
        said = " ".join(str(error).split())
        if isinstance(error, (errors.RayTaskError, errors.RuntimeEnvSetupError)):  # before the call itself could begin
            last = str(error).strip().splitlines()[-1]
            raise BadInput(
                f"a machine of the cluster cannot compute a run: {shortened(last)}. Every machine needs dualdelay and "
                "whatever else your code imports, in the same versions."
            ) from None
        if isinstance(error, errors.TaskCancelledError):
            return RunFailed("it was cancelled in the cluster.")
        tries = self._tries.setdefault(number, [0, 0])
        gone = isinstance(error, (errors.NodeDiedError, errors.ObjectLostError)) or "node" in said.lower()
        tries[gone] += 1
        what = "its machine was lost" if gone else f"its process died ({shortened(said)})"
        if tries[0] >= _TRIES or tries[1] >= _MACHINES:
            return RunFailed(f"{what}, for the {sum(tries)}. time. What it had saved is in its folder.")
        _log.warning("a run of the sweep begins again elsewhere, or goes on from its checkpoint: %s", what)
        share(number, None)
        self._submit(number)
        return None

    def _require_room(self) -> None:
        """Refuse to wait for a machine that does not come."""
        now = time.monotonic()
        if self._under_way or not self._calls:
            self._moved = now
            return
        quiet = now - self._moved
        if quiet < min(_SOON, self._cluster.patience):
            return
        patience, why = self._cluster.patience, why_never_placed(self._ray, self._cluster.claims)
        if why and quiet >= patience:
            raise RunFailed(
                f"no run could begin for {patience:g} s{why}. Claim less (dd.Cluster(cpus=..., gpus=...), on the shell "
                "--cluster-cpus and --cluster-gpus) or add a machine; the same call then goes on."
            )
        if not self._told and (why or quiet >= patience):
            self._told = True
            others = ": all that it claims is taken, or processes take long to start there"
            _log.warning(
                "no run has begun in %.0f s%s; waiting%s.", quiet, why or others, f" {patience:g} s" if why else ""
            )

    def _stop(self) -> None:
        """Have the tasks that are under way save what they do, and end; those that wait never begin."""
        if not self._calls:
            return
        calls = list(self._calls)
        try:
            for call in calls:
                self._ray.cancel(call)
            self._ray.wait(calls, num_returns=len(calls), timeout=_LEAVE)
        finally:  # also when somebody does not want to wait for that
            for call in [] if self._ours else self._ray.wait(calls, num_returns=len(calls), timeout=0)[1]:
                with suppress(Exception):  # never of one that has ended: if its answer is still on the way, Ray aborts us
                    self._ray.cancel(call, force=True)

"""Runs of a sweep in several processes or on a cluster: what those are sent, and what comes of the runs."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import secrets
import socket
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..core import Arrival, State
from ..core.devices import batches, free_memory, placed
from ..core.errors import BadInput, RunFailed, shortened
from ..engine.result import Run
from ..problems import exact
from ..simulation.cores import cores_here
from ..storage.files import Damaged, make_folder, remove, write
from ..storage.folder import Folder
from ..storage.locks import InUse
from ..workers.ray_tasks import Cluster, RayTasks
from . import own
from .grouping import grouped
from .processes import Outcome, Sent, SideBySide, packed, received
from .runner import Interrupted, interruptible, runs_saved
from .settings import Compute, Reporting
from .simulate import run_one
from .spec import Options
from .together import Point, Report, of_point, side_by_side

_OFTEN = 0.5  # seconds between two news of a run
_SPARE = 0.5  # the share of free memory that copies of problems may take
_SEEN = 10.0  # seconds in which a machine of a cluster sees what was written on another
_UNLOCKED = 30.0  # seconds in which a cluster ends the processes of a driver that was killed
_MARK = ".cluster"  # the file in the folder of all runs by which machines know it

Keep = Callable[[int, Run | None, str], None]


class Ends:
    """What comes of the runs of a sweep, told as if they had been computed one after the other.

    A run that fails does not take the others with it. Input that cannot be is the user's where no run before it has come to
    its end; later it is that run's own.
    """

    def __init__(self, points: Sequence[Point], keep: Keep | None) -> None:
        self.runs: dict[int, Run] = {}
        self.failed: dict[int, str] = {}
        self.shares: dict[int, float] = {}  # of runs that are under way
        self._refused: dict[int, BadInput] = {}
        self._points, self._keep, self._any_before = points, keep, False

    def __contains__(self, k: object) -> bool:
        return k in self.runs or k in self.failed

    @property
    def share(self) -> float:
        """How much of the sweep is done."""
        return (len(self.runs) + len(self.failed) + sum(self.shares.copy().values())) / len(self._points)

    def add_all(self, runs: Mapping[int, Run]) -> None:
        """Runs that were computed together, before any other."""
        for k, run in runs.items():
            self.add(k, run)
        self._any_before = bool(runs)

    def add(self, k: int, run: Run | None, error: BaseException | None = None) -> None:
        """A run has come to its end, or not; raises what ends the sweep."""
        self.shares.pop(k, None)
        if run is not None:
            self.runs[k] = run
        elif isinstance(error, (RunFailed, BadInput)) and not isinstance(error, NotShared):
            self.failed[k] = str(error)
            if isinstance(error, BadInput):
                self._refused[k] = error
        else:
            assert error is not None
            raise error
        if not self._any_before:
            first = next((one for one in range(len(self._points)) if one not in self.failed), len(self._points))
            if refused := [self._refused[one] for one in sorted(self._refused) if one < first]:
                raise refused[0]
        if self._keep is not None:
            self._keep(k, run, self.failed.get(k, ""))


def compute_here(point: Point, options: Options, reporting: Reporting, ends: Ends, k: int) -> None:
    """Bring one run to its end in this process."""
    try:
        run = _alone(point, options, reporting)
    except (RunFailed, BadInput) as error:
        ends.add(k, None, error)
    else:
        ends.add(k, run)


def _alone(point: Point, options: Options, reporting: Reporting) -> Run:
    return run_one(of_point(options, point), point.algorithm, point.problem, point.fleet, point.seed, reporting)


def processes_for(points: Sequence[Point], compute: Compute, count: int) -> int:
    """In how many processes so many runs are computed: as the cores allow, but not on a GPU or in another's process."""
    if compute.cores is None and multiprocessing.parent_process() is not None:
        return 1  # who has several processes uses the cores already
    if torch.device(compute.device or "cpu").type != "cpu":
        return 1
    if compute.device is None and any(point.problem.start(0).device.type != "cpu" for point in points[:1]):
        return 1
    threads = torch.get_num_threads() if compute.threads is None else compute.threads
    return max(1, min(count, (compute.cores or cores_here()) // threads))


@contextmanager
def one_display(reporting: Reporting, tell: Report) -> Iterator[Report]:
    """What shows the progress of all runs at once: what the caller has, or a bar, for which the rich package is needed."""
    if reporting.report is not None or not reporting.progress:
        yield tell
        return
    try:
        from .progress import SweepProgress
    except ImportError:
        yield tell
        return
    with SweepProgress() as bar:
        yield bar


class NotShared(BadInput):
    """A machine of a cluster does not see the folder of the runs."""


class _Sharing:
    """A watch function that tells how much of its run is done."""

    def __init__(self, share: Callable[[float], None], options: Options) -> None:
        self._share, self._updates, self._time, self._next = share, options.updates, options.time, 0.0

    def __call__(self, state: State, arrival: Arrival) -> None:
        if (now := clock.monotonic()) >= self._next:
            self._next = now + _OFTEN
            done = (
                state.version / self._updates if self._updates else 0.0,
                arrival.time / self._time if self._time else 0.0,
            )
            self._share(min(max(done), 1.0))


@dataclass(frozen=True)
class _Elsewhere:
    """Runs of a sweep as another process computes them, with everything that their bits and their folders depend on."""

    points: Sequence[Point]
    options: Options
    units: Sequence[Sequence[int]]  # the runs of each call
    imported: Mapping[str, Mapping[str, Any]]  # what is known by name because it was imported
    plugins: bool  # whether those are known
    dtype: torch.dtype
    precision: str
    token: str = ""  # what the folder of all runs holds, if they are computed on other machines
    device: str | None = None  # where they are computed, if the caller left that open

    @classmethod
    def of(cls, points: Sequence[Point], options: Options, units: Sequence[Sequence[int]], **where: Any) -> _Elsewhere:
        """The runs of these points, as far as the units name them."""
        imported = {kind: dict(known) for kind, known in own.IMPORTED.items()}
        loaded, dtype, precision = (
            own.plugins.cache_info().currsize > 0,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
        )
        threads = options.compute.threads or torch.get_num_threads()
        options = replace(options, compute=replace(options.compute, threads=threads))
        return cls(points, options, units, imported, loaded, dtype, precision, **where)

    def __call__(self, unit: int, share: Callable[[float], None]) -> list[tuple[int, Run | None, Exception | None]]:
        """Compute the runs of a unit; what is theirs comes back with them, and the rest stays where it was."""
        for kind, known in self.imported.items():
            own.IMPORTED[kind].update(known)
            if self.plugins:
                own.plugins(kind)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        if self.token:
            _require_shared(self.options.saving.path, self.token)
        numbers, options = self.units[unit], self.options
        if self.device is not None:
            options = replace(options, compute=replace(options.compute, device=self.device))
        together: dict[int, Run] = {}
        if len(numbers) > 1:
            together = side_by_side([self.points[k] for k in numbers], options, (), lambda part, _: share(part))
        ended: list[tuple[int, Run | None, Exception | None]] = []
        for place, k in enumerate(numbers):
            run = together.get(place)
            try:
                if run is None:
                    run = self._alone(k, options, share)
            except (RunFailed, BadInput) as error:
                ended.append((k, None, error))
            else:
                ended.append((k, _without_what_is_known(run), None))
        return ended

    def _alone(self, k: int, options: Options, share: Callable[[float], None]) -> Run:
        """Compute one run by itself; on another machine it waits for a process whose end that has not heard of yet."""
        point, until = self.points[k], clock.monotonic() + (_UNLOCKED if self.token else 0.0)
        reporting = Reporting([_Sharing(share, options)], progress=False)
        while True:
            try:
                return _alone(point, options, reporting)
            except InUse:
                if clock.monotonic() > until:
                    raise
                clock.sleep(_OFTEN)


def _without_what_is_known(run: Run) -> Run:
    """A run as it travels: without its problem and method, which whoever asked for it has, and not on a GPU."""
    here, state = torch.device("cpu"), copy.copy(run.state)
    for each in fields(state):
        setattr(state, each.name, placed(getattr(state, each.name), here))
    best = run.best if run.best is None else replace(run.best, x=placed(run.best.x, here))
    return replace(run, problem=None, algorithm=None, state=state, best=best, weights=placed(run.weights, here))


def _require_shared(folder: Path | None, token: str) -> None:
    """Refuse a folder that is not the one whose runs are asked for, as on a machine that does not share it."""
    assert folder is not None
    until = clock.monotonic() + _SEEN
    while True:
        with suppress(OSError):
            if (folder / _MARK).read_text() == token:
                return
        if clock.monotonic() > until:
            break
        clock.sleep(_OFTEN)  # a network file system may take a while
    raise NotShared(
        f"the machine {socket.gethostname()} of the cluster does not see {folder} as this one does: it has no {_MARK} "
        "there, which was written before the runs began. Choose a folder that all machines share by the same path, such as "
        "one on a network file system, or leave it out."
    )


class Spread:
    """The runs of a sweep in several processes on this machine or in a cluster, with one display for all."""

    def __init__(self, points: Sequence[Point], options: Options, ends: Ends, left: Sequence[int], show: Report) -> None:
        self._points, self._options, self._ends, self._left, self._show = points, options, ends, left, show
        self._saves = options.saving.path is not None

    def run(self, on: Cluster | None, processes: int) -> None:
        """Bring all runs to their ends, through Ctrl-C and SIGTERM: then they are saved, and the same call goes on."""
        for k in self._left:  # those are only to be read
            point = self._points[k]
            if point.path is not None and _has_result(point.path):
                self._tell()
                compute_here(point, self._options, Reporting(progress=False), self._ends, k)
        self._left = [k for k in self._left if k not in self._ends]
        if not self._left:
            return
        with interruptible(self._saves) as self._asked:
            try:
                if on is None:
                    self._in_processes(processes)
                else:
                    self._in_cluster(on)
            except Interrupted:  # of one of them, and all were saved
                self._asked[0] = True
            self._check()

    def _tell(self) -> None:
        ends, shares = self._ends, self._ends.shares.copy()
        done = sum(part >= 1 for part in shares.values())  # elsewhere, and not told here yet
        ended = len(ends.runs) + len(ends.failed) + done
        self._show(ends.share, f"{ended:,} of {len(self._points):,} runs, {len(shares) - done:,} under way")

    def _under_way(self, units: Sequence[Sequence[int]]) -> Callable[[int, float | None], None]:
        """A function that is told how much of a unit's runs is done."""

        def told(unit: int, part: float | None) -> None:
            for k in units[unit]:
                if part is None:
                    self._ends.shares.pop(k, None)
                elif k not in self._ends:
                    self._ends.shares[k] = part

        return told

    def _check(self) -> None:
        """Show how far the runs are, and end if somebody has asked for that."""
        self._tell()
        if self._asked[0]:
            raise runs_saved(self._options.saving.path)

    def _settle(self, unit: Sequence[int], outcome: Outcome) -> None:
        """What another process says of the runs of a unit."""
        ended = [(k, None, outcome.error) for k in unit] if outcome.value is None else outcome.value
        for k, run, error in ended:
            self._ends.add(k, None if run is None else self._completed(k, run), error)

    def _completed(self, k: int, run: Run) -> Run:
        """A run that came from elsewhere with what it left behind."""
        point, compute = self._points[k], self._options.compute
        problem = exact(point.problem) if point.algorithm.exact else point.problem
        device = problem.start(0).device.type if compute.device is None else compute.device
        if torch.device(device).type == "cpu":
            problem = problem.on(device, compute.precision)
        return replace(run, problem=problem, algorithm=point.algorithm, folder=point.path)

    def _in_processes(self, processes: int) -> None:
        points, ends, left, compute = self._points, self._ends, self._left, self._options.compute
        processes = min(processes, len(left))
        each = max(1, (compute.cores or cores_here()) // processes)
        options = replace(self._options, compute=replace(compute, cores=each))
        room = free_memory(torch.device("cpu")) * _SPARE if compute.memory_limit is None else compute.memory_limit

        def here(unit: int, share: Callable[[float], None]) -> Any:
            def told(part: float) -> None:
                share(part)
                self._tell()

            point = points[left[unit]]
            reporting = Reporting([_Sharing(told, options)], progress=False)
            try:
                run = _alone(point, options, reporting)
            except (RunFailed, BadInput) as error:
                return [(left[unit], None, error)]
            return [(left[unit], run, None)]

        units = [[k] for k in left]
        call = _Elsewhere.of(points, options, units)

        def settle(unit: int, outcome: Outcome) -> None:
            self._settle(units[unit], outcome)

        with SideBySide(call, range(len(left)), processes, room, lambda: ends.share) as calls:
            calls.run(here, settle, self._under_way(units), self._check)

    def _in_cluster(self, on: Cluster) -> None:
        points, saving, compute, server = self._points, self._options.saving, self._options.compute, self._options.server
        if compute.cores is None:
            compute = replace(compute, cores=max(1, int(on.cpus)))
        weights = server.initial_weights
        if isinstance(weights, (str, Path)):
            server = replace(server, initial_weights=Path(weights).absolute())
        root = None if saving.path is None else saving.path.absolute()
        placed_at = [replace(point, path=None if point.path is None else point.path.absolute()) for point in points]
        options = replace(self._options, saving=replace(saving, folder=root), compute=compute, server=server)
        device = "cuda" if on.gpus > 0 and compute.device is None else None
        units = self._units(device or compute.device or "cpu")
        token = "" if root is None else secrets.token_hex(16)
        try:
            payload = packed(_Elsewhere.of(placed_at, options, units, token=token, device=device))
        except Exception as error:  # whatever pickling a user's objects raises
            why = shortened(" ".join(str(error).split()) or type(error).__name__)
            raise BadInput(
                f"the runs cannot be sent to the cluster: {why}. Keep out of them what lives in one process."
            ) from error

        def settle(unit: int, value: bytes | Exception) -> None:
            self._settle(units[unit], Outcome(None, value) if isinstance(value, Exception) else received(value))

        if root is not None:
            Folder.require_possible(root)
        with RayTasks(on, Sent(payload)) as tasks:  # a cluster that does not answer leaves no folder behind
            if root is not None:
                make_folder(root)
                write(root / _MARK, token.encode())
            try:
                tasks.run(range(len(units)), settle, self._under_way(units), self._check)
            finally:
                if root is not None:
                    remove(root / _MARK)

    def _units(self, device: str) -> list[list[int]]:
        """The runs that are one task in a cluster: those that share a schedule, where gradients are taken together."""
        options, server = self._options, self._options.server
        if not batches(device, options.compute.batch) or server.optimizer or server.schedule:
            return [[k] for k in self._left]
        on_cpu = replace(options, compute=replace(options.compute, device="cpu", precision="float32"))
        specs = {}
        for k in self._left:
            point = self._points[k]
            specs[k] = of_point(on_cpu, point).spec(point.algorithm, point.problem, point.fleet, point.seed)
        groups = grouped(specs)
        alone = set(self._left) - set(itertools.chain(*groups))
        return [*groups, *([k] for k in sorted(alone))]


def _has_result(path: Path) -> bool:
    """Whether a folder holds a run that has come to its end."""
    try:
        return Folder(path).result() is not None
    except (BadInput, Damaged):  # it is no run's folder, or is written again
        return False

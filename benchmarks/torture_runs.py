"""Small runs that are tortured, what they come to when nobody disturbs them, and what must be true of them afterwards."""

from __future__ import annotations

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.storage.folder import Folder
from torture_core import Failure, Tell, must
from torture_messages import local

_FILES = ("trace.parquet", "metrics.parquet", "workers.parquet", "model.safetensors", "best.safetensors", "result.json")
_CENTERS = [[0.0, 1.0], [6.0, -2.0], [12.0, 4.0]]
_QUIET = dd.Reporting(progress=False)
_ONE_CORE = dd.Compute(cores=1)


class Cut(BaseException):
    """What stands for a kill where a process need not die: nothing is saved on its account."""


@dataclass(frozen=True)
class Case:
    """A small run."""

    method: dd.Algorithm[Any]
    problem: dd.Problem
    speeds: dd.SpeedModel
    options: Mapping[str, Any]
    saving: dd.Saving | None = None

    def start(self, folder: Path | None, **more: Any) -> dd.Run:
        """From its beginning to its end."""
        place = folder if self.saving is None else replace(self.saving, folder=folder)
        given = {"watch": _QUIET, "compute": _ONE_CORE, **self.options, "folder": place, **more}
        return dd.simulate(self.method, self.problem, self.speeds, **given)

    def until(self, folder: Path, version: int, **more: Any) -> None:
        """From its beginning to this version, where it is cut off."""

        def watch(state: dd.State, arrival: dd.Arrival) -> None:
            if state.version >= version:
                raise Cut

        try:
            self.start(folder, watch=dd.Reporting([watch], progress=False), **more)
        except Cut:
            return
        raise AssertionError(f"the run ended before version {version}")


def resumed(folder: Path, **more: Any) -> dd.Run:
    """Go on with a run."""
    return dd.resume(folder, **{"watch": _QUIET, "cores": 1, **more})


_QUADRATIC = dd.Quadratic(_CENTERS, noise=0.3)
CASES = {
    "plain": Case(
        dd.DuDe(lr=0.05),
        _QUADRATIC,
        dd.FixedSpeeds([1.0, 2.0, 5.0]),
        {"updates": 12, "checkpoint_every": 2, "evaluation": dd.Evaluation(every=3)},
    ),
    "memory": Case(
        dd.DuDe(lr=0.05, memory="workers", wait_for=2),
        _QUADRATIC,
        dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0], seed=5),
        {"updates": 10, "evaluation": dd.Evaluation(seconds=1.5, best_by="objective")},
        dd.Saving(every=3, keep=1),
    ),
    "stop": Case(
        dd.DuDe(lr=0.3),
        _QUADRATIC,
        dd.FixedSpeeds([1.0, 2.0, 5.0]),
        {"updates": 200, "evaluation": dd.Evaluation(every=2, early_stop=dd.EarlyStop(patience=2))},
        dd.Saving(every=2, keep=2),
    ),
    "digits": Case(
        dd.FedBuff(lr=0.05, buffer=2),
        dd.Digits(workers=3, alpha=1.0, hidden=4, batch_size=4),
        dd.FixedSpeeds([1.0, 1.5, 4.0]),
        {
            "updates": 4,
            "checkpoint_every": 1,
            "evaluation": dd.Evaluation(every=2),
            "server": dd.Server(optimizer="Adam"),
        },
    ),
}


# ------------------------------------------------------------------------------------------------------ what a run comes to


def digest(x: Tensor) -> str:
    """A name for a tensor's bits."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def bits(run: dd.Run, *, files: bool = True) -> dict[str, Any]:
    """Everything that a run has come to."""
    content: dict[str, Any] = {"x": digest(run.x), "state": digest(run.state.x), "version": run.version}
    content |= {f"weights {name}": digest(x) for name, x in run.state_dict().items()}
    content |= {f"trace {name}": run.trace[name].tobytes() for name in run.trace} | {"events": run.trace.events}
    for name, table in (("metric", run.metrics), ("worker", run.workers)):
        content |= {f"{name} {column}": table[column].tolist() for column in table}
    content |= {"ended": run.ended, "time": run.time, "audit": run.audit, "notes": tuple(run.notes)}
    content["summary"] = repr(run.summary())
    if run.best is not None and run.best.x is not None:
        content["best"] = (run.best.metric, run.best.value, run.best.version, digest(run.best.x))
    if files and run.folder is not None:
        content |= {name: (run.folder / name).read_bytes() for name in _FILES if (run.folder / name).exists()}
    return {name: repr(value) for name, value in content.items()}  # so that nan is nan


def differences(one: Mapping[str, Any], other: Mapping[str, Any], *but: str) -> list[str]:
    """What is not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name) and name not in but)


@dataclass
class Straight:
    """A run that nobody disturbed: its end, and all that it was on its way."""

    bits: dict[str, Any]
    run: dd.Run
    models: dict[int, str] = field(default_factory=dict)  # the weights of each version
    rows: set[str] = field(default_factory=set)  # evaluations that are right

    @classmethod
    def of(cls, case: Case, folder: Path, **more: Any) -> Straight:
        """Run it."""
        models = {}

        def watch(state: dd.State, arrival: dd.Arrival) -> None:
            models[state.version] = digest(state.x)

        models[0] = digest(case.start(None, **{**more, "updates": 0}).state.x)
        run = case.start(folder, watch=dd.Reporting([watch], progress=False), **more)
        return cls(bits(run), run, models, {repr(row) for row in run.metrics.rows()})

    def require_end(self, run: dd.Run, what: str, *but: str) -> None:
        """The run came to the same end, in every bit."""
        other = differences(bits(run), self.bits, *but)
        if other:
            raise Failure("wrong bit", f"{what} ends otherwise: {', '.join(other[:4])}")

    def require_on_the_way(self, run: dd.Run, least: int, kind: str = "wrong bit", said: str = "") -> None:
        """What was loaded is this run at one of its versions, and not before ``least``."""
        if run.version < least:
            raise Failure("lost run", f"{said}version {run.version} was loaded, and {least} had been saved")
        if digest(run.state.x) != self.models.get(run.version):
            raise Failure(kind, f"{said}the weights that were loaded are not those of version {run.version}")
        for name in self.run.trace:
            if not self.run.trace[name].tobytes().startswith(run.trace[name].tobytes()):
                raise Failure(kind, f"{said}the trace that was loaded has another {name}")
        last = int(run.trace.after[-1]) if len(run.trace) else 0
        if last != run.version:
            raise Failure(kind, f"{said}the trace that was loaded ends at version {last}, the weights are of {run.version}")
        wrong = {repr(row) for row in run.metrics.rows()} - self.rows
        if wrong:
            raise Failure(kind, f"{said}an evaluation that was loaded is wrong: {min(wrong)}")


def require_clean(place: Path) -> None:
    """Nothing half written is left, in a folder or beside it."""
    left = [str(path.relative_to(place)) for path in place.rglob("*") if path.name.endswith(".part")]
    if left:
        raise Failure("leftovers", f"{left[0]} is left")


# ------------------------------------------------------------------------------------------------- what is done to a folder


@contextmanager
def promising(place: Path, tell: Tell) -> Iterator[None]:
    """While this lasts it is told which folders have been made, and which versions have been saved in them."""
    make, save = Folder.create, Folder.save

    def created(cls: type[Folder], path: Path, *rest: Any, **more: Any) -> Folder:
        made = make(path, *rest, **more)
        tell({"made": str(Path(path).relative_to(place))})
        return made

    def saved(self: Folder, content: Mapping[str, Any], *rest: Any, **more: Any) -> None:
        save(self, content, *rest, **more)
        tell({"saved": str(self.path.relative_to(place)), "version": content["state"]["version"]})

    with mock.patch.object(Folder, "create", classmethod(created)), mock.patch.object(Folder, "save", saved):
        yield


Promises = dict[str, int]  # by folder the version that is safe; -1: the folder alone
ENDED = "it has ended"  # among them, once the call has returned


def promises(told: list[dict[str, Any]], before: Promises) -> Promises:
    """What was promised, from what was told."""
    safe = dict(before)
    for line in told:
        if "made" in line:
            safe.setdefault(line["made"], -1)
        elif "saved" in line:
            safe[line["saved"]] = max(safe.get(line["saved"], -1), line["version"])
        elif line.get("ended") == "well":
            safe[ENDED] = 1
    return safe


class Action(ABC):
    """Something that writes to a folder and can be disturbed at any call."""

    before: Promises

    @abstractmethod
    def setup(self, place: Path) -> None:
        """Put there what is there before."""

    @abstractmethod
    def act(self, place: Path) -> Any:
        """Do it; after a disturbance the same again."""

    def still(self, safe: Promises) -> Promises:
        """What of the promises holds while it is done again: a run that goes on has not ended."""
        return {name: version for name, version in safe.items() if name != ENDED}

    @abstractmethod
    def require(self, place: Path, safe: Promises, *but: str) -> None:
        """After a disturbance: what was promised is there, and doing it again gives the right bits, ``but`` for these."""


class OneRun(Action):
    """A run is started, or goes on from a folder that is copied."""

    def __init__(self, case: Case, straight: Straight, base: Path | None = None, least: int = -1, **more: Any) -> None:
        self._case, self._straight, self._base, self._more = case, straight, base, more
        self.before = {} if base is None else {"run": least}

    def setup(self, place: Path) -> None:
        if self._base is not None:
            shutil.copytree(self._base, place / "run")

    def act(self, place: Path) -> dd.Run:
        if (place / "run").exists():
            return resumed(place / "run", **self._more)
        return self._case.start(place / "run", **self._more)

    def require(self, place: Path, safe: Promises, *but: str) -> None:
        folder, straight = place / "run", self._straight
        if folder.exists():
            run = must("lost run", "load", lambda: dd.load(folder))
            straight.require_on_the_way(run, safe.get("run", -1))
            if ENDED in safe and run.ended != straight.run.ended:
                raise Failure("lost run", f"it had ended, and what is loaded is {run.ended}")
        elif "run" in safe:
            raise Failure("lost run", "the folder is gone")
        run = must("lost run", "going on", lambda: OneRun.act(self, place))
        straight.require_end(run, "going on", *but)
        again = must("wrong bit", "replay", lambda: dd.replay(folder, watch=dd.Reporting(progress=False)))
        straight.require_end(again, "replay", "ended", "audit", "summary", *but)
        later = must("lost run", "load at the end", lambda: dd.load(folder))
        straight.require_end(later, "what is loaded at last", *but)
        require_clean(place)


class Looking(OneRun):
    """A finished run is only looked at."""

    def __init__(self, call: Callable[[Path], dd.Run], case: Case, straight: Straight, base: Path) -> None:
        super().__init__(case, straight, base, straight.run.version)
        self._looks = call

    def act(self, place: Path) -> dd.Run:
        return self._looks(place / "run")


class ManyRuns(Action):
    """Several runs in folders of one folder: a comparison, or a sweep whose runs are computed side by side."""

    def __init__(self, call: Callable[[Path], dd.Sweep], place: Path, *, together: bool) -> None:
        self._call, self._together, self.before = call, together, {}
        self._expected = self._content(call(place / "many"), place / "many")

    def setup(self, place: Path) -> None:
        pass

    def act(self, place: Path) -> dd.Sweep:
        return self._call(place / "many")

    def still(self, safe: Promises) -> Promises:
        """Runs that are computed together go on from the newest checkpoint that all of them have; there may be none."""
        return {name: -1 if self._together else version for name, version in super().still(safe).items()}

    def _content(self, table: dd.Sweep, folder: Path) -> dict[str, Any]:
        """What they have come to; whether they were computed together stands in files, and after a fault they are not."""
        content = {f"column {name}": repr(table[name].tolist()) for name in table}
        for run in table.runs:
            if run is not None and run.folder is not None:
                content |= {
                    f"{run.folder.name} {name}": value for name, value in bits(run, files=not self._together).items()
                }
        content["comparison.parquet"] = [path.read_bytes() for path in folder.glob("comparison.parquet")]
        return content

    def require(self, place: Path, safe: Promises, *but: str) -> None:
        for name in {name for name in safe if name != ENDED and not (place / name).exists()}:
            raise Failure("lost run", f"the folder {name} is gone")
        for path in sorted((place / "many").glob("[!.]*/config.json")):
            name = str(path.parent.relative_to(place))
            run = must("lost run", f"load of {name}", lambda path=path: dd.load(path.parent))
            if run.version < safe.get(name, -1):
                raise Failure("lost run", f"version {run.version} of {name} was loaded, and {safe[name]} had been saved")
        table = must("lost run", "going on", lambda: self.act(place))
        if table.failed:
            raise Failure("lost run", f"going on: {next(iter(table.failed.values()))}")
        other = differences(self._content(table, place / "many"), self._expected)
        other = [name for name in other if not name.endswith(but or ("\0",))]
        if other:
            raise Failure("wrong bit", f"going on ends otherwise: {other[0]}")
        for run in table.runs:
            assert run is not None and run.folder is not None
            must("wrong bit", "replay", lambda run=run: dd.replay(run.folder, watch=dd.Reporting(progress=False)))
        require_clean(place)


class RealRun(Action):
    """A run of real workers, in this process: after a disturbance another order of arrivals is as good."""

    def __init__(self) -> None:
        self.before = {}

    def setup(self, place: Path) -> None:
        pass

    def act(self, place: Path) -> dd.Run:
        folder, options = place / "run", {"updates": 8, "checkpoint_every": 2, "evaluation": dd.Evaluation(every=3)}
        with local() as fleet:
            if folder.exists():
                return dd.resume(folder, watch=dd.Reporting(progress=False))
            return dd.train(dd.DuDe(lr=0.05, memory="workers"), _QUADRATIC, fleet, folder=folder, watch=_QUIET, **options)

    def require(self, place: Path, safe: Promises, *but: str) -> None:
        folder = place / "run"
        if folder.exists():
            version = must("lost run", "load", lambda: dd.load(folder)).version
            if version < safe.get("run", -1):
                raise Failure("lost run", f"version {version} was loaded, and {safe['run']} had been saved")
        elif "run" in safe:
            raise Failure("lost run", "the folder is gone")
        run = must("lost run", "going on", lambda: self.act(place))
        again = must("wrong bit", "replay", lambda: dd.replay(folder, watch=dd.Reporting(progress=False)))
        left = (
            "ended",
            "audit",
            "summary",
            "notes",
            "trace down",
        )  # what was sent twice, or to a new process, is not replayed
        other = differences(bits(again), bits(run), *left)
        if other or run.version != 8 or run.audit is None or not run.audit < 1e-9:
            raise Failure(
                "wrong bit", f"version {run.version}, audit {run.audit}, another {', '.join(other[:3])} in a replay"
            )
        require_clean(place)


@cache
def actions(place: Path) -> dict[str, Action]:
    """All that is done to folders, with what has to be there before in ``place``."""
    place.mkdir()
    made: dict[str, Action] = {}
    for name in ("plain", "memory", "stop", "digits"):
        case, straight = CASES[name], Straight.of(CASES[name], place / f"{name} straight")
        made[f"start {name}"] = OneRun(case, straight)
    case, plain = CASES["plain"], Straight.of(CASES["plain"], place / "straight")
    case.until(place / "cut", 7)
    made["resume"] = OneRun(case, plain, place / "cut", dd.load(place / "cut").version)
    made["go on"] = OneRun(case, plain, place / "cut", dd.load(place / "cut").version)
    made["finish again"] = OneRun(case, plain, place / "straight", plain.run.version)
    made["load"] = Looking(dd.load, case, plain, place / "straight")
    made["replay"] = Looking(
        lambda folder: dd.replay(folder, watch=dd.Reporting(progress=False)), case, plain, place / "straight"
    )
    short = Straight.of(case, place / "short", updates=8)
    longer = Straight.of(case, place / "longer", updates=16)
    longer.rows |= short.rows
    made["extend"] = OneRun(case, longer, place / "short", short.run.version, updates=16)
    made["train"] = RealRun()
    made["compare"] = ManyRuns(_compared, place / "compared", together=False)
    made["sweep"] = ManyRuns(_swept, place / "swept", together=True)
    return made


def _compared(folder: Path) -> dd.Sweep:
    methods, options = [dd.DuDe(lr=0.05), dd.VanillaASGD(lr=0.05)], {"updates": 6, "checkpoint_every": 2}
    return dd.compare(
        methods, _QUADRATIC, dd.FixedSpeeds([1.0, 2.0, 5.0]), folder=folder, watch=_QUIET, compute=_ONE_CORE, **options
    )


def _swept(folder: Path) -> dd.Sweep:
    grid, options = {"algorithm": [dd.DuDe(lr=0.05)], "lr": [0.05, 0.1]}, {"updates": 6, "checkpoint_every": 2}
    return dd.sweep(
        grid,
        _QUADRATIC,
        dd.FixedSpeeds([1.0, 2.0, 5.0]),
        folder=folder,
        watch=_QUIET,
        compute=dd.Compute(cores=1, batch=True),
        **options,
    )
